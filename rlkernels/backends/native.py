"""The C++ kernels on CPU tensors. The only file that takes a tensor's address."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlkernels import _native
from rlkernels.ops.objective_options import ObjectiveOptions
from rlkernels.ops.rows import Rows, RowStats, SavedStats, Tile, Upstream

if TYPE_CHECKING:  # the operation's file imports the backends
    from rlkernels.ops.policy_objective import ObjectiveBatch, ObjectiveResult

free_idle_buffers = _native.free_idle_buffers

_DTYPE_CODES = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.numel() == 0 else tensor.data_ptr()


def _addresses(tensors: dict[str, Tensor | None]) -> dict[str, Any]:
    return {name: _address(tensor) for name, tensor in tensors.items()}


def _views(rows: Rows, tile: Tile | None) -> dict[str, Any]:
    vocab = rows.logits.shape[-1]
    return {
        "logits": _native.LogitsView(
            data=_address(rows.logits),
            dtype=_DTYPE_CODES[rows.logits.dtype],
            sizes=tuple(rows.logits.shape),
            strides=rows.logits.stride(),
        ),
        "scaling": _native.RowScaling(
            temperature=_address(rows.temperature),
            temperature_stride=int(rows.temperature.numel() > 1),
            softcap=_address(rows.softcap),
            logit_scale=_address(rows.logit_scale),
        ),
        "vocab": vocab if tile is None else tile.vocab,
        "vocab_start": 0 if tile is None else tile.start,
        "targets": _address(rows.targets),
        "ignore_index": rows.ignore_index,
        "threads": torch.get_num_threads(),
    }


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor in a buffer of the pool."""
    count = math.prod(shape)
    flat = torch.frombuffer(_native.Buffer(count * dtype.itemsize), dtype=dtype, count=count)
    # no view of `flat`: the tensor is to look like any other
    return torch.empty(0, dtype=dtype).set_(flat.untyped_storage(), 0, torch.Size(shape), flat.view(shape).stride())


def empty_states(count: int, logits: Tensor) -> Tensor:
    """`[count, ...]` row states for a sweep in tiles; the first tile starts them, column 0 is the running maximum."""
    return logits.new_empty(count, _native.row_state_bytes // 8, dtype=torch.float64)


def token_stats_forward(rows: Rows, stats: RowStats, tile: Tile | None = None, states: Tensor | None = None) -> None:
    _native.token_stats_forward(**_views(rows, tile), **_addresses(stats._asdict()), states=_address(states))


def token_stats_backward(
    rows: Rows,
    saved: SavedStats,
    upstream: Upstream,
    dlogits: Tensor,
    tile: Tile | None = None,
    dtarget: Tensor | None = None,
) -> None:
    tensors = {**saved._asdict(), **upstream._asdict(), "dlogits": dlogits, "dtarget": dtarget}
    _native.token_stats_backward(**_views(rows, tile), **_addresses(tensors))


def _objective_params(options: ObjectiveOptions, batch: ObjectiveBatch, **tensors: Tensor | None) -> Any:
    tokens = batch.mask.shape[0]
    per_token = {
        f"{name}_per_token": value is not None and value.shape[0] == tokens
        for name, value in (
            ("advantages", batch.advantages),
            ("policy_weight", batch.policy_weight),
            ("success_rate", batch.success_rate),
        )
    }
    tensors |= {name: value for name, value in batch._asdict().items() if not isinstance(value, int)}
    return _native.PolicyObjectiveParams(
        options=_native.ObjectiveOptions(**options._asdict()),
        dtype=_DTYPE_CODES[batch.advantages.dtype],
        tokens=tokens,
        sequences=batch.sequences,
        width=tokens // max(1, batch.sequences),
        reduction=batch.reduction,
        entropy_reduction=batch.entropy_reduction,
        threads=torch.get_num_threads(),
        **per_token,
        **_addresses(tensors),
    )


def policy_objective(
    logp: Tensor, entropy: Tensor | None, options: ObjectiveOptions, batch: ObjectiveBatch, result: ObjectiveResult
) -> None:
    _native.policy_objective(_objective_params(options, batch, logp=logp, entropy=entropy, **result._asdict()))


def policy_sweep(
    rows: Rows, options: ObjectiveOptions, batch: ObjectiveBatch, stats: RowStats, dlogits: Tensor
) -> None:
    views = _views(rows, None)
    _native.policy_sweep(
        logits=views["logits"],
        scaling=views["scaling"],
        targets=views["targets"],
        ignore_index=rows.ignore_index,
        logp=_address(stats.logp),
        entropy=_address(stats.entropy),
        row_max=_address(stats.row_max),
        log_sum_exp=_address(stats.log_sum_exp),
        objective=_objective_params(
            options, batch, logp=None, entropy=None, loss=None, metrics=None, dlogp=None, dentropy=None
        ),
        dlogits=_address(dlogits),
        threads=views["threads"],
    )


def scale_unless_one(dlogits: Tensor, factor: Tensor) -> None:
    if factor != 1:
        dlogits.mul_(factor.item())


def prefix_counts(token_ids: Tensor, lengths: Tensor, row_order: Tensor, group_starts: Tensor, counts: Tensor) -> None:
    rows, width = token_ids.shape
    _native.prefix_counts(
        token_ids=_address(token_ids),
        rows=rows,
        width=width,
        lengths=_address(lengths),
        row_order=_address(row_order),
        group_starts=_address(group_starts),
        groups=group_starts.shape[0] - 1,
        counts=_address(counts),
        threads=torch.get_num_threads(),
    )
