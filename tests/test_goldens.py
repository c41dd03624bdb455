"""Numbers from the authors' own code, in value and in gradient to 1e-9 in float64, through every backend.

`RLKERNELS_GOLDENS` names another folder of cases. A case is understood by its system and its fields alone.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rlkernels
from rlkernels import GMPO, GRPO, GSPO, NFT, GSPOToken, PolicyBatch
from rlkernels.credit import group_advantages, mixed_groups, overlong_penalty, prefix_set_counts

FOLDER = Path(os.environ.get("RLKERNELS_GOLDENS", Path(__file__).parent / "goldens"))
TOLERANCE = 1e-9


def load(path: Path) -> dict[str, Any]:
    """A case with its inputs and expectations as tensors where they are rectangular numbers."""
    case = json.loads(path.read_text())
    for part in ("inputs", "expected"):
        case[part] = {name: as_tensor(value) for name, value in case[part].items()}
    return case


def as_tensor(value: Any) -> Any:
    def numbers(x: Any) -> Any:
        if isinstance(x, list):
            return [numbers(y) for y in x]
        return float(x) if isinstance(x, str) and x in ("nan", "inf", "-inf") else x

    try:
        return torch.tensor(numbers(value), dtype=torch.float64)
    except (TypeError, ValueError):
        return value


CASES = {path.stem: path for path in sorted(FOLDER.glob("*.json"))}


def assert_close(actual: Tensor, expected: Tensor, name: str) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=TOLERANCE, msg=lambda m: f"{name}: {m}")


def logits_of(logp: Tensor) -> Tensor:
    """Two-token logits in which token 0 has log-probability `logp`."""
    return torch.stack([logp, torch.log(-torch.expm1(logp))], dim=-1)


def check_loss(
    logp: Tensor,
    batch: dict[str, Any],
    objective: Any,
    reduction: str,
    normalizer: float | None,
    loss: Tensor,
    gradient: Tensor,
    what: str = "",
) -> None:
    """Value and gradient from log-probabilities, then from logits, on the selected backend."""
    options = {"reduction": reduction, "normalizer": normalizer}

    def loss_and_gradient(logp: Tensor) -> tuple[Tensor, Tensor]:
        logp = logp.clone().requires_grad_()
        out = rlkernels.logp_policy_loss(logp, PolicyBatch(None, **batch), objective, **options)
        return out.loss, torch.autograd.grad(out.loss, logp)[0]

    actual_loss, dlogp = loss_and_gradient(logp)
    assert_close(actual_loss, loss, f"{what} loss")
    assert_close(dlogp, gradient, f"{what} gradient")

    logits = logits_of(logp).requires_grad_()
    targets = torch.zeros(logp.shape, dtype=torch.int64)
    out = rlkernels.policy_loss(logits, PolicyBatch(targets, **batch), objective, **options)
    (dlogits,) = torch.autograd.grad(out.loss, logits)
    assert_close(out.loss, loss, f"{what} loss from logits")
    expected = -gradient * torch.expm1(logp)  # dlogp / dlogits is 1 - p for token 0 and p - 1 for the other
    # a case that sits exactly on a bound leaves it by one rounding on the way through the logits
    below, above = (loss_and_gradient(logp + shift)[1] for shift in (-1e-12, 1e-12))
    smooth = ((above - below).abs() < TOLERANCE)[..., None]
    expected = torch.stack([expected, -expected], dim=-1)
    assert_close(dlogits * smooth, expected * smooth, f"{what} gradient from logits")


def reduction_of(agg: str, params: dict[str, Any], mask: Tensor) -> tuple[str, float | None]:
    """What a case's `agg` says, in this package's terms."""
    rows, non_empty = mask.shape[0], int((mask.sum(-1) > 0).sum())
    if agg.startswith("token-mean"):
        return "token_mean", None
    if agg.startswith("seq-mean-token-mean"):
        # verl leaves empty rows out of the mean, TRL counts them
        return "seq_mean_token_mean", rows if "trl" in agg else non_empty
    if agg.startswith("mean over sequences"):
        return "seq_mean_token_mean", None
    if agg.startswith("sum/(B*Lmax)"):
        return "seq_mean_token_sum_norm", rows * params["Lmax"]
    if agg.startswith("seq-mean-token-sum-norm"):
        return "seq_mean_token_sum_norm", params["Lmax"]
    if agg.startswith("seq-mean-token-sum"):
        return "seq_mean_token_sum", None
    if divisor := re.match(r"sum over all tokens / (\d+)", agg):
        return "token_sum", float(divisor[1])
    raise AssertionError(f"unknown aggregation {agg!r}")


def kl_options(params: dict[str, Any]) -> dict[str, Any]:
    if not params.get("beta"):
        return {}
    estimator = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(params["kl"], params["kl"])
    return {"kl_coef": params["beta"], "kl_estimator": estimator or "k3"}


def verl_weight(mask: Tensor) -> Tensor:
    """verl divides a row's sum by n + 1e-8 where this package divides by n."""
    lengths = mask.sum(-1, keepdim=True)
    return (lengths / (lengths + 1e-8)).expand_as(mask)


def common_batch(inputs: dict[str, Any], advantages: Tensor) -> dict[str, Any]:
    optional = {"ref_logp": inputs["ref_logp"]} if "ref_logp" in inputs else {}
    return {"advantages": advantages, "old_logp": inputs["old_logp"], "mask": inputs["mask"], **optional}


def check_group_advantages(case: dict[str, Any]) -> None:
    inputs, params = case["inputs"], case["params"]
    variants = {
        "adv_verl_sample_std_eps1e6": {"eps": params["eps_verl"]},
        "adv_trl_sample_std_eps1e4": {"eps": params["eps_trl"]},
        "adv_population_std_eps1e6": {"eps": params["eps_verl"], "ddof": 0},
        "adv_centered_only_verl": {"scale": "none"},
    }
    for name, options in variants.items():
        actual = group_advantages(inputs["rewards"], inputs["group"].long(), **options)
        assert_close(actual, case["expected"][name], name)


def check_surrogate(case: dict[str, Any]) -> None:
    """grpo, dapo: the clipped surrogate."""
    inputs, params, expected = case["inputs"], case["params"], case["expected"]
    objective = GRPO(
        clip_low=params["eps_low"],
        clip_high=params["eps_high"],
        dual_clip=params.get("dual_clip_c"),
        **kl_options(params),
    )
    reduction, normalizer = reduction_of(params["agg"], params, inputs["mask"])
    batch = common_batch(inputs, inputs["adv"])
    if "verl" in params["agg"]:
        batch["weight"] = verl_weight(inputs["mask"])
    check_loss(inputs["logp"], batch, objective, reduction, normalizer, expected["loss"], expected["grad_logp"])


def check_grpo(case: dict[str, Any]) -> None:
    check_surrogate(case) if "logp" in case["inputs"] else check_group_advantages(case)


def check_dapo(case: dict[str, Any]) -> None:
    inputs, params, expected = case["inputs"], case["params"], case["expected"]
    if "acc" in inputs:
        keep = mixed_groups(inputs["acc"], inputs["group"].long())
        for group, kept in expected["keep_group"].items():
            assert (keep[inputs["group"] == float(group)] == kept).all(), group
    elif "length" in inputs:
        penalty = overlong_penalty(
            inputs["length"],
            params["max_resp_len"],
            params["overlong_buffer_len"],
            factor=params["penalty_factor"],
        )
        assert_close(penalty, expected["overlong_reward"], "overlong_reward")
    else:
        check_surrogate(case)


def check_drgrpo(case: dict[str, Any]) -> None:
    inputs, params, expected = case["inputs"], case["params"], case["expected"]
    advantages = group_advantages(inputs["rewards"], inputs["group"].long(), scale="none")
    assert_close(advantages, expected["adv"], "advantages")
    objective = GRPO(clip_low=params["eps"], clip_high=params["eps"], **kl_options(params))
    reduction, normalizer = reduction_of(params["agg"], params, inputs["mask"])
    batch = common_batch(inputs, advantages)
    check_loss(inputs["logp"], batch, objective, reduction, normalizer, expected["loss"], expected["grad_logp"])
    if "verl_seq_mean_token_sum_norm_loss" in expected:
        out = rlkernels.logp_policy_loss(
            inputs["logp"],
            PolicyBatch(None, **batch),
            objective,
            reduction=reduction,
            normalizer=params["Lmax"],
        )
        assert_close(out.loss, expected["verl_seq_mean_token_sum_norm_loss"], "verl's loss")


def check_sequence_ratio(objective: type[GSPO]) -> Callable[[dict[str, Any]], None]:
    def check(case: dict[str, Any]) -> None:
        inputs, params, expected = case["inputs"], case["params"], case["expected"]
        instance = objective(
            clip_low=params["eps_low"],
            clip_high=params["eps_high"],
            log_ratio_clamp=params.get("verl_log_ratio_clamp_max"),
        )
        batch = common_batch(inputs, inputs["adv"])
        reduction, normalizer = reduction_of(params["agg"], params, inputs["mask"])
        logp, as_verl = inputs["logp"], batch | {"weight": verl_weight(inputs["mask"])}
        loss, gradient = expected["loss"], expected["grad_logp"]
        check_loss(logp, as_verl, instance, reduction, normalizer, loss, gradient, "verl")
        if "loss_trl_divide_by_B" in expected:
            loss, gradient = expected["loss_trl_divide_by_B"], expected["grad_trl"]
            check_loss(logp, batch, instance, reduction, None, loss, gradient, "TRL")

    return check


def check_gmpo(case: dict[str, Any]) -> None:
    inputs, params, expected = case["inputs"], case["params"], case["expected"]
    objective = GMPO(log_clip_low=params["log_clip_low"], log_clip_high=params["log_clip_high"])
    reduction, normalizer = reduction_of(params["agg"], params, inputs["mask"])
    batch = common_batch(inputs, inputs["adv"])
    loss = expected["loss"]
    if loss.isnan():
        # the authors' 0 / 0 of an empty row; here, as in verl, it gives 0 and still counts in the mean
        ratio = expected["seq_ratio"].nan_to_num(0.0)
        loss = -(inputs["adv"] * ratio).mean()
        torch.testing.assert_close(loss, expected["loss_verl"], rtol=1e-8, atol=0)  # verl: n + 1e-8
    check_loss(inputs["logp"], batch, objective, reduction, normalizer, loss, expected["grad_logp"])


def check_nft(case: dict[str, Any]) -> None:
    inputs, params, expected = case["inputs"], case["params"], case["expected"]
    weights = {"1-r_q": "failure_rate", "sqrt((1-r_q)/r_q)": "sqrt_failure_odds", "1": "uniform"}
    objective = NFT(
        min_ratio=params["eps"],
        prompt_weight=weights[params["prompt_weight"]],
        negative_weight=params["neg_weight"],
        rate_clamp=tuple(params["rate_clamp"]),
        log_ratio_max=params["log_ratio_clamp_max"],
    )
    reduction, normalizer = reduction_of(params["agg"], params, inputs["mask"])
    batch = common_batch(inputs, 2 * inputs["correct"] - 1) | {"extras": {"success_rate": inputs["correct_rate"]}}
    check_loss(inputs["logp"], batch, objective, reduction, normalizer, expected["loss"], expected["grad_logp"])
    out = rlkernels.logp_policy_loss(inputs["logp"], PolicyBatch(None, **batch), objective, reduction="token_sum")
    assert_close(out.loss, expected["loss_unscaled_sum"], "unscaled sum")


def padded(rows: list[list[int]] | Tensor) -> tuple[Tensor, Tensor]:
    """Token ids right-padded with an id that a response may also contain, and the true lengths."""
    rows = [[int(token) for token in row] for row in rows]
    width = max(len(row) for row in rows)
    ids = torch.tensor([row + [rows[0][0]] * (width - len(row)) for row in rows])
    return ids, torch.tensor([len(row) for row in rows])


def check_prefix_counts(rows: Any, expected: Any) -> Tensor:
    ids, lengths = padded(rows)
    counts = prefix_set_counts(ids, lengths, len(ids))
    for i, row in enumerate(expected):
        assert counts[i, : lengths[i]].tolist() == [int(count) for count in row]
    return counts


def check_lambda_grpo(case: dict[str, Any]) -> None:
    inputs, expected = case["inputs"], case["expected"]
    if "policy" in inputs:
        check_tree_simulation(case)
        return
    if "sampled_paths" in inputs:
        check_tree_step(case)
        return
    counts = check_prefix_counts(inputs["token_ids"], expected["prefix_count"])
    if "logp" not in inputs:
        return
    advantages = group_advantages(inputs["rewards"], len(counts))
    assert_close(advantages, expected["adv"], "advantages")
    eps = case["params"].get("eps", 0.2) if isinstance(case["params"], dict) else 0.2
    objective = GRPO(clip_low=eps, clip_high=eps)
    batch = common_batch(inputs, advantages) | {"weight": 1 / counts.double()}
    logp = inputs["logp"]
    check_loss(logp, batch, objective, "token_mean", None, expected["loss"], expected["grad_logp"], "paper")
    if "loss_official_seqmean" in expected:
        loss, gradient = expected["loss_official_seqmean"], expected["grad_logp_official_seqmean"]
        check_loss(logp, batch, objective, "seq_mean_token_mean", None, loss, gradient, "official")


def path_logp(theta: Tensor, paths: Tensor) -> Tensor:
    """Log-probabilities `[..., depth]` of binary actions: a logit of action 1 at each heap-numbered node."""
    node = torch.ones(paths.shape[:-1], dtype=torch.int64)
    columns = []
    for action in paths.unbind(-1):
        logit = theta.expand(*node.shape[:-1], -1).gather(-1, node)
        columns.append(torch.nn.functional.logsigmoid(torch.where(action == 1, logit, -logit)))
        node = 2 * node + action
    return torch.stack(columns, dim=-1)


def check_tree_step(case: dict[str, Any]) -> None:
    inputs, expected = case["inputs"], case["expected"]
    paths = inputs["sampled_paths"].long()
    counts = check_prefix_counts(paths, expected["prefix_count"])
    advantages = group_advantages(inputs["rewards"], len(paths), eps=case["params"]["eps"])
    assert_close(advantages, expected["adv"], "advantages")
    for name, recipe, weight in (("grpo", "dapo", None), ("lambda", "lambda_grpo", 1 / counts.double())):
        theta = torch.zeros(1, 2 ** (paths.shape[-1]), dtype=torch.float64, requires_grad=True)
        logp = path_logp(theta, paths[None])[0]
        batch = PolicyBatch(None, advantages, weight=weight)
        rlkernels.logp_policy_loss(logp, batch, recipe).loss.backward()
        assert_close(theta.grad[0], expected[f"dLoss_dtheta_{name}"], name)


def check_tree_simulation(case: dict[str, Any]) -> None:
    """Direction only, as the case says: under SGD with n = 1, lambda-GRPO finds the target and GRPO does not."""
    key = next(key for key in case["expected"] if key.startswith("sgd") and "_n1_" in key)
    options = dict(re.findall(r"(lr|steps|G|rneg)(-?[\d.]+)", key))
    size, negative = int(options["G"]), float(options["rneg"])
    target = case["inputs"]["target"].long()
    seeds, generator = 24, torch.Generator().manual_seed(0)
    frequency = {}
    for recipe in ("dapo", "lambda_grpo"):
        theta = torch.zeros(seeds, 2 ** len(target), requires_grad=True)
        found = []
        for _ in range(int(options["steps"])):
            with torch.no_grad():
                paths = torch.empty(seeds, size, 0, dtype=torch.int64)
                node = torch.ones(seeds, size, dtype=torch.int64)
                for _ in target:
                    action = torch.bernoulli(theta.gather(1, node).sigmoid(), generator=generator).long()
                    paths, node = torch.cat([paths, action[..., None]], -1), 2 * node + action
                hit = (paths == target).all(-1)
                rewards = torch.where(hit, 1.0, torch.where(paths[..., 0] == target[0], negative, 0.7))
                found.append(hit.float().mean())
                flat = paths.flatten(0, 1)
                weight = None
                if recipe == "lambda_grpo":
                    weight = 1 / prefix_set_counts(flat, torch.full((len(flat),), len(target)), size)
                batch = PolicyBatch(None, group_advantages(rewards.flatten(), size), weight=weight)
            logp = path_logp(theta, paths).flatten(0, 1)
            # each seed is a run of its own, so the denominator is one group's tokens
            loss = rlkernels.logp_policy_loss(logp, batch, recipe, reduction="token_sum", normalizer=size * len(target))
            (gradient,) = torch.autograd.grad(loss.loss, theta)
            theta = (theta - float(options["lr"]) * gradient).detach().requires_grad_()
        frequency[recipe] = torch.stack(found[-50:]).mean().item()
    assert frequency["lambda_grpo"] > 2 * frequency["dapo"], frequency


SYSTEMS: dict[str, Callable[[dict[str, Any]], None]] = {
    "grpo": check_grpo,
    "drgrpo": check_drgrpo,
    "dapo": check_dapo,
    "gspo": check_sequence_ratio(GSPO),
    "gspo_token": check_sequence_ratio(GSPOToken),
    "gmpo": check_gmpo,
    "nft": check_nft,
    "lambda_grpo": check_lambda_grpo,
}


def is_simulation(case: dict[str, Any]) -> bool:
    return "policy" in case["inputs"]


KNOWN = {name: case for name, path in CASES.items() if (case := load(path))["system"] in SYSTEMS}


@pytest.mark.parametrize("name", [name for name, case in KNOWN.items() if not is_simulation(case)])
def test_golden(name: str, backend: str) -> None:
    SYSTEMS[KNOWN[name]["system"]](KNOWN[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in KNOWN.items() if is_simulation(case)])
def test_golden_simulation(name: str) -> None:
    SYSTEMS[KNOWN[name]["system"]](KNOWN[name])


def test_every_system_has_a_case() -> None:
    """An empty or mistyped folder must not pass."""
    assert KNOWN, f"no known case in {FOLDER}"
