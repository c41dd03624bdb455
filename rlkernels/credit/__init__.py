"""From rewards to advantages and weights: `[B]`- and `[B, T]`-sized credit assignment."""

from rlkernels.credit.advantages import group_advantages, mixed_groups, overlong_penalty
from rlkernels.credit.constraints import all_or_nothing, constraint_satisfaction_rate
from rlkernels.credit.contrast import contrast_by_span, counterfactual_contrast, linear_counterfactual_contrast
from rlkernels.credit.prefix_sets import prefix_set_counts
from rlkernels.credit.replay import replay_weights, smoothstep_ramp

__all__ = [
    "all_or_nothing",
    "constraint_satisfaction_rate",
    "contrast_by_span",
    "counterfactual_contrast",
    "group_advantages",
    "linear_counterfactual_contrast",
    "mixed_groups",
    "overlong_penalty",
    "prefix_set_counts",
    "replay_weights",
    "smoothstep_ramp",
]
