"""Statistics are computed in float64 where the device has it; results are float32, or float64 for float64 input."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(values: Tensor) -> Tensor:
    return values.to(torch.float32 if values.device.type == "mps" else torch.float64)


def result_dtype(*inputs: Tensor) -> torch.dtype:
    return torch.float64 if any(values.dtype == torch.float64 for values in inputs) else torch.float32
