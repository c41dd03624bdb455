"""TRL's trainers on this package: the same numbers, by other kernels."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

# read once, when they are imported
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false")

import pytest
import torch

pytest.importorskip("trl", reason="needs the trl extra: pip install -c constraints.txt -e '.[test,trl]'")

from torch import Generator, Tensor
from trl import GRPOTrainer
from trl.kernels import ChunkedLogProbFunction
from trl.trainer import utils
from trl_models import VOCAB, config, dataset, low_ids, tiny_model, tokenizer
from trl_steps import Operations

import rlkernels
from rlkernels.integrations import trl as adapter
from rlkernels.integrations.trl import OPTIONAL_OUTPUTS, ChunkedLogProb

FORWARD, BACKWARD = "rlkernels::linear_token_stats", "rlkernels::linear_token_stats_backward"
CHUNK = 1000  # columns: an odd rest of 5,000
TRL_NAMES = ("_ChunkedLogProbFunction", "_use_triton")


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    yield
    adapter.unpatch()


# --- the function ---------------------------------------------------------------------------------------------------


def head(generator: Generator, dtype: torch.dtype, with_bias: bool = True) -> list[Tensor | None]:
    shapes = [(7, 16), (5000, 16), *([(5000,)] if with_bias else [])]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors[0] /= 4  # logits of a few units
    tensors = [tensor.to(dtype).requires_grad_() for tensor in tensors]
    return [*tensors, *([] if with_bias else [None])]


def results(function: Any, tensors: list[Tensor | None], targets: Tensor, *rest: Any) -> tuple[list[Any], list[Tensor]]:
    """The five outputs, and the gradients of `loss_of` them."""
    out = function.apply(*tensors, targets, *rest)
    needed = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    return list(out), list(torch.autograd.grad(loss_of(*out[:2]), needed))


def loss_of(logp: Tensor, entropy: Tensor | None) -> Tensor:
    """Reaches every row in another way, and the one in the middle not at all."""
    slope = torch.linspace(-1, 1, len(logp))
    loss = (slope * logp).sum()
    return loss if entropy is None else loss + (slope.square() * entropy).sum()


SUBSETS = [
    ("log_probs", *names)
    for count in range(len(OPTIONAL_OUTPUTS) + 1)
    for names in itertools.combinations(OPTIONAL_OUTPUTS, count)
]


# of the norm of TRL's result, which is as far from float64's as ours
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype, name: str) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), name
    error = ((actual.double() - expected.double()).norm() / expected.double().norm()).item()
    assert error <= TOLERANCE[dtype], f"{name}: relative error {error:.3e}"


def assert_equal_to_trl(
    tensors: list[Tensor | None], generator: Generator, outputs: tuple[str, ...], **scaling: Any
) -> None:
    targets = torch.randint(0, 5000, (7,), generator=generator)
    with torch.no_grad():  # one row whose target is its maximum
        tensors[1][targets[0]] = 12 * tensors[0][0] / tensors[0][0].square().sum()
    rest = (scaling["temperature"], CHUNK, scaling["softcap"], scaling["logit_scale"], outputs)
    mine, my_gradients = results(ChunkedLogProb, tensors, targets, *rest)
    trls, trl_gradients = results(ChunkedLogProbFunction, tensors, targets, *rest)
    for name, actual, expected in zip(("log_probs", *OPTIONAL_OUTPUTS), mine, trls, strict=True):
        assert (actual is None) == (expected is None) == (name not in outputs), name
        if actual is not None:
            assert actual.requires_grad == expected.requires_grad, name
            assert_close(actual, expected, tensors[0].dtype, name)
    for actual, expected in zip(my_gradients, trl_gradients, strict=True):
        assert_close(actual, expected, tensors[0].dtype, f"gradient of {list(expected.shape)}")


@pytest.mark.parametrize("outputs", SUBSETS, ids="+".join)
def test_every_subset_of_outputs(outputs: tuple[str, ...], generator: Generator) -> None:
    tensors = head(generator, torch.float32)
    assert_equal_to_trl(tensors, generator, outputs, temperature=0.7, softcap=None, logit_scale=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("frozen", [False, True], ids=["all-gradients", "frozen-head"])
@pytest.mark.parametrize("softcap", [None, 20.0], ids=["plain", "softcap"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["no-bias", "bias"])
def test_every_argument(
    with_bias: bool, softcap: float | None, frozen: bool, dtype: torch.dtype, generator: Generator
) -> None:
    tensors = head(generator, dtype, with_bias)
    for tensor in tensors[1:]:
        if tensor is not None:
            tensor.requires_grad_(not frozen)
    outputs = ("log_probs", *OPTIONAL_OUTPUTS)
    assert_equal_to_trl(tensors, generator, outputs, temperature=1.3, softcap=softcap, logit_scale=0.8)


def test_reference_backend(generator: Generator) -> None:
    tensors = head(generator, torch.float32)
    targets = torch.randint(0, 5000, (7,), generator=generator)
    rest = (1.3, CHUNK, 20.0, 0.8, ("log_probs", "entropy"))
    trls = results(ChunkedLogProbFunction, tensors, targets, *rest)
    rlkernels.set_backend("reference")
    mine = results(ChunkedLogProb, tensors, targets, *rest)
    assert mine[0][2:] == [None] * 3
    torch.testing.assert_close((mine[0][:2], mine[1]), (trls[0][:2], trls[1]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_no_rows(backend: str, generator: Generator) -> None:
    """What TRL hands over where no position has a label."""
    rlkernels.set_backend(backend)
    tensors = [torch.randn(0, 16), *head(generator, torch.float32)[1:]]
    out, gradients = results(ChunkedLogProb, tensors, torch.empty(0, dtype=torch.int64), 1.0, CHUNK)
    assert [tuple(value.shape) for value in out] == [(0,)] * 5
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("autocast", [False, True], ids=["fsdp2", "autocast"])
def test_float32_head_with_bfloat16_hidden_states(autocast: bool, generator: Generator) -> None:
    hidden, weight, _ = head(generator, torch.float32)
    tensors = [hidden.detach().to(torch.float32 if autocast else torch.bfloat16).requires_grad_(), weight, None]
    targets = torch.randint(0, 5000, (7,), generator=generator)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        mine, my_gradients = results(ChunkedLogProb, tensors, targets, 1.0, CHUNK)
        trls, trl_gradients = results(ChunkedLogProbFunction, tensors, targets, 1.0, CHUNK)
    for actual, expected in zip(mine[:2] + my_gradients, trls[:2] + trl_gradients, strict=True):
        assert_close(actual, expected, torch.bfloat16, f"{list(expected.shape)}")


def test_head_is_gathered_again_for_backward(monkeypatch: pytest.MonkeyPatch, generator: Generator) -> None:
    """ZeRO-3: the weight is empty outside the context."""
    tensors = head(generator, torch.float32)
    targets = torch.randint(0, 5000, (7,), generator=generator)
    _, expected = results(ChunkedLogProb, tensors, targets, 0.7, CHUNK)
    whole = {id(tensor): tensor.data for tensor in tensors[1:]}
    entered = []

    @contextmanager
    def gather(*parameters: Tensor) -> Iterator[None]:
        entered.append([id(parameter) for parameter in parameters])
        for parameter in parameters:
            parameter.data = whole[id(parameter)]
        yield
        for parameter in parameters:
            parameter.data = torch.empty(0)

    monkeypatch.setattr(utils, "maybe_gather_lm_head_ctx", gather)
    with gather(*tensors[1:]):
        logp, entropy, *_ = ChunkedLogProb.apply(*tensors, targets, 0.7, CHUNK)
    assert tensors[1].numel() == 0
    gradients = torch.autograd.grad(loss_of(logp, entropy), tensors)
    assert entered == [list(whole)] * 2
    assert all(map(torch.equal, gradients, expected))
    assert tensors[1].numel() == 0


# --- patching -------------------------------------------------------------------------------------------------------


def test_patching_and_unpatching_may_be_repeated() -> None:
    originals = [getattr(utils, name) for name in TRL_NAMES]
    adapter.unpatch()
    adapter.patch()
    adapter.patch()
    assert utils._ChunkedLogProbFunction is ChunkedLogProb
    adapter.unpatch()
    adapter.unpatch()
    assert [getattr(utils, name) for name in TRL_NAMES] == originals


def test_trl_that_cannot_be_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
            return hidden

    with monkeypatch.context() as patched:
        patched.setattr(utils, "_ChunkedLogProbFunction", Other)
        with pytest.raises(RuntimeError, match=r"trl 1\.16.* takes hidden, weight; expected hidden, weight, bias,"):
            adapter.patch()
        assert utils._ChunkedLogProbFunction is Other
    for name in (*TRL_NAMES, "maybe_gather_lm_head_ctx"):
        with monkeypatch.context() as patched:
            patched.delattr(utils, name)
            with pytest.raises(RuntimeError, match=rf"trl 1\.16.* cannot be patched.*has no {name}"):
                adapter.patch()

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(ImportError, match="needs TRL"):
        adapter.patch()


def test_importing_the_adapter_does_not_import_trl() -> None:
    script = "import sys, rlkernels, rlkernels.integrations.trl; assert 'trl' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


# --- a trainer ------------------------------------------------------------------------------------------------------


def trainer(folder: Path) -> GRPOTrainer:
    return GRPOTrainer(
        model=tiny_model(),
        reward_funcs=low_ids,
        args=config(folder, entropy_coef=0.01),
        train_dataset=dataset(),
        processing_class=tokenizer(),
    )


Log = list[dict[str, float]]


def trained(trainer: GRPOTrainer) -> tuple[Log, dict[str, Tensor], Counter[str]]:
    with Operations() as operations:
        trainer.train()
    log = [
        {name: value for name, value in entry.items() if "time" not in name and "_per_second" not in name}
        for entry in trainer.state.log_history[:3]
    ]
    return log, trainer.model.state_dict(), operations.counts


@pytest.fixture(scope="module")
def unpatched_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Log, dict[str, Tensor], Counter[str]]:
    return trained(trainer(tmp_path_factory.mktemp("unpatched")))


def assert_equal_runs(mine: tuple[Log, dict[str, Tensor], Any], trls: tuple[Log, dict[str, Tensor], Any]) -> None:
    assert len(mine[0]) == 3
    for actual, expected in zip(mine[0], trls[0], strict=True):
        assert {"loss", "grad_norm", "reward", "reward_std", "entropy", "completions/mean_length"} <= set(expected)
        assert actual == pytest.approx(expected, rel=1e-5, abs=1e-6, nan_ok=True)
    for name, weight in trls[1].items():
        torch.testing.assert_close(mine[1][name], weight, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("patched", ["before", "after"])
def test_trainer_gives_the_same_log_and_weights(patched: str, unpatched_run: Any, tmp_path: Path) -> None:
    """patched before and after the trainer is built"""
    if patched == "before":
        adapter.patch()
    subject = trainer(tmp_path)
    adapter.patch()
    mine = trained(subject)
    assert_equal_runs(mine, unpatched_run)
    assert (mine[2][FORWARD], mine[2][BACKWARD]) == (3, 3)
    assert not unpatched_run[2]
    rewards = [entry["reward_std"] for entry in mine[0]]
    lengths = [entry["completions/min_length"] < entry["completions/max_length"] for entry in mine[0]]
    assert min(rewards) > 0 and all(lengths), "a run that tests nothing"
    moved = [not torch.equal(mine[1][name], weight) for name, weight in tiny_model().state_dict().items()]
    assert all(moved)


def test_nothing_of_this_package_runs_after_unpatching(unpatched_run: Any, tmp_path: Path) -> None:
    adapter.patch()
    subject = trainer(tmp_path)
    adapter.unpatch()
    mine = trained(subject)
    assert not mine[2]
    assert_equal_runs(mine, unpatched_run)


def test_a_batch_without_labels_gives_zero_and_zero_gradients() -> None:
    adapter.patch()
    model = tiny_model()
    utils.add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    ids = torch.randint(3, VOCAB, (2, 5))
    out = model(input_ids=ids, labels=torch.full_like(ids, -100), fused_lm_head=True)
    assert not out.log_probs.any() and not out.entropy.any()
    out.loss.backward()
    assert not model.lm_head.weight.grad.any()


def test_only_labelled_positions_are_projected(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter.patch()
    rows = []

    def counted(hidden: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
        rows.append(hidden.shape[0])
        return apply(hidden, *args)

    apply = ChunkedLogProb.apply
    monkeypatch.setattr(ChunkedLogProb, "apply", staticmethod(counted))
    model = tiny_model()
    utils.add_fused_lm_head(model)
    ids = torch.randint(3, VOCAB, (2, 5))
    labels = ids.clone()
    labels[:, :3] = -100
    model(input_ids=ids, labels=labels, fused_lm_head=True)
    assert rows == [4]
