"""Where the responses' tokens stand in a micro-batch of slime's, and their log-probabilities."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernels.batch import IGNORE_INDEX
from rlkernels.integrations.slime.package import parallel_state, slimes
from rlkernels.stats import token_stats


class ResponseTokens(NamedTuple):
    """The responses' tokens that are on this rank, in order of samples."""

    rows: Tensor  # [N] of the logits
    targets: Tensor  # [N]
    mask: Tensor  # [N]
    lengths: list[int]  # [B]
    cu_seqlens: Tensor  # [B + 1]
    cp_group: dist.ProcessGroup | None


def response_tokens(args: Namespace, batch: dict[str, Any], logits: Tensor) -> ResponseTokens:
    """Of packed samples, whole or, under context parallelism, as slime cuts them."""
    mpu = parallel_state()
    totals, responses, device = batch["total_lengths"], batch["response_lengths"], logits.device
    is_spread = mpu.get_context_parallel_world_size() > 1
    if is_spread:
        # slime's own layout, of numbers of rows and positions in place of logits and tokens
        numbers = torch.arange(logits.shape[1], dtype=torch.float32).view(1, -1, 1)
        spans = slimes("backends.megatron_utils.loss").get_responses(
            numbers,
            args=args,
            unconcat_tokens=[torch.arange(total) for total in totals],
            total_lengths=totals,
            response_lengths=responses,
            apply_temperature=False,
        )
        places = [(rows.flatten().long(), positions) for rows, positions in spans]
    else:
        ends = torch.tensor([0, *totals]).cumsum(0).tolist()
        places = [
            (torch.arange(end + total - response - 1, end + total - 1), torch.arange(total - response, total))
            for end, total, response in zip(ends, totals, responses, strict=False)
        ]
    tokens, masks, first_token, first_response = [], [], 0, 0
    for (_, positions), sample, total, response in zip(
        places, batch["unconcat_tokens"], totals, responses, strict=True
    ):
        tokens.append(first_token + positions)
        masks.append(first_response + positions - (total - response))
        first_token, first_response = first_token + len(sample), first_response + response
    lengths = [len(positions) for _, positions in places]

    def taken(values: Sequence[Tensor], indices: list[Tensor]) -> Tensor:
        return torch.cat(list(values))[torch.cat(indices).to(device)]

    return ResponseTokens(
        rows=torch.cat([rows for rows, _ in places]).to(device),
        targets=taken(batch["unconcat_tokens"], tokens),
        mask=taken(batch["loss_masks"], masks) != 0,
        lengths=lengths,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(device),
        cp_group=mpu.get_context_parallel_group() if is_spread else None,
    )


def log_probs_and_entropy(args: Namespace, logits: Tensor, tokens: ResponseTokens) -> tuple[Tensor, Tensor]:
    """`[N]` both, 0 where the mask is; entropies carry a gradient where the loss has a term of them."""
    mpu = parallel_state()
    targets = torch.full(logits.shape[1:2], IGNORE_INDEX, dtype=torch.int64, device=logits.device)
    targets[tokens.rows] = torch.where(tokens.mask, tokens.targets.to(torch.int64), IGNORE_INDEX)
    is_spread = mpu.get_tensor_model_parallel_world_size() > 1
    group = mpu.get_tensor_model_parallel_group() if is_spread else None
    temperature = getattr(args, "rollout_temperature", 1.0)
    stats = token_stats(logits[0], targets, temperature=temperature, tp_group=group)
    assert stats.entropy is not None
    entropy = stats.entropy[tokens.rows]
    return stats.logp[tokens.rows], entropy if args.entropy_coef != 0 else entropy.detach()
