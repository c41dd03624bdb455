"""TRL's fused LM head on this package's kernels."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from rlkernels import backends
from rlkernels.ops import linear_token_stats as linear_op
from rlkernels.ops.rows import RowStats, Wanted
from rlkernels.stats import TokenStats, linear_token_stats, make_linear_rows

OPTIONAL_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")

_UTILS = "trl.trainer.utils"
_FUNCTION = "_ChunkedLogProbFunction"
_GATHER = "maybe_gather_lm_head_ctx"
_COMPACTS = "_use_triton"
_TILE_ROWS = 4096  # of TRL's buffer, whose columns are `chunk_size`

_originals: dict[str, Any] = {}


def patch() -> None:
    """Run the fused LM head of every TRL trainer on this package, until `unpatch()`.

    Trainers built before and after are patched alike: TRL looks the function up at every call. What it computes, its
    arguments and its outputs stay TRL's. On a CPU TRL would project every position and mask the results; patched, it
    projects only those with a label, as on a GPU. On other devices without Triton all are projected in forward still,
    and backward leaves out those without a gradient. Calling it again does nothing.

    Raises:
        ImportError: TRL is not installed.
        RuntimeError: this version of TRL has no such function, or one with other arguments.

    Example:
        >>> from rlkernels.integrations import trl
        >>> trl.patch()
        >>> trl.unpatch()
    """
    if _originals:
        return
    utils = _checked_utils()
    compacts = getattr(utils, _COMPACTS)
    replacements = {_FUNCTION: ChunkedLogProb, _COMPACTS: lambda device: device.type == "cpu" or compacts(device)}
    for name, replacement in replacements.items():
        _originals[name] = getattr(utils, name)
        setattr(utils, name, replacement)


def unpatch() -> None:
    """Give TRL its own functions back; does nothing where they are in place.

    Example:
        >>> from rlkernels.integrations import trl
        >>> trl.unpatch()
    """
    while _originals:
        name, original = _originals.popitem()
        setattr(importlib.import_module(_UTILS), name, original)


def _checked_utils() -> Any:
    try:
        version = metadata.version("trl")
    except metadata.PackageNotFoundError:
        raise ImportError("rlkernels.integrations.trl needs TRL: pip install 'trl>=1.16'") from None
    utils = importlib.import_module(_UTILS)
    missing = [name for name in (_FUNCTION, _GATHER, _COMPACTS) if not hasattr(utils, name)]
    if missing:
        raise RuntimeError(f"trl {version} cannot be patched (1.16 can): {_UTILS} has no {', '.join(missing)}")
    function = getattr(utils, _FUNCTION)
    found = _argument_names(getattr(function, "forward", function))[1:]  # without ctx
    expected = _argument_names(ChunkedLogProb.apply)
    if found != expected:
        raise RuntimeError(
            f"trl {version} cannot be patched (1.16 can): {_UTILS}.{_FUNCTION} takes {', '.join(found)}; "
            f"expected {', '.join(expected)}"
        )
    return utils


def _argument_names(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


class ChunkedLogProb:
    """Stands in for `trl.kernels.ChunkedLogProbFunction`, of which TRL uses `apply` alone."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: Sequence[str] = OPTIONAL_OUTPUTS,
    ) -> tuple[Tensor | None, ...]:
        """`linear_token_stats` of `hidden [N, H]`: logp and each of `OPTIONAL_OUTPUTS`, None unless in `outputs`.

        `chunk_size` is the width of TRL's buffer; the logits here get as many bytes, cut as this package cuts them.
        """
        wanted = Wanted(*(name in outputs for name in Wanted._fields))
        stats: TokenStats | RowStats
        with _gemms_in_dtype_of(hidden, weight):
            if backends.choose(hidden.device) == "reference":
                stats = linear_token_stats(
                    hidden,
                    weight,
                    targets,
                    bias=bias,
                    temperature=temperature,
                    softcap=final_logit_softcapping,
                    logit_scale=logit_scale,
                    outputs=OPTIONAL_OUTPUTS,
                )
            else:
                rows = make_linear_rows(
                    hidden, weight, bias, targets, temperature, final_logit_softcapping, logit_scale, ignore_index=-100
                )
                chunk_bytes = _TILE_ROWS * chunk_size * rows.hidden.element_size()
                columns = _GatheredAgain.apply(*rows, *wanted, *rows.what_to_keep(), chunk_bytes)
                stats = RowStats(*columns[: len(RowStats._fields)])
        return (stats.logp, *(getattr(stats, name) if name in outputs else None for name in OPTIONAL_OUTPUTS))


def _gemms_in_dtype_of(hidden: Tensor, weight: Tensor) -> AbstractContextManager[Any]:
    """Autocast to `hidden`'s dtype where no autocast is on: FSDP2 hands a float32 head to bfloat16 hidden states."""
    device = hidden.device.type
    if weight.dtype == hidden.dtype or torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, hidden.dtype)


class _GatheredAgain(torch.autograd.Function):
    """The operation's own node, but ZeRO-3, which frees the head after forward, gathers it for backward too."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        output = linear_op.linear_token_stats(*inputs)
        linear_op.setup_context(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        _hidden, weight, bias = ctx.saved_tensors[:3]
        with getattr(importlib.import_module(_UTILS), _GATHER)(weight, bias):
            return linear_op.backward(ctx, *gradients)
