"""One gloo rank of `test_trl_trainer.py`'s runs: trains, or weighs given completions, and saves what came of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false")

import torch
from trl import GRPOTrainer
from trl_models import config, dataset, low_ids, tiny_model, tokenizer

from rlkernels.integrations.trl import FusedGRPOTrainer

RANK = int(os.environ["RANK"])
COMPLETIONS = [[5, 6, 7, 1], [5, 6], [5, 9, 9, 9, 9, 9], [5, 6, 7, 1]]  # a group on two ranks


def trained(kind: type[GRPOTrainer], folder: Path, **own: Any) -> dict[str, Any]:
    trainer = kind(
        model=tiny_model(),
        reward_funcs=low_ids,
        args=config(
            folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=2, num_iterations=2
        ),
        train_dataset=dataset(),
        processing_class=tokenizer(),
        **own,
    )
    trainer.train()
    assert trainer.accelerator.num_processes == 2
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    return {"log": log, "weights": weights}


def weighed(folder: Path) -> dict[str, Any]:
    def given(self: GRPOTrainer, prompts: list[Any]) -> Any:
        mine = COMPLETIONS[2 * RANK : 2 * RANK + 2]
        return self._tokenize_prompts(prompts)[0], mine, None, [""] * 2, None, {}, None, None

    GRPOTrainer._generate = given
    trainer = FusedGRPOTrainer(
        model=tiny_model(),
        reward_funcs=low_ids,
        args=config(folder, per_device_train_batch_size=2),
        train_dataset=dataset(),
        processing_class=tokenizer(),
        objective="lambda_grpo",
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    output = trainer._generate_and_score_completions([{"prompt": "w10"}] * 2)
    return {"counts": (1 / output["token_weights"]).round().int().tolist()}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    results = {
        "trl": trained(GRPOTrainer, folder),
        "fused": trained(FusedGRPOTrainer, folder),
        "gmpo": trained(FusedGRPOTrainer, folder, objective="gmpo"),
        "weighed": weighed(folder),
    }
    torch.save(results, folder / f"rank{RANK}.pt")
