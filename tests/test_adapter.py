"""Objectives chosen by name where a trainer's configuration cannot express them, and how the adapters are imported."""

from __future__ import annotations

import doctest
import subprocess
import sys

import pytest

import rlkernels
from rlkernels.integrations import adapter as module
from rlkernels.integrations.adapter import chosen_objective, named_reduction

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
    assert isinstance(chosen_objective("kl_cov", "X", has_whole_batch=True), rlkernels.KLCov)
    with pytest.raises(TypeError, match="objective: expected a recipe's name or an Objective"):
        chosen_objective(lambda logp, batch: logp, "X")  # type: ignore[arg-type]


def test_reductions_that_a_choice_stands_for() -> None:
    assert named_reduction("gspo") == "seq_mean_token_mean"
    assert named_reduction(rlkernels.LUSPO()) == "seq_mean_token_sum"
    assert named_reduction(rlkernels.GSPO()) is None


def test_docstring() -> None:
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("name", ["areal", "nemo_rl", "openrlhf", "prime_rl", "skyrl", "slime"])
def test_importing_an_adapter_imports_no_trainer(name: str) -> None:
    code = f"import sys, rlkernels.integrations.{name}; sys.exit({name!r} in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
