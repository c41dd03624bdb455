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
CASES = {path.stem: path for path in sorted(FOLDER.glob("*.json"))}


def is_simulation(case: Case) -> bool:
    return "policy" in case["inputs"]


KNOWN = {name: case for name, path in CASES.items() if (case := load(path))["system"] in SYSTEMS}


@pytest.mark.parametrize("name", [name for name, case in KNOWN.items() if not is_simulation(case)])
def test_golden(name: str, backend: str) -> None:
    SYSTEMS[KNOWN[name]["system"]](KNOWN[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in KNOWN.items() if is_simulation(case)])
def test_golden_simulation(name: str) -> None:
    SYSTEMS[KNOWN[name]["system"]](KNOWN[name])


def test_every_system_has_a_case() -> None:
    """An empty or mistyped folder must not pass."""
    assert KNOWN, f"no known case in {FOLDER}"
