"""What is Triton's alone: row states of its own dtype, and its kernels' compilation for AMD."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from row_cases import by_dtype, triton_kernels
from test_gpu_static import BENCH, environment_of_compiler

from rlkernels.ops.rows import compute_dtype

pytest.importorskip("triton")


@by_dtype
def test_row_states_are_of_the_compute_dtype(dtype: torch.dtype) -> None:
    logits = torch.empty(1, 3, 5, dtype=dtype)
    assert triton_kernels().stats.empty_states(3, logits).dtype == compute_dtype(dtype)


@pytest.mark.slow
def test_every_kernel_compiles_for_amd_without_spilling(tmp_path: Path) -> None:
    """For NVIDIA: tests/test_gpu_static.py."""
    result = subprocess.run(
        [sys.executable, str(BENCH / "triton_targets.py"), "gfx942"],
        env=environment_of_compiler() | {"TRITON_CACHE_DIR": str(tmp_path)},  # compiled now, whatever was before
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    print(result.stdout)
    usage = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(usage) > 70
    assert all(line["spills"] == 0 for line in usage)
