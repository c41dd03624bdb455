"""TRL's fused LM head on this package's kernels."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlkernels import backends
from rlkernels.batch import IGNORE_INDEX
from rlkernels.integrations.trl.policy_call import PolicyCall, pending, temperatures_of_head
from rlkernels.losses import PolicyLoss, linear_policy_loss, logp_policy_loss
from rlkernels.ops import linear_token_stats as linear_op
from rlkernels.ops.rows import RowStats, Wanted
from rlkernels.stats import TokenStats, linear_token_stats, make_linear_rows

OPTIONAL_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
"""What TRL's head can return besides log-probabilities, in TRL's order."""

UTILS = "trl.trainer.utils"
GATHER = "maybe_gather_lm_head_ctx"

_TILE_ROWS = 4096  # of TRL's buffer, whose columns are `chunk_size`


class ChunkedLogProb:
    """Stands in for `trl.kernels.ChunkedLogProbFunction`, of which TRL uses `apply` alone.

    Example:
        >>> import torch
        >>> from rlkernels.integrations.trl import ChunkedLogProb
        >>> hidden, weight, targets = torch.zeros(1, 4), torch.zeros(8, 4), torch.tensor([3])
        >>> logp, entropy, *_ = ChunkedLogProb.apply(hidden, weight, None, targets, 1.0, 32768)
        >>> round(logp.item(), 6), round(entropy.item(), 6)
        (-2.079442, 2.079442)
    """

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
        """TRL's function of these arguments on `linear_token_stats`.

        Args:
            hidden, weight, bias, targets, temperature: `[N, H]`, `[V, H]`, `[V]` or None, integers `[N]`, a number.
            chunk_size: the width of TRL's buffer; the logits here get as many bytes, cut as this package cuts them.
            final_logit_softcapping, logit_scale: `softcap` and `logit_scale` of `linear_token_stats`.
            outputs: which of `OPTIONAL_OUTPUTS` to compute.

        Returns:
            logp `[N]` and each of `OPTIONAL_OUTPUTS`, None unless in `outputs`; dtypes as in `linear_token_stats`.
        """
        call, temperatures = pending(), temperatures_of_head()
        numbers: float | Tensor = temperature
        if temperatures is not None:
            numbers = temperatures.tokens[temperatures.is_scored] if call is None else temperatures.tokens
        head = _Head(hidden, weight, bias, numbers, chunk_size, final_logit_softcapping, logit_scale)
        with _gemms_in_dtype_of(hidden, weight):
            if call is not None:
                return head.answer(call)
            wanted = Wanted(*(name in outputs for name in Wanted._fields))
            stats = head.statistics(targets, wanted)
        return (stats.logp, *(getattr(stats, name) if name in outputs else None for name in OPTIONAL_OUTPUTS))


class _Head(NamedTuple):
    """TRL's arguments."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    temperature: float | Tensor
    chunk_size: int
    softcap: float | None
    logit_scale: float

    def chunk_bytes(self, hidden: Tensor) -> int:
        return _TILE_ROWS * self.chunk_size * hidden.element_size()

    def statistics(self, targets: Tensor, wanted: Wanted) -> TokenStats | RowStats:
        """Of `hidden [N, H]`."""
        if backends.choose(self.hidden.device) == "reference":
            return linear_token_stats(
                self.hidden,
                self.weight,
                targets,
                bias=self.bias,
                temperature=self.temperature,
                softcap=self.softcap,
                logit_scale=self.logit_scale,
                outputs=OPTIONAL_OUTPUTS,
            )
        rows = make_linear_rows(
            self.hidden,
            self.weight,
            self.bias,
            targets,
            self.temperature,
            self.softcap,
            self.logit_scale,
            ignore_index=IGNORE_INDEX,
        )
        columns = _GatheredAgain.apply(*rows, *wanted, *rows.what_to_keep(), self.chunk_bytes(rows.hidden))
        return RowStats(*columns[: len(RowStats._fields)])

    def answer(self, call: PolicyCall) -> tuple[Tensor | None, ...]:
        """The call's loss, kept in it; detached statistics of all rows, zero before the call's tokens."""
        batch = call.batch
        assert batch.targets is not None and batch.mask is not None
        sequences, tokens = batch.targets.shape
        hidden = self.hidden.view(sequences, -1, self.hidden.shape[-1])
        width = hidden.shape[1]
        scored = self._replace(hidden=hidden[:, -tokens:])
        call.out = scored.policy_loss(call)
        assert call.out.entropy is not None

        def with_prompt(values: Tensor) -> Tensor:
            return pad(values, (width - tokens, 0)).view(-1)

        return (with_prompt(call.out.logp), with_prompt(call.out.entropy), None, None, None)

    def policy_loss(self, call: PolicyCall) -> PolicyLoss:
        batch = call.batch
        assert batch.targets is not None and batch.mask is not None
        if hasattr(self.weight, "ds_id"):  # ZeRO-3 frees the head before backward
            flat = self._replace(hidden=self.hidden.reshape(-1, self.hidden.shape[-1]))
            if isinstance(self.temperature, Tensor):
                flat = flat._replace(temperature=self.temperature.reshape(-1))
            targets = torch.where(batch.mask, batch.targets, IGNORE_INDEX)
            stats = flat.statistics(targets.view(-1), Wanted(*(name == "entropy" for name in Wanted._fields)))
            assert stats.entropy is not None
            return logp_policy_loss(
                stats.logp.view(targets.shape),
                batch,
                call.objective,
                entropy=stats.entropy.view(targets.shape),
                reduction=call.reduction,
                normalizer=call.normalizer,
            )
        return linear_policy_loss(
            self.hidden,
            self.weight,
            batch,
            call.objective,
            bias=self.bias,
            reduction=call.reduction,
            normalizer=call.normalizer,
            temperature=self.temperature,
            softcap=self.softcap,
            logit_scale=self.logit_scale,
            chunk_bytes=self.chunk_bytes(self.hidden),
        )


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
