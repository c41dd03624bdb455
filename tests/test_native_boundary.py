"""The structs that enter native code: what is wrong with one is said before a pointer of it is followed.

Each check by itself here, on the C++ kernels and on CUDA's; random structs under AddressSanitizer and UBSan in
fuzz_native.py, for RLKERNELS_FUZZ_SECONDS.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz_native
import host_device
import numpy as np
import pybind11
import pytest
import row_cases as cases
import torch
from row_cases import CUDA, RowKernels, triton_kernels
from test_cuda_sanitized import Sanitized
from torch import Generator, Tensor

from rlkernels import _native, checks
from rlkernels.backends.params import Params
from rlkernels.ops.objective_options import CISPO_KIND, CLIP, GEOMETRIC, TOKEN_MEAN, ObjectiveOptions
from rlkernels.ops.policy_objective import ObjectiveBatch, empty_result
from rlkernels.ops.rows import Rows, SavedStats, Upstream, Wanted, empty_row_stats

TESTS = Path(__file__).parent
N, VOCAB, SEQUENCES, WIDTH = 6, 7, 2, 3
LARGEST = 1 << 47


class Described:
    """In a native module's place for `Params`: keeps each struct as its name and its fields."""

    def __getattr__(self, name: str) -> Callable[..., dict[str, Any]]:
        return lambda **fields: {"struct": name, **fields}


def built(module: Any, described: dict[str, Any]) -> Any:
    fields = {
        name: built(module, value) if isinstance(value, dict) else value
        for name, value in described.items()
        if name != "struct"
    }
    return getattr(module, described["struct"])(**fields)


class Sound:
    """Structs that nothing is wrong with, of arrays that live as long."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def floats(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        one = torch.ones(1)
        self.rows = Rows(floats(2, 3, VOCAB), torch.arange(N), torch.ones(N), one.clone(), one.clone(), -100)
        self.stats = empty_row_stats(self.rows, Wanted(*[True] * 5))
        self.index = torch.arange(N)
        self.states = torch.zeros(N, _native.row_state_bytes // 8, dtype=torch.float64)
        self.saved = SavedStats(*floats(3, N))
        self.upstream = Upstream(*floats(3, N))
        self.dlogits, self.dtarget = floats(2, 3, VOCAB), floats(N)
        self.options = ObjectiveOptions(CLIP, 0, kl_coef=0.1, entropy_coef=0.01)
        self.batch = ObjectiveBatch(
            mask=torch.ones(N, dtype=torch.bool),
            old_logp=floats(N),
            ref_logp=floats(N),
            weight=torch.ones(N),
            advantages=floats(SEQUENCES),
            policy_weight=torch.ones(N),
            success_rate=torch.full((SEQUENCES,), 0.5),
            cu_seqlens=torch.tensor([0, 2, N]),
            sequences=SEQUENCES,
            reduction=TOKEN_MEAN,
            entropy_reduction=TOKEN_MEAN,
            normalizer=torch.ones(1, dtype=torch.float64),
            entropy_normalizer=torch.ones(1, dtype=torch.float64),
        )
        self.logp, self.entropy = floats(N), floats(N)
        self.result = empty_result(self.logp, self.options, need_grad=True)
        self.prefixes = (
            torch.zeros(4, WIDTH, dtype=torch.int64),
            torch.full((4,), WIDTH),
            torch.arange(4),
            torch.tensor([0, 2, 4]),
            torch.zeros(4, WIDTH, dtype=torch.int32),
        )

    def describe(self, entry: str) -> dict[str, Any]:
        params = Params(Described(), threads=1)
        if entry == "token_stats_forward":
            return params.forward(self.rows, self.stats, None, self.states, self.index)
        if entry == "token_stats_backward":
            return params.backward(self.rows, self.saved, self.upstream, self.dlogits, None, self.dtarget)
        if entry == "policy_objective":
            tensors = {"logp": self.logp, "entropy": self.entropy, **self.result._asdict()}
            return params.objective(self.options, self.batch, **tensors)
        if entry == "policy_sweep":
            stats = self.stats._replace(**dict.fromkeys(("log_sum_sq_probs", "mean_logits", "is_top1"), torch.empty(0)))
            return params.sweep(self.rows, self.options, self.batch, stats, self.dlogits)
        return params.prefix_counts(*self.prefixes)


def call(module: Any, entry: str, described: dict[str, Any]) -> None:
    params = built(module, described)
    if module is _native:
        getattr(module, entry)(params)
        return
    more: dict[str, int] = {}
    workspace = torch.empty(0)
    if entry == "policy_objective":
        workspace = torch.empty(module.policy_objective_workspace_bytes(params) // 8, dtype=torch.float64)
    elif entry == "policy_sweep":
        workspace = torch.empty(module.policy_sweep_workspace_bytes(params, 1) // 8, dtype=torch.float64)
        more["shared_limit"] = 0
    if entry in ("token_stats_forward", "policy_objective", "policy_sweep"):
        more["workspace"] = workspace.data_ptr() if workspace.numel() else 0
    if entry in ("token_stats_backward", "policy_sweep"):
        more["multiprocessors"] = 1
    getattr(module, entry)(params, stream=0, **more)


def change(described: dict[str, Any], path: str, value: Any) -> None:
    """Sets a field, or adds to an address where the value is a string."""
    *outer, name = path.split(".")
    for field in outer:
        described = described[field]
    described[name] = described[name] + int(value) if isinstance(value, str) else value


@pytest.fixture(params=["cpu", "cuda"])
def native(request: pytest.FixtureRequest) -> Any:
    return _native if request.param == "cpu" else request.getfixturevalue("host_device_kernels")


ENTRIES = tuple(fuzz_native.ENTRIES)

FORWARD, BACKWARD, OBJECTIVE, SWEEP, PREFIXES = ENTRIES
EITHER = (FORWARD, BACKWARD)

# entry points, fields with their values, the start of the message
REFUSED: dict[str, tuple[tuple[str, ...], dict[str, Any], str]] = {
    **{
        f"{name} {value}": (EITHER, {f"logits.{name}": value}, rf"LogitsView\.{name}: expected .*got {value}$")
        for name in ("outer", "inner", "vocab", "count", "stride_outer", "stride_inner", "stride_vocab")
        for value in (-1, -(2**63))
    },
    **{
        f"{name} too large": (EITHER, {f"logits.{name}": LARGEST + 1}, rf"LogitsView\.{name}: .*got {LARGEST + 1}$")
        for name in ("outer", "inner", "vocab", "count")
    },
    "integer past 64 bits": (EITHER, {"logits.inner": 2**63}, r"LogitsView\.inner: expected an integer of 64 bits"),
    "a float for an integer": (EITHER, {"logits.inner": 3.0}, r"LogitsView\.inner: expected an integer.*got 3\.0"),
    "a negative address": (EITHER, {"logits.data": -1}, r"LogitsView\.data: expected an address, got -1"),
    "a struct of another kind": (EITHER, {"scaling": 3}, r"scaling: expected a struct of this module, got 3"),
    "dtype 4": (EITHER, {"logits.dtype": 4}, r"LogitsView\.dtype: expected a number in \[0, 3\], got 4"),
    "dtype NaN": (EITHER, {"logits.dtype": torch.nan}, r"LogitsView\.dtype: expected an integer.*got nan"),
    "rows that overflow": (
        EITHER,
        {"logits.outer": 2**40, "logits.inner": 2**40},
        r"LogitsView\.inner: expected at most .* rows, got",
    ),
    "a stride that overflows": (EITHER, {"logits.stride_outer": 2**62}, r"LogitsView\.data: .*64-bit offsets"),
    "a stride whose bytes overflow": (EITHER, {"logits.stride_inner": 2**60}, r"LogitsView\.data: .*64-bit offsets"),
    "a row without columns whose offset overflows": (
        (FORWARD,),
        {"logits.vocab": 0, "logits.stride_outer": 2**62, "logits.data": 0},
        r"LogitsView\.data: .*64-bit offsets",
    ),
    "a gradient that overflows": (
        (FORWARD,),
        {"logits.count": 2**40, "logits.vocab": 2**40, "vocab": 2**40, "logits.stride_vocab": 0},
        r"LogitsView\.count: .*64-bit offsets",
    ),
    "no logits": (EITHER, {"logits.data": 0}, r"LogitsView\.data: expected the address of an array, got none"),
    "misaligned logits": (EITHER, {"logits.data": "1"}, r"LogitsView\.data: expected an address that 4 divides"),
    "misaligned index": ((FORWARD,), {"logits.index": "4"}, r"LogitsView\.index: .*that 8 divides"),
    "an index of no rows": ((FORWARD,), {"logits.outer": 0}, r"LogitsView\.index: expected stored rows"),
    "fewer rows than logits": ((BACKWARD,), {"logits.count": N - 1}, r"LogitsView\.count: .*= 6 rows.*got 5"),
    "more rows than logits": ((BACKWARD,), {"logits.count": N + 1}, r"LogitsView\.count: .*= 6 rows.*got 7"),
    "fewer columns than logits": (EITHER, {"vocab": VOCAB - 1}, r"Params\.vocab: expected .*\[7, .*got 6"),
    "a tile before the first column": (EITHER, {"vocab_start": -1}, r"vocab_start: .*in \[0, 0\], got -1"),
    "a tile past the last column": (EITHER, {"vocab": 9, "vocab_start": 3}, r"vocab_start: .*in \[0, 2\], got 3"),
    "no targets": (EITHER, {"targets": 0}, r"Params\.targets: expected the address"),
    "misaligned targets": (EITHER, {"targets": "1"}, r"Params\.targets: .*that 8 divides"),
    "temperature_stride": (EITHER, {"scaling.temperature_stride": 2}, r"RowScaling\.temperature_stride: .*got 2"),
    "no temperature": (EITHER, {"scaling.temperature": 0}, r"RowScaling\.temperature: expected the address"),
    "no logit_scale": (EITHER, {"scaling.logit_scale": 0}, r"RowScaling\.logit_scale: expected the address"),
    **{
        f"misaligned {name}": (EITHER, {f"scaling.{name}": "2"}, rf"RowScaling\.{name}: .*that 4 divides")
        for name in ("temperature", "softcap", "logit_scale")
    },
    "a negative number of threads": (ENTRIES[:3] + ENTRIES[4:], {"threads": -1}, r"threads: .*got -1"),
    "threads past 32 bits": (ENTRIES[:3], {"threads": 2**31}, r"threads: expected an integer of 32 bits"),
    # forward
    **{
        f"misaligned out.{name}": ((FORWARD,), {f"out.{name}": "2"}, rf"RowStatsOut\.{name}: .*that 4 divides")
        for name in ("logp", "entropy", "lse", "log_sum_sq_probs", "mean_logits", "row_max", "log_sum_exp")
    },
    "a first tile without states": ((FORWARD,), {"vocab": 9, "states": 0}, r"states: expected the address"),
    "a last tile without states": (
        (FORWARD,),
        {"vocab": 9, "vocab_start": 2, "states": 0},
        r"states: expected the address",
    ),
    "misaligned states": ((FORWARD,), {"states": "4"}, r"states: .*that 8 divides"),
    # backward
    **{
        f"no {name}": ((BACKWARD,), {name: 0}, rf"Params\.{name}: expected the address")
        for name in ("row_max", "log_sum_exp", "entropy", "dlogits")
    },
    **{
        f"misaligned {name} of backward": ((BACKWARD,), {name: "2"}, rf"Params\.{name}: .*that 4 divides")
        for name in ("dlogp", "dentropy", "dlse", "row_max", "log_sum_exp", "entropy", "dlogits", "dtarget")
    },
    # options
    **{
        f"{name} {value}": ((OBJECTIVE, SWEEP), {f"options.{name}": value}, rf"ObjectiveOptions\.{name}: ")
        for name, values in {
            "kind": (-1, 7, 0.5, torch.inf),
            "level": (-1, 3),
            "kl_estimator": (0, 4, torch.nan),
            "prompt_weight": (-1, 3),
            "clips_sequence": (2, -1, torch.nan),
            "kl_importance_weighted": (2, 0.5),
        }.items()
        for value in values
    },
    # objective
    "bfloat16 objective": ((OBJECTIVE,), {"dtype": 2}, r"Params\.dtype: .*\[0, 1\], got 2"),
    "reduction": ((OBJECTIVE, SWEEP), {"reduction": 5}, r"\.reduction: .*\[0, 4\], got 5"),
    "entropy_reduction": ((OBJECTIVE, SWEEP), {"entropy_reduction": -1}, r"\.entropy_reduction: .*got -1"),
    "negative tokens": ((OBJECTIVE, SWEEP), {"tokens": -1}, r"\.tokens: .*got -1"),
    "negative sequences": ((OBJECTIVE, SWEEP), {"sequences": -1}, r"\.sequences: .*got -1"),
    "too many sequences": ((OBJECTIVE, SWEEP), {"sequences": LARGEST + 1}, r"\.sequences: "),
    "tokens of no sequence": ((OBJECTIVE, SWEEP), {"sequences": 0}, r"\.sequences: expected some for 6 tokens"),
    "a width that does not fit": (
        (OBJECTIVE, SWEEP),
        {"cu_seqlens": 0, "width": 4},
        r"\.width: expected sequences of 6 tokens in all.*got 2 of 4",
    ),
    "a width that overflows": (
        (OBJECTIVE, SWEEP),
        {"cu_seqlens": 0, "width": 2**47, "sequences": 2**47},
        r"\.width: expected sequences of 6 tokens",
    ),
    "a negative width": ((OBJECTIVE, SWEEP), {"cu_seqlens": 0, "width": -3}, r"\.width: .*got -3"),
    "advantages_per_token": ((OBJECTIVE, SWEEP), {"advantages_per_token": 2}, r"\.advantages_per_token: .*got 2"),
    **{
        f"no {name} of a batch": ((OBJECTIVE, SWEEP), {name: 0}, rf"\.{name}: expected the address")
        for name in ("mask", "ref_logp", "advantages")
    },
    **{
        f"misaligned {name} of a batch": ((OBJECTIVE, SWEEP), {name: "2"}, rf"\.{name}: .*divides")
        for name in (
            *("cu_seqlens", "old_logp", "ref_logp", "weight", "advantages", "policy_weight", "success_rate"),
            *("normalizer", "entropy_normalizer"),
        )
    },
    **{
        f"no {name} of an objective": ((OBJECTIVE,), {name: 0}, rf"Params\.{name}: expected the address")
        for name in ("logp", "entropy", "loss", "metrics")
    },
    **{
        f"misaligned {name} of an objective": ((OBJECTIVE,), {name: "2"}, rf"Params\.{name}: .*divides")
        for name in ("logp", "entropy", "loss", "metrics", "dlogp", "dentropy")
    },
    # sweep
    "a sweep of a tile": ((SWEEP,), {"stats.vocab": 9}, r"stats\.vocab: expected whole rows, got 7 of 9"),
    "a sweep of sequences": ((SWEEP,), {"objective.options.kind": GEOMETRIC}, r"options: expected a token-level"),
    "a sweep of a sequence's ratio": ((SWEEP,), {"objective.options.level": 1}, r"options: expected a token-level"),
    "a sweep of fewer tokens": ((SWEEP,), {"objective.tokens": 5}, r"tokens: expected the logits' 6 rows, got 5"),
    "a sweep of another dtype": ((SWEEP,), {"objective.dtype": 0}, r"objective\.dtype: .*got 0"),
    **{
        f"a sweep without {name}": ((SWEEP,), {f"stats.out.{name}": 0}, rf"stats\.out\.{name}: expected the address")
        for name in ("logp", "row_max", "log_sum_exp", "entropy")
    },
    "a sweep without a gradient": ((SWEEP,), {"dlogits": 0}, r"PolicySweepParams\.dlogits: expected the address"),
    "a sweep's misaligned gradient": ((SWEEP,), {"dlogits": "2"}, r"PolicySweepParams\.dlogits: .*that 4 divides"),
    "a sweep's threads": ((SWEEP,), {"stats.threads": -1}, r"threads: .*got -1"),
    # prefixes
    **{
        f"{name} -1 of prefixes": ((PREFIXES,), {name: -1}, rf"PrefixCountsParams\.{name}: .*got -1")
        for name in ("rows", "width", "groups")
    },
    "tokens that overflow": ((PREFIXES,), {"rows": 2**40, "width": 2**40}, r"\.width: .*64-bit offsets"),
    "rows of no group": ((PREFIXES,), {"groups": 0}, r"\.groups: expected some for 4 rows"),
    **{
        f"no {name} of prefixes": ((PREFIXES,), {name: 0}, rf"\.{name}: expected the address")
        for name in ("token_ids", "lengths", "row_order", "group_starts", "counts")
    },
    **{
        f"misaligned {name} of prefixes": ((PREFIXES,), {name: "2"}, rf"\.{name}: .*divides")
        for name in ("token_ids", "lengths", "row_order", "group_starts", "counts")
    },
}

BATCH_FIELDS = {
    *ObjectiveBatch._fields,
    *("dtype", "tokens", "width", "options", "advantages_per_token", "policy_weight_per_token"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_struct_that_cannot_be_is_refused(name: str, native: Any) -> None:
    entries, changes, message = REFUSED[name]
    for entry in entries:
        sound = Sound()
        described = sound.describe(entry)
        for path, value in changes.items():
            in_batch = entry == SWEEP and path.split(".")[0] in BATCH_FIELDS
            change(described, f"objective.{path}" if in_batch else path, value)
        with pytest.raises(ValueError, match=message):
            call(native, entry, described)


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_sound_struct_runs(entry: str, native: Any) -> None:
    sound = Sound()
    call(native, entry, sound.describe(entry))


@pytest.mark.parametrize("entry", ENTRIES)
def test_nothing_needs_no_array(entry: str, native: Any) -> None:
    """Of a batch of nothing, whose sizes are 0, every address may be."""
    sound = Sound()
    described = sound.describe(entry)
    sizes = {"outer", "inner", "vocab", "count", "tokens", "sequences", "width", "rows", "groups"}
    kept = {"loss", "metrics"}

    def emptied(fields: dict[str, Any]) -> dict[str, Any]:
        return {
            name: emptied(value)
            if isinstance(value, dict)
            else 0
            if name in sizes or (isinstance(value, int) and value > 2**20 and name not in kept)
            else value
            for name, value in fields.items()
        }

    call(native, entry, emptied(described))


def test_threads_are_needed_where_they_work() -> None:
    for entry in ENTRIES:
        sound = Sound()
        described = sound.describe(entry)
        change(described, "stats.threads" if entry == SWEEP else "threads", 0)
        with pytest.raises(ValueError, match=r"threads: expected a number in \[1, "):
            call(_native, entry, described)


def test_a_gradient_takes_all_of_the_logits_place_or_none(native: Any) -> None:
    memory = torch.zeros(3 * N * VOCAB)
    for entry in (BACKWARD, SWEEP):
        sound = Sound()
        sound.rows = sound.rows._replace(logits=memory[: N * VOCAB].view(2, 3, VOCAB))
        described = sound.describe(entry)
        for offset, fits in ((0, entry == BACKWARD), (1, False), (N * VOCAB - 1, False), (N * VOCAB, True)):
            change(described, "dlogits", memory[offset:].data_ptr())
            if fits:
                call(native, entry, described)
            else:
                with pytest.raises(ValueError, match=r"dlogits: expected memory of its own"):
                    call(native, entry, described)
    nothing = sound.describe(BACKWARD)
    for path, value in {"logits.vocab": 0, "dlogits": memory[1:].data_ptr()}.items():
        change(nothing, path, value)
    call(native, BACKWARD, nothing)  # a tile of no columns shares no memory
    sound = Sound()
    sound.rows = sound.rows._replace(logits=memory[: 2 * N * VOCAB].view(2, 3, 2 * VOCAB)[..., ::2])
    sound.dlogits = memory
    with pytest.raises(ValueError, match=r"dlogits: expected memory of its own or that of contiguous logits"):
        call(native, BACKWARD, sound.describe(BACKWARD))


def test_what_a_sweep_does_not_form_is_not_asked_of_it(native: Any) -> None:
    for name in ("log_sum_sq_probs", "mean_logits", "is_top1"):
        sound = Sound()
        described = sound.describe(SWEEP)
        change(described, f"stats.out.{name}", getattr(sound.stats, name).data_ptr())
        with pytest.raises(ValueError, match=r"stats\.out: expected logp, entropy and lse alone"):
            call(native, SWEEP, described)


def test_a_device_scales_what_is_there(host_device_kernels: Any) -> None:
    values, factor = torch.ones(3), torch.ones(1)
    sound = {"values": values.data_ptr(), "dtype": 1, "count": 3, "factor": factor.data_ptr(), "stream": 0}
    host_device_kernels.scale_unless_one(**sound)
    for name, value in (("dtype", 4), ("count", -1), ("values", 0), ("factor", 0), ("values", values.data_ptr() + 1)):
        with pytest.raises(ValueError, match=rf"scale_unless_one\.{name}: expected "):
            host_device_kernels.scale_unless_one(**sound | {name: value})


def test_a_device_has_a_workspace_and_multiprocessors(host_device_kernels: Any) -> None:
    sound = Sound()
    objective = built(host_device_kernels, sound.describe(OBJECTIVE))
    for address in (0, sound.states.data_ptr() + 4):
        with pytest.raises(ValueError, match="workspace"):
            host_device_kernels.policy_objective(objective, stream=0, workspace=address)
    backward = built(host_device_kernels, sound.describe(BACKWARD))
    with pytest.raises(ValueError, match=r"multiprocessors: .*got 0"):
        host_device_kernels.token_stats_backward(backward, stream=0, multiprocessors=0)


def test_a_buffer_of_more_than_there_is() -> None:
    for size in (2**64 - 1, 2**63, LARGEST):
        with pytest.raises(MemoryError):
            _native.Buffer(size)


SEGMENT = cases.SEGMENT
LABELS = (-(2**63), 1 - 2**63, -(2**40), -SEGMENT, -1, SEGMENT + 5, 2 * SEGMENT, 2**40, 2**63 - 1)


class Guard:
    """Triton's interpreter may touch the tensors that a kernel was called with, and nothing else."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        from triton.runtime import interpreter

        self.ranges: list[tuple[int, int]] = []
        arguments = interpreter.GridExecutor._init_args_hst

        def noted(executor: Any, *given: Any) -> Any:
            positional, named = arguments(executor, *given)
            tensors = [value for value in (*positional, *named.values()) if isinstance(value, Tensor)]
            self.ranges = [self.extent(tensor) for tensor in tensors if tensor.numel()]
            return positional, named

        patch.setattr(interpreter.GridExecutor, "_init_args_hst", noted)
        for name, mask_at in (("create_masked_load", 1), ("create_masked_store", 2), ("create_atomic_rmw", 3)):
            patch.setattr(interpreter.InterpreterBuilder, name, self.guarded(name, mask_at))

    @staticmethod
    def extent(tensor: Tensor) -> tuple[int, int]:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()

    def guarded(self, name: str, mask_at: int) -> Callable[..., Any]:
        from triton.runtime import interpreter

        inner = getattr(interpreter.InterpreterBuilder, name)

        def access(builder: Any, *arguments: Any) -> Any:
            pointers, mask = arguments[int(name == "create_atomic_rmw")], arguments[mask_at]
            width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
            addresses = pointers.data[np.broadcast_to(mask.data != 0, pointers.data.shape)].astype(np.int64)
            inside = np.zeros(addresses.shape, bool)
            for begin, end in self.ranges:
                inside |= (addresses >= begin) & (addresses + width <= end)
            assert inside.all(), f"{name} outside of every tensor"
            return inner(builder, *arguments)

        return access


@pytest.fixture(params=["triton", "cuda", "cuda, split rows"])
def unchecked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RowKernels:
    """Kernels as on a GPU, where they alone see the values."""
    monkeypatch.setattr(checks, "values_are_checked", lambda device: False)
    if request.param == "triton":
        Guard(monkeypatch)
        return triton_kernels()
    multiprocessors = cases.FEW if request.param == "cuda, split rows" else cases.MANY
    host_device.use(request.getfixturevalue("host_device_kernels"), monkeypatch, multiprocessors)
    return CUDA


def labelled(labels: list[int], generator: Generator) -> Rows:
    case = cases.gaussian(SEGMENT + 5, generator, len(labels))._replace(targets=torch.tensor(labels))
    return cases.make_rows(case, torch.float32, "cpu")


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
def test_a_bad_label_is_never_an_address(unchecked: RowKernels, generator: Generator) -> None:
    """Wherever it points, and whatever overflows on the way: its row is NaN, and no other row knows of it."""
    good = torch.tensor([False] * len(LABELS) + [True] * 2)
    rows = labelled([*LABELS, 0, SEGMENT + 4], generator)
    alone = rows._replace(logits=rows.logits[:, good].clone(), targets=rows.targets[good])
    outputs, expected = unchecked.forward(rows), unchecked.forward(alone)
    in_tiles = unchecked.forward_in_tiles(rows)
    for field in cases.STATISTICS:
        values = getattr(outputs, field)
        assert values[~good].isnan().all(), field
        assert values[good].equal(getattr(expected, field)), field
        assert cases.same_bits(getattr(in_tiles, field), values), field
    upstream = cases.upstream_of(rows)
    dlogits = unchecked.backward(rows, outputs, upstream)[0]
    assert dlogits[~good].isnan().all()
    assert dlogits[good].equal(unchecked.backward(alone, expected, Upstream(*(d[good] for d in upstream)))[0])
    dtarget = torch.full_like(outputs.logp, 7.0)
    in_place = unchecked.backward_in_tiles(rows, outputs, upstream, SEGMENT, dtarget)
    assert in_place[~good].isnan().all()
    assert in_place[good].isfinite().all()
    assert (dtarget == 7.0).equal(~good)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
def test_a_bad_label_of_a_sweep_is_never_an_address(unchecked: RowKernels, generator: Generator) -> None:
    good = torch.tensor([False] * len(LABELS) + [True] * 2)
    rows = labelled([*LABELS, 0, SEGMENT + 4], generator)
    count = len(good)
    batch = Sound().batch._replace(
        mask=torch.ones(count, dtype=torch.bool),
        **dict.fromkeys(("old_logp", "ref_logp", "weight", "policy_weight", "success_rate")),
        cu_seqlens=torch.tensor([0, 3, count]),
    )
    stats = empty_row_stats(rows, Wanted(True, *[False] * 4))
    dlogits = torch.zeros_like(rows.logits)
    options = ObjectiveOptions(CISPO_KIND, 0, entropy_coef=0.01)
    unchecked.sweep.policy_sweep(rows, options, batch, stats, dlogits)
    assert stats.logp.isnan().equal(~good)
    assert dlogits[0].isnan().all(-1).equal(~good)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
def test_a_bad_row_number_is_never_an_address(unchecked: RowKernels, generator: Generator) -> None:
    rows = labelled([1, 2, 3], generator)
    bad = [-(2**63), -(2**40), -1, 3, 2**40, 2**63 - 1]
    index = torch.tensor([*bad, 2, 0])
    rows = rows._replace(targets=torch.ones(len(index), dtype=torch.int64))
    outputs = cases.unwritten_stats(rows, cases.PLAIN)
    unchecked.stats.token_stats_forward(rows, outputs, index=index)
    assert outputs.logp.isnan().tolist() == [True] * len(bad) + [False] * 2


@pytest.mark.parametrize("label", LABELS)
def test_the_cpu_says_so(label: int, generator: Generator) -> None:
    from rlkernels.backends import native

    rows = labelled([0, label], generator)
    outputs = cases.unwritten_stats(rows, cases.EVERYTHING)
    message = rf"targets: expected labels in \[0, {SEGMENT + 5}\).*got {label} at row 1"
    with pytest.raises(ValueError, match=message):
        native.token_stats_forward(rows, outputs)
    with pytest.raises(ValueError, match=message):
        native.token_stats_backward(
            rows, cases.saved_of(outputs), cases.upstream_of(rows), torch.empty_like(rows.logits)
        )


GARBAGE = (-(2**63), -1, 41, 2**40, 2**63 - 1)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize("value", GARBAGE)
@pytest.mark.parametrize("name", ["lengths", "row_order", "group_starts"])
def test_garbage_in_prefix_counts_is_never_an_address(name: str, value: int, unchecked: RowKernels) -> None:
    """The first, a middle and the last one in turn: what the array is of stays where it is."""
    for at in (0, 2, 3):
        arguments = {
            "lengths": torch.full((4,), 40),
            "row_order": torch.arange(4),
            "group_starts": torch.tensor([0, 1, 2, 4]),
        }
        arguments[name][at] = value
        counts = torch.zeros(4, 40, dtype=torch.int32)
        unchecked.prefixes.prefix_counts(torch.ones(4, 40, dtype=torch.int64), **arguments, counts=counts)
        with pytest.raises(ValueError, match=f"{name}: expected"):
            from rlkernels.backends import native

            native.prefix_counts(torch.ones(4, 40, dtype=torch.int64), **arguments, counts=counts)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize("value", GARBAGE)
def test_a_bad_border_is_never_an_address(value: int, unchecked: RowKernels) -> None:
    from rlkernels.backends import cuda

    for at in range(SEQUENCES + 1):
        sound = Sound()
        sound.batch.cu_seqlens[at] = value
        if unchecked.backend == "triton":
            from rlkernels.triton_kernels import policy_objective as kernels
        else:
            kernels = cuda
        for options in (sound.options, sound.options._replace(level=1)):
            kernels.policy_objective(sound.logp, sound.entropy, options, sound.batch, sound.result)
        stats = empty_row_stats(sound.rows, Wanted(True, *[False] * 4))
        unchecked.sweep.policy_sweep(sound.rows, sound.options, sound.batch, stats, sound.dlogits)


# fuzzing


def folder_with_sources(folder: Path) -> Path:
    root = TESTS.parent
    shutil.copytree(root / "csrc", folder / "csrc")
    shutil.copy(root / "CMakeLists.txt", folder)
    return folder


def build_sanitized(folder: Path) -> Path:
    """The module of a folder with sources, for the best instruction set of this processor and for any."""
    checks_of_compiler = "address,alignment,bounds,shift,signed-integer-overflow"
    flags = f"-fsanitize={checks_of_compiler} -fno-sanitize-recover=all -fno-omit-frame-pointer"
    options = {
        "CMAKE_BUILD_TYPE": "Debug",
        "CMAKE_CXX_FLAGS": flags,
        "CMAKE_CXX_FLAGS_DEBUG": "-O1 -g1",
        "CMAKE_LIBRARY_OUTPUT_DIRECTORY": str(folder),
        "Python_EXECUTABLE": sys.executable,
        "pybind11_DIR": pybind11.get_cmake_dir(),
        "RLK_CUDA": "OFF",
        "RLK_ISAS": ";".join(dict.fromkeys(("generic", _native.available_isas()[0]))),
    }
    configure = ["cmake", "-S", str(folder), "-B", str(folder / "build"), "-G", "Ninja"]
    configure += [f"-D{name}={value}" for name, value in options.items()]
    for command in (configure, ["cmake", "--build", str(folder / "build")]):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
    (module,) = folder.glob("_native.*.so")
    return module


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_with_sources(tmp_path_factory.mktemp("native"))


@pytest.fixture(scope="module")
def sanitized_native(sources: Path) -> Path:
    return build_sanitized(sources)


def fuzz(module: Path, seed: int, seconds: float, *more: str) -> subprocess.CompletedProcess[str]:
    progress = module.parent / "case"
    script = [str(TESTS / "fuzz_native.py"), str(module), "--seed", str(seed), "--seconds", str(seconds)]
    result = Sanitized("address", module.parent).run(*script, "--progress", str(progress), *more)
    if result.returncode != 0:
        (case,) = np.fromfile(progress, np.int64)
        print(f"fuzz_native.py {module.name} --seed {seed} --case {case} {' '.join(more)}")
    return result


SHARES = {"generic": 0.25, "best": 0.25, "cuda": 0.5}  # of the time; a device's threads take turns on one core


@pytest.mark.slow
@pytest.mark.parametrize("part", SHARES)
def test_fuzzing_finds_nothing(part: str, request: pytest.FixtureRequest) -> None:
    seconds = float(os.environ.get("RLKERNELS_FUZZ_SECONDS", 60)) * SHARES[part]
    seed = int(os.environ.get("RLKERNELS_TEST_SEED", random.SystemRandom().getrandbits(32)))
    if part == "cuda":
        (module,) = request.getfixturevalue("sanitized_host_device")("address").glob("_host_device.*.so")
        result = fuzz(module, seed, seconds)
    else:
        isa = "generic" if part == "generic" else _native.available_isas()[0]
        result = fuzz(request.getfixturevalue("sanitized_native"), seed, seconds, "--isa", isa)
    assert result.returncode == 0, result.stderr[-10000:]
    counts = json.loads(result.stdout)
    assert set(counts) == set(fuzz_native.ON_DEVICE if part == "cuda" else fuzz_native.ON_CPU)
    for outcome in ("ran", "refused"):
        assert sum(outcomes.get(outcome, 0) for outcomes in counts.values()) > 10, counts


@pytest.mark.slow
def test_fuzzing_finds_a_missing_check(sources: Path, sanitized_native: Path, tmp_path: Path) -> None:
    header = sources / "csrc" / "check_params.h"
    kept = shutil.copy(sanitized_native, tmp_path)
    sound = header.read_text()
    check = 's.require(view.count == 0 || view.count == stored, "count"'
    assert check in sound
    header.write_text(sound.replace(check, check.replace("view.count == stored", "true")))
    try:
        result = fuzz(build_sanitized(sources), 1, 300, "--isa", "generic")
    finally:
        header.write_text(sound)
        shutil.copy(kept, sanitized_native)
    assert result.returncode != 0
    assert "ERROR: AddressSanitizer: heap-buffer-overflow" in result.stderr
