"""The C++ kernels on CPU tensors. The only file that takes a tensor's address."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlkernels import _native
from rlkernels.ops.rows import Rows, RowStats, SavedStats, Upstream

_DTYPE_CODES = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.numel() == 0 else tensor.data_ptr()


def _addresses(tensors: dict[str, Tensor | None]) -> dict[str, Any]:
    return {name: _address(tensor) for name, tensor in tensors.items()}


def _views(rows: Rows) -> dict[str, Any]:
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
        "targets": _address(rows.targets),
        "ignore_index": rows.ignore_index,
        "threads": torch.get_num_threads(),
    }


def token_stats_forward(rows: Rows, stats: RowStats) -> None:
    _native.token_stats_forward(**_views(rows), **_addresses(stats._asdict()))


def token_stats_backward(rows: Rows, saved: SavedStats, upstream: Upstream, dlogits: Tensor) -> None:
    tensors = {**saved._asdict(), **upstream._asdict(), "dlogits": dlogits}
    _native.token_stats_backward(**_views(rows), **_addresses(tensors))


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
