"""This package's kernels and objectives in slime.

    --loss-type custom_loss --custom-loss-function-path rlkernels.integrations.slime.policy_loss

computes what `--loss-type policy_loss` does. Another objective is a line in a module of yours, whose path is given:

    loss = policy_loss_of("gmpo")

`patch()` puts slime's own log-probabilities and entropies on this package, whatever the loss.

Written for and tested with slime 0.3.1 (commit 624b824) and Megatron-Core 0.16.1. Nothing of either is imported before
a loss is computed.
"""

from rlkernels.integrations.slime.log_probs import calculate_log_probs_and_entropy, patch, unpatch
from rlkernels.integrations.slime.losses import policy_loss, policy_loss_of

__all__ = ["calculate_log_probs_and_entropy", "patch", "policy_loss", "policy_loss_of", "unpatch"]
