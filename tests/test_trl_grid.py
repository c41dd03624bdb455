"""TRL's loss types by `FusedGRPOTrainer`: loss and every parameter's gradient are TRL's own.

On a tiny Qwen3 and on SmolLM2 cut to two layers, whose head is its embedding, both of random weights; in float32, and
in bfloat16 as close to float64 as TRL's.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

# read once, when they are imported
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false")

import pytest
import torch

pytest.importorskip("trl", reason="needs the trl extra: pip install -c constraints.txt -e '.[test,trl]'")

from torch import Tensor
from trl_models import small_smollm2, tiny_model
from trl_steps import (
    LOSS_TYPES,
    Exact,
    assert_as_exact_as_trl,
    assert_like_trl,
    fused_trainer,
    made_up_inputs,
    own_step,
    set_options,
    trls_step,
)

from rlkernels.integrations import trl as adapter
from rlkernels.integrations.trl import FusedGRPOTrainer

Loss = tuple[str, str, float]  # type, importance-sampling level, beta

# no heavy row in the head: the rounding of its one logit to bfloat16 would decide all gradients' errors
MODELS = {"qwen3": partial(tiny_model, ends_early=False), "smollm2": small_smollm2}
LOSSES = list(itertools.product(LOSS_TYPES, ("token", "sequence"), (0.0, 0.04)))
A_FEW = [("dapo", "token", 0.04), ("grpo", "sequence", 0.04), ("cispo", "token", 0.0), ("vespo", "token", 0.0)]
VARIANTS = [
    ("plain", ""),
    ("plain", "delta"),
    ("plain", "tool_mask"),
    ("plain", "entropy"),
    ("softcap", ""),
    ("bias", ""),
]
ALL = "delta+tool_mask+entropy"  # at once


class Subject(NamedTuple):
    exact: Exact
    logp: Tensor  # of the made-up batch

    def inputs(
        self, monkeypatch: pytest.MonkeyPatch, extra: str, loss: Loss
    ) -> tuple[FusedGRPOTrainer, dict[str, Tensor]]:
        """The trainer, with options set for one test, and its batch."""
        loss_type, level, beta = loss
        set_options(
            self.exact.trainer,
            monkeypatch,
            loss_type=loss_type,
            importance_sampling_level=level,
            beta=beta,
            delta=1.3 if "delta" in extra else None,
            entropy_coef=0.02 if "entropy" in extra else 0.0,
            epsilon_high=1.1 if loss_type == "cispo" else 0.2,
        )
        return self.exact.trainer, made_up_inputs("tool_mask" in extra, self.logp)


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    yield
    adapter.unpatch()


@pytest.fixture(scope="module")
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """A model with a head in a dtype."""
    name, head, dtype = request.param
    model = MODELS[name]()
    if head == "softcap":
        model.config.final_logit_softcapping = 3.0
    if head == "bias":
        model.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, model.config.vocab_size))
    folder = tmp_path_factory.mktemp("trainer")
    trainer = fused_trainer(folder, model=model.to(dtype), steps_per_generation=2, gradient_accumulation_steps=3)
    trainer.current_gradient_accumulation_steps = 3
    trainer.model.train()
    exact = Exact.of(trainer)
    yield Subject(exact, exact.logp(made_up_inputs()))


def cases(dtype: torch.dtype, name: str, variants: list[tuple[str, str]], losses: list[Loss]) -> list[Any]:
    return [
        pytest.param((name, head, dtype), extra, loss, id="-".join(filter(None, (name, head, extra, *map(str, loss)))))
        for head, extra in variants
        for loss in losses
    ]


@pytest.mark.parametrize(
    ("subject", "extra", "loss"),
    [
        *cases(torch.float32, "qwen3", VARIANTS, LOSSES),
        *cases(torch.float32, "smollm2", [("plain", ALL)], LOSSES),
        *cases(torch.float32, "smollm2", [("softcap", ALL), ("bias", ALL)], LOSSES[1::4]),
    ],
    indirect=["subject"],
)
def test_float32(subject: Subject, extra: str, loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, inputs = subject.inputs(monkeypatch, extra, loss)
    assert_like_trl(trainer, inputs, subject.exact)


@pytest.mark.parametrize(
    ("subject", "extra", "loss"),
    [
        *cases(torch.bfloat16, "qwen3", VARIANTS, LOSSES),
        *cases(torch.bfloat16, "smollm2", [("plain", ALL), ("softcap", ALL), ("bias", ALL)], A_FEW),
    ],
    indirect=["subject"],
)
def test_bfloat16(subject: Subject, extra: str, loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, inputs = subject.inputs(monkeypatch, extra, loss)
    truth = subject.exact.step(inputs)
    assert_as_exact_as_trl(own_step(trainer, inputs), trls_step(trainer, inputs), truth)
