"""CLIPO: correct answers to a prompt are drawn together, and how far they are is part of their reward."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from rlkernels import checks
from rlkernels.credit.groups import Groups
from rlkernels.dtypes import result_dtype, wide

KINDS = ("infonce", "supcon_out", "supcon_in", "soft_nn")


def pool_hidden(hidden: Tensor, mask: Tensor) -> Tensor:
    """The mean of each response's hidden states.

        pooled_i = sum_t m h / sum_t m;   0 for an empty response

    Detached: the contrastive loss trains the head alone and reaches the policy through the reward only.

    Args:
        hidden: `[B, T, H]` float, states of the responses' tokens. Not read where the mask is 0.
        mask: `[B, T]`, nonzero = a token of the response.

    Returns:
        `[B, H]`, float32 (float64 for float64 states).

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it.

    Source: CLIPO (Qwen-Applications/CLIPO), which pools the states that the rollout engine returns.

    Example:
        >>> import torch
        >>> from rlkernels.credit import pool_hidden
        >>> pool_hidden(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([[1, 1, 0]])).tolist()
        [[2.0]]
    """
    checks.require_floats("hidden", hidden, "B", "T", "H")
    checks.require_tensor("mask", mask)
    checks.require_shape("mask", mask, tuple(hidden.shape[:2]))
    checks.require_same_device("hidden", hidden, mask=mask)
    used, dtype = mask != 0, result_dtype(hidden)
    total = torch.where(used[..., None], hidden.detach(), 0).sum(1, dtype=dtype)
    return total / used.sum(1).clamp(min=1)[:, None]


class ContrastiveHead(nn.Module):
    """A linear projection without a bias onto the unit sphere.

        e = W pooled / |W pooled|

    Frozen (`requires_grad_(False)`) it is the ablation with a fixed head.

    Args:
        hidden_size: H.
        embedding_size: D; the authors take 512 and 2048.

    Source: CLIPO (Qwen-Applications/CLIPO); trained by AdamW with learning rate 1e-3.

    Example:
        >>> import torch
        >>> from rlkernels.credit import ContrastiveHead
        >>> head = ContrastiveHead(hidden_size=8, embedding_size=4)
        >>> head(torch.ones(3, 8)).norm(dim=-1).round().tolist()
        [1.0, 1.0, 1.0]
    """

    def __init__(self, hidden_size: int, embedding_size: int = 512) -> None:
        super().__init__()
        self.projection = nn.Linear(hidden_size, embedding_size, bias=False)

    def forward(self, pooled: Tensor) -> Tensor:
        """Embeddings of length 1.

        Args:
            pooled: `[B, H]` float, of `pool_hidden`.

        Returns:
            `[B, D]`, in the weight's dtype.

        Raises:
            TypeError, ValueError: an argument that is not as above, naming it.
        """
        checks.require_floats("pooled", pooled, "B", self.projection.in_features)
        return nn.functional.normalize(self.projection(pooled.to(self.projection.weight.dtype)), dim=-1)


class ContrastiveLoss(NamedTuple):
    """A loss, of each response too."""

    loss: Tensor  # 0-d: the mean over anchors
    per_response: Tensor  # [B], 0 where `is_anchor` is False
    is_anchor: Tensor  # [B] bool


def contrastive_loss(
    embeddings: Tensor,
    correct: Tensor,
    groups: int | Tensor,
    *,
    kind: str = "infonce",
    temperature: float = 0.05,
    positives: Tensor | None = None,
    generator: Generator | None = None,
    eps: float = 0.0,
) -> ContrastiveLoss:
    """How much closer a correct answer is to its prompt's other correct answers than to its wrong ones.

        z_ia = e_i . e_a / temperature;   P(i): the other correct answers of i's group;   A(i): all others of it
        infonce     -z_ip + log sum_A exp z_ia                       one p of P(i)
        supcon_out  -mean_P z_ip + log sum_A exp z_ia
        supcon_in   -log mean_P exp z_ip + log sum_A exp z_ia
        soft_nn     -log sum_P exp z_ip + log sum_A exp z_ia

    Anchors are the correct answers with something in P(i) and something wrong in A(i); the loss is their mean, 0
    without any. Gradients reach the embeddings.

    Args:
        embeddings: `[B, D]` float, of length 1 (`ContrastiveHead`).
        correct: `[B]`, any dtype, > 0 where the answer is right; NaN (a rejected response) is in neither set.
        groups: group size (consecutive rows), or `[B]` integer ids. Ids compare all rows with all, `[B, B]`.
        kind: as above.
        temperature: > 0.
        positives: `[B]` integers, for `infonce`: the row of each anchor's p; not read for others. None draws one.
        generator: draws the p.
        eps: >= 0; the authors' 1e-8, which they add to each sum of exponentials after the row's largest z, that with
            itself included, was subtracted. It dominates where other answers are far: use it for parity alone.

    Returns:
        `ContrastiveLoss(loss, per_response, is_anchor)`, float32 (float64 for float64 embeddings).

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it. A bad positive on a GPU gives NaN unless
            `set_checks(True)`.

    Source: CLIPO (Qwen-Applications/CLIPO). As in its code an anchor is not in its own denominator.

    Example:
        >>> import torch
        >>> from rlkernels.credit import contrastive_loss
        >>> out = contrastive_loss(torch.eye(4), torch.tensor([1, 1, 0, 0]), groups=4, kind="supcon_out")
        >>> round(out.loss.item(), 4), out.is_anchor.tolist()  # log 3
        (1.0986, [True, True, False, False])
    """
    checks.require_floats("embeddings", embeddings, "B", "D")
    rows = embeddings.shape[0]
    checks.require_tensor("correct", correct)
    checks.require_sizes("correct", correct, rows)
    if positives is not None:
        checks.require_tensor("positives", positives)
    checks.require_same_device("embeddings", embeddings, correct=correct, positives=positives)
    checks.require_choice("kind", kind, KINDS)
    checks.require_number("temperature", temperature, above=0.0)
    checks.require_number("eps", eps, at_least=0.0)
    for name, value in (("positives", positives), ("generator", generator)):
        if value is not None and kind != "infonce":
            raise ValueError(f"{name}: expected None with kind={kind!r}, got one")
    group = Groups(groups, rows, embeddings.device)
    size = max(1, groups if isinstance(groups, int) else rows)
    pairs = _Pairs(correct, group.index, size)

    # a rejected response may be NaN, and 0 * NaN would reach every gradient
    e = torch.where(correct.isnan()[:, None], 0, embeddings).to(result_dtype(embeddings))
    e = e.reshape(rows // size, size, embeddings.shape[1])
    z = e @ e.transpose(1, 2) / temperature
    floor = z.detach().amax(-1) + math.log(eps) if eps > 0 else None
    among_all = pairs.log_sum_exp(z, pairs.others, floor)
    if kind == "infonce":
        near = pairs.of_one(z, pairs.drawn(generator) if positives is None else pairs.given(positives))
    elif kind == "supcon_out":
        near = torch.where(pairs.positive, z, 0).sum(-1) / pairs.count.clamp(min=1)
    else:
        near = pairs.log_sum_exp(z, pairs.positive, floor)
        if kind == "supcon_in":
            near = near - pairs.count.clamp(min=1).to(z.dtype).log()
    per_response = torch.where(pairs.is_anchor, among_all - near, 0).view(rows)
    is_anchor = pairs.is_anchor.view(rows)
    return ContrastiveLoss(per_response.sum() / is_anchor.sum().clamp(min=1), per_response, is_anchor)


class _Pairs:
    """Who is compared with whom, in blocks `[blocks, size, size]` that no group crosses."""

    def __init__(self, correct: Tensor, index: Tensor, size: int) -> None:
        self.rows, self.size = index.shape[0], size
        index, right, known = (x.reshape(-1, size) for x in (index, correct > 0, ~correct.isnan()))
        same = (index[:, :, None] == index[:, None, :]) & ~torch.eye(size, dtype=torch.bool, device=index.device)
        self.others = same & known[:, None, :]
        self.positive = self.others & right[:, None, :] & right[:, :, None]
        self.count = self.positive.sum(-1)
        self.is_anchor = (self.count > 0) & (self.others & ~self.positive).any(-1)

    def log_sum_exp(self, z: Tensor, chosen: Tensor, floor: Tensor | None) -> Tensor:
        """Over the chosen columns; rows that are no anchors may choose none, and have no gradient."""
        z = torch.where(self.is_anchor[..., None], torch.where(chosen, z, -torch.inf), 0)
        total = z.logsumexp(-1)
        return total if floor is None else torch.logaddexp(total, floor)

    def of_one(self, z: Tensor, column: Tensor) -> Tensor:
        is_positive = self.positive.gather(-1, column).squeeze(-1)
        return torch.where(is_positive, z.gather(-1, column).squeeze(-1), torch.nan)

    def drawn(self, generator: Generator | None) -> Tensor:
        """A column of each row, uniform over its positives."""
        lots = torch.rand(self.positive.shape, generator=generator, device=self.positive.device)
        return torch.where(self.positive, lots, -1).argmax(-1, keepdim=True)

    def given(self, positives: Tensor) -> Tensor:
        checks.require_dtype("positives", positives, checks.INTEGER_DTYPES)
        checks.require_shape("positives", positives, (self.rows,))
        blocks = self.rows // self.size
        first = torch.arange(blocks, device=positives.device)[:, None] * self.size
        column = positives.reshape(blocks, self.size).to(torch.int64) - first
        inside = (column >= 0) & (column < self.size)
        column = torch.where(inside, column, torch.arange(self.size, device=column.device))[..., None]
        if checks.values_are_checked(positives.device):
            bad = (self.is_anchor & ~self.positive.gather(-1, column).squeeze(-1)).view(-1)
            if bool(bad.any()):
                row = int(bad.nonzero()[0])
                raise ValueError(
                    f"positives: expected another correct row of the same group, got {int(positives[row])} at row {row}"
                )
        return column


def contrastive_reward(per_response: Tensor, *, weight: float = 0.2, floor: float = -0.5) -> Tensor:
    """What the contrastive loss adds to each response's reward.

        max(-weight L_i, floor)

    0 for responses that are no anchors. Carries no gradient.

    Args:
        per_response: `[B]` float, of `contrastive_loss`.
        weight: >= 0 (lambda).
        floor: <= 0.

    Returns:
        `[B]`, float32 (float64 for float64 losses).

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it.

    Source: CLIPO (Qwen-Applications/CLIPO).

    Example:
        >>> import torch
        >>> from rlkernels.credit import contrastive_reward
        >>> contrastive_reward(torch.tensor([0.0, 1.0, 5.0])).tolist()
        [0.0, -0.20000000298023224, -0.5]
    """
    checks.require_floats("per_response", per_response, "B")
    checks.require_number("weight", weight, at_least=0.0)
    checks.require_number("floor", floor, at_most=0.0)
    return (0 - weight * wide(per_response.detach())).clamp(min=floor).to(result_dtype(per_response))
