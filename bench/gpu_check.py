"""Checks and measures the GPU kernels on one GPU, in at most eight minutes and without a network.

    python bench/gpu_check.py [--previous gpu_check.json]

builds the package, runs the GPU-marked tests, compute-sanitizer where it is installed and the capture of a CUDA graph,
measures both backends beside PyTorch and whatever peers are installed, prints one table and writes gpu_check.json and
gpu_check.md. It fails where a check does, and where something is 10 % slower than in the JSON of an earlier run.
`--quick` runs tiny shapes without building anything, on the CPU where there is no GPU: what CI without one runs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import gpu_cases
import torch
from gpu_cases import Case, Sizes

import rlkernels
from rlkernels import backends
from rlkernels.cli import machine, measure
from rlkernels.cli.loss_twins import why_failing

ROOT = Path(__file__).parents[1]
SLOWER = 1.10
CHECK_SECONDS = 240
SANITIZER_TOOLS = ("memcheck", "racecheck", "synccheck")
PEERS = {"TRL": "trl", "Liger": "liger-kernel", "cut-cross-entropy": "cut-cross-entropy"}


class Rates(NamedTuple):
    """What the device does at best, measured: bytes read and written in a second by a copy, and a GEMM's FLOP."""

    copy: float
    gemm: float


class Row(NamedTuple):
    """A line of the table; what was not measured or does not apply is None."""

    case: str
    name: str
    milliseconds: float | None
    bytes: int | None  # that the case has to move at least
    flop: int | None
    peak_bytes: int | None  # beyond inputs and gradients
    failure: str | None


def copy_rate(sizes: Sizes, device: str) -> float:
    source = torch.empty(sizes.tokens, sizes.vocab, dtype=torch.bfloat16, device=device).zero_()
    out = torch.empty_like(source)
    seconds = measure.interleaved_medians({"copy": lambda: out.copy_(source)}, sizes.rounds, device)["copy"]
    return 2 * source.nbytes / seconds


def gemm_rate(sizes: Sizes, device: str) -> float:
    hidden = torch.empty(sizes.tokens, sizes.hidden, dtype=torch.bfloat16, device=device).normal_()
    weight = torch.empty(sizes.vocab, sizes.hidden, dtype=torch.bfloat16, device=device).normal_()
    calls = {"gemm": lambda: torch.nn.functional.linear(hidden, weight)}
    seconds = measure.interleaved_medians(calls, sizes.rounds, device)["gemm"]
    return gpu_cases.gemm_flop(sizes) / seconds


def measured_rows(case: Case, rounds: int, device: str) -> list[Row]:
    """Of what can run; the others' lines say why they cannot."""
    failures = {name: why_failing(step) for name, step in case.steps.items()}
    running = {name: step for name, step in case.steps.items() if failures[name] is None}
    medians = measure.interleaved_medians(running, rounds, device) if running else {}
    rows = []
    for name in case.steps:
        peak = None
        if name in running and device == "cuda":
            peak = max(0, (measure.peak_bytes(lambda: running[name], device) or 0) - case.result_bytes)  # noqa: B023
        seconds = medians.get(name)
        rows.append(
            Row(
                case.name,
                name,
                None if seconds is None else 1e3 * seconds,
                case.bytes,
                case.flop,
                peak,
                failures[name],
            )
        )
    return rows


def _share(amount: int | None, milliseconds: float, rate: float, unit: float, name: str) -> str:
    if amount is None:
        return ""
    achieved = amount / (1e-3 * milliseconds)
    return f"{achieved / unit:,.0f} {name} ({100 * achieved / rate:.0f} %)"


def table(rows: list[Row], rates: Rates) -> list[str]:
    """Markdown; shares are of the copy and the GEMM that were measured in the same run."""
    lines = [
        f"Copy of the logits: {rates.copy / 1e9:,.0f} GB/s. The head's GEMM: {rates.gemm / 1e12:,.1f} TFLOP/s.",
        "",
        "| case | | ms | of the copy's rate | of the GEMM's rate | memory beyond inputs and gradients |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        if row.milliseconds is None:
            lines.append(f"| {row.case} | {row.name} | {row.failure} | | | |")
            continue
        memory = "" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:,.0f} MiB"
        of_copy = _share(row.bytes, row.milliseconds, rates.copy, 1e9, "GB/s")
        of_gemm = _share(row.flop, row.milliseconds, rates.gemm, 1e12, "TFLOP/s")
        lines.append(f"| {row.case} | {row.name} | {row.milliseconds:.2f} | {of_copy} | {of_gemm} | {memory} |")
    return lines


def slower(rows: list[dict[str, Any]], previous: list[dict[str, Any]]) -> list[str]:
    """This package's lines that take more than 10 % longer than before; what either run lacks is not compared."""
    before = {(row["case"], row["name"]): row["milliseconds"] for row in previous}
    found = []
    for row in rows:
        old, new = before.get((row["case"], row["name"])), row["milliseconds"]
        if row["name"].startswith(gpu_cases.OURS) and old and new and new > SLOWER * old:
            found.append(f"{row['case']}, {row['name']}: {new:.2f} ms, before {old:.2f} ms")
    return found


def peers() -> dict[str, str]:
    """Versions of the peers, or that they are not installed."""
    found = {}
    for name, distribution in PEERS.items():
        try:
            found[name] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def passes(title: str, command: list[str]) -> bool:
    """Runs a check in a process of its own; its output is shown where it fails."""
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=CHECK_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"{title}: FAILED, not done in {CHECK_SECONDS} s", flush=True)
        return False
    print(f"{title}: {'passed' if result.returncode == 0 else 'FAILED'}", flush=True)
    if result.returncode != 0:
        print(result.stdout[-8000:] + result.stderr[-8000:])
    return result.returncode == 0


# with what is installed: there need be no network
BUILD = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "-e", "."]
BUILT = "--built"


def build_and_start_again() -> int:
    """1 if the build fails; else this script runs anew, with the package that was built."""
    if not passes("build", BUILD):
        return 1
    os.execv(sys.executable, [sys.executable, *sys.argv, BUILT])


_SMALL_CASE = """
import torch, rlkernels
rlkernels.set_backend("cuda")
logits = torch.randn(3, 5003, device="cuda", dtype=torch.bfloat16, requires_grad=True)
batch = rlkernels.PolicyBatch(torch.zeros(1, 3, dtype=torch.int64, device="cuda"), torch.ones(1, device="cuda"))
rlkernels.policy_loss(logits.view(1, 3, 5003), batch, "grpo").loss.backward()
torch.cuda.synchronize()
"""


def checks_pass(names: list[str]) -> bool:
    """Tests, sanitizer and graph capture, on the GPU."""
    results = [passes("pytest -m gpu", [sys.executable, "-m", "pytest", "-m", "gpu"])]
    if "cuda" not in names:
        print(f"cuda: {backends.why_unavailable('cuda')}")
    elif shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer: not installed")
    else:
        for tool in SANITIZER_TOOLS:
            # PyTorch asks the driver for things that it may refuse
            sanitizer = ["compute-sanitizer", "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "1"]
            results.append(passes(f"compute-sanitizer, {tool}", [*sanitizer, sys.executable, "-c", _SMALL_CASE]))
    for name in names:
        failure = why_failing(lambda: gpu_cases.replay_captured(name))  # noqa: B023
        print(f"CUDA graph, {name}: {failure or 'captured, and replayed with the same result'}")
        results.append(failure is None)
    return all(results)


def run(sizes: Sizes, device: str, names: list[str]) -> dict[str, Any]:
    rates = Rates(copy_rate(sizes, device), gemm_rate(sizes, device))
    rows = []
    for make_case in gpu_cases.CASES:
        rows += measured_rows(make_case(sizes, device, names), sizes.rounds, device)
        if device == "cuda":
            torch.cuda.empty_cache()
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine.summary(),
        "peers": peers(),
        "sizes": sizes._asdict(),
        "rates": rates._asdict(),
        "rows": [row._asdict() for row in rows],
    }


def report(result: dict[str, Any]) -> str:
    rows = [Row(**row) for row in result["rows"]]
    described = [f"* {name}: {value}" for name, value in {**result["machine"], **result["peers"]}.items()]
    head = [f"Measured on {result['date']}, medians of {result['sizes']['rounds']} calls that took turns.", ""]
    return "\n".join([*head, *described, "", *table(rows, Rates(**result["rates"]))]) + "\n"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, no build and no checks")
    parser.add_argument(BUILT, action="store_true", help="the package is built already")
    parser.add_argument("--previous", type=Path, help="an earlier run's gpu_check.json, if there is one")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of gpu_check.json and gpu_check.md")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.quick:
        print("PyTorch finds no GPU to measure; --quick runs tiny shapes on the CPU")
        return 1
    if not (options.quick or options.built):
        return build_and_start_again()
    names = [name for name in ("cuda", "triton") if backends.why_unavailable(name) is None] if device == "cuda" else []
    passed = options.quick or checks_pass(names)
    result = run(gpu_cases.QUICK if options.quick else gpu_cases.FULL, device, names or ["cpu"])
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu_check.json").write_text(json.dumps(result, indent=1))
    (options.out / "gpu_check.md").write_text(report(result))
    print(report(result))
    regressions = []
    if options.previous is not None and options.previous.exists():
        regressions = slower(result["rows"], json.loads(options.previous.read_text())["rows"])
        print("\n".join(regressions) or "nothing is 10 % slower than before")
    rlkernels.set_backend("auto")
    return 0 if passed and not regressions else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
