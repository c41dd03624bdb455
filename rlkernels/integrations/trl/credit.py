"""What is computed when TRL has generated: weights of whole groups, and contrasts with another prompt."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import pad

from rlkernels.credit import prefix_set_counts, success_rates
from rlkernels.integrations.trl.replay import Replay
from rlkernels.integrations.trl.sampling import SamplingTrainer

_COLUMN = "counterfactual_prompt"


class CreditTrainer(SamplingTrainer):
    """Adds tensors to the batch that TRL generates, by row, so that they survive its shuffling and splitting.

    Groups may span ranks: ids and rewards of all ranks are gathered first.
    """

    prefix_weights = False  # adds "token_weights" [B, T]
    reads_correctness = False  # "success_rate" [B], and advantages of 1 and -1
    replay: Replay | None = None  # "contrast" [B, T], and advantages [B, T]

    _signature_columns: list[str] | None

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        columns = self._signature_columns or []
        if self.replay is not None and _COLUMN not in columns:
            self._signature_columns = [*columns, _COLUMN]

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        self._rewards: Tensor = super()._calculate_rewards(*args, **kwargs)  # of all ranks
        return self._rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        generations = self.num_generations if self.model.training else self.num_generations_eval
        first = self.accelerator.process_index * len(inputs)
        mine = slice(first, first + len(inputs))
        if self.prefix_weights:
            output["token_weights"] = 1 / self._prefix_counts(output["completion_ids"], generations)[mine]
        if self.reads_correctness:
            self._add_correctness(output, generations, mine)
        if self.replay is not None:
            self._add_replay(self.replay, inputs, output)
        return output

    def _prefix_counts(self, ids: Tensor, generations: int) -> Tensor:
        """Of the completions of all ranks, in this rank's width."""
        everyones = self.accelerator.gather(self.accelerator.pad_across_processes(ids, dim=1))
        lengths = self.accelerator.gather(self._lengths)
        return prefix_set_counts(everyones, lengths, generations)[:, : ids.shape[1]]

    def _add_correctness(self, output: dict[str, Any], generations: int, mine: slice) -> None:
        rewards = (self._rewards * self.reward_weights.to(self._rewards.device)).nansum(dim=1)
        rewards[self._rewards.isnan().all(dim=1)] = torch.nan
        output["success_rate"] = success_rates(rewards, generations)[mine].float()
        own = rewards[mine]
        output["advantages"] = torch.where(own > 0, 1.0, -1.0)
        # an answer that no reward function could score is neither right nor wrong
        scored = (~own.isnan()).float()[:, None].expand(output["completion_ids"].shape)
        output["token_weights"] = scored * output.get("token_weights", 1.0)

    def _add_replay(self, replay: Replay, inputs: list[dict[str, Any]], output: dict[str, Any]) -> None:
        missing = [row for row in inputs if row.get(_COLUMN) is None]
        if missing:
            raise ValueError(f"replay: expected a column {_COLUMN!r} in every example, got {sorted(missing[0])}")
        mask = output["completion_mask"]
        if "tool_mask" in output:
            mask = mask * output["tool_mask"]
        factual = output.get("old_per_token_logps")
        if factual is None:
            factual = self._logp(output["prompt_ids"], output["prompt_mask"], output)
        prompt_ids, images, _ = self._tokenize_prompts([copy.deepcopy(row[_COLUMN]) for row in inputs])
        if images is not None or "pixel_values" in output:
            raise ValueError("replay: expected prompts of text, got images")
        ids = [torch.tensor(row) for row in prompt_ids]
        device = self.accelerator.device
        counterfactual = self._logp(
            pad(ids, padding_value=self._tokenizer.pad_token_id, padding_side="left").to(device),
            pad([torch.ones_like(row) for row in ids], padding_value=0, padding_side="left").to(device),
            output,
        )
        contrast = torch.where(mask != 0, factual - counterfactual, 0)
        weights = replay.weights(contrast, mask, self.state.global_step)
        advantages = output["advantages"]
        output["contrast"] = contrast
        output["advantages"] = (advantages[:, None] if advantages.ndim == 1 else advantages) * weights
        sums = self.accelerator.reduce(torch.stack([contrast.sum(), mask.sum()]), reduction="sum")
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["contrast"].append((sums[0] / sums[1].clamp(min=1)).item())

    @torch.no_grad()
    def _logp(self, prompt_ids: Tensor, prompt_mask: Tensor, output: dict[str, Any]) -> Tensor:
        """Of the batch's completions after these prompts, by the policy that sampled them."""
        args, ids = self.args, output["completion_ids"]
        with self._at(output.get("temperatures")):
            logp, _, _ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([prompt_ids, ids], dim=1),
                torch.cat([prompt_mask, output["completion_mask"]], dim=1),
                ids.shape[1],
                batch_size=args.per_device_train_batch_size if self.model.training else args.per_device_eval_batch_size,
            )
        return logp
