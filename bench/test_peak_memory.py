"""Peak memory of the GRPO loss, forward and backward, beyond its inputs and the gradients that are asked for."""

from __future__ import annotations

from functools import partial

import linear_losses
import pytest
import torch
from common import Shape, extra_bytes
from linear_losses import DEFAULT_CHUNK, SMALL_CHUNK, SMALL_CHUNK_BYTES
from pytest_benchmark.fixture import BenchmarkFixture

from rlkernels.cli import loss_twins
from rlkernels.cli.loss_twins import COMPILED, FUSED, NAIVE, make_rows, why_not_compiled
from rlkernels.schedules import DEFAULT_CHUNK_BYTES

DTYPE = torch.bfloat16
FROZEN = f"{FUSED}, frozen head"
# a frozen head keeps no logits: a tile, but two float32 [N, H]
BOUND = {FUSED: (DEFAULT_CHUNK_BYTES, 1), SMALL_CHUNK: (SMALL_CHUNK_BYTES, 1), FROZEN: (SMALL_CHUNK_BYTES, 2)}


def skip_if_unavailable(name: str) -> None:
    failure = why_not_compiled(make_rows(4, 16, DTYPE, "cpu")) if name == COMPILED else None
    if failure:
        pytest.skip(failure)


@pytest.mark.parametrize("name", [FUSED, NAIVE, COMPILED])
def test_grpo(name: str, shape: Shape, benchmark: BenchmarkFixture) -> None:
    skip_if_unavailable(name)

    def measure(tokens: int) -> int:
        make_step = partial(loss_twins.make_step, name, tokens, shape.vocab, DTYPE, "cpu")
        return extra_bytes(make_step, gradient_bytes=tokens * shape.vocab * DTYPE.itemsize)

    token_counts = (shape.tokens // 4, shape.tokens)
    benchmark.extra_info["memory"] = {
        "title": f'policy_loss("grpo"), bf16 logits [N, {shape.vocab:,}]',
        "loss": name,
        "extra_bytes": benchmark.pedantic(lambda: {n: measure(n) for n in token_counts}, rounds=1),
    }


@pytest.mark.parametrize("name", [FUSED, SMALL_CHUNK, FROZEN, NAIVE, COMPILED])
def test_linear_grpo(name: str, shape: Shape, benchmark: BenchmarkFixture) -> None:
    skip_if_unavailable(name)
    head = linear_losses.head_of("qwen", shape)
    loss, frozen = (FUSED, True) if name == FROZEN else (name, False)

    def measure(tokens: int) -> int:
        make_step = partial(linear_losses.make_step, loss, head, tokens, frozen)
        return extra_bytes(make_step, head.gradient_bytes(tokens, frozen))

    token_counts = linear_losses.TOKENS[:1] if shape.is_quick else linear_losses.TOKENS
    benchmark.extra_info["memory"] = {
        "title": f'linear_policy_loss("grpo"), {head.name}, {head.sizes()}, {DEFAULT_CHUNK}; '
        "bound: chunk_bytes + float32 [N, H]; frozen head: a tile + two float32 [N, H]; O(N) not counted",
        "loss": name,
        "extra_bytes": benchmark.pedantic(lambda: {n: measure(n) for n in token_counts}, rounds=1),
    }
    if name in BOUND:
        chunk, sums = BOUND[name]
        benchmark.extra_info["memory"]["bound_bytes"] = {
            n: chunk + sums * n * head.hidden_size * torch.float32.itemsize for n in token_counts
        }
