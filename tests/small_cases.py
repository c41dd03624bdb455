"""The small cases that broke other software: their ids, which backends each one concerns, and the paths to a loss."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import host_device
import pytest
import torch
from torch import Tensor

import rlkernels
from rlkernels import Metrics, PolicyBatch, TokenStats
from rlkernels.stats import OUTPUTS

# fmt: off
ROWS = (
    "B02", "B03", "B04", "B05", "B06", "B07", "B09", "B11", "B12", "B13", "B14", "B15", "B17", "B18", "B19", "B20",
    "B22", "B24", "B25", "B26", "B27", "B28", "B29", "B30", "B31", "B32", "B33", "B34", "B35", "B36", "B38", "B39",
    "B40", "B41", "B42", "B43", "B44", "B45", "B46", "B47", "B48", "B49", "B50", "B51", "B54", "B55", "B56", "B57",
    "B58", "B59", "B60", "B61", "B62", "B63", "B64", "B65", "B66", "B67", "B68", "B70", "B71", "B72", "B73", "B74",
    "B75", "B76", "B77", "B78", "B79", "B80", "B81", "B83", "B84", "B85", "B86", "B87", "B88", "B89", "B90", "B91",
    "B92", "B93", "B94", "B96", "B97", "B98", "B99", "B100", "B101", "B102", "B103", "B104", "B105", "B106", "B107",
    "B108", "B109", "B110", "P1", "P2", "P3", "P4", "P5", "P6", "P7", "P8",
)
# fmt: on

BACKENDS = ("cpu", "cuda", "triton", "reference")  # cuda, triton: on a GPU, or their kernels as the CPU runs them

_NO_GPU = "runs on CPU tensors or is any device's plain PyTorch, and this fault is a GPU's"
_ONLY_A_GPU = {"cpu": _NO_GPU, "reference": _NO_GPU}
_DEFINITION = "plain PyTorch, which keeps whole tensors of the logits' size; bounded memory is the kernels' promise"
_COMPARED = "what the other backends are compared with"
_PLAIN = dict.fromkeys(BACKENDS, "plain PyTorch without a kernel, the same code under every backend")
_STATIC = dict.fromkeys(BACKENDS, "read from the launch sizes or the build, without running a kernel")
_ON_HOST = {"cuda": "ranks are processes of their own, which the build for the CPU is not loaded into"}
_TRITON_ALONE = dict.fromkeys(("cpu", "cuda", "reference"), "of Triton's toolchain")

NOT_APPLICABLE: dict[str, dict[str, str]] = {
    **dict.fromkeys(("B02", "B03", "B04", "B05", "B79", "B80", "B88", "B91"), _ONLY_A_GPU),
    **{row: {"reference": _DEFINITION} for row in ("B32", "B36", "B92")},
    "B63": {"reference": _COMPARED},
    "B73": {"reference": _COMPARED},
    "B84": _TRITON_ALONE,
    **dict.fromkeys(("B77", "B78", "B90"), _ON_HOST),
    **dict.fromkeys(("B93", "B94", "B96", "B97", "B98", "B99", "B100"), _PLAIN),
    **dict.fromkeys(("B85", "B86"), _STATIC),
}

LN2 = math.log(2)
INF, NAN = math.inf, math.nan
IGNORE = -100


def row_of(test: str) -> str:
    found = re.match(r"test_([BP]\d+)_", test)
    assert found is not None, f"{test}: expected test_<row>_<what>"
    return found[1]


def by_row(metafunc: pytest.Metafunc) -> None:
    """A module's `pytest_generate_tests`: `backend` is each one that the test's row applies to."""
    _by_row(metafunc, on_gpu=True)


def by_row_on_the_cpu(metafunc: pytest.Metafunc) -> None:
    _by_row(metafunc, on_gpu=False)


def _by_row(metafunc: pytest.Metafunc, on_gpu: bool) -> None:
    if "backend" not in metafunc.fixturenames:
        return
    missing = NOT_APPLICABLE.get(row_of(metafunc.function.__name__), {})
    gpu = [name for name in ("cuda", "triton") if name not in missing]
    if metafunc.definition.get_closest_marker("gpu"):
        names: list[Any] = list(gpu)
    else:
        names = [name for name in BACKENDS if name not in missing]
        names += [pytest.param(name, marks=pytest.mark.gpu, id=f"{name} on a GPU") for name in gpu if on_gpu]
    metafunc.parametrize("backend", names, indirect=True)


@pytest.fixture
def backend_of_row(request: pytest.FixtureRequest, select_backend: Callable[[str], str]) -> str:
    """A module's `backend`, with `by_row`."""
    return select_backend(request.param)


def on_device(*values: Any, dtype: torch.dtype | None = None) -> Any:
    """Tensors, or what makes one, where the tests' tensors lie."""
    tensors = [torch.as_tensor(value, dtype=dtype).to(host_device.device()) for value in values]
    return tensors[0] if len(tensors) == 1 else tensors


through_logits_and_hidden = pytest.mark.parametrize("path", ["logits", "hidden"])
through_every_path = pytest.mark.parametrize("path", ["logits", "hidden", "logp"])


class GradientOf(Protocol):
    def __call__(self, scalar: Tensor) -> Tensor: ...


class Statistics(NamedTuple):
    stats: TokenStats
    dlogits: GradientOf  # [N, V]


def statistics(path: str, logits: Any, targets: Any, **options: Any) -> Statistics:
    """Every statistic of `[N, V]` logits: given as they are, or as what hidden states and a head make exactly.

    Several rows' hidden states are unit vectors, so that the head holds the logits; one row of logits is a bias, which
    need not be finite.
    """
    logits, targets = on_device(logits, targets)
    options = {"outputs": OUTPUTS} | options
    rows = logits.shape[0]
    if path == "logits":
        leaf = logits.clone().requires_grad_()
        stats = rlkernels.token_stats(leaf, targets, **options)
    elif rows == 1:
        leaf = logits[0].clone().requires_grad_()
        nothing = logits.new_zeros(leaf.shape[0], 1)
        stats = rlkernels.linear_token_stats(logits.new_ones(1, 1), nothing, targets, bias=leaf, **options)
    else:
        leaf = logits.T.clone(memory_format=torch.contiguous_format).requires_grad_()
        unit = torch.eye(rows, dtype=logits.dtype, device=logits.device)
        stats = rlkernels.linear_token_stats(unit, leaf, targets, **options)

    def dlogits(scalar: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(scalar, leaf, retain_graph=True)
        if path == "logits":
            return gradient
        return gradient[None] if rows == 1 else gradient.T

    return Statistics(stats, dlogits)


class LossAndGradient(NamedTuple):
    loss: Tensor
    dlogp: Tensor  # the loss's gradient with respect to each token's log-probability, in the tokens' layout
    metrics: Metrics


LOSS_OPTIONS = ("reduction", "normalizer", "entropy")


def loss_through(
    path: str,
    log_ratio: Any,
    objective: Any = "grpo",
    *,
    advantages: Any = None,
    mask: Any = None,
    garbage: float | None = None,
    ref_above: Any = None,
    on_policy: bool = False,
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> LossAndGradient:
    """A loss of tokens whose log-probabilities are log(1/2), in the layout of `log_ratio`.

    `ref_above` is ref_logp - logp; `garbage` stands in every input where the mask is 0.
    """
    log_ratio = on_device(log_ratio, dtype=dtype)
    shape = tuple(log_ratio.shape)
    kept = on_device(torch.ones(shape) if mask is None else mask) != 0

    def spoiled(values: Tensor) -> Tensor:
        return values if garbage is None else values.masked_fill(~kept, garbage)

    logp = torch.full(shape, -LN2, dtype=dtype, device=log_ratio.device)
    options = {name: more.pop(name) for name in LOSS_OPTIONS if name in more}
    extras = {name: on_device(value, dtype=dtype) for name, value in more.pop("extras", {}).items()}
    tensors = {name: on_device(value, dtype=dtype) for name, value in more.items()}
    tensors = {name: spoiled(value) if value.shape == shape else value for name, value in tensors.items()}
    if not on_policy:
        tensors["old_logp"] = spoiled(logp - log_ratio)
    if ref_above is not None:
        tensors["ref_logp"] = spoiled(logp + on_device(ref_above, dtype=dtype))
    if mask is not None:
        tensors["mask"] = kept
    advantages = on_device(torch.ones(shape[:1]) if advantages is None else advantages, dtype=dtype)
    labels = torch.zeros(shape, dtype=torch.int64, device=log_ratio.device)
    batch = PolicyBatch(None if path == "logp" else labels, advantages, extras=extras, **tensors)
    if path == "logp":
        leaf = spoiled(logp).requires_grad_()
        out = rlkernels.logp_policy_loss(leaf, batch, objective, **options)
    elif path == "logits":
        leaf = logp.new_zeros(*shape, 2).masked_fill(~kept[..., None], 0.0 if garbage is None else garbage)
        out = rlkernels.policy_loss(leaf.requires_grad_(), batch, objective, **options)
    else:
        width = max(1, labels.numel())
        unit = torch.eye(labels.numel(), width, dtype=dtype, device=logp.device).reshape(*shape, width)
        unit = unit.masked_fill(~kept[..., None], 0.0 if garbage is None else garbage)
        leaf = logp.new_zeros(2, width).requires_grad_()
        out = rlkernels.linear_policy_loss(unit, leaf, batch, objective, **options)
    (gradient,) = torch.autograd.grad(out.loss.sum(), leaf)
    if path == "logits":
        gradient = 2 * gradient[..., 0]  # dlogits of the target are dlogp (1 - p)
    elif path == "hidden":
        gradient = 2 * gradient[0, : labels.numel()].reshape(shape)
    return LossAndGradient(out.loss.detach(), gradient, out.metrics)


def assert_values(actual: Tensor, expected: Any, tolerance: float = 1e-5) -> None:
    """Close to numbers that are written with six digits, or to 0 itself."""
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual.detach().cpu(), expected, rtol=tolerance, atol=2e-6)


def assert_bits(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
