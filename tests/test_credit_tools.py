"""ReTool and rollout weights: tool output, masked advantages, values, another engine's log-probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator

import rlkernels
from rlkernels import PolicyBatch
from rlkernels.credit import (
    generalized_advantages,
    outcome_reward,
    rollout_weights,
    tool_output_mask,
    value_loss,
    whiten,
)


def scanned(tokens: list[int], opening: list[int], closing: list[int]) -> list[int]:
    """One pass from left to right: 1 where a token is trained."""
    trained, inside = [1] * len(tokens), False
    for end in range(1, len(tokens) + 1):
        if inside:
            trained[end - 1] = 0
        if end >= len(opening) and tokens[end - len(opening) : end] == opening:
            inside = True
            for position in range(end - len(opening), end):
                trained[position] = 0
        elif end >= len(closing) and tokens[end - len(closing) : end] == closing:
            inside = False
    return trained


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), max_size=10), min_size=1, max_size=4),
    st.sampled_from(
        [([0], [1]), ([0, 1], [2]), ([0, 1], [1, 2]), ([0, 0], [1, 1]), ([0, 1, 2], [2, 1]), ([2], [0, 1])]
    ),
)
def test_tags_against_a_scan(rows: list[list[int]], tags: tuple[list[int], list[int]]) -> None:
    """Few tokens, so that tags overlap, nest, stray, stay open, and stand at the padding too."""
    opening, closing = tags
    width = max(map(len, rows)) + 2
    padding = (opening + closing) * width
    ids = torch.tensor([row + padding[: width - len(row)] for row in rows])
    valid = torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]
    mask = tool_output_mask(valid, token_ids=ids, opening=opening, closing=closing)
    assert mask.dtype == torch.bool
    expected = [scanned(row, opening, closing) + [0] * (width - len(row)) for row in rows]
    assert mask.int().tolist() == expected


def test_spans() -> None:
    valid = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    mask = tool_output_mask(valid, spans=[[(1, 2), (4, 5)], [], [(0, 2), (1, 4), (4, 4)]])
    assert mask.int().tolist() == [[1, 0, 1, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]]
    assert tool_output_mask(torch.ones(0, 3), spans=[]).shape == (0, 3)
    assert tool_output_mask(torch.ones(2, 0), spans=[[], [(0, 0)]]).shape == (2, 0)
    empty = torch.ones(2, 0, dtype=torch.int64)
    assert tool_output_mask(empty, token_ids=empty, opening=[1], closing=[2]).shape == (2, 0)


IDS = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    "options, error, name",
    [
        ({}, ValueError, "spans"),
        ({"token_ids": IDS}, ValueError, "spans"),
        ({"spans": [[], []], "opening": [1]}, ValueError, "spans"),
        ({"spans": [[], []], "token_ids": IDS, "opening": [1], "closing": [2]}, ValueError, "spans"),
        ({"spans": [[]]}, ValueError, "spans"),
        ({"spans": [[], [(2, 4)]]}, ValueError, "spans"),
        ({"spans": [[], [(2, 1)]]}, ValueError, "spans"),
        ({"token_ids": IDS.float(), "opening": [1], "closing": [2]}, TypeError, "token_ids"),
        ({"token_ids": IDS[:, :2], "opening": [1], "closing": [2]}, ValueError, "token_ids"),
        ({"token_ids": IDS, "opening": [], "closing": [2]}, ValueError, "opening"),
        ({"token_ids": IDS, "opening": [1], "closing": ["</code>"]}, ValueError, "closing"),
        ({"token_ids": IDS, "opening": [1], "closing": [1]}, ValueError, "closing"),
        ({"token_ids": IDS, "opening": [1], "closing": [2, 1]}, ValueError, "closing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_mask_arguments(options: dict, error: type[Exception], name: str) -> None:
    with pytest.raises(error, match=name):
        tool_output_mask(torch.ones(2, 3), **options)


def test_outcomes_of_a_list() -> None:
    assert outcome_reward([-1, 1, 0, 0.5]).tolist() == [-1.0, 1.0, -1.0, 1.0]
    assert outcome_reward([math.nan])[0].isnan()
    for wrong in (None, "yes", ["yes"]):
        with pytest.raises(TypeError, match="correct"):
            outcome_reward(wrong)


@pytest.mark.parametrize("spans", [3, [3], [[(1, 2)], [(1.5, 2)]], [[(1, 2)], [(1, 2, 3)]]], ids=str)
def test_spans_that_are_none(spans: object) -> None:
    with pytest.raises((TypeError, ValueError), match="spans"):
        tool_output_mask(torch.ones(2, 4), spans=spans)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_weights_where_nothing_is_trained(level: str) -> None:
    logp, mask = torch.zeros(2, 3), torch.tensor([[1, 1, 0], [0, 0, 0]])
    weights = rollout_weights(logp, logp, mask, level=level, mode="mask", low=1.5).expand(2, 3)
    assert (weights[1] == 1).all() and (weights[0, :2] == 0).all()


def test_outcomes() -> None:
    assert outcome_reward([True, None, False]).tolist() == [1.0, -1.0, -1.0]
    assert outcome_reward([]).shape == (0,)
    rewards = outcome_reward(torch.tensor([1.0, 0.0, -1.0, math.nan]))
    assert rewards[:3].tolist() == [1.0, -1.0, -1.0]
    assert rewards[3].isnan()


def advantages_by_hand(rewards: list, values: list, mask: list, gamma: float, lam: float) -> list[float]:
    """From the last trained token to the first."""
    out, next_value, next_advantage = [0.0] * len(mask), 0.0, 0.0
    for t in reversed(range(len(mask))):
        if mask[t]:
            next_advantage = rewards[t] + gamma * next_value - values[t] + gamma * lam * next_advantage
            next_value = values[t]
            out[t] = next_advantage
    return out


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.booleans()), max_size=17),
    st.sampled_from([(1.0, 1.0), (0.9, 0.5), (1.0, 0.0), (0.0, 1.0), (0.99, 1.0)]),
)
def test_advantages_one_token_at_a_time(tokens: list[tuple[float, float, bool]], factors: tuple[float, float]) -> None:
    rewards, values, mask = ([token[i] for token in tokens] for i in range(3))
    row = [torch.tensor(x, dtype=torch.float64).reshape(1, -1) for x in (rewards, values)]
    used = torch.tensor(mask, dtype=torch.bool).reshape(1, -1)
    spoiled = [torch.where(used, x, math.nan) for x in row]
    out = generalized_advantages(*spoiled, used, gamma=factors[0], lam=factors[1])
    expected = advantages_by_hand(rewards, values, mask, *factors)
    assert out.advantages[0].tolist() == pytest.approx(expected, rel=1e-10, abs=1e-12)
    returns = [a + v if m else 0.0 for a, v, m in zip(expected, values, mask, strict=True)]
    assert out.returns[0].tolist() == pytest.approx(returns, rel=1e-10, abs=1e-12)


def test_a_response_is_paid_at_its_last_trained_token(generator: Generator) -> None:
    values = torch.randn(4, 6, generator=generator, dtype=torch.float64).requires_grad_()
    mask = torch.tensor([[1, 1, 0, 1, 0, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]])
    rewards = torch.tensor([1.0, -1.0, 1.0, math.nan])
    out = generalized_advantages(rewards, values, mask, gamma=0.9, lam=0.8)
    assert not out.advantages.requires_grad
    paid = torch.zeros(4, 6, dtype=torch.float64)
    paid[0, 3], paid[1, 5] = 1.0, -1.0
    expected = generalized_advantages(paid, values, mask, gamma=0.9, lam=0.8)
    torch.testing.assert_close(out.advantages[:3], expected.advantages[:3])
    assert out.advantages[2:].abs().sum() == 0  # nothing trained; rejected
    torch.testing.assert_close(out.returns[3], torch.where(mask[3] != 0, values[3], 0).detach())


def test_long_responses_are_discounted_exactly(generator: Generator) -> None:
    rewards = torch.randn(2, 5000, generator=generator)
    values, mask = torch.randn(2, 5000, generator=generator), torch.rand(2, 5000, generator=generator) < 0.8
    out = generalized_advantages(rewards, values, mask, gamma=0.999, lam=0.97)
    assert out.advantages.dtype == torch.float32
    for row in range(2):
        expected = advantages_by_hand(rewards[row].tolist(), values[row].tolist(), mask[row].tolist(), 0.999, 0.97)
        torch.testing.assert_close(out.advantages[row], torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_value_loss_clips_and_reads_no_padding(generator: Generator) -> None:
    def random_values() -> torch.Tensor:
        return torch.randn(3, 4, generator=generator, dtype=torch.float64)

    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]])
    values, old, returns = random_values(), random_values(), random_values()
    leaves = [torch.where(mask != 0, x, math.nan).requires_grad_() for x in (values, old, returns)]
    loss = value_loss(*leaves, mask, clip=0.3)
    loss.backward()
    total, count, gradient = 0.0, 0, torch.zeros(3, 4, dtype=torch.float64)
    for i in range(3):
        for t in range(4):
            if mask[i, t]:
                v, o, r = (x[i, t].item() for x in (values, old, returns))
                clipped = min(max(v, o - 0.3), o + 0.3)
                total += 0.5 * max((v - r) ** 2, (clipped - r) ** 2)
                gradient[i, t] = v - r if (v - r) ** 2 >= (clipped - r) ** 2 or clipped == v else 0.0
                count += 1
    assert loss.item() == pytest.approx(total / count, rel=1e-12)
    torch.testing.assert_close(leaves[0].grad, gradient / count)
    assert leaves[1].grad is None
    assert leaves[2].grad is None


def test_value_loss_of_micro_batches_adds_up(generator: Generator) -> None:
    values, old, returns = (torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.tensor([[1, 0, 0], [1, 1, 1], [0, 0, 0], [1, 1, 0]])
    whole = value_loss(values, old, returns, mask)
    parts = [value_loss(*(x[i : i + 2] for x in (values, old, returns, mask)), normalizer=6.0) for i in (0, 2)]
    torch.testing.assert_close(sum(parts), whole)
    assert value_loss(values, old, returns, torch.zeros(4, 3)).item() == 0
    assert value_loss(values, old, returns, mask, reduction="none").shape == (4, 3)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.booleans()), max_size=12))
def test_whitened_tokens(tokens: list[tuple[float, bool]]) -> None:
    values = torch.tensor([value if used else math.nan for value, used in tokens], dtype=torch.float64)
    mask = torch.tensor([used for _, used in tokens], dtype=torch.bool)
    out = whiten(values, mask)
    chosen = values[mask]
    assert out[~mask].tolist() == [0.0] * int((~mask).sum())
    if len(chosen) < 2 or (chosen == chosen[0]).all():
        assert out.tolist() == [0.0] * len(tokens)
    else:
        expected = (chosen - chosen.mean()) / (chosen.var() + 1e-8).sqrt()
        torch.testing.assert_close(out[mask], expected, rtol=1e-9, atol=1e-9)


def test_equal_values_whiten_to_zero() -> None:
    assert whiten(torch.full((3, 7), 0.1), torch.ones(3, 7)).tolist() == [[0.0] * 7] * 3


def test_retool_runs_whole(backend: str, generator: Generator) -> None:
    """Tool tokens have no gradient, from the policy and from the values alike."""
    logits = torch.randn(2, 8, 5, generator=generator, dtype=torch.float64).requires_grad_()
    values = torch.randn(2, 8, generator=generator, dtype=torch.float64).requires_grad_()
    ids = torch.randint(0, 5, (2, 8), generator=generator)
    mask = tool_output_mask(torch.ones(2, 8), spans=[[(2, 5)], [(0, 1), (6, 8)]])
    out = generalized_advantages(outcome_reward([True, None]), values, mask)
    batch = PolicyBatch(ids, whiten(out.advantages, mask), mask=mask)
    loss = rlkernels.policy_loss(logits, batch, "ppo").loss + value_loss(values, values.detach(), out.returns, mask)
    loss.backward()
    assert (logits.grad.abs().sum(-1) > 0).equal(mask)
    assert (values.grad != 0).equal(mask)


LEVELS = ("token", "sequence", "geometric")


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-4, 4), st.sampled_from(["known", "unknown", "masked"])), min_size=1, max_size=6),
    st.sampled_from(LEVELS),
    st.sampled_from(["truncate", "mask"]),
    st.sampled_from([(None, 2.0), (0.5, 2.0), (0.5, None), (None, None)]),
)
def test_rollout_weights_of_one_row(tokens: list, level: str, mode: str, bounds: tuple) -> None:
    low, high = bounds
    differences = [0.0 if kind == "unknown" else d for d, kind in tokens if kind != "masked"]
    count = max(1, len(differences))
    log_weights = {
        "token": [d if kind == "known" else 0.0 for d, kind in tokens],
        "sequence": [sum(differences)],
        "geometric": [sum(differences) / count],
    }[level]

    def bounded(weight: float) -> float:
        if mode == "mask":
            return weight if (low or 0.0) <= weight <= (high or math.inf) else 0.0
        return min(max(weight, low or 0.0), high or math.inf)

    expected = [bounded(math.exp(d)) for d in log_weights]
    old = torch.tensor([[-5.0 if kind == "known" else math.nan for _, kind in tokens]], dtype=torch.float64)
    rollout = torch.tensor([[-5.0 - d for d, _ in tokens]], dtype=torch.float64)
    mask = torch.tensor([[kind != "masked" for _, kind in tokens]])
    actual = rollout_weights(old, rollout, mask, level=level, mode=mode, low=low, high=high)
    assert actual.shape == ((1, len(tokens)) if level == "token" else (1, 1))
    # a weight that a rounding moves over a bound may be either
    for mine, theirs, d in zip(actual[0].tolist(), expected, log_weights, strict=True):
        near_bound = any(bound and abs(math.exp(d) - bound) < 1e-9 for bound in bounds)
        assert near_bound or mine == pytest.approx(theirs, rel=1e-9)


def test_rollout_weights_are_finite() -> None:
    """Log-probabilities of -inf on either side, and sums beyond what an exponential holds."""
    old = torch.tensor([[-math.inf, -1.0, -math.inf, -1000.0]])
    rollout = torch.tensor([[-1.0, -math.inf, -math.inf, -1.0]])
    for level in LEVELS:
        for mode in ("truncate", "mask"):
            for high in (2.0, None):
                weights = rollout_weights(old, rollout, torch.ones(1, 4), level=level, mode=mode, high=high)
                assert weights.isfinite().all()
    weights = rollout_weights(old, rollout, torch.ones(1, 4))
    assert weights[0].tolist() == pytest.approx([0.0, 2.0, 1.0, 0.0], abs=1e-30)


def test_nothing_formed_of_log_probabilities_has_a_gradient() -> None:
    x, mask = torch.zeros(2, 3, requires_grad=True), torch.ones(2, 3)
    assert not rollout_weights(x, x, mask).requires_grad
    assert not whiten(x, mask).requires_grad
    assert not any(part.requires_grad for part in generalized_advantages(x, x, mask))


def test_rollout_weights_in_a_loss(backend: str, generator: Generator) -> None:
    """They scale the policy term; a rejected token and a rejected response have no gradient."""
    logp = -torch.rand(3, 4, generator=generator, dtype=torch.float64)
    rollout = logp + 0.3 * torch.randn(3, 4, generator=generator, dtype=torch.float64)
    rollout[1, 2] = logp[1, 2] - 3.0
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]])
    advantages = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    for level in LEVELS:
        weights = rollout_weights(logp, rollout, mask, level=level, mode="mask", low=0.2, high=3.0)
        leaf = logp.clone().requires_grad_()
        batch = PolicyBatch(None, advantages, mask=mask, old_logp=logp, policy_weight=weights)
        out = rlkernels.logp_policy_loss(leaf, batch, "dapo")
        (gradient,) = torch.autograd.grad(out.loss, leaf)
        expected = -advantages[:, None] * weights * mask / mask.sum()
        torch.testing.assert_close(gradient, expected)
    assert rollout_weights(logp, rollout, mask, mode="mask", high=3.0)[1, 2] == 0


def test_only_values_and_log_probabilities_of_a_batch_shape() -> None:
    logp, mask = torch.zeros(2, 3), torch.ones(2, 3)
    for options, name in (
        ({"level": "word"}, "level"),
        ({"mode": "clip"}, "mode"),
        ({"low": 2.0}, "high"),
        ({"low": -1.0}, "low"),
        ({"high": math.inf}, "high"),
    ):
        with pytest.raises(ValueError, match=name):
            rollout_weights(logp, logp, mask, **options)
    with pytest.raises(ValueError, match="rollout_logp"):
        rollout_weights(logp, logp[:, :2], mask)
    with pytest.raises(ValueError, match="rewards"):
        generalized_advantages(torch.zeros(3), logp, mask)
    with pytest.raises(ValueError, match="gamma"):
        generalized_advantages(torch.zeros(2), logp, mask, gamma=1.1)
    with pytest.raises(ValueError, match="returns"):
        value_loss(logp, logp, logp[:1], mask)
    with pytest.raises(ValueError, match="clip"):
        value_loss(logp, logp, logp, mask, clip=0.0)
    with pytest.raises(ValueError, match="reduction"):
        value_loss(logp, logp, logp, mask, reduction="mean")
