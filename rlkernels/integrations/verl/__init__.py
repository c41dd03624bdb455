"""This package's objectives, lambda-GRPO's weights and the fused head in verl.

    actor_rollout_ref.model.external_lib: my_package   # which calls `register()` and `patch_fused_forward()`
    actor_rollout_ref.actor.policy_loss.loss_mode: rlk_gspo

Written for and tested with verl 0.9.1.
"""

from rlkernels.integrations.verl.fused_forward import linear_cross_entropy, patch_fused_forward, unpatch
from rlkernels.integrations.verl.lambda_grpo import LambdaGRPO, fold_lambda_weights
from rlkernels.integrations.verl.policy_losses import POLICY_LOSSES, register

__all__ = [
    "POLICY_LOSSES",
    "LambdaGRPO",
    "fold_lambda_weights",
    "linear_cross_entropy",
    "patch_fused_forward",
    "register",
    "unpatch",
]
