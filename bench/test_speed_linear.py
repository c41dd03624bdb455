"""The GRPO loss from hidden states, forward and backward, beside the GEMMs alone and beside others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import linear_losses
import pytest
import torch
from common import Shape, compare
from linear_losses import HEADS, PEERS, TOKENS, Head, Problem, step_of
from pytest_benchmark.fixture import BenchmarkFixture

from rlkernels.cli.loss_twins import FUSED

Call = Callable[[], object]


def gemms(problem: Problem, *products: str) -> Call:
    """Bare full-size GEMMs into buffers that exist: `logits`, `dhidden`, `dweight`."""
    hidden, weight = problem.hidden.detach().flatten(0, 1), problem.weight.detach()
    logits = hidden.new_zeros(hidden.shape[0], weight.shape[0])
    dhidden, dweight = torch.empty_like(hidden), torch.empty_like(weight)
    calls: dict[str, Call] = {
        "logits": partial(torch.mm, hidden, weight.t(), out=logits),
        "dhidden": partial(torch.mm, logits, weight, out=dhidden),
        "dweight": partial(torch.mm, logits.t(), hidden, out=dweight),
    }

    def run() -> None:
        for product in products:
            calls[product]()

    return run


def peers(problem: Problem) -> dict[str, Call]:
    unavailable = linear_losses.unavailable_peers(problem.hidden.dtype)
    return {name: step_of(name, problem) for name in PEERS if name not in unavailable}


@pytest.fixture(params=HEADS, ids=str)
def head(request: pytest.FixtureRequest, shape: Shape) -> Head:
    return linear_losses.head_of(request.param, shape)


@pytest.mark.parametrize("tokens", TOKENS)
def test_all_gradients(head: Head, tokens: int, shape: Shape, benchmark: BenchmarkFixture) -> None:
    problem = Problem(head, tokens)
    four, three = "logits twice, dhidden, dweight", "logits, dhidden, dweight"
    compare(
        benchmark,
        f'linear_policy_loss("grpo"), {head.name}, N={tokens}, {head.sizes()}',
        {
            FUSED: step_of(FUSED, problem),
            f"bare GEMMs: {four}": gemms(problem, "logits", "logits", "dhidden", "dweight"),
            f"bare GEMMs: {three}": gemms(problem, "logits", "dhidden", "dweight"),
            **peers(problem),
        },
        subject=FUSED,
        baseline=f"bare GEMMs: {four}",
        tokens=tokens,
        rounds=shape.slow_rounds,
    )
    benchmark.extra_info["unavailable"] = linear_losses.unavailable_peers(head.dtype)


@pytest.mark.parametrize("tokens", TOKENS[:2])
def test_frozen_head(head: Head, tokens: int, shape: Shape, benchmark: BenchmarkFixture) -> None:
    problem = Problem(head, tokens, frozen=True)
    two = "bare GEMMs: logits, dhidden"
    compare(
        benchmark,
        f"frozen head, {head.name}, N={tokens}, {head.sizes()}",
        {FUSED: step_of(FUSED, problem), two: gemms(problem, "logits", "dhidden"), **peers(problem)},
        subject=FUSED,
        baseline=two,
        tokens=tokens,
        rounds=shape.slow_rounds,
    )
    benchmark.extra_info["unavailable"] = linear_losses.unavailable_peers(head.dtype)


def test_mostly_zero_advantages(head: Head, shape: Shape, benchmark: BenchmarkFixture) -> None:
    tokens = 1024
    dense = "every advantage nonzero"
    compare(
        benchmark,
        f"three quarters of the rows at zero advantage, {head.name}, N={tokens}",
        {FUSED: step_of(FUSED, Problem(head, tokens, active_share=0.25)), dense: step_of(FUSED, Problem(head, tokens))},
        subject=FUSED,
        baseline=dense,
        tokens=tokens,
        rounds=shape.slow_rounds,
    )
