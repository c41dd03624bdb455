"""Fused kernels for the losses of reinforcement-learning post-training of language models."""

from rlkernels.backends import backend, set_backend
from rlkernels.backends.memory import empty_cache
from rlkernels.batch import PolicyBatch
from rlkernels.checks import set_checks
from rlkernels.covariance_objectives import ClipCov, KLCov
from rlkernels.heads import head_arguments
from rlkernels.losses import PolicyLoss, linear_policy_loss, logp_policy_loss, policy_loss
from rlkernels.metrics import Metrics
from rlkernels.objectives import CISPO, GMPO, GRPO, GSPO, LUSPO, NFT, SAPO, GSPOToken, Objective, Reinforce
from rlkernels.recipes import RECIPES
from rlkernels.reductions import REDUCTIONS, global_normalizer
from rlkernels.stats import TokenStats, linear_token_stats, token_stats
from rlkernels.weighted_objectives import DPPO, DRO, VESPO

__version__ = "0.1.0"

__all__ = [
    "CISPO",
    "DPPO",
    "DRO",
    "GMPO",
    "GRPO",
    "GSPO",
    "LUSPO",
    "NFT",
    "RECIPES",
    "REDUCTIONS",
    "SAPO",
    "VESPO",
    "ClipCov",
    "GSPOToken",
    "KLCov",
    "Metrics",
    "Objective",
    "PolicyBatch",
    "PolicyLoss",
    "Reinforce",
    "TokenStats",
    "backend",
    "empty_cache",
    "global_normalizer",
    "head_arguments",
    "linear_policy_loss",
    "linear_token_stats",
    "logp_policy_loss",
    "policy_loss",
    "set_backend",
    "set_checks",
    "token_stats",
]
