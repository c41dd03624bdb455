"""The GRPO loss from hidden states, forward and backward, beside the GEMMs alone and beside PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from common import Shape, compare
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

import rlkernels
from rlkernels.cli import loss_twins
from rlkernels.cli.loss_twins import COMPILED, FUSED, NAIVE, SEQUENCE, Rows

Call = Callable[[], object]


class Head(NamedTuple):
    """A head's sizes and dtype, named after a model that has them."""

    name: str
    hidden_size: int
    vocab: int
    dtype: torch.dtype


HEADS = {"qwen": Head("bf16", 1024, 151_936, torch.bfloat16), "smollm2": Head("fp32", 576, 49_152, torch.float32)}
TOKENS = (512, 1024, 3072)


class Problem:
    """Hidden states, a head, and the calls that are compared."""

    def __init__(self, head: Head, tokens: int, frozen: bool = False, active_share: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (tokens // SEQUENCE, SEQUENCE)
        hidden = torch.randn(*shape, head.hidden_size, generator=generator).to(head.dtype)
        weight = torch.randn(head.vocab, head.hidden_size, generator=generator).div_(head.hidden_size**0.5)
        self.hidden, self.weight = hidden.requires_grad_(), weight.to(head.dtype).requires_grad_(not frozen)
        self.inputs = (self.hidden,) if frozen else (self.hidden, self.weight)
        targets = torch.randint(head.vocab, shape, generator=generator)
        advantages = torch.randn(shape[0], generator=generator)
        advantages[int(active_share * shape[0]) :] = 0
        old_logp = rlkernels.linear_token_stats(hidden.detach(), self.weight.detach(), targets, outputs=()).logp
        self.rows = Rows(hidden, targets, advantages, old_logp)

    def fused(self) -> Tensor:
        batch = rlkernels.PolicyBatch(self.rows.targets, self.rows.advantages, old_logp=self.rows.old_logp)
        return rlkernels.linear_policy_loss(self.hidden, self.weight, batch, "grpo").loss

    def naive(self, function: Callable[[Rows], Tensor]) -> Tensor:
        return function(self.rows._replace(logits=torch.nn.functional.linear(self.hidden, self.weight)))

    def gradients_of(self, loss: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss(), self.inputs)

    def fused_call(self) -> Call:
        return partial(self.gradients_of, self.fused)

    def peers(self) -> dict[str, Call]:
        names = [NAIVE, COMPILED]
        losses = {name: partial(self.naive, loss_twins.loss_function(name)) for name in names}
        return {name: partial(self.gradients_of, loss) for name, loss in losses.items()}

    def gemms(self, *products: str) -> Call:
        """Bare full-size GEMMs into buffers that exist: `logits`, `dhidden`, `dweight`."""
        hidden, weight = self.hidden.detach().flatten(0, 1), self.weight.detach()
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


@pytest.fixture(params=HEADS, ids=str)
def head(request: pytest.FixtureRequest, shape: Shape) -> Head:
    head = HEADS[request.param]
    return head._replace(vocab=shape.vocab, hidden_size=64) if shape.is_quick else head


@pytest.mark.parametrize("tokens", TOKENS)
def test_all_gradients(head: Head, tokens: int, shape: Shape, benchmark: BenchmarkFixture) -> None:
    problem = Problem(head, tokens)
    four, three = "logits twice, dhidden, dweight", "logits, dhidden, dweight"
    compare(
        benchmark,
        f'linear_policy_loss("grpo"), {head.name}, N={tokens}, H={head.hidden_size}, V={head.vocab:,}',
        {
            FUSED: problem.fused_call(),
            f"bare GEMMs: {four}": problem.gemms("logits", "logits", "dhidden", "dweight"),
            f"bare GEMMs: {three}": problem.gemms("logits", "dhidden", "dweight"),
            **problem.peers(),
        },
        subject=FUSED,
        baseline=f"bare GEMMs: {four}",
        tokens=tokens,
        rounds=shape.slow_rounds,
    )


@pytest.mark.parametrize("tokens", TOKENS[:2])
def test_frozen_head(head: Head, tokens: int, shape: Shape, benchmark: BenchmarkFixture) -> None:
    problem = Problem(head, tokens, frozen=True)
    two = "bare GEMMs: logits, dhidden"
    compare(
        benchmark,
        f"frozen head, {head.name}, N={tokens}, H={head.hidden_size}, V={head.vocab:,}",
        {FUSED: problem.fused_call(), two: problem.gemms("logits", "dhidden"), **problem.peers()},
        subject=FUSED,
        baseline=two,
        tokens=tokens,
        rounds=shape.slow_rounds,
    )


def test_mostly_zero_advantages(head: Head, shape: Shape, benchmark: BenchmarkFixture) -> None:
    tokens = 1024
    dense = "every advantage nonzero"
    compare(
        benchmark,
        f"three quarters of the rows at zero advantage, {head.name}, N={tokens}",
        {FUSED: Problem(head, tokens, active_share=0.25).fused_call(), dense: Problem(head, tokens).fused_call()},
        subject=FUSED,
        baseline=dense,
        tokens=tokens,
        rounds=shape.slow_rounds,
    )
