"""What each system's goldens demand: a check a system, found by the case's fields, never by its name."""

from __future__ import annotations

from collections.abc import Callable

from golden_systems import clipo, cort, gmpo, lambda_grpo, nft, prime, retool, rlvp, skill0, surrogates, verifree
from golden_systems.common import Case

SYSTEMS: dict[str, Callable[[Case], None]] = {
    **surrogates.SYSTEMS,
    **gmpo.SYSTEMS,
    **nft.SYSTEMS,
    **lambda_grpo.SYSTEMS,
    **prime.SYSTEMS,
    **rlvp.SYSTEMS,
    **skill0.SYSTEMS,
    **verifree.SYSTEMS,
    **clipo.SYSTEMS,
    **retool.SYSTEMS,
    **cort.SYSTEMS,
}
