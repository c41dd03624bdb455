"""A vocabulary's shards, one a rank: row states of every shard, merged into the whole row's on every rank.

A shard is a tile of the vocabulary. Where a tile's state goes on to the next tile, a shard's is merged with the other
ranks', moved to the common maximum as `merge` of csrc/row_math.h does it. The kernels do all else: what they are given
last is the merged state and a tile without columns behind the last one, which makes them finish.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernels.ops.rows import Rows, RowStats, Tile

# columns of the kernels' states: m, s, t, q, sum of u, the target's u, largest u before the target
_MAXIMA, _SUMS = (0, 6), slice(1, 6)


class VocabShard(NamedTuple):
    """Which columns of a vocabulary this rank has: as many as its logits or its weight, from `start` on."""

    start: int
    vocab: int
    group: str | None  # the process group's name: operations take no objects; None: all columns are here

    @classmethod
    def make(cls, start: int, vocab: int | None, group: str | None, width: int) -> VocabShard:
        """Of an operation's arguments, where `vocab` is None for a whole one."""
        return cls(start, width if vocab is None else vocab, group)

    def tile(self, columns: slice) -> Tile:
        return Tile(self.start + columns.start, self.vocab)

    def sum(self, values: Tensor) -> Tensor:
        """Over the ranks, in place."""
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def _all_reduce(self, values: Tensor, operation: Any) -> Tensor:
        if self.group is not None and values.numel():
            # not imported above: torch.distributed may not be built in
            group = dist.distributed_c10d._resolve_process_group(self.group)  # type: ignore[arg-type]
            dist.all_reduce(values, op=operation, group=group)
        return values

    def merge(self, states: Tensor, k: Tensor, shift_unit: float) -> Tensor:
        """The shards' states `[n, 7]` become the whole rows', in place. Returns the shard's own maxima `[n]`."""
        own = states[:, 0].clone()
        maxima = self._all_reduce(states[:, _MAXIMA].contiguous(), dist.ReduceOp.MAX)
        states[:, _MAXIMA] = maxima
        shift = shift_between(k, own, states[:, 0]).to(states.dtype)
        factor = shift.exp()
        _, s, t, q, _, _, _ = states.unbind(1)
        t.copy_(factor * (t + s * shift / shift_unit))
        s *= factor
        q *= factor * factor
        states[:, _SUMS] = self.sum(states[:, _SUMS].contiguous())
        return own


def fresh_states(kernels: Any, count: int, like: Tensor) -> Tensor:
    """States of no columns, whichever the first tile is."""
    states: Tensor = kernels.empty_states(count, like).zero_()
    states[:, _MAXIMA] = -torch.inf
    return states


def shift_between(k: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Logarithm of what sums relative to a maximum `before` of u are multiplied by, to be relative to `after`.

    Not below what makes every sum 0, since 0 * -inf would be NaN.
    """
    floor = math.log(torch.finfo(torch.float64).tiny) - 100
    return torch.where(before == after, 0.0, (k.double() * (before - after)).clamp(min=floor))


def state_scale(rows: Any) -> Tensor:
    """k of `Rows` or `LinearRows`: what u is multiplied by to give z."""
    scale: Tensor = (rows.logit_scale if rows.softcap is None else rows.softcap) / rows.temperature
    return scale


def finish(rows: Rows, stats: RowStats, states: Tensor, vocab: int, kernels: Any) -> None:
    """Statistics of whole rows from their states, by a tile of no columns."""
    kernels.token_stats_forward(rows._replace(logits=rows.logits[..., :0]), stats, Tile(vocab, vocab), states)


def sharded_stats(rows: Rows, stats: RowStats, shard: VocabShard, kernels: Any) -> None:
    """`token_stats_forward` of rows whose logits are a shard's."""
    width = rows.logits.shape[-1]
    states = fresh_states(kernels, rows.targets.shape[0], rows.logits)
    if width:
        kernels.token_stats_forward(rows, stats, shard.tile(slice(0, width)), states)
    shard.merge(states, state_scale(rows), kernels.SHIFT_UNIT)
    finish(rows, stats, states, shard.vocab, kernels)
