"""Which rows share a prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernels import checks


class Groups:
    """`groups` as an int (consecutive groups of that size) or a `[B]` tensor of ids, without a host read.

    `index [B]` numbers each row's group from 0; there are at most B groups, and the numbers left over are empty.
    """

    def __init__(self, groups: int | Tensor, rows: int, device: torch.device) -> None:
        positions = torch.arange(rows, device=device)
        if isinstance(groups, Tensor):
            checks.require_dtype("groups", groups, checks.INTEGER_DTYPES)
            checks.require_shape("groups", groups, (rows,))
            if groups.device != device:
                raise ValueError(f"groups: expected on {device}, got {checks.describe(groups)}")
            ids, self.row_order = torch.sort(groups, stable=True)
            is_new = torch.zeros(rows, dtype=torch.int64, device=device)
            is_new[1:] = ids[1:] != ids[:-1]
            sorted_index = is_new.cumsum(0)
            self.index = torch.empty_like(sorted_index).scatter_(0, self.row_order, sorted_index)
            # `[B + 1]` borders into row_order; empty groups lie at its end
            self.starts = torch.searchsorted(sorted_index, torch.arange(rows + 1, device=device))
        else:
            if isinstance(groups, bool) or not isinstance(groups, int):
                raise TypeError(f"groups: expected an int or a [B] tensor, got {checks.describe(groups)}")
            if groups < 1 or rows % groups:
                raise ValueError(f"groups: expected a group size that divides {rows} rows, got {groups}")
            self.row_order = positions
            self.index = positions // groups
            self.starts = torch.arange(0, rows + 1, groups, device=device)
        self.rows = rows
        self.size = None if isinstance(groups, Tensor) else groups

    def sum(self, values: Tensor) -> Tensor:
        """`[B]` -> each row's group's sum, `[B]`."""
        return values.new_zeros(self.rows).index_add(0, self.index, values)[self.index]

    def count(self, chosen: Tensor) -> Tensor:
        """`[B]` bool -> how many of each row's group, `[B]` int64."""
        return self.sum(chosen.to(torch.int64))

    def min(self, values: Tensor) -> Tensor:
        """`[B]` -> each row's group's minimum, `[B]`."""
        lowest = values.new_full((self.rows,), torch.inf)
        return lowest.scatter_reduce(0, self.index, values, "amin")[self.index]

    def size_bound(self) -> int:
        """No group has more rows than this; B where the host does not know the groups."""
        if self.size is not None:
            return self.size
        if checks.values_are_checked(self.index.device) and self.rows:
            return int(self.starts.diff().max())
        return self.rows

    def centre(self, values: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """`[B]` values less the mean of their group's valid ones, 0 for the others; and how many are valid, `[B]`."""
        count = self.sum(valid.to(values.dtype))
        # relative to the group's smallest value, equal values are exactly 0 and so is all that follows
        lowest = self.min(torch.where(valid, values, torch.inf))
        above = torch.where(valid, values - lowest, 0)
        return torch.where(valid, above - self.sum(above) / count.clamp(min=1), 0), count

    def leave_one_out(self, values: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """As `centre`, less the mean of the group's other valid values; 0 where there is no other."""
        centred, count = self.centre(values, valid)
        return centred * (count / (count - 1).clamp(min=1)), count

    def share_with_any(self, flags: Tensor) -> Tensor:
        """Share of the groups in which a row's flag, `[B]` bool, is set; 0-d."""
        ones = torch.ones_like(self.index)
        size = torch.zeros_like(self.index).index_add(0, self.index, ones)
        flagged = torch.zeros_like(self.index).index_add(0, self.index, flags.to(ones.dtype))
        return (flagged > 0).sum() / (size > 0).sum().clamp(min=1)

    def member(self, position: int) -> tuple[Tensor, Tensor]:
        """The row at that position in each row's group, `[B]`, and whether the group has so many, `[B]` bool."""
        place = self.starts[self.index] + position
        return self.row_order[place.clamp(max=self.rows - 1)], place < self.starts[self.index + 1]
