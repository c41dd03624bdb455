"""`python -m rlkernels demo`: train through `policy_loss`, then measure it beside PyTorch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rlkernels.cli.loss_table import loss_table
from rlkernels.cli.sorting import DIGITS, PROMPTS, RESPONSES, SEPARATOR, Trainer

SMOOTHED_STEPS = 10
PLOT_WIDTH = 50
_BLOCKS = "▁▂▃▄▅▆▇█"


def run(objective: str, steps: int, seed: int, device: str, with_table: bool) -> int:
    _require_device(device)
    console = Console()
    start = time.perf_counter()
    console.print(
        f"[bold]{objective}[/bold] teaches a two-layer transformer to sort {DIGITS} digits: {PROMPTS} prompts x "
        f"{RESPONSES} answers a step; reward = share of digits in their place"
    )
    trainer = Trainer(objective, seed, device)
    with one_thread():
        rewards = train(trainer, steps, console)
        console.print(
            f"\nreward  {sparkline(rewards)}  {_mean(rewards[:SMOOTHED_STEPS]):.2f} -> {_recent(rewards):.2f}"
        )
        for line in _examples(trainer):
            console.print(line, highlight=False)
    if with_table:
        console.print()
        console.print(loss_table(device, console))
    console.print(f"\n{time.perf_counter() - start:.0f} s in all", highlight=False)
    return 0


def train(trainer: Trainer, steps: int, console: Console) -> list[float]:
    """The mean reward of each step."""
    rewards: list[float] = []
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("reward {task.fields[reward]:.2f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=steps, reward=0.0)
        for _ in range(steps):
            rewards.append(trainer.step())
            progress.update(task, advance=1, reward=_recent(rewards))
    return rewards


def sparkline(rewards: list[float]) -> str:
    """One block for each of at most `PLOT_WIDTH` stretches of steps, on a scale from 0 to 1."""
    count = min(len(rewards), PLOT_WIDTH)
    borders = [len(rewards) * i // count for i in range(count + 1)]
    means = (_mean(rewards[a:b]) for a, b in itertools.pairwise(borders))
    return "".join(_BLOCKS[min(int(mean * len(_BLOCKS)), len(_BLOCKS) - 1)] for mean in means)


def _recent(rewards: list[float]) -> float:
    return _mean(rewards[-SMOOTHED_STEPS:])


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _examples(trainer: Trainer) -> Iterator[str]:
    for row in trainer.sample(prompts=3, responses=1).token_ids.tolist():
        border = row.index(SEPARATOR)
        yield f"        {_spaced(row[:border])} -> {_spaced(row[border + 1 :])}"


def _spaced(digits: list[int]) -> str:
    return " ".join("=" if digit == SEPARATOR else str(digit) for digit in digits)


def _require_device(device: str) -> None:
    """Raises ValueError where tensors cannot live on `device`."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ValueError(f"--device {device}: {str(error).splitlines()[0]}") from None


@contextmanager
def one_thread() -> Iterator[None]:
    """A model this small gains nothing from threads, and waits for them on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
