"""Gloo ranks on one machine: cases that all of them run, each against what its own process computes without a group."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close

import rlkernels
from rlkernels import backends
from rlkernels.stats import token_stats

WORLDS = (2, 4)
IGNORE = -100
VOCAB = 61
WIDTHS = {  # of the ranks' shards
    2: [(31, 30), (61, 0), (0, 61), (1, 60)],
    4: [(16, 15, 15, 15), (0, 0, 61, 0), (20, 0, 30, 11)],
}
SEQUENCES = {2: [(4, 3), (7, 0)], 4: [(3, 0, 2, 2), (0, 0, 7, 0)]}  # how many of `whole_batch` a rank has
BACKENDS = [name for name in ("cpu", "reference", "triton") if backends.why_unavailable(name) is None]

TIMEOUT = datetime.timedelta(seconds=30)

Case = Callable[[int, int], None]

CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def on_each_backend(function: Callable[[int, int, str], None]) -> None:
    for backend in BACKENDS:

        def run(rank: int, world: int, backend: str = backend) -> None:
            if backend != BACKENDS[0] and world > 2:
                return  # two ranks say as much
            previous = rlkernels.set_backend(backend)
            try:
                function(rank, world, backend)
            finally:
                rlkernels.set_backend(previous)

        CASES[f"{function.__name__}[{backend}]"] = run


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def columns_of(rank: int, widths: tuple[int, ...]) -> slice:
    start = sum(widths[:rank])
    return slice(start, start + widths[rank])


def close(actual: Tensor, expected: Tensor, **more: Any) -> None:
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}[expected.dtype]
    assert_close(actual, expected, atol=tolerance, rtol=tolerance, equal_nan=True, **more)


def leaf(values: Tensor) -> Tensor:
    return values.clone().requires_grad_()


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (3 * torch.randn(*shape, generator=generator(seed), dtype=torch.float64)).to(dtype)


def some_targets(rows: int, vocab: int = VOCAB) -> Tensor:
    targets = torch.randint(0, vocab, (rows,), generator=generator(7))
    targets[:2] = torch.tensor([0, vocab - 1])
    targets[3] = IGNORE
    return targets


def whole_batch(dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Seven sequences of unequal lengths, one of them empty; hidden states and a head."""
    targets = torch.randint(0, VOCAB, (7, 5), generator=generator(11))
    lengths = torch.tensor([5, 1, 0, 3, 2, 5, 4])
    targets[torch.arange(5) >= lengths[:, None]] = IGNORE
    hidden, weight = 0.2 * drawn(7, 5, 6, dtype=dtype), drawn(VOCAB, 6, dtype=dtype, seed=1)
    old_logp = token_stats(hidden @ weight.T, targets).logp + 0.1 * drawn(7, 5, dtype=dtype, seed=12)
    batch = {
        "targets": targets,
        "advantages": torch.linspace(-1, 1.3, 7, dtype=dtype),
        "old_logp": old_logp,
        "ref_logp": old_logp.flip(-1),
    }
    return batch, hidden, weight


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error)
    raise AssertionError("nothing raised")
