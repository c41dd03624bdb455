"""Per-token statistics of logits."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernels import backends, checks, reference
from rlkernels.ops.rows import Rows, RowStats, Wanted, compute_dtype
from rlkernels.ops.token_stats import token_stats as token_stats_op


class TokenStats(NamedTuple):
    """Statistics of each token's distribution, each of `targets`' shape; None where not asked for."""

    logp: Tensor
    entropy: Tensor | None
    lse: Tensor | None
    log_sum_sq_probs: Tensor | None
    mean_logits: Tensor | None
    is_top1: Tensor | None


OUTPUTS = Wanted._fields

Number = float | Tensor


def token_stats(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: Number = 1.0,
    softcap: Number | None = None,
    logit_scale: Number = 1.0,
    ignore_index: int = -100,
    outputs: Sequence[str] = ("entropy",),
) -> TokenStats:
    """Log-probability of each target, entropy and other statistics, in one sweep over the vocabulary.

        z       = softcap * tanh(logit_scale * logits / softcap) / temperature
        logp    = z[target] - logsumexp(z)          lse  = logsumexp(z)
        entropy = -sum_v p_v log p_v                log_sum_sq_probs = log sum_v p_v^2,    p = softmax(z)

    `logp`, `entropy` and `lse` are differentiable with respect to `logits`; backward needs one more sweep and
    no memory beyond the gradient. Neither `logits` nor anything returned is modified.

    Args:
        logits: `[..., V]`, float64, float32, bfloat16 or float16, any strides.
        targets: `[...]`, integers in `[0, V)` or `ignore_index`. `logits[i]` scores `targets[i]`.
        temperature: > 0; a number or 0-d tensor, `[B]` (one for each sequence of `[B, ...]`) or `targets`' shape.
        softcap: > 0, or None for none. A number or 0-d tensor.
        logit_scale: > 0. A number or 0-d tensor.
        ignore_index: label of rows that give 0 and a zero gradient; their logits are not read.
        outputs: any of `entropy`, `lse`, `log_sum_sq_probs`, `mean_logits` (mean of z) and `is_top1` (the target
            is the first maximum of z).

    Returns:
        `TokenStats`, float32 (float64 for float64 logits), nats.

    Raises:
        TypeError, ValueError: a wrong type, dtype, shape, device or value, naming the argument. Labels and
            temperatures on a GPU are checked only under `set_checks(True)`; unchecked, a bad one gives NaN in
            its row.

    Example:
        >>> import torch, rlkernels
        >>> logits = torch.tensor([[0.0, 1.0], [3.0, 3.0]])
        >>> stats = rlkernels.token_stats(logits, torch.tensor([1, -100]), temperature=0.5)
        >>> [round(x, 6) for x in stats.logp.tolist()]
        [-0.126928, 0.0]
    """
    for name in outputs:
        checks.require_choice("outputs", name, OUTPUTS)
    rows = make_rows(logits, targets, temperature, softcap, logit_scale, ignore_index)
    wanted = Wanted(*(name in outputs for name in OUTPUTS))
    stats = row_stats(rows, wanted)
    return TokenStats(
        stats.logp.view(targets.shape),
        *(
            getattr(stats, name).view(targets.shape) if want else None
            for name, want in zip(OUTPUTS, wanted, strict=True)
        ),
    )


def row_stats(rows: Rows, wanted: Wanted) -> RowStats:
    if backends.choose(rows.logits.device) == "reference":
        checks.check_row_values(rows.targets, rows.logits.shape[-1], rows.ignore_index, *rows[2:5])
        return reference.row_stats(rows)
    return RowStats(*token_stats_op(*rows, *wanted))


def make_rows(
    logits: Tensor,
    targets: Tensor,
    temperature: Number,
    softcap: Number | None,
    logit_scale: Number,
    ignore_index: int,
) -> Rows:
    """Checked arguments of a sweep, with logits as `[outer, inner, V]` without copying them."""
    checks.require_tensor("logits", logits)
    checks.require_tensor("targets", targets)
    checks.require_dtype("logits", logits, checks.FLOAT_DTYPES)
    checks.require_dtype("targets", targets, checks.INTEGER_DTYPES)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits: expected shape [..., V] with V >= 1, got {checks.describe(logits)}")
    checks.require_shape("targets", targets, tuple(logits.shape[:-1]))
    checks.require_same_device("logits", logits, targets=targets)
    dtype = compute_dtype(logits.dtype)

    def scalar(name: str, value: Number) -> Tensor:
        if isinstance(value, Tensor):
            checks.require_shape(name, value, ())
        return _as_values(name, value, logits.device, dtype).reshape(1)

    vocab = logits.shape[-1]
    if logits.ndim < 3:
        rows = logits.view(1, -1, vocab) if logits.ndim == 1 else logits.unsqueeze(0)
    else:
        rows = logits.flatten(0, -3) if logits.ndim > 3 else logits
    return Rows(
        rows,
        targets.reshape(-1).to(torch.int64).contiguous(),
        _row_temperature(temperature, targets, dtype),
        None if softcap is None else scalar("softcap", softcap),
        scalar("logit_scale", logit_scale),
        ignore_index,
    )


def _row_temperature(temperature: Number, targets: Tensor, dtype: torch.dtype) -> Tensor:
    values = _as_values("temperature", temperature, targets.device, dtype)
    if values.ndim == 0:
        return values.reshape(1)
    checks.require_shape("temperature", values, (), tuple(targets.shape[:1]), tuple(targets.shape))
    if values.ndim < targets.ndim:
        values = values.reshape(-1, *[1] * (targets.ndim - 1)).expand(targets.shape)
    return values.reshape(-1).contiguous()


def _as_values(name: str, value: Number, device: torch.device, dtype: torch.dtype) -> Tensor:
    if not isinstance(value, Tensor):
        if not isinstance(value, numbers.Real) and not isinstance(value, torch.SymFloat | torch.SymInt):
            raise TypeError(f"{name}: expected a number or a tensor, got {checks.describe(value)}")
        checks.require_number(name, value, above=0.0)
        return torch.full((), float(value), dtype=dtype, device=device)
    if value.requires_grad:
        raise ValueError(f"{name}: expected a tensor without gradient (none is computed), got one that requires it")
    if value.dtype not in (*checks.FLOAT_DTYPES, *checks.INTEGER_DTYPES):
        raise TypeError(f"{name}: expected a real dtype, got {checks.describe(value)}")
    if value.ndim > 0 and value.device != device:
        raise ValueError(f"{name}: expected on {device} like logits, got {checks.describe(value)}")
    return value.to(device=device, dtype=dtype)
