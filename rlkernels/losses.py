"""The policy losses: from logits or log-probabilities to a scalar with gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernels import backends, checks, schedules
from rlkernels.agreement import Facts, agree
from rlkernels.batch import IGNORE_INDEX, PolicyBatch
from rlkernels.metrics import Metrics
from rlkernels.objectives import Objective, PolicyTerms
from rlkernels.ops.gradient_in_forward import GradientInForward, Parts
from rlkernels.ops.linear_rows import LinearRows
from rlkernels.ops.objective_options import ObjectiveOptions
from rlkernels.ops.policy_sweep import PolicySweep
from rlkernels.ops.rows import Rows, Wanted, compute_dtype
from rlkernels.recipes import ObjectiveFunction, Recipe, resolve
from rlkernels.reductions import Normalizer, check_reduction, denominator
from rlkernels.segments import Segments
from rlkernels.stats import Number, linear_stats, make_chunk_bytes, make_linear_rows, make_rows, stats_of_rows
from rlkernels.token_loss import (
    PolicyLoss,
    entropy_reduction,
    fused_metrics,
    fused_options,
    objective_batch,
    token_loss,
    token_terms,
    with_entropy_normalizer,
)

_ENTROPY = Wanted(*(name == "entropy" for name in Wanted._fields))


def policy_loss(
    logits: Tensor,
    batch: PolicyBatch,
    objective: str | Objective | ObjectiveFunction = "grpo",
    *,
    reduction: str | None = None,
    normalizer: Normalizer | None = None,
    temperature: Number = 1.0,
    softcap: Number | None = None,
    logit_scale: Number = 1.0,
    vocab_start: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    cp_group: dist.ProcessGroup | None = None,
) -> PolicyLoss:
    """A policy loss from logits, without a second `[N, V]` tensor besides the gradient.

        logp, entropy = token_stats(logits, targets)
        L    = weight (policy_weight policy_term(logp, ...) + kl_coef kl)
        loss = reduce(L) - entropy_coef reduce(entropy)

    Args:
        logits: `[B, T, V]`, or packed `[N, V]` or `[1, N, V]`; any strides; float64, float32, bfloat16, float16.
        batch: everything else about the tokens. Masked tokens' logits are not read.
        objective: a recipe's name (`rlkernels.RECIPES`), an instance from `rlkernels.objectives`, or any
            callable `(logp, batch) -> per-token loss`, both in the batch's layout, which applies the batch's
            weights itself.
        reduction: `token_mean`, `seq_mean_token_mean`, `seq_mean_token_sum`, `seq_mean_token_sum_norm`,
            `token_sum` or `none`; None: the recipe's.
        normalizer: replaces the reduction's denominator (see `global_normalizer`); a number or 0-d tensor, >= 0. 0, the
            count of an empty batch, gives the loss 0 of one.
        temperature, softcap, logit_scale: as in `token_stats`; a `[B]` temperature goes by sequence, and so does
            `[B, 1]` of packed ones, where `[B]` is taken for one a token if B = N.
        vocab_start, tp_group: as in `token_stats`; the batch and the loss are the same on every rank.
        cp_group: process group over whose ranks every sequence's tokens are spread: each has all B sequences, of each
            its own tokens (as many as it has; none is fine too), and what is given by sequence is the same on every
            rank (packed as `[B, 1]`: a rank may have B tokens). The loss is the whole batch's, the gradient that of a
            rank's own tokens, so parameters' gradients are to be added over the group; metrics are those of the rank's
            tokens (`Metrics.all_reduce(cp_group)`). An objective that is a callable sees the rank's tokens alone; those
            that need the whole batch (`clip_cov`, `kl_cov`) are refused.

    Returns:
        `PolicyLoss(loss, metrics, logp, entropy)`.

    Raises:
        TypeError, ValueError: a wrong type, dtype, shape, device or value, naming the argument; with a group on all of
            its ranks, whichever has it.
        RuntimeError: the selected backend cannot run on this device; in backward, a gradient to be differentiated again
            (`create_graph=True`), but on the reference backend.

    Example:
        >>> import torch, rlkernels
        >>> logits = torch.zeros(2, 3, 11, requires_grad=True)
        >>> targets = torch.tensor([[4, 1, 10], [2, 2, -100]])
        >>> batch = rlkernels.PolicyBatch(targets, advantages=torch.tensor([1.0, -1.0]))
        >>> out = rlkernels.policy_loss(logits, batch, "dapo", temperature=0.7)
        >>> out.loss.backward()
        >>> round(out.loss.item(), 6), round(out.metrics["entropy"].item(), 6)
        (-0.2, 2.397895)
    """

    def check(fewest_columns: int) -> tuple[Recipe, Segments, Rows]:
        recipe = _checked_recipe(batch, objective, reduction, normalizer, cp_group)
        segments, targets, temperatures = _rows_of_batch(batch, temperature, cp_group)
        rows = make_rows(logits, targets, temperatures, softcap, logit_scale, IGNORE_INDEX, fewest_columns)
        return recipe, segments, rows

    def facts(recipe: Recipe, segments: Segments, rows: Rows) -> Facts:
        return Facts(logits.device, _alike(recipe, segments, logits.dtype, logits.requires_grad), rows)

    groups = {"tp_group": tp_group, "cp_group": cp_group}
    (recipe, segments, rows), shard = agree(check, facts, groups, vocab_start)
    # what a row's gradient depends on is not all here
    is_spread = shard is not None or cp_group is not None
    options = None if is_spread else _single_sweep_options(rows, recipe)
    if options is not None:
        fused = objective_batch(batch, segments, recipe, compute_dtype(logits.dtype))
        checks.refuse_transforms("policy_loss", rows.logits)
        loss, sums, logp, entropy = PolicySweep.apply(rows.logits, rows, options, fused)
        metrics = fused_metrics(sums, batch, options, has_entropy=True)
        return PolicyLoss(loss, metrics, logp.view(segments.shape), entropy.view(segments.shape))
    stats = stats_of_rows(rows, shard, _ENTROPY, segments.shape)
    return token_loss(stats.logp, stats.entropy, batch, segments, recipe)


def _single_sweep_options(rows: Rows, recipe: Recipe) -> ObjectiveOptions | None:
    """Of an objective whose gradient can be written as soon as a row's statistics are known; else None."""
    options = fused_options(rows.logits.device, recipe, "policy_sweep")
    wants_gradient = torch.is_grad_enabled() and rows.logits.requires_grad
    if options is None or not options.is_token_level or not wants_gradient or torch.compiler.is_compiling():
        return None
    # most of a float16 gradient would vanish before a gradient scaler's factor arrives
    return None if rows.logits.dtype == torch.float16 else options


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    batch: PolicyBatch,
    objective: str | Objective | ObjectiveFunction = "grpo",
    *,
    bias: Tensor | None = None,
    reduction: str | None = None,
    normalizer: Normalizer | None = None,
    temperature: Number = 1.0,
    softcap: Number | None = None,
    logit_scale: Number = 1.0,
    chunk_bytes: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    cp_group: dist.ProcessGroup | None = None,
) -> PolicyLoss:
    """`policy_loss` from hidden states and the head's weight: no `[N, V]` tensor, neither logits nor gradient.

        logits = hidden @ weight.T + bias;   everything else as in `policy_loss`

    Args:
        hidden: `[B, T, H]`, or packed `[N, H]` or `[1, N, H]`; float64, float32, bfloat16, float16.
        weight, bias, chunk_bytes, tp_group: as in `linear_token_stats`; the batch and the loss are the same on every
            rank.
        batch, objective, reduction, normalizer, temperature, softcap, logit_scale, cp_group: as in `policy_loss`.

    Returns, Raises: as `policy_loss`.

    Example:
        >>> import torch, rlkernels
        >>> hidden, weight = torch.zeros(2, 3, 4), torch.zeros(11, 4, requires_grad=True)
        >>> batch = rlkernels.PolicyBatch(torch.tensor([[4, 1, 10], [2, 2, -100]]), torch.tensor([1.0, -1.0]))
        >>> out = rlkernels.linear_policy_loss(hidden, weight, batch, "dapo")
        >>> out.loss.backward()
        >>> round(out.loss.item(), 6), weight.grad.shape
        (-0.2, torch.Size([11, 4]))
    """

    def check(fewest_columns: int) -> tuple[Recipe, Segments, LinearRows, int]:
        recipe = _checked_recipe(batch, objective, reduction, normalizer, cp_group)
        segments, targets, temperatures = _rows_of_batch(batch, temperature, cp_group)
        rows = make_linear_rows(
            hidden, weight, bias, targets, temperatures, softcap, logit_scale, IGNORE_INDEX, fewest_columns
        )
        return recipe, segments, rows, make_chunk_bytes(chunk_bytes)

    def facts(recipe: Recipe, segments: Segments, rows: LinearRows, limit: int) -> Facts:
        wants_gradient = hidden.requires_grad or rows.what_to_keep().logits
        alike = _alike(recipe, segments, rows.hidden.dtype, wants_gradient)
        return Facts(hidden.device, alike, rows, batch.rows)

    groups = {"tp_group": tp_group, "cp_group": cp_group}
    (recipe, segments, rows, limit), shard = agree(check, facts, groups)
    is_spread = shard is not None or cp_group is not None
    parts = [] if is_spread else _parts_with_gradient_in_forward(rows, batch, recipe, limit)
    if parts:
        return _loss_in_parts(rows, batch, segments, parts, recipe, limit)
    stats = linear_stats(rows, shard, _ENTROPY, limit, segments.shape, batch.rows)
    return token_loss(stats.logp, stats.entropy, batch, segments, recipe)


def _parts_with_gradient_in_forward(
    rows: LinearRows, batch: PolicyBatch, recipe: Recipe, chunk_bytes: int
) -> list[PolicyBatch]:
    """See `rlkernels.schedules`; none where gradients are not formed in forward."""
    is_known = isinstance(recipe.objective, Objective) and recipe.objective.by_sequence and recipe.reduction != "none"
    # packed borders and `rows` would have to be read by the host
    is_padded = batch.cu_seqlens is None and batch.rows is None
    is_eager = not torch.compiler.is_compiling() and backends.choose(rows.hidden.device) != "reference"
    if not (is_known and is_padded and is_eager) or rows.hidden.dtype == torch.float16:
        return []
    if not rows.what_to_keep().logits:
        return []
    assert batch.targets is not None
    count = schedules.parts(rows.problem(chunk_bytes), batch.targets.shape[-1], rows.hidden.device)
    return batch.split(count) if count else []


def _loss_in_parts(
    rows: LinearRows,
    batch: PolicyBatch,
    segments: Segments,
    parts: list[PolicyBatch],
    recipe: Recipe,
    chunk_bytes: int,
) -> PolicyLoss:
    """The parts' losses under the whole batch's denominators add up to the batch's."""
    assert batch.mask is not None and isinstance(recipe.objective, Objective)
    mask = batch.mask.reshape(-1)
    if recipe.normalizer is None:
        recipe = recipe._replace(normalizer=denominator(mask, segments, recipe.reduction))
    if recipe.entropy_normalizer is None:
        recipe = recipe._replace(entropy_normalizer=denominator(mask, segments, entropy_reduction(recipe)))
    metrics = []

    def loss_of(number: int, logp: Tensor, entropy: Tensor) -> Tensor:
        part = parts[number]
        assert part.targets is not None
        shape = tuple(part.targets.shape)
        out = token_loss(logp.view(shape), entropy.view(shape), part, Segments(shape, None), recipe)
        metrics.append(out.metrics)
        return out.loss

    width = segments.tokens // max(1, segments.count) if len(segments.shape) == 2 else 1
    spans = [slice(part.span.start * width, part.span.stop * width) for part in parts]
    head_bytes = 4 * rows.weight.numel()
    plan = Parts(spans, loss_of, chunk_bytes - head_bytes)
    checks.refuse_transforms("linear_policy_loss", rows.hidden, rows.weight, rows.bias)
    loss, logp, entropy = GradientInForward.apply(rows.hidden, rows.weight, rows.bias, rows, plan)
    return PolicyLoss(loss, Metrics.merge(metrics), logp.view(segments.shape), entropy.view(segments.shape))


def logp_policy_loss(
    logp: Tensor,
    batch: PolicyBatch,
    objective: str | Objective | ObjectiveFunction = "grpo",
    *,
    entropy: Tensor | None = None,
    reduction: str | None = None,
    normalizer: Normalizer | None = None,
    cp_group: dist.ProcessGroup | None = None,
) -> PolicyLoss:
    """`policy_loss` from log-probabilities that exist already.

        L    = weight (policy_weight policy_term(logp, ...) + kl_coef kl)
        loss = reduce(L) - entropy_coef reduce(entropy)

    Args:
        logp: `[B, T]`, or packed `[N]` or `[1, N]`, any float dtype: log-probability of each target, nats; what
            gradients reach.
        batch: as in `policy_loss`; its `targets` may be None (then nothing but `mask` masks).
        entropy: `logp`'s shape, any float dtype, nats; needed where the objective has an entropy bonus, else only
            reported.
        objective, reduction, normalizer, cp_group: as in `policy_loss`.

    Returns, Raises: as `policy_loss`.

    Example:
        >>> import torch, rlkernels
        >>> logp = torch.tensor([[-1.0, -2.0]], requires_grad=True)
        >>> batch = rlkernels.PolicyBatch(None, torch.tensor([1.0]), old_logp=torch.tensor([[-1.0, -2.5]]))
        >>> round(rlkernels.logp_policy_loss(logp, batch, "grpo").loss.item(), 6)  # -(1 + 1.2) / 2
        -1.1
    """

    def check(fewest_columns: int) -> tuple[Recipe, Segments]:
        recipe = _checked_recipe(batch, objective, reduction, normalizer, cp_group)
        checks.require_tensor("logp", logp)
        checks.require_dtype("logp", logp, checks.FLOAT_DTYPES)
        like = batch.targets if batch.targets is not None else batch.mask
        if like is not None:
            checks.require_shape("logp", logp, tuple(like.shape))
        segments = batch.check_against(tuple(logp.shape), logp.device).across(cp_group)
        if entropy is not None:
            checks.require_tensor("entropy", entropy)
            checks.require_dtype("entropy", entropy, checks.FLOAT_DTYPES)
            checks.require_shape("entropy", entropy, tuple(logp.shape))
            checks.require_same_device("logp", logp, entropy=entropy)
        elif isinstance(recipe.objective, Objective) and recipe.objective.entropy_coef != 0:
            raise ValueError(f"entropy: expected with entropy_coef={recipe.objective.entropy_coef}, got None")
        return recipe, segments

    def facts(recipe: Recipe, segments: Segments) -> Facts:
        return Facts(logp.device, _alike(recipe, segments, logp.dtype, logp.requires_grad))

    (recipe, segments), _ = agree(check, facts, {"cp_group": cp_group})
    return token_loss(logp, entropy, batch, segments, recipe)


def logp_policy_terms(
    logp: Tensor, batch: PolicyBatch, objective: str | Objective, *, cp_group: dist.ProcessGroup | None = None
) -> PolicyTerms:
    """The policy term of every token, for trainers that reduce it, and where it is clipped, by themselves.

        policy_term(logp, ...);   no weight, KL term, entropy bonus or reduction

    Args:
        logp, batch, objective, cp_group: as in `logp_policy_loss`; the objective is no callable.

    Returns:
        `PolicyTerms(loss, ratio, clipped_low, clipped_high)`, `[N]`, the tokens in order; only the first is for
        gradients.

    Raises: as `logp_policy_loss`.

    Example:
        >>> import torch, rlkernels
        >>> from rlkernels.losses import logp_policy_terms
        >>> batch = rlkernels.PolicyBatch(None, torch.tensor([1.0]), old_logp=torch.tensor([[-1.0, -2.5]]))
        >>> terms = logp_policy_terms(torch.tensor([[-1.0, -2.0]]), batch, "grpo")
        >>> terms.loss.tolist(), terms.clipped_high.tolist()
        ([-1.0, -1.2000000476837158], [False, True])
    """

    def check(fewest_columns: int) -> tuple[Recipe, Segments, Objective]:
        recipe = _checked_recipe(batch, objective, "none", None, cp_group)
        if not isinstance(recipe.objective, Objective):
            raise TypeError(f"objective: expected a recipe's name or an objective, got {checks.describe(objective)}")
        checks.require_tensor("logp", logp)
        checks.require_dtype("logp", logp, checks.FLOAT_DTYPES)
        segments = batch.check_against(tuple(logp.shape), logp.device).across(cp_group)
        return recipe, segments, recipe.objective

    def facts(recipe: Recipe, segments: Segments, known: Objective) -> Facts:
        return Facts(logp.device, _alike(recipe, segments, logp.dtype, logp.requires_grad))

    (_, segments, known), _ = agree(check, facts, {"cp_group": cp_group})
    return token_terms(logp, batch, segments, known)


def _checked_recipe(
    batch: PolicyBatch,
    objective: str | Objective | ObjectiveFunction,
    reduction: str | None,
    normalizer: Normalizer | None,
    cp_group: dist.ProcessGroup | None = None,
) -> Recipe:
    """The recipe with the caller's reduction and normalizer, checked before anything is computed."""
    if not isinstance(batch, PolicyBatch):
        raise TypeError(f"batch: expected a PolicyBatch, got {checks.describe(batch)}")
    recipe = resolve(objective, reduction)
    if normalizer is not None:
        recipe = recipe._replace(normalizer=normalizer)
    check_reduction(recipe.reduction, recipe.normalizer)
    if recipe.needs is not None and getattr(batch, recipe.needs) is None:
        raise ValueError(f"{recipe.needs}: expected in the batch for objective {objective!r}, got None")
    if isinstance(recipe.objective, Objective):
        if cp_group is not None and cp_group.size() > 1 and not recipe.objective.by_sequence:
            name = type(recipe.objective).__name__
            raise ValueError(f"cp_group: expected None with {name}, which needs the whole batch, got a group")
        recipe.objective.check_batch(batch)
        if recipe.objective.entropy_coef != 0:
            recipe = with_entropy_normalizer(recipe)
    return recipe


def _alike(recipe: Recipe, segments: Segments, dtype: torch.dtype, requires_grad: bool) -> dict[str, Any]:
    """What of a loss decides which sums over ranks it takes, and of how many numbers."""
    alike = {
        "objective": recipe.objective.kind() if isinstance(recipe.objective, Objective) else "callable",
        "reduction": recipe.reduction,
        "normalizer": "no normalizer" if recipe.normalizer is None else "a normalizer",
    }
    if segments.group is None:
        return alike
    return alike | {
        "sequences": segments.count,
        "dtype of log-probabilities": compute_dtype(dtype),
        "requires_grad of log-probabilities": torch.is_grad_enabled() and requires_grad,
    }


def _rows_of_batch(
    batch: PolicyBatch, temperature: Number, cp_group: dist.ProcessGroup | None
) -> tuple[Segments, Tensor, Number]:
    """The batch's sequences, its targets with masked ones ignored, and a temperature that fits the targets."""
    if batch.targets is None or batch.mask is None:
        raise ValueError("batch: expected targets, got None")
    segments = batch.check_against(tuple(batch.targets.shape), batch.targets.device).across(cp_group)
    if isinstance(temperature, Tensor) and batch.cu_seqlens is not None and temperature.ndim > 0:
        by_token, by_sequence = (segments.shape, (segments.tokens,)), ((segments.count,), (segments.count, 1))
        checks.require_shape("temperature", temperature, *by_token, *by_sequence)
        if tuple(temperature.shape) not in by_token:
            temperature = segments.expand(temperature.reshape(-1))
        temperature = temperature.reshape(segments.shape)
    return segments, torch.where(batch.mask, batch.targets, IGNORE_INDEX), temperature
