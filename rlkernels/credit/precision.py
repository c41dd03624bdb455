"""Statistics of rewards and log-probabilities: in float64 inside, in float32 outside."""

from __future__ import annotations

import torch
from torch import Tensor


def widened(values: Tensor) -> Tensor:
    """Detached, in float64 where the device has it."""
    return values.detach().to(torch.float32 if values.device.type == "mps" else torch.float64)


def result_dtype(*values: Tensor) -> torch.dtype:
    return torch.float64 if any(value.dtype == torch.float64 for value in values) else torch.float32
