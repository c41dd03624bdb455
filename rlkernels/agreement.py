"""The ranks' agreement on a call's arguments, before the first collective whose shape depends on them.

Every check that an argument can fail runs in here, so that one rank's mistake raises on all ranks of its groups. The
others cannot be told of a call that a rank does not make, or makes without the group or with something that is none:
they wait for the group's timeout.

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

from rlkernels import backends, checks
from rlkernels.ops.linear_rows import LinearRows
from rlkernels.ops.rows import Rows, check_values
from rlkernels.ops.vocab_shards import VocabShard
from rlkernels.untraced import untraced

Arguments = TypeVar("Arguments", bound=tuple[Any, ...])


class Facts(NamedTuple):
    """What the ranks must know of each other's checked arguments."""

    device: torch.device
    alike: dict[str, Any]  # what has to be the same on every rank, by the name that an error gives it
    rows: Rows | LinearRows | None = None  # whose columns are spread over `tp_group`
    selected: Tensor | None = None  # the rows to compute, if not all

    def rows_in_use(self) -> Rows | LinearRows | None:
        """Of selected ones without their hidden states."""
        if self.selected is None or not isinstance(self.rows, LinearRows):
            return self.rows
        return self.rows._replace(hidden=self.rows.hidden[:, :0]).take(self.selected.to(torch.int64))


class _Report(NamedTuple):
    """What a rank tells the others."""

    error: str | None = None
    columns: int = 0
    vocab_start: int | None = None
    alike: tuple[tuple[str, Any], ...] = ()


# Where values are not checked, a GPU's host must not wait for the others in every call.
_told: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[_Report, list[_Report]]] = weakref.WeakKeyDictionary()
_MOST_TOLD = 4096


def agree(
    check: Callable[[int], Arguments],
    facts: Callable[..., Facts],
    groups: dict[str, dist.ProcessGroup | None],
    vocab_start: int | None = None,
) -> tuple[Arguments, VocabShard | None]:
    """A call's arguments as `check(fewest_columns)` returns them, and the shard that their columns are.

    `groups` by the names of their arguments. Without any, `facts(*arguments)` are not looked at; without `tp_group`
    there is no shard. The ranks tell each other in every call on the CPU and under `set_checks(True)`, else each thing
    once.
    """
    given = {name: group for name, group in groups.items() if group is not None}
    if not given:
        _check_vocab_start(vocab_start, given)
        return check(1), None
    return _agree(check, facts, given, vocab_start)


@untraced
def agree_on(name: str, group: dist.ProcessGroup | None, device: torch.device, alike: dict[str, Any]) -> None:
    """Raises on every rank of `group`, or of all ranks, if one says something else of what has to be `alike`."""
    told: Any = dist.group.WORLD if group is None else group
    check_group(name, told)
    _tell(name, told, _Report(alike=tuple(alike.items())), checks.values_are_checked(device))


@untraced
def _agree(
    check: Callable[[int], Arguments],
    facts: Callable[..., Facts],
    groups: dict[str, dist.ProcessGroup],
    vocab_start: int | None,
) -> tuple[Arguments, VocabShard | None]:
    for name, group in groups.items():
        check_group(name, group)
    failure: Exception | None = None
    shard = rows = None
    reports = {}
    every_time = True
    try:
        _check_vocab_start(vocab_start, groups)
        arguments = check(0 if "tp_group" in groups else 1)
        known = facts(*arguments)
        rows = known.rows_in_use()
        alike = {"groups": " and ".join(groups), "backend": backends.choose(known.device), **known.alike}
        reports["cp_group"] = _Report(alike=tuple(alike.items()))
        if rows is not None and "tp_group" in groups:
            reports["tp_group"] = _report_of_shard(known, rows, alike, vocab_start)
        elif rows is not None:
            check_values(rows, rows.columns)
        every_time = checks.values_are_checked(known.device)
    except Exception as error:
        failure = error
    # One after the other: what fails in a rank's first group is told in its second.
    for name, group in groups.items():
        try:
            if failure is not None:
                _exchange(name, group, _Report(f"{type(failure).__name__}: {failure}"))
            told = _tell(name, group, reports[name], every_time)
            if name == "tp_group":
                shard = _shard_of(told, group)
                check_values(rows, shard.vocab)  # the targets are the same on all of its ranks
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return arguments, shard


def check_group(name: str, group: Any) -> None:
    if not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise TypeError(f"{name}: expected a process group that this rank is in, got {checks.describe(group)}")


def _check_vocab_start(vocab_start: int | None, groups: dict[str, dist.ProcessGroup]) -> None:
    if vocab_start is None:
        return
    if "tp_group" not in groups:
        raise ValueError(f"vocab_start: expected None without tp_group, got {vocab_start!r}")
    if isinstance(vocab_start, bool) or not isinstance(vocab_start, int):
        raise TypeError(f"vocab_start: expected an integer or None, got {checks.describe(vocab_start)}")


def _report_of_shard(known: Facts, rows: Rows | LinearRows, alike: dict[str, Any], vocab_start: int | None) -> _Report:
    checks.check_scaling(rows.targets != rows.ignore_index, rows.temperature, rows.softcap, rows.logit_scale)
    assert known.rows is not None
    selected = None if known.selected is None else known.selected.numel()
    alike = {**alike, "rows": known.rows.targets.shape[0], "selected rows": selected, **known.rows.sizes()}
    alike["ignore_index"] = rows.ignore_index
    if checks.values_are_checked(known.device):
        alike["checksum of targets"] = _checksum(rows.targets)
        if known.selected is not None:
            alike["checksum of selected rows"] = _checksum(known.selected.to(torch.int64))
        temperature = rows.temperature
        if temperature.numel() > 1:
            temperature = temperature[rows.targets != rows.ignore_index]
        alike["temperature"] = _told_of(temperature)
        alike["softcap"], alike["logit_scale"] = _told_of(rows.softcap), _told_of(rows.logit_scale)
    return _Report(None, rows.columns, vocab_start, tuple(alike.items()))


def _checksum(values: Tensor) -> int:
    return zlib.crc32(values.detach().contiguous().cpu().numpy().tobytes())


def _told_of(numbers: Tensor | None) -> str | None:
    if numbers is None:
        return None
    if numbers.numel() == 1:
        return str(numbers.item())
    return f"{numbers.numel()} numbers of checksum {_checksum(numbers)}"


def _tell(name: str, group: dist.ProcessGroup, report: _Report, every_time: bool) -> list[_Report]:
    if every_time:
        return _exchange(name, group, report)
    told = _told.setdefault(group, {})
    if report not in told:
        if len(told) == _MOST_TOLD:
            told.clear()  # on every rank in the same call: all have told the same number of things
        told[report] = _exchange(name, group, report)
    return told[report]


def _exchange(name: str, group: dist.ProcessGroup, report: _Report) -> list[_Report]:
    """Every rank's report. All ranks raise if one has failed or if what they must have in common differs."""
    reports: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(reports, report, group=group)
    except RuntimeError as error:
        raise RuntimeError(f"{name}: expected this call on every rank of the group, got no answer: {error}") from error
    for rank, other in enumerate(reports):
        if other.error is not None:
            raise ValueError(f"{name}: expected right arguments on every rank, got on rank {rank}: {other.error}")
    first = dict(reports[0].alike)
    for rank, other in enumerate(reports):
        values = dict(other.alike)
        for what in first | values:
            if first.get(what) != values.get(what):
                raise ValueError(
                    f"{name}: expected the same {what} on every rank, "
                    f"got {first.get(what)} on rank 0, {values.get(what)} on rank {rank}"
                )
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
