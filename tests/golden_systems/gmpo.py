"""GMPO: the geometric mean of clipped ratios."""

from __future__ import annotations

import torch

from golden_systems.common import Case, check_loss, common_batch, reduction_of
from rlkernels import GMPO


def check_gmpo(case: Case) -> None:
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


SYSTEMS = {"gmpo": check_gmpo}
