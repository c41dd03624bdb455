"""Plain PyTorch twins of every operation: the same signatures, no tricks, PyTorch's own autograd.

They define what the kernels must compute, in whatever dtype they are given (float64 is the ground truth of the
tests), and serve as the `reference` backend.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernels.ops.linear_rows import LinearRows
from rlkernels.ops.rows import Rows, RowStats, compute_dtype


def row_stats(rows: Rows) -> RowStats:
    """Every statistic of every row, with the row state's definition written out; see `token_stats`."""
    x = rows.logits.reshape(-1, rows.logits.shape[-1]).to(compute_dtype(rows.logits.dtype))
    used = rows.targets != rows.ignore_index  # [rows]
    # an ignored row is replaced before any arithmetic: whatever it holds cannot reach a gradient
    x = torch.where(used[:, None], x, 0.0)
    temperature = torch.where(used, rows.temperature, 1.0)
    targets = torch.where(used, rows.targets, 0)[:, None]
    z = rows.logit_scale * x
    if rows.softcap is not None:
        z = rows.softcap * torch.tanh(z / rows.softcap)
    z = z / temperature[:, None]

    log_probs = torch.log_softmax(z, dim=-1)
    # p log p is 0 where p is 0; the product itself would be 0 * -inf
    finite_log_probs = log_probs.masked_fill(z == -torch.inf, 0.0)
    row_max = z.amax(dim=-1)
    nowhere = ~row_max.isfinite()  # a row that is -inf throughout, or holds +inf or NaN, has no distribution

    def zero_if_ignored(value: Tensor) -> Tensor:
        return torch.where(used, value, torch.zeros_like(value))

    return RowStats(
        logp=zero_if_ignored(log_probs.gather(-1, targets).squeeze(-1)),
        entropy=zero_if_ignored(-(log_probs.exp() * finite_log_probs).sum(-1)),
        lse=zero_if_ignored(torch.where(nowhere, torch.nan, torch.logsumexp(z, dim=-1))),
        log_sum_sq_probs=zero_if_ignored(torch.logsumexp(2 * log_probs, dim=-1)).detach(),
        mean_logits=zero_if_ignored(z.mean(dim=-1)).detach(),
        is_top1=used & ~nowhere & (z.argmax(dim=-1) == targets.squeeze(-1)),
        row_max=zero_if_ignored(row_max).detach(),
        log_sum_exp=zero_if_ignored(torch.logsumexp(z - row_max[:, None], dim=-1)).detach(),
    )


def indexed_logp(rows: Rows, index: Tensor | None) -> Tensor:
    """`row_stats(...).logp` of the rows that an index names; see `credit.counterfactual_contrast`."""
    if index is not None:
        index = torch.where(rows.targets != rows.ignore_index, index, 0)
        rows = rows._replace(logits=rows.logits.flatten(0, 1)[index][None])
    return row_stats(rows).logp


def linear_row_stats(rows: LinearRows) -> RowStats:
    """`row_stats` of the logits, made whole."""
    return row_stats(rows.with_logits(linear_logits(rows)))


def linear_logits(rows: LinearRows) -> Tensor:
    """`[N, V]`, those of ignored rows without a gradient."""
    used = (rows.targets != rows.ignore_index)[:, None]
    hidden = torch.where(used, rows.hidden, 0.0)  # before the GEMM: NaN in an ignored row would reach the weight
    return torch.nn.functional.linear(hidden, rows.weight.to(hidden.dtype), _cast(rows.bias, hidden))


def _cast(tensor: Tensor | None, like: Tensor) -> Tensor | None:
    return None if tensor is None else tensor.to(like.dtype)


def prefix_counts(token_ids: Tensor, lengths: Tensor, group_of_row: Tensor) -> Tensor:
    """Every pair of rows compared token by token; see `credit.prefix_set_counts`."""
    width = token_ids.shape[1]
    inside = torch.arange(width, device=token_ids.device) < lengths[:, None]  # [B, T]
    equal = (token_ids[:, None] == token_ids[None]) & inside[:, None] & inside[None]  # [B, B, T]
    equal &= (group_of_row[:, None] == group_of_row[None])[:, :, None]
    same_prefix = equal.to(torch.int32).cumprod(dim=-1)
    return torch.where(inside, same_prefix.sum(dim=1), 1).to(torch.int32)
