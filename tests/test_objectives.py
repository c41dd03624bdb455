"""The objectives that Python alone knows, against their formulas written out token by token, and against TRL's own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Generator, Tensor
from versions import traced_whole_after_2_7

import rlkernels
from rlkernels import DPPO, DRO, GSPO, LUSPO, ClipCov, KLCov, PolicyBatch, schedules
from rlkernels.objectives import limited

Value = tuple[float, float]  # of the loss, and of its derivative by logp

LOGP = -0.7


def dppo(inside: Callable[[float, float, float], bool]) -> Callable[[float, float], Value]:
    def formula(d: float, a: float) -> Value:
        p, q = math.exp(LOGP), math.exp(LOGP - d)
        weight = min(p / q, 1.5)
        return (-weight * a * LOGP, -weight * a) if inside(p, q, a) else (0.0, 0.0)

    return formula


def inside_tv(p: float, q: float, a: float) -> bool:
    return p - q <= 0.05 if a > 0 else q - p <= 0.15


def inside_kl(p: float, q: float, a: float) -> bool:
    divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    return (p <= q or divergence <= 0.01) if a > 0 else (p >= q or divergence <= 0.05)


FORMULAS: dict[str, tuple[Any, Callable[[float, float], Value]]] = {
    "dppo-tv": (DPPO(divergence="tv", threshold_low=0.15, threshold_high=0.05, ratio_max=1.5), dppo(inside_tv)),
    "dppo-kl": (DPPO(divergence="kl", threshold_low=0.05, threshold_high=0.01, ratio_max=1.5), dppo(inside_kl)),
    "dro": (DRO(beta=0.3), lambda d, a: (-(a * LOGP - 0.15 * d * d), -(a - 0.3 * d))),
}


@pytest.mark.parametrize("advantage", [1.5, -1.5, 0.0], ids="A={}".format)
@pytest.mark.parametrize("log_ratio", [-0.6, -0.3, -0.05, 0.0, 0.05, 0.3, 0.9], ids="d={}".format)
@pytest.mark.parametrize("name", FORMULAS)
def test_formula(name: str, log_ratio: float, advantage: float, backend: str) -> None:
    objective, formula = FORMULAS[name]
    logp = torch.tensor([[LOGP]], dtype=torch.float64, requires_grad=True)
    batch = PolicyBatch(None, torch.tensor([advantage], dtype=torch.float64), old_logp=logp - log_ratio)
    out = rlkernels.logp_policy_loss(logp, batch, objective)
    (slope,) = torch.autograd.grad(out.loss, logp)
    assert (out.loss.item(), slope.item()) == pytest.approx(formula(log_ratio, advantage), abs=1e-12)


def random_batch(generator: Generator, **changes: Any) -> tuple[Tensor, dict[str, Any]]:
    """Five padded sequences, the last without a trained token; float64."""

    def draw() -> Tensor:
        return torch.randn(5, 8, generator=generator, dtype=torch.float64)

    logp = -draw().abs() - 0.1
    mask = torch.rand(5, 8, generator=generator) < 0.7
    mask[0, 0], mask[4] = True, False
    tensors: dict[str, Any] = {"advantages": draw()[:, 0], "mask": mask, "old_logp": logp - 0.2 * draw()}
    return logp.requires_grad_(), tensors | changes


def loss_and_gradient(logp: Tensor, tensors: dict[str, Any], objective: Any, **options: Any) -> tuple[Tensor, Tensor]:
    out = rlkernels.logp_policy_loss(logp, PolicyBatch(None, **tensors), objective, **options)
    return out.loss.detach(), torch.autograd.grad(out.loss.sum(), logp)[0]


def test_vespo_written_out(generator: Generator) -> None:
    logp, tensors = random_batch(generator)
    mask, advantages = tensors["mask"], tensors["advantages"].tolist()
    d = (logp.detach() - tensors["old_logp"]).tolist()
    values, slopes = torch.zeros(5, 8, dtype=torch.float64), torch.zeros(5, 8, dtype=torch.float64)
    for i, row in enumerate(mask):
        w = math.exp(sum(d[i][t] for t in range(8) if row[t]))
        k, decay = (2.0, 3.0) if advantages[i] >= 0 else (3.0, 2.0)
        phi = math.exp(decay) * w**k * math.exp(-decay * w)
        for t in range(8):
            if row[t]:
                values[i, t], slopes[i, t] = -phi * advantages[i] * logp[i, t].item(), -phi * advantages[i]
    loss, gradient = loss_and_gradient(logp, tensors, "vespo", reduction="none")
    torch.testing.assert_close(loss, values)
    torch.testing.assert_close(gradient, slopes)


@pytest.mark.parametrize("spread", [0.2, 30.0], ids=["near", "beyond-the-clamps"])
def test_vespo_is_trls(spread: float, generator: Generator) -> None:
    trainer = pytest.importorskip("trl").GRPOTrainer
    logp, tensors = random_batch(generator)
    noise = torch.randn(5, 8, generator=generator, dtype=torch.float64)
    old, mask = logp.detach() - spread * noise, tensors["mask"]
    correction = torch.rand(5, 8, generator=generator, dtype=torch.float64) + 0.5
    advantages = tensors["advantages"][:, None]
    arguments = {"advantages": advantages, "log_ratio_per_token": logp - old, "mask": mask.double()}
    for ratio in (None, torch.where(mask, correction, 1)):
        if ratio is not None and spread > 20:
            continue  # TRL clamps the policy's ratio and the correction one by one
        phi = trainer.get_gamma_weights(**arguments, importance_sampling_ratio=ratio)
        tensors["old_logp"] = old if ratio is None else old - ratio.log()
        loss, gradient = loss_and_gradient(logp, tensors, "vespo")
        expected = torch.where(mask, -phi * advantages * logp, 0).sum() / mask.sum()
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(gradient, torch.autograd.grad(expected, logp)[0])


def test_luspo_weighs_a_sequence_by_its_length(generator: Generator) -> None:
    """TRL's sum over the tokens of GSPO's term, which is one per sequence; a peer was off by |o| / L."""
    logp, tensors = random_batch(generator)
    mask, advantages, count = tensors["mask"], tensors["advantages"], tensors["mask"].sum(1)
    d = torch.where(mask, logp - tensors["old_logp"], 0).sum(1) / count.clamp(min=1)
    surrogate = -torch.minimum(d.exp() * advantages, d.exp().clamp(0.9, 1.2) * advantages)
    expected = (count * surrogate).sum() / 5
    loss, gradient = loss_and_gradient(logp, tensors, LUSPO(clip_low=0.1, clip_high=0.2))
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logp)[0])
    gspo = loss_and_gradient(logp, tensors, GSPO(clip_low=0.1, clip_high=0.2), reduction="seq_mean_token_sum")
    assert torch.equal(gspo[0], loss)


# ---------------------------------------------------------------------------------------------------------------
# The covariance of log-probability and advantage


def covariances(logp: Tensor, tensors: dict[str, Any]) -> dict[tuple[int, int], float]:
    trained = [(i, t) for i in range(5) for t in range(8) if tensors["mask"][i, t]]
    mean_logp = sum(float(logp[place]) for place in trained) / len(trained)
    mean_advantage = sum(float(tensors["advantages"][i]) for i, _ in trained) / len(trained)
    return {
        place: (float(tensors["advantages"][place[0]]) - mean_advantage) * (float(logp[place]) - mean_logp)
        for place in trained
    }


@pytest.mark.parametrize("share", [1e-4, 0.3, 1.0])
def test_kl_cov_written_out(share: float, generator: Generator) -> None:
    logp, tensors = random_batch(generator)
    covariance = covariances(logp, tensors)
    places = sorted(covariance, key=lambda place: -covariance[place])
    penalised = places[: max(1, int(share * len(places)))]
    expected = torch.zeros((), dtype=torch.float64)
    for place in places:
        d = logp[place] - tensors["old_logp"][place]
        expected = expected - tensors["advantages"][place[0]] * d.exp() + (0.7 * d.abs() if place in penalised else 0)
    expected = expected / len(places)
    loss, gradient = loss_and_gradient(logp, tensors, KLCov(share=share, penalty=0.7))
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logp)[0])


@pytest.mark.parametrize("share", [1e-4, 0.2, 1.0])
def test_clip_cov_draws_so_many_of_the_candidates(share: float, generator: Generator) -> None:
    logp, tensors = random_batch(generator)
    covariance = covariances(logp, tensors)
    everything = ClipCov(share=1.0, cov_low=0.05, cov_high=3.0)
    plain = rlkernels.logp_policy_loss(logp, PolicyBatch(None, **tensors), "grpo", reduction="none").loss.detach()

    def drawn(objective: ClipCov) -> tuple[Tensor, Tensor]:
        loss, gradient = loss_and_gradient(logp, tensors, objective, reduction="none")
        removed = (loss == 0) & (plain != 0)
        assert torch.equal(loss[~removed], plain[~removed])
        assert (gradient[removed] == 0).all()
        return loss, removed

    d = logp.detach() - tensors["old_logp"]
    advantages = tensors["advantages"][:, None].expand(5, 8)
    clipped = ((advantages > 0) & (d.exp() > 1.2)) | ((advantages < 0) & (d.exp() < 0.8))
    candidates = torch.zeros(5, 8, dtype=torch.bool)
    for place, value in covariance.items():
        candidates[place] = 0.05 < value < 3.0 and not clipped[place]
    assert torch.equal(drawn(everything)[1], candidates)

    number = min(max(1, int(share * len(covariance))), int(candidates.sum()))
    times = torch.zeros(5, 8)
    draws = torch.Generator().manual_seed(7)
    for _ in range(300):
        objective = ClipCov(share=share, cov_low=0.05, cov_high=3.0, generator=draws)
        _, removed = drawn(objective)
        assert int(removed.sum()) == number
        times += removed
    assert (times[~candidates] == 0).all()
    if number < candidates.sum():  # uniform: 300 draws lie within 5 standard deviations
        chance = number / int(candidates.sum())
        assert ((times[candidates] - 300 * chance).abs() <= 5 * (300 * chance * (1 - chance)) ** 0.5 + 1).all()


def test_clip_cov_counts_drawn_tokens_as_clipped(generator: Generator) -> None:
    logp, tensors = random_batch(generator)
    tensors["old_logp"] = logp.detach()
    objective = ClipCov(share=1.0, cov_low=0.05, cov_high=3.0)
    inside = sum(0.05 < value < 3.0 for value in covariances(logp, tensors).values())
    metrics = rlkernels.logp_policy_loss(logp, PolicyBatch(None, **tensors), objective).metrics
    fraction = (metrics["clip_frac_low"] + metrics["clip_frac_high"]).item()
    assert fraction == pytest.approx(inside / int(tensors["mask"].sum()))


@pytest.mark.parametrize("objective", [ClipCov(share=0.2, cov_low=0.0), KLCov(share=0.2)], ids=["clip", "kl"])
def test_padding_changes_no_choice(objective: Any, generator: Generator) -> None:
    """A seed draws the same tokens, padded or packed, with whatever under the mask."""
    logp, tensors = random_batch(generator)
    mask = tensors["mask"]

    def run(logp: Tensor, **tensors: Any) -> tuple[Tensor, Tensor]:
        seeded = {"generator": torch.Generator().manual_seed(3)} if isinstance(objective, ClipCov) else {}
        return loss_and_gradient(logp, tensors, dataclasses.replace(objective, **seeded))

    padded_loss, padded_gradient = run(logp, **tensors)
    borders = torch.cat([torch.zeros(1, dtype=torch.int64), mask.sum(1).cumsum(0)])
    packed = logp.detach()[mask].requires_grad_()
    loss, gradient = run(
        packed, advantages=tensors["advantages"], old_logp=tensors["old_logp"][mask], cu_seqlens=borders
    )
    torch.testing.assert_close(loss, padded_loss)
    torch.testing.assert_close(gradient, padded_gradient[mask])


@traced_whole_after_2_7
def test_compiled_clip_cov(generator: Generator) -> None:
    """With every candidate drawn, since a compiled draw has other numbers."""
    torch._dynamo.reset()
    logp, tensors = random_batch(generator)
    batch = PolicyBatch(None, **tensors)

    def loss(logp: Tensor) -> Tensor:
        return rlkernels.logp_policy_loss(logp, batch, ClipCov(share=1.0, cov_low=0.05, cov_high=3.0)).loss

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(logp), loss(logp))


def test_batches_with_covariances_are_never_cut(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients formed in forward go by parts of the batch, whose covariances would be others."""
    monkeypatch.setattr(schedules, "parts", lambda problem, sequence, device: 2)
    hidden = torch.randn(4, 3, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(20, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(20, (4, 3), generator=generator)
    batch = PolicyBatch(targets, torch.randn(4, generator=generator, dtype=torch.float64))
    objective = KLCov(share=0.3, penalty=2.0)
    old = rlkernels.linear_token_stats(hidden, weight, targets).logp + 0.3
    batch = PolicyBatch(targets, batch.advantages, old_logp=old)
    linear = rlkernels.linear_policy_loss(hidden, weight, batch, objective).loss
    expected = rlkernels.policy_loss(hidden @ weight.T, batch, objective).loss
    torch.testing.assert_close(linear, expected)
    for mine, other in zip(*(torch.autograd.grad(x, (hidden, weight)) for x in (linear, expected)), strict=True):
        torch.testing.assert_close(mine, other)


def test_certain_tokens_have_a_finite_divergence() -> None:
    """p = 1 and q = 1: 0 * log 0 is 0."""
    for logp, old in ((0.0, -1.0), (-1.0, 0.0), (0.0, 0.0), (-200.0, 0.0), (1e-6, 0.0), (-1.0, -math.inf)):
        leaf = torch.tensor([[logp]], requires_grad=True)
        for a in (1.0, -1.0):
            batch = PolicyBatch(None, torch.tensor([a]), old_logp=torch.tensor([[old]]))
            out = rlkernels.logp_policy_loss(leaf, batch, "dppo_kl")
            assert out.loss.isfinite() and torch.autograd.grad(out.loss, leaf)[0].isfinite().all()


def test_an_impossible_token_has_left_the_trust_region() -> None:
    """q = 0: p log (p / q) has no part in it, (1 - q) log ((1 - q) / (1 - p)) has."""
    batch = PolicyBatch(None, torch.tensor([1.0]), old_logp=torch.tensor([[-math.inf]]))
    for name in ("dppo_tv", "dppo_kl"):
        assert rlkernels.logp_policy_loss(torch.tensor([[-0.5]]), batch, name).loss == 0


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0,)], ids=str)
@pytest.mark.parametrize("name", ["vespo", "luspo", "dppo_tv", "dppo_kl", "dro", "clip_cov", "kl_cov"])
def test_no_token_at_all(name: str, shape: tuple[int, ...]) -> None:
    logp = torch.zeros(shape, requires_grad=True)
    batch = PolicyBatch(None, torch.ones(shape[0] if len(shape) == 2 else 1), mask=torch.ones(shape))
    out = rlkernels.logp_policy_loss(logp, batch, name)
    out.loss.backward()
    assert out.loss == 0
    assert all(math.isfinite(value) for value in out.metrics.values())


def test_a_limit_passes_the_gradient_at_its_bounds() -> None:
    """Whatever torch.clamp does there: at a bound nothing is clipped, and NaN is felt."""
    x = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0, torch.nan], requires_grad=True)
    y = limited(x, -1.0, 1.0)
    torch.testing.assert_close(y, torch.tensor([-1.0, -1.0, 0.0, 1.0, 1.0, torch.nan]), equal_nan=True)
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [0, 1, 1, 1, 0, 1]


@pytest.mark.parametrize("name", ["grpo", "gspo", "sapo", "nft"])
def test_nan_of_a_trained_token_reaches_the_gradient(name: str, backend: str) -> None:
    """On every backend alike: a step that cannot be computed must not look like one."""
    logp = torch.full((2, 3), -1.0, requires_grad=True)
    old_logp = logp.detach().clone()
    old_logp[1, 2] = torch.nan
    batch = PolicyBatch(
        None, torch.tensor([1.0, -1.0]), old_logp=old_logp, extras={"success_rate": torch.full((2,), 0.5)}
    )
    rlkernels.logp_policy_loss(logp, batch, name).loss.backward()
    assert logp.grad[1, 2].isnan()
    assert logp.grad[0].isfinite().all()


@pytest.mark.parametrize("threshold, is_inside", [(8.4, False), (8.6, True)])
def test_divergence_of_a_token_that_has_become_certain(threshold: float, is_inside: bool) -> None:
    """1 - p = 0 counts as 1e-8: D = 1/2 log(1/2) + 1/2 log((1/2 + 1e-8) / 1e-8) = 8.517."""
    logp = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    batch = PolicyBatch(None, torch.tensor([1.0]), old_logp=torch.full((1, 1), 0.5, dtype=torch.float64).log())
    objective = rlkernels.DPPO(divergence="kl", threshold_high=threshold)
    rlkernels.logp_policy_loss(logp, batch, objective).loss.backward()
    assert (logp.grad != 0).all() == is_inside


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_at_its_borders(divergence: str) -> None:
    """On policy nothing leaves a trust region of size 0; a token of advantage 0 is clipped on no side."""

    def run(log_ratio: float, advantage: float, logp: float = -0.7) -> tuple[rlkernels.PolicyLoss, float]:
        leaf = torch.tensor([[logp]], dtype=torch.float64, requires_grad=True)
        batch = PolicyBatch(None, torch.tensor([advantage], dtype=torch.float64), old_logp=leaf.detach() - log_ratio)
        objective = DPPO(divergence=divergence, threshold_low=0.0, threshold_high=0.0)
        out = rlkernels.logp_policy_loss(leaf, batch, objective)
        return out, torch.autograd.grad(out.loss, leaf)[0].item()

    for advantage in (1.0, -1.0):
        assert run(0.0, advantage)[1] == -advantage
    for log_ratio in (0.5, -0.5):
        metrics = run(log_ratio, 0.0)[0].metrics
        assert metrics["clip_frac_low"] == metrics["clip_frac_high"] == 0
    assert run(0.5, 0.5)[0].metrics["clip_frac_high"] == run(-0.5, -0.5)[0].metrics["clip_frac_low"] == 1
    # a log-probability above 0, as rounding leaves it, is a probability of 1, old and new
    for advantage in (1.0, -1.0):
        assert run(0.25, advantage, logp=0.5)[1] == pytest.approx(-advantage * math.exp(0.25))


def test_clip_cov_between_its_bounds() -> None:
    """Both covariances are 1 exactly: inside (0, 2), neither inside (1, 2) nor inside (0, 1)."""
    logp = torch.tensor([[0.0, -2.0]], dtype=torch.float64)
    batch = PolicyBatch(None, torch.tensor([[1.0, -1.0]], dtype=torch.float64), old_logp=logp)
    for low, high, drawn in ((0.0, 2.0, 0.5), (1.0, 2.0, 0.0), (0.0, 1.0, 0.0)):
        metrics = rlkernels.logp_policy_loss(logp, batch, ClipCov(share=1.0, cov_low=low, cov_high=high)).metrics
        assert metrics["clip_frac_low"] == metrics["clip_frac_high"] == drawn


def test_clip_cov_side_of_a_drawn_token() -> None:
    """A drawn token counts on the side to which its advantage pushes, on none where that is 0."""
    logp = torch.tensor([[0.0, -1.0, -2.0]], dtype=torch.float64)
    batch = PolicyBatch(None, torch.tensor([[0.5, 0.0, -0.5]], dtype=torch.float64), old_logp=logp)
    metrics = rlkernels.logp_policy_loss(logp, batch, ClipCov(share=1.0, cov_low=-1.0)).metrics
    assert metrics["clip_frac_low"].item() == metrics["clip_frac_high"].item() == pytest.approx(1 / 3)


@pytest.mark.parametrize("first", [True, False])
def test_clip_cov_can_draw_each_of_two(first: bool) -> None:
    logp = torch.tensor([[-9.0, 0.0, -2.0]], dtype=torch.float64)  # the first is masked
    fields = {"mask": torch.tensor([[0, 1, 1]]), "old_logp": logp}
    batch = PolicyBatch(None, torch.tensor([[3.0, 1.0, -1.0]], dtype=torch.float64), **fields)
    losses = [
        rlkernels.logp_policy_loss(
            logp,
            batch,
            ClipCov(share=0.5, cov_low=0.0, generator=torch.Generator().manual_seed(seed)),
            reduction="none",
        ).loss[0]
        for seed in range(40)
    ]
    assert any(loss[1 if first else 2] == 0 and loss[2 if first else 1] != 0 for loss in losses)
