"""From rewards to advantages and weights: `[B]`- and `[B, T]`-sized credit assignment."""

from rlkernels.credit.advantages import group_advantages, leave_one_out_advantages, mixed_groups, overlong_penalty
from rlkernels.credit.prefix_sets import prefix_set_counts
from rlkernels.credit.prefix_tree import (
    PrefixNode,
    PrefixTreeSummary,
    prefix_tree,
    prefix_tree_summary,
    process_set_rewards,
)
from rlkernels.credit.prime import accuracy_filter, implicit_prm_loss, implicit_process_rewards, prime_advantages
from rlkernels.credit.skills import budget_at_step, compression_reward, select_skills, skill_budget
from rlkernels.credit.two_channel import (
    VarianceDecomposition,
    group_variance_decomposition,
    path_annealing,
    two_channel_advantages,
    two_channel_zscore,
)
from rlkernels.credit.whitening import whiten

__all__ = [
    "PrefixNode",
    "PrefixTreeSummary",
    "VarianceDecomposition",
    "accuracy_filter",
    "budget_at_step",
    "compression_reward",
    "group_advantages",
    "group_variance_decomposition",
    "implicit_prm_loss",
    "implicit_process_rewards",
    "leave_one_out_advantages",
    "mixed_groups",
    "overlong_penalty",
    "path_annealing",
    "prefix_set_counts",
    "prefix_tree",
    "prefix_tree_summary",
    "prime_advantages",
    "process_set_rewards",
    "select_skills",
    "skill_budget",
    "two_channel_advantages",
    "two_channel_zscore",
    "whiten",
]
