"""The Triton kernels in the configurations that are launched, compiled for GPUs that need not be there.

Run as a script with a target's name, this file compiles all of them and prints what they spill.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rlkernels.ops.rows import Wanted, compute_dtype
from rlkernels.triton_kernels import configs, policy_objective, policy_sweep, prefix_counts, token_stats

if not isinstance(token_stats.token_stats_forward_kernel, triton.JITFunction):
    raise RuntimeError("Triton's interpreter is on, and its kernels do not compile: unset TRITON_INTERPRET")

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TRITON_TYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
VOCAB = 151936  # Qwen's


_NUMBERS = ("temperature_stride", "ignore_index", "inner", "vocab", "vocab_start", "width", "stored_rows")


class Compilation(NamedTuple):
    name: str
    kernel: Any
    types: dict[str, str]  # of every argument; those of `constants` are left out
    constants: dict[str, Any]
    aligned: tuple[str, ...]  # arguments known to be divisible by 16, as Triton finds out at a launch
    num_warps: int


def sweep_compilation(
    kernel: Any, dtype: torch.dtype, label: str, unused: tuple[str, ...], layout: str = "contiguous"
) -> Compilation:
    launch = configs.row_sweep(dtype, VOCAB)
    number = "*" + TRITON_TYPES[compute_dtype(dtype)]
    types = dict.fromkeys(kernel.arg_names, number)
    types |= dict.fromkeys(("logits", "dlogits"), "*" + TRITON_TYPES[dtype])
    types |= dict.fromkeys(_NUMBERS, "i32")
    types |= dict.fromkeys(("stride_outer", "stride_inner", "stride_vocab"), "i64")
    types |= {"targets": "*i64", "index": "*i64", "is_top1": "*i1"}
    constants: dict[str, Any] = {"BLOCK": launch.block, **dict.fromkeys(unused)}
    pointers = tuple(name for name, kind in types.items() if kind.startswith("*"))
    aligned: tuple[str, ...] = pointers
    if layout != "strided":
        constants["stride_vocab"] = 1
    if layout == "contiguous":
        aligned = (*pointers, "width", "stride_outer", "stride_inner")
    name = f"{kernel.__name__} {TRITON_TYPES[dtype]} {label}"
    return Compilation(name, kernel, types, constants, aligned, launch.num_warps)


OBJECTIVE_KINDS = ("clip", "clip detached", "geometric", "cispo", "sapo", "nft", "reinforce")


def objective_compilations(kind: int) -> Iterator[Compilation]:
    """Of packed float32 batches, with all that a batch can hold."""
    block, num_warps = configs.OBJECTIVE_TOKENS
    is_geometric = OBJECTIVE_KINDS[kind] == "geometric"
    flags = {
        "ADVANTAGES_PER_TOKEN": True,
        "POLICY_WEIGHT_PER_TOKEN": False,
        "SUCCESS_RATE_PER_TOKEN": False,
        "REDUCTION": 1,
        "ENTROPY_REDUCTION": 0,
        "KIND": kind,
        "CLIPS_SEQUENCE": False,
        "POOLS": OBJECTIVE_KINDS[kind] in ("clip detached", "geometric"),
        "SUMS_SEQUENCE": False,
        "HAS_KL": True,
    }
    number_types = {
        **dict.fromkeys(("options", "counts", "normalizer", "entropy_normalizer", "sums", "metrics"), "*fp64"),
        **dict.fromkeys(("tokens", "sequences", "width"), "i32"),
        "mask": "*u8",
        "cu_seqlens": "*i64",
    }
    for kernel in (policy_objective.count_kernel, policy_objective.objective_kernel, policy_objective.add_up_kernel):
        types = {name: number_types.get(name, "*fp32") for name in kernel.arg_names}
        constants = {name: value for name, value in flags.items() if name in types} | {"BLOCK": block}
        pointers = tuple(name for name, kind_of in types.items() if kind_of.startswith("*"))
        yield Compilation(f"{kernel.__name__} {OBJECTIVE_KINDS[kind]}", kernel, types, constants, pointers, num_warps)
    if is_geometric:
        return
    for dtype in (torch.float32, torch.bfloat16):
        job = sweep_compilation(policy_sweep.policy_sweep_kernel, dtype, OBJECTIVE_KINDS[kind], ())
        names = job.kernel.arg_names
        types = job.types | {name: number_types[name] for name in number_types if name in names}
        constants = job.constants | {name: value for name, value in flags.items() if name in names}
        # `width` is a sequence's here, the row's is `vocab`
        aligned = (*(name for name in job.aligned if name != "width"), "vocab")
        yield job._replace(types=types, constants=constants, aligned=aligned)


def compilations() -> Iterator[Compilation]:
    forward, backward = token_stats.token_stats_forward_kernel, token_stats.token_stats_backward_kernel
    passes = (
        (forward, "states", ("index",), Wanted._fields),
        (backward, "dtarget", (), ("entropy", "dentropy", "dlse")),
    )
    for kernel, of_tiles, of_rows, optional in passes:
        for dtype in TRITON_TYPES:
            yield sweep_compilation(kernel, dtype, "softcap", (of_tiles, *of_rows))
            yield sweep_compilation(kernel, dtype, "plain", (of_tiles, *of_rows, "softcap"))
            yield sweep_compilation(kernel, dtype, "softcap, tile", of_rows)
            yield sweep_compilation(kernel, dtype, "plain, tile", (*of_rows, "softcap"))
        logp_alone = (of_tiles, *of_rows, "softcap", *optional)
        yield sweep_compilation(kernel, torch.bfloat16, "logp alone", logp_alone)
        yield sweep_compilation(kernel, torch.bfloat16, "odd vocabulary", (of_tiles, *of_rows, "softcap"), layout="odd")
        yield sweep_compilation(kernel, torch.bfloat16, "strided", (of_tiles, *of_rows), layout="strided")
        yield sweep_compilation(kernel, torch.bfloat16, "strided, tile", of_rows, layout="strided")
    for dtype in TRITON_TYPES:
        yield sweep_compilation(forward, dtype, "indexed", ("states", "softcap", *Wanted._fields))

    for kind in range(len(OBJECTIVE_KINDS)):
        yield from objective_compilations(kind)
    block, num_warps = configs.SCALE
    types = {"values": "*bf16", "factor": "*fp32", "count": "i32"}
    yield Compilation("scale_kernel", policy_sweep.scale_kernel, types, {"BLOCK": block}, ("values",), num_warps)

    block, num_warps = configs.PREFIX_TOKENS
    for kernel in (prefix_counts.common_prefix_kernel, prefix_counts.sum_from_right_kernel):
        types = dict.fromkeys(kernel.arg_names, "*i64") | {
            "histogram": "*i32",
            "counts": "*i32",
            "rows": "i32",
            "width": "i32",
        }
        pointers = tuple(name for name in kernel.arg_names if types[name].startswith("*"))
        yield Compilation(kernel.__name__, kernel, types, {"BLOCK": block}, pointers, num_warps)


def compiled(job: Compilation, target: GPUTarget) -> Any:
    names = job.kernel.arg_names
    signature = {name: "constexpr" if name in job.constants else job.types[name] for name in names}
    aligned = [name for name in job.aligned if name in names and name not in job.constants]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(job.kernel, signature, job.constants, attributes)
    return triton.compile(source, target=target, options={"num_warps": job.num_warps})


def spilled_registers(kernel: Any) -> int:
    """Of AMD's compiler; NVIDIA's binaries are read by sass.py."""
    return int(re.search(r"\.vgpr_spill_count: *(\d+)", kernel.asm["amdgcn"])[1])


if __name__ == "__main__":
    for job in compilations():
        print(json.dumps({"kernel": job.name, "spills": spilled_registers(compiled(job, TARGETS[sys.argv[1]]))}))
