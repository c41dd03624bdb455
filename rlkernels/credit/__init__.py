"""From rewards to advantages and weights: `[B]`- and `[B, T]`-sized credit assignment."""

from rlkernels.credit.advantages import group_advantages, mixed_groups, overlong_penalty
from rlkernels.credit.prefix_sets import prefix_set_counts

__all__ = ["group_advantages", "mixed_groups", "overlong_penalty", "prefix_set_counts"]
