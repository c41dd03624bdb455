"""Cases of `test_distributed.py`: a mistake of one rank raises on all of them, within seconds."""

from __future__ import annotations

import contextlib
import datetime
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from ranks import IGNORE, VOCAB, WIDTHS, case, close, columns_of, drawn, group, leaf, raised, some_targets

import rlkernels
from rlkernels import PolicyBatch
from rlkernels.stats import linear_token_stats, token_stats


@case
def other_sequences_raise_on_every_rank(rank: int, world: int) -> None:
    logp = torch.zeros(3 if rank == 1 else 2, 4)
    batch = PolicyBatch(None, torch.ones(logp.shape[0]))
    message = raised(lambda: rlkernels.logp_policy_loss(logp, batch, "gspo", cp_group=group()))
    assert "cp_group: expected the same sequences on every rank, got 2 on rank 0, 3 on rank 1" in message
    logp = torch.zeros(2, 4, requires_grad=rank == 1)
    batch = PolicyBatch(None, torch.ones(2))
    assert "requires_grad" in raised(lambda: rlkernels.logp_policy_loss(logp, batch, "gspo", cp_group=group()))
    assert "cp_group: expected a process group" in raised(
        lambda: rlkernels.logp_policy_loss(logp, batch, "gspo", cp_group="default")
    )


@case
def wrong_arguments_raise_on_every_rank(rank: int, world: int) -> None:
    targets = some_targets(6)
    logits = drawn(6, VOCAB, dtype=torch.float32)
    own = columns_of(rank, WIDTHS[world][0])
    good = functools.partial(token_stats, logits[:, own], targets, tp_group=group())
    one_is_wrong = rank == 1

    def call(**changed: Any) -> Callable[[], Any]:
        arguments = {"logits": logits[:, own], "targets": targets, "tp_group": group(), **changed}
        return lambda: token_stats(**arguments)

    expected = token_stats(logits, targets)
    for _ in range(2):
        # the whole vocabulary on every rank, too few columns, a hole (B78)
        assert "vocab_start: expected shards that adjoin" in raised(call(logits=logits, vocab_start=own.start))
        short = logits[:, own.start : own.stop - 1] if one_is_wrong and own.stop > own.start else logits[:, own]
        if world == 2:
            assert "label" in raised(call(logits=short, targets=torch.full_like(targets, VOCAB - 1)))
            starts = (0, 32)
            assert "expected shards that adjoin" in raised(call(vocab_start=starts[rank]))
        assert "on every rank or on none" in raised(call(vocab_start=None if one_is_wrong else own.start))
        # other rows, another dtype, other labels, a wrong argument on one rank
        assert "the same rows on every rank, got 6 on rank 0, 5 on rank 1" in raised(
            call(**({"logits": logits[:5, own], "targets": targets[:5]} if one_is_wrong else {}))
        )
        assert "the same dtype of logits" in raised(call(logits=(logits.double() if one_is_wrong else logits)[:, own]))
        other = targets.clone()
        other[0] += rank == 1
        assert "the same checksum of targets" in raised(call(targets=other))
        message = raised(call(temperature=-1.0 if one_is_wrong else 1.0))
        assert "temperature: expected" in message and ("rank 1" in message) == (not one_is_wrong)
        assert "targets: expected shape" in raised(call(targets=targets[:4] if one_is_wrong else targets))
        for label in (VOCAB, -1):
            message = raised(call(targets=torch.full_like(targets, label)))
            assert f"targets: expected labels in [0, {VOCAB})" in message
        per_row = torch.ones(6)
        per_row[2] = 0.0 if one_is_wrong else 1.0
        assert "temperature: expected" in raised(call(temperature=per_row))
        # what turns the shards' logits into z
        for name, mine, others in (
            ("ignore_index", -1, IGNORE),
            ("temperature", 0.5, 1.0),
            ("temperature", torch.linspace(0.5, 2, 6), 1.0),
            ("temperature", torch.linspace(0.5, 2, 6), torch.linspace(0.5, 3, 6)),
            ("softcap", 4.0, None),
            ("logit_scale", 2.0, 1.0),
        ):
            message = raised(call(**{name: mine if one_is_wrong else others}))
            assert f"tp_group: expected the same {name} on every rank, got" in message, message
            if isinstance(mine, float):
                assert message.endswith(f"got {others} on rank 0, {mine} on rank 1"), message
        call(temperature=torch.where(targets == IGNORE, 1.0 + rank, 0.5))()  # of rows that nothing is made of
        assert "at least one column" in raised(call(logits=logits[:, :0]))
        # nothing is left over that the next call would trip over
        close(good().logp, expected.logp)


@case
def wrong_heads_raise_on_every_rank(rank: int, world: int) -> None:
    hidden, weight, targets = drawn(6, 5, dtype=torch.float32), drawn(20, 5, dtype=torch.float32), some_targets(6, 20)
    one_is_wrong = rank == 1

    def call(**changed: Any) -> Callable[[], Any]:
        arguments = {"hidden": hidden, "weight": weight, "targets": targets, "tp_group": group(), **changed}
        return lambda: linear_token_stats(**arguments)

    assert "weight: expected shape" in raised(call(weight=weight[:, :4] if one_is_wrong else weight))
    assert "the same H on every rank" in raised(
        call(**({"weight": weight[:, :4], "hidden": hidden[:, :4]} if one_is_wrong else {}))
    )
    assert "the same weight.requires_grad" in raised(call(weight=leaf(weight) if one_is_wrong else weight))
    assert "the same hidden.requires_grad" in raised(call(hidden=leaf(hidden) if one_is_wrong else hidden))
    assert "the same selected rows" in raised(call(rows=torch.tensor([0, 1, 2][: 2 + rank])))
    assert "tp_group: expected a process group" in raised(call(tp_group="default"))
    assert "vocab_start: expected None without tp_group" in raised(lambda: token_stats(hidden, targets, vocab_start=0))
    assert torch.isfinite(call(weight=weight)().logp).all()


@contextlib.contextmanager
def within_seconds() -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < 5


def a_batch(**changed: Any) -> PolicyBatch:
    given = {"targets": some_targets(6, 20).view(2, 3), "advantages": torch.tensor([1.0, -1.0]), **changed}
    return PolicyBatch(**given)


def refusals(group_name: str, rank: int, call: Callable[..., Any], mistakes: dict[str, dict[str, Any]]) -> None:
    """Each mistake, made by rank 1 alone, raises on every rank: on rank 1 itself, on the others in its name."""
    for text, arguments in mistakes.items():
        with within_seconds():
            message = raised(lambda arguments=arguments: call(**(arguments if rank == 1 else {})))
        if text.startswith("the same"):
            assert f"{group_name}: expected {text} on every rank" in message, message
        elif rank == 1:
            assert message.startswith(text), message
        else:
            assert message.startswith(f"{group_name}: expected right arguments on every rank, got on rank 1: "), message
            assert text in message


@case
def a_mistake_in_a_loss_of_shards_raises_on_every_rank(rank: int, world: int) -> None:
    own = columns_of(rank, (5,) * world)
    hidden, weight = drawn(2, 3, 4, dtype=torch.float32), drawn(5 * world, 4, dtype=torch.float32)
    batch = a_batch(targets=some_targets(6, 5 * world).view(2, 3))

    def from_hidden(**changed: Any) -> Any:
        given = {"hidden": hidden, "weight": weight[own], "batch": batch, "objective": "grpo", **changed}
        return rlkernels.linear_policy_loss(**given, tp_group=group())

    def from_logits(**changed: Any) -> Any:
        given = {"logits": (hidden @ weight.T)[..., own], "batch": batch, "objective": "grpo", **changed}
        return rlkernels.policy_loss(**given, tp_group=group())

    both = {
        "batch: expected a PolicyBatch": {"batch": "nonsense"},
        "batch: expected targets": {"batch": PolicyBatch(None, torch.ones(2))},
        "objective: expected one of": {"objective": "gripo"},
        "reduction: expected one of": {"reduction": "mean"},
        "normalizer: expected": {"normalizer": -1.0},
        "ref_logp: expected in the batch": {"objective": rlkernels.GRPO(kl_coef=0.1)},
        "weight: expected in the batch": {"objective": "lambda_grpo"},
        "temperature: expected": {"temperature": 0.0},
        "softcap: expected": {"softcap": -1.0},
        "logit_scale: expected": {"logit_scale": "two"},
        "the same objective": {"objective": rlkernels.GSPO(level="sequence_product")},
        "the same reduction": {"reduction": "token_mean"},
        "the same normalizer": {"normalizer": 7.0},
    }
    for call in (from_hidden, from_logits):
        refusals("tp_group", rank, call, both)
        assert torch.isfinite(call().loss)
    heads = {
        "hidden: expected a tensor": {"hidden": None},
        "hidden: expected shape": {"hidden": hidden[..., :0]},
        "targets: expected shape": {"hidden": hidden[:, :2]},
        "weight: expected shape": {"weight": weight[own].T},
        "weight: expected torch.float32": {"weight": weight[own].double()},
        "bias: expected shape": {"bias": torch.zeros(3)},
        "chunk_bytes: expected": {"chunk_bytes": 0},
        "the same H": {"hidden": hidden[..., :3], "weight": weight[own, :3]},
    }
    refusals("tp_group", rank, from_hidden, heads)
    refusals("tp_group", rank, from_logits, {"vocab_start: expected an integer": {"vocab_start": 1.5}})

    def statistics(**changed: Any) -> Any:
        given = {"hidden": hidden, "weight": weight[own], "targets": batch.targets, **changed}
        return linear_token_stats(**given, tp_group=group())

    selected = {
        "outputs: expected one of": {"outputs": ("perplexity",)},
        "rows: expected rising": {"rows": torch.tensor([1, 0])},
        "rows: expected dtype": {"rows": torch.tensor([1.0])},
        "the same selected rows": {"rows": torch.tensor([0])},
    }
    refusals("tp_group", rank, statistics, selected)
    other = torch.tensor([0, 1 + rank])
    assert "the same checksum of" in raised(lambda: statistics(rows=other, targets=torch.zeros_like(batch.targets)))
    previous = rlkernels.set_backend("reference") if rank == 1 else None
    assert "the same backend on every rank, got cpu on rank 0, reference on rank 1" in raised(statistics)
    if previous is not None:
        rlkernels.set_backend(previous)
    assert torch.isfinite(statistics().logp).all()
    some = torch.tensor([0, 1, 2], dtype=torch.uint8)
    close(statistics(rows=some).logp.view(-1)[:3], statistics().logp.view(-1)[:3])
    close(statistics(rows=some.to((torch.int64, torch.int32)[rank % 2])).logp, statistics(rows=some).logp)


@case
def a_mistake_in_a_loss_of_spread_sequences_raises_on_every_rank(rank: int, world: int) -> None:
    logits, hidden, weight = torch.zeros(2, 3, 20), torch.zeros(2, 3, 4), torch.zeros(20, 4)
    batch = a_batch()

    def from_logits(**changed: Any) -> Any:
        given = {"logits": logits, "batch": batch, "objective": "gspo", **changed}
        return rlkernels.policy_loss(**given, cp_group=group())

    def from_hidden(**changed: Any) -> Any:
        given = {"hidden": hidden, "weight": weight, "batch": batch, "objective": "gspo", **changed}
        return rlkernels.linear_policy_loss(**given, cp_group=group())

    def from_logp(**changed: Any) -> Any:
        given = {"logp": logits[..., 0], "batch": batch, "objective": "gspo", **changed}
        return rlkernels.logp_policy_loss(**given, cp_group=group())

    every = {
        "batch: expected a PolicyBatch": {"batch": None},
        "objective: expected one of": {"objective": "gripo"},
        "reduction: expected one of": {"reduction": "mean"},
        "normalizer: expected": {"normalizer": float("nan")},
        "cp_group: expected None with ClipCov": {"objective": "clip_cov"},
        "the same objective": {"objective": "grpo"},
        "the same reduction": {"reduction": "token_mean"},
        "the same normalizer": {"normalizer": 2},
    }
    three = a_batch(targets=torch.zeros(3, 3, dtype=torch.int64), advantages=torch.ones(3))
    for call in (from_logits, from_hidden, from_logp):
        refusals("cp_group", rank, call, every)
        longer = {name: torch.zeros(3, 3, *size) for name, size in (("logits", [20]), ("hidden", [4]), ("logp", []))}
        name = call.__name__.removeprefix("from_")
        refusals("cp_group", rank, call, {"the same sequences": {"batch": three, name: longer[name]}})
        trained = {"logits": leaf(logits), "hidden": leaf(hidden), "logp": leaf(logits[..., 0])}[name]
        refusals("cp_group", rank, call, {"the same requires_grad of log-probabilities": {name: trained}})
        refusals("cp_group", rank, call, {f"{name}: expected": {name: "nonsense"}})
        assert torch.isfinite(call().loss)
    values = {
        "targets: expected labels in [0, 20)": {"batch": a_batch(targets=torch.full((2, 3), 20))},
        "temperature: expected finite numbers": {"temperature": torch.tensor([1.0, 0.0])},
        "temperature: expected shape": {"temperature": torch.ones(5)},
    }
    refusals("cp_group", rank, from_logits, values)
    refusals("cp_group", rank, from_hidden, values)
    refusals("cp_group", rank, from_logits, {"vocab_start: expected None without tp_group": {"vocab_start": 0}})
    refusals("cp_group", rank, from_logp, {"entropy: expected shape": {"entropy": torch.zeros(3)}})
    bonus = {"objective": rlkernels.GSPO(entropy_coef=0.1)}
    refusals("cp_group", rank, from_logp, {"entropy: expected with entropy_coef": bonus})


@case
def a_mistake_reaches_the_other_groups_of_a_grid(rank: int, world: int) -> None:
    """Two by two: rank 3 shares its shards with rank 2, its sequences with rank 1, nothing with rank 0."""
    if world != 4:
        return
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    groups = {"tp_group": pairs[rank // 2], "cp_group": pairs[2 + rank % 2]}
    hidden, weight = torch.zeros(2, 3, 4), torch.zeros(10, 4)
    bad_label = a_batch(targets=torch.full((2, 3), 20))

    def loss(**changed: Any) -> Any:
        given = {"batch": a_batch(), "objective": "gspo", **changed}
        return rlkernels.linear_policy_loss(hidden, weight, **given, **groups)

    for mistake in ({"temperature": 0.0}, {"reduction": "token_mean"}, {"batch": bad_label}):
        with within_seconds():
            raised(lambda mistake=mistake: loss(**(mistake if rank == 3 else {})))
    # both ranks of a group have the bad label, which only the vocabulary's size shows
    message = raised(lambda: loss(**({"batch": bad_label} if rank >= 2 else {})))
    assert "targets: expected labels in [0, 20)" in message
    assert torch.isfinite(loss().loss)


@case
def a_rank_that_stays_away_is_waited_for_as_long_as_the_group_waits(rank: int, world: int) -> None:
    short = dist.new_group(timeout=datetime.timedelta(seconds=1))
    if rank != 1:
        try:
            token_stats(torch.zeros(1, 3), torch.tensor([0]), tp_group=short)
        except RuntimeError as error:
            assert "tp_group: expected this call on every rank of the group, got no answer" in str(error)
        else:
            raise AssertionError("nothing raised")
    dist.barrier()
