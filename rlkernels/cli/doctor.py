"""`python -m rlkernels doctor`: every backend, and why one is unavailable."""

from __future__ import annotations

from pathlib import Path

import torch

import rlkernels
from rlkernels import backends, schedules, testing
from rlkernels.cli import machine


def explain(rows: int, vocab: int, hidden_size: int) -> int:
    """Prints how the linear path would cut up bfloat16 hidden states `[rows, H]` and a head `[V, H]`."""
    itemsize = torch.bfloat16.itemsize
    for line in schedules.explain(schedules.Problem(rows, hidden_size, vocab, itemsize, schedules.DEFAULT_CHUNK_BYTES)):
        print(line)
    return 0


def diagnose(path: Path) -> int:
    """Prints what `rlkernels.testing.compare_with_reference` finds in a saved batch; 1 if something is not finite."""
    call = testing.load_call(path)
    try:
        found = testing.compare_with_reference(**call)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path}: {error}") from error
    print(found)
    return int(found.first is not None)


def run() -> int:
    """Prints the report; 1 if the selected backend cannot run here, else 0."""
    for label, value in machine.summary().items():
        print(f"{label:<13}{value}")
    print()
    for name in backends.NAMES:
        reason = backends.why_unavailable(name)
        print(f"{name:<13}{'available' if reason is None else 'unavailable':<13}{reason or ''}".rstrip())
    print()
    try:
        print(f"selected     {rlkernels.backend()}")
        for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
            print(f"{device} tensors: {backends.choose(torch.device(device))}")
    except (ValueError, RuntimeError) as error:
        print(error)
        return 1
    return 0
