"""The one way to verl's modules: nothing of it is imported before it is asked for."""

from __future__ import annotations

import importlib
from typing import Any


def imported(name: str) -> Any:
    """The module of this name; ImportError says what to install."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "verl":
            raise
        raise ImportError("rlkernels.integrations.verl needs verl: pip install verl") from None
