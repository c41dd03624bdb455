"""The first use of a GPU kernel in a process: its result for a small batch against the definition, once.

Compilers, drivers and devices that nobody tested with cannot then be wrong in silence.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import torch
from torch import Tensor

from rlkernels import reference
from rlkernels.ops.objective_options import CLIP, TOKEN_SUM, ObjectiveOptions
from rlkernels.ops.policy_objective import ObjectiveBatch, empty_result
from rlkernels.ops.rows import (
    Rows,
    SavedStats,
    Upstream,
    Wanted,
    compute_dtype,
    empty_dlogits,
    empty_row_stats,
)

ENVIRONMENT_VARIABLE = "RLKERNELS_SELF_CHECK"

_VOCAB = 4999  # two segments, rows that are not aligned
_IGNORE = -100

# relative to the largest number expected: far above rounding, far below a mistake
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.int32: 0.0}

_Check = Callable[[ModuleType, torch.device, torch.dtype], None]
_passed: set[tuple[str, _Check, torch.device, torch.dtype]] = set()


def once(module: ModuleType, backend: str, operation: str, device: torch.device, dtype: torch.dtype) -> None:
    """Checks a backend's kernels of an operation, unless they have passed, or a CUDA graph is being captured.

    Raises:
        RuntimeError: a result is wrong.
    """
    key = backend, _CHECKS[operation], device, dtype
    if key in _passed or os.environ.get(ENVIRONMENT_VARIABLE) == "0" or torch.compiler.is_compiling():
        return
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    with ThreadPoolExecutor(1) as thread:  # where no mode of the caller's is on: autograd, autocast, inference
        failure = thread.submit(_failure, _CHECKS[operation], module, device, dtype).result()
    if failure is not None:
        raise RuntimeError(
            f"backend {backend!r}: {operation} gives a wrong {failure} on {device} for {dtype}; its results cannot be "
            f"trusted with this driver or compiler. set_backend('reference') does without it, "
            f"{ENVIRONMENT_VARIABLE}=0 leaves this check out"
        )
    _passed.add(key)


class _WrongError(Exception):
    """Names the result."""


def _failure(check: _Check, module: ModuleType, device: torch.device, dtype: torch.dtype) -> str | None:
    try:
        check(module, device, dtype)
    except _WrongError as error:
        return str(error)
    return None


def _require(name: str, actual: Tensor, expected: Tensor) -> None:
    tolerance = _TOLERANCE[actual.dtype]
    actual, expected = actual.detach().cpu().double(), expected.detach().double()
    bound = tolerance * max(1e-30, expected.abs().max().item())
    if not bool(((actual - expected).abs() <= bound).all()):  # NaN is not
        raise _WrongError(name)


def _row_counts(device: torch.device) -> tuple[int, int]:
    """Few rows, which are split over blocks, and as many as give each block one."""
    many = 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    return 1, many


def _token_stats(module: ModuleType, device: torch.device, dtype: torch.dtype) -> None:
    for count in _row_counts(device):
        rows = _rows(count, device, dtype)
        stats, dlogits = empty_row_stats(rows, Wanted(*[True] * len(Wanted._fields))), empty_dlogits(rows)
        upstream = Upstream(*torch.linspace(-1, 1, 3 * count, dtype=compute_dtype(dtype), device=device).view(3, count))
        module.token_stats_forward(rows, stats)
        saved = SavedStats(stats.row_max, stats.log_sum_exp, stats.entropy)
        module.token_stats_backward(rows, saved, upstream, dlogits)

        logits = rows.logits.cpu().double().requires_grad_()
        exact = reference.row_stats(_rows(count, torch.device("cpu"), torch.float64)._replace(logits=logits))
        for name in ("logp", "entropy", "lse", "log_sum_sq_probs", "mean_logits"):
            _require(name, getattr(stats, name), getattr(exact, name))
        gradients = [gradient.cpu().double() for gradient in upstream if gradient is not None]
        (expected,) = torch.autograd.grad([exact.logp, exact.entropy, exact.lse], logits, gradients)
        _require("gradient", dlogits, expected)
        if not stats.is_top1.cpu().equal(exact.is_top1):
            raise _WrongError("is_top1")


def _indexed_logp(module: ModuleType, device: torch.device, dtype: torch.dtype) -> None:
    for count in _row_counts(device):
        index = torch.arange(count).flip(0).repeat(2)
        rows = _rows(count, device, dtype)
        rows = rows._replace(targets=rows.targets[index.to(device)])
        stats = empty_row_stats(rows, Wanted(*[False] * len(Wanted._fields)))
        module.token_stats_forward(rows, stats, index=index.to(device))

        exact = _rows(count, torch.device("cpu"), torch.float64)
        exact = exact._replace(logits=rows.logits.cpu().double(), targets=rows.targets.cpu())
        _require("logp", stats.logp, reference.indexed_logp(exact, index))


def _rows(count: int, device: torch.device, dtype: torch.dtype) -> Rows:
    """The same numbers on every device, but for the dtype's rounding; the last of several rows is ignored."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(1, count, _VOCAB, generator=generator)
    targets = torch.randint(_VOCAB, (count,), generator=generator)
    targets[1:][-1:] = _IGNORE
    one = torch.ones(1, dtype=compute_dtype(dtype), device=device)
    return Rows(logits.to(dtype).to(device), targets.to(device), 0.5 * one, None, one, _IGNORE)


def _policy_objective(module: ModuleType, device: torch.device, dtype: torch.dtype) -> None:
    logp = torch.linspace(-3, -1, 5, dtype=torch.float64)
    batch, options = _surrogate_batch(logp, device, dtype), _SURROGATE
    result = empty_result(logp.to(device, dtype), options, need_grad=True)
    module.policy_objective(logp.to(device, dtype), None, options, batch, result)
    rounded = logp.to(dtype).double().requires_grad_()
    loss = _surrogate(rounded, batch)
    _require("loss", result.loss, loss)
    _require("dlogp", result.dlogp, torch.autograd.grad(loss, rounded)[0])


def _policy_sweep(module: ModuleType, device: torch.device, dtype: torch.dtype) -> None:
    for count in _row_counts(device):
        rows = _rows(count, device, dtype)
        logits = rows.logits.cpu().double().requires_grad_()
        exact = reference.row_stats(_rows(count, torch.device("cpu"), torch.float64)._replace(logits=logits))
        batch = _surrogate_batch(exact.logp.detach(), device, compute_dtype(dtype))
        stats = empty_row_stats(rows, Wanted(True, False, False, False, False))
        dlogits = empty_dlogits(rows)
        module.policy_sweep(rows, _SURROGATE, batch, stats, dlogits)
        _require("logp", stats.logp, exact.logp)
        _require("entropy", stats.entropy, exact.entropy)
        (expected,) = torch.autograd.grad(_surrogate(exact.logp, batch), logits)
        _require("gradient", dlogits, expected)
        module.scale_unless_one(dlogits, torch.full((), 0.5, dtype=compute_dtype(dtype), device=device))
        _require("scaled gradient", dlogits, 0.5 * expected)


def _prefix_counts(module: ModuleType, device: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(2, (6, 40), generator=generator)
    token_ids[1, :33] = token_ids[0, :33]
    lengths, groups = torch.tensor([40, 38, 0, 5, 40, 40]), torch.tensor([0, 0, 0, 1, 1, 1])
    counts = torch.empty(token_ids.shape, dtype=torch.int32, device=device)
    arguments = token_ids, lengths, torch.arange(6), torch.tensor([0, 3, 6])
    module.prefix_counts(*(value.to(device) for value in arguments), counts)
    _require("count", counts, reference.prefix_counts(token_ids, lengths, groups))


# the clipped surrogate
_SURROGATE = ObjectiveOptions(kind=CLIP, level=0, ratio_min=0.8, ratio_max=1.2)


def _surrogate_batch(logp: Tensor, device: torch.device, dtype: torch.dtype) -> ObjectiveBatch:
    """Two sequences, the last of several tokens masked; ratios inside and outside the clip range."""
    count = logp.shape[0]
    mask = torch.ones(count, dtype=torch.bool)
    mask[1:][-1:] = False
    return ObjectiveBatch(
        mask=mask.to(device),
        old_logp=(logp - torch.linspace(0.1, 0.5, count)).to(device, dtype),
        ref_logp=None,
        weight=None,
        advantages=torch.linspace(-1, 1, count + 1)[:count].to(device, dtype),
        policy_weight=None,
        success_rate=None,
        cu_seqlens=torch.tensor([0, count // 2, count], device=device),
        sequences=2,
        reduction=TOKEN_SUM,
        entropy_reduction=TOKEN_SUM,
        normalizer=None,
        entropy_normalizer=None,
    )


def _surrogate(logp: Tensor, batch: ObjectiveBatch) -> Tensor:
    """Its definition, of float64 on the CPU."""
    assert batch.old_logp is not None
    mask, old_logp, advantages = batch.mask.cpu(), batch.old_logp.cpu().double(), batch.advantages.cpu().double()
    ratio = torch.exp(logp - old_logp)
    clipped = ratio.clamp(_SURROGATE.ratio_min, _SURROGATE.ratio_max)
    return -torch.where(mask, torch.minimum(ratio * advantages, clipped * advantages), 0).sum()


_CHECKS: dict[str, _Check] = {
    "token_stats": _token_stats,
    "linear_token_stats": _token_stats,
    "indexed_logp": _indexed_logp,
    "policy_objective": _policy_objective,
    "policy_sweep": _policy_sweep,
    "prefix_counts": _prefix_counts,
}
