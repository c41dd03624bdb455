"""Objectives chosen by name where a trainer's configuration cannot express them, and how the adapters are imported."""

from __future__ import annotations

import doctest
import subprocess
import sys

import pytest

import rlkernels
from rlkernels.integrations import chosen_objective as module
from rlkernels.integrations.chosen_objective import chosen_objective

REFUSED = {"nft", "lambda_grpo", "clip_cov", "kl_cov"}


@pytest.mark.parametrize("name", sorted(rlkernels.RECIPES))
def test_every_recipe_is_its_objective_or_refused(name: str) -> None:
    if name not in REFUSED:
        assert chosen_objective(name, "X") == rlkernels.RECIPES[name].objective
        return
    with pytest.raises(ValueError, match=f"objective: expected one that X can serve, got '{name}', which needs"):
        chosen_objective(name, "X")


def test_instances() -> None:
    gspo = rlkernels.GSPO(clip_low=0.1)
    assert chosen_objective(gspo, "X") is gspo
    with_kl = rlkernels.GRPO(kl_coef=0.1)
    assert chosen_objective(with_kl, "X", has_ref_logp=True) is with_kl
    with pytest.raises(ValueError, match=r"which needs ref_logp with kl_coef=0\.1"):
        chosen_objective(with_kl, "X")
    with pytest.raises(ValueError, match=r"needs entropies. gradient with entropy_coef=0\.2"):
        chosen_objective(rlkernels.GRPO(entropy_coef=0.2), "X")
    with pytest.raises(TypeError, match="objective: expected a recipe's name or an Objective"):
        chosen_objective(lambda logp, batch: logp, "X")  # type: ignore[arg-type]


def test_docstring() -> None:
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("name", ["areal", "nemo_rl", "prime_rl"])
def test_importing_an_adapter_imports_no_trainer(name: str) -> None:
    code = f"import sys, rlkernels.integrations.{name}; sys.exit({name!r} in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
