"""Threads where no OpenMP runtime is loaded, as in a process without torch: the native module starts its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlkernels import _native

SCRIPT = """
import sys

import numpy as np
from replay_kernels import load

native = load(sys.argv[1])
with open("/proc/self/maps") as maps:
    if "libgomp" in maps.read():
        sys.exit(77)

rows, width = 60, 9
random = np.random.default_rng(0)
tokens = random.integers(0, 2, (rows, width))
lengths = random.integers(0, width + 1, rows)
order, starts = np.arange(rows), np.arange(0, rows + 1, 3)
results = []
for threads in (1, 3, 64):
    counts = np.full((rows, width), -1, np.int32)
    addresses = {
        name: array.ctypes.data
        for name, array in {
            "token_ids": tokens, "lengths": lengths, "row_order": order, "group_starts": starts, "counts": counts
        }.items()
    }
    sizes = {"rows": rows, "width": width, "groups": len(starts) - 1, "threads": threads}
    native.prefix_counts(native.PrefixCountsParams(**addresses, **sizes))
    results.append(counts)
expected = np.ones((rows, width), np.int32)
for i in range(rows):
    for t in range(lengths[i]):
        group = range(i // 3 * 3, i // 3 * 3 + 3)
        expected[i, t] = sum(lengths[j] > t and (tokens[j, : t + 1] == tokens[i, : t + 1]).all() for j in group)
assert all((counts == expected).all() for counts in results)
assert "torch" not in sys.modules
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks for the runtime in /proc")
def test_prefix_counts_without_torch() -> None:
    command = [sys.executable, "-c", SCRIPT, _native.__file__]
    ran = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120, check=False)
    if ran.returncode == 77:
        pytest.skip("this numpy loads an OpenMP runtime itself")
    assert ran.returncode == 0, ran.stderr
