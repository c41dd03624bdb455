"""The GRPO loss through the public interface, forward and backward, beside PyTorch."""

from __future__ import annotations

from functools import partial

from common import Shape, compare, describe
from pytest_benchmark.fixture import BenchmarkFixture

from rlkernels.cli.loss_twins import COMPILED, FUSED, NAIVE, Rows, forward_backward, why_not_compiled


def test_grpo(rows: Rows, shape: Shape, benchmark: BenchmarkFixture) -> None:
    failure = why_not_compiled(rows)
    names = [FUSED, NAIVE] if failure else [FUSED, NAIVE, COMPILED]
    compare(
        benchmark,
        f'policy_loss("grpo"), forward + backward, {describe(rows.logits)}',
        {name: partial(forward_backward, name, rows) for name in names},
        subject=FUSED,
        baseline=FUSED,
        tokens=rows.targets.numel(),
        rounds=shape.rounds,
    )
    if failure:
        benchmark.extra_info["unavailable"] = {COMPILED: failure}
