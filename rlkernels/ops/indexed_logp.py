"""`rlkernels::indexed_logp`: log-probabilities at rows that an index names, of a policy that is not trained here."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernels import backends
from rlkernels.ops.rows import Rows, Wanted, compute_dtype, empty_row_stats

_LOGP_ALONE = Wanted(entropy=False, lse=False, log_sum_sq_probs=False, mean_logits=False, is_top1=False)


@torch.library.custom_op("rlkernels::indexed_logp", mutates_args=())
def indexed_logp(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    softcap: Tensor | None,
    logit_scale: Tensor,
    ignore_index: int,
    index: Tensor | None,
) -> Tensor:
    rows = Rows(logits, targets, temperature, softcap, logit_scale, ignore_index)
    stats = empty_row_stats(rows, _LOGP_ALONE)
    backends.implementation("indexed_logp", logits).token_stats_forward(rows, stats, index=index)
    return stats.logp


@indexed_logp.register_fake
def _(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    softcap: Tensor | None,
    logit_scale: Tensor,
    ignore_index: int,
    index: Tensor | None,
) -> Tensor:
    return torch.empty(targets.shape, dtype=compute_dtype(logits.dtype), device=logits.device)
