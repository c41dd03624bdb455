"""CoRT's weights: a response's advantage goes where the contrast is."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernels import checks
from rlkernels.dtypes import result_dtype, wide


def replay_weights(
    contrast: Tensor,
    mask: Tensor,
    *,
    sharpness: float = 1.0,
    offset: float = 0.0,
    strength: float = 0.5,
    ramp: float = 1.0,
    normalize: bool = True,
) -> Tensor:
    """Weights of a response's tokens by their contrast, for its advantage: `advantages[:, None] * weights`.

        w~ = 1 + strength ramp (sigmoid(sharpness (D - offset)) - 1/2)
        w  = w~ / mean of w~ over the response's valid tokens

    Every `w~` is between 1 - strength ramp / 2 and 1 + strength ramp / 2, so that none changes an advantage's sign nor
    the side on which its ratio is clipped, and the mean weight of a response is 1. At `strength * ramp = 0` and for a
    response of one token they are exactly 1.

    Args:
        contrast: `[B, T]` float, nats, of `counterfactual_contrast`.
        mask: `[B, T]`, any dtype, nonzero = valid. What lies under mask 0 is not read and gets weight 0. NaN elsewhere
            makes the weights of its response NaN.
        sharpness: >= 0, the slope of the sigmoid.
        offset: nats, the contrast that gets weight `w~ = 1`.
        strength: >= 0, with `strength * ramp < 2`, so that weights stay positive.
        ramp: in [0, 1], of `smoothstep_ramp`; 1 for none.
        normalize: False gives `w~`, whose mean moves with the contrast.

    Returns:
        `[B, T]`, float32 (float64 for a float64 contrast), detached.

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it.

    Source: CoRT (counterfactual replay over tokens); no public code.

    Example:
        >>> import torch
        >>> from rlkernels.credit import replay_weights
        >>> w = replay_weights(torch.tensor([[1.6, 0.0, -0.1, 7.0]]), torch.tensor([[1, 1, 1, 0]]))
        >>> [round(x, 4) for x in w[0].tolist()]
        [1.1092, 0.9513, 0.9394, 0.0]
    """
    checks.require_tensor("mask", mask)
    checks.require_tokens("contrast", contrast, mask)
    checks.require_number("sharpness", sharpness, at_least=0.0)
    checks.require_number("offset", offset)
    checks.require_number("strength", strength, at_least=0.0)
    checks.require_number("ramp", ramp, at_least=0.0, at_most=1.0)
    scale = strength * ramp
    if not scale < 2:
        raise ValueError(f"strength: expected strength * ramp < 2, got {strength!r} * {ramp!r}")
    dtype = result_dtype(contrast)
    valid = mask != 0
    if scale * sharpness == 0:  # whatever the contrast holds
        return valid.to(dtype)
    contrast = wide(contrast.detach())
    # sigmoid(x) - 1/2, exact near 0
    centred = 0.5 * torch.tanh(0.5 * sharpness * (contrast - offset))
    weights = torch.where(valid, 1 + scale * centred, 0)
    if normalize:
        mean = weights.sum(-1, keepdim=True) / valid.sum(-1, keepdim=True).clamp(min=1)
        weights = torch.where(valid, weights / mean, 0)
    return weights.to(dtype)


def smoothstep_ramp(step: float, warmup: float, length: float) -> float:
    """How much of the weighting is on at a step: 0 up to `warmup`, then smoothly up to 1 over `length` steps.

        u = clip((step - warmup) / length, 0, 1)        ramp = 3 u^2 - 2 u^3

    Args:
        step: of the training.
        warmup: last step without weighting; negative to begin within the ramp.
        length: >= 0; 0 for a step function, which is 1 at every step after `warmup`.

    Returns:
        A number in [0, 1], for `replay_weights`.

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it.

    Source: CoRT (counterfactual replay over tokens); no public code.

    Example:
        >>> from rlkernels.credit import smoothstep_ramp
        >>> [smoothstep_ramp(step, warmup=10, length=100) for step in (10, 60, 110, 1000)]
        [0.0, 0.5, 1.0, 1.0]
    """
    checks.require_number("step", step)
    checks.require_number("warmup", warmup)
    checks.require_number("length", length, at_least=0.0)
    if step <= warmup:
        return 0.0
    if step >= warmup + length:
        return 1.0
    u = (step - warmup) / length
    return u * u * (3 - 2 * u)
