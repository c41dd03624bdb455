"""RLVP: an outcome's channel and, beside it, one for verifiable right and wrong moves on the way."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlkernels import checks
from rlkernels.credit.advantages import group_advantages
from rlkernels.credit.groups import Groups
from rlkernels.dtypes import result_dtype, wide

_VARIANTS = ("outcome", "c1", "c2", "c3", "c4")


def two_channel_advantages(
    outcomes: Tensor,
    violations: Tensor,
    fulfilments: Tensor,
    turn_ids: Tensor,
    groups: int | Tensor,
    *,
    variant: str = "c2",
    penalty: float = 0.5,
    credit: float = 0.5,
    count_clip: float = 2.0,
) -> Tensor:
    """Per-token advantages of two channels, each divided by its own number of tokens.

        A_t    = (R_i - mean_g R) / n_outcome + a_turn(t) / n_path
        a_turn = -penalty violations + credit fulfilments           neither centred nor scaled

        outcome   R = outcome, no path channel
        c1        R = outcome - penalty min(sum violations, count_clip) + credit min(sum fulfilments, count_clip),
                  no path channel
        c2        R = outcome                    with the path channel
        c3        R of c1                        with the path channel
        c4        R = outcome                    with the path channel, fulfilments only where outcome > 0

    n_outcome counts the batch's action tokens, n_path those whose a_turn is not 0. The denominators are folded in:
    reduce with `token_sum`, and call this on the whole batch before it is split into micro-batches. A response whose
    outcome is not finite gets 0 and counts nowhere. A group of one has no outcome channel, but its path trains.

    Args:
        outcomes: `[B]`, float or integer.
        violations: `[B, S]`, float or integer: how many rules each turn broke.
        fulfilments: `[B, S]`, float or integer: how many pending obligations each turn met.
        turn_ids: `[B, T]` integers in `[0, S)`: the turn whose action a token belongs to; negative for every other
            token (prompt, tool output, padding). `turn_ids >= 0` is the loss mask.
        groups: group size (consecutive rows), or `[B]` integer ids.
        variant: see above; c2 is the authors' default, c3 the variant that they report first.
        penalty, credit: >= 0, the paper's lambda and beta. Both 0 leave GRPO's outcome channel (`path_annealing`).
        count_clip: >= 0.

    Returns:
        `[B, T]`, float32 (float64 for float64 outcomes), 0 outside actions.

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it. Turns past S on a GPU give NaN, and raise
            only under `set_checks(True)`.

    Source: RLVP, `build_advantages` and `update_policy` of 19PINE-AI/rlvp.

    Example:
        >>> import torch
        >>> from rlkernels.credit import two_channel_advantages
        >>> turn_ids = torch.tensor([[0, 0, -1, 1], [0, -1, -1, -1]])
        >>> violations, fulfilments = torch.tensor([[0, 1], [0, 0]]), torch.tensor([[0, 0], [1, 0]])
        >>> two_channel_advantages(torch.tensor([1.0, 0.0]), violations, fulfilments, turn_ids, groups=2).tolist()
        [[0.125, 0.125, 0.0, -0.125], [0.125, 0.0, 0.0, 0.0]]
    """
    checks.require_reals("outcomes", outcomes, "B")
    checks.require_reals("violations", violations, "B", "S")
    checks.require_like("violations", violations, fulfilments=fulfilments)
    checks.require_reals("turn_ids", turn_ids, "B", "T")
    checks.require_dtype("turn_ids", turn_ids, checks.INTEGER_DTYPES)
    rows, turns = violations.shape
    checks.require_shape("outcomes", outcomes, (rows,))
    checks.require_shape("turn_ids", turn_ids, (rows, turn_ids.shape[1]))
    checks.require_same_device("outcomes", outcomes, violations=violations, turn_ids=turn_ids)
    checks.require_choice("variant", variant, _VARIANTS)
    for name, value in (("penalty", penalty), ("credit", credit), ("count_clip", count_clip)):
        checks.require_number(name, value, at_least=0.0)
    checks.check_values("turn_ids", turn_ids, turn_ids < turns, "turns below {}", turns)

    rewards = wide(outcomes.detach())
    violations, fulfilments = wide(violations.detach()), wide(fulfilments.detach())
    if variant in ("c1", "c3"):
        broken, met = (counts.sum(-1).clamp(max=count_clip) for counts in (violations, fulfilments))
        rewards = rewards - penalty * broken + credit * met
    elif variant == "c4":
        fulfilments = torch.where((rewards > 0)[:, None], fulfilments, 0)
    accepted = rewards.isfinite()
    is_action = (turn_ids >= 0) & accepted[:, None]
    centred, _ = Groups(groups, rows, rewards.device).centre(rewards, accepted)
    advantages = torch.where(is_action, centred[:, None] / is_action.sum().clamp(min=1), 0)
    if variant in ("c2", "c3", "c4"):
        # a turn that does not exist finds a NaN behind the last one
        of_turns = torch.nn.functional.pad(credit * fulfilments - penalty * violations, (0, 1), value=torch.nan)
        of_tokens = of_turns.gather(1, turn_ids.to(torch.int64).clamp(0, turns))
        path = torch.where(is_action, of_tokens, 0)
        advantages = advantages + path / (path != 0).sum().clamp(min=1)
    return advantages.to(result_dtype(outcomes))


def two_channel_zscore(
    outcomes: Tensor, path_scores: Tensor, groups: int | Tensor, *, beta: float, ddof: int = 1, eps: float = 1e-4
) -> Tensor:
    """One advantage a response: both channels standardised in the group, added, and standardised again.

        A = z(z(O) + beta z(Phi))           z(x) = (x - mean_g) / (std_g + eps)

    In a group whose outcomes are equal, beta cancels but for eps: there, lowering it changes nothing until it is 0.
    A response with an outcome or score that is not finite is left out of its group and gets 0.

    Args:
        outcomes: `[B]`, float or integer: O.
        path_scores: `[B]`, float or integer: Phi, credits less penalties along the response.
        groups: group size (consecutive rows), or `[B]` integer ids.
        beta: >= 0.
        ddof, eps: see `group_advantages`.

    Returns:
        `[B]`, float32 (float64 for float64 input).

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it.

    Source: RLVP's separate normalisation read as one of scores; the authors' code is `two_channel_advantages`.

    Example:
        >>> import torch
        >>> from rlkernels.credit import two_channel_zscore
        >>> outcomes, path_scores = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 1.0, -1.0])
        >>> two_channel_zscore(outcomes, path_scores, groups=2, beta=0.5, eps=0.0).tolist()
        [0.7071067690849304, -0.7071067690849304, 0.7071067690849304, -0.7071067690849304]
    """
    checks.require_number("beta", beta, at_least=0.0)
    wide_outcomes, wide_scores, accepted = _channels(outcomes, path_scores)

    def standardised(scores: Tensor) -> Tensor:
        return group_advantages(torch.where(accepted, scores, torch.nan), groups, ddof=ddof, eps=eps)

    advantages = standardised(standardised(wide_outcomes) + beta * standardised(wide_scores))
    return advantages.to(result_dtype(outcomes, path_scores))


class VarianceDecomposition(NamedTuple):
    """Population variances of each row's group, `[B]`, and whether the path channel can train it at all."""

    reward: Tensor  # Var(O + beta Phi)
    outcome: Tensor  # Var(O)
    path: Tensor  # Var(Phi)
    covariance: Tensor  # Cov(O, Phi)
    is_reachable: Tensor  # bool: Var(Phi) > 0


def group_variance_decomposition(
    outcomes: Tensor, path_scores: Tensor, groups: int | Tensor, *, beta: float
) -> VarianceDecomposition:
    """Where a group's variance, and with it its gradient, comes from.

        Var(O + beta Phi) = Var(O) + beta^2 Var(Phi) + 2 beta Cov(O, Phi)

    In a group that fails or succeeds throughout, Var(O) is 0 and the path channel alone can train; it can only where
    the policy reaches states that differ: Var(Phi) > 0 (`is_reachable`). Variances of equal values are exactly 0. A
    response with an outcome or score that is not finite is left out.

    Args:
        outcomes: `[B]`, float or integer: O.
        path_scores: `[B]`, float or integer: Phi.
        groups: group size (consecutive rows), or `[B]` integer ids.
        beta: >= 0.

    Returns:
        `VarianceDecomposition(reward, outcome, path, covariance, is_reachable)`, each `[B]`: the row's group's;
        float32 (float64 for float64 input) and bool.

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it.

    Source: RLVP (19PINE-AI/rlvp), equation 1.

    Example:
        >>> import torch
        >>> from rlkernels.credit import group_variance_decomposition
        >>> outcomes, path_scores = torch.tensor([0.0, 0.0, 1.0, 0.0]), torch.tensor([-1.0, 1.0, 0.0, 0.0])
        >>> parts = group_variance_decomposition(outcomes, path_scores, groups=2, beta=0.5)
        >>> parts.reward.tolist(), parts.is_reachable.tolist()
        ([0.25, 0.25, 0.25, 0.25], [True, True, False, False])
    """
    checks.require_number("beta", beta, at_least=0.0)
    wide_outcomes, wide_scores, accepted = _channels(outcomes, path_scores)
    group = Groups(groups, outcomes.shape[0], outcomes.device)
    outcome, count = group.centre(wide_outcomes, accepted)
    path, _ = group.centre(wide_scores, accepted)
    reward = outcome + beta * path
    dtype = result_dtype(outcomes, path_scores)

    def mean_product(a: Tensor, b: Tensor) -> Tensor:
        return (group.sum(a * b) / count.clamp(min=1)).to(dtype)

    return VarianceDecomposition(
        reward=mean_product(reward, reward),
        outcome=mean_product(outcome, outcome),
        path=mean_product(path, path),
        covariance=mean_product(outcome, path),
        is_reachable=group.sum((path != 0).to(torch.int32)) > 0,
    )


def _channels(outcomes: Tensor, path_scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both in the dtype of statistics, and which responses have both, `[B]` bool."""
    checks.require_reals("outcomes", outcomes, "B")
    checks.require_like("outcomes", outcomes, path_scores=path_scores)
    outcomes, path_scores = wide(outcomes.detach()), wide(path_scores.detach())
    return outcomes, path_scores, outcomes.isfinite() & path_scores.isfinite()


def path_annealing(step: int, start: int, *, length: int = 0) -> float:
    """Factor for the path channel's penalty and credit: 1 through step `start`, then falling to 0.

        min(1, max(0, 1 - (step - start) / length))         length > 0: gradual
        1 if step <= start else 0                           length = 0: at once, as the authors have it

    Args:
        step: current step.
        start: last step with the whole path channel.
        length: >= 0, steps until nothing is left of it.

    Returns:
        A number in [0, 1].

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it.

    Source: RLVP, `anneal_at` of 19PINE-AI/rlvp.

    Example:
        >>> from rlkernels.credit import path_annealing
        >>> [path_annealing(step, 10, length=4) for step in (10, 11, 14)], path_annealing(11, 10)
        ([1.0, 0.75, 0.0], 0.0)
    """
    checks.require_number("step", step)
    checks.require_number("start", start)
    checks.require_number("length", length, at_least=0.0)
    if step <= start:
        return 1.0
    return max(0.0, 1 - (step - start) / length) if length else 0.0
