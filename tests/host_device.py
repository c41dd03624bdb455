"""The CUDA kernels as the CPU runs them: building their modules, and the `cuda` backend on CPU tensors."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rlkernels import backends
from rlkernels.backends import cuda

SOURCES = Path(__file__).parent.parent / "csrc"

# as an H100's
SHARED_BYTES = 227 << 10


def build(directory: Path, sanitize: str = "off") -> Path:
    """Builds both modules; `sanitize` is "thread", "address" or "off". Returns where they lie."""
    pybind11 = pytest.importorskip("pybind11")
    for tool in (os.environ.get("CXX", "c++"), "cmake", "ninja"):
        if shutil.which(tool) is None:
            pytest.skip(f"building the CUDA kernels for the CPU needs {tool}")
    configure = [
        *("cmake", "-S", str(SOURCES / "host_device"), "-B", str(directory), "-G", "Ninja"),
        "-DCMAKE_BUILD_TYPE=Release",
        f"-DRLK_SANITIZE={sanitize}",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        f"-DPython_EXECUTABLE={sys.executable}",
    ]
    for command in (configure, ["cmake", "--build", str(directory)]):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
    return directory


def load(directory: Path, name: str) -> ModuleType:
    (path,) = directory.glob(f"{name}.*.so")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def use(kernels: object, patch: pytest.MonkeyPatch, multiprocessors: int = 1, shared_bytes: int = SHARED_BYTES) -> None:
    """Makes `cuda` a backend of CPU tensors, which it runs with `kernels` as on a GPU with these limits."""
    limits = cuda.Limits(multiprocessors, shared_bytes)
    choose = backends.choose
    patch.setattr(cuda, "kernels", kernels)
    patch.setattr(cuda, "limits", lambda device: limits)
    patch.setattr(cuda, "launching", lambda device: contextlib.nullcontext({"stream": 0}))
    patch.setattr(backends, "_CUDA_ERROR", None)
    patch.setattr(backends, "choose", lambda device: "cuda" if backends.backend() == "cuda" else choose(device))


def device() -> str:
    """Of the tests that run: a GPU's under `pytest -m gpu`."""
    return "cuda" if torch.cuda.is_available() and not backends.triton_is_interpreted else "cpu"


ON_A_GPU = [pytest.param(name, marks=pytest.mark.gpu, id=f"{name} on a GPU") for name in ("triton", "cuda")]


@pytest.fixture(params=["cpu", "cuda", "triton", "reference", *ON_A_GPU])
def backend_anywhere(request: pytest.FixtureRequest, select_backend: Callable[[str], str]) -> str:
    """A module's `backend`, if its tests put their tensors on `device()`."""
    return select_backend(request.param)
