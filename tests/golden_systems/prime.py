"""PRIME: implicit process rewards, leave-one-out returns, the reward model's cross-entropy, the prompt filter."""

from __future__ import annotations

import torch

from golden_systems.common import Case, assert_close, check_loss, common_batch, reduction_of
from rlkernels import GRPO
from rlkernels.credit import accuracy_filter, implicit_prm_loss, implicit_process_rewards, prime_advantages


def check_prime(case: Case) -> None:
    inputs = case["inputs"]
    if "q_logratio" not in inputs:
        check_filter(case)
    elif "logp" in inputs:
        check_advantages(case)
    else:
        check_reward_model(case)


def check_filter(case: Case) -> None:
    inputs, params = case["inputs"], case["params"]
    size = int(inputs["group_size"])
    keep = accuracy_filter(inputs["acc"], size, low=params["lower"], high=params["upper"]).view(-1, size)
    expected = torch.as_tensor(case["expected"]["keep"]).bool()
    assert torch.equal(keep, expected[:, None].expand_as(keep))


def check_reward_model(case: Case) -> None:
    inputs, expected = case["inputs"], case["expected"]
    log_ratio = inputs["q_logratio"].requires_grad_()
    reference = torch.zeros_like(log_ratio)
    loss = implicit_prm_loss(log_ratio, reference, inputs["mask"], inputs["acc"], beta=case["params"]["beta"])
    assert_close(loss, expected["loss"], "loss")
    (gradient,) = torch.autograd.grad(loss, log_ratio)
    assert_close(gradient, expected["grad_q"], "gradient")


def check_advantages(case: Case) -> None:
    inputs, params, expected = case["inputs"], case["params"], case["expected"]
    log_ratio, mask = inputs["q_logratio"], inputs["mask"]
    rewards = implicit_process_rewards(
        log_ratio, torch.zeros_like(log_ratio), mask, beta=1.0, batch_norm=params["batch_norm"]
    )
    assert_close(rewards, expected["process_score"], "process rewards")
    size = int(inputs["group_size"])
    discounts = {"gamma_process": params["gamma_process"], "gamma_outcome": params["gamma_outcome"]}
    for baseline, name in (("paper", "returns_paper_formula"), ("code", "returns_code")):
        returns = prime_advantages(rewards, inputs["acc"], mask, size, baseline=baseline, **discounts)
        assert_close(returns, expected[name], name)
    assert params["whiten_eps"] == 1e-8
    advantages = prime_advantages(rewards, inputs["acc"], mask, size, baseline="code", whiten=True, **discounts)
    # the authors' padding holds -mean / std, which their loss masks
    assert_close(advantages, torch.where(mask != 0, expected["adv_whitened"], 0), "whitened")
    objective = GRPO(clip_low=params["eps"], clip_high=params["eps"])
    reduction, normalizer = reduction_of(params["agg"], params, mask)
    batch = common_batch(inputs, advantages)
    check_loss(inputs["logp"], batch, objective, reduction, normalizer, expected["loss"], expected["grad_logp"])


SYSTEMS = {"prime": check_prime}
