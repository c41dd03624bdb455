"""lambda-GRPO's weights where verl knows token ids and groups: neither its losses nor its estimators see them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlkernels.credit import prefix_set_counts
from rlkernels.integrations.verl.package import imported


def fold_lambda_weights(data: Any, config: Any) -> Any:
    """lambda-GRPO's weights, 1 / (size of the token's prefix set), multiplied into a batch's advantages.

    To be called where verl knows token ids and groups: on what `compute_advantage` returned, before the batch is split.

        advantages[i, t] /= prefix_set_counts(responses, lengths, uid)[i, t]

    Exact for the clipped surrogate, whose value and gradient are proportional to |A|; a KL loss of the actor would keep
    the weight 1 and is refused, as is any loss mode but `vanilla` and `rlk_grpo`.

    Args:
        data: verl's `DataProto` of all responses of each group: `batch` with `responses` and `advantages` `[B, T]` and
            `attention_mask` `[B, prompt + T]`, `non_tensor_batch["uid"]` `[B]`.
        config: the trainer's whole configuration.

    Returns:
        `data`, changed.

    Raises:
        ValueError: a KL loss, another loss mode, or a batch that lacks one of these.

    Source: lambda-GRPO (2509.21154), as `rlkernels.credit.prefix_set_counts`.

    Example:
        >>> import numpy, torch
        >>> from types import SimpleNamespace as Namespace
        >>> from rlkernels.integrations import verl
        >>> actor = Namespace(use_kl_loss=False, policy_loss={"loss_mode": "vanilla"})
        >>> batch = {"responses": torch.tensor([[1, 2], [1, 3]]), "advantages": torch.ones(2, 2)}
        >>> batch["attention_mask"] = torch.ones(2, 5, dtype=torch.int64)
        >>> data = Namespace(batch=batch, non_tensor_batch={"uid": numpy.array(["a", "a"])})
        >>> verl.fold_lambda_weights(data, Namespace(actor_rollout_ref=Namespace(actor=actor))).batch["advantages"]
        tensor([[0.5000, 1.0000],
                [0.5000, 1.0000]])
    """
    _refuse_other_losses(config)
    present = {*data.batch.keys(), *data.non_tensor_batch.keys()}
    missing = [name for name in ("responses", "advantages", "attention_mask", "uid") if name not in present]
    if missing:
        raise ValueError(f"data: expected {', '.join(missing)} in the batch for lambda-GRPO, got none")
    responses = data.batch["responses"]
    lengths = (data.batch["attention_mask"][:, -responses.shape[1] :] != 0).sum(-1)
    counts = _counts(responses, lengths, data.non_tensor_batch["uid"].tolist())
    data.batch["advantages"] = data.batch["advantages"] / counts
    return data


class LambdaGRPO:
    """`fold_lambda_weights` for verl's trainers with a transfer queue, to be mixed into one of them.

    The weights are folded in when the trainer has computed a batch's advantages, and written back to the queue.

        advantages[i, t] /= prefix_set_counts(responses, lengths, uid)[i, t]

    An agent's session with more than one output is refused then, and what `fold_lambda_weights` refuses, with
    ValueError: contexts of several outputs differ, so that equal tokens are no common prefix.

    Source: lambda-GRPO (2509.21154), as `rlkernels.credit.prefix_set_counts`.

    Example:
        >>> from rlkernels.integrations.verl import LambdaGRPO
        >>> from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer  # doctest: +SKIP
        >>> @register_trainer("lambda_grpo")  # doctest: +SKIP
        ... class Trainer(LambdaGRPO, PPOTrainerSync): ...
    """

    config: Any

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        _refuse_other_losses(self.config)
        sessions = {key.rsplit("_", 1)[0] for key in batch.keys}  # of uid_session_output
        if len(sessions) < len(batch.keys):
            found = f"{len(batch.keys)} of {len(sessions)} sessions"
            raise ValueError(f"batch: expected one output a session for lambda-GRPO, got {found}")
        batch = super()._compute_advantage(batch, metrics)  # type: ignore[misc]
        queue = imported("transfer_queue")
        place = {"keys": batch.keys, "partition_id": batch.partition_id}
        data = queue.kv_batch_get(**place, select_fields=["uid", "responses", "response_mask", "advantages"])
        responses, mask = data["responses"], data["response_mask"]
        counts = _counts(responses.to_padded_tensor(padding=0), responses.offsets().diff(), data.get("uid").tolist())
        folded = data["advantages"].to_padded_tensor(padding=0) / counts
        nested = imported("verl.workers.utils.padding").response_to_nested(folded, mask)
        fields = imported("tensordict").TensorDict({"advantages": nested}, batch_size=len(batch))
        return queue.kv_batch_put(**place, fields=fields)


def _refuse_other_losses(config: Any) -> None:
    actor = config.actor_rollout_ref.actor
    if actor.use_kl_loss:
        raise ValueError(
            "actor.use_kl_loss: expected False, since a KL loss would not get lambda-GRPO's weights, got True"
        )
    mode = actor.policy_loss.get("loss_mode", "vanilla")
    if mode not in ("vanilla", "rlk_grpo"):
        raise ValueError(f"actor.policy_loss.loss_mode: expected vanilla or rlk_grpo for lambda-GRPO, got {mode!r}")


def _counts(responses: Tensor, lengths: Tensor, uids: list[Any]) -> Tensor:
    """`[B, T]`, of groups that share a uid."""
    numbers: dict[Any, int] = {}
    groups = [numbers.setdefault(uid, len(numbers)) for uid in uids]
    return prefix_set_counts(responses, lengths, torch.tensor(groups, device=responses.device))
