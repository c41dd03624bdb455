"""How benchmarks are measured and what they leave in `extra_info` for the report."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from rlkernels.cli.measure import peak_bytes, seconds


class Shape(NamedTuple):
    """Sizes of a run."""

    tokens: int
    vocab: int
    groups: int
    responses: int  # of a group
    length: int  # of a response, in tokens
    slow_rounds: int  # of what takes seconds
    rounds: int  # of what takes a second
    short_rounds: int  # of what takes milliseconds, where more are needed against noise
    is_quick: bool


def take_turns(
    benchmark: BenchmarkFixture, calls: Mapping[str, Callable[[], object]], subject: str, rounds: int
) -> dict[str, float]:
    """Times `subject` with pytest-benchmark and, before each of its rounds, every other call once.

    A ratio is then of calls that took turns within one run: a slow spell of the machine hits all of them.
    Returns the others' medians.
    """
    times: dict[str, list[float]] = {name: [] for name in calls if name != subject}

    def others_take_their_turn() -> None:
        for name in times:
            times[name].append(seconds(calls[name]))

    def subject_takes_its_turn() -> None:
        calls[subject]()  # returns nothing, so that freeing the result is timed as it is for the others

    benchmark.pedantic(subject_takes_its_turn, setup=others_take_their_turn, rounds=rounds, warmup_rounds=1)
    return {name: statistics.median(values[-rounds:]) for name, values in times.items()}


def compare(
    benchmark: BenchmarkFixture,
    title: str,
    calls: Mapping[str, Callable[[], object]],
    *,
    subject: str,
    baseline: str,
    tokens: int,
    rounds: int,
) -> None:
    """Leaves the times of calls that took turns; the report divides by `baseline`'s median."""
    other_medians = take_turns(benchmark, calls, subject, rounds)
    benchmark.extra_info["comparison"] = {
        "title": title,
        "subject": subject,
        "baseline": baseline,
        "tokens": tokens,
        "other_medians": other_medians,
    }


def extra_bytes(make_step: Callable[[], Callable[[], object]], gradient_bytes: int) -> int:
    """Peak memory of a step beyond what `make_step` holds and the gradients that the step returns."""
    peak = peak_bytes(make_step)
    if peak is None:
        pytest.skip("peak memory is measured on Linux only")
    # the system counts pages in batches for each thread, so that a peak of nothing may come out below zero
    return max(peak - gradient_bytes, 0)


def describe(tensor: torch.Tensor) -> str:
    """Such as `bf16 [512, 151,936]`: rows and columns."""
    names = {torch.bfloat16: "bf16", torch.float32: "fp32"}
    sizes = (tensor.numel() // tensor.shape[-1], tensor.shape[-1])
    return f"{names[tensor.dtype]} [{', '.join(f'{size:,}' for size in sizes)}]"
