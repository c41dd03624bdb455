"""prime-rl's custom loss: as its trainer calls it, against its formulas in float64 and against its own code."""

from __future__ import annotations

import doctest
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Generator, Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import rlkernels
from rlkernels.integrations import prime_rl as integration
from rlkernels.integrations.prime_rl import policy_loss

LENGTHS = (7, 1, 12, 5, 0, 9)

CLIPS = {"clip_low": 0.15, "clip_high": 0.3}

OBJECTIVES: dict[str, dict[str, Any]] = {
    "default": {"dppo_mask_low": 0.05, "dppo_mask_high": 0.1, "adv_tau": 0.7, "kl_tau": 0.03},
    "ipo": {"ipo_threshold": 0.08, "adv_tau": 1.3, "kl_tau": 0.02},
    "grpo": {**CLIPS, "dual_clip": 1.2},
    "gspo": {"clip_low": 0.02, "clip_high": 0.05},
    "cispo": {"ratio_min": 0.8, "ratio_max": 1.3},
    "sapo": {"tau_pos": 1.2, "tau_neg": 1.4},
    "gmpo": {"log_clip_low": 0.2, "log_clip_high": 0.3},
    "dppo_tv": {"threshold_low": 0.05, "threshold_high": 0.1, "ratio_max": 1.5},
    "reinforce": {},
}


def samples(generator: Generator, dtype: torch.dtype = torch.float64, weighted: bool = False) -> list[SimpleNamespace]:
    """The third is masked throughout, the fifth is empty, the fourth's advantages are 0."""
    found = []
    for i, length in enumerate(LENGTHS):

        def draw(length: int = length) -> Tensor:
            return torch.randn(length, generator=generator, dtype=torch.float64)

        logp = -draw().abs() - 0.02
        mask = torch.rand(length, generator=generator) < (0 if i == 2 else 0.7)
        advantages = draw()[:1].expand(length) if i % 2 else draw()
        values = {
            "trainer_logprobs": logp,
            "inference_logprobs": (logp - 0.4 * draw()).clamp(max=-0.01),
            "ref_logprobs": logp - 0.5 * draw(),
            "advantages": torch.zeros(length) if i == 3 else advantages,
            "loss_weights": torch.rand(length, generator=generator) + 0.5 if weighted else None,
        }
        found.append(
            SimpleNamespace(loss_mask=mask, **{k: None if v is None else v.to(dtype) for k, v in values.items()})
        )
        found[-1].trainer_logprobs.requires_grad_()
    return found


def expected_terms(name: str, sample: SimpleNamespace, o: dict[str, Any]) -> Tensor:
    """prime-rl's formulas, and the papers', per token."""
    logp, q, a, m = sample.trainer_logprobs, sample.inference_logprobs, sample.advantages, sample.loss_mask
    d = logp - q
    r = d.exp()
    count = max(int(m.sum()), 1)
    if name in ("default", "ipo"):
        change = logp.exp() - q.exp()
        if name == "ipo":
            kept = ~(change.abs() > o["ipo_threshold"])
        else:
            kept = torch.where(a > 0, change <= o["dppo_mask_high"], change >= -o["dppo_mask_low"])
        return -kept.double() * o["adv_tau"] * a * r + o["kl_tau"] * d**2
    if name == "grpo":
        loss = torch.maximum(-r * a, -r.clamp(1 - o["clip_low"], 1 + o["clip_high"]) * a)
        return torch.where(a < 0, torch.minimum(loss, -o["dual_clip"] * a), loss)
    if name == "gspo":
        s = ((d * m).sum() / count).exp()
        return torch.maximum(-s * a, -s.clamp(1 - o["clip_low"], 1 + o["clip_high"]) * a)
    if name == "cispo":
        return -r.clamp(o["ratio_min"], o["ratio_max"]).detach() * a * logp
    if name == "sapo":
        tau = torch.where(a > 0, o["tau_pos"], o["tau_neg"]).double()
        return -a * 4 / tau * torch.sigmoid(tau * (r - 1))
    if name == "gmpo":
        clipped = torch.where(a > 0, d.clamp(max=o["log_clip_high"]), d.clamp(min=-o["log_clip_low"]))
        return -a * ((clipped * m).sum() / count).exp()
    if name == "dppo_tv":
        change = (logp.exp() - q.exp()).detach()
        kept = torch.where(a > 0, change <= o["threshold_high"], change >= -o["threshold_low"])
        return -kept.double() * r.detach().clamp(max=o["ratio_max"]) * a * logp
    return -a * logp


def total_and_gradients(losses: list[Tensor], batch: list[SimpleNamespace]) -> tuple[Tensor, list[Tensor]]:
    total = torch.stack(losses).sum()
    gradients = torch.autograd.grad(total, [s.trainer_logprobs for s in batch], allow_unused=True)
    return total.detach(), [
        torch.zeros_like(s.trainer_logprobs) if g is None else g for g, s in zip(gradients, batch, strict=True)
    ]


def assert_same(actual: tuple[Tensor, list[Tensor]], expected: tuple[Tensor, list[Tensor]], **tolerance: float) -> None:
    tolerance = tolerance or {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(actual[0], expected[0], **tolerance)
    torch.testing.assert_close(actual[1], expected[1], **tolerance)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weights"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_value_and_gradient(name: str, weighted: bool, generator: Generator) -> None:
    batch = samples(generator, weighted=weighted)
    mine = total_and_gradients([policy_loss(s, name, **OBJECTIVES[name]).loss for s in batch], batch)
    losses = []
    for s in batch:
        terms = expected_terms(name, s, OBJECTIVES[name]) * (1 if s.loss_weights is None else s.loss_weights)
        losses.append((terms * s.loss_mask).sum())
    assert_same(mine, total_and_gradients(losses, batch))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_far_off_policy_in_float32(name: str, generator: Generator) -> None:
    batch = samples(generator, torch.float32)
    for s in batch:
        s.trainer_logprobs = (10 * s.trainer_logprobs.detach()).requires_grad_()
    mine = total_and_gradients([policy_loss(s, name, **OBJECTIVES[name]).loss for s in batch], batch)
    exact = [
        SimpleNamespace(**{k: v if v is None or k == "loss_mask" else v.double() for k, v in vars(s).items()})
        for s in batch
    ]
    losses = [(expected_terms(name, s, OBJECTIVES[name]) * s.loss_mask).sum() for s in exact]
    total, gradients = total_and_gradients(losses, batch)
    assert_same(mine, (total.float(), gradients), rtol=1e-5, atol=1e-5)


def test_reference_kl(generator: Generator) -> None:
    batch = samples(generator)
    out = [policy_loss(s, "grpo", **CLIPS, kl_coef=0.1) for s in batch]
    losses = []
    for s in batch:
        x = s.ref_logprobs - s.trainer_logprobs
        terms = expected_terms("grpo", s, {**CLIPS, "dual_clip": 1e9}) + 0.1 * (x.exp() - x - 1)
        losses.append((terms * s.loss_mask).sum())
    assert_same(total_and_gradients([o.loss for o in out], batch), total_and_gradients(losses, batch))
    assert all("ref_kl" in o.metrics for o in out)


def test_an_instance_is_its_recipe(generator: Generator) -> None:
    batch = samples(generator)
    mine = [policy_loss(s, rlkernels.GMPO(log_clip_low=0.2, log_clip_high=0.3)).loss for s in batch]
    named = [policy_loss(s, "gmpo", **OBJECTIVES["gmpo"]).loss for s in batch]
    assert_same(total_and_gradients(mine, batch), total_and_gradients(named, batch), rtol=0, atol=0)


class HostReads(TorchDispatchMode):
    """Raises where the host would wait for a device: numbers, and shapes that depend on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.split(".")[0] in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"):
            raise AssertionError(f"{func} is read by the host")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_nothing_is_read_by_the_host(name: str, backend: str, generator: Generator) -> None:
    batch = samples(generator, torch.float32)
    rlkernels.set_backend(backend)
    with HostReads():
        for s in batch:
            out = policy_loss(s, name, **OBJECTIVES[name])
            out.loss.backward()
    with pytest.raises(AssertionError, match="read by the host"), HostReads():
        batch[0].advantages.sum().item()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_samples_without_a_trained_token_keep_their_graph(name: str, generator: Generator) -> None:
    for s in (samples(generator)[i] for i in (2, 4)):
        out = policy_loss(s, name, **OBJECTIVES[name])
        assert out.loss == 0 and out.loss.requires_grad
        out.loss.backward()
        assert s.trainer_logprobs.grad.shape == s.trainer_logprobs.shape and not s.trainer_logprobs.grad.any()
        assert all(value.ndim == 0 and value.isfinite() for value in out.metrics.values())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_nan_under_the_mask_is_not_felt(name: str, generator: Generator) -> None:
    clean = samples(generator)[0]
    clean.loss_mask[0] = False
    dirty = SimpleNamespace(**vars(clean))
    for key in ("inference_logprobs", "advantages"):
        setattr(dirty, key, getattr(clean, key).masked_fill(~clean.loss_mask, torch.nan))
    dirty.trainer_logprobs = clean.trainer_logprobs.detach().masked_fill(~clean.loss_mask, torch.nan).requires_grad_()
    outs = [policy_loss(s, name, **OBJECTIVES[name]) for s in (clean, dirty)]
    gradients = [torch.autograd.grad(o.loss, s.trainer_logprobs)[0] for o, s in zip(outs, (clean, dirty), strict=True)]
    torch.testing.assert_close(outs[0].loss, outs[1].loss, rtol=0, atol=0)
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    torch.testing.assert_close(outs[0].metrics, outs[1].metrics)


def test_clip_metrics(generator: Generator) -> None:
    s = samples(generator)[0]
    m, a = s.loss_mask, s.advantages
    r = (s.trainer_logprobs - s.inference_logprobs).exp()
    m[0] = True
    metrics = policy_loss(s, "grpo", **CLIPS).metrics
    high, low = ((a > 0) & (r > 1.3) & m).sum() / m.sum(), ((a < 0) & (r < 0.85) & m).sum() / m.sum()
    assert set(metrics) == {"is_masked", "is_masked_low", "is_masked_high", "importance_ratio"}
    torch.testing.assert_close(metrics["is_masked_high"], high.float())
    torch.testing.assert_close(metrics["is_masked_low"], low.float())
    torch.testing.assert_close(metrics["is_masked"], (low + high).float())
    torch.testing.assert_close(metrics["importance_ratio"], r[m].mean().detach().float())
    assert all(value.dtype == torch.float32 and not value.requires_grad for value in metrics.values())


@pytest.mark.parametrize(
    "objective, options, message",
    [
        ("dapo2", {}, "objective: expected one of"),
        ("grpo", {"eps_clip": 0.2}, "option of 'grpo': expected one of .*'clip_low'.*, got 'eps_clip'"),
        ("default", {"clip_low": 0.2}, "option of 'default': expected one of 'dppo_mask_low'"),
        ("default", {"kl_tau": -1.0}, "kl_tau: expected a finite number >= 0"),
        ("ipo", {"dppo_mask_low": 0.1}, "option of 'ipo'"),
        ("grpo", {"clip_low": -1.0}, "clip_low: expected"),
        ("grpo", {"entropy_coef": 0.1}, "needs entropies' gradient"),
        ("nft", {}, "needs each prompt's success_rate"),
        ("lambda_grpo", {}, "needs a weight of each token"),
        ("clip_cov", {}, "needs the whole batch"),
        ("kl_cov", {}, "needs the whole batch"),
        (rlkernels.GRPO(), {"clip_low": 0.1}, "options: expected none with an instance"),
    ],
)
def test_what_is_refused(objective: Any, options: dict[str, Any], message: str, generator: Generator) -> None:
    with pytest.raises(ValueError, match=message):
        policy_loss(samples(generator)[0], objective, **options)


def test_kl_without_a_reference_is_refused(generator: Generator) -> None:
    s = samples(generator)[0]
    s.ref_logprobs = None
    with pytest.raises(ValueError, match="ref_logp: expected in the batch"):
        policy_loss(s, "grpo", kl_coef=0.1)
    with pytest.raises(TypeError, match="objective: expected"):
        policy_loss(s, lambda logp, batch: logp)  # type: ignore[arg-type]


def test_docstrings() -> None:
    assert doctest.testmod(integration).failed == 0


# ---------------------------------------------------------------------------------------------------------------
# prime-rl's own code


@pytest.fixture
def trainer() -> Any:
    return pytest.importorskip("prime_rl.trainer.rl.loss")


def configured(name: str, kind: str) -> Any:
    configs = pytest.importorskip("prime_rl.configs.trainer")
    if kind == "own":
        return {"default": configs.DefaultLossConfig, "ipo": configs.IPOLossConfig}[name](**OBJECTIVES[name])
    path = "rlkernels.integrations.prime_rl.policy_loss"
    return configs.CustomLossConfig(import_path=path, kwargs={"objective": name, **OBJECTIVES[name]})


def run_trainer(trainer: Any, config: Any, batch: list[SimpleNamespace], streams: str) -> tuple[Any, dict[str, Tensor]]:
    """`compute_loss` as `trainer/rl/train.py` calls it; "mixed" has tokens of all three components."""
    mixed = streams == "mixed"
    weights = [s.loss_weights for s in batch]
    others = [torch.where(s.loss_mask, 0, w.detach()) for s, w in zip(batch, weights, strict=True)] if mixed else None
    loss, metrics = trainer.compute_loss(
        trainer_logprobs=[s.trainer_logprobs for s in batch],
        inference_logprobs=[s.inference_logprobs for s in batch],
        ref_logprobs=[s.ref_logprobs for s in batch],
        advantages=[s.advantages for s in batch],
        loss_mask=[s.loss_mask for s in batch],
        rl_weights=None if streams == "none" else weights,
        ce_weights=others,
        ref_kl_weights=others,
        rl_loss_fn=trainer.setup_rl_loss_fn(config),
        rl_scale=37,
        ce_scale=11,
        ref_kl_scale=5,
    )
    return total_and_gradients([loss], batch), metrics


@pytest.mark.parametrize("streams", ["none", "rl", "mixed"])
@pytest.mark.parametrize("name", ["default", "ipo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_its_own_losses(trainer: Any, name: str, streams: str, dtype: torch.dtype, generator: Generator) -> None:
    batch = samples(generator, dtype, weighted=True)
    mine, my_metrics = run_trainer(trainer, configured(name, "custom"), batch, streams)
    theirs, metrics = run_trainer(trainer, configured(name, "own"), batch, streams)
    assert_same(mine, theirs)
    assert set(my_metrics) == set(metrics)
    for key, values in metrics.items():
        torch.testing.assert_close(my_metrics[key].double(), values.detach().double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_its_trainer_runs_every_objective(trainer: Any, name: str, generator: Generator) -> None:
    batch = samples(generator, weighted=True)
    mine, metrics = run_trainer(trainer, configured(name, "custom"), batch, "rl")
    losses = [(expected_terms(name, s, OBJECTIVES[name]) * s.loss_weights * s.loss_mask).sum() / 37 for s in batch]
    assert_same(mine, total_and_gradients(losses, batch))
    assert all(values.ndim == 1 for values in metrics.values())


def test_its_example_of_a_custom_loss(trainer: Any, generator: Generator) -> None:
    """`ppo_clip_loss` of its documentation, on its own dataclasses."""

    def ppo_clip_loss(inputs: Any, clip_eps: float = 0.2) -> Any:
        ratio = torch.exp(inputs.trainer_logprobs - inputs.inference_logprobs)
        surrogates = ratio * inputs.advantages, torch.clamp(ratio, 1 - clip_eps, 1 + clip_eps) * inputs.advantages
        return trainer.LossOutputs(-torch.min(*surrogates)[inputs.loss_mask].sum(), {})

    batch = [trainer.LossInputs(**vars(s)) for s in samples(generator)]
    mine = total_and_gradients([policy_loss(s, "grpo", clip_low=0.2, clip_high=0.2).loss for s in batch], batch)
    assert_same(mine, total_and_gradients([ppo_clip_loss(s).loss for s in batch], batch))
