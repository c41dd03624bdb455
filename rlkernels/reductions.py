"""From per-token values to one loss, and the denominators that make micro-batches and ranks add up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernels import checks
from rlkernels.agreement import check_group
from rlkernels.batch import PolicyBatch
from rlkernels.distributed import sum_over_ranks
from rlkernels.segments import Segments

REDUCTIONS = (
    "token_mean",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
    "token_sum",
    "none",
)
"""How the values of tokens become one loss.

    token_mean               sum / valid tokens
    seq_mean_token_mean      sum_i (sum_t / n_i) / B
    seq_mean_token_sum       sum / B
    seq_mean_token_sum_norm  sum / normalizer               (B x maximum length)
    token_sum                sum
    none                     the values, in the tokens' shape

n_i are the valid tokens of sequence i; B counts every sequence; empty ones, and an empty batch, give 0. `normalizer`
replaces the denominator (B of `seq_mean_token_mean`).
"""

Normalizer = float | Tensor


def check_reduction(reduction: str, normalizer: Normalizer | None, name: str = "reduction") -> None:
    checks.require_choice(name, reduction, REDUCTIONS)
    if isinstance(normalizer, Tensor):
        checks.require_tensor("normalizer", normalizer)
        checks.require_shape("normalizer", normalizer, ())
        checks.require_no_gradient("normalizer", normalizer)
        checks.require_dtype("normalizer", normalizer, (*checks.FLOAT_DTYPES, *checks.INTEGER_DTYPES))
        if checks.values_are_checked(normalizer.device) and not (normalizer >= 0 and normalizer.isfinite()):
            raise ValueError(f"normalizer: expected a finite number >= 0, got {normalizer.item()}")
    elif normalizer is not None:
        checks.require_number("normalizer", normalizer, at_least=0.0)
    if reduction == "none" and normalizer is not None:
        raise ValueError(f"normalizer: expected None with {name}='none', got {normalizer!r}")
    if reduction == "seq_mean_token_sum_norm" and normalizer is None:
        raise ValueError(
            f"normalizer: expected sequences x maximum length with {name}='seq_mean_token_sum_norm', got None"
        )


def reduce_tokens(
    values: Tensor, mask: Tensor, segments: Segments, reduction: str, normalizer: Normalizer | None
) -> Tensor:
    """One 0-d loss from `values [N]`, which are zero where `mask` is; `[N]` for `none`.

    Of sequences spread over ranks it is this rank's share of the loss, under the whole's denominators.
    """
    if reduction == "none":
        return values
    if reduction == "seq_mean_token_mean":
        lengths = segments.sum(mask.to(values.dtype)).clamp(min=1)
        total = (segments.own_sum(values) / lengths).sum()
    else:
        total = values.sum()
    if normalizer is None:
        normalizer = denominator(mask, segments, reduction)
    if isinstance(normalizer, Tensor):
        normalizer = normalizer.to(device=total.device, dtype=total.dtype)
        return total / torch.where(normalizer == 0, 1, normalizer)
    return total / (normalizer or 1.0)


def denominator(mask: Tensor, segments: Segments, reduction: str) -> Normalizer:
    """A batch's own, where no normalizer replaces it."""
    if reduction == "token_mean":
        tokens = mask.sum()
        return tokens if segments.group is None else sum_over_ranks(tokens, segments.group)
    return 1.0 if reduction == "token_sum" else float(segments.count)


def global_normalizer(
    masks: Sequence[Tensor | PolicyBatch] | Tensor | PolicyBatch,
    reduction: str,
    *,
    group: dist.ProcessGroup | None = None,
    cp_group: dist.ProcessGroup | None = None,
    gradients: str = "mean",
    max_length: int | None = None,
    count_empty: bool = True,
) -> Tensor:
    """The `normalizer` with which the losses of all micro-batches and ranks add up to one big batch's.

        token_mean                          valid tokens of all micro-batches and ranks
        seq_mean_token_mean, _token_sum     their sequences
        seq_mean_token_sum_norm             their sequences x max_length
        token_sum                           1
        gradients="mean": divided by the number of ranks

    Args:
        masks: of this rank's micro-batches: `PolicyBatch`es, or mask tensors `[B, T]` (`[N]` is one sequence),
            nonzero = trained.
        reduction: as in `policy_loss`, except `none`.
        group: process group to sum over, all ranks whose gradients are put together; None: the default group if one is
            initialised, else this process.
        cp_group: the losses' `cp_group`: the masks are of this rank's tokens of sequences that it shares with the
            group's other ranks, all of whom are in `group` too. Tokens are counted on each of them, sequences once.
            With `gradients="mean"` a rank's loss, which is its whole group's, comes out as many times as large as
            `cp_group` has ranks: divide what is averaged over ranks for a log by that.
        gradients: `"mean"` where the trainer averages gradients over ranks (DDP, FSDP), `"sum"` where it adds
            them.
        max_length: >= 1, tokens of the longest response, for `seq_mean_token_sum_norm`; else None.
        count_empty: whether sequences without a trained token are counted: TRL does, verl and OpenRLHF do not.

    Returns:
        0-d float32 on the masks' device. No synchronisation with the host.

    Raises:
        TypeError, ValueError: unknown reduction or `gradients`, no masks, `max_length` missing or without effect, a
            group without `torch.distributed`. Of one rank alone: the others wait for the group's timeout.

    Example:
        >>> import torch, rlkernels
        >>> masks = [torch.tensor([[1, 1, 0]]), torch.tensor([[1, 0, 0], [1, 1, 1]])]
        >>> rlkernels.global_normalizer(masks, "token_mean").item()
        6.0
    """
    checks.require_choice("reduction", reduction, REDUCTIONS[:-1])
    checks.require_choice("gradients", gradients, ("mean", "sum"))
    needs_length = reduction == "seq_mean_token_sum_norm"
    if needs_length != (max_length is not None):
        expected = "an integer" if needs_length else "None"
        raise ValueError(f"max_length: expected {expected} with reduction={reduction!r}, got {max_length!r}")
    if max_length is not None and (not isinstance(max_length, int) or max_length < 1):
        raise ValueError(f"max_length: expected an integer >= 1, got {max_length!r}")
    if not isinstance(masks, Tensor | PolicyBatch | Sequence):
        raise TypeError(f"masks: expected masks or batches, got {checks.describe(masks)}")
    parts = [masks] if isinstance(masks, Tensor | PolicyBatch) else list(masks)
    if not parts:
        raise ValueError("masks: expected at least one mask, got none")
    lengths = torch.cat([_lengths(part) for part in parts])
    total = torch.stack([lengths.sum(), _sequences(lengths, count_empty, cp_group)])
    ranks = 1
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total, group=group)
        ranks = dist.get_world_size(group)
    elif group is not None:
        raise ValueError("group: expected None without an initialised torch.distributed, got a group")
    if reduction == "token_mean":
        count = total[0].float()
    elif reduction == "token_sum":
        count = torch.ones((), dtype=torch.float32, device=total.device)
    else:
        count = total[1].float() * (max_length or 1)
    return count / ranks if gradients == "mean" else count


def _lengths(part: Tensor | PolicyBatch) -> Tensor:
    """`[B]`, int64: trained tokens of each sequence that are here."""
    if isinstance(part, PolicyBatch):
        if part.mask is None:
            raise ValueError("masks: expected batches with a mask or targets, got one without")
        mask, borders = part.mask, part.cu_seqlens
    else:
        checks.require_tensor("masks", part)
        if part.ndim not in (1, 2):
            raise ValueError(f"masks: expected shape [B, T] or [N], got {checks.describe(part)}")
        mask, borders = part != 0, None
    return Segments(tuple(mask.shape), borders).sum(mask.reshape(-1).to(torch.int64))


def _sequences(lengths: Tensor, count_empty: bool, cp_group: dist.ProcessGroup | None) -> Tensor:
    """0-d, int64: how many sequences this rank adds; of those that ranks share the first one adds all."""
    if cp_group is not None:
        check_group("cp_group", cp_group)
        if not count_empty:
            lengths = lengths.clone()
            dist.all_reduce(lengths, group=cp_group)
        if dist.get_rank(cp_group) != 0:
            return torch.zeros_like(lengths.sum())
    counted = torch.ones_like(lengths) if count_empty else lengths > 0
    return counted.sum()
