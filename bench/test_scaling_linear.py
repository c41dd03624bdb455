"""Time and extra memory of the GRPO loss from hidden states, forward and backward, as tokens grow."""

from __future__ import annotations

from functools import partial

import linear_losses
import pytest
from common import Shape, extra_bytes, take_turns
from linear_losses import DEFAULT_CHUNK, SMALL_CHUNK, Head, Problem
from pytest_benchmark.fixture import BenchmarkFixture

from rlkernels.cli.loss_twins import FUSED, NAIVE
from rlkernels.cli.measure import available_bytes

TOKENS = (256, 512, 1024, 2048, 4096, 8192)
NAIVE_BYTES = 12  # for each logit: it and its gradient in bf16, its log-softmax and that one's gradient in fp32
SPARE_BYTES = 2 << 30  # the head, its gradient, and what the process holds anyway


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("tokens", TOKENS[:2] if metafunc.config.getoption("--quick") else TOKENS)


def test_tokens(tokens: int, shape: Shape, benchmark: BenchmarkFixture) -> None:
    head = linear_losses.head_of("qwen", shape)
    failure = why_too_large(head, tokens)
    names = [FUSED, SMALL_CHUNK] if failure else [FUSED, SMALL_CHUNK, NAIVE]
    gradient_bytes = head.gradient_bytes(tokens)
    extra = {n: extra_bytes(partial(linear_losses.make_step, n, head, tokens), gradient_bytes) for n in names}
    problem = Problem(head, tokens)
    steps = {name: linear_losses.step_of(name, problem) for name in names}
    benchmark.extra_info["scaling"] = {
        "title": f'linear_policy_loss("grpo"), forward + backward, {head.name}, {head.sizes()}, {DEFAULT_CHUNK}',
        "subject": FUSED,
        "tokens": tokens,
        "other_medians": take_turns(benchmark, steps, FUSED, shape.slow_rounds),
        "extra_bytes": extra,
    }
    if failure:
        benchmark.extra_info["unavailable"] = {f"{NAIVE}, N={tokens}": failure}


def why_too_large(head: Head, tokens: int) -> str | None:
    """None if the naive loss fits in memory, else the reason."""
    available = available_bytes()
    needed = NAIVE_BYTES * tokens * head.vocab + SPARE_BYTES
    if available is None or needed <= available:
        return None
    return f"needs about {needed / 2**30:.1f} GiB of memory, {available / 2**30:.1f} GiB are available"
