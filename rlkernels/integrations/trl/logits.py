"""TRL's functions of logits: the same arguments and results, in one sweep over the vocabulary."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from rlkernels.integrations.trl.head import UTILS
from rlkernels.stats import TokenStats, token_stats

_IGNORED = torch.iinfo(torch.int64).min  # no label that TRL's own functions would take for one


def selective_log_softmax(
    logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> Tensor:
    """Log-probabilities `[...]` or `[..., K]` of `index`; entries under a zero of `row_mask` are 0 and not read."""
    logp, _ = _statistics(logits, index, temperature, row_mask, ())
    return _as_trl_has_it(logp, logits, index, row_mask)


def entropy_from_logits(logits: Tensor, chunk_size: int = 128) -> Tensor:
    """Entropies `[...]`, nats. `chunk_size` rows are TRL's at a time; here one sweep takes them all."""
    _, stats = _statistics(logits, torch.zeros_like(logits[..., 0], dtype=torch.int64), 1.0, None, ("entropy",))
    assert stats.entropy is not None
    return _as_trl_has_it(stats.entropy, logits)


def selective_log_softmax_and_entropy(
    logits: Tensor,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Both from the same sweep."""
    logp, stats = _statistics(logits, index, temperature, row_mask, ("entropy",))
    assert stats.entropy is not None
    entropy = stats.entropy if entropy_requires_grad else stats.entropy.detach()
    return _as_trl_has_it(logp, logits, index, row_mask), _as_trl_has_it(entropy, logits, index, row_mask)


def fused_logprob_entropy(
    logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`trl.kernels.selective_log_softmax_and_entropy`, which returns float32 whatever the logits are."""
    logp, stats = _statistics(logits, index, temperature, row_mask, ("entropy",))
    assert stats.entropy is not None
    return logp, stats.entropy


def _statistics(
    logits: Tensor, index: Tensor, temperature: float, row_mask: Tensor | None, outputs: tuple[str, ...]
) -> tuple[Tensor, TokenStats]:
    """Log-probabilities in `index`'s shape, and the statistics of the rows."""
    if temperature <= 0:  # in TRL's words
        raise ValueError("temperature must be positive")
    used = None if row_mask is None else (row_mask != 0).expand(index.shape)
    if index.ndim < logits.ndim:
        targets = index if used is None else torch.where(used, index, _IGNORED)
        stats = token_stats(logits, targets, temperature=temperature, ignore_index=_IGNORED, outputs=outputs)
        return stats.logp, stats
    row = index.new_zeros(index.shape[:-1])
    if used is not None:
        row = torch.where(used.any(-1), row, _IGNORED)
        index = torch.where(used, index, 0)
    stats = token_stats(logits, row, temperature=temperature, ignore_index=_IGNORED, outputs=("lse", *outputs))
    assert stats.lse is not None
    logp = logits.gather(-1, index).to(stats.lse.dtype) / temperature - stats.lse[..., None]
    return (logp if used is None else torch.where(used, logp, 0)), stats


def _as_trl_has_it(
    values: Tensor, logits: Tensor, index: Tensor | None = None, row_mask: Tensor | None = None
) -> Tensor:
    """In the dtype of TRL's own result: float32 from its Triton kernel, elsewhere what `log_softmax` gives."""
    utils = importlib.import_module(UTILS)
    if utils.is_triton_available() and utils._supports_trl_loss_kernel(logits, index, row_mask):
        return values.to(torch.float32)
    return values.to(log_softmax(logits.new_zeros(1), dim=-1).dtype)  # autocast has a say
