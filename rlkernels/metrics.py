"""Metrics that stay exact when micro-batches and ranks are put together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernels import checks


class Metrics(Mapping[str, Tensor]):
    """A mapping from name to a 0-d tensor that keeps sums, counts and extremes instead of means.

    A mean over nothing is 0, and so is an extreme over nothing. Reading a value does not synchronise with the
    host; `float(metrics[name])` does.

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
    ) -> None:
        """`means` maps a name to (sum, count); an extreme over nothing is +inf in `minima`, -inf in `maxima`."""
        self._means = dict(means)
        self._minima = dict(minima or {})
        self._maxima = dict(maxima or {})

    def __getitem__(self, name: str) -> Tensor:
        if name in self._means:
            total, count = self._means[name]
            return total / count.clamp(min=1)
        extreme = self._minima[name] if name in self._minima else self._maxima[name]
        return torch.where(extreme.isinf(), 0.0, extreme)

    def __iter__(self) -> Iterator[str]:
        yield from self._means
        yield from self._minima
        yield from self._maxima

    def __len__(self) -> int:
        return len(self._means) + len(self._minima) + len(self._maxima)

    def __repr__(self) -> str:
        return f"Metrics({', '.join(f'{name}={float(value):.6g}' for name, value in self.items())})"

    @staticmethod
    def merge(parts: Sequence[Metrics]) -> Metrics:
        """The metrics of all parts together, exactly as of one batch.

        Raises:
            ValueError: no parts, or parts with different names.
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

        def total(name: str, column: int) -> Tensor:
            return torch.stack([part._means[name][column] for part in parts]).sum()

        return Metrics(
            {name: (total(name, 0), total(name, 1)) for name in first._means},
            {name: torch.stack([p._minima[name] for p in parts]).amin() for name in first._minima},
            {name: torch.stack([p._maxima[name] for p in parts]).amax() for name in first._maxima},
        )

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> Metrics:
        """The metrics of all ranks of `group` together; every rank gets the same. Two collectives."""
        sums = torch.stack([value for pair in self._means.values() for value in pair])
        dist.all_reduce(sums, group=group)
        means = {name: (sums[2 * i], sums[2 * i + 1]) for i, name in enumerate(self._means)}
        values = [*(-value for value in self._minima.values()), *self._maxima.values()]
        if not values:
            return Metrics(means)
        extremes = torch.stack(values)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
        count = len(self._minima)
        minima = {name: -extremes[i] for i, name in enumerate(self._minima)}
        maxima = {name: extremes[count + i] for i, name in enumerate(self._maxima)}
        return Metrics(means, minima, maxima)
