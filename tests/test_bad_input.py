"""Mistakes of a caller: an error that names the argument, what was expected and what came."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rlkernels
from rlkernels import GRPO, PolicyBatch, backends

TARGETS = torch.tensor([[1, 2, 3], [4, 0, -100]])
LOGITS = torch.zeros(2, 3, 5)
ONES = torch.ones(2, 3)
PACKED = TARGETS.view(-1)


def batch(**arguments: Any) -> PolicyBatch:
    return PolicyBatch(**({"targets": TARGETS, "advantages": torch.ones(2)} | arguments))


BAD_BATCHES = {
    "targets-float": ({"targets": TARGETS.float()}, TypeError, "targets.*int64.*float32"),
    "targets-list": ({"targets": [[1]]}, TypeError, "targets.*tensor"),
    "targets-3d": ({"targets": TARGETS[None]}, ValueError, "targets"),
    "advantages-shape": ({"advantages": torch.ones(3)}, ValueError, r"advantages.*\[2\].*\[3\]"),
    "advantages-transposed": ({"advantages": torch.ones(3, 2)}, ValueError, "advantages"),
    "advantages-bool": ({"advantages": torch.ones(2, dtype=torch.bool)}, TypeError, "advantages"),
    "advantages-list": ({"advantages": [1.0, 1.0]}, TypeError, "advantages"),
    "mask-shape": ({"mask": torch.ones(2, 4)}, ValueError, r"mask.*\[2, 3\].*\[2, 4\]"),
    "mask-device": ({"mask": torch.ones(2, 3, device="meta")}, ValueError, "mask.*cpu.*meta"),
    "old-logp-shape": ({"old_logp": torch.ones(4, 3)}, ValueError, "old_logp"),
    "old-logp-broadcast": ({"old_logp": torch.ones(1, 3)}, ValueError, "old_logp"),
    "ref-logp-device": ({"ref_logp": torch.ones(2, 3, device="meta")}, ValueError, "ref_logp"),
    "weight-per-sequence": ({"weight": torch.ones(2)}, ValueError, "weight"),
    "policy-weight-shape": ({"policy_weight": torch.ones(3)}, ValueError, "policy_weight"),
    "extras-list": ({"extras": [1]}, TypeError, "extras"),
    "extras-shape": ({"extras": {"success_rate": torch.ones(3)}}, ValueError, "success_rate"),
    "cu-seqlens-with-padded": ({"cu_seqlens": torch.tensor([0, 6])}, ValueError, "targets"),
    "cu-seqlens-float": (
        {"targets": PACKED, "cu_seqlens": torch.tensor([0.0, 6.0])},
        TypeError,
        "cu_seqlens",
    ),
    "cu-seqlens-short": (
        {"targets": PACKED, "cu_seqlens": torch.tensor([0, 4])},
        ValueError,
        "cu_seqlens",
    ),
    "cu-seqlens-late": (
        {"targets": PACKED, "cu_seqlens": torch.tensor([1, 6])},
        ValueError,
        "cu_seqlens",
    ),
    "cu-seqlens-falling": (
        {"targets": PACKED, "cu_seqlens": torch.tensor([0, 4, 2, 6])},
        ValueError,
        "cu_seqlens",
    ),
    "cu-seqlens-empty": ({"targets": PACKED, "cu_seqlens": torch.tensor([0])}, ValueError, "cu_seqlens"),
    "unknown": ({"rollout_logp": ONES}, TypeError, "rollout_logp"),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_bad_batch(name: str) -> None:
    arguments, error, message = BAD_BATCHES[name]
    with pytest.raises(error, match=message):
        batch(**arguments)


@pytest.mark.parametrize("name", ["loss_mask", "advantages"])
def test_ids_and_the_rest_on_two_devices(name: str) -> None:
    """Advantages of `[B, T]` are shifted with the ids."""
    tensors = {"loss_mask": ONES, "advantages": ONES}
    tensors[name] = tensors[name].to("meta")
    with pytest.raises(ValueError, match=f"{name}: expected on cpu like input_ids, got .* on meta"):
        PolicyBatch.from_input_ids(TARGETS, **tensors)


BAD_CALLS = {
    "batch-dict": ({"batch": {"targets": TARGETS}}, TypeError, "batch.*PolicyBatch.*dict"),
    "no-targets": ({"batch": PolicyBatch(None, torch.ones(2), mask=ONES)}, ValueError, "batch.*targets"),
    "logits-vocab-missing": ({"logits": LOGITS[..., 0]}, ValueError, "targets"),
    "logits-integer": ({"logits": LOGITS.long()}, TypeError, "logits"),
    "logits-longer": ({"logits": torch.zeros(2, 4, 5)}, ValueError, r"targets.*\[2, 4\].*\[2, 3\]"),
    "logits-device": ({"logits": torch.zeros(2, 3, 5, device="meta")}, ValueError, "targets.*meta.*cpu"),
    "label-too-large": ({"logits": torch.zeros(2, 3, 4)}, ValueError, r"targets.*\[0, 4\).*4"),
    "label-negative": ({"batch": batch(targets=TARGETS.clone().fill_(-1))}, ValueError, "targets.*-1"),
    "temperature-zero": ({"temperature": 0.0}, ValueError, "temperature.*> 0.*0"),
    "temperature-negative": ({"temperature": -1.0}, ValueError, "temperature"),
    "temperature-nan": ({"temperature": float("nan")}, ValueError, "temperature"),
    "temperature-tensor-zero": ({"temperature": torch.tensor([1.0, 0.0])}, ValueError, "temperature"),
    "temperature-shape": ({"temperature": torch.ones(3)}, ValueError, "temperature"),
    "temperature-text": ({"temperature": "1"}, TypeError, "temperature"),
    "softcap-zero": ({"softcap": 0.0}, ValueError, "softcap"),
    "logit-scale-tensor-negative": ({"logit_scale": torch.tensor(-1.0)}, ValueError, "logit_scale"),
    "objective-unknown": ({"objective": "gppo"}, ValueError, "objective.*'grpo'.*'gppo'"),
    "objective-number": ({"objective": 3}, TypeError, "objective"),
    "reduction-unknown": ({"reduction": "mean"}, ValueError, "reduction.*'token_mean'.*'mean'"),
    "normalizer-missing": ({"objective": "dr_grpo"}, ValueError, "normalizer"),
    "normalizer-negative": ({"normalizer": -1}, ValueError, "normalizer"),
    "normalizer-nan": ({"normalizer": float("nan")}, ValueError, "normalizer"),
    "normalizer-shape": ({"normalizer": torch.ones(2)}, ValueError, "normalizer"),
    "normalizer-tensor-negative": ({"normalizer": torch.tensor(-2.0)}, ValueError, "normalizer.*-2"),
    "normalizer-of-hundreds-of-digits": ({"normalizer": 10**400}, ValueError, "normalizer.*finite"),
    "normalizer-with-gradient": (
        {"normalizer": torch.tensor(2.0, requires_grad=True)},
        ValueError,
        "normalizer.*gradient",
    ),
    "normalizer-tensor-bool": ({"normalizer": torch.tensor(True)}, TypeError, "normalizer"),
    "objective-class": ({"objective": GRPO}, TypeError, "objective.*instance.*GRPO"),
    "callable-dtype": ({"objective": lambda logp, batch: logp.long()}, TypeError, "objective"),
    "normalizer-without-effect": ({"normalizer": 2.0, "reduction": "none"}, ValueError, "normalizer"),
    "ref-logp-missing": ({"objective": GRPO(kl_coef=0.1)}, ValueError, "ref_logp"),
    "success-rate-missing": ({"objective": "nft"}, ValueError, "success_rate"),
    "weight-missing": ({"objective": "lambda_grpo"}, ValueError, "weight"),
    "base-class": ({"objective": rlkernels.Objective()}, TypeError, "base class"),
    "callable-shape": ({"objective": lambda logp, batch: logp.sum()}, ValueError, "objective"),
    "unknown": ({"entropy_coef": 0.1}, TypeError, "entropy_coef"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_call(name: str, backend: str) -> None:
    changes, error, message = BAD_CALLS[name]
    arguments = {"logits": LOGITS.clone(), "batch": batch()} | changes
    with pytest.raises(error, match=message):
        rlkernels.policy_loss(**arguments)
    if isinstance(arguments["logits"], torch.Tensor) and arguments["logits"].device.type == "cpu":
        assert (arguments["logits"] == 0).all()


def test_logp_of_another_shape() -> None:
    with pytest.raises(ValueError, match=r"logp.*\[2, 3\].*\[2, 4\]"):
        rlkernels.logp_policy_loss(torch.zeros(2, 4), batch())


def test_entropy_bonus_without_entropies() -> None:
    with pytest.raises(ValueError, match="entropy"):
        rlkernels.logp_policy_loss(torch.zeros(2, 3), batch(), GRPO(entropy_coef=0.1))


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="name: expected one of 'auto', 'cpu'"):
        backends.why_unavailable("gpu")
    with pytest.raises(ValueError, match=r"'auto'.*'gpu'"):
        rlkernels.set_backend("gpu")


def kernels_of(driver: int) -> SimpleNamespace:
    """Built with CUDA 13.0, on a machine whose driver supports another version."""
    return SimpleNamespace(driver_version=lambda: driver, runtime_version=lambda: 13000)


@pytest.mark.parametrize(
    "kernels, reason",
    [
        (None, "built without CUDA kernels.*triton"),
        (kernels_of(0), "no NVIDIA driver"),
        (kernels_of(12040), r"CUDA 13\.0.*supports 12\.4"),
        (kernels_of(13010), "no NVIDIA GPU"),
    ],
    ids=["without nvcc", "without a driver", "older driver", "without a GPU"],
)
def test_unavailable_backend_says_why(
    kernels: SimpleNamespace | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = pytest.importorskip("rlkernels._native")
    monkeypatch.setattr(native, "cuda", kernels, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(backends, "_CUDA_ERROR", backends._cuda_error())
    with pytest.raises(RuntimeError, match=f"cuda.*{reason}"):
        rlkernels.set_backend("cuda")
    assert rlkernels.backend() == "auto"


def test_cuda_kernels_take_tensors_of_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_CUDA_ERROR", None)
    rlkernels.set_backend("cuda")
    with pytest.raises(RuntimeError, match=r"cuda.*got cpu"):
        rlkernels.token_stats(LOGITS, TARGETS)


def test_explicit_backend_is_never_replaced() -> None:
    rlkernels.set_backend("cpu")
    with pytest.raises(RuntimeError, match=r"cpu.*meta"):
        rlkernels.token_stats(LOGITS.to("meta"), TARGETS.to("meta"))
