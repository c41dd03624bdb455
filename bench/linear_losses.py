"""The GRPO loss from hidden states and a head: what the linear benchmarks compare."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import NamedTuple

import torch
from common import Shape
from torch import Tensor

import rlkernels
from rlkernels.cli import loss_twins
from rlkernels.cli.loss_twins import COMPILED, FUSED, NAIVE, SEQUENCE
from rlkernels.schedules import DEFAULT_CHUNK_BYTES

SMALL_CHUNK_BYTES = 32 << 20
SMALL_CHUNK = f"{FUSED}, chunk_bytes={SMALL_CHUNK_BYTES >> 20} MiB"
DEFAULT_CHUNK = f"chunk_bytes={DEFAULT_CHUNK_BYTES >> 20} MiB unless stated"
TOKENS = (512, 1024, 3072)
TRL_COLUMNS = 32_768  # of its tiles, as its trainers have it

Step = Callable[[], tuple[Tensor, ...]]


class Head(NamedTuple):
    """A head's sizes and dtype, named after the dtype."""

    name: str
    hidden_size: int
    vocab: int
    dtype: torch.dtype

    def sizes(self) -> str:
        return f"H={self.hidden_size}, V={self.vocab:,}"

    def gradient_bytes(self, tokens: int, frozen: bool = False) -> int:
        return (tokens + (0 if frozen else self.vocab)) * self.hidden_size * self.dtype.itemsize


HEADS = {"qwen": Head("bf16", 1024, 151_936, torch.bfloat16), "smollm2": Head("fp32", 576, 49_152, torch.float32)}


def head_of(model: str, shape: Shape) -> Head:
    head = HEADS[model]
    return head._replace(vocab=shape.vocab, hidden_size=64) if shape.is_quick else head


class Problem:
    """Hidden states, a head, and what the loss needs beside them."""

    def __init__(
        self, head: Head, tokens: int, frozen: bool = False, active_share: float = 1.0, device: str = "cpu"
    ) -> None:
        generator = torch.Generator(device).manual_seed(0)
        shape = (tokens // SEQUENCE, SEQUENCE) if tokens % SEQUENCE == 0 else (1, tokens)
        hidden = torch.randn(*shape, head.hidden_size, device=device, generator=generator).to(head.dtype)
        weight = torch.randn(head.vocab, head.hidden_size, device=device, generator=generator).div_(
            head.hidden_size**0.5
        )
        self.hidden, self.weight = hidden.requires_grad_(), weight.to(head.dtype).requires_grad_(not frozen)
        self.inputs = (self.hidden,) if frozen else (self.hidden, self.weight)
        self.targets = torch.randint(head.vocab, shape, device=device, generator=generator)
        self.advantages = torch.randn(shape[0], device=device, generator=generator)
        self.advantages[int(active_share * shape[0]) :] = 0
        stats = rlkernels.linear_token_stats(hidden.detach(), self.weight.detach(), self.targets, outputs=())
        self.old_logp = stats.logp

    def gradients_of(self, loss: Callable[[Problem], Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss(self), self.inputs)


def fused(problem: Problem, chunk_bytes: int | None = None) -> Tensor:
    batch = rlkernels.PolicyBatch(problem.targets, problem.advantages, old_logp=problem.old_logp)
    return rlkernels.linear_policy_loss(problem.hidden, problem.weight, batch, "grpo", chunk_bytes=chunk_bytes).loss


def from_logits(problem: Problem, name: str) -> Tensor:
    logits = torch.nn.functional.linear(problem.hidden, problem.weight)
    rows = loss_twins.Rows(logits, problem.targets, problem.advantages, problem.old_logp)
    return loss_twins.loss_function(name)(rows)


def trl(problem: Problem) -> Tensor:
    from trl.kernels import ChunkedLogProbFunction

    hidden, targets = problem.hidden.flatten(0, 1), problem.targets.flatten()
    # the entropy is a metric here, as in its GRPOTrainer
    logp = ChunkedLogProbFunction.apply(
        hidden, problem.weight, None, targets, 1.0, TRL_COLUMNS, None, 1.0, ("log_probs", "entropy")
    )[0]
    return loss_twins.surrogate(logp.view_as(problem.targets), problem.advantages, problem.old_logp)


def liger(problem: Problem) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(
        beta=0.0,
        compiled=False,  # of the arithmetic on log-probabilities alone
        use_ref_model=False,
        epsilon_low=loss_twins.CLIP,
        epsilon_high=loss_twins.CLIP,
        loss_type="grpo",
        chunk_size=len(problem.hidden),  # responses at a time; all is the fastest, and its logits are in tiles anyway
    )
    return loss(
        problem.hidden,
        problem.weight,
        problem.targets,
        torch.ones_like(problem.old_logp),
        problem.advantages,
        old_per_token_logps=problem.old_logp,
    )[0]


def _versioned(title: str, distribution: str, remark: str) -> str:
    try:
        return f"{title} {metadata.version(distribution)} ({remark})"
    except metadata.PackageNotFoundError:
        return title


TRL = _versioned("TRL", "trl", "its CPU fallback")

LOSSES: dict[str, Callable[[Problem], Tensor]] = {
    FUSED: fused,
    SMALL_CHUNK: partial(fused, chunk_bytes=SMALL_CHUNK_BYTES),
    NAIVE: partial(from_logits, name=NAIVE),
    COMPILED: partial(from_logits, name=COMPILED),
    TRL: trl,
    _versioned("Liger", "liger-kernel", "plain PyTorch"): liger,
}
PEERS = [name for name in LOSSES if name not in (FUSED, SMALL_CHUNK)]


def make_step(name: str, head: Head, tokens: int, frozen: bool = False) -> Step:
    """Forward and backward of a loss, on a problem of its own."""
    return step_of(name, Problem(head, tokens, frozen))


def step_of(name: str, problem: Problem) -> Step:
    return partial(problem.gradients_of, LOSSES[name])


@functools.cache
def unavailable_peers(dtype: torch.dtype) -> dict[str, str]:
    """Those that cannot run here, with the reason: each is tried on a small problem."""
    problem = Problem(Head("small", 16, 32, dtype), SEQUENCE)
    failures = {name: loss_twins.why_failing(step_of(name, problem)) for name in PEERS}
    return {name: failure for name, failure in failures.items() if failure is not None}
