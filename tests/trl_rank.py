"""One gloo rank of `test_trl_trainer.py`'s runs: trains, or weighs given completions, and saves what came of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false")

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trl import GRPOTrainer
from trl.trainer import utils
from trl_models import VOCAB, config, dataset, low_ids, tiny_model, tokenizer

from rlkernels import GRPO, PolicyBatch
from rlkernels.integrations.trl import FusedGRPOTrainer, patch
from rlkernels.integrations.trl.policy_call import PolicyCall, add_policy_loss

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


def sharded() -> dict[str, Any]:
    """Loss and gradients of half a batch on each rank, by FSDP2 and by one process's model of the whole batch."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (4, 8), generator=generator)
    advantages = torch.tensor([1.0, -0.5, 0.7, -1.2])
    labels = ids.clone()
    labels[:, :3] = -100

    def step(model: Any, rows: slice) -> Any:
        batch = PolicyBatch(ids[rows, 3:], advantages[rows, None])
        call = PolicyCall(batch, GRPO(entropy_coef=0.1), "seq_mean_token_mean", batch.targets.shape[0])
        out = model(input_ids=ids[rows], labels=labels[rows], fused_lm_head=True, policy_call=call)
        out.loss.backward()
        return out.loss.detach()

    patch()
    models = [tiny_model(), tiny_model()]
    for model in models:
        utils.add_fused_lm_head(model, temperature=0.9, outputs=("log_probs", "entropy"))
        add_policy_loss(model)
    mesh = init_device_mesh("cpu", (2,))
    for layer in models[1].model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(models[1], mesh=mesh)
    loss = step(models[0], slice(None))
    mine = step(models[1], slice(2 * RANK, 2 * RANK + 2))
    torch.distributed.all_reduce(mine)
    gradients = [
        (name, whole.grad, part.grad.full_tensor())
        for (name, whole), part in zip(models[0].named_parameters(), models[1].parameters(), strict=True)
    ]
    return {"losses": (loss, mine / 2), "gradients": gradients}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    results = {
        "trl": trained(GRPOTrainer, folder),
        "fused": trained(FusedGRPOTrainer, folder),
        "gmpo": trained(FusedGRPOTrainer, folder, objective="gmpo"),
        "weighed": weighed(folder),
        "sharded": sharded(),
    }
    torch.save(results, folder / f"rank{RANK}.pt")
