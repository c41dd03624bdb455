"""What `gpu_check.py` measures: each case's implementations as calls without arguments, and what they have to move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import linear_losses
import torch
from linear_losses import Head, Problem
from torch import Tensor

import rlkernels
from rlkernels.cli import loss_twins
from rlkernels.cli.loss_twins import COMPILED, FUSED, NAIVE
from rlkernels.credit import prefix_set_counts

OURS = FUSED  # this package's lines are named after it and the backend
EAGER = NAIVE
GEMMS = "three bare GEMMs"
CCE = "cut-cross-entropy"

Step = Callable[[], object]


class Sizes(NamedTuple):
    tokens: int
    vocab: int
    hidden: int
    odd_tokens: int
    odd_vocab: int
    groups: int
    responses: int  # of a group
    length: int  # of a response
    rounds: int


FULL = Sizes(8192, 151_936, 4096, 65_537, 32_003, 64, 16, 8192, rounds=10)
QUICK = Sizes(128, 1000, 16, 65, 33, 2, 3, 20, rounds=1)


class Case(NamedTuple):
    name: str
    steps: Mapping[str, Step]
    bytes: int | None = None  # of logits read and gradients written, each once
    flop: int | None = None
    result_bytes: int = 0  # that a step returns


def gemm_flop(sizes: Sizes) -> int:
    return 2 * sizes.tokens * sizes.vocab * sizes.hidden


def on_backend(backend: str, step: Step) -> object:
    previous = rlkernels.set_backend(backend)
    try:
        return step()
    finally:
        rlkernels.set_backend(previous)


def ours(step: Step, names: list[str]) -> dict[str, Step]:
    return {f"{OURS} {name}": partial(on_backend, name, step) for name in names}


def _eager_stats(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_probs = torch.log_softmax(logits, -1, dtype=torch.float32)
    return log_probs.gather(-1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


def _trl_stats(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    return selective_log_softmax(logits, targets), entropy_from_logits(logits)


def statistics(sizes: Sizes, device: str, names: list[str]) -> Case:
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.empty(sizes.tokens, sizes.vocab, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    targets = torch.randint(sizes.vocab, (sizes.tokens,), device=device, generator=generator)
    steps = {
        **ours(lambda: rlkernels.token_stats(logits, targets), names),
        EAGER: partial(_eager_stats, logits, targets),
        COMPILED: partial(torch.compile(_eager_stats, dynamic=False), logits, targets),
        "TRL": partial(_trl_stats, logits, targets),
    }
    return Case(f"logp and entropy, logits {_shape(sizes.tokens, sizes.vocab)}", steps, bytes=logits.nbytes)


def loss_from_logits(sizes: Sizes, device: str, names: list[str]) -> Case:
    return _loss_case(sizes.tokens, sizes.vocab, device, names)


def loss_of_odd_shape(sizes: Sizes, device: str, names: list[str]) -> Case:
    """More rows than a grid's second axis takes, and rows that are not aligned."""
    return _loss_case(sizes.odd_tokens, sizes.odd_vocab, device, names)


def _loss_case(tokens: int, vocab: int, device: str, names: list[str]) -> Case:
    rows = loss_twins.make_rows(tokens, vocab, torch.bfloat16, device)
    steps = {
        **ours(partial(loss_twins.forward_backward, FUSED, rows), names),
        **{name: partial(loss_twins.forward_backward, name, rows) for name in (EAGER, COMPILED)},
    }
    size = rows.logits.nbytes
    return Case(f"GRPO loss and gradient, logits {_shape(tokens, vocab)}", steps, bytes=2 * size, result_bytes=size)


def _cut_cross_entropy(problem: Problem) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    nll = linear_cross_entropy(problem.hidden, problem.weight, problem.targets, reduction="none")
    return loss_twins.surrogate(-nll, problem.advantages, problem.old_logp)


def _three_gemms(problem: Problem) -> tuple[Tensor, Tensor]:
    hidden, weight = problem.hidden.detach().flatten(0, 1), problem.weight.detach()
    logits = hidden @ weight.T
    return logits @ weight, logits.T @ hidden


def loss_from_hidden(sizes: Sizes, device: str, names: list[str]) -> Case:
    problem = Problem(Head("bf16", sizes.hidden, sizes.vocab, torch.bfloat16), sizes.tokens, device=device)
    others: dict[str, Callable[[Problem], Any]] = {
        EAGER: partial(linear_losses.from_logits, name=NAIVE),
        COMPILED: partial(linear_losses.from_logits, name=COMPILED),
        "TRL": linear_losses.trl,
        "Liger": linear_losses.liger,
        CCE: _cut_cross_entropy,
    }
    steps = {
        **ours(partial(problem.gradients_of, linear_losses.fused), names),
        GEMMS: partial(_three_gemms, problem),
        **{name: partial(problem.gradients_of, loss) for name, loss in others.items()},
    }
    return Case(
        f"GRPO loss and gradients, hidden {_shape(sizes.tokens, sizes.hidden)} x {_shape(sizes.vocab, sizes.hidden)}",
        steps,
        flop=3 * gemm_flop(sizes),
        result_bytes=problem.hidden.nbytes + problem.weight.nbytes,
    )


def prefix_counts(sizes: Sizes, device: str, names: list[str]) -> Case:
    rows = sizes.groups * sizes.responses
    generator = torch.Generator(device).manual_seed(0)
    token_ids = torch.randint(2, (rows, sizes.length), device=device, generator=generator)
    token_ids[:, : sizes.length // 2] = 0  # shared
    lengths = torch.full((rows,), sizes.length, device=device)
    steps = ours(lambda: prefix_set_counts(token_ids, lengths, sizes.responses), names)
    return Case(f"prefix counts, {sizes.groups} x {sizes.responses} x {sizes.length:,}", steps)


CASES = (statistics, loss_from_logits, loss_of_odd_shape, loss_from_hidden, prefix_counts)


def _shape(*sizes: int) -> str:
    return f"[{', '.join(f'{size:,}' for size in sizes)}]"


def replay_captured(backend: str) -> None:
    """Captures statistics and their gradient in a CUDA graph and replays it on other logits."""
    logits = torch.randn(64, 5003, device="cuda", requires_grad=True)
    targets = torch.zeros(64, dtype=torch.int64, device="cuda")

    def step() -> Tensor:
        return torch.autograd.grad(rlkernels.token_stats(logits, targets).logp.sum(), logits)[0]

    on_backend(backend, step)  # compiles, and is checked
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = on_backend(backend, step)
    with torch.no_grad():
        logits.normal_()
    graph.replay()
    torch.testing.assert_close(captured, on_backend(backend, step), rtol=0, atol=0)
