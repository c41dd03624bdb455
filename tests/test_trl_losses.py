"""TRL's own loss, fed with log-probabilities, against this package's recipes in TRL's conventions."""

from __future__ import annotations

import itertools
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

import rlkernels
from rlkernels import CISPO, GRPO, LUSPO, SAPO, VESPO, Objective, PolicyBatch

trl = pytest.importorskip("trl")

LOW, HIGH, MAX_LENGTH, ITEMS = 0.1, 0.25, 13, 17
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


def random_inputs(generator: Generator) -> tuple[Tensor, dict[str, Tensor]]:
    """Five completions, the fourth of which is masked whole; float64."""

    def draw() -> Tensor:
        return torch.randn(5, 7, generator=generator, dtype=torch.float64)

    logp = -draw().abs()
    mask = (torch.rand(5, 7, generator=generator) < 0.8).double()
    mask[3] = 0
    return logp.requires_grad_(), {
        "prompt_ids": torch.ones(5, 2, dtype=torch.int64),
        "prompt_mask": torch.ones(5, 2),
        "completion_ids": torch.ones(5, 7, dtype=torch.int64),
        "completion_mask": mask,
        "advantages": draw()[:, 0],
        "old_per_token_logps": logp.detach() - 0.3 * draw(),
        "ref_per_token_logps": logp.detach() + 0.3 * draw(),
        "importance_sampling_ratio": torch.where(mask == 1, 0.5 + draw().abs(), 1),
        "num_items_in_batch": torch.tensor(ITEMS),
    }


def trls_loss(logp: Tensor, inputs: dict[str, Tensor], loss_type: str, level: str, options: dict[str, Any]) -> Tensor:
    """`GRPOTrainer._compute_loss` itself, on a trainer that has nothing but what that reads."""
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logp, torch.zeros_like(logp), None),
        get_gamma_weights=trl.GRPOTrainer.get_gamma_weights,
        args=SimpleNamespace(
            use_bias_correction_kl=options["bias_corrected"],
            delta=options["delta"],
            sapo_temperature_pos=1.25,  # TRL rounds them to float32
            sapo_temperature_neg=1.5,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
        ),
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=options["beta"],
        epsilon_low=LOW,
        epsilon_high=HIGH,
        max_completion_length=MAX_LENGTH,
        use_vllm=options["corrected"],
        vllm_importance_sampling_correction=options["corrected"],
        model=SimpleNamespace(training=False),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        _entropy_bonus_enabled=False,
        _metrics={"eval": defaultdict(list)},
    )
    if not options["corrected"]:
        inputs = {key: value for key, value in inputs.items() if key != "importance_sampling_ratio"}
    return trl.GRPOTrainer._compute_loss(trainer, None, inputs)


def recipe_of(loss_type: str, level: str, options: dict[str, Any]) -> tuple[Objective, str, float | None]:
    """Objective, reduction and normalizer."""
    shared = {
        "kl_coef": options["beta"],
        "kl_importance_weighted": options["bias_corrected"] and options["beta"] > 0,
    }
    level = "token" if level == "token" else "sequence_mean"
    surrogate = GRPO(level=level, clip_low=LOW, clip_high=HIGH, ratio_cap=options["delta"], **shared)
    if loss_type == "luspo" and level == "sequence_mean":
        surrogate = LUSPO(clip_low=LOW, clip_high=HIGH, ratio_cap=options["delta"], **shared)
    objective = {
        "cispo": CISPO(ratio_max=HIGH, level=level, **shared),
        "sapo": SAPO(tau_pos=1.25, tau_neg=1.5, level=level, **shared),
        "vespo": VESPO(**shared),
    }.get(loss_type, surrogate)
    reduction, normalizer = {
        "bnpo": ("token_mean", None),
        "dr_grpo": ("seq_mean_token_sum_norm", 5.0 * MAX_LENGTH),
        "luspo": ("seq_mean_token_sum", None),
    }.get(loss_type, ("seq_mean_token_mean", None) if loss_type in ("grpo", "sapo") else ("token_mean", float(ITEMS)))
    return objective, reduction, normalizer


OPTIONS = [
    dict(zip(("beta", "bias_corrected", "delta", "corrected"), values, strict=True))
    for values in itertools.product((0.0, 0.04), (False, True), (None, 1.4), (False, True))
    if values[0] > 0 or not values[1]
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_value_and_gradient(loss_type: str, level: str, options: dict[str, Any], generator: Generator) -> None:
    """With and without KL (importance-weighted too), two-sided clipping, and a correction of the rollout engine."""
    if loss_type == "vespo" and level == "sequence":
        pytest.skip("TRL refuses it")
    logp, inputs = random_inputs(generator)
    objective, reduction, normalizer = recipe_of(loss_type, level, options)
    old, weight = inputs["old_per_token_logps"], inputs["importance_sampling_ratio"] if options["corrected"] else None
    if loss_type == "vespo" and weight is not None:
        old, weight = old - weight.log(), None
        if objective.kl_importance_weighted:
            pytest.skip("TRL's weight of the KL term leaves the correction out, this package's does not")
    batch = PolicyBatch(
        None,
        inputs["advantages"],
        mask=inputs["completion_mask"],
        old_logp=old,
        ref_logp=inputs["ref_per_token_logps"],
        policy_weight=weight,
    )
    out = rlkernels.logp_policy_loss(logp, batch, objective, reduction=reduction, normalizer=normalizer)
    expected = trls_loss(logp, inputs, loss_type, level, options)
    torch.testing.assert_close(out.loss, expected, rtol=1e-9, atol=1e-9)
    gradients = (torch.autograd.grad(loss, logp)[0] for loss in (out.loss, expected))
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)
