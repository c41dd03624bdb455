"""SKILL0 and AgentOCR: a reward for compressed histories, and which skills a curriculum still shows."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence

import torch
from torch import Tensor

from rlkernels import checks
from rlkernels.dtypes import result_dtype, wide


def compression_reward(
    success: Tensor,
    compression: Tensor,
    *,
    coef: float = 0.01,
    convention: str = "factor",
    largest_factor: float = 5.0,
) -> Tensor:
    """Bonus of a step whose response succeeded with a compressed history, to be added to its reward.

        coef ln c on success, else 0

        convention="factor"      c = original / compressed size, in [1, largest_factor]: compression is rewarded
        convention="fraction"    c = compressed / original size, in [1 / largest_factor, 1]: compression is punished

    "fraction" is the papers' formula as printed, against their text; "factor" is what their code does. Values outside
    are clamped; one that is not finite (the response named none that could be read) counts as 1.

    Args:
        success: any shape and dtype, > 0 = succeeded. SkillZero gives the bonus at every eighth step only: pass
            `success & applied`.
        compression: success's shape, float or integer.
        coef: >= 0.
        convention: `"factor"` or `"fraction"`.
        largest_factor: >= 1.

    Returns:
        success's shape, float32 (float64 for float64 compression).

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it.

    Source: AgentOCR (2601.04786); SKILL0 (2604.02268), `episode_with_compression.py` of ZJU-REAL/SkillZero.

    Example:
        >>> import torch
        >>> from rlkernels.credit import compression_reward
        >>> compression_reward(torch.tensor([True, True, False]), torch.tensor([1.0, 2.5, 2.5])).tolist()
        [0.0, 0.009162907488644123, 0.0]
    """
    checks.require_tensor("compression", compression)
    checks.require_like("compression", compression, success=success)
    checks.require_number("coef", coef, at_least=0.0)
    checks.require_choice("convention", convention, ("factor", "fraction"))
    checks.require_number("largest_factor", largest_factor, at_least=1.0)
    values = wide(compression.detach())
    low, high = (1.0, largest_factor) if convention == "factor" else (1 / largest_factor, 1.0)
    values = torch.where(values.isfinite(), values, 1.0).clamp(low, high)
    return torch.where(success > 0, coef * values.log(), 0).to(result_dtype(compression))


def skill_budget(skills: int, stages: int) -> list[int]:
    """How many skills each stage of the curriculum shows, from all to none.

        M_s = floor(skills (stages - s) / (stages - 1)),  s = 1 ... stages

    Args:
        skills: >= 0.
        stages: >= 2: one stage cannot go from all to none.

    Returns:
        `stages` numbers.

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it.

    Source: SKILL0 (2604.02268). Its scripts write lists out; for five skills theirs is [5, 3, 0].

    Example:
        >>> from rlkernels.credit import skill_budget
        >>> skill_budget(6, 3), skill_budget(5, 3)
        ([6, 3, 0], [5, 2, 0])
    """
    _require_count("skills", skills, at_least=0)
    _require_count("stages", stages, at_least=2)
    return [skills * (stages - stage) // (stages - 1) for stage in range(1, stages + 1)]


def budget_at_step(budgets: Sequence[int], step: int, total_steps: int) -> int:
    """The budget of the stage that a training step lies in; stages are equally long.

        budgets[floor((step - 1) stages / total_steps)]

    Args:
        budgets: one a stage, such as `skill_budget` gives.
        step: 1 to `total_steps`.
        total_steps: >= 1.

    Returns:
        One of `budgets`.

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it.

    Source: SKILL0 (2604.02268), `curriculum_skill_manager.py` of ZJU-REAL/SkillZero.

    Example:
        >>> from rlkernels.credit import budget_at_step
        >>> [budget_at_step([6, 3, 0], step, 180) for step in (1, 60, 61, 180)]
        [6, 6, 3, 0]
    """
    if not isinstance(budgets, Sequence) or not len(budgets):
        raise ValueError(f"budgets: expected a sequence of at least one stage, got {budgets!r}")
    _require_count("total_steps", total_steps, at_least=1)
    _require_count("step", step, at_least=1, at_most=total_steps)
    return budgets[(step - 1) * len(budgets) // total_steps]


def select_skills(
    acc_with: Sequence[float] | Tensor,
    acc_without: Sequence[float] | Tensor,
    budget: int,
    *,
    filter: bool = True,
    rank: bool = True,
    keep_neutral: bool = False,
) -> list[int]:
    """The skills that help most, by what accuracy loses without them.

        delta_k = acc_with_k - acc_without_k;   keep delta_k > 0, sort by delta_k, take the first `budget`

    Equal skills keep their order. A skill whose delta is NaN (not evaluated) does not pass the filter and ranks last.

    Args:
        acc_with, acc_without: K numbers each, accuracies, on the host; a tensor is read there.
        budget: >= 0. SkillZero always shows its general skills and counts them as one: pass one less.
        filter: False keeps skills whatever their delta.
        rank: False takes them in the given order.
        keep_neutral: let delta = 0 pass the filter: the authors' code does, the paper does not.

    Returns:
        Indices of the selected skills, at most `budget`.

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it.

    Source: SKILL0 (2604.02268); `curriculum_skill_manager.py` of ZJU-REAL/SkillZero.

    Example:
        >>> from rlkernels.credit import select_skills
        >>> select_skills([0.6, 0.5, 0.9], [0.5, 0.5, 0.6], budget=2)
        [2, 0]
    """
    acc_with, acc_without = _numbers("acc_with", acc_with), _numbers("acc_without", acc_without)
    if len(acc_with) != len(acc_without):
        raise ValueError(f"acc_without: expected {len(acc_with)} accuracies like acc_with, got {len(acc_without)}")
    _require_count("budget", budget, at_least=0)
    deltas = [with_skill - without for with_skill, without in zip(acc_with, acc_without, strict=True)]
    kept = [k for k, delta in enumerate(deltas) if not filter or delta > 0 or (keep_neutral and delta == 0)]
    if rank:
        kept.sort(key=lambda k: math.inf if math.isnan(deltas[k]) else -deltas[k])
    return kept[:budget]


def _numbers(name: str, values: Sequence[float] | Tensor) -> list[float]:
    listed = values.tolist() if isinstance(values, Tensor) else values
    if not isinstance(listed, Sequence) or not all(isinstance(x, numbers.Real) for x in listed):
        raise TypeError(f"{name}: expected a sequence of numbers, got {checks.describe(values)}")
    return [float(x) for x in listed]


def _require_count(name: str, value: int, *, at_least: int, at_most: float = math.inf) -> None:
    checks.require_number(name, value, at_least=at_least, at_most=at_most)
    if not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}: expected an int, got {checks.describe(value)}")
