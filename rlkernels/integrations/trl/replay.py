"""CoRT's options under TRL."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlkernels.credit import replay_weights, smoothstep_ramp


@dataclass(frozen=True, kw_only=True)
class Replay:
    """How the contrast of two prompts weights a response's advantage, for `FusedGRPOTrainer(replay=...)`.

        advantages[:, None] * replay_weights(contrast, mask, ramp=smoothstep_ramp(step, warmup, length), ...)

    Args:
        sharpness, offset, strength, normalize: as in `rlkernels.credit.replay_weights`.
        warmup, length: as in `rlkernels.credit.smoothstep_ramp`, in optimiser steps; by default the weights are whole
            from the first step.

    Raises:
        TypeError, ValueError: an argument that is not as above, naming it.

    Source: CoRT (counterfactual replay over tokens); no public code.

    Example:
        >>> from rlkernels.integrations.trl import Replay
        >>> Replay(strength=0.8, warmup=50, length=100).sharpness
        1.0
    """

    sharpness: float = 1.0
    offset: float = 0.0
    strength: float = 0.5
    normalize: bool = True
    warmup: float = -1.0
    length: float = 0.0

    def __post_init__(self) -> None:
        smoothstep_ramp(0, self.warmup, self.length)
        self.weights(torch.zeros(1, 1), torch.ones(1, 1), step=self.warmup + self.length + 1)

    def weights(self, contrast: Tensor, mask: Tensor, step: float) -> Tensor:
        """The weights at a step of the training.

        Args:
            contrast, mask: `[B, T]`, as in `rlkernels.credit.replay_weights`.
            step: as in `rlkernels.credit.smoothstep_ramp`.

        Returns:
            `[B, T]`, float32 (float64 for a float64 contrast), 0 under the mask's zeros.
        """
        return replay_weights(
            contrast,
            mask,
            sharpness=self.sharpness,
            offset=self.offset,
            strength=self.strength,
            ramp=smoothstep_ramp(step, self.warmup, self.length),
            normalize=self.normalize,
        )
