"""What the head is told besides TRL's arguments: a policy loss inside of a model's forward, tokens' temperatures."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor

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


class HeadTemperatures(NamedTuple):
    """`[B, T]`, of the last T positions: temperatures, and which of these positions have a label."""

    tokens: Tensor
    is_scored: Tensor


_pending: ContextVar[PolicyCall | None] = ContextVar("policy_call", default=None)

_temperatures: ContextVar[HeadTemperatures | None] = ContextVar("head_temperatures", default=None)


def pending() -> PolicyCall | None:
    """The call that the head has to answer, while a model's forward runs with one."""
    return _pending.get()


def temperatures_of_head() -> HeadTemperatures | None:
    """What replaces TRL's one temperature in the forward that runs."""
    return _temperatures.get()


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
        with _set(_pending, policy_call):
            output = fused_forward(*args, **kwargs)
        if policy_call.out is None:
            raise RuntimeError("policy_call: expected TRL patched, got its own head; call rlkernels' patch() first")
        output.loss = policy_call.out.loss
        return output

    model.forward = types.MethodType(forward, model)


def head_temperatures(temperatures: HeadTemperatures) -> AbstractContextManager[None]:
    """Forwards inside have these, in place of the temperature that TRL gave the head."""
    return _set(_temperatures, temperatures)


@contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
