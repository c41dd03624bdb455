"""What the GPU kernels are compiled to, read from the binaries: no GPU needed.

    python bench/gpu_static.py

writes docs/gpu_static.md for sm_80, sm_90 and sm_100, and fails where a kernel breaks a rule of `violations`. The CUDA
kernels are those that `rlkernels._native` was built with, the Triton kernels are compiled.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import sass
import triton_targets

from rlkernels import _native

DOCUMENT = Path(__file__).parents[1] / "docs" / "gpu_static.md"
NVIDIA = ("sm_80", "sm_90", "sm_100")

REGISTERS, WARPS, BLOCKS = 65536, 64, 32  # of a multiprocessor, in all three
SHARED_BYTES = {"sm_80": 164 << 10, "sm_90": 228 << 10, "sm_100": 228 << 10}
RESERVED_BYTES = 1024  # of shared memory, for each block; no block has all of it
WIDE = 128

# Row loops that read or write fewer than 128 bits at a time, by a pattern of their kernel's name.
EXEMPT_KERNELS = {
    r"Strided|strided": "columns are apart in memory, so that there is nothing to read at once",
    r"odd vocabulary": "Triton uses wide accesses only where it knows addresses to be divisible; `cuda` always does",
}
# Triton's, of a few bytes outside the row loop.
EXEMPT_SPILLS = {
    r"^token_stats_forward_kernel .*(odd vocabulary|strided)": "sixteen addresses a thread take its registers",
    r"^policy_sweep_kernel (fp32|bf16) ": "once a row, between its two loops",
    r"^objective_kernel ": "some fifteen float64 numbers for each of `[N]` tokens",
}
EXEMPT_STACK = 32  # bytes
EXEMPT_LOOPS = {
    "edge": "the first and last batch of a row, whose aligned neighbourhood is not all in the row",
    "search": "is_top1: the largest logit before the target, in the one segment that holds it",
}


class Loop(NamedTuple):
    """Accesses that a row loop makes, by width."""

    widths: tuple[int, ...]  # in bits, ascending
    spills: int

    def kind(self) -> str:
        if self.widths[0] >= WIDE:
            return "wide"
        return "edge" if self.widths[-1] >= WIDE else "search"


class Kernel(NamedTuple):
    backend: str
    target: str
    name: str
    threads: int  # of a block
    stated_blocks: int  # that are to be resident on a multiprocessor
    resources: sass.Resources
    dynamic_shared: int
    local_accesses: int
    row_loops: tuple[Loop, ...]
    sweeps: int  # of a row: as many loops must be wide

    def static_shared(self) -> int:
        """The kernel's own; from sm_90 on the binary counts what is reserved too, where there is any."""
        return max(0, self.resources.shared - (0 if self.target == "sm_80" else RESERVED_BYTES))

    def resident_blocks(self) -> int:
        warps = -(-self.threads // 32)
        registers = -(-self.resources.registers * 32 // 256) * 256 * warps  # given out to warps by 256
        shared = RESERVED_BYTES + self.static_shared() + self.dynamic_shared
        return min(REGISTERS // registers, SHARED_BYTES[self.target] // shared, WARPS // warps, BLOCKS)

    def exemption(self) -> str | None:
        return next((why for pattern, why in EXEMPT_KERNELS.items() if re.search(pattern, self.name)), None)


def violations(kernel: Kernel) -> list[str]:
    """What CI fails on."""
    found = []
    may_spill = any(re.search(pattern, kernel.name) for pattern in EXEMPT_SPILLS)
    resources = kernel.resources
    if (
        resources.local > 0
        or resources.stack > (EXEMPT_STACK if may_spill else 0)
        or (kernel.local_accesses > 0 and not may_spill)
        or any(loop.spills for loop in kernel.row_loops)
    ):
        found.append(f"local memory: stack {resources.stack}, {kernel.local_accesses} accesses")
    if kernel.resident_blocks() < kernel.stated_blocks:
        found.append(f"{kernel.resident_blocks()} resident blocks, stated {kernel.stated_blocks}")
    if kernel.exemption() is None:
        kinds = [loop.kind() for loop in kernel.row_loops]
        if kinds.count("wide") < kernel.sweeps:
            found.append(f"{kinds.count('wide')} of {kernel.sweeps} row loops use {WIDE} bits at a time")
        narrow = [kind for kind in kinds if kind != "wide"]
        is_cuda = kernel.backend == "cuda"
        if narrow and not is_cuda:
            found.append(f"row loops with narrow accesses: {narrow}")
        if is_cuda and (narrow.count("edge") > 2 * kernel.sweeps or ("search" in narrow and "Full" not in kernel.name)):
            found.append(f"more loops with narrow accesses than are exempt: {narrow}")
    return [f"{kernel.backend} {kernel.target} {kernel.name}: {what}" for what in found]


def row_loops(
    code: list[sass.Instruction], is_double: bool, is_row_access: Callable[[sass.Instruction], bool]
) -> tuple[Loop, ...]:
    """The innermost loops with the exponential, in float64 a polynomial, that touch global memory."""
    found = []
    for loop in sass.innermost_loops(code, "DFMA" if is_double else r"MUFU\.EX2"):
        if any(instruction.is_global_access() for instruction in loop):
            widths = sorted(instruction.bits() for instruction in loop if is_row_access(instruction))
            found.append(Loop(tuple(widths), sum(instruction.is_local_access() for instruction in loop)))
    return tuple(found)


SWEEPS = {
    "token_stats_forward_kernel": 1,
    "token_stats_segments_kernel": 1,
    "token_stats_backward_kernel": 1,
    "policy_sweep_kernel": 2,
}


def cuda_kernels(target: str) -> Iterator[Kernel]:
    """Those of the built module."""
    binary = Path(_native.__file__)
    found = sass.read(binary, target)
    stated = _stated_launches(sass.embedded_ptx(binary))
    seen = set()
    for symbol, name in zip(found, _demangled(list(found)), strict=True):
        if name in seen:  # in two sources, the same
            continue
        seen.add(name)
        resources, code = found[symbol]
        threads, blocks = stated[symbol]
        sweeps = SWEEPS.get(name.split("<")[0], 0)
        loops = row_loops(code, "double" in name, sass.Instruction.is_access) if sweeps else ()
        staged = re.fullmatch(r"policy_sweep_kernel<\w+, true>", name)
        kernel = Kernel(
            "cuda",
            target,
            name,
            threads,
            blocks,
            resources,
            0,
            sum(instruction.is_local_access() for instruction in code),
            loops,
            sweeps,
        )
        if staged:  # a row that just fits
            kernel = kernel._replace(dynamic_shared=SHARED_BYTES[target] - RESERVED_BYTES - kernel.static_shared())
        yield kernel


def _stated_launches(ptx: str) -> dict[str, tuple[int, int]]:
    """Threads of a block and resident blocks, as RLK_KERNEL states them for every target."""
    entries = re.findall(r"\.entry (\w+)\(.*?\)\s*((?:\.\w+ [\d, ]+\s*)*)\{", ptx, re.DOTALL)
    launches = {}
    for name, directives in entries:
        threads = re.search(r"\.maxntid (\d+)", directives)
        blocks = re.search(r"\.minnctapersm (\d+)", directives)
        assert threads is not None, f"{name} has no launch bounds"
        launches[name] = int(threads[1]), int(blocks[1]) if blocks else 1
    return launches


def _demangled(symbols: list[str]) -> list[str]:
    result = subprocess.run(["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True)
    names = []
    for line in result.stdout.splitlines():
        found = re.search(r"\w+_kernel(<.*?>)?(?=\()", line.replace("(rlk::cuda::Rows)", "Rows"))
        assert found is not None, line
        name = found[0].replace("rlk::", "")
        for code, rows in (("Rows0", "Plain"), ("Rows1", "Full"), ("Rows2", "Strided")):
            name = name.replace(code, rows)
        names.append(name)
    return names


def triton_kernels(target: str) -> Iterator[Kernel]:
    for job in triton_targets.compilations():
        compiled = triton_targets.compiled(job, triton_targets.TARGETS[target])
        ((resources, code),) = sass.read_cubin(compiled.asm["cubin"]).values()
        sweeps = SWEEPS.get(job.kernel.__name__, 0)
        yield Kernel(
            "triton",
            target,
            job.name,
            32 * job.num_warps,
            1,
            resources,
            compiled.metadata.shared,
            sum(instruction.is_local_access() for instruction in code),
            # in shared memory are partial sums, not the row
            row_loops(code, " fp64 " in job.name, sass.Instruction.is_global_access) if sweeps else (),
            sweeps,
        )


def has_cuda() -> bool:
    return hasattr(_native, "cuda")


def kernels(target: str) -> Iterator[Kernel]:
    if has_cuda():
        yield from cuda_kernels(target)
    yield from triton_kernels(target)


def _row_loop_cell(kernel: Kernel) -> str:
    if not kernel.sweeps:
        return ""
    narrow = sorted(
        f"{loop.kind() if kernel.backend == 'cuda' else 'narrow'} {loop.widths[0]}"
        for loop in set(kernel.row_loops)
        if loop.kind() != "wide"
    )
    wide = sum(loop.kind() == "wide" for loop in kernel.row_loops)
    return ", ".join([*([f"{wide} x {WIDE}"] if wide else []), *narrow])


def _one_for_all(values: list[str]) -> str:
    return values[0] if len(set(values)) == 1 else " / ".join(values)


COLUMNS = {
    "threads": lambda k: str(k.threads),
    "registers": lambda k: str(k.resources.registers),
    "stack": lambda k: str(k.resources.stack),
    "spills": lambda k: str(k.local_accesses),
    "shared": lambda k: str(k.static_shared()),
    "dynamic": lambda k: str(k.dynamic_shared),
    "resident blocks": lambda k: f"{k.resident_blocks()} ({k.stated_blocks})",
    "warps": lambda k: f"{100 * k.resident_blocks() * -(-k.threads // 32) // WARPS} %",
    "row loop": _row_loop_cell,
}


def table(found: list[Kernel]) -> Iterator[str]:
    """One line a kernel; values that differ between targets in their order."""
    yield f"| kernel | {' | '.join(COLUMNS)} |"
    yield f"|---|{'---:|' * (len(COLUMNS) - 1)}---|"
    of_name: dict[str, list[Kernel]] = {}
    for kernel in found:
        of_name.setdefault(kernel.name, []).append(kernel)
    for name, variants in of_name.items():
        cells = [_one_for_all([cell(kernel) for kernel in variants]) for cell in COLUMNS.values()]
        yield f"| `{name}` | {' | '.join(cells)} |"


def compilers() -> str:
    nvcc = "none"
    if has_cuda():
        report = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
        nvcc = report.split("release ")[1].split(",")[0]
    return f"nvcc {nvcc} and Triton {importlib.metadata.version('triton')}"


def document(found: list[Kernel]) -> str:
    lines = [
        "# What the GPU kernels are compiled to",
        "",
        "Written by `python bench/gpu_static.py`, checked by `tests/test_gpu_static.py`; nothing here ran on a GPU.",
        f"Compiled for {', '.join(NVIDIA)} by {compilers()},",
        f"for a vocabulary of {triton_targets.VOCAB:,}. Where these differ, a cell holds one for each, in this order.",
        "",
        "* registers, stack (bytes), spills (loads from and stores to local memory): of a thread; shared memory in",
        "  bytes of a block, what the code fixes and what the launch asks for; resident blocks of a multiprocessor,",
        "  as registers, shared memory and warps allow, and in brackets as many as the kernel's launch bounds state",
        "  (Triton's state none: 1);",
        "  warps: their share of the 64 that a multiprocessor holds.",
        "* row loop: the innermost loops with the exponential that touch `[N, V]`: how many of them move 128 bits a",
        "  thread and access, and the narrowest access, in bits, of the others.",
        "",
        "CI fails on stack or local memory, on fewer resident blocks than stated, and on an access narrower than 128",
        "bits in a row loop. Exempt are",
        "",
        *(f"* kernels named `{pattern}`: {why};" for pattern, why in EXEMPT_KERNELS.items()),
        *(f"* spills outside the row loop of `{pattern}`: {why};" for pattern, why in EXEMPT_SPILLS.items()),
        *(f"* CUDA loops marked *{kind}*: {why};" for kind, why in EXEMPT_LOOPS.items()),
        "",
        "and kernels without a row loop, which read `[N]`, row states or token ids.",
    ]
    for backend in ("cuda", "triton"):
        lines += ["", f"## `{backend}`", "", *table([kernel for kernel in found if kernel.backend == backend])]
    return "\n".join(lines) + "\n"


def main() -> int:
    if not has_cuda():
        print("rlkernels was built without CUDA kernels, for want of nvcc: docs/gpu_static.md needs both backends")
        return 1
    found = [kernel for target in NVIDIA for kernel in kernels(target)]
    broken = [line for kernel in found for line in violations(kernel)]
    if not broken:
        DOCUMENT.write_text(document(found))
    print("\n".join(broken) or f"{len(found)} kernels within the rules; written: {DOCUMENT}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
