"""PRIME: process rewards that a reward model trained on outcomes gives for nothing."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlkernels import checks
from rlkernels.credit import whitening
from rlkernels.credit.groups import Groups
from rlkernels.credit.suffix_scan import suffix_scan
from rlkernels.dtypes import result_dtype, wide


def implicit_process_rewards(
    logp: Tensor, ref_logp: Tensor, mask: Tensor, *, beta: float = 0.05, batch_norm: bool = False
) -> Tensor:
    """Each token's reward under a reward model that is a language model.

        r_t = beta (logp_t - ref_logp_t)
        r_t / (max |sum_{s >= t} r_s| + 1e-6)           batch_norm: the largest over the batch

    Masked entries give 0 and are not read. No gradient: a reward is not trained through.

    Args:
        logp: `[B, T]` float, nats: the reward model's log-probabilities of the response's tokens.
        ref_logp: `[B, T]` float: its reference model's.
        mask: `[B, T]`, any dtype, nonzero = token of the response.
        beta: > 0. The paper's is 0.05; the authors' code has no beta here (1.0).
        batch_norm: the authors' code divides by the largest finite return in the batch, the paper does not.

    Returns:
        `[B, T]`, float32 (float64 for float64 input).

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it.

    Source: PRIME (2502.01456); `dp_prime.py` of PRIME-RL/PRIME.

    Example:
        >>> import torch
        >>> from rlkernels.credit import implicit_process_rewards
        >>> logp, ref_logp = torch.tensor([[-1.0, -0.5, 9.0]]), torch.tensor([[-3.0, -0.5, 9.0]])
        >>> implicit_process_rewards(logp, ref_logp, torch.tensor([[1, 1, 0]]), beta=0.5).tolist()
        [[1.0, 0.0, 0.0]]
    """
    checks.require_reals("logp", logp, "B", "T")
    checks.require_like("logp", logp, ref_logp=ref_logp, mask=mask)
    checks.require_number("beta", beta, above=0.0)
    mask = mask != 0
    rewards = torch.where(mask, beta * (wide(logp.detach()) - wide(ref_logp.detach())), 0)
    if batch_norm and rewards.numel():
        returns = suffix_scan(rewards, torch.ones_like(rewards)).abs()
        rewards = rewards / (torch.where(returns.isfinite(), returns, 0).max() + 1e-6)
    return rewards.to(result_dtype(logp, ref_logp))


def prime_advantages(
    process_rewards: Tensor,
    outcome_rewards: Tensor,
    mask: Tensor,
    groups: int | Tensor,
    *,
    baseline: str = "paper",
    gamma_process: float = 1.0,
    gamma_outcome: float = 1.0,
    whiten: bool = False,
) -> Tensor:
    """Returns of process and outcome rewards, each less what the group's other responses got.

        A_t = sum_{s >= t} gamma_p^{s - t} x_s + gamma_o^{last - t} (o_i - mean_{j != i} o_j)
        x_s = r_s - mean_{j != i} m_j                                       baseline="paper"
        x_s = r_s K / (K - 1) - sum_j m_j / (K - 1)                         baseline="code"

    with m_j the mean process reward of response j's tokens, `last` a response's last token, K the group's responses.
    Steps count trained tokens; masked ones are passed over. Where there is no other response both terms are 0, and an
    empty response takes part in the outcome's baseline alone. A response whose outcome or process rewards are not
    all finite is nobody's baseline and gets 0.

    Args:
        process_rewards: `[B, T]`, float or integer, see `implicit_process_rewards`.
        outcome_rewards: `[B]`, float or integer.
        mask: `[B, T]`, any dtype, nonzero = trained.
        groups: group size (consecutive rows), or `[B]` integer ids.
        baseline: `"paper"` or `"code"`: that of the authors' code adds (r_s - m_i) / (K - 1).
        gamma_process, gamma_outcome: discounts, in [0, 1].
        whiten: `credit.whiten` over the batch's trained tokens: the authors' code does, the paper does not.

    Returns:
        `[B, T]`, float32 (float64 for float64 rewards), 0 where masked.

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it.

    Source: PRIME (2502.01456); `compute_rloo_returns` of PRIME-RL/PRIME.

    Example:
        >>> import torch
        >>> from rlkernels.credit import prime_advantages
        >>> process, mask = torch.tensor([[0.5, 0.5], [0.25, 0.0]]), torch.tensor([[1, 1], [1, 0]])
        >>> prime_advantages(process, torch.tensor([1.0, 0.0]), mask, groups=2).tolist()
        [[1.5, 1.25], [-1.25, 0.0]]
    """
    checks.require_reals("process_rewards", process_rewards, "B", "T")
    checks.require_reals("outcome_rewards", outcome_rewards, "B")
    checks.require_shape("outcome_rewards", outcome_rewards, process_rewards.shape[:1])
    checks.require_same_device("process_rewards", process_rewards, outcome_rewards=outcome_rewards)
    checks.require_like("process_rewards", process_rewards, mask=mask)
    checks.require_choice("baseline", baseline, ("paper", "code"))
    checks.require_number("gamma_process", gamma_process, at_least=0.0, at_most=1.0)
    checks.require_number("gamma_outcome", gamma_outcome, at_least=0.0, at_most=1.0)
    process, outcomes = wide(process_rewards.detach()), wide(outcome_rewards.detach())
    group = Groups(groups, outcomes.shape[0], outcomes.device)
    mask = mask != 0
    accepted = outcomes.isfinite() & (process.isfinite() | ~mask).all(-1)  # [B]
    mask = mask & accepted[:, None]
    process = torch.where(mask, process, 0)
    lengths = mask.sum(-1)
    means = process.sum(-1) / lengths.clamp(min=1)
    mean_advantages, responses = group.leave_one_out(means, lengths > 0)
    scale = 1.0 if baseline == "paper" else (responses / (responses - 1).clamp(min=1))[:, None]
    steps = scale * (process - means[:, None]) + mean_advantages[:, None]
    steps = torch.where(mask & (responses > 1)[:, None], steps, 0)
    decay = torch.ones_like(steps).masked_fill(mask, gamma_process)
    outcome_advantages, _ = group.leave_one_out(outcomes, accepted)
    following = mask.sum(-1, keepdim=True) - mask.cumsum(-1)  # trained tokens after each
    returns = suffix_scan(steps, decay) + outcome_advantages[:, None] * gamma_outcome ** following.to(steps.dtype)
    advantages = torch.where(mask, returns, 0)
    if whiten:
        advantages = whitening.whiten(advantages, mask)
    return advantages.to(result_dtype(process_rewards, outcome_rewards))


def implicit_prm_loss(logp: Tensor, ref_logp: Tensor, mask: Tensor, outcomes: Tensor, *, beta: float = 0.05) -> Tensor:
    """Cross-entropy that trains the implicit reward model on outcomes alone.

        mean over responses of BCE(sigmoid(beta sum_t (logp_t - ref_logp_t)), outcome)

    Gradient to `logp` alone: beta (sigmoid - outcome) / B at each token. An empty response gives ln 2 and no
    gradient; one whose outcome is not finite is left out.

    Args:
        logp: `[B, T]` float, nats: the reward model's log-probabilities of the response's tokens.
        ref_logp: `[B, T]` float: its reference model's.
        mask: `[B, T]`, any dtype, nonzero = token of the response.
        outcomes: `[B]`, float or integer, in [0, 1], fractions allowed.
        beta: > 0.

    Returns:
        0-d, float32 (float64 for float64 log-probabilities); 0 for no response.

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it. Outcomes on a GPU are checked only under
            `set_checks(True)`.

    Source: PRIME (2502.01456); `compute_ce_dpo_loss_rm` of PRIME-RL/PRIME.

    Example:
        >>> import torch
        >>> from rlkernels.credit import implicit_prm_loss
        >>> logp = torch.zeros(2, 3, requires_grad=True)
        >>> loss = implicit_prm_loss(logp, torch.zeros(2, 3), torch.ones(2, 3), torch.tensor([1.0, 0.0]))
        >>> loss.backward()
        >>> logp.grad[:, 0].tolist()
        [-0.012500000186264515, 0.012500000186264515]
    """
    checks.require_reals("logp", logp, "B", "T")
    checks.require_like("logp", logp, ref_logp=ref_logp, mask=mask)
    checks.require_reals("outcomes", outcomes, "B")
    checks.require_shape("outcomes", outcomes, logp.shape[:1])
    checks.require_same_device("logp", logp, outcomes=outcomes)
    checks.require_number("beta", beta, above=0.0)
    labels = wide(outcomes.detach())
    labelled = labels.isfinite()
    checks.check_values("outcomes", outcomes, ~labelled | ((labels >= 0) & (labels <= 1)), "numbers in [0, 1]")
    used = (mask != 0) & labelled[:, None]
    # selected before the difference: a gradient must not meet what a masked entry holds
    log_ratio = torch.where(used, wide(logp), 0) - torch.where(used, wide(ref_logp.detach()), 0)
    score = beta * log_ratio.sum(-1)
    # a token of probability 0 costs nothing where the outcome is 0
    losses = -sum(
        torch.where(label > 0, label * logsigmoid(x), 0) for label, x in ((labels, score), (1 - labels, -score))
    )
    loss = torch.where(labelled, losses, 0).sum() / labelled.sum().clamp(min=1)
    return loss.to(result_dtype(logp))


def accuracy_filter(accuracies: Tensor, groups: int | Tensor, *, low: float = 0.2, high: float = 0.8) -> Tensor:
    """Online prompt filter: which responses belong to a prompt that is neither too hard nor too easy.

        keep_i = (low <= mean accuracy of i's group <= high)

    Accuracies that are not finite (rejected responses) take no part and are not kept.

    Args:
        accuracies: `[B]`, float or integer, usually 0 or 1.
        groups: group size (consecutive rows), or `[B]` integer ids.
        low, high: inclusive bounds.

    Returns:
        `[B]` bool.

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it.

    Source: PRIME (2502.01456); `filter` in `ray_trainer.py` of PRIME-RL/PRIME.

    Example:
        >>> import torch
        >>> from rlkernels.credit import accuracy_filter
        >>> accuracy_filter(torch.tensor([1.0, 1.0, 1.0, 0.0]), groups=2).tolist()
        [False, False, True, True]
    """
    checks.require_reals("accuracies", accuracies, "B")
    checks.require_number("low", low)
    checks.require_number("high", high, at_least=low)
    values = wide(accuracies.detach())
    group = Groups(groups, values.shape[0], values.device)
    valid = values.isfinite()
    count = group.sum(valid.to(values.dtype))
    mean = group.sum(torch.where(valid, values, 0)) / count
    # a bound is rounded as the accuracies are, so that it is inclusive
    mean, bounds = mean.to(result_dtype(accuracies)), mean.new_tensor([low, high]).to(result_dtype(accuracies))
    return valid & (mean >= bounds[0]) & (mean <= bounds[1])
