"""Runs before torch and triton are imported: without a GPU, Triton's kernels run in its interpreter."""

import os
import subprocess
from collections.abc import Callable, Iterator
from types import ModuleType


def _has_gpu() -> bool:
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).stdout.startswith(b"GPU")
    except FileNotFoundError:
        return False


if not _has_gpu():
    os.environ["TRITON_INTERPRET"] = "1"

import host_device  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

import rlkernels  # noqa: E402
from rlkernels import backends  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def restored_selection():
    """Every test starts from the defaults, whatever the one before it selected."""
    yield
    backends.set_backend("auto")
    rlkernels.set_checks(False)


@pytest.fixture
def select_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Selects a backend for CPU tensors; the CUDA kernels take them where the CPU runs those."""

    def select(name: str) -> str:
        if name == "cuda":
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
    seed = int(os.environ.get("RLKERNELS_TEST_SEED", int.from_bytes(os.urandom(4), "little")))
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def thread_counts() -> Iterator[tuple[int, ...]]:
    """Numbers of threads to try; what was set before comes back."""
    before = torch.get_num_threads()
    yield 1, 2, 5
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def host_device_kernels(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The CUDA kernels as the CPU runs them: a module with the functions of `rlkernels._native.cuda`."""
    return host_device.load(host_device.build(tmp_path_factory.mktemp("host_device")), "_host_device")
