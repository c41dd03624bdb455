"""verl's fused forward on this package."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from rlkernels.heads import head_arguments
from rlkernels.integrations.verl.package import imported
from rlkernels.stats import linear_token_stats

_KERNEL = "verl.utils.kernel.linear_cross_entropy"
_FUSED_LINEAR = "verl.utils.experimental.torch_functional"
_MODEL_PATCH = "verl.models.transformers.monkey_patch"

_undo: list[Callable[[], None]] = []


def patch_fused_forward() -> None:
    """Run verl's fused forward (`model.use_fused_kernels=True`, any `impl_backend`) on this package, until `unpatch()`.

    Replaces `linear_cross_entropy`, also where Megatron's modules have imported it by name, and the forward of
    `FusedLinearForPPO`. Entropies come back in float32. verl hands over neither bias, softcap nor scale: a model that
    has one raises ValueError when verl patches it, instead of being computed wrongly. Calling it again does nothing.

    Raises:
        ImportError: verl is not installed.
        RuntimeError: this version of verl has no such functions.

    Example:
        >>> from rlkernels.integrations import verl
        >>> verl.patch_fused_forward()
        >>> verl.unpatch()
    """
    if _undo:
        return
    kernel, fused_linear, models = map(imported, (_KERNEL, _FUSED_LINEAR, _MODEL_PATCH))
    wanted = (
        (kernel, "linear_cross_entropy"),
        (fused_linear, "FusedLinearForPPO"),
        (models, "patch_forward_with_backends"),
    )
    for module, name in wanted:
        if not hasattr(module, name):
            raise RuntimeError(f"this version of verl cannot be patched (0.9.1 can): {module.__name__} has no {name}")
    _swap_kernel(kernel.linear_cross_entropy, linear_cross_entropy)
    _replace(fused_linear.FusedLinearForPPO, "forward", _fused_linear_forward)
    _replace(models, "patch_forward_with_backends", _checking_model(models.patch_forward_with_backends))


def unpatch() -> None:
    """Give verl its own fused forward back; does nothing where it is in place.

    Example:
        >>> from rlkernels.integrations import verl
        >>> verl.unpatch()
    """
    while _undo:
        _undo.pop()()


def _replace(owner: Any, name: str, replacement: Any) -> None:
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    _undo.append(lambda: setattr(owner, name, original))


def _swap_kernel(old: Any, new: Any) -> None:
    """Wherever verl's modules have `old`, and back again in those that import it in between too."""

    def swap(old: Any, new: Any) -> None:
        modules: list[Any] = [module for name, module in sys.modules.items() if name.startswith("verl.")]
        for module in modules:
            if getattr(module, "linear_cross_entropy", None) is old:
                module.linear_cross_entropy = new

    swap(old, new)
    _undo.append(lambda: swap(new, old))


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """verl's function of this name on `linear_token_stats`.

    Args:
        hidden: `[..., H]`, any float dtype.
        weight: `[V, H]`, `hidden`'s dtype; or this rank's part of the vocabulary, `[V / ranks, H]`.
        labels: `[...]` integers.
        temperature: > 0.
        reduction: `"none"`.
        dist_process_group: over whose ranks the vocabulary is spread, in their order, or None. `hidden`'s gradients add
            up over the ranks, as those of verl's kernel: Megatron's sequence-parallel gather, which made `hidden`, sums
            them.

    Returns:
        Log-probabilities and entropies, both `[N]` float32, nats.

    Raises:
        TypeError, ValueError: another reduction, or as `linear_token_stats`.

    Source: verl 0.9.1, `verl/utils/kernel/linear_cross_entropy.py`.

    Example:
        >>> import torch
        >>> from rlkernels.integrations import verl
        >>> logp, entropy = verl.linear_cross_entropy(torch.zeros(2, 4), torch.zeros(8, 4), torch.tensor([1, 3]))
        >>> round(logp[0].item(), 6), round(entropy[0].item(), 6)
        (-2.079442, 2.079442)
    """
    if reduction.lower() != "none":
        raise ValueError(f"reduction: expected 'none', got {reduction!r}")
    rows = hidden.reshape(-1, hidden.shape[-1])
    ranks = 1 if dist_process_group is None else dist_process_group.size()
    if ranks > 1 and rows.requires_grad:
        rows = rows.view_as(rows)
        rows.register_hook(lambda gradient: gradient / ranks)  # the whole one, on every rank
    group = dist_process_group if ranks > 1 else None
    stats = linear_token_stats(rows, weight, labels.reshape(-1), temperature=temperature, tp_group=group)
    assert stats.entropy is not None
    return stats.logp, stats.entropy


def _fused_linear_forward(
    self: Any, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    logp, entropy = linear_cross_entropy(hidden_states, vocab_weights, input_ids, temperature)
    return logp.view(input_ids.shape), entropy.view(input_ids.shape)


def _checking_model(patch_forward: Callable[..., Any]) -> Callable[..., Any]:
    def patch_forward_with_backends(model: Any, use_fused_kernels: bool = False, *args: Any, **kwargs: Any) -> Any:
        if use_fused_kernels:
            _refuse_unknown_head(model)
        return patch_forward(model, use_fused_kernels, *args, **kwargs)

    return patch_forward_with_backends


def _refuse_unknown_head(model: Any) -> None:
    found = [f"{name}={value}" for name, value in head_arguments(model.config).items() if value not in (None, 1.0)]
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        found.append("a bias")
    if found:
        raise ValueError(
            f"model: expected a head without bias, softcap and scale, which verl's fused forward does not apply, got "
            f"{type(model).__name__} with {', '.join(found)}; set model.use_fused_kernels=False"
        )
