"""From rewards to advantages and weights: `[B]`- and `[B, T]`-sized credit assignment."""

from rlkernels.credit.advantages import group_advantages, group_std, mixed_groups, overlong_penalty
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
from rlkernels.credit.rlpr import StdFilter, debias_reward
from rlkernels.credit.rollout import rollout_weights
from rlkernels.credit.tool_output import outcome_reward, tool_output_mask
from rlkernels.credit.value import GeneralizedAdvantages, generalized_advantages, value_loss
from rlkernels.credit.whitening import whiten

__all__ = [
    "ContrastiveHead",
    "ContrastiveLoss",
    "GeneralizedAdvantages",
    "StdFilter",
    "contrastive_loss",
    "contrastive_reward",
    "debias_reward",
    "generalized_advantages",
    "group_advantages",
    "group_std",
    "mixed_groups",
    "outcome_reward",
    "overlong_penalty",
    "pool_hidden",
    "prefix_set_counts",
    "reference_probability_reward",
    "rollout_weights",
    "success_rates",
    "tool_output_mask",
    "value_loss",
    "verifree_advantages",
    "whiten",
]
