"""NeMo-RL's loss function: as its workers call it, against its formulas in float64 and against its own code."""

from __future__ import annotations

import doctest
import math
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

import rlkernels
from rlkernels import PolicyBatch, logp_policy_loss
from rlkernels.integrations.nemo_rl import PolicyLossFn, loss_function

# the defaults of NeMo-RL's ClippedPGLossConfig
DEFAULTS: dict[str, Any] = {
    "disable_ppo_ratio": False,
    "token_level_loss": True,
    "sequence_level_importance_ratios": False,
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.2,
    "ratio_clip_c": None,
    "reference_policy_kl_penalty": 0.01,
    "reference_policy_kl_type": "k3",
    "kl_input_clamp_value": 20.0,
    "kl_output_clamp_value": 10.0,
    "use_kl_in_reward": False,
    "use_importance_sampling_correction": False,
    "truncated_importance_sampling_type": None,
    "truncated_importance_sampling_ratio": None,
    "truncated_importance_sampling_ratio_min": None,
    "use_on_policy_kl_approximation": False,
    "force_on_policy_ratio": False,
    "use_cispo": False,
    "positive_example_nll_weight": 0.0,
}

SEQUENCE = {"token_level_loss": False}
CLIPS = {"ratio_clip_min": 0.1, "ratio_clip_max": 0.3}
GSPO = {**SEQUENCE, "sequence_level_importance_ratios": True, "ratio_clip_min": 0.05, "ratio_clip_max": 0.1}
CORRECTION = {"use_importance_sampling_correction": True}


def truncation(kind: str, low: float | None, high: float) -> dict[str, Any]:
    names = ("type", "ratio_min", "ratio")
    values = dict(zip((f"truncated_importance_sampling_{name}" for name in names), (kind, low, high), strict=True))
    return {**CORRECTION, **values}


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "grpo": SEQUENCE,
    "asymmetric": CLIPS,
    "dual": {**CLIPS, "ratio_clip_c": 1.4},
    "dual by sequence": {**CLIPS, **SEQUENCE, "ratio_clip_c": 1.4},
    "gspo": GSPO,
    "gspo with dual clip": {**GSPO, "ratio_clip_c": 1.2},
    "cispo": {**CLIPS, "use_cispo": True},
    "reinforce": {"disable_ppo_ratio": True},
    "reinforce by sequence": {**SEQUENCE, "disable_ppo_ratio": True},
    "on-policy": {"force_on_policy_ratio": True},
    "on-policy by sequence": {**GSPO, **CORRECTION, "force_on_policy_ratio": True},
    "kl by k1": {"reference_policy_kl_type": "k1", "reference_policy_kl_penalty": 0.3},
    "kl by k2": {**SEQUENCE, "reference_policy_kl_type": "k2", "reference_policy_kl_penalty": 0.3},
    "kl with tight clamps": {
        "reference_policy_kl_penalty": 0.3,
        "kl_input_clamp_value": 0.6,
        "kl_output_clamp_value": 0.1,
    },
    "kl without clamps": {
        "reference_policy_kl_penalty": 0.3,
        "kl_input_clamp_value": None,
        "kl_output_clamp_value": None,
    },
    "kl of the rollout policy": {
        "reference_policy_kl_penalty": 0.3,
        "use_on_policy_kl_approximation": True,
        "kl_input_clamp_value": 0.6,
    },
    "kl in the reward": {"use_kl_in_reward": True},
    "no kl": {"reference_policy_kl_penalty": 0.0},
    "correction": CORRECTION,
    "correction by sequence": {**SEQUENCE, **CORRECTION},
    "gspo with correction": {**GSPO, **CORRECTION},
    "cispo with correction": {**CLIPS, **CORRECTION, "use_cispo": True},
    "tis": truncation("tis", None, 1.1),
    "tis with both bounds": {**CLIPS, **truncation("tis", 0.9, 1.1)},
    "gspo with tis": {**GSPO, **truncation("tis", 0.9, 1.1)},
    "icepop": truncation("icepop", 0.8, 1.2),
    "gspo with icepop": {**GSPO, **truncation("icepop", 0.8, 1.2)},
    "seq-mask-tis": truncation("seq-mask-tis", 0.93, 1.07),
    "seq-mask-tis by sequence": {**SEQUENCE, **truncation("seq-mask-tis", 0.93, 1.07)},
    "nll": {"positive_example_nll_weight": 0.2},
}

COUNTS = (torch.tensor(11.0), torch.tensor(77.0))  # of the global batch: sequences, tokens


def configuration(**options: Any) -> SimpleNamespace:
    return SimpleNamespace(**DEFAULTS | options)


def random_batch(
    generator: Generator, dtype: torch.dtype = torch.float64, multiplier: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """The third sequence has no trained token, the fourth is left out, the last is multiplied by something."""

    def draw() -> Tensor:
        return torch.randn(6, 10, generator=generator, dtype=torch.float64)

    token_mask = torch.rand(6, 10, generator=generator) < 0.7
    token_mask[:, :2], token_mask[:, 2], token_mask[2] = False, True, False
    now = -draw().abs() - 0.05
    prev = now - 0.2 * draw()
    data = {
        "advantages": draw()[:, :1].expand(6, 10) + 0.1 * draw(),
        "prev_logprobs": prev,
        "generation_logprobs": prev - 0.15 * draw(),
        "reference_policy_logprobs": now - 0.4 * draw(),
        "rewards": torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.5]),
        "token_mask": token_mask,
        "sample_mask": torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, multiplier]),
    }
    data = {name: values.to(dtype) for name, values in data.items()}
    data["input_ids"] = torch.randint(50, (6, 10), generator=generator)
    return now[:, 1:].to(dtype).requires_grad_(), data


def expected_loss(logp: Tensor, data: dict[str, Tensor], cfg: Any, seqs: Tensor, toks: Tensor) -> Tensor:
    """NeMo-RL's documented formulas."""
    a, gen, ref = (data[key][:, 1:] for key in ("advantages", "generation_logprobs", "reference_policy_logprobs"))
    prev = logp.detach() if cfg.force_on_policy_ratio else data["prev_logprobs"][:, 1:]
    m, rows = data["token_mask"][:, 1:], data["sample_mask"]
    lengths = m.sum(1, keepdim=True).clamp(min=1)

    def reduce(values: Tensor) -> Tensor:
        if cfg.token_level_loss:
            return (values * m * rows[:, None]).sum() / toks
        return ((values * m).sum(1) / lengths[:, 0] * rows).sum() / seqs

    d = logp - prev
    if cfg.sequence_level_importance_ratios and not cfg.force_on_policy_ratio:
        d = (d * m).sum(1, keepdim=True) / lengths
    r = d.exp()
    clipped = r.clamp(1 - cfg.ratio_clip_min, 1 + cfg.ratio_clip_max)
    if cfg.use_cispo:
        policy = -clipped.detach() * a * logp
    elif cfg.disable_ppo_ratio:
        policy = -a * logp
    else:
        policy = torch.maximum(-a * r, -a * clipped)
        if cfg.ratio_clip_c is not None:
            policy = torch.where(a < 0, torch.minimum(policy, -a * cfg.ratio_clip_c), policy)
    if cfg.use_importance_sampling_correction:
        gap = prev - gen
        if cfg.sequence_level_importance_ratios:
            gap = (gap * m * rows[:, None]).sum(1, keepdim=True)
        v, kind = gap.exp(), cfg.truncated_importance_sampling_type
        low, high = cfg.truncated_importance_sampling_ratio_min or 0.0, cfg.truncated_importance_sampling_ratio
        if kind == "tis":
            v = v.clamp(low, high)
        elif kind == "icepop":
            v = v * ((v >= low) & (v <= high))
        elif kind == "seq-mask-tis":
            mean = ((gap * m).sum(1, keepdim=True) / lengths).exp()
            v = v * ((mean >= low) & (mean <= high))
        policy = v * policy
    loss = reduce(policy)
    if cfg.reference_policy_kl_penalty and not cfg.use_kl_in_reward:
        x = ref - logp
        score = (logp - (gen if cfg.use_on_policy_kl_approximation else logp.detach())).exp()
        if cfg.kl_input_clamp_value is not None:
            inside = x.abs() <= cfg.kl_input_clamp_value
            x = x.clamp(-cfg.kl_input_clamp_value, cfg.kl_input_clamp_value)
            score = torch.where(inside, score, score.detach())
        kl = {"k1": -x, "k2": x**2 / 2, "k3": x.exp() - 1 - x}[cfg.reference_policy_kl_type] * score
        if cfg.kl_output_clamp_value is not None:
            kl = kl.clamp(-cfg.kl_output_clamp_value, cfg.kl_output_clamp_value)
        loss = loss + cfg.reference_policy_kl_penalty * reduce(kl)
    if cfg.positive_example_nll_weight:
        correct = m * (rows * (data["rewards"] > 0))[:, None]
        loss = loss - cfg.positive_example_nll_weight * (logp * correct).sum() / correct.sum()
    return loss


def loss_and_gradient(loss: Tensor, logp: Tensor) -> tuple[Tensor, Tensor]:
    return loss.detach(), torch.autograd.grad(loss, logp)[0]


def assert_same(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("multiplier", [1.0, 0.3], ids=["masks", "multiplier"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_value_and_gradient(name: str, multiplier: float, generator: Generator) -> None:
    cfg = configuration(**CONFIGURATIONS[name])
    logp, data = random_batch(generator, multiplier=multiplier)
    if cfg.force_on_policy_ratio:
        del data["prev_logprobs"]  # which NeMo-RL does not compute then
    loss, metrics = PolicyLossFn(cfg)(
        next_token_logprobs=logp, data=data, global_valid_seqs=COUNTS[0], global_valid_toks=COUNTS[1]
    )
    expected = expected_loss(logp, data, cfg, *COUNTS)
    assert_same(loss_and_gradient(loss, logp), loss_and_gradient(expected, logp))
    assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-6)
    assert all(isinstance(value, float) for value in metrics.values())


@pytest.mark.parametrize("name", ["dual", "gspo with dual clip", "cispo", "reinforce", "kl with tight clamps"])
def test_far_off_policy_in_float32(name: str, generator: Generator) -> None:
    cfg = configuration(**CONFIGURATIONS[name])
    logp, data = random_batch(generator, torch.float32)
    logp = (6 * logp.detach()).requires_grad_()
    loss, _ = PolicyLossFn(cfg)(logp, data, *COUNTS)
    exact = {key: values.double() for key, values in data.items()}
    value, gradient = loss_and_gradient(expected_loss(logp.double(), exact, cfg, *COUNTS), logp)
    assert_same(loss_and_gradient(loss, logp), (value.float(), gradient), 1e-5)


def test_micro_batches_add_up(generator: Generator) -> None:
    """As NeMo-RL's packed sequences, which come one at a time."""
    for name in ("dual", "gspo with tis", "seq-mask-tis by sequence", "kl with tight clamps"):
        logp, data = random_batch(generator)
        loss_fn = PolicyLossFn(configuration(**CONFIGURATIONS[name]))
        whole, metrics = loss_fn(logp, data, *COUNTS)
        parts = [loss_fn(logp[i : i + 1], {k: v[i : i + 1] for k, v in data.items()}, *COUNTS) for i in range(6)]
        total = torch.stack([loss for loss, _ in parts]).sum()
        assert_same(loss_and_gradient(total, logp), loss_and_gradient(whole, logp))
        for key, value in metrics.items():
            values = [found[key] for _, found in parts]
            merge = min if key.endswith("_min") else max if key.endswith("_max") else sum
            assert merge(values) == pytest.approx(value, rel=1e-6, abs=1e-9), key


def test_unfiltered_log_probabilities_are_the_kls(generator: Generator) -> None:
    """NeMo-RL's top-k and top-p filtering gives the policy term one log-probability and the KL another."""
    cfg = configuration(reference_policy_kl_penalty=0.5)
    logp, data = random_batch(generator)
    other = (logp.detach() - 0.1).requires_grad_()
    loss, _ = PolicyLossFn(cfg)(logp, data | {"curr_logprobs_unfiltered": other}, *COUNTS)
    policy = expected_loss(logp, data, configuration(reference_policy_kl_penalty=0.0), *COUNTS)
    kl = expected_loss(other, data, cfg, *COUNTS)
    kl = kl - expected_loss(other, data, configuration(reference_policy_kl_penalty=0.0), *COUNTS)
    torch.testing.assert_close(
        torch.autograd.grad(loss, [logp, other]), torch.autograd.grad(policy + kl, [logp, other]), rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(loss, policy + kl, rtol=1e-6, atol=1e-6)


RECIPES = sorted(set(rlkernels.RECIPES) - {"nft", "lambda_grpo", "clip_cov", "kl_cov"})


@pytest.mark.parametrize("options", [{}, SEQUENCE, {"force_on_policy_ratio": True}], ids=["token", "sequence", "on"])
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_by_name(name: str, options: dict[str, Any], generator: Generator) -> None:
    """Its objective with NeMo-RL's denominator, correction and KL."""
    if name == "luspo" and "token_level_loss" in options:
        return  # refused
    cfg = configuration(**options, **({} if name == "vespo" else truncation("tis", 0.9, 1.1)))
    logp, data = random_batch(generator)
    loss, metrics = PolicyLossFn(cfg, objective=name)(logp, data, *COUNTS)
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    prev = data["prev_logprobs"][:, 1:] if "force_on_policy_ratio" not in options else logp.detach()
    weight = (prev - data["generation_logprobs"][:, 1:]).exp().clamp(0.9, 1.1)
    batch = PolicyBatch(
        None,
        data["advantages"][:, 1:],
        mask=mask,
        old_logp=prev if "force_on_policy_ratio" not in options else None,
        policy_weight=None if name == "vespo" else weight,
    )
    by_token = cfg.token_level_loss
    out = logp_policy_loss(
        logp,
        batch,
        rlkernels.RECIPES[name].objective,
        reduction="token_mean" if by_token else "seq_mean_token_mean",
        normalizer=COUNTS[1] if by_token else COUNTS[0],
    )
    with_kl = expected_loss(logp, data, configuration(**options), *COUNTS)
    without = expected_loss(logp, data, configuration(**options, use_kl_in_reward=True), *COUNTS)
    assert_same(loss_and_gradient(loss, logp), loss_and_gradient(out.loss + with_kl - without, logp))
    assert metrics["probs_ratio_min"] == pytest.approx(float(out.metrics["ratio_min"]))
    assert not {"probs_ratio_clamped", "probs_ratio_clamped_min"} & set(metrics)


def test_sampling_importance_ratio_of_sequences(generator: Generator) -> None:
    """The mean over sequences; NeMo-RL's own product has the batch's size squared."""
    logp, data = random_batch(generator)
    _, metrics = PolicyLossFn(configuration(**GSPO, **CORRECTION))(logp, data, *COUNTS)
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    gap = (data["prev_logprobs"] - data["generation_logprobs"])[:, 1:]
    ratios = (gap * mask).sum(1).exp() * data["sample_mask"]
    assert metrics["sampling_importance_ratio"] == pytest.approx(float(ratios.sum() / COUNTS[0]), rel=1e-6)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_no_trained_token(name: str, generator: Generator) -> None:
    logp, data = random_batch(generator)
    data["sample_mask"] = torch.zeros(6)
    zero = torch.tensor(0.0)
    loss, metrics = PolicyLossFn(configuration(**CONFIGURATIONS[name]))(logp, data, zero, zero)
    value, gradient = loss_and_gradient(loss, logp)
    assert value == 0 and not gradient.any()
    assert (metrics.pop("probs_ratio_min"), metrics.pop("probs_ratio_max")) == (math.inf, -math.inf)
    assert (metrics.pop("probs_ratio_clamped_min"), metrics.pop("probs_ratio_clamped_max")) == (math.inf, -math.inf)
    assert set(metrics.values()) == {0.0}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_nan_under_the_mask_is_not_felt(name: str, generator: Generator) -> None:
    logp, data = random_batch(generator)
    left_out = data["token_mask"] * data["sample_mask"][:, None] == 0
    floats = ("advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
    dirty = data | {key: data[key].masked_fill(left_out, torch.nan) for key in floats}
    dirty_logp = logp.detach().masked_fill(left_out[:, 1:], torch.nan).requires_grad_()
    loss_fn = PolicyLossFn(configuration(**CONFIGURATIONS[name]))
    loss, metrics = loss_fn(logp, data, *COUNTS)
    dirty_loss, dirty_metrics = loss_fn(dirty_logp, dirty, *COUNTS)
    assert_same(loss_and_gradient(dirty_loss, dirty_logp), loss_and_gradient(loss, logp), 1e-12)
    assert dirty_metrics == pytest.approx(metrics)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"sequence_level_importance_ratios": True}, "token_level_loss: expected False with sequence_level"),
        ({"use_cispo": True, "disable_ppo_ratio": True}, "disable_ppo_ratio: expected False with use_cispo"),
        ({"use_cispo": True, "force_on_policy_ratio": True}, "force_on_policy_ratio: expected False with use_cispo"),
        ({"use_cispo": True, "ratio_clip_c": 3.0}, "ratio_clip_c: expected None with use_cispo, got 3.0"),
        ({"use_cispo": True, "token_level_loss": False}, "token_level_loss: expected True with use_cispo"),
        ({**truncation("tis", None, 2.0), "use_importance_sampling_correction": False}, "expected True with trunc"),
        (truncation("clip", 0.5, 2.0), "truncated_importance_sampling_type: expected one of 'tis'"),
        ({"truncated_importance_sampling_ratio": 2.0}, "truncated_importance_sampling_type: expected one of"),
        (truncation("tis", 3.0, 2.0), "truncated_importance_sampling_ratio_min: expected a finite number <= 2"),
        (truncation("tis", None, -1.0), "truncated_importance_sampling_ratio: expected a finite number > 0"),
        ({**GSPO, **truncation("seq-mask-tis", 0.5, 2.0)}, "sequence_level_importance_ratios: expected False with"),
        ({"ratio_clip_c": 0.9}, "ratio_clip_c: expected a finite number > 1"),
        ({"reference_policy_kl_type": "k4"}, "reference_policy_kl_type: expected one of 'k1', 'k2', 'k3', got 'k4'"),
        ({"objective": "gmpo", "use_cispo": True}, "use_cispo: expected False with objective='gmpo'"),
        ({"objective": "gmpo", **GSPO}, "sequence_level_importance_ratios: expected False with objective='gmpo'"),
        ({"objective": "gmpo", "ratio_clip_c": 3.0}, "ratio_clip_c: expected None with objective='gmpo'"),
        ({"objective": "gmpo", "disable_ppo_ratio": True}, "disable_ppo_ratio: expected False with objective='gmpo'"),
        ({"objective": "vespo", **CORRECTION}, "use_importance_sampling_correction: expected False with"),
        ({"objective": "luspo", **SEQUENCE}, "token_level_loss: expected True with LUSPO, got False"),
        ({"objective": "nft"}, "needs each prompt's success_rate"),
        ({"objective": "kl_cov"}, "needs the whole batch"),
        ({"objective": rlkernels.GRPO(kl_coef=0.1)}, "needs ref_logp with kl_coef=0.1"),
        ({"objective": rlkernels.GRPO(entropy_coef=0.1)}, "needs entropies' gradient"),
        ({"objective": "dapo2"}, "objective: expected one of"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    options = dict(options)
    objective = options.pop("objective", None)
    with pytest.raises(ValueError, match=message):
        PolicyLossFn(configuration(**options), objective=objective)


def test_truncation_without_a_lower_bound_is_refused() -> None:
    for kind in ("icepop", "seq-mask-tis"):
        with pytest.raises(TypeError, match="truncated_importance_sampling_ratio_min: expected a number, got NoneType"):
            PolicyLossFn(configuration(**truncation(kind, None, 2.0)))


def test_it_can_be_sent_to_workers(generator: Generator) -> None:
    logp, data = random_batch(generator)
    loss_fn = PolicyLossFn(configuration(**CLIPS), use_fused_linear_logprobs=True, objective="gmpo")
    sent = pickle.loads(pickle.dumps(loss_fn))
    assert sent.use_fused_linear_logprobs and sent.reference_policy_kl_penalty == 0.01
    torch.testing.assert_close(sent(logp, data, *COUNTS), loss_fn(logp, data, *COUNTS), rtol=0, atol=0)


# ---------------------------------------------------------------------------------------------------------------
# NeMo-RL's own code


@pytest.fixture
def trainer() -> Any:
    return pytest.importorskip("nemo_rl.algorithms.loss")


def both(trainer: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    cfg = trainer.ClippedPGLossConfig(**options)
    return PolicyLossFn(cfg), trainer.ClippedPGLossFn(cfg)


def assert_same_metrics(mine: dict[str, float], theirs: dict[str, float], options: dict[str, Any]) -> None:
    """But for what docs/trainers.md says: ratios without a ratio, and a mean over sequences."""
    assert set(mine) == set(theirs)
    different = {"sampling_importance_ratio"} if options.get("sequence_level_importance_ratios") else set()
    for key, value in theirs.items():
        is_logp = options.get("disable_ppo_ratio") and key.startswith("probs_ratio")
        if key not in different and not is_logp:
            assert mine[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key


def test_docstrings(trainer: Any) -> None:
    assert doctest.testmod(loss_function).failed == 0


def test_a_later_versions_field_is_not_overlooked(trainer: Any) -> None:
    class Later(trainer.ClippedPGLossConfig):
        entropy_bonus: float = 0.0

    assert PolicyLossFn(Later()).objective == rlkernels.GRPO()
    with pytest.raises(ValueError, match=r"entropy_bonus: expected 0\.0, since this adapter does not know the field"):
        PolicyLossFn(Later(entropy_bonus=0.1))


def test_the_defaults_are_its_own(trainer: Any) -> None:
    assert trainer.ClippedPGLossConfig().model_dump() == DEFAULTS


@pytest.mark.parametrize("multiplier", [1.0, 0.3], ids=["masks", "multiplier"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_its_own_loss(trainer: Any, name: str, dtype: torch.dtype, multiplier: float, generator: Generator) -> None:
    mine, theirs = both(trainer, CONFIGURATIONS[name])
    logp, data = random_batch(generator, dtype, multiplier)
    (my_loss, my_metrics), (loss, metrics) = (
        loss_fn(next_token_logprobs=logp, data=data, global_valid_seqs=COUNTS[0], global_valid_toks=COUNTS[1])
        for loss_fn in (mine, theirs)
    )
    assert_same(loss_and_gradient(my_loss, logp), loss_and_gradient(loss, logp))
    assert_same_metrics(my_metrics, metrics, CONFIGURATIONS[name])


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_what_it_advertises(trainer: Any, name: str) -> None:
    mine, theirs = both(trainer, CONFIGURATIONS[name])
    assert (mine.loss_type, mine.input_type) == (theirs.loss_type, theirs.input_type)
    assert mine.metric_normalizations == theirs.metric_normalizations
    assert mine.reference_policy_kl_penalty == theirs.reference_policy_kl_penalty


def from_logits(
    trainer: Any, loss_fn: Any, logits: Tensor, data: dict[str, Tensor], packed: bool
) -> tuple[Tensor, dict]:
    """As its workers call a loss function: through `prepare_loss_input`, packed sequences one at a time."""
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    utils = pytest.importorskip("nemo_rl.algorithms.loss.utils")
    batch = BatchedDataDict(data)
    if packed:
        borders = torch.arange(7) * 10
        wrapper = trainer.SequencePackingLossWrapper(loss_fn, utils.prepare_loss_input, borders)
        return wrapper(logits.reshape(1, 60, -1), batch, *COUNTS)
    loss_input, batch = utils.prepare_loss_input(logits, batch, loss_fn)
    return loss_fn(data=batch, global_valid_seqs=COUNTS[0], global_valid_toks=COUNTS[1], **loss_input)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", ["dual", "gspo with tis", "cispo", "on-policy", "seq-mask-tis by sequence"])
def test_its_calling_code(
    trainer: Any, name: str, packed: bool, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tensor, "cuda", lambda self: self)  # where it moves the token ids
    mine, theirs = both(trainer, CONFIGURATIONS[name])
    logp, data = random_batch(generator, torch.float32)
    logits = torch.randn(6, 10, 50, generator=generator)
    picked = torch.nn.functional.log_softmax(logits, -1)[:, :-1].gather(-1, data["input_ids"][:, 1:, None])[..., 0]
    shift = (picked - logp.detach()) * data["token_mask"][:, 1:]
    for key in ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs"):
        data[key][:, 1:] += shift
    logits.requires_grad_()
    my_loss, my_metrics = from_logits(trainer, mine, logits, data, packed)
    loss, metrics = from_logits(trainer, theirs, logits, data, packed)
    assert_same(loss_and_gradient(my_loss, logits), loss_and_gradient(loss, logits))
    assert_same_metrics(my_metrics, metrics, CONFIGURATIONS[name])
