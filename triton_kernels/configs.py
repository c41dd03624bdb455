"""How the kernels are launched: sizes by dtype and vocabulary, and the device.

A launch depends on nothing else, so a row's bits do not depend on the batch around it.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from rlkernels.schedules import SEGMENT


class Launch(NamedTuple):
    block: int  # elements handled at once by one program, a power of two
    num_warps: int  # at most 16: a warp of AMD has 64 threads, a block at most 1024


SMALLEST_SEGMENT = 128  # a floor under small vocabularies, which would compile one kernel each

# 16 bytes a load or more, and few enough that a thread keeps its share of a segment in registers
ELEMENTS_PER_THREAD = {torch.float64: 8, torch.float32: 16, torch.bfloat16: 16, torch.float16: 16}

PREFIX_TOKENS = Launch(block=1024, num_warps=4)
SCALE = Launch(block=4096, num_warps=8)
OBJECTIVE_TOKENS = Launch(block=512, num_warps=8)  # some fifteen float64 numbers a token: few of them a thread


def row_sweep(dtype: torch.dtype, vocab: int) -> Launch:
    """Launch of a kernel in which one program sweeps one row of logits."""
    block = max(SMALLEST_SEGMENT, min(SEGMENT, triton.next_power_of_2(vocab)))
    return Launch(block, max(1, block // (32 * ELEMENTS_PER_THREAD[dtype])))


def device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's GPU the current one, where Triton launches."""
    if tensor.device.type == "cpu":  # the interpreter
        return contextlib.nullcontext()
    return torch.get_device_module(tensor.device).device(tensor.device)
