"""Metrics that stay exact when micro-batches and ranks are put together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernels import checks
from rlkernels.agreement import agree_on


class Metrics(Mapping[str, Tensor]):
    """A mapping from name to a 0-d tensor that keeps sums, counts and extremes instead of means.

    A mean over nothing is 0, and so are a variance and an extreme over nothing. Reading a value does not
    synchronise with the host; `float(metrics[name])` does.

        mean = sum / max(1, count),   variance = spread / n - ((sum - n) / n)^2,   n = max(1, count)

    Args:
        means: name -> (sum, count), 0-d float tensors, as all that follow.
        minima, maxima: name -> the extreme; over nothing +inf in `minima`, -inf in `maxima`.
        variances: name -> (sum of x, spread = sum of (x - 1)^2, count) of numbers near 1, such as ratios: squares about
            0 would cancel.

    Example:
        >>> import torch, rlkernels
        >>> a = rlkernels.Metrics({"kl": (torch.tensor(3.0), torch.tensor(3.0))})
        >>> b = rlkernels.Metrics({"kl": (torch.tensor(4.0), torch.tensor(1.0))})
        >>> rlkernels.Metrics.merge([a, b])["kl"].item()
        1.75
    """

    def __init__(
        self,
        means: Mapping[str, tuple[Tensor, Tensor]],
        minima: Mapping[str, Tensor] | None = None,
        maxima: Mapping[str, Tensor] | None = None,
        variances: Mapping[str, tuple[Tensor, Tensor, Tensor]] | None = None,
    ) -> None:
        self._means = dict(means)
        self._variances = dict(variances or {})
        self._minima = dict(minima or {})
        self._maxima = dict(maxima or {})

    def __getitem__(self, name: str) -> Tensor:
        if name in self._means:
            total, count = self._means[name]
            return total / count.clamp(min=1)
        if name in self._variances:
            total, spread, count = self._variances[name]
            number = count.clamp(min=1)
            return (spread / number - ((total - count) / number) ** 2).clamp(min=0)
        extreme = self._minima[name] if name in self._minima else self._maxima[name]
        return torch.where(extreme.isinf(), 0.0, extreme)

    def __iter__(self) -> Iterator[str]:
        yield from self._means
        yield from self._variances
        yield from self._minima
        yield from self._maxima

    def __len__(self) -> int:
        return len(self._means) + len(self._variances) + len(self._minima) + len(self._maxima)

    def __repr__(self) -> str:
        return f"Metrics({', '.join(f'{name}={float(value):.6g}' for name, value in self.items())})"

    @staticmethod
    def merge(parts: Sequence[Metrics]) -> Metrics:
        """The metrics of all parts together, exactly as of one batch.

        Args:
            parts: those of micro-batches, at least one.

        Returns:
            A new `Metrics`.

        Raises:
            TypeError, ValueError: `parts` holds something else, nothing, or other names in one than in another.
        """
        parts = list(parts)
        if not parts:
            raise ValueError("parts: expected at least one Metrics, got none")
        for part in parts:
            if not isinstance(part, Metrics):
                raise TypeError(f"parts: expected Metrics, got {checks.describe(part)}")
        names = list(parts[0])
        for part in parts:
            if list(part) != names:
                raise ValueError(f"parts: expected the same metrics {names} in each, got {list(part)}")
        first = parts[0]

        def totals(sums: Iterable[Sequence[Tensor]]) -> Any:
            return tuple(torch.stack(column).sum() for column in zip(*sums, strict=True))

        return Metrics(
            {name: totals(p._means[name] for p in parts) for name in first._means},
            {name: torch.stack([p._minima[name] for p in parts]).amin() for name in first._minima},
            {name: torch.stack([p._maxima[name] for p in parts]).amax() for name in first._maxima},
            {name: totals(p._variances[name] for p in parts) for name in first._variances},
        )

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> Metrics:
        """The metrics of all ranks of `group` together; every rank gets the same.

        Two collectives. The ranks first tell each other which metrics they have: on the CPU and under
        `set_checks(True)` every time, else once for each set of names.

        Args:
            group: a process group that this rank is in; None: all ranks.

        Returns:
            A new `Metrics`.

        Raises:
            TypeError: `group` is none that this rank is in.
            ValueError: on every rank, if one has other metrics, or the same in another order.
        """
        kept = [*self._means.values(), *self._variances.values()]
        sums = torch.stack([value for values in kept for value in values])
        kinds = (
            ("means", self._means),
            ("variances", self._variances),
            ("minima", self._minima),
            ("maxima", self._maxima),
        )
        names = {kind: ", ".join(some) or "none" for kind, some in kinds}
        agree_on("group", group, sums.device, {**names, "dtype of metrics": sums.dtype})
        dist.all_reduce(sums, group=group)
        reduced = iter(sums)
        means = {name: (next(reduced), next(reduced)) for name in self._means}
        variances = {name: (next(reduced), next(reduced), next(reduced)) for name in self._variances}
        values = [*(-value for value in self._minima.values()), *self._maxima.values()]
        if not values:
            return Metrics(means, variances=variances)
        extremes = torch.stack(values)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
        count = len(self._minima)
        minima = {name: -extremes[i] for i, name in enumerate(self._minima)}
        maxima = {name: extremes[count + i] for i, name in enumerate(self._maxima)}
        return Metrics(means, minima, maxima, variances)
