"""Selection of backends, for tests on the CPU and, as `pytest -m gpu`, on a GPU.

Triton's kernels run in its interpreter, but where only a GPU's tests are asked for. That is decided before torch,
triton and the package are imported, so they are imported in the fixtures.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr != "gpu":
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return
    skip = pytest.mark.skip(reason="needs a CUDA device and pytest -m gpu")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """A wheel's tests run without a compiler too; only what torch.compile's own backend compiles is skipped there."""
    try:
        return (yield)
    except Exception as error:
        if "No working C++ compiler" in str(error) and shutil.which(os.environ.get("CXX", "g++")) is None:
            pytest.skip("torch.compile's inductor needs a C++ compiler")
        raise


@pytest.fixture(autouse=True)
def restored_selection() -> Iterator[None]:
    """Every test starts from the defaults, whatever the one before it selected."""
    import rlkernels

    yield
    rlkernels.set_backend("auto")
    rlkernels.set_checks(False)


@pytest.fixture(scope="session", autouse=True)
def interpreter_out_of_coverage() -> Iterator[None]:
    """No line of Triton's kernels is counted, and traced, its interpreter would take twice as long."""
    if sys.gettrace() is None or importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime import interpreter

    run = interpreter.GridExecutor.__call__

    def untraced(*args: Any, **kwargs: Any) -> Any:
        tracer = sys.gettrace()
        sys.settrace(None)
        try:
            return run(*args, **kwargs)
        finally:
            sys.settrace(tracer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", untraced)
        yield


@pytest.fixture
def select_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Selects a backend for a GPU's tensors in its tests, else for the CPU's, where CUDA's kernels run too."""
    import host_device

    import rlkernels
    from rlkernels import backends

    def select(name: str) -> str:
        if request.node.get_closest_marker("gpu"):
            reason = backends.why_unavailable(name)
            if reason is not None:
                pytest.skip(reason)
        elif name == "cuda":
            host_device.use(request.getfixturevalue("host_device_kernels"), monkeypatch)
        rlkernels.set_backend(name)
        return name

    return select


@pytest.fixture(params=["cpu", "cuda", "triton", "reference"])
def backend(request: pytest.FixtureRequest, select_backend: Callable[[str], str]) -> str:
    """Each backend in turn, selected explicitly, so that none can stand in for another."""
    return select_backend(request.param)


@pytest.fixture
def generator() -> torch.Generator:
    """Fresh random numbers every run, unless RLKERNELS_TEST_SEED is set; the seed is printed with a failure."""
    import torch

    seed = int(os.environ.get("RLKERNELS_TEST_SEED", int.from_bytes(os.urandom(4), "little")))
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def thread_counts() -> Iterator[tuple[int, ...]]:
    """Numbers of threads to try; what was set before comes back."""
    import torch

    before = torch.get_num_threads()
    yield 1, 2, 5
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def host_device_kernels(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The CUDA kernels as the CPU runs them: a module with the functions of `rlkernels._native.cuda`."""
    import host_device

    return host_device.load(host_device.build(tmp_path_factory.mktemp("host_device")), "_host_device")


@pytest.fixture(scope="session")
def sanitized_host_device(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of the same module built with a sanitizer, "thread" or "address"."""
    import host_device

    return functools.cache(lambda sanitizer: host_device.build(tmp_path_factory.mktemp(sanitizer), sanitizer))
