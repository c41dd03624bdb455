"""What the figures were measured on."""

from __future__ import annotations

import importlib
import os
import platform
from pathlib import Path

import torch

import rlkernels
from rlkernels import backends


def cpu_name() -> str:
    """The processor's marketing name; the architecture where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def gpu_names() -> list[str]:
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def version(module: str) -> str:
    try:
        return importlib.import_module(module).__version__
    except ImportError:
        return "not installed"


def native_isas() -> tuple[str, list[str]] | None:
    """Selected and available instruction sets of the C++ kernels; None where they cannot be loaded."""
    if backends.why_unavailable("cpu") is not None:
        return None
    from rlkernels import _native

    return _native.current_isa(), _native.available_isas()


def summary() -> dict[str, str]:
    """One line for each thing that a figure depends on."""
    isas = native_isas()
    return {
        "machine": f"{cpu_name()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "GPUs": ", ".join(gpu_names()) or "none",
        "C++ kernels": "not loaded" if isas is None else f"{isas[0]}, selected from {', '.join(isas[1])}",
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads",
        "triton": version("triton") + (", interpreted" if backends.triton_is_interpreted else ""),
        "rlkernels": f"{rlkernels.__version__}, Python {platform.python_version()}",
    }
