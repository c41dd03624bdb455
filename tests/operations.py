"""Every public operation on tensors: how its inputs are drawn, how it is called, and what of it has a gradient.

`test_contracts.py` and `test_contracts_torch.py` are made of this list alone. Whatever is an input of an entry is a
tensor; numbers are 0-d.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import host_device
import pytest
import torch
from torch import Generator, Tensor

import rlkernels
from rlkernels import CISPO, GMPO, GRPO, GSPO, NFT, VESPO, PolicyBatch, Reinforce, credit, schedules
from rlkernels.losses import logp_policy_terms
from rlkernels.ops.rows import compute_dtype
from rlkernels.stats import OUTPUTS

Tensors = dict[str, Tensor]

FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Sizes(NamedTuple):
    sequences: int = 3
    length: int = 5
    vocab: int = 37
    hidden: int = 8


class Draw:
    """Random inputs: model tensors in `dtype`, what batches hold in the dtype that is computed in."""

    def __init__(self, generator: Generator, dtype: torch.dtype = torch.float32, sizes: Sizes | None = None) -> None:
        self.generator, self.dtype, self.sizes = generator, dtype, sizes or Sizes()
        self.tokens = (self.sizes.sequences, self.sizes.length)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        values = scale * torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return values.to(host_device.device(), dtype or self.dtype)

    def floats(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        values = low + (high - low) * torch.rand(shape, generator=self.generator, dtype=torch.float64)
        return values.to(host_device.device(), compute_dtype(self.dtype))

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator).to(host_device.device())

    def number(self, low: float = 0.5, high: float = 2.0) -> Tensor:
        return self.floats(low=low, high=high)

    def mask(self, *shape: int) -> Tensor:
        """Of every five tokens one is masked."""
        mask = torch.ones(shape, dtype=torch.bool, device=host_device.device())
        mask.view(-1)[3::5] = False
        return mask

    def targets(self, *shape: int) -> Tensor:
        return self.integers(self.sizes.vocab, *shape).masked_fill_(~self.mask(*shape), -100)

    def groups(self) -> Tensor:
        return torch.arange(self.sizes.sequences, device=host_device.device()) // 2


INTERPRETED = (
    *("token_stats", "linear_token_stats", "policy_loss-single-sweep", "logp_policy_loss-packed-gspo"),
    *("counterfactual_contrast", "prefix_set_counts"),
)


class Operation(NamedTuple):
    name: str
    inputs: Callable[[Draw], Tensors]
    call: Callable[..., Tensors]  # takes the inputs by name, gives its outputs by name
    leaves: tuple[str, ...] = ()  # inputs that gradients reach
    differentiable: tuple[str, ...] = ()  # outputs that have one
    has_kernels: bool = True  # else plain PyTorch, the same under every backend
    refuses_second_derivatives: bool = True
    uses_gemms: bool = False  # autocast rounds, and strides may change bits
    chooses_path: bool = False  # a second backward forms the gradient in another way
    stops_gradients: bool = False  # by definition, so that the gradient is not that of the value
    dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES
    parts: int = 0  # that the linear loss is cut into, as a GPU's cost model may

    @property
    def backends(self) -> tuple[str, ...]:
        """Those that it has code of its own for; Triton's interpreter, which takes its time, runs each kernel once."""
        if not self.has_kernels:
            return ("cpu",)
        return ("cpu", "cuda", "triton", "reference") if self.name in INTERPRETED else ("cpu", "cuda", "reference")

    def prepared(self, patch: pytest.MonkeyPatch) -> Operation:
        if self.parts:
            patch.setattr(schedules, "parts", lambda problem, sequence, device: self.parts)
        return self


# Statistics


def _stats(stats: rlkernels.TokenStats) -> Tensors:
    return {name: value for name, value in stats._asdict().items() if value is not None}


def _head_numbers(draw: Draw) -> Tensors:
    return {
        "temperature": draw.number(),
        "softcap": draw.number(4.0, 8.0),
        "logit_scale": draw.number(),
    }


def _logits(draw: Draw) -> Tensors:
    logits = draw.normal(*draw.tokens, draw.sizes.vocab)
    return {"logits": logits, "targets": draw.targets(*draw.tokens), **_head_numbers(draw)}


def _plain_logits(draw: Draw) -> Tensors:
    """One row of logits for each token, a temperature for each, no cap."""
    count = draw.sizes.sequences * draw.sizes.length
    return {
        "logits": draw.normal(count, draw.sizes.vocab),
        "targets": draw.targets(count),
        "temperature": draw.floats(count, low=0.5, high=2.0),
    }


def _head(draw: Draw, shape: tuple[int, ...]) -> Tensors:
    vocab, hidden = draw.sizes.vocab, draw.sizes.hidden
    return {
        "hidden": draw.normal(*shape, hidden),
        "weight": draw.normal(vocab, hidden, scale=0.3),
        "bias": draw.normal(vocab, scale=0.3),
    }


def _hidden(draw: Draw) -> Tensors:
    return {**_head(draw, draw.tokens), "targets": draw.targets(*draw.tokens), **_head_numbers(draw)}


def _logp_alone(logits: Tensor, targets: Tensor, temperature: Tensor) -> Tensors:
    return _stats(rlkernels.token_stats(logits, targets, temperature=temperature, outputs=()))


def _linear_stats(**inputs: Tensor) -> Tensors:
    return _stats(rlkernels.linear_token_stats(**inputs, outputs=OUTPUTS))


def _linear_stats_in_small_chunks(**inputs: Tensor) -> Tensors:
    return _stats(rlkernels.linear_token_stats(**inputs, outputs=OUTPUTS, chunk_bytes=64 << 10))


THREE = ("logp", "entropy", "lse")
HEAD = ("hidden", "weight", "bias")

STATISTICS = (
    Operation(
        "token_stats",
        _logits,
        lambda **inputs: _stats(rlkernels.token_stats(**inputs, outputs=OUTPUTS)),
        ("logits",),
        THREE,
    ),
    Operation("token_stats-logp-alone", _plain_logits, _logp_alone, ("logits",), ("logp",)),
    Operation("linear_token_stats", _hidden, _linear_stats, HEAD, THREE, uses_gemms=True),
    Operation("linear_token_stats-frozen-head", _hidden, _linear_stats, ("hidden",), THREE, uses_gemms=True),
    Operation("linear_token_stats-chunks", _hidden, _linear_stats_in_small_chunks, HEAD, THREE, uses_gemms=True),
)


# Policy losses


def _batch_inputs(draw: Draw, packed: bool) -> Tensors:
    """A policy that has moved a little since it sampled."""
    sequences, length = draw.tokens
    shape = (sequences * length,) if packed else (sequences, length)
    unlikely = -torch.tensor(float(draw.sizes.vocab)).log().item()
    tensors = {
        "targets": draw.targets(*shape),
        "advantages": draw.normal(sequences, dtype=compute_dtype(draw.dtype)),
        "mask": draw.mask(*shape),
        "old_logp": draw.floats(*shape, low=unlikely - 0.2, high=unlikely + 0.2),
        "ref_logp": draw.floats(*shape, low=unlikely - 0.2, high=unlikely + 0.2),
        "weight": draw.floats(*shape, low=0.5),
        "policy_weight": draw.floats(sequences, low=0.5),
        "success_rate": draw.floats(sequences, low=0.2, high=0.8),
    }
    if packed:  # the last sequence is the longest
        borders = torch.arange(sequences + 1, device=host_device.device()) * length
        borders[1:-1] -= length // 2
        tensors["cu_seqlens"] = borders
    return tensors


def _loss(out: rlkernels.PolicyLoss) -> Tensors:
    values = {"loss": out.loss, "logp": out.logp, "entropy": out.entropy}
    return {name: value for name, value in values.items() if value is not None} | {
        f"metrics.{name}": value for name, value in out.metrics.items()
    }


FIELDS = ("mask", "old_logp", "ref_logp", "weight", "policy_weight", "cu_seqlens")


def _policy(path: str, objective: Any, packed: bool = False, **options: Any) -> dict[str, Callable[..., Tensors]]:
    """`inputs` and `call` of a loss from "logits", "hidden" states or "logp"."""
    has_normalizer = options.get("reduction") == "seq_mean_token_sum_norm"

    def inputs(draw: Draw) -> Tensors:
        batch = _batch_inputs(draw, packed)
        shape = tuple(batch["targets"].shape)
        if isinstance(objective, VESPO):
            del batch["policy_weight"]
        tensors = {f"batch.{name}": value for name, value in batch.items()}
        if has_normalizer:
            tensors["normalizer"] = draw.number(4.0, 8.0)
        if path == "logp":
            logp = batch["old_logp"] + draw.normal(*shape, scale=0.3, dtype=batch["old_logp"].dtype)
            return tensors | {"logp": logp.to(draw.dtype), "entropy": draw.floats(*shape, high=3.0).to(draw.dtype)}
        tensors["temperature"] = draw.number()
        if packed:
            tensors["softcap"] = draw.number(4.0, 8.0)
        if path == "logits":
            return tensors | {"logits": draw.normal(*shape, draw.sizes.vocab, scale=0.3)}
        return tensors | {name.replace("weight", "head"): value for name, value in _head(draw, shape).items()}

    def call(**tensors: Tensor) -> Tensors:
        names = [name for name in tensors if name.startswith("batch.")]
        fields = {name.removeprefix("batch."): tensors.pop(name) for name in names}
        extras = {"success_rate": fields.pop("success_rate")}
        targets, advantages = fields.pop("targets"), fields.pop("advantages")
        batch = PolicyBatch(targets, advantages, **fields, extras=extras)
        if path == "logits":
            return _loss(rlkernels.policy_loss(tensors.pop("logits"), batch, objective, **tensors, **options))
        if path == "hidden":
            hidden, head = tensors.pop("hidden"), tensors.pop("head")
            return _loss(rlkernels.linear_policy_loss(hidden, head, batch, objective, **tensors, **options))
        return _loss(rlkernels.logp_policy_loss(tensors.pop("logp"), batch, objective, **tensors, **options))

    return {"inputs": inputs, "call": call}


def _cost(logp: Tensor, batch: PolicyBatch) -> Tensor:
    return -batch.advantages[:, None] * logp


def _terms(logp: Tensor, advantages: Tensor, **fields: Tensor) -> Tensors:
    terms = logp_policy_terms(logp, PolicyBatch(None, advantages, **fields), GRPO(clip_high=0.3))
    return terms._asdict() | {"ratio": terms.ratio.detach()}  # attached, but not for gradients


TERMS = {"kl_coef": 0.1, "entropy_coef": 0.01}
DAPO = GRPO(clip_low=0.3, clip_high=0.5, **TERMS)
WIDE_GSPO = GSPO(clip_low=0.5, clip_high=0.5, **TERMS)  # else every sequence is clipped
NORM = {"reduction": "seq_mean_token_sum_norm"}
LOSS, HEAD_OF_LOSS = ("loss",), ("hidden", "head", "bias")

LOSSES = (
    Operation(
        "policy_loss-single-sweep",
        **_policy("logits", DAPO),
        leaves=("logits",),
        differentiable=LOSS,
        chooses_path=True,
    ),
    Operation(
        "policy_loss-packed",
        **_policy("logits", GRPO(kl_coef=0.1), packed=True, **NORM),
        leaves=("logits",),
        differentiable=LOSS,
        chooses_path=True,
    ),
    Operation("policy_loss-gspo", **_policy("logits", WIDE_GSPO, **NORM), leaves=("logits",), differentiable=LOSS),
    Operation(
        "policy_loss-nft",
        **_policy("logits", NFT(kl_coef=0.1)),
        leaves=("logits",),
        differentiable=LOSS,
        chooses_path=True,
        stops_gradients=True,
    ),
    Operation(
        "policy_loss-vespo",
        **_policy("logits", VESPO()),
        leaves=("logits",),
        differentiable=LOSS,
        stops_gradients=True,
    ),
    Operation("policy_loss-callable", **_policy("logits", _cost), leaves=("logits",), differentiable=LOSS),
    Operation(
        "policy_loss-per-token",
        **_policy("logits", DAPO, reduction="none"),
        leaves=("logits",),
        differentiable=LOSS,
    ),
    Operation(
        "linear_policy_loss",
        **_policy("hidden", DAPO),
        leaves=HEAD_OF_LOSS,
        differentiable=LOSS,
        uses_gemms=True,
    ),
    Operation(
        "linear_policy_loss-in-parts",
        **_policy("hidden", DAPO),
        leaves=HEAD_OF_LOSS,
        differentiable=LOSS,
        uses_gemms=True,
        parts=2,
    ),
    Operation(
        "linear_policy_loss-packed-gmpo-frozen-head",
        **_policy("hidden", GMPO(kl_coef=0.1), packed=True),
        leaves=("hidden",),
        differentiable=LOSS,
        uses_gemms=True,
    ),
    Operation("logp_policy_loss", **_policy("logp", DAPO), leaves=("logp", "entropy"), differentiable=LOSS),
    Operation(
        "logp_policy_loss-packed-gspo",
        **_policy("logp", WIDE_GSPO, packed=True, **NORM),
        leaves=("logp", "entropy"),
        differentiable=LOSS,
    ),
    Operation(
        "logp_policy_loss-cispo",
        **_policy("logp", CISPO(ratio_max=1.2)),
        leaves=("logp",),
        differentiable=LOSS,
        stops_gradients=True,
    ),
    Operation("logp_policy_loss-verifree", **_policy("logp", Reinforce()), leaves=("logp",), differentiable=LOSS),
    Operation(
        "logp_policy_loss-vespo",
        **_policy("logp", VESPO(**TERMS)),
        leaves=("logp", "entropy"),
        differentiable=LOSS,
        has_kernels=False,
        refuses_second_derivatives=False,
        stops_gradients=True,
    ),
    Operation(
        "logp_policy_loss-callable",
        **_policy("logp", _cost),
        leaves=("logp",),
        differentiable=LOSS,
        has_kernels=False,
        refuses_second_derivatives=False,
    ),
    Operation(
        "logp_policy_terms",
        inputs=lambda draw: (
            {name: draw.floats(*draw.tokens, low=low, high=-2.0) for name, low in (("logp", -2.4), ("old_logp", -2.3))}
            | {"advantages": draw.floats(draw.sizes.sequences, low=-1.0), "mask": draw.mask(*draw.tokens)}
        ),
        call=_terms,
        leaves=("logp",),
        differentiable=("loss",),
        has_kernels=False,
        refuses_second_derivatives=False,
        dtypes=FLOAT_DTYPES[:2],
    ),
)


# Credit assignment


def _pair(draw: Draw, last: int, name: str) -> Tensors:
    """Two prompts of different lengths behind which the same response lies."""
    sequences, length = draw.tokens
    tokens = torch.arange(length, device=host_device.device())
    starts = torch.arange(sequences, device=host_device.device())[:, None]
    return {
        f"{name}_with": draw.normal(sequences, length + 2, last),
        f"{name}_without": draw.normal(sequences, length + 1, last),
        "targets": draw.targets(sequences, length),
        "rows_with": starts * (length + 2) + 2 + tokens,
        "rows_without": starts * (length + 1) + 1 + tokens,
    }


def _prefixes(draw: Draw) -> Tensors:
    sequences, length = draw.tokens
    ids = draw.integers(2, sequences, length)
    lengths = torch.arange(sequences, device=host_device.device()) % 3
    return {"token_ids": ids, "lengths": (length - lengths).clamp(min=0), "groups": draw.groups()}


def _answers(draw: Draw) -> Tensors:
    answer = draw.mask(*draw.tokens)
    answer[:, : draw.sizes.length // 2] = False
    thinks = draw.mask(*draw.tokens) & ~answer
    logp = draw.normal(*draw.tokens, scale=0.2)
    return {"logp": -logp.abs(), "think_mask": thinks, "answer_mask": answer, "groups": draw.groups()}


def _like_tokens(*names: str) -> Callable[[Draw], Tensors]:
    """Normal `[B, T]` floats and a mask."""
    return lambda draw: {name: draw.normal(*draw.tokens) for name in names} | {"mask": draw.mask(*draw.tokens)}


def _with(inputs: Callable[[Draw], Tensors], **more: Callable[[Draw], Tensor]) -> Callable[[Draw], Tensors]:
    return lambda draw: inputs(draw) | {name: make(draw) for name, make in more.items()}


def _per_response(*names: str) -> Callable[[Draw], Tensors]:
    return lambda draw: {name: draw.normal(draw.sizes.sequences) for name in names} | {"groups": draw.groups()}


def _embeddings(draw: Draw) -> Tensors:
    """Two groups in turn; in each of them one wrong answer, the last."""
    rows = draw.sizes.sequences * 4
    index = torch.arange(rows, device=host_device.device())
    correct = (index < rows - 2).float()
    positives = torch.where(correct > 0, (index + 2) % max(1, rows - 2), 0)
    inputs = {"embeddings": draw.normal(rows, draw.sizes.hidden, scale=0.2), "correct": correct, "groups": index % 2}
    return inputs | {"positives": positives}


def _contrastive(kind: str) -> Callable[..., Tensors]:
    def call(positives: Tensor, **inputs: Tensor) -> Tensors:
        chosen = {"positives": positives} if kind == "infonce" else {}
        return credit.contrastive_loss(**inputs, **chosen, kind=kind, temperature=0.5)._asdict()

    return call


def _result(function: Callable[..., Any], **options: Any) -> Callable[..., Tensors]:
    """A function of tensors by name, with one result or a named tuple of them."""

    def call(**inputs: Tensor) -> Tensors:
        out = function(**inputs, **options)
        return {"result": out} if isinstance(out, Tensor) else out._asdict()

    return call


def _learned(name: str, inputs: Callable[[Draw], Tensors], call: Callable[..., Tensors], *leaves: str) -> Operation:
    is_contrastive = name.startswith("contrastive_loss")
    return Operation(
        name,
        inputs,
        call,
        leaves,
        ("loss", "per_response") if is_contrastive else ("result",),
        has_kernels=False,
        refuses_second_derivatives=False,
        uses_gemms=is_contrastive,
    )


def _given(name: str, inputs: Callable[[Draw], Tensors], **options: Any) -> Operation:
    """A reward, an advantage or a weight: without a gradient."""
    return Operation(name, inputs, _result(getattr(credit, name), **options), has_kernels=False)


LEARNED = (
    _learned("value_loss", _like_tokens("values", "old_values", "returns"), _result(credit.value_loss), "values"),
    _learned(
        "implicit_prm_loss",
        _with(_like_tokens("logp", "ref_logp"), outcomes=lambda draw: draw.floats(draw.sizes.sequences)),
        _result(credit.implicit_prm_loss),
        "logp",
    ),
    *(
        _learned(f"contrastive_loss-{kind}", _embeddings, _contrastive(kind), "embeddings")
        for kind in ("infonce", "supcon_out", "supcon_in", "soft_nn")
    ),
)

CONTRASTS = (
    Operation(
        "counterfactual_contrast",
        lambda draw: _pair(draw, draw.sizes.vocab, "logits") | _head_numbers(draw),
        _result(credit.counterfactual_contrast),
    ),
    Operation(
        "linear_counterfactual_contrast",
        lambda draw: (
            _pair(draw, draw.sizes.hidden, "hidden")
            | {"weight": draw.normal(draw.sizes.vocab, draw.sizes.hidden, scale=0.3)}
            | _head_numbers(draw)
        ),
        _result(credit.linear_counterfactual_contrast),
        uses_gemms=True,
    ),
    Operation("prefix_set_counts", _prefixes, _result(credit.prefix_set_counts), dtypes=(torch.float32,)),
)


def _outcomes(draw: Draw) -> Tensor:
    return draw.integers(2, draw.sizes.sequences).to(compute_dtype(draw.dtype))


GIVEN = (
    _given("group_advantages", _per_response("rewards")),
    _given("leave_one_out_advantages", _per_response("rewards")),
    _given("group_std", _per_response("rewards")),
    _given("mixed_groups", _per_response("rewards")),
    _given("success_rates", lambda draw: {"correct": _outcomes(draw), "groups": draw.groups()}),
    _given("accuracy_filter", lambda draw: {"accuracies": _outcomes(draw), "groups": draw.groups()}),
    _given("whiten", _like_tokens("x")),
    _given("rollout_weights", _like_tokens("old_logp", "rollout_logp")),
    _given("replay_weights", _like_tokens("contrast")),
    _given(
        "contrast_by_span",
        _with(
            _like_tokens("contrast"),
            spans=lambda draw: (
                torch.tensor([0, draw.sizes.length], device=host_device.device())
                .expand(draw.sizes.sequences, 1, 2)
                .contiguous()
            ),
        ),
    ),
    _given(
        "generalized_advantages",
        _with(_like_tokens("values"), rewards=lambda draw: draw.normal(draw.sizes.sequences)),
        lam=0.9,
    ),
    _given("implicit_process_rewards", _like_tokens("logp", "ref_logp"), batch_norm=True),
    _given(
        "prime_advantages",
        _with(
            _like_tokens("process_rewards"),
            outcome_rewards=lambda draw: draw.normal(draw.sizes.sequences),
            groups=Draw.groups,
        ),
        whiten=True,
    ),
    _given(
        "reference_probability_reward",
        lambda draw: {"answer_logp": draw.normal(*draw.tokens), "answer_mask": draw.mask(*draw.tokens)},
    ),
    _given("verifree_advantages", _answers),
    _given("debias_reward", lambda draw: {name: draw.normal(*draw.tokens[:1]) for name in ("rewards", "base_rewards")}),
    _given("pool_hidden", _with(_like_tokens(), hidden=lambda draw: draw.normal(*draw.tokens, draw.sizes.hidden))),
    _given("contrastive_reward", lambda draw: {"per_response": draw.normal(draw.sizes.sequences)}),
    _given("two_channel_zscore", _per_response("outcomes", "path_scores"), beta=0.5),
    _given("group_variance_decomposition", _per_response("outcomes", "path_scores"), beta=0.5),
    _given("process_set_rewards", _with(_prefixes, rewards=lambda draw: draw.normal(draw.sizes.sequences))),
)

# of credit's names: types, what runs on the host, or on integers and judgements that no gradient could come from
NOT_LISTED = {
    "ContrastiveHead",
    *("ContrastiveLoss", "GeneralizedAdvantages", "PrefixNode", "PrefixTreeSummary", "VarianceDecomposition"),
    *("StdFilter", "budget_at_step", "path_annealing", "skill_budget", "select_skills", "smoothstep_ramp"),
    *("prefix_tree", "prefix_tree_summary", "tool_output_mask", "overlong_penalty", "compression_reward"),
    *("all_or_nothing", "constraint_satisfaction_rate", "outcome_reward", "two_channel_advantages"),
}

OPERATIONS = (*STATISTICS, *LOSSES, *CONTRASTS, *LEARNED, *GIVEN)
