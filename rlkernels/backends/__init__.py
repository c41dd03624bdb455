"""Which backend serves an operation, and why one cannot.

A backend is a module with functions named after the operations' passes (`token_stats_forward`, ...); all take
and return the same things. `reference` has no entry here: it is plain PyTorch with PyTorch's own autograd and is
called in the operation's stead.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from types import ModuleType

import torch

from rlkernels import checks

NAMES = ("auto", "cpu", "cuda", "triton", "reference")
ENVIRONMENT_VARIABLE = "RLKERNELS_BACKEND"

_selected: str | None = None


def backend() -> str:
    """Name of the selected backend: `set_backend`'s, else `RLKERNELS_BACKEND`'s, else `"auto"`.

    Example:
        >>> import rlkernels
        >>> rlkernels.backend() in ("auto", "cpu", "cuda", "triton", "reference")
        True
    """
    if _selected is not None:
        return _selected
    name = os.environ.get(ENVIRONMENT_VARIABLE, "auto")
    checks.require_choice(ENVIRONMENT_VARIABLE, name, NAMES)
    return name


def set_backend(name: str) -> str:
    """Select the backend of every later call: `"auto"`, `"cpu"`, `"cuda"`, `"triton"` or `"reference"`.

    `"auto"` takes the C++ kernels for CPU tensors, Triton for GPU tensors and plain PyTorch for other devices.
    An explicit choice is never replaced by another.

    Returns:
        The name that was selected before.

    Raises:
        ValueError: unknown name.
        RuntimeError: the backend cannot run here; says why.

    Example:
        >>> import rlkernels
        >>> previous = rlkernels.set_backend("reference")
        >>> _ = rlkernels.set_backend(previous)
    """
    global _selected
    checks.require_choice("name", name, NAMES)
    reason = why_unavailable(name)
    if reason is not None:
        raise RuntimeError(f"backend {name!r} is not available: {reason}")
    previous, _selected = backend(), name
    return previous


def _why_no_cpu() -> str | None:
    try:
        importlib.import_module("rlkernels._native")
    except ImportError as error:
        return f"the C++ extension does not import ({error}); reinstall rlkernels with a C++17 compiler"
    return None


def _why_no_cuda() -> str | None:
    return "this version has no CUDA C++ kernels; GPUs run the Triton kernels (backend 'triton')"


def triton_is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def _why_no_triton() -> str | None:
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"triton does not import ({error})"
    if triton_is_interpreted() or torch.cuda.is_available() or torch.xpu.is_available():
        return None
    return "no GPU found; TRITON_INTERPRET=1, set before triton is imported, runs the kernels on the CPU"


_WHY_UNAVAILABLE: dict[str, Callable[[], str | None]] = {
    "cpu": _why_no_cpu,
    "cuda": _why_no_cuda,
    "triton": _why_no_triton,
}


def why_unavailable(name: str) -> str | None:
    """None if backend `name` can run here, else the reason."""
    return _WHY_UNAVAILABLE.get(name, lambda: None)()


def choose(device: torch.device) -> str:
    """The backend that serves tensors on `device` under the current selection.

    Raises:
        RuntimeError: the selected backend cannot run here, or not on this device.
    """
    name = backend()
    if name == "auto":
        if device.type == "cpu":
            return "cpu" if why_unavailable("cpu") is None else "reference"
        on_gpu = device.type in ("cuda", "xpu")
        return "triton" if on_gpu and why_unavailable("triton") is None else "reference"
    reason = why_unavailable(name)
    if reason is None and name == "cpu" and device.type != "cpu":
        reason = f"it runs on CPU tensors, got {device}"
    if reason is None and name == "triton" and device.type == "cpu" and not triton_is_interpreted():
        reason = "it runs on GPU tensors, got cpu (TRITON_INTERPRET=1 runs it on CPU tensors)"
    if reason is not None:
        raise RuntimeError(f"backend {name!r} cannot run this: {reason}")
    return name


_MODULES = {
    "cpu": {"token_stats": "rlkernels.backends.native", "prefix_counts": "rlkernels.backends.native"},
    "triton": {
        "token_stats": "rlkernels.triton_kernels.token_stats",
        "prefix_counts": "rlkernels.triton_kernels.prefix_counts",
    },
}


def implementation(operation: str, device: torch.device) -> ModuleType:
    """The module that runs `operation` for tensors on `device`."""
    name = choose(device)
    if name == "reference":
        raise RuntimeError(f"{operation}: the reference backend is plain PyTorch; call rlkernels.reference")
    return importlib.import_module(_MODULES[name][operation])
