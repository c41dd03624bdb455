"""Where the large buffers come from: on the CPU from a pool of huge pages, elsewhere from PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rlkernels import backends

_SMALLEST = 4 << 20  # bytes; below, a page fault is no cost and a huge page a waste


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty`; the memory returns to the pool with the last tensor that uses it."""
    is_large = math.prod(shape) * dtype.itemsize >= _SMALLEST
    if device.type != "cpu" or not is_large or backends.why_unavailable("cpu") is not None:
        return torch.empty(shape, dtype=dtype, device=device)
    from rlkernels.backends import native

    return native.empty(shape, dtype)


def empty_cache() -> None:
    """Give the memory of freed CPU buffers back to the system.

    Gradients of logits and of heads, and logits kept for backward, are large enough that page faults would cost more
    than the kernels. Their memory, from 4 MiB on, stays with the process when the last tensor in it dies, at most 1 GiB
    of it, for the next ones of about that size. A storage in it cannot be resized.
    GPUs: `torch.cuda.empty_cache()`.

    Example:
        >>> import rlkernels
        >>> rlkernels.empty_cache()
    """
    if backends.why_unavailable("cpu") is None:
        from rlkernels.backends import native

        native.free_idle_buffers()
