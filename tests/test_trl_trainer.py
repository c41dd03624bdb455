"""`FusedGRPOTrainer` against TRL's own loss, and against the definition where TRL has none."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import os
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

# read once, when they are imported
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false")

import pytest
import torch

pytest.importorskip("trl", reason="needs the trl extra: pip install -c constraints.txt -e '.[test,trl]'")

from torch import Tensor
from trl import GRPOTrainer
from trl.trainer import utils
from trl_models import VOCAB, config, dataset, low_ids, tiny_model, tokenizer
from trl_steps import (
    LENGTH,
    LOSS_TYPES,
    PROMPT,
    ROWS,
    TEMPERATURE,
    Exact,
    Operations,
    Result,
    assert_as_exact_as_trl,
    assert_equal_steps,
    assert_like_trl,
    fused_trainer,
    made_up_inputs,
    own_step,
    set_options,
    step,
    trls_step,
)

import rlkernels
from rlkernels.integrations import trl as adapter
from rlkernels.integrations.trl import FusedGRPOTrainer, Replay
from rlkernels.recipes import resolve


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    yield
    adapter.unpatch()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FusedGRPOTrainer]:
    """One trainer, whose options each test sets."""
    trainer = fused_trainer(tmp_path_factory.mktemp("shared"), steps_per_generation=2, gradient_accumulation_steps=3)
    trainer.current_gradient_accumulation_steps = 3
    trainer.model.train()
    yield trainer


@pytest.fixture
def options(shared: FusedGRPOTrainer, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets attributes of the shared trainer and of its args for one test."""
    return partial(set_options, shared, monkeypatch)


def test_all_at_once(options: Any) -> None:
    for loss_type, level in itertools.product(LOSS_TYPES, ("token", "sequence")):
        trainer = options(loss_type=loss_type, importance_sampling_level=level, beta=0.04, delta=1.3, entropy_coef=0.02)
        assert_like_trl(trainer, made_up_inputs(with_tools=True))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_on_policy_and_evaluation(loss_type: str, options: Any) -> None:
    trainer = options(loss_type=loss_type)
    inputs = made_up_inputs()
    del inputs["old_per_token_logps"]
    inputs["advantages"] = inputs["advantages"][:, None] * torch.linspace(0.5, 2, LENGTH)  # of each token
    assert_like_trl(trainer, inputs)
    trainer.model.eval()
    with torch.no_grad():
        mine = trainer._compute_loss(trainer.model, dict(inputs))
        adapter.unpatch()
        trls = GRPOTrainer._compute_loss(trainer, trainer.model, dict(inputs))
    trainer.model.train()
    torch.testing.assert_close(mine, trls, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_vllm_correction_comes_before_the_kl_term(loss_type: str, shape: str, options: Any) -> None:
    trainer = options(loss_type=loss_type, beta=0.04, use_vllm=True, vllm_importance_sampling_correction=True)
    inputs = made_up_inputs()
    if shape == "sequence":
        inputs["importance_sampling_ratio"] = inputs["importance_sampling_ratio"][:, :1]
    inputs["importance_sampling_ratio"][1] = 0.0  # as the mask modes have it
    assert_like_trl(trainer, inputs)


@pytest.mark.parametrize("loss_type", ["grpo", "cispo", "sapo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_kl_without_bias_correction(level: str, loss_type: str, options: Any) -> None:
    trainer = options(
        beta=0.04, use_bias_correction_kl=False, importance_sampling_level=level, loss_type=loss_type, delta=1.1
    )
    assert_like_trl(trainer, made_up_inputs())


@pytest.mark.parametrize("name", ["off_policy_mask_threshold", "top_entropy_quantile"])
def test_what_needs_log_probabilities_first(name: str, options: Any) -> None:
    trainer = options(**{name: 0.5 if name == "top_entropy_quantile" else 0.01}, entropy_coef=0.02)
    assert_like_trl(trainer, made_up_inputs())


def test_adaptive_entropy(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for last in (0.0, 1e9):
        trainer = options(use_adaptive_entropy=True, entropy_coef=0.02)
        results = []
        for patched, loss_of in ((False, GRPOTrainer._compute_loss), (True, FusedGRPOTrainer._compute_loss)):
            monkeypatch.setattr(trainer, "_last_world_entropy", last)
            monkeypatch.setattr(trainer, "_entropy_window_stats", None)
            monkeypatch.setattr(trainer, "entropy_coef", 0.02)
            (adapter.patch if patched else adapter.unpatch)()
            results.append(step(trainer, loss_of, made_up_inputs()))
        assert_equal_steps(results[1], results[0])


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "vespo"])
@pytest.mark.parametrize("head", ["softcap", "logit_scale", "bias", "tied", "frozen", "cast_lm_head_to_fp32"])
def test_heads(head: str, loss_type: str, tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=head == "tied")
    if head == "softcap":
        model.config.final_logit_softcapping = 3.0
    if head == "logit_scale":
        model.config.logit_scale = 0.4
    if head == "bias":
        model.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, VOCAB))
    if head == "frozen":
        model.lm_head.requires_grad_(False)
    trainer = fused_trainer(
        tmp_path,
        model=model,
        loss_type=loss_type,
        entropy_coef=0.02,
        cast_lm_head_to_fp32=head == "cast_lm_head_to_fp32",
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    assert_like_trl(trainer, made_up_inputs())


@pytest.mark.parametrize("loss_type", ["dapo", "vespo"])
def test_lora(loss_type: str, tmp_path: Path) -> None:
    """the head is frozen, and no gradient of its size exists"""
    peft = pytest.importorskip("peft", reason="needs peft")
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    trainer = fused_trainer(tmp_path, peft_config=lora, loss_type=loss_type, entropy_coef=0.02, learning_rate=0.5)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    assert not trainer.model.get_base_model().lm_head.weight.requires_grad
    assert_like_trl(trainer, made_up_inputs())
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    trainer.train()
    moved = {name for name, weight in trainer.model.state_dict().items() if not torch.equal(weight, before[name])}
    assert moved and all("lora_" in name for name in moved)


def test_lora_on_the_head_is_refused_as_by_trl(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="lm_head"):
        fused_trainer(tmp_path, peft_config=lora)


def test_autocast(tmp_path: Path) -> None:
    trainer = fused_trainer(tmp_path, bf16=True, entropy_coef=0.02)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    exact = Exact.of(trainer)
    inputs = made_up_inputs(logp=exact.logp(made_up_inputs()))
    truth = exact.step(inputs)
    trainer.accelerator.prepare_model(trainer.model)
    dtypes = set()
    trainer.model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: dtypes.add(output.dtype))
    trls, mine = trls_step(trainer, inputs), own_step(trainer, inputs)
    assert dtypes == {torch.bfloat16}
    assert_as_exact_as_trl(mine, trls, truth)


def test_training_gives_trls_log(tmp_path: Path) -> None:
    """accumulation that differs from the steps of a generation, truncated completions masked; weights too"""
    logs, weights = [], []
    for kind in (GRPOTrainer, FusedGRPOTrainer):
        trainer = kind(
            model=tiny_model(),
            reward_funcs=low_ids,
            args=config(
                tmp_path,
                per_device_train_batch_size=4,
                gradient_accumulation_steps=2,
                steps_per_generation=4,
                mask_truncated_completions=True,
                entropy_coef=0.01,
            ),
            train_dataset=dataset(),
            processing_class=tokenizer(),
        )
        with Operations() as operations:
            trainer.train()
        # three steps of two micro-batches
        assert operations.counts["rlkernels::policy_objective"] == (6 if kind is FusedGRPOTrainer else 0)
        assert bool(operations.counts) == (kind is FusedGRPOTrainer)
        logs.append([entry for entry in trainer.state.log_history if "loss" in entry])
        weights.append(trainer.model.state_dict())
    assert len(logs[0]) == 3
    assert any(0 < entry.get("completions/clipped_ratio", 0) < 1 for entry in logs[0]), "nothing was truncated"
    for mine, trls in zip(logs[1], logs[0], strict=True):
        assert set(mine) == set(trls)
        for name, value in trls.items():
            if "time" not in name:
                assert mine[name] == pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True), name
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-5, atol=1e-6)


def test_a_micro_batch_without_tokens(options: Any) -> None:
    adapter.patch()
    inputs = made_up_inputs()
    inputs["completion_mask"] = torch.zeros_like(inputs["completion_mask"])
    for loss_type in LOSS_TYPES:
        trainer = options(loss_type=loss_type, entropy_coef=0.02)
        loss, gradients, _ = step(trainer, FusedGRPOTrainer._compute_loss, inputs)
        assert loss == 0 and not any(gradient.any() for gradient in gradients.values())


def test_without_the_patch_it_says_so(options: Any) -> None:
    for loss_type in ("dapo", "vespo"):
        trainer = options(loss_type=loss_type)
        adapter.unpatch()
        inputs = made_up_inputs()
        if loss_type == "vespo":
            trainer.compute_loss(trainer.model, inputs)  # TRL's own loss needs no patch, but with
            inputs["temperatures"] = torch.ones(ROWS, LENGTH)
        with pytest.raises(RuntimeError, match="expected TRL patched"):
            trainer.compute_loss(trainer.model, inputs)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_rows_that_are_not_trained_are_not_projected(loss_type: str, options: Any) -> None:
    """their hidden states may be NaN"""
    adapter.patch()
    trainer = options(loss_type=loss_type, entropy_coef=0.02)
    inputs = made_up_inputs(with_tools=True)
    expected = step(trainer, FusedGRPOTrainer._compute_loss, inputs)
    trained = torch.zeros(ROWS, PROMPT + LENGTH, dtype=torch.bool)
    trained[:, PROMPT - 1 : -1] = (inputs["completion_mask"] * inputs["tool_mask"]).bool()

    def poison(module: Any, args: Any, output: Any) -> Any:
        output.last_hidden_state = torch.where(trained[..., None], output.last_hidden_state, torch.nan)
        return output

    hook = trainer.model.model.register_forward_hook(poison)
    mine = step(trainer, FusedGRPOTrainer._compute_loss, inputs)
    hook.remove()
    assert_equal_steps(mine, expected)


def test_the_loss_is_an_output_of_the_forward(options: Any) -> None:
    """what DDP, FSDP and ZeRO hang their hooks on"""
    adapter.patch()
    trainer = options()
    outputs = []
    hook = trainer.model.register_forward_hook(lambda module, args, output: outputs.append(output))
    loss = trainer._compute_loss(trainer.model, made_up_inputs())
    hook.remove()
    assert len(outputs) == 1 and outputs[0].loss is loss
    assert not outputs[0].log_probs.requires_grad and not outputs[0].entropy.requires_grad


def test_zero3_gathers_the_head_for_backward(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = options(beta=0.04, entropy_coef=0.02)
    adapter.patch()
    expected = step(trainer, FusedGRPOTrainer._compute_loss, made_up_inputs())
    weight = trainer.model.lm_head.weight
    entered = []

    @contextmanager
    def gather(*parameters: Tensor) -> Iterator[None]:
        entered.append(parameters[0] is weight)
        yield

    monkeypatch.setattr(utils, "maybe_gather_lm_head_ctx", gather)
    monkeypatch.setattr(weight, "ds_id", 7, raising=False)
    mine = step(trainer, FusedGRPOTrainer._compute_loss, made_up_inputs())
    assert entered == [True, True]
    assert_equal_steps(mine, expected)


# --- what TRL lacks -------------------------------------------------------------------------------------------------


def definition(
    trainer: FusedGRPOTrainer,
    objective: Any,
    reduction: str,
    normalizer: Any,
    inputs: dict[str, Tensor],
    temperature: float | Tensor = TEMPERATURE,
) -> Result:
    """From the logits of the model's own forward, in plain PyTorch and float64."""
    model = copy.deepcopy(trainer.model).double()
    model.forward = types.MethodType(type(model).forward, model)  # the copy's, not the trainer's with its fused head
    model.zero_grad(set_to_none=True)
    targets = inputs["completion_ids"]
    ids = torch.cat([inputs["prompt_ids"], targets], dim=1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    logits = model(input_ids=ids, attention_mask=attention).logits[:, -targets.shape[1] - 1 : -1]
    batch = rlkernels.PolicyBatch(
        targets,
        inputs["advantages"][:, None],
        mask=inputs["completion_mask"] * inputs.get("tool_mask", 1),
        old_logp=inputs.get("old_per_token_logps"),
        ref_logp=inputs.get("ref_per_token_logps"),
        weight=inputs.get("token_weights"),
        extras={"success_rate": inputs["success_rate"]} if "success_rate" in inputs else None,
    )
    # a mean over tokens would divide the entropy bonus too, which is a mean already
    summed = {"token_mean": "token_sum", "seq_mean_token_sum_norm": "token_sum"}.get(reduction, reduction)
    before = rlkernels.set_backend("reference")
    out = rlkernels.policy_loss(
        logits, batch, objective, reduction=summed, normalizer=normalizer, temperature=temperature
    )
    out.loss.backward()
    rlkernels.set_backend(before)
    gradients = {name: parameter.grad.float() for name, parameter in model.named_parameters()}
    return out.loss.detach().float(), gradients, {name: value.item() for name, value in out.metrics.items()}


def definition_of_own(trainer: FusedGRPOTrainer, objective: Any, inputs: dict[str, Tensor]) -> Result:
    """Of a recipe, an instance or a callable, with the terms and denominators of the trainer's args."""
    written, reduction, *_ = resolve(objective, None)
    accumulation = trainer.current_gradient_accumulation_steps
    if objective is not tis:
        written = dataclasses.replace(
            written,
            kl_coef=trainer.beta,
            kl_importance_weighted=trainer.beta > 0,  # TRL's default
            entropy_coef=trainer.entropy_coef / accumulation,
        )
    rows = len(inputs["completion_ids"])
    denominators = {
        "token_mean": inputs["num_items_in_batch"] / trainer.args.steps_per_generation,
        "seq_mean_token_mean": rows,
        "seq_mean_token_sum": rows,
        "seq_mean_token_sum_norm": rows * 12,
        "token_sum": 1000,
    }
    normalizer = accumulation * denominators[reduction]
    if objective == "bnpo":
        normalizer = accumulation * (inputs["completion_mask"] * inputs.get("tool_mask", 1)).sum()
    return definition(trainer, written, reduction, normalizer, inputs)


def tis(logp: Tensor, batch: rlkernels.PolicyBatch) -> Tensor:
    """a callable that only Python knows"""
    old_logp = logp.detach() if batch.old_logp is None else batch.old_logp
    return -(logp - old_logp).exp().clamp(max=2.0).detach() * batch.advantages * logp


OWN = [*rlkernels.RECIPES, rlkernels.GMPO(clip_level="sequence"), rlkernels.GRPO(dual_clip=3.0), tis]


def name_of(objective: Any) -> str:
    return objective if isinstance(objective, str) else getattr(objective, "__name__", type(objective).__name__)


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("objective", OWN, ids=name_of)
def test_own_objectives_match_the_definition(
    objective: Any, beta: float, shared: FusedGRPOTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter.patch()
    inputs = made_up_inputs(with_tools=True)
    inputs["success_rate"] = torch.tensor([0.25, 0.5, 0.75, 0.5, 0.25])
    inputs["token_weights"] = torch.linspace(0.2, 1, LENGTH).expand(ROWS, LENGTH)
    monkeypatch.setattr(shared, "beta", 0.0 if objective is tis else beta)
    monkeypatch.setattr(shared, "_own", shared._checked(objective, None))
    mine = step(shared, FusedGRPOTrainer._compute_loss, inputs)
    expected = definition_of_own(shared, objective, inputs)
    assert_equal_steps(mine, expected, metrics=False)
    for name, value in expected[2].items():
        logged = mine[2][{"entropy": "entropy", "ref_kl": "kl"}.get(name, f"policy/{name}")]
        assert logged == pytest.approx([value], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_vespo_takes_vllms_correction_into_its_ratio(level: str, options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """as TRL's does"""
    trainer = options(loss_type="vespo", use_vllm=True, vllm_importance_sampling_correction=True)
    inputs = made_up_inputs(with_tools=True)
    is_padding = inputs["completion_mask"] * inputs["tool_mask"] == 0
    ratio = inputs["importance_sampling_ratio"].masked_fill(is_padding, 1.0)
    inputs["importance_sampling_ratio"] = ratio if level == "token" else ratio[:, :1]
    expected = step(trainer, GRPOTrainer._compute_loss, inputs)
    adapter.patch()
    monkeypatch.setattr(trainer.args, "loss_type", "dapo")
    monkeypatch.setattr(trainer, "_own", trainer._checked("vespo", None))
    mine = step(trainer, FusedGRPOTrainer._compute_loss, inputs)
    assert_equal_steps(mine, expected, metrics=False)


@pytest.mark.parametrize("objective", [*rlkernels.RECIPES, tis], ids=name_of)
def test_own_objectives_train(objective: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """and each of the trainer's own micro-batches has the definition's loss and gradients"""
    trainer = fused_trainer(
        tmp_path,
        objective=objective,
        max_steps=2,
        num_iterations=2,
        gradient_accumulation_steps=2,
        entropy_coef=0.0 if objective is tis else 0.01,
    )
    compute = trainer._compute_loss
    steps = []

    def compared(model: Any, inputs: dict[str, Tensor]) -> Tensor:
        steps.append(trainer.state.global_step)
        if objective == "kl_cov" and steps[-1] == 0:  # its penalty has a kink where the ratio is 1
            return compute(model, inputs)
        assert "old_per_token_logps" in inputs
        torch.manual_seed(0)  # what a recipe draws
        expected = definition_of_own(trainer, objective, inputs)
        torch.manual_seed(0)
        loss = compute(model, inputs)
        gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        names = [name for name, _ in model.named_parameters()]
        assert_equal_steps((loss.detach(), dict(zip(names, gradients, strict=True)), {}), expected, metrics=False)
        return loss

    monkeypatch.setattr(trainer, "_compute_loss", compared)
    trainer.train()
    assert steps == [0, 0, 1, 1]
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 2 and all(math.isfinite(entry["loss"]) and entry["grad_norm"] > 0 for entry in logs)
    assert {"entropy", "reward", "completions/mean_length", "policy/approx_kl_k1"} <= set(logs[0])
    assert not any(name.startswith("clip_ratio") for name in logs[0]), "TRL's clip metrics are of TRL's loss"


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"objective": "no_such"}, "objective: expected one of"),
        ({"reduction": "token_mean"}, "reduction: expected None without an objective"),
        ({"objective": "grpo", "reduction": "none"}, "reduction: expected one of token_mean"),
        ({"objective": "grpo", "delta": 1.5}, "delta: expected None with an objective, which has fields .*, got 1.5"),
        ({"objective": "gmpo", "epsilon": 0.1}, "epsilon: expected 0.2 with an objective"),
        ({"objective": "gmpo", "loss_type": "bnpo"}, "loss_type: expected 'dapo' with an objective"),
        ({"objective": "grpo", "top_entropy_quantile": 0.2}, "top_entropy_quantile: expected 1.0"),
        ({"objective": "grpo", "off_policy_mask_threshold": 0.2}, "off_policy_mask_threshold: expected None"),
        ({"objective": "grpo", "use_adaptive_entropy": True}, "use_adaptive_entropy: expected False"),
        ({"objective": rlkernels.GRPO(entropy_coef=0.1)}, "entropy_coef to be left to the trainer's args"),
        ({"objective": tis, "entropy_coef": 0.1}, "with a callable"),
        ({"prefix_weights": True}, "prefix_weights: expected None or False without an objective"),
        ({"objective": "lambda_grpo", "prefix_weights": False}, "prefix_weights: expected None or True"),
    ],
    ids=lambda value: value if isinstance(value, str) else " and ".join(value),
)
def test_what_has_no_meaning_is_refused(own: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        fused_trainer(tmp_path, **own)


# --- what needs whole groups ----------------------------------------------------------------------------------------

COMPLETIONS = [[5, 6, 7, 1], [5, 6, 8], [5, 9], [5, 6, 7, 1], [4, 4, 4], [4, 4], [3, 4, 4], [4, 4, 9, 9, 9]]
COUNTS = [[4, 3, 2, 2], [4, 3, 1], [4, 1], [4, 3, 2, 2], [3, 3, 1], [3, 3], [1, 1, 1], [3, 3, 1, 1, 1]]


def generated(trainer: FusedGRPOTrainer, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], dict[str, Tensor]]:
    """Examples, and what becomes of `COMPLETIONS` before TRL shuffles them."""

    def given(self: GRPOTrainer, prompts: list[Any]) -> Any:
        ids = self._tokenize_prompts(prompts)[0]
        return ids, COMPLETIONS, None, [""] * len(prompts), None, {}, None, None

    monkeypatch.setattr(GRPOTrainer, "_generate", given)
    monkeypatch.setattr(trainer, "current_gradient_accumulation_steps", 1, raising=False)
    trainer.model.train()
    examples = next(iter(trainer.get_train_dataloader()))
    return examples, trainer._generate_and_score_completions(examples)


@pytest.mark.parametrize("mask_truncated_completions", [False, True])
def test_prefix_weights(mask_truncated_completions: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """by the ids' own lengths, also where truncation has zeroed the mask"""
    trainer = fused_trainer(tmp_path, objective="lambda_grpo", mask_truncated_completions=mask_truncated_completions)
    _, output = generated(trainer, monkeypatch)
    for row, counts in zip(output["token_weights"], COUNTS, strict=True):
        padded = counts + [1] * (len(row) - len(counts))
        assert row.tolist() == pytest.approx([1 / count for count in padded])
    assert bool((output["completion_mask"].sum(1) == 0).any()) == mask_truncated_completions


def test_weights_stay_with_their_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """through TRL's shuffling and splitting"""
    trainer = fused_trainer(
        tmp_path, objective="lambda_grpo", per_device_train_batch_size=4, gradient_accumulation_steps=2
    )
    examples, _ = generated(trainer, monkeypatch)
    weight_of = {tuple(ids): [1 / count for count in counts] for ids, counts in zip(COMPLETIONS, COUNTS, strict=True)}
    seen = 0
    for micro_batch in range(2):
        trainer._step = micro_batch
        inputs = trainer._prepare_inputs(examples)
        for ids, mask, weights in zip(
            inputs["completion_ids"], inputs["completion_mask"], inputs["token_weights"], strict=True
        ):
            length = int(mask.sum())
            assert weights[:length].tolist() == pytest.approx(weight_of[tuple(ids[:length].tolist())])
            seen += 1
    assert seen == len(COMPLETIONS)


def test_nft_reads_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = fused_trainer(tmp_path, objective="nft")
    rewards = [1.0, 0.0, None, 0.0, 1.0, 1.0, 1.0, 1.0]
    monkeypatch.setattr(trainer, "reward_funcs", [lambda completions, **_: rewards])
    _, output = generated(trainer, monkeypatch)
    assert output["success_rate"].tolist() == pytest.approx([1 / 3] * 4 + [1.0] * 4)
    assert output["advantages"].tolist() == [1, -1, -1, -1, 1, 1, 1, 1]
    assert output["token_weights"].amax(1).tolist() == [1, 1, 0, 1, 1, 1, 1, 1]


OTHER_PROMPTS = {"counterfactual_prompt": ["w11 w12", "w20 w21 w22 w23 w24 w25", "w30", "w40 w42"]}


def naive_logp(trainer: FusedGRPOTrainer, prompt: str, ids: list[int], temperatures: Tensor | None = None) -> Tensor:
    before = tokenizer()(prompt)["input_ids"]
    logits = trainer.model(torch.tensor([before + ids])).logits[0, len(before) - 1 : -1]
    divisor = 0.9 if temperatures is None else temperatures[:, None].double()
    return (logits.double() / divisor).log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)].detach()


@pytest.mark.parametrize("remove_unused_columns", [False, True])
@pytest.mark.parametrize("aligned", [True, False], ids=["factual-pass", "old-logp"])
def test_contrast_weights_the_advantages(
    aligned: bool, remove_unused_columns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = fused_trainer(
        tmp_path,
        OTHER_PROMPTS,
        replay=Replay(strength=0.8, sharpness=20.0),
        num_iterations=1 if aligned else 2,
        remove_unused_columns=remove_unused_columns,
        mask_truncated_completions=True,
    )
    examples, output = generated(trainer, monkeypatch)
    assert ("old_per_token_logps" in output) == (not aligned)
    _, plain = generated(fused_trainer(tmp_path, OTHER_PROMPTS, mask_truncated_completions=True), monkeypatch)
    assert plain["advantages"].ndim == 1
    trained = 0
    for row, (example, ids) in enumerate(zip(examples, COMPLETIONS, strict=True)):
        mask = output["completion_mask"][row]
        if not mask.any():  # truncated
            assert not output["contrast"][row].any() and not output["advantages"][row].any()
            continue
        trained += 1
        contrast = naive_logp(trainer, example["prompt"], ids) - naive_logp(
            trainer, example["counterfactual_prompt"], ids
        )
        torch.testing.assert_close(output["contrast"][row, : len(ids)].double(), contrast, rtol=1e-4, atol=1e-5)
        weights = 1 + 0.8 * (torch.sigmoid(20.0 * contrast) - 0.5)
        expected = plain["advantages"][row] * weights / weights.mean()
        torch.testing.assert_close(output["advantages"][row, : len(ids)].double(), expected, rtol=1e-4, atol=1e-5)
        assert not output["advantages"][row, len(ids) :].any()
    assert trained == 2
    assert output["contrast"].abs().max() > 1e-3, "a contrast that tests nothing"


@pytest.mark.parametrize("objective", [None, "gmpo"])
def test_replay_trains(objective: str | None, tmp_path: Path) -> None:
    trainer = fused_trainer(
        tmp_path,
        OTHER_PROMPTS,
        objective=objective,
        replay=Replay(strength=1.0, warmup=0, length=2),
        max_steps=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 2 and all(math.isfinite(entry["loss"]) and entry["contrast"] != 0 for entry in logs)


def test_replay_without_its_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = fused_trainer(tmp_path, replay=Replay())
    with pytest.raises(ValueError, match="expected a column 'counterfactual_prompt' in every example, got"):
        generated(trainer, monkeypatch)
    with pytest.raises(TypeError, match="replay: expected a Replay or None, got dict"):
        fused_trainer(tmp_path, replay={"strength": 1.0})
    with pytest.raises(ValueError, match="replay: expected None with NFT"):
        fused_trainer(tmp_path, replay=Replay(), objective="nft")
    with pytest.raises(ValueError, match="strength"):
        Replay(strength=2.0)


# --- temperatures of single tokens ------------------------------------------------------------------------------------

TEMPERATURES: list[Any] = [0.5, [0.5, 1.5, 0.7], 2.0, [1.0, 1.0, 0.25, 3.0], 0.9, [1.0, 0.3], 1.0, 0.9]


def rollout(prompts: list[Any], trainer: GRPOTrainer, temperatures: Any = TEMPERATURES) -> dict[str, Any]:
    return {
        "prompt_ids": trainer.processing_class(text=prompts)["input_ids"],
        "completion_ids": COMPLETIONS,
        "logprobs": None,
        "temperatures": temperatures,
    }


def test_temperatures_of_a_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """in old log-probabilities, in several micro-batches, and in CoRT's contrast"""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    trainer = fused_trainer(tmp_path, OTHER_PROMPTS, replay=Replay(), num_iterations=2, num_generations=8)
    trainer.args.per_device_train_batch_size = 3  # the last part is smaller
    trainer.rollout_func = rollout
    trainer.model.train()
    examples = [{"prompt": "w10 w11", "counterfactual_prompt": "w12"}] * 8
    output = trainer._generate_and_score_completions(examples)
    for row, (ids, given) in enumerate(zip(COMPLETIONS, TEMPERATURES, strict=True)):
        temperatures = torch.tensor(given).expand(len(ids))
        assert output["temperatures"][row, : len(ids)].tolist() == temperatures.tolist()
        factual, counterfactual = (naive_logp(trainer, prompt, ids, temperatures) for prompt in ("w10 w11", "w12"))
        torch.testing.assert_close(
            output["old_per_token_logps"][row, : len(ids)].double(), factual, rtol=1e-5, atol=1e-5
        )
        torch.testing.assert_close(
            output["contrast"][row, : len(ids)].double(), factual - counterfactual, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("given", [None, "zero3"])
@pytest.mark.parametrize("objective", ["grpo", "gspo"])
def test_loss_at_temperatures(
    objective: str, given: str | None, shared: FusedGRPOTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter.patch()
    if given == "zero3":
        monkeypatch.setattr(shared.model.lm_head.weight, "ds_id", 7, raising=False)
    inputs = made_up_inputs()
    temperatures = torch.linspace(0.5, 2, ROWS * LENGTH).view(ROWS, LENGTH)
    inputs["temperatures"] = temperatures
    monkeypatch.setattr(shared, "_own", shared._checked(objective, None))
    mine = step(shared, FusedGRPOTrainer.compute_loss, inputs)
    written = resolve(objective, None).objective
    expected = definition(shared, written, "seq_mean_token_mean", 3 * ROWS, inputs, temperatures)
    assert_equal_steps(mine, expected, metrics=False)


@pytest.mark.parametrize("loss_type", ["grpo", "vespo"])
def test_one_temperature_for_all_is_trls(loss_type: str, options: Any) -> None:
    trainer = options(loss_type=loss_type)
    inputs = made_up_inputs()
    adapter.unpatch()
    expected = step(trainer, GRPOTrainer._compute_loss, inputs)
    adapter.patch()
    inputs["temperatures"] = torch.full((ROWS, LENGTH), 0.9)
    assert_equal_steps(step(trainer, FusedGRPOTrainer.compute_loss, inputs), expected)
    inputs["temperatures"] = torch.full((ROWS, LENGTH), 1.8)
    assert not torch.equal(step(trainer, FusedGRPOTrainer.compute_loss, inputs)[0], expected[0])


@pytest.mark.parametrize(
    ("temperatures", "message"),
    [([1.0] * 7, "expected 8, one a completion, got 7"), ([[1.0, 1.0]] * 8, "expected a number or 4 numbers")],
)
def test_bad_temperatures(temperatures: Any, message: str, tmp_path: Path) -> None:
    trainer = fused_trainer(tmp_path)
    trainer.rollout_func = lambda prompts, trainer: rollout(prompts, trainer, temperatures)
    with pytest.raises(ValueError, match=f"temperatures: {message}"):
        trainer._generate_and_score_completions([{"prompt": "w10"}] * 8)


# --- two ranks ------------------------------------------------------------------------------------------------------


def test_two_ranks(tmp_path: Path) -> None:
    """DDP and FSDP2 over gloo: TRL's log and weights to its numbers; prefix sets of a group that lies on both ranks"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    worker = str(Path(__file__).with_name("trl_rank.py"))
    ranks = [
        subprocess.Popen(
            [sys.executable, worker, str(tmp_path)],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(text[-3000:] for text in said)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(2))
    assert first["weighed"]["counts"] == [[4, 3, 2, 2], [4, 3, 1, 1]]
    assert second["weighed"]["counts"] == [[4, 1, 1, 1, 1, 1], [4, 3, 2, 2, 1, 1]]
    for rank in (first, second):
        torch.testing.assert_close(*rank["sharded"]["losses"], rtol=1e-5, atol=1e-6)
        for name, whole, part in rank["sharded"]["gradients"]:
            assert (part - whole).norm() <= 3e-5 * whole.norm(), name
    start = tiny_model().state_dict()
    for kind in ("fused", "gmpo"):
        for name, weight in first[kind]["weights"].items():
            assert torch.equal(weight, second[kind]["weights"][name]), f"{kind}: the ranks' {name} differ"
            assert not torch.equal(weight, start[name])
    for name, weight in first["trl"]["weights"].items():
        torch.testing.assert_close(first["fused"]["weights"][name], weight, rtol=1e-5, atol=1e-6)
    assert len(first["fused"]["log"]) == 2
    for mine, trls in zip(first["fused"]["log"], first["trl"]["log"], strict=True):
        timed = {name for name in trls if "time" in name or "per_second" in name}
        assert {name: mine[name] for name in trls if name not in timed} == pytest.approx(
            {name: trls[name] for name in trls if name not in timed}, rel=1e-5, abs=1e-6, nan_ok=True
        )
