"""The linear path's sweeps: logits are made a tile at a time, reduced or turned into their gradient, and dropped.

Every GEMM is PyTorch's. The vocabulary is outermost: a tile of the weight is read once, its logits stay in the cache
while the row kernels run over them, and its part of the weight's gradient is finished in one GEMM. As many logits as
`chunk_bytes` allows are not dropped but kept for backward, which need not make those again (`rlkernels.schedules`).

PyTorch's CPU GEMMs of 16-bit matrices round their result to 16 bits, so products that are summed over tiles are summed
in float32, and the target column, which dominates a row's gradient, is kept out of them: its `dtarget * weight[y]` is
added in float32 at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernels import schedules
from rlkernels.backends import memory
from rlkernels.ops.rows import Rows, RowStats, SavedStats, Tile, Upstream, Wanted, compute_dtype, empty_row_stats
from rlkernels.ops.vocab_shards import VocabShard, finish, fresh_states, shift_between, state_scale

_FEW = schedules.Blocks(rows=256, columns=1)  # rows at a time where all would take another [N, H]


class Keep(NamedTuple):
    """What forward is to leave for backward besides statistics."""

    direction: bool  # dlogp / dhidden
    logits: bool  # as many as fit


class Kept(NamedTuple):
    """What forward left; empty where it was not to."""

    direction: Tensor  # [N, H], compute dtype
    logits: Tensor  # tiles of the vocabulary's first columns, one after another; what no row needed is not written


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

    def what_to_keep(self) -> Keep:
        """The direction where the head is frozen, logits where it is trained, nothing without a gradient."""
        head_is_trained = self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad)
        wanted = torch.is_grad_enabled()
        return Keep(
            direction=wanted and self.hidden.requires_grad and not head_is_trained, logits=wanted and head_is_trained
        )

    @property
    def columns(self) -> int:
        return self.weight.shape[0]

    def sizes(self) -> dict[str, Any]:
        """What the shards of one vocabulary have in common, besides the rows."""
        return {
            "dtype of hidden": self.hidden.dtype,
            "H": self.hidden.shape[1],
            "hidden.requires_grad": torch.is_grad_enabled() and self.hidden.requires_grad,
            "weight.requires_grad": self.what_to_keep().logits,
        }

    def whole(self) -> VocabShard:
        """The shard that is all of the vocabulary."""
        return VocabShard(0, self.weight.shape[0], None)

    def problem(self, chunk_bytes: int) -> schedules.Problem:
        vocab, hidden_size = self.weight.shape
        return schedules.Problem(self.targets.shape[0], hidden_size, vocab, self.hidden.element_size(), chunk_bytes)

    def is_labelled(self) -> Tensor:
        return self.targets != self.ignore_index

    def only(self, used: Tensor) -> tuple[LinearRows, Tensor | slice]:
        """The rows that matter, and their indices; a slice, which copies nothing, where all do.

        A GPU's host would have to wait for their number: there the others stay, with hidden states of 0.
        """
        if not self.knows_counts():
            return self._replace(hidden=torch.where(used[:, None], self.hidden, 0)), slice(None)
        index = used.nonzero().squeeze(1)
        return (self, slice(None)) if index.shape[0] == used.shape[0] else (self.take(index), index)

    def knows_counts(self) -> bool:
        return self.hidden.device.type == "cpu"

    def weight_tile(self, columns: slice) -> Tensor:
        return self.weight[columns].to(self.hidden.dtype)

    def label_columns(self, start: int) -> Tensor:
        """`targets` as an index of weight rows: one that a shard has not, or a bad label, is never an address."""
        return (self.targets - start).clamp(0, self.weight.shape[0] - 1)

    def make_logits(self, columns: slice, out: Tensor) -> Tensor:
        """The rows' logits of some columns, written into `out`."""
        if self.bias is None:
            torch.mm(self.hidden, self.weight_tile(columns).t(), out=out)
        else:
            bias = self.bias[columns].to(self.hidden.dtype)
            torch.addmm(bias, self.hidden, self.weight_tile(columns).t(), out=out)
        return out

    def with_logits(self, logits: Tensor) -> Rows:
        """Rows of a tile `[n, columns]`."""
        return Rows(logits[None], self.targets, self.temperature, self.softcap, self.logit_scale, self.ignore_index)

    def empty_tile(self, chunk_bytes: int) -> Tensor:
        size = self.problem(chunk_bytes).tile_size()
        return memory.empty((size,), self.hidden.dtype, self.hidden.device)


def _view(buffer: Tensor, rows: int, columns: slice) -> Tensor:
    width = columns.stop - columns.start
    return buffer[: rows * width].view(rows, width)


class KeptTiles:
    """The tiles in `Kept.logits`: each is all of forward's rows of some columns."""

    def __init__(self, buffer: Tensor, problem: schedules.Problem) -> None:
        self.columns = problem.kept_columns(buffer.numel())
        self._buffer, self._rows = buffer, problem.rows

    def tile(self, columns: slice) -> Tensor:
        return _view(self._buffer[self._rows * columns.start :], self._rows, columns)


class ProductSum:
    """A sum of GEMMs `[n, H]`, in the compute dtype: in `total`, which holds zeros, or in a tensor of its own."""

    def __init__(self, rows: LinearRows, total: Tensor | None = None) -> None:
        if total is None:
            total = rows.hidden.new_zeros(rows.hidden.shape, dtype=compute_dtype(rows.hidden.dtype))
        self.total = total
        self._is_exact = self.total.dtype == rows.hidden.dtype
        self._is_wide = schedules.has_wide_gemms(rows.hidden.device)
        self._product = None if self._is_exact or self._is_wide else torch.empty_like(rows.hidden)

    def add(self, tile: Tensor, weight: Tensor, factor: Tensor | None = None) -> None:
        """total = factor * total + tile @ weight."""
        if factor is not None:
            self.total *= factor[:, None]
        if self._is_exact:
            self.total.addmm_(tile, weight)
        elif self._is_wide:
            torch.addmm(self.total, tile, weight, out_dtype=self.total.dtype, out=self.total)
        else:
            product = torch.mm(tile, weight, out=self._product)
            for some in _FEW.row_ranges(product.shape[0]):  # PyTorch widens all of a 16-bit addend first
                self.total[some] += product[some]


class HeadGradient:
    """dweight and dbias, empty where not needed, finished tile by tile or summed over several backward passes."""

    def __init__(self, rows: LinearRows, need_weight: bool, need_bias: bool, dtype: torch.dtype) -> None:
        vocab, device = rows.weight.shape[0], rows.weight.device
        self.need_weight, self.need_bias = need_weight, need_bias
        self.dweight = memory.empty(rows.weight.shape if need_weight else (0,), dtype, device)
        self.dbias = torch.empty(vocab if need_bias else 0, dtype=dtype, device=device)
        self.adds = False

    @classmethod
    def sums(cls, rows: LinearRows, need_weight: bool, need_bias: bool) -> HeadGradient:
        """In the compute dtype, so that no part is rounded before it is added."""
        gradient = cls(rows, need_weight, need_bias, compute_dtype(rows.weight.dtype))
        gradient.zero()
        gradient.adds = True
        return gradient

    def zero(self) -> None:
        self.dweight.zero_()
        self.dbias.zero_()

    def put(self, columns: slice, dlogits: Tensor, hidden: Tensor) -> None:
        if self.need_weight:
            self._put_product(dlogits.t(), hidden, self.dweight[columns])
        if self.need_bias:
            total = dlogits.sum(0, dtype=compute_dtype(dlogits.dtype))
            self.dbias[columns] = self.dbias[columns] + total if self.adds else total

    def _put_product(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        """Not rounded to the matrices' dtype where out's is wider: a sum, or the gradient of autocast's master."""
        if a.dtype != out.dtype and schedules.has_wide_gemms(a.device):
            if self.adds:
                torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
            else:
                torch.mm(a, b, out_dtype=out.dtype, out=out)
            return
        a, b = a.to(out.dtype), b.to(out.dtype)
        if self.adds:
            out.addmm_(a, b)
        else:
            torch.mm(a, b, out=out)


def empty_linear_stats(rows: LinearRows, wanted: Wanted) -> RowStats:
    return empty_row_stats(Rows(rows.hidden[None, :, :1], *rows[3:]), wanted)


def empty_kept(rows: LinearRows, keep: Keep, chunk_bytes: int, empty: Callable[..., Tensor] = torch.empty) -> Kept:
    """Sized by all rows, so that no shape depends on labels; pages that nobody writes take no memory."""
    dtype, device = rows.hidden.dtype, rows.hidden.device
    return Kept(
        direction=empty(rows.hidden.shape if keep.direction else (0,), dtype=compute_dtype(dtype), device=device),
        logits=empty((rows.problem(chunk_bytes).kept_logits() if keep.logits else 0,), dtype=dtype, device=device),
    )


def linear_forward(
    rows: LinearRows, wanted: Wanted, chunk_bytes: int, kernels: Any, keep: Keep, shard: VocabShard | None = None
) -> tuple[RowStats, Kept]:
    """Statistics, and what backward will need."""
    shard = shard or rows.whole()
    stats = RowStats(*(column.zero_() for column in empty_linear_stats(rows, wanted)))
    kept = empty_kept(rows, keep, chunk_bytes, memory.empty)
    kept.direction.zero_()
    used_rows, used = rows.only(rows.is_labelled())
    problem = used_rows.problem(chunk_bytes)
    tiles = KeptTiles(kept.logits, problem)
    blocks = problem.forward_blocks()
    buffer = used_rows.empty_tile(chunk_bytes)
    states = fresh_states(kernels, problem.rows, buffer)
    for block in blocks.row_ranges(problem.rows):
        part = used_rows.take(block)
        part_stats = empty_linear_stats(part, wanted)
        where = block if isinstance(used, slice) else used[block]
        in_place = kept.direction[block] if isinstance(used, slice) and keep.direction else None
        sweep = _ForwardSweep(part, part_stats, states[block], buffer, kernels, shard)
        others = ProductSum(part, in_place) if keep.direction else None
        for columns in blocks.column_ranges(problem.vocab):
            sweep.push(columns, tiles.tile(columns)[block] if columns.stop <= tiles.columns else None, others)
        if shard.group is None:
            stats.put(where, part_stats)
            if others is not None:
                _finish_direction(part, part_stats, others.total, shard)
        if others is not None and in_place is None:
            kept.direction[where] = others.total
    if shard.group is not None:
        stats.put(used, _finish_shard(used_rows, used, states, wanted, kept.direction, shard, kernels))
    return stats, kept


def _finish_shard(
    rows: LinearRows,
    used: Tensor | slice,
    states: Tensor,
    wanted: Wanted,
    direction: Tensor,
    shard: VocabShard,
    kernels: Any,
) -> RowStats:
    """Whole rows' statistics from a shard's states; the direction, of all rows or empty, is completed in its place."""
    own_max = shard.merge(states, state_scale(rows), kernels.SHIFT_UNIT)
    stats = empty_linear_stats(rows, wanted)
    no_logits = rows.hidden.new_empty(rows.targets.shape[0], 0)
    finish(rows.with_logits(no_logits), stats, states, shard.vocab, kernels)
    if direction.numel():
        others = direction[used]
        others *= _rescaling(rows, own_max, states[:, 0]).to(others.dtype)[:, None]
        _finish_direction(rows, stats, others, shard)
        direction[used] = others
        shard.sum(direction)
    return stats


class _ForwardSweep:
    """A block of rows, swept tile by tile."""

    def __init__(
        self, rows: LinearRows, stats: RowStats, states: Tensor, buffer: Tensor, kernels: Any, shard: VocabShard
    ) -> None:
        self.rows, self.stats, self.kernels, self.shard = rows, stats, kernels, shard
        self._states, self._buffer = states, buffer

    def push(self, columns: slice, out: Tensor | None, others: ProductSum | None) -> None:
        """A tile's logits, made in `out` if they are kept, into the statistics, and into `others` where asked for."""
        rows, tile = self.rows, self.shard.tile(columns)
        if out is None:
            out = _view(self._buffer, rows.targets.shape[0], columns)
        logits = rows.with_logits(rows.make_logits(columns, out))
        before = self._states[:, 0].clone()
        self.kernels.token_stats_forward(logits, self.stats, tile, self._states)
        if others is not None:
            maximum = self._states[:, 0]
            exponentials = _exponentials_in_place(logits, maximum, tile, self.kernels)
            factor = _rescaling(rows, before, maximum)
            others.add(exponentials, rows.weight_tile(columns), factor.to(others.total.dtype))


def _exponentials_in_place(logits: Rows, maximum: Tensor, tile: Tile, kernels: Any) -> Tensor:
    """`e^(z - max) dz/dx` in the logits' place, 0 in the target's column: lse's gradient times s."""
    values = logits.logits[0]
    dtype = compute_dtype(values.dtype)
    # of columns that are all -inf so far each exponential is 0, not e^(-inf + inf)
    maximum = torch.where(maximum == -torch.inf, 0, maximum).to(dtype)
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
    """What sums relative to another maximum of u are multiplied by."""
    return shift_between(state_scale(rows), before, after).exp()


def _finish_direction(rows: LinearRows, stats: RowStats, others: Tensor, shard: VocabShard) -> None:
    """dlogp/dhidden = (1 - p_y) z'_y weight[y] - sum_{v != y} p_v z'_v weight[v], of the sum with e^d for p."""
    for some in _FEW.row_ranges(rows.targets.shape[0]):
        _finish_direction_of_few(rows.take(some), stats.take(some), others[some], shard)


def _finish_direction_of_few(rows: LinearRows, stats: RowStats, others: Tensor, shard: VocabShard) -> None:
    others *= -torch.exp(-stats.log_sum_exp)[:, None]
    if rows.weight.shape[0] == 0:
        return
    columns = rows.label_columns(shard.start)
    target_weight = rows.weight[columns].to(others.dtype)
    slope = (rows.logit_scale / rows.temperature).expand(rows.targets.shape[0])
    if rows.softcap is not None:
        target_logit = (rows.hidden.to(others.dtype) * target_weight).sum(-1)
        if rows.bias is not None:
            target_logit += rows.bias[columns].to(others.dtype)
        e = torch.exp(-2 * (rows.logit_scale * target_logit / rows.softcap).abs())
        slope = slope * 4 * e / (1 + e) ** 2
    coefficient = -torch.expm1(stats.logp) * slope
    if shard.group is not None:
        coefficient = torch.where(columns == rows.targets - shard.start, coefficient, 0)
    others.addcmul_(coefficient[:, None], target_weight)


def linear_backward(
    rows: LinearRows,
    saved: SavedStats,
    kept_logits: Tensor,
    upstream: Upstream,
    need_hidden: bool,
    head: HeadGradient,
    chunk_bytes: int,
    kernels: Any,
    shard: VocabShard | None = None,
) -> Tensor:
    """dhidden, empty where not needed; the head's gradient goes into `head`. Logits not kept are made again.

    Of a shard dhidden is the ranks' sum, over all rows, whichever of them a rank leaves out of its GEMMs.
    """
    shard = shard or rows.whole()
    labelled = rows.is_labelled()
    nonzero = [gradient != 0 for gradient in upstream if gradient is not None]
    part, index = rows.only(labelled & torch.stack(nonzero).any(0))
    part_saved = SavedStats(*(column[index] if column.numel() else column for column in saved))
    part_upstream = Upstream(*(None if gradient is None else gradient[index] for gradient in upstream))

    count = part.targets.shape[0]
    dtype = rows.hidden.dtype if shard.group is None else compute_dtype(rows.hidden.dtype)
    dhidden = rows.hidden.new_zeros(rows.hidden.shape if need_hidden else (0,), dtype=dtype)
    if count == 0:
        if not head.adds:
            head.zero()
        return shard.sum(dhidden).to(rows.hidden.dtype)
    problem, forward_problem = part.problem(chunk_bytes), rows.problem(chunk_bytes)
    among_kept: Tensor | slice = slice(None)
    if rows.knows_counts():
        rank = labelled.cumsum(0) - 1  # of a row among those that forward swept
        forward_problem = forward_problem._replace(rows=int(rank[-1]) + 1)
        if count < forward_problem.rows:
            among_kept = rank[index]
    kept = KeptTiles(kept_logits, forward_problem)
    buffer = part.empty_tile(chunk_bytes)
    total = ProductSum(part) if need_hidden else None
    dtarget = torch.zeros_like(part_saved.row_max) if need_hidden else None
    for columns, held in schedules.backward_tiles(forward_problem, problem, kept.columns):
        dlogits = _view(buffer, count, columns)
        if held is None:
            logits = part.make_logits(columns, dlogits)
        else:
            inside = slice(columns.start - held.start, columns.stop - held.start)
            logits = kept.tile(held)[:, inside]
            if isinstance(among_kept, Tensor):
                logits = torch.index_select(logits, 0, among_kept, out=dlogits)
        tile = shard.tile(columns)
        kernels.token_stats_backward(
            part.with_logits(logits), part_saved, part_upstream, dlogits, tile, dtarget=dtarget
        )
        if total is not None:
            total.add(dlogits, rows.weight_tile(columns))
        if head.need_weight or head.need_bias:
            if dtarget is not None:
                _put_target_back(dlogits, dtarget, part.targets - tile.start)
            head.put(columns, dlogits, part.hidden)
    if total is not None and dtarget is not None:
        labels = part.label_columns(shard.start)
        for some in _FEW.row_ranges(count):
            if rows.weight.shape[0]:
                target_weight = rows.weight[labels[some]].to(total.total.dtype)
                total.total[some].addcmul_(dtarget[some, None], target_weight)
            where = some if isinstance(index, slice) else index[some]
            dhidden[where] = total.total[some].to(dhidden.dtype)
    return shard.sum(dhidden).to(rows.hidden.dtype)


def _put_target_back(dlogits: Tensor, dtarget: Tensor, column: Tensor) -> None:
    """dtarget into each row's target column, where this tile has it; no host waits for how many do."""
    rows, width = dlogits.shape
    # indexed, not scattered: PyTorch's scatter_ of 16-bit matrices copies them on the CPU
    target = (torch.arange(rows, device=column.device), column.clamp(0, width - 1))
    is_inside = (column >= 0) & (column < width)
    dlogits[target] = torch.where(is_inside, dtarget.to(dlogits.dtype), dlogits[target])
