"""TRL's fused head on SmolLM2's sizes, forward and backward, and this package's in its place.

Both get the rows with a label, as TRL hands them over on a GPU; the gradient comes through log-probabilities alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import linear_losses
import pytest
import torch
from common import Shape, compare
from linear_losses import TRL_COLUMNS, Problem
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from rlkernels.cli.loss_twins import FUSED
from rlkernels.integrations.trl import ChunkedLogProb

OUTPUTS = {"log-probabilities": ("log_probs",), "log-probabilities and entropy": ("log_probs", "entropy")}


def step(head: Any, problem: Problem, outputs: tuple[str, ...]) -> tuple[Tensor, ...]:
    hidden, targets = problem.hidden.flatten(0, 1), problem.targets.flatten()
    out = head.apply(hidden, problem.weight, None, targets, 0.7, TRL_COLUMNS, None, 1.0, outputs)
    return torch.autograd.grad(out[0], problem.inputs, problem.old_logp.flatten())


@pytest.mark.parametrize("outputs", OUTPUTS, ids=["logp", "entropy"])
@pytest.mark.parametrize("tokens", [64, 512, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_head(dtype: torch.dtype, tokens: int, outputs: str, shape: Shape, benchmark: BenchmarkFixture) -> None:
    kernels = pytest.importorskip("trl.kernels", reason="needs trl")
    name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    head = linear_losses.head_of("smollm2", shape)._replace(name=name, dtype=dtype)
    problem = Problem(head, tokens)
    compare(
        benchmark,
        f"TRL's head, {outputs}, {name}, N={tokens}, {head.sizes()}",
        {
            FUSED: partial(step, ChunkedLogProb, problem, OUTPUTS[outputs]),
            linear_losses.TRL: partial(step, kernels.ChunkedLogProbFunction, problem, OUTPUTS[outputs]),
        },
        subject=FUSED,
        baseline=FUSED,
        tokens=tokens,
        rounds=shape.rounds if tokens < 4096 else shape.slow_rounds,
    )
