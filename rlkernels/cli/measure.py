"""Time and peak memory, measured so that a noisy machine is unfair to nobody."""

from __future__ import annotations

import ctypes
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from rlkernels.cli import loss_twins


def seconds(call: Callable[[], object], device: str = "cpu") -> float:
    """Wall time of one call, its work on the GPU and the release of its result included."""
    _synchronize(device)
    start = time.perf_counter()
    call()
    _synchronize(device)
    return time.perf_counter() - start


def interleaved_medians(
    calls: Mapping[str, Callable[[], object]], rounds: int, device: str = "cpu"
) -> dict[str, float]:
    """Median seconds of each call. They take turns, so that a slow spell of the machine hits all of them."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(seconds(call, device))
    return {name: statistics.median(values) for name, values in times.items()}


def peak_bytes(loss: str, tokens: int, vocab: int, dtype: torch.dtype, device: str) -> int | None:
    """Most memory that forward and backward of a loss of `loss_twins` hold beyond the logits.

    On the CPU in a process of its own, since a process has one peak for all that it does; None on systems other
    than Linux, which cannot reset it.
    """
    arguments = (loss, tokens, vocab, dtype, device)
    if torch.device(device).type == "cuda":
        return _peak_bytes(*arguments)
    if not _CLEAR_REFS.exists():
        return None
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as child:
        return child.submit(_peak_bytes, *arguments).result()


def _peak_bytes(loss: str, tokens: int, vocab: int, dtype: torch.dtype, device: str) -> int:
    rows = loss_twins.make_rows(tokens, vocab, dtype, device)
    # a first call loads libraries, thread pools and the compiler; their memory is not the loss's
    loss_twins.forward_backward(loss, rows)
    before = _reset_peak(device)
    loss_twins.forward_backward(loss, rows)
    return _peak(device) - before


_CLEAR_REFS = Path("/proc/self/clear_refs")


def _reset_peak(device: str) -> int:
    """Starts a new peak at the memory in use, and returns that."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    # pages that malloc kept from earlier calls would hide what the next one takes
    ctypes.CDLL(None).malloc_trim(0)
    # not getrusage's ru_maxrss: it cannot be reset, and a child starts with its parent's
    _CLEAR_REFS.write_text("5")
    return _status_bytes("VmRSS")


def _peak(device: str) -> int:
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def _synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
