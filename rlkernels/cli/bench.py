"""`python -m rlkernels bench`: run `bench/`, then report."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import rlkernels
from rlkernels.cli import report

_NOTHING_SELECTED = 5  # pytest's exit code


def run(select: str | None, out: Path | None, quick: bool) -> int:
    directory = _bench_directory()
    _require_modules("pytest", "pytest_benchmark")
    out = (out or directory / "results").resolve()
    out.mkdir(parents=True, exist_ok=True)
    results = out / "results.json"
    results.unlink(missing_ok=True)
    # options for tests, as of pytest-xdist, would switch the benchmarks off
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = _command(directory, results, select, quick)
    code = subprocess.run(command, cwd=directory.parent, env=environment).returncode
    if code == _NOTHING_SELECTED:
        raise ValueError(f"--select {select}: no benchmark matches")
    if not results.exists() or not results.stat().st_size:
        raise RuntimeError("no benchmark finished; see pytest's output above")
    written = [results, *report.write(results)]
    print("\n" + (out / "results.md").read_text())
    print("written: " + ", ".join(map(str, written)))
    return code


def _command(directory: Path, results: Path, select: str | None, quick: bool) -> list[str]:
    command = [sys.executable, "-m", "pytest", str(directory), "-vv", "-rs", "--no-header", "--disable-warnings"]
    command += [f"--benchmark-json={results}", "--benchmark-quiet"]
    command += ["-k", select] if select else []
    command += ["--quick"] if quick else []
    return command


def _bench_directory() -> Path:
    """The checkout's: that of an editable installation, else the one that the command is run in."""
    candidates = [Path(rlkernels.__file__).parents[1] / "bench", Path.cwd() / "bench"]
    for directory in candidates:
        if (directory / "common.py").exists():
            return directory
    raise ValueError(
        "bench/ is not part of the installed package: run this in a checkout of the repository "
        f"(looked for {' and '.join(map(str, candidates))})"
    )


def _require_modules(*names: str) -> None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} not installed: pip install 'rlkernels[bench]'")
