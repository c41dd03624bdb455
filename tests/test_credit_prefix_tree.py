"""The prefix tree, its summary, the process rewards, and Theorem 1."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

import rlkernels
from rlkernels.credit import (
    PrefixNode,
    group_advantages,
    prefix_set_counts,
    prefix_tree,
    prefix_tree_summary,
    process_set_rewards,
)

Rows = list[tuple[int, list[int]]]  # of group and tokens
ROWS = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2), max_size=7)), min_size=1, max_size=9)


def padded(rows: Rows, padding: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, lengths, groups; the padding is a token too."""
    width = max(len(tokens) for _, tokens in rows)
    ids = torch.tensor([tokens + [padding] * (width - len(tokens)) for _, tokens in rows], dtype=torch.int64)
    lengths = torch.tensor([len(tokens) for _, tokens in rows])
    return ids.reshape(len(rows), width), lengths, torch.tensor([group for group, _ in rows])


def sharing(rows: Rows, i: int, end: int) -> list[int]:
    """Rows of i's group that have i's first `end` tokens."""
    group, tokens = rows[i]
    return [
        j for j, (other, row) in enumerate(rows) if other == group and row[:end] == tokens[:end] and len(row) >= end
    ]


def leaf_of(nodes: list[PrefixNode], row: int) -> int:
    """The deepest node: parents come before their children."""
    return max(k for k, node in enumerate(nodes) if row in node.members)


def path_to(nodes: list[PrefixNode], k: int | None) -> list[int]:
    path: list[int] = []
    while k is not None:
        path.insert(0, k)
        k = nodes[k].parent
    return path


@settings(max_examples=100, deadline=None)
@given(ROWS)
def test_tree_is_what_its_definition_says(rows: Rows) -> None:
    ids, lengths, groups = padded(rows)
    nodes = prefix_tree(ids, lengths, groups)
    counts = prefix_set_counts(ids, lengths, groups)
    assert sum(node.parent is None for node in nodes) == len(set(groups.tolist()))
    for k, node in enumerate(nodes):
        sharers = sharing(rows, node.members[0], node.end)
        if all(other.parent != k for other in nodes):  # a leaf: those that end here
            sharers = [row for row in sharers if len(rows[row][1]) == node.end]
        assert list(node.members) == sharers
        assert node.start == (0 if node.parent is None else nodes[node.parent].end)
        # the longest prefix that all share
        following = {tuple(rows[row][1][: node.end + 1]) for row in node.members}
        assert len(following) > 1 or all(len(rows[row][1]) == node.end for row in node.members)
        if node.parent is None:
            assert [rows[row][0] for row in node.members] == [rows[node.members[0]][0]] * len(node.members)
        else:
            assert node.parent < k and set(node.members) < set(nodes[node.parent].members)
    for row, (_, tokens) in enumerate(rows):
        path = path_to(nodes, leaf_of(nodes, row))
        of_tokens = [nodes[k] for k in path for _ in range(nodes[k].start, nodes[k].end)]
        assert len(of_tokens) == len(tokens)
        assert [len(node.members) for node in of_tokens] == counts[row, : len(tokens)].tolist()
        equal = [j for j in sharing(rows, row, len(tokens)) if len(rows[j][1]) == len(tokens)]
        assert list(nodes[path[-1]].members) == equal


@settings(max_examples=100, deadline=None)
@given(ROWS, st.sampled_from(["cpu", "reference"]))
def test_summary_is_the_trees(rows: Rows, backend: str) -> None:
    ids, lengths, groups = padded(rows)
    previous = rlkernels.set_backend(backend)
    try:
        summary = prefix_tree_summary(ids, lengths, groups)
    finally:
        rlkernels.set_backend(previous)
    nodes = prefix_tree(ids, lengths, groups)
    for row, (_, tokens) in enumerate(rows):
        path = path_to(nodes, leaf_of(nodes, row))
        assert summary.path_depth[row] == len(path)
        shared = sum(nodes[k].end - nodes[k].start for k in path if len(nodes[k].members) > 1)
        assert summary.intermediate_proportion[row].item() == pytest.approx(shared / max(1, len(tokens)))
    has_shared = {group: False for group, _ in rows}
    for (group, _), proportion in zip(rows, summary.intermediate_proportion.tolist(), strict=True):
        has_shared[group] |= proportion > 0
    share = sum(has_shared.values()) / len(has_shared)
    assert summary.nontrivial_group_share.item() == pytest.approx(share)


def test_small_trees() -> None:
    def nodes(rows: list[list[int]], groups: int) -> list[PrefixNode]:
        return prefix_tree(*padded([(0, row) for row in rows])[:2], groups)

    assert nodes([[1, 2]], 1) == [(0, 2, (0,), None)]
    assert nodes([[1], [1]], 2) == [(0, 1, (0, 1), None)]  # equal responses end in one leaf
    assert nodes([[1], [1]], 1) == [(0, 1, (0,), None), (0, 1, (1,), None)]  # two groups of one
    assert nodes([[1], [1, 2]], 2) == [(0, 1, (0, 1), None), (1, 1, (0,), 0), (1, 2, (1,), 0)]  # a strict prefix
    assert nodes([[1], [2]], 2) == [(0, 0, (0, 1), None), (0, 1, (0,), 0), (0, 1, (1,), 0)]
    assert nodes([[], [2]], 2) == [(0, 0, (0, 1), None), (0, 0, (0,), 0), (0, 1, (1,), 0)]
    assert prefix_tree(torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), 4) == []


def test_summary_of_nothing() -> None:
    summary = prefix_tree_summary(torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), 4)
    assert summary.path_depth.shape == (0,) and summary.nontrivial_group_share == 0
    summary = prefix_tree_summary(torch.zeros(2, 0, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), 2)
    assert summary.path_depth.tolist() == [1, 1] and summary.intermediate_proportion.tolist() == [0.0, 0.0]


@settings(max_examples=100, deadline=None)
@given(ROWS, st.data())
def test_process_rewards_are_means_over_prefix_sets(rows: Rows, data: st.DataObject) -> None:
    rewards = data.draw(st.lists(st.sampled_from([0.0, 1.0, 0.3, math.nan]), min_size=len(rows), max_size=len(rows)))
    ids, lengths, groups = padded(rows)
    actual = process_set_rewards(ids, lengths, torch.tensor(rewards, dtype=torch.float64), groups)
    for i, (_, tokens) in enumerate(rows):
        for t in range(len(tokens)):
            known = [rewards[j] for j in sharing(rows, i, t + 1) if not math.isnan(rewards[j])]
            expected = sum(known) / len(known) if known else math.nan
            assert actual[i, t].item() == pytest.approx(expected, nan_ok=True)
        assert (actual[i, len(tokens) :] == 0).all()


def test_process_rewards_have_no_gradient() -> None:
    rewards = torch.tensor([1.0, 0.0], requires_grad=True)
    ids, lengths = torch.tensor([[1, 2], [1, 3]]), torch.tensor([2, 2])
    out = process_set_rewards(ids, lengths, rewards, 2)
    assert out.dtype == torch.float32 and not out.requires_grad
    assert torch.equal(process_set_rewards(ids.t().contiguous().t(), lengths.int(), rewards, torch.tensor([5, 5])), out)


@settings(max_examples=40, deadline=None)
@given(ROWS, st.integers(0, 2**31 - 1))
def test_theorem_1(rows: Rows, seed: int) -> None:
    """GRPO is its process-set formulation: equal losses, equal gradients of a policy that sees prefixes alone."""
    generator = torch.Generator().manual_seed(seed)
    ids, lengths, groups = padded(rows)
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    if not mask.any():
        return
    prefixes = sorted({(group, *tokens[:t]) for group, tokens in rows for t in range(len(tokens))})
    place = torch.zeros_like(ids)
    for i, (group, tokens) in enumerate(rows):
        place[i, : len(tokens)] = torch.tensor(
            [prefixes.index((group, *tokens[:t])) for t in range(len(tokens))], dtype=torch.int64
        )
    table = torch.randn(len(prefixes), 3, generator=generator, dtype=torch.float64).requires_grad_()
    rewards = torch.randint(0, 3, (len(rows),), generator=generator).double()
    advantages = group_advantages(rewards, groups)
    of_sets = process_set_rewards(ids, lengths, advantages, groups)
    assert ((of_sets - process_set_rewards(ids, lengths, rewards, groups)) * mask).isfinite().all()

    def loss_and_gradients(advantages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = table[place]
        logits.retain_grad()
        table.grad = None
        batch = rlkernels.PolicyBatch(ids, advantages, mask=mask)
        loss = rlkernels.policy_loss(logits, batch, "dapo").loss
        loss.backward()
        return loss.detach(), logits.grad, table.grad

    loss, dlogits, dtable = loss_and_gradients(advantages)
    set_loss, set_dlogits, set_dtable = loss_and_gradients(of_sets)
    torch.testing.assert_close(set_loss, loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(set_dtable, dtable, rtol=0, atol=1e-12)
    differs = ((of_sets - advantages[:, None]).abs() > 1e-6) & mask
    changed = ((set_dlogits - dlogits).abs() > 1e-12).any(-1)
    assert torch.equal(changed, differs)  # a row's own gradient is another wherever its set's advantage is


def test_theorem_1_is_not_empty(generator: Generator) -> None:
    ids, lengths = torch.tensor([[1, 2], [1, 3]]), torch.tensor([2, 2])
    advantages = group_advantages(torch.tensor([1.0, 0.0]), 2)
    of_sets = process_set_rewards(ids, lengths, advantages, 2)
    assert of_sets[:, 0].tolist() == [0.0, 0.0] and (of_sets[:, 1] == advantages).all()


@pytest.mark.parametrize("function", [prefix_tree, prefix_tree_summary])
def test_bad_tree_arguments(function) -> None:
    with pytest.raises(ValueError, match=r"lengths: expected values in \[0, 3\]"):
        function(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([4, 1]), 2)
    with pytest.raises(TypeError, match="token_ids"):
        function(torch.zeros(2, 3), torch.tensor([1, 1]), 2)
    with pytest.raises(ValueError, match="groups"):
        function(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([1, 1]), 3)


def test_bad_process_rewards() -> None:
    ids, lengths = torch.zeros(2, 3, dtype=torch.int64), torch.tensor([1, 1])
    with pytest.raises(ValueError, match="rewards"):
        process_set_rewards(ids, lengths, torch.zeros(3), 2)
    with pytest.raises(ValueError, match="rewards: expected on cpu"):
        process_set_rewards(ids, lengths, torch.zeros(2, device="meta"), 2)
