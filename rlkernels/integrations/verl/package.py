"""The one way to verl's modules: nothing of it is imported before it is asked for."""

from __future__ import annotations

from typing import Any

from rlkernels.integrations import adapter


def imported(name: str) -> Any:
    return adapter.imported(name, "pip install verl")
