"""NFT: positive and negative answers with an implicit negative policy."""

from __future__ import annotations

import rlkernels
from golden_systems.common import Case, assert_close, check_loss, common_batch, reduction_of
from rlkernels import NFT, PolicyBatch


def check_nft(case: Case) -> None:
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


SYSTEMS = {"nft": check_nft}
