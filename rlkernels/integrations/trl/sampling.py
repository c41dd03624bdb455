"""Temperatures of single tokens, as a rollout had them, in everything that TRL computes from the head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer import utils

from rlkernels.integrations.trl.head import ChunkedLogProb
from rlkernels.integrations.trl.policy_call import HeadTemperatures, head_temperatures

_FIELD = "temperatures"


class SamplingTrainer(GRPOTrainer):
    """Reads `temperatures` of a `rollout_func`'s result: for each completion a number, or one for each of its tokens.

    They replace `args.temperature` in the policy's, the old and the reference log-probabilities and the entropies.
    """

    _temperatures: Tensor | None = None  # [B, T] of the batch at hand

    def _generate(self, prompts: list[Any]) -> Any:
        generated = super()._generate(prompts)
        completion_ids, fields = generated[1], generated[5]
        # of the ids themselves: masks of truncated completions will be zeroed
        self._lengths = torch.tensor([len(ids) for ids in completion_ids], device=self.accelerator.device)
        self._temperatures = self._padded(fields[_FIELD], completion_ids) if fields and _FIELD in fields else None
        return generated

    def _padded(self, temperatures: list[Any], completion_ids: list[list[int]]) -> Tensor:
        if len(temperatures) != len(completion_ids):
            raise ValueError(f"temperatures: expected {len(completion_ids)}, one a completion, got {len(temperatures)}")
        if any(values is None for values in temperatures):
            raise ValueError("temperatures: expected numbers for every completion, got None")
        rows = [torch.as_tensor(values, dtype=torch.float32) for values in temperatures]
        for row, ids in zip(rows, completion_ids, strict=True):
            if tuple(row.shape) not in ((), (len(ids),)):
                raise ValueError(
                    f"temperatures: expected a number or {len(ids)} numbers for a completion of {len(ids)} tokens, "
                    f"got shape {list(row.shape)}"
                )
        padded: Tensor = utils.pad(
            [row.expand(len(ids)) for row, ids in zip(rows, completion_ids, strict=True)],
            padding_value=1.0,
            padding_side="right",
            pad_to_multiple_of=self.pad_to_multiple_of,
        )
        return padded.to(self.accelerator.device)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        with self._at(None):  # `_generate` knows better
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
            if self._temperatures is not None:
                output[_FIELD] = self._temperatures
        return output

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        with self._at(inputs.get(_FIELD)):
            loss: Tensor = super().compute_loss(model, inputs, *args, **kwargs)
        return loss

    @contextmanager
    def _at(self, temperatures: Tensor | None) -> Iterator[None]:
        """Log-probabilities inside are at these temperatures; None: at TRL's."""
        self._temperatures = temperatures
        try:
            yield
        finally:
            self._temperatures = None

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **rest: Any,
    ) -> Any:
        score = super()._get_per_token_logps_and_entropies
        if self._temperatures is None:
            return score(model, input_ids, attention_mask, logits_to_keep, batch_size, **rest)
        if utils._ChunkedLogProbFunction is not ChunkedLogProb:  # TRL's own would take one for all
            raise RuntimeError("temperatures: expected TRL patched, got its own head; call rlkernels' patch() first")
        rows = batch_size or input_ids.shape[0]
        if rows < input_ids.shape[0] and any(rest.get(name) is not None for name in ("pixel_values", "num_images")):
            raise ValueError("temperatures: expected prompts of text, got images")
        parts = []
        for start in range(0, input_ids.shape[0], rows):
            part = slice(start, start + rows)
            is_scored = attention_mask[part, -logits_to_keep:] != 0
            with head_temperatures(HeadTemperatures(self._temperatures[part], is_scored)):
                parts.append(score(model, input_ids[part], attention_mask[part], logits_to_keep, **rest))
        logp, entropies, aux_losses = zip(*parts, strict=True)
        return (
            torch.cat(logp),
            None if entropies[0] is None else torch.cat(entropies),
            None if aux_losses[0] is None else torch.stack(aux_losses).mean(),
        )
