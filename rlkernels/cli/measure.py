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

import rlkernels


def seconds(call: Callable[[], object], device: str = "cpu") -> float:
    """Time of one call: on the CPU wall time, the release of its result included; on a GPU the GPU's.

    As in training, the GPU has work queued when the call is made, so that it does not wait for Python.
    """
    if torch.device(device).type == "cuda":
        return _gpu_seconds(call)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


_QUEUED_CYCLES = 10_000_000  # some 5 ms, longer than any call takes to be queued


def _gpu_seconds(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(_QUEUED_CYCLES)
    start.record()
    call()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end)


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


def peak_bytes(make_step: Callable[[], Callable[[], object]], device: str = "cpu") -> int | None:
    """Most memory that a step holds, its result included, beyond what `make_step` holds for it.

    On the CPU in a process of its own, since a process has one peak for all that it does: `make_step` is pickled.
    None on systems other than Linux, which cannot reset the peak.
    """
    if torch.device(device).type == "cuda":
        return _peak_bytes(make_step, device)
    if not _CLEAR_REFS.exists():
        return None
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as child:
        return child.submit(_peak_bytes, make_step, device).result()


def _peak_bytes(make_step: Callable[[], Callable[[], object]], device: str) -> int:
    step = make_step()
    # a first call loads libraries, thread pools and the compiler; their memory is not the step's
    step()
    before = _reset_peak(device)
    step()
    return _peak(device) - before


def available_bytes() -> int | None:
    """Memory that the system can give without swapping; None on systems other than Linux."""
    return _bytes_of(_MEMINFO, "MemAvailable") if _MEMINFO.exists() else None


_MEMINFO = Path("/proc/meminfo")
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def _reset_peak(device: str) -> int:
    """Starts a new peak at the memory in use, and returns that."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    # memory that this package and malloc kept from earlier calls would hide what the next one takes
    rlkernels.empty_cache()
    ctypes.CDLL(None).malloc_trim(0)
    # not getrusage's ru_maxrss: it cannot be reset, and a child starts with its parent's
    _CLEAR_REFS.write_text("5")
    return _bytes_of(_STATUS, "VmRSS")


def _peak(device: str) -> int:
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _bytes_of(_STATUS, "VmHWM")


def _bytes_of(file: Path, field: str) -> int:
    lines = file.read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))
