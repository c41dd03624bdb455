"""VeriFree and RLPR: rewards from the likelihood of a reference answer, without a verifier."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernels import checks
from rlkernels.credit.advantages import leave_one_out_advantages
from rlkernels.dtypes import result_dtype, wide


def reference_probability_reward(answer_logp: Tensor, answer_mask: Tensor, *, kind: str = "mean") -> Tensor:
    """How probable the reference answer is after a response's reasoning.

        mean_t exp(l_t)             kind="mean" (RLPR)
        exp(mean_t l_t)             kind="geometric_mean"
        exp(sum_t l_t)              kind="product" (VeriFree)

    over the answer's tokens. Logs are added up first and exponentiated last. No answer gives 0, and so does a
    product with a token of log-probability -inf. Carries no gradient.

    Args:
        answer_logp: `[B, T]` float: log-probability of each token of the reference answer.
        answer_mask: `[B, T]`, nonzero = a token of the answer. Elsewhere nothing is read.
        kind: as above.

    Returns:
        `[B]`, float32 (float64 for float64 log-probabilities), in [0, 1].

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it.

    Source: RLPR (2506.18254); its code also rounds to bfloat16, which is left out. VeriFree (2505.21493).

    Example:
        >>> import torch
        >>> from rlkernels.credit import reference_probability_reward
        >>> logp = torch.tensor([[0.01, 0.7, 0.9], [0.05, 0.7, 0.9]]).log()
        >>> [round(r, 4) for r in reference_probability_reward(logp, torch.ones(2, 3)).tolist()]
        [0.5367, 0.55]
    """
    checks.require_floats("answer_logp", answer_logp, "B", "T")
    checks.require_tensor("answer_mask", answer_mask)
    checks.require_shape("answer_mask", answer_mask, tuple(answer_logp.shape))
    checks.require_same_device("answer_logp", answer_logp, answer_mask=answer_mask)
    checks.require_choice("kind", kind, ("mean", "geometric_mean", "product"))
    used, logp = answer_mask != 0, wide(answer_logp.detach())
    count = used.sum(-1)
    if kind == "mean":
        rewards = torch.where(used, logp.exp(), 0).sum(-1) / count.clamp(min=1)
    else:
        total = torch.where(used, logp, 0).sum(-1)
        rewards = (total if kind == "product" else total / count.clamp(min=1)).exp()
    return torch.where(count > 0, rewards, 0).to(result_dtype(answer_logp))


def verifree_advantages(
    logp: Tensor,
    think_mask: Tensor,
    answer_mask: Tensor,
    groups: int | Tensor,
    *,
    answer_coefficient: str = "reward",
) -> Tensor:
    """VeriFree's coefficients of each token, for the recipe `"verifree"`.

        R_i = exp(sum_answer l)     A_i = R_i - mean of the group's other R
        A_i on the reasoning, R_i on the reference answer (or A_i there too), 0 elsewhere

    With them the recipe's loss, -sum_t coefficient_t l_t averaged over rows, has the gradient of the expected
    likelihood of the reference answer: R_i grad l is the gradient of R_i itself. Coefficients carry no gradient.
    A row without an answer has R = 0. A group of one, and a row whose R is NaN, get A = 0.

    Args:
        logp: `[B, T]` float: log-probabilities of the sampled reasoning followed by the reference answer.
        think_mask: `[B, T]`, nonzero = a token of the reasoning.
        answer_mask: `[B, T]`, nonzero = a token of the reference answer; overlaps the other mask nowhere.
        groups: group size (consecutive rows), or `[B]` integer ids.
        answer_coefficient: `"reward"` (the paper and the authors' script) or `"advantage"` (the default of the authors'
            dataclass).

    Returns:
        `[B, T]`, float32 (float64 for float64 log-probabilities).

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it. Masks on a GPU are checked only under
            `set_checks(True)`.

    Source: VeriFree (2505.21493) and sail-sg/VeriFree.

    Example:
        >>> import torch
        >>> from rlkernels.credit import verifree_advantages
        >>> logp = torch.tensor([[-1.0, 0.5], [-1.0, 0.25]]).abs().log()
        >>> think, answer = torch.tensor([[1, 0], [1, 0]]), torch.tensor([[0, 1], [0, 1]])
        >>> verifree_advantages(logp, think, answer, groups=2).tolist()
        [[0.25, 0.5], [-0.25, 0.25]]
    """
    checks.require_floats("logp", logp, "B", "T")
    for name, mask in (("think_mask", think_mask), ("answer_mask", answer_mask)):
        checks.require_tensor(name, mask)
        checks.require_shape(name, mask, tuple(logp.shape))
        checks.require_same_device("logp", logp, **{name: mask})
    checks.require_choice("answer_coefficient", answer_coefficient, ("reward", "advantage"))
    thinks, answers = think_mask != 0, answer_mask != 0
    if checks.values_are_checked(logp.device) and bool((thinks & answers).any()):
        row = int((thinks & answers).any(-1).nonzero()[0])
        raise ValueError(f"answer_mask: expected no token that think_mask has too, got one in row {row}")
    rewards = reference_probability_reward(wide(logp.detach()), answers, kind="product")
    advantages = leave_one_out_advantages(rewards, groups)
    rewards = torch.where(rewards.isfinite(), rewards, 0)
    of_answer = rewards if answer_coefficient == "reward" else advantages
    coefficients = torch.where(answers, of_answer[:, None], torch.where(thinks, advantages[:, None], 0))
    return coefficients.to(result_dtype(logp))
