"""The prefix tree of a group's responses, and the process rewards that GRPO reads from it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlkernels import checks
from rlkernels.credit.groups import Groups
from rlkernels.credit.prefix_sets import check_responses, prefix_set_counts
from rlkernels.dtypes import result_dtype, wide

_END = torch.iinfo(torch.int64).min  # an id that no vocabulary has


class PrefixNode(NamedTuple):
    """Tokens `start` to `end` (exclusive) of the responses `members`, who share all of them and what comes before."""

    start: int
    end: int
    members: tuple[int, ...]  # rows, rising
    parent: int | None  # index into the list of nodes; None for a group's root


def prefix_tree(token_ids: Tensor, lengths: Tensor, groups: int | Tensor) -> list[PrefixNode]:
    """Every group's prefix tree, for pictures and reports.

    A node starts where its parent ends and ends where its members stop agreeing. The root holds the whole group and
    may span nothing. Each distinct response ends in a leaf of its own, which spans nothing where the response is a
    prefix of another; equal responses share one. The nodes' spans partition each response's tokens, and a token's
    `prefix_set_counts` is its node's number of members.

    The tensors are read back: on a GPU this waits for it.

    Args:
        token_ids: `[B, T]`, any integer dtype; what lies past a response's length is not read.
        lengths: `[B]` integers in `[0, T]`: tokens of each response, its end token included.
        groups: group size (consecutive rows), or `[B]` integer ids.

    Returns:
        `PrefixNode(start, end, members, parent)` of all groups, parents before their children.

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it.

    Source: lambda-GRPO (2509.21154), the tree B(G) of process sets.

    Example:
        >>> import torch
        >>> from rlkernels.credit import prefix_tree
        >>> ids = torch.tensor([[1, 2, 3], [1, 2, 4], [1, 5, 0]])
        >>> for node in prefix_tree(ids, torch.tensor([3, 3, 2]), groups=3):
        ...     print(node)
        PrefixNode(start=0, end=1, members=(0, 1, 2), parent=None)
        PrefixNode(start=1, end=2, members=(0, 1), parent=0)
        PrefixNode(start=2, end=3, members=(0,), parent=1)
        PrefixNode(start=2, end=3, members=(1,), parent=1)
        PrefixNode(start=1, end=2, members=(2,), parent=0)
    """
    check_responses(token_ids, lengths)
    group = Groups(groups, token_ids.shape[0], token_ids.device)
    responses = [tokens[:length] for tokens, length in zip(token_ids.tolist(), lengths.tolist(), strict=True)]
    members_of_group: dict[int, list[int]] = {}
    for row, index in enumerate(group.index.tolist()):
        members_of_group.setdefault(index, []).append(row)

    nodes: list[PrefixNode] = []
    waiting: list[tuple[list[int], int, int | None]] = []  # members, start, parent; the next node last
    waiting += [(members, 0, None) for members in reversed(members_of_group.values())]
    while waiting:
        members, start, parent = waiting.pop()
        # what the first and the last in lexical order share is shared by all between them
        first, last = min(responses[row] for row in members), max(responses[row] for row in members)
        end = start
        while end < len(first) and first[end] == last[end]:
            end += 1
        children: dict[int | None, list[int]] = {}
        for row in members:
            following = responses[row][end] if end < len(responses[row]) else None
            children.setdefault(following, []).append(row)
        if len(children) > 1:
            waiting += [(rows, end, len(nodes)) for rows in reversed(children.values())]
        nodes.append(PrefixNode(start, end, tuple(members), parent))
    return nodes


class PrefixTreeSummary(NamedTuple):
    """How far a batch's prefix trees are from trivial ones."""

    path_depth: Tensor  # [B] int64: nodes on the way from the root to the response's leaf, both included
    intermediate_proportion: Tensor  # [B] float32: share of the response's tokens in nodes with several members
    nontrivial_group_share: Tensor  # 0-d float32: share of the groups with any such token


def prefix_tree_summary(token_ids: Tensor, lengths: Tensor, groups: int | Tensor) -> PrefixTreeSummary:
    """Path depth and intermediate proportion of each response, and the share of groups whose tree is not trivial.

        path_depth              1 + number of times that the prefix set shrinks, from the whole group to the response
        intermediate_proportion #{t : prefix_set_counts[i, t] > 1} / len_i            0 for an empty response

    The nodes are those of `prefix_tree`. In a group without a shared first token the depth is 2: an empty root and a
    leaf. Nothing is read back.

    Args:
        token_ids, lengths, groups: see `prefix_tree`.

    Returns:
        `PrefixTreeSummary(path_depth, intermediate_proportion, nontrivial_group_share)`.

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it. Lengths on a GPU are checked only under
            `set_checks(True)`.

    Source: lambda-GRPO (2509.21154), its measurements of real groups.

    Example:
        >>> import torch
        >>> from rlkernels.credit import prefix_tree_summary
        >>> ids = torch.tensor([[1, 2, 3], [1, 2, 4], [1, 5, 0]])
        >>> summary = prefix_tree_summary(ids, torch.tensor([3, 3, 2]), groups=3)
        >>> summary.path_depth.tolist(), summary.intermediate_proportion.tolist()
        ([3, 3, 2], [0.6666666865348816, 0.6666666865348816, 0.5])
    """
    check_responses(token_ids, lengths)
    rows, width = token_ids.shape
    group = Groups(groups, rows, token_ids.device)
    # with an end mark behind it, a response's last prefix set is the set of its equals
    lengths = lengths.to(torch.int64)
    marked = torch.nn.functional.pad(token_ids.to(torch.int64), (0, 1))
    place = torch.arange(width + 1, device=token_ids.device)
    marked = torch.where(place == lengths[:, None], _END, marked)
    counts = prefix_set_counts(marked, lengths + 1, groups)  # [B, T + 1]
    group_size = group.sum(torch.ones_like(counts[:, 0]))
    before = torch.cat([group_size[:, None], counts[:, :-1]], dim=1)
    path_depth = 1 + ((counts != before) & (place <= lengths[:, None])).sum(-1)
    shared = ((counts > 1) & (place < lengths[:, None])).sum(-1)
    return PrefixTreeSummary(
        path_depth,
        shared.to(torch.float32) / lengths.clamp(min=1),
        group.share_with_any(shared > 0),
    )


def process_set_rewards(token_ids: Tensor, lengths: Tensor, rewards: Tensor, groups: int | Tensor) -> Tensor:
    """Process rewards that a group implies: the mean reward of the responses in each token's prefix set.

        R[i, t] = mean of r_j over j in group(i) with len_j > t and token_ids[j, :t + 1] == token_ids[i, :t + 1]

    Given a group's advantages for rewards, these are the advantages of its process sets: with them in place of the
    responses' own, GRPO's loss and its gradient stay what they are (Theorem 1), since tokens of one prefix set have
    one log-probability.

    Args:
        token_ids, lengths, groups: see `prefix_tree`. Every row is compared with the G rows of its group, or with B
            rows where ids on a GPU hide how large the groups are.
        rewards: `[B]`, float or integer. One that is not finite is left out; a set without any finite reward gives NaN.

    Returns:
        `[B, T]`, float32 (float64 for float64 rewards), 0 at padding.

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it. Lengths on a GPU are checked only under
            `set_checks(True)`.

    Source: lambda-GRPO (2509.21154), Theorem 1.

    Example:
        >>> import torch
        >>> from rlkernels.credit import process_set_rewards
        >>> ids, lengths = torch.tensor([[1, 2], [1, 3], [4, 0]]), torch.tensor([2, 2, 1])
        >>> process_set_rewards(ids, lengths, torch.tensor([1.0, 0.0, 0.5]), groups=3).tolist()
        [[0.5, 1.0], [0.5, 0.0], [0.5, 0.0]]
    """
    check_responses(token_ids, lengths)
    checks.require_reals("rewards", rewards, "B")
    checks.require_shape("rewards", rewards, (token_ids.shape[0],))
    checks.require_same_device("token_ids", token_ids, rewards=rewards)
    values = wide(rewards.detach())
    group = Groups(groups, values.shape[0], values.device)
    inside = torch.arange(token_ids.shape[1], device=token_ids.device) < lengths[:, None]
    total, count = (torch.zeros(token_ids.shape, dtype=values.dtype, device=values.device) for _ in range(2))
    for position in range(group.size_bound()):
        other, exists = group.member(position)
        equal = (token_ids == token_ids[other]) & inside & inside[other] & exists[:, None]
        in_set = equal.cumprod(-1, dtype=torch.uint8) > 0
        in_set &= values[other].isfinite()[:, None]
        total += torch.where(in_set, values[other][:, None], 0)
        count += in_set
    return torch.where(inside, total / count, 0).to(result_dtype(rewards))
