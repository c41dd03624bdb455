"""The ways to Megatron's parallel state, slime's modules and the functions that its configuration names."""

from __future__ import annotations

import importlib
from typing import Any


def parallel_state() -> Any:
    """Megatron-Core's parallel state, which the trainer has initialised."""
    try:
        return importlib.import_module("megatron.core").mpu
    except ModuleNotFoundError as error:
        if error.name not in ("megatron", "megatron.core"):
            raise
        raise ImportError("rlkernels.integrations.slime needs Megatron-Core: pip install megatron-core") from None


def imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("slime"):
            raise
        raise ImportError("rlkernels.integrations.slime needs slime: github.com/THUDM/slime") from None


def loaded(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
