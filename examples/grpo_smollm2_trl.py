"""The task of grpo_smollm2.py under TRL's own GRPOTrainer, whose fused LM head runs on rlkernels.

    pip install 'trl>=1.16'
    python examples/grpo_smollm2.py --trl

`rlkernels.integrations.trl.patch()` is all that the package needs; the rest is how TRL is told about the task.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from datasets import Dataset
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rlkernels.integrations import trl as integration

if TYPE_CHECKING:
    from grpo_smollm2 import Policy, Question


class Operations(TorchDispatchMode):
    """Counts this package's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "rlkernels":
            self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


class Recorder(TrainerCallback):
    def __init__(self, record: Callable[[float, float, float], None]) -> None:
        self.record = record

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "reward" in logs:  # not in the summary of the whole run
            self.record(logs["reward"], logs["loss"], logs["entropy"])


def train(
    policy: Policy,
    questions: list[Question],
    seed: int,
    args: argparse.Namespace,
    loss: dict[str, Any],
    record: Callable[[float, float, float], None],
) -> dict[str, int]:
    """Trains the policy in place; how often each of this package's operations ran."""
    answers = args.prompts_per_step * args.group_size
    dataset = Dataset.from_dict(
        {"prompt": [question.messages() for question in questions], "index": list(range(len(questions)))}
    )

    def reward(completions: list[list[dict[str, str]]], index: list[int], **_: Any) -> list[float]:
        texts = [messages[0]["content"] for messages in completions]
        return [questions[i].reward(text) for i, text in zip(index, texts, strict=True)]

    integration.patch()
    with tempfile.TemporaryDirectory() as folder, Operations() as operations:
        config = GRPOConfig(
            output_dir=folder,
            seed=seed,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            # TRL counts optimiser steps, and logs after the last one of each round of sampling
            max_steps=args.steps * args.minibatches,
            logging_steps=args.minibatches,
            generation_batch_size=answers,
            per_device_train_batch_size=answers // args.minibatches,
            num_generations=args.group_size,
            max_completion_length=args.max_new_tokens,
            temperature=args.temperature,
            learning_rate=args.lr,
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **loss,
        )
        trainer = GRPOTrainer(
            model=policy.model,
            reward_funcs=reward,
            args=config,
            train_dataset=dataset,
            processing_class=policy.tokenizer,
            callbacks=[Recorder(record)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    if not operations.counts:
        raise RuntimeError("TRL ran none of this package's operations")
    return dict(operations.counts)
