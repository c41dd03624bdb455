"""This package's objectives as NeMo-RL's loss function.

    loss_fn = PolicyLossFn(master_config.loss_fn)   # in place of the ClippedPGLossFn that NeMo-RL's setup() returns

Written for NeMo-RL at commit 7ea279a (0.6.0, August 2026) and tested with its own `ClippedPGLossFn`.
"""

from rlkernels.integrations.nemo_rl.loss_function import PolicyLossFn

__all__ = ["PolicyLossFn"]
