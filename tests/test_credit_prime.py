"""PRIME: implicit process rewards, leave-one-out returns, the reward model's loss, the accuracy filter."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator

from rlkernels.credit import (
    accuracy_filter,
    implicit_prm_loss,
    implicit_process_rewards,
    prime_advantages,
    whiten,
)


def test_process_rewards_are_log_ratios(generator: Generator) -> None:
    logp, ref_logp = torch.randn(2, 3, 5, generator=generator)
    mask = torch.rand(3, 5, generator=generator) < 0.7
    logp[~mask], ref_logp[~mask] = math.nan, -math.inf
    logp.requires_grad_()
    actual = implicit_process_rewards(logp, ref_logp, mask.int(), beta=0.3)
    assert not actual.requires_grad and actual.dtype == torch.float32
    torch.testing.assert_close(actual, torch.where(mask, 0.3 * (logp - ref_logp).detach(), 0))


def test_batch_norm_divides_by_the_largest_return(generator: Generator) -> None:
    logp = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    zeros, mask = torch.zeros_like(logp), torch.ones(3, 5)
    mask[1, 2] = 0
    plain, normed = (
        implicit_process_rewards(logp, zeros, mask, beta=1.0, batch_norm=batch_norm) for batch_norm in (False, True)
    )
    largest = max(abs(sum(row[t:])) for row in plain.tolist() for t in range(5))
    torch.testing.assert_close(normed, plain / (largest + 1e-6))
    assert implicit_process_rewards(zeros[:0], zeros[:0], mask[:0], batch_norm=True).shape == (0, 5)
    assert (implicit_process_rewards(zeros, zeros, 0 * mask, batch_norm=True) == 0).all()
    poisoned = torch.cat([logp, torch.full((1, 5), math.nan, dtype=torch.float64)])
    actual = implicit_process_rewards(
        poisoned, torch.zeros(4, 5), torch.cat([mask, torch.ones(1, 5)]), beta=1.0, batch_norm=True
    )
    torch.testing.assert_close(actual[:3], normed)


def written_out(process, outcomes, masks, groups, baseline, gamma_process, gamma_outcome) -> list[list[float]]:
    """Plain loops over Python numbers, step by step from a response's end."""
    rows = range(len(outcomes))
    tokens = [[r for r, m in zip(process[i], masks[i], strict=True) if m] for i in rows]
    accepted = [not math.isnan(outcomes[i] + sum(tokens[i])) for i in rows]
    result = [[0.0] * len(process[i]) for i in rows]
    for i in rows:
        if not accepted[i]:
            continue
        peers = [j for j in rows if groups[j] == groups[i] and j != i and accepted[j]]
        others = [sum(tokens[j]) / len(tokens[j]) for j in peers if tokens[j]]
        outcome = outcomes[i] - sum(outcomes[j] for j in peers) / len(peers) if peers else 0.0
        following = None
        for t in reversed(range(len(process[i]))):
            if not masks[i][t]:
                continue
            if not others:
                step = 0.0
            elif baseline == "paper":
                step = process[i][t] - sum(others) / len(others)
            else:
                k = len(others) + 1
                own = sum(tokens[i]) / len(tokens[i])
                step = process[i][t] * k / (k - 1) - (sum(others) + own) / (k - 1)
            if following is None:
                following = (step, outcome)
            else:
                following = (step + gamma_process * following[0], gamma_outcome * following[1])
            result[i][t] = sum(following)
    return result


@st.composite
def batches(draw: st.DrawFn) -> dict:
    rows, width = draw(st.integers(1, 6)), draw(st.integers(1, 7))

    def table(values: st.SearchStrategy) -> list:
        return draw(st.lists(st.lists(values, min_size=width, max_size=width), min_size=rows, max_size=rows))

    def column(values: st.SearchStrategy) -> list:
        return draw(st.lists(values, min_size=rows, max_size=rows))

    return {
        "process": table(st.one_of(st.floats(-2, 2, width=32), st.just(0.5))),
        "outcomes": column(st.sampled_from([0.0, 1.0, 0.25, math.nan])),
        "masks": table(st.booleans()),
        "groups": column(st.integers(0, 1)),
        "baseline": draw(st.sampled_from(["paper", "code"])),
        "gamma_process": draw(st.sampled_from([1.0, 0.9, 0.0])),
        "gamma_outcome": draw(st.sampled_from([1.0, 0.95, 0.0])),
    }


@settings(max_examples=150, deadline=None)
@given(batches())
def test_advantages_are_as_written(batch: dict) -> None:
    expected = torch.tensor(written_out(**batch), dtype=torch.float64)
    mask = torch.tensor(batch["masks"])
    process = torch.where(mask, torch.tensor(batch["process"], dtype=torch.float64), math.nan)
    outcomes, groups = torch.tensor(batch["outcomes"], dtype=torch.float64), torch.tensor(batch["groups"])
    options = {name: batch[name] for name in ("baseline", "gamma_process", "gamma_outcome")}
    actual = prime_advantages(process, outcomes, mask, groups, **options)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    whitened = prime_advantages(process, outcomes, mask, groups, **options, whiten=True)
    accepted = mask & outcomes.isfinite()[:, None]
    torch.testing.assert_close(whitened, whiten(actual, accepted))


def test_baselines_agree_on_single_tokens(generator: Generator) -> None:
    process, outcomes = torch.randn(6, 1, generator=generator), torch.rand(6, generator=generator)
    paper, code = (
        prime_advantages(process, outcomes, torch.ones(6, 1), 3, baseline=baseline) for baseline in ("paper", "code")
    )
    torch.testing.assert_close(paper, code)


def test_a_bad_response_is_nobodys_baseline() -> None:
    process = torch.tensor([[0.5, 0.25], [1.0, 0.0], [math.nan, 0.0], [2.0, 2.0]])
    outcomes, mask = torch.tensor([1.0, 0.0, 1.0, math.nan]), torch.ones(4, 2)
    actual = prime_advantages(process, outcomes, mask, 4)
    assert torch.equal(actual[:2], prime_advantages(process[:2], outcomes[:2], mask[:2], 2))
    assert (actual[2:] == 0).all()


def test_group_of_one_and_empty_responses() -> None:
    process, mask = torch.tensor([[0.5, 0.25], [1.0, 0.0]]), torch.tensor([[1, 1], [0, 0]])
    for baseline in ("paper", "code"):
        assert (prime_advantages(process, torch.tensor([1.0, 0.0]), mask, 1, baseline=baseline) == 0).all()
        # the empty one is a baseline for the outcome alone, and nothing wraps to its last column
        actual = prime_advantages(process, torch.tensor([1.0, 0.5]), mask, 2, baseline=baseline)
        assert actual.tolist() == [[0.5, 0.5], [0.0, 0.0]]
    assert prime_advantages(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, 4), 4).shape == (0, 4)
    assert prime_advantages(torch.zeros(4, 0), torch.zeros(4), torch.zeros(4, 0), 4, whiten=True).shape == (4, 0)


def test_long_discounted_responses(generator: Generator) -> None:
    """A closed form by powers of gamma underflows here."""
    process = torch.randn(2, 3000, generator=generator, dtype=torch.float64)
    outcomes = torch.tensor([1.0, 0.0], dtype=torch.float64)
    actual = prime_advantages(process, outcomes, torch.ones(2, 3000), 2, gamma_process=0.5, gamma_outcome=0.5)
    assert actual.isfinite().all()
    steps = process[0] - process[1].mean()
    near_end = sum(0.5**k * steps[-20 + k] for k in range(20)) + 0.5**19
    assert actual[0, -20].item() == pytest.approx(near_end.item(), abs=1e-9)
    assert actual[0, 0].item() == pytest.approx(sum(0.5**k * steps[k] for k in range(60)).item(), abs=1e-9)


def test_reward_model_loss(generator: Generator) -> None:
    logp, ref_logp = torch.randn(2, 4, 6, generator=generator, dtype=torch.float64)
    mask = torch.arange(6) < torch.tensor([6, 3, 0, 5])[:, None]
    outcomes = torch.tensor([1.0, 0.0, 1.0, 0.25], dtype=torch.float64)
    masked = {name: torch.where(mask, value, math.nan) for name, value in (("logp", logp), ("ref_logp", ref_logp))}
    leaves = {name: value.requires_grad_() for name, value in masked.items()} | {"outcomes": outcomes.requires_grad_()}
    loss = implicit_prm_loss(**leaves, mask=mask, beta=0.3)
    loss.backward()
    scores = 0.3 * torch.where(mask, logp - ref_logp, 0).sum(-1)
    p = torch.sigmoid(scores)
    expected = -(outcomes * p.log() + (1 - outcomes) * (1 - p).log()).mean()
    assert loss.item() == pytest.approx(expected.item())
    gradient = 0.3 * (p - outcomes).detach()[:, None] * mask / 4
    torch.testing.assert_close(leaves["logp"].grad, gradient)
    assert leaves["ref_logp"].grad is None and leaves["outcomes"].grad is None


def test_reward_model_loss_edges() -> None:
    logp = torch.zeros(2, 3, requires_grad=True)
    mask, outcomes = torch.zeros(2, 3), torch.tensor([1.0, math.nan])
    loss = implicit_prm_loss(logp, torch.zeros(2, 3), mask, outcomes)
    loss.backward()
    assert (
        loss.item() == pytest.approx(math.log(2)) and (logp.grad == 0).all()
    )  # an empty one; the rejected is left out
    nothing = implicit_prm_loss(logp[:0], torch.zeros(0, 3), mask[:0], outcomes[:0])
    assert nothing == 0
    far = implicit_prm_loss(torch.full((1, 1), -1e6), torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1), beta=1.0)
    assert far.item() == pytest.approx(1e6)
    half = torch.zeros(2, 3, dtype=torch.bfloat16, requires_grad=True)
    loss = implicit_prm_loss(half, torch.zeros(2, 3), torch.ones(2, 3), torch.ones(2))
    loss.backward()
    assert loss.dtype == torch.float32 and half.grad.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"outcomes: expected numbers in \[0, 1\]"):
        implicit_prm_loss(logp, torch.zeros(2, 3), mask, torch.tensor([-1.0, 1.0]))
    with pytest.raises(ValueError, match="ref_logp"):
        implicit_prm_loss(logp, torch.zeros(2, 2), mask, torch.ones(2))
    with pytest.raises(ValueError, match="beta"):
        implicit_prm_loss(logp, torch.zeros(2, 3), mask, torch.ones(2), beta=0.0)


def test_an_impossible_token_is_certain_failure() -> None:
    logp = torch.tensor([[-1.0, -torch.inf], [-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    loss = implicit_prm_loss(logp, torch.full_like(logp, -1.0), torch.ones(2, 2), torch.tensor([0.0, 1.0]), beta=1.0)
    loss.backward()
    assert loss.item() == pytest.approx(math.log1p(math.e) / 2)
    assert logp.grad.isfinite().all() and (logp.grad[0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_accuracies_at_a_bound_are_kept(dtype: torch.dtype) -> None:
    assert accuracy_filter(torch.full((4,), 0.8, dtype=dtype), 4, low=0.0, high=0.8).all()
    assert accuracy_filter(torch.tensor([1, 1, 1, 1, 0], dtype=dtype), 5, low=0.8, high=0.8).all()
    assert accuracy_filter(torch.tensor([1, 0, torch.nan], dtype=dtype), 3).tolist() == [True, True, False]


def test_accuracy_filter() -> None:
    ragged = torch.tensor([3, 1, 3, 3, 1, 3, 3, 2])
    accuracies = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, math.nan])
    in_group_3 = ragged == 3  # 1 of 5 is 0.2, the bound included
    assert torch.equal(accuracy_filter(accuracies, ragged), in_group_3 & accuracies.isfinite())
    assert accuracy_filter(accuracies, ragged, low=0.21).any().item() is False
    assert accuracy_filter(torch.tensor([1.0, math.nan, 0.0]), 3).tolist() == [True, False, True]
    with pytest.raises(ValueError, match="high"):
        accuracy_filter(accuracies, ragged, low=0.5, high=0.4)


@pytest.mark.parametrize(
    "change, error, name",
    [
        ({"process_rewards": torch.zeros(4)}, ValueError, "process_rewards"),
        ({"outcome_rewards": torch.zeros(4, 1)}, ValueError, "outcome_rewards"),
        ({"outcome_rewards": torch.zeros(3)}, ValueError, "outcome_rewards"),
        ({"mask": torch.zeros(4)}, ValueError, "mask"),
        ({"mask": [1]}, TypeError, "mask"),
        ({"groups": 3}, ValueError, "groups"),
        ({"baseline": "mean"}, ValueError, "baseline"),
        ({"gamma_process": 1.1}, ValueError, "gamma_process"),
        ({"gamma_outcome": -0.1}, ValueError, "gamma_outcome"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_advantage_arguments(change: dict, error: type[Exception], name: str) -> None:
    arguments = {
        "process_rewards": torch.zeros(4, 3),
        "outcome_rewards": torch.zeros(4),
        "mask": torch.ones(4, 3),
        "groups": 2,
    }
    with pytest.raises(error, match=name):
        prime_advantages(**(arguments | change))
