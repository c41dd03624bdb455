"""What a sweep over the rows of `[outer, inner, V]` logits takes and gives, the same for every backend."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernels import checks


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for every other dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Rows(NamedTuple):
    """Rows of logits and what turns them into z; numbers are tensors of the compute dtype."""

    logits: Tensor  # [outer, inner, V], any strides
    targets: Tensor  # [outer * inner] int64, contiguous
    temperature: Tensor  # [1] or [outer * inner], contiguous
    softcap: Tensor | None  # [1]
    logit_scale: Tensor  # [1]
    ignore_index: int

    @property
    def columns(self) -> int:
        return self.logits.shape[-1]

    def sizes(self) -> dict[str, Any]:
        """What the shards of one vocabulary have in common, besides the rows."""
        return {"dtype of logits": self.logits.dtype}


def check_values(rows: Any, vocab: int) -> None:
    """Labels and numbers of `Rows` or `LinearRows`, where the host may look at them."""
    checks.check_row_values(rows.targets, vocab, rows.ignore_index, rows.temperature, rows.softcap, rows.logit_scale)


class Tile(NamedTuple):
    """Which columns of the vocabulary the logits of `Rows` are: `[start, start + logits.shape[-1])` of `vocab`."""

    start: int
    vocab: int


class Wanted(NamedTuple):
    """Which statistics are written besides logp and those that backward needs."""

    entropy: bool
    lse: bool
    log_sum_sq_probs: bool
    mean_logits: bool
    is_top1: bool


class RowStats(NamedTuple):
    """One value a row, in the compute dtype; what is not wanted is an empty tensor."""

    logp: Tensor
    entropy: Tensor
    lse: Tensor
    log_sum_sq_probs: Tensor
    mean_logits: Tensor
    is_top1: Tensor
    row_max: Tensor
    log_sum_exp: Tensor

    def take(self, rows: slice) -> RowStats:
        return RowStats(*(column[rows] if column.numel() else column for column in self))

    def put(self, rows: Tensor | slice, some: RowStats) -> None:
        for whole, values in zip(self, some, strict=True):
            if values.numel():
                whole[rows] = values


def empty_row_stats(rows: Rows, wanted: Wanted) -> RowStats:
    count = rows.targets.shape[0]
    dtype = compute_dtype(rows.logits.dtype)

    def column(needed: bool, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(count if needed else 0, dtype=dtype, device=rows.logits.device)

    return RowStats(
        logp=column(True),
        entropy=column(wanted.entropy),
        lse=column(wanted.lse),
        log_sum_sq_probs=column(wanted.log_sum_sq_probs),
        mean_logits=column(wanted.mean_logits),
        is_top1=column(wanted.is_top1, torch.bool),
        row_max=column(True),
        log_sum_exp=column(True),
    )


class SavedStats(NamedTuple):
    """What forward leaves for backward. `entropy` is empty when it was not computed."""

    row_max: Tensor
    log_sum_exp: Tensor
    entropy: Tensor


class Upstream(NamedTuple):
    """Gradients of the loss with respect to a row's statistics, contiguous; None where none arrived."""

    dlogp: Tensor | None
    dentropy: Tensor | None
    dlse: Tensor | None


def empty_dlogits(rows: Rows) -> Tensor:
    """Contiguous, whatever the strides of the logits: every element is written once, in order."""
    return torch.empty(rows.logits.shape, dtype=rows.logits.dtype, device=rows.logits.device)
