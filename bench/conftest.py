"""Options and fixtures of the benchmarks. Run them with `python -m rlkernels bench`, or with `pytest bench`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common import Shape

from rlkernels.cli import loss_twins, machine

FULL = Shape(tokens=512, vocab=151_936, groups=64, responses=16, length=4096, rounds=9, short_rounds=51)
QUICK = Shape(tokens=128, vocab=1024, groups=2, responses=4, length=64, rounds=2, short_rounds=2)


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
