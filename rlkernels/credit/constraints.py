"""Rewards of instructions that consist of several criteria."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernels import checks
from rlkernels.dtypes import result_dtype


def constraint_satisfaction_rate(satisfied: Tensor) -> Tensor:
    """CSR: the share of its criteria that a response satisfies.

        CSR_i = mean_k satisfied[i, k]

    Args:
        satisfied: `[B, K]`, bool, or integers or floats in [0, 1] (a judge's scores). NaN for a criterion that the
            response's prompt does not have, or that could not be judged; it is left out.

    Returns:
        `[B]`, float32 (float64 for float64 scores); NaN, which `group_advantages` leaves out, where no criterion is.

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it. Values on a GPU are checked only under
            `set_checks(True)`.

    Source: CoRT (counterfactual replay over tokens); no public code.

    Example:
        >>> import torch
        >>> from rlkernels.credit import constraint_satisfaction_rate
        >>> constraint_satisfaction_rate(torch.tensor([[1.0, 0.0], [1.0, torch.nan]])).tolist()
        [0.5, 1.0]
    """
    scores, is_judged = _scores(satisfied)
    return torch.where(is_judged, scores, 0).sum(-1) / is_judged.sum(-1)


def all_or_nothing(satisfied: Tensor) -> Tensor:
    """AON: 1 for a response that satisfies all of its criteria, else 0.

        AON_i = prod_k 1{satisfied[i, k] = 1}

    Args, Returns, Raises, Source: as `constraint_satisfaction_rate`.

    Example:
        >>> import torch
        >>> from rlkernels.credit import all_or_nothing
        >>> all_or_nothing(torch.tensor([[1.0, 0.0], [1.0, torch.nan]])).tolist()
        [0.0, 1.0]
    """
    scores, is_judged = _scores(satisfied)
    rewards = ((scores == 1) | ~is_judged).all(-1).to(scores.dtype)
    return torch.where(is_judged.any(-1), rewards, torch.nan)


def _scores(satisfied: Tensor) -> tuple[Tensor, Tensor]:
    checks.require_tensor("satisfied", satisfied)
    checks.require_dtype("satisfied", satisfied, (torch.bool, *checks.FLOAT_DTYPES, *checks.INTEGER_DTYPES))
    checks.require_sizes("satisfied", satisfied, "B", "K")
    scores = satisfied.detach().to(result_dtype(satisfied))
    is_judged = ~scores.isnan()
    good = ~is_judged | ((scores >= 0) & (scores <= 1))
    checks.check_values("satisfied", scores, good, "numbers in [0, 1] or NaN")
    return scores, is_judged
