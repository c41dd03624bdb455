"""What each system's goldens demand: a check a system, found by the case's fields, never by its name."""

from __future__ import annotations

from collections.abc import Callable

from golden_systems import cort, gmpo, lambda_grpo, nft, surrogates
from golden_systems.common import Case

SYSTEMS: dict[str, Callable[[Case], None]] = {
    **surrogates.SYSTEMS,
    **gmpo.SYSTEMS,
    **nft.SYSTEMS,
    **lambda_grpo.SYSTEMS,
    **cort.SYSTEMS,
}
