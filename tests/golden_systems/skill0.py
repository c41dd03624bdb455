"""SKILL0 and AgentOCR: compression reward, skill selection, and the loss."""

from __future__ import annotations

import re

import torch

from golden_systems.common import Case, assert_close
from golden_systems.surrogates import check_surrogate
from rlkernels.credit import budget_at_step, compression_reward, select_skills


def check_skill0(case: Case) -> None:
    inputs = case["inputs"]
    if "logp" in inputs:
        check_surrogate(case)
    elif "aggregated_delta" in inputs:
        check_selection(case)
    elif "compression_factor" in inputs:
        low, high = case["params"]["c_range"]
        assert low == 1
        rewarded = torch.as_tensor(inputs["success"]).bool() & torch.as_tensor(inputs["applied"]).bool()
        bonus = compression_reward(
            rewarded, inputs["compression_factor"], coef=case["params"]["coef"], largest_factor=high
        )
        assert_close(bonus, case["expected"]["compression_reward"], "compression reward")
    else:
        check_both_signs(case)


def check_both_signs(case: Case) -> None:
    inputs, expected, coef = case["inputs"], case["expected"], case["params"]["lam"]
    success, fraction = inputs["success"], inputs["c"]
    printed = compression_reward(success, fraction, coef=1.0, convention="fraction")
    assert_close(printed, expected["r_comp_literal"], "as printed")
    total = inputs["r"] + compression_reward(success, fraction, coef=coef, convention="fraction")
    assert_close(total, expected["r_total_literal"], "total, as printed")
    total = inputs["r"] + compression_reward(success, 1 / fraction, coef=coef)
    assert_close(total, expected["r_total_factor_convention"], "total, factor")


def check_selection(case: Case) -> None:
    params, expected = case["params"], case["expected"]
    names = list(case["inputs"]["aggregated_delta"])
    deltas = list(case["inputs"]["aggregated_delta"].values())
    nothing = [0.0] * len(deltas)
    for budget, active in expected["official_active"].items():
        # the authors always show their general skills, and count them
        chosen = select_skills(deltas, nothing, max(int(budget) - 1, 0), keep_neutral=True)
        assert ["general_skills"] * (int(budget) > 0) + [names[k] for k in chosen] == active
    for budget, active in expected["paper_strict_gt0"].items():
        assert [names[k] for k in select_skills(deltas, nothing, int(budget))] == active
    key = next(key for key in expected if key.startswith("official_max_set_at_steps_"))
    schedule = [int(size) for size in params["max_set_schedule"]]
    for step, size in zip(re.findall(r"\d+", key), expected[key], strict=True):
        assert budget_at_step(schedule, int(step), params["total_steps"]) == size


SYSTEMS = {"skill0": check_skill0}
