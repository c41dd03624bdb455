"""The pictures of credit, drawn from made-up groups without a model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import credit_picture
import prefix_tree_picture

TEXTS = {0: "<b>", 1: "$x$ & y", 2: "↵", 3: "·\\frac$$", 4: "[end]"}


def random_group(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Few ids and short responses: some are equal, some end within others."""
    return (
        torch.randint(0, 3, (8, 24), generator=generator),
        torch.tensor([1, 2, 3, 4, 5, 24, 24, 24])[torch.randperm(8, generator=generator)],
    )


def test_boxes_are_the_distinct_prefixes(generator: torch.Generator) -> None:
    token_ids, lengths = random_group(generator)
    rewards = torch.rand(8, generator=generator)
    tree = prefix_tree_picture.tree_of(token_ids, lengths, rewards, TEXTS)
    responses = [row[:length].tolist() for row, length in zip(token_ids, lengths, strict=True)]
    sharers: dict[tuple[int, ...], list[int]] = {}
    for row, response in enumerate(responses):
        for end in range(1, len(response) + 1):
            sharers.setdefault(tuple(response[:end]), []).append(row)
    assert tree.weight == pytest.approx(len(sharers))
    assert tree.tokens == sum(map(len, responses))
    assert tree.shared_tokens == sum(len(rows) for rows in sharers.values() if len(rows) > 1)
    assert sum(len(box.tokens) for box in tree.boxes) == len(sharers)
    for box in tree.boxes:
        rows = sorted(tree.rows[box.top : box.top + box.members])
        for length in range(1, len(box.tokens) + 1):
            prefix = responses[rows[0]][: box.start + length]
            assert sharers[tuple(prefix)] == rows
            assert TEXTS[prefix[-1]] == box.tokens[length - 1]
        assert box.reward == pytest.approx(rewards[rows].mean().item(), rel=1e-5)


@pytest.mark.parametrize("rewards", [[1.0, 0, 0, 1, 1, 0, 0, 0], [1.0] * 8], ids=["mixed", "equal"])
def test_prefix_tree_is_drawn_and_escaped(tmp_path: Path, rewards: list[float], generator: torch.Generator) -> None:
    token_ids, lengths = random_group(generator)
    token_ids[:, -1] = 3
    tree = prefix_tree_picture.tree_of(token_ids, lengths, torch.tensor(rewards), TEXTS)
    png, page = tmp_path / "tree.png", tmp_path / "tree.html"
    prefix_tree_picture.draw(tree, "a < b", png)
    prefix_tree_picture.write_html(tree, "a < b", page)
    assert png.read_bytes().startswith(b"\x89PNG")
    text = page.read_text(encoding="utf-8")
    assert "<b>" not in text and "a < b" not in text
    assert "&lt;b&gt;" in text and "$x$ &amp; y" in text and "a &lt; b" in text
    assert text.count("<tr>") == 8
    assert text.count("<td") == len(tree.boxes)


def test_contrast_is_drawn_and_escaped(tmp_path: Path, generator: torch.Generator) -> None:
    tokens = list(TEXTS.values()) * 4  # more than a row of the picture
    values = (9 * torch.randn(2, len(tokens), generator=generator)).tolist()
    lines = [credit_picture.Line("no <rules>", values[0], 0.0, 4.0), credit_picture.Line("weight", values[1], 1.0, 0.3)]
    png, page = tmp_path / "contrast.png", tmp_path / "contrast.html"
    credit_picture.draw(tokens, lines, "a < b", png)
    credit_picture.write_html(tokens, lines, "a < b", page)
    assert png.read_bytes().startswith(b"\x89PNG")
    text = page.read_text(encoding="utf-8")
    assert "<b>" not in text and "<rules>" not in text
    assert text.count("&lt;b&gt;") == 8


def test_colours_go_from_pink_over_white_to_green() -> None:
    def channels(value: float) -> tuple[int, int, int]:
        colour = credit_picture.colour_of(value, 1.0, 0.5)
        return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)

    assert min(channels(1.0)) > 240
    red, green, blue = channels(0.5)
    assert green < min(red, blue)
    red, green, blue = channels(1.5)
    assert green > max(red, blue)
    assert channels(9.0) == channels(1.5)
    assert channels(-9.0) == channels(0.5)
