"""The C++ kernels on CPU tensors. The only file that takes a tensor's address."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlkernels import _native
from rlkernels.ops.rows import Rows, RowStats, SavedStats, Tile, Upstream

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
