"""TRL's fused LM head on this package's kernels."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from rlkernels import backends
from rlkernels.ops import linear_token_stats as linear_op
from rlkernels.ops.rows import RowStats, Wanted
from rlkernels.stats import TokenStats, linear_token_stats, make_linear_rows

OPTIONAL_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")

UTILS = "trl.trainer.utils"
GATHER = "maybe_gather_lm_head_ctx"

_TILE_ROWS = 4096  # of TRL's buffer, whose columns are `chunk_size`


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
        with getattr(importlib.import_module(UTILS), GATHER)(weight, bias):
            return linear_op.backward(ctx, *gradients)
