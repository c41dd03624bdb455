"""Policy losses through the public interface, forward and backward, beside PyTorch and beside copying the logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from common import Shape, compare, describe
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

import rlkernels
from rlkernels import backends
from rlkernels.cli.loss_twins import COMPILED, FUSED, NAIVE, Rows, forward_backward, make_rows, why_not_compiled

COPY, KERNEL = "copy of the logits", "kernel"
DAPO_WITH_ENTROPY = rlkernels.GRPO(clip_high=0.28, entropy_coef=0.01)
Call = Callable[[], object]


def test_grpo(rows: Rows, shape: Shape, benchmark: BenchmarkFixture) -> None:
    failure = why_not_compiled(rows)
    names = [FUSED, NAIVE] if failure else [FUSED, NAIVE, COMPILED]
    compare(
        benchmark,
        f'policy_loss("grpo"), forward + backward, {describe(rows.logits)}',
        {name: partial(forward_backward, name, rows) for name in names},
        subject=FUSED,
        baseline=FUSED,
        tokens=rows.targets.numel(),
        rounds=shape.rounds,
    )
    if failure:
        benchmark.extra_info["unavailable"] = {COMPILED: failure}


def call(
    rows: Rows, objective: str | rlkernels.Objective, upstream: float = 1.0, advantages: Tensor | None = None
) -> Call:
    batch = rlkernels.PolicyBatch(
        rows.targets, rows.advantages if advantages is None else advantages, old_logp=rows.old_logp
    )

    def run() -> tuple[Tensor, ...]:
        loss = rlkernels.policy_loss(rows.logits, batch, objective, reduction="token_mean").loss
        return torch.autograd.grad(loss if upstream == 1 else loss * upstream, rows.logits)

    return run


def captured(function: str, run: Call) -> Call:
    """The C++ backend's call of `function` that `run` makes, to be made again."""
    from rlkernels.backends import native

    kernel, calls = getattr(native, function), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, function, lambda *arguments: (calls.append(arguments), kernel(*arguments)))
        run()
    return partial(kernel, *calls[-1])


def mostly_zero(rows: Rows) -> Tensor:
    """Advantages of which a quarter is not 0, token by token."""
    advantages = rows.advantages[:, None].expand(rows.targets.shape).clone()
    advantages[:, advantages.shape[1] // 4 :] = 0
    return advantages


def rising(rows: Rows) -> Rows:
    """The same logits sorted: every segment's maximum lies above the one before."""
    return rows._replace(logits=rows.logits.detach().sort(dim=-1).values.requires_grad_())


CALLS: dict[str, Callable[[Rows], Call]] = {
    "dapo with entropy": lambda rows: call(rows, DAPO_WITH_ENTROPY),
    "dapo with entropy, upstream gradient 1/8": lambda rows: call(rows, DAPO_WITH_ENTROPY, upstream=0.125),
    "gspo": lambda rows: call(rows, "gspo"),
    "dapo, three quarters of the rows at zero advantage": lambda rows: call(rows, "dapo", advantages=mostly_zero(rows)),
    "dapo with entropy, rising rows": lambda rows: call(rising(rows), DAPO_WITH_ENTROPY),
}


@pytest.mark.parametrize("name", CALLS)
def test_beside_a_copy(name: str, rows: Rows, shape: Shape, benchmark: BenchmarkFixture) -> None:
    source, destination = rows.logits.detach(), torch.zeros_like(rows.logits)
    compare(
        benchmark,
        f"policy_loss, {name}, {describe(rows.logits)}",
        {
            FUSED: CALLS[name](rows),
            COPY: partial(destination.copy_, source),
            "dapo without entropy": call(rows, "dapo"),
        },
        subject=FUSED,
        baseline=COPY,
        tokens=rows.targets.numel(),
        rounds=shape.short_rounds,
    )


@pytest.mark.skipif(backends.why_unavailable("cpu") is not None, reason=str(backends.why_unavailable("cpu")))
def test_sweep_kernel(rows: Rows, shape: Shape, benchmark: BenchmarkFixture) -> None:
    """Without Python and PyTorch around it, into a gradient that exists; on one thread as well."""
    source, destination = rows.logits.detach(), torch.zeros_like(rows.logits)
    sweep = captured("policy_sweep", call(rows, DAPO_WITH_ENTROPY))

    def on_one_thread() -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        sweep()
        torch.set_num_threads(threads)

    compare(
        benchmark,
        f"policy_sweep, the kernel alone, {describe(rows.logits)}",
        {KERNEL: sweep, COPY: partial(destination.copy_, source), "the kernel on one thread": on_one_thread},
        subject=KERNEL,
        baseline=COPY,
        tokens=rows.targets.numel(),
        rounds=shape.short_rounds,
    )


OTHER_ROWS = {
    "odd rows": (4096, 32_003, 2.0),
    "short rows": (100_000, 128, 2.0),
    "nearly uniform": (512, 151_936, 0.05),
    "nearly certain": (512, 151_936, 20.0),
}


@pytest.mark.parametrize("name", OTHER_ROWS)
def test_other_shapes_and_spreads(name: str, shape: Shape, benchmark: BenchmarkFixture) -> None:
    tokens, vocab, spread = OTHER_ROWS[name]
    if shape.is_quick:
        tokens, vocab = 64, min(vocab, 1003)
    rows = make_rows(tokens, vocab, torch.bfloat16, "cpu", spread=spread)
    source, destination = rows.logits.detach(), torch.zeros_like(rows.logits)
    compare(
        benchmark,
        f"policy_loss, dapo with entropy, {name}, bf16 [{tokens:,}, {vocab:,}], standard deviation {spread}",
        {FUSED: call(rows, DAPO_WITH_ENTROPY), COPY: partial(destination.copy_, source)},
        subject=FUSED,
        baseline=COPY,
        tokens=tokens,
        rounds=shape.rounds,
    )


@pytest.mark.parametrize("objective", ["dapo", "gspo"])
def test_objective_alone(objective: str, shape: Shape, benchmark: BenchmarkFixture) -> None:
    """What is left between log-probabilities and loss: N = 65,536 tokens, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    sequences, length = (64, 1024) if not shape.is_quick else (4, 16)
    logp = torch.randn(sequences, length, generator=generator).requires_grad_()
    noise = 0.1 * torch.randn(sequences, length, generator=generator)
    targets = torch.zeros(sequences, length, dtype=torch.int64)
    advantages = torch.randn(sequences, generator=generator)
    batch = rlkernels.PolicyBatch(targets, advantages, old_logp=logp.detach() + noise)

    def run(backend: str = "auto") -> None:
        previous = rlkernels.set_backend(backend)
        torch.autograd.grad(rlkernels.logp_policy_loss(logp, batch, objective).loss, logp)
        rlkernels.set_backend(previous)

    calls = {FUSED: run, "the same in PyTorch (backend reference)": partial(run, "reference")}
    if backends.why_unavailable("cpu") is None:
        calls[KERNEL] = captured("policy_objective", run)
    compare(
        benchmark,
        f'logp_policy_loss("{objective}"), {sequences * length:,} tokens, metrics included',
        calls,
        subject=FUSED,
        baseline=FUSED,
        tokens=sequences * length,
        rounds=shape.short_rounds,
    )
