"""The linear loss in parts of the rows, each with its gradients formed as soon as its logits exist.

Three GEMMs for any number of rows: nothing is made again, and nothing but gradients is kept. For GPUs, whose GEMMs add
to a float32 sum; `rlkernels.schedules` says when it is worth its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from rlkernels import backends
from rlkernels.ops.linear_rows import HeadGradient, Keep, LinearRows, linear_backward, linear_forward
from rlkernels.ops.rows import SavedStats, Upstream, Wanted, compute_dtype
from rlkernels.ops.token_stats import refuse_double_backward

_WANTED = Wanted(entropy=True, lse=False, log_sum_sq_probs=False, mean_logits=False, is_top1=False)


class Parts(NamedTuple):
    """Ranges of the rows, and what each adds to the loss."""

    spans: Sequence[slice]
    loss: Callable[[int, Tensor, Tensor], Tensor]  # of a part's number, logp and entropy, both flat
    chunk_bytes: int


def _itself(tensor: Tensor) -> Tensor:
    return tensor


class GradientInForward(torch.autograd.Function):
    """(loss, logp, entropy) of all parts; `hidden`, `weight` and `bias` stand beside `rows` for autograd to see."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: LinearRows, parts: Parts
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = rows._replace(hidden=hidden, weight=weight, bias=bias)
        ctx.needs = ctx.needs_input_grad[:3]
        kernels = backends.implementation("linear_token_stats", hidden)
        head = HeadGradient.sums(rows, *ctx.needs[1:])
        loss = torch.zeros((), dtype=compute_dtype(hidden.dtype), device=hidden.device)
        logp, entropy, dhidden = [], [], []
        for number, span in enumerate(parts.spans):
            part = rows.take(span)
            stats, kept = linear_forward(part, _WANTED, parts.chunk_bytes, kernels, Keep(direction=False, logits=True))
            leaves = (stats.logp.detach().requires_grad_(), stats.entropy.detach().requires_grad_())
            # a checkpoint around the loss keeps nothing of this graph, which ends here
            with torch.enable_grad(), saved_tensors_hooks(_itself, _itself):
                value = parts.loss(number, *leaves)
            dlogp, dentropy = torch.autograd.grad(value, leaves, allow_unused=True)
            loss += value.detach()
            logp.append(stats.logp)
            entropy.append(stats.entropy)
            saved = SavedStats(stats.row_max, stats.log_sum_exp, stats.entropy)
            upstream = Upstream(dlogp, dentropy, None)
            dhidden.append(
                linear_backward(part, saved, kept.logits, upstream, ctx.needs[0], head, parts.chunk_bytes, kernels)
            )
        ctx.save_for_backward(torch.cat(dhidden), head.dweight, head.dbias)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden, weight, bias)]
        outputs = loss, torch.cat(logp), torch.cat(entropy)
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        refuse_double_backward("linear_policy_loss")
        gradients: list[Tensor | None] = [None, None, None]
        if dloss is not None:
            for i, (gradient, needed) in enumerate(zip(ctx.saved_tensors, ctx.needs, strict=True)):
                if needed:
                    # one pass that scales and rounds, never in place: a second backward finds what the first did
                    out = torch.empty_like(gradient, dtype=ctx.dtypes[i])
                    gradients[i] = torch.mul(gradient, dloss, out=out)
        return (*gradients, None, None)
