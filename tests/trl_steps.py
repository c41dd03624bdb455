"""One step of a GRPO trainer's loss on a made-up batch: TRL's, this package's, and TRL's in float64."""

from __future__ import annotations

import copy
import math
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trl import GRPOTrainer
from trl.trainer import utils
from trl_models import VOCAB, config, dataset, low_ids, tiny_model, tokenizer

from rlkernels.integrations import trl as adapter
from rlkernels.integrations.trl import FusedGRPOTrainer

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
ROWS, PROMPT, LENGTH = 5, 4, 9
TEMPERATURE = 0.9
UNIFORM = -math.log(VOCAB)
# far from where the tests' clipping starts: log 0.8, log 1.1, log 1.2 and log 1.3
LOG_RATIOS = torch.tensor([-0.6, -0.35, -0.1, 0.02, 0.14, 0.22, 0.45])
SEED = 2305  # the means over sequences are far from it too, and on both sides of it


def fused_trainer(
    folder: Path, columns: dict[str, list[Any]] | None = None, model: Any = None, **options: Any
) -> FusedGRPOTrainer:
    names = ("objective", "reduction", "prefix_weights", "replay", "peft_config")
    own = {name: options.pop(name) for name in names if name in options}
    return FusedGRPOTrainer(
        model=tiny_model() if model is None else model,
        reward_funcs=low_ids,
        args=config(folder, **options),
        train_dataset=dataset(**(columns or {})),
        processing_class=tokenizer(),
        **own,
    )


def set_options(trainer: FusedGRPOTrainer, monkeypatch: pytest.MonkeyPatch, **values: Any) -> FusedGRPOTrainer:
    """Sets attributes of the trainer and of its args for one test."""
    for name, value in values.items():
        for owner in (trainer, trainer.args):
            if hasattr(owner, name):
                monkeypatch.setattr(owner, name, value)
    monkeypatch.setattr(trainer, "_entropy_bonus_enabled", trainer.entropy_coef != 0 or trainer.use_adaptive_entropy)
    return trainer


def made_up_inputs(with_tools: bool = False, logp: Tensor | None = None) -> dict[str, Tensor]:
    """Ragged prompts and completions; one row empty, one all of whose tokens are a tool's.

    Ratios are to `logp`, the policy's; by default to that of a policy that knows nothing.
    """
    generator = torch.Generator().manual_seed(SEED)
    logp = torch.full((ROWS, LENGTH), UNIFORM) if logp is None else logp.float()

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(ROWS, LENGTH, generator=generator)

    lengths = torch.tensor([9, 4, 0, 7, 2])
    completion_mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    prompt_mask = (torch.arange(PROMPT) >= torch.tensor([0, 1, 0, 2, 3])[:, None]).long()
    inputs = {
        "prompt_ids": torch.randint(3, VOCAB, (ROWS, PROMPT), generator=generator),
        "prompt_mask": prompt_mask,
        "completion_ids": torch.randint(3, VOCAB, (ROWS, LENGTH), generator=generator),
        "completion_mask": completion_mask,
        "advantages": torch.tensor([1.2, -0.7, 0.4, -1.5, 0.9]),
        "num_items_in_batch": torch.tensor(37),
        "old_per_token_logps": logp - LOG_RATIOS[torch.randint(len(LOG_RATIOS), (ROWS, LENGTH), generator=generator)],
        "ref_per_token_logps": logp + noise(0.3),
        "importance_sampling_ratio": noise(0.3).exp(),
    }
    if with_tools:
        tool_mask = torch.randint(0, 2, (ROWS, LENGTH), generator=generator)
        tool_mask[4] = 0
        inputs["tool_mask"] = tool_mask
    return inputs


Result = tuple[Tensor, dict[str, Tensor], dict[str, Any]]


def step(trainer: GRPOTrainer, loss_of: Any, inputs: dict[str, Tensor], model: Any = None) -> Result:
    """Loss, gradients of all parameters, metrics."""
    model = trainer.model if model is None else model
    model.zero_grad(set_to_none=True)
    trainer._metrics["train"].clear()
    loss = loss_of(trainer, model, dict(inputs))
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    model.zero_grad(set_to_none=True)
    return loss.detach(), gradients, dict(trainer._metrics["train"])


def trls_step(trainer: FusedGRPOTrainer, inputs: dict[str, Tensor]) -> Result:
    adapter.unpatch()
    return step(trainer, GRPOTrainer._compute_loss, inputs)


def own_step(trainer: FusedGRPOTrainer, inputs: dict[str, Tensor]) -> Result:
    adapter.patch()
    with Operations() as operations:
        result = step(trainer, FusedGRPOTrainer._compute_loss, inputs)
    assert operations.counts, "none of this package's operations ran"
    assert trainer._needs_trls_loss() or "rlkernels::policy_objective" in operations.counts
    return result


class Operations(TorchDispatchMode):
    """Counts this package's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "rlkernels":
            self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


class Exact(NamedTuple):
    """A trainer, and its model in float64 under a head in plain PyTorch: TRL's own loss without rounding."""

    trainer: FusedGRPOTrainer
    model: Any

    @classmethod
    def of(cls, trainer: FusedGRPOTrainer) -> Exact:
        model = copy.deepcopy(trainer.model).double()
        model.forward = types.MethodType(type(model).forward, model)  # the copy's, not the trainer's
        utils.add_fused_lm_head(model, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
        for module in model.modules():
            if hasattr(module, "variance_epsilon"):  # transformers' norms round to float32
                module.forward = types.MethodType(_rms_norm, module)
        return cls(trainer, model)

    def step(self, inputs: dict[str, Tensor]) -> Result:
        with _plain_head():
            return step(self.trainer, GRPOTrainer._compute_loss, inputs, self.model)

    @torch.no_grad()
    def logp(self, inputs: dict[str, Tensor]) -> Tensor:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        with _plain_head():
            score = GRPOTrainer._get_per_token_logps_and_entropies
            return score(self.trainer, self.model, ids, mask, inputs["completion_ids"].shape[1])[0]


def _rms_norm(self: Any, hidden: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(hidden, hidden.shape[-1:], self.weight, self.variance_epsilon)


class _PlainHead:
    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None,
        logit_scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:
        logits = logit_scale * torch.nn.functional.linear(hidden, weight, bias)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        log_p = (logits / temperature).log_softmax(-1)
        return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1), None, None, None


@contextmanager
def _plain_head() -> Iterator[None]:
    adapter.unpatch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "_ChunkedLogProbFunction", _PlainHead)
        patch.setattr(utils, "_use_triton", lambda device: True)  # projects labelled rows only
        yield


def relative_errors(actual: Result, expected: Result) -> dict[str, float]:
    """Of each gradient, of its norm."""
    assert set(actual[1]) == set(expected[1])
    return {
        name: ((actual[1][name] - gradient).norm() / gradient.norm().clamp(min=1e-6)).item()
        for name, gradient in expected[1].items()
    }


TOLERANCE = 1e-5


def assert_equal_steps(mine: Result, expected: Result, metrics: bool = True) -> None:
    """Loss and every gradient within 1e-5."""
    torch.testing.assert_close(mine[0], expected[0], rtol=TOLERANCE, atol=1e-6)
    for name, error in relative_errors(mine, expected).items():
        assert error <= TOLERANCE, f"{name}: {error:.2e}"
    if metrics:
        assert_equal_metrics(mine, expected)


def assert_equal_metrics(mine: Result, expected: Result) -> None:
    assert set(mine[2]) == set(expected[2])
    for name, values in expected[2].items():
        assert mine[2][name] == pytest.approx(values, rel=1e-5, abs=1e-6, nan_ok=True), name


def assert_like_trl(trainer: FusedGRPOTrainer, inputs: dict[str, Tensor], exact: Exact | None = None) -> None:
    """Loss, metrics and every gradient within 1e-5 of TRL's.

    Where a gradient is not: TRL's own is further than half of that from float64's, and this package's is no further
    than TRL's + 1e-5.
    """
    expected, mine = trls_step(trainer, inputs), own_step(trainer, inputs)
    torch.testing.assert_close(mine[0], expected[0], rtol=TOLERANCE, atol=1e-6)
    assert_equal_metrics(mine, expected)
    far = {name: error for name, error in relative_errors(mine, expected).items() if error > TOLERANCE}
    if not far:
        return
    truth = (Exact.of(trainer) if exact is None else exact).step(inputs)
    errors, trls = relative_errors(mine, truth), relative_errors(expected, truth)
    for name, difference in far.items():
        told = f"{name}: differs by {difference:.2e}; from float64 by {errors[name]:.2e}, TRL by {trls[name]:.2e}"
        assert difference <= 2 * trls[name] and errors[name] <= trls[name] + TOLERANCE, told


def assert_as_exact_as_trl(mine: Result, expected: Result, truth: Result) -> None:
    """No gradient further from float64's than twice the furthest of TRL's, and one rounding to bfloat16.

    The loss alike, with four roundings: its terms are log-probabilities of about -10 in some losses, and cancel.
    """
    own, trls = ((result[0].double() - truth[0]).abs() for result in (mine, expected))
    assert own <= 2 * trls + 2**-6 * truth[0].abs().clamp(min=1), f"loss: {own:.2e}, TRL {trls:.2e}"
    bound = 2 * max(relative_errors(expected, truth).values()) + 2**-8
    for name, error in relative_errors(mine, truth).items():
        assert error <= bound, f"{name}: {error:.2e}, bound {bound:.2e}"
