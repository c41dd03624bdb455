"""GMPO: its clips, its bound by GRPO, and what the geometric mean costs for ratios near 1."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

import rlkernels
from rlkernels import GMPO, GRPO, GSPO, PolicyBatch

UNCLIPPED = GMPO(clip_level=None)
# one-sided in log space: e^-0.4 <= ratio where A < 0, ratio <= e^0.4 where A > 0
TRUE_PRODUCT = GSPO(level="sequence_product", clip_low=1 - math.exp(-0.4), clip_high=math.exp(0.4) - 1)


def loss_and_gradient(d: Tensor, mask: Tensor, advantages: Tensor, objective: Any) -> tuple[Tensor, Tensor]:
    logp = (d - 1).requires_grad_()
    batch = PolicyBatch(None, advantages, mask=mask, old_logp=torch.full_like(d, -1.0))
    out = rlkernels.logp_policy_loss(logp, batch, objective, reduction="seq_mean_token_mean")
    return out.loss.detach(), torch.autograd.grad(out.loss, logp)[0]


def random_batch(generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    d = 0.5 * torch.randn(8, 6, generator=generator, dtype=torch.float64)
    mask = torch.rand(8, 6, generator=generator) < 0.7
    mask[2] = False
    return d, mask, torch.randn(8, generator=generator, dtype=torch.float64)


def one_sided(x: Tensor, advantages: Tensor) -> Tensor:
    return torch.where(advantages > 0, x.clamp(max=0.4), x.clamp(min=-0.4))


@pytest.mark.parametrize("clip", ["token", "sequence", "product", None])
def test_clips(clip: str | None, backend: str, generator: Generator) -> None:
    """The authors' sequence clip bounds the sum of log ratios, then divides; the true product is not rooted."""
    d, mask, advantages = random_batch(generator)
    objective = TRUE_PRODUCT if clip == "product" else GMPO(clip_level=clip)
    actual = loss_and_gradient(d, mask, advantages, objective)

    leaf = d.clone().requires_grad_()
    length = mask.sum(1).clamp(min=1)
    per_token = one_sided(leaf, advantages[:, None]) if clip == "token" else leaf
    total = torch.where(mask, per_token, 0).sum(1)
    log_ratio = {
        "token": lambda: total / length,
        "sequence": lambda: one_sided(total, advantages) / length,
        "product": lambda: one_sided(total, advantages),
        None: lambda: total / length,
    }[clip]()
    loss = -(torch.where(mask.any(1), advantages * log_ratio.exp(), 0)).mean()
    torch.testing.assert_close(actual[0], loss.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(actual[1], torch.autograd.grad(loss, leaf)[0], rtol=1e-10, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(-3, 3), min_size=1, max_size=12),
    st.floats(-5, 5).filter(lambda a: a == 0 or abs(a) > 1e-3),
)
def test_unclipped_is_bounded_by_grpo(log_ratios: list[float], advantage: float) -> None:
    """A geometric mean is at most the arithmetic one, for every response of either sign."""
    d, advantages = torch.tensor([log_ratios], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    mask = torch.ones_like(d)
    # bounds out of reach
    free = GRPO(clip_low=1.0, clip_high=1e6)
    geometric, arithmetic = (loss_and_gradient(d, mask, advantages, o)[0].abs().item() for o in (UNCLIPPED, free))
    assert geometric <= arithmetic * (1 + 1e-12)
    if len(set(log_ratios)) == 1:
        assert geometric == pytest.approx(arithmetic, rel=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=2, max_size=12), st.sampled_from([-2.0, 0.5, 1.0]))
def test_difference_from_grpo_is_half_the_variance(log_ratios: list[float], advantage: float) -> None:
    """J_GMPO - J_GRPO = -A / 2 Var(d) + O(d^3): a hundredth of the log ratios has a hundredth of the relative error."""
    advantages = torch.tensor([advantage], dtype=torch.float64)
    for scale in (1e-2, 1e-3):
        d = scale * torch.tensor([log_ratios], dtype=torch.float64)
        mask = torch.ones_like(d)
        grpo = GRPO(clip_low=0.5, clip_high=0.5)
        geometric, arithmetic = (loss_and_gradient(d, mask, advantages, o)[0].item() for o in (UNCLIPPED, grpo))
        expansion = -advantage / 2 * d.var(correction=0).item()
        assert -geometric + arithmetic == pytest.approx(expansion, abs=abs(advantage) * scale**3 + 1e-14)


def test_variance_metric_is_that_of_the_expansion(backend: str, generator: Generator) -> None:
    """Near 1, the variance of the ratios is that of their logs."""
    d = 1e-3 * torch.randn(1, 500, generator=generator, dtype=torch.float64)
    batch = PolicyBatch(None, torch.ones(1), old_logp=-1 - d)
    metrics = rlkernels.logp_policy_loss(torch.full_like(d, -1.0), batch, "grpo").metrics
    assert metrics["ratio_variance"].item() == pytest.approx(d.var(correction=0).item(), rel=1e-2)
