"""The ways to Megatron's parallel state, slime's modules and the functions that its configuration names."""

from __future__ import annotations

import importlib
from typing import Any

from rlkernels.integrations.adapter import imported


def parallel_state() -> Any:
    """Megatron-Core's, which the trainer has initialised."""
    return imported("megatron.core", "pip install megatron-core").mpu


def slimes(module: str) -> Any:
    """A module of slime's; the index's package of that name is an empty placeholder."""
    return imported(f"slime.{module}", "install slime from github.com/THUDM/slime")


def function_at(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
