"""AReaL's actor losses: as its trainer calls them, against its formulas in float64 and against its own code."""

from __future__ import annotations

import doctest
import functools
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

import rlkernels
from rlkernels import PolicyBatch, logp_policy_loss
from rlkernels.integrations import areal as integration

BORDERS = torch.tensor([0, 7, 8, 20, 20, 25, 34], dtype=torch.int32)

CLIPS: list[dict[str, Any]] = [
    {"eps_clip": 0.2},
    {"eps_clip": 0.1, "eps_clip_higher": 0.3},
    {"eps_clip": 0.1, "eps_clip_higher": 0.3, "c_clip": 1.2},
    {"eps_clip": 0.1, "c_clip": 3.0},
]

LEVELS = ("token", "sequence")

LAYOUTS = ("packed", "padded")


def random_batch(generator: Generator, layout: str, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """One sequence is masked throughout, the next has no advantage, another (of those packed) no tokens."""
    shape = (34,) if layout == "packed" else (5, 9)

    def draw() -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    logp, mask = -draw().abs() - 0.05, torch.rand(shape, generator=generator) < 0.7
    prox = logp - 0.3 * draw()
    advantages = draw()
    if layout == "packed":
        mask[20:25], advantages[25:] = False, 0
    else:
        mask[2], advantages[3] = False, 0
    batch = {
        "logprobs": logp,
        "proximal_logprobs": prox,
        "old_logprobs": prox - 0.3 * draw(),
        "advantages": advantages * mask,
    }
    batch = {name: values.to(dtype) for name, values in batch.items()} | {"loss_mask": mask}
    batch["logprobs"].requires_grad_()
    return batch | ({"cu_seqlens": BORDERS} if layout == "packed" else {})


def sequence_means(values: Tensor, mask: Tensor, layout: str) -> Tensor:
    """Each token's sequence's mean over its trained tokens."""
    if layout == "padded":
        return ((values * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).expand_as(values)
    parts = []
    for start, stop in zip(BORDERS[:-1].tolist(), BORDERS[1:].tolist(), strict=True):
        m = mask[start:stop]
        parts.append(((values[start:stop] * m).sum() / m.sum().clamp(min=1)).expand(stop - start))
    return torch.cat(parts)


def surrogate(batch: dict[str, Tensor], layout: str, level: str, clip: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """AReaL's formula: per-token loss, ratio and advantage."""
    d, a = batch["logprobs"] - batch["proximal_logprobs"], batch["advantages"]
    if level == "sequence":
        d, a = (sequence_means(values, batch["loss_mask"], layout) for values in (d, a))
    r, high = d.exp(), clip.get("eps_clip_higher") or clip["eps_clip"]
    loss = torch.maximum(-a * r, -a * r.clamp(1 - clip["eps_clip"], 1 + high))
    if "c_clip" in clip:
        loss = torch.minimum(loss, clip["c_clip"] * a.abs())
    return loss, r, a


def loss_and_gradient(loss: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return loss.detach(), torch.autograd.grad(loss, batch["logprobs"])[0]


def assert_same(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_value_and_gradient(clip: dict[str, Any], level: str, layout: str, generator: Generator) -> None:
    batch = random_batch(generator, layout)
    loss, stat = integration.ppo_actor_loss_fn(**batch, **clip, importance_sampling_level=level)
    terms, ratio, advantages = surrogate(batch, layout, level, clip)
    mask = batch["loss_mask"]
    expected = torch.where(mask, terms, 0).sum() / mask.sum()
    assert_same(loss_and_gradient(loss, batch), loss_and_gradient(expected, batch))
    for name, values in {"loss": terms, "importance_weight": ratio}.items():
        torch.testing.assert_close(stat[name][mask], values.detach()[mask])
    high = 1 + (clip.get("eps_clip_higher") or clip["eps_clip"])
    clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < 1 - clip["eps_clip"]))
    torch.testing.assert_close(stat["clip_mask"], clipped & mask)
    dual = (advantages < 0) & (ratio > clip.get("c_clip", torch.inf))
    torch.testing.assert_close(stat["dual_clip_mask"], dual & mask)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("level", LEVELS)
def test_sapo(level: str, layout: str, generator: Generator) -> None:
    batch = random_batch(generator, layout)
    batch["old_logprobs"] = batch.pop("proximal_logprobs")
    loss, stat = integration.sapo_loss_fn(**batch, tau_pos=1.2, tau_neg=1.7, importance_sampling_level=level)
    d, a, mask = batch["logprobs"] - batch["old_logprobs"], batch["advantages"], batch["loss_mask"]
    if level == "sequence":
        d, a = (sequence_means(values, mask, layout) for values in (d, a))
    tau = torch.where(a > 0, 1.2, 1.7).double()
    terms = -a * 4 / tau * torch.sigmoid(tau * (d.exp() - 1))
    expected = torch.where(mask, terms, 0).sum() / mask.sum()
    assert_same(loss_and_gradient(loss, batch), loss_and_gradient(expected, batch))
    torch.testing.assert_close(stat["loss"][mask], terms.detach()[mask])
    torch.testing.assert_close(
        stat["sapo_soft_gate"][mask], (4 / tau * torch.sigmoid(tau * (d.exp() - 1)))[mask].detach()
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_far_off_policy_in_float32(layout: str, generator: Generator) -> None:
    batch = random_batch(generator, layout, torch.float32)
    batch["logprobs"] = (10 * batch["logprobs"].detach()).requires_grad_()
    exact = {name: v.double() if v.dtype == torch.float32 else v for name, v in batch.items()}
    loss, stat = integration.ppo_actor_loss_fn(**batch, **CLIPS[2])
    terms, *_ = surrogate(exact, layout, "token", CLIPS[2])
    expected = torch.where(batch["loss_mask"], terms, 0).sum() / batch["loss_mask"].sum()
    actual, wanted = loss_and_gradient(loss, batch), loss_and_gradient(expected, batch)
    assert_same(actual, (wanted[0].float(), wanted[1]), 1e-5)
    assert all(v.dtype in (torch.float32, torch.bool) and not v.requires_grad for v in stat.values())


RECIPES = sorted(set(rlkernels.RECIPES) - {"nft", "lambda_grpo", "clip_cov", "kl_cov"})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_by_name(name: str, layout: str, generator: Generator) -> None:
    """Its objective, AReaL's denominator; the statistics are the objective's too."""
    batch = random_batch(generator, layout)
    loss, stat = integration.ppo_actor_loss_fn(**batch, eps_clip=0.2, objective=name)
    mask = batch["loss_mask"]
    recipe = PolicyBatch(
        None,
        batch["advantages"],
        mask=mask,
        old_logp=batch["proximal_logprobs"],
        cu_seqlens=batch.get("cu_seqlens"),
    )
    out = logp_policy_loss(batch["logprobs"], recipe, rlkernels.RECIPES[name].objective, reduction="token_mean")
    assert_same(loss_and_gradient(loss, batch), loss_and_gradient(out.loss, batch))
    torch.testing.assert_close(stat["loss"][mask].sum() / mask.sum(), loss.detach())
    clipped = out.metrics["clip_frac_low"] + out.metrics["clip_frac_high"]
    torch.testing.assert_close(stat["clip_mask"].sum() / mask.sum(), clipped.float())


def test_an_instance(generator: Generator) -> None:
    batch = random_batch(generator, "packed")
    mine = integration.ppo_actor_loss_fn(**batch, eps_clip=9.0, objective=rlkernels.GRPO(clip_low=0.1, clip_high=0.3))
    same = integration.ppo_actor_loss_fn(**batch, **CLIPS[1])
    assert_same(loss_and_gradient(mine[0], batch), loss_and_gradient(same[0], batch), 1e-12)


@pytest.mark.parametrize("level", LEVELS)
def test_no_trained_token(level: str, generator: Generator) -> None:
    batch = random_batch(generator, "packed")
    batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    loss, _ = integration.ppo_actor_loss_fn(**batch, **CLIPS[2], importance_sampling_level=level)
    value, gradient = loss_and_gradient(loss, batch)
    assert value == 0 and not gradient.any()


@pytest.mark.parametrize("level", LEVELS)
def test_nan_under_the_mask_is_not_felt(level: str, generator: Generator) -> None:
    batch = random_batch(generator, "packed")
    dirty = dict(batch)
    for name in ("logprobs", "proximal_logprobs", "advantages"):
        dirty[name] = batch[name].detach().masked_fill(~batch["loss_mask"], torch.nan)
    dirty["logprobs"].requires_grad_()
    both = []
    for tokens in (batch, dirty):
        loss, stat = integration.ppo_actor_loss_fn(**tokens, **CLIPS[2], importance_sampling_level=level)
        both.append(loss_and_gradient(loss, tokens))
        assert stat["loss"].isfinite().all() and stat["importance_weight"].isfinite().all()
    assert_same(*both, 0)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"importance_sampling_level": "word"}, "importance_sampling_level: expected one of 'token', 'sequence'"),
        ({"c_clip": 0.9}, "c_clip: expected a finite number > 1"),
        ({"objective": "gmpo", "c_clip": 3.0}, "c_clip: expected None with objective='gmpo', got 3.0"),
        ({"objective": "gmpo", "importance_sampling_level": "sequence"}, "importance_sampling_level: expected 'token'"),
        ({"objective": "vespo", "rejection_sampling": object()}, "rejection_sampling: expected None with VESPO"),
        ({"objective": "nft"}, "needs each prompt's success_rate"),
        ({"objective": "lambda_grpo"}, "needs a weight of each token"),
        ({"objective": "clip_cov"}, "needs the whole batch"),
        ({"objective": rlkernels.GRPO(kl_coef=0.1)}, "needs ref_logp"),
        ({"objective": rlkernels.GRPO(entropy_coef=0.1)}, "needs entropies' gradient"),
        ({"objective": "gmpo", "cu_seqlens": None}, "cu_seqlens: expected borders"),
        ({"importance_sampling_level": "sequence", "cu_seqlens": None}, "cu_seqlens: expected borders"),
        ({"importance_sampling_level": "sequence", "cu_seqlens": 2 * BORDERS}, "cu_seqlens: expected to end at 34"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str, generator: Generator) -> None:
    batch = random_batch(generator, "packed") | {"eps_clip": 0.2}
    with pytest.raises(ValueError, match=message):
        integration.ppo_actor_loss_fn(**batch | options)


def test_sapo_with_an_objective_is_refused(generator: Generator) -> None:
    batch = random_batch(generator, "packed")
    del batch["proximal_logprobs"]
    with pytest.raises(ValueError, match="use_sapo_loss: expected False with objective='gmpo'"):
        integration.sapo_loss_fn(**batch, tau_pos=1.0, tau_neg=1.0, objective="gmpo")
    with pytest.raises(ValueError, match="objective: expected one that AReaL can serve"):
        integration.patch("clip_cov")


def test_docstrings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of `patch` needs an actor to patch."""
    actor = SimpleNamespace(ppo_actor_loss_fn=None, sapo_loss_fn=None)
    monkeypatch.setitem(sys.modules, "areal.trainer.ppo.actor", actor)  # type: ignore[arg-type]
    assert doctest.testmod(integration).failed == 0


# ---------------------------------------------------------------------------------------------------------------
# AReaL's own code


@pytest.fixture
def actor() -> Iterator[Any]:
    module = pytest.importorskip("areal.trainer.ppo.actor")
    yield module
    integration.unpatch()
    module.stats_tracker.export_all()


REJECTIONS: list[dict[str, Any]] = [
    {"action": "mask", "metric": "ratio", "level": "token", "upper": 1.3, "lower": 0.7},
    {"action": "clamp", "metric": "ratio", "level": "token", "upper": 1.2, "lower": 0.8},
    {"action": "mask", "metric": "ratio", "level": "sequence", "agg": "mean", "upper": 1.1, "lower": 0.9},
    {"action": "clamp", "metric": "ratio", "level": "sequence", "agg": "sum", "upper": 1.2},
    {"action": "mask", "metric": "kl_k3", "level": "token", "upper": 0.1},
    {"action": "mask", "metric": "kl_k2", "level": "sequence", "agg": "max", "upper": 0.2},
]


def assert_same_statistics(mine: dict[str, Any], theirs: dict[str, Any], mask: Tensor) -> None:
    """AReaL keeps them of trained tokens."""
    assert set(mine) == set(theirs)
    for name, expected in theirs.items():
        if isinstance(expected, Tensor):
            assert mine[name].dtype == expected.dtype and mine[name].shape == expected.shape, name
            torch.testing.assert_close(mine[name][mask], expected[mask], rtol=1e-6, atol=1e-6)
        else:
            assert mine[name] == expected, name


@pytest.mark.parametrize("rejection", [None, *REJECTIONS], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_its_surrogate(
    actor: Any, clip: dict[str, Any], level: str, layout: str, rejection: dict[str, Any] | None, generator: Generator
) -> None:
    config = None if rejection is None else actor.RejectionSamplingConfig(**rejection)
    batch = random_batch(generator, layout)
    options = {**batch, **clip, "importance_sampling_level": level, "rejection_sampling": config}
    theirs, their_stat = actor.ppo_actor_loss_fn(**options)
    mine, my_stat = integration.ppo_actor_loss_fn(**options)
    assert_same(loss_and_gradient(mine, batch), loss_and_gradient(theirs, batch))
    assert_same_statistics(my_stat, their_stat, batch["loss_mask"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("level", LEVELS)
def test_its_sapo(actor: Any, level: str, layout: str, generator: Generator) -> None:
    batch = random_batch(generator, layout)
    del batch["proximal_logprobs"]
    options = {**batch, "tau_pos": 1.3, "tau_neg": 1.6, "importance_sampling_level": level}
    theirs, their_stat = actor.sapo_loss_fn(**options)
    mine, my_stat = integration.sapo_loss_fn(**options)
    assert_same(loss_and_gradient(mine, batch), loss_and_gradient(theirs, batch))
    assert_same_statistics(my_stat, their_stat, batch["loss_mask"])


def actor_input(batch: dict[str, Tensor]) -> dict[str, Any]:
    """What `grpo_loss_fn` gets: the micro-batch under AReaL's names."""
    return {
        "logprobs": batch["old_logprobs"],
        "prox_logp": batch["proximal_logprobs"],
        "advantages": batch["advantages"],
        "loss_mask": batch["loss_mask"].float(),
        "cu_seqlens": batch["cu_seqlens"],
        "versions": torch.full((34,), 3),
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gspo": {"importance_sampling_level": "sequence"},
    "m2po": {"m2_threshold": 0.05},
    "sapo": {"use_sapo_loss": True, "sapo_tau_pos": 1.1, "sapo_tau_neg": 1.5},
    "decoupled": {"use_decoupled_loss": True, "rejection_sampling": REJECTIONS[0]},
    "loglinear": {"prox_logp_method": "loglinear", "use_decoupled_loss": True, "current_version": 5},
    "metrics": {"prox_logp_method": "metrics", "current_version": 5},
    "distilled": {"teacher": True},
}


def evaluate(actor: Any, options: dict[str, Any], batch: dict[str, Tensor]) -> tuple[tuple[Tensor, Tensor], dict]:
    """`grpo_loss_fn`, with the statistics that AReaL's tracker makes of it."""
    options = dict(options)
    tokens = actor_input(batch)
    if options.pop("teacher", False):
        tokens["teacher_logp"] = batch["old_logprobs"] - 0.1
    if options.get("prox_logp_method") == "loglinear":
        tokens["prox_logp"] = None
    if "rejection_sampling" in options:
        options["rejection_sampling"] = actor.RejectionSamplingConfig(**options["rejection_sampling"])
    actor.stats_tracker.export_all()
    loss = actor.grpo_loss_fn(batch["logprobs"], torch.ones(34), tokens, 0.1, 0.3, 1.2, **options)
    return loss_and_gradient(loss, batch), actor.stats_tracker.export_all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_its_loss_of_a_step(actor: Any, variant: str, generator: Generator) -> None:
    """All that `grpo_loss_fn` does, with its losses and with these."""
    batch = random_batch(generator, "packed", torch.float32)
    theirs, their_statistics = evaluate(actor, VARIANTS[variant], batch)
    integration.patch()
    mine, my_statistics = evaluate(actor, VARIANTS[variant], batch)
    integration.unpatch()
    assert_same(mine, theirs, 2e-6)
    assert set(my_statistics) == set(their_statistics) and my_statistics
    for name, value in their_statistics.items():
        assert my_statistics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_patch_and_unpatch(actor: Any, generator: Generator) -> None:
    batch = random_batch(generator, "packed", torch.float32)
    own = actor.ppo_actor_loss_fn, actor.sapo_loss_fn
    theirs, _ = evaluate(actor, {}, batch)
    integration.patch("gmpo")
    integration.patch(objective=rlkernels.GMPO())  # anew
    actor_loss = functools.partial(evaluate, actor, {}, batch)
    with pytest.raises(ValueError, match="c_clip: expected None"):
        actor_loss()
    tokens = actor_input(batch)
    loss = actor.grpo_loss_fn(batch["logprobs"], torch.ones(34), tokens, 0.1, None, None)
    recipe = PolicyBatch(
        None, batch["advantages"], mask=batch["loss_mask"], old_logp=batch["proximal_logprobs"], cu_seqlens=BORDERS
    )
    out = logp_policy_loss(batch["logprobs"], recipe, "gmpo", reduction="token_mean")
    assert_same(loss_and_gradient(loss, batch), loss_and_gradient(out.loss, batch))
    with pytest.raises(ValueError, match="use_sapo_loss: expected False"):
        actor.grpo_loss_fn(batch["logprobs"], torch.ones(34), tokens, 0.1, None, None, use_sapo_loss=True)
    integration.unpatch()
    integration.unpatch()
    assert (actor.ppo_actor_loss_fn, actor.sapo_loss_fn) == own
    assert_same(actor_loss()[0], theirs, 0)


def test_another_version_is_not_patched(actor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(actor, "sapo_loss_fn")
    own = actor.ppo_actor_loss_fn
    with pytest.raises(RuntimeError, match="has no sapo_loss_fn"):
        integration.patch()
    assert actor.ppo_actor_loss_fn is own


class Engine:
    """In place of a model: one log-probability a token id, packed as AReaL's engines pack."""

    def __init__(self) -> None:
        self.table = (-torch.linspace(0.1, 3.0, 50)).requires_grad_()
        self.losses: list[float] = []

    def train(self) -> None:
        pass

    def get_version(self) -> int:
        return 1

    def train_batch(self, micro_batch: dict[str, Any], loss_fn: Any, loss_weight_fn: Any) -> dict[str, float]:
        from areal.utils.data import pack_tensor_dict

        packed = pack_tensor_dict(micro_batch)
        logprobs = self.table[packed["input_ids"].roll(-1)]
        loss = loss_fn(logprobs, torch.ones_like(logprobs), packed) * loss_weight_fn(packed)
        loss.backward()
        self.losses.append(loss.item())
        return {}


def updated(actor: Any, data: dict[str, Tensor], **options: Any) -> tuple[list[float], Tensor]:
    from areal.api.cli_args import PPOActorConfig

    config = PPOActorConfig(experiment_name="", trial_name="", ppo_n_minibatches=2, kl_ctl=0.0, **options)
    engine = Engine()
    ppo = actor.PPOActor(config, engine)
    ppo._ppo_update(ppo._compute_advantages({name: values.clone() for name, values in data.items()}))
    actor.stats_tracker.export_all()
    assert engine.table.grad is not None
    return engine.losses, engine.table.grad


@pytest.mark.parametrize(
    "options",
    [
        {"eps_clip": 0.1, "eps_clip_higher": 0.3, "c_clip": 1.5},
        {"importance_sampling_level": "sequence"},
        {"use_sapo_loss": True},
        {"use_decoupled_loss": True, "rejection_sampling": REJECTIONS[1]},
    ],
    ids=["clip", "gspo", "sapo", "decoupled"],
)
def test_its_actor(actor: Any, options: dict[str, Any], generator: Generator) -> None:
    """AReaL's own advantages, minibatches and update."""
    options = dict(options)
    if "rejection_sampling" in options:
        options["rejection_sampling"] = actor.RejectionSamplingConfig(**options["rejection_sampling"])
    lengths = torch.tensor([12, 7, 9, 12, 5, 10])
    attention = torch.arange(12) < lengths[:, None]
    data = {
        "input_ids": torch.randint(50, (6, 12), generator=generator),
        "attention_mask": attention,
        "loss_mask": (attention & (torch.arange(12) >= 3)).float(),
        "logprobs": -3 * torch.rand(6, 12, generator=generator),
        "prox_logp": -3 * torch.rand(6, 12, generator=generator),
        "rewards": torch.randn(6, generator=generator),
        "versions": torch.zeros(6, 12, dtype=torch.int64),
    }
    theirs = updated(actor, data, **options)
    integration.patch()
    mine = updated(actor, data, **options)
    assert mine[0] == pytest.approx(theirs[0], rel=1e-5, abs=2e-5) and len(mine[0]) == 2
    torch.testing.assert_close(mine[1], theirs[1], rtol=1e-5, atol=2e-5)  # float32 sums of ratios up to e^3
