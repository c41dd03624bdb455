"""`rlkernels::prefix_counts`: integers only, no gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernels import backends


@torch.library.custom_op("rlkernels::prefix_counts", mutates_args=())
def prefix_counts(token_ids: Tensor, lengths: Tensor, row_order: Tensor, group_starts: Tensor) -> Tensor:
    counts = torch.empty(token_ids.shape, dtype=torch.int32, device=token_ids.device)
    module = backends.implementation("prefix_counts", token_ids)
    module.prefix_counts(token_ids, lengths, row_order, group_starts, counts)
    return counts


@prefix_counts.register_fake
def _(token_ids: Tensor, lengths: Tensor, row_order: Tensor, group_starts: Tensor) -> Tensor:
    return torch.empty(token_ids.shape, dtype=torch.int32, device=token_ids.device)
