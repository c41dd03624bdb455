"""TRL's functions of logits on this package: the same results, wherever a module of TRL has them by name."""

from __future__ import annotations

import importlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

# read once, when they are imported
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false")

import pytest
import torch

pytest.importorskip("trl", reason="needs the trl extra: pip install -c constraints.txt -e '.[test,trl]'")

from torch import Generator, Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trl.trainer import utils

import rlkernels
from rlkernels.integrations import trl as adapter
from rlkernels.integrations.trl import logits as ours

FORWARD, BACKWARD = "rlkernels::token_stats", "rlkernels::token_stats_backward"
FUNCTIONS = ("selective_log_softmax", "entropy_from_logits", "selective_log_softmax_and_entropy")
# beyond TRL's own error, both of the largest of the exact result
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
SHAPE = (2, 3, 5000)


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    yield
    adapter.unpatch()


def counted(function: Callable[[], Any]) -> tuple[Any, Counter[str]]:
    counts: Counter[str] = Counter()

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "rlkernels":
                counts[func.name()] += 1
            return func(*args, **(kwargs or {}))

    with Operations():
        return function(), counts


def with_gradient(name: str, logits: Tensor, *args: Any, **kwargs: Any) -> list[Tensor]:
    """The results of TRL's function of that name, and the gradient of a loss that reaches every entry differently."""
    leaf = logits.detach().requires_grad_()
    out = getattr(utils, name)(leaf, *args, **kwargs)
    outputs = list(out) if isinstance(out, tuple) else [out]
    loss = sum(
        (torch.linspace(-1, 2, x.numel(), dtype=torch.float64).view(x.shape) * x.double()).sum()
        for x in outputs
        if x.requires_grad
    )
    return [*outputs, *torch.autograd.grad(loss, leaf)]


def assert_like_trl(name: str, logits: Tensor, *args: Any, **kwargs: Any) -> None:
    exact = with_gradient(name, logits.double(), *args, **kwargs)
    trls, nothing = counted(lambda: with_gradient(name, logits, *args, **kwargs))
    adapter.patch()
    mine, counts = counted(lambda: with_gradient(name, logits, *args, **kwargs))
    adapter.unpatch()
    assert not nothing and counts == {FORWARD: 1, BACKWARD: 1}
    for actual, expected, truth in zip(mine, trls, exact, strict=True):
        described = (actual.dtype, actual.shape, actual.requires_grad)
        assert described == (expected.dtype, expected.shape, expected.requires_grad)
        scale = truth.abs().max().clamp(min=1e-6)
        error, trls_error = (((x.double() - truth).abs().max() / scale).item() for x in (actual, expected))
        assert error <= trls_error + TOLERANCE[logits.dtype], f"{list(actual.shape)}: {error:.2e}, TRL {trls_error:.2e}"


def inputs(generator: Generator, dtype: torch.dtype, choices: int | None) -> tuple[Tensor, Tensor, Tensor]:
    logits = (3 * torch.randn(SHAPE, generator=generator)).to(dtype)
    shape = SHAPE[:-1] if choices is None else (*SHAPE[:-1], choices)
    index = torch.randint(0, SHAPE[-1], shape, generator=generator)
    mask = torch.randint(0, 2, shape, generator=generator)
    mask[0, 1], mask[1, 0] = 0, 1
    return logits, index, mask


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("choices", [None, 1, 4], ids=["one", "K=1", "K=4"])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "row_mask"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_selective_log_softmax(
    dtype: torch.dtype, choices: int | None, masked: bool, temperature: float, generator: Generator
) -> None:
    logits, index, mask = inputs(generator, dtype, choices)
    assert_like_trl("selective_log_softmax", logits, index, temperature, row_mask=mask if masked else None)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_entropy_from_logits(dtype: torch.dtype, generator: Generator) -> None:
    logits, _, _ = inputs(generator, dtype, None)
    assert_like_trl("entropy_from_logits", logits, chunk_size=2)
    assert_like_trl("entropy_from_logits", logits[0])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["all", "row_mask"])
@pytest.mark.parametrize("entropy_requires_grad", [False, True], ids=["detached", "attached"])
def test_the_pair(dtype: torch.dtype, masked: bool, entropy_requires_grad: bool, generator: Generator) -> None:
    logits, index, mask = inputs(generator, dtype, None)
    mask = mask if masked else None
    assert_like_trl("selective_log_softmax_and_entropy", logits, index, entropy_requires_grad, 0.7, mask)


def test_slices_are_read_in_place(generator: Generator) -> None:
    logits, index, mask = inputs(generator, torch.float32, None)
    assert_like_trl("selective_log_softmax_and_entropy", logits[:, :-1], index[:, 1:], row_mask=mask[:, 1:])


def test_autocast_keeps_trls_dtype(generator: Generator) -> None:
    logits, index, _ = inputs(generator, torch.bfloat16, None)
    with torch.autocast("cpu", torch.bfloat16):
        assert_like_trl("selective_log_softmax", logits, index)
        assert_like_trl("entropy_from_logits", logits)


def test_nothing_of_a_masked_row_is_felt(generator: Generator) -> None:
    logits, index, mask = inputs(generator, torch.float32, 2)
    adapter.patch()
    clean = with_gradient("selective_log_softmax", logits, index, row_mask=mask)
    logits[0, 1], index[0, 1] = torch.nan, -100
    dirty = with_gradient("selective_log_softmax", logits, index, row_mask=mask)
    assert all(map(torch.equal, clean, dirty))


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_the_kernel_of_the_pair(backend: str, generator: Generator) -> None:
    """TRL's own runs on GPUs alone: what its CPU functions give, in float32."""
    logits, index, mask = inputs(generator, torch.float32, None)
    expected = utils.selective_log_softmax_and_entropy(logits, index, temperature=0.7, row_mask=mask)
    rlkernels.set_backend(backend)
    actual = ours.fused_logprob_entropy(logits, index, 0.7, mask)
    torch.testing.assert_close(actual, expected)
    half = ours.fused_logprob_entropy(logits.bfloat16(), index)
    assert [x.dtype for x in half] == [torch.float32] * 2


@pytest.mark.parametrize("label", [-100, SHAPE[-1]])
@pytest.mark.parametrize("choices", [None, 2])
def test_labels_outside_of_the_vocabulary_raise_as_in_trl(
    label: int, choices: int | None, generator: Generator
) -> None:
    logits, index, _ = inputs(generator, torch.float32, choices)
    index[1, 2] = label
    for patched in (False, True):
        if patched:
            adapter.patch()
        with pytest.raises((RuntimeError, ValueError)):
            utils.selective_log_softmax(logits, index)
        with pytest.raises(ValueError, match="temperature must be positive"):
            utils.selective_log_softmax(logits, index, temperature=0.0)


IMPORTED_BY_NAME = [
    ("trl.experimental.sdpo.loss_utils", "selective_log_softmax"),
    ("trl.experimental.sdft.loss_utils", "selective_log_softmax"),
    ("trl.experimental.tpo.tpo_trainer", "selective_log_softmax_and_entropy"),
]


@pytest.mark.parametrize("imported", ["before", "after"])
@pytest.mark.parametrize(("module", "name"), IMPORTED_BY_NAME, ids=[module for module, _ in IMPORTED_BY_NAME])
def test_modules_that_have_a_function_by_name(
    module: str, name: str, imported: str, monkeypatch: pytest.MonkeyPatch, generator: Generator
) -> None:
    """imported before and after the patch; after `unpatch()` they have TRL's again"""
    original = getattr(utils, name)
    if imported == "after":
        monkeypatch.delitem(sys.modules, module, raising=False)
        adapter.patch()
    user = importlib.import_module(module)
    adapter.patch()
    logits, index, _ = inputs(generator, torch.float32, None)
    _, counts = counted(lambda: getattr(user, name)(logits, index))
    assert counts == {FORWARD: 1}
    adapter.unpatch()
    assert getattr(user, name) is original
    _, counts = counted(lambda: getattr(user, name)(logits, index))
    assert not counts


def test_other_modules_keep_what_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module outside of TRL that had TRL's function keeps it; the adapter's own functions stay what they are."""
    mine = sys.modules[__name__]
    originals = {name: getattr(utils, name) for name in FUNCTIONS}
    monkeypatch.setattr(mine, "held_before", originals["entropy_from_logits"], raising=False)
    monkeypatch.setattr(mine, "of_the_adapter", ours.entropy_from_logits, raising=False)
    adapter.patch()
    monkeypatch.setattr(mine, "held_after", utils.entropy_from_logits, raising=False)
    assert vars(mine)["held_before"] is originals["entropy_from_logits"]
    assert vars(mine)["held_after"] is not originals["entropy_from_logits"]
    adapter.unpatch()
    assert vars(mine)["held_after"] is originals["entropy_from_logits"]
    assert vars(mine)["of_the_adapter"] is ours.entropy_from_logits
    assert {name: getattr(utils, name) for name in FUNCTIONS} == originals


def test_what_is_left_alone() -> None:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction
    from trl.trainer import distillation_trainer

    compacts = distillation_trainer._use_triton
    adapter.patch()
    assert distillation_trainer.ChunkedDivergenceFunction is ChunkedDivergenceFunction
    assert distillation_trainer._use_triton is compacts
    assert "ChunkedDivergenceFunction" in (adapter.patch.__doc__ or "")


def test_other_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "entropy_from_logits", lambda logits: logits)
    function = utils._ChunkedLogProbFunction
    with pytest.raises(RuntimeError, match=r"entropy_from_logits takes logits; expected logits, chunk_size"):
        adapter.patch()
    assert utils._ChunkedLogProbFunction is function
