"""Discounted sums over what follows."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad


def suffix_scan(values: Tensor, decay: Tensor) -> Tensor:
    """`y_t = values_t + decay_t y_{t+1}` along the last axis, in log2 T passes; both `[..., T]`."""
    step = 1  # values_t is the sum of this many terms by now, decay_t the product of as many factors
    while step < values.shape[-1]:
        values = values + decay * pad(values[..., step:], (0, step))
        decay = decay * pad(decay[..., step:], (0, step))
        step *= 2
    return values
