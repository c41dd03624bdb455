"""NFT: how often each prompt is answered correctly."""

from __future__ import annotations

from torch import Tensor

from rlkernels import checks
from rlkernels.credit.groups import Groups
from rlkernels.dtypes import result_dtype, wide


def success_rates(correct: Tensor, groups: int | Tensor) -> Tensor:
    """The share of correct answers among a prompt's responses, for `PolicyBatch(extras={"success_rate": ...})`.

        q_i = mean over i's group of [correct_j > 0]

    NaN (a rejected response) takes no part; a group of nothing else gets 0. `mixed_groups(correct, groups)` keeps
    exactly the responses with 0 < q < 1, the ones that NFT trains on.

    Args:
        correct: `[B]`, any dtype, > 0 where the answer is right: rewards of 0 and 1, or of -1 and 1, or bools.
        groups: group size (consecutive rows), or `[B]` integer ids.

    Returns:
        `[B]`, float32 (float64 for float64 `correct`).

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it.

    Source: NFT (2505.18116). Its code gives a group of one 1/2; here it has 0 or 1, and is filtered.

    Example:
        >>> import torch
        >>> from rlkernels.credit import success_rates
        >>> success_rates(torch.tensor([1, 0, 0, 1, 1, 1]), groups=3).tolist()
        [0.3333333432674408, 0.3333333432674408, 0.3333333432674408, 1.0, 1.0, 1.0]
    """
    checks.require_reals("correct", correct, "B")
    values = wide(correct.detach())
    group = Groups(groups, values.shape[0], values.device)
    rate = group.count(values > 0).to(values.dtype) / group.count(~values.isnan()).clamp(min=1)
    return rate.to(result_dtype(correct))
