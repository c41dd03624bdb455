"""verl's own policy losses and fused forward against this package's, on random batches."""

from __future__ import annotations

import doctest
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor

pytest.importorskip("verl")

import transformers
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from verl import DataProto
from verl.models.transformers import monkey_patch
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig, PolicyLossConfig

import rlkernels
from rlkernels.credit import prefix_set_counts
from rlkernels.integrations import verl as integration
from rlkernels.integrations.verl import fused_forward, lambda_grpo, policy_losses

COUNTERPARTS = {
    "vanilla": "rlk_grpo",
    "dppo_tv": "rlk_dppo_tv",
    "dppo_kl": "rlk_dppo_kl",
    "gspo": "rlk_gspo_token",
    "sapo": "rlk_sapo",
    "gpg": "rlk_reinforce",
    "clip_cov": "rlk_clip_cov",
    "kl_cov": "rlk_kl_cov",
    "geo_mean": "rlk_gmpo",
    "dro": "rlk_dro",
    "cispo": "rlk_cispo",
}

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")

GLOBAL = {"dp_size": 4, "batch_num_tokens": 333, "global_batch_size": 48, "loss_scale_factor": 50}


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    integration.register()


def configuration(info: dict[str, Any] | None = None, policy_loss: dict[str, Any] | None = None) -> ActorConfig:
    """Clip-Cov draws every candidate: verl's permutation and this package's numbers would choose differently."""
    options = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.05, "kl_cov_ratio": 0.2, "dro_beta": 0.3, "ppo_kl_coef": 0.7}
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(**options | (policy_loss or {})),
        clip_ratio_low=0.15,
        clip_ratio_high=0.25,
        clip_ratio_c=1.8,
        tau_pos=1.2,
        tau_neg=1.4,
    )
    config.global_batch_info.update(info or {})
    return config


def random_batch(generator: Generator) -> dict[str, Tensor]:
    """float64, one advantage a sequence as verl's trainers have it; the third sequence is empty."""

    def draw() -> Tensor:
        return torch.randn(6, 9, generator=generator, dtype=torch.float64)

    log_prob = -draw().abs() - 0.05
    mask = torch.rand(6, 9, generator=generator) < 0.7
    mask[:, 0] = True
    mask[2] = False
    return {
        "log_prob": log_prob.requires_grad_(),
        "old_log_prob": (log_prob.detach() - 0.3 * draw()).clamp(max=-0.01),
        "advantages": draw()[:, :1] * mask,
        "response_mask": mask,
    }


def evaluate(name: str, batch: dict[str, Tensor], mode: str, config: Any, **more: Any) -> tuple[Tensor, Tensor, dict]:
    torch.manual_seed(5)
    loss, metrics = core_algos.get_policy_loss_fn(name)(**batch, loss_agg_mode=mode, config=config, **more)
    return loss.detach(), torch.autograd.grad(loss, batch["log_prob"])[0], metrics


def assert_same(name: str, batch: dict[str, Tensor], mode: str, config: Any, scale: float = 1.0, **more: Any) -> None:
    mine = evaluate(COUNTERPARTS[name], batch, mode, config, **more)
    theirs = evaluate(name, batch, mode, config, **more)
    for actual, expected in zip(mine[:2], theirs[:2], strict=True):
        torch.testing.assert_close(actual, scale * expected, rtol=1e-6, atol=1e-6)
    assert set(mine[2]) == {"actor/pg_clipfrac", "actor/ppo_kl"}
    assert all(isinstance(value, float) for value in mine[2].values())


def test_every_loss_has_a_counterpart() -> None:
    theirs = {name for name in core_algos.POLICY_LOSS_REGISTRY if not name.startswith("rlk_")}
    assert theirs == {*COUNTERPARTS, "bypass_mode"}
    assert set(integration.POLICY_LOSSES) <= set(core_algos.POLICY_LOSS_REGISTRY)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "rollout-weights"])
@pytest.mark.parametrize("info", [{}, GLOBAL, {"dp_size": 1, "loss_scale_factor": 7}], ids=["own", "global", "scale"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", COUNTERPARTS)
def test_value_and_gradient(name: str, mode: str, info: dict[str, Any], weighted: bool, generator: Generator) -> None:
    batch, more = random_batch(generator), {}
    if weighted:
        more["rollout_is_weights"] = torch.rand(6, 9, generator=generator, dtype=torch.float64) + 0.5
    # verl's geo_mean divides by the micro-batch's rows, whatever the whole batch's number
    scale = 6 * GLOBAL["dp_size"] / GLOBAL["global_batch_size"] if name == "geo_mean" and info == GLOBAL else 1.0
    assert_same(name, batch, mode, configuration(info), scale, **more)


@pytest.mark.parametrize("name", COUNTERPARTS)
def test_far_off_policy(name: str, generator: Generator) -> None:
    """Every clip and verl's clamps at 20 and, upwards, at 10; geo_mean, kl_cov and clip_cov have none."""
    batch = random_batch(generator)
    spread = 2.0 if name in ("geo_mean", "kl_cov", "clip_cov", "gspo", "dro") else 25.0
    batch["log_prob"] = (batch["log_prob"].detach() * spread).requires_grad_()
    assert_same(name, batch, "token-mean", configuration())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask_dtype", [torch.int64, torch.float32], ids=str)
def test_other_dtypes(dtype: torch.dtype, mask_dtype: torch.dtype, generator: Generator) -> None:
    batch = random_batch(generator)
    batch = {key: value.detach().to(dtype) for key, value in batch.items()}
    batch["log_prob"].requires_grad_()
    batch["response_mask"] = batch["response_mask"].to(mask_dtype)
    mine, gradient, _ = evaluate("rlk_grpo", batch, "token-mean", configuration())
    exact = {key: value.detach().double() for key, value in batch.items()}
    exact["log_prob"].requires_grad_()
    theirs, expected, _ = evaluate("vanilla", exact, "token-mean", configuration())
    torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-2, atol=1e-3)


def test_clip_cov_draws_as_many(generator: Generator) -> None:
    batch = random_batch(generator)
    config = configuration(policy_loss={"clip_cov_ratio": 0.1})
    zeros = [(evaluate(name, batch, "token-sum", config)[1] == 0).sum() for name in ("clip_cov", "rlk_clip_cov")]
    assert zeros[0] == zeros[1]


@pytest.mark.parametrize("info", [{}, GLOBAL], ids=["own", "global"])
@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
@pytest.mark.parametrize(
    "correction",
    [
        {
            "rollout_is": "token",
            "rollout_is_threshold": 1.2,
            "rollout_rs": "token_k1",
            "rollout_rs_threshold": "0.7_1.6",
        },
        {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
        {"rollout_is": None, "rollout_rs": "seq_max_k2", "rollout_rs_threshold": 0.2},
    ],
    ids=lambda options: str(options["rollout_is"]),
)
def test_bypass_mode(correction: dict[str, Any], loss_type: str, info: dict[str, Any], generator: Generator) -> None:
    from verl.trainer.config.algorithm import RolloutCorrectionConfig

    batch = random_batch(generator)
    options = RolloutCorrectionConfig(bypass_mode=True, loss_type=loss_type, **correction)
    config = configuration(info, policy_loss={"rollout_correction": options})
    theirs, mine = (evaluate(name, batch, "token-mean", config) for name in ("bypass_mode", "rlk_bypass_mode"))
    torch.testing.assert_close(mine[0], theirs[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mine[1], theirs[1], rtol=1e-6, atol=1e-6)
    corrected = {name: value for name, value in theirs[2].items() if not name.startswith("actor/pg_clipfrac")}
    assert {name: mine[2][name] for name in corrected} == pytest.approx(corrected)
    assert len(corrected) > 1, "the correction's own metrics"


def test_bypass_mode_refuses(generator: Generator) -> None:
    batch = random_batch(generator)
    with pytest.raises(ValueError, match="rollout_correction: expected verl's configuration"):
        evaluate("rlk_bypass_mode", batch, "token-mean", configuration(policy_loss={"rollout_correction": None}))
    with pytest.raises(ValueError, match="loss_type: expected one of ppo_clip, reinforce, got 'other'"):
        evaluate(
            "rlk_bypass_mode",
            batch,
            "token-mean",
            configuration(policy_loss={"rollout_correction": {"loss_type": "other"}}),
        )


@pytest.mark.parametrize("name", ["rlk_gspo", "rlk_luspo", "rlk_vespo"])
def test_those_that_verl_lacks(name: str, generator: Generator) -> None:
    """The recipe itself, with verl's clip range and the whole batch's denominator."""
    batch = random_batch(generator)
    loss, gradient, _ = evaluate(name, batch, "seq-mean-token-sum", configuration(GLOBAL))
    objectives = {
        "rlk_gspo": rlkernels.GSPO(clip_low=0.15, clip_high=0.25),
        "rlk_luspo": rlkernels.LUSPO(clip_low=0.15, clip_high=0.25),
        "rlk_vespo": rlkernels.VESPO(),
    }
    old = batch["old_log_prob"]
    recipe = rlkernels.PolicyBatch(None, batch["advantages"], mask=batch["response_mask"], old_logp=old)
    out = rlkernels.logp_policy_loss(
        batch["log_prob"], recipe, objectives[name], reduction="seq_mean_token_sum", normalizer=48 / 4
    )
    torch.testing.assert_close(loss, out.loss.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(out.loss, batch["log_prob"])[0])


def test_an_empty_micro_batch_is_no_nan(generator: Generator) -> None:
    batch = random_batch(generator)
    batch["response_mask"] = torch.zeros_like(batch["response_mask"])
    for name in integration.POLICY_LOSSES:
        for mode in MODES:
            loss, gradient, _ = evaluate(name, batch, mode, configuration())
            assert loss == 0 and (gradient == 0).all(), name


@pytest.mark.parametrize(
    "mode, missing", [("token-mean", "batch_num_tokens"), ("seq-mean-token-sum", "global_batch_size")]
)
def test_ranks_need_the_whole_batchs_counts(mode: str, missing: str, generator: Generator) -> None:
    with pytest.raises(ValueError, match=f"global_batch_info: expected {missing}"):
        evaluate("rlk_grpo", random_batch(generator), mode, configuration({"dp_size": 2}))


def test_bad_configurations(generator: Generator) -> None:
    batch = random_batch(generator)
    with pytest.raises(ValueError, match="loss_agg_mode: expected one of token-mean"):
        evaluate("rlk_grpo", batch, "mean", configuration())
    with pytest.raises(ValueError, match="config: expected"):
        evaluate("rlk_grpo", batch, "token-mean", None)
    with pytest.raises(ValueError, match="rollout_is_weights: expected None with VESPO"):
        evaluate("rlk_vespo", batch, "token-mean", configuration(), rollout_is_weights=torch.ones(6, 9))
    with pytest.raises(ValueError, match="dro_beta: expected"):
        evaluate("rlk_dro", batch, "token-mean", configuration(policy_loss={"dro_beta": None}))


# ---------------------------------------------------------------------------------------------------------------
# lambda-GRPO


def trainer_configuration(use_kl_loss: bool = False, loss_mode: str = "vanilla") -> Any:
    actor = SimpleNamespace(use_kl_loss=use_kl_loss, policy_loss={"loss_mode": loss_mode})
    return SimpleNamespace(actor_rollout_ref=SimpleNamespace(actor=actor))


def responses_of(generator: Generator) -> Any:
    """A `DataProto` as verl's trainer has it when it computes advantages, with interleaved groups."""
    responses = torch.randint(2, (6, 9), generator=generator)
    lengths = torch.tensor([9, 4, 0, 7, 9, 3])
    valid = torch.arange(9) < lengths[:, None]
    response_mask = valid & (torch.rand(6, 9, generator=generator) < 0.8)  # others are a tool's tokens
    attention_mask = torch.cat([torch.ones(6, 4, dtype=torch.int64), valid.long()], 1)
    tensors: dict[str, Any] = {
        "responses": responses,
        "attention_mask": attention_mask,
        "response_mask": response_mask,
        "token_level_rewards": torch.randn(6, 9, generator=generator) * response_mask,
    }
    return DataProto.from_single_dict(
        tensors | {"uid": np.array(["a", "b", "a", "b", "a", "b"], dtype=object)}
    ), lengths


def test_lambda_grpo_is_the_recipe(generator: Generator) -> None:
    """verl's advantages, weights folded in, verl's own loss: as `lambda_grpo` with weights of its own."""
    data, lengths = responses_of(generator)
    data.batch["advantages"], _ = core_algos.compute_grpo_outcome_advantage(
        data.batch["token_level_rewards"], data.batch["response_mask"], data.non_tensor_batch["uid"]
    )
    advantages = data.batch["advantages"].clone()
    folded = integration.fold_lambda_weights(data, trainer_configuration()).batch["advantages"]
    counts = prefix_set_counts(data.batch["responses"], lengths, torch.tensor([0, 1, 0, 1, 0, 1]))
    assert (counts > 1).any()
    log_prob = -torch.rand(6, 9, generator=generator)
    old = log_prob - 0.3 * torch.randn(6, 9, generator=generator)
    mask = data.batch["response_mask"]
    batch = {"log_prob": log_prob.requires_grad_(), "old_log_prob": old, "advantages": folded, "response_mask": mask}
    theirs, gradient, _ = evaluate("vanilla", batch, "token-mean", configuration())
    recipe = rlkernels.PolicyBatch(None, advantages, mask=mask, old_logp=old, weight=1 / counts)
    objective = rlkernels.GRPO(clip_low=0.15, clip_high=0.25, dual_clip=1.8)
    out = rlkernels.logp_policy_loss(log_prob, recipe, objective, reduction="token_mean")
    torch.testing.assert_close(out.loss.detach(), theirs)
    torch.testing.assert_close(torch.autograd.grad(out.loss, log_prob)[0], gradient)


def test_lambda_grpo_is_refused_where_it_would_be_untrue(generator: Generator) -> None:
    data, _ = responses_of(generator)
    with pytest.raises(ValueError, match="use_kl_loss: expected False"):
        integration.fold_lambda_weights(data, trainer_configuration(use_kl_loss=True))
    with pytest.raises(ValueError, match="loss_mode: expected vanilla"):
        integration.fold_lambda_weights(data, trainer_configuration(loss_mode="clip_cov"))
    with pytest.raises(ValueError, match="expected advantages in the batch"):
        integration.fold_lambda_weights(data, trainer_configuration())


def test_lambda_grpo_of_a_trainer_with_a_transfer_queue(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's own `_compute_advantage`, on a queue that is a dictionary; responses of unequal lengths."""
    queue = pytest.importorskip("transfer_queue")
    v1 = pytest.importorskip("verl.trainer.ppo.v1")
    lengths = torch.tensor([5, 3, 4, 5, 1, 2])
    valid = torch.arange(5) < lengths[:, None]
    uids = ["a", "a", "b", "a", "b", "b"]

    def nested(rows: Tensor) -> Tensor:
        return torch.nested.as_nested_tensor(
            [row[: int(n)] for row, n in zip(rows, lengths, strict=True)], layout=torch.jagged
        )

    responses = torch.randint(2, (6, 5), generator=generator)
    scores = torch.randn(6, 5, generator=generator)
    fields = {"responses": nested(responses), "response_mask": nested(valid.long()), "rm_scores": nested(scores)}
    stored = fields | {"uid": NonTensorStack(*uids)}
    place = SimpleNamespace(keys=[f"{uid}_{i}_0" for i, uid in enumerate(uids)], partition_id="train")

    class Batch(SimpleNamespace):
        def __len__(self) -> int:
            return len(self.keys)

    def get(keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        return TensorDict({name: stored[name] for name in select_fields if name in stored}, batch_size=[6])

    def put(keys: list[str], partition_id: str, fields: TensorDict) -> Batch:
        stored.update({name: fields[name] for name in fields.keys()})  # noqa: SIM118
        return Batch(**vars(place))

    monkeypatch.setattr(queue, "kv_batch_get", get)
    monkeypatch.setattr(queue, "kv_batch_put", put)

    class Plain(v1.PPOTrainer):
        pass

    class Weighted(integration.LambdaGRPO, v1.PPOTrainer):
        pass

    config = OmegaConf.create(
        {
            "algorithm": {"use_kl_in_reward": False, "adv_estimator": "grpo", "gamma": 1.0, "lam": 1.0},
            "actor_rollout_ref": {"rollout": {"n": 3}, "actor": {"use_kl_loss": False, "policy_loss": {}}},
        }
    )
    found = []
    for cls in (Plain, Weighted):
        cls.__abstractmethods__ = frozenset()
        trainer = object.__new__(cls)
        trainer.config = config
        trainer._compute_advantage(Batch(**vars(place)), metrics={})
        found.append(stored.pop("advantages").to_padded_tensor(padding=0))
    counts = prefix_set_counts(responses, lengths, torch.tensor([0, 0, 1, 0, 1, 1]))
    assert (found[0] != 0).any() and (counts > 1).any()
    torch.testing.assert_close(found[1], found[0] / counts)

    place.keys[1] = "a_0_1"  # the first session's second output
    with pytest.raises(ValueError, match="batch: expected one output a session"):
        trainer._compute_advantage(Batch(**vars(place)), metrics={})


# ---------------------------------------------------------------------------------------------------------------
# The fused forward


@pytest.fixture
def patched() -> Iterator[None]:
    integration.patch_fused_forward()
    yield
    integration.unpatch()


def tiny_model(kind: str = "Llama", **fields: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=5000,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        **fields,
    )
    torch.manual_seed(0)
    # verl replaces the class's forward: a class of our own keeps transformers' as it is
    base = getattr(transformers, f"{kind}ForCausalLM")
    return type(f"Tiny{kind}", (base,), {})(config)


def fused_gradients(model: Any, backend: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    monkey_patch.patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend=backend)
    ids = torch.arange(24).view(1, 24) * 97 % 5000
    out = model(input_ids=ids, temperature=0.7, return_dict=True)
    loss = (out.log_probs.flatten() * torch.linspace(-1, 1, 24)).sum() - 0.3 * out.entropy.sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return out.log_probs.detach().flatten(), out.entropy.detach().flatten(), list(gradients)


@pytest.mark.parametrize("backend", ["torch", "liger", "triton"])
def test_fused_forward_of_a_model(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's Triton kernel needs a GPU, so that all are compared with its PyTorch."""
    theirs = fused_gradients(tiny_model(), "torch")
    calls = []
    stats = fused_forward.linear_token_stats
    monkeypatch.setattr(fused_forward, "linear_token_stats", lambda *a, **k: calls.append(1) or stats(*a, **k))
    integration.patch_fused_forward()
    integration.patch_fused_forward()  # nothing new
    try:
        mine = fused_gradients(tiny_model(), backend)
    finally:
        integration.unpatch()
    assert calls == [1]
    for actual, expected in zip((*mine[:2], *mine[2]), (*theirs[:2], *theirs[2]), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    fused_gradients(tiny_model(), "torch")
    assert calls == [1], "verl's own is back"


@pytest.mark.parametrize(
    "kind, fields, what",
    [
        ("Gemma2", {"final_logit_softcapping": 30.0}, "softcap=30.0"),
        ("Granite", {"logits_scaling": 8.0}, "logit_scale=0.125"),
        ("Llama", {"bias": True}, "a bias"),
    ],
)
def test_heads_that_verl_would_compute_wrongly_are_refused(
    kind: str, fields: dict[str, Any], what: str, patched: None
) -> None:
    has_bias = fields.pop("bias", False)
    model = tiny_model(kind, **fields)
    if has_bias:
        model.lm_head = torch.nn.Linear(32, 5000)
    with pytest.raises(ValueError, match=f"^model: expected a head without bias, .* with {what}"):
        monkey_patch.patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend="torch")
    monkey_patch.patch_forward_with_backends(model, use_fused_kernels=False)


def test_names_imported_elsewhere_are_replaced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Megatron's `model_forward_fused` does, which needs Megatron to be imported."""
    from verl.utils.kernel import linear_cross_entropy as kernel

    original = kernel.linear_cross_entropy
    before = SimpleNamespace(linear_cross_entropy=original)
    monkeypatch.setitem(sys.modules, "verl.models.mcore.model_forward_fused", before)
    integration.patch_fused_forward()
    meanwhile = SimpleNamespace(linear_cross_entropy=kernel.linear_cross_entropy)
    monkeypatch.setitem(sys.modules, "verl.models.mcore.model_forward_1f1b_overlap", meanwhile)
    places = (kernel, before, meanwhile)
    assert all(place.linear_cross_entropy is integration.linear_cross_entropy for place in places)
    integration.unpatch()
    assert all(place.linear_cross_entropy is original for place in places)


def test_what_the_fused_head_refuses() -> None:
    hidden, weight, labels = torch.zeros(2, 4), torch.zeros(5, 4), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="reduction: expected 'none'"):
        integration.linear_cross_entropy(hidden, weight, labels, 1.0, "mean")


@pytest.mark.parametrize("module", [fused_forward, lambda_grpo, policy_losses], ids=lambda module: module.__name__)
def test_docstring_examples(module: Any) -> None:
    result = doctest.testmod(module)
    assert result.failed == 0 and result.attempted > 0
