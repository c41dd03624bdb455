"""lambda-GRPO's binary tree: does a policy find the one path that pays most, where its siblings are punished?

    python examples/lambda_grpo_tree.py                                     # the table
    pip install matplotlib
    python examples/lambda_grpo_tree.py --plot docs/lambda_grpo_tree.png    # and the picture

A path takes four binary actions. The target path pays 1, any other path that shares its first n actions r_neg < 0,
every other path 0.7. GRPO weights the first n actions by how many responses take them, and so punishes them for the
many siblings before the target has been found; lambda-GRPO divides by that number. The paper ("GRPO is Secretly a
Process Reward Model", 2509.21154) finds lambda-GRPO ahead for n = 1, 2 and r_neg = -0.5, -1, -1.5. It does not say
with which optimiser and learning rate. Here the policy is a table, a logit for each inner node; each step is on-policy
and one of plain SGD; and each setting is shown at several learning rates, because its result depends on them.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import rlkernels
from rlkernels.credit import group_advantages, prefix_set_counts

TARGET = (1, 0, 1, 1)
OTHER_REWARD = 0.7
LAST_STEPS = 50
RECIPES = {"GRPO": "dapo", "λ-GRPO": "lambda_grpo"}  # on-policy nothing clips: they differ in the weight alone


class Setting(NamedTuple):
    shared: int  # n
    negative: float  # r_neg
    rate: float = 0.3


PAPER_SETTINGS = [Setting(n, r_neg) for n in (1, 2) for r_neg in (-0.5, -1.0, -1.5)]


def path_logp(theta: Tensor, paths: Tensor) -> Tensor:
    """`theta [runs, 16]`, the logit of action 1 at each heap-numbered node; `paths [runs, G, 4]` -> `[runs, G, 4]`."""
    node = torch.ones_like(paths[..., 0])
    columns = []
    for action in paths.unbind(-1):
        logit = theta.gather(1, node)
        columns.append(torch.nn.functional.logsigmoid(torch.where(action == 1, logit, -logit)))
        node = 2 * node + action
    return torch.stack(columns, dim=-1)


@torch.no_grad()
def sample_paths(theta: Tensor, group_size: int, generator: torch.Generator) -> Tensor:
    node = torch.ones(len(theta), group_size, dtype=torch.int64)
    actions = []
    for _ in TARGET:
        actions.append(torch.bernoulli(theta.gather(1, node).sigmoid(), generator=generator).long())
        node = 2 * node + actions[-1]
    return torch.stack(actions, dim=-1)


@contextmanager
def one_thread() -> Iterator[None]:
    """For small tensors, at which a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def simulate(
    recipe: str, settings: Sequence[Setting], *, seeds: int, group_size: int, steps: int, generator: torch.Generator
) -> Tensor:
    """How often the target path was sampled, `[steps, settings, seeds]`; all settings and seeds run side by side."""
    repeated = torch.tensor(settings, dtype=torch.float32).repeat_interleave(seeds, dim=0)
    shared, negative, rate = repeated[:, 0, None].long(), repeated[:, 1, None], repeated[:, 2, None]
    runs, depth = len(repeated), len(TARGET)
    theta = torch.zeros(runs, 2**depth, requires_grad=True)
    lengths = torch.full((runs * group_size,), depth)
    found = torch.empty(steps, runs)
    for step in range(steps):
        paths = sample_paths(theta, group_size, generator)
        agreement = (paths == torch.tensor(TARGET)).cumprod(-1).sum(-1)  # [runs, G]: leading actions of the target
        rewards = torch.where(agreement >= shared, negative, OTHER_REWARD)
        rewards = torch.where(agreement == depth, 1.0, rewards)
        found[step] = (agreement == depth).float().mean(-1)
        advantages = group_advantages(rewards.flatten(), group_size)
        flat = paths.flatten(0, 1)
        weight = 1 / prefix_set_counts(flat, lengths, group_size) if recipe == "lambda_grpo" else None
        batch = rlkernels.PolicyBatch(None, advantages, weight=weight)
        logp = path_logp(theta, paths).flatten(0, 1)
        # every run learns alone: the denominator is one group's tokens
        normalizer = group_size * depth
        loss = rlkernels.logp_policy_loss(logp, batch, recipe, reduction="token_sum", normalizer=normalizer).loss
        (gradient,) = torch.autograd.grad(loss, theta)
        theta = (theta - rate * gradient).detach().requires_grad_()
    return found.view(steps, len(settings), seeds)


def verdict(found: dict[str, Tensor], index: int) -> str:
    """Whether λ-GRPO's mean over the last steps differs from GRPO's by more than two standard errors over the seeds."""
    grpo, lambda_grpo = (found[name][-LAST_STEPS:, index].mean(0) for name in RECIPES)
    difference = lambda_grpo.mean() - grpo.mean()
    error = math.sqrt((grpo.var() + lambda_grpo.var()) / len(grpo))
    return "higher" if difference > 2 * error else "lower" if difference < -2 * error else "no different"


def print_table(settings: list[Setting], found: dict[str, Tensor], console: Console) -> None:
    title = f"share of samples that are the target path, last {LAST_STEPS} steps, mean of the seeds"
    table = Table("rate", "n", "r_neg", *RECIPES, "paper: λ-GRPO is", "here", title=title)
    for index, setting in enumerate(settings):
        shares = (f"{found[name][-LAST_STEPS:, index].mean():.2f}" for name in RECIPES)
        here = verdict(found, index)
        here = here if here == "higher" else f"[bold red]{here}[/]"
        ends_block = index % len(PAPER_SETTINGS) == len(PAPER_SETTINGS) - 1
        numbers = (f"{setting.rate:g}", str(setting.shared), f"{setting.negative:g}")
        table.add_row(*numbers, *shares, "higher", here, end_section=ends_block)
    console.print(table)


def plot(settings: list[Setting], found: dict[str, Tensor], title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    rates = sorted({setting.rate for setting in settings})
    figure = Figure(figsize=(4 * len(rates), 6), layout="constrained")
    grid = figure.subplots(2, len(rates), sharex=True, sharey=True, squeeze=False)
    for index, (n, r_neg, rate) in enumerate(settings):
        axes = grid[n - 1, rates.index(rate)]
        style = {-0.5: "-", -1.0: "--", -1.5: ":"}[r_neg]
        for name, colour in zip(RECIPES, ("tab:red", "tab:blue"), strict=True):
            curve = found[name][:, index].mean(-1)
            smooth = torch.nn.functional.avg_pool1d(curve[None], 25, 25)[0]
            steps = torch.arange(len(smooth)) * 25 + 12.5
            axes.plot(steps, smooth, style, color=colour, linewidth=1.3, label=f"{name}, r_neg = {r_neg:g}")
        axes.set_title(f"n = {n}, SGD at {rate:g}", fontsize="medium")
        axes.set_ylim(0, 1)
    for axes in grid[-1]:
        axes.set_xlabel("step")
    for axes in grid[:, 0]:
        axes.set_ylabel("target path among the samples")
    grid[0, 0].legend(fontsize="small", loc="upper left")
    figure.suptitle(title, fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--rates", type=float, nargs="+", default=[0.15, 0.3, 0.6, 1.2], help="learning rates of SGD")
    add("--seeds", type=int, default=24, help="runs of each setting")
    add("--group-size", type=int, default=6, help="paths sampled in a step")
    add("--steps", type=int, default=1500, help="gradient steps")
    add("--plot", type=Path, help="where to draw how often the target path is sampled")
    args = parser.parse_args()
    settings = [setting._replace(rate=rate) for rate in args.rates for setting in PAPER_SETTINGS]
    start = time.perf_counter()
    options = {"seeds": args.seeds, "group_size": args.group_size, "steps": args.steps}
    found = {
        name: simulate(recipe, settings, **options, generator=torch.Generator().manual_seed(0))
        for name, recipe in RECIPES.items()
    }
    console = Console()
    print_table(settings, found, console)
    console.print(f"{2 * len(settings) * args.seeds} runs of {args.steps} steps, {time.perf_counter() - start:.0f} s")
    if args.plot is not None:
        title = f"binary tree of depth 4, mean of {args.seeds} seeds, groups of {args.group_size}"
        plot(settings, found, title, args.plot)


if __name__ == "__main__":
    main()
