"""The statistics kernels alone, into buffers that exist, beside copying the logits."""

from __future__ import annotations

import pytest
import torch
from common import Shape, compare, describe
from pytest_benchmark.fixture import BenchmarkFixture

from rlkernels import backends
from rlkernels.cli.loss_twins import Rows
from rlkernels.ops.rows import SavedStats, Upstream, Wanted, empty_dlogits, empty_row_stats
from rlkernels.stats import make_rows

COPY = "copy of the logits"

pytestmark = pytest.mark.skipif(
    backends.why_unavailable("cpu") is not None, reason=str(backends.why_unavailable("cpu"))
)


class Kernels:
    """Calls of the kernels and of the copy, each into its own existing buffer."""

    def __init__(self, rows: Rows) -> None:
        from rlkernels.backends import native

        logits = rows.logits.detach()
        self.rows = make_rows(logits, rows.targets, 1.0, None, 1.0, ignore_index=-100)
        wanted = Wanted(entropy=True, lse=False, log_sum_sq_probs=False, mean_logits=False, is_top1=False)
        stats = empty_row_stats(self.rows, wanted)
        saved = SavedStats(stats.row_max, stats.log_sum_exp, stats.entropy)
        upstream = Upstream(dlogp=torch.full_like(stats.logp, 1e-3), dentropy=None, dlse=None)
        gradient = empty_dlogits(self.rows)
        destination = torch.empty_like(logits)
        self.forward = lambda: native.token_stats_forward(self.rows, stats)
        self.backward = lambda: native.token_stats_backward(self.rows, saved, upstream, gradient)
        self.copy = lambda: destination.copy_(logits)
        self.tokens, self.shape = rows.targets.numel(), describe(logits)


@pytest.fixture
def kernels(rows: Rows) -> Kernels:
    return Kernels(rows)


def test_forward(kernels: Kernels, shape: Shape, benchmark: BenchmarkFixture) -> None:
    compare(
        benchmark,
        f"token_stats, forward kernel, {kernels.shape}",
        {"kernel": kernels.forward, COPY: kernels.copy},
        subject="kernel",
        baseline=COPY,
        tokens=kernels.tokens,
        rounds=shape.short_rounds,
    )


def test_backward(kernels: Kernels, shape: Shape, benchmark: BenchmarkFixture) -> None:
    kernels.forward()
    compare(
        benchmark,
        f"token_stats, backward kernel, {kernels.shape}",
        {"kernel": kernels.backward, COPY: kernels.copy},
        subject="kernel",
        baseline=COPY,
        tokens=kernels.tokens,
        rounds=shape.short_rounds,
    )
