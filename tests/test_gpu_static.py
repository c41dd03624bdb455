"""What the GPU kernels are compiled to, and that docs/gpu_static.md is of these kernels. No GPU needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

BENCH = Path(__file__).parents[1] / "bench"
DOCUMENT = BENCH.parent / "docs" / "gpu_static.md"

REPORT = """
import sys
import gpu_static
found = [kernel for target in sys.argv[2:] for kernel in getattr(gpu_static, sys.argv[1])(target)]
for kernel in found:
    print("kernel", kernel.name)
    for line in gpu_static.violations(kernel):
        print("violation", line)
if gpu_static.compilers() in gpu_static.DOCUMENT.read_text():
    for line in gpu_static.table(found):
        print("line", line)
"""


def environment_of_compiler() -> dict[str, str]:
    """For a process of its own: Triton's kernels do not compile where its interpreter is on."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def run(script: str, *arguments: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=BENCH,
        env=environment_of_compiler() | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def report(kernels: str, targets: tuple[str, ...], cache: Path) -> list[str]:
    return run(REPORT, kernels, *targets, TRITON_CACHE_DIR=str(cache)).splitlines()


def assert_within_rules(lines: list[str]) -> None:
    assert [line for line in lines if line.startswith("violation")] == []
    described = DOCUMENT.read_text()
    names = {line.removeprefix("kernel ") for line in lines if line.startswith("kernel ")}
    assert names
    missing = [name for name in sorted(names) if f"| `{name}` |" not in described]
    assert missing == [], "run python bench/gpu_static.py"


@pytest.mark.slow
def test_cuda_kernels_keep_to_registers_and_wide_accesses(tmp_path: Path) -> None:
    from rlkernels import _native

    if not hasattr(_native, "cuda"):
        pytest.skip("built without CUDA kernels, for want of nvcc")
    lines = report("cuda_kernels", ("sm_80", "sm_90", "sm_100"), tmp_path)
    assert_within_rules(lines)
    described = DOCUMENT.read_text().splitlines()
    stale = [line for line in lines if line.startswith("line ") and line.removeprefix("line ") not in described]
    assert stale == [], "run python bench/gpu_static.py"


@pytest.mark.slow
def test_triton_kernels_keep_to_registers_and_wide_accesses(tmp_path: Path) -> None:
    assert_within_rules(report("triton_kernels", ("sm_90",), tmp_path))


PLANTED = """
import gpu_static, sass

def kernel(**changes):
    code = sass.parse(USAGE, SASS.format(**changes))["sweep"][1]
    loops = gpu_static.row_loops(code, False, sass.Instruction.is_access)
    resources = sass.Resources(changes.get("registers", 32), changes.get("stack", 0), 0, 0)
    return gpu_static.Kernel("cuda", "sm_80", "sweep", 256, 2, resources, 0, changes.get("spills", 0), loops, 1)

USAGE = " Function sweep:\\n  REG:32 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:712"
SASS = '''
Function : sweep
        /*0000*/                   LDG.E.64 R6, [R6.64] ;
        /*0010*/                   LDG.E{width} R4, [R4.64] ;
        /*0020*/                   MUFU.EX2 R8, R8 ;
        /*0030*/              @!P0 BRA 0x10 ;
        /*0040*/                   EXIT ;
        /*0050*/                   BRA 0x50;
'''
assert gpu_static.violations(kernel(width=".128")) == []
for changes in ({"width": ".64"}, {"width": ".U16"}, {"width": ""}):
    assert "0 of 1 row loops" in " ".join(gpu_static.violations(kernel(**changes))), changes
assert "local memory" in gpu_static.violations(kernel(width=".128", stack=8))[0]
assert "local memory" in gpu_static.violations(kernel(width=".128", spills=1))[0]
assert "1 resident blocks" in gpu_static.violations(kernel(width=".128", registers=200))[0]
"""


def test_broken_rules_are_found() -> None:
    run(PLANTED)


INTERPRETED = """
import os
try:
    import triton_targets
except RuntimeError as error:
    assert "unset TRITON_INTERPRET" in str(error)
else:
    raise AssertionError("imported")
assert os.environ["TRITON_INTERPRET"] == "1"
"""


def test_nothing_is_compiled_under_the_interpreter() -> None:
    run(INTERPRETED, TRITON_INTERPRET="1")
