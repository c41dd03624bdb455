"""slime's log-probabilities and entropies on this package."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernels.integrations.slime.package import slimes
from rlkernels.stats import token_stats

_FUNCTION = "calculate_log_probs_and_entropy"

_undo: list[Callable[[], None]] = []


def calculate_log_probs_and_entropy(
    logits: Tensor,
    tokens: Tensor,
    tp_group: dist.ProcessGroup | None,
    with_entropy: bool = False,
    chunk_size: int = -1,
    log_prob_keep_mask: Tensor | None = None,
    with_entropy_grad: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """slime's function of this name on `token_stats`.

    Args:
        logits: `[N, V]`, any float dtype: this rank's columns, as many as every other rank of `tp_group` has.
        tokens: `[N]` integers.
        tp_group: over whose ranks the vocabulary is spread, or None.
        with_entropy, with_entropy_grad: whether entropies are returned, and whether with their gradient.
        chunk_size: of no effect: no second tensor of the logits' size is made, but under a mask.
        log_prob_keep_mask: `[N, V]` bool: the columns among which the log-probability is, and the token's own; the
            entropy is that of all.

    Returns:
        Log-probabilities `[N, 1]` and entropies `[N]` or None, float32 (float64 for float64 logits), nats.

    Raises: as `token_stats`.

    Source: slime 0.3.1, `slime/utils/ppo_utils.py`.

    Example:
        >>> import torch
        >>> from rlkernels.integrations import slime
        >>> logp, entropy = slime.calculate_log_probs_and_entropy(torch.zeros(2, 4), torch.tensor([1, 3]), None)
        >>> round(logp[0].item(), 6), entropy
        (-1.386294, None)
    """
    is_spread = tp_group is not None and tp_group.size() > 1
    group = tp_group if is_spread else None
    outputs = ("entropy",) if with_entropy else ()
    if log_prob_keep_mask is None:
        stats = token_stats(logits, tokens, outputs=outputs, tp_group=group)
        logp, entropy = stats.logp, stats.entropy
    else:
        first = tp_group.rank() * logits.shape[-1] if group is not None and tp_group is not None else 0
        columns = first + torch.arange(logits.shape[-1], device=logits.device)
        is_kept = log_prob_keep_mask | (columns == tokens[:, None])
        kept = logits.masked_fill(~is_kept, -torch.inf)
        logp = token_stats(kept, tokens, outputs=(), tp_group=group).logp
        entropy = token_stats(logits, tokens, tp_group=group).entropy if with_entropy else None
    if entropy is not None and not with_entropy_grad:
        entropy = entropy.detach()
    return logp.unsqueeze(-1), entropy


def patch() -> None:
    """Compute slime's log-probabilities and entropies, in every loss and forward of it, on this package.

    Until `unpatch()`; also where slime has imported the function by name. Calling it again does nothing.

    Raises:
        ImportError: slime is not installed.

    Example:
        >>> from rlkernels.integrations import slime
        >>> slime.patch()  # doctest: +SKIP
    """
    if _undo:
        return
    original = getattr(slimes("utils.ppo_utils"), _FUNCTION)
    _swap(original, calculate_log_probs_and_entropy)
    _undo.append(lambda: _swap(calculate_log_probs_and_entropy, original))


def unpatch() -> None:
    """Give slime its own function back; does nothing where it is in place.

    Example:
        >>> from rlkernels.integrations import slime
        >>> slime.unpatch()
    """
    while _undo:
        _undo.pop()()


def _swap(old: Any, new: Any) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("slime.") and getattr(module, _FUNCTION, None) is old:
            setattr(module, _FUNCTION, new)
