"""The CUDA kernels, run on the CPU by csrc/host_device/: what is theirs alone; the `backend` fixture has them too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import host_device
import pytest
import torch
from test_policy_objective import OBJECTIVES, both_ways, logits_batch
from tolerance import CONSTANT, assert_as_exact_as_torch
from torch import Generator, Tensor

import rlkernels
from rlkernels import checks, reference
from rlkernels.backends import cuda
from rlkernels.ops.rows import Rows, RowStats, SavedStats, Tile, Upstream, Wanted, compute_dtype, empty_row_stats
from rlkernels.schedules import SEGMENT

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
EVERYTHING = Wanted(*[True] * len(Wanted._fields))
PLAIN = Wanted(entropy=True, lse=True, log_sum_sq_probs=False, mean_logits=False, is_top1=False)
STATISTICS = ("logp", "entropy", "lse", "log_sum_sq_probs", "mean_logits")
IGNORE = -100
MANY_SEGMENTS = 65 * SEGMENT + 1  # more than are merged at once
MANY, FEW = 1, 100  # rows for a device of so many multiprocessors

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture(autouse=True)
def emulated(host_device_kernels: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    host_device.use(host_device_kernels, monkeypatch)
    return host_device_kernels


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where only the kernel sees the values."""
    monkeypatch.setattr(checks, "values_are_checked", lambda device: False)


@pytest.fixture(params=[MANY, FEW], ids=["whole rows", "split rows"])
def multiprocessors(request: pytest.FixtureRequest, emulated: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    host_device.use(emulated, monkeypatch, request.param)
    return request.param


@pytest.fixture(params=[0, 1, 5], ids=["forwards", "backwards", "shuffled"])
def schedule(request: pytest.FixtureRequest, emulated: Any) -> Iterator[None]:
    emulated.set_schedule(request.param)
    yield
    emulated.set_schedule(0)


class Case(NamedTuple):
    logits: Tensor  # [outer, inner, V] float64; copied to another dtype with its strides and offset
    targets: Tensor
    temperature: Tensor | float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0


def gaussian(vocab: int, generator: Generator, count: int = 3) -> Case:
    logits = 4 * torch.randn(1, count, vocab, dtype=torch.float64, generator=generator)
    return Case(logits, torch.randint(vocab, (count,), generator=generator))


def odd_strides(generator: Generator) -> Case:
    """Rows that start at every remainder of 16 bytes, and not at the storage's beginning."""
    stored = 4 * torch.randn(2, 9, 9007, dtype=torch.float64, generator=generator)
    return Case(stored[:, 1:, 3:9004], torch.randint(9001, (16,), generator=generator))


def columns_apart(generator: Generator) -> Case:
    stored = 4 * torch.randn(5003, 3, dtype=torch.float64, generator=generator)
    return Case(stored.T.unsqueeze(0), torch.randint(5003, (3,), generator=generator))


def scaled(generator: Generator) -> Case:
    return gaussian(5003, generator)._replace(temperature=torch.tensor([0.3, 1.0, 4.0]), logit_scale=1.7)


def capped(case: Case) -> Case:
    return case._replace(logits=5 * case.logits, softcap=30.0)


def with_ignored(generator: Generator) -> Case:
    case = gaussian(1003, generator)._replace(temperature=torch.tensor([1.0, -1.0, 2.0]))
    case.targets[1] = IGNORE
    case.logits[0, 1] = torch.nan
    return case


def minus_infinity(generator: Generator) -> Case:
    case = gaussian(9001, generator, 5)
    logits = case.logits[0]
    logits[0, :SEGMENT] = -torch.inf
    logits[1, SEGMENT:] = -torch.inf
    logits[2, case.targets[2]] = -torch.inf
    logits[3, :-1] = -torch.inf
    logits[4, ::2] = -torch.inf
    return case


def confident(generator: Generator) -> Case:
    case = gaussian(1003, generator)
    lead = torch.tensor([8.0, 12.0, 60.0], dtype=torch.float64)
    case.logits[0, torch.arange(3), case.targets] = case.logits[0].amax(-1) + lead
    return case


CASES: dict[str, Callable[[Generator], Case]] = {
    **{f"V = {vocab}": lambda g, vocab=vocab: gaussian(vocab, g) for vocab in (1, 31, SEGMENT, SEGMENT + 1, 12289)},
    "many segments": lambda g: gaussian(MANY_SEGMENTS, g, 2),
    "no rows": lambda g: gaussian(5, g, 0),
    "odd strides": odd_strides,
    "odd strides, softcap": lambda g: capped(odd_strides(g)),
    "columns apart": columns_apart,
    "columns apart, softcap": lambda g: capped(columns_apart(g)),
    "temperature a row": scaled,
    "temperature a row, softcap": lambda g: capped(scaled(g)),
    "ignored": with_ignored,
    "minus infinity": minus_infinity,
    "minus infinity, softcap": lambda g: minus_infinity(g)._replace(softcap=30.0),  # finite, unlike padding
    "confident": confident,
}


def in_dtype(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """With the strides, and the distance from the storage's beginning, in elements."""
    count = logits.untyped_storage().nbytes() // logits.itemsize
    stored = torch.empty(0, dtype=logits.dtype).set_(logits.untyped_storage(), 0, (count,))
    return stored.to(dtype).as_strided(logits.shape, logits.stride(), logits.storage_offset())


def make_rows(case: Case, dtype: torch.dtype) -> Rows:
    def number(value: Tensor | float) -> Tensor:
        # rounded to float32 whatever the dtype, so that all compute with the same numbers
        return torch.as_tensor(value, dtype=torch.float32).to(compute_dtype(dtype)).reshape(-1)

    return Rows(
        in_dtype(case.logits, dtype),
        case.targets,
        number(case.temperature),
        None if case.softcap is None else number(case.softcap),
        number(case.logit_scale),
        IGNORE,
    )


def in_float64(rows: Rows) -> Rows:
    return Rows(*(value.double() if torch.is_tensor(value) and value.is_floating_point() else value for value in rows))


def upstream_of(rows: Rows) -> Upstream:
    """Gradients of either sign, none of them 0, that every dtype holds exactly."""
    n = rows.targets.shape[0]
    gradients = torch.arange(3 * n).reshape(3, n) * 5 % 17 / 4 - 2.125
    return Upstream(*gradients.to(compute_dtype(rows.logits.dtype)).unbind(0))


def unwritten_stats(rows: Rows, wanted: Wanted) -> RowStats:
    outputs = empty_row_stats(rows, wanted)
    for output in outputs:
        output.fill_(True if output.dtype == torch.bool else torch.nan)
    return outputs


def forward(rows: Rows, wanted: Wanted = EVERYTHING) -> RowStats:
    outputs = unwritten_stats(rows, wanted)
    cuda.token_stats_forward(rows, outputs)
    return outputs


def saved_of(outputs: RowStats) -> SavedStats:
    return SavedStats(outputs.row_max, outputs.log_sum_exp, outputs.entropy)


def backward(rows: Rows, outputs: RowStats, upstream: Upstream, skew: int = 0) -> Tensor:
    """Into memory that begins `skew` elements after a multiple of 16 bytes."""
    count = rows.logits.numel()
    dlogits = torch.full((skew + count,), torch.nan, dtype=rows.logits.dtype)[skew:].view(rows.logits.shape)
    cuda.token_stats_backward(rows, saved_of(outputs), upstream, dlogits)
    return dlogits


def tiles_of(rows: Rows, width: int) -> Iterator[tuple[Rows, Tile]]:
    vocab = rows.logits.shape[-1]
    for start in range(0, vocab, width):
        logits = rows.logits[..., start : start + width].clone(memory_format=torch.contiguous_format)
        yield rows._replace(logits=logits), Tile(start, vocab)


def reference_passes(rows: Rows, upstream: Upstream) -> tuple[RowStats, Tensor]:
    logits = rows.logits.detach().requires_grad_()
    outputs = reference.row_stats(rows._replace(logits=logits))
    gradients = [d.to(outputs.logp.dtype) for d in upstream]
    (dlogits,) = torch.autograd.grad([outputs.logp, outputs.entropy, outputs.lse], logits, gradients)
    return RowStats(*(value.detach() for value in outputs)), dlogits


def with_term(magnitude: float, *results: Tensor) -> list[Tensor]:
    """Results whose tolerance is also relative to `magnitude`, which cancelled in them."""
    return [torch.cat([x.double().flatten(), x.new_full((1,), magnitude, dtype=torch.float64)]) for x in results]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.nan_to_num(nan=123.0).equal(b.nan_to_num(nan=123.0)) and a.isnan().equal(b.isnan())


@by_dtype
@pytest.mark.parametrize("name", CASES)
def test_both_passes_match_the_definition(name: str, dtype: torch.dtype, generator: Generator) -> None:
    if name == "confident" and dtype == torch.float64:
        pytest.skip("the definition cancels as well, so it is not exact")
    rows = make_rows(CASES[name](generator), dtype)
    upstream = upstream_of(rows)
    outputs = forward(rows)
    dlogits = backward(rows, outputs, upstream, skew=1)

    own, own_dlogits = reference_passes(rows, upstream)
    exact, exact_dlogits = reference_passes(in_float64(rows), upstream)
    compute = compute_dtype(dtype)
    # z is softcap / temperature times a tanh that is rounded near 1
    capped_z = 0.0 if rows.softcap is None else (rows.softcap / rows.temperature).max().item()
    assert outputs.is_top1.equal(exact.is_top1)
    for field in STATISTICS:
        results = (getattr(stats, field) for stats in (outputs, own, exact))
        # the sum of exponentials is at least 1, and so is what it is rounded in
        assert_as_exact_as_torch(*with_term(max(1.0, capped_z), *results), compute, field)
    largest = exact_dlogits.abs().max().item() if exact_dlogits.numel() else 0.0
    lost_in_z = capped_z * CONSTANT[compute] / CONSTANT[dtype]
    assert_as_exact_as_torch(*with_term(largest * lost_in_z, dlogits, own_dlogits, exact_dlogits), dtype, "dlogits")


@by_dtype
@pytest.mark.parametrize("name", ["V = 12289", "odd strides", "columns apart, softcap", "minus infinity"])
def test_bits_depend_on_neither_launch_nor_place(
    name: str,
    dtype: torch.dtype,
    multiprocessors: int,
    schedule: None,
    emulated: Any,
    monkeypatch: pytest.MonkeyPatch,
    generator: Generator,
) -> None:
    """Whole or split rows, threads in any order, a row alone and aligned: the same bits."""
    rows = make_rows(CASES[name](generator), dtype)
    upstream = upstream_of(rows)
    outputs = forward(rows)
    dlogits = backward(rows, outputs, upstream)
    host_device.use(emulated, monkeypatch, MANY)
    emulated.set_schedule(0)
    vocab = rows.logits.shape[-1]
    for i in range(rows.targets.shape[0]):
        alone = rows._replace(
            logits=rows.logits.reshape(-1, vocab)[i].clone().view(1, 1, vocab), targets=rows.targets[i : i + 1]
        )
        expected = forward(alone)
        for a, b in zip(outputs, expected, strict=True):
            assert same_bits(a[i : i + 1], b)
        gradient = backward(alone, expected, Upstream(*(d[i : i + 1] for d in upstream)))
        assert same_bits(dlogits.reshape(-1, vocab)[i], gradient.view(-1))


@by_dtype
def test_an_output_does_not_depend_on_the_others(dtype: torch.dtype, generator: Generator) -> None:
    rows = make_rows(gaussian(5003, generator), dtype)
    everything = forward(rows)
    for index, name in enumerate(Wanted._fields):
        outputs = forward(rows, Wanted(*(i == index for i in range(len(Wanted._fields)))))
        for field in ("logp", name, "row_max", "log_sum_exp"):
            assert getattr(outputs, field).equal(getattr(everything, field)), field
        assert sum(output.numel() > 0 for output in outputs) == 4


def test_gradients_that_did_not_arrive_count_as_zero(generator: Generator) -> None:
    rows = make_rows(gaussian(1003, generator), torch.float32)
    outputs = forward(rows)
    for arrived in range(1, 8):
        present = [bool(arrived >> i & 1) for i in range(3)]
        full = upstream_of(rows)
        as_none = Upstream(*(d if here else None for d, here in zip(full, present, strict=True)))
        as_zero = Upstream(*(d * here for d, here in zip(full, present, strict=True)))
        assert backward(rows, outputs, as_none).equal(backward(rows, outputs, as_zero))


TILED = {
    "plain": lambda g: gaussian(9001, g, 7),
    "softcap": lambda g: capped(gaussian(9001, g, 7))._replace(temperature=0.7, logit_scale=1.3),
}


def targets_in_every_tile(case: Case) -> Case:
    case.targets[:4] = torch.tensor([0, SEGMENT - 1, SEGMENT, 9000])
    case.targets[4] = case.logits[0, 4].argmax()
    case.targets[5] = IGNORE
    case.logits[0, 5] = torch.nan
    return case


@by_dtype
@pytest.mark.parametrize("name", TILED)
def test_tiles_give_the_bits_of_whole_rows(
    name: str, dtype: torch.dtype, multiprocessors: int, generator: Generator
) -> None:
    rows = make_rows(targets_in_every_tile(TILED[name](generator)), dtype)
    used = rows.targets != IGNORE
    for wanted in (PLAIN, EVERYTHING):
        whole = forward(rows, wanted)
        for width in (SEGMENT, 2 * SEGMENT):
            outputs = unwritten_stats(rows, wanted)
            states = cuda.empty_states(7, rows.logits).fill_(torch.nan)
            for tile_rows, tile in tiles_of(rows, width):
                assert outputs.logp.isnan().all()
                cuda.token_stats_forward(tile_rows, outputs, tile, states)
            for field, a, b in zip(RowStats._fields, outputs, whole, strict=True):
                assert same_bits(a, b), field
            assert states[~used].isnan().all()


@by_dtype
@pytest.mark.parametrize("with_dtarget", [False, True])
@pytest.mark.parametrize("width", [1792, SEGMENT, 9001])  # backward's tiles need not be whole segments
@pytest.mark.parametrize("name", TILED)
def test_the_gradient_takes_the_place_of_the_logits(
    name: str, width: int, with_dtarget: bool, dtype: torch.dtype, multiprocessors: int, generator: Generator
) -> None:
    rows = make_rows(targets_in_every_tile(TILED[name](generator)), dtype)
    outputs = forward(rows)
    upstream = upstream_of(rows)
    for gradient in upstream:
        gradient[6] = 0.0
    whole = backward(rows, outputs, upstream)[0]
    dtarget = torch.full_like(outputs.logp, torch.nan) if with_dtarget else None
    dlogits = []
    for tile_rows, tile in tiles_of(rows, width):
        cuda.token_stats_backward(tile_rows, saved_of(outputs), upstream, tile_rows.logits, tile, dtarget)
        dlogits.append(tile_rows.logits[0])
    result = torch.cat(dlogits, -1)
    if dtarget is not None:
        has_gradient = rows.targets != IGNORE
        has_gradient[6] = False
        assert dtarget.isnan().equal(~has_gradient)  # not written
        column = rows.targets[has_gradient]
        assert not result[has_gradient, column].any()
        result[has_gradient, column] = dtarget[has_gradient].to(dtype)
    assert same_bits(result, whole)


@pytest.mark.parametrize("second", [11, 4500], ids=["same segment", "later segment"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_first_maximum_is_top1(
    second: int, softcap: float | None, multiprocessors: int, generator: Generator
) -> None:
    case = gaussian(5003, generator, 2)._replace(targets=torch.tensor([10, second]), softcap=softcap)
    case.logits.clamp_(max=10.0)
    case.logits[0, :, [10, second]] = 12.0
    assert forward(make_rows(case, torch.float32)).is_top1.tolist() == [True, False]


# in the first segment, in the last, and in the column of the target
@pytest.mark.parametrize("column", [7, 4999, 4321])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("wanted", [PLAIN, EVERYTHING], ids=["plain", "full"])
def test_nan_stays_visible(wanted: Wanted, softcap: float | None, column: int, generator: Generator) -> None:
    case = gaussian(5003, generator, 2)._replace(targets=torch.tensor([4321, 4321]), softcap=softcap)
    case.logits[0, 0, column] = torch.nan
    rows = make_rows(case, torch.float32)
    outputs = forward(rows, wanted)
    dlogits = backward(rows, outputs, upstream_of(rows))[0]
    for field in STATISTICS:
        value = getattr(outputs, field)
        assert value.numel() == 0 or value.isnan().tolist() == [True, False], field
    assert not (outputs.is_top1.numel() and outputs.is_top1[0])
    assert dlogits[0].isnan().all()
    assert dlogits[1].isfinite().all()


@pytest.mark.parametrize("wanted", [PLAIN, EVERYTHING], ids=["plain", "full"])
def test_a_row_of_minus_infinity_has_no_distribution(
    wanted: Wanted, multiprocessors: int, generator: Generator
) -> None:
    case = gaussian(5003, generator, 2)
    case.logits[0, 0] = -torch.inf
    rows = make_rows(case, torch.float32)
    outputs = forward(rows, wanted)
    dlogits = backward(rows, outputs, upstream_of(rows))[0]
    for field in ("logp", "entropy", "lse", "log_sum_sq_probs"):
        value = getattr(outputs, field)
        assert value.numel() == 0 or value.isnan().tolist() == [True, False], field
    assert dlogits.isnan().all(-1).tolist() == [True, False]


BAD_ROWS = {  # label, temperature
    "label V": (1003, 1.0),
    "negative label": (-1, 1.0),
    "label far outside": (2**60, 1.0),
    "temperature 0": (3, 0.0),
    "negative temperature": (3, -1.0),
    "infinite temperature": (3, torch.inf),
    "temperature NaN": (3, torch.nan),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("wanted", [PLAIN, EVERYTHING], ids=["plain", "full"])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_value_poisons_its_own_row(
    name: str, softcap: float | None, wanted: Wanted, multiprocessors: int, generator: Generator
) -> None:
    good_case = gaussian(1003, generator)._replace(temperature=torch.ones(3), softcap=softcap)
    bad_case = good_case._replace(targets=good_case.targets.clone(), temperature=good_case.temperature.clone())
    bad_case.targets[1], bad_case.temperature[1] = BAD_ROWS[name]
    good, bad = make_rows(good_case, torch.float32), make_rows(bad_case, torch.float32)
    good_stats, bad_stats = forward(good, wanted), forward(bad, wanted)
    for field in RowStats._fields:
        a, b = getattr(good_stats, field), getattr(bad_stats, field)
        if a.numel():
            assert a[[0, 2]].equal(b[[0, 2]]), field
            assert field == "row_max" or (not b[1] if field == "is_top1" else b.isnan()[1]), field
    upstream = upstream_of(good)
    a, b = backward(good, good_stats, upstream)[0], backward(bad, bad_stats, upstream)[0]
    assert a[[0, 2]].equal(b[[0, 2]])
    assert b[1].isnan().all()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("value", [0.0, -1.0, torch.inf, torch.nan])
@pytest.mark.parametrize("name", ["softcap", "logit_scale"])
def test_a_bad_number_poisons_every_row_in_use(name: str, value: float, generator: Generator) -> None:
    case = gaussian(1003, generator, 2)._replace(**{name: value})
    case.targets[0] = IGNORE
    rows = make_rows(case, torch.float32)
    outputs = forward(rows)
    assert outputs.logp[0] == 0
    assert outputs.logp.isnan()[1]
    dlogits = backward(rows, outputs, upstream_of(rows))[0]
    assert not dlogits[0].any()
    assert dlogits[1].isnan().all()


def test_a_bad_label_is_reported_where_the_host_may_look(generator: Generator) -> None:
    case = gaussian(5, generator, 2)
    case.targets[1] = 5
    rlkernels.set_checks(True)
    with pytest.raises(ValueError, match=r"targets: expected labels in \[0, 5\).*got 5 at row 1"):
        forward(make_rows(case, torch.float32))


def test_rows_without_coefficients_are_not_read(multiprocessors: int, generator: Generator) -> None:
    rows = make_rows(gaussian(5003, generator), torch.float32)
    outputs = forward(rows)
    rows.logits[0, 1] = torch.nan
    zero = torch.tensor([1.0, 0.0, 1.0])
    dlogits = backward(rows, outputs, Upstream(zero, None, zero), skew=1)[0]
    assert dlogits.isfinite().all()
    assert dlogits.any(-1).tolist() == [True, False, True]


SHARED_BYTES = {"staged": host_device.SHARED_BYTES, "read again": 0}


@pytest.mark.parametrize("shared", SHARED_BYTES)
@pytest.mark.parametrize("vocab", [1, 37, SEGMENT, 9001])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["grpo", "grpo-k3-all", "cispo-two-sided", "sapo", "nft", "reinforce-kl"])
def test_single_sweep_equals_two(
    name: str,
    dtype: torch.dtype,
    vocab: int,
    shared: str,
    emulated: Any,
    monkeypatch: pytest.MonkeyPatch,
    generator: Generator,
) -> None:
    host_device.use(emulated, monkeypatch, MANY, SHARED_BYTES[shared])
    rlkernels.set_backend("cuda")
    logits = (3 * torch.randn(3, 5, vocab, generator=generator, dtype=torch.float64)).to(dtype)
    objective = dataclasses.replace(OBJECTIVES[name], entropy_coef=0.01)
    batch = logits_batch(generator, vocab)
    (one, dlogits), (two, expected) = both_ways(logits, batch, objective, temperature=0.8)
    assert torch.equal(one.loss, two.loss)
    assert torch.equal(one.logp, two.logp)
    assert torch.equal(one.entropy, two.entropy)
    assert torch.equal(dlogits, expected)
    for metric, value in two.metrics.items():
        torch.testing.assert_close(one.metrics[metric], value, rtol=0, atol=0, msg=metric)


@pytest.mark.parametrize("few_rows", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["plain", "softcap"])
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_single_sweep_of_any_rows(
    strided: bool,
    softcap: float | None,
    few_rows: bool,
    emulated: Any,
    monkeypatch: pytest.MonkeyPatch,
    generator: Generator,
) -> None:
    vocab = 40001 if few_rows else 4501
    host_device.use(emulated, monkeypatch, FEW if few_rows else MANY)
    rlkernels.set_backend("cuda")
    logits = torch.randn(3, 5, (1 + strided) * vocab, generator=generator).bfloat16()[..., :: 1 + strided]
    options = {"softcap": softcap, "logit_scale": 1.7, "temperature": torch.tensor([0.5, 1.0, 2.0])}
    (one, dlogits), (two, expected) = both_ways(logits, logits_batch(generator, vocab), "dapo", **options)
    assert torch.equal(one.loss, two.loss)
    assert torch.equal(dlogits, expected)


@by_dtype
@pytest.mark.parametrize("factor", [1.0, 1 / 3])
def test_scaling_looks_at_the_factor(factor: float, dtype: torch.dtype, generator: Generator) -> None:
    values = torch.randn(9001, generator=generator).to(dtype)[1:]
    by = torch.tensor(factor, dtype=compute_dtype(dtype))
    expected = (values.to(by.dtype) * by).to(dtype)
    cuda.scale_unless_one(values, by)
    assert values.equal(expected)


def test_public_function_with_autograd(generator: Generator) -> None:
    rows = make_rows(gaussian(1003, generator), torch.float32)
    expected = forward(rows)
    upstream = upstream_of(rows)
    rlkernels.set_backend("cuda")
    logits = rows.logits[0].clone().requires_grad_()
    stats = rlkernels.token_stats(logits, rows.targets, outputs=("entropy", "lse"))
    assert stats.logp.equal(expected.logp)
    (dlogits,) = torch.autograd.grad([stats.logp, stats.entropy, stats.lse], logits, list(upstream))
    assert dlogits.equal(backward(rows, expected, upstream)[0])


def test_linear_loss_in_tiles(generator: Generator) -> None:
    """Through the vocabulary's tiles, as on the CPU, against whole logits."""
    hidden = torch.randn(3, 5, 16, generator=generator)
    weight = torch.randn(9001, 16, generator=generator)
    batch = logits_batch(generator, 9001)
    results = []
    for name in ("cuda", "cpu"):
        rlkernels.set_backend(name)
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        out = rlkernels.linear_policy_loss(*leaves, batch, "dapo")
        results.append((out, torch.autograd.grad(out.loss, leaves)))
    torch.testing.assert_close(results[0][0].loss, results[1][0].loss)
    for a, b in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def prefix_counts_by_definition(ids: Tensor, lengths: Tensor, group_of: Tensor) -> Tensor:
    """Every pair and every position by itself."""
    counts = torch.ones(ids.shape, dtype=torch.int32)
    for i in range(ids.shape[0]):
        for t in range(int(lengths[i])):
            counts[i, t] = sum(
                int(lengths[j]) > t and ids[j, : t + 1].equal(ids[i, : t + 1])
                for j in range(ids.shape[0])
                if group_of[j] == group_of[i]
            )
    return counts


def prefix_counts(ids: Tensor, lengths: Tensor, group_of: Tensor, groups: int) -> Tensor:
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(group_of, minlength=groups).cumsum(0)])
    counts = torch.full(ids.shape, -1, dtype=torch.int32)
    cuda.prefix_counts(ids, lengths, group_of.argsort(stable=True), starts, counts)
    return counts


@pytest.mark.parametrize(
    ("group_of", "width"),
    [
        pytest.param([0, 0, 0, 0, 0, 0], 12, id="one group"),
        pytest.param([2, 0, 3, 0, 2, 2, 3, 2], 300, id="ragged groups, interleaved, one of them empty"),
        pytest.param([0] * 300, 5, id="more rows than a block compares at once"),
        pytest.param([0], 1, id="one token"),
        pytest.param([0, 0], 0, id="no tokens"),
        pytest.param([], 4, id="no rows"),
    ],
)
def test_prefix_counts_match_the_definition(group_of: list[int], width: int, generator: Generator) -> None:
    rows = len(group_of)
    ids = torch.randint(0, 2, (rows, width), generator=generator)  # two tokens, so that long prefixes are shared
    if rows and width:
        ids[:, : width // 2] = ids[0, : width // 2]
        ids[-1, -1] += 2**40  # differs beyond 32 bits
    lengths = torch.randint(0, width + 1, (rows,), generator=generator)
    groups = torch.tensor(group_of, dtype=torch.int64)
    assert prefix_counts(ids, lengths, groups, 4).equal(prefix_counts_by_definition(ids, lengths, groups))
