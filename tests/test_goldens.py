"""Numbers from the authors' own code, in value and in gradient to 1e-9 in float64, through every backend.

`RLKERNELS_GOLDENS` names another folder of cases. A case is understood by its system and its fields alone.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from golden_systems import SYSTEMS
from golden_systems.common import Case, load

FOLDER = Path(os.environ.get("RLKERNELS_GOLDENS", Path(__file__).parent / "goldens"))
CASES = {path.stem: load(path) for path in sorted(FOLDER.glob("*.json"))}


def is_simulation(case: Case) -> bool:
    return "policy" in case["inputs"]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not is_simulation(case)])
def test_golden(name: str, backend: str) -> None:
    SYSTEMS[CASES[name]["system"]](CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if is_simulation(case)])
def test_golden_simulation(name: str) -> None:
    SYSTEMS[CASES[name]["system"]](CASES[name])


def test_the_folder_has_cases() -> None:
    """An empty or mistyped folder must not pass."""
    assert CASES, f"no case in {FOLDER}"
