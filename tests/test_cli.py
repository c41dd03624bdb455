"""`python -m rlkernels`: what its commands print, write and refuse."""

import io
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

import rlkernels
from rlkernels import __main__ as cli
from rlkernels import backends
from rlkernels.cli import bench, demo, loss_table, loss_twins, measure, report, sorting


@pytest.fixture
def run(capfd):
    """Runs a command; returns its exit code, stdout and stderr, child processes' included."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        try:
            code = cli.main(list(arguments))
        except SystemExit as exit:
            code = exit.code
        return code, *capfd.readouterr()

    return run


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "required"),
            (["dem"], "invalid choice: 'dem'"),
            (["demo", "--objective", "gpro"], "invalid choice: 'gpro'"),
            (["demo", "--steps", "0"], "--steps: expected an integer >= 1, got '0'"),
            (["demo", "--seed", "x"], "--seed"),
            (["bench", "--selekt", "x"], "--selekt"),
        ],
    )
    def test_bad_ones_exit_with_2(self, run, arguments, message):
        code, _, error = run(*arguments)
        assert code == 2
        assert message in error

    @pytest.mark.parametrize(
        ("command", "flags"),
        [
            ("demo", ["--objective", "--steps", "--seed", "--device", "--skip-table"]),
            ("bench", ["--select", "--out", "--quick"]),
        ],
    )
    def test_help_shows_every_flag(self, run, command, flags):
        code, output, _ = run(command, "--help")
        assert code == 0
        assert all(flag in output for flag in flags)

    def test_a_failure_is_one_line(self, run):
        code, _, error = run("demo", "--device", "nonsense")
        assert code == 1
        assert error.startswith("rlkernels demo: --device nonsense: ")
        assert error.count("\n") == 1

    def test_an_interrupt_is_one_line(self, run, monkeypatch):
        def interrupt() -> int:
            raise KeyboardInterrupt

        monkeypatch.setattr("rlkernels.cli.doctor.run", interrupt)
        code, _, error = run("doctor")
        assert code == 130
        assert error.strip() == "interrupted"


class TestDoctor:
    def test_names_every_backend_and_every_reason(self, run):
        code, output, _ = run("doctor")
        assert code == 0
        lines = {line.split()[0]: line for line in output.splitlines() if line}
        for name in backends.NAMES:
            reason = backends.why_unavailable(name)
            assert ("unavailable" in lines[name]) == (reason is not None)
            assert reason is None or reason in lines[name]
        assert torch.__version__ in lines["torch"]

    def test_a_selection_that_cannot_run_fails(self, run, monkeypatch):
        monkeypatch.setattr(backends, "_selected", "no such backend")
        code, output, _ = run("doctor")
        assert code == 1
        assert "no such backend" in output


class TestDemo:
    @pytest.mark.parametrize("objective", rlkernels.RECIPES)
    def test_every_recipe_can_be_fed(self, objective):
        trainer = sorting.Trainer(objective, seed=0, device="cpu")
        before = [parameter.clone() for parameter in trainer.model.parameters()]
        assert 0 < trainer.step() < 1
        changed = [not torch.equal(*pair) for pair in zip(before, trainer.model.parameters(), strict=True)]
        assert any(changed)

    def test_prints_a_reward_that_a_seed_reproduces(self, run):
        arguments = ("demo", "--steps", "3", "--seed", "5", "--skip-table")
        code, first, _ = run(*arguments)
        assert code == 0
        assert "3/3" in first
        second = run(*arguments)[1]
        assert _line(first, "reward  ") == _line(second, "reward  ")

    def test_reward_is_the_share_of_sorted_digits(self):
        rollout = sorting.Trainer("grpo", seed=0, device="cpu").sample(prompts=4, responses=2)
        for row, reward in zip(rollout.token_ids.tolist(), rollout.rewards.tolist(), strict=True):
            wanted = sorted(row[: sorting.DIGITS])
            answer = row[sorting.DIGITS + 1 :]
            right = sum(a == b for a, b in zip(answer, wanted, strict=True))
            assert reward == right / sorting.DIGITS

    def test_reward_rises(self):
        trainer = sorting.Trainer("grpo", seed=0, device="cpu")
        with demo.one_thread():
            rewards = demo.train(trainer, 50, Console(quiet=True))
        assert sum(rewards[-5:]) > 2 * sum(rewards[:5])

    @pytest.mark.parametrize(
        ("rewards", "line"), [([0.0, 0.5, 1.0], "▁▅█"), ([0.0] * 60 + [1.0] * 60, "▁" * 25 + "█" * 25)]
    )
    def test_sparkline(self, rewards, line):
        assert demo.sparkline(rewards) == line


class TestLossTwins:
    def test_all_compute_the_same(self):
        rows = loss_twins.make_rows(256, 50, torch.float32, "cpu")
        losses = [loss_twins.loss_function(n)(rows) for n in (loss_twins.FUSED, loss_twins.NAIVE)]
        gradients = [loss_twins.forward_backward(n, rows) for n in (loss_twins.FUSED, loss_twins.NAIVE)]
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(*gradients)

    def test_no_row_is_clipped(self):
        rows = loss_twins.make_rows(256, 50, torch.float32, "cpu")
        assert bool((loss_twins.forward_backward(loss_twins.FUSED, rows) != 0).any(-1).all())


class TestLossTable:
    def test_a_failed_compilation_is_a_line(self, monkeypatch):
        monkeypatch.setattr(loss_table, "VOCAB", 64)
        monkeypatch.setattr(loss_table, "why_not_compiled", lambda rows: "no compiler here")
        monkeypatch.setattr(measure, "peak_bytes", lambda *arguments: None)
        console = Console(width=160, file=io.StringIO())
        console.print(loss_table.loss_table("cpu", console))
        text = console.file.getvalue()
        for expected in ("rlkernels", "naive PyTorch", "no compiler here", "not measured"):
            assert expected in text

    def test_peak_memory_of_the_naive_loss(self):
        tokens, vocab = 64, 100_000
        peak = measure.peak_bytes(partial(loss_twins.make_step, loss_twins.NAIVE, tokens, vocab, torch.bfloat16, "cpu"))
        if peak is None:
            pytest.skip("peak memory is measured on Linux only")
        # at least the fp32 log-softmax, its gradient and the logits' gradient live at once
        assert peak > (4 + 4 + 2) * tokens * vocab


class TestPeakBytes:
    """Of any step, in a process of its own."""

    @pytest.fixture
    def peak_bytes(self):
        def peak_bytes(make_step):
            peak = measure.peak_bytes(make_step)
            if peak is None:
                pytest.skip("peak memory is measured on Linux only")
            return peak

        return peak_bytes

    def test_a_result_counts(self, peak_bytes):
        peak = peak_bytes(partial(partial, torch.ones, 50_000_000))
        assert 0.95 < peak / 200_000_000 < 1.1

    def test_buffers_of_the_first_call_hide_nothing(self, peak_bytes):
        tokens, vocab = 64, 200_000
        make_step = partial(loss_twins.make_step, loss_twins.FUSED, tokens, vocab, torch.bfloat16, "cpu")
        gradient_bytes = 2 * tokens * vocab
        assert 0.95 < peak_bytes(make_step) / gradient_bytes < 1.5


class TestBench:
    def test_quick_run_writes_json_tables_and_pictures(self, run, tmp_path):
        code, output, _ = run("bench", "--quick", "--select", "forward or credit or 256", "--out", str(tmp_path))
        assert code == 0, output
        names = {benchmark["name"] for benchmark in json.loads((tmp_path / "results.json").read_text())["benchmarks"]}
        assert any("prefix_set_counts" in name for name in names)
        markdown = (tmp_path / "results.md").read_text()
        assert torch.__version__ in markdown
        assert "| prefix_set_counts, equal ids" in markdown
        assert "| 256 | rlkernels |" in markdown
        for picture in ("results.png", "scaling.png"):
            assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")

    def test_a_keyword_that_matches_nothing(self, run, tmp_path):
        code, _, error = run("bench", "--select", "nothing_like_it", "--out", str(tmp_path))
        assert code == 1
        assert "--select nothing_like_it: no benchmark matches" in error

    def test_without_a_checkout(self, run, monkeypatch, tmp_path):
        monkeypatch.setattr(rlkernels, "__file__", str(tmp_path / "site-packages/rlkernels/__init__.py"))
        monkeypatch.chdir(tmp_path)
        code, _, error = run("bench")
        assert code == 1
        assert "bench/ is not part of the installed package" in error

    def test_missing_modules_are_named(self):
        with pytest.raises(ValueError, match="no_such_module not installed"):
            bench._require_modules("pytest", "no_such_module")

    def test_ratios_and_memory(self, tmp_path: Path):
        results = tmp_path / "results.json"
        results.write_text(json.dumps(_RESULTS))
        report.write(results)
        markdown = results.with_suffix(".md").read_text()
        assert "| a loss | rlkernels | 20 ms | 200 µs | 1.00 |" in markdown
        assert "|  | naive | 90 ms | 900 µs | 4.50 |" in markdown
        assert "| rlkernels | 0.5 MiB | 2.0 MiB |" in markdown
        assert markdown.count("Not measured: torch.compile: no compiler") == 1

    def test_memory_is_grouped_by_title_with_bounds_beside(self, tmp_path: Path):
        results = tmp_path / "results.json"
        results.write_text(json.dumps(_RESULTS))
        report.write(results)
        logits, linear = results.with_suffix(".md").read_text().split("Peak memory of ")[1:]
        assert "gradients, logits." in logits
        assert "| loss | N = 1 | N = 4 |" in logits
        assert "| naive | 1.0 MiB | 4.0 MiB |" in logits
        assert "bound" not in logits
        assert "gradients, hidden." in linear
        assert "| rlkernels | 3.0 MiB |\n| its bound | 5.0 MiB |" in linear

    def test_scaling(self, tmp_path: Path):
        results = tmp_path / "results.json"
        results.write_text(json.dumps(_RESULTS))
        assert report.write(results)[-1] == tmp_path / "scaling.png"
        assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
        markdown = results.with_suffix(".md").read_text()
        assert "| 256 | rlkernels | 2 s | 7.81 ms | 1.0 MiB |\n|  | naive | 3 s | 11.7 ms | 8.0 MiB |" in markdown
        assert "| 512 | rlkernels | 4 s | 7.81 ms | 1.0 MiB |" in markdown

    def test_no_picture_of_an_earlier_run_stays(self, tmp_path: Path):
        results, stale = tmp_path / "results.json", [tmp_path / "results.png", tmp_path / "scaling.png"]
        for picture in stale:
            picture.touch()
        results.write_text(json.dumps({**_RESULTS, "benchmarks": []}))
        assert report.write(results) == [tmp_path / "results.md"]
        assert not any(picture.exists() for picture in stale)


_RESULTS = {
    "datetime": "2025-01-02T03:04:05+00:00",
    "machine_info": {"rlkernels": {"machine": "a machine", "quick": False}},
    "benchmarks": [
        {
            "stats": {"median": 0.02},
            "extra_info": {
                "comparison": {
                    "title": "a loss",
                    "subject": "rlkernels",
                    "baseline": "rlkernels",
                    "tokens": 100,
                    "other_medians": {"naive": 0.09},
                },
                "unavailable": {"torch.compile": "no compiler"},
            },
        },
        *(
            {
                "stats": {"median": 9.0},
                "extra_info": {"memory": memory, "unavailable": {"torch.compile": "no compiler"}},
            }
            for memory in (
                {"title": "logits", "loss": "rlkernels", "extra_bytes": {"1": 2**19, "4": 2**21}},
                {"title": "hidden", "loss": "rlkernels", "extra_bytes": {"8": 3 << 20}, "bound_bytes": {"8": 5 << 20}},
                {"title": "logits", "loss": "naive", "extra_bytes": {"1": 2**20, "4": 2**22}},
            )
        ),
        {
            "stats": {"median": 2.0},
            "extra_info": {
                "scaling": {
                    "title": "a linear loss",
                    "subject": "rlkernels",
                    "tokens": 256,
                    "other_medians": {"naive": 3.0},
                    "extra_bytes": {"rlkernels": 1 << 20, "naive": 8 << 20},
                }
            },
        },
        {
            "stats": {"median": 4.0},
            "extra_info": {
                "scaling": {
                    "title": "a linear loss",
                    "subject": "rlkernels",
                    "tokens": 512,
                    "other_medians": {},
                    "extra_bytes": {"rlkernels": 1 << 20},
                }
            },
        },
    ],
}


def _line(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(start))
