"""lambda-GRPO: prefix-set counts, its loss under both normalisers, and the paper's binary tree."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

import rlkernels
from golden_systems.common import Case, assert_close, check_loss, common_batch
from rlkernels import GRPO, PolicyBatch
from rlkernels.credit import group_advantages, prefix_set_counts


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


def path_logp(theta: Tensor, paths: Tensor) -> Tensor:
    """Log-probabilities `[..., depth]` of binary actions: a logit of action 1 at each heap-numbered node."""
    node = torch.ones(paths.shape[:-1], dtype=torch.int64)
    columns = []
    for action in paths.unbind(-1):
        logit = theta.expand(*node.shape[:-1], -1).gather(-1, node)
        columns.append(torch.nn.functional.logsigmoid(torch.where(action == 1, logit, -logit)))
        node = 2 * node + action
    return torch.stack(columns, dim=-1)


def check_tree_step(case: Case) -> None:
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


def check_tree_simulation(case: Case) -> None:
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


SYSTEMS = {"lambda_grpo": check_lambda_grpo}
