"""The CUDA C++ kernels on GPU tensors. Nothing waits for the device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rlkernels import _native
from rlkernels.backends.params import DTYPE_CODES, Params, address
from rlkernels.ops.objective_options import ObjectiveOptions
from rlkernels.ops.rows import Rows, RowStats, SavedStats, Tile, Upstream, check_values

if TYPE_CHECKING:  # the operation's file imports the backends
    from rlkernels.ops.policy_objective import ObjectiveBatch, ObjectiveResult

kernels: Any = getattr(_native, "cuda", None)  # None in a build without nvcc

SHIFT_UNIT = 1.0  # of t in a row state: nats


class Limits(NamedTuple):
    """What a launch depends on."""

    multiprocessors: int
    shared_bytes: int  # that a block may ask for


@functools.cache
def limits(device: torch.device) -> Limits:
    return Limits(*kernels.device_limits(device.index))


@contextlib.contextmanager
def launching(device: torch.device) -> Iterator[dict[str, int]]:
    """Makes a device the current one, where kernels run, and gives its current stream."""
    with torch.cuda.device(device):
        yield {"stream": torch.cuda.current_stream(device).cuda_stream}


def _workspace(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def empty_states(count: int, logits: Tensor) -> Tensor:
    """`[count, ...]` row states for a sweep in tiles; the first tile starts them, column 0 is the running maximum."""
    return logits.new_empty(count, kernels.row_state_bytes // 8, dtype=torch.float64)


def token_stats_forward(
    rows: Rows,
    stats: RowStats,
    tile: Tile | None = None,
    states: Tensor | None = None,
    index: Tensor | None = None,
) -> None:
    """`index [N]` names the stored row of each target; without it they are all rows in their order."""
    device = rows.logits.device
    check_values(rows, rows.logits.shape[-1] if tile is None else tile.vocab)
    params = Params(kernels).forward(rows, stats, tile, states, index)
    size = kernels.token_stats_workspace_bytes(params, limits(device).multiprocessors)
    workspace = _workspace(size, device)
    with launching(device) as target:
        kernels.token_stats_forward(params, **target, workspace=address(workspace))


def token_stats_backward(
    rows: Rows,
    saved: SavedStats,
    upstream: Upstream,
    dlogits: Tensor,
    tile: Tile | None = None,
    dtarget: Tensor | None = None,
) -> None:
    """`dlogits` may be the logits; with `dtarget` the target's gradient goes there, and 0 into `dlogits`."""
    device = rows.logits.device
    params = Params(kernels).backward(rows, saved, upstream, dlogits, tile, dtarget)
    with launching(device) as target:
        kernels.token_stats_backward(params, **target, multiprocessors=limits(device).multiprocessors)


def policy_objective(
    logp: Tensor, entropy: Tensor | None, options: ObjectiveOptions, batch: ObjectiveBatch, result: ObjectiveResult
) -> None:
    params = Params(kernels).objective(options, batch, logp=logp, entropy=entropy, **result._asdict())
    workspace = _workspace(kernels.policy_objective_workspace_bytes(params), logp.device)
    with launching(logp.device) as target:
        kernels.policy_objective(params, **target, workspace=address(workspace))


def policy_sweep(
    rows: Rows, options: ObjectiveOptions, batch: ObjectiveBatch, stats: RowStats, dlogits: Tensor
) -> None:
    device = rows.logits.device
    check_values(rows, rows.logits.shape[-1])
    params = Params(kernels).sweep(rows, options, batch, stats, dlogits)
    multiprocessors, shared_bytes = limits(device)
    workspace = _workspace(kernels.policy_sweep_workspace_bytes(params, multiprocessors), device)
    with launching(device) as target:
        kernels.policy_sweep(
            params,
            **target,
            workspace=address(workspace),
            multiprocessors=multiprocessors,
            shared_limit=shared_bytes,
        )


def scale_unless_one(dlogits: Tensor, factor: Tensor) -> None:
    with launching(dlogits.device) as target:
        kernels.scale_unless_one(
            values=address(dlogits),
            dtype=DTYPE_CODES[dlogits.dtype],
            count=dlogits.numel(),
            factor=address(factor),
            **target,
        )


def prefix_counts(token_ids: Tensor, lengths: Tensor, row_order: Tensor, group_starts: Tensor, counts: Tensor) -> None:
    params = Params(kernels).prefix_counts(token_ids, lengths, row_order, group_starts, counts)
    with launching(token_ids.device) as target:
        kernels.prefix_counts(params, **target)
