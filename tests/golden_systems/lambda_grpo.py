"""lambda-GRPO: prefix-set counts, its loss under both normalisers, and the paper's binary tree."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rlkernels
from golden_systems.common import Case, assert_close, check_loss, common_batch
from rlkernels import GRPO, PolicyBatch
from rlkernels.credit import group_advantages, prefix_set_counts

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import lambda_grpo_tree


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


def check_lambda_grpo(case: Case) -> None:
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


def check_tree_step(case: Case) -> None:
    inputs, expected = case["inputs"], case["expected"]
    paths = inputs["sampled_paths"].long()
    counts = check_prefix_counts(paths, expected["prefix_count"])
    advantages = group_advantages(inputs["rewards"], len(paths), eps=case["params"]["eps"])
    assert_close(advantages, expected["adv"], "advantages")
    for name, recipe, weight in (("grpo", "dapo", None), ("lambda", "lambda_grpo", 1 / counts.double())):
        theta = torch.zeros(1, 2 ** (paths.shape[-1]), dtype=torch.float64, requires_grad=True)
        logp = lambda_grpo_tree.path_logp(theta, paths[None])[0]
        batch = PolicyBatch(None, advantages, weight=weight)
        rlkernels.logp_policy_loss(logp, batch, recipe).loss.backward()
        assert_close(theta.grad[0], expected[f"dLoss_dtheta_{name}"], name)


def check_tree_simulation(case: Case) -> None:
    """Direction only, as the case says: under SGD with n = 1, lambda-GRPO finds the target and GRPO does not."""
    inputs = case["inputs"]
    assert tuple(inputs["target"].int().tolist()) == lambda_grpo_tree.TARGET
    settings: dict[tuple[int, int], list[lambda_grpo_tree.Setting]] = {}
    for key in case["expected"]:
        if key.startswith("sgd") and "_n1_" in key:
            options = dict(re.findall(r"(lr|steps|G|n|rneg)(-?[\d.]+)", key))
            setting = lambda_grpo_tree.Setting(int(options["n"]), float(options["rneg"]), float(options["lr"]))
            settings.setdefault((int(options["G"]), int(options["steps"])), []).append(setting)
    for (size, steps), together in settings.items():
        sizes = {"seeds": 24, "group_size": size, "steps": steps}
        frequency = {}
        for recipe in ("dapo", "lambda_grpo"):
            found = lambda_grpo_tree.simulate(recipe, together, **sizes, generator=torch.Generator().manual_seed(0))
            frequency[recipe] = found[-50:].mean(dim=(0, 2))
        assert (frequency["lambda_grpo"] > 2 * frequency["dapo"]).all(), (size, together, frequency)


SYSTEMS = {"lambda_grpo": check_lambda_grpo}
