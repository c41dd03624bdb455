"""TRL on this package's kernels: its fused LM head and its functions of logits."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch

from rlkernels.integrations.trl import logits
from rlkernels.integrations.trl.head import GATHER, OPTIONAL_OUTPUTS, UTILS, ChunkedLogProb
from rlkernels.integrations.trl.policy_call import pending, temperatures_of_head
from rlkernels.integrations.trl.replay import Replay

__all__ = ["OPTIONAL_OUTPUTS", "ChunkedLogProb", "FusedGRPOTrainer", "Replay", "patch", "unpatch"]

_FUNCTION = "_ChunkedLogProbFunction"
_COMPACTS = "_use_triton"
_KERNEL = "_fused_logprob_entropy"  # only where Triton is installed

_OF_LOGITS: dict[str, Callable[..., Any]] = {
    "selective_log_softmax": logits.selective_log_softmax,
    "entropy_from_logits": logits.entropy_from_logits,
    "selective_log_softmax_and_entropy": logits.selective_log_softmax_and_entropy,
    _KERNEL: logits.fused_logprob_entropy,
}

_originals: dict[str, Any] = {}
_replacements: dict[str, Any] = {}


def patch() -> None:
    """Run TRL's fused LM head and its functions of logits on this package, until `unpatch()`.

    Replaced, with TRL's own arguments, results, shapes and dtypes:

    * the fused head of every trainer (`_ChunkedLogProbFunction`). On a CPU TRL would project every position and mask
      the results; patched, it projects only those with a label, as on a GPU. On other devices without Triton all are
      projected in forward still, and backward leaves out those without a gradient;
    * `selective_log_softmax`, `entropy_from_logits` and `selective_log_softmax_and_entropy` of `trl.trainer.utils`, and
      wherever a module of TRL has them by name. Modules outside of TRL get them if they import them after the patch.

    Left alone: the divergence of `DistillationTrainer` (`ChunkedDivergenceFunction`), which compares two whole
    distributions.

    Trainers built before and after are patched alike: TRL looks the functions up at every call. Calling it again does
    nothing.

    Raises:
        ImportError: TRL is not installed.
        RuntimeError: this version of TRL lacks one of these functions, or has one with other arguments.

    Example:
        >>> from rlkernels.integrations import trl
        >>> trl.patch()
        >>> trl.unpatch()
    """
    if _originals:
        return
    utils = _checked_utils()
    compacts = getattr(utils, _COMPACTS)
    of_logits = {name: _own_object(function) for name, function in _OF_LOGITS.items() if hasattr(utils, name)}

    def compacts_rows(device: torch.device) -> bool:
        if pending() is not None:  # a loss wants whole sequences
            return False
        return temperatures_of_head() is not None or device.type == "cpu" or compacts(device)

    _replacements.update(of_logits | {_FUNCTION: ChunkedLogProb, _COMPACTS: compacts_rows})
    _originals.update({name: getattr(utils, name) for name in _replacements})
    for name, replacement in _replacements.items():
        setattr(utils, name, replacement)
    trls = {id(_originals[name]): function for name, function in of_logits.items() if name != _KERNEL}
    for module in list(sys.modules):
        if module.startswith("trl."):
            _replace(sys.modules[module], trls)


def unpatch() -> None:
    """Give TRL its own functions back, everywhere; does nothing where they are in place.

    Example:
        >>> from rlkernels.integrations import trl
        >>> trl.unpatch()
    """
    if not _originals:
        return
    utils = importlib.import_module(UTILS)
    for name, original in _originals.items():
        setattr(utils, name, original)
    ours = {id(_replacements[name]): original for name, original in _originals.items() if name in _OF_LOGITS}
    for module in list(sys.modules.values()):
        _replace(module, ours)
    _originals.clear()
    _replacements.clear()


def _own_object(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function as an object that nobody has but from TRL's modules, so that `unpatch()` finds it there."""

    @functools.wraps(function)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return replacement


def _replace(module: Any, functions: dict[int, Any]) -> None:
    """Module attributes that are one of the functions, by identity."""
    for name, value in list(getattr(module, "__dict__", {}).items()):
        if id(value) in functions:
            setattr(module, name, functions[id(value)])


def _checked_utils() -> Any:
    try:
        version = metadata.version("trl")
    except metadata.PackageNotFoundError:
        raise ImportError("rlkernels.integrations.trl needs TRL: pip install 'trl>=1.16'") from None
    utils = importlib.import_module(UTILS)
    of_logits = [name for name in _OF_LOGITS if name != _KERNEL]
    required = [_FUNCTION, GATHER, _COMPACTS, "_supports_trl_loss_kernel", *of_logits]
    missing = [name for name in required if not hasattr(utils, name)]
    if missing:
        raise RuntimeError(f"trl {version} cannot be patched (1.16 can): {UTILS} has no {', '.join(missing)}")
    function = getattr(utils, _FUNCTION)
    replaced = {_FUNCTION: (_argument_names(getattr(function, "forward", function))[1:], ChunkedLogProb.apply)}
    for name, replacement in _OF_LOGITS.items():
        if hasattr(utils, name):
            replaced[name] = (_argument_names(getattr(utils, name)), replacement)
    for name, (found, replacement) in replaced.items():
        expected = _argument_names(replacement)
        if found != expected:
            raise RuntimeError(
                f"trl {version} cannot be patched (1.16 can): {UTILS}.{name} takes {', '.join(found)}; "
                f"expected {', '.join(expected)}"
            )
    return utils


def _argument_names(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def __getattr__(name: str) -> Any:
    if name != "FusedGRPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rlkernels.integrations.trl.trainer import FusedGRPOTrainer  # imports TRL

    return FusedGRPOTrainer
