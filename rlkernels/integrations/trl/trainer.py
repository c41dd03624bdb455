"""`FusedGRPOTrainer`: TRL's GRPO trainer with a loss of this package."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, NamedTuple

import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from rlkernels import checks
from rlkernels.batch import PolicyBatch
from rlkernels.integrations.trl import patch
from rlkernels.integrations.trl.credit import CreditTrainer
from rlkernels.integrations.trl.policy_call import PolicyCall, add_policy_loss
from rlkernels.integrations.trl.replay import Replay
from rlkernels.metrics import Metrics
from rlkernels.objectives import CISPO, GRPO, NFT, SAPO, Objective
from rlkernels.recipes import ObjectiveFunction, Recipe, resolve
from rlkernels.reductions import Normalizer
from rlkernels.weighted_objectives import VESPO


class _Sum(NamedTuple):
    """How per-token losses become one: a reduction, and which of the trainer's denominators divides it."""

    reduction: str
    denominator: str


# The bonus is always a micro-batch's own token mean, so that the loss's may not be called "token_mean": the loss's
# normalizer would apply to both.
_SUM_OF_LOSS_TYPE = {
    "grpo": _Sum("seq_mean_token_mean", "rows"),
    "sapo": _Sum("seq_mean_token_mean", "rows"),
    "luspo": _Sum("seq_mean_token_sum", "rows"),
    "bnpo": _Sum("token_sum", "tokens"),
    "dr_grpo": _Sum("token_sum", "rows x length"),
    "dapo": _Sum("token_sum", "tokens of the window"),
    "cispo": _Sum("token_sum", "tokens of the window"),
}
_SUM_OF_REDUCTION = {
    "token_mean": _Sum("token_sum", "tokens of the window"),
    "seq_mean_token_mean": _Sum("seq_mean_token_mean", "rows"),
    "seq_mean_token_sum": _Sum("seq_mean_token_sum", "rows"),
    "seq_mean_token_sum_norm": _Sum("token_sum", "rows x length"),
    "token_sum": _Sum("token_sum", "recipe"),
}


# arguments of TRL's that have no meaning for another objective
_OF_TRLS_LOSS = (
    "loss_type",
    "importance_sampling_level",
    "epsilon",
    "epsilon_high",
    "delta",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
    "top_entropy_quantile",
    "off_policy_mask_threshold",
    "use_adaptive_entropy",
)


class FusedGRPOTrainer(CreditTrainer):
    """TRL's `GRPOTrainer` whose loss, from hidden states to scalar, is `linear_policy_loss` inside the model's forward.

    Without `objective` the loss is the one that `args` names: TRL's loss types, importance-sampling levels, `delta`,
    vLLM corrections, tool masks, denominators and metrics, to TRL's numbers. What needs log-probabilities before there
    is a loss (`loss_type="vespo"`, `off_policy_mask_threshold`, `top_entropy_quantile`) is TRL's own loss on the
    patched head.

    With `objective` the policy term is this package's. `args` still says `beta` and `use_bias_correction_kl` (the KL
    term, which is multiplied by the objective's own ratio where TRL multiplies it by its), `entropy_coef`, and how
    samples are drawn; vLLM's correction is the batch's `policy_weight`, but of VESPO, whose ratio takes it. `clip_cov`
    and `kl_cov` see one micro-batch at a time. A callable applies `batch.weight` and `batch.policy_weight` itself, as
    in `policy_loss`. Denominators are TRL's under accumulation: tokens of the
    accumulation window for `token_mean`, as TRL's dapo ("bnpo" takes a micro-batch's own, as TRL's), rows for
    `seq_mean_*`, rows x `max_completion_length` for `seq_mean_token_sum_norm`. `metrics` of `PolicyLoss` are logged as
    `policy/...`, its entropy and KL under TRL's names.

    A `rollout_func` may return `temperatures`, for each completion a number or one for each token: they replace
    `args.temperature` wherever log-probabilities are computed.

    Building one calls `patch()`; it stays in force for every trainer until `unpatch()`.

    Args:
        objective: a recipe's name, an instance or a callable, as in `policy_loss`, or None. Of an instance `kl_coef`,
            `kl_importance_weighted`, `entropy_coef` and `entropy_reduction` are to be left at their defaults: `args`
            has them.
        reduction: as in `policy_loss`, except `none`; None: the recipe's.
        prefix_weights: lambda-GRPO's `1 / prefix_set_counts` as weights of the tokens, over groups that may span ranks;
            None: where the recipe is "lambda_grpo". Needs an objective.
        replay: CoRT: a response's advantage goes where its log-probability differs from that after the prompt in the
            dataset's column `counterfactual_prompt` (text, of the column `prompt`'s kind). One forward more for each
            batch that is generated; two where TRL does not compute old log-probabilities. The contrast is logged.
        args, kwargs: all else, as `GRPOTrainer` takes it.

    `NFT` takes rewards > 0 for correct answers: in place of TRL's advantages, and for its `success_rate`.

    Raises:
        TypeError, ValueError: `objective` or `reduction` of a wrong kind, or beside an argument of TRL's loss that has
            no meaning for it and is not at its default (`loss_type`, `epsilon`, `delta`, `top_entropy_quantile`, ...).

    Example:
        >>> from rlkernels.integrations.trl import FusedGRPOTrainer  # doctest: +SKIP
        >>> trainer = FusedGRPOTrainer(
        ...     "Qwen/Qwen3-0.6B", reward, args, train_dataset=data, objective="gmpo")  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    def __init__(
        self,
        *args: Any,
        objective: str | Objective | ObjectiveFunction | None = None,
        reduction: str | None = None,
        prefix_weights: bool | None = None,
        replay: Replay | None = None,
        **kwargs: Any,
    ) -> None:
        patch()
        super().__init__(*args, **kwargs)
        add_policy_loss(self.model.get_base_model() if is_peft_model(self.model) else self.model)
        self._own: tuple[Recipe, _Sum] | None = None
        if objective is not None:
            self._own = self._checked(objective, reduction)
        elif reduction is not None:
            raise ValueError(f"reduction: expected None without an objective, got {reduction!r}")
        needs_weights = self._own is not None and self._own[0].needs == "weight"
        self.prefix_weights = needs_weights if prefix_weights is None else prefix_weights
        if self.prefix_weights and self._own is None:
            raise ValueError("prefix_weights: expected None or False without an objective, got True")
        if needs_weights and not self.prefix_weights:
            raise ValueError(f"prefix_weights: expected None or True with {objective!r}, got {prefix_weights!r}")
        if not isinstance(replay, Replay | None):
            raise TypeError(f"replay: expected a Replay or None, got {checks.describe(replay)}")
        self.replay = replay
        self.reads_correctness = self._own is not None and isinstance(self._own[0].objective, NFT)
        if replay is not None and self.reads_correctness:
            raise ValueError("replay: expected None with NFT, whose advantages only say correct or not, got a Replay")

    def _checked(self, objective: str | Objective | ObjectiveFunction, reduction: str | None) -> tuple[Recipe, _Sum]:
        recipe = resolve(objective, reduction)
        if recipe.reduction not in _SUM_OF_REDUCTION:
            raise ValueError(f"reduction: expected one of {', '.join(_SUM_OF_REDUCTION)}, got {recipe.reduction!r}")
        presets = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
        for name in _OF_TRLS_LOSS:
            if getattr(self.args, name) != presets[name]:
                raise ValueError(
                    f"{name}: expected {presets[name]!r} with an objective, which has fields of its own, "
                    f"got {getattr(self.args, name)!r}"
                )
        if isinstance(recipe.objective, Objective):
            fields = {field.name: field.default for field in dataclasses.fields(Objective)}
            for name in ("kl_coef", "kl_importance_weighted", "entropy_coef", "entropy_reduction"):
                if getattr(recipe.objective, name) != fields[name]:
                    raise ValueError(
                        f"objective: expected {name} to be left to the trainer's args, "
                        f"got {getattr(recipe.objective, name)!r}"
                    )
        elif self.beta != 0 or self._entropy_bonus_enabled:
            raise ValueError(
                "objective: expected beta=0 and entropy_coef=0 with a callable, which has its own terms, "
                f"got beta={self.beta}, entropy_coef={self.entropy_coef}"
            )
        if objective == "bnpo" and reduction is None:
            return recipe, _SUM_OF_LOSS_TYPE["bnpo"]
        return recipe, _SUM_OF_REDUCTION[recipe.reduction]

    def _needs_trls_loss(self) -> bool:
        is_gated = self.off_policy_mask_threshold is not None or self.top_entropy_quantile < 1.0
        return is_gated or self.loss_type not in _SUM_OF_LOSS_TYPE

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if self._own is None and self._needs_trls_loss():
            return super()._compute_loss(model, inputs)
        mask = inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        how = _SUM_OF_LOSS_TYPE[self.loss_type] if self._own is None else self._own[1]
        normalizer = self._normalizer(how.denominator, inputs, mask)
        call = PolicyCall(self._batch(inputs, mask), self._objective(), how.reduction, normalizer)
        scored = _Scored(model, call)
        if self._own is None:
            super()._compute_loss(scored, inputs)  # on detached statistics: TRL's metrics
        else:
            self._score(scored, inputs)
            assert call.out is not None
            self._log_policy(call.out.metrics)
        loss: Tensor = scored.output.loss
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * scored.output.aux_loss / self._accumulation()
        return loss

    def _batch(self, inputs: dict[str, Any], mask: Tensor) -> PolicyBatch:
        ids, advantages = inputs["completion_ids"], inputs["advantages"]
        corrected = self.use_vllm and self.vllm_importance_sampling_correction
        old_logp, policy_weight = inputs.get("old_per_token_logps"), None
        if corrected and self._own is not None and isinstance(self._own[0].objective, VESPO):
            assert old_logp is not None  # TRL corrects from it to the sampler's
            old_logp = old_logp - _log_by_token(inputs["importance_sampling_ratio"], mask)
        elif corrected:
            policy_weight = inputs["importance_sampling_ratio"]
        return PolicyBatch(
            ids,
            advantages.unsqueeze(1) if advantages.ndim == 1 else advantages,
            mask=mask,
            old_logp=old_logp,
            ref_logp=inputs.get("ref_per_token_logps"),
            weight=inputs.get("token_weights"),
            policy_weight=policy_weight,
            extras={"success_rate": inputs["success_rate"]} if "success_rate" in inputs else None,
            # a GPU waits here, as in TRL's own selection of rows
            rows=None if ids.device.type == "cpu" else mask.flatten().nonzero().squeeze(1),
        )

    def _objective(self) -> Objective | ObjectiveFunction:
        shared: dict[str, Any] = {"kl_coef": self.beta, "entropy_coef": self._applied_entropy_coef()}
        if self.beta != 0:
            shared["kl_importance_weighted"] = bool(self.args.use_bias_correction_kl)
        if self._own is not None:
            objective = self._own[0].objective
            return dataclasses.replace(objective, **shared) if isinstance(objective, Objective) else objective
        shared["level"] = {"token": "token", "sequence": "sequence_mean"}[self.importance_sampling_level]
        if self.loss_type == "cispo":
            return CISPO(ratio_max=self.epsilon_high, **shared)
        if self.loss_type == "sapo":
            return SAPO(tau_pos=self.args.sapo_temperature_pos, tau_neg=self.args.sapo_temperature_neg, **shared)
        return GRPO(clip_low=self.epsilon_low, clip_high=self.epsilon_high, ratio_cap=self.args.delta, **shared)

    def _applied_entropy_coef(self) -> float:
        if not self._entropy_bonus_enabled:
            return 0.0
        is_off = self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target
        return 0.0 if is_off else self.entropy_coef / self._accumulation()

    def _accumulation(self) -> float:
        return self.current_gradient_accumulation_steps if self.model.training else 1.0

    def _normalizer(self, denominator: str, inputs: dict[str, Any], mask: Tensor) -> Normalizer:
        accumulation = self._accumulation()
        if denominator == "tokens of the window":
            tokens = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
            return tokens * accumulation / self.args.steps_per_generation if self.model.training else tokens
        if denominator == "tokens":
            return mask.sum().clamp(min=1) * accumulation
        if denominator == "recipe":
            assert self._own is not None
            normalizer = self._own[0].normalizer
            return accumulation if normalizer is None else normalizer * accumulation
        rows = mask.shape[0] * accumulation
        return rows * self.max_completion_length if denominator == "rows x length" else rows

    def _score(self, model: Any, inputs: dict[str, Any]) -> None:
        """The model's forward as TRL's loss calls it."""
        completion_ids = inputs["completion_ids"]
        parameters = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters
        self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], completion_ids], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            completion_ids.shape[1],
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
            **{name: value for name, value in inputs.items() if name in parameters},
        )

    def _log_policy(self, metrics: Metrics) -> None:
        if self.accelerator.num_processes > 1:
            metrics = metrics.all_reduce()
        log = self._metrics["train" if self.model.training else "eval"]
        names = {"entropy": "entropy", "ref_kl": "kl"}
        for name, value in metrics.items():
            log[names.get(name, f"policy/{name}")].append(value.item())


def _log_by_token(ratio: Tensor, mask: Tensor) -> Tensor:
    """`[B, T]` of a ratio `[B, T]` or, of whole sequences, `[B, 1]`: what adds up over a sequence to its logarithm."""
    logarithm = ratio.clamp(min=1e-8).log()
    if ratio.shape != mask.shape:
        logarithm = logarithm / mask.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(mask != 0, logarithm, 0)


class _Scored:
    """The model, for TRL's one call of it: with the policy call, and its output kept."""

    def __init__(self, model: Any, call: PolicyCall) -> None:
        self._model, self._call = model, call
        self.output: Any = None

    def __call__(self, **inputs: Any) -> Any:
        self.output = self._model(**inputs, policy_call=self._call)
        return self.output
