"""A whole step of a small model in one process: activation checkpointing, `torch.compile`, LoRA off the head."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Generator, Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from versions import traced_whole_after_2_7

import rlkernels
from rlkernels import PolicyBatch

VOCAB = 89

Head = Callable[[torch.nn.Linear, Tensor, PolicyBatch, str], Tensor]


def from_hidden(head: torch.nn.Linear, hidden: Tensor, batch: PolicyBatch, objective: str) -> Tensor:
    return rlkernels.linear_policy_loss(hidden, head.weight, batch, objective, bias=head.bias).loss


def from_logits(head: torch.nn.Linear, hidden: Tensor, batch: PolicyBatch, objective: str) -> Tensor:
    return rlkernels.policy_loss(head(hidden), batch, objective).loss


class Model(torch.nn.Module):
    def __init__(self, head: Head, objective: str, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, 16)
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)
        self.lm_head = torch.nn.Linear(16, VOCAB)
        self.head, self.objective, self.is_checkpointed = head, objective, is_checkpointed

    def forward(self, ids: Tensor, batch: PolicyBatch) -> Tensor:
        hidden = self.embedding(ids)
        hidden = hidden + self.down(torch.nn.functional.gelu(self.up(hidden)))
        if self.is_checkpointed:
            return checkpoint(self._loss, hidden, batch, use_reentrant=False)
        return self._loss(hidden, batch)

    def _loss(self, hidden: Tensor, batch: PolicyBatch) -> Tensor:
        return self.head(self.lm_head, hidden, batch, self.objective)


def model_of(head: Head, objective: str, **options: Any) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model(head, objective, **options)


def inputs_of(generator: Generator, length: int = 7) -> tuple[Tensor, PolicyBatch]:
    ids = torch.randint(0, VOCAB, (3, length), generator=generator)
    targets = ids.roll(-1, 1)
    targets[:, -1] = -100
    old_logp = -4.5 + 0.1 * torch.randn(3, length, generator=generator)
    return ids, PolicyBatch(targets, torch.randn(3, generator=generator), old_logp=old_logp)


def gradients(model: torch.nn.Module, step: Callable[..., Tensor], *inputs: Any) -> dict[str, Tensor]:
    """Of the parameters that are trained; and the loss."""
    model.zero_grad()
    loss = step(*inputs)
    loss.backward()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {"loss": loss.detach(), **{name: parameter.grad.clone() for name, parameter in trained.items()}}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


both_paths = pytest.mark.parametrize("head", [from_hidden, from_logits])
objectives = pytest.mark.parametrize("objective", ["dapo", "gspo", "gmpo"])


@both_paths
@objectives
@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained-head", "frozen-head"])
def test_head_and_loss_under_checkpointing(head: Head, objective: str, is_frozen: bool, generator: Generator) -> None:
    """B110: the same bits; backward makes the head's forward once more."""
    inputs, results = inputs_of(generator), []
    for is_checkpointed in (False, True):
        model = model_of(head, objective, is_checkpointed=is_checkpointed)
        model.lm_head.requires_grad_(not is_frozen)
        calls = []
        model.head = lambda *arguments, calls=calls: calls.append(1) or head(*arguments)
        results.append(gradients(model, model, *inputs))
        assert len(calls) == 1 + is_checkpointed
    assert_same(results[1], results[0], atol=0, rtol=0)


@traced_whole_after_2_7
@both_paths
@objectives
def test_step_compiles_whole_and_once_for_new_lengths(head: Head, objective: str, generator: Generator) -> None:
    """One graph of model, head and loss; the second length compiles it for any."""
    torch._dynamo.reset()
    model, counter = model_of(head, objective), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for length in (5, 8, 11, 6, 20):
        inputs = inputs_of(generator, length)
        assert_same(gradients(model, compiled, *inputs), gradients(model, model, *inputs), atol=1e-6, rtol=1e-5)
    assert counter.frame_count <= 2


@traced_whole_after_2_7
@pytest.mark.slow
def test_step_compiles_by_inductor(generator: Generator) -> None:
    torch._dynamo.reset()
    model, inputs = model_of(from_hidden, "dapo"), inputs_of(generator)
    compiled = torch.compile(model, fullgraph=True)
    assert_same(gradients(model, compiled, *inputs), gradients(model, model, *inputs), atol=1e-6, rtol=1e-5)


@traced_whole_after_2_7
def test_a_checkpointed_step_compiles_whole(generator: Generator) -> None:
    torch._dynamo.reset()
    inputs = inputs_of(generator)
    plain, model = model_of(from_hidden, "gspo"), model_of(from_hidden, "gspo", is_checkpointed=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same(gradients(model, compiled, *inputs), gradients(plain, plain, *inputs), atol=1e-6, rtol=1e-5)


@objectives
def test_lora_off_the_head(objective: str, generator: Generator) -> None:
    """The head is frozen: forward keeps a direction, and no gradient of the head is made."""
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False)
    fused = peft.get_peft_model(model_of(from_hidden, objective), adapters)
    naive = copy.deepcopy(fused)
    naive.get_base_model().head = from_logits
    inputs = inputs_of(generator)
    actual, expected = (gradients(model, model, *inputs) for model in (fused, naive))
    assert all("lora_" in name or name == "loss" for name in actual)
    assert_same(actual, expected, atol=1e-6, rtol=1e-5)
    assert all(parameter.grad is None for name, parameter in fused.named_parameters() if "lora_" not in name)
