"""A policy loss inside of a model's forward, by TRL's own way through backbone and head."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from rlkernels.batch import PolicyBatch
from rlkernels.losses import PolicyLoss
from rlkernels.objectives import Objective
from rlkernels.recipes import ObjectiveFunction
from rlkernels.reductions import Normalizer


class PolicyCall:
    """What `linear_policy_loss` is asked in a forward, and its answer.

    A plain class, as `PolicyBatch` is: FSDP casts the floats of containers and dataclasses among a module's arguments.
    """

    def __init__(
        self,
        batch: PolicyBatch,
        objective: Objective | ObjectiveFunction,
        reduction: str,
        normalizer: Normalizer,
    ) -> None:
        self.batch = batch
        self.objective = objective
        self.reduction = reduction
        self.normalizer = normalizer
        self.out: PolicyLoss | None = None


_pending: ContextVar[PolicyCall | None] = ContextVar("policy_call", default=None)


def pending() -> PolicyCall | None:
    """The call that the head has to answer, while a model's forward runs with one."""
    return _pending.get()


def add_policy_loss(model: Any) -> None:
    """`model(..., labels=labels, fused_lm_head=True, policy_call=call)` returns the call's loss as `loss`.

    `log_probs` and `entropy` of the call's tokens are detached. `model` has TRL's fused head; without `policy_call` its
    forward is what it was. The loss is an output of the forward, so that hooks of DDP, FSDP and ZeRO see it.
    """
    fused_forward: Callable[..., Any] = model.forward

    @functools.wraps(type(model).forward)  # `generate` validates its arguments against it
    def forward(self: Any, *args: Any, policy_call: PolicyCall | None = None, **kwargs: Any) -> Any:
        if policy_call is None:
            return fused_forward(*args, **kwargs)
        with _as_pending(policy_call):
            output = fused_forward(*args, **kwargs)
        if policy_call.out is None:
            raise RuntimeError("policy_call: expected TRL patched, got its own head; call rlkernels' patch() first")
        output.loss = policy_call.out.loss
        return output

    model.forward = types.MethodType(forward, model)


@contextmanager
def _as_pending(call: PolicyCall) -> Iterator[None]:
    token = _pending.set(call)
    try:
        yield
    finally:
        _pending.reset(token)
