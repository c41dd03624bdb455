"""VeriFree, RLPR and NFT: likelihood rewards, success rates, and the losses they end in."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

import rlkernels
from rlkernels import NFT, PolicyBatch
from rlkernels.credit import (
    StdFilter,
    debias_reward,
    group_advantages,
    group_std,
    mixed_groups,
    reference_probability_reward,
    success_rates,
    verifree_advantages,
)

KINDS = ("mean", "geometric_mean", "product")


def ragged_masks(rows: int, width: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Reasoning, then an answer that may be empty, then padding."""
    think = torch.randint(0, width // 2, (rows, 1), generator=generator)
    answer = torch.randint(0, width // 2, (rows, 1), generator=generator)
    position = torch.arange(width)
    return position < think, (position >= think) & (position < think + answer)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.floats(-30, 0), max_size=6), min_size=1, max_size=5), st.sampled_from(KINDS))
def test_reward_is_that_of_each_answer_alone(answers: list[list[float]], kind: str) -> None:
    width = max(map(len, answers)) + 1
    logp = torch.tensor([row + [math.nan] * (width - len(row)) for row in answers], dtype=torch.float64)
    mask = torch.arange(width) < torch.tensor([len(row) for row in answers])[:, None]
    expected = {
        "mean": lambda row: sum(map(math.exp, row)) / len(row),
        "geometric_mean": lambda row: math.exp(sum(row) / len(row)),
        "product": lambda row: math.exp(sum(row)),
    }[kind]
    actual = reference_probability_reward(logp, mask, kind=kind).tolist()
    assert actual == pytest.approx([expected(row) if row else 0.0 for row in answers], rel=1e-12)


def test_long_and_impossible_answers() -> None:
    """A product that underflows in float32 one factor at a time, and a token that cannot come."""
    logp = torch.full((2, 400), -0.2)
    logp[1, 7] = -math.inf
    product = reference_probability_reward(logp, torch.ones(2, 400), kind="product")
    assert product.tolist() == pytest.approx([math.exp(-80), 0.0], rel=1e-5)
    assert reference_probability_reward(logp, torch.ones(2, 400), kind="mean").isfinite().all()


def test_reward_of_bfloat16_is_formed_wide() -> None:
    logp = torch.full((1, 1000), -1.0, dtype=torch.bfloat16)
    reward = reference_probability_reward(logp, torch.ones(1, 1000))
    assert reward.dtype == torch.float32
    assert reward.item() == pytest.approx(math.exp(-1), rel=1e-6)


def test_verifree_gradient_is_that_of_the_expected_likelihood(backend: str, generator: Generator) -> None:
    """On the answer, R grad log R = grad R; on the reasoning, leave-one-out policy gradient. Ragged groups by id."""
    rows, width = 7, 12
    groups = torch.tensor([4, 1, 4, 9, 1, 4, 1])
    think, answer = ragged_masks(rows, width, generator)
    answer[2] = False
    logp = (-torch.rand(rows, width, generator=generator, dtype=torch.float64)).requires_grad_()
    advantages = verifree_advantages(logp, think, answer, groups)
    assert not advantages.requires_grad
    out = rlkernels.logp_policy_loss(logp, PolicyBatch(None, advantages, mask=think | answer), "verifree")
    (gradient,) = torch.autograd.grad(out.loss, logp)

    rewards = torch.where(answer, logp, 0).sum(1).exp() * answer.any(1)
    members = defaultdict(list)
    for row, group in enumerate(groups.tolist()):
        members[group].append(row)
    baseline = torch.stack(
        [
            torch.stack([rewards[j] for j in members[group] if j != row] or [rewards[row]]).mean()
            for row, group in enumerate(groups.tolist())
        ]
    )
    advantage = (rewards - baseline).detach()
    surrogate = -(rewards + advantage * torch.where(think, logp, 0).sum(1)).mean()
    torch.testing.assert_close(gradient, torch.autograd.grad(surrogate, logp)[0], rtol=1e-10, atol=1e-14)


def test_verifree_edge_cases() -> None:
    logp = torch.tensor([[-1.0, -0.5], [-1.0, math.nan], [-1.0, -0.7]])
    think, answer = torch.tensor([[1, 0]] * 3), torch.tensor([[0, 1]] * 3)
    out = verifree_advantages(logp, think, answer, groups=3)
    a, b = math.exp(-0.5), math.exp(-0.7)
    assert out.flatten().tolist() == pytest.approx([a - b, a, 0.0, 0.0, b - a, b])  # the NaN is in nobody's mean
    alone = verifree_advantages(logp[:1], think[:1], answer[:1], groups=1)
    assert alone.flatten().tolist() == pytest.approx([0.0, a])
    with pytest.raises(ValueError, match="answer_mask"):
        verifree_advantages(logp, think, think, groups=3)
    with pytest.raises(ValueError, match="answer_coefficient"):
        verifree_advantages(logp, think, answer, groups=3, answer_coefficient="adv")


def test_debiased_rewards() -> None:
    rewards = debias_reward(torch.tensor([0.9, 0.1, math.nan]), torch.tensor([0.2, 0.4, 0.0]))
    assert rewards[:2].tolist() == pytest.approx([0.7, 0.0])
    assert rewards[2].isnan()
    assert group_advantages(rewards, 3).isfinite().all()
    with pytest.raises(ValueError, match="base_rewards"):
        debias_reward(torch.zeros(3), torch.zeros(2))


def test_group_std_has_no_spread_of_one(generator: Generator) -> None:
    rewards = torch.tensor([0.5, 0.1, 0.3, math.nan, 2.0, 2.0, 7.0], dtype=torch.float64)
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 5])
    expected = [torch.tensor([0.5, 0.1, 0.3], dtype=torch.float64).std().item()] * 4 + [0.0] * 3
    assert group_std(rewards, groups).tolist() == pytest.approx(expected, rel=1e-12)


def std_filter_by_hand(steps: list[Tensor], size: int, scale: float, decay: float, skipped: int, warmup: int) -> list:
    """Lists and means, step by step."""
    past, mean, kept = [], None, []
    for number, rewards in enumerate(steps, start=1):
        stds = [group.std().item() for group in rewards.view(-1, size)]
        if number > skipped + warmup:
            mean = sum(past) / len(past) if mean is None else mean
            kept.append([std >= scale * mean for std in stds for _ in range(size)])
            mean = decay * mean + (1 - decay) * sum(stds) / len(stds)
        else:
            kept.append([True] * rewards.numel())
            if number > skipped:
                past.append(sum(stds) / len(stds))
    return kept


def test_std_filter_against_the_same_by_hand(generator: Generator) -> None:
    steps = [torch.rand(24, generator=generator, dtype=torch.float64) for _ in range(14)]
    steps = [s * torch.rand(6, 1, generator=generator, dtype=torch.float64).expand(6, 4).reshape(-1) for s in steps]
    options = {"scale": 0.8, "decay": 0.7, "skipped": 2, "warmup": 3}
    keep = StdFilter(**options)
    actual = [keep(rewards, 4).tolist() for rewards in steps]
    assert actual == std_filter_by_hand(steps, 4, **options)
    assert any(not all(row) for row in actual[5:])


def test_std_filter_resumes_where_it_stopped(generator: Generator) -> None:
    steps = [torch.rand(8, generator=generator) for _ in range(8)]
    whole = StdFilter(scale=1.0, decay=0.5, skipped=1, warmup=2)
    expected = [whole(rewards, 2).tolist() for rewards in steps]
    for stop in range(8):
        first = StdFilter(scale=1.0, decay=0.5, skipped=1, warmup=2)
        actual = [first(rewards, 2).tolist() for rewards in steps[:stop]]
        second = StdFilter(scale=1.0, decay=0.5, skipped=1, warmup=2)
        second.load_state_dict(first.state_dict())
        assert actual + [second(rewards, 2).tolist() for rewards in steps[stop:]] == expected
    with pytest.raises(ValueError, match="state"):
        whole.load_state_dict({"step": 3})
    for wrong in ({"mean": math.nan}, {"step": -5}):  # NaN would drop every response from then on
        with pytest.raises(ValueError, match=f"state\\['{next(iter(wrong))}'\\]: expected a finite number >= 0"):
            whole.load_state_dict({**whole.state_dict(), **wrong})


def test_std_filter_and_groups_without_a_spread() -> None:
    """NaN and groups of one enter no mean and are dropped; a step of nothing else changes nothing."""
    keep = StdFilter(scale=0.5, decay=0.5, skipped=0, warmup=1)
    groups = torch.tensor([0, 0, 1, 2, 2])
    keep(torch.tensor([1.0, 0.0, 9.0, 5.0, math.nan]), groups)
    assert keep.mean.item() == pytest.approx(math.sqrt(0.5))
    before = keep.mean.item()
    assert keep(torch.tensor([1.0, math.nan, 9.0, 5.0, math.nan]), groups).tolist() == [False] * 5
    assert keep.mean.item() == before
    assert keep(torch.tensor([1.0, 0.0, 9.0, 2.0, 2.0]), groups).tolist() == [True, True, False, False, False]
    none_seen = StdFilter(skipped=0, warmup=0)
    assert none_seen(torch.tensor([1.0, 0.0]), 2).tolist() == [True, True]
    assert none_seen.mean.item() == pytest.approx(math.sqrt(0.5))


def test_success_rates() -> None:
    correct = torch.tensor([1.0, -1.0, math.nan, 1.0, math.nan, 0.0])
    groups = torch.tensor([3, 3, 3, 0, 8, 3])
    assert success_rates(correct, groups).tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1.0, 0.0, 1 / 3])
    assert success_rates(torch.tensor([True, False]), 2).tolist() == [0.5, 0.5]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=16))
def test_nft_filter_keeps_what_is_neither_hopeless_nor_solved(rows: list[tuple[int, bool]]) -> None:
    groups = torch.tensor([group for group, _ in rows])
    correct = torch.tensor([right for _, right in rows])
    rate = success_rates(correct, groups)
    assert torch.equal(mixed_groups(correct, groups), (rate > 0) & (rate < 1))


def nft_batch(generator: Generator) -> tuple[Tensor, dict, Tensor, Tensor]:
    logp = -torch.rand(6, 5, generator=generator, dtype=torch.float64)
    old_logp = logp + 0.6 * torch.randn(6, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 5, generator=generator) < 0.7
    mask[3] = False
    correct = torch.tensor([1, 0, 0, 1, 0, 1])
    rate = success_rates(correct, 3).double()
    batch = {
        "advantages": 2 * correct - 1,
        "old_logp": old_logp,
        "mask": mask,
        "extras": {"success_rate": rate},
    }
    return logp.requires_grad_(), batch, correct, rate


def test_nft_with_negative_weight_zero_imitates_correct_answers(backend: str, generator: Generator) -> None:
    """Rejection-sampling fine-tuning: wrong answers have neither value nor gradient."""
    logp, batch, correct, _ = nft_batch(generator)
    objective = NFT(negative_weight=0.0, prompt_weight="uniform")
    out = rlkernels.logp_policy_loss(logp, PolicyBatch(None, **batch), objective, reduction="token_sum")
    (gradient,) = torch.autograd.grad(out.loss, logp)
    expected = -(batch["mask"] & (correct[:, None] == 1)).double()
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)


def test_nft_of_whole_sequences(backend: str, generator: Generator) -> None:
    """One term a response: the sum of its log ratios, limited from above; as the authors' `ratio_type: sequence`."""
    logp, batch, correct, rate = nft_batch(generator)
    objective = NFT(level="sequence_product", log_ratio_max=0.8, min_ratio=0.5)
    out = rlkernels.logp_policy_loss(
        logp, PolicyBatch(None, **batch), objective, reduction="seq_mean_token_mean", normalizer=1.0
    )
    (gradient,) = torch.autograd.grad(out.loss, logp)

    d = torch.where(batch["mask"], logp - batch["old_logp"], 0).sum(1).clamp(max=0.8)
    negative = (1 - rate * d.exp()) / (1 - rate)
    straight = negative + (negative.clamp(min=0.5) - negative).detach()
    terms = (1 - rate) * torch.where(correct == 1, -d, -straight.log())
    terms = terms[batch["mask"].any(1)].sum()
    torch.testing.assert_close(out.loss, terms, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradient, torch.autograd.grad(terms, logp)[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "call, error, name",
    [
        (lambda: reference_probability_reward(torch.zeros(3), torch.ones(3)), ValueError, "answer_logp"),
        (lambda: reference_probability_reward(torch.zeros(2, 3), torch.ones(3)), ValueError, "answer_mask"),
        (lambda: reference_probability_reward(torch.zeros(2, 3).long(), torch.ones(2, 3)), TypeError, "answer_logp"),
        (lambda: reference_probability_reward(torch.zeros(2, 3), torch.ones(2, 3), kind="sum"), ValueError, "kind"),
        (lambda: verifree_advantages(torch.zeros(2), torch.ones(2), torch.ones(2), 1), ValueError, "logp"),
        (lambda: success_rates(torch.zeros(2, 2), 2), ValueError, "correct"),
        (lambda: success_rates(torch.zeros(3), 2), ValueError, "groups"),
        (lambda: StdFilter(decay=1.5), ValueError, "decay"),
        (lambda: StdFilter(scale=-1.0), ValueError, "scale"),
        (lambda: group_std(torch.zeros(2), 2, ddof=3), ValueError, "ddof"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_arguments(call, error: type[Exception], name: str) -> None:
    with pytest.raises(error, match=name):
        call()
