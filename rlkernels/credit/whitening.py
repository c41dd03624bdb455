"""Values over a whole batch brought to mean 0 and variance 1."""

from __future__ import annotations

from torch import Tensor

from rlkernels import checks
from rlkernels.credit.groups import Groups
from rlkernels.dtypes import result_dtype, wide


def whiten(x: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Advantages of all trained tokens of a batch, centred and scaled by their standard deviation.

        y = (x - mean) / sqrt(var + eps)            over the unmasked entries; the sample's variance

    Exactly 0 where x is the same everywhere or only one entry is unmasked. Masked entries give 0 and are not read;
    an unmasked NaN makes every unmasked entry NaN. No gradient.

    Args:
        x: any shape, float or integer.
        mask: x's shape, any dtype, nonzero = counts.
        eps: > 0, inside the root.

    Returns:
        x's shape, float32 (float64 for float64 x).

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it.

    Source: verl's `masked_whiten`, which gives masked entries -mean / std.

    Example:
        >>> import torch
        >>> from rlkernels.credit import whiten
        >>> whiten(torch.tensor([1.0, 3.0, 7.0]), torch.tensor([1, 1, 0])).tolist()
        [-0.7071067690849304, 0.7071067690849304, 0.0]
    """
    checks.require_tensor("x", x)
    checks.require_like("x", x, mask=mask)
    checks.require_number("eps", eps, above=0.0)
    values, counts = wide(x.detach()).flatten(), (mask != 0).flatten()
    everything = Groups(max(1, values.numel()), values.numel(), x.device)
    centred, count = everything.centre(values, counts)
    variance = everything.sum(centred * centred) / (count - 1).clamp(min=1)
    return (centred / (variance + eps).sqrt()).reshape(x.shape).to(result_dtype(x))
