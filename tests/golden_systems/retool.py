"""ReTool: PPO without the interpreter's tokens."""

from __future__ import annotations

import torch

from golden_systems.common import Case, assert_close
from golden_systems.surrogates import check_surrogate
from rlkernels.credit import generalized_advantages, outcome_reward, tool_output_mask, whiten


def check_retool(case: Case) -> None:
    inputs, params, expected = case["inputs"], case["params"], case["expected"]
    if "is_equivalent" in inputs:
        assert_close(outcome_reward(inputs["is_equivalent"]), expected["reward"], "reward")
    elif "open_ids" in inputs:
        assert params["mask_tags"]
        opening, closing = (inputs[name].int().tolist() for name in ("open_ids", "close_ids"))
        ids = inputs["token_ids"].long()
        mask = tool_output_mask(inputs["valid"], token_ids=ids, opening=opening, closing=closing)
        assert_close(mask, expected["mask"], "mask")
    elif "token_rewards" in inputs:
        trained = inputs["mask"] != 0
        out = generalized_advantages(
            inputs["token_rewards"], inputs["values"], inputs["mask"], gamma=params["gamma"], lam=params["lam"]
        )
        # what the authors have under the mask is not used by anything
        whitened = whiten(out.advantages, inputs["mask"])
        for name, actual in (("adv_raw", out.advantages), ("returns", out.returns), ("adv_whitened", whitened)):
            assert_close(actual, torch.where(trained, expected[name], 0), name)
    else:
        check_surrogate(case)


SYSTEMS = {"retool": check_retool}
