"""RLVP: the authors' two channels, and the recipe of standardised scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from golden_systems.common import Case, as_tensor, assert_close, check_loss, common_batch
from rlkernels import GRPO
from rlkernels.credit import (
    group_advantages,
    group_variance_decomposition,
    two_channel_advantages,
    two_channel_zscore,
)


def check_rlvp(case: Case) -> None:
    check_scores(case) if "path" in case["inputs"] else check_channels(case)


def counts_by_turn(rows: list[dict[str, Any]], turns: int) -> Tensor:
    return torch.tensor([[float(row.get(str(turn), 0)) for turn in range(turns)] for row in rows])


def check_channels(case: Case) -> None:
    inputs, params, expected = case["inputs"], case["params"], case["expected"]
    turn_ids = torch.full(inputs["mask"].shape, -1)
    for row, spans in enumerate(inputs["action_spans"].int().tolist()):
        for start, end, turn in spans:
            turn_ids[row, start:end] = turn
    turns = int(turn_ids.max()) + 1
    assert torch.equal(turn_ids >= 0, inputs["mask"] != 0)
    advantages = two_channel_advantages(
        inputs["outcome"],
        counts_by_turn(inputs["turn_violation_counts"], turns),
        counts_by_turn(inputs["turn_discharge_counts"], turns),
        turn_ids,
        len(turn_ids),
        variant=params["credit"],
        penalty=params["lam"],
        credit=params["beta"],
        count_clip=params["c1_clip"],
    )
    assert_close(advantages, expected["token_adv"], "advantages")
    objective = GRPO(clip_low=params["clip_eps"], clip_high=params["clip_eps"])
    batch = common_batch(inputs, advantages)
    check_loss(inputs["logp"], batch, objective, "token_sum", None, expected["loss"], expected["grad_logp"])


def check_scores(case: Case) -> None:
    outcomes, path_scores = case["inputs"]["outcome"], case["inputs"]["path"]
    size, beta, eps = len(outcomes), case["params"]["beta"], case["params"]["eps"]
    for name, ddof in (("population", 0), ("sample", 1)):
        expected = {field: as_tensor(value) for field, value in case["expected"][name].items()}
        standardised = [group_advantages(scores, size, ddof=ddof, eps=eps) for scores in (outcomes, path_scores)]
        assert_close(standardised[0], expected["O_tilde"], f"{name} outcomes")
        assert_close(standardised[1], expected["Phi_tilde"], f"{name} path scores")
        advantages = two_channel_zscore(outcomes, path_scores, size, beta=beta, ddof=ddof, eps=eps)
        assert_close(advantages, expected["A"], f"{name} advantages")
        if "var_O" in expected:
            parts = group_variance_decomposition(outcomes, path_scores, size, beta=beta)
            fields = {"outcome": "var_O", "path": "var_Phi", "covariance": "cov", "reward": "var_R_raw"}
            for field, key in fields.items():
                assert_close(getattr(parts, field), expected[key].expand(size), field)
            assert_close(parts.reward, expected["identity_rhs"].expand(size), "identity")


SYSTEMS = {"rlvp": check_rlvp}
