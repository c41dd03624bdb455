"""Advantages with mean 0 and variance 1 over a batch's trained tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernels import checks
from rlkernels.credit.precision import result_dtype, widened


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Values centred and scaled over the trained tokens of the whole batch.

        (x - mean) / sqrt(var + 1e-8),   var with n - 1

    Exactly 0 for equal values and for a single one. NaN at a trained token stays visible: it is in every result.

    Args:
        values: float, any shape, such as `[B, T]` advantages.
        mask: `values`' shape, nonzero = trained. Nothing is read where it is 0; the result there is 0.

    Returns:
        `values`' shape, float32 (float64 for float64 values).

    Raises:
        TypeError, ValueError: naming the argument.

    Source: PPO as in verl (`masked_whiten`).

    Example:
        >>> import torch
        >>> from rlkernels.credit import whiten
        >>> [round(x, 4) for x in whiten(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([1, 1, 0])).tolist()]
        [-0.7071, 0.7071, 0.0]
    """
    checks.require_tensor("values", values)
    checks.require_dtype("values", values, checks.FLOAT_DTYPES)
    checks.require_tensor("mask", mask)
    checks.require_shape("mask", mask, tuple(values.shape))
    checks.require_same_device("values", values, mask=mask)
    trained, wide = mask != 0, widened(values)
    count = trained.sum()
    # relative to the smallest value, equal values are exactly 0 and so is all that follows
    lowest = torch.cat([torch.where(trained, wide, torch.inf).flatten(), wide.new_full((1,), torch.inf)]).amin()
    above = torch.where(trained, wide - lowest, 0)
    centred = torch.where(trained, above - above.sum() / count.clamp(min=1), 0)
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    return (centred * (variance + 1e-8).rsqrt()).to(result_dtype(values))
