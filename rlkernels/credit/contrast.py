"""CoRT's contrast: how much likelier a context makes the tokens of a response than another one does."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rlkernels import backends, checks, reference
from rlkernels.dtypes import result_dtype, wide
from rlkernels.ops.indexed_logp import indexed_logp
from rlkernels.ops.rows import Rows
from rlkernels.stats import Number, check_targets, flat, linear_token_stats, scaling, stored_rows


def counterfactual_contrast(
    logits_with: Tensor | None,
    logits_without: Tensor,
    targets: Tensor,
    *,
    rows_with: Tensor | None = None,
    rows_without: Tensor | None = None,
    logp_with: Tensor | None = None,
    temperature: Number = 1.0,
    softcap: Number | None = None,
    logit_scale: Number = 1.0,
    ignore_index: int = -100,
) -> Tensor:
    """Log-probability of each target in one context less that in another: with a criterion, and without it.

        D = logp_with(target) - logp_without(target)

    Each logit of an aligned row is read once and none is copied. Both terms have the bits of `token_stats(...).logp`.
    No gradient: the policy is the frozen one that sampled the response.

    Several counterfactual contexts, one criterion removed at a time, go against one factual pass: as a leading
    dimension K of `rows_without` (of `logits_without`, where there are no rows), or in calls that share `logp_with`.

    Args:
        logits_with: `[..., V]`, float64, float32, bfloat16 or float16, any strides; None where `logp_with` is known.
        logits_without: `[..., V]`, likewise.
        targets: `[...]`, integers in `[0, V)` or `ignore_index`.
        rows_with: like `targets`, integers: which row of `logits_with`, its leading dimensions counted as one, scores
            each target; not read at ignored targets. None: `logits_with[i]` scores `targets[i]`. Prompts differ in
            length, so that the same response lies at different rows of its two contexts.
        rows_without: the same for `logits_without`; or `[K, ...]`.
        logp_with: like `targets`, the factual log-probabilities in nats, in place of `logits_with`: the `old_logp` of
            the batch, if the response was sampled in this context and at this temperature.
        temperature, softcap, logit_scale: as in `token_stats`, for both contexts.
        ignore_index: label of targets that give 0; their logits are not read.

    Returns:
        Like `targets`, or `[K, ...]`; float32 (float64 where a log-probability is), nats, detached.

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it. Labels, rows and temperatures on a GPU are
            checked only under `set_checks(True)`; unchecked, a bad one gives NaN in its place.

    Source: CoRT (counterfactual replay over tokens); no public code.

    Example:
        >>> import torch
        >>> from rlkernels.credit import counterfactual_contrast
        >>> with_rule = torch.tensor([[9.0, 9.0], [0.0, 0.0], [0.0, 1.0986123]])  # a longer prompt: rows 1 and 2
        >>> without = torch.zeros(2, 2)
        >>> D = counterfactual_contrast(
        ...     with_rule, without, torch.tensor([0, 1]), rows_with=torch.tensor([1, 2]))
        >>> [round(x, 6) for x in D.tolist()]
        [0.0, 0.405465]
    """

    def logp(argument: str, logits: Tensor, rows: Tensor | None) -> Tensor:
        stored = stored_rows(argument, logits)
        numbers = scaling(logits, targets, temperature, softcap, logit_scale)
        all_rows = Rows(stored, flat(targets), *numbers, ignore_index)
        index = None if rows is None else flat(rows)
        if backends.choose(logits.device) == "reference":
            checks.check_row_values(all_rows.targets, logits.shape[-1], ignore_index, *numbers)
            return reference.indexed_logp(all_rows, index).view(targets.shape)
        checks.refuse_transforms("counterfactual_contrast", logits)
        return indexed_logp(*all_rows, index).view(targets.shape)

    return _contrast(
        "logits", logp, logits_with, logits_without, targets, rows_with, rows_without, logp_with, ignore_index
    )


def linear_counterfactual_contrast(
    hidden_with: Tensor | None,
    hidden_without: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    rows_with: Tensor | None = None,
    rows_without: Tensor | None = None,
    logp_with: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: Number = 1.0,
    softcap: Number | None = None,
    logit_scale: Number = 1.0,
    ignore_index: int = -100,
    chunk_bytes: int | None = None,
) -> Tensor:
    """`counterfactual_contrast` of `hidden @ weight.T + bias`, in memory that `chunk_bytes` bounds.

        logits = hidden @ weight.T + bias;   everything else as in `counterfactual_contrast`

    Only the rows that score a target go through the GEMMs.

    Args:
        hidden_with: `[..., H]`, float64, float32, bfloat16 or float16; None where `logp_with` is known.
        hidden_without: `[..., H]`, likewise.
        weight: `[V, H]`, the hidden states' dtype (under autocast any float dtype).
        targets, rows_with, rows_without, logp_with: as in `counterfactual_contrast`, of rows of hidden states.
        bias, chunk_bytes: as in `linear_token_stats`.
        temperature, softcap, logit_scale, ignore_index: as in `counterfactual_contrast`.

    Returns, Raises, Source: as `counterfactual_contrast`.

    Example:
        >>> import torch
        >>> from rlkernels.credit import linear_counterfactual_contrast
        >>> weight = torch.tensor([[0.0], [1.0986123]])
        >>> with_rule, without = torch.tensor([[5.0], [1.0]]), torch.zeros(1, 1)
        >>> D = linear_counterfactual_contrast(
        ...     with_rule, without, weight, torch.tensor([1]), rows_with=torch.tensor([1]))
        >>> round(D.item(), 6)
        0.405465
    """

    def logp(argument: str, hidden: Tensor, rows: Tensor | None) -> Tensor:
        if hidden.ndim == 0 or weight.ndim != 2 or hidden.shape[-1] != weight.shape[1]:
            raise ValueError(
                f"{argument}: expected shape [..., H] for weight [V, H] {list(weight.shape)}, "
                f"got {checks.describe(hidden)}"
            )
        is_missing = None
        if rows is not None:
            hidden, is_missing = _take(hidden, rows, targets != ignore_index)
        result = linear_token_stats(
            hidden,
            weight.detach(),
            targets,
            bias=None if bias is None else bias.detach(),
            temperature=temperature,
            softcap=softcap,
            logit_scale=logit_scale,
            ignore_index=ignore_index,
            outputs=(),
            chunk_bytes=chunk_bytes,
        ).logp
        return result if is_missing is None else torch.where(is_missing, torch.nan, result)

    checks.require_tensor("weight", weight)
    return _contrast(
        "hidden", logp, hidden_with, hidden_without, targets, rows_with, rows_without, logp_with, ignore_index
    )


def _take(hidden: Tensor, rows: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """`[..., H]` at `rows`, and which of those that are used are not there."""
    stored = hidden.reshape(-1, hidden.shape[-1])
    is_stored = (rows >= 0) & (rows < stored.shape[0])
    index = torch.where(used & is_stored, rows, 0).to(torch.int64)
    return stored.index_select(0, flat(index)).view(*rows.shape, stored.shape[1]), used & ~is_stored


def _contrast(
    kind: str,
    logp_of: Callable[[str, Tensor, Tensor | None], Tensor],
    vectors_with: Tensor | None,
    vectors_without: Tensor,
    targets: Tensor,
    rows_with: Tensor | None,
    rows_without: Tensor | None,
    logp_with: Tensor | None,
    ignore_index: int,
) -> Tensor:
    """`logp_of(argument, vectors, rows)` is called once a context: logits or hidden states, checked but for dtypes."""
    checks.require_tensor(f"{kind}_without", vectors_without)
    check_targets(f"{kind}_without", vectors_without, targets, ignore_index)
    used = targets != ignore_index

    def logp(side: str, vectors: Tensor, rows: Tensor | None) -> Tensor:
        argument = f"{kind}_{side}"
        checks.require_tensor(argument, vectors)
        checks.require_same_device("targets", targets, **{argument: vectors})
        width = vectors_without.shape[-1:]
        if vectors.shape[-1:] != width:
            raise ValueError(
                f"{argument}: expected {kind}_without's last size {list(width)}, got {checks.describe(vectors)}"
            )
        if rows is None:
            checks.require_shape(argument, vectors, (*targets.shape, *width))
        else:
            checks.check_row_numbers(f"rows_{side}", rows, targets, used, math.prod(vectors.shape[:-1]))
        return logp_of(argument, vectors.detach(), rows)

    if logp_with is None:
        if vectors_with is None:
            raise ValueError(f"{kind}_with: expected a tensor where logp_with is None, got None")
        factual = logp("with", vectors_with, rows_with)
    else:
        for name, value in ((f"{kind}_with", vectors_with), ("rows_with", rows_with)):
            if value is not None:
                raise ValueError(f"{name}: expected None beside logp_with, got {checks.describe(value)}")
        checks.require_tensor("logp_with", logp_with)
        checks.require_dtype("logp_with", logp_with, checks.FLOAT_DTYPES)
        checks.require_shape("logp_with", logp_with, tuple(targets.shape))
        checks.require_same_device("targets", targets, logp_with=logp_with)
        factual = logp_with.detach()

    def difference(vectors: Tensor, rows: Tensor | None) -> Tensor:
        counterfactual = logp("without", vectors, rows)
        return torch.where(used, factual - counterfactual, 0)

    if rows_without is None:
        if vectors_without.ndim == targets.ndim + 2 and vectors_without.shape[0]:
            return torch.stack([difference(vectors, None) for vectors in vectors_without])
    else:
        checks.require_tensor("rows_without", rows_without)
        if rows_without.ndim == targets.ndim + 1 and rows_without.shape[0]:
            return torch.stack([difference(vectors_without, rows) for rows in rows_without])
    return difference(vectors_without, rows_without)


def contrast_by_span(contrast: Tensor, spans: Tensor, *, mask: Tensor | None = None, reduction: str = "mean") -> Tensor:
    """Mean or sum of the contrast over spans of each response: its sentences, or the places that a rule is about.

        sum_t D_t / #t          reduction="mean"        over the valid tokens t of the span
        sum_t D_t               reduction="sum"

    Args:
        contrast: `[B, T]` float, nats, of `counterfactual_contrast`.
        spans: `[B, S, 2]` integers: first token and the token after the last, in [0, T]. Spans may overlap; an empty
            one pads the rows of responses that have fewer.
        mask: `[B, T]`, any dtype, nonzero = valid; None: all tokens are. What lies under mask 0 is not read.
        reduction: `"mean"` or `"sum"`.

    Returns:
        `[B, S]`, float32 (float64 for a float64 contrast), nats, detached; 0 for a span without a valid token.

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it. Spans on a GPU are checked only under
            `set_checks(True)`.

    Source: CoRT (counterfactual replay over tokens); no public code.

    Example:
        >>> import torch
        >>> from rlkernels.credit import contrast_by_span
        >>> contrast = torch.tensor([[1.0, 2.0, 4.0, 0.0]])
        >>> contrast_by_span(contrast, torch.tensor([[[0, 2], [2, 3], [0, 0]]])).tolist()
        [[1.5, 4.0, 0.0]]
    """
    checks.require_tokens("contrast", contrast, mask)
    checks.require_tensor("spans", spans)
    checks.require_dtype("spans", spans, checks.INTEGER_DTYPES)
    responses, length = contrast.shape
    if spans.ndim != 3 or spans.shape[0] != responses or spans.shape[2] != 2:
        raise ValueError(f"spans: expected shape [{responses}, S, 2], got {checks.describe(spans)}")
    checks.require_same_device("contrast", contrast, spans=spans)
    checks.require_choice("reduction", reduction, ("mean", "sum"))
    begin, end = spans.unbind(-1)
    good = (begin >= 0) & (begin <= end) & (end <= length)
    checks.check_values("spans", spans, good, "0 <= first <= end <= {}", length)
    valid = torch.ones_like(contrast, dtype=torch.bool) if mask is None else mask != 0
    values = wide(contrast.detach())
    positions = torch.arange(length, device=contrast.device)
    result = values.new_zeros(spans.shape[:2])
    for i in range(spans.shape[1]):  # a [B, T] at a time
        inside = valid & (positions >= begin[:, i, None]) & (positions < end[:, i, None])
        total = torch.where(inside, values, 0).sum(-1)
        result[:, i] = total / inside.sum(-1).clamp(min=1) if reduction == "mean" else total
    return result.to(result_dtype(contrast))
