"""Options and fixtures of the benchmarks. Run them with `python -m rlkernels bench`, or with `pytest bench`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common import Shape

from rlkernels.cli import loss_twins, machine

FULL = Shape(512, 151_936, 64, 16, 4096, slow_rounds=3, rounds=9, short_rounds=51, is_quick=False)
QUICK = Shape(128, 1024, 2, 4, 64, slow_rounds=1, rounds=2, short_rounds=2, is_quick=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="small shapes: checks that every benchmark runs")


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    machine_info["rlkernels"] = {**machine.summary(), "quick": config.getoption("--quick")}


@pytest.fixture(scope="session")
def shape(request: pytest.FixtureRequest) -> Shape:
    return QUICK if request.config.getoption("--quick") else FULL


@pytest.fixture(scope="session", params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def rows(request: pytest.FixtureRequest, shape: Shape) -> loss_twins.Rows:
    return loss_twins.make_rows(shape.tokens, shape.vocab, request.param, "cpu")


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """A function that was compiled for eight shapes would run uncompiled on the ninth."""
    torch.compiler.reset()
