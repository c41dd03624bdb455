"""What `token_stats` promises beside its values: what it leaves alone, which bits are equal, what composes with it.

Values are the business of test_token_stats.py.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import host_device
import pytest
import torch
from test_token_stats import DIFFERENTIABLE, IGNORE, gaussian, name_of, random_targets
from torch import Generator, Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from rlkernels import backends
from rlkernels.ops.rows import RowStats, SavedStats, Upstream, Wanted, empty_row_stats
from rlkernels.ops.token_stats import token_stats as token_stats_op
from rlkernels.ops.token_stats import token_stats_backward as token_stats_backward_op
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


# Nothing is modified


@every_dtype
@pytest.mark.parametrize("requires_grad", [True, False], ids=["grad", "no grad"])
def test_inputs_are_not_modified(backend: str, requires_grad: bool, dtype: torch.dtype, generator: Generator) -> None:
    """B24, B25"""
    logits, targets = leaf_and_targets(backend, generator, dtype)
    logits = logits.detach().requires_grad_(requires_grad)
    temperature = torch.linspace(0.5, 2.0, 6, device=logits.device)
    inputs = (logits, targets, temperature)
    before = [tensor.detach().clone() for tensor in inputs]
    stats = token_stats(logits, targets, temperature=temperature, softcap=30.0, outputs=OUTPUTS)
    if requires_grad:
        upstream = [torch.ones_like(stats.logp), torch.full_like(stats.logp, 2.0)]
        given = [d.clone() for d in upstream]
        torch.autograd.grad([stats.logp, stats.entropy], logits, upstream)
        assert_equal_bits(upstream, given)
    assert_equal_bits([tensor.detach() for tensor in inputs], before)
    assert all(tensor._version == 0 for tensor in inputs)


def test_earlier_results_stay(backend: str, generator: Generator) -> None:
    """B27: neither statistics nor gradients are buffers that a later call takes again."""
    logits, targets = leaf_and_targets(backend, generator)
    stats = token_stats(logits, targets, outputs=OUTPUTS)
    (dlogits,) = torch.autograd.grad(weighted_sum(stats), logits, retain_graph=True)
    kept = [stat.detach().clone() for stat in stats], dlogits.clone()
    other, other_targets = leaf_and_targets(backend, generator)
    torch.autograd.grad(weighted_sum(token_stats(other, other_targets, outputs=OUTPUTS)), other)
    torch.autograd.grad(weighted_sum(stats, (3.0, 1.0, 1.0)), logits)
    assert_equal_bits(([stat.detach() for stat in stats], dlogits), kept)


def test_outputs_share_no_storage(backend: str, generator: Generator) -> None:
    logits, targets = leaf_and_targets(backend, generator)
    stats = token_stats(logits, targets, outputs=OUTPUTS)
    tensors = [logits, targets, *stats]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


def test_two_heads_and_entropy_after_backward(backend: str) -> None:
    """B24"""
    z = torch.zeros(1, 2, device=host_device.device(), requires_grad=True)
    for target in (0, 1):
        token_stats(z, torch.tensor([target], device=z.device)).logp.sum().neg().backward()
    assert z.grad.tolist() == [[0.0, 0.0]]
    assert z.tolist() == [[0.0, 0.0]]
    entropy = token_stats(z, torch.tensor([0], device=z.device)).entropy
    assert entropy.item() == pytest.approx(0.693147, abs=1e-6)


@pytest.mark.parametrize("order", [("logp", "entropy"), ("entropy", "logp")], ids=" then ".join)
def test_order_of_two_calls(backend: str, order: tuple[str, str]) -> None:
    """B26: logp and entropy from two calls on the same logits, with gradient through both."""
    z = torch.tensor([[0.0, 1.0986122886681098]], device=host_device.device(), requires_grad=True)
    target = torch.tensor([1], device=z.device)
    values = {name: getattr(token_stats(z, target), name) for name in order}
    assert values["logp"].item() == pytest.approx(-0.287682, abs=1e-6)
    assert values["entropy"].item() == pytest.approx(0.562335, abs=1e-6)
    (values["logp"] + 0.5 * values["entropy"]).sum().backward()
    assert z.grad[0].tolist() == pytest.approx([-0.25 + 0.5 * 0.205990, 0.25 - 0.5 * 0.205990], abs=1e-6)


@kernels  # the reference computes from a copy
def test_logits_changed_before_backward_are_noticed(backend: str, generator: Generator) -> None:
    logits, targets = leaf_and_targets(backend, generator)
    logits = logits.clone()
    stats = token_stats(logits, targets)
    logits.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stats.logp.sum().backward()


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


@every_dtype
@pytest.mark.parametrize("options", [{}, {"softcap": 30.0}], ids=["plain", "softcap"])
@pytest.mark.parametrize("rows", [37, 3, 1], ids=["pieces-of-rows", "fewer-rows-than-threads", "one-row"])
def test_number_of_threads(
    rows: int,
    thread_counts: tuple[int, ...],
    options: dict[str, float],
    dtype: torch.dtype,
    generator: Generator,
) -> None:
    backends.set_backend("cpu")
    logits, targets = leaf_and_targets("cpu", generator, dtype, n=rows, vocab=32003)
    results = []
    for count in thread_counts:
        torch.set_num_threads(count)
        stats = token_stats(logits, targets, outputs=OUTPUTS, **options)
        results.append((stats, torch.autograd.grad(weighted_sum(stats), logits)[0]))
    assert_equal_bits(results[1], results[0])
    assert_equal_bits(results[2], results[0])


@every_dtype
def test_gradient_mode_does_not_change_bits(backend: str, dtype: torch.dtype, generator: Generator) -> None:
    """B31, B42"""
    logits, targets = leaf_and_targets(backend, generator, dtype)
    stats = token_stats(logits, targets, outputs=OUTPUTS)
    assert [stat.requires_grad for stat in stats] == [True, True, True, False, False, False]
    with torch.no_grad():
        under_no_grad = token_stats(logits, targets, outputs=OUTPUTS)
    with torch.inference_mode():
        under_inference = token_stats(logits, targets, outputs=OUTPUTS)
        from_inference_tensor = token_stats(logits.clone(), targets, outputs=OUTPUTS)
    without_grad = token_stats(logits.detach(), targets, outputs=OUTPUTS)
    for other in (under_no_grad, under_inference, from_inference_tensor, without_grad):
        assert not any(stat.requires_grad for stat in other)
        assert_equal_bits(tuple(other), tuple(stat.detach() for stat in stats))


def test_autocast_changes_nothing(backend: str, generator: Generator) -> None:
    logits, targets = leaf_and_targets(backend, generator)

    def both_passes() -> tuple[Any, Tensor]:
        stats = token_stats(logits, targets, outputs=OUTPUTS)
        return stats, torch.autograd.grad(weighted_sum(stats), logits)[0]

    plain = both_passes()
    with torch.autocast(logits.device.type, dtype=torch.bfloat16):
        under_autocast = both_passes()
    assert under_autocast[0].logp.dtype == under_autocast[1].dtype == torch.float32
    assert_equal_bits(under_autocast, plain)


@every_dtype
def test_checkpoint(backend: str, dtype: torch.dtype, generator: Generator) -> None:
    """B110"""
    logits, targets = leaf_and_targets(backend, generator, dtype)
    runs = []

    def head(hidden: Tensor) -> tuple[Tensor, Tensor]:
        stats = token_stats(2 * hidden, targets)
        runs.append([stats.logp.detach().clone(), stats.entropy.detach().clone()])
        return stats.logp, stats.entropy

    def gradient(outputs: tuple[Tensor, Tensor]) -> Tensor:
        return torch.autograd.grad(outputs[0].sum() + 0.5 * outputs[1].sum(), logits)[0]

    plain = gradient(head(logits))
    with set_checkpoint_early_stop(False):  # else the recomputation ends before it is looked at
        assert_equal_bits(gradient(checkpoint(head, logits, use_reentrant=False)), plain)
    assert len(runs) == 3
    assert_equal_bits(runs[1], runs[0])
    assert_equal_bits(runs[2], runs[0])


@pytest.mark.parametrize("backend", ["cpu", "reference"], indirect=True)  # the interpreter patches tl, globally
def test_two_threads_at_once(backend: str, generator: Generator) -> None:
    inputs = [leaf_and_targets(backend, generator, n=17, vocab=32003) for _ in range(2)]

    def both_passes(logits: Tensor, targets: Tensor) -> tuple[Any, Tensor]:
        stats = token_stats(logits, targets, outputs=OUTPUTS)
        return stats, torch.autograd.grad(weighted_sum(stats), logits)[0]

    expected = [both_passes(*pair) for pair in inputs]
    results: list[list[Any]] = [[], []]
    start = threading.Barrier(2)

    def work(i: int) -> None:
        start.wait()
        results[i] = [both_passes(*inputs[i]) for _ in range(5)]

    workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for i in range(2):
        assert len(results[i]) == 5
        # PyTorch may split its own reductions otherwise on a thread that is not the main one
        close = {"rtol": 1e-5, "atol": 1e-5} if backend == "reference" else {"rtol": 0, "atol": 0}
        for result in results[i]:
            torch.testing.assert_close(result, expected[i], **close)


# Upstream gradients


def gradient_of(stats_and_leaf: tuple[Any, Tensor], upstream: dict[str, Tensor]) -> Tensor:
    stats, leaf = stats_and_leaf
    outputs = [getattr(stats, name) for name in upstream]
    return torch.autograd.grad(outputs, leaf, list(upstream.values()), retain_graph=True)[0]


@pytest.mark.parametrize("k", [0.0, 1.0, 0.5, 1024.0, -2.0], ids=str)
def test_linear_in_upstream(backend: str, k: float, generator: Generator) -> None:
    """B20: powers of two, so exactly."""
    logits, targets = leaf_and_targets(backend, generator)
    stats = token_stats(logits, targets, outputs=OUTPUTS)
    upstream = {name: torch.randn(6, generator=generator).to(logits.device) for name in DIFFERENTIABLE}
    once = gradient_of((stats, logits), upstream)
    scaled = gradient_of((stats, logits), {name: k * d for name, d in upstream.items()})
    tolerance = 0 if backend == "cpu" else 1e-6
    torch.testing.assert_close(scaled, k * once, rtol=tolerance, atol=tolerance * abs(k))


def test_linear_row_by_row(backend: str, generator: Generator) -> None:
    """B20: per-token weights, one of them 0."""
    logits, targets = leaf_and_targets(backend, generator, n=4)
    weights = torch.tensor([2.0, 0.0, -1.0, 0.5], device=logits.device)
    logp = token_stats(logits, targets).logp
    (plain,) = torch.autograd.grad(logp.sum(), logits, retain_graph=True)
    (weighted,) = torch.autograd.grad((logp * weights).sum(), logits)
    torch.testing.assert_close(weighted, weights[:, None] * plain, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("upstream", "dweight", "dbias"),
    [([1.0, 3.0], [-3.5, 3.5], [-2.0, 2.0]), ([0.0, 1.0], [-1.0, 1.0], [-0.5, 0.5])],
    ids=["1, 3", "first row 0"],
)
def test_every_row_has_its_own_upstream(
    backend: str, upstream: list[float], dweight: list[float], dbias: list[float]
) -> None:
    """B19"""
    device = host_device.device()
    hidden = torch.tensor([[1.0], [2.0]], device=device)
    weight = torch.zeros(2, 1, device=device, requires_grad=True)
    bias = torch.zeros(2, device=device, requires_grad=True)
    loss = -token_stats(hidden @ weight.T + bias, torch.zeros(2, dtype=torch.int64, device=device)).logp
    loss.backward(torch.tensor(upstream, device=device))
    assert weight.grad.flatten().tolist() == pytest.approx(dweight)
    assert bias.grad.tolist() == pytest.approx(dbias)


UPSTREAM_FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "B22 transposed": lambda stat: stat.t().contiguous().t(),
    "stride 2": lambda stat: torch.stack([stat, stat], dim=-1)[..., 0],
    "expanded rows": lambda stat: stat[:1].expand_as(stat),
    "expanded columns": lambda stat: stat[:, :1].expand_as(stat),
    "expanded scalar": lambda stat: stat[0, 0].expand_as(stat),
}


@pytest.mark.parametrize("form", UPSTREAM_FORMS)
def test_upstream_strides(backend: str, form: str, generator: Generator) -> None:
    logits, targets = leaf_and_targets(backend, generator)
    leaf, targets = logits.detach().view(2, 3, -1).requires_grad_(), targets.view(2, 3)
    stats = token_stats(leaf, targets, outputs=OUTPUTS)
    values = (torch.randn(2, 3, generator=generator).to(leaf.device) for _ in DIFFERENTIABLE)
    upstream = {name: UPSTREAM_FORMS[form](d) for name, d in zip(DIFFERENTIABLE, values, strict=True)}
    assert not upstream["logp"].is_contiguous()
    dense = {name: d.contiguous() for name, d in upstream.items()}
    assert_equal_bits(gradient_of((stats, leaf), upstream), gradient_of((stats, leaf), dense))


def test_transposed_loss(backend: str, generator: Generator) -> None:
    """B22: logp [B, T] is transposed before distinct weights reach it."""
    logits, targets = leaf_and_targets(backend, generator)
    leaf, targets = logits.detach().view(2, 3, -1).requires_grad_(), targets.view(2, 3)
    weights = torch.arange(1.0, 7.0, device=leaf.device).view(3, 2)
    logp = token_stats(leaf, targets).logp
    (transposed,) = torch.autograd.grad((logp.t().contiguous() * weights).sum(), leaf, retain_graph=True)
    (plain,) = torch.autograd.grad((logp * weights.t()).sum(), leaf)
    assert_equal_bits(transposed, plain)


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


def test_no_upstream_is_no_gradient(backend: str, generator: Generator) -> None:
    logits, targets = leaf_and_targets(backend, generator)
    token_stats(logits, targets)
    assert logits.grad is None
    stats = token_stats(logits, targets, outputs=OUTPUTS)
    (0 * stats.logp.detach().sum() + 1.0 * logits.sum()).backward()
    assert_equal_bits(logits.grad, torch.ones_like(logits))


def test_second_backward(backend: str, generator: Generator) -> None:
    """B27: with upstream 1, then 3."""
    logits, targets = leaf_and_targets(backend, generator)
    logp = token_stats(logits, targets).logp
    (first,) = torch.autograd.grad(logp, logits, torch.ones(6, device=logits.device), retain_graph=True)
    (again,) = torch.autograd.grad(logp, logits, torch.ones(6, device=logits.device), retain_graph=True)
    assert_equal_bits(again, first)
    (third,) = torch.autograd.grad(logp, logits, torch.full((6,), 3.0, device=logits.device))
    torch.testing.assert_close(third, 3 * first, rtol=1e-6, atol=1e-8)


def test_gradients_accumulate(backend: str, generator: Generator) -> None:
    logits, targets = leaf_and_targets(backend, generator)
    logits.grad = torch.full_like(logits, 7.0)
    logp = token_stats(logits, targets).logp
    (expected,) = torch.autograd.grad(logp.sum(), logits, retain_graph=True)
    logp.sum().backward()
    torch.testing.assert_close(logits.grad, 7.0 + expected, rtol=1e-6, atol=1e-6)


@kernels
def test_second_derivative_is_refused(backend: str, generator: Generator) -> None:
    logits, targets = leaf_and_targets(backend, generator)
    stats = token_stats(logits, targets)
    with pytest.raises(RuntimeError, match=r"token_stats.*create_graph=True.*reference"):
        torch.autograd.grad(stats.logp.sum(), logits, create_graph=True)


@pytest.mark.parametrize("backend", ["reference"], indirect=True)
def test_reference_has_second_derivatives(backend: str, generator: Generator) -> None:
    logits, targets = leaf_and_targets(backend, generator, torch.float64, n=2, vocab=5)
    assert torch.autograd.gradgradcheck(lambda z: token_stats(z, targets).logp, (logits,))


# PyTorch's machinery


GRADCHECK_OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "temperature of each row": {"temperature": torch.tensor([0.5, 0.7, 1.0, 2.0], dtype=torch.float64)},
    "softcap": {"softcap": 3.0},
    "softcap, scale and temperature": {"softcap": 3.0, "logit_scale": 0.7, "temperature": 1.3},
}


@pytest.mark.parametrize("options", GRADCHECK_OPTIONS)
def test_gradcheck(backend: str, options: str, generator: Generator) -> None:
    logits, targets = leaf_and_targets(backend, generator, torch.float64, n=4, vocab=5)
    targets[2] = IGNORE
    chosen = {
        name: value.to(logits.device) if isinstance(value, Tensor) else value
        for name, value in GRADCHECK_OPTIONS[options].items()
    }

    def differentiable(z: Tensor) -> tuple[Tensor, ...]:
        return token_stats(z, targets, outputs=OUTPUTS, **chosen)[:3]

    assert torch.autograd.gradcheck(differentiable, (logits,))
    columns_apart = logits.detach().T.contiguous().T.requires_grad_()
    assert torch.autograd.gradcheck(differentiable, (columns_apart,))


@kernels
@pytest.mark.parametrize("softcap", [None, 30.0], ids=["plain", "softcap"])
@pytest.mark.parametrize("wanted", [EVERYTHING, Wanted(*[False] * 5)], ids=["everything", "logp alone"])
def test_opcheck(backend: str, wanted: Wanted, softcap: float | None, generator: Generator) -> None:
    logits, targets = leaf_and_targets(backend, generator, n=3, vocab=11)
    rows = make_rows(logits, targets, 0.7, softcap, 1.0, IGNORE)
    torch.library.opcheck(token_stats_op, (*rows, *wanted))
    stats = RowStats(*(stat.detach() for stat in token_stats_op(*rows, *wanted)))
    saved = (stats.row_max, stats.log_sum_exp, stats.entropy)
    ones = torch.ones(3, device=logits.device)
    dentropy = ones if wanted.entropy else None
    detached = rows._replace(logits=rows.logits.detach())
    torch.library.opcheck(token_stats_backward_op, (*detached, *saved, ones, dentropy, None))


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compile(backend: str, compiler: str, generator: Generator) -> None:
    """Without a graph break, forward and backward, to the bits of the operation run eagerly."""
    if compiler == "inductor" and backend == "triton":
        pytest.skip("aot_eager shows the same; the inductor's part is the operation's surroundings")
    logits, targets = leaf_and_targets(backend, generator)

    def loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        stats = token_stats(logits, targets, temperature=0.7, softcap=30.0, outputs=("entropy", "lse"))
        return (stats.logp - 0.1 * stats.entropy + 0.01 * stats.lse).sum(), stats.logp.detach()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend=compiler)
    results = []
    for function in (loss, compiled):
        value, logp = function(logits, targets)
        results.append((value, logp, torch.autograd.grad(value, logits)[0]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    if backend != "reference":
        assert_equal_bits(results[1][1], results[0][1])


def test_tensor_options_do_not_recompile(backend: str, generator: Generator) -> None:
    logits, targets = leaf_and_targets(backend, generator)
    logits = logits.detach()
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(token_stats, fullgraph=True, backend=counter)
    for value in (0.5, 0.7, 1.0, 2.0):
        options = {
            name: torch.tensor(factor * value, device=logits.device)
            for name, factor in (("temperature", 1.0), ("softcap", 20.0), ("logit_scale", 0.5))
        }
        assert_equal_bits(compiled(logits, targets, **options).logp, token_stats(logits, targets, **options).logp)
    assert counter.frame_count == 1


def test_new_lengths_compile_once_more_at_most(backend: str, generator: Generator) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(token_stats, fullgraph=True, backend=counter)
    for n in (5, 7, 12, 9):
        logits, targets = leaf_and_targets(backend, generator, n=n, vocab=130)
        assert_equal_bits(compiled(logits, targets).logp, token_stats(logits, targets).logp)
    assert counter.frame_count <= 2


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
