"""Credit assignment: prefix sets, group advantages, counterfactual contrasts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from common import Shape, compare, describe
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from rlkernels.cli.loss_twins import Rows
from rlkernels.credit import counterfactual_contrast, group_advantages, prefix_set_counts


def different_ids(shape: Shape) -> Tensor:
    return torch.randint(151_936, (shape.groups * shape.responses, shape.length))


def equal_ids(shape: Shape) -> Tensor:
    return torch.full((shape.groups * shape.responses, shape.length), 7)


@pytest.mark.parametrize("make_ids", [different_ids, equal_ids])
def test_prefix_set_counts(make_ids: Callable[[Shape], Tensor], shape: Shape, benchmark: BenchmarkFixture) -> None:
    token_ids = make_ids(shape)
    lengths = torch.full(token_ids.shape[:1], shape.length)
    sizes = f"[{shape.groups} x {shape.responses}, {shape.length:,}]"
    compare(
        benchmark,
        f"prefix_set_counts, {make_ids.__name__.replace('_', ' ')} {sizes}",
        {
            "rlkernels": lambda: prefix_set_counts(token_ids, lengths, shape.responses),
            "copy of the ids": token_ids.clone,
        },
        subject="rlkernels",
        baseline="copy of the ids",
        tokens=token_ids.numel(),
        rounds=shape.short_rounds,
    )


def test_group_advantages(shape: Shape, benchmark: BenchmarkFixture) -> None:
    rewards = torch.rand(shape.groups * shape.responses)

    def plain() -> Tensor:
        groups = rewards.view(shape.groups, shape.responses)
        return (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)

    compare(
        benchmark,
        f"group_advantages, [{shape.groups} x {shape.responses}] responses",
        {"rlkernels": lambda: group_advantages(rewards, shape.responses), "plain PyTorch": plain},
        subject="rlkernels",
        baseline="plain PyTorch",
        tokens=rewards.numel(),
        rounds=shape.short_rounds,
    )


def test_counterfactual_contrast(rows: Rows, shape: Shape, benchmark: BenchmarkFixture) -> None:
    logits_with = rows.logits.detach()
    logits_without, destinations = logits_with * 0.9, (torch.empty_like(logits_with), torch.empty_like(logits_with))
    every_row = torch.arange(rows.targets.numel()).view_as(rows.targets)

    def contrast() -> Tensor:
        return counterfactual_contrast(logits_with, logits_without, rows.targets, rows_with=every_row)

    def copy() -> None:
        for destination, logits in zip(destinations, (logits_with, logits_without), strict=True):
            destination.copy_(logits)

    def naive() -> Tensor:
        logp_with, logp_without = (torch.log_softmax(logits.float(), -1) for logits in (logits_with, logits_without))
        return (logp_with - logp_without).gather(-1, rows.targets[..., None])[..., 0]

    compare(
        benchmark,
        f"counterfactual_contrast, two {describe(logits_with)}",
        {"rlkernels": contrast, "copy of both": copy, "naive PyTorch": naive},
        subject="rlkernels",
        baseline="copy of both",
        tokens=rows.targets.numel(),
        rounds=shape.rounds,
    )
