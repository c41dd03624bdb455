"""What the kernels load from and store to `[N, V]`: each byte once from memory, again only from a cache.

C++ kernels are compiled with -fsanitize=thread and linked with tests/native/count_accesses.cpp, which counts where
the sanitizer would look for races; Triton kernels run in the interpreter with counted accesses.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

import rlkernels

ROOT = Path(__file__).parent.parent
ROWS, VOCAB = 3, 10007  # three segments, the last one odd
KERNELS = ("token_stats", "policy_objective", "policy_sweep")


class Traffic:
    """Loads and stores of each byte of one tensor."""

    def __init__(self, name: str, loads: np.ndarray, stores: np.ndarray) -> None:
        self.name, self.loads, self.stores = name, loads, stores

    def summary(self) -> dict[str, float]:
        """Shares of the tensor's bytes: touched at all, and issued in all."""
        return {
            "loaded": float((self.loads > 0).mean()),
            "loads": float(self.loads.mean()),
            "stored": float((self.stores > 0).mean()),
            "stores": float(self.stores.mean()),
        }


Watch = Callable[[str, Tensor], None]
Counts = Callable[[], list[Traffic]]


def cases(watch: Watch, counts: Counts, dtype: torch.dtype, backend: Any, vocab: int) -> Iterator[tuple[str, Any]]:
    """Runs every kernel that touches `[N, V]`; yields what each did."""
    from rlkernels.stats import OUTPUTS

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, ROWS, vocab, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (1, ROWS), generator=generator)

    def batch(advantage: float) -> rlkernels.PolicyBatch:
        return rlkernels.PolicyBatch(targets, torch.full((1,), advantage))

    def watching(function: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any, **named: Any) -> None:
            watch("dlogits", next(value for value in arguments if isinstance(value, Tensor)))
            function(*arguments, **named)

        return run

    def gradient_of(loss: Tensor) -> None:
        torch.autograd.grad(loss, logits)

    def sweep(objective: Any, advantage: float = 1.0) -> None:
        gradient_of(rlkernels.policy_loss(logits, batch(advantage), objective).loss)

    def backward_of_statistics() -> None:
        stats = rlkernels.token_stats(logits, targets)
        counts()
        watch("logits", logits)
        gradient_of(stats.logp.sum() + stats.entropy.sum())

    runs: dict[str, Callable[[], Any]] = {
        "statistics": lambda: rlkernels.token_stats(logits.detach(), targets),
        "statistics, every output": lambda: rlkernels.token_stats(logits.detach(), targets, outputs=OUTPUTS),
        "gradient": backward_of_statistics,
        "sweep": lambda: sweep("dapo"),
        "sweep with an entropy bonus": lambda: sweep(rlkernels.GRPO(entropy_coef=0.01)),
        "sweep of rows without a coefficient": lambda: sweep("dapo", advantage=0.0),
        "sweep without a gradient": lambda: rlkernels.policy_loss(logits.detach(), batch(1.0), "dapo"),
    }
    for name, run in runs.items():
        watch("logits", logits)
        with pytest.MonkeyPatch.context() as patch:
            for function in ("token_stats_backward", "policy_sweep"):
                module = next(module for module in backend if hasattr(module, function))
                patch.setattr(module, function, watching(getattr(module, function)))
            run()
        yield name, {traffic.name: traffic.summary() for traffic in counts()}


def assert_each_byte_once(name: str, seen: dict[str, dict[str, float]], passes: int) -> None:
    """`passes` over the logits at most, of which all but the first are served by a cache."""
    a_few_columns = 64 / VOCAB  # the target's, looked up apart; those left over by loops over whole vectors
    logits = seen["logits"]
    assert (logits["loaded"], logits["stored"]) == (1, 0), name
    assert logits["loads"] <= passes + a_few_columns, name
    if "dlogits" in seen:
        dlogits = seen["dlogits"]
        assert dlogits["stored"] == 1, name
        assert dlogits["stores"] <= 1 + a_few_columns, name
        assert dlogits["loads"] == 0, name


# C++


def build(folder: Path) -> Path:
    """The native module with its row kernels counted, generic instruction set."""
    pybind11 = pytest.importorskip("pybind11")
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    flags = ["-std=c++17", "-O2", "-fPIC", "-fopenmp-simd", "-fno-math-errno", "-fvisibility=hidden", "-w"]
    flags += [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}"]
    source = ROOT / "csrc"
    jobs = [
        (source / "cpu" / f"{name}.cpp", ["-DRLK_ISA=generic", "-fsanitize=thread", "-fno-builtin"]) for name in KERNELS
    ]
    plain = ("buffer_pool", "dispatch", "parallel", "prefix_counts")
    jobs += [(source / "bind.cpp", []), *((source / "cpu" / f"{name}.cpp", []) for name in plain)]
    jobs += [(ROOT / "tests" / "native" / "count_accesses.cpp", ["-fvisibility=default"])]
    objects = []
    for file, extra in jobs:
        objects.append(str(folder / f"{file.stem}.o"))
        subprocess.run([compiler, *flags, *extra, "-c", str(file), "-o", objects[-1]], check=True)
    module = folder / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    wrapped = [f"-Wl,--wrap={name}" for name in ("memcpy", "memset")]
    subprocess.run([compiler, "-shared", *objects, *wrapped, "-pthread", "-ldl", "-o", str(module)], check=True)
    return module


# replaces the installed module before anything imports it
LOADER = """
import importlib.util, runpy, sys
spec = importlib.util.spec_from_file_location("rlkernels._native", sys.argv[1])
module = sys.modules["rlkernels._native"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
runpy.run_path(sys.argv[2], run_name="__main__")
"""


def watch_of_native(path: str) -> tuple[Watch, Counts]:
    library = ctypes.CDLL(path)
    names: list[tuple[str, int]] = []

    def watch(name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        library.watch(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(size))
        names.append((name, size))

    def counts() -> list[Traffic]:
        found = []
        for i, (name, size) in enumerate(names):
            loads, stores = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
            library.counts(
                ctypes.c_size_t(i), loads.ctypes.data_as(ctypes.c_void_p), stores.ctypes.data_as(ctypes.c_void_p)
            )
            found.append(Traffic(name, loads, stores))
        library.forget()
        names.clear()
        return found

    return watch, counts


@pytest.fixture(scope="module")
def native_traffic(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    module = build(tmp_path_factory.mktemp("counting"))
    result = subprocess.run(
        [sys.executable, "-c", LOADER, str(module), __file__], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "torch.float32"])
def test_cpp_kernels(native_traffic: dict[str, dict[str, Any]], dtype: str) -> None:
    """A segment is read for its maximum and, from the first-level cache, for its sums.

    The gradient of 16-bit rows comes from kept exponentials: only an entropy bonus needs the logits for it.
    """
    is_half = dtype == "torch.bfloat16"
    passes = {
        "statistics": 2,
        "statistics, every output": 3,  # is_top1 looks at the columns before the target once more
        "gradient": 1,
        "sweep": 2 if is_half else 3,
        "sweep with an entropy bonus": 3,
        "sweep of rows without a coefficient": 2,
        "sweep without a gradient": 2,
    }
    seen = native_traffic[dtype]
    assert seen.keys() == passes.keys()
    for name, traffic in seen.items():
        print(name, traffic)
        assert_each_byte_once(name, traffic, passes[name])


# Triton


class CountedInterpreter:
    """Watches ranges of memory while kernels run in the interpreter; `elsewhere` counts the bytes outside of them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ranges: list[tuple[int, Traffic]] = []
        self.elsewhere = 0
        builder = interpreter.InterpreterBuilder
        load, store = builder.create_masked_load, builder.create_masked_store

        def counted_load(builder: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
            self.count(ptrs, mask, "loads")
            return load(builder, ptrs, mask, *rest)

        def counted_store(builder: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self.count(ptrs, mask, "stores")
            return store(builder, ptrs, value, mask, *rest)

        patch.setattr(builder, "create_masked_load", counted_load)
        patch.setattr(builder, "create_masked_store", counted_store)

    def count(self, ptrs: Any, mask: Any, kind: str) -> None:
        width = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        addresses = ptrs.data[np.broadcast_to(mask.data != 0, ptrs.data.shape)].reshape(-1, 1)
        touched = (addresses.astype(np.int64) + np.arange(width)).reshape(-1)
        for begin, traffic in self.ranges:
            at = touched - begin
            inside = (at >= 0) & (at < traffic.loads.size)
            np.add.at(getattr(traffic, kind), at[inside], 1)
            touched = touched[~inside]
        self.elsewhere += touched.size

    def watch(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        self.ranges.append((tensor.data_ptr(), Traffic(name, np.zeros(size, np.uint8), np.zeros(size, np.uint8))))

    def counts(self) -> list[Traffic]:
        found = [traffic for _, traffic in self.ranges]
        self.ranges.clear()
        return found


def test_triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block stays in registers between its maximum and its sums; a gradient reads the row again, from a cache."""
    from rlkernels.triton_kernels import policy_sweep, token_stats

    rlkernels.set_backend("triton")
    passes = {
        "statistics": 1,
        "statistics, every output": 1,
        "gradient": 1,
        "sweep": 2,
        "sweep with an entropy bonus": 2,
        "sweep of rows without a coefficient": 1,
        "sweep without a gradient": 1,
    }
    elsewhere = {}
    for vocab in (VOCAB, 2 * VOCAB):
        counted = CountedInterpreter(monkeypatch)
        seen = dict(cases(counted.watch, counted.counts, torch.bfloat16, [token_stats, policy_sweep], vocab))
        assert seen.keys() == passes.keys()
        for name, traffic in seen.items():
            print(name, traffic)
            assert_each_byte_once(name, traffic, passes[name])
        elsewhere[vocab] = counted.elsewhere
        monkeypatch.undo()
    assert elsewhere[2 * VOCAB] - elsewhere[VOCAB] < VOCAB / 100, "nothing else grows with V"


if __name__ == "__main__":
    watch_native, counts_native = watch_of_native(sys.argv[1])
    torch.set_num_threads(1)
    from rlkernels.backends import native

    print(
        json.dumps(
            {
                str(dtype): dict(cases(watch_native, counts_native, dtype, [native], VOCAB))
                for dtype in (torch.bfloat16, torch.float32)
            }
        )
    )
