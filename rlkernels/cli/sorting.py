"""The demo's task: a causal transformer learns to sort digits from nothing but the share it got right."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

import rlkernels
from rlkernels.credit import group_advantages, prefix_set_counts
from rlkernels.recipes import RECIPES

DIGITS = 4  # of a prompt, and of its answer
SEPARATOR = 10
VOCABULARY = 11
PROMPTS, RESPONSES = 32, 8  # of a step; responses to one prompt are a group
INNER_STEPS = 2
LEARNING_RATE = 1e-3


class Transformer(nn.Module):
    """Two layers over at most a prompt, the separator and an answer."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(2 * DIGITS + 1, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        length = token_ids.shape[1]
        hidden = self.tokens(token_ids) + self.positions.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=token_ids.device)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.head(self.norm(hidden))  # [B, T, V]


class Rollout(NamedTuple):
    token_ids: Tensor  # [B, T]: digits, separator, answer
    rewards: Tensor  # [B]

    @property
    def answers(self) -> Tensor:
        return self.token_ids[:, DIGITS + 1 :]


class Trainer:
    """One policy, one optimiser, one recipe."""

    def __init__(self, objective: str, seed: int, device: str) -> None:
        torch.manual_seed(seed)
        self.objective, self.device = objective, device
        self.model = Transformer().to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE)

    def step(self) -> float:
        """Samples, rewards, and takes `INNER_STEPS` optimiser steps on the samples; returns the mean reward."""
        rollout = self.sample(PROMPTS, RESPONSES)
        batch = self._batch(rollout)
        recipe = RECIPES[self.objective]
        sums_over_length = recipe.reduction == "seq_mean_token_sum_norm"
        for _ in range(INNER_STEPS):
            loss = rlkernels.policy_loss(
                self._answer_logits(rollout.token_ids),
                batch,
                self.objective,
                normalizer=rollout.answers.numel() if sums_over_length else None,
            ).loss
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return rollout.rewards.mean().item()

    @torch.no_grad()
    def sample(self, prompts: int, responses: int) -> Rollout:
        """Answers to random digits, and the share of positions at which each is the sorted prompt."""
        digits = torch.randint(10, (prompts, DIGITS), device=self.device).repeat_interleave(responses, dim=0)
        token_ids = torch.cat([digits, torch.full_like(digits[:, :1], SEPARATOR)], dim=1)
        for _ in range(DIGITS):
            probabilities = self.model(token_ids)[:, -1].softmax(-1)
            token_ids = torch.cat([token_ids, torch.multinomial(probabilities, 1)], dim=1)
        is_right = token_ids[:, DIGITS + 1 :] == digits.sort(dim=1).values
        return Rollout(token_ids, is_right.float().mean(dim=1))

    def _answer_logits(self, token_ids: Tensor) -> Tensor:
        return self.model(token_ids[:, :-1])[:, DIGITS:]

    @torch.no_grad()
    def _batch(self, rollout: Rollout) -> rlkernels.PolicyBatch:
        """Everything that any recipe may ask of a batch."""
        answers, recipe = rollout.answers, RECIPES[self.objective]
        is_dr_grpo = recipe.reduction == "seq_mean_token_sum_norm"  # which does not divide by deviations either
        advantages = group_advantages(rollout.rewards, RESPONSES, scale="none" if is_dr_grpo else "std")
        # Rewards are shares, not verdicts: better than its group counts as correct.
        success_rate = (advantages > 0).float().view(-1, RESPONSES).mean(1).repeat_interleave(RESPONSES)
        weight = None
        if recipe.needs == "weight":
            lengths = torch.full_like(answers[:, 0], DIGITS)
            weight = 1 / prefix_set_counts(answers, lengths, RESPONSES)
        return rlkernels.PolicyBatch(
            answers,
            advantages,
            old_logp=rlkernels.token_stats(self._answer_logits(rollout.token_ids), answers).logp,
            weight=weight,
            extras={"success_rate": success_rate},
        )
