"""Objectives, masks, weights, layouts and metrics of the policy losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

import rlkernels
from rlkernels import CISPO, GMPO, GRPO, GSPO, NFT, RECIPES, SAPO, GSPOToken, PolicyBatch, Reinforce
from rlkernels.losses import logp_policy_terms

LN2 = math.log(2.0)


def loss_and_gradient(logp: Any, objective: Any = "grpo", **arguments: Any) -> tuple[float, list[Any]]:
    """Of float64 log-probabilities; batch arguments and options together."""
    logp = torch.as_tensor(logp, dtype=torch.float64).clone().requires_grad_()
    options = {name: arguments.pop(name) for name in ("reduction", "normalizer", "entropy") if name in arguments}
    tensors = {
        name: torch.as_tensor(value, dtype=torch.float64) if name != "extras" else value
        for name, value in arguments.items()
    }
    advantages = tensors.pop("advantages", torch.ones(logp.shape[0], dtype=torch.float64))
    out = rlkernels.logp_policy_loss(logp, PolicyBatch(None, advantages, **tensors), objective, **options)
    (gradient,) = torch.autograd.grad(out.loss.sum(), logp)
    return out.loss.tolist(), gradient.tolist()


# ---------------------------------------------------------------------------------------------------------------
# Values and gradients, against the formulas of the papers written out per token


def surrogate(ratio: float, a: float, low: float, high: float) -> tuple[float, float]:
    """PPO's clipped surrogate and its derivative by logp; a tie is not clipped."""
    clipped = (a > 0 and ratio > 1 + high) or (a < 0 and ratio < 1 - low)
    return -min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a), 0.0 if clipped else -a * ratio


def dual_clipped(ratio: float, a: float) -> tuple[float, float]:
    value, slope = surrogate(ratio, a, 0.2, 0.2)
    return (-3 * a, 0.0) if a < 0 and ratio > 3 else (value, slope)


def ratio_capped(ratio: float, a: float) -> tuple[float, float]:
    """TRL's delta caps the unclipped branch, so only A < 0 can feel it."""
    value, slope = surrogate(min(ratio, 2.5), a, 0.2, 0.2)
    return value, 0.0 if ratio > 2.5 else slope


def sapo(ratio: float, a: float) -> tuple[float, float]:
    tau = 1.0 if a > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -a * 4 / tau * gate, -a * 4 * gate * (1 - gate) * ratio


def cispo(ratio: float, a: float) -> tuple[float, float]:
    weight = min(max(ratio, 0.5), 2.0)
    return -weight * a * LOGP, -weight * a


def nft_negative(ratio: float) -> tuple[float, float]:
    rate, omega = 0.4, 0.6
    x = (1 - rate * ratio) / (1 - rate)
    return -omega * math.log(max(x, 1.0)), omega * rate / (1 - rate) * ratio / max(x, 1.0)


def nft(ratio: float, a: float) -> tuple[float, float]:
    return (-0.6 * math.log(ratio), -0.6) if a > 0 else nft_negative(ratio)


LOGP = -1.25
FORMULAS: dict[str, tuple[Any, Callable[[float, float], tuple[float, float]]]] = {
    "grpo": (GRPO(clip_low=0.2, clip_high=0.28), lambda r, a: surrogate(r, a, 0.2, 0.28)),
    "grpo-dual": (GRPO(dual_clip=3.0), dual_clipped),
    "grpo-cap": (GRPO(ratio_cap=2.5), ratio_capped),
    "gspo": (GSPO(), lambda r, a: surrogate(r, a, 3e-4, 4e-4)),
    "gspo-token": (GSPOToken(clip_low=0.1, clip_high=0.3), lambda r, a: surrogate(r, a, 0.1, 0.3)),
    "gspo-product": (GSPO(level="sequence_product"), lambda r, a: surrogate(r, a, 3e-4, 4e-4)),
    "gmpo": (
        GMPO(log_clip_low=0.2, log_clip_high=0.3),
        lambda r, a: (
            -a * (min(r, math.exp(0.3)) if a > 0 else max(r, math.exp(-0.2))),
            0.0 if (a > 0 and r > math.exp(0.3)) or (a < 0 and r < math.exp(-0.2)) else -a * r,
        ),
    ),
    "gmpo-unclipped": (GMPO(clip_level=None), lambda r, a: (-a * r, -a * r)),
    "cispo": (CISPO(ratio_max=2.0, ratio_min=0.5), cispo),
    "sapo": (SAPO(), sapo),
    "nft": (NFT(), nft),
    "reinforce": (Reinforce(), lambda r, a: (-a * LOGP, -a)),
}


@pytest.mark.parametrize("advantage", [1.5, -1.5, 0.0], ids="A={}".format)
@pytest.mark.parametrize("log_ratio", [-1.4, -0.1, 0.0, 0.1, 0.26, 0.95, 1.4], ids="d={}".format)
@pytest.mark.parametrize("name", FORMULAS)
def test_formula(name: str, log_ratio: float, advantage: float) -> None:
    objective, formula = FORMULAS[name]
    extras = {"success_rate": torch.tensor([0.4], dtype=torch.float64)}
    loss, gradient = loss_and_gradient(
        [[LOGP]], objective, advantages=[advantage], old_logp=[[LOGP - log_ratio]], extras=extras
    )
    if name == "nft":  # its recipe divides by 1000
        loss, gradient = 1000 * loss, [[1000 * gradient[0][0]]]
    value, slope = formula(math.exp(log_ratio), advantage)
    assert loss == pytest.approx(value, abs=1e-12)
    assert gradient[0][0] == pytest.approx(slope, abs=1e-12)


@pytest.mark.parametrize("level", ["sequence_mean", "sequence_product"])
def test_sequence_level_gradient_goes_through_every_token(level: str) -> None:
    """s depends on all tokens of the sequence: finite differences of the loss."""
    old = torch.tensor([[-1.0, -2.0, -0.5]], dtype=torch.float64)
    logp = (old + torch.tensor([[0.1, -0.05, 0.02]], dtype=torch.float64)).requires_grad_()

    def loss(logp: Tensor) -> Tensor:
        batch = PolicyBatch(None, torch.tensor([[1.0, -0.5, 2.0]], dtype=torch.float64), old_logp=old)
        return rlkernels.logp_policy_loss(logp, batch, GRPO(level=level, clip_low=0.5, clip_high=0.5)).loss

    assert torch.autograd.gradcheck(loss, (logp,))


def test_gspo_token_equals_gspo_for_equal_advantages(generator: Generator) -> None:
    logp = -torch.rand(4, 6, generator=generator, dtype=torch.float64)
    old = logp + 0.1 * torch.randn(4, 6, generator=generator, dtype=torch.float64)
    arguments = {"advantages": torch.randn(4, generator=generator), "old_logp": old}
    sequence = loss_and_gradient(logp, GSPO(clip_low=0.02, clip_high=0.02), **arguments)
    token = loss_and_gradient(logp, GSPOToken(clip_low=0.02, clip_high=0.02), **arguments)
    assert sequence[0] == pytest.approx(token[0], abs=1e-12)
    torch.testing.assert_close(torch.tensor(sequence[1]), torch.tensor(token[1]))


def test_gmpo_is_at_most_unclipped_grpo(generator: Generator) -> None:
    """A geometric mean is at most the arithmetic one."""
    logp = -torch.rand(8, 5, generator=generator, dtype=torch.float64)
    old = logp + torch.randn(8, 5, generator=generator, dtype=torch.float64)
    for row in range(8):
        arguments = {"advantages": torch.ones(1), "old_logp": old[row : row + 1]}
        geometric, _ = loss_and_gradient(logp[row : row + 1], GMPO(clip_level=None), **arguments)
        arithmetic = (logp[row] - old[row]).exp().mean().item()
        assert abs(geometric) <= arithmetic + 1e-12


def test_gmpo_sequence_clip_clips_the_sum() -> None:
    """Two log ratios of 0.3 sum to 0.6: clipped at 0.4, R = exp(0.4 / 2), no gradient."""
    objective = GMPO(clip_level="sequence")
    loss, gradient = loss_and_gradient([[-1.0, -1.0]], objective, old_logp=[[-1.3, -1.3]])
    assert loss == pytest.approx(-math.exp(0.2))
    assert gradient == [[0.0, 0.0]]


def test_nft_sequence_ratio_uses_the_sum() -> None:
    extras = {"success_rate": torch.tensor([0.4], dtype=torch.float64)}
    objective = NFT(level="sequence_product", prompt_weight="uniform")
    arguments = {"old_logp": [[-1.2, -1.1]], "extras": extras, "reduction": "seq_mean_token_mean"}
    loss, _ = loss_and_gradient([[-1.0, -1.0]], objective, advantages=[1.0], **arguments)
    assert loss == pytest.approx(-0.3)


# ---------------------------------------------------------------------------------------------------------------
# KL, entropy, weights


@pytest.mark.parametrize(
    "estimator, value, slope",
    [("k1", -LN2, 1.0), ("k2", LN2 * LN2 / 2, -LN2), ("k3", 2 - LN2 - 1, -1.0)],
    ids=["k1", "k2", "k3"],
)
def test_kl_estimators_at_ref_minus_logp_ln2(estimator: str, value: float, slope: float) -> None:
    objective = GRPO(kl_coef=0.5, kl_estimator=estimator)
    loss, gradient = loss_and_gradient([[-1.0]], objective, advantages=[0.0], ref_logp=[[-1.0 + LN2]])
    assert loss == pytest.approx(0.5 * value)
    assert gradient[0][0] == pytest.approx(0.5 * slope)


def test_importance_weighted_kl_is_attached() -> None:
    """d/dlogp of r (e^x - x - 1), x = ref - logp: r k + r (1 - e^x)."""
    ratio, x = math.exp(0.1), LN2
    objective = GRPO(kl_coef=1.0, kl_importance_weighted=True)
    arguments = {"advantages": [0.0], "old_logp": [[-1.1]], "ref_logp": [[-1.0 + x]]}
    loss, gradient = loss_and_gradient([[-1.0]], objective, **arguments)
    k3 = math.exp(x) - x - 1
    assert loss == pytest.approx(ratio * k3)
    assert gradient[0][0] == pytest.approx(ratio * k3 + ratio * (1 - math.exp(x)))


def test_kl_clamps_have_no_gradient_outside() -> None:
    arguments = {"advantages": [0.0], "ref_logp": [[29.0]]}
    objective = GRPO(kl_coef=1.0, log_ratio_clamp=20.0)
    assert loss_and_gradient([[-1.0]], objective, **arguments) == (
        pytest.approx(math.expm1(20.0) - 20.0),
        [[0.0]],
    )
    objective = GRPO(kl_coef=1.0, kl_clamp=10.0)
    assert loss_and_gradient([[-1.0]], objective, **arguments) == (10.0, [[0.0]])


def test_weight_scales_policy_and_kl_but_not_entropy() -> None:
    objective = GRPO(kl_coef=1.0, kl_estimator="k2", entropy_coef=0.1)
    entropy = torch.tensor([[2.0, 4.0]], dtype=torch.float64)
    arguments = {"ref_logp": [[-2.0, -2.0]], "weight": [[0.5, 0.0]], "entropy": entropy}
    loss, _ = loss_and_gradient([[-1.0, -1.0]], objective, **arguments)
    assert loss == pytest.approx(0.5 * (-1 + 0.5) / 2 - 0.1 * 3)


@pytest.mark.parametrize("shape", [(1,), (1, 1), (1, 2)], ids=str)
def test_policy_weight_scales_the_policy_term_before_kl(shape: tuple[int, ...]) -> None:
    objective = GRPO(kl_coef=1.0, kl_estimator="k2")
    arguments = {"ref_logp": [[-2.0, -2.0]], "policy_weight": torch.full(shape, 0.25)}
    loss, gradient = loss_and_gradient([[-1.0, -1.0]], objective, **arguments)
    assert loss == pytest.approx(-0.25 + 0.5)
    assert gradient == [[pytest.approx((-0.25 + 1) / 2)] * 2]


def test_entropy_bonus_has_its_own_reduction() -> None:
    """Two rows of 1 and 3 tokens: the token mean of the entropies is not their mean of row means."""
    entropy = torch.tensor([[4.0, 9.0, 9.0], [1.0, 2.0, 3.0]], dtype=torch.float64)
    mask = [[1, 0, 0], [1, 1, 1]]
    arguments = {"advantages": [0.0, 0.0], "mask": mask, "entropy": entropy}
    zeros = torch.zeros(2, 3)
    assert loss_and_gradient(zeros, GRPO(entropy_coef=1.0), **arguments)[0] == pytest.approx(-2.5)
    by_row = GRPO(entropy_coef=1.0, entropy_reduction="seq_mean_token_mean")
    assert loss_and_gradient(zeros, by_row, **arguments)[0] == pytest.approx(-3.0)
    doubled = loss_and_gradient(zeros, by_row, normalizer=4, reduction="seq_mean_token_mean", **arguments)
    assert doubled[0] == pytest.approx(-1.5)


def test_entropy_gradient_reaches_the_logits(backend: str, generator: Generator) -> None:
    """-coef * mean entropy, against autograd of the formula."""
    logits = torch.randn(2, 3, 7, generator=generator, dtype=torch.float64).requires_grad_()
    batch = PolicyBatch(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2))
    loss = rlkernels.policy_loss(logits, batch, GRPO(entropy_coef=0.3)).loss
    (actual,) = torch.autograd.grad(loss, logits)
    probs = logits.softmax(-1)
    (expected,) = torch.autograd.grad(0.3 * (probs * probs.log()).sum(-1).mean(), logits)
    torch.testing.assert_close(actual, expected)


# ---------------------------------------------------------------------------------------------------------------
# Layouts


def random_batch(generator: Generator, lengths: list[int]) -> tuple[dict[str, Tensor], Tensor]:
    """Packed tensors of sequences of the given lengths, and their borders."""
    count = sum(lengths)

    def draw() -> Tensor:
        return -torch.rand(count, generator=generator, dtype=torch.float64)

    logp = draw()
    tensors = {
        "logp": logp,
        "old_logp": logp + 0.2 * torch.randn(count, generator=generator, dtype=torch.float64),
        "ref_logp": draw(),
        "weight": torch.rand(count, generator=generator, dtype=torch.float64),
        "mask": torch.rand(count, generator=generator) < 0.8,
    }
    return tensors, torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


@pytest.mark.parametrize(
    "name", [name for name, recipe in RECIPES.items() if name != "dr_grpo" and recipe.objective.by_sequence]
)
def test_packed_equals_padded_equals_one_by_one(name: str, generator: Generator) -> None:
    lengths = [3, 1, 0, 5]  # one of a single token, one empty
    packed, borders = random_batch(generator, lengths)
    advantages = torch.randn(4, generator=generator, dtype=torch.float64)
    extras = {"success_rate": torch.rand(4, generator=generator, dtype=torch.float64)}

    def run(logp: Tensor, options: dict[str, Any] | None = None, **batch: Any) -> tuple[Tensor, Tensor]:
        logp = logp.clone().requires_grad_()
        out = rlkernels.logp_policy_loss(logp, PolicyBatch(None, **batch), name, **(options or {}))
        return out.loss.detach(), torch.autograd.grad(out.loss, logp)[0]

    per_token = {key: value for key, value in packed.items() if key != "logp"}
    packed_loss, packed_gradient = run(
        packed["logp"], advantages=advantages, extras=extras, cu_seqlens=borders, **per_token
    )

    def pad(values: Tensor) -> Tensor:
        rows = torch.zeros(4, 7, dtype=values.dtype)
        for row, part in enumerate(values.split(lengths)):
            rows[row, : lengths[row]] = part
        return rows

    padded = {key: pad(value) for key, value in per_token.items()}
    padded_loss, padded_gradient = run(pad(packed["logp"]), advantages=advantages, extras=extras, **padded)
    torch.testing.assert_close(padded_loss, packed_loss)
    unpadded = torch.cat([row[:length] for row, length in zip(padded_gradient, lengths, strict=True)])
    torch.testing.assert_close(unpadded, packed_gradient)

    normalizer = rlkernels.global_normalizer(padded["mask"], RECIPES[name].reduction)
    if name == "nft":
        normalizer = torch.tensor(1000.0)
    total = torch.zeros((), dtype=torch.float64)
    for row in range(4):
        one = slice(int(borders[row]), int(borders[row + 1]))
        total += run(
            packed["logp"][one],
            {"normalizer": normalizer},
            advantages=advantages[row : row + 1],
            extras={"success_rate": extras["success_rate"][row : row + 1]},
            **{key: value[one] for key, value in per_token.items()},
        )[0]
    torch.testing.assert_close(total, packed_loss)


def test_leading_one_with_cu_seqlens_is_accepted(generator: Generator) -> None:
    packed, borders = random_batch(generator, [2, 4])
    logp = packed.pop("logp")
    advantages = torch.tensor([1.0, -1.0])
    flat = rlkernels.logp_policy_loss(logp, PolicyBatch(None, advantages, cu_seqlens=borders, **packed), "gspo")
    rows = {name: value[None] for name, value in packed.items()}
    nested = rlkernels.logp_policy_loss(logp[None], PolicyBatch(None, advantages, cu_seqlens=borders, **rows), "gspo")
    assert torch.equal(flat.loss, nested.loss)
    assert nested.logp.shape == (1, 6)


@pytest.mark.parametrize("form", ["[B]", "[B, 1]", "[B, T]"])
def test_advantage_forms_agree(form: str) -> None:
    advantages = {
        "[B]": torch.tensor([1.0, -2.0]),
        "[B, 1]": torch.tensor([[1.0], [-2.0]]),
        "[B, T]": torch.tensor([[1.0] * 3, [-2.0] * 3]),
    }[form]
    loss, _ = loss_and_gradient(-torch.ones(2, 3), "grpo", advantages=advantages)
    assert loss == pytest.approx(0.5)


@pytest.mark.parametrize("layout", [(6,), (1, 6)], ids=str)
@pytest.mark.parametrize("form", [(2,), (2, 1), (6,), (1, 6)], ids=str)
def test_temperatures_of_packed_tokens(form: tuple[int, ...], layout: tuple[int, ...], generator: Generator) -> None:
    logits = torch.randn(6, 9, generator=generator)
    targets = torch.randint(0, 9, (6,), generator=generator)
    batch = PolicyBatch(targets.view(layout), torch.ones(2), cu_seqlens=torch.tensor([0, 2, 6]))
    per_token = torch.tensor([0.5] * 2 + [2.0] * 4)
    if 6 in form:
        per_token = temperature = torch.rand(6, generator=generator) + 0.5
    else:
        temperature = torch.tensor([0.5, 2.0])
    if form == (1, 6) and layout == (6,):
        with pytest.raises(ValueError, match="temperature: expected shape"):
            rlkernels.policy_loss(logits, batch, temperature=temperature.view(form))
        return
    out = rlkernels.policy_loss(logits.view(*layout, 9), batch, temperature=temperature.view(form))
    expected = rlkernels.token_stats(logits, targets, temperature=per_token).logp
    assert torch.equal(out.logp.view(-1), expected)


def test_one_sequence_a_token() -> None:
    """`[B]` where B = N is by token, `[B, 1]` by sequence."""
    logits, targets = torch.tensor([[0.0, 1.0]] * 2), torch.tensor([0, 0])
    batch = PolicyBatch(targets, torch.ones(2, 1), cu_seqlens=torch.tensor([0, 2, 2]))
    by_token = rlkernels.policy_loss(logits, batch, temperature=torch.tensor([0.5, 2.0])).logp
    by_sequence = rlkernels.policy_loss(logits, batch, temperature=torch.tensor([[0.5], [2.0]])).logp
    assert by_token[0] != by_token[1] and by_sequence[0] == by_sequence[1] == by_token[0]


@pytest.mark.parametrize("name", [name for name in rlkernels.RECIPES if name not in ("nft", "dr_grpo", "lambda_grpo")])
def test_impossible_token_of_no_advantage(name: str, backend: str) -> None:
    """Zero advantage times a log-probability of -inf is no loss."""
    logits = torch.zeros(1, 2, 5)
    logits[0, 0, 4] = -torch.inf
    logits.requires_grad_()
    batch = PolicyBatch(torch.tensor([[4, 1]]), torch.tensor([[0.0, 1.0]]), old_logp=torch.full((1, 2), -1.0))
    if rlkernels.RECIPES[name].objective.level == "token" and name not in ("gmpo", "vespo"):
        loss = rlkernels.policy_loss(logits, batch, name).loss
        assert torch.isfinite(loss)
        assert torch.isfinite(torch.autograd.grad(loss, logits)[0]).all()


def test_vespo_refuses_a_weight_outside_of_its_ratio() -> None:
    batch = PolicyBatch(None, torch.ones(1), policy_weight=torch.ones(1, 2))
    with pytest.raises(ValueError, match="policy_weight: expected None with VESPO"):
        rlkernels.logp_policy_loss(-torch.ones(1, 2), batch, "vespo")


# ---------------------------------------------------------------------------------------------------------------
# Masks and extreme values


GARBAGE = [200.0, -200.0, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("garbage", GARBAGE, ids="masked={}".format)
@pytest.mark.parametrize("name", RECIPES)
def test_masked_tokens_cannot_be_felt(name: str, garbage: float, generator: Generator) -> None:
    """B44: every input holds garbage under the mask; loss, gradient and metrics keep their bits."""
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    objective = RECIPES[name]._replace()
    fields = {"kl_coef": 0.1, "entropy_coef": 0.1}
    instance = type(objective.objective)(**(vars(objective.objective) | fields))

    def run(fill: float) -> tuple[Tensor, Tensor, dict[str, float]]:
        draws = torch.Generator().manual_seed(0)

        def draw() -> Tensor:
            return torch.where(mask == 1, -torch.rand(2, 3, generator=draws), fill)

        logp = draw().requires_grad_()
        batch = PolicyBatch(
            None,
            draw(),
            mask=mask,
            old_logp=draw(),
            ref_logp=draw(),
            weight=draw().abs(),
            policy_weight=None if name == "vespo" else draw().abs(),  # which refuses it
            extras={"success_rate": draw().abs()},
        )
        out = rlkernels.logp_policy_loss(
            logp, batch, instance, entropy=draw(), reduction=objective.reduction, normalizer=7.0
        )
        metrics = {key: float(value) for key, value in out.metrics.items()}
        return out.loss, torch.autograd.grad(out.loss, logp)[0], metrics

    clean, dirty = run(0.0), run(garbage)
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1], dirty[1])
    assert clean[2] == dirty[2]
    assert all(math.isfinite(value) for value in dirty[2].values())


def test_unmasked_nan_stays_visible() -> None:
    loss, _ = loss_and_gradient([[0.0, 0.0]], "dapo", old_logp=[[0.0, math.nan]])
    assert math.isnan(loss)


@pytest.mark.parametrize("name", RECIPES)
def test_empty_mask_gives_zero_with_zero_gradients(name: str, backend: str) -> None:
    """B18, B49, B50."""
    logits = torch.randn(2, 3, 5, requires_grad=True)
    batch = PolicyBatch(
        torch.full((2, 3), -100),
        torch.ones(2),
        weight=torch.ones(2, 3),
        extras={"success_rate": torch.full((2,), 0.5)},
    )
    for normalizer in (None, 0, torch.tensor(0)):
        if RECIPES[name].reduction == "seq_mean_token_sum_norm" and normalizer is None:
            continue
        out = rlkernels.policy_loss(logits, batch, name, normalizer=normalizer)
        (gradient,) = torch.autograd.grad(out.loss, logits)
        assert out.loss == 0
        assert torch.equal(gradient, torch.zeros_like(logits))
        assert all(math.isfinite(value) for value in out.metrics.values())


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["A>0", "A<0"])
@pytest.mark.parametrize("log_ratio", [89.0, -89.0, 1e30, -1e30], ids="d={}".format)
@pytest.mark.parametrize("name", RECIPES)
def test_no_finite_log_ratio_overflows_float32(name: str, log_ratio: float, sign: float) -> None:
    """B46, B48: ratios and KL stop at e^80."""
    logp = torch.zeros(1, 2, requires_grad=True)
    old = torch.full((1, 2), -log_ratio)
    batch = PolicyBatch(
        None,
        torch.tensor([sign]),
        old_logp=old,
        ref_logp=-old,
        weight=torch.ones(1, 2),
        extras={"success_rate": torch.tensor([0.5])},
    )
    recipe = RECIPES[name]
    instance = type(recipe.objective)(**(vars(recipe.objective) | {"kl_coef": 1.0}))
    out = rlkernels.logp_policy_loss(logp, batch, instance, reduction=recipe.reduction, normalizer=2.0)
    (gradient,) = torch.autograd.grad(out.loss, logp)
    assert out.loss.isfinite()
    assert gradient.isfinite().all()
    assert all(math.isfinite(value) for value in out.metrics.values())


@pytest.mark.parametrize(
    "name", [name for name in RECIPES if RECIPES[name].needs is None and name not in ("dr_grpo", "clip_cov")]
)
def test_on_policy_is_exact(name: str, backend: str, generator: Generator) -> None:
    """B42: the bits of no_grad are the bits of training, so ratio 1, no clipping, KL 0."""
    logits = torch.randn(2, 4, 50, generator=generator).requires_grad_()
    targets = torch.randint(0, 50, (2, 4), generator=generator)
    with torch.no_grad():
        old = rlkernels.token_stats(logits, targets, temperature=0.7).logp
        alone = rlkernels.token_stats(logits[1:, 2:3], targets[1:, 2:3], temperature=0.7).logp
    assert torch.equal(alone, old[1:, 2:3])
    batch = PolicyBatch(
        targets,
        torch.tensor([1.0, -1.0]),
        old_logp=old,
        extras={"success_rate": torch.full((2,), 0.5)},
    )
    metrics = rlkernels.policy_loss(logits, batch, name, temperature=0.7).metrics
    assert metrics["ratio_min"] == metrics["ratio_max"] == 1
    assert metrics["clip_frac_low"] == metrics["clip_frac_high"] == metrics["approx_kl_k3"] == 0


# ---------------------------------------------------------------------------------------------------------------
# Metrics


def test_metrics_of_a_known_batch() -> None:
    ratio = torch.tensor([[2.0, 1.0, 9.0], [0.5, 1.0, 1.0]])
    batch = PolicyBatch(
        None,
        torch.tensor([1.0, -1.0]),
        mask=torch.tensor([[1, 1, 0], [1, 1, 1]]),
        old_logp=-ratio.log(),
        ref_logp=torch.full((2, 3), LN2),
        weight=torch.full((2, 3), 0.5),
        policy_weight=torch.tensor([1.0, 2.0]),
    )
    out = rlkernels.logp_policy_loss(torch.zeros(2, 3), batch, GRPO(kl_coef=1.0), entropy=torch.ones(2, 3))
    expected = {
        "ratio_mean": 5.5 / 5,
        "ratio_variance": (4 + 0.25 + 3) / 5 - 1.1**2,
        "ratio_min": 0.5,
        "ratio_max": 2.0,
        "clip_frac_low": 1 / 5,
        "clip_frac_high": 1 / 5,
        "clip_frac_low_min": 0.0,
        "clip_frac_low_max": 1 / 3,
        "clip_frac_high_min": 0.0,
        "clip_frac_high_max": 1 / 2,
        "approx_kl_k1": 0.0,
        "approx_kl_k3": (2 + 0.5 - 2) / 5,
        "weight_mean": 0.5,
        "policy_weight_mean": (2 * 1 + 3 * 2) / 5,
        "ref_kl": 0.306853,
        "entropy": 1.0,
    }
    assert {name: float(value) for name, value in out.metrics.items()} == pytest.approx(expected, abs=1e-6)
    assert len(out.metrics) == len(expected)


def test_metrics_of_parts_merge_to_those_of_the_whole(generator: Generator) -> None:
    """B51: unequal parts, one of them without a single trained token."""
    logp = -torch.rand(6, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 5, generator=generator) < 0.6
    mask[5] = False
    batch = PolicyBatch(
        None,
        torch.randn(6, generator=generator),
        mask=mask,
        old_logp=-torch.rand(6, 5, generator=generator, dtype=torch.float64),
    )
    whole = rlkernels.logp_policy_loss(logp, batch, "dapo").metrics
    parts = [rlkernels.logp_policy_loss(logp[part.span], part, "dapo").metrics for part in batch.split(6)]
    merged = rlkernels.Metrics.merge([rlkernels.Metrics.merge(parts[:1]), *parts[1:]])
    assert {k: float(v) for k, v in merged.items()} == pytest.approx({k: float(v) for k, v in whole.items()})


def test_variance_of_ratios_near_one(backend: str, generator: Generator) -> None:
    """Squares about 1 do not cancel in float32; equal ratios have none; parts of it merge to the whole."""
    d = 1e-3 * torch.randn(16, 200, generator=generator)
    mask = torch.rand(16, 200, generator=generator) < 0.8
    batch = PolicyBatch(None, torch.ones(16), mask=mask, old_logp=torch.where(mask, d, math.nan) - 1)
    logp = torch.full((16, 200), -1.0)
    expected = (-1 - batch.old_logp[mask].double()).exp().var(correction=0).item()
    whole = rlkernels.logp_policy_loss(logp, batch, "grpo").metrics
    assert whole["ratio_variance"].item() == pytest.approx(expected, rel=1e-4)
    parts = [rlkernels.logp_policy_loss(logp[part.span], part, "grpo").metrics for part in batch.split(5)]
    merged = rlkernels.Metrics.merge(parts)["ratio_variance"].item()
    assert merged == pytest.approx(expected, rel=1e-4)
    shifted = PolicyBatch(None, torch.ones(16), mask=mask, old_logp=torch.full((16, 200), -1.5))
    equal = rlkernels.logp_policy_loss(logp, shifted, "grpo").metrics
    assert equal["ratio_variance"].item() == pytest.approx(0.0, abs=1e-6)


def test_an_impossible_token_without_advantage(backend: str) -> None:
    """0 times its log-probability would be NaN."""
    logp = torch.tensor([[-1.0, -torch.inf]], requires_grad=True)
    batch = PolicyBatch(None, torch.tensor([[2.0, 0.0]]))
    loss = rlkernels.logp_policy_loss(logp, batch, "verifree").loss
    assert loss.item() == pytest.approx(2.0)
    assert torch.autograd.grad(loss, logp)[0].tolist() == [[-2.0, 0.0]]


def test_variance_of_huge_ratios_is_finite(backend: str) -> None:
    batch = PolicyBatch(None, torch.ones(1), old_logp=torch.tensor([[-200.0, -1.0]]))
    metrics = rlkernels.logp_policy_loss(torch.full((1, 2), -1.0), batch, "grpo").metrics
    assert metrics["ratio_variance"].item() == pytest.approx(math.exp(160) / 4, rel=1e-4)  # ratios stop at e^80
    empty = PolicyBatch(None, torch.ones(1), mask=torch.zeros(1, 2))
    assert rlkernels.logp_policy_loss(torch.zeros(1, 2), empty, "grpo").metrics["ratio_variance"] == 0


def test_metrics_with_other_names_do_not_merge() -> None:
    one = rlkernels.Metrics({"a": (torch.ones(()), torch.ones(()))})
    two = rlkernels.Metrics({"b": (torch.ones(()), torch.ones(()))})
    with pytest.raises(ValueError, match="parts"):
        rlkernels.Metrics.merge([one, two])


# ---------------------------------------------------------------------------------------------------------------
# Callables, batches, compilation


def test_callable_objective_sees_the_callers_layout(backend: str, generator: Generator) -> None:
    logits = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64).requires_grad_()
    batch = PolicyBatch(torch.tensor([[1, 2, -100], [0, 4, 3]]), torch.tensor([1.0, -1.0]))

    def objective(logp: Tensor, batch: PolicyBatch) -> Tensor:
        assert logp.shape == batch.targets.shape
        return -batch.advantages[:, None] * logp

    own = rlkernels.policy_loss(logits, batch, objective)
    known = rlkernels.policy_loss(logits, batch, "reinforce")
    torch.testing.assert_close(own.loss, known.loss)
    torch.testing.assert_close(*(torch.autograd.grad(out.loss, logits)[0] for out in (own, known)))


def test_reduction_none_keeps_the_layout(generator: Generator) -> None:
    logp = -torch.rand(2, 3, generator=generator)
    batch = PolicyBatch(None, torch.tensor([1.0, -1.0]), mask=torch.tensor([[1, 1, 0], [1, 1, 1]]))
    out = rlkernels.logp_policy_loss(logp, batch, "dapo", reduction="none")
    assert torch.equal(out.loss, torch.tensor([[-1.0, -1.0, 0.0], [1.0, 1.0, 1.0]]))


def test_floats_are_kept_detached_and_at_least_single() -> None:
    advantages = torch.ones(2, requires_grad=True)
    batch = PolicyBatch(
        None,
        advantages,
        old_logp=torch.zeros(2, 3, dtype=torch.bfloat16),
        ref_logp=torch.zeros(2, 3, dtype=torch.float64),
    )
    assert not batch.advantages.requires_grad
    assert (batch.old_logp.dtype, batch.ref_logp.dtype) == (torch.float32, torch.float64)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_from_input_ids_shifts_inside_each_sequence(layout: str) -> None:
    """B75: no row predicts the first token of the next sequence, and the last does not wrap."""
    if layout == "padded":
        ids, borders = torch.tensor([[10, 11, 12], [20, 21, 22]]), None
        expected = [[11, 12, -100], [21, 22, -100]]
    else:
        ids, borders = torch.tensor([10, 11, 12, 20, 21]), torch.tensor([0, 3, 3, 5], dtype=torch.int32)
        expected = [11, 12, -100, 21, -100]
    loss_mask = torch.ones_like(ids)
    loss_mask.view(-1)[1] = 0  # token 11 is not trained: row 0 is masked
    sequences = 2 if borders is None else 3
    batch = PolicyBatch.from_input_ids(ids, loss_mask, torch.ones(sequences), cu_seqlens=borders)
    assert batch.targets.tolist() == expected
    assert batch.mask.tolist() == ((torch.tensor(expected) != -100) & (torch.tensor(expected) != 11)).tolist()
    advantages = torch.arange(ids.numel()).reshape(ids.shape).float()
    shifted = PolicyBatch.from_input_ids(ids, loss_mask, advantages, cu_seqlens=borders).advantages
    assert shifted.flatten()[:2].tolist() == [1.0, 2.0]


def test_a_part_with_as_many_sequences_as_tokens() -> None:
    """What is given by sequence stays so."""
    logp, old_logp = torch.full((6,), -1.0), torch.full((6,), -1.5)
    by_sequence = torch.tensor([1.0, 2.0, 3.0, 4.0])
    borders = torch.tensor([0, 0, 2, 4, 6])
    batch = PolicyBatch(
        None, by_sequence, cu_seqlens=borders, mask=torch.ones(6), old_logp=old_logp, policy_weight=by_sequence
    )
    whole = rlkernels.logp_policy_loss(logp, batch, "grpo", reduction="token_sum").loss
    parts = [
        rlkernels.logp_policy_loss(logp[part.span], part, "grpo", reduction="token_sum").loss for part in batch.split(2)
    ]
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("k", [1, 2, 3, 10])
def test_split_covers_every_sequence_once(k: int, packed: bool, generator: Generator) -> None:
    borders = torch.tensor([0, 2, 3, 3, 8, 10], dtype=torch.int32) if packed else None
    shape = (10,) if packed else (5, 2)
    batch = PolicyBatch(
        torch.randint(0, 9, shape, generator=generator),
        torch.randn(5, generator=generator),
        old_logp=torch.randn(shape, generator=generator),
        policy_weight=torch.randn(5, generator=generator),
        cu_seqlens=borders,
    )
    parts = batch.split(k)
    assert len(parts) <= k
    assert torch.equal(torch.cat([part.targets for part in parts]), batch.targets)
    assert torch.equal(torch.cat([part.old_logp for part in parts]), batch.old_logp)
    assert torch.equal(torch.cat([part.advantages.flatten() for part in parts]), batch.advantages)
    assert torch.equal(torch.cat([batch.targets[part.span] for part in parts]), batch.targets)


def test_to_moves_every_tensor() -> None:
    batch = PolicyBatch(torch.zeros(2, 3, dtype=torch.int64), torch.ones(2), extras={"success_rate": torch.ones(2)})
    moved = batch.to("meta")
    assert {moved.targets.device.type, moved.mask.device.type, moved.extras["success_rate"].device.type} == {"meta"}
    assert batch.targets.device.type == "cpu"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "clip_cov"])  # which draws other numbers then
def test_compiles_whole(name: str, generator: Generator) -> None:
    """B83: no graph break with mixed signs of the advantage; a compiled loss is the eager one."""
    torch._dynamo.reset()
    logits = torch.randn(2, 3, 11, generator=generator).requires_grad_()
    targets = torch.tensor([[1, 2, -100], [0, 4, 3]])
    old = -torch.rand(2, 3, generator=generator)
    normalizer = 6.0 if name == "dr_grpo" else None

    def loss(logits: Tensor, targets: Tensor, old: Tensor) -> rlkernels.PolicyLoss:
        batch = PolicyBatch(
            targets,
            torch.tensor([1.0, -1.0]),
            old_logp=old,
            weight=torch.ones(2, 3),
            extras={"success_rate": torch.full((2,), 0.5)},
        )
        return rlkernels.policy_loss(logits, batch, name, temperature=0.7, normalizer=normalizer)

    eager, compiled = loss(logits, targets, old), torch.compile(loss, fullgraph=True)(logits, targets, old)
    torch.testing.assert_close(compiled.loss, eager.loss)
    torch.testing.assert_close(*(torch.autograd.grad(out.loss, logits)[0] for out in (compiled, eager)))
    assert {k: float(v) for k, v in compiled.metrics.items()} == pytest.approx(
        {k: float(v) for k, v in eager.metrics.items()}, rel=1e-5, abs=1e-6
    )


# ---------------------------------------------------------------------------------------------------------------
# Found by trying to break it


def test_narrow_targets_keep_their_mask(backend: str) -> None:
    """A uint8 label cannot be -100."""
    logits = torch.zeros(1, 3, 10)
    logits[0, 1] = math.nan
    batch = PolicyBatch(torch.tensor([[1, 2, 3]], dtype=torch.uint8), torch.ones(1), mask=torch.tensor([[1, 0, 1]]))
    assert rlkernels.policy_loss(logits, batch).logp.isfinite().all()


def test_per_sequence_values_go_by_shape() -> None:
    """As many sequences as tokens, one of them empty: `[B, 1]` is still by sequence."""
    batch = PolicyBatch(
        None, torch.tensor([[100.0], [1.0], [10.0]]), mask=torch.ones(3), cu_seqlens=torch.tensor([0, 0, 2, 3])
    )
    out = rlkernels.logp_policy_loss(torch.full((3,), -1.0), batch, Reinforce(), reduction="none")
    assert out.loss.tolist() == [1.0, 1.0, 10.0]


def test_dual_clip_at_its_bound_is_not_clipped() -> None:
    bound = math.exp(1.5)
    logp = torch.tensor([[1.5]], dtype=torch.float64)
    objective = GRPO(dual_clip=logp.exp().item())
    _, gradient = loss_and_gradient(logp, objective, advantages=[-1.0], old_logp=[[0.0]])
    assert gradient[0][0] == pytest.approx(bound)


def test_gmpo_sequence_clip_respects_the_log_ratio_clamp() -> None:
    objective = GMPO(clip_level="sequence", log_ratio_clamp=0.1, log_clip_high=10.0)
    loss, _ = loss_and_gradient([[1.0] * 4], objective, old_logp=[[0.0] * 4])
    assert loss == pytest.approx(-math.exp(0.1))


@pytest.mark.parametrize("name", ["weight", "policy_weight"])
def test_zero_weight_selects_an_infinite_advantage_away(name: str) -> None:
    arguments = {"advantages": [[1.0, math.inf]], name: [[1.0, 0.0]]}
    assert loss_and_gradient([[-1.0, -1.0]], "grpo", **arguments) == (-0.5, [[-0.5, 0.0]])


def test_policy_terms_are_those_of_the_loss(generator: Generator) -> None:
    """Packed, with an empty sequence; neither weights nor KL term are in them."""
    logp = -torch.rand(9, generator=generator)
    old = logp - 0.5 * torch.randn(9, generator=generator)
    mask = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1, 1])
    borders = torch.tensor([0, 4, 4, 9])
    batch = rlkernels.PolicyBatch(
        None,
        torch.tensor([1.0, 2.0, -1.0]),
        mask=mask,
        old_logp=old,
        cu_seqlens=borders,
        policy_weight=torch.ones(3) / 2,
    )
    for objective in ("grpo", "gspo", rlkernels.CISPO(ratio_max=1.2, ratio_min=0.8)):
        terms = logp_policy_terms(logp, batch, objective)
        out = rlkernels.logp_policy_loss(logp, batch, objective, reduction="none")
        torch.testing.assert_close(0.5 * terms.loss, out.loss)
        clipped = [side.sum() / mask.sum() for side in (terms.clipped_low, terms.clipped_high)]
        torch.testing.assert_close(clipped[0], out.metrics["clip_frac_low"], check_dtype=False)
        torch.testing.assert_close(clipped[1], out.metrics["clip_frac_high"], check_dtype=False)
    with pytest.raises(TypeError, match="objective: expected a recipe's name or an objective"):
        logp_policy_terms(logp, batch, lambda logp, batch: logp)
