"""What `token_stats` promises beside its values and beside what `test_contracts.py` has of every operation."""

from __future__ import annotations

import itertools
from typing import Any

import host_device
import pytest
import torch
from test_token_stats import DIFFERENTIABLE, IGNORE, gaussian, name_of, random_targets
from torch import Generator, Tensor

from rlkernels import backends
from rlkernels.ops.rows import RowStats, SavedStats, Upstream, Wanted, empty_row_stats
from rlkernels.stats import OUTPUTS, make_rows, token_stats

backend = host_device.backend_anywhere
EVERYTHING = Wanted(*[True] * len(OUTPUTS))
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# For promises of bit-equality between different shapes, which PyTorch's own reductions do not give.
kernels = pytest.mark.parametrize("backend", ["cpu", "triton"], indirect=True)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)


def leaf_and_targets(
    backend: str, generator: Generator, dtype: torch.dtype = torch.float32, n: int = 6, vocab: int = 1003
) -> tuple[Tensor, Tensor]:
    case = gaussian(generator, dtype, n, vocab).to(host_device.device())
    return case.logits.requires_grad_(), case.targets


def weighted_sum(stats: Any, weights: tuple[float, float, float] = (1.0, 0.5, -0.25)) -> Tensor:
    terms = (getattr(stats, name) for name in DIFFERENTIABLE)
    return sum(weight * term.sum() for weight, term in zip(weights, terms, strict=True))


def assert_equal_bits(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


# Every element is written, and nothing beside it


def poison(tensor: Tensor, flag: bool) -> Tensor:
    return tensor.fill_(flag if tensor.dtype == torch.bool else torch.nan)


@kernels
@every_dtype
@pytest.mark.parametrize("options", [{}, {"softcap": 30.0}], ids=["plain", "softcap"])
@pytest.mark.parametrize("vocab", [1, 5, 1003, 9001], ids="V={}".format)
def test_every_element_is_written(
    backend: str, vocab: int, options: dict[str, float], dtype: torch.dtype, generator: Generator
) -> None:
    logits, targets = leaf_and_targets(backend, generator, dtype, n=5, vocab=vocab)
    targets[1] = IGNORE
    rows = make_rows(logits.detach(), targets, 0.75, options.get("softcap"), 1.0, IGNORE)
    module = backends.implementation("token_stats", logits)

    results = []
    for flag in (True, False):  # a bool has no NaN
        stats = RowStats(*(poison(tensor, flag) for tensor in empty_row_stats(rows, EVERYTHING)))
        module.token_stats_forward(rows, stats)
        results.append(stats)
    assert_equal_bits(*results)
    assert all(stat.isfinite().all() for stat in stats)

    saved = SavedStats(stats.row_max, stats.log_sum_exp, stats.entropy)
    upstream = torch.linspace(-1.0, 1.0, 5, dtype=stats.logp.dtype, device=logits.device)
    guard = 64
    buffer = poison(logits.new_empty(5 * vocab + 2 * guard), False)
    dlogits = buffer[guard:-guard].view(rows.logits.shape)
    # the middle row has no upstream, the second is ignored
    module.token_stats_backward(rows, saved, Upstream(upstream, None, 2 * upstream), dlogits)
    assert dlogits.isfinite().all()
    assert (dlogits[0, [1, 2]] == 0).all()
    assert buffer[:guard].isnan().all()
    assert buffer[-guard:].isnan().all()


@kernels
@pytest.mark.parametrize("wanted", [Wanted(*flags) for flags in itertools.product([False, True], repeat=5)], ids=str)
def test_only_wanted_outputs_are_written(backend: str, wanted: Wanted, generator: Generator) -> None:
    logits, targets = leaf_and_targets(backend, generator, n=2, vocab=130)
    rows = make_rows(logits.detach(), targets, 1.0, None, 1.0, IGNORE)
    stats = RowStats(*(poison(tensor, False) for tensor in empty_row_stats(rows, wanted)))
    backends.implementation("token_stats", logits).token_stats_forward(rows, stats)
    for name in OUTPUTS:
        assert getattr(stats, name).numel() == (2 if getattr(wanted, name) else 0), name
    assert all(stat.isfinite().all() for stat in stats)


@every_dtype
def test_gradient_written_past_the_caches(dtype: torch.dtype, generator: Generator) -> None:
    """The C++ kernels stream a gradient of 32 MiB or more; its bits are those of a small one."""
    backends.set_backend("cpu")
    vocab = 32 * 1024  # rows of whole cache lines
    logits, targets = leaf_and_targets("cpu", generator, dtype, (1 << 25) // (vocab * dtype.itemsize) + 1, vocab)

    def gradient(logits: Tensor, targets: Tensor) -> Tensor:
        stats = token_stats(logits, targets, outputs=OUTPUTS)
        return torch.autograd.grad(weighted_sum(stats), logits)[0]

    whole = gradient(logits, targets)
    for rows in (slice(0, 3), slice(-3, None)):
        assert_equal_bits(whole[rows], gradient(logits.detach()[rows].requires_grad_(), targets[rows]))


# Equal bits


@kernels
@every_dtype
def test_row_alone_in_a_batch_and_in_a_view(backend: str, dtype: torch.dtype, generator: Generator) -> None:
    """B42: no ratio other than 1 on the first step, however tokens are batched."""
    wide, targets = leaf_and_targets(backend, generator, dtype, n=6, vocab=9003)
    logits = wide.detach()[:, 1:-1]  # rows that are not aligned
    targets = targets.clamp(max=9000)

    def both_passes(logits: Tensor, targets: Tensor) -> tuple[Any, Tensor]:
        leaf = logits.detach().requires_grad_()
        stats = token_stats(leaf, targets, temperature=0.75, outputs=OUTPUTS)
        return stats, torch.autograd.grad(weighted_sum(stats), leaf)[0]

    stats, dlogits = both_passes(logits, targets)
    columns_apart = logits.T.contiguous().T
    for copy in (logits.contiguous(), columns_apart):
        assert_equal_bits(both_passes(copy, targets), (stats, dlogits))
    for row in (0, 5):
        alone, dalone = both_passes(logits[row], targets[row])
        assert_equal_bits((tuple(alone), dalone), (tuple(stat[row] for stat in stats), dlogits[row]))


# Upstream gradients


def gradient_of(stats_and_leaf: tuple[Any, Tensor], upstream: dict[str, Tensor]) -> Tensor:
    stats, leaf = stats_and_leaf
    outputs = [getattr(stats, name) for name in upstream]
    return torch.autograd.grad(outputs, leaf, list(upstream.values()), retain_graph=True)[0]


@pytest.mark.parametrize("names", [("logp",), ("entropy",), ("lse",), ("entropy", "lse")], ids=" and ".join)
def test_part_of_the_upstream(backend: str, names: tuple[str, ...], generator: Generator) -> None:
    """What gets no gradient is the same as what gets zeros."""
    logits, targets = leaf_and_targets(backend, generator)
    stats = token_stats(logits, targets, outputs=OUTPUTS)
    given = {name: torch.randn(6, generator=generator).to(logits.device) for name in names}
    padded = {name: given.get(name, torch.zeros(6, device=logits.device)) for name in DIFFERENTIABLE}
    torch.testing.assert_close(
        gradient_of((stats, logits), given), gradient_of((stats, logits), padded), rtol=1e-6, atol=1e-8
    )
    only = token_stats(logits, targets, outputs=[name for name in names if name != "logp"])
    assert_equal_bits(gradient_of((only, logits), given), gradient_of((stats, logits), given))


# PyTorch's machinery


@pytest.mark.parametrize("backend", ["cpu", "reference"], indirect=True)
def test_compile_by_inductor(backend: str, generator: Generator) -> None:
    """Without a graph break, forward and backward, to the bits of the operation run eagerly."""
    logits, targets = leaf_and_targets(backend, generator)

    def loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        stats = token_stats(logits, targets, temperature=0.7, softcap=30.0, outputs=("entropy", "lse"))
        return (stats.logp - 0.1 * stats.entropy + 0.01 * stats.lse).sum(), stats.logp.detach()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True)
    results = []
    for function in (loss, compiled):
        value, logp = function(logits, targets)
        results.append((value, logp, torch.autograd.grad(value, logits)[0]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    if backend != "reference":
        assert_equal_bits(results[1][1], results[0][1])


def test_compiled_numbers(backend: str, generator: Generator) -> None:
    """Numbers that change from call to call, a schedule say: compiled again or not, they arrive."""
    logits, targets = leaf_and_targets(backend, generator, n=2, vocab=11)
    torch._dynamo.reset()
    compiled = torch.compile(token_stats, fullgraph=True, backend="eager")
    for temperature in (0.5, 0.7, 0.9):
        expected = token_stats(logits, targets, temperature=temperature).logp
        torch.testing.assert_close(compiled(logits, targets, temperature=temperature).logp, expected)


@pytest.mark.parametrize("backend", ["cpu"], indirect=True)
def test_compiled_calls_still_check_labels(backend: str, generator: Generator) -> None:
    logits, targets = leaf_and_targets(backend, generator, n=2, vocab=11)
    torch._dynamo.reset()
    compiled = torch.compile(token_stats, fullgraph=True, backend="eager")
    compiled(logits, targets)
    with pytest.raises(ValueError, match=r"targets.*11.*got 12"):
        compiled(logits, torch.full_like(targets, 12))


# Memory: saved are the logits themselves and a few numbers a row


@kernels
@every_dtype
def test_saved_tensors(backend: str, dtype: torch.dtype, generator: Generator) -> None:
    """B36, B92: a slice of a larger tensor is saved as what it is, not copied."""
    n, vocab = 6, 1003
    full = torch.randn(2, 5, vocab, generator=generator).to(host_device.device(), dtype).requires_grad_()
    before = full.detach().clone()
    targets = random_targets(generator, (2, 3), vocab).to(full.device)
    own_bytes = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal own_bytes
        if tensor.untyped_storage().data_ptr() != full.untyped_storage().data_ptr():
            own_bytes += tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        stats = token_stats(full[:, -3:], targets, temperature=0.7, outputs=OUTPUTS)
    assert own_bytes <= n * 8 * 8
    weighted_sum(stats).backward()
    assert_equal_bits(full.detach(), before)
    assert (full.grad[:, :2] == 0).all()
    assert (full.grad[:, 2:] != 0).any(dim=-1).all()


@pytest.mark.parametrize("strides", [(2**31 + 8, 1), (1, 2**30 + 8)], ids=["rows apart", "columns apart"])
def test_offsets_beyond_two_to_the_31(strides: tuple[int, int], backend: str, generator: Generator) -> None:
    """B02, B03: only the pages that hold the logits are ever touched."""
    shape = (3, 37) if strides[1] == 1 else (3, 4)
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    apart = torch.empty(reach + 1, dtype=torch.bfloat16, device=host_device.device()).as_strided(shape, strides)
    together = torch.randn(shape, generator=generator).to(apart)
    apart.copy_(together)
    targets = torch.tensor([0, 3, 2], device=apart.device)

    def results(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        leaf = logits.requires_grad_()
        stats = token_stats(leaf, targets, outputs=("entropy", "lse"))
        return stats.logp.detach(), stats.entropy.detach(), torch.autograd.grad(weighted_sum(stats), leaf)[0]

    assert_equal_bits(results(apart), results(together))
