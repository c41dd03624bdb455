"""From rewards to advantages and weights: `[B]`- and `[B, T]`-sized credit assignment."""

from rlkernels.credit.advantages import (
    group_advantages,
    group_std,
    leave_one_out_advantages,
    mixed_groups,
    overlong_penalty,
)
from rlkernels.credit.constraints import all_or_nothing, constraint_satisfaction_rate
from rlkernels.credit.contrast import contrast_by_span, counterfactual_contrast, linear_counterfactual_contrast
from rlkernels.credit.contrastive import (
    ContrastiveHead,
    ContrastiveLoss,
    contrastive_loss,
    contrastive_reward,
    pool_hidden,
)
from rlkernels.credit.likelihood import reference_probability_reward, verifree_advantages
from rlkernels.credit.nft import success_rates
from rlkernels.credit.prefix_sets import prefix_set_counts
from rlkernels.credit.prefix_tree import (
    PrefixNode,
    PrefixTreeSummary,
    prefix_tree,
    prefix_tree_summary,
    process_set_rewards,
)
from rlkernels.credit.prime import accuracy_filter, implicit_prm_loss, implicit_process_rewards, prime_advantages
from rlkernels.credit.replay import replay_weights, smoothstep_ramp
from rlkernels.credit.rlpr import StdFilter, debias_reward
from rlkernels.credit.rollout import rollout_weights
from rlkernels.credit.skills import budget_at_step, compression_reward, select_skills, skill_budget
from rlkernels.credit.tool_output import outcome_reward, tool_output_mask
from rlkernels.credit.two_channel import (
    VarianceDecomposition,
    group_variance_decomposition,
    path_annealing,
    two_channel_advantages,
    two_channel_zscore,
)
from rlkernels.credit.value import GeneralizedAdvantages, generalized_advantages, value_loss
from rlkernels.credit.whitening import whiten

__all__ = [
    "ContrastiveHead",
    "ContrastiveLoss",
    "GeneralizedAdvantages",
    "PrefixNode",
    "PrefixTreeSummary",
    "StdFilter",
    "VarianceDecomposition",
    "accuracy_filter",
    "all_or_nothing",
    "budget_at_step",
    "compression_reward",
    "constraint_satisfaction_rate",
    "contrast_by_span",
    "contrastive_loss",
    "contrastive_reward",
    "counterfactual_contrast",
    "debias_reward",
    "generalized_advantages",
    "group_advantages",
    "group_std",
    "group_variance_decomposition",
    "implicit_prm_loss",
    "implicit_process_rewards",
    "leave_one_out_advantages",
    "linear_counterfactual_contrast",
    "mixed_groups",
    "outcome_reward",
    "overlong_penalty",
    "path_annealing",
    "pool_hidden",
    "prefix_set_counts",
    "prefix_tree",
    "prefix_tree_summary",
    "prime_advantages",
    "process_set_rewards",
    "reference_probability_reward",
    "replay_weights",
    "rollout_weights",
    "select_skills",
    "skill_budget",
    "smoothstep_ramp",
    "success_rates",
    "tool_output_mask",
    "two_channel_advantages",
    "two_channel_zscore",
    "value_loss",
    "verifree_advantages",
    "whiten",
]
