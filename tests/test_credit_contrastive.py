"""CLIPO: pooling, the head, the contrastive losses and their reward."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

import rlkernels
from rlkernels import PolicyBatch
from rlkernels.credit import (
    ContrastiveHead,
    contrastive_loss,
    contrastive_reward,
    group_advantages,
    pool_hidden,
)

KINDS = ("infonce", "supcon_out", "supcon_in", "soft_nn")


def loss_of_anchor(z: list[list[float]], i: int, near: list[int], others: list[int], kind: str, chosen: int) -> float:
    everything = math.log(sum(math.exp(z[i][a]) for a in others))
    if kind == "infonce":
        return everything - z[i][chosen]
    if kind == "supcon_out":
        return everything - sum(z[i][p] for p in near) / len(near)
    total = sum(math.exp(z[i][p]) for p in near)
    return everything - math.log(total / len(near) if kind == "supcon_in" else total)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1.0, 0.0, math.nan])), min_size=1, max_size=9),
    st.sampled_from(KINDS),
    st.integers(0, 2**31),
)
def test_losses_one_anchor_at_a_time(rows: list[tuple[int, float]], kind: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    count = len(rows)
    embeddings = torch.nn.functional.normalize(torch.randn(count, 4, generator=generator, dtype=torch.float64), dim=-1)
    groups, correct = [group for group, _ in rows], [right for _, right in rows]
    z = (embeddings @ embeddings.T / 0.3).tolist()
    expected, chosen = [0.0] * count, [0] * count
    anchors = []
    for i in range(count):
        others = [a for a in range(count) if a != i and groups[a] == groups[i] and not math.isnan(correct[a])]
        near = [a for a in others if correct[a] == 1 and correct[i] == 1]
        if near and len(near) < len(others):
            chosen[i] = near[seed % len(near)]
            expected[i] = loss_of_anchor(z, i, near, others, kind, chosen[i])
            anchors.append(i)
    positives = torch.tensor(chosen) if kind == "infonce" else None
    out = contrastive_loss(
        embeddings, torch.tensor(correct), torch.tensor(groups), kind=kind, temperature=0.3, positives=positives
    )
    assert out.is_anchor.nonzero().flatten().tolist() == anchors
    assert out.per_response.tolist() == pytest.approx(expected, rel=1e-10, abs=1e-12)
    assert out.loss.item() == pytest.approx(sum(expected) / max(1, len(anchors)), rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_a_size_are_groups_by_id(kind: str, generator: Generator) -> None:
    embeddings = torch.nn.functional.normalize(torch.randn(12, 5, generator=generator, dtype=torch.float64), dim=-1)
    correct = torch.tensor([1, 1, 0, 0, 1, 1, 1, 1, 1, 0, 1, 1])
    positives = torch.tensor([1, 0, 0, 0, 5, 4, 4, 4, 10, 0, 11, 8]) if kind == "infonce" else None
    results = []
    for groups in (4, torch.arange(12) // 4):
        leaf = embeddings.clone().requires_grad_()
        out = contrastive_loss(leaf, correct, groups, kind=kind, positives=positives)
        results.append((out.per_response.detach(), torch.autograd.grad(out.loss, leaf)[0]))
    torch.testing.assert_close(results[0], results[1])
    assert results[0][0][4:8].tolist() == [0.0] * 4  # a group of correct answers alone


@pytest.mark.parametrize("eps", [0.0, 1e-8])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_compare_gives_zero_and_a_zero_gradient(kind: str, eps: float) -> None:
    for correct in ([0, 0, 0], [1, 1, 1], [1, 0, 0], [math.nan, 1, 1]):
        embeddings = torch.eye(3, requires_grad=True)
        out = contrastive_loss(embeddings, torch.tensor(correct), 3, kind=kind, eps=eps)
        out.loss.backward()
        assert out.loss.item() == 0
        assert out.per_response.tolist() == [0.0] * 3
        assert embeddings.grad.abs().sum() == 0
        assert contrastive_reward(out.per_response).tolist() == [0.0] * 3
    empty = contrastive_loss(torch.zeros(0, 3), torch.zeros(0), torch.zeros(0, dtype=torch.int64), kind=kind, eps=eps)
    assert empty.loss.item() == 0
    assert contrastive_loss(torch.zeros(0, 3), torch.zeros(0), 4, kind=kind).per_response.shape == (0,)


def test_strided_inputs_are_their_copies(generator: Generator) -> None:
    embeddings = torch.randn(8, 2, 3, generator=generator)[:, 1].t().contiguous().t()
    correct, positives, groups = (
        torch.stack([torch.tensor(x)] * 2, 1)[:, 0]
        for x in ([1, 1, 0, 1] * 2, [1, 0, 0, 1, 5, 4, 4, 4], [3] * 4 + [0] * 4)
    )
    out = contrastive_loss(embeddings, correct, groups, positives=positives)
    copies = [x.contiguous() for x in (embeddings, correct, groups)]
    expected = contrastive_loss(*copies, positives=positives.contiguous())
    torch.testing.assert_close(out.per_response, expected.per_response)
    assert torch.equal(contrastive_loss(embeddings, correct, 4, positives=positives).is_anchor, out.is_anchor)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rejected_response_may_be_nan(kind: str) -> None:
    embeddings = torch.eye(4).requires_grad_()
    correct = torch.tensor([1.0, 1.0, 0.0, math.nan])
    spoiled = torch.cat([embeddings[:3], torch.full((1, 4), math.nan)])
    out = contrastive_loss(spoiled, correct, torch.zeros(4, dtype=torch.int64), kind=kind, eps=1e-8)
    out.loss.backward()
    assert out.loss.isfinite()
    assert embeddings.grad.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_far_answers_at_a_low_temperature(kind: str) -> None:
    """Where the authors' epsilon dominates, the exact loss is log 3; opposite ones leave nothing but finite numbers."""
    out = contrastive_loss(torch.eye(4), torch.tensor([1, 1, 0, 0]), 4, kind=kind, temperature=0.01)
    assert out.loss.item() == pytest.approx(math.log(3), rel=1e-6)
    embeddings = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0], [1.0, 0.0]], requires_grad=True)
    out = contrastive_loss(embeddings, torch.tensor([1, 1, 0, 0]), 4, kind=kind, temperature=0.01)
    out.loss.backward()
    assert out.loss.isfinite()
    assert embeddings.grad.isfinite().all()


def test_a_positive_is_drawn_by_the_generator() -> None:
    """Uniform over the other correct answers; the same seed draws the same."""
    embeddings = torch.nn.functional.normalize(torch.arange(1.0, 13.0).reshape(4, 3).sin(), dim=-1)
    correct = torch.tensor([1, 1, 1, 0])
    possible = {
        round(contrastive_loss(embeddings, correct, 4, positives=torch.tensor([p, 0, 0, 0])).per_response[0].item(), 4)
        for p in (1, 2)
    }
    draw = torch.Generator().manual_seed(0)
    drawn = [contrastive_loss(embeddings, correct, 4, generator=draw).per_response[0].item() for _ in range(200)]
    values = [round(value, 4) for value in drawn]
    assert set(values) == possible
    assert 60 < values.count(min(possible)) < 140
    again = contrastive_loss(embeddings, correct, 4, generator=torch.Generator().manual_seed(0))
    assert again.per_response[0].item() == drawn[0]


def test_pooling_reads_no_padding_and_carries_no_gradient() -> None:
    hidden = torch.randn(3, 4, 5, dtype=torch.bfloat16, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0]])
    spoiled = torch.where(mask[..., None] != 0, hidden, torch.nan)
    pooled = pool_hidden(spoiled, mask)
    assert pooled.dtype == torch.float32
    assert not pooled.requires_grad
    wide = hidden.detach().float()
    expected = torch.stack([wide[0, :2].mean(0), wide[1, [1, 3]].mean(0), torch.zeros(5)])
    torch.testing.assert_close(pooled, expected)


def test_head_projects_onto_the_sphere() -> None:
    head = ContrastiveHead(6, 3).double()
    assert [name for name, _ in head.named_parameters()] == ["projection.weight"]
    embedding = head(torch.randn(4, 6))
    torch.testing.assert_close(embedding.norm(dim=-1), torch.ones(4, dtype=torch.float64))
    empty = head(torch.zeros(1, 6))
    empty.sum().backward()
    assert head.projection.weight.grad.abs().sum() == 0


def test_reward_has_a_floor() -> None:
    loss = torch.tensor([0.0, 1.0, 2.5, 2.6, 100.0], requires_grad=True)
    reward = contrastive_reward(loss, weight=0.2, floor=-0.5)
    assert reward.tolist() == pytest.approx([0.0, -0.2, -0.5, -0.5, -0.5])
    assert not math.copysign(1, reward[0].item()) < 0
    assert not reward.requires_grad


def joint_step(head: ContrastiveHead, train_head: bool, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Policy loss with contrastive rewards, and the head's loss, in one backward."""
    hidden = torch.randn(8, 5, 6, generator=generator, dtype=torch.float64).requires_grad_()
    lm_head = torch.randn(11, 6, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.randint(0, 11, (8, 5), generator=generator)
    mask = torch.arange(5) < torch.tensor([5, 4, 3, 5, 5, 2, 1, 5])[:, None]
    correct = torch.tensor([1, 1, 0, 0, 1, 1, 1, 0])
    out = contrastive_loss(head(pool_hidden(hidden, mask)), correct, 4, kind="soft_nn", temperature=0.5)
    rewards = correct + contrastive_reward(out.per_response)
    batch = PolicyBatch(targets, group_advantages(rewards, 4), mask=mask)
    policy = rlkernels.linear_policy_loss(hidden, lm_head, batch, "grpo").loss
    (policy + out.loss if train_head else policy).backward()
    return policy.detach(), hidden.grad, lm_head.grad


def test_joint_step_trains_head_and_policy_apart(generator: Generator) -> None:
    """The contrastive loss gives the head its gradient, and the policy none: that sees rewards alone."""
    head = ContrastiveHead(6, 4).double()
    state = generator.get_state()
    together = joint_step(head, True, generator)
    assert head.projection.weight.grad.abs().sum() > 0
    head.zero_grad()
    generator.set_state(state)
    policy_alone = joint_step(head, False, generator)
    assert head.projection.weight.grad is None
    for a, b in zip(together, policy_alone, strict=True):
        assert torch.equal(a, b)


def test_fixed_head_still_gives_rewards(generator: Generator) -> None:
    head = ContrastiveHead(6, 4).double().requires_grad_(False)
    _, dhidden, _ = joint_step(head, False, generator)
    assert head.projection.weight.grad is None
    assert dhidden.abs().sum() > 0


@pytest.mark.parametrize(
    "change, error, name",
    [
        ({"embeddings": torch.eye(4)[0]}, ValueError, "embeddings"),
        ({"embeddings": torch.eye(4).long()}, TypeError, "embeddings"),
        ({"correct": torch.ones(3)}, ValueError, "correct"),
        ({"groups": 3}, ValueError, "groups"),
        ({"kind": "simclr"}, ValueError, "kind"),
        ({"temperature": 0.0}, ValueError, "temperature"),
        ({"eps": -1.0}, ValueError, "eps"),
        ({"positives": torch.tensor([1, 0, 0, 0])}, ValueError, "positives"),
        ({"kind": "infonce", "positives": torch.tensor([0, 0, 0, 0])}, ValueError, "positives"),
        ({"kind": "infonce", "positives": torch.tensor([2, 0, 0, 0])}, ValueError, "positives"),
        ({"kind": "infonce", "positives": torch.tensor([9, 0, 0, 0])}, ValueError, "positives"),
        ({"kind": "infonce", "positives": torch.zeros(4)}, TypeError, "positives"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_contrastive_arguments(change: dict, error: type[Exception], name: str) -> None:
    arguments = {"embeddings": torch.eye(4), "correct": torch.tensor([1, 1, 0, 0]), "groups": 4, "kind": "soft_nn"}
    with pytest.raises(error, match=name):
        contrastive_loss(**(arguments | change))


def test_bad_pooling_arguments() -> None:
    with pytest.raises(TypeError, match="positives"):
        contrastive_loss(torch.eye(2), torch.ones(2), 2, positives=[1, 0])
    with pytest.raises(ValueError, match="mask"):
        pool_hidden(torch.zeros(2, 3, 4), torch.ones(2, 4))
    with pytest.raises(ValueError, match="pooled"):
        ContrastiveHead(6, 4)(torch.zeros(2, 5))
    with pytest.raises(ValueError, match="floor"):
        contrastive_reward(torch.zeros(2), floor=0.5)
