"""What is handed out: the sdist and the wheel hold every file they should, and the native module needs no library."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import rlkernels
from rlkernels import backends

ROOT = Path(__file__).parent.parent
OF_A_CHECKOUT = (".ci/", ".clang-format", ".github/", ".gitignore")
GENERATED = ("PKG-INFO", "setup.cfg", "rlkernels.egg-info/")


def tracked_files() -> set[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    return {name for name in listed.stdout.split("\0") if name}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpacked. Made in a copy of the tracked files, since it leaves files beside them."""
    pytest.importorskip("pybind11")
    tree, folder = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("sdist")
    for name in tracked_files():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    for stray in ("bench/results/results.json", "tests/__pycache__/a.cpython-311.pyc", "build/a.o", "dist/a.whl"):
        (tree / stray).parent.mkdir(parents=True, exist_ok=True)
        (tree / stray).touch()
    code = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=tree, check=True, capture_output=True)
    (archive,) = folder.glob("rlkernels-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def files_under(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_sdist_holds_what_is_tracked(sdist: Path) -> None:
    found = {name for name in files_under(sdist) if not name.startswith(GENERATED)}
    assert found == {name for name in tracked_files() if not name.startswith(OF_A_CHECKOUT)}


def test_the_wheel_holds_every_module(sdist: Path, tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=sdist, check=True, capture_output=True)
    names = {name for name in tracked_files() if name.startswith(("rlkernels/", "triton_kernels/"))}
    wanted = {name.replace("triton_kernels/", "rlkernels/triton_kernels/") for name in names}
    assert files_under(tmp_path) == wanted
    assert {"rlkernels/py.typed", "rlkernels/_native.pyi"} <= wanted


IMPORT_ALONE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("_native", sys.argv[1])
spec.loader.exec_module(importlib.util.module_from_spec(spec))
assert "torch" not in sys.modules
with open("/proc/self/maps") as maps:
    print(*{line.split("/")[-1].strip() for line in maps if ".so" in line}, sep="\\n")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_native_module_brings_no_other_runtime() -> None:
    """No OpenMP beside torch's, and nothing of torch or CUDA: one build serves every version of them."""
    if reason := backends.why_unavailable("cpu"):
        pytest.skip(reason)
    from rlkernels import _native

    run = subprocess.run(
        [sys.executable, "-S", "-c", IMPORT_ALONE, _native.__file__], check=True, capture_output=True, text=True
    )
    loaded = run.stdout.split()
    assert any(name.startswith("_native.") for name in loaded)
    foreign = ("libgomp", "libomp", "libiomp", "libtorch", "libc10", "libcud", "libnv")
    assert [name for name in loaded if name.startswith(foreign)] == []


def test_the_stub_names_what_the_native_module_has() -> None:
    if reason := backends.why_unavailable("cpu"):
        pytest.skip(reason)
    from rlkernels import _native

    (folder,) = rlkernels.__path__
    stub = ast.parse((Path(folder) / "_native.pyi").read_text())
    named = {node.name for node in stub.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    named |= {node.target.id for node in stub.body if isinstance(node, ast.AnnAssign)}
    # a build with nvcc has the CUDA kernels too, as a submodule
    assert {name for name in dir(_native) if not name.startswith("_")} - {"cuda"} == named


def test_the_package_is_typed() -> None:
    (folder,) = rlkernels.__path__
    assert (Path(folder) / "py.typed").exists()
