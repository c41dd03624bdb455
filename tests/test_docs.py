"""What the documents say is so: their code runs, their tables are the package's."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from dataclasses import fields

import pytest
from documents import ROOT, run_code_blocks

import rlkernels
from rlkernels import RECIPES, Objective

MODULES = [
    module.name
    for module in pkgutil.walk_packages(rlkernels.__path__, "rlkernels.")
    if not re.search(r"\.(_native|__main__|triton_kernels|cli|integrations)", module.name)
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


@pytest.mark.parametrize("name", ["README.md", "docs/methods.md"])
def test_code_blocks_run(name: str) -> None:
    run_code_blocks(name)


def test_code_blocks_run_as_one_gloo_process(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    run_code_blocks("docs/distributed.md")


def recipe_table() -> str:
    """One row a recipe; of the fields, those that differ from the base class's defaults."""
    lines = ["| recipe | objective | reduction | the batch must hold |", "|---|---|---|---|"]
    for name, (objective, reduction, normalizer, needs, _) in RECIPES.items():
        base = {field.name: field.default for field in fields(Objective)}
        values = {field.name: getattr(objective, field.name) for field in fields(objective)}
        shown = ", ".join(
            f"{key}={value!r}" for key, value in values.items() if value is not None and base.get(key) != value
        )
        reduction = f"{reduction} / {normalizer:g}" if normalizer else reduction
        needs = {"nft": 'extras["success_rate"]', "dr_grpo": "(normalizer=...)"}.get(name, needs or "")
        lines.append(f"| `{name}` | `{type(objective).__name__}({shown})` | {reduction} | {needs} |")
    return "\n".join(lines)


def test_recipe_table_is_current() -> None:
    assert recipe_table() in (ROOT / "docs" / "recipes.md").read_text()
