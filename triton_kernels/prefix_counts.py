"""Prefix-set counts, defined in csrc/cpu/prefix_counts.cpp.

With LCP(i, j) the length of the longest common prefix of rows i and j,

    counts[i, t] = 1 + #{j != i : LCP(i, j) > t}

is a histogram of row i's LCPs, summed from the right. Its atomics are on integers: their order does not matter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernels.triton_kernels import configs


@triton.jit
def length_of(lengths, row, rows, width):
    """At most the width; 0 of a row that is not there, which is then never an address."""
    is_there = (row >= 0) & (row < rows)
    return tl.minimum(tl.load(lengths + row, mask=is_there, other=0), width)


@triton.jit(do_not_specialize=["rows", "width"])
def common_prefix_kernel(
    token_ids, lengths, row_order, group_starts, group_of_position, histogram, rows, width, BLOCK: tl.constexpr
):
    """Counts LCP(i, j), unless 0, into rows i and j of the histogram, for every j after i in i's group."""
    position = tl.program_id(0).to(tl.int64)
    row = tl.load(row_order + position)
    length = length_of(lengths, row, rows, width)
    group_end = tl.minimum(tl.load(group_starts + tl.load(group_of_position + position) + 1), rows)
    for other_position in range(position + 1, group_end):
        other = tl.load(row_order + other_position)
        end = tl.minimum(length, length_of(lengths, other, rows, width))
        shared = tl.zeros_like(end)
        begin = tl.zeros_like(end)
        while begin < end:
            columns = begin + tl.arange(0, BLOCK)
            inside = columns < end
            mine = tl.load(token_ids + row * width + columns, mask=inside, other=0)
            theirs = tl.load(token_ids + other * width + columns, mask=inside, other=0)
            shared = tl.min(tl.where(inside & (mine == theirs), begin + BLOCK, columns), axis=0)
            begin = tl.where(shared == begin + BLOCK, shared, end)
        tl.atomic_add(histogram + row * width + shared - 1, 1, mask=shared > 0, sem="relaxed")
        tl.atomic_add(histogram + other * width + shared - 1, 1, mask=shared > 0, sem="relaxed")


@triton.jit(do_not_specialize=["width"])
def sum_from_right_kernel(counts, width, BLOCK: tl.constexpr):
    """counts[i, t] = 1 + sum of counts[i, t:], in place."""
    row_counts = counts + tl.program_id(0).to(tl.int64) * width
    right_sum = tl.full((), 1, tl.int32)
    for tile in range(tl.cdiv(width, BLOCK)):
        columns = width - 1 - tile * BLOCK - tl.arange(0, BLOCK)
        values = tl.load(row_counts + columns, mask=columns >= 0, other=0)
        tl.store(row_counts + columns, right_sum + tl.cumsum(values, axis=0), mask=columns >= 0)
        right_sum += tl.sum(values, axis=0)


def prefix_counts(token_ids: Tensor, lengths: Tensor, row_order: Tensor, group_starts: Tensor, counts: Tensor) -> None:
    rows, width = token_ids.shape
    if counts.numel() == 0:
        return
    block, num_warps = configs.PREFIX_TOKENS
    positions = torch.arange(rows, device=token_ids.device)
    group_of_position = torch.searchsorted(group_starts, positions, right=True) - 1
    group_of_position.clamp_(0, group_starts.shape[0] - 2)
    counts.zero_()  # the histogram, until it is summed
    with configs.device_of(token_ids):
        common_prefix_kernel[(rows,)](
            token_ids,
            lengths,
            row_order,
            group_starts,
            group_of_position,
            counts,
            rows,
            width,
            BLOCK=block,
            num_warps=num_warps,
        )
        sum_from_right_kernel[(rows,)](counts, width, BLOCK=block, num_warps=num_warps)
