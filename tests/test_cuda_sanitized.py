"""Every CUDA kernel under ThreadSanitizer, and under AddressSanitizer with UBSan; planted faults that they must catch.

Python with a sanitizer's library must not load torch. So the launches are recorded here, with what they made of their
tensors, and replayed in a process with numpy alone.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import host_device
import numpy as np
import pytest
import row_cases as cases
import torch
from row_cases import CUDA
from test_policy_objective import OBJECTIVES, both_ways, evaluate, logits_batch, random_batch
from torch import Generator, Tensor

import rlkernels
from rlkernels.backends import cuda, params
from rlkernels.ops.rows import compute_dtype

TESTS = Path(__file__).parent
SANITIZERS = {"thread": "libtsan.so", "address": "libasan.so"}
ENVIRONMENT = {
    "TSAN_OPTIONS": "exitcode=66 report_signal_unsafe=0",
    "ASAN_OPTIONS": "detect_leaks=0",
    "OPENBLAS_NUM_THREADS": "1",
}


class Pointer(NamedTuple):
    tensor: Tensor


class Struct(NamedTuple):
    name: str
    fields: dict[str, Any]


def pointer_to(tensor: Tensor | None) -> Pointer | int:
    return 0 if tensor is None or tensor.numel() == 0 else Pointer(tensor)


class Recorder:
    """Takes the place of a module of kernels; runs them with it, and keeps what came and what was made of it."""

    def __init__(self, kernels: Any) -> None:
        self.row_state_bytes = kernels.row_state_bytes
        self.calls: list[dict[str, Any]] = []
        self.arrays: dict[str, np.ndarray] = {}
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        if isinstance(getattr(self._kernels, name), type):
            return lambda **fields: Struct(name, fields)
        if name.endswith("_bytes"):
            return lambda *arguments: getattr(self._kernels, name)(*map(self._real, arguments))
        return lambda *positional, **keywords: self._run(name, positional, keywords)

    def _real(self, value: Any) -> Any:
        if isinstance(value, Pointer):
            return value.tensor.data_ptr()
        if isinstance(value, Struct):
            fields = {name: self._real(field) for name, field in value.fields.items()}
            return getattr(self._kernels, value.name)(**fields)
        return value

    def _run(self, function: str, positional: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        storages: dict[int, tuple[str, np.ndarray]] = {}

        def described(value: Any) -> Any:
            if isinstance(value, Pointer):
                storage = value.tensor.untyped_storage()
                name = storages.setdefault(
                    storage.data_ptr(),
                    (f"{len(self.calls)}.{len(storages)}", torch.empty(0, dtype=torch.uint8).set_(storage).numpy()),
                )[0]
                return {"array": name, "offset": value.tensor.data_ptr() - storage.data_ptr()}
            if isinstance(value, Struct):
                return {
                    "struct": value.name,
                    "fields": {name: described(field) for name, field in value.fields.items()},
                }
            return value

        call = {
            "function": function,
            "positional": [described(value) for value in positional],
            "keywords": {name: described(value) for name, value in keywords.items()},
            "schedule": len(self.calls) % 3,
        }
        call["arrays"] = [name for name, _ in storages.values()]
        self.arrays |= {f"{name}/before": array.copy() for name, array in storages.values()}
        getattr(self._kernels, function)(
            *map(self._real, positional), **{name: self._real(value) for name, value in keywords.items()}
        )
        self.arrays |= {f"{name}/after": array.copy() for name, array in storages.values()}
        self.calls.append(call)


def run_row_kernels(generator: Generator, patch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    odd, apart = cases.odd_strides(generator), cases.columns_apart(generator)
    odd = odd._replace(logits=odd.logits[:, :2], targets=odd.targets[:4])
    few_rows = (odd, cases.capped(odd), apart, cases.capped(apart), cases.minus_infinity(generator))
    for multiprocessors in (cases.MANY, cases.FEW):
        host_device.use(recorder, patch, multiprocessors)
        for dtype in cases.DTYPES:
            for case in few_rows:
                rows = cases.make_rows(case, dtype, "cpu")
                CUDA.forward(rows, cases.PLAIN)
                CUDA.backward(rows, CUDA.forward(rows), cases.upstream_of(rows), skew=1)
                last = torch.full((2,), case.logits.shape[:-1].numel() - 1)
                rows = rows._replace(targets=rows.targets[:2], temperature=rows.temperature[:1])
                outputs = cases.unwritten_stats(rows, cases.PLAIN)
                cuda.token_stats_forward(rows, outputs, index=torch.cat([last[:1], last[1:] + 1]))
    host_device.use(recorder, patch)
    CUDA.forward(cases.make_rows(cases.gaussian(cases.MANY_SEGMENTS, generator, 2), torch.bfloat16, "cpu"))
    rows = cases.make_rows(cases.targets_in_every_tile(generator), torch.bfloat16, "cpu")
    outputs = CUDA.forward_in_tiles(rows)
    dtarget = torch.empty_like(outputs.logp)
    CUDA.backward_in_tiles(rows, outputs, cases.upstream_of(rows), cases.SEGMENT, dtarget)


def run_objective_kernels(generator: Generator, patch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    host_device.use(recorder, patch)
    for name in (
        "grpo-k3-all",
        "gspo-product-kl",
        "gspo-token-kl",
        "gmpo",
        "gmpo-sequence",
        "cispo",
        "sapo",
        "nft-odds",
    ):
        objective = OBJECTIVES[name]
        logp, entropy, batch = random_batch(generator, packed=True, per_token=True)
        evaluate("cuda", logp, batch, objective, entropy)
    rlkernels.set_backend("cuda")
    for multiprocessors, shared_bytes in ((cases.MANY, host_device.SHARED_BYTES), (cases.MANY, 0), (cases.FEW, 0)):
        host_device.use(recorder, patch, multiprocessors, shared_bytes)
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            # few rows of several pieces, or some of odd width
            vocab = 40001 if multiprocessors == cases.FEW else 4501
            logits = torch.randn(3, 5, vocab, generator=generator).to(dtype)
            both_ways(logits, logits_batch(generator, vocab), "dapo")
    for dtype in cases.DTYPES:
        values = torch.randn(9001, generator=generator).to(dtype)[1:]
        cuda.scale_unless_one(values, torch.tensor(0.3, dtype=compute_dtype(dtype)))


def run_prefix_counts(generator: Generator, patch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    host_device.use(recorder, patch)
    ids = torch.randint(0, 2, (8, 300), generator=generator)
    ids[:, :150] = 0
    group_of = torch.tensor([2, 0, 3, 0, 2, 2, 3, 2])
    CUDA.prefix_counts(ids, torch.randint(0, 301, (8,), generator=generator), group_of, 4)
    CUDA.prefix_counts(ids.T[:260, :3].contiguous(), torch.full((260,), 3), torch.zeros(260, dtype=torch.int64), 1)


@pytest.fixture(scope="module")
def recording(host_device_kernels: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("recording") / "recording.npz"
    recorder = Recorder(host_device_kernels)
    generator = torch.Generator().manual_seed(1)
    with pytest.MonkeyPatch.context() as patch:
        for module in (params, cuda):
            patch.setattr(module, "address", pointer_to)
        for run in (run_row_kernels, run_objective_kernels, run_prefix_counts):
            run(generator, patch, recorder)
    rlkernels.set_backend("auto")
    np.savez(path, calls=json.dumps(recorder.calls), **recorder.arrays)
    return path


def path_of_library(name: str) -> str:
    command = ["g++", f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


class Sanitized(NamedTuple):
    name: str
    modules: Path

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        # AddressSanitizer looks for libstdc++ when it starts, and Python does not bring it
        libraries = [
            subprocess.run(
                ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
            ).stdout.strip()
            for name in (SANITIZERS[self.name], "libstdc++.so")
        ]
        environment = os.environ | ENVIRONMENT | {"LD_PRELOAD": ":".join(libraries)}
        return subprocess.run(
            [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
        )


@pytest.fixture(scope="module", params=SANITIZERS)
def sanitized(request: pytest.FixtureRequest, sanitized_host_device: Callable[[str], Path]) -> Sanitized:
    return Sanitized(request.param, sanitized_host_device(request.param))


def kernels_in_sources() -> set[str]:
    sources = [*host_device.SOURCES.glob("cuda/*.cu"), *host_device.SOURCES.glob("cuda/*.cuh")]
    return {
        name
        for source in sources
        for name in re.findall(r"RLK_KERNEL\((?:[^()]|\([^()]*\))*\)\s*void\s+(\w+)\(", source.read_text())
    }


def test_every_kernel_is_clean(sanitized: Sanitized, recording: Path) -> None:
    (module,) = sanitized.modules.glob("_host_device.*.so")
    result = sanitized.run(str(TESTS / "replay_kernels.py"), str(module), str(recording))
    assert result.returncode == 0, result.stderr[:10000]
    launched = {re.match(r"\(?(\w+)", name)[1] for name in json.loads(result.stdout)}
    assert launched == kernels_in_sources()


FAULTS = {
    "none": ("faults.hand_over(out.ctypes.data, True, 0)", {"thread": None, "address": None}),
    "a removed barrier": ("faults.hand_over(out.ctypes.data, False, 0)", {"thread": "data race"}),
    "blocks that write the same": ("faults.write_from_every_block(out.ctypes.data)", {"thread": "data race"}),
    "an overrun of dynamic shared memory": (
        "faults.hand_over(out.ctypes.data, True, 4)",
        {"address": "heap-buffer-overflow"},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault: str, sanitized: Sanitized) -> None:
    launch, reports = FAULTS[fault]
    if sanitized.name not in reports:
        pytest.skip("the other sanitizer's")
    code = f"""
import sys
import numpy as np
sys.path.insert(0, {str(sanitized.modules)!r})
import _planted_faults as faults
out = np.zeros(2 * faults.threads, np.int32)
{launch}
"""
    result = sanitized.run("-c", code)
    report = reports[sanitized.name]
    if report is None:
        assert result.returncode == 0, result.stderr[:10000]
    else:
        assert result.returncode != 0
        assert report in result.stderr
        assert "planted_faults.cu" in result.stderr


@pytest.fixture(scope="module")
def faults(host_device_kernels: Any) -> Any:
    return host_device.load(Path(host_device_kernels.__file__).parent, "_planted_faults")


@pytest.mark.parametrize("schedule", [0, 1, 5], ids=["forwards", "backwards", "shuffled"])
def test_a_removed_barrier_shows_in_the_results(schedule: int, faults: Any) -> None:
    faults.set_schedule(schedule)
    expected = np.tile((np.arange(faults.threads) - 1) % faults.threads, 2)
    out = np.zeros(2 * faults.threads, np.int32)
    faults.hand_over(out.ctypes.data, True, 0)
    np.testing.assert_array_equal(out, expected)
    faults.hand_over(out.ctypes.data, False, 0)
    assert (out != expected).any()
    faults.set_schedule(0)


@pytest.mark.parametrize(
    "in_warp, waits", [(True, ["__syncwarp", "__syncthreads"]), (False, ["thread 63", "mask of other lanes"])]
)
def test_threads_that_wait_for_each_other(in_warp: bool, waits: list[str], faults: Any) -> None:
    with pytest.raises(RuntimeError, match=r"wait_for_each_other_kernel.*block 0") as error:
        faults.wait_for_each_other(in_warp)
    assert all(wait in str(error.value) for wait in waits)


def test_lanes_that_are_not_there(faults: Any) -> None:
    """They have exited or, in the last warp, never were: nobody waits for them, and they have no values."""
    for threads in (64, 40):
        out = np.zeros(64, np.int32)
        faults.leave_early(out.ctypes.data, threads)
        even = np.arange(0, threads, 2)
        np.testing.assert_array_equal(out[even], even ^ 2)
        np.testing.assert_array_equal(out[even + 1], -1)
    votes = np.zeros(64, np.uint32)
    faults.vote(votes.ctypes.data, 40)
    of_three = [
        sum(1 << lane for lane in range(count) if (first + lane) % 3 == 0) for first, count in ((0, 32), (32, 8))
    ]
    np.testing.assert_array_equal(votes[:40], np.repeat(np.array(of_three, np.uint32), [32, 8]))
