"""Per-token statistics of logits, or of the logits that hidden states and a head would give."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernels import backends, checks, reference
from rlkernels.agreement import Facts, agree
from rlkernels.distributed import GatheredColumns, SharedByShards
from rlkernels.ops.linear_rows import LinearRows
from rlkernels.ops.linear_token_stats import linear_token_stats as linear_token_stats_op
from rlkernels.ops.rows import Rows, RowStats, Wanted, check_values, compute_dtype
from rlkernels.ops.token_stats import token_stats as token_stats_op
from rlkernels.ops.vocab_shards import VocabShard
from rlkernels.schedules import DEFAULT_CHUNK_BYTES


class TokenStats(NamedTuple):
    """Statistics of each token's distribution, each of `targets`' shape; None where not asked for.

    Attributes:
        logp: log-probability of the target, nats.
        entropy: nats.
        lse: log of the sum of e^z.
        log_sum_sq_probs: log of the sum of squared probabilities.
        mean_logits: mean of z over the vocabulary.
        is_top1: bool: the target is the first maximum of z.
    """

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
    vocab_start: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
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
        tp_group: process group over whose ranks the vocabulary is spread: `logits` are this rank's columns, as many as
            it has (of a padded shard pass those that exist; none is fine too), all else is the same on every rank, and
            so is what is returned. Every rank's gradient is that of its own columns. Labels count from the vocabulary's
            first column.
        vocab_start: which column of the vocabulary is this rank's first; None: the shards lie in the order of ranks.

    Returns:
        `TokenStats`, float32 (float64 for float64 logits), nats.

    Raises:
        TypeError, ValueError: a wrong type, dtype, shape, device or value, naming the argument. Labels and
            temperatures on a GPU are checked only under `set_checks(True)`; unchecked, a bad one gives NaN in
            its row. With `tp_group` on all of its ranks, whichever has it.
        RuntimeError: the selected backend cannot run on this device; in backward, a gradient to be differentiated again
            (`create_graph=True`), but on the reference backend.

    Example:
        >>> import torch, rlkernels
        >>> logits = torch.tensor([[0.0, 1.0], [3.0, 3.0]])
        >>> stats = rlkernels.token_stats(logits, torch.tensor([1, -100]), temperature=0.5)
        >>> [round(x, 6) for x in stats.logp.tolist()]
        [-0.126928, 0.0]
    """

    def check(fewest_columns: int) -> tuple[Rows, Wanted]:
        rows = make_rows(logits, targets, temperature, softcap, logit_scale, ignore_index, fewest_columns)
        return rows, _wanted(outputs)

    def facts(rows: Rows, wanted: Wanted) -> Facts:
        return Facts(logits.device, {}, rows)

    (rows, wanted), shard = agree(check, facts, {"tp_group": tp_group}, vocab_start)
    return stats_of_rows(rows, shard, wanted, tuple(targets.shape))


def stats_of_rows(rows: Rows, shard: VocabShard | None, wanted: Wanted, shape: tuple[int, ...]) -> TokenStats:
    """`token_stats` of checked arguments."""
    return _token_stats(_row_stats(rows, shard, wanted), wanted, shape)


def linear_token_stats(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: Number = 1.0,
    softcap: Number | None = None,
    logit_scale: Number = 1.0,
    ignore_index: int = -100,
    outputs: Sequence[str] = ("entropy",),
    chunk_bytes: int | None = None,
    rows: Tensor | None = None,
    tp_group: dist.ProcessGroup | None = None,
) -> TokenStats:
    """`token_stats` of `hidden @ weight.T + bias`, in memory that `chunk_bytes` bounds.

        logits = hidden @ weight.T + bias;   everything else as in `token_stats`

    The logits are made a tile at a time and reduced; as many as `chunk_bytes` allows stay until backward, which makes
    the others again. Gradients reach `hidden`, `weight` and `bias`, those of them that require one, each in its own
    dtype. With a frozen head (`weight.requires_grad=False`, LoRA) forward keeps `dlogp / dhidden` instead, and backward
    needs no logits. Ignored rows, and in backward rows without a gradient, are left out of the GEMMs.

    Args:
        hidden: `[..., H]`, float64, float32, bfloat16 or float16.
        weight: `[V, H]`, `hidden`'s dtype (under autocast any float dtype); `[H, V].t()` is fine. With LoRA on the
            head pass the effective weight.
        targets: `[...]`, integers in `[0, V)` or `ignore_index`. `hidden[i]` predicts `targets[i]`.
        bias: `[V]`, `weight`'s dtype, or None.
        temperature, softcap, logit_scale, ignore_index, outputs: as in `token_stats`.
        chunk_bytes: bound of the logits that exist at a time: a tile at work (at least 256 columns of
            all rows) and, where the head is trained, those kept until backward. None: 512 MiB. 32 MiB keeps none,
            for a third more time.
        rows: `[M]` integers, rising: the only ones of the N flat positions to compute, or None for all; the others give
            0 if ignored, else NaN. For GPUs, where the host does not know which rows are ignored and projects all.
        tp_group: process group over whose ranks the vocabulary is spread, in the order of ranks: `weight` and `bias`
            are this rank's rows of the head, as many as it has (of a padded head pass those that exist; none is fine
            too); all else is the same on every rank, and so is what is returned. `hidden`'s gradient is whole on every
            rank: the ranks' parts are summed in it, so nothing around this call may sum them again.

    Returns, Raises: as `token_stats`.

    Example:
        >>> import torch, rlkernels
        >>> hidden, weight = torch.zeros(2, 4), torch.zeros(3, 4)
        >>> stats = rlkernels.linear_token_stats(
        ...     hidden, weight, torch.tensor([1, -100]), bias=torch.tensor([0.0, 1.0986123, 0.0]))
        >>> [round(x, 6) for x in stats.logp.tolist()]
        [-0.510826, 0.0]
    """

    def check(fewest_columns: int) -> tuple[LinearRows, Wanted, int]:
        everything = make_linear_rows(
            hidden, weight, bias, targets, temperature, softcap, logit_scale, ignore_index, fewest_columns
        )
        if rows is not None:
            checks.check_indices("rows", rows, targets.numel(), targets.device)
        return everything, _wanted(outputs), make_chunk_bytes(chunk_bytes)

    def facts(everything: LinearRows, wanted: Wanted, limit: int) -> Facts:
        return Facts(hidden.device, {}, everything, rows)

    (everything, wanted, limit), shard = agree(check, facts, {"tp_group": tp_group})
    return linear_stats(everything, shard, wanted, limit, tuple(targets.shape), rows)


def make_chunk_bytes(chunk_bytes: int | None) -> int:
    checks.require_number("chunk_bytes", DEFAULT_CHUNK_BYTES if chunk_bytes is None else chunk_bytes, above=0)
    return DEFAULT_CHUNK_BYTES if chunk_bytes is None else min(int(chunk_bytes), 2**62)


def linear_stats(
    everything: LinearRows,
    shard: VocabShard | None,
    wanted: Wanted,
    chunk_bytes: int,
    shape: tuple[int, ...],
    rows: Tensor | None,
) -> TokenStats:
    """`linear_token_stats` of checked arguments."""
    if rows is None:
        return _token_stats(_linear_row_stats(everything, shard, wanted, chunk_bytes), wanted, shape)
    index = rows.to(torch.int64)
    selected = _linear_row_stats(everything.take(index), shard, wanted, chunk_bytes)
    return _token_stats(_put_back(selected, index, everything.is_labelled()), wanted, shape)


def _put_back(selected: RowStats, index: Tensor, is_labelled: Tensor) -> RowStats:
    """Statistics of some rows among all."""

    def whole(column: Tensor) -> Tensor:
        if column.numel() != index.numel():
            return column
        missing = torch.where(is_labelled, torch.nan, 0).to(column.dtype)
        return missing.index_copy(0, index, column)

    return RowStats(*map(whole, selected))


def _wanted(outputs: Sequence[str]) -> Wanted:
    if isinstance(outputs, str) or not isinstance(outputs, Sequence):
        raise TypeError(f"outputs: expected a sequence of names, got {checks.describe(outputs)}")
    for name in outputs:
        checks.require_choice("outputs", name, OUTPUTS)
    return Wanted(*(name in outputs for name in OUTPUTS))


def _token_stats(stats: RowStats, wanted: Wanted, shape: tuple[int, ...]) -> TokenStats:
    columns = zip(OUTPUTS, wanted, strict=True)
    return TokenStats(
        stats.logp.view(shape), *(getattr(stats, name).view(shape) if want else None for name, want in columns)
    )


def _linear_row_stats(rows: LinearRows, shard: VocabShard | None, wanted: Wanted, chunk_bytes: int) -> RowStats:
    if backends.choose(rows.hidden.device) == "reference":
        if shard is None:
            check_values(rows, rows.columns)
            return reference.linear_row_stats(rows)
        logits = reference.linear_logits(rows._replace(hidden=SharedByShards.apply(rows.hidden, shard)))
        return reference.row_stats(rows.with_logits(GatheredColumns.apply(logits, shard)))
    checks.refuse_transforms("linear_token_stats", rows.hidden, rows.weight, rows.bias)
    arguments = (*rows, *wanted, *rows.what_to_keep(), chunk_bytes)
    columns = linear_token_stats_op(*arguments, *(shard or ()))
    return RowStats(*columns[: len(RowStats._fields)])


def _row_stats(rows: Rows, shard: VocabShard | None, wanted: Wanted) -> RowStats:
    if backends.choose(rows.logits.device) == "reference":
        if shard is None:
            check_values(rows, rows.columns)
        else:
            rows = rows._replace(logits=GatheredColumns.apply(rows.logits, shard))
        return reference.row_stats(rows)
    checks.refuse_transforms("token_stats", rows.logits)
    return RowStats(*token_stats_op(*rows, *wanted, *(shard or ())))


def make_rows(
    logits: Tensor,
    targets: Tensor,
    temperature: Number,
    softcap: Number | None,
    logit_scale: Number,
    ignore_index: int,
    fewest_columns: int = 1,
) -> Rows:
    """Checked arguments of a sweep over all rows."""
    stored = stored_rows("logits", logits, fewest_columns)
    check_targets("logits", logits, targets, ignore_index)
    checks.require_shape("targets", targets, tuple(logits.shape[:-1]))
    return Rows(stored, flat(targets), *scaling(logits, targets, temperature, softcap, logit_scale), ignore_index)


def stored_rows(name: str, logits: Tensor, fewest_columns: int = 1) -> Tensor:
    """Checked logits as `[outer, inner, V]`, without copying them."""
    checks.require_tensor(name, logits)
    checks.require_strided(name, logits)
    checks.require_dtype(name, logits, checks.FLOAT_DTYPES)
    if logits.ndim == 0 or logits.shape[-1] < fewest_columns:
        raise ValueError(f"{name}: expected shape [..., V] with V >= {fewest_columns}, got {checks.describe(logits)}")
    if logits.ndim < 3:
        return logits.view(1, 1, logits.shape[-1]) if logits.ndim == 1 else logits.unsqueeze(0)
    return logits.flatten(0, -3) if logits.ndim > 3 else logits


def make_linear_rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Number,
    softcap: Number | None,
    logit_scale: Number,
    ignore_index: int,
    fewest_columns: int = 1,
) -> LinearRows:
    """Checked arguments of the linear path, with hidden as `[N, H]`, cast as autocast would."""
    tensors = {"hidden": hidden, "weight": weight}
    if bias is not None:
        tensors["bias"] = bias
    for name, tensor in tensors.items():
        checks.require_tensor(name, tensor)
        checks.require_strided(name, tensor)
        checks.require_dtype(name, tensor, checks.FLOAT_DTYPES)
    if hidden.ndim == 0 or hidden.shape[-1] == 0:
        raise ValueError(f"hidden: expected shape [..., H] with H >= 1, got {checks.describe(hidden)}")
    if weight.ndim != 2 or weight.shape[0] < fewest_columns or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight: expected shape [V, H] with H = {hidden.shape[-1]}, the last size of hidden "
            f"{list(hidden.shape)}, got {checks.describe(weight)}"
        )
    checks.require_same_device("hidden", hidden, weight=weight, bias=bias)
    if bias is not None:
        checks.require_shape("bias", bias, (weight.shape[0],))
        checks.require_dtype("bias", bias, (weight.dtype,))
    check_targets("hidden", hidden, targets, ignore_index)
    checks.require_shape("targets", targets, tuple(hidden.shape[:-1]))
    device = hidden.device.type
    is_autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if is_autocast and torch.float64 not in (hidden.dtype, weight.dtype):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    elif weight.dtype != hidden.dtype:
        raise TypeError(f"weight: expected {hidden.dtype} like hidden outside autocast, got {checks.describe(weight)}")
    numbers = scaling(hidden, targets, temperature, softcap, logit_scale)
    return LinearRows(hidden.reshape(-1, hidden.shape[-1]), weight, bias, flat(targets), *numbers, ignore_index)


def check_targets(name: str, rows: Tensor, targets: Tensor, ignore_index: int) -> None:
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, (int, torch.SymInt)):
        raise TypeError(f"ignore_index: expected an integer, got {checks.describe(ignore_index)}")
    if not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"ignore_index: expected a 64-bit integer, got {ignore_index}")
    checks.require_tensor("targets", targets)
    checks.require_dtype("targets", targets, checks.INTEGER_DTYPES)
    checks.require_same_device(name, rows, targets=targets)


def flat(targets: Tensor) -> Tensor:
    return targets.reshape(-1).to(torch.int64).contiguous()


def scaling(
    rows: Tensor, targets: Tensor, temperature: Number, softcap: Number | None, logit_scale: Number
) -> tuple[Tensor, Tensor | None, Tensor]:
    dtype = compute_dtype(rows.dtype)

    def scalar(name: str, value: Number) -> Tensor:
        values = _as_values(name, value, rows.device, dtype)
        checks.require_shape(name, values, ())
        return values.reshape(1)

    cap = None if softcap is None else scalar("softcap", softcap)
    return _row_temperature(temperature, targets, dtype), cap, scalar("logit_scale", logit_scale)


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
        if not isinstance(value, numbers.Real) and not isinstance(value, (torch.SymFloat, torch.SymInt)):
            raise TypeError(f"{name}: expected a number or a tensor, got {checks.describe(value)}")
        largest = torch.finfo(dtype).max
        checks.require_number(name, value, above=0.0, at_most=largest)
        return torch.full((), float(value), dtype=dtype, device=device)
    checks.require_tensor(name, value)
    checks.require_no_gradient(name, value)
    if value.dtype not in (*checks.FLOAT_DTYPES, *checks.INTEGER_DTYPES):
        raise TypeError(f"{name}: expected a real dtype, got {checks.describe(value)}")
    # a 0-d tensor on the CPU is a number, as everywhere in PyTorch
    if value.device != device and not (value.ndim == 0 and value.device.type == "cpu"):
        raise ValueError(f"{name}: expected on {device} like logits, got {checks.describe(value)}")
    return value.to(device=device, dtype=dtype)
