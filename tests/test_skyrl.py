"""SkyRL's calls of a policy loss, with this package's in its registry.

Against float64 formulas always; against SkyRL's own losses and its worker's own step where it is installed.
"""

from __future__ import annotations

import doctest
import importlib
import pickle
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

import rlkernels
from rlkernels.integrations import skyrl as integration

CORRECTIONS: dict[str, dict[str, Any]] = {
    "off": {},
    "token": {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.1},
    "sequence": {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.3},
    "token-mask": {"token_mask_is_threshold_low": 0.8, "token_mask_is_threshold_high": 1.2},
    "outliers": {"outlier_token_is_threshold_low": 0.6, "outlier_token_is_threshold_high": 1.5},
    "geometric": {"sequence_mask_metric": "geometric", "geo_mask_low": 0.95, "geo_mask_high": 1.05},
    "product": {
        "sequence_mask_metric": "product",
        "product_mask_low": 0.6,
        "product_mask_high": 1.4,
        "tis_ratio_type": "token",
    },
}

NO_CORRECTION = dict.fromkeys(integration._CORRECTIONS)


def options(**changes: Any) -> dict[str, Any]:
    """Clip-Cov draws every candidate: SkyRL's permutation and this package's numbers would choose differently."""
    return {
        "eps_clip_low": 0.15,
        "eps_clip_high": 0.25,
        "clip_ratio_c": 1.8,
        "loss_reduction": "sequence_mean",
        "cispo": {"cispo_eps_clip_low": 0.3, "cispo_eps_clip_high": 0.2},
        "sapo": {"tau_pos": 1.25, "tau_neg": 1.5},
        "dppo": {"dppo_type": "binary_tv", "delta_low": 0.04, "delta_high": 0.06},
        "clip_cov": {"clip_ratio": 1.0, "clip_cov_lb": 0.02, "clip_cov_ub": 5.0},
        "kl_cov": {"kl_cov_frac": 0.2, "ppo_kl_coef": 0.7},
        "off_policy_correction": NO_CORRECTION,
    } | changes


def namespace(**changes: Any) -> Any:
    """What the losses read of SkyRL's `AlgorithmConfig`."""
    values = options(**changes)
    return SimpleNamespace(
        **{name: SimpleNamespace(**value) if isinstance(value, dict) else value for name, value in values.items()}
    )


def random_batch(generator: Generator, spread: float = 0.4) -> dict[str, Tensor]:
    """One advantage a sequence, divided as `loss_reduction=sequence_mean` does; the third sequence is empty."""

    def draw() -> Tensor:
        return torch.randn(6, 9, generator=generator, dtype=torch.float64)

    logp = -draw().abs() - 0.05
    mask = (torch.rand(6, 9, generator=generator) < 0.7).double()
    mask[:, 0] = 1
    mask[2] = 0
    old = (logp - spread * draw()).clamp(max=-0.01)
    return {
        "log_probs": logp.requires_grad_(),
        "old_log_probs": old,
        "advantages": draw()[:, :1] / (6 * mask.sum(-1, keepdim=True).clamp(min=1)).expand(6, 9),
        "loss_mask": mask,
        "rollout_logprobs": (old - 0.2 * draw()).clamp(max=-0.01),
    }


def called(loss_fn: Any, batch: dict[str, Tensor], config: Any) -> tuple[Tensor, Tensor, dict[str, float]]:
    """As SkyRL's workers call it."""
    torch.manual_seed(5)
    loss, metrics = loss_fn(
        batch["log_probs"],
        batch["old_log_probs"],
        batch["advantages"],
        config=config,
        loss_mask=batch["loss_mask"],
        rollout_logprobs=batch["rollout_logprobs"],
    )
    gradient = torch.autograd.grad(loss, batch["log_probs"])[0]
    assert all(isinstance(value, float) for value in metrics.values())
    return loss.detach(), gradient, metrics


def loss_of(name: str) -> Any:
    return integration._PolicyLoss(name)


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(
        torch.as_tensor(actual), torch.as_tensor(expected), rtol=1e-6, atol=1e-6, check_dtype=False
    )


# ---------------------------------------------------------------------------------------------------------------
# Formulas


def term(name: str, config: Any, logp: Tensor, old: Tensor, advantage: Tensor, mean: Tensor) -> tuple[Tensor, bool]:
    """A token's policy term and whether it is clipped; `mean` is its sequence's log ratio."""
    low, high = 1 - config.eps_clip_low, 1 + config.eps_clip_high
    ratio = (logp - old).clamp(-20, 20).exp()
    if name == "rlk_gspo":
        ratio = mean.exp()
    if name == "rlk_gspo_token":
        ratio = mean.detach().exp() * (logp - logp.detach()).exp()
    if name == "rlk_reinforce":
        return -advantage * logp, False
    if name == "rlk_sapo":
        tau = config.sapo.tau_pos if advantage > 0 else config.sapo.tau_neg
        return -advantage * 4 / tau / (1 + (-tau * (ratio - 1)).exp()), False
    if name == "rlk_cispo":
        low, high = 1 - config.cispo.cispo_eps_clip_low, 1 + config.cispo.cispo_eps_clip_high
        return -ratio.detach().clamp(low, high) * advantage * logp, bool(ratio < low or ratio > high)
    if name == "rlk_dppo":
        moved = (logp.exp() - old.exp()).detach()
        outside = moved > config.dppo.delta_high if advantage > 0 else -moved > config.dppo.delta_low
        return -ratio.detach() * advantage * logp * (not outside), bool(outside)
    gain = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    if name == "rlk_dual_clip" and advantage < 0:
        gain = torch.maximum(gain, config.clip_ratio_c * advantage)
    return -gain, bool(ratio < low if advantage < 0 else ratio > high)


@pytest.mark.parametrize(
    "name",
    ["rlk_grpo", "rlk_dual_clip", "rlk_gspo", "rlk_gspo_token", "rlk_cispo", "rlk_sapo", "rlk_dppo", "rlk_reinforce"],
)
def test_value_gradient_and_metric(name: str, generator: Generator) -> None:
    batch, config = random_batch(generator), namespace()
    logp, advantages, mask = batch["log_probs"], batch["advantages"], batch["loss_mask"]
    old = batch["rollout_logprobs"] if name == "rlk_dppo" else batch["old_log_probs"]
    total, clipped = torch.zeros((), dtype=torch.float64), []
    for i in range(6):
        trained = [t for t in range(9) if mask[i, t] == 1]
        for t in trained:
            mean = sum(logp[i, s] - old[i, s] for s in trained) / len(trained)
            value, is_clipped = term(name, config, logp[i, t], old[i, t], advantages[i, t], mean)
            total = total + value
            clipped.append(is_clipped)
    loss, gradient, metrics = called(loss_of(name), batch, config)
    assert_close(loss, total.detach())
    assert_close(gradient, torch.autograd.grad(total, logp)[0])
    assert metrics.keys() == {"clip_ratio"}
    assert metrics["clip_ratio"] == pytest.approx(sum(clipped) / len(clipped), abs=1e-6)


def test_the_others_are_the_recipes(generator: Generator) -> None:
    batch, config = random_batch(generator), namespace()
    objectives = {
        "rlk_gmpo": rlkernels.GMPO(log_clip_low=0.15, log_clip_high=0.25),
        "rlk_vespo": rlkernels.VESPO(),
        "rlk_kl_cov": rlkernels.KLCov(share=0.2, penalty=0.7),
        "rlk_clip_cov": rlkernels.ClipCov(clip_low=0.15, clip_high=0.25, share=1.0, cov_low=0.02, cov_high=5.0),
    }
    for name, objective in objectives.items():
        tensors = rlkernels.PolicyBatch(
            None, batch["advantages"], mask=batch["loss_mask"], old_logp=batch["old_log_probs"]
        )
        out = rlkernels.logp_policy_loss(batch["log_probs"], tensors, objective, reduction="token_sum")
        loss, gradient, _ = called(loss_of(name), batch, config)
        assert_close(loss, out.loss.detach())
        assert_close(gradient, torch.autograd.grad(out.loss, batch["log_probs"])[0])


def test_every_loss_is_tested_here() -> None:
    named = {"rlk_grpo", "rlk_dual_clip", "rlk_gspo", "rlk_gspo_token", "rlk_cispo", "rlk_sapo", "rlk_dppo"}
    named |= {"rlk_reinforce", "rlk_gmpo", "rlk_vespo", "rlk_kl_cov", "rlk_clip_cov"}
    assert named == set(integration.POLICY_LOSSES)


def test_without_mask_and_rollout(generator: Generator) -> None:
    batch = random_batch(generator)
    everything = batch | {"loss_mask": torch.ones(6, 9)}
    nothing = batch | {"loss_mask": None, "rollout_logprobs": None}
    for name in set(integration.POLICY_LOSSES) - {"rlk_dppo"}:
        mine, theirs = (called(loss_of(name), part, namespace()) for part in (nothing, everything))
        assert mine[0] == theirs[0] and torch.equal(mine[1], theirs[1]) and mine[2] == theirs[2]


def test_nothing_trained_is_zero(generator: Generator) -> None:
    batch = random_batch(generator)
    batch["loss_mask"] = torch.zeros(6, 9)
    for name in integration.POLICY_LOSSES:
        loss, gradient, _ = called(loss_of(name), batch, namespace())
        assert loss == 0 and (gradient == 0).all()


def test_an_objective_by_hand(generator: Generator) -> None:
    batch = random_batch(generator)
    objective = rlkernels.GRPO(clip_low=0.15, clip_high=0.25, log_ratio_clamp=20.0)
    mine = called(integration._PolicyLoss("by_hand", objective), batch, namespace())
    expected = called(loss_of("rlk_grpo"), batch, namespace())
    assert_close(mine[0], expected[0])
    assert_close(mine[1], expected[1])
    named = integration._PolicyLoss("by_name", "gspo")
    called(named, batch, namespace())
    with pytest.raises(ValueError, match="loss_reduction: expected sequence_mean for 'gspo', got 'token_mean'"):
        called(named, batch, namespace(loss_reduction="token_mean"))
    with pytest.raises(ValueError, match="got 'prompt_mean'"):
        called(named, batch, namespace(loss_reduction="prompt_mean"))


def test_what_cannot_be_computed_is_refused(generator: Generator) -> None:
    batch = random_batch(generator)
    for choice in ("luspo", rlkernels.LUSPO(), "verifree"):
        with pytest.raises(ValueError, match="objectives: expected for x one reduced by token_mean, seq_mean"):
            integration._PolicyLoss("x", choice)
    for choice in ("lambda_grpo", "nft"):
        with pytest.raises(ValueError, match="expected one that SkyRL can serve"):
            integration._PolicyLoss("x", choice)
    with pytest.raises(ValueError, match=r"needs ref_logp with kl_coef=0\.1"):
        integration._PolicyLoss("x", rlkernels.GRPO(kl_coef=0.1))
    with pytest.raises(ValueError, match="cispo_anchor: expected 'old'"):
        called(loss_of("rlk_cispo"), batch, namespace(cispo={"cispo_anchor": "rollout"}))
    with pytest.raises(ValueError, match="dppo_type: expected binary_tv or binary_kl"):
        called(loss_of("rlk_dppo"), batch, namespace(dppo={"dppo_type": "topk_tv"}))
    corrected = namespace(off_policy_correction=NO_CORRECTION | {"tis_ratio_type": "token"})
    for name in ("rlk_clip_cov", "rlk_kl_cov", "rlk_vespo"):
        with pytest.raises(ValueError, match="tis_ratio_type: expected None"):
            called(loss_of(name), batch, corrected)


def test_without_skyrl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, f"{integration._UTILITIES}.ppo_utils", None)
    with pytest.raises(ImportError, match="is missing: pip install skyrl"):
        integration.register()


def test_losses_reach_other_processes() -> None:
    for name in integration.POLICY_LOSSES:
        assert pickle.loads(pickle.dumps(loss_of(name))) == loss_of(name)


def test_docstring_examples() -> None:
    assert doctest.testmod(integration).failed == 0


# ---------------------------------------------------------------------------------------------------------------
# SkyRL's own code

COUNTERPARTS = {
    "regular": "rlk_grpo",
    "dual_clip": "rlk_dual_clip",
    "gspo": "rlk_gspo_token",
    "cispo": "rlk_cispo",
    "sapo": "rlk_sapo",
    "dppo": "rlk_dppo",
    "clip_cov": "rlk_clip_cov",
    "kl_cov": "rlk_kl_cov",
}

# `dppo` has the ratio in its value, DPPO the log-probability, with the same gradient
OTHER_VALUE = "dppo"

# Clip-Cov's clipped tokens count as clipped here, SkyRL counts the drawn ones alone
OTHER_METRIC = "clip_cov"


@pytest.fixture(scope="module")
def ppo_utils() -> Any:
    """SkyRL's module of losses; on Python 3.11 its types need the `TypedDict` that pydantic asks for."""
    for name in ("skyrl", "skyrl_gym", "ray", "tensordict", "jaxtyping", "loguru", "omegaconf", "transformers"):
        pytest.importorskip(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typing.TypedDict", pytest.importorskip("typing_extensions").TypedDict)
        module = importlib.import_module("skyrl.backends.skyrl_train.utils.ppo_utils")
        integration.register({"rlk_by_hand": rlkernels.DRO(beta=0.1)})
        integration.register()
        return module


def configuration(ppo_utils: Any, name: str, **changes: Any) -> Any:
    from skyrl.train.config import config

    values = options(policy_loss_type=name, **changes)
    classes = {
        "cispo": config.CISPOConfig,
        "sapo": config.SAPOConfig,
        "dppo": config.DPPOConfig,
        "clip_cov": config.ClipCovConfig,
        "kl_cov": config.KLCovConfig,
        "off_policy_correction": config.OffPolicyCorrectionConfig,
    }
    built = {key: classes[key](**value) if key in classes else value for key, value in values.items()}
    return ppo_utils.AlgorithmConfig(**built)


def assert_same(ppo_utils: Any, name: str, batch: dict[str, Tensor], **changes: Any) -> None:
    config = configuration(ppo_utils, name, **changes)
    registry = ppo_utils.PolicyLossRegistry
    mine = called(registry.get(COUNTERPARTS[name]), batch, config)
    theirs = called(registry.get(name), batch, config)
    if name != OTHER_VALUE:
        assert_close(mine[0], theirs[0])
    assert_close(mine[1], theirs[1])
    assert mine[2].keys() == theirs[2].keys()
    for key, value in mine[2].items():
        if (name, key) != (OTHER_METRIC, "clip_ratio"):
            assert value == pytest.approx(theirs[2][key], rel=1e-5, abs=1e-6), key


def test_every_loss_of_skyrl_has_a_counterpart_or_none_on_purpose(ppo_utils: Any) -> None:
    available = set(ppo_utils.PolicyLossRegistry.list_available())
    assert set(integration.POLICY_LOSSES) | {"rlk_by_hand"} <= available
    theirs = {name for name in available if not name.startswith("rlk_")}
    assert theirs == {*COUNTERPARTS, "rollout_is", "cross_entropy", "importance_sampling"}


@pytest.mark.parametrize(
    "name, correction",
    [(name, which) for name in COUNTERPARTS for which in CORRECTIONS if which == "off" or not name.endswith("_cov")],
)
def test_skyrls_own_losses(ppo_utils: Any, name: str, correction: str, generator: Generator) -> None:
    changes = {"off_policy_correction": CORRECTIONS[correction]}
    for _ in range(3):
        assert_same(ppo_utils, name, random_batch(generator), **changes)


def test_skyrls_own_dppo_of_the_other_divergence(ppo_utils: Any, generator: Generator) -> None:
    dppo = {"dppo_type": "binary_kl", "delta_low": 0.01, "delta_high": 0.02}
    assert_same(ppo_utils, "dppo", random_batch(generator), dppo=dppo)


@pytest.mark.parametrize("name", ["regular", "dual_clip", "cispo", "sapo"])
def test_skyrls_own_losses_far_off_policy(ppo_utils: Any, name: str, generator: Generator) -> None:
    assert_same(ppo_utils, name, random_batch(generator, spread=25.0))


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "seq_mean_token_sum_norm"])
def test_skyrls_own_reduction(ppo_utils: Any, reduction: str, generator: Generator) -> None:
    """With advantages that SkyRL has scaled, the losses of micro-batches add up to the recipe's of the mini-batch."""
    batch = random_batch(generator)
    advantages = torch.randn(6, 1, generator=generator, dtype=torch.float64).expand(6, 9)
    batch["advantages"] = ppo_utils.apply_loss_reduction_to_advantages_minibatch(
        advantages, batch["loss_mask"], reduction, 2, 50
    )
    parts = [{name: value[rows : rows + 2] for name, value in batch.items()} for rows in (0, 2, 4)]
    config = configuration(ppo_utils, "rlk_gspo", loss_reduction=reduction)
    total = sum(called(ppo_utils.PolicyLossRegistry.get("rlk_gspo"), part, config)[0] for part in parts)
    tensors = rlkernels.PolicyBatch(None, advantages, mask=batch["loss_mask"], old_logp=batch["old_log_probs"])
    objective = rlkernels.GSPO(clip_low=0.15, clip_high=0.25)
    normalizer = 6 * 50 if reduction == "seq_mean_token_sum_norm" else None
    out = rlkernels.logp_policy_loss(
        batch["log_probs"],
        tensors,
        objective,
        reduction=integration._REDUCTIONS[reduction],
        normalizer=normalizer,
    )
    assert_close(total, out.loss.detach())


@pytest.mark.parametrize("name", ["regular", "gspo"])
def test_skyrls_own_training_step(ppo_utils: Any, name: str, generator: Generator, monkeypatch: Any) -> None:
    """`PolicyWorkerBase._forward_backward_micro` with its KL loss and entropy bonus: gradients and what it logs."""
    worker = importlib.import_module("skyrl.backends.skyrl_train.workers.worker")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    batch = random_batch(generator)

    def step(loss_name: str) -> tuple[Tensor, dict[str, Any]]:
        config = configuration(
            ppo_utils, name, use_kl_loss=True, use_entropy_loss=True, off_policy_correction=CORRECTIONS["token"]
        )
        table = torch.nn.Parameter(batch["log_probs"].detach().clone())

        class Model(torch.nn.Module):
            def forward(self, sequences: Tensor, num_actions: int, **kwargs: Any) -> tuple[Tensor, Any]:
                return table, {"entropy": torch.nn.functional.pad(-table, (0, 1))}

        experience = SimpleNamespace(
            to_device=lambda device: None,
            sequences=torch.ones(6, 12, dtype=torch.int64),
            action_log_probs=batch["old_log_probs"],
            base_action_log_probs=batch["old_log_probs"] - 0.1,
            advantages=batch["advantages"],
            num_actions=9,
            attention_mask=torch.ones(6, 12),
            loss_mask=batch["loss_mask"],
            action_mask=batch["loss_mask"],
            rollout_logprobs=batch["rollout_logprobs"],
            pixel_values=None,
            image_grid_thw=None,
        )
        me = SimpleNamespace(
            cfg=SimpleNamespace(algorithm=config),
            model=Model(),
            mesh_rank=SimpleNamespace(dp_size=2),
            optimizer=None,
            policy_loss_fn=ppo_utils.PolicyLossRegistry.get(loss_name),
            scheduler=SimpleNamespace(get_last_lr=lambda: [0.1]),
            strategy=SimpleNamespace(backward=lambda loss, model, optimizer: loss.backward()),
        )
        status = worker.PolicyWorkerBase._forward_backward_micro(me, experience, 0.5)
        assert table.grad is not None
        return table.grad, status

    (gradient, status), (expected, theirs) = step(COUNTERPARTS[name]), step(name)
    assert_close(gradient, expected)
    assert status.keys() == theirs.keys()
    for key, value in status.items():
        if key != "loss_fn_outputs":
            assert value == pytest.approx(theirs[key], rel=1e-5, abs=1e-6), key
