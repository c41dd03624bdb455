"""How a case is read, and how a loss is held against its value and gradient."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rlkernels
from rlkernels import PolicyBatch

TOLERANCE = 1e-9
Case = dict[str, Any]


def load(path: Path) -> Case:
    """A case with its inputs and expectations as tensors where they are rectangular numbers."""
    case = json.loads(path.read_text())
    for part in ("inputs", "expected"):
        case[part] = {name: as_tensor(value) for name, value in case[part].items()}
    return case


def as_tensor(value: Any) -> Any:
    def numbers(x: Any) -> Any:
        if isinstance(x, list):
            return [numbers(y) for y in x]
        return float(x) if isinstance(x, str) and x in ("nan", "inf", "-inf") else x

    try:
        return torch.tensor(numbers(value), dtype=torch.float64)
    except (TypeError, ValueError):
        return value


def assert_close(actual: Tensor, expected: Tensor, name: str, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=tolerance, msg=lambda m: f"{name}: {m}")


def logits_of(logp: Tensor) -> Tensor:
    """Two-token logits in which token 0 has log-probability `logp`."""
    return torch.stack([logp, torch.log(-torch.expm1(logp))], dim=-1)


def check_loss(
    logp: Tensor,
    batch: dict[str, Any],
    objective: Any,
    reduction: str,
    normalizer: float | None,
    loss: Tensor,
    gradient: Tensor,
    what: str = "",
) -> None:
    """Value and gradient from log-probabilities, then from logits, on the selected backend."""
    options = {"reduction": reduction, "normalizer": normalizer}

    def loss_and_gradient(logp: Tensor) -> tuple[Tensor, Tensor]:
        logp = logp.clone().requires_grad_()
        out = rlkernels.logp_policy_loss(logp, PolicyBatch(None, **batch), objective, **options)
        return out.loss, torch.autograd.grad(out.loss, logp)[0]

    actual_loss, dlogp = loss_and_gradient(logp)
    assert_close(actual_loss, loss, f"{what} loss")
    assert_close(dlogp, gradient, f"{what} gradient")

    logits = logits_of(logp).requires_grad_()
    targets = torch.zeros(logp.shape, dtype=torch.int64)
    out = rlkernels.policy_loss(logits, PolicyBatch(targets, **batch), objective, **options)
    (dlogits,) = torch.autograd.grad(out.loss, logits)
    assert_close(out.loss, loss, f"{what} loss from logits")
    expected = -gradient * torch.expm1(logp)  # dlogp / dlogits is 1 - p for token 0 and p - 1 for the other
    # a case that sits exactly on a bound leaves it by one rounding on the way through the logits
    below, above = (loss_and_gradient(logp + shift)[1] for shift in (-1e-12, 1e-12))
    smooth = ((above - below).abs() < TOLERANCE)[..., None]
    expected = torch.stack([expected, -expected], dim=-1)
    assert_close(dlogits * smooth, expected * smooth, f"{what} gradient from logits")


def reduction_of(agg: str, params: dict[str, Any], mask: Tensor) -> tuple[str, float | None]:
    """What a case's `agg` says, in this package's terms."""
    rows, non_empty = mask.shape[0], int((mask.sum(-1) > 0).sum())
    if agg.startswith("token-mean"):
        return "token_mean", None
    if agg.startswith("seq-mean-token-mean"):
        # verl leaves empty rows out of the mean, TRL counts them
        return "seq_mean_token_mean", rows if "trl" in agg else non_empty
    if agg.startswith("mean over sequences"):
        return "seq_mean_token_mean", None
    if agg.startswith("sum/(B*Lmax)"):
        return "seq_mean_token_sum_norm", rows * params["Lmax"]
    if agg.startswith("seq-mean-token-sum-norm"):
        return "seq_mean_token_sum_norm", params["Lmax"]
    if agg.startswith("seq-mean-token-sum"):
        return "seq_mean_token_sum", None
    if divisor := re.match(r"sum over all tokens / (\d+)", agg):
        return "token_sum", float(divisor[1])
    raise AssertionError(f"unknown aggregation {agg!r}")


def kl_options(params: dict[str, Any]) -> dict[str, Any]:
    if not params.get("beta"):
        return {}
    name = (params["kl"] or "k3").partition(":")[0]
    return {"kl_coef": params["beta"], "kl_estimator": {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(name, name)}


def verl_weight(mask: Tensor) -> Tensor:
    """verl divides a row's sum by n + 1e-8 where this package divides by n."""
    lengths = mask.sum(-1, keepdim=True)
    return (lengths / (lengths + 1e-8)).expand_as(mask)


def common_batch(inputs: dict[str, Any], advantages: Tensor) -> dict[str, Any]:
    optional = {"ref_logp": inputs["ref_logp"]} if "ref_logp" in inputs else {}
    return {"advantages": advantages, "old_logp": inputs["old_logp"], "mask": inputs["mask"], **optional}
