"""bench/gpu_check.py where there is no GPU: its table, its comparison of runs, and a whole quick run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCH))
    import gpu_check

    yield gpu_check


def row(gpu_check: ModuleType, name: str, milliseconds: float | None, **fields: object) -> dict[str, object]:
    unknown = dict.fromkeys(("bytes", "flop", "peak_bytes", "failure"))
    return gpu_check.Row(case="loss", name=name, milliseconds=milliseconds, **unknown | fields)._asdict()


def test_shares_are_of_the_measured_rates(gpu_check: ModuleType) -> None:
    rates = gpu_check.Rates(copy=4e12, gemm=500e12)
    rows = [
        gpu_check.Row(**row(gpu_check, "rlkernels cuda", 2.0, bytes=4 * 10**9, peak_bytes=3 << 20)),
        gpu_check.Row(**row(gpu_check, "GEMMs", 10.0, flop=4 * 10**12)),
        gpu_check.Row(**row(gpu_check, "TRL", None, failure="ModuleNotFoundError: trl")),
    ]
    lines = gpu_check.table(rows, rates)[-3:]
    assert lines == [
        "| loss | rlkernels cuda | 2.00 | 2,000 GB/s (50 %) |  | 3 MiB |",
        "| loss | GEMMs | 10.00 |  | 400 TFLOP/s (80 %) |  |",
        "| loss | TRL | ModuleNotFoundError: trl | | | |",
    ]


@pytest.mark.parametrize(
    ("name", "before", "now", "is_slower"),
    [
        ("rlkernels cuda", 10.0, 11.1, True),
        ("rlkernels cuda", 10.0, 10.9, False),
        ("rlkernels triton", 10.0, 5.0, False),
        ("rlkernels triton", None, 5.0, False),  # could not run before
        ("rlkernels triton", 5.0, None, False),
        ("naive PyTorch", 10.0, 20.0, False),  # not ours to fail on
    ],
)
def test_ten_per_cent_slower_than_the_last_run_is_found(
    name: str, before: float | None, now: float | None, is_slower: bool, gpu_check: ModuleType
) -> None:
    found = gpu_check.slower([row(gpu_check, name, now)], [row(gpu_check, name, before)])
    assert bool(found) == is_slower
    assert gpu_check.slower([row(gpu_check, name, now)], []) == []


@pytest.mark.slow
def test_a_quick_run_leaves_table_and_json(
    gpu_check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_check.main(["--quick", "--out", str(tmp_path), "--previous", str(tmp_path / "none.json")]) == 0
    result = json.loads((tmp_path / "gpu_check.json").read_text())
    measured = {(line["case"], line["name"]) for line in result["rows"] if line["milliseconds"] is not None}
    own = [name for _, name in measured if name.startswith("rlkernels")]
    assert len(own) >= 5, [line["failure"] for line in result["rows"]]
    assert set(result["peers"]) == {"TRL", "Liger", "cut-cross-entropy"}
    assert (tmp_path / "gpu_check.md").read_text().strip() in capsys.readouterr().out
    # against itself, made fast: everything is slower now
    for line in result["rows"]:
        line["milliseconds"] = line["milliseconds"] and 1e-9
    (tmp_path / "before.json").write_text(json.dumps(result))
    assert gpu_check.slower(json.loads((tmp_path / "gpu_check.json").read_text())["rows"], result["rows"])


def test_it_goes_on_with_what_it_built(gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda path, arguments: started.append(arguments))
    monkeypatch.setattr("sys.argv", ["gpu_check.py", "--out", "here"])
    monkeypatch.setattr(gpu_check, "passes", lambda title, command: "--no-deps" in command)
    gpu_check.build_and_start_again()
    assert started[0][1:] == ["gpu_check.py", "--out", "here", "--built"]
    monkeypatch.setattr(gpu_check, "passes", lambda title, command: False)
    assert gpu_check.build_and_start_again() == 1 and len(started) == 1


def test_without_a_gpu_it_says_so(gpu_check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu_check.main([]) == 1
    assert "no GPU" in capsys.readouterr().out
