"""slime's calls of its loss and of its log-probabilities, with this package's in their place.

Against float64 formulas always; against slime's own `loss_function` on real Megatron groups, vocabulary and sequences
spread over two ranks included, where both are installed.
"""

from __future__ import annotations

import contextlib
import datetime
import doctest
import functools
import importlib
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Generator, Tensor

import rlkernels
from rlkernels.integrations import slime as integration
from rlkernels.integrations.slime import losses, tokens

VOCAB = 24
TOTALS, RESPONSES = [7, 12, 5, 9], [4, 9, 3, 8]


def arguments(**changes: Any) -> Namespace:
    """What `loss_function` reads of slime's configuration, with its defaults but for the clip range."""
    values = {
        "advantage_estimator": "grpo",
        "allgather_cp": False,
        "calculate_per_token_loss": False,
        "custom_loss_function_path": "rlkernels.integrations.slime.policy_loss",
        "custom_pg_loss_reducer_function_path": None,
        "custom_tis_function_path": None,
        "entropy_coef": 0.0,
        "eps_clip": 0.15,
        "eps_clip_high": 0.25,
        "eps_clip_c": None,
        "get_mismatch_metrics": False,
        "kl_loss_coef": 0.1,
        "kl_loss_type": "k1",
        "log_probs_chunk_size": -1,
        "recompute_loss_function": False,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "tis_clip": 1.2,
        "tis_clip_low": 0.8,
        "use_kl_loss": False,
        "use_opsm": False,
        "opsm_delta": 0.02,
        "use_rollout_logprobs": False,
        "use_tis": False,
        "use_unbiased_kl": False,
    }
    return Namespace(**values | changes)


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "per-token": {"calculate_per_token_loss": True},
    "dual-clip": {"eps_clip_c": 1.5, "advantage_estimator": "reinforce_plus_plus"},
    "gspo": {"advantage_estimator": "gspo", "eps_clip_c": 1.5},
    "cispo": {"advantage_estimator": "cispo"},
    "cispo-wide": {"advantage_estimator": "cispo", "eps_clip": 1.0, "eps_clip_high": 4.0},
    "entropy": {"entropy_coef": 0.05, "rollout_temperature": 0.7},
    "k2": {"use_kl_loss": True, "kl_loss_type": "k2"},
    "low-var-kl": {"use_kl_loss": True, "kl_loss_type": "low_var_kl", "advantage_estimator": "gspo"},
    "unbiased-kl": {"use_kl_loss": True, "kl_loss_type": "k3", "use_unbiased_kl": True, "advantage_estimator": "gspo"},
    "tis": {"use_tis": True},
    "mismatch": {"get_mismatch_metrics": True, "advantage_estimator": "gspo", "calculate_per_token_loss": True},
    "opsm": {"use_opsm": True, "use_tis": True},
    "rollout": {"use_rollout_logprobs": True},
    "recompute": {"recompute_loss_function": True, "entropy_coef": 0.05},
}


def random_batch(generator: Generator, dtype: torch.dtype) -> tuple[dict[str, Any], Tensor]:
    """Four samples of two rollouts, the third without a trained token."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    logits = 2 * draw(1, sum(TOTALS), VOCAB)
    samples = [torch.randint(VOCAB, (total,), generator=generator) for total in TOTALS]
    masks = [(torch.rand(n, generator=generator) < 0.7).int() for n in RESPONSES]
    masks[1][:2], masks[2][:] = 1, 0
    denominators = [m.sum() for m in masks]
    denominators[0] = denominators[1] = masks[0].sum() + masks[1].sum()
    near = [logp.to(dtype) for logp, _ in per_sample(logits.double(), samples, 1.0)]
    return {
        "unconcat_tokens": samples,
        "total_lengths": TOTALS,
        "response_lengths": RESPONSES,
        "loss_masks": masks,
        "rollout_mask_sums": denominators,
        "advantages": [draw(n) for n in RESPONSES],
        "log_probs": [logp + 0.3 * draw(len(logp)) for logp in near],
        "ref_log_probs": [logp + 0.3 * draw(len(logp)) for logp in near],
        "rollout_log_probs": [logp + 0.3 * draw(len(logp)) for logp in near],
    }, logits


def per_sample(logits: Tensor, samples: list[Tensor], temperature: float) -> list[tuple[Tensor, Tensor]]:
    """Each response's log-probabilities and entropies, by the whole log-softmax."""
    logps = (logits[0] / temperature).log_softmax(-1)
    found, end = [], 0
    for sample, total, response in zip(samples, TOTALS, RESPONSES, strict=True):
        end += total
        rows = logps[end - response - 1 : end - 1]
        logp = rows.gather(1, sample[-response:, None]).squeeze(1)
        found.append((logp, -(rows.exp() * rows).sum(-1)))
    return found


def reducer(batch: dict[str, Any], args: Namespace) -> Callable[[Tensor], Tensor]:
    """slime's: every sample over its rollout's tokens, or the plain sum."""
    masks, sums = batch["loss_masks"], batch["rollout_mask_sums"]

    def reduce(values: Tensor) -> Tensor:
        parts = [(part * mask).sum() for part, mask in zip(values.split(RESPONSES), masks, strict=True)]
        if args.calculate_per_token_loss:
            return torch.stack(parts).sum()
        return torch.stack([part / max(int(total), 1) for part, total in zip(parts, sums, strict=True)]).sum()

    return reduce


def by_hand(args: Namespace, batch: dict[str, Any], logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    reduce = reducer(batch, args)
    found = per_sample(logits, batch["unconcat_tokens"], args.rollout_temperature)
    logp, entropy = (torch.cat(values) for values in zip(*found, strict=True))
    old = torch.cat(batch["rollout_log_probs" if args.use_rollout_logprobs else "log_probs"])
    rollout, reference = torch.cat(batch["rollout_log_probs"]), torch.cat(batch["ref_log_probs"])
    advantages, difference = torch.cat(batch["advantages"]), logp - old
    if args.advantage_estimator == "gspo":
        means = []
        for part, mask in zip(difference.split(RESPONSES), batch["loss_masks"], strict=True):
            means.append(((part * mask).sum() / max(int(mask.sum()), 1)).expand(len(part)))
        difference = torch.cat(means)
    ratio, low, high = difference.exp(), 1 - args.eps_clip, 1 + args.eps_clip_high
    if args.advantage_estimator == "cispo":
        pg_loss = -ratio.detach().clamp(low, high) * advantages * logp
        clipped = (ratio < low) | (ratio > high)
    else:
        pg_loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
        clipped = torch.where(advantages < 0, ratio < low, ratio > high)
        if args.eps_clip_c is not None:
            bounded = torch.minimum(pg_loss, -args.eps_clip_c * advantages)
            pg_loss = torch.where(advantages < 0, bounded, pg_loss)
    expected = {"entropy_loss": entropy, "pg_clipfrac": clipped.to(ratio.dtype), "ppo_kl": -difference}
    expected["train_rollout_logprob_abs_diff"] = ((logp if args.use_rollout_logprobs else old) - rollout).abs()
    off_policy = torch.zeros((), dtype=logp.dtype)
    if args.use_opsm:
        flags = []
        for part, gain, mask in zip(
            (logp - old).split(RESPONSES), batch["advantages"], batch["loss_masks"], strict=True
        ):
            has_moved = -(part * mask).sum() / max(int(mask.sum()), 1) > args.opsm_delta
            flags.append((gain < 0) & has_moved)
            off_policy = off_policy + flags[-1].sum() / max(int(mask.sum()), 1)
        pg_loss = pg_loss * ~torch.cat(flags)
    if args.use_tis or args.get_mismatch_metrics:
        weight = (torch.cat(batch["log_probs"]) - rollout).exp()
        bounded = weight.clamp(args.tis_clip_low, args.tis_clip)
        pg_loss = pg_loss * bounded
        expected |= {"ois": ratio, "tis": weight, "tis_abs": (weight - 1).abs()}
        expected["tis_clipfrac"] = (bounded != weight).to(ratio.dtype)
    loss = reduce(pg_loss) - args.entropy_coef * reduce(entropy)
    expected["pg_loss"] = pg_loss
    if args.use_kl_loss:
        x = reference - logp
        kl = {"k1": -x, "k2": x * x / 2, "k3": x.exp() - 1 - x, "low_var_kl": (x.exp() - 1 - x).clamp(-10, 10)}
        expected["kl_loss"] = kl[args.kl_loss_type]
        if args.use_unbiased_kl:
            expected["kl_loss"] = expected["kl_loss"] * (logp - torch.cat(batch["log_probs"])).exp()
        loss = loss + args.kl_loss_coef * reduce(expected["kl_loss"])
    metrics = {"loss": loss} | {name: reduce(values) for name, values in expected.items()}
    return loss, metrics | ({"opsm_clipfrac": off_policy} if args.use_opsm else {})


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Megatron's parallel state what an unspread model has."""
    sizes = SimpleNamespace(get_context_parallel_world_size=lambda: 1, get_tensor_model_parallel_world_size=lambda: 1)
    for module in (losses, tokens):
        monkeypatch.setattr(module, "parallel_state", lambda: sizes)


def evaluated(loss_fn: Any, args: Namespace, batch: dict[str, Any], logits: Tensor) -> tuple[Tensor, Tensor, Any]:
    logits = logits.clone().requires_grad_()
    loss, metrics = loss_fn(args, batch, logits, reducer(batch, args))
    return loss.detach(), torch.autograd.grad(loss, logits)[0], metrics


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_value_gradient_and_metrics(name: str, generator: Generator) -> None:
    args = arguments(**CONFIGURATIONS[name])
    batch, logits = random_batch(generator, torch.float64)
    loss, gradient, metrics = evaluated(integration.policy_loss, args, batch, logits)
    expected, expected_gradient, expected_metrics = evaluated(
        lambda args, batch, logits, _: by_hand(args, batch, logits), args, batch, logits
    )
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-6)
    assert metrics.keys() == expected_metrics.keys()
    for key, value in metrics.items():
        assert not value.requires_grad
        torch.testing.assert_close(value, expected_metrics[key].detach(), rtol=1e-6, atol=1e-6, check_dtype=False)


@pytest.mark.usefixtures("one_process")
def test_on_policy_without_old_log_probs(generator: Generator) -> None:
    batch, logits = random_batch(generator, torch.float64)
    batch = {key: value for key, value in batch.items() if key not in ("log_probs", "rollout_log_probs")}
    loss, gradient, metrics = evaluated(integration.policy_loss, arguments(), batch, logits)
    batch["log_probs"] = [logp.detach() for logp, _ in per_sample(logits, batch["unconcat_tokens"], 1.0)]
    expected, expected_gradient, _ = evaluated(integration.policy_loss, arguments(), batch, logits)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient)
    assert metrics["pg_clipfrac"] == 0 and "train_rollout_logprob_abs_diff" not in metrics


@pytest.mark.usefixtures("one_process")
def test_prompts_and_masked_tokens_are_not_felt(generator: Generator) -> None:
    batch, logits = random_batch(generator, torch.float64)
    expected = evaluated(integration.policy_loss, arguments(), batch, logits)
    ends = torch.tensor(TOTALS).cumsum(0)
    is_trained = torch.zeros(sum(TOTALS), dtype=torch.bool)
    for end, response, mask in zip(ends, RESPONSES, batch["loss_masks"], strict=True):
        is_trained[end - response - 1 : end - 1] = mask != 0
    logits[0, ~is_trained] = torch.nan
    loss, gradient, _ = evaluated(integration.policy_loss, arguments(), batch, logits)
    assert loss == expected[0] and torch.equal(gradient, expected[1])


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", ["grpo", "gmpo", "sapo", "gspo_token", "dapo", "reinforce", "vespo"])
def test_another_objective(name: str, generator: Generator) -> None:
    batch, logits = random_batch(generator, torch.float64)
    recipe = rlkernels.RECIPES[name]
    per_token = recipe.reduction == "token_mean"
    args = arguments(calculate_per_token_loss=per_token)
    batch["rollout_mask_sums"] = [mask.sum() for mask in batch["loss_masks"]]
    mine = evaluated(integration.policy_loss_of(name), args, batch, logits)
    by_instance = evaluated(integration.policy_loss_of(recipe.objective), args, batch, logits)
    assert mine[0] == by_instance[0]
    logits = logits.clone().requires_grad_()
    logp = torch.cat([logp for logp, _ in per_sample(logits, batch["unconcat_tokens"], 1.0)])
    whole = rlkernels.PolicyBatch(
        None,
        torch.cat(batch["advantages"]),
        mask=torch.cat(batch["loss_masks"]),
        old_logp=torch.cat(batch["log_probs"]),
        cu_seqlens=torch.tensor([0, *RESPONSES]).cumsum(0),
    )
    out = rlkernels.logp_policy_loss(logp, whole, name, normalizer=1.0)
    torch.testing.assert_close(mine[0], out.loss.detach())
    torch.testing.assert_close(mine[1], torch.autograd.grad(out.loss, logits)[0])


def shorter(*, pg_loss: Tensor, loss_masks: list[Tensor], **kwargs: Any) -> tuple[Tensor, list[Tensor], dict]:
    """A `--custom-tis-function-path` that rejects a sample."""
    return 2 * pg_loss, [0 * loss_masks[0], *loss_masks[1:]], {"seen": pg_loss.detach()}


def tokens_over_hundred(totals: Any, responses: list[int], masks: list[Tensor], per_token: bool) -> Any:
    """A `--custom-pg-loss-reducer-function-path`."""
    return lambda values: (values * torch.cat(masks)).sum() / 100


@pytest.mark.usefixtures("one_process")
def test_a_custom_reducer(generator: Generator) -> None:
    batch, logits = random_batch(generator, torch.float64)
    args = arguments(custom_pg_loss_reducer_function_path="test_slime.tokens_over_hundred")
    per_token = arguments(calculate_per_token_loss=True)
    mine = evaluated(integration.policy_loss, args, batch, logits)
    plain = evaluated(integration.policy_loss, per_token, batch, logits)
    torch.testing.assert_close(mine[0], plain[0] / 100)
    torch.testing.assert_close(mine[1], plain[1] / 100)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    "changes, said",
    [
        ({"rollout_top_p": 0.9}, "rollout_top_p: expected 1.0, got 0.9"),
        ({"use_tis": True}, "batch: expected rollout_log_probs, got none"),
        ({"use_rollout_logprobs": True}, "batch: expected rollout_log_probs, got none"),
        ({"use_kl_loss": True, "use_unbiased_kl": True, "kl_loss_type": "low_var_kl"}, "kl_loss_type: expected k1"),
    ],
)
def test_what_cannot_be_computed_is_refused(changes: dict[str, Any], said: str, generator: Generator) -> None:
    batch, logits = random_batch(generator, torch.float64)
    del batch["rollout_log_probs"]
    with pytest.raises(ValueError, match=said):
        evaluated(integration.policy_loss, arguments(**changes), batch, logits)


@pytest.mark.usefixtures("one_process")
def test_objectives_that_are_refused(generator: Generator) -> None:
    batch, logits = random_batch(generator, torch.float64)
    for objective in ("luspo", rlkernels.LUSPO(), "dr_grpo"):
        with pytest.raises(ValueError, match="objective: expected one reduced by token_mean or"):
            integration.policy_loss_of(objective)
    for objective, changes, said in (
        ("gmpo", {"calculate_per_token_loss": True}, "calculate_per_token_loss: expected False for 'gmpo', got True"),
        ("dapo", {}, "calculate_per_token_loss: expected True for 'dapo', got False"),
        ("gmpo", {"advantage_estimator": "cispo"}, "advantage_estimator: expected one that says nothing"),
        ("gmpo", {"eps_clip_c": 3.0}, "eps_clip_c: expected None"),
        (rlkernels.VESPO(), {"use_tis": True}, "use_tis: expected False with VESPO"),
    ):
        with pytest.raises(ValueError, match=said):
            evaluated(integration.policy_loss_of(objective), arguments(**changes), batch, logits)


@pytest.mark.parametrize("with_entropy_grad", [True, False])
@pytest.mark.parametrize("with_mask", [True, False])
def test_log_probs_and_entropy(with_mask: bool, with_entropy_grad: bool, generator: Generator) -> None:
    """`calculate_log_probs_and_entropy` as slime calls it: the mask touches the log-probability alone."""
    logits = torch.randn(9, VOCAB, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.randint(VOCAB, (9,), generator=generator)
    keep = torch.rand(9, VOCAB, generator=generator) < 0.5 if with_mask else None
    logp, entropy = integration.calculate_log_probs_and_entropy(
        logits,
        labels,
        None,
        with_entropy=True,
        with_entropy_grad=with_entropy_grad,
        chunk_size=4,
        log_prob_keep_mask=keep,
    )
    assert logp.shape == (9, 1) and entropy is not None and entropy.shape == (9,)
    every = logits.log_softmax(-1)
    kept = logits
    if keep is not None:
        kept = logits.masked_fill(~(keep | torch.nn.functional.one_hot(labels, VOCAB).bool()), -torch.inf)
    expected = kept.log_softmax(-1).gather(1, labels[:, None])
    expected_entropy = -(every.exp() * every).sum(-1)
    torch.testing.assert_close(logp, expected)
    torch.testing.assert_close(entropy, expected_entropy)
    weights = torch.randn(9, 1, generator=generator, dtype=torch.float64)
    mine, theirs = (weights * logp).sum(), (weights * expected).sum()
    if with_entropy_grad:
        mine, theirs = mine + 0.3 * entropy.sum(), theirs + 0.3 * expected_entropy.sum()
    torch.testing.assert_close(torch.autograd.grad(mine, logits)[0], torch.autograd.grad(theirs, logits)[0])


def test_no_rows() -> None:
    logp, entropy = integration.calculate_log_probs_and_entropy(
        torch.zeros(0, VOCAB), torch.zeros(0, dtype=torch.int64), None, with_entropy=True
    )
    assert logp.numel() == 0 and entropy is not None and entropy.shape == (0,)


@pytest.mark.parametrize("module", [losses, importlib.import_module("rlkernels.integrations.slime.log_probs")])
def test_docstring_examples(module: Any) -> None:
    result = doctest.testmod(module)
    assert result.failed == 0 and result.attempted > 0


# ---------------------------------------------------------------------------------------------------------------
# slime's own code


def slimes_modules() -> tuple[Any, Any]:
    return (
        importlib.import_module("slime.backends.megatron_utils.loss"),
        importlib.import_module("megatron.core").mpu,
    )


def dispatched(loss_module: Any, args: Namespace, batch: dict[str, Any], logits: Tensor) -> tuple[Any, ...]:
    """slime's `loss_function`, which calls the one that the arguments name: its results, and the gradient."""
    logits = logits.clone().requires_grad_()
    with torch.compiler.set_stance("force_eager"):
        loss, normalizer, log = loss_module.loss_function(args, batch, 3, 16, logits)
        loss.backward()  # not autograd.grad, which would leave out slime's collectives of samples without a token here
    assert logits.grad is not None
    gradient = logits.grad
    return loss.detach(), torch.as_tensor(normalizer), log["keys"], log["values"], gradient


def assert_as_slime(loss_module: Any, batch: dict[str, Any], logits: Tensor, **changes: Any) -> None:
    mine = dispatched(loss_module, arguments(**changes, loss_type="custom_loss"), batch, logits)
    theirs = dispatched(loss_module, arguments(**changes, loss_type="policy_loss"), batch, logits)
    assert mine[2] == theirs[2]
    close(mine[4], theirs[4], changes)
    for actual, expected in zip((*mine[:2], mine[3]), (*theirs[:2], theirs[3]), strict=True):
        close(actual, expected, changes, terms=sum(RESPONSES))


def close(actual: Tensor, expected: Tensor, changes: dict[str, Any], terms: int = 2) -> None:
    """Within a millionth of every term: slime computes in float32."""
    said = functools.partial("{}: {}".format, changes)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6 * terms, check_dtype=False, msg=said)


@pytest.fixture(scope="module")
def slime_loss(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """slime's module of losses, on Megatron groups of one rank."""
    pytest.importorskip("slime.backends.megatron_utils", reason="slime and Megatron-Core are not installed")
    loss_module, mpu = slimes_modules()
    store = tmp_path_factory.mktemp("gloo") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    mpu.initialize_model_parallel()
    yield loss_module
    mpu.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_slimes_own_loss(slime_loss: Any, name: str, generator: Generator) -> None:
    for _ in range(3):
        batch, logits = random_batch(generator, torch.float32)
        assert_as_slime(slime_loss, batch, logits, **CONFIGURATIONS[name])


def test_slimes_own_loss_with_functions_of_the_users(slime_loss: Any, generator: Generator) -> None:
    batch, logits = random_batch(generator, torch.float32)
    tis = {"use_tis": True, "custom_tis_function_path": "test_slime.shorter"}
    assert_as_slime(slime_loss, batch, logits, **tis)
    reduced = {"custom_pg_loss_reducer_function_path": "test_slime.tokens_over_hundred"}
    assert_as_slime(slime_loss, batch, logits, **reduced)
    assert_as_slime(slime_loss, batch, logits, **tis, **reduced)


def test_slimes_own_loss_on_policy(slime_loss: Any, generator: Generator) -> None:
    batch, logits = random_batch(generator, torch.float32)
    del batch["log_probs"]
    assert_as_slime(slime_loss, batch, logits)
    assert_as_slime(slime_loss, batch, logits, use_tis=True)


def test_slimes_own_loss_on_patched_log_probs(slime_loss: Any, generator: Generator) -> None:
    """Its loss on this package's log-probabilities, top-p masks included, and its own again after `unpatch()`."""
    for changes in ({}, {"rollout_top_p": 0.9, "entropy_coef": 0.05}, {"log_probs_chunk_size": 5}):
        batch, logits = random_batch(generator, torch.float32)
        assert_as_patched(slime_loss, with_top_p(batch, generator), logits, **changes)


def with_top_p(batch: dict[str, Any], generator: Generator) -> dict[str, Any]:
    """Among which tokens each one was sampled."""
    ids = [[torch.randperm(VOCAB, generator=generator)[:3] for _ in range(n)] for n in RESPONSES]
    return batch | {
        "rollout_top_p_token_ids": [torch.cat(sample) for sample in ids],
        "rollout_top_p_token_offsets": [torch.arange(n + 1) * 3 for n in RESPONSES],
    }


def assert_as_patched(loss_module: Any, batch: dict[str, Any], logits: Tensor, **changes: Any) -> None:
    original = loss_module.calculate_log_probs_and_entropy
    args = arguments(**changes, loss_type="policy_loss")
    theirs = dispatched(loss_module, args, batch, logits)
    integration.patch()
    integration.patch()
    assert loss_module.calculate_log_probs_and_entropy is integration.calculate_log_probs_and_entropy
    mine = dispatched(loss_module, args, batch, logits)
    integration.unpatch()
    assert loss_module.calculate_log_probs_and_entropy is original
    close(mine[3], theirs[3], changes, terms=sum(RESPONSES))
    close(mine[4], theirs[4], changes)


def spread_batch(batch: dict[str, Any], cp_utils: Any) -> dict[str, Any]:
    """The per-token values of this rank's part of every sequence, as slime's data loader leaves them."""
    local = dict(batch)
    for name in ("advantages", "log_probs", "ref_log_probs", "rollout_log_probs"):
        local[name] = [
            cp_utils.slice_log_prob_with_cp(values, total, response)
            for values, total, response in zip(batch[name], TOTALS, RESPONSES, strict=True)
        ]
    return local


def rank_of_two(rank: int, spread: str, seed: int, store: str, results: Any) -> None:
    """The same batch on both ranks; each has its part of the vocabulary, or of the sequences."""
    try:
        torch.set_num_threads(1)
        loss_module, mpu = slimes_modules()
        timeout = datetime.timedelta(seconds=30)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timeout)
        mpu.initialize_model_parallel(**{f"{spread}_parallel_size": 2, "distributed_timeout_minutes": 1})
        cp_utils = importlib.import_module("slime.backends.megatron_utils.cp_utils")
        generator = torch.Generator().manual_seed(seed)
        for changes in CONFIGURATIONS.values():
            batch, logits = random_batch(generator, torch.float32)
            if spread == "context":
                batch = spread_batch(batch, cp_utils)
                rows = sum(2 * -(-total // 4) for total in TOTALS)
                logits = 2 * torch.randn(1, rows, VOCAB, generator=generator)
            else:
                logits = logits[..., rank * VOCAB // 2 : (rank + 1) * VOCAB // 2]
            assert_as_slime(loss_module, batch, logits, **changes)
            if spread == "tensor_model":
                assert_as_patched(loss_module, with_top_p(batch, generator), logits, **changes, rollout_top_p=0.9)
        results[rank] = None
        dist.destroy_process_group()
    except BaseException:
        results[rank] = traceback.format_exc()
        raise


@pytest.mark.slow
@pytest.mark.parametrize("spread", ["tensor_model", "context"])
def test_slimes_own_loss_on_two_ranks(spread: str, tmp_path: Path, generator: Generator) -> None:
    pytest.importorskip("slime.backends.megatron_utils", reason="slime and Megatron-Core are not installed")
    with mp.get_context("spawn").Manager() as manager:
        results = manager.dict()
        with contextlib.suppress(mp.ProcessRaisedException):  # said by the rank
            mp.spawn(rank_of_two, (spread, generator.initial_seed(), str(tmp_path / "store"), results), nprocs=2)
        assert dict(results) == {0: None, 1: None}, "\n".join(str(value) for value in results.values())
