"""The GRPO loss three ways, on the same rows: what the demo and `bench/` compare."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import rlkernels

CLIP = 0.2
SEQUENCE = 128  # tokens of a response
FUSED, NAIVE, COMPILED = "rlkernels", "naive PyTorch", "torch.compile"


class Rows(NamedTuple):
    """Logits of responses of equal length and what a loss needs beside them."""

    logits: Tensor  # [B, T, V], requires grad
    targets: Tensor  # [B, T]
    advantages: Tensor  # [B]
    old_logp: Tensor  # [B, T]


def make_rows(tokens: int, vocab: int, dtype: torch.dtype, device: str, seed: int = 0, spread: float = 1.0) -> Rows:
    """`tokens` rows of logits with standard deviation `spread`.

    In responses of `SEQUENCE` tokens, or in one where they do not divide.
    Filled in place: a temporary would be a peak of memory before the one that is measured.
    """
    generator = torch.Generator(device).manual_seed(seed)
    shape = (tokens // SEQUENCE, SEQUENCE) if tokens % SEQUENCE == 0 else (1, tokens)
    logits = torch.empty(*shape, vocab, dtype=dtype, device=device).normal_(std=spread, generator=generator)
    targets = torch.randint(vocab, shape, device=device, generator=generator)
    advantages = torch.randn(shape[0], device=device, generator=generator)
    # Ratios stay inside the clip range: a clipped row has no gradient and would be skipped by the fused loss.
    noise = torch.rand(shape, device=device, generator=generator) * 0.2 - 0.1
    old_logp = rlkernels.token_stats(logits, targets).logp + noise
    return Rows(logits.requires_grad_(), targets, advantages, old_logp)


def fused(rows: Rows) -> Tensor:
    batch = rlkernels.PolicyBatch(rows.targets, rows.advantages, old_logp=rows.old_logp)
    return rlkernels.policy_loss(rows.logits, batch, "grpo").loss


def naive(rows: Rows) -> Tensor:
    """What trainers write: nothing masked and equal lengths, so that a plain mean is GRPO's reduction."""
    log_probs = torch.log_softmax(rows.logits, dim=-1, dtype=torch.float32)
    return surrogate(log_probs.gather(-1, rows.targets.unsqueeze(-1)).squeeze(-1), rows.advantages, rows.old_logp)


def surrogate(logp: Tensor, advantages: Tensor, old_logp: Tensor) -> Tensor:
    """GRPO's loss of log-probabilities `[B, T]` of responses of equal length."""
    ratio = torch.exp(logp - old_logp)
    advantages = advantages.unsqueeze(-1)
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()


@functools.cache
def loss_function(name: str) -> Callable[[Rows], Tensor]:
    if name == COMPILED:
        return torch.compile(naive, dynamic=False)
    return {FUSED: fused, NAIVE: naive}[name]


def forward_backward(name: str, rows: Rows) -> Tensor:
    """One step of a loss; returns the logits' gradient."""
    return torch.autograd.grad(loss_function(name)(rows), rows.logits)[0]


def make_step(name: str, tokens: int, vocab: int, dtype: torch.dtype, device: str) -> Callable[[], Tensor]:
    """A loss's `forward_backward` on rows of its own."""
    return functools.partial(forward_backward, name, make_rows(tokens, vocab, dtype, device))


def why_not_compiled(rows: Rows) -> str | None:
    """Compiles the twin for the rows' shape. None if that works, else the first line of the reason."""
    return why_failing(functools.partial(forward_backward, COMPILED, rows))


def why_failing(step: Callable[[], object]) -> str | None:
    """None if the step runs, else the first line of the reason."""
    try:
        step()
    except Exception as error:  # what it needs may be missing, broken or too old, and there is no one class for that
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None
