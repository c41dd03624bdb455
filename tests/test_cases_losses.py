"""The table's rows about losses: masks, overflow, normalisers, formulas, packing, options. See `small_cases`."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import small_cases
import torch
from small_cases import (
    IGNORE,
    INF,
    LN2,
    NAN,
    LossAndGradient,
    assert_bits,
    assert_values,
    loss_through,
    on_device,
    through_every_path,
    through_logits_and_hidden,
)
from torch import Generator, Tensor

import rlkernels
from rlkernels import (
    CISPO,
    DPPO,
    DRO,
    GMPO,
    GRPO,
    GSPO,
    LUSPO,
    NFT,
    RECIPES,
    SAPO,
    VESPO,
    GSPOToken,
    Objective,
    PolicyBatch,
    Reinforce,
    global_normalizer,
)
from rlkernels.credit import rollout_weights

pytest_generate_tests, backend = small_cases.by_row, small_cases.backend_of_row

KL = GRPO(kl_coef=1.0)
UNCLIPPED = GRPO(clip_low=1.0, clip_high=1e9)
GARBAGE = [NAN, INF, -INF, 200.0, -200.0]


def assert_loss(result: LossAndGradient, loss: float, dlogp: Any = None, tolerance: float = 1e-5) -> None:
    assert_values(result.loss, loss, tolerance)
    if dlogp is not None:
        assert_values(result.dlogp, dlogp, tolerance)
    assert_finite_metrics(result)


def assert_finite_metrics(result: LossAndGradient) -> None:
    for name, value in result.metrics.items():
        assert value.isfinite(), name


# Masks


@pytest.mark.parametrize("old", [-1.0, -INF], ids="old={}".format)
def test_B12_impossible_masked_token(old: float, backend: str) -> None:
    logp = on_device([[-1.0, -INF]]).requires_grad_()
    batch = PolicyBatch(None, on_device([1.0]), old_logp=on_device([[-1.0, old]]), mask=on_device([[1, 0]]))
    out = rlkernels.logp_policy_loss(logp, batch)
    assert_values(out.loss, -1.0)
    assert_values(torch.autograd.grad(out.loss, logp)[0], [[-1.0, 0.0]])
    assert out.metrics["approx_kl_k1"] == out.metrics["approx_kl_k3"] == 0
    assert all(value.isfinite() for value in out.metrics.values())


@through_every_path
@pytest.mark.parametrize("garbage", GARBAGE)
def test_B12_garbage_under_the_mask(garbage: float, path: str, backend: str) -> None:
    assert_loss(loss_through(path, [[0.0, 0.0]], mask=[[1, 0]], garbage=garbage), -1.0, [[-1.0, 0.0]])


@through_every_path
def test_B17_mean_over_valid_tokens(path: str, backend: str) -> None:
    targets, logits = on_device([0, IGNORE, 1, IGNORE]), on_device(torch.zeros(4, 8))
    batch = PolicyBatch(targets, on_device([1.0] * 4))
    if path == "logits":
        leaf = logits.requires_grad_()
        out = rlkernels.policy_loss(leaf, batch, "reinforce")
    elif path == "hidden":
        leaf = on_device(torch.eye(4)).requires_grad_()
        out = rlkernels.linear_policy_loss(leaf, on_device(torch.zeros(8, 4)), batch, "reinforce")
    else:
        leaf = on_device([-math.log(8)] * 4).requires_grad_()
        out = rlkernels.logp_policy_loss(leaf, batch, "reinforce")
    assert_values(out.loss, 2.079442)
    (gradient,) = torch.autograd.grad(out.loss, leaf)
    assert (gradient[1::2] == 0).all()
    if path == "logp":
        assert_values(gradient, [-0.5, 0.0, -0.5, 0.0])
    if path == "logits":
        assert_values(gradient[0], [0.5 * (1 / 8 - 1)] + [0.5 / 8] * 7)


@through_every_path
@pytest.mark.parametrize("garbage", [0.0, NAN])
@pytest.mark.parametrize("objective", [KL, GSPO(), GRPO(entropy_coef=0.5)], ids=["grpo", "gspo", "entropy bonus"])
def test_B18_nothing_is_trained(objective: Any, garbage: float, path: str, backend: str) -> None:
    more = {"entropy": on_device([[LN2, LN2]] * 2)} if path == "logp" else {}
    result = loss_through(
        path, [[0.0, 0.0]] * 2, objective, mask=[[0, 0]] * 2, garbage=garbage, ref_above=[[0.0, 0.0]] * 2, **more
    )
    assert result.loss == 0
    assert (result.dlogp == 0).all()
    assert_finite_metrics(result)


@through_every_path
@pytest.mark.parametrize("objective", ["dapo", "gspo"])
def test_B20_weights_of_each_loss(objective: str, path: str, backend: str) -> None:
    """Of losses without a reduction, and of a scalar loss."""
    targets = None if path == "logp" else on_device([0, 0, 0, 0])
    batch = PolicyBatch(targets, on_device(torch.ones(4)), cu_seqlens=on_device([0, 1, 2, 3, 4]))
    leaf, call = {
        "logp": (on_device([-LN2] * 4), rlkernels.logp_policy_loss),
        "logits": (on_device(torch.zeros(4, 2)), rlkernels.policy_loss),
        "hidden": (
            on_device(torch.zeros(2, 4)),
            lambda weight, *rest, **named: rlkernels.linear_policy_loss(
                torch.eye(4).to(weight), weight, *rest, **named
            ),
        ),
    }[path]
    leaf = leaf.requires_grad_()
    weights = on_device([2.0, 0.0, -1.0, 0.5])

    def of_target(gradient: Tensor) -> Tensor:
        return {"logp": gradient, "logits": 2 * gradient.view(4, -1)[:, 0], "hidden": 2 * gradient.view(-1, 4)[0]}[path]

    loss = call(leaf, batch, objective, reduction="none").loss
    assert_values(of_target(torch.autograd.grad((loss * weights).sum(), leaf)[0]), [-2.0, 0.0, 1.0, -0.5])
    for k in (0.0, 0.5, 1024.0):
        loss = call(leaf, batch, objective, reduction="token_sum").loss
        assert_values(of_target(torch.autograd.grad(loss * k, leaf)[0]), [-k] * 4)


@through_logits_and_hidden
def test_B35_bonus_follows_the_factor(path: str, backend: str, generator: Generator) -> None:
    leaf = on_device(torch.randn(3, 7, generator=generator)).requires_grad_()
    batch = PolicyBatch(on_device([0, 6, 3]), on_device([1.0, -1.0, 0.0]), ref_logp=on_device([-1.0, -2.0, -3.0]))
    unit = torch.eye(3).to(leaf)

    def gradient(k: float, **fields: float) -> Tensor:
        objective = GRPO(**fields)
        if path == "logits":
            out = rlkernels.policy_loss(leaf, batch, objective)
        else:
            out = rlkernels.linear_policy_loss(unit, leaf.T, batch, objective)
        return torch.autograd.grad(out.loss * k, leaf)[0]

    for fields in ({"entropy_coef": 0.3}, {"kl_coef": 0.3}, {"entropy_coef": 0.3, "kl_coef": 0.3}):
        torch.testing.assert_close(gradient(4.0, **fields), 4 * gradient(1.0, **fields))
    both = gradient(1.0, entropy_coef=0.3, kl_coef=0.3) + gradient(1.0)
    torch.testing.assert_close(gradient(1.0, entropy_coef=0.3) + gradient(1.0, kl_coef=0.3), both)


@through_every_path
def test_B43_unknown_old_log_probability(path: str, backend: str) -> None:
    result = loss_through(path, [[0.0, NAN]], mask=[[1, 0]])
    assert_loss(result, -1.0, [[-1.0, 0.0]])
    assert result.metrics["approx_kl_k3"].abs() < 1e-6
    assert loss_through(path, [[0.0, NAN]], mask=[[1, 1]]).loss.isnan()


LEVELS = {
    "token": GRPO(kl_coef=0.1),
    "sequence mean": GSPO(clip_low=0.2, clip_high=0.2, kl_coef=0.1),
    "sequence product": GSPO(level="sequence_product", clip_low=0.2, clip_high=0.2, kl_coef=0.1),
    "geometric mean": GMPO(kl_coef=0.1),
    "weighted KL": GRPO(kl_coef=0.1, kl_importance_weighted=True),
}


# from hidden states the objective is the same operation on the log-probabilities
@pytest.mark.parametrize(("level", "path"), [("token", "hidden"), *itertools.product(LEVELS, ["logits", "logp"])])
def test_B44_ratios_under_the_mask(level: str, path: str, backend: str) -> None:
    def run(masked: float, garbage: float | None) -> LossAndGradient:
        log_ratio = [[0.1, masked, -0.3], [masked, 0.2, 0.05]]
        more = {
            "advantages": [1.0, -0.5],
            "mask": [[1, 0, 1], [0, 1, 1]],
            "ref_above": [[0.1, masked, 0.2], [masked, 0.1, -0.4]],
        }
        return loss_through(path, log_ratio, LEVELS[level], garbage=garbage, **more)

    clean = run(0.0, None)
    for masked, garbage in ((200.0, None), (-200.0, None), (INF, INF), (-INF, -INF), (NAN, NAN)):
        dirty = run(masked, garbage)
        assert_bits([dirty.loss, dirty.dlogp, dict(dirty.metrics)], [clean.loss, clean.dlogp, dict(clean.metrics)])


@through_every_path
def test_B45_rejected_weights(path: str, backend: str) -> None:
    rollout = on_device([[-1000.0, 0.0]])
    weight = rollout_weights(torch.zeros_like(rollout), rollout, torch.ones_like(rollout), mode="mask", low=0.5, high=5)
    assert weight.tolist() == [[0.0, 1.0]]
    assert_loss(loss_through(path, [[0.0, 0.0]], policy_weight=weight), -0.5, [[0.0, -0.5]])
    infinite = loss_through(path, [[0.0, 0.0]], advantages=[[INF, 1.0]], policy_weight=weight)
    assert_values(infinite.loss, -0.5)
    assert_values(infinite.dlogp, [[0.0, -0.5]])


# Overflow


@through_every_path
def test_B46_huge_ratios(path: str, backend: str) -> None:
    assert_loss(loss_through(path, [[89.0]]), -1.2, [[0.0]])
    assert_loss(loss_through(path, [[89.0]], GRPO(dual_clip=3.0), advantages=[-1.0]), 3.0, [[0.0]])
    capped = loss_through(path, [[89.0]], GRPO(log_ratio_clamp=20.0), advantages=[-1.0])
    assert_loss(capped, 4.851652e8, [[0.0]])
    limited = loss_through(path, [[89.0]], advantages=[-1.0])  # of every ratio the logarithm is limited to 80
    assert_loss(limited, math.exp(80), [[0.0]])


@through_every_path
def test_B47_infinite_sequence_ratio(path: str, backend: str) -> None:
    objective = GSPO(clip_low=3e-4, clip_high=3e-4)
    result = loss_through(path, [[100.0, 100.0]], objective)
    assert_loss(result, -1.0003, [[0.0, 0.0]])
    assert (result.dlogp == 0).all()
    product = GSPO(level="sequence_product", clip_low=3e-4, clip_high=3e-4)
    assert_loss(loss_through(path, [[3e38, 3e38]], product), -1.0003, [[0.0, 0.0]])


@through_every_path
@pytest.mark.parametrize(
    ("above", "kl"), [(0.0, 0.0), (LN2, 0.306853), (-LN2, 0.193147), (10.0, 22015.4658)], ids="ref-lp={}".format
)
def test_B48_kl(above: float, kl: float, path: str, backend: str) -> None:
    result = loss_through(path, [[0.0]], KL, advantages=[0.0], ref_above=[[above]])
    assert_loss(result, kl, [[1 - math.exp(above)]])


@through_every_path
def test_B48_kl_is_capped(path: str, backend: str) -> None:
    more = {"advantages": [0.0], "ref_above": [[100.0]]}
    assert_loss(loss_through(path, [[0.0]], GRPO(kl_coef=1.0, log_ratio_clamp=20.0), **more), 4.851652e8, [[0.0]])
    assert_loss(loss_through(path, [[0.0]], KL, **more), math.exp(80), [[0.0]])


# Empty


def of_every_recipe(path: str, name: str, **more: Any) -> LossAndGradient:
    """With KL and entropy terms, and what some objectives need besides."""
    recipe = RECIPES[name]
    objective = dataclasses.replace(recipe.objective, kl_coef=0.1, entropy_coef=0.1)  # type: ignore[type-var]
    shape = torch.as_tensor(more["mask"]).shape
    needed = {"ref_above": torch.zeros(shape), "weight": torch.ones(shape)}
    if path == "logp":
        needed["entropy"] = on_device(torch.full(shape, LN2))
    if name == "nft":
        needed["extras"] = {"success_rate": on_device(torch.full(shape[:1], 0.5))}
    return loss_through(path, torch.zeros(shape), objective, reduction=recipe.reduction, **needed | more)


@through_every_path
@pytest.mark.parametrize("name", RECIPES)
def test_B49_every_recipe_without_a_token(name: str, path: str, backend: str) -> None:
    result = of_every_recipe(path, name, mask=torch.zeros(2, 2), normalizer=4.0)
    assert result.loss == 0
    assert (result.dlogp == 0).all()
    assert_finite_metrics(result)


@through_every_path
@pytest.mark.parametrize("objective", ["dapo", "cispo", "dr_grpo"])
def test_B50_no_items(objective: str, path: str, backend: str) -> None:
    for normalizer in (0, 0.0, torch.tensor(0), torch.tensor(0.0)):
        result = loss_through(path, [[0.0, 0.0]], objective, mask=[[0, 0]], garbage=NAN, normalizer=normalizer)
        assert result.loss == 0
        assert (result.dlogp == 0).all()
        assert_finite_metrics(result)


@through_every_path
def test_B51_metrics_of_an_empty_row(path: str, backend: str) -> None:
    """Metrics are means over the trained tokens, of which the empty row has none."""
    log_ratio, ref = [[0.1, -0.2], [0.5, 0.5]], [[LN2, LN2], [1.0, 1.0]]
    both = loss_through(path, log_ratio, KL, mask=[[1, 1], [0, 0]], ref_above=ref, garbage=NAN)
    alone = loss_through(path, log_ratio[:1], KL, ref_above=ref[:1])
    assert_values(both.metrics["ref_kl"], 0.306853)
    for name, value in alone.metrics.items():
        torch.testing.assert_close(both.metrics[name], value, msg=name)


# Normalisers and reductions. On-policy the loss of a token is minus its advantage.


def of_values(path: str, values: Any, mask: Any, reduction: str, **more: Any) -> LossAndGradient:
    values = torch.as_tensor(values, dtype=torch.float32)
    more = {"advantages": -values, "mask": mask, "on_policy": True, "reduction": reduction} | more
    return loss_through(path, torch.zeros_like(values), GRPO(), **more)


UNEVEN = [torch.tensor([[1] * n + [0] * (5 - n)]) for n in (5, 2, 1, 3)]


@through_every_path
@pytest.mark.parametrize(
    ("reduction", "window"), [("token_mean", 2), ("token_mean", 4), ("seq_mean_token_mean", 4)], ids=str
)
def test_B54_accumulation_windows(reduction: str, window: int, path: str, backend: str) -> None:
    for first in range(0, 4, window):
        masks = UNEVEN[first : first + window]
        normalizer = global_normalizer(masks, reduction)
        losses = [of_values(path, [[1.0] * 5], mask, reduction, normalizer=normalizer).loss for mask in masks]
        assert_values(sum(losses), 1.0)


@through_every_path
def test_B55_micro_batches_add_up(path: str, backend: str) -> None:
    log_ratio, mask = torch.linspace(-0.5, 0.5, 20).view(4, 5), torch.cat(UNEVEN)
    whole = loss_through(path, log_ratio, "dapo", mask=mask)
    normalizer = global_normalizer(UNEVEN, "token_mean")
    parts = [
        loss_through(path, log_ratio[i, None], "dapo", mask=mask[i, None], normalizer=normalizer) for i in range(4)
    ]
    torch.testing.assert_close(sum(part.loss for part in parts), whole.loss)
    torch.testing.assert_close(torch.cat([part.dlogp for part in parts]), whole.dlogp)


def test_B56_data_parallel_ranks(backend: str) -> None:
    """Four ranks whose gradients are averaged; `gradients="mean"` divides the count by the ranks' number."""
    ranks = 4
    mask, ones = torch.ones(8, 3), [[1.0] * 3] * 8
    for reduction in ("token_mean", "seq_mean_token_mean"):
        normalizer = global_normalizer([mask] * ranks, reduction) / ranks
        of_a_rank = of_values("logp", ones, mask, reduction, normalizer=normalizer).loss
        assert_values(ranks * of_a_rank / ranks, 1.0)


@through_every_path
def test_B57_context_parallel_ranks(path: str, backend: str) -> None:
    values, masks = [[[1.0, 1.0, 1.0]], [[4.0, 0.0, 0.0]]], [torch.tensor([[1, 1, 1]]), torch.tensor([[1, 0, 0]])]
    normalizer = global_normalizer(masks, "token_mean")
    parts = [of_values(path, *part, "token_mean", normalizer=normalizer) for part in zip(values, masks, strict=True)]
    assert_values(sum(part.loss for part in parts), 1.75)


B58 = ([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]], [[1, 1, 1], [1, 0, 0]])


@through_every_path
@pytest.mark.parametrize(
    ("reduction", "normalizer", "loss"),
    [
        ("token_mean", None, 2.5),
        ("seq_mean_token_mean", None, 3.0),
        ("seq_mean_token_sum", None, 5.0),
        ("seq_mean_token_sum_norm", 20.0, 0.5),
    ],
)
def test_B58_reductions(reduction: str, normalizer: float | None, loss: float, path: str, backend: str) -> None:
    assert_loss(of_values(path, *B58, reduction, normalizer=normalizer), loss)


@through_every_path
def test_B59_padding_changes_nothing(path: str, backend: str) -> None:
    losses = []
    for width in (3, 8):
        values, mask = (torch.zeros(2, width) for _ in range(2))
        values[:, :3], mask[:, :3] = torch.tensor(B58[0]), torch.tensor(B58[1])
        normalizer = global_normalizer(mask, "seq_mean_token_sum_norm", max_length=10)
        losses.append(of_values(path, values, mask, "seq_mean_token_sum_norm", normalizer=normalizer).loss)
        rows = [
            of_values(path, values[i, None], mask[i, None], "seq_mean_token_sum_norm", normalizer=normalizer).loss
            for i in range(2)
        ]
        torch.testing.assert_close(sum(rows), losses[-1])
    assert_values(torch.stack(losses), [0.5, 0.5])


@through_every_path
def test_B60_grpo_is_not_dapo(path: str, backend: str) -> None:
    values = [[2, 2, 2, 2, 2, 6, 5, 3, 2, 4], [10, 3, 4, 5, 2, 3, 4, 1, 1, 3]]
    mask = torch.tensor([[1] * 5 + [0] * 5, [1] + [0] * 9])
    assert_values(of_values(path, values, mask, RECIPES["dapo"].reduction).loss, 3.333333)
    assert_values(of_values(path, values, mask, RECIPES["grpo"].reduction).loss, 6.0)


@through_every_path
def test_B61_mean_over_sequences(path: str, backend: str) -> None:
    unclipped = GSPO(clip_low=0.9, clip_high=9.0)
    more: dict[str, Any] = {"mask": [[1, 1], [1, 0]], "garbage": NAN}
    assert_loss(loss_through(path, [[LN2, LN2], [0.0, 0.0]], unclipped, **more), -1.5)
    by_token = loss_through(path, [[LN2, LN2], [0.0, 0.0]], unclipped, reduction="token_mean", **more)
    assert_loss(by_token, -1.666667)
    assert RECIPES["gspo"].reduction == "seq_mean_token_mean"


# Formulas


OBJECTIVES: dict[str, tuple[Any, dict[str, Any]]] = {
    **{name: (name, {}) for name in RECIPES if name not in ("dr_grpo", "clip_cov")},
    "dr_grpo": ("dr_grpo", {"normalizer": 6.0}),
    "weights of tokens": (GRPO(), {"policy_weight": [[0.5, 2.0, 0.0], [1.0, 1.5, 0.3]]}),
    "weights of sequences": (GRPO(), {"policy_weight": [[0.5], [2.0]]}),
    "weights [B]": (GSPO(), {"policy_weight": [0.5, 2.0]}),
    "ratio_cap": (GRPO(ratio_cap=1.1), {}),
    "dual_clip": (GRPO(dual_clip=1.1), {}),
    "kl k1": (GRPO(kl_coef=0.3, kl_estimator="k1"), {}),
    "kl k2": (GRPO(kl_coef=0.3, kl_estimator="k2"), {}),
    "kl k3": (GSPO(kl_coef=0.3), {}),
    "kl clamped": (GRPO(kl_coef=0.3, kl_clamp=0.05), {}),
    "kl weighted": (GRPO(kl_coef=0.3, kl_importance_weighted=True), {}),
    "kl weighted by sequence": (GSPO(kl_coef=0.3, kl_importance_weighted=True), {}),
    "clamp": (GRPO(log_ratio_clamp=0.2), {}),
    "product": (GSPO(level="sequence_product"), {}),
    "clip of a sequence": (GMPO(clip_level="sequence"), {}),
    "no clip": (GMPO(clip_level=None), {}),
    "nft by sequence": (NFT(level="sequence_product", prompt_weight="sqrt_failure_odds"), {}),
    "cispo with a floor": (CISPO(ratio_max=1.1, ratio_min=0.9), {}),
    "dppo": (DPPO(divergence="kl", threshold_low=0.001, threshold_high=0.001), {}),
}
B63_INPUTS: dict[str, Any] = {
    "log_ratio": [[0.5, -0.1, -0.5], [-0.3, 0.2, 0.9]],
    "advantages": [1.0, -0.7],
    "mask": [[1, 1, 0], [1, 1, 1]],
    "ref_above": [[0.3, -0.4, 0.1], [0.6, -0.2, 0.0]],
    "weight": [[1.0, 0.5, 1.0], [0.25, 1.0, 0.5]],
}


@pytest.mark.parametrize(("name", "path"), [("dapo", "hidden"), *itertools.product(OBJECTIVES, ["logits", "logp"])])
def test_B63_equal_to_the_reference(name: str, path: str, backend: str) -> None:
    objective, more = OBJECTIVES[name]
    more = {"extras": {"success_rate": on_device([0.5, 0.25])}} | more
    results = []
    for selected in (backend, "reference"):
        rlkernels.set_backend(selected)
        results.append(loss_through(path, objective=objective, **B63_INPUTS | more))
    actual, expected = results
    torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(actual.dlogp, expected.dlogp, rtol=1e-5, atol=1e-6)
    assert list(actual.metrics) == list(expected.metrics)
    for key, value in expected.metrics.items():
        torch.testing.assert_close(actual.metrics[key], value, rtol=1e-5, atol=1e-5, check_dtype=False, msg=key)


# every field away from its default; of a class's fields those that it has not from Objective
FIELDS: dict[str, Any] = {
    "log_ratio_clamp": 0.15,
    "kl_coef": 0.3,
    "kl_estimator": "k2",
    "kl_clamp": 0.05,
    "kl_importance_weighted": True,
    "entropy_coef": 0.3,
    "entropy_reduction": "seq_mean_token_mean",
    "clip_low": 0.01,
    "clip_high": 0.01,
    "dual_clip": 1.05,
    "ratio_cap": 1.05,
    "log_clip_low": 0.05,
    "log_clip_high": 0.05,
    "clip_level": "sequence",
    "ratio_max": 1.05,
    "ratio_min": 0.95,
    "tau_pos": 2.0,
    "tau_neg": 2.0,
    "min_ratio": 0.5,
    "prompt_weight": "uniform",
    "negative_weight": 0.5,
    "rate_clamp": (0.45, 0.46),
    "log_ratio_max": 0.1,
    "k_pos": 1.0,
    "k_neg": 1.0,
    "lambda_pos": 1.0,
    "lambda_neg": 1.0,
    "log_weight_clamp": (-0.01, 0.01),
    "divergence": "kl",
    "threshold_low": 0.0,
    "threshold_high": 0.0,
    "beta": 2.0,
    "level": "sequence_product",
}
INSTANCES = (
    *(GRPO(), GSPO(), GSPOToken(), LUSPO(), GMPO(), CISPO(ratio_max=5.0), SAPO(), NFT(), Reinforce()),
    *(VESPO(), DPPO(), DRO(beta=1.0)),
)
NEEDS: dict[str, dict[str, Any]] = {  # what gives a field something to act on
    "kl_estimator": {"kl_coef": 0.3},
    "kl_clamp": {"kl_coef": 0.3},
    "kl_importance_weighted": {"kl_coef": 0.3},
    "entropy_reduction": {"entropy_coef": 0.3},
}


@pytest.mark.parametrize("instance", INSTANCES, ids=lambda instance: type(instance).__name__)
def test_B64_every_field_acts_or_raises(instance: Any, backend: str) -> None:
    probabilities = torch.tensor([[0.7, 0.1, 0.4], [0.3, 0.3, 0.9]]).repeat(2, 1)
    logp = on_device(probabilities.log()).requires_grad_()
    log_ratio = [[0.43, 0.1, -0.5], [-0.3, -0.2, 0.1], [-0.1, -0.6, 0.05], [0.43, 0.7, -0.05]]
    batch = PolicyBatch(
        None,
        on_device([1.0, -0.7, 0.5, -0.2]),
        mask=on_device([[1, 1, 0]] + [[1, 1, 1]] * 3),
        old_logp=logp - on_device(log_ratio),
        ref_logp=logp + on_device([[0.3, -0.4, 0.1], [0.6, -0.2, 0.0]] * 2),
        extras={"success_rate": on_device([0.5, 0.25, 0.5, 0.25])},
    )
    entropy = on_device(probabilities)

    def run(objective: Any) -> list[Tensor]:
        loss = rlkernels.logp_policy_loss(logp, batch, objective, reduction="token_mean", entropy=entropy).loss
        return [loss.detach(), torch.autograd.grad(loss, logp)[0]]

    plain = run(instance)
    shared = {field.name for field in dataclasses.fields(Objective)}
    for field in dataclasses.fields(instance):
        if backend == "triton" and field.name in shared and type(instance) is not GRPO:
            continue  # its interpreter is slow
        base = dataclasses.replace(instance, **NEEDS.get(field.name, {}))
        try:
            changed = dataclasses.replace(base, **{field.name: FIELDS[field.name]})
        except ValueError:
            assert field.name == "level"
            continue
        before, after = plain if base == instance else run(base), run(changed)
        if not (type(instance) is Reinforce and field.name == "log_ratio_clamp"):  # it has a ratio in metrics alone
            differs = any(not torch.allclose(a, b, rtol=1e-4, atol=1e-7) for a, b in zip(before, after, strict=True))
            assert differs, field.name
    with pytest.raises(TypeError, match="clip_width"):
        type(instance)(clip_width=0.2)


@through_logits_and_hidden
def test_B64_every_option_acts(path: str, backend: str, generator: Generator) -> None:
    logits = on_device(torch.randn(2, 3, 5, generator=generator))
    tensors = [logits] if path == "logits" else [torch.eye(6).view(2, 3, 6).to(logits), logits.view(6, 5).T]
    targets = on_device([[0, 4, 2], [1, IGNORE, 3]])
    batch = PolicyBatch(targets, on_device([1.0, -0.7]), old_logp=on_device(torch.full((2, 3), -1.5)))
    of_tokens, of_batch = {
        "logits": (rlkernels.token_stats, rlkernels.policy_loss),
        "hidden": (rlkernels.linear_token_stats, rlkernels.linear_policy_loss),
    }[path]
    options: dict[str, Any] = {"temperature": 0.5, "softcap": 1.0, "logit_scale": 2.0}
    if path == "hidden":
        options["bias"] = on_device([1.0, 0.0, 0.0, 0.0, 0.5])
    plain = of_tokens(*tensors, targets)
    for name, value in options.items():
        assert not torch.equal(of_tokens(*tensors, targets, **{name: value}).logp, plain.logp), name
    assert of_tokens(*tensors, targets, outputs=()).entropy is None
    assert of_tokens(*tensors, targets.clamp(min=0), ignore_index=4).logp[0, 1] == 0
    loss = of_batch(*tensors, batch).loss
    for name, value in (options | {"reduction": "token_sum", "normalizer": 7.0, "objective": "cispo"}).items():
        assert not torch.equal(of_batch(*tensors, batch, **{name: value}).loss, loss), name
    for function, argument in ((of_tokens, targets), (of_batch, batch)):
        with pytest.raises(TypeError, match="label_smoothing"):
            function(*tensors, argument, label_smoothing=0.1)
    with pytest.raises(TypeError, match="label_smoothing"):
        PolicyBatch(targets, on_device([1.0, -0.7]), label_smoothing=0.1)


@through_every_path
def test_B65_descends(path: str, backend: str) -> None:
    assert_loss(loss_through(path, [[0.0]]), -1.0, [[-1.0]])


@through_every_path
def test_B66_kl_is_a_cost(path: str, backend: str) -> None:
    assert_loss(loss_through(path, [[0.0]], KL, advantages=[0.0], ref_above=[[LN2]]), 0.306853, [[-1.0]])


@through_every_path
def test_B70_geometric_mean_clips_one_side(path: str, backend: str) -> None:
    log_ratio = [[0.6, -0.6]]
    assert_loss(loss_through(path, log_ratio, GMPO()), -0.904837, [[0.0, -0.452419]])
    assert_loss(loss_through(path, log_ratio, GMPO(), advantages=[-1.0]), 1.105171, [[0.552585, 0.0]])
    nothing = loss_through(path, [[1000.0, -0.6]], GMPO(), advantages=[0.0])
    assert nothing.loss == 0
    assert (nothing.dlogp == 0).all()


@through_every_path
def test_B71_dual_clip(path: str, backend: str) -> None:
    objective = GRPO(dual_clip=3.0)
    assert_loss(loss_through(path, [[0.0]], objective), -1.0, [[-1.0]])
    assert_loss(loss_through(path, [[math.log(10)]], objective, advantages=[-1.0]), 3.0, [[0.0]])


@through_every_path
def test_B105_ties(path: str, backend: str) -> None:
    """At a bound itself a token is not clipped."""
    for bound, advantage, field in ((0.5, 1.0, "clip_high"), (-0.5, -1.0, "clip_low")):
        ratio = math.exp(bound)
        objective = GRPO(**{field: abs(ratio - 1)})
        logp = on_device([[bound]], dtype=torch.float64).requires_grad_()
        advantages = on_device([advantage], dtype=torch.float64)
        out = rlkernels.logp_policy_loss(logp, PolicyBatch(None, advantages, old_logp=0 * logp), objective)
        assert_values(out.loss, -ratio * advantage)
        assert_values(torch.autograd.grad(out.loss, logp)[0], [[-ratio * advantage]])
        assert out.metrics["clip_frac_low"] == out.metrics["clip_frac_high"] == 0
    equal = loss_through(path, [[0.0]], KL, advantages=[0.0], ref_above=[[0.0]])
    assert equal.loss.abs() <= 1e-12 and equal.dlogp.abs().max() <= 1e-6
    idle = loss_through(path, [[0.3, -0.3]], advantages=[0.0])
    assert idle.loss == 0
    assert (idle.dlogp == 0).all()


@through_every_path
def test_B106_old_log_probabilities_count(path: str, backend: str) -> None:
    assert_loss(loss_through(path, [[LN2]], UNCLIPPED), -2.0, [[-2.0]])
    assert_loss(loss_through(path, [[LN2]], UNCLIPPED, on_policy=True), -1.0, [[-1.0]])


# Layouts


@through_logits_and_hidden
@pytest.mark.parametrize("borders", [[0, 3, 5], [0, 3, 3, 5]], ids=str)
def test_B75_packed_tokens(borders: list[int], path: str, backend: str, generator: Generator) -> None:
    ids, borders_ = on_device([10, 11, 12, 20, 21]), on_device(borders)
    sequences = len(borders) - 1
    advantages = on_device(torch.arange(1.0, sequences + 1))
    batch = PolicyBatch.from_input_ids(ids, torch.ones_like(ids), advantages, cu_seqlens=borders_)
    assert batch.targets.tolist() == [11, 12, IGNORE, 21, IGNORE]
    leaf = on_device(torch.randn(5, 30, generator=generator)).requires_grad_()

    def loss(rows: slice, part: PolicyBatch) -> Tensor:
        if path == "logits":
            return rlkernels.policy_loss(leaf[rows], part, "reinforce", reduction="token_sum").loss
        unit = torch.eye(5).to(leaf)[rows]
        return rlkernels.linear_policy_loss(unit, leaf.T, part, "reinforce", reduction="token_sum").loss

    whole = loss(slice(None), batch)
    parts = []
    for index, (start, stop) in enumerate(itertools.pairwise(borders)):
        if stop > start:
            own = ids[None, start:stop]
            part = PolicyBatch.from_input_ids(own, torch.ones_like(own), advantages[index, None])
            parts.append(loss(slice(start, stop), flat(part)))
    torch.testing.assert_close(sum(parts), whole)
    torch.testing.assert_close(
        torch.autograd.grad(sum(parts), leaf)[0], torch.autograd.grad(whole, leaf)[0], rtol=1e-5, atol=1e-6
    )


def flat(batch: PolicyBatch) -> PolicyBatch:
    """One padded row as the packed sequence that it is."""
    return PolicyBatch(batch.targets[0], batch.advantages, mask=batch.mask[0])


@through_logits_and_hidden
def test_B62_packed_tokens_are_counted(path: str, backend: str) -> None:
    ids, borders = on_device([1, 2, 3, 4, 5, 1, 2, 3]), on_device([0, 5, 8])
    first_tokens_out = on_device([0, 1, 1, 1, 1, 0, 1, 1])
    for loss_mask in (torch.ones_like(ids), first_tokens_out):
        batch = PolicyBatch.from_input_ids(ids, loss_mask, on_device([-1.0, -1.0]), cu_seqlens=borders)
        assert batch.mask.sum() == 6
        leaf = on_device(torch.zeros(8, 7)).requires_grad_()
        tensors = [leaf] if path == "logits" else [torch.eye(8).to(leaf), leaf.T]
        function = rlkernels.policy_loss if path == "logits" else rlkernels.linear_policy_loss
        loss = function(*tensors, batch, "dapo").loss
        assert_values(loss, 1.0)
        (gradient,) = torch.autograd.grad(loss, leaf)
        assert_values(gradient.abs().sum(), 2 * 6 / 7)
    short = PolicyBatch.from_input_ids(
        ids, on_device([0, 0, 0, 0, 1, 0, 0, 1]), on_device([-1.0, -1.0]), cu_seqlens=borders
    )
    assert_values(rlkernels.policy_loss(on_device(torch.zeros(8, 7)), short, "dapo").loss, 1.0)


@through_logits_and_hidden
def test_B76_left_padding(path: str, backend: str, generator: Generator) -> None:
    ids = on_device([[5, 1, 2, 3, 4], [0, 0, 6, 2, 1]])  # prompts of 3 and 1 tokens, two tokens of padding
    loss_mask = on_device([[0, 0, 0, 1, 1], [0, 0, 0, 1, 1]])
    leaf = on_device(torch.randn(2, 5, 9, generator=generator)).requires_grad_()
    advantages = on_device([1.0, -2.0])

    def loss(row: slice, columns: slice) -> Tensor:
        batch = PolicyBatch.from_input_ids(ids[row, columns], loss_mask[row, columns], advantages[row])
        rows = leaf[row, columns]
        if path == "logits":
            return rlkernels.policy_loss(rows, batch, "reinforce", reduction="token_sum").loss
        unit = torch.eye(rows.shape[0] * rows.shape[1]).to(leaf).view(*rows.shape[:2], -1)
        return rlkernels.linear_policy_loss(unit, rows.reshape(-1, 9).T, batch, "reinforce", reduction="token_sum").loss

    whole = loss(slice(None), slice(None))
    parts = loss(slice(0, 1), slice(None)) + loss(slice(1, 2), slice(2, None))
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(torch.autograd.grad(parts, leaf)[0], torch.autograd.grad(whole, leaf)[0])


@pytest.mark.parametrize("name", ["dapo", "gmpo", "nft"])
def test_B83_compiles_whole(name: str, backend: str, generator: Generator) -> None:
    logits = on_device(torch.randn(2, 3, 5, generator=generator)).requires_grad_()
    batch = PolicyBatch(
        on_device([[0, 4, 2], [1, IGNORE, 3]]),
        on_device([1.0, -1.0]),
        old_logp=on_device(torch.full((2, 3), -1.5)),
        extras={"success_rate": on_device([0.5, 0.25])},
    )

    def step(logits: Tensor) -> tuple[Tensor, Tensor]:
        logp = torch.log_softmax(logits, -1)[..., 0]
        return rlkernels.policy_loss(logits, batch, name).loss, rlkernels.logp_policy_loss(logp, batch, name).loss

    torch._dynamo.reset()
    results = []
    for function in (step, torch.compile(step, backend="eager", fullgraph=True)):
        losses = function(logits)
        results.append((*losses, torch.autograd.grad(sum(losses), logits)[0]))
    torch.testing.assert_close(results[1], results[0])


@through_every_path
def test_B101_nothing_at_all(path: str, backend: str) -> None:
    for shape in ((0, 3), (2, 0)):
        for objective in ("dapo", "gspo", KL):
            result = loss_through(path, torch.zeros(shape), objective, ref_above=torch.zeros(shape))
            assert result.loss == 0
            assert result.dlogp.shape == shape
            assert_finite_metrics(result)


def test_B104_strided_log_probabilities(backend: str, generator: Generator) -> None:
    stored = on_device(-torch.rand(3, 4, 5, generator=generator))
    mask = on_device(torch.rand(4, 10, generator=generator) < 0.7)[:, ::2]
    leaf = stored[0].T.contiguous().T.requires_grad_()

    def run(logp: Tensor, old: Tensor, mask: Tensor, advantages: Tensor) -> list[Tensor]:
        batch = PolicyBatch(None, advantages, old_logp=old, mask=mask)
        loss = rlkernels.logp_policy_loss(logp, batch, "dapo").loss
        return [loss.detach(), torch.autograd.grad(loss, logp)[0]]

    arguments = (stored[1], mask, stored[2, :, 0])
    expected = run(leaf.detach().contiguous().requires_grad_(), *(value.contiguous() for value in arguments))
    strided = (stored[1].T.contiguous().T, mask, stored[2, :, 0])
    assert_bits(run(leaf, *strided), expected)
    assert_bits(run(leaf, strided[0], strided[1].to(torch.float16), strided[2]), expected)
    with pytest.raises(TypeError, match=r"logp: expected dtype .*got int64"):
        rlkernels.logp_policy_loss(on_device(torch.zeros(4, 5, dtype=torch.int64)), PolicyBatch(None, stored[0, :, 0]))
    with pytest.raises(TypeError, match="advantages: expected a float or integer dtype, got bool"):
        PolicyBatch(None, on_device([True]))


def test_B107_shapes(backend: str) -> None:
    logp = on_device([[-1.0, -2.0], [-3.0, -0.5]])
    one = on_device([1.0, -1.0])
    forms = [one, one[:, None], one[:, None].expand(2, 2), one[:, None].repeat(1, 2)]
    losses = [rlkernels.logp_policy_loss(logp, PolicyBatch(None, form, old_logp=logp - 0.1)).loss for form in forms]
    assert_bits(losses, losses[:1] * len(forms))
    wrong = {"old_logp": (1, 2), "ref_logp": (2,), "mask": (2, 1), "advantages": (1, 2), "policy_weight": (2, 3)}
    for name, shape in (("old_logp", (4, 2)), *wrong.items()):
        arguments = {"advantages": one} | {name: on_device(torch.ones(shape))}
        with pytest.raises(ValueError, match=r"expected shape .*, got float32 \["):
            rlkernels.logp_policy_loss(logp, PolicyBatch(None, **arguments))
