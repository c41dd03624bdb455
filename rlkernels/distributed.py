"""Losses over many processes, on torch.distributed: the ranks' agreement on sizes, and sums with gradients over ranks.

Nothing here is traced by `torch.compile`: it breaks the graph, and under `fullgraph=True` it raises.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernels import checks
from rlkernels.ops.linear_rows import LinearRows
from rlkernels.ops.rows import Rows
from rlkernels.ops.vocab_shards import VocabShard

AnyRows = TypeVar("AnyRows", Rows, LinearRows)


class _Report(NamedTuple):
    """What a rank tells the others before the first collective whose shape depends on it."""

    error: str | None = None
    columns: int = 0
    vocab_start: int | None = None
    common: tuple[tuple[str, Any], ...] = ()  # what has to be the same on every rank


# Where values are not checked, a GPU's host must not wait for the others in every call.
_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[_Report, Any]] = weakref.WeakKeyDictionary()
_MOST_AGREED = 4096


def _check_group(name: str, group: Any) -> None:
    if not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise TypeError(f"{name}: expected a process group that this rank is in, got {checks.describe(group)}")


def with_shard(
    make: Callable[..., AnyRows],
    tp_group: dist.ProcessGroup | None,
    vocab_start: int | None,
    selected: Tensor | None = None,
) -> tuple[AnyRows, VocabShard | None]:
    """Rows as `make(fewest_columns=...)` checks them, and which shard their columns are; None without a group.

    `selected` are the rows to compute, if not all.
    """
    if tp_group is not None:
        return _agree_on_shards(make, tp_group, vocab_start, selected)
    if vocab_start is not None:
        raise ValueError(f"vocab_start: expected None without tp_group, got {vocab_start!r}")
    return make(fewest_columns=1), None


@torch.compiler.disable
def _agree_on_shards(
    make: Callable[..., AnyRows], tp_group: dist.ProcessGroup, vocab_start: int | None, selected: Tensor | None
) -> tuple[AnyRows, VocabShard]:
    """Bad arguments of one rank raise on all.

    The ranks tell each other their sizes in every call on the CPU and under `set_checks(True)`, else once for each.
    """
    _check_group("tp_group", tp_group)
    failure, rows, report = None, None, _Report()
    try:
        _check_vocab_start(vocab_start)
        rows = make(fewest_columns=0)
        used = rows.targets != rows.ignore_index
        checks.check_scaling(used, rows.temperature, rows.softcap, rows.logit_scale)
        common = {"rows": rows.targets.shape[0], **rows.sizes()}
        if selected is not None:
            common["selected rows"] = selected.numel()
        report = _Report(None, rows.columns, vocab_start, tuple(common.items()))
    except (TypeError, ValueError) as error:
        failure, report = error, _Report(f"{type(error).__name__}: {error}")
    if rows is None or checks.values_are_checked(rows.targets.device):
        labels = () if rows is None else (("checksum of targets", zlib.crc32(rows.targets.cpu().numpy().tobytes())),)
        shard = _shard_of(
            _exchange("tp_group", tp_group, report._replace(common=report.common + labels), failure), tp_group
        )
    else:
        known = _agreed.setdefault(tp_group, {})
        if report not in known:
            if len(known) == _MOST_AGREED:
                known.clear()  # on every rank in the same call: all have met the same numbers of rows
            known[report] = _shard_of(_exchange("tp_group", tp_group, report, failure), tp_group)
        shard = known[report]
    assert rows is not None  # else its error was raised
    return rows, shard


def _check_vocab_start(vocab_start: int | None) -> None:
    if vocab_start is not None and (isinstance(vocab_start, bool) or not isinstance(vocab_start, int)):
        raise TypeError(f"vocab_start: expected an integer or None, got {checks.describe(vocab_start)}")


@torch.compiler.disable
def agree_on_sequences(cp_group: dist.ProcessGroup, sequences: int, logp: Tensor) -> None:
    """Raises on all ranks where one has another number of sequences, or no gradient while another has.

    As often as with shards of a vocabulary.
    """
    _check_group("cp_group", cp_group)
    wants_gradient = torch.is_grad_enabled() and logp.requires_grad
    report = _Report(common=(("sequences", sequences), ("requires_grad of log-probabilities", wants_gradient)))
    known = _agreed.setdefault(cp_group, {})
    if checks.values_are_checked(logp.device) or report not in known:
        _exchange("cp_group", cp_group, report)
        known[report] = None


def _exchange(name: str, group: dist.ProcessGroup, report: _Report, failure: Exception | None = None) -> list[_Report]:
    """Every rank's report. All ranks raise if one has failed or if what they must have in common differs."""
    reports: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reports, report, group=group)
    if failure is not None:
        raise failure
    for rank, other in enumerate(reports):
        if other.error is not None:
            raise ValueError(f"{name}: expected right arguments on every rank, got on rank {rank}: {other.error}")
    for rank, other in enumerate(reports):
        for (what, first), (_, value) in zip(reports[0].common, other.common, strict=False):
            if first != value:
                raise ValueError(
                    f"{name}: expected the same {what} on every rank, got {first} on rank 0, {value} on rank {rank}"
                )
        if len(other.common) != len(reports[0].common):
            raise ValueError(f"{name}: expected the same arguments on every rank, got others on rank {rank}")
    return reports


def _shard_of(reports: list[_Report], group: dist.ProcessGroup) -> VocabShard:
    """This rank's, if all ranks' make up a vocabulary."""
    starts = _first_columns(reports)
    vocab = sum(other.columns for other in reports)
    return VocabShard(starts[dist.get_rank(group)], vocab, group.group_name)


def _first_columns(reports: list[_Report]) -> list[int]:
    """Every rank's vocab_start: in the order of ranks where none is given."""
    end = 0
    in_order = []
    for report in reports:
        in_order.append(end)
        end += report.columns
    if end == 0:
        raise ValueError("tp_group: expected at least one column of the vocabulary on some rank, got none on any")
    given = [report.vocab_start for report in reports]
    if all(start is None for start in given):
        return in_order
    described = ", ".join(
        f"{report.columns} from {report.vocab_start} on at rank {rank}" for rank, report in enumerate(reports)
    )
    starts = [start for start in given if start is not None]
    if len(starts) < len(reports):
        raise ValueError(f"vocab_start: expected on every rank or on none, got columns {described}")
    end = 0
    for start, columns in sorted((report.vocab_start or 0, report.columns) for report in reports):
        if start != end:
            raise ValueError(f"vocab_start: expected shards that adjoin, the first at 0, got columns {described}")
        end += columns
    return starts


class GatheredColumns(torch.autograd.Function):
    """`[N, columns of a shard]` -> `[N, V]`: plain PyTorch's way to a whole row, for the reference backend."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, shard: VocabShard) -> Tensor:
        ctx.columns = slice(shard.start, shard.start + part.shape[-1])
        whole = part.new_zeros(*part.shape[:-1], shard.vocab)
        whole[..., ctx.columns] = part
        return shard.sum(whole)

    @staticmethod
    def backward(ctx: Any, dwhole: Tensor) -> tuple[Tensor, None]:
        return dwhole[..., ctx.columns], None


class SharedByShards(torch.autograd.Function):
    """The identity, of what every rank has alike; its gradient is the sum of the ranks'."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, shard: VocabShard) -> Tensor:
        ctx.shard = shard
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, dvalues: Tensor) -> tuple[Tensor, None]:
        return ctx.shard.sum(dvalues.clone(memory_format=torch.contiguous_format)), None


class _SumOverRanks(torch.autograd.Function):
    """The ranks' sum, on every rank. Each rank's loss depends on it, so its gradient is a sum too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(values, group)

    @staticmethod
    def backward(ctx: Any, dsum: Tensor) -> tuple[Tensor, None]:
        return _summed(dsum, ctx.group), None


class _TotalOfShares(torch.autograd.Function):
    """The ranks' sum in value; a rank's gradient is that of its own share."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _summed(share, group)

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor, None]:
        return dtotal, None


def _summed(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


@torch.compiler.disable
def sum_over_ranks(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Of what a sequence's parts add up to, before it enters every rank's loss."""
    total: Tensor = values if group is None else _SumOverRanks.apply(values, group)
    return total


@torch.compiler.disable
def total_of_shares(share: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """A loss of which every rank has made its share."""
    total: Tensor = share if group is None else _TotalOfShares.apply(share, group)
    return total
