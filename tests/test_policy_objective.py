"""The objective's kernels against its definition in plain PyTorch: values, gradients, metrics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor

import rlkernels
from rlkernels import CISPO, GMPO, GRPO, GSPO, LUSPO, NFT, SAPO, GSPOToken, Objective, PolicyBatch, Reinforce
from rlkernels.kernel_options import objective_options
from rlkernels.ops import policy_objective as operation
from rlkernels.token_loss import objective_batch

OBJECTIVES: dict[str, Objective] = {
    "grpo": GRPO(),
    "grpo-asymmetric": GRPO(clip_low=0.1, clip_high=0.28),
    "grpo-dual-clip": GRPO(dual_clip=3.0),
    "grpo-ratio-cap": GRPO(ratio_cap=1.5),
    "grpo-ratio-cap-at-the-clip": GRPO(ratio_cap=1.2),
    "grpo-sequence-mean": GRPO(level="sequence_mean"),
    "grpo-sequence-product": GRPO(level="sequence_product"),
    "grpo-log-ratio-clamp": GRPO(log_ratio_clamp=0.15),
    "grpo-k1": GRPO(kl_coef=0.1, kl_estimator="k1"),
    "grpo-k2-clamped": GRPO(kl_coef=0.1, kl_estimator="k2", kl_clamp=0.3),
    "grpo-k3-weighted": GRPO(kl_coef=0.1, kl_importance_weighted=True),
    "grpo-k3-all": GRPO(kl_coef=0.1, kl_clamp=0.5, kl_importance_weighted=True, log_ratio_clamp=2.0),
    "gspo": GSPO(),
    "gspo-product-kl": GSPO(level="sequence_product", kl_coef=0.1, kl_importance_weighted=True),
    "luspo": LUSPO(clip_low=0.1, clip_high=0.2),
    "gspo-token": GSPOToken(),
    "gspo-token-kl": GSPOToken(kl_coef=0.1, kl_importance_weighted=True, log_ratio_clamp=0.1),
    "gmpo": GMPO(),
    "gmpo-clamped": GMPO(log_ratio_clamp=0.3, kl_coef=0.1, kl_importance_weighted=True),
    "gmpo-sequence": GMPO(clip_level="sequence", log_ratio_clamp=5.0),
    "gmpo-unclipped": GMPO(clip_level=None),
    "cispo": CISPO(ratio_max=1.2),
    "cispo-two-sided": CISPO(ratio_max=1.2, ratio_min=0.8, kl_coef=0.1, kl_importance_weighted=True),
    "cispo-sequence": CISPO(ratio_max=1.2, level="sequence_mean"),
    "sapo": SAPO(),
    "sapo-sequence": SAPO(tau_pos=2.0, tau_neg=0.5, level="sequence_mean"),
    "nft": NFT(),
    "nft-odds": NFT(min_ratio=0.5, prompt_weight="sqrt_failure_odds", negative_weight=0.7, log_ratio_max=0.2),
    "nft-product": NFT(prompt_weight="uniform", level="sequence_product", rate_clamp=(0.3, 0.6)),
    "reinforce": Reinforce(),
    "reinforce-kl": Reinforce(kl_coef=0.1, kl_importance_weighted=True),
}


@pytest.fixture(params=["cpu", "cuda", "triton"])
def backend(request: pytest.FixtureRequest, select_backend: Callable[[str], str]) -> str:
    """Those with kernels of their own; the reference backend is the definition."""
    return select_backend(request.param)


REDUCTIONS = rlkernels.REDUCTIONS[:-1]


def normalizer_of(reduction: str) -> float | None:
    return 37.0 if reduction == "seq_mean_token_sum_norm" else None


RATIOS = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.28, 1.5, 3.0, 1 - 3e-4, 1 + 4e-4)
LOG_RATIOS = (0.15, -0.15, 0.3, -0.3, 0.4, -0.4, 0.2, 2.0, -2.0)


def at_and_around(ratios: Sequence[float], log_ratios: Sequence[float] = ()) -> Tensor:
    """Log ratios: each bound, and a hair below and above. At a ratio's, where exponentials agree on its last bit."""
    bounds = torch.tensor([math.log(ratio) for ratio in ratios], dtype=torch.float64)
    agreed = bounds[bounds.exp() == torch.from_numpy(np.exp(bounds.numpy()))]
    exact = torch.cat([agreed, torch.tensor(log_ratios, dtype=torch.float64)])
    return torch.cat([exact, exact - 1e-9, exact + 1e-9])


BEYOND_EVERY_LIMIT = torch.tensor([12.0, -12.0, 79.0, 81.0, -81.0, 300.0, -300.0], dtype=torch.float64)


def grid_batch(d: Tensor, old_logp: bool = True) -> tuple[Tensor, PolicyBatch]:
    """Every log ratio under advantages of each sign and 0, with weights that are 0, and some tokens masked."""
    signs = torch.tensor([-1.3, 0.0, 0.7, 2.0], dtype=torch.float64)
    shape = (len(signs), len(d))
    logp = torch.zeros(shape, dtype=torch.float64)  # logp - old_logp is d to the last bit
    position = torch.arange(logp.numel()).view(shape)
    batch = PolicyBatch(
        torch.zeros(shape, dtype=torch.int64),
        signs,
        mask=position % 11 != 5,
        old_logp=logp - d if old_logp else None,
        ref_logp=logp + d.flip(0) / 3,
        weight=torch.where(position % 7 == 3, 0.0, 0.5 + position % 3),
        policy_weight=torch.where(position % 5 == 1, 0.0, 1.0 + position % 2),
        extras={"success_rate": torch.tensor([0.0, 0.3, 0.5, 1.0])},
    )
    return logp, batch


def evaluate(
    backend: str, logp: Tensor, batch: PolicyBatch, objective: Objective, entropy: Tensor | None = None, **options: Any
) -> tuple[rlkernels.PolicyLoss, list[Tensor]]:
    leaves = [x.detach().clone().requires_grad_() for x in (logp, entropy) if x is not None]
    previous = rlkernels.set_backend(backend)
    try:
        out = rlkernels.logp_policy_loss(
            leaves[0], batch, objective, entropy=leaves[1] if len(leaves) > 1 else None, **options
        )
        gradients = torch.autograd.grad(out.loss, leaves, allow_unused=True)
    finally:
        rlkernels.set_backend(previous)
    zero = torch.zeros_like(logp)
    return out, [zero if gradient is None else gradient for gradient in gradients]


def assert_like_reference(backend: str, logp: Tensor, batch: PolicyBatch, *args: Any, **options: Any) -> None:
    mine, my_gradients = evaluate(backend, logp, batch, *args, **options)
    exact, exact_gradients = evaluate("reference", logp, batch, *args, **options)
    torch.testing.assert_close(mine.loss, exact.loss, rtol=1e-12, atol=1e-13)
    for actual, expected in zip(my_gradients, exact_gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)
    assert list(mine.metrics) == list(exact.metrics)
    for name, value in exact.metrics.items():
        torch.testing.assert_close(mine.metrics[name], value, rtol=1e-12, atol=1e-13, msg=name)


@pytest.mark.parametrize("old_logp", [True, False], ids=["off-policy", "on-policy"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_grid_of_advantage_and_ratio(name: str, old_logp: bool, backend: str) -> None:
    """sign(A) x ratio below, at and above each bound, A = 0 included."""
    logp, batch = grid_batch(at_and_around(RATIOS, LOG_RATIOS), old_logp)
    assert_like_reference(backend, logp, batch, OBJECTIVES[name], reduction="token_sum")


@pytest.mark.parametrize("name", [name for name, o in OBJECTIVES.items() if not o.kl_importance_weighted])
def test_beyond_every_limit(name: str, backend: str) -> None:
    """Without a weighted KL, whose two derivatives cancel out there."""
    for d in BEYOND_EVERY_LIMIT.split(1):
        logp, batch = grid_batch(d)
        assert_like_reference(backend, logp, batch, OBJECTIVES[name], reduction="token_sum")


def one_token_a_sequence(d: Tensor) -> tuple[Tensor, PolicyBatch]:
    """The grid again, so that sequence ratios meet every bound too."""
    logp, batch = grid_batch(d)
    flat = logp.reshape(-1)
    borders = torch.arange(flat.shape[0] + 1)
    assert batch.mask is not None and batch.targets is not None
    return flat, PolicyBatch(
        batch.targets.view(-1),
        batch.advantages.repeat_interleave(logp.shape[1]),
        mask=batch.mask.view(-1),
        old_logp=batch.old_logp.view(-1),
        ref_logp=batch.ref_logp.view(-1),
        weight=batch.weight.view(-1),
        policy_weight=batch.policy_weight.view(-1),
        cu_seqlens=borders,
        extras={"success_rate": batch.extras["success_rate"].repeat_interleave(logp.shape[1])},
    )


@pytest.mark.parametrize("name", [name for name, o in OBJECTIVES.items() if not objective_options(o).is_token_level])
def test_grid_of_sequence_ratios(name: str, backend: str) -> None:
    logp, batch = one_token_a_sequence(at_and_around((0.8, 1.2, 1 - 3e-4, 1 + 4e-4), (0.4, -0.4)))
    assert_like_reference(backend, logp, batch, OBJECTIVES[name], reduction="token_sum")


def random_batch(generator: Generator, packed: bool, per_token: bool) -> tuple[Tensor, Tensor, PolicyBatch]:
    """Seven sequences, some empty, some masked whole; advantages and weights by sequence or by token."""
    lengths = torch.tensor([5, 0, 1, 17, 3, 600, 4]) if packed else torch.full((7,), 19)
    count = int(lengths.sum())

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shape = (count,) if packed else (7, 19)
    of_each = shape if per_token else (7,)
    logp = -2 + 0.5 * draw(*shape)
    mask = torch.rand(*shape, generator=generator) < 0.8
    if not packed:
        mask[2] = False
    borders = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    batch = PolicyBatch(
        torch.zeros(shape, dtype=torch.int64),
        draw(*of_each),
        mask=mask,
        old_logp=logp + 0.3 * draw(*shape),
        ref_logp=logp + 0.3 * draw(*shape),
        weight=draw(*shape).abs(),
        policy_weight=draw(*of_each).abs(),
        cu_seqlens=borders if packed else None,
        extras={"success_rate": torch.rand(7, generator=generator, dtype=torch.float64)},
    )
    return logp, draw(*shape).abs(), batch


@pytest.mark.parametrize("packed, per_token", [(False, False), (True, True)], ids=["padded", "packed"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_reduction_and_layout(
    name: str, packed: bool, per_token: bool, backend: str, generator: Generator
) -> None:
    logp, entropy, batch = random_batch(generator, packed, per_token)
    for i, reduction in enumerate(REDUCTIONS):
        bonus = REDUCTIONS[(i + 1) % 3]
        objective = dataclasses.replace(OBJECTIVES[name], entropy_coef=0.05, entropy_reduction=bonus)
        options = {"reduction": reduction, "normalizer": normalizer_of(reduction), "entropy": entropy}
        assert_like_reference(backend, logp, batch, objective, **options)
        assert_like_reference(backend, logp, batch, objective, **options | {"normalizer": torch.tensor(12.5)})


@pytest.mark.parametrize("name", OBJECTIVES)
def test_float32_rounds_once(name: str, backend: str, generator: Generator) -> None:
    """At most 4 units in the last place of the sum of the terms' magnitudes; see `tests/tolerance.py`."""
    logp, _, batch = random_batch(generator, packed=True, per_token=True)
    for field in ("advantages", "old_logp", "ref_logp", "weight", "policy_weight"):
        setattr(batch, field, getattr(batch, field).float())
    single = logp.float()
    wide = {name: value.double() for name, value in vars(batch).items() if isinstance(value, Tensor)}
    exact_batch = PolicyBatch.__new__(PolicyBatch)
    vars(exact_batch).update(vars(batch) | {k: v for k, v in wide.items() if getattr(batch, k).is_floating_point()})
    out, (dlogp,) = evaluate(backend, single, batch, OBJECTIVES[name], reduction="token_sum")
    exact, (exact_dlogp,) = evaluate("reference", single.double(), exact_batch, OBJECTIVES[name], reduction="token_sum")
    per_token = rlkernels.logp_policy_loss(single.double(), exact_batch, OBJECTIVES[name], reduction="none")
    ulp = torch.finfo(torch.float32).eps
    assert (out.loss - exact.loss).abs() <= 4 * ulp * per_token.loss.abs().sum()
    torch.testing.assert_close(dlogp.double(), exact_dlogp, rtol=4 * ulp, atol=4 * ulp * float(exact_dlogp.abs().max()))


@pytest.mark.parametrize(
    "objective, function",
    [(CISPO(ratio_max=1e40), np.exp), (GRPO(kl_coef=1.0), np.expm1)],
    ids=["ratio", "slope-of-k3"],
)
def test_exponentials_are_exact_to_a_rounding(
    objective: Objective, function: Callable[[Any], Any], backend: str, generator: Generator
) -> None:
    """In float64 against long double: a gradient of a token is -e^d here, or 1 - e^d."""
    halves_of_ln_2 = (torch.arange(-115, 115, dtype=torch.float64) + 0.5) * math.log(2)
    near_0 = 0.3 * torch.randn(2000, generator=generator, dtype=torch.float64)
    d = torch.cat([torch.linspace(-79.9, 79.9, 2001, dtype=torch.float64), halves_of_ln_2, near_0, near_0 * 1e-6])
    logp = torch.zeros_like(d).requires_grad_()
    is_ratio = function is np.exp
    advantages = torch.full_like(d, float(is_ratio))
    tensors = {"old_logp": -d} if is_ratio else {"ref_logp": d}
    batch = PolicyBatch(None, advantages, cu_seqlens=torch.tensor([0, len(d)]), **tensors)
    loss = rlkernels.logp_policy_loss(logp, batch, objective, reduction="token_sum").loss
    (gradient,) = torch.autograd.grad(loss, logp)
    expected = function(d.numpy().astype(np.longdouble))
    roundings = 4 if backend == "triton" else 1  # Triton has no expm1 of its own
    assert (np.abs(-gradient.numpy() - expected) <= roundings * 2.0**-52 * np.abs(expected)).all()


def test_no_token_at_all(backend: str) -> None:
    for shape in ((0, 3), (2, 0), (0,)):
        logp = torch.zeros(shape, requires_grad=True)
        batch = PolicyBatch(torch.zeros(shape, dtype=torch.int64), torch.ones(shape[0] if len(shape) == 2 else 1))
        out = rlkernels.logp_policy_loss(logp, batch, GSPO(), reduction="token_mean")
        out.loss.backward()
        assert out.loss == 0
        assert logp.grad is not None
        assert out.metrics["ratio_mean"] == 0


@pytest.mark.parametrize("at", [0, 1, 40])
def test_ratio_that_is_nan_is_seen_in_its_extremes(at: int, backend: str) -> None:
    old_logp = torch.zeros(3, 14)
    old_logp.view(-1)[at] = torch.nan
    batch = PolicyBatch(None, torch.ones(3), mask=torch.ones(3, 14, dtype=torch.bool), old_logp=old_logp)
    for logp in (torch.zeros(3, 14), torch.zeros(3, 14).requires_grad_()):
        metrics = rlkernels.logp_policy_loss(logp, batch, GRPO()).metrics
        assert all(metrics[name].isnan() for name in ("ratio_mean", "ratio_min", "ratio_max"))
        assert metrics["clip_frac_high_max"] == 0


def test_masked_values_cannot_be_felt(backend: str) -> None:
    logp, batch = grid_batch(at_and_around(RATIOS, LOG_RATIOS))
    clean, (clean_gradient,) = evaluate(backend, logp, batch, GRPO(kl_coef=0.1))
    assert batch.mask is not None
    for field in ("old_logp", "ref_logp", "weight", "policy_weight"):
        getattr(batch, field)[~batch.mask] = torch.nan
    dirty, (dirty_gradient,) = evaluate(backend, logp.masked_fill(~batch.mask, torch.nan), batch, GRPO(kl_coef=0.1))
    assert torch.equal(clean.loss, dirty.loss)
    assert torch.equal(clean_gradient, dirty_gradient)
    assert (dirty_gradient[~batch.mask] == 0).all()


def test_subclasses_and_callables_take_the_definition() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Mine(GRPO):
        pass

    assert objective_options(Mine()) is None
    assert objective_options(lambda logp, batch: -logp) is None
    for name, (objective, *_) in rlkernels.RECIPES.items():
        is_known = name not in ("vespo", "dppo_tv", "dppo_kl", "dro", "clip_cov", "kl_cov")
        assert (objective_options(objective) is not None) == is_known, name


@pytest.mark.parametrize("has_fp64", [False, True])
def test_gpus_without_float64_take_the_definition(has_fp64: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rlkernels.backends, "choose", lambda device: "triton")
    properties = SimpleNamespace(has_fp64=has_fp64)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: properties)
    for operation_name in ("policy_objective", "policy_sweep"):
        assert rlkernels.backends.has(operation_name, torch.device("xpu")) == has_fp64
    assert rlkernels.backends.has("token_stats", torch.device("xpu"))


# The single sweep: gradient written in forward.

TOKEN_LEVEL = [name for name, objective in OBJECTIVES.items() if objective_options(objective).is_token_level]


def logits_batch(generator: Generator, vocab: int, **changes: Any) -> PolicyBatch:
    targets = torch.randint(vocab, (3, 5), generator=generator)
    targets[1, 3:] = -100
    old_logp = torch.full((3, 5), -math.log(vocab)) + 0.2 * torch.randn(3, 5, generator=generator)
    fields = {
        "advantages": torch.tensor([1.0, -0.7, 0.0]),
        "old_logp": old_logp,
        "ref_logp": old_logp,
        "extras": {"success_rate": torch.tensor([0.5, 0.25, 0.4])},
    }
    return PolicyBatch(targets, **fields | changes)


def both_ways(logits: Tensor, *args: Any, **options: Any) -> list[tuple[rlkernels.PolicyLoss, Tensor]]:
    """In a single sweep, and in two through the statistics."""
    results = []
    for single in (True, False):
        leaf = logits.detach().clone().requires_grad_()
        with pytest.MonkeyPatch.context() as patch:
            if not single:
                patch.setattr(rlkernels.losses, "_single_sweep_options", lambda rows, recipe: None)
            out = rlkernels.policy_loss(leaf, *args, **options)
        assert (type(out.loss.grad_fn).__name__ == "PolicySweepBackward") == single
        results.append((out, torch.autograd.grad(out.loss, leaf)[0]))
    return results


@pytest.mark.parametrize("vocab", [1, 37, 4096, 9001])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TOKEN_LEVEL)
def test_single_sweep_equals_two(name: str, dtype: torch.dtype, vocab: int, generator: Generator, backend: str) -> None:
    logits = (3 * torch.randn(3, 5, vocab, generator=generator, dtype=torch.float64)).to(dtype)
    objective = dataclasses.replace(OBJECTIVES[name], entropy_coef=0.01)
    (one, dlogits), (two, expected) = both_ways(logits, logits_batch(generator, vocab), objective, temperature=0.8)
    torch.testing.assert_close(one.loss, two.loss, rtol=0, atol=0)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(dlogits, expected, rtol=tolerance, atol=1e-6 * float(expected.abs().max()))
    for metric, value in two.metrics.items():
        torch.testing.assert_close(one.metrics[metric], value, rtol=0, atol=0, msg=metric)
    assert torch.equal(one.logp, two.logp)
    assert torch.equal(one.entropy, two.entropy)


@pytest.mark.parametrize("path", ["logp", "logits"])
def test_entropy_bonus_of_weight_1(path: str, backend: str) -> None:
    logits = torch.zeros(2, 3, 8, dtype=torch.float64)
    batch = PolicyBatch(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.float64))
    objective = GRPO(entropy_coef=1.0)
    if path == "logits":
        loss = rlkernels.policy_loss(logits, batch, objective).loss
    else:
        entropy = torch.full((2, 3), math.log(8), dtype=torch.float64)
        loss = rlkernels.logp_policy_loss(logits[..., 0], batch, objective, entropy=entropy).loss
    assert loss.item() == pytest.approx(-math.log(8))


@pytest.mark.parametrize("factor", [2.0, 0.5, 0.0, -3.0])
def test_single_sweep_under_any_upstream_gradient(factor: float, generator: Generator, backend: str) -> None:
    leaf = torch.randn(3, 5, 300, generator=generator, dtype=torch.float64).requires_grad_()
    batch = logits_batch(generator, 300)
    (once,) = torch.autograd.grad(rlkernels.policy_loss(leaf, batch, "dapo").loss, leaf)
    (scaled,) = torch.autograd.grad(factor * rlkernels.policy_loss(leaf, batch, "dapo").loss, leaf)
    torch.testing.assert_close(scaled, factor * once, rtol=1e-14, atol=0)


@pytest.mark.parametrize("label", [7, 10**6, -1, -(2**63)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_bad_label_poisons_its_row(
    dtype: torch.dtype, label: int, generator: Generator, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the host cannot look at labels; a CPU can."""
    monkeypatch.setattr(rlkernels.checks, "values_are_checked", lambda device: False)
    leaf = torch.randn(1, 3, 7, generator=generator, dtype=dtype).requires_grad_()
    batch = PolicyBatch(torch.tensor([[0, label, 6]]), torch.ones(1))
    if backend == "cpu":
        with pytest.raises(ValueError, match="targets"):
            rlkernels.policy_loss(leaf, batch, "reinforce")
        return
    loss = rlkernels.policy_loss(leaf, batch, "reinforce").loss
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert loss.isnan()
    assert gradient[0, 1].isnan().all()
    assert gradient[0, [0, 2]].isfinite().all()


@pytest.mark.parametrize("normalizer", [-1.0, math.inf, math.nan])
def test_a_cpu_looks_at_the_normalizer_itself(normalizer: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled call has not."""
    monkeypatch.setattr(rlkernels.checks, "values_are_checked", lambda device: False)
    logp = torch.zeros(2, 3)
    batch = PolicyBatch(None, torch.ones(2), mask=torch.ones(2, 3))
    rlkernels.set_backend("cpu")
    with pytest.raises(ValueError, match="normalizer"):
        rlkernels.logp_policy_loss(logp, batch, GRPO(), normalizer=torch.tensor(normalizer))


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["plain", "softcap"])
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_single_sweep_of_any_rows(softcap: float | None, strided: bool, generator: Generator) -> None:
    logits = torch.randn(3, 5, 2 * 4500 if strided else 4500, generator=generator).bfloat16()[..., :: 1 + strided]
    options = {"softcap": softcap, "logit_scale": 1.7, "temperature": torch.tensor([0.5, 1.0, 2.0])}
    (one, dlogits), (two, expected) = both_ways(logits, logits_batch(generator, 4500), "dapo", **options)
    assert torch.equal(one.loss, two.loss)
    torch.testing.assert_close(dlogits, expected, rtol=1e-2, atol=1e-8)


def test_contract_of_a_gradient_formed_in_forward(generator: Generator) -> None:
    """Any upstream gradient, a second backward, two losses on one logits tensor, a leaf or an inner tensor."""
    vocab = 4500
    logits = torch.randn(3, 5, vocab, generator=generator)
    batch, other = logits_batch(generator, vocab), logits_batch(generator, vocab)

    def gradient(loss: Any, leaf: Tensor, **options: Any) -> Tensor:
        return torch.autograd.grad(loss, leaf, **options)[0]

    leaf = logits.clone().requires_grad_()
    loss = rlkernels.policy_loss(leaf, batch, "dapo").loss
    once = gradient(loss, leaf, retain_graph=True)
    kept = once.clone()
    once.zero_()  # whoever got it may do with it what he wants
    again = gradient(loss, leaf, retain_graph=True)
    torch.testing.assert_close(again, kept, rtol=1e-5, atol=1e-10)
    torch.testing.assert_close(gradient(loss / 8, leaf, retain_graph=True), kept / 8, rtol=1e-5, atol=1e-10)
    for factor in (0.125, 3.0, 0.0):
        fresh = rlkernels.policy_loss(leaf, batch, "dapo").loss
        torch.testing.assert_close(gradient(fresh * factor, leaf), kept * factor, rtol=1e-6, atol=1e-10)

    both = rlkernels.policy_loss(leaf, batch, "dapo").loss + 2 * rlkernels.policy_loss(leaf, other, "grpo").loss
    second = gradient(rlkernels.policy_loss(leaf, other, "grpo").loss, leaf)
    torch.testing.assert_close(gradient(both, leaf), kept + 2 * second, rtol=1e-5, atol=1e-9)

    inner_leaf = logits.clone().requires_grad_()
    inner = gradient(rlkernels.policy_loss(inner_leaf * 2, batch, "dapo").loss, inner_leaf)
    torch.testing.assert_close(inner, 2 * _leaf_gradient(2 * logits, batch))


def _leaf_gradient(logits: Tensor, batch: PolicyBatch) -> Tensor:
    leaf = logits.detach().clone().requires_grad_()
    return torch.autograd.grad(rlkernels.policy_loss(leaf, batch, "dapo").loss, leaf)[0]


def test_bfloat16_gradient_follows_a_factor_that_bfloat16_cannot_hold(generator: Generator) -> None:
    logits = torch.randn(3, 5, 4500, generator=generator).bfloat16()
    batch = logits_batch(generator, 4500)
    exact = _leaf_gradient(logits.double(), batch)
    leaf = logits.clone().requires_grad_()
    factor = 1 / 3
    scaled = torch.autograd.grad(rlkernels.policy_loss(leaf, batch, "dapo").loss * factor, leaf)[0]
    error = (scaled.double() / (factor * exact) - 1)[exact != 0]
    assert error.abs().max() < 1.01 * 2**-7, "two roundings"
    assert error.mean().abs() < 2**-12, "without a bias"


@pytest.mark.parametrize(
    "options",
    [{"reduction": "none"}, {"objective": lambda logp, batch: -logp}, {"objective": "gspo"}, {"objective": "gmpo"}],
    ids=["per-token-loss", "callable", "gspo", "gmpo"],
)
def test_what_takes_two_sweeps(options: dict[str, Any], generator: Generator) -> None:
    leaf = torch.randn(3, 5, 20, generator=generator, requires_grad=True)
    out = rlkernels.policy_loss(leaf, logits_batch(generator, 20), **{"objective": "dapo"} | options)
    assert type(out.loss.grad_fn).__name__ != "PolicySweepBackward"
    half = leaf.detach().half().requires_grad_()
    out = rlkernels.policy_loss(half, logits_batch(generator, 20), "dapo")
    assert type(out.loss.grad_fn).__name__ != "PolicySweepBackward"


def test_rows_without_a_coefficient_are_written_as_zero(generator: Generator) -> None:
    """Zero advantage, clipped, masked: NaN in the buffer before must not survive."""
    vocab = 5000
    batch = logits_batch(generator, vocab, advantages=torch.tensor([0.0, 1.0, 0.0]))
    leaf = torch.randn(3, 5, vocab, generator=generator, requires_grad=True)
    for _ in range(2):  # the second gradient comes from the first one's buffer
        gradient = torch.autograd.grad(rlkernels.policy_loss(leaf, batch, "dapo").loss, leaf)[0]
        assert (gradient[0] == 0).all() and (gradient[2] == 0).all() and (gradient[1, 3:] == 0).all()
        assert gradient[1, :3].isfinite().all()
        gradient.fill_(torch.nan)


@pytest.mark.parametrize(
    "borders", [[0, 2, 9, 6], [0, 2, 4, 10**6], [0, 50, -3, 10**12], [0, 2, 4, 5], [1, 2, 4, 6]], ids=str
)
@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_bad_borders_are_never_addresses(name: str, borders: list[int]) -> None:
    """What eager code checks first, a compiled function brings straight to the kernel."""
    batch = PolicyBatch(None, torch.ones(3), cu_seqlens=torch.tensor([0, 2, 4, 6]))
    logp = torch.zeros(6)
    recipe = rlkernels.losses._checked_recipe(batch, OBJECTIVES[name], None, None)
    fused = objective_batch(batch, batch.check_against((6,), logp.device), recipe, torch.float32)
    options = list(objective_options(recipe.objective))
    for bad, message in (
        ({"cu_seqlens": torch.tensor(borders)}, "cu_seqlens: expected borders that rise from 0 to 6"),
        ({"normalizer": torch.tensor([-1.0], dtype=torch.float64)}, "normalizer: expected a finite number >= 0"),
    ):
        with pytest.raises(ValueError, match=message):
            operation.policy_objective(logp, None, options, *fused._replace(**bad), True)
