"""CLIPO: contrastive losses over pooled hidden states, and the reward made of them."""

from __future__ import annotations

import torch
from torch import Tensor

from golden_systems.common import Case, assert_close
from rlkernels.credit import ContrastiveHead, contrastive_loss, contrastive_reward, pool_hidden

TOLERANCE = 1e-8
KINDS = {
    "infonce_loss": "infonce",
    "supcon_loss_out": "supcon_out",
    "supcon_loss_in": "supcon_in",
    "soft_nn_loss": "soft_nn",
}


def check_clipo(case: Case) -> None:
    inputs, params, expected = case["inputs"], case["params"], case["expected"]
    kind = KINDS[params["loss_type"]]
    positives = inputs["infonce_positive_index"]
    options = {"kind": kind, "temperature": params["temperature"]}
    if kind == "infonce":
        options["positives"] = positives.long()

    def close(actual: Tensor, name: str) -> None:
        assert_close(actual, expected[name], name, TOLERANCE)

    pooled = pool_hidden(inputs["token_hidden"], inputs["token_mask"]).requires_grad_()
    close(pooled, "pooled")
    head = ContrastiveHead(*inputs["head_W"].T.shape).double()
    head.projection.weight.data.copy_(inputs["head_W"])
    embedding = head(pooled)
    close(embedding, "embedding")
    out = contrastive_loss(embedding, inputs["correct"], inputs["group"].long(), eps=params["eps"], **options)
    close(out.per_response, "individual_loss")
    close(out.loss, "loss")
    reward = contrastive_reward(out.per_response, weight=params["lam"], floor=params["clip_min"])
    close(reward, "contrastive_reward")
    close(inputs["correct"] + reward, "total_reward")
    leaves = {"grad_head_W": head.projection.weight, "grad_pooled": pooled, "grad_embedding": embedding}
    gradients = torch.autograd.grad(out.loss, list(leaves.values()))
    for name, gradient in zip(leaves, gradients, strict=True):
        if expected.get(name) is not None:
            close(gradient, name)
    exact = contrastive_loss(embedding, inputs["correct"], inputs["group"].long(), **options)
    close(exact.per_response, "exact_eps0_individual")
    close(exact.loss, "exact_eps0_loss")


SYSTEMS = {"clipo": check_clipo}
