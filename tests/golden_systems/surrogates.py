"""GRPO, Dr.GRPO, DAPO, GSPO and GSPO-token: the clipped surrogate with a token's or a sequence's ratio."""

from __future__ import annotations

from collections.abc import Callable

import rlkernels
from golden_systems.common import Case, assert_close, check_loss, common_batch, kl_options, reduction_of, verl_weight
from rlkernels import GRPO, GSPO, GSPOToken, PolicyBatch
from rlkernels.credit import group_advantages, mixed_groups, overlong_penalty


def check_group_advantages(case: Case) -> None:
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


def check_surrogate(case: Case) -> None:
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


def check_grpo(case: Case) -> None:
    check_surrogate(case) if "logp" in case["inputs"] else check_group_advantages(case)


def check_dapo(case: Case) -> None:
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


def check_drgrpo(case: Case) -> None:
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


def check_sequence_ratio(objective: type[GSPO]) -> Callable[[Case], None]:
    def check(case: Case) -> None:
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


SYSTEMS = {
    "grpo": check_grpo,
    "drgrpo": check_drgrpo,
    "dapo": check_dapo,
    "gspo": check_sequence_ratio(GSPO),
    "gspo_token": check_sequence_ratio(GSPOToken),
}
