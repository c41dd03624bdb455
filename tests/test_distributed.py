"""Vocabulary shards, sequences across ranks and data parallel: gloo processes against one process.

The processes are started once and run every case, those of `rank_mistakes.py` and `rank_wrappers.py` too.
"""

from __future__ import annotations

import itertools
import traceback
from typing import Any
from unittest import mock

import pytest
import rank_mistakes  # noqa: F401
import rank_wrappers  # noqa: F401
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ranks import (
    CASES,
    IGNORE,
    SEQUENCES,
    TIMEOUT,
    VOCAB,
    WIDTHS,
    WORLDS,
    case,
    close,
    columns_of,
    drawn,
    generator,
    group,
    leaf,
    on_each_backend,
    raised,
    some_targets,
    whole_batch,
)
from torch import Tensor
from torch.testing import assert_close

import rlkernels
from rlkernels import PolicyBatch, checks
from rlkernels.integrations.verl import linear_cross_entropy
from rlkernels.ops.linear_rows import LinearRows
from rlkernels.stats import OUTPUTS, linear_token_stats, token_stats

Variants = list[tuple[tuple[int, ...], torch.dtype]]


def in_both_dtypes(variants: list[tuple[int, ...]], backend: str = "cpu") -> Variants:
    """Every variant in float64, of two ranks the last one in float32 too; that alone in Triton, which is slow here."""
    every = [(variant, torch.float64) for variant in variants]
    if len(variants[0]) > 2:
        return every
    last = (variants[-1], torch.float32)
    return [last] if backend == "triton" else [*every, last]


def in_dtypes(variants: list[tuple[int, ...]], backend: str = "cpu") -> Variants:
    """Of two ranks the first variant in bfloat16 too."""
    every = in_both_dtypes(variants, backend)
    return every if len(variants[0]) > 2 else [*every, (variants[0], torch.bfloat16)]


def few_if_slow(backend: str, *cases: Any) -> tuple[Any, ...]:
    """Of Triton, whose interpreter is slow, the last case alone."""
    return cases[-1:] if backend == "triton" else cases


def objective_of_stats(stats: Any) -> Tensor:
    weight = torch.linspace(-1, 2, stats.logp.numel(), dtype=stats.logp.dtype).view_as(stats.logp)
    return (weight * (stats.logp + 0.3 * stats.entropy + 0.1 * stats.lse)).sum()


def compare_token_stats(logits: Tensor, targets: Tensor, rank: int, widths: tuple[int, ...], **options: Any) -> None:
    columns = columns_of(rank, widths)
    whole, part = leaf(logits), leaf(logits[..., columns])
    expected = token_stats(whole, targets, outputs=OUTPUTS, **options)
    actual = token_stats(part, targets, outputs=OUTPUTS, tp_group=group(), **options)
    for name, a, b in zip(actual._fields, actual, expected, strict=True):
        close(a, b, msg=lambda text, name=name: f"{name}, {widths}: {text}") if a.is_floating_point() else None
        assert a.dtype == b.dtype and (a.is_floating_point() or torch.equal(a, b)), (name, widths)
    objective_of_stats(expected).backward()
    objective_of_stats(actual).backward()
    close(part.grad, whole.grad[..., columns])


@on_each_backend
def token_stats_of_shards(rank: int, world: int, backend: str) -> None:
    rows = 6
    targets = some_targets(rows)
    temperature = torch.linspace(0.5, 2, rows)
    for widths, dtype in in_both_dtypes(WIDTHS[world], backend):
        logits = drawn(rows, VOCAB, dtype=dtype)
        compare_token_stats(logits, targets, rank, widths, temperature=0.7)
        compare_token_stats(logits, targets, rank, widths, temperature=temperature, softcap=4.0, logit_scale=1.5)
        shaped = logits.view(2, 3, VOCAB).transpose(0, 1)
        compare_token_stats(shaped, targets.view(3, 2), rank, widths, temperature=temperature[:3])
    compare_token_stats(drawn(rows, VOCAB, dtype=torch.bfloat16), targets, rank, WIDTHS[world][0])
    compare_token_stats(logits[:0], targets[:0], rank, WIDTHS[world][0])


@on_each_backend
def unusual_logits(rank: int, world: int, backend: str) -> None:
    """Offsets, infinities, NaN, and maxima that stand in several shards."""
    logits = drawn(8, VOCAB, dtype=torch.float64)
    logits[0] += 1e6
    logits[1, :40] = -torch.inf
    logits[2] = -torch.inf
    logits[3, 5] = torch.nan
    logits[4] = 0.0
    logits[5, [3, 50]] = 9.0
    logits[6, [3, 50]] = 9.0
    logits[7, 60] = torch.inf
    targets = torch.tensor([4, 45, 0, 5, 0, 3, 50, 7])
    for widths in few_if_slow(backend, *WIDTHS[world]):
        part = logits[:, columns_of(rank, widths)]
        expected = token_stats(logits, targets, outputs=OUTPUTS)
        actual = token_stats(part, targets, outputs=OUTPUTS, tp_group=group())
        for name, a, b in zip(actual._fields, actual, expected, strict=True):
            if name == "mean_logits":
                close(a[4:7], b[4:7])
            elif a.dtype == torch.bool:
                assert torch.equal(a, b), (name, a, b)
            else:
                # an offset of 1e6 leaves no more digits to a sum with it
                assert_close(a, b, atol=1e-9, rtol=1e-12, equal_nan=True)


@case
def many_segments(rank: int, world: int) -> None:
    widths = {2: (9000, 5000), 4: (5000, 4096, 0, 4904)}[world]
    logits, targets = drawn(3, 14000, dtype=torch.float32), torch.tensor([13999, 4096, 17])
    compare_token_stats(logits, targets, rank, widths)


@case
def shards_in_another_order(rank: int, world: int) -> None:
    """`vocab_start` says where a shard is, whichever rank has it."""
    widths = WIDTHS[world][0]
    own = columns_of(world - 1 - rank, widths)
    logits, targets = drawn(6, VOCAB, dtype=torch.float64), some_targets(6)
    logits[:, [2, 59]] = 20.0
    expected = token_stats(logits, targets, outputs=OUTPUTS)
    actual = token_stats(logits[:, own], targets, outputs=OUTPUTS, vocab_start=own.start, tp_group=group())
    for a, b in zip(actual, expected, strict=True):
        assert_close(a, b)


@case
def case_B77_target_on_another_shard(rank: int, world: int) -> None:
    part = torch.zeros(1, 4 // world, requires_grad=True)
    token_stats(part, torch.tensor([0]), tp_group=group()).logp.sum().backward()
    whole = torch.tensor([[0.75, -0.25, -0.25, -0.25]])
    assert_close(part.grad, whole[:, columns_of(rank, (4 // world,) * world)])


@case
def padded_vocabulary(rank: int, world: int) -> None:
    """A vocabulary padded to equal shards: each passes the columns that exist, and padding gets no gradient."""
    width, hidden_size, rows = 24, 5, 6  # 61 columns: with 4 ranks the last one has none but padding
    start = rank * width
    exist = max(0, min(VOCAB - start, width)) if world == 4 else (width + 7, VOCAB - width - 7)[rank]
    width = 24 if world == 4 else 40
    start = start if world == 4 else (0, 31)[rank]
    targets = some_targets(rows)
    logits = drawn(rows, VOCAB, dtype=torch.float64)
    padded = torch.full((rows, width), 1e9, dtype=torch.float64)
    padded[:, :exist] = logits[:, start : start + exist]
    whole, part = leaf(logits), leaf(padded)
    objective_of_stats(token_stats(whole, targets, outputs=OUTPUTS)).backward()
    objective_of_stats(token_stats(part[:, :exist], targets, outputs=OUTPUTS, tp_group=group())).backward()
    close(part.grad[:, :exist], whole.grad[:, start : start + exist])
    assert not part.grad[:, exist:].any()

    hidden, weight = drawn(rows, hidden_size, dtype=torch.float64), drawn(VOCAB, hidden_size, dtype=torch.float64)
    padded_weight = torch.full((width, hidden_size), 1e9, dtype=torch.float64)
    padded_weight[:exist] = weight[start : start + exist]
    whole, part = leaf(weight), leaf(padded_weight)
    objective_of_stats(linear_token_stats(hidden, whole, targets, outputs=OUTPUTS)).backward()
    objective_of_stats(linear_token_stats(hidden, part[:exist], targets, outputs=OUTPUTS, tp_group=group())).backward()
    close(part.grad[:exist], whole.grad[start : start + exist])
    assert not part.grad[exist:].any()


def compare_linear(
    rank: int, widths: tuple[int, ...], dtype: torch.dtype, trained: str, with_bias: bool = True, **options: Any
) -> None:
    """`trained` names what requires a gradient: hidden, weight, bias."""
    rows, hidden_size = 7, 5
    columns = columns_of(rank, widths)
    tensors = {
        "hidden": drawn(rows, hidden_size, dtype=dtype),
        "weight": drawn(VOCAB, hidden_size, dtype=dtype, seed=1),
    }
    if with_bias:
        tensors["bias"] = drawn(VOCAB, dtype=dtype, seed=2)
    parts = {name: value if name == "hidden" else value[columns] for name, value in tensors.items()}
    tensors, parts = ({name: leaf(v) if name in trained else v for name, v in t.items()} for t in (tensors, parts))
    targets = some_targets(rows)
    objective = options.pop("objective", objective_of_stats)
    whole = linear_token_stats(**tensors, targets=targets, outputs=OUTPUTS, **options)
    shard = linear_token_stats(**parts, targets=targets, outputs=OUTPUTS, tp_group=group(), **options)
    # a logit is a sum of H products, whose order is the GEMM's
    scale = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 4e-2}[dtype]
    for name, a, b in zip(shard._fields, shard, whole, strict=True):
        assert_close(a, b, atol=scale, rtol=scale, msg=lambda text, name=name: f"{name}, {widths}: {text}")
    if trained:
        objective(whole).backward()
        objective(shard).backward()
    for name in tensors:
        if name in trained:
            expected = tensors[name].grad if name == "hidden" else tensors[name].grad[columns]
            assert_close(
                parts[name].grad,
                expected,
                atol=5 * scale * max(1.0, float(tensors[name].grad.abs().max())),
                rtol=scale,
                msg=lambda text, name=name: f"d{name}, {widths}, trained {trained}: {text}",
            )


def logp_alone(stats: Any) -> Tensor:
    """Some rows without a gradient, and none through the entropy: what a frozen head's direction serves."""
    weight = torch.linspace(-1, 2, stats.logp.numel(), dtype=stats.logp.dtype)
    weight[4] = 0
    return (weight * stats.logp).sum()


@on_each_backend
def linear_path(rank: int, world: int, backend: str) -> None:
    temperature = torch.linspace(0.5, 2, 7)
    for widths, dtype in in_both_dtypes(WIDTHS[world], backend):
        compare_linear(rank, widths, dtype, "hidden weight bias", temperature=0.7, softcap=4.0)
        for options in few_if_slow(backend, {}, {"temperature": temperature}, {"softcap": 4.0, "logit_scale": 0.5}):
            compare_linear(rank, widths, dtype, "hidden", objective=logp_alone, **options)
            compare_linear(rank, widths, dtype, "hidden", **options)
        if backend != "triton":
            compare_linear(rank, widths, dtype, "hidden weight", with_bias=False, chunk_bytes=1)
            compare_linear(rank, widths, dtype, "weight", objective=logp_alone)
            compare_linear(rank, widths, dtype, "", with_bias=False)
    compare_linear(rank, WIDTHS[world][0], torch.bfloat16, "hidden weight bias")
    compare_linear(rank, WIDTHS[world][0], torch.bfloat16, "hidden", objective=logp_alone)


@case
def linear_path_of_all_rows(rank: int, world: int) -> None:
    """As on a GPU, whose host does not know which rows are ignored."""
    with mock.patch.object(LinearRows, "knows_counts", lambda self: False):
        for widths in WIDTHS[world]:
            compare_linear(rank, widths, torch.float64, "hidden weight bias", softcap=4.0)
            compare_linear(rank, widths, torch.float64, "hidden", objective=logp_alone, softcap=4.0)
            compare_linear(rank, widths, torch.float64, "hidden")


@case
def linear_path_without_a_labelled_row(rank: int, world: int) -> None:
    columns = columns_of(rank, WIDTHS[world][0])
    for requires_grad in (True, False):
        hidden, weight = leaf(drawn(3, 5, dtype=torch.float32)), drawn(VOCAB, 5, dtype=torch.float32)[columns]
        weight.requires_grad_(requires_grad)
        for rows in (3, 0):
            targets = torch.full((rows,), IGNORE)
            stats = linear_token_stats(hidden[:rows], weight, targets, tp_group=group())
            stats.logp.sum().backward()
            assert not stats.logp.any() and not hidden.grad.any()
            assert not requires_grad or not weight.grad.any()


@case
def linear_path_under_autocast(rank: int, world: int) -> None:
    columns = columns_of(rank, WIDTHS[world][0])
    hidden, weight = drawn(6, 8, dtype=torch.float32), drawn(VOCAB, 8, dtype=torch.float32)
    whole, part = (leaf(hidden), leaf(weight)), (leaf(hidden), leaf(weight[columns]))
    with torch.autocast("cpu", torch.bfloat16):
        linear_token_stats(*whole, some_targets(6)).logp.sum().backward()
        linear_token_stats(*part, some_targets(6), tp_group=group()).logp.sum().backward()
    assert part[1].grad.dtype == torch.float32
    assert_close(part[0].grad, whole[0].grad, atol=5e-2, rtol=2e-2)
    assert_close(part[1].grad, whole[1].grad[columns], atol=5e-2, rtol=2e-2)


def a_batch(dtype: torch.dtype) -> PolicyBatch:
    targets = torch.randint(0, VOCAB, (3, 4), generator=generator(5))
    targets[1, 2:] = IGNORE
    old_logp = -4 + 0.2 * drawn(3, 4, dtype=dtype, seed=6)
    return PolicyBatch(
        targets, torch.tensor([1.0, -0.5, 0.3], dtype=dtype), old_logp=old_logp, ref_logp=old_logp.flip(0)
    )


POLICIES = (
    ("dapo", {}),
    ("grpo", {"reduction": "none"}),
    (rlkernels.GSPO(clip_low=2.0, clip_high=2.0, kl_coef=0.1), {"reduction": "seq_mean_token_mean"}),
    (rlkernels.GSPO(level="sequence_product", clip_low=2.0, clip_high=2.0), {}),
    (rlkernels.GMPO(entropy_coef=0.01, kl_coef=0.1), {"reduction": "token_sum"}),
)
# of what GEMMs of other shapes may add up otherwise
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2}


def compare_gradients(actual: Tensor, expected: Tensor, scale: float, whole: Tensor | None = None) -> None:
    """Of another tensor's part, relative to the whole one's largest entry: an entry is a sum that may cancel."""
    largest = float((expected if whole is None else whole).abs().max()) if expected.numel() else 0.0
    assert_close(actual, expected, atol=scale * max(1.0, largest), rtol=0)


@on_each_backend
def policy_losses(rank: int, world: int, backend: str) -> None:
    columns = columns_of(rank, WIDTHS[world][0])
    dtypes = (torch.float64, torch.bfloat16, torch.float32) if world == 2 else (torch.float64,)
    for dtype in few_if_slow(backend, *dtypes):
        batch = a_batch(dtype)
        logits = drawn(3, 4, VOCAB, dtype=dtype)
        hidden, weight = 0.1 * drawn(3, 4, 5, dtype=dtype), drawn(VOCAB, 5, dtype=dtype, seed=1)
        for objective, options in few_if_slow(backend, *POLICIES):
            options = {**options, "temperature": 0.9}
            whole, part = leaf(logits), leaf(logits[..., columns])
            expected = rlkernels.policy_loss(whole, batch, objective, **options)
            actual = rlkernels.policy_loss(
                part, batch, objective, vocab_start=columns.start, tp_group=group(), **options
            )
            close(actual.loss, expected.loss)
            expected.loss.sum().backward()
            actual.loss.sum().backward()
            close(part.grad, whole.grad[..., columns])
            for name, value in expected.metrics.items():
                assert_close(actual.metrics[name], value, atol=1e-5, rtol=1e-5)

            for frozen in few_if_slow(backend, True, False):
                whole_head, head = weight.clone(), weight[columns].clone()
                whole, part = leaf(hidden), leaf(hidden)
                if not frozen:
                    whole_head.requires_grad_(), head.requires_grad_()
                expected = rlkernels.linear_policy_loss(whole, whole_head, batch, objective, **options)
                actual = rlkernels.linear_policy_loss(part, head, batch, objective, tp_group=group(), **options)
                scale = TOLERANCE[dtype]
                assert_close(actual.loss, expected.loss, atol=scale, rtol=scale)
                expected.loss.sum().backward()
                actual.loss.sum().backward()
                compare_gradients(part.grad, whole.grad, scale)
                if not frozen:
                    compare_gradients(head.grad, whole_head.grad[columns], scale, whole_head.grad)


LONGEST = 9
DATA_PARALLEL = (
    ("token_mean", rlkernels.GRPO(kl_coef=0.1, entropy_coef=0.02)),
    ("seq_mean_token_mean", rlkernels.GSPO(clip_low=2.0, clip_high=2.0)),
    ("seq_mean_token_sum", rlkernels.GMPO()),
    ("seq_mean_token_sum_norm", rlkernels.CISPO(ratio_max=1.5)),
    ("token_sum", rlkernels.Reinforce()),
)


def compare_metrics(actual: rlkernels.Metrics, expected: rlkernels.Metrics, scale: float = 1e-6) -> None:
    assert list(actual) == list(expected)
    scale = max(scale, 1e-6)
    for name, value in expected.items():
        assert_close(
            actual[name], value, atol=scale, rtol=scale, check_dtype=False, msg=lambda t, name=name: f"{name}: {t}"
        )


def from_logits(hidden: Tensor, weight: Tensor, batch: PolicyBatch, **options: Any) -> rlkernels.PolicyLoss:
    return rlkernels.policy_loss(hidden @ weight.T, batch, **options)


def from_logp(hidden: Tensor, weight: Tensor, batch: PolicyBatch, **options: Any) -> rlkernels.PolicyLoss:
    stats = linear_token_stats(hidden, weight, batch.targets)
    return rlkernels.logp_policy_loss(stats.logp, batch, entropy=stats.entropy, **options)


PATHS = (rlkernels.linear_policy_loss, from_logits)


def part_of(batch: dict[str, Tensor], sequences: slice, tokens: slice = slice(None)) -> PolicyBatch:
    own = {name: value[sequences] for name, value in batch.items()}
    return PolicyBatch(**{name: value if value.ndim == 1 else value[:, tokens] for name, value in own.items()})


@case
def case_B56_B57_data_parallel(rank: int, world: int) -> None:
    """Whole sequences spread unevenly, ranks without any included, in micro-batches."""
    for counts, dtype in in_dtypes(SEQUENCES[world]):
        batch, hidden, weight = whole_batch(dtype)
        start = sum(counts[:rank])
        own = slice(start, start + counts[rank])
        micro = [slice(start, min(start + 1, own.stop)), slice(min(start + 1, own.stop), own.stop)]
        every = itertools.product(DATA_PARALLEL, ("mean", "sum"), (*PATHS, from_logp))
        for (reduction, objective), gradients, path in every:
            max_length = LONGEST if reduction == "seq_mean_token_sum_norm" else None
            norm = None if max_length is None else 7.0 * LONGEST
            head = leaf(weight)
            options: dict[str, Any] = {"objective": objective, "reduction": reduction}
            expected = path(hidden, head, PolicyBatch(**batch), normalizer=norm, **options)
            expected.loss.backward()

            parts = [part_of(batch, span) for span in micro]
            normalizer = rlkernels.global_normalizer(parts, reduction, gradients=gradients, max_length=max_length)
            own_head = leaf(weight)
            loss, metrics = torch.zeros((), dtype=expected.loss.dtype), []
            for part, span in zip(parts, micro, strict=True):
                out = path(hidden[span], own_head, part, normalizer=normalizer, **options)
                out.loss.backward()
                loss += out.loss.detach()
                metrics.append(out.metrics)
            ranks = world if gradients == "mean" else 1
            for total in (loss, own_head.grad):
                dist.all_reduce(total)
                total /= ranks  # as DDP does
            scale = TOLERANCE[dtype]
            assert_close(loss, expected.loss, atol=scale, rtol=scale)
            compare_gradients(own_head.grad, head.grad, scale)
            compare_metrics(rlkernels.Metrics.merge(metrics).all_reduce(), expected.metrics, scale)


def grid(rank: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Two by two: this rank's row and column."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    return pairs[rank // 2], pairs[2 + rank % 2]


@case
def data_parallel_times_shards(rank: int, world: int) -> None:
    """Two by two: the head in two shards, the sequences in two parts."""
    if world != 4:
        return
    tp_group, dp_group = grid(rank)
    batch, hidden, weight = whole_batch(torch.float64)
    head, columns = leaf(weight), columns_of(rank % 2, (40, 21))
    rlkernels.linear_policy_loss(hidden, head, PolicyBatch(**batch), "dapo").loss.backward()
    own = (slice(0, 5), slice(5, 7))[rank // 2]
    part = part_of(batch, own)
    shard = leaf(weight[columns])
    normalizer = rlkernels.global_normalizer(part, "token_mean", group=dp_group, gradients="sum")
    loss = rlkernels.linear_policy_loss(hidden[own], shard, part, "dapo", normalizer=normalizer, tp_group=tp_group).loss
    loss.backward()
    dist.all_reduce(shard.grad, group=dp_group)
    close(shard.grad, head.grad[columns])


TOKENS = {2: [(3, 2), (0, 5)], 4: [(1, 0, 3, 1), (0, 5, 0, 0)]}
SPREAD = (
    *DATA_PARALLEL,
    ("seq_mean_token_mean", rlkernels.GSPOToken(clip_low=0.01, clip_high=0.01)),
    ("seq_mean_token_mean", rlkernels.GMPO(clip_level="sequence", log_clip_low=0.02, log_clip_high=0.02)),
    ("none", rlkernels.GSPO(clip_low=2.0, clip_high=2.0)),
    ("token_mean", rlkernels.GSPO(level="sequence_product", clip_low=2.0, clip_high=2.0, entropy_coef=0.01)),
)


@on_each_backend
def sequences_across_ranks(rank: int, world: int, backend: str) -> None:
    """Every rank has some tokens of every sequence: unevenly, or none at all."""
    for counts, dtype in in_dtypes(TOKENS[world], backend):
        batch, hidden, weight = whole_batch(dtype)
        own = columns_of(rank, counts)
        part = part_of(batch, slice(None), own)
        scale = TOLERANCE[dtype]
        every = itertools.product(few_if_slow(backend, *SPREAD), few_if_slow(backend, *PATHS))
        for (reduction, objective), path in every:
            options = {"objective": objective, "reduction": reduction}
            options["normalizer"] = 7.0 * LONGEST if reduction == "seq_mean_token_sum_norm" else None
            whole, own_hidden, head, own_head = leaf(hidden), leaf(hidden[:, own]), leaf(weight), leaf(weight)
            expected = path(whole, head, PolicyBatch(**batch), **options)
            actual = path(own_hidden, own_head, part, cp_group=group(), **options)
            loss = expected.loss[:, own] if reduction == "none" else expected.loss
            assert_close(actual.loss, loss, atol=scale, rtol=scale)
            expected.loss.sum().backward()
            actual.loss.sum().backward()
            compare_gradients(own_hidden.grad, whole.grad[:, own], scale, whole.grad)
            dist.all_reduce(own_head.grad)
            compare_gradients(own_head.grad, head.grad, scale)
            compare_metrics(actual.metrics.all_reduce(), expected.metrics, scale)


@case
def sequences_across_ranks_times_data_parallel(rank: int, world: int) -> None:
    """Two pairs of ranks, each with sequences of its own, whose tokens are spread over the pair."""
    if world != 4:
        return
    cp_group, _ = grid(rank)
    sequences, tokens = (slice(0, 5), slice(5, 7))[rank // 2], (slice(0, 3), slice(3, 5))[rank % 2]
    batch, hidden, weight = whole_batch(torch.float64)
    part = part_of(batch, sequences, tokens)
    trained = PolicyBatch(**batch).mask
    for (reduction, objective), path, gradients, count_empty in itertools.product(
        DATA_PARALLEL, (*PATHS, from_logp), ("mean", "sum"), (True, False)
    ):
        max_length = LONGEST if reduction == "seq_mean_token_sum_norm" else None
        count = {"token_mean": trained.sum(), "token_sum": 1}.get(reduction, 7 if count_empty else 6)
        head, own_head = leaf(weight), leaf(weight)
        options: dict[str, Any] = {"objective": objective, "reduction": reduction}
        expected = path(hidden, head, PolicyBatch(**batch), normalizer=count * (max_length or 1), **options)
        expected.loss.backward()
        counted = {"cp_group": cp_group, "gradients": gradients, "count_empty": count_empty, "max_length": max_length}
        normalizer = rlkernels.global_normalizer(part, reduction, **counted)
        actual = path(hidden[sequences, tokens], own_head, part, normalizer=normalizer, cp_group=cp_group, **options)
        actual.loss.backward()
        loss = actual.loss.detach()
        for total in (loss, own_head.grad):
            dist.all_reduce(total)
            total /= world if gradients == "mean" else 1
        close(loss / 2, expected.loss)
        compare_gradients(own_head.grad, head.grad, 1e-12)
        compare_metrics(actual.metrics.all_reduce(), expected.metrics)


@case
def sequences_trained_on_one_rank_alone(rank: int, world: int) -> None:
    """What a rank has none of is not empty where another has some of it."""
    masks = torch.zeros(world + 1, 2)
    masks[rank, 1] = 1
    alone = [dist.new_group([member]) for member in range(world)][rank]
    for cp_group, count_empty, sequences in (
        (dist.group.WORLD, True, world + 1),
        (dist.group.WORLD, False, world),
        (alone, True, world * (world + 1)),
        (alone, False, world),
    ):
        counted = {"cp_group": cp_group, "gradients": "sum", "count_empty": count_empty}
        assert rlkernels.global_normalizer(masks, "seq_mean_token_mean", **counted) == sequences


@case
def sequences_across_ranks_times_shards(rank: int, world: int) -> None:
    """Two by two: the head in two shards, the tokens of every sequence in two parts."""
    if world != 4:
        return
    tp_group, cp_group = grid(rank)
    columns, tokens = columns_of(rank % 2, (40, 21)), (slice(0, 3), slice(3, 5))[rank // 2]
    batch, hidden, weight = whole_batch(torch.float64)
    part = part_of(batch, slice(None), tokens)
    for (reduction, objective), path in itertools.product(SPREAD, PATHS):
        options = {"objective": objective, "reduction": reduction}
        options["normalizer"] = 7.0 * LONGEST if reduction == "seq_mean_token_sum_norm" else None
        whole, head, own_hidden, shard = leaf(hidden), leaf(weight), leaf(hidden[:, tokens]), leaf(weight[columns])
        expected = path(whole, head, PolicyBatch(**batch), **options)
        actual = path(own_hidden, shard, part, tp_group=tp_group, cp_group=cp_group, **options)
        close(actual.loss, expected.loss[:, tokens] if reduction == "none" else expected.loss)
        expected.loss.sum().backward()
        actual.loss.sum().backward()
        dist.all_reduce(shard.grad, group=cp_group)
        if path is from_logits:
            dist.all_reduce(own_hidden.grad, group=tp_group)  # the product's gradient, not this package's
        compare_gradients(own_hidden.grad, whole.grad[:, tokens], 1e-12)
        compare_gradients(shard.grad, head.grad[columns], 1e-12)


@case
def packed_sequences_across_ranks(rank: int, world: int) -> None:
    logp, old_logp = drawn(2, 9, dtype=torch.float64) / 10
    advantages = torch.tensor([[1.0], [-0.5], [0.7]], dtype=torch.float64)  # [3] would be taken for one a token of 3
    options = {"objective": rlkernels.GSPO(clip_low=2.0, clip_high=2.0), "reduction": "seq_mean_token_mean"}
    borders = torch.tensor([0, 4, 4, 9])
    whole = leaf(logp)
    batch = PolicyBatch(None, advantages, old_logp=old_logp, cu_seqlens=borders)
    expected = rlkernels.logp_policy_loss(whole, batch, **options)
    expected.loss.backward()
    # token i goes to rank i % world
    positions = torch.arange(rank, 9, world)
    own_borders = torch.searchsorted(positions, borders)
    own = leaf(logp[positions])
    part = PolicyBatch(None, advantages, old_logp=old_logp[positions], cu_seqlens=own_borders)
    actual = rlkernels.logp_policy_loss(own, part, cp_group=group(), **options)
    actual.loss.backward()
    close(actual.loss, expected.loss)
    close(own.grad, whole.grad[positions])


@case
def sizes_are_exchanged_once_where_values_are_not_checked(rank: int, world: int) -> None:
    """As on a GPU, whose host does not wait in every call."""
    own = columns_of(rank, WIDTHS[world][0])
    logits = drawn(6, VOCAB, dtype=torch.float32)
    targets = some_targets(6)
    unchecked = mock.patch.object(checks, "values_are_checked", lambda device: False)
    with unchecked, mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as exchange:
        for rows in (6, 6, 4, 6, 4):
            actual = token_stats(logits[:rows, own], targets[:rows], tp_group=group())
            close(actual.logp, token_stats(logits[:rows], targets[:rows]).logp)
        assert exchange.call_count == 2


@case
def no_second_derivatives_across_ranks(rank: int, world: int) -> None:
    """Of a sequence's parts a second derivative has the other ranks' tokens in it, which no graph holds."""
    logp = leaf(drawn(2, 3, dtype=torch.float64))
    batch = PolicyBatch(None, torch.ones(2))
    objectives = (rlkernels.GMPO(), rlkernels.GSPO(), rlkernels.GRPO())
    losses = [rlkernels.logp_policy_loss(logp, batch, objective, cp_group=group()).loss for objective in objectives]
    previous = rlkernels.set_backend("reference")
    losses += [rlkernels.logp_policy_loss(logp, batch, objective, cp_group=group()).loss for objective in objectives]
    losses.append(rlkernels.logp_policy_loss(logp, batch, "gspo", reduction="none", cp_group=group()).loss)
    for loss in losses:
        message = raised(lambda loss=loss: torch.autograd.grad(loss.sum(), logp, create_graph=True))
        assert "cp_group: its gradient cannot be differentiated again" in message, message
    targets = torch.zeros(2, dtype=torch.int64)
    stats = (
        token_stats(logp, targets, tp_group=group()),
        linear_token_stats(logp, torch.ones(2, 3, dtype=torch.float64), targets, tp_group=group()),
    )
    for some in stats:
        message = raised(lambda some=some: torch.autograd.grad(some.logp.sum(), logp, create_graph=True))
        assert "tp_group: its gradient cannot be differentiated again" in message, message
    rlkernels.set_backend(previous)


@case
def metrics_that_are_means_alone(rank: int, world: int) -> None:
    mean = rlkernels.Metrics({"x": (torch.tensor(float(rank)), torch.ones(()))}).all_reduce()
    assert mean["x"] == (world - 1) / 2


@case
def other_metrics_raise_on_every_rank(rank: int, world: int) -> None:
    one, two = torch.ones(()), torch.full((), 2.0)
    plain = {"kl": (one, two), "entropy": (one, two)}
    got = "on every rank, got kl, entropy on rank 0,"
    others = {
        f"means {got} kl, entropy, weight on rank 1": rlkernels.Metrics({**plain, "weight": (one, one)}),
        f"means {got} entropy, kl on rank 1": rlkernels.Metrics(dict(reversed(plain.items()))),
        "maxima on every rank, got none on rank 0, ratio on rank 1": rlkernels.Metrics(plain, maxima={"ratio": one}),
        "dtype of metrics on every rank": rlkernels.Metrics(dict.fromkeys(plain, (one.double(), two.double()))),
    }
    for text, other in others.items():
        message = raised((other if rank == 1 else rlkernels.Metrics(plain)).all_reduce)
        assert f"group: expected the same {text}" in message, message
    assert rlkernels.Metrics(plain).all_reduce()["kl"] == 0.5
    unchecked = mock.patch.object(checks, "values_are_checked", lambda device: False)
    with unchecked, mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as exchange:
        for name in ("x", "x", "y", "x"):
            rlkernels.Metrics({name: (one, two)}).all_reduce(group())
        assert exchange.call_count == 2


@case
def two_collectives_for_any_number_of_rows(rank: int, world: int) -> None:
    own = columns_of(rank, WIDTHS[world][0])
    logits, targets = leaf(drawn(6, VOCAB, dtype=torch.float32)[:, own]), some_targets(6)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        token_stats(logits, targets, outputs=OUTPUTS, tp_group=group()).logp.sum().backward()
        assert all_reduce.call_count == 2


@case
def verls_fused_head(rank: int, world: int) -> None:
    """verl's kernel leaves the sum of `hidden`'s gradients to Megatron."""
    own, targets = columns_of(rank, WIDTHS[world][0]), some_targets(6).clamp(min=0)
    hidden, weight = drawn(6, 8, dtype=torch.float64), drawn(VOCAB, 8, dtype=torch.float64)
    whole, part = (leaf(hidden), leaf(weight)), (leaf(hidden), leaf(weight[own]))
    expected = linear_cross_entropy(*whole, targets, 0.7)
    actual = linear_cross_entropy(*part, targets, 0.7, "none", group())
    for (logp, entropy), name in ((expected, "whole"), (actual, "part")):
        assert logp.shape == entropy.shape == (6,), name
        (logp + 0.3 * entropy).sum().backward()
    for a, b in zip(actual, expected, strict=True):
        close(a, b)
    dhidden = part[0].grad.clone()
    dist.all_reduce(dhidden)
    close(dhidden, whole[0].grad)
    close(part[1].grad, whole[1].grad[own])


@case
def compiled_code_leaves_shards_to_python(rank: int, world: int) -> None:
    if world > 2:
        return
    own = columns_of(rank, WIDTHS[world][0])
    logits, targets = drawn(6, VOCAB, dtype=torch.float32)[:, own], some_targets(6)

    def step(logits: Tensor) -> Tensor:
        return token_stats(logits, targets, tp_group=group()).logp

    close(torch.compile(step, backend="eager")(logits), step(logits))
    torch._dynamo.reset()
    try:
        torch.compile(step, backend="eager", fullgraph=True)(logits)
    except torch._dynamo.exc.Unsupported as error:
        assert "_agree" in str(error)
    else:
        raise AssertionError("nothing raised")


def run_cases(rank: int, folder: str, gate: Any, results: Any) -> None:
    """Each world in turn, while the ranks it has not wait at the gate: processes take longer to start than to run."""
    torch.set_num_threads(1)
    for world in WORLDS:
        if rank < world:
            run_world(rank, world, f"file://{folder}/{world}", results)
        gate.wait()


def run_world(rank: int, world: int, address: str, results: Any) -> None:
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world, timeout=TIMEOUT)
    for name, function in CASES.items():
        try:
            function(rank, world)
        except BaseException:
            results[world, rank, name] = traceback.format_exc()
            raise  # the ranks are no longer at the same collective
        results[world, rank, name] = None
    dist.destroy_process_group()


def outcomes(folder: str) -> dict[Any, str | None]:
    """What every rank of every world says about every case: None, or how it failed."""
    context = mp.get_context("spawn")
    with context.Manager() as manager:
        results = manager.dict()
        arguments = (folder, context.Barrier(max(WORLDS)), results)
        processes = mp.spawn(run_cases, arguments, nprocs=max(WORLDS), join=False)
        try:
            while not processes.join():
                pass
        except (mp.ProcessRaisedException, mp.ProcessExitedException):
            if all(failure is None for failure in results.values()):
                raise  # not a case's failure
        return dict(results)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, str | None]:
    return outcomes(str(tmp_path_factory.mktemp("gloo")))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world", WORLDS)
def test_as_one_process(world: int, name: str, outcome: dict[Any, str | None]) -> None:
    said = {rank: outcome[world, rank, name] for rank in range(world) if (world, rank, name) in outcome}
    failures = [text for text in said.values() if text is not None]
    assert not failures, "\n".join(failures)
    assert len(said) == world, "not run: an earlier case failed"
