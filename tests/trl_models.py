"""A tiny Qwen3 with a real vocabulary, a short SmolLM2, a tokenizer, and the arguments of a short GRPO run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig

VOCAB = 32768
PROMPTS = ["w10 w11 w12", "w20", "w30 w31 w32 w33 w34", "w40 w41"]


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1", pad_token="w2")


def tiny_model(tie_word_embeddings: bool = False, ends_early: bool = True) -> Qwen3ForCausalLM:
    """Completions end early, at different lengths, where the end of a text has fifty times the others' weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=tie_word_embeddings,
        eos_token_id=1,
        pad_token_id=2,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    if ends_early:
        with torch.no_grad():
            model.lm_head.weight[1] *= 50
    return model


def small_smollm2() -> LlamaForCausalLM:
    """SmolLM2-135M's config, but two layers of thirty."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        initializer_range=0.041666666666666664,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def low_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(index < VOCAB // 2 for index in ids) / len(ids) + 0.01 * len(ids) for ids in completion_ids]


def config(folder: Path, **changed: Any) -> GRPOConfig:
    arguments = {
        "output_dir": str(folder),
        "seed": 3,
        "use_cpu": True,
        "bf16": False,
        "max_steps": 3,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 12,
        "temperature": 0.9,
        "optim": "sgd",
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return GRPOConfig(**(arguments | changed))


def dataset(**columns: list[Any]) -> Dataset:
    return Dataset.from_dict({"prompt": PROMPTS, **columns})
