"""A tiny Qwen3 with a real vocabulary, its tokenizer, and the arguments of a short GRPO run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig

VOCAB = 32768
PROMPTS = ["w10 w11 w12", "w20", "w30 w31 w32 w33 w34", "w40 w41"]


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1", pad_token="w2")


def tiny_model(tie_word_embeddings: bool = False) -> Qwen3ForCausalLM:
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
    with torch.no_grad():
        model.lm_head.weight[1] *= 50  # completions end early, at different lengths
    return model


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
