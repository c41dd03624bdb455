"""Sequences inside a flat run of tokens: the one place that knows padded from packed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernels import checks
from rlkernels.distributed import sum_over_ranks


class Segments:
    """Token i belongs to one of `count` sequences; tokens are flat `[N]` whatever the caller's layout.

    Padded `[B, T]`: sequence b holds tokens b T .. (b + 1) T. Packed: `cu_seqlens [B + 1]` holds the borders.
    With `group` these are a rank's part of every sequence.
    """

    def __init__(
        self, shape: tuple[int, ...], cu_seqlens: Tensor | None, group: dist.ProcessGroup | None = None
    ) -> None:
        self.shape, self.cu_seqlens, self.group = shape, cu_seqlens, group
        if cu_seqlens is not None:
            self.tokens = shape[-1]
            self.count = cu_seqlens.shape[0] - 1
        else:
            self.count, self.width = shape if len(shape) == 2 else (1, shape[0])
            self.tokens = self.count * self.width

    def across(self, group: dist.ProcessGroup | None) -> Segments:
        """These, as a rank's part of sequences that are spread over a group."""
        return Segments(self.shape, self.cu_seqlens, group)

    def sum(self, values: Tensor) -> Tensor:
        """`[N]` -> `[B]` over whole sequences; a sequence's values never meet another's."""
        own = self.own_sum(values)
        return own if self.group is None else sum_over_ranks(own, self.group)

    def own_sum(self, values: Tensor) -> Tensor:
        """`sum` over the tokens that are here."""
        if self.cu_seqlens is None:
            return values.reshape(self.count, self.width).sum(-1)
        return values.new_zeros(self.count).index_add(0, self._sequence_of_token(), values)

    def expand(self, values: Tensor) -> Tensor:
        """`[B]` -> `[N]`."""
        if self.cu_seqlens is None:
            return values[:, None].expand(self.count, self.width).reshape(-1)
        return values[self._sequence_of_token()]

    def _sequence_of_token(self) -> Tensor:
        assert self.cu_seqlens is not None
        positions = torch.arange(self.tokens, device=self.cu_seqlens.device)
        sequence = torch.searchsorted(self.cu_seqlens[1:].to(torch.int64), positions, right=True)
        # borders that end early (checked on the CPU) must not become an address
        return sequence.clamp(max=self.count - 1)


def check_layout(shape: tuple[int, ...], cu_seqlens: Tensor | None, device: torch.device) -> None:
    """Token shapes are `[B, T]` or `[N]`; with `cu_seqlens` `[N]` or `[1, N]`."""
    if cu_seqlens is None:
        if len(shape) not in (1, 2):
            raise ValueError(f"targets: expected shape [B, T] or [N], got {list(shape)}")
        return
    checks.require_tensor("cu_seqlens", cu_seqlens)
    checks.require_dtype("cu_seqlens", cu_seqlens, (torch.int32, torch.int64))
    if len(shape) != 1 and not (len(shape) == 2 and shape[0] == 1):
        raise ValueError(f"targets: expected shape [N] or [1, N] with cu_seqlens, got {list(shape)}")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens: expected shape [B + 1] with B >= 1, got {checks.describe(cu_seqlens)}")
    if cu_seqlens.device != device:
        raise ValueError(f"cu_seqlens: expected on {device} like targets, got {checks.describe(cu_seqlens)}")
    if checks.values_are_checked(device):
        borders = cu_seqlens.tolist()
        if borders[0] != 0 or borders[-1] != shape[-1] or sorted(borders) != borders:
            raise ValueError(f"cu_seqlens: expected borders rising from 0 to {shape[-1]}, got {borders}")
