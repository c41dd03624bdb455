"""CoRT: contrast, ramp and weights, and the surrogate with the weighted advantages."""

from __future__ import annotations

import torch

from golden_systems.common import Case, assert_close, check_loss, common_batch, logits_of
from rlkernels import GRPO
from rlkernels.credit import counterfactual_contrast, group_advantages, replay_weights, smoothstep_ramp


def check_cort(case: Case) -> None:
    inputs, params, expected = case["inputs"], case["params"], case["expected"]
    ramp = smoothstep_ramp(inputs["step"].item(), params["k0"], params["K"])
    assert_close(torch.tensor(ramp), expected["lambda_k"], "ramp")

    factual, counterfactual = inputs["logp_factual"], inputs["logp_counterfactual"]
    targets = torch.zeros(factual.shape, dtype=torch.int64)
    contrast = counterfactual_contrast(logits_of(factual), logits_of(counterfactual), targets)
    assert_close(contrast, factual - counterfactual, "contrast")
    known = counterfactual_contrast(None, logits_of(counterfactual), targets, logp_with=factual)
    assert_close(known, factual - counterfactual, "contrast with a known term")
    weights = replay_weights(
        contrast,
        inputs["mask"],
        sharpness=params["tau"],
        offset=params["b"],
        strength=params["eta"],
        ramp=ramp,
    )
    assert_close(weights, expected["weights"], "weights")

    eps = float(params["adv"].split("+")[-1].rstrip(")"))
    advantages = group_advantages(inputs["rewards"], inputs["group"].long(), eps=eps)
    assert_close(advantages, expected["adv"], "advantages")
    token_advantages = advantages[:, None] * weights
    assert_close(token_advantages, expected["token_adv"], "token advantages")

    objective = GRPO(clip_low=params["eps_clip"], clip_high=params["eps_clip"])
    batch = common_batch(inputs, token_advantages)
    for reduction, suffix in (("token_mean", ""), ("seq_mean_token_mean", "_seqmean_divB")):
        loss, gradient = expected[f"loss{suffix}"], expected[f"grad_logp{suffix}"]
        check_loss(inputs["logp"], batch, objective, reduction, None, loss, gradient, reduction)


SYSTEMS = {"cort": check_cort}
