"""The C++ kernels on CPU tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlkernels import _native
from rlkernels.backends.params import Params
from rlkernels.ops.objective_options import ObjectiveOptions
from rlkernels.ops.rows import Rows, RowStats, SavedStats, Tile, Upstream

if TYPE_CHECKING:  # the operation's file imports the backends
    from rlkernels.ops.policy_objective import ObjectiveBatch, ObjectiveResult

free_idle_buffers = _native.free_idle_buffers

SHIFT_UNIT = 1.0  # of t in a row state: nats


def _params() -> Params:
    return Params(_native, torch.get_num_threads())


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor in a buffer of the pool."""
    count = math.prod(shape)
    flat = torch.frombuffer(_native.Buffer(count * dtype.itemsize), dtype=dtype, count=count)
    # no view of `flat`: the tensor is to look like any other
    return torch.empty(0, dtype=dtype).set_(flat.untyped_storage(), 0, torch.Size(shape), flat.view(shape).stride())


def empty_states(count: int, logits: Tensor) -> Tensor:
    """`[count, ...]` row states for a sweep in tiles; the first tile starts them, column 0 is the running maximum."""
    return logits.new_empty(count, _native.row_state_bytes // 8, dtype=torch.float64)


def token_stats_forward(
    rows: Rows,
    stats: RowStats,
    tile: Tile | None = None,
    states: Tensor | None = None,
    index: Tensor | None = None,
) -> None:
    """`index [N]` names the stored row of each target; without it they are all rows in their order."""
    _native.token_stats_forward(_params().forward(rows, stats, tile, states, index))


def token_stats_backward(
    rows: Rows,
    saved: SavedStats,
    upstream: Upstream,
    dlogits: Tensor,
    tile: Tile | None = None,
    dtarget: Tensor | None = None,
) -> None:
    _native.token_stats_backward(_params().backward(rows, saved, upstream, dlogits, tile, dtarget))


def policy_objective(
    logp: Tensor, entropy: Tensor | None, options: ObjectiveOptions, batch: ObjectiveBatch, result: ObjectiveResult
) -> None:
    _native.policy_objective(_params().objective(options, batch, logp=logp, entropy=entropy, **result._asdict()))


def policy_sweep(
    rows: Rows, options: ObjectiveOptions, batch: ObjectiveBatch, stats: RowStats, dlogits: Tensor
) -> None:
    _native.policy_sweep(_params().sweep(rows, options, batch, stats, dlogits))


def scale_unless_one(dlogits: Tensor, factor: Tensor) -> None:
    if factor != 1:
        dlogits.mul_(factor.item())


def prefix_counts(token_ids: Tensor, lengths: Tensor, row_order: Tensor, group_starts: Tensor, counts: Tensor) -> None:
    _native.prefix_counts(_params().prefix_counts(token_ids, lengths, row_order, group_starts, counts))
