"""Prefix sets and group advantages."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator

import rlkernels
from rlkernels import reference
from rlkernels.credit import group_advantages, mixed_groups, overlong_penalty, prefix_set_counts


def brute_force(rows: list[list[int]], groups: list[int]) -> list[list[int]]:
    """A dictionary of every prefix of every group."""
    prefixes = [
        [(group, tuple(row[:end])) for end in range(1, len(row) + 1)] for row, group in zip(rows, groups, strict=True)
    ]
    sizes = Counter(prefix for row in prefixes for prefix in row)
    return [[sizes[prefix] for prefix in row] for row in prefixes]


def counts_of(rows: list[list[int]], groups: int | list[int], padding: int = 0) -> list[list[int]]:
    """The counts of ragged rows padded with `padding`; what lies at the padding must be 1."""
    width = max([len(row) for row in rows], default=0)
    ids = torch.tensor([row + [padding] * (width - len(row)) for row in rows], dtype=torch.int64)
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    groups = groups if isinstance(groups, int) else torch.tensor(groups)
    counts = prefix_set_counts(ids.reshape(len(rows), width), lengths, groups)
    assert counts.dtype == torch.int32
    assert all((counts[i, len(row) :] == 1).all() for i, row in enumerate(rows))
    return [counts[i, : len(row)].tolist() for i, row in enumerate(rows)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2), max_size=9)), max_size=9),
    st.sampled_from(["cpu", "triton", "reference"]),
)
def test_counts_equal_brute_force(rows: list[tuple[int, list[int]]], backend: str) -> None:
    """Few distinct tokens and groups, so that prefixes are shared at every length; padding is a token."""
    previous = rlkernels.set_backend(backend)
    try:
        tokens, groups = [row for _, row in rows], [group for group, _ in rows]
        if tokens:
            assert counts_of(tokens, groups) == brute_force(tokens, groups)
    finally:
        rlkernels.set_backend(previous)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8], ids=str)
def test_strided_ids_of_any_integer_dtype(dtype: torch.dtype, generator: Generator) -> None:
    ids = torch.randint(0, 3, (12, 2, 200), generator=generator).to(dtype)[:, 1, ::2]
    lengths = torch.randint(0, 101, (24,), generator=generator, dtype=torch.int32)[::2]
    expected = reference.prefix_counts(ids.long(), lengths, torch.arange(12) // 4)
    assert torch.equal(prefix_set_counts(ids, lengths, 4), expected)


def test_long_shared_prefixes(backend: str, generator: Generator) -> None:
    """Longer than one comparison block or tile, diverging in the middle of one."""
    ids = torch.randint(0, 9, (1, 700), generator=generator).repeat(4, 1)
    ids[1, 300:] += 1
    ids[2, 511:] += 2
    lengths = torch.tensor([700, 650, 700, 512])
    expected = reference.prefix_counts(ids, lengths, torch.zeros(4, dtype=torch.int64))
    assert torch.equal(prefix_set_counts(ids, lengths, 4), expected)


@pytest.mark.parametrize(
    "change, error, name",
    [
        ({"token_ids": torch.zeros(4, dtype=torch.int64)}, ValueError, "token_ids"),
        ({"token_ids": torch.zeros(4, 3)}, TypeError, "token_ids"),
        ({"lengths": torch.zeros(3, dtype=torch.int64)}, ValueError, "lengths"),
        ({"lengths": torch.tensor([0, 1, 2, 4])}, ValueError, "lengths"),
        ({"lengths": torch.tensor([0, 1, 2, -1])}, ValueError, "lengths"),
        ({"lengths": torch.zeros(4)}, TypeError, "lengths"),
        ({"groups": 3}, ValueError, "groups"),
        ({"groups": 0}, ValueError, "groups"),
        ({"groups": True}, TypeError, "groups"),
        ({"groups": torch.zeros(5, dtype=torch.int64)}, ValueError, "groups"),
        ({"groups": torch.zeros(4)}, TypeError, "groups"),
        ({"lengths": torch.zeros(4, dtype=torch.int64, device="meta")}, ValueError, "lengths"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_prefix_arguments(change: dict, error: type[Exception], name: str) -> None:
    arguments = {
        "token_ids": torch.zeros(4, 3, dtype=torch.int64),
        "lengths": torch.tensor([3, 2, 1, 0]),
        "groups": 2,
    }
    with pytest.raises(error, match=name):
        prefix_set_counts(**(arguments | change))


def advantages(rewards: list[float], groups: list[int] | int, **options) -> list[float]:
    groups = groups if isinstance(groups, int) else torch.tensor(groups)
    return group_advantages(torch.tensor(rewards), groups, **options).tolist()


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("value, count", [(0.2, 8), (0.1, 7), (0.7, 16)], ids=["B94-8x0.2", "B94-7x0.1", "B94-16x0.7"])
def test_equal_rewards_give_exactly_zero(value: float, count: int, ddof: int) -> None:
    assert advantages([value] * count, count, eps=1e-6, ddof=ddof) == [0.0] * count


def test_singletons_and_mixed_sizes() -> None:
    """B93, B98."""
    assert advantages([0.7], 1) == [0.0]
    assert advantages([0.7], 1, eps=0.0) == [0.0]
    assert advantages([1.0, 5.0, 0.0, 3.0], [2, 0, 2, 1], scale="none") == [0.5, 0.0, -0.5, 0.0]
    assert advantages([0.0, 0.0, 1.0, 1.0], 2) == [0.0] * 4


def test_rejected_rewards_leave_no_trace() -> None:
    """B96, B97."""
    actual = advantages([1.0, 0.0, math.nan, 1.0, 0.0], [0, 0, 0, 1, 1], eps=0.0)
    assert actual == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5), 0.0, math.sqrt(0.5), -math.sqrt(0.5)])
    assert advantages([1.0, 0.0, math.nan], 3, scale="none") == [0.5, -0.5, 0.0]
    assert advantages([math.nan, math.nan], 2) == [0.0, 0.0]
    assert advantages([1.0, 0.0, math.inf], 3, scale="none") == [0.5, -0.5, 0.0]


def test_rewards_of_any_magnitude() -> None:
    for size in (3e38, 1e20, 1e-30):
        assert advantages([size, -size], 2, eps=0.0) == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])


def test_large_common_offset_is_harmless(generator: Generator) -> None:
    """Two passes: the variance of 1e6 + {0, 1} is that of {0, 1}."""
    small = torch.randint(0, 2, (32,), generator=generator).float()
    torch.testing.assert_close(group_advantages(small + 1e6, 8), group_advantages(small, 8))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.floats(-1e3, 1e3, width=32, allow_subnormal=False)),
        min_size=1,
        max_size=20,
    )
)
def test_groups_are_independent_and_centred(rows: list[tuple[int, float]]) -> None:
    groups, rewards = (list(column) for column in zip(*rows, strict=True))
    together = torch.tensor(advantages(rewards, groups))
    for group in set(groups):
        members = [i for i, other in enumerate(groups) if other == group]
        alone = torch.tensor(advantages([rewards[i] for i in members], len(members)))
        torch.testing.assert_close(together[members], alone)
        assert abs(together[members].sum().item()) < 1e-3 * len(members)


@pytest.mark.parametrize(
    "arguments, error, name",
    [
        ({"rewards": torch.zeros(2, 2)}, ValueError, "rewards"),
        ({"rewards": [0.0, 1.0]}, TypeError, "rewards"),
        ({"scale": "max"}, ValueError, "scale"),
        ({"ddof": 2}, ValueError, "ddof"),
        ({"ddof": True}, ValueError, "ddof"),
        ({"eps": -1.0}, ValueError, "eps"),
        ({"groups": 3}, ValueError, "groups"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_advantage_arguments(arguments: dict, error: type[Exception], name: str) -> None:
    with pytest.raises(error, match=name):
        group_advantages(**({"rewards": torch.zeros(4), "groups": 2} | arguments))


def test_mixed_groups_drops_singletons() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.3]), torch.tensor([0, 0, 1, 1, 2])
    assert mixed_groups(rewards, groups).tolist() == [True, True, False, False, False]


def test_rejected_responses_are_not_kept() -> None:
    rewards = torch.tensor([1.0, 0.0, torch.nan, 1.0, 1.0, torch.nan])
    assert mixed_groups(rewards, 3).tolist() == [True, True, False, False, False, False]


def test_overlong_penalty_has_no_gradient() -> None:
    assert not overlong_penalty(torch.tensor([8.0, 10.0], requires_grad=True), 10, 4).requires_grad


def test_a_bad_value_is_shown_with_its_place() -> None:
    lengths = torch.full((1000,), 3)
    lengths[700] = 9
    with pytest.raises(ValueError, match=r"lengths: expected values in \[0, 5\], got 9 at \[700\]$"):
        prefix_set_counts(torch.zeros(1000, 5, dtype=torch.int64), lengths, 10)


def test_overlong_penalty_needs_a_buffer_within_the_length() -> None:
    with pytest.raises(ValueError, match="buffer_length"):
        overlong_penalty(torch.tensor([1]), 10, 11)


def test_lambda_grpo_runs_whole(backend: str, generator: Generator) -> None:
    """Theorem of the method at ratio 1: duplicates carry one response's weight together."""
    ids = torch.tensor([[1, 2, 9], [1, 2, 9], [1, 3, 9], [4, 9, 0]])
    lengths = torch.tensor([3, 3, 3, 2])
    mask = torch.arange(3) < lengths[:, None]
    weight = 1 / prefix_set_counts(ids, lengths, 4)
    assert weight[mask].sum().item() == pytest.approx(1 + 1 + 1 + 2 + 2)  # one for each prefix set
    logits = torch.randn(4, 3, 10, generator=generator, dtype=torch.float64).requires_grad_()
    batch = rlkernels.PolicyBatch(
        ids, group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.5]), 4), mask=mask, weight=weight
    )
    out = rlkernels.policy_loss(logits, batch, "lambda_grpo")
    out.loss.backward()
    expected = -(batch.advantages[:, None] * weight)[mask].sum() / mask.sum()
    assert out.loss.item() == pytest.approx(expected.item())
    assert logits.grad[3, 2].abs().sum() == 0
