"""Peak memory of the GRPO loss, forward and backward, beyond the logits and their gradient."""

from __future__ import annotations

import pytest
import torch
from common import Shape
from pytest_benchmark.fixture import BenchmarkFixture

from rlkernels.cli.loss_twins import COMPILED, FUSED, NAIVE, make_rows, why_not_compiled
from rlkernels.cli.measure import peak_bytes

DTYPE = torch.bfloat16


@pytest.mark.parametrize("name", [FUSED, NAIVE, COMPILED])
def test_grpo(name: str, shape: Shape, benchmark: BenchmarkFixture) -> None:
    if name == COMPILED:
        failure = why_not_compiled(make_rows(4, 16, DTYPE, "cpu"))
        if failure:
            pytest.skip(failure)

    def measure() -> dict[int, int | None]:
        token_counts = (shape.tokens // 4, shape.tokens)
        return {n: peak_bytes(name, n, shape.vocab, DTYPE, "cpu") for n in token_counts}

    peaks = benchmark.pedantic(measure, rounds=1)
    if None in peaks.values():
        pytest.skip("peak memory is measured on Linux only")
    benchmark.extra_info["memory"] = {
        "title": f"bf16 logits [N, {shape.vocab:,}]",
        "loss": name,
        "extra_bytes": {n: max(peak - n * shape.vocab * DTYPE.itemsize, 0) for n, peak in peaks.items()},
    }
