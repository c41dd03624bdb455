"""The linear path's sweeps: logits are made a tile at a time, reduced or turned into their gradient, and dropped.

Every GEMM is PyTorch's. The vocabulary is outermost: a tile of the weight is read once, its logits stay in the cache
while the row kernels run over them, and its part of the weight's gradient is finished in one GEMM.

PyTorch's CPU GEMMs of 16-bit matrices round their result to 16 bits, so products that are summed over tiles are summed
in float32, and the target column, which dominates a row's gradient, is kept out of them: its `dtarget * weight[y]` is
added in float32 at the end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernels import schedules
from rlkernels.ops.rows import Rows, RowStats, SavedStats, Tile, Upstream, Wanted, compute_dtype, empty_row_stats


class LinearRows(NamedTuple):
    """What `Rows` holds, with `hidden @ weight.T + bias` in the logits' place."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]; of another dtype than hidden's under autocast, whose GEMMs are in hidden's
    bias: Tensor | None  # [V], weight's dtype
    targets: Tensor  # [N] int64
    temperature: Tensor  # [1] or [N]
    softcap: Tensor | None  # [1]
    logit_scale: Tensor  # [1]
    ignore_index: int

    def take(self, index: Tensor | slice) -> LinearRows:
        """Some of the rows."""
        temperature = self.temperature if self.temperature.numel() == 1 else self.temperature[index]
        return self._replace(hidden=self.hidden[index], targets=self.targets[index], temperature=temperature)

    def want_direction(self) -> bool:
        """Whether forward is to keep dlogp / dhidden: the head is frozen and a gradient will be asked for."""
        head_is_frozen = not self.weight.requires_grad and not (self.bias is not None and self.bias.requires_grad)
        return torch.is_grad_enabled() and self.hidden.requires_grad and head_is_frozen

    def weight_tile(self, columns: slice) -> Tensor:
        return self.weight[columns].to(self.hidden.dtype)

    def label_columns(self) -> Tensor:
        """`targets` as an index: a bad label, which gives NaN on a GPU, is never an address."""
        return self.targets.clamp(0, self.weight.shape[0] - 1)

    def logits(self, columns: slice, buffer: Tensor) -> Rows:
        """The rows' logits of some columns, written into `buffer`."""
        shape = (self.hidden.shape[0], columns.stop - columns.start)
        out = buffer[: shape[0] * shape[1]].view(shape)
        if self.bias is None:
            torch.mm(self.hidden, self.weight_tile(columns).t(), out=out)
        else:
            bias = self.bias[columns].to(self.hidden.dtype)
            torch.addmm(bias, self.hidden, self.weight_tile(columns).t(), out=out)
        return Rows(out[None], self.targets, self.temperature, self.softcap, self.logit_scale, self.ignore_index)

    def empty_logits(self, blocks: schedules.Blocks) -> Tensor:
        return self.hidden.new_empty(min(blocks.rows, self.hidden.shape[0]) * blocks.columns)


class ProductSum:
    """A sum of GEMMs `[n, H]`, in the compute dtype."""

    def __init__(self, rows: LinearRows) -> None:
        self.total = rows.hidden.new_zeros(rows.hidden.shape, dtype=compute_dtype(rows.hidden.dtype))
        is_exact = self.total.dtype == rows.hidden.dtype
        self._product = None if is_exact else torch.empty_like(rows.hidden)

    def add(self, tile: Tensor, weight: Tensor, factor: Tensor | None = None) -> None:
        """total = factor * total + tile @ weight."""
        if factor is not None:
            self.total *= factor[:, None]
        if self._product is None:
            self.total.addmm_(tile, weight)
        else:
            self.total += torch.mm(tile, weight, out=self._product)


def empty_linear_stats(rows: LinearRows, wanted: Wanted) -> RowStats:
    return empty_row_stats(Rows(rows.hidden[None, :, :1], *rows[3:]), wanted)


def _used_rows(used: Tensor) -> Tensor | slice:
    """Indices of the rows that matter; a slice, which copies nothing, where all do."""
    index = used.nonzero().squeeze(1)
    return slice(None) if index.shape[0] == used.shape[0] else index


def linear_forward(
    rows: LinearRows, wanted: Wanted, chunk_bytes: int, kernels: Any, with_direction: bool
) -> tuple[RowStats, Tensor]:
    """Statistics, and `direction [N, H]` = dlogp / dhidden where asked for (else empty)."""
    count = rows.targets.shape[0]
    vocab, hidden_size = rows.weight.shape
    stats = RowStats(*(column.zero_() for column in empty_linear_stats(rows, wanted)))
    dtype = compute_dtype(rows.hidden.dtype)
    direction = rows.hidden.new_zeros((count, hidden_size) if with_direction else (0,), dtype=dtype)
    used = _used_rows(rows.targets != rows.ignore_index)
    all_rows = rows.take(used)
    blocks = schedules.forward_blocks(
        all_rows.targets.shape[0], hidden_size, vocab, rows.hidden.element_size(), chunk_bytes
    )
    buffer = all_rows.empty_logits(blocks)
    for block in blocks.row_ranges(all_rows.targets.shape[0]):
        part = all_rows.take(block)
        part_stats = empty_linear_stats(part, wanted)
        part_direction = _forward_block(part, part_stats, blocks, buffer, kernels, with_direction)
        where = block if isinstance(used, slice) else used[block]
        for whole, values in zip(stats, part_stats, strict=True):
            if values.numel():
                whole[where] = values
        if part_direction is not None:
            direction[where] = part_direction
    return stats, direction


def _forward_block(
    rows: LinearRows,
    stats: RowStats,
    blocks: schedules.Blocks,
    buffer: Tensor,
    kernels: Any,
    with_direction: bool,
) -> Tensor | None:
    vocab = rows.weight.shape[0]
    states = kernels.empty_states(rows.targets.shape[0], buffer)
    states[:, 0] = -torch.inf
    others = ProductSum(rows) if with_direction else None
    for columns in blocks.column_ranges(vocab):
        tile = Tile(columns.start, vocab)
        logits = rows.logits(columns, buffer)
        before = states[:, 0].clone()
        kernels.token_stats_forward(logits, stats, tile, states)
        if others is not None:
            exponentials = _exponentials_in_place(logits, states[:, 0], tile, kernels)
            factor = _rescaling(rows, before, states[:, 0])
            others.add(exponentials, rows.weight_tile(columns), factor.to(others.total.dtype))
    return None if others is None else _direction(rows, stats, others.total)


def _exponentials_in_place(logits: Rows, maximum: Tensor, tile: Tile, kernels: Any) -> Tensor:
    """`e^(z - max) dz/dx` in the logits' place, 0 in the target's column: lse's gradient times s."""
    values = logits.logits[0]
    dtype = compute_dtype(values.dtype)
    maximum = maximum.to(dtype).contiguous()
    none, ones = torch.zeros_like(maximum), torch.ones_like(maximum)
    kernels.token_stats_backward(
        logits,
        SavedStats(row_max=maximum, log_sum_exp=none, entropy=none),
        Upstream(dlogp=None, dentropy=None, dlse=ones),
        values,
        tile,
        dtarget=torch.empty_like(maximum),
    )
    return values


def _rescaling(rows: LinearRows, before: Tensor, after: Tensor) -> Tensor:
    """What sums relative to an earlier maximum of u are multiplied by."""
    scale = (rows.logit_scale if rows.softcap is None else rows.softcap) / rows.temperature
    return torch.where(before == after, 1.0, torch.exp(scale.double() * (before - after)))


def _direction(rows: LinearRows, stats: RowStats, others: Tensor) -> Tensor:
    """dlogp/dhidden = (1 - p_y) z'_y weight[y] - sum_{v != y} p_v z'_v weight[v]; the difference before rounding."""
    columns = rows.label_columns()
    target_weight = rows.weight[columns].to(others.dtype)
    slope = (rows.logit_scale / rows.temperature).expand(rows.targets.shape[0])
    if rows.softcap is not None:
        target_logit = (rows.hidden.to(others.dtype) * target_weight).sum(-1)
        if rows.bias is not None:
            target_logit += rows.bias[columns].to(others.dtype)
        e = torch.exp(-2 * (rows.logit_scale * target_logit / rows.softcap).abs())
        slope = slope * 4 * e / (1 + e) ** 2
    coefficient = -torch.expm1(stats.logp) * slope
    return coefficient[:, None] * target_weight - others * torch.exp(-stats.log_sum_exp)[:, None]


def linear_backward(
    rows: LinearRows,
    saved: SavedStats,
    upstream: Upstream,
    needs: tuple[bool, bool, bool],
    chunk_bytes: int,
    kernels: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dhidden, dweight, dbias), empty where not needed; logits are made again."""
    need_hidden, need_weight, need_bias = needs
    vocab, hidden_size = rows.weight.shape
    used = rows.targets != rows.ignore_index
    coefficients = [gradient for gradient in upstream if gradient is not None]
    used &= torch.stack([gradient != 0 for gradient in coefficients]).any(0)
    index = _used_rows(used)
    part = rows.take(index)
    part_saved = SavedStats(*(column[index] if column.numel() else column for column in saved))
    part_upstream = Upstream(*(None if gradient is None else gradient[index] for gradient in upstream))

    count = part.targets.shape[0]
    dhidden = rows.hidden.new_zeros(rows.hidden.shape if need_hidden else (0,))
    dweight = rows.weight.new_empty(rows.weight.shape if need_weight else (0,))
    dbias = rows.weight.new_empty((vocab,) if need_bias else (0,))
    if count == 0:
        return dhidden, dweight.zero_(), dbias.zero_()
    blocks = schedules.backward_blocks(count, hidden_size, vocab, rows.hidden.element_size(), chunk_bytes)
    buffer = part.empty_logits(blocks)
    total = ProductSum(part) if need_hidden else None
    dtarget = torch.zeros_like(part_saved.row_max) if need_hidden else None
    for columns in blocks.column_ranges(vocab):
        logits = part.logits(columns, buffer)
        dlogits = logits.logits[0]
        kernels.token_stats_backward(
            logits, part_saved, part_upstream, dlogits, Tile(columns.start, vocab), dtarget=dtarget
        )
        if total is not None:
            total.add(dlogits, rows.weight_tile(columns))
        if need_weight or need_bias:
            if dtarget is not None:
                _put_target_back(dlogits, dtarget, part.targets, columns)
            if need_weight:
                # a weight of another dtype is autocast's master copy: its gradient is not rounded to hidden's
                torch.mm(dlogits.t().to(dweight.dtype), part.hidden.to(dweight.dtype), out=dweight[columns])
            if need_bias:
                dbias[columns] = dlogits.sum(0, dtype=compute_dtype(dlogits.dtype))
    if total is not None and dtarget is not None:
        labels = part.label_columns()
        for block in schedules.Blocks(256, vocab).row_ranges(count):  # weight[y] is another [N, H]
            target_weight = rows.weight[labels[block]].to(total.total.dtype)
            total.total[block] += dtarget[block, None] * target_weight
        dhidden[index] = total.total.to(dhidden.dtype)
    return dhidden, dweight, dbias


def _put_target_back(dlogits: Tensor, dtarget: Tensor, targets: Tensor, columns: slice) -> None:
    inside = ((targets >= columns.start) & (targets < columns.stop)).nonzero().squeeze(1)
    dlogits[inside, targets[inside] - columns.start] = dtarget[inside].to(dlogits.dtype)
