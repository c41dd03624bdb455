"""The paper's binary tree: what the example prints is what it simulated, and the direction at n = 1."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import lambda_grpo_tree as example


def simulate(settings: list[example.Setting], steps: int, seeds: int = 24) -> dict[str, Tensor]:
    return {
        name: example.simulate(
            recipe, settings, seeds=seeds, group_size=6, steps=steps, generator=torch.Generator().manual_seed(0)
        )
        for name, recipe in example.RECIPES.items()
    }


def test_lambda_grpo_finds_the_target_at_n_1_and_grpo_does_not() -> None:
    settings = [setting for setting in example.PAPER_SETTINGS if setting.shared == 1]
    found = simulate(settings, steps=1500)
    for index in range(len(settings)):
        grpo, lambda_grpo = (found[name][-50:, index].mean() for name in example.RECIPES)
        assert lambda_grpo > 0.6
        assert grpo < 0.4
        assert example.verdict(found, index) == "higher"


def test_gradient_of_a_step(generator: torch.Generator) -> None:
    """One step of the simulation against the objective written out, for both recipes and several settings."""
    settings = [example.Setting(1, -1.0, 40.0), example.Setting(2, -0.5, 80.0)]  # large: the next samples must differ
    state = generator.get_state()
    paths = example.sample_paths(torch.zeros(40, 16), 5, generator)  # 2 settings of 20 seeds
    for recipe in example.RECIPES.values():
        theta = torch.zeros(40, 16, dtype=torch.float64, requires_grad=True)
        total = torch.zeros((), dtype=torch.float64)
        for run in range(40):
            n, negative, rate = settings[run // 20]
            rows = [tuple(path) for path in paths[run].tolist()]
            rewards = torch.tensor(
                [1.0 if r == example.TARGET else negative if r[:n] == example.TARGET[:n] else 0.7 for r in rows],
                dtype=torch.float64,
            )
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            for row, advantage in zip(rows, advantages, strict=True):
                node = 1
                for depth, action in enumerate(row):
                    logit = theta[run, node] * (2 * action - 1)
                    count = sum(other[: depth + 1] == row[: depth + 1] for other in rows)
                    scale = count if recipe == "lambda_grpo" else 1
                    total = total - rate * advantage * torch.nn.functional.logsigmoid(logit) / (5 * 4 * scale)
                    node = 2 * node + action
        (gradient,) = torch.autograd.grad(total, theta)
        # two steps: what is sampled in the second shows the policy after the first
        generator.set_state(state)
        found = example.simulate(recipe, settings, seeds=20, group_size=5, steps=2, generator=generator)
        after = torch.Generator()
        after.set_state(state)
        first = example.sample_paths(torch.zeros(40, 16), 5, after)
        second = example.sample_paths(-gradient.float(), 5, after)
        for step, sampled in enumerate((first, second)):
            hits = (sampled == torch.tensor(example.TARGET)).all(-1).float().mean(-1)
            torch.testing.assert_close(found[step].flatten(), hits)


def test_table_and_picture(tmp_path: Path) -> None:
    settings = [setting._replace(rate=rate) for rate in (0.3, 0.6) for setting in example.PAPER_SETTINGS]
    found = simulate(settings, steps=60, seeds=3)
    text = io.StringIO()
    example.print_table(settings, found, Console(file=text, width=120))
    assert len([line for line in text.getvalue().splitlines() if "-1.5" in line]) == 4
    pytest.importorskip("matplotlib")
    example.plot(settings, found, "title", tmp_path / "tree.png")
    assert (tmp_path / "tree.png").stat().st_size > 10_000


def test_verdicts_are_of_the_last_steps() -> None:
    grpo, noise = torch.zeros(100, 3, 8), torch.linspace(-0.1, 0.1, 8)
    grpo[:50] = 1  # forgotten by the end
    lambda_grpo = grpo.clone()
    grpo[-50:] += torch.tensor([0.1, 0.5, 0.9])[:, None] + noise
    lambda_grpo[-50:] += torch.tensor([0.9, 0.5, 0.1])[:, None] - noise
    found = {"GRPO": grpo, "λ-GRPO": lambda_grpo}
    assert [example.verdict(found, index) for index in range(3)] == ["higher", "no different", "lower"]
