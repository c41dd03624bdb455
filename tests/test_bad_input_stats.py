"""Mistakes in a call of `token_stats`: what the message says, and that nothing has happened by then."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch
from test_token_stats import IGNORE
from torch import Tensor
from torch.autograd import forward_ad

import rlkernels
from rlkernels import backends, set_backend, set_checks
from rlkernels.ops.rows import RowStats, SavedStats, Upstream, Wanted, empty_dlogits, empty_row_stats
from rlkernels.stats import OUTPUTS, make_rows, token_stats

N, VOCAB = 4, 5
kernels = pytest.mark.parametrize("backend", ["cpu", "triton"], indirect=True)


def good_call(device: str) -> dict[str, Any]:
    return {
        "logits": torch.linspace(-2.0, 2.0, N * VOCAB, device=device).view(N, VOCAB),
        "targets": torch.tensor([0, 4, IGNORE, 1], device=device),
    }


def of_each_row(value: float) -> Tensor:
    """A temperature for each row, `value` in the last."""
    return torch.tensor([1.0, 2.0, 0.5, value])


# Found out on the host, whatever the device: the bad argument, the exception, the three parts of its message.
Mistake = tuple[dict[str, Any], type[Exception], str]

MISTAKES: dict[str, Mistake] = {
    # logits
    "logits: list": ({"logits": [[0.0, 1.0]]}, TypeError, "logits: expected a tensor, got list"),
    "logits: int64": (
        {"logits": torch.zeros(N, VOCAB, dtype=torch.int64)},
        TypeError,
        r"logits: expected dtype float64, float32, bfloat16, float16, got int64 \[4, 5\]",
    ),
    "logits: complex64": (
        {"logits": torch.zeros(N, VOCAB, dtype=torch.complex64)},
        TypeError,
        "logits: expected dtype .*got complex64",
    ),
    "logits: float8": (
        {"logits": torch.zeros(N, VOCAB).to(torch.float8_e4m3fn)},
        TypeError,
        "logits: expected dtype .*got float8_e4m3fn",
    ),
    "logits: bool": (
        {"logits": torch.zeros(N, VOCAB, dtype=torch.bool)},
        TypeError,
        "logits: expected dtype .*got bool",
    ),
    "logits: 0-d": ({"logits": torch.tensor(1.0)}, ValueError, r"logits: expected shape \[\.\.\., V\].*got"),
    "logits: no columns": (
        {"logits": torch.zeros(N, 0)},
        ValueError,
        r"logits: expected shape \[\.\.\., V\] with V >= 1, got float32 \[4, 0\]",
    ),
    "logits: sparse": (
        {"logits": torch.zeros(N, VOCAB).to_sparse()},
        (TypeError, ValueError),
        "logits: expected",
    ),
    # targets
    "targets: list": ({"targets": [0, 1, 2, 3]}, TypeError, "targets: expected a tensor, got list"),
    "targets: float32": (
        {"targets": torch.zeros(N)},
        TypeError,
        r"targets: expected dtype int64, .*got float32 \[4\]",
    ),
    "B104 targets: bool": (
        {"targets": torch.zeros(N, dtype=torch.bool)},
        TypeError,
        "targets: expected dtype .*got bool",
    ),
    "B107 targets: one too few": (
        {"targets": torch.zeros(N - 1, dtype=torch.int64)},
        ValueError,
        r"targets: expected shape \[4\], got int64 \[3\]",
    ),
    "B107 targets: one for all": (
        {"targets": torch.zeros(1, dtype=torch.int64)},
        ValueError,
        r"targets: expected shape \[4\], got int64 \[1\]",
    ),
    "targets: transposed": (
        {"logits": torch.zeros(2, 3, VOCAB), "targets": torch.zeros(3, 2, dtype=torch.int64)},
        ValueError,
        r"targets: expected shape \[2, 3\], got int64 \[3, 2\]",
    ),
    "targets: like logits": (
        {"targets": torch.zeros(N, VOCAB, dtype=torch.int64)},
        ValueError,
        r"targets: expected shape \[4\], got int64 \[4, 5\]",
    ),
    "B81 targets: another device": (
        {"targets": torch.zeros(N, dtype=torch.int64, device="meta")},
        ValueError,
        r"targets: expected on .* like logits, got int64 \[4\] on meta",
    ),
    # temperature
    "B68 temperature: 0": ({"temperature": 0.0}, ValueError, r"temperature: expected .*> 0.*, got 0\.0"),
    "B68 temperature: -1": ({"temperature": -1}, ValueError, "temperature: expected .*> 0.*, got -1"),
    "B68 temperature: NaN": ({"temperature": math.nan}, ValueError, "temperature: expected .*> 0.*, got nan"),
    "temperature: inf": ({"temperature": math.inf}, ValueError, "temperature: expected a finite .*got inf"),
    "temperature: None": ({"temperature": None}, TypeError, "temperature: expected a number .*got NoneType"),
    "temperature: str": ({"temperature": "1"}, TypeError, "temperature: expected a number .*got str"),
    "temperature: bool": ({"temperature": True}, TypeError, "temperature: expected a number, got bool"),
    "temperature: list": ({"temperature": [1.0] * N}, TypeError, "temperature: expected a number .*got list"),
    "temperature: complex": ({"temperature": 1j}, TypeError, "temperature: expected a number .*got complex"),
    "temperature: 1e39 in float32": ({"temperature": 1e39}, ValueError, "temperature: expected"),
    "temperature: one too few": (
        {"temperature": torch.ones(N - 1)},
        ValueError,
        r"temperature: expected shape \[\] or \[4\], got float32 \[3\]",
    ),
    "temperature: [B, 1]": (
        {"temperature": torch.ones(N, 1)},
        ValueError,
        r"temperature: expected shape \[\] or \[4\], got float32 \[4, 1\]",
    ),
    "temperature: bool tensor": (
        {"temperature": torch.ones(N, dtype=torch.bool)},
        TypeError,
        "temperature: expected a real dtype, got bool",
    ),
    "temperature: complex tensor": (
        {"temperature": torch.ones(N, dtype=torch.complex64)},
        TypeError,
        "temperature: expected a real dtype, got complex64",
    ),
    "temperature: requires grad": (
        {"temperature": torch.ones(N, requires_grad=True)},
        ValueError,
        "temperature: expected a tensor without gradient",
    ),
    "B81 temperature: another device": (
        {"temperature": torch.ones(N, device="meta")},
        ValueError,
        r"temperature: expected on .* like logits, got float32 \[4\] on meta",
    ),
    "B81 temperature: 0-d on another device": (
        {"temperature": torch.ones((), device="meta")},
        ValueError,
        r"temperature: expected on .*got float32 \[\] on meta",
    ),
    # softcap and logit_scale
    **{
        f"{name}: {value}": ({name: value}, ValueError, f"{name}: expected .*got {value}")
        for name in ("softcap", "logit_scale")
        for value in (0.0, -30.0, math.nan, math.inf)
    },
    "softcap: str": ({"softcap": "30"}, TypeError, "softcap: expected a number .*got str"),
    "softcap: of each row": (
        {"softcap": torch.ones(N)},
        ValueError,
        r"softcap: expected shape \[\], got float32 \[4\]",
    ),
    "logit_scale: None": ({"logit_scale": None}, TypeError, "logit_scale: expected a number .*got NoneType"),
    "logit_scale: of each row": (
        {"logit_scale": torch.ones(N)},
        ValueError,
        r"logit_scale: expected shape \[\], got float32 \[4\]",
    ),
    # ignore_index and outputs
    "ignore_index: None": ({"ignore_index": None}, TypeError, "ignore_index: expected an integer, got NoneType"),
    "ignore_index: float": ({"ignore_index": 0.5}, TypeError, "ignore_index: expected an integer, got float"),
    "ignore_index: past int64": ({"ignore_index": 2**63}, (TypeError, ValueError), "ignore_index: expected"),
    "outputs: unknown": (
        {"outputs": ("entropy", "perplexity")},
        ValueError,
        "outputs: expected one of 'entropy', .*got 'perplexity'",
    ),
    "outputs: logp is always there": ({"outputs": ("logp",)}, ValueError, "outputs: expected one of .*got 'logp'"),
    "outputs: a name alone": ({"outputs": "entropy"}, (TypeError, ValueError), "outputs: expected"),
    "outputs: None": ({"outputs": None}, (TypeError, ValueError), "outputs: expected"),
}


@pytest.fixture
def no_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> ModuleType:
        raise AssertionError("a kernel was asked for")

    monkeypatch.setattr(backends, "implementation", refuse)


@pytest.mark.usefixtures("no_kernel_runs")
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_seen_by_the_host(backend: str, name: str) -> None:
    changed, exception, message = MISTAKES[name]
    with pytest.raises(exception, match=message):
        token_stats(**{**good_call("cpu"), **changed})


def test_unknown_argument() -> None:
    """B64"""
    with pytest.raises(TypeError, match="label_smoothing"):
        token_stats(**good_call("cpu"), label_smoothing=0.1)


@kernels
def test_explicit_backend_does_not_run_elsewhere(backend: str) -> None:
    logits, targets = torch.zeros(N, VOCAB, device="meta"), torch.zeros(N, dtype=torch.int64, device="meta")
    if backend == "cpu":
        with pytest.raises(RuntimeError, match="backend 'cpu' cannot run this: it runs on CPU tensors, got meta"):
            token_stats(logits, targets)
    set_backend("auto")
    assert token_stats(logits, targets).logp.is_meta


# Known to the device alone. On the CPU it is looked at, always.

BAD_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"B14 label {label}": (
            {"targets": torch.tensor([0, 4, IGNORE, label])},
            rf"targets: expected labels in \[0, 5\) or ignore_index -100, got {label} at row 3",
        )
        for label in (-4, -1, VOCAB, 2**40, -(2**63), 2**63 - 1)
    },
    "B14 the usual ignored label, if another is": (
        {"ignore_index": 255},
        r"targets: expected labels in \[0, 5\) or ignore_index 255, got -100 at row 2",
    ),
    **{
        f"B68 temperature of a row {value}": ({"temperature": of_each_row(value)}, "temperature: expected .*> 0, got")
        for value in (0.0, -1.0, math.nan, math.inf)
    },
    **{
        f"{name} as a tensor {value}": ({name: torch.tensor(value)}, f"{name}: expected .*> 0, got")
        for name in ("temperature", "softcap", "logit_scale")
        for value in (0.0, -1.0, math.nan, math.inf)
    },
    "temperature 0 in float32": ({"temperature": 1e-60}, "temperature: expected .*> 0, got"),
}


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_values(backend: str, name: str, grad: bool) -> None:
    changed, message = BAD_VALUES[name]
    call = {**good_call("cpu"), **changed}
    call["logits"].requires_grad_(grad)
    before = [value.detach().clone() for value in call.values() if isinstance(value, Tensor)]
    with pytest.raises(ValueError, match=message):
        token_stats(**call)
    after = [value.detach() for value in call.values() if isinstance(value, Tensor)]
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


@kernels
@pytest.mark.parametrize("name", BAD_VALUES)
def test_nothing_is_written_before_bad_values_are_found(backend: str, name: str) -> None:
    changed, message = BAD_VALUES[name]
    defaults = {"temperature": 1.0, "softcap": None, "logit_scale": 1.0, "ignore_index": IGNORE}
    rows = make_rows(**{**good_call("cpu"), **defaults, **changed})
    stats = empty_row_stats(rows, Wanted(*[True] * len(OUTPUTS)))
    stats = RowStats(*(tensor.fill_(True if tensor.dtype == torch.bool else math.nan) for tensor in stats))
    module = backends.implementation("token_stats", rows.logits)
    with pytest.raises(ValueError, match=message):
        module.token_stats_forward(rows, stats)
    for field, tensor in stats._asdict().items():
        assert (tensor if tensor.dtype == torch.bool else tensor.isnan()).all(), field
    if backend == "cpu":  # the last guard before memory: it holds for backward alone, too
        dlogits = empty_dlogits(rows).fill_(math.nan)
        saved = SavedStats(torch.zeros(N), torch.zeros(N), torch.zeros(N))
        with pytest.raises(ValueError, match=message):
            module.token_stats_backward(rows, saved, Upstream(torch.ones(N), None, None), dlogits)
        assert dlogits.isnan().all()


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf], ids=str)
def test_temperature_of_an_ignored_row_is_not_looked_at(backend: str, value: float) -> None:
    call = good_call("cpu")
    temperature = torch.tensor([1.0, 2.0, value, 0.5], device=call["logits"].device)
    stats = token_stats(**call, temperature=temperature, outputs=OUTPUTS)
    assert [float(stat[2]) for stat in stats] == [0.0] * len(stats)
    assert all(stat.isfinite().all() for stat in stats)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BAD_VALUES)
def test_checks_on_a_gpu(name: str) -> None:
    """Unchecked, a bad value is NaN in its own rows; under set_checks(True) it raises."""
    set_backend("triton")
    changed, message = BAD_VALUES[name]
    call = {**good_call("cuda"), **changed}
    call = {key: value.cuda() if isinstance(value, Tensor) else value for key, value in call.items()}
    assert token_stats(**call).logp.isnan().any()
    set_checks(True)
    with pytest.raises(ValueError, match=message):
        token_stats(**call)


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_derivatives_that_kernels_do_not_have_are_refused(backend: str) -> None:
    """Not zeros, and not an internal error; the reference backend has them."""
    logits, targets = torch.randn(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64)
    batch = rlkernels.PolicyBatch(targets, torch.ones(2))
    weight = torch.randn(7, 5)
    functions = {
        "token_stats": lambda x: rlkernels.token_stats(x, targets).logp,
        "policy_loss": lambda x: rlkernels.policy_loss(x, batch).loss,
        "linear_token_stats": lambda x: rlkernels.linear_token_stats(x, weight, targets).logp,
        "policy objective": lambda x: rlkernels.logp_policy_loss(x[..., 0], batch).loss,
    }
    for name, function in functions.items():
        rlkernels.set_backend("reference")
        tangent = torch.func.jvp(function, (logits,), (torch.ones_like(logits),))[1]
        assert tangent.isfinite().all()
        rlkernels.set_backend(backend)
        with pytest.raises(RuntimeError, match=f"({name}|token_stats).*reference"):
            torch.func.jvp(function, (logits,), (torch.ones_like(logits),))
        with pytest.raises(RuntimeError, match="reference"):
            torch.func.grad(lambda x, function=function: function(x).sum())(logits)
        with pytest.raises(RuntimeError, match="reference"), forward_ad.dual_level():
            function(forward_ad.make_dual(logits, torch.ones_like(logits)))


def test_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2, 4), torch.zeros(1, 4)])
    with pytest.raises(TypeError, match=r"hidden.*nested"):
        rlkernels.linear_token_stats(nested, torch.zeros(5, 4), torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"logits.*nested"):
        rlkernels.token_stats(nested, torch.zeros(2, 2, dtype=torch.int64))


def test_meta_tensors_have_shapes() -> None:
    hidden, weight = torch.zeros(2, 3, device="meta"), torch.zeros(5, 3, device="meta")
    stats = rlkernels.linear_token_stats(hidden, weight, torch.zeros(2, dtype=torch.int64, device="meta"))
    assert stats.logp.shape == (2,) and stats.logp.device.type == "meta"


def test_any_size_of_chunk() -> None:
    hidden, weight = torch.zeros(2, 3), torch.zeros(5, 3)
    targets = torch.zeros(2, dtype=torch.int64)
    for chunk_bytes in (1, 2**63, 1e30):
        assert rlkernels.linear_token_stats(hidden, weight, targets, chunk_bytes=chunk_bytes).logp.isfinite().all()
