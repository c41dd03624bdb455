"""RLVP: two channels with their own denominators, standardised scores, variances, annealing."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

import rlkernels
from rlkernels.credit import (
    group_advantages,
    group_variance_decomposition,
    path_annealing,
    two_channel_advantages,
    two_channel_zscore,
)

VARIANTS = ("outcome", "c1", "c2", "c3", "c4")


def written_out(
    outcomes, violations, fulfilments, turn_ids, groups, variant, penalty, credit, clip
) -> list[list[float]]:
    """Plain loops over Python numbers."""
    rewards = list(outcomes)
    if variant in ("c1", "c3"):
        rewards = [
            outcome - penalty * min(sum(broken), clip) + credit * min(sum(met), clip)
            for outcome, broken, met in zip(outcomes, violations, fulfilments, strict=True)
        ]
    of_group = defaultdict(list)
    for group, reward in zip(groups, rewards, strict=True):
        if not math.isnan(reward):
            of_group[group].append(reward)
    outcome_channel, path_channel = [], []
    for row, turns in enumerate(turn_ids):
        rejected = math.isnan(rewards[row])
        mean = 0.0 if rejected else sum(of_group[groups[row]]) / len(of_group[groups[row]])
        gate = variant in ("c2", "c3") or (variant == "c4" and outcomes[row] > 0)
        has_path = variant in ("c2", "c3", "c4")
        outcome_channel.append([None if turn < 0 or rejected else rewards[row] - mean for turn in turns])
        path_channel.append(
            [
                0.0
                if turn < 0 or rejected or not has_path
                else credit * fulfilments[row][turn] * gate - penalty * violations[row][turn]
                for turn in turns
            ]
        )
    n_outcome = max(1, sum(value is not None for row in outcome_channel for value in row))
    n_path = max(1, sum(value != 0 for row in path_channel for value in row))
    return [
        [(a or 0.0) / n_outcome + b / n_path for a, b in zip(*rows, strict=True)]
        for rows in zip(outcome_channel, path_channel, strict=True)
    ]


@st.composite
def batches(draw: st.DrawFn) -> dict:
    rows, turns, width = draw(st.integers(1, 6)), draw(st.integers(1, 3)), draw(st.integers(0, 6))
    counts = st.lists(st.lists(st.integers(0, 3), min_size=turns, max_size=turns), min_size=rows, max_size=rows)
    tokens = st.lists(st.integers(-1, turns - 1), min_size=width, max_size=width)
    return {
        "outcomes": draw(st.lists(st.sampled_from([0.0, 1.0, math.nan]), min_size=rows, max_size=rows)),
        "violations": draw(counts),
        "fulfilments": draw(counts),
        "turn_ids": draw(st.lists(tokens, min_size=rows, max_size=rows)),
        "groups": draw(st.lists(st.integers(0, 1), min_size=rows, max_size=rows)),
        "variant": draw(st.sampled_from(VARIANTS)),
    }


@settings(max_examples=150, deadline=None)
@given(batches())
def test_channels_are_as_written(batch: dict) -> None:
    expected = written_out(**batch, penalty=0.5, credit=0.75, clip=2.0)
    variant, rows = batch.pop("variant"), len(batch["outcomes"])
    tensors = {name: torch.tensor(value) for name, value in batch.items()}
    tensors["outcomes"] = tensors["outcomes"].double()
    tensors["turn_ids"] = tensors["turn_ids"].long().reshape(rows, -1)
    actual = two_channel_advantages(**tensors, variant=variant, credit=0.75)
    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64).reshape(rows, -1))


def small_batch(outcomes: list[float]) -> dict[str, Tensor]:
    return {
        "outcomes": torch.tensor(outcomes),
        "violations": torch.tensor([[1, 0], [0, 2], [0, 0]]),
        "fulfilments": torch.tensor([[0, 0], [1, 0], [0, 0]]),
        "turn_ids": torch.tensor([[0, 0, -1, 1, 1], [0, -1, 1, -1, -1], [0, 1, 1, 1, -1]]),
    }


def test_all_fail_groups_train_and_a_group_of_one_trains_its_path() -> None:
    actual = two_channel_advantages(**small_batch([0.0, 0.0, 0.0]), groups=3)
    assert (actual != 0).sum() == 4 and (actual[2] == 0).all()
    alone = two_channel_advantages(**small_batch([1.0, 0.0, 1.0]), groups=1)
    assert torch.equal(alone, actual)  # no outcome channel either


def test_without_shaping_the_outcome_is_left() -> None:
    batch = small_batch([1.0, 0.0, 0.0])
    centred = group_advantages(batch["outcomes"], 3, scale="none")
    is_action = batch["turn_ids"] >= 0
    scale = path_annealing(11, 10)
    annealed = two_channel_advantages(**batch, groups=3, penalty=0.5 * scale, credit=0.5 * scale)
    torch.testing.assert_close(annealed, centred[:, None] * is_action / is_action.sum())


def test_rejected_responses_leave_no_trace() -> None:
    with_rejected = two_channel_advantages(**small_batch([1.0, 0.0, math.nan]), groups=3)
    kept = {name: value[:2] for name, value in small_batch([1.0, 0.0, math.nan]).items()}
    assert torch.equal(with_rejected[:2], two_channel_advantages(**kept, groups=2))
    assert (with_rejected[2] == 0).all()


def test_empty_responses_and_batches() -> None:
    nothing = torch.full((3, 5), -1)
    assert (two_channel_advantages(**small_batch([1.0, 0.0, 1.0]) | {"turn_ids": nothing}, groups=3) == 0).all()
    no_turns = torch.zeros(3, 0)
    batch = {"outcomes": torch.ones(3), "violations": no_turns, "fulfilments": no_turns, "turn_ids": nothing}
    assert (two_channel_advantages(**batch, groups=3) == 0).all()
    empty = {name: value[:0] for name, value in small_batch([1.0, 0.0, 1.0]).items()}
    assert two_channel_advantages(**empty, groups=3).shape == (0, 5)


def test_loss_runs_whole(generator: Generator) -> None:
    batch = small_batch([1.0, 0.0, 0.0])
    batch["outcomes"].requires_grad_()
    advantages = two_channel_advantages(**batch, groups=3)
    assert not advantages.requires_grad
    logits = torch.randn(3, 5, 7, generator=generator, requires_grad=True)
    targets = torch.randint(0, 7, (3, 5), generator=generator)
    policy_batch = rlkernels.PolicyBatch(targets, advantages, mask=batch["turn_ids"] >= 0)
    out = rlkernels.policy_loss(logits, policy_batch, "ppo", reduction="token_sum")
    out.loss.backward()
    assert out.loss.item() == pytest.approx(-advantages.sum().item(), abs=1e-6)
    assert (logits.grad[batch["turn_ids"] < 0] == 0).all()


@pytest.mark.parametrize(
    "change, error, name",
    [
        ({"outcomes": torch.zeros(2)}, ValueError, "outcomes"),
        ({"violations": torch.zeros(3)}, ValueError, "violations"),
        ({"fulfilments": torch.zeros(3, 3)}, ValueError, "fulfilments"),
        ({"turn_ids": torch.zeros(3, 5)}, TypeError, "turn_ids"),
        ({"turn_ids": torch.full((3, 5), 2)}, ValueError, "turn_ids: expected turns below 2, got 2"),
        ({"turn_ids": torch.zeros(2, 5, dtype=torch.int64)}, ValueError, "turn_ids"),
        ({"variant": "c5"}, ValueError, "variant"),
        ({"penalty": -0.5}, ValueError, "penalty"),
        ({"credit": True}, TypeError, "credit"),
        ({"groups": 2}, ValueError, "groups"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_channel_arguments(change: dict, error: type[Exception], name: str) -> None:
    with pytest.raises(error, match=name):
        two_channel_advantages(**(small_batch([1.0, 0.0, 0.0]) | {"groups": 3} | change))


def test_unchecked_turns_poison_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: never an address."""
    monkeypatch.setattr(rlkernels.checks, "values_are_checked", lambda device: False)
    batch = small_batch([1.0, 0.0, 0.0])
    batch["turn_ids"][0, 0] = 10**9
    actual = two_channel_advantages(**batch, groups=3)
    assert actual[0, 0].isnan() and actual.isnan().sum() == 1


SCORES = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([0.0, 1.0, math.nan]), st.sampled_from([-1.0, 0.0, 0.5, math.nan])),
    min_size=1,
    max_size=12,
)


@settings(max_examples=100, deadline=None)
@given(SCORES, st.sampled_from([0.0, 0.5, 2.0]))
def test_variances_are_as_written(rows: list[tuple[int, float, float]], beta: float) -> None:
    groups, outcomes, scores = (list(column) for column in zip(*rows, strict=True))
    wide = {"dtype": torch.float64}
    parts = group_variance_decomposition(
        torch.tensor(outcomes, **wide), torch.tensor(scores, **wide), torch.tensor(groups), beta=beta
    )
    identity = parts.outcome + beta**2 * parts.path + 2 * beta * parts.covariance
    torch.testing.assert_close(parts.reward, identity)
    for i, group in enumerate(groups):
        known = [(o, s) for g, o, s in rows if g == group and not math.isnan(o + s)]
        o, s = torch.tensor(known or [(0.0, 0.0)], **wide).unbind(-1)
        rewards = o + beta * s
        assert parts.reward[i].item() == pytest.approx(rewards.var(correction=0).item())
        assert parts.outcome[i].item() == pytest.approx(o.var(correction=0).item())
        assert parts.path[i].item() == pytest.approx(s.var(correction=0).item())
        assert parts.covariance[i].item() == pytest.approx(((o - o.mean()) * (s - s.mean())).mean().item())
        assert parts.is_reachable[i] == (len(set(s.tolist())) > 1)


@settings(max_examples=100, deadline=None)
@given(SCORES, st.sampled_from([0.0, 0.5]), st.integers(0, 1))
def test_zscore_is_as_written(rows: list[tuple[int, float, float]], beta: float, ddof: int) -> None:
    groups, outcomes, scores = (list(column) for column in zip(*rows, strict=True))
    wide = {"dtype": torch.float64}
    actual = two_channel_zscore(
        torch.tensor(outcomes, **wide), torch.tensor(scores, **wide), torch.tensor(groups), beta=beta, ddof=ddof
    )

    def z(x: Tensor) -> Tensor:
        if len(x) < 2 or x.max() - x.min() < 1e-12:
            return torch.zeros_like(x)
        return (x - x.mean()) / (x.std(correction=ddof) + 1e-4)

    expected = torch.zeros(len(rows), **wide)
    for group in set(groups):
        members = [i for i, (g, o, s) in enumerate(rows) if g == group and not math.isnan(o + s)]
        if members:
            o, s = (torch.tensor([column[i] for i in members], **wide) for column in (outcomes, scores))
            expected[members] = z(z(o) + beta * z(s))
    torch.testing.assert_close(actual, expected, atol=1e-9, rtol=1e-9)


def test_beta_cancels_where_all_fail() -> None:
    outcomes, scores = torch.zeros(4), torch.tensor([-1.0, 0.5, 0.0, -0.5])
    first, second = (two_channel_zscore(outcomes, scores, 4, beta=beta, eps=0.0) for beta in (0.5, 0.001))
    torch.testing.assert_close(first, second)
    assert (two_channel_zscore(outcomes, scores, 4, beta=0.0) == 0).all()


def test_annealing() -> None:
    assert [path_annealing(step, 40) for step in (0, 40, 41)] == [1.0, 1.0, 0.0]
    assert [path_annealing(step, 40, length=20) for step in (40, 45, 50, 60, 99)] == [1.0, 0.75, 0.5, 0.0, 0.0]
    with pytest.raises(ValueError, match="length"):
        path_annealing(1, 2, length=-1)
    with pytest.raises(TypeError, match="start"):
        path_annealing(1, None)
