"""Which backend serves an operation, and why one cannot.

A backend is a module with functions named after the operations' passes (`token_stats_forward`, ...); all take
and return the same things. `reference` has no entry here: it is plain PyTorch with PyTorch's own autograd and is
called in the operation's stead.
"""

from __future__ import annotations

import importlib.util
import os
from types import ModuleType

import torch

from rlkernels import checks

NAMES = ("auto", "cpu", "cuda", "triton", "reference")
ENVIRONMENT_VARIABLE = "RLKERNELS_BACKEND"

_selected = os.environ.get(ENVIRONMENT_VARIABLE) or "auto"


def backend() -> str:
    """Name of the selected backend: `set_backend`'s, else what `RLKERNELS_BACKEND` held at import, else `"auto"`.

    Returns:
        `"auto"`, `"cpu"`, `"cuda"`, `"triton"` or `"reference"`.

    Raises:
        ValueError: `RLKERNELS_BACKEND` holds another name.

    Example:
        >>> import rlkernels
        >>> rlkernels.backend() in ("auto", "cpu", "cuda", "triton", "reference")
        True
    """
    checks.require_choice(ENVIRONMENT_VARIABLE, _selected, NAMES)
    return _selected


def set_backend(name: str) -> str:
    """Select the backend of every later call: `"auto"`, `"cpu"`, `"cuda"`, `"triton"` or `"reference"`.

    `"auto"` takes the C++ kernels for CPU tensors, Triton for GPU tensors and plain PyTorch for other devices.
    An explicit choice is never replaced by another. Before a GPU kernel's first use in a process a small result of it
    is compared with plain PyTorch's, and RuntimeError raised if it is wrong; `RLKERNELS_SELF_CHECK=0` leaves that out.

    Args:
        name: one of these.

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
    previous, _selected = _selected, name
    return previous


def _import_error(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        return str(error)
    return None


def _triton_error() -> str | None:
    if _HAS_GPU or triton_is_interpreted:
        return _import_error("triton")
    # a quarter of a second, for what cannot run here
    return None if importlib.util.find_spec("triton") else "No module named 'triton'"


# found out once, at import: torch.compile traces through `choose`
triton_is_interpreted = os.environ.get("TRITON_INTERPRET", "0") == "1"
_HAS_GPU = torch.cuda.is_available() or torch.xpu.is_available()
_NATIVE_ERROR = _import_error("rlkernels._native")
_TRITON_ERROR = _triton_error()


def _cuda_name(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _cuda_error() -> str | None:
    if _NATIVE_ERROR is not None:
        return f"the C++ extension does not import ({_NATIVE_ERROR})"
    kernels = getattr(importlib.import_module("rlkernels._native"), "cuda", None)
    if kernels is None:
        return "built without CUDA kernels (no nvcc, or RLK_CUDA=OFF); GPUs run the Triton kernels (backend 'triton')"
    driver, runtime = kernels.driver_version(), kernels.runtime_version()
    if driver == 0:
        return "built with CUDA kernels, but this machine has no NVIDIA driver"
    if driver // 1000 < runtime // 1000:
        return f"built with CUDA {_cuda_name(runtime)}, but NVIDIA's driver here supports {_cuda_name(driver)}"
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "built with CUDA kernels, but PyTorch finds no NVIDIA GPU"
    return None


_CUDA_ERROR = _cuda_error()


def why_unavailable(name: str) -> str | None:
    """None if backend `name` can run here, else the reason.

    Args:
        name: `"cpu"`, `"cuda"`, `"triton"`; `"auto"` and `"reference"` always can.

    Returns:
        A sentence for people, or None.

    Raises:
        ValueError: no backend's name.

    Example:
        >>> from rlkernels.backends import why_unavailable
        >>> why_unavailable("reference") is None
        True
    """
    checks.require_choice("name", name, NAMES)
    if name == "cpu" and _NATIVE_ERROR is not None:
        return f"the C++ extension does not import ({_NATIVE_ERROR}); reinstall with a C++17 compiler"
    if name == "cuda" and _CUDA_ERROR is not None:
        return _CUDA_ERROR
    if name == "triton" and _TRITON_ERROR is not None:
        return f"triton does not import ({_TRITON_ERROR})"
    if name == "triton" and not _HAS_GPU and not triton_is_interpreted:
        return "no GPU found; TRITON_INTERPRET=1, set before triton is imported, runs the kernels on the CPU"
    return None


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
    if reason is None and name == "cuda" and device.type != "cuda":
        reason = f"it runs on CUDA tensors, got {device}"
    if reason is None and name == "triton" and device.type == "cpu" and not triton_is_interpreted:
        reason = "it runs on GPU tensors, got cpu (TRITON_INTERPRET=1 runs it on CPU tensors)"
    if reason is not None:
        raise RuntimeError(f"backend {name!r} cannot run this: {reason}")
    return name


_MODULES = {
    "cpu": {
        "token_stats": "rlkernels.backends.native",
        "indexed_logp": "rlkernels.backends.native",
        "linear_token_stats": "rlkernels.backends.native",
        "policy_objective": "rlkernels.backends.native",
        "policy_sweep": "rlkernels.backends.native",
        "prefix_counts": "rlkernels.backends.native",
    },
    "cuda": {
        "token_stats": "rlkernels.backends.cuda",
        "indexed_logp": "rlkernels.backends.cuda",
        "linear_token_stats": "rlkernels.backends.cuda",
        "policy_objective": "rlkernels.backends.cuda",
        "policy_sweep": "rlkernels.backends.cuda",
        "prefix_counts": "rlkernels.backends.cuda",
    },
    "triton": {
        "token_stats": "rlkernels.triton_kernels.token_stats",
        "indexed_logp": "rlkernels.triton_kernels.token_stats",
        "linear_token_stats": "rlkernels.triton_kernels.token_stats",
        "policy_objective": "rlkernels.triton_kernels.policy_objective",
        "policy_sweep": "rlkernels.triton_kernels.policy_sweep",
        "prefix_counts": "rlkernels.triton_kernels.prefix_counts",
    },
}


def has(operation: str, device: torch.device) -> bool:
    """Whether the backend that serves `device` has kernels for `operation` that run there."""
    if operation in _FLOAT64_OPERATIONS and not _computes_float64(device):
        return False
    return operation in _MODULES.get(choose(device), {})


_FLOAT64_OPERATIONS = ("policy_objective", "policy_sweep")


def _computes_float64(device: torch.device) -> bool:
    """Some of Intel's GPUs have no float64."""
    return device.type != "xpu" or bool(torch.xpu.get_device_properties(device).has_fp64)


def implementation(operation: str, like: torch.Tensor) -> ModuleType:
    """The module that runs `operation` for tensors of this one's device and dtype; a GPU's is checked at first."""
    name = choose(like.device)
    if name == "reference":
        raise RuntimeError(f"{operation}: the reference backend is plain PyTorch; call rlkernels.reference")
    module = importlib.import_module(_MODULES[name][operation])
    if name == "cuda" or (name == "triton" and not triton_is_interpreted):
        # not above: it imports the operations, which import this
        importlib.import_module("rlkernels.backends.self_check").once(module, name, operation, like.device, like.dtype)
    return module
