"""OpenRLHF's calls of its loss, with this package's in its place.

Against float64 formulas always; against its own `PolicyLoss` and its own training step where it is installed. What its
modules import of vLLM and FlashAttention has a stand-in, since neither can be had on a CPU and the loss needs none.
"""

from __future__ import annotations

import copy
import doctest
import importlib
import itertools
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

import rlkernels
from rlkernels.integrations import openrlhf as integration

SETTINGS = {
    "clip_eps_low": 0.15,
    "clip_eps_high": 0.25,
    "dual_clip": None,
    "token_level_loss": True,
    "policy_loss_type": "ppo",
    "is_correction_level": "off",
    "is_correction_mode": "mask",
    "is_correction_gating": "ratio",
    "is_correction_threshold": (0.5, 5.0),
}

CORRECTIONS: dict[str, dict[str, Any]] = {
    "off": {},
    "tis": {"is_correction_level": "token", "is_correction_mode": "clip", "is_correction_threshold": (0.8, 1.2)},
    "icepop": {"is_correction_level": "token", "is_correction_threshold": (0.7, 1.3)},
    "seq-ratio": {"is_correction_level": "seq", "is_correction_threshold": (0.9, 1.1)},
    "token-tv": {
        "is_correction_level": "token",
        "is_correction_gating": "tv",
        "is_correction_threshold": (0.0, 0.05),
    },
    "token-kl": {
        "is_correction_level": "token",
        "is_correction_gating": "binary_kl",
        "is_correction_threshold": (0.0, 0.02),
    },
    "seq-tv": {"is_correction_level": "seq", "is_correction_gating": "tv", "is_correction_threshold": (0.0, 0.06)},
    "seq-kl": {
        "is_correction_level": "seq",
        "is_correction_gating": "binary_kl",
        "is_correction_threshold": (0.0, 0.025),
    },
}

GLOBAL = {"dp_size": 4, "batch_num_tokens": torch.tensor(333.0), "global_batch_size": torch.tensor(48.0)}


def random_batch(generator: Generator, spread: float = 0.4) -> dict[str, Tensor]:
    """As the trainer has it: one advantage a token, an action mask of bools; the third sequence is empty."""

    def draw() -> Tensor:
        return torch.randn(6, 9, generator=generator, dtype=torch.float64)

    logp = -draw().abs() - 0.05
    mask = torch.rand(6, 9, generator=generator) < 0.7
    mask[:, 0] = True
    mask[2] = False
    old = (logp - spread * draw()).clamp(max=-0.01)
    return {
        "log_probs": logp.requires_grad_(),
        "old_log_probs": old,
        "advantages": draw() * mask,
        "action_mask": mask,
        "rollout_log_probs": (old - 0.2 * draw()).clamp(max=-0.01),
    }


def called(loss_fn: Callable[..., Any], batch: dict[str, Tensor], info: dict[str, Any]) -> tuple[list[Any], Tensor]:
    """As `ActorPPOTrainer.training_step` calls it; its result, detached, and the gradient."""
    loss, *rest = loss_fn(
        batch["log_probs"],
        batch["old_log_probs"],
        batch["advantages"],
        action_mask=batch["action_mask"],
        rollout_log_probs=batch["rollout_log_probs"],
        **info,
    )
    gradient = torch.autograd.grad(loss, batch["log_probs"])[0]
    assert all(value is None or (value.ndim == 0 and not value.requires_grad) for value in rest)
    return [loss.detach(), *rest], gradient


def assert_same(actual: tuple[list[Any], Tensor], expected: tuple[list[Any], Tensor]) -> None:
    assert [value is None for value in actual[0]] == [value is None for value in expected[0]]
    pairs = [
        pair for pair in zip([*actual[0], actual[1]], [*expected[0], expected[1]], strict=True) if pair[0] is not None
    ]
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6, check_dtype=False)


def settings_of(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**SETTINGS | changes)


def surrogate(ratio: Tensor, advantage: Tensor, low: float, high: float, dual_clip: float | None) -> Tensor:
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    return -torch.maximum(gain, dual_clip * advantage) if dual_clip is not None and advantage < 0 else -gain


def gated(settings: Any, old: Tensor, rollout: Tensor) -> Tensor:
    p, q = rollout.exp(), old.exp()
    if settings.is_correction_gating == "tv":
        return (p - q).abs()
    if settings.is_correction_gating == "binary_kl":
        return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    return old - rollout


def by_hand(settings: Any, batch: dict[str, Tensor], info: dict[str, Any]) -> tuple[list[Any], Tensor]:
    """A loop over sequences and tokens."""
    logp, advantages, mask = batch["log_probs"], batch["advantages"], batch["action_mask"]
    old, rollout = batch["old_log_probs"], batch["rollout_log_probs"]
    low, high, dual = settings.clip_eps_low, settings.clip_eps_high, settings.dual_clip
    is_gspo = settings.policy_loss_type == "gspo"
    is_corrected = settings.is_correction_level != "off"
    bottom, top = settings.is_correction_threshold
    per_sequence, clipped, filtered_tokens, filtered_sequences = [], [], [], []
    for i in range(len(mask)):
        trained = [t for t in range(mask.shape[1]) if mask[i, t]]
        weights = dict.fromkeys(trained, 1.0)
        if is_corrected and not is_gspo:
            statistics = {t: gated(settings, old[i, t], rollout[i, t]) for t in trained}
            if settings.is_correction_level == "seq":
                mean = sum(statistics.values()) / max(1, len(trained))
                statistics = dict.fromkeys(trained, mean)
            if settings.is_correction_gating == "ratio":
                statistics = {t: torch.as_tensor(value).exp() for t, value in statistics.items()}
            inside = {t: bool(bottom <= value <= top) for t, value in statistics.items()}
            for t in trained:
                weights[t] = (old[i, t] - rollout[i, t]).exp()
                if settings.is_correction_mode == "clip":
                    weights[t] = weights[t].clamp(bottom, top)
                elif not inside[t]:
                    weights[t] = torch.zeros(())
            filtered_tokens += [not inside[t] for t in trained]
            filtered_sequences.append(not trained or not inside[trained[0]])
        behaviour = rollout if is_gspo and is_corrected else old
        mean_log_ratio = sum(logp[i, t] - behaviour[i, t] for t in trained) / max(1, len(trained))
        losses = []
        for t in trained:
            ratio = torch.as_tensor(mean_log_ratio).exp() if is_gspo else (logp[i, t] - old[i, t]).clamp(-20, 20).exp()
            losses.append(weights[t] * surrogate(ratio, advantages[i, t], low, high, dual))
            outside = ratio < 1 - low if advantages[i, t] < 0 else ratio > 1 + high
            clipped.append(bool(outside) and advantages[i, t] != 0)
        if trained:
            per_sequence.append(losses)
    ranks = info.get("dp_size", 1)
    if settings.token_level_loss:
        count = info.get("batch_num_tokens")
        total = sum(sum(losses) for losses in per_sequence)
        own = sum(map(len, per_sequence))
    else:
        count = info.get("global_batch_size")
        total = sum(sum(losses) / len(losses) for losses in per_sequence)
        own = len(per_sequence)
    loss = total / own if count is None else total / count * ranks
    has_weights = is_corrected and not is_gspo
    filtered = filtered_sequences if settings.is_correction_level == "seq" else filtered_tokens
    shares = [torch.tensor(flags, dtype=torch.float64).mean() for flags in (clipped, filtered)]
    ppo_kl, vllm_kl = (old - logp.detach())[mask].mean(), (rollout - old)[mask].mean()
    rest = [shares[0], ppo_kl, vllm_kl if has_weights else None, shares[1] if has_weights else None]
    return [loss.detach(), *rest], torch.autograd.grad(loss, logp)[0]


def combinations() -> list[dict[str, Any]]:
    kinds = itertools.product(("ppo", "gspo"), (None, 1.5), (True, False), CORRECTIONS)
    return [
        {"policy_loss_type": kind, "dual_clip": dual, "token_level_loss": per_token and kind == "ppo"}
        | CORRECTIONS[name]
        for kind, dual, per_token, name in kinds
        if kind == "ppo" or per_token
    ]


@pytest.mark.parametrize("info", [{}, GLOBAL], ids=["own", "global"])
def test_value_gradient_and_metrics(info: dict[str, Any], generator: Generator) -> None:
    for changes in combinations():
        batch, settings = random_batch(generator), settings_of(**changes)
        print(changes)
        assert_same(called(integration.policy_loss(settings), batch, info), by_hand(settings, batch, info))


def test_ranks_and_micro_batches_add_up(generator: Generator) -> None:
    """Two ranks of one micro-batch each, whose gradients the trainer averages."""
    batch = random_batch(generator)
    for per_token in (True, False):
        loss_fn = integration.policy_loss(settings_of(token_level_loss=per_token))
        (whole, *_), _ = called(loss_fn, batch, {})
        info = {
            "dp_size": 2,
            "batch_num_tokens": batch["action_mask"].sum().float(),
            "global_batch_size": torch.tensor(5.0),
        }
        parts = [{name: value[rows] for name, value in batch.items()} for rows in (slice(2), slice(2, 6))]
        losses = [called(loss_fn, part, info)[0][0] for part in parts]
        torch.testing.assert_close(sum(losses) / 2, whole)


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo_token", "gmpo", "cispo", "sapo", "luspo", "reinforce"])
def test_a_recipe_brings_its_reduction(name: str, generator: Generator) -> None:
    batch = random_batch(generator)
    batch["advantages"] = batch["advantages"][:, :1].expand(6, 9)
    (loss, *_), gradient = called(integration.policy_loss(settings_of(), name), batch, GLOBAL)
    recipe = rlkernels.RECIPES[name]
    tensors = rlkernels.PolicyBatch(
        None, batch["advantages"], mask=batch["action_mask"], old_logp=batch["old_log_probs"]
    )
    count = 333 if recipe.reduction == "token_mean" else 48
    out = rlkernels.logp_policy_loss(batch["log_probs"], tensors, name, normalizer=count / 4)
    torch.testing.assert_close(loss, out.loss.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(out.loss, batch["log_probs"])[0])


def test_an_objective_takes_the_trainers_reduction_and_correction(generator: Generator) -> None:
    batch, settings = random_batch(generator), settings_of(**CORRECTIONS["icepop"])
    objective = rlkernels.GRPO(clip_low=0.15, clip_high=0.25, log_ratio_clamp=20.0)
    mine = called(integration.policy_loss(settings, objective), batch, GLOBAL)
    assert_same(mine, called(integration.policy_loss(settings), batch, GLOBAL))
    settings.token_level_loss = False
    other = called(integration.policy_loss(settings, objective, reduction="token_mean"), batch, GLOBAL)
    assert_same(other, mine)


def test_adapters_import_no_trainer() -> None:
    program = (
        "import sys; from rlkernels.integrations import openrlhf, skyrl, slime; "
        "found = {name.partition('.')[0] for name in sys.modules} & {'openrlhf', 'skyrl', 'slime', 'megatron', 'ray'}; "
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_docstring_examples() -> None:
    assert doctest.testmod(integration).failed == 0


def test_nothing_trained_is_no_nan(generator: Generator) -> None:
    batch = random_batch(generator)
    batch["action_mask"] = torch.zeros_like(batch["action_mask"])
    for changes in combinations():
        values, gradient = called(integration.policy_loss(settings_of(**changes)), batch, {})
        assert values[0] == 0 and (gradient == 0).all()


def test_what_cannot_be_computed_is_refused(generator: Generator) -> None:
    batch = random_batch(generator)
    with pytest.raises(RuntimeError, match="expected OpenRLHF's PolicyLoss, got one without clip_eps_low"):
        integration.policy_loss(SimpleNamespace())
    with pytest.raises(ValueError, match="is_correction_gating: expected one of 'ratio'"):
        integration.policy_loss(settings_of(is_correction_gating="js"))
    with pytest.raises(ValueError, match="policy_loss_type: expected 'ppo' with an objective"):
        integration.policy_loss(settings_of(policy_loss_type="gspo"), "gmpo")
    with pytest.raises(ValueError, match="dual_clip: expected None with an objective"):
        integration.policy_loss(settings_of(dual_clip=3.0), "gmpo")
    with pytest.raises(ValueError, match="is_correction_level: expected 'off' with VESPO"):
        integration.policy_loss(settings_of(is_correction_level="token"), "vespo")
    with pytest.raises(ValueError, match="reduction: expected one of"):
        integration.policy_loss(settings_of(), "dr_grpo")
    with pytest.raises(ValueError, match="reduction: expected one of"):
        integration.policy_loss(settings_of(), reduction="none")
    with pytest.raises(ValueError, match=r"needs ref_logp with kl_coef=0\.1"):
        integration.policy_loss(settings_of(), rlkernels.GRPO(kl_coef=0.1))
    with pytest.raises(ValueError, match=r"needs entropies. gradient with entropy_coef"):
        integration.policy_loss(settings_of(), rlkernels.GRPO(entropy_coef=0.1))
    with pytest.raises(ValueError, match="expected one that OpenRLHF can serve, got 'lambda_grpo'"):
        integration.policy_loss(settings_of(), "lambda_grpo")
    with pytest.raises(TypeError, match="objective: expected a recipe's name or an Objective"):
        integration.policy_loss(settings_of(), lambda logp, batch: logp)
    batch["rollout_log_probs"] = None
    with pytest.raises(ValueError, match="rollout_log_probs: expected with is_correction_level='token'"):
        called(integration.policy_loss(settings_of(is_correction_level="token")), batch, {})


# ---------------------------------------------------------------------------------------------------------------
# OpenRLHF's own code

STAND_INS = (
    "flash_attn",
    "flash_attn.bert_padding",
    "flash_attn.utils",
    "flash_attn.utils.distributed",
    "vllm",
    "vllm.inputs",
    "vllm.utils",
)


class _StandIn(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


@pytest.fixture(scope="module")
def trainer_module() -> Any:
    """`openrlhf.trainer.ray.ppo_actor`, whose `PolicyLoss` and `ActorPPOTrainer` are OpenRLHF's."""
    pytest.importorskip("openrlhf")
    for name in ("deepspeed", "ray", "peft", "transformers", "pylatexenc", "aiohttp", "PIL", "einops", "datasets"):
        pytest.importorskip(name)
    absent = [name for name in STAND_INS if name not in sys.modules]
    for name in absent:
        sys.modules[name] = _StandIn(name)
    try:
        return importlib.import_module("openrlhf.trainer.ray.ppo_actor")
    finally:
        for name in absent:
            del sys.modules[name]


@pytest.mark.parametrize("info", [{}, GLOBAL], ids=["own", "global"])
def test_openrlhfs_own_loss(trainer_module: Any, info: dict[str, Any], generator: Generator) -> None:
    for changes in combinations():
        print(changes)
        theirs = trainer_module.PolicyLoss(**SETTINGS | changes)
        batch = random_batch(generator)
        assert_same(called(integration.policy_loss(theirs), batch, info), called(theirs, batch, info))


def test_openrlhfs_own_loss_far_off_policy(trainer_module: Any, generator: Generator) -> None:
    for kind in ("ppo", "gspo"):
        theirs = trainer_module.PolicyLoss(**SETTINGS | {"policy_loss_type": kind})
        batch = random_batch(generator, spread=25.0 if kind == "ppo" else 3.0)
        assert_same(called(integration.policy_loss(theirs), batch, GLOBAL), called(theirs, batch, GLOBAL))


class _Actor(torch.nn.Module):
    """A table of log-probabilities, called as OpenRLHF's `Actor` is."""

    def __init__(self, log_probs: Tensor) -> None:
        super().__init__()
        self.log_probs = torch.nn.Parameter(log_probs)

    def forward(self, sequences: Tensor, action_mask: Tensor, **kwargs: Any) -> tuple[Tensor, Any]:
        return self.log_probs, SimpleNamespace(entropy=-self.log_probs)


@pytest.mark.parametrize("correction", ["off", "icepop", "seq-kl"])
def test_openrlhfs_own_training_step(trainer_module: Any, correction: str, generator: Generator) -> None:
    """With its KL loss and entropy bonus: one step, its parameters and what it logs."""
    batch = random_batch(generator)
    config = SimpleNamespace(
        train=SimpleNamespace(dynamic_batch_enable=False),
        actor=SimpleNamespace(entropy_coef=0.01),
        algo=SimpleNamespace(kl=SimpleNamespace(use_loss=True, init_coef=0.1, estimator="k3", unbiased_gradient=False)),
    )

    def step(replace: bool) -> tuple[Tensor, dict[str, Any]]:
        actor = _Actor(batch["log_probs"].detach().clone())
        optimizer = torch.optim.SGD(actor.parameters(), lr=0.5)
        strategy = SimpleNamespace(
            ring_attn_group=None,
            backward=lambda loss, model, optimizer: loss.backward(),
            optimizer_step=lambda optimizer, *args, **kwargs: optimizer.step(),
            get_grad_norm=lambda model: 0.0,
        )
        loss_fn = trainer_module.PolicyLoss(**SETTINGS | CORRECTIONS[correction])
        trainer = SimpleNamespace(
            actor=actor,
            actor_optim=optimizer,
            actor_scheduler=SimpleNamespace(get_last_lr=lambda: [0.5]),
            actor_loss_fn=integration.policy_loss(loss_fn) if replace else loss_fn,
            args=config,
            aux_loss=False,
            ema_model=None,
            replay_buffer=None,
            strategy=strategy,
        )
        experience = trainer_module.Experience(
            sequences=torch.ones(6, 11, dtype=torch.int64),
            attention_mask=torch.ones(6, 11),
            action_mask=batch["action_mask"],
            action_log_probs=batch["old_log_probs"],
            base_action_log_probs=batch["old_log_probs"] - 0.1,
            rollout_log_probs=batch["rollout_log_probs"],
            advantages=batch["advantages"],
        )
        status = trainer_module.ActorPPOTrainer.training_step(trainer, copy.copy(experience), 0.1, 0)
        return actor.log_probs.detach(), status["metrics"]

    (parameters, logged), (expected, theirs) = step(True), step(False)
    torch.testing.assert_close(parameters, expected, rtol=1e-6, atol=1e-6)
    assert logged.keys() == theirs.keys()
    for name, value in logged.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-6, atol=1e-6, check_dtype=False)
