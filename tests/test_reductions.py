"""Denominators: micro-batches and ranks add up to one big batch, whatever the padding or the split."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

import rlkernels
from rlkernels import GRPO, PolicyBatch, global_normalizer

SUMMED = [reduction for reduction in rlkernels.REDUCTIONS if reduction != "none"]
MAX_LENGTH = 10


def value_as_loss(logp: Tensor, batch: PolicyBatch) -> Tensor:
    return logp


def reduced(values: list[list[float]], mask: list[list[int]], reduction: str, normalizer: float | None = None) -> float:
    batch = PolicyBatch(None, torch.ones(len(values)), mask=torch.tensor(mask))
    options = {"reduction": reduction, "normalizer": normalizer}
    return rlkernels.logp_policy_loss(torch.tensor(values), batch, value_as_loss, **options).loss.item()


@pytest.mark.parametrize(
    "reduction, expected",
    [
        ("token_mean", 2.5),
        ("seq_mean_token_mean", 3.0),
        ("seq_mean_token_sum", 5.0),
        ("seq_mean_token_sum_norm", 0.5),
        ("token_sum", 10.0),
    ],
)
@pytest.mark.parametrize("width", [3, 8], ids="B58-B59-padded-to-{}".format)
def test_values_do_not_depend_on_padding(reduction: str, expected: float, width: int) -> None:
    values = [row + [77.0] * (width - 3) for row in ([1.0, 2.0, 3.0], [4.0, 0.0, 0.0])]
    mask = [row + [0] * (width - 3) for row in ([1, 1, 1], [1, 0, 0])]
    normalizer = 2 * MAX_LENGTH if reduction == "seq_mean_token_sum_norm" else None
    assert reduced(values, mask, reduction, normalizer) == pytest.approx(expected)


def test_case_B60() -> None:
    values = [[2.0, 2, 2, 2, 2, 6, 5, 3, 2, 4], [10.0, 3, 4, 5, 2, 3, 4, 1, 1, 3]]
    mask = [[1] * 5 + [0] * 5, [1] + [0] * 9]
    assert reduced(values, mask, "token_mean") == pytest.approx(20 / 6)
    assert reduced(values, mask, "seq_mean_token_mean") == pytest.approx(6.0)


def test_case_B17_ignored_targets_leave_the_mean() -> None:
    logits = torch.zeros(1, 4, 8, requires_grad=True)
    batch = PolicyBatch(torch.tensor([[3, -100, 5, -100]]), torch.ones(1))
    out = rlkernels.policy_loss(logits, batch, "reinforce")
    out.loss.backward()
    assert out.loss.item() == pytest.approx(math.log(8.0))
    assert (logits.grad.abs().sum(-1) > 0).tolist() == [[True, False, True, False]]


def unequal_batch(generator: Generator) -> tuple[Tensor, dict[str, Tensor]]:
    """Seven rows of 0 to 6 trained tokens."""
    mask = torch.arange(6) < torch.tensor([6, 1, 0, 3, 5, 2, 4])[:, None]
    logp = -torch.rand(7, 6, generator=generator, dtype=torch.float64)
    batch = {
        "advantages": torch.randn(7, generator=generator, dtype=torch.float64),
        "mask": mask,
        "old_logp": logp + 0.2 * torch.randn(7, 6, generator=generator, dtype=torch.float64),
    }
    return logp, batch


def objective_with_entropy(reduction: str) -> GRPO:
    """The bonus shares the loss's reduction, and so its normalizer."""
    return GRPO(entropy_coef=0.1, entropy_reduction=reduction)


def big_batch(reduction: str, logp: Tensor, entropy: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    normalizer = 7 * MAX_LENGTH if reduction == "seq_mean_token_sum_norm" else None
    logp = logp.clone().requires_grad_()
    out = rlkernels.logp_policy_loss(
        logp,
        PolicyBatch(None, **batch),
        objective_with_entropy(reduction),
        entropy=entropy,
        reduction=reduction,
        normalizer=normalizer,
    )
    return out.loss.detach(), torch.autograd.grad(out.loss, logp)[0]


@pytest.mark.parametrize("sizes", [[3, 4], [1, 2, 4], [1] * 7], ids=str)
@pytest.mark.parametrize("reduction", SUMMED)
def test_unequal_micro_batches_add_up(reduction: str, sizes: list[int], generator: Generator) -> None:
    """B54, B55: the sum over micro-batches is the big batch, in value and in gradient."""
    logp, batch = unequal_batch(generator)
    entropy = torch.rand(7, 6, generator=generator, dtype=torch.float64)
    loss, gradient = big_batch(reduction, logp, entropy, batch)
    max_length = MAX_LENGTH if reduction == "seq_mean_token_sum_norm" else None
    masks = batch["mask"].split(sizes)
    normalizer = global_normalizer(masks, reduction, max_length=max_length)
    leaf = logp.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    begin = 0
    for size in sizes:
        part = slice(begin, begin + size)
        out = rlkernels.logp_policy_loss(
            leaf[part],
            PolicyBatch(None, **{name: value[part] for name, value in batch.items()}),
            objective_with_entropy(reduction),
            entropy=entropy[part],
            reduction=reduction,
            normalizer=normalizer,
        )
        out.loss.backward()
        total += out.loss.detach()
        begin += size
    torch.testing.assert_close(total, loss)
    torch.testing.assert_close(leaf.grad, gradient)


def test_global_normalizer_counts_batches_and_masks() -> None:
    packed = PolicyBatch(
        torch.tensor([1, 2, -100, 4, 5]), torch.ones(2), cu_seqlens=torch.tensor([0, 3, 5], dtype=torch.int32)
    )
    mask = torch.tensor([[1, 0, 0], [1, 1, 1], [0, 0, 0]])
    assert global_normalizer([packed, mask], "token_mean") == 8
    assert global_normalizer([packed, mask], "seq_mean_token_mean") == 5
    assert global_normalizer(packed, "seq_mean_token_sum_norm", max_length=4) == 8
    assert global_normalizer(packed, "seq_mean_token_sum_norm", max_length=1) == 2
    assert global_normalizer(mask, "token_sum") == 1
    assert global_normalizer(torch.tensor([[1], [0]]), "seq_mean_token_mean") == 2
    assert global_normalizer(mask[0], "seq_mean_token_sum") == 1


@pytest.mark.parametrize("normalizer", [0, torch.tensor(0.0)], ids=["number", "tensor"])
def test_normalizer_of_0_divides_by_1(normalizer: float | torch.Tensor, backend: str) -> None:
    batch = PolicyBatch(None, torch.tensor([2.0, 3.0]), mask=torch.ones(2, 1, dtype=torch.bool))
    logp = torch.zeros(2, 1)
    assert rlkernels.logp_policy_loss(logp, batch, GRPO(), reduction="token_mean", normalizer=normalizer).loss == -5


def test_a_given_normalizer_replaces_the_recipes_own(generator: Generator) -> None:
    rate = torch.tensor([0.25, 0.5])
    batch = PolicyBatch(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([1.0, -1.0]), extras={"success_rate": rate})
    logp = -torch.rand(2, 3, generator=generator)
    own = rlkernels.logp_policy_loss(logp, batch, "nft").loss
    given = rlkernels.logp_policy_loss(logp, batch, "nft", normalizer=1000 * global_normalizer(batch, "token_sum")).loss
    torch.testing.assert_close(given, own)


def test_empty_sequences_count_only_for_trl() -> None:
    masks = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0]])
    packed = PolicyBatch(None, torch.ones(3), mask=torch.ones(2), cu_seqlens=torch.tensor([0, 1, 1, 2]))
    for count_empty, sequences in ((True, 6), (False, 4)):
        parts = [masks, packed]
        assert global_normalizer(parts, "seq_mean_token_mean", count_empty=count_empty) == sequences
        assert (
            global_normalizer(parts, "seq_mean_token_sum_norm", max_length=5, count_empty=count_empty) == 5 * sequences
        )
        assert global_normalizer(parts, "token_mean", count_empty=count_empty) == 5


@pytest.mark.parametrize(
    "arguments, name",
    [
        ({"masks": [], "reduction": "token_mean"}, "masks"),
        ({"masks": [torch.ones(1, 2, 3)], "reduction": "token_mean"}, "masks"),
        ({"masks": torch.ones(2, 2), "reduction": "none"}, "reduction"),
        ({"masks": torch.ones(2, 2), "reduction": "mean"}, "reduction"),
        ({"masks": torch.ones(2, 2), "reduction": "token_mean", "gradients": "avg"}, "gradients"),
        ({"masks": torch.ones(2, 2), "reduction": "token_mean", "max_length": 3}, "max_length"),
        ({"masks": torch.ones(2, 2), "reduction": "seq_mean_token_sum_norm"}, "max_length"),
        ({"masks": torch.ones(2, 2), "reduction": "seq_mean_token_sum_norm", "max_length": 0}, "max_length"),
        ({"masks": torch.ones(2, 2), "reduction": "seq_mean_token_sum_norm", "max_length": 2.5}, "max_length"),
        ({"masks": torch.ones(2, 2), "reduction": "token_mean", "cp_group": "default"}, "cp_group"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_normalizer_arguments(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises((TypeError, ValueError), match=name):
        global_normalizer(**arguments)
