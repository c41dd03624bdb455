"""VeriFree and RLPR: rewards from the likelihood of the reference answer."""

from __future__ import annotations

import torch

from golden_systems.common import Case, assert_close, check_loss
from golden_systems.surrogates import check_surrogate
from rlkernels import RECIPES
from rlkernels.credit import (
    debias_reward,
    group_advantages,
    group_std,
    mixed_groups,
    reference_probability_reward,
    verifree_advantages,
)


def check_verifree(case: Case) -> None:
    inputs, params, expected = case["inputs"], case["params"], case["expected"]
    assert params["reward_source"] == "p"
    think, answer = inputs["think_mask"] != 0, (inputs["answer_mask"] != 0) & (inputs["has_answer"][:, None] != 0)
    rewards = reference_probability_reward(inputs["logp"], answer, kind="product")
    assert_close(rewards, expected["R"], "R")
    coefficient = {"reward": "reward", "adv": "advantage"}[params["sft_coef_source"]]
    size = int(inputs["group_size"])
    advantages = verifree_advantages(inputs["logp"], think, answer, size, answer_coefficient=coefficient)
    first_thought = think.int().argmax(-1, keepdim=True)
    assert_close(advantages.gather(1, first_thought)[:, 0], expected["A"], "A")
    mask = (think | answer) & (inputs["loss_mask"][:, None] != 0)
    objective, reduction = RECIPES["verifree"][:2]
    loss, gradient = expected["loss"], expected["grad_logp"]
    # logits of two tokens cannot say log-probability 0 with a finite gradient; it stands at padding alone
    logp = torch.where(mask, inputs["logp"], -1.0)
    check_loss(logp, {"advantages": advantages, "mask": mask}, objective, reduction, None, loss, gradient)


def check_rlpr(case: Case) -> None:
    inputs, params, expected = case["inputs"], case["params"], case["expected"]
    if "answer_logp" in inputs:
        kinds = {
            "mean_exp_log_softmax": "mean",
            "exp_sum_log_softmax": "product",
            "exp_mean_log_softmax": "geometric_mean",
        }
        for name, kind in kinds.items():
            actual = reference_probability_reward(inputs["answer_logp"], inputs["answer_mask"], kind=kind)
            assert_close(actual, torch.tensor(expected["exact"][name], dtype=torch.float64), name)
    elif "r_base" in inputs:
        assert_close(debias_reward(inputs["r"], inputs["r_base"]), expected["r_hat"], "r_hat")
        final = debias_reward(
            inputs["r"],
            inputs["r_base"],
            format_rewards=inputs["format_ok"],
            format_coefficient=params["format_coefficient"],
        )
        assert_close(final, expected["final_reward"], "final reward")
    elif "rewards" in inputs:
        rewards, group = inputs["rewards"], inputs["group"].long()
        # the authors give a group of one std 1 and its own reward as advantage; here it has 0 and 0
        alone = (group[:, None] == group).sum(-1) == 1
        ddof = {"sample": 1, "population": 0}[params["std"]]
        advantages = group_advantages(rewards, group, ddof=ddof, eps=params["eps"])
        assert_close(advantages, torch.where(alone, 0, expected["adv"]), "advantages")
        assert_close(group_std(rewards, group, ddof=ddof), torch.where(alone, 0, expected["std"]), "std")
        dropped = ~mixed_groups(rewards, group) & ~alone
        assert_close(dropped.double().mean(), expected["filter_rate"], "filter rate")
    else:
        check_surrogate(case)


SYSTEMS = {"verifree": check_verifree, "rlpr": check_rlpr}
