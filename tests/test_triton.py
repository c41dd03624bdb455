"""The Triton kernels: their values, on a GPU or in the interpreter, and their compilation for AMD."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from test_gpu_static import BENCH, environment_of_compiler
from tolerance import CONSTANT, assert_as_exact_as_torch

import rlkernels
from rlkernels import backends, checks, reference
from rlkernels.ops.rows import (
    Rows,
    RowStats,
    SavedStats,
    Tile,
    Upstream,
    Wanted,
    compute_dtype,
    empty_dlogits,
    empty_row_stats,
)
from rlkernels.triton_kernels import (
    configs,
    prefix_counts,
    token_stats,
)

DEVICE = "cpu" if backends.triton_is_interpreted else "cuda"
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
EVERYTHING = Wanted(*[True] * len(Wanted._fields))
PUBLIC = ("logp", *Wanted._fields)
IGNORE = -100

# infinities and NaN are computed with here on purpose; NumPy, under the interpreter, remarks on them
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def one_sequence(stored: Tensor) -> Tensor:
    return stored.unsqueeze(0)


class Case(NamedTuple):
    logits: Tensor  # as stored, float64; a copy in another dtype would not keep the strides of a view
    targets: Tensor  # [N]
    temperature: Tensor | float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0
    view: Callable[[Tensor], Tensor] = one_sequence  # [outer, inner, V] of what is stored


def gaussian(n: int, vocab: int, generator: torch.Generator, scale: float = 4.0) -> Case:
    return Case(
        scale * torch.randn(n, vocab, dtype=torch.float64, generator=generator),
        torch.randint(0, vocab, (n,), generator=generator),
    )


def transposed(generator: torch.Generator) -> Case:
    case = gaussian(5, 1003, generator)
    return case._replace(logits=case.logits.T.contiguous(), view=lambda stored: stored.T.unsqueeze(0))


def shifted_slices(generator: torch.Generator) -> Case:
    case = gaussian(8, 1010, generator)
    return case._replace(targets=case.targets[:6] % 1003, view=lambda stored: stored.view(2, 4, 1010)[:, :-1, 3:1006])


def scaled_and_capped(generator: torch.Generator) -> Case:
    temperature = torch.tensor([0.3, 0.7, 1.0, 1.3, 4.0])
    return gaussian(5, 5000, generator, 20.0)._replace(temperature=temperature, softcap=30.0, logit_scale=1.7)


def ignored(generator: torch.Generator) -> Case:
    case = gaussian(5, 1003, generator)
    case.targets[[0, 3]] = IGNORE
    case.logits[3] = torch.nan
    return case._replace(temperature=torch.tensor([1.0, 2.0, 1.0, -1.0, 1.0]))


def minus_infinity(generator: torch.Generator) -> Case:
    case = gaussian(5, 9000, generator)
    case.logits[0, :4096] = -torch.inf  # the first segment
    case.logits[1, 4096:] = -torch.inf  # all but the first
    case.logits[2, case.targets[2]] = -torch.inf
    case.logits[3] = -torch.inf  # all but the last column
    case.logits[3, -1] = 1.0
    case.logits[4, ::2] = -torch.inf
    return case


def common_offset(generator: torch.Generator) -> Case:
    case = gaussian(5, 1003, generator)
    return case._replace(logits=case.logits + 1e6)


def confident(generator: torch.Generator) -> Case:
    case = gaussian(15, 1003, generator)
    lead = torch.tensor([8.0, 12.0, 60.0], dtype=torch.float64).repeat(5)
    case.logits[torch.arange(15), case.targets] = case.logits.amax(-1) + lead
    return case


CASES: dict[str, Callable[[torch.Generator], Case]] = {
    "one column": lambda g: gaussian(5, 1, g),  # probability 1 exactly
    "fewer columns than lanes": lambda g: gaussian(5, 5, g),
    "odd vocabulary": lambda g: gaussian(5, 1003, g),  # one masked segment
    "whole and partial segment": lambda g: gaussian(5, 5000, g),
    "whole segments": lambda g: gaussian(2, 8192, g),  # nothing masked
    "one row": lambda g: gaussian(1, 1003, g),
    "no rows": lambda g: gaussian(0, 1003, g),  # no launch
    "transposed": transposed,  # columns apart
    "shifted slices": shifted_slices,  # two row strides, rows not aligned
    "per-row temperature, softcap, scale": scaled_and_capped,
    "ignored rows": ignored,  # whatever their logits and temperature hold
    "minus infinity": minus_infinity,
    "minus infinity, softcap": lambda g: minus_infinity(g)._replace(softcap=30.0),  # finite, unlike padding
    "common offset": common_offset,  # p rebuilt from lse would be lost
    "confident rows": confident,  # 1 - p cancels
}


NOT_COMPARABLE = {
    ("common offset", torch.float16): "float16 ends at 65504",
    ("common offset", torch.float64): "the definition differentiates lse through its rounded value",
    ("confident rows", torch.float64): "the definition cancels as well, so it is not exact",
}


def make_rows(case: Case, dtype: torch.dtype) -> Rows:
    logits = case.logits.to(dtype).to(DEVICE)
    compute = compute_dtype(dtype)

    def number(value: Tensor | float) -> Tensor:
        # rounded to float32 whatever the dtype, so that all compute with the same numbers
        return torch.as_tensor(value, dtype=torch.float32, device=DEVICE).to(compute).reshape(-1)

    return Rows(
        case.view(logits),
        case.targets.to(DEVICE),
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
    return Upstream(*gradients.to(DEVICE, compute_dtype(rows.logits.dtype)).unbind(0))


def unwritten_stats(rows: Rows, wanted: Wanted = EVERYTHING) -> RowStats:
    outputs = empty_row_stats(rows, wanted)
    for output in outputs:
        output.fill_(True if output.dtype == torch.bool else torch.nan)
    return outputs


def forward(rows: Rows, wanted: Wanted = EVERYTHING) -> RowStats:
    outputs = unwritten_stats(rows, wanted)
    token_stats.token_stats_forward(rows, outputs)
    return outputs


def saved_of(outputs: RowStats) -> SavedStats:
    return SavedStats(outputs.row_max, outputs.log_sum_exp, outputs.entropy)


def backward(rows: Rows, outputs: RowStats, upstream: Upstream) -> Tensor:
    dlogits = empty_dlogits(rows).fill_(torch.nan)
    token_stats.token_stats_backward(rows, saved_of(outputs), upstream, dlogits)
    return dlogits


def tiles_of(rows: Rows, width: int) -> Iterator[tuple[Rows, Tile]]:
    """Tiles of the rows from left to right, each with logits of its own."""
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


def stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """What a kernel makes of values of the compute dtype when it stores them."""
    if dtype == torch.bfloat16 and backends.triton_is_interpreted:
        # the interpreter truncates to bfloat16 where a GPU rounds
        values = (values.view(torch.int32) & -(1 << 16)).view(torch.float32)
    return values.to(dtype)


def pytorch_passes(rows: Rows, upstream: Upstream) -> tuple[RowStats, Tensor]:
    """What PyTorch makes of rows in their own dtype."""
    stats, dlogits = reference_passes(rows, upstream)
    if rows.logits.dtype == torch.bfloat16:
        _, unrounded = reference_passes(rows._replace(logits=rows.logits.float()), upstream)
        dlogits = stored(unrounded, torch.bfloat16)
    return stats, dlogits


def with_term(magnitude: float, *results: Tensor) -> list[Tensor]:
    """Results whose tolerance is also relative to `magnitude`, which cancelled in them."""
    return [torch.cat([x.double().flatten(), x.new_full((1,), magnitude, dtype=torch.float64)]) for x in results]


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where only the kernel sees the values."""
    monkeypatch.setattr(checks, "values_are_checked", lambda device: False)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", CASES)
def test_both_passes_match_the_definition(name: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    if (name, dtype) in NOT_COMPARABLE:
        pytest.skip(NOT_COMPARABLE[name, dtype])
    rows = make_rows(CASES[name](generator), dtype)
    upstream = upstream_of(rows)
    outputs = forward(rows)
    dlogits = backward(rows, outputs, upstream)

    own, own_dlogits = pytorch_passes(rows, upstream)
    exact, exact_dlogits = reference_passes(in_float64(rows), upstream)
    compute = compute_dtype(dtype)
    # z is softcap / temperature times a tanh that is rounded near 1
    capped_z = 0.0 if rows.softcap is None else (rows.softcap / rows.temperature).max().item()
    assert outputs.is_top1.equal(exact.is_top1)
    for field in ("logp", "entropy", "lse", "log_sum_sq_probs", "mean_logits"):
        results = (getattr(stats, field) for stats in (outputs, own, exact))
        # the sum of exponentials is at least 1, and so is what it is rounded in
        assert_as_exact_as_torch(*with_term(max(1.0, capped_z), *results), compute, field)
    largest = exact_dlogits.abs().max().item() if exact_dlogits.numel() else 0.0
    lost_in_z = capped_z * CONSTANT[compute] / CONSTANT[dtype]
    results = (dlogits, own_dlogits, exact_dlogits)
    assert_as_exact_as_torch(*with_term(largest * lost_in_z, *results), dtype, "dlogits")


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_an_output_does_not_depend_on_the_others(softcap: float | None, generator: torch.Generator) -> None:
    rows = make_rows(gaussian(2, 5000, generator)._replace(softcap=softcap), torch.float32)
    everything = forward(rows)
    for index, name in enumerate(Wanted._fields):
        outputs = forward(rows, Wanted(*(i == index for i in range(len(Wanted._fields)))))
        for field in ("logp", name, "row_max", "log_sum_exp"):
            assert getattr(outputs, field).equal(getattr(everything, field)), field
        assert sum(output.numel() > 0 for output in outputs) == 4


@pytest.mark.parametrize("arrived", range(1, 8), ids="{:03b}".format)
def test_gradients_that_did_not_arrive_count_as_zero(arrived: int, generator: torch.Generator) -> None:
    rows = make_rows(gaussian(3, 1003, generator), torch.float32)
    outputs = forward(rows)
    full = upstream_of(rows)
    present = [bool(arrived >> i & 1) for i in range(3)]
    absent_as_none = Upstream(*(d if here else None for d, here in zip(full, present, strict=True)))
    absent_as_zero = Upstream(*(d * here for d, here in zip(full, present, strict=True)))
    assert backward(rows, outputs, absent_as_none).equal(backward(rows, outputs, absent_as_zero))


def test_a_row_has_the_same_bits_in_any_batch(generator: torch.Generator) -> None:
    case = gaussian(5, 9000, generator)
    whole = make_rows(case, torch.bfloat16)
    alone = make_rows(case._replace(logits=case.logits[3:4], targets=case.targets[3:4]), torch.bfloat16)
    whole_stats, alone_stats = forward(whole), forward(alone)
    for a, b in zip(whole_stats, alone_stats, strict=True):
        assert a[3:4].equal(b)
    upstream = upstream_of(whole)
    whole_gradient = backward(whole, whole_stats, upstream)
    alone_gradient = backward(alone, alone_stats, Upstream(*(d[3:4] for d in upstream)))
    assert whole_gradient[:, 3:4].equal(alone_gradient)


def targets_in_every_tile(vocab: int, generator: torch.Generator) -> Case:
    """Targets at the ends of segments, one that is the highest logit, and an ignored row of NaN."""
    case = gaussian(7, vocab, generator)
    case.targets[:4] = torch.tensor([0, configs.SEGMENT - 1, configs.SEGMENT, vocab - 1])
    case.targets[4] = case.logits[4].argmax()
    case.targets[5] = IGNORE
    case.logits[5] = torch.nan
    return case


TILED = {
    "vocabulary of 16s": lambda g: targets_in_every_tile(8240, g),
    "odd vocabulary": lambda g: targets_in_every_tile(9001, g),  # rows of whole tiles are aligned, others are not
    "softcap": lambda g: targets_in_every_tile(9001, g)._replace(softcap=5.0, temperature=0.7, logit_scale=1.3),
    "minus infinity": minus_infinity,
    "per-row temperature, one tile": scaled_and_capped,
}


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.nan_to_num(nan=123.0).equal(b.nan_to_num(nan=123.0)) and a.isnan().equal(b.isnan())


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", TILED)
def test_tiles_give_the_bits_of_whole_rows(name: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    rows = make_rows(TILED[name](generator), dtype)
    whole = forward(rows)
    count, vocab = rows.targets.shape[0], rows.logits.shape[-1]
    used = rows.targets != IGNORE
    for width in (configs.SEGMENT, 2 * configs.SEGMENT):
        outputs = unwritten_stats(rows)
        states = token_stats.empty_states(count, rows.logits).fill_(torch.nan)
        assert states.dtype == compute_dtype(dtype)
        maximum = torch.full_like(states[:, 0], -torch.inf)
        for tile_rows, tile in tiles_of(rows, min(width, vocab)):
            assert outputs.logp.isnan().all()
            token_stats.token_stats_forward(tile_rows, outputs, tile, states)
            if rows.softcap is None:
                maximum = maximum.maximum(tile_rows.logits[0].amax(-1))
                assert states[used, 0].equal(maximum[used])
        for field, a, b in zip(RowStats._fields, outputs, whole, strict=True):
            assert same_bits(a, b), field
        assert states[~used].isnan().all()


def test_a_statistic_in_tiles_does_not_depend_on_the_others(generator: torch.Generator) -> None:
    rows = make_rows(targets_in_every_tile(9001, generator), torch.float32)
    everything = forward(rows)
    for index, name in enumerate(Wanted._fields):
        outputs = unwritten_stats(rows, Wanted(*(i == index for i in range(len(Wanted._fields)))))
        states = token_stats.empty_states(7, rows.logits).fill_(torch.nan)
        for tile_rows, tile in tiles_of(rows, configs.SEGMENT):
            token_stats.token_stats_forward(tile_rows, outputs, tile, states)
        for field in ("logp", name, "row_max", "log_sum_exp"):
            assert same_bits(getattr(outputs, field), getattr(everything, field)), field


@pytest.mark.parametrize("with_dtarget", [False, True])
@pytest.mark.parametrize("width", [1792, 4096, 9001])  # backward's tiles need not be whole segments
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_gradient_takes_the_place_of_the_logits(
    softcap: float | None, dtype: torch.dtype, width: int, with_dtarget: bool, generator: torch.Generator
) -> None:
    rows = make_rows(targets_in_every_tile(9001, generator)._replace(softcap=softcap), dtype)
    outputs = forward(rows)
    upstream = upstream_of(rows)
    for gradient in upstream:
        gradient[6] = 0.0
    whole = backward(rows, outputs, upstream)[0]
    dtarget = torch.full_like(outputs.logp, torch.nan) if with_dtarget else None
    dlogits = []
    for tile_rows, tile in tiles_of(rows, width):
        logits = tile_rows.logits
        token_stats.token_stats_backward(tile_rows, saved_of(outputs), upstream, logits, tile, dtarget)
        dlogits.append(logits[0])
    result = torch.cat(dlogits, -1)
    if dtarget is not None:
        has_gradient = rows.targets != IGNORE
        has_gradient[6] = False
        assert dtarget.isnan().equal(~has_gradient)  # not written
        column = rows.targets[has_gradient]
        assert not result[has_gradient, column].any()
        result[has_gradient, column] = stored(dtarget[has_gradient], dtype)
    assert same_bits(result, whole)


@pytest.mark.usefixtures("unchecked")
def test_a_bad_label_poisons_its_row_in_every_tile(generator: torch.Generator) -> None:
    case = gaussian(2, 9001, generator)
    case.targets[:] = torch.tensor([9001, 9000])
    rows = make_rows(case, torch.float32)
    outputs, upstream = unwritten_stats(rows), upstream_of(rows)
    states = token_stats.empty_states(2, rows.logits)
    for tile_rows, tile in tiles_of(rows, configs.SEGMENT):
        token_stats.token_stats_forward(tile_rows, outputs, tile, states)
    assert outputs.logp.isnan().tolist() == [True, False]
    dtarget = torch.zeros_like(outputs.logp)
    for tile_rows, tile in tiles_of(rows, configs.SEGMENT):
        logits = tile_rows.logits
        token_stats.token_stats_backward(tile_rows, saved_of(outputs), upstream, logits, tile, dtarget)
        assert logits[0].isnan().all(-1).tolist() == [True, False]
    assert dtarget.isfinite().all()
    assert dtarget[1] != 0


@pytest.mark.parametrize("second", [11, 4500], ids=["same segment", "later segment"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_first_maximum_is_top1(second: int, softcap: float | None, generator: torch.Generator) -> None:
    case = gaussian(2, 5000, generator)._replace(targets=torch.tensor([10, second]), softcap=softcap)
    case.logits.clamp_(max=10.0)
    case.logits[:, [10, second]] = 12.0
    assert forward(make_rows(case, torch.float32)).is_top1.tolist() == [True, False]


def test_rows_without_coefficients_are_not_read(generator: torch.Generator) -> None:
    rows = make_rows(gaussian(3, 5000, generator), torch.float32)
    outputs = forward(rows)
    rows.logits[0, 1] = torch.nan
    zero = torch.tensor([1.0, 0.0, 1.0], device=DEVICE)
    dlogits = backward(rows, outputs, Upstream(zero, None, zero))[0]
    assert dlogits.isfinite().all()
    assert not dlogits[1].any()
    assert dlogits[0].any()
    assert dlogits[2].any()


# in the first segment, in the last, and in the column of the target
@pytest.mark.parametrize("column", [7, 4999, 4321])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_nan_stays_visible(column: int, softcap: float | None, generator: torch.Generator) -> None:
    case = gaussian(2, 5000, generator)._replace(targets=torch.tensor([4321, 4321]), softcap=softcap)
    case.logits[0, column] = torch.nan
    rows = make_rows(case, torch.float32)
    outputs = forward(rows)
    dlogits = backward(rows, outputs, upstream_of(rows))[0]
    for field in PUBLIC:
        value = getattr(outputs, field)
        assert value.isfinite()[1]
        assert not value[0] if field == "is_top1" else value.isnan()[0], field
    assert dlogits[0].isnan().all()
    assert dlogits[1].isfinite().all()


def test_a_row_of_minus_infinity_has_no_distribution(generator: torch.Generator) -> None:
    case = gaussian(2, 5000, generator)
    case.logits[0] = -torch.inf
    rows = make_rows(case, torch.float32)
    outputs = forward(rows)
    dlogits = backward(rows, outputs, upstream_of(rows))[0]
    for field in ("logp", "entropy", "lse", "log_sum_sq_probs"):
        value = getattr(outputs, field)
        assert value.isnan().tolist() == [True, False], field
    assert not outputs.is_top1[0]
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
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_value_poisons_its_own_row(name: str, softcap: float | None, generator: torch.Generator) -> None:
    good_case = gaussian(3, 1003, generator)._replace(temperature=torch.ones(3), softcap=softcap)
    bad_case = good_case._replace(targets=good_case.targets.clone(), temperature=good_case.temperature.clone())
    bad_case.targets[1], bad_case.temperature[1] = BAD_ROWS[name]
    good, bad = make_rows(good_case, torch.float32), make_rows(bad_case, torch.float32)
    good_stats, bad_stats = forward(good), forward(bad)
    for field in PUBLIC:
        a, b = getattr(good_stats, field), getattr(bad_stats, field)
        assert a[[0, 2]].equal(b[[0, 2]]), field
        assert not b[1] if field == "is_top1" else b.isnan()[1], field
    upstream = upstream_of(good)
    a, b = backward(good, good_stats, upstream)[0], backward(bad, bad_stats, upstream)[0]
    assert a[[0, 2]].equal(b[[0, 2]])
    assert b[1].isnan().all()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("value", [0.0, -1.0, torch.inf, torch.nan])
@pytest.mark.parametrize("name", ["softcap", "logit_scale"])
def test_a_bad_number_poisons_every_row_in_use(name: str, value: float, generator: torch.Generator) -> None:
    case = gaussian(2, 1003, generator)._replace(**{name: value})
    case.targets[0] = IGNORE
    rows = make_rows(case, torch.float32)
    outputs = forward(rows)
    assert outputs.logp[0] == 0
    assert outputs.logp.isnan()[1]
    dlogits = backward(rows, outputs, upstream_of(rows))[0]
    assert not dlogits[0].any()
    assert dlogits[1].isnan().all()


def test_a_bad_label_is_reported_where_the_host_may_look(generator: torch.Generator) -> None:
    case = gaussian(2, 5, generator)
    case.targets[1] = 5
    rlkernels.set_checks(True)
    with pytest.raises(ValueError, match=r"targets: expected labels in \[0, 5\).*got 5 at row 1"):
        forward(make_rows(case, torch.float32))


def test_public_function_runs_on_triton(generator: torch.Generator) -> None:
    """The whole way, with autograd, gives what calling the kernels gives."""
    rows = make_rows(gaussian(4, 1003, generator), torch.float32)
    expected = forward(rows)
    upstream = upstream_of(rows)
    rlkernels.set_backend("triton")
    logits = rows.logits[0].clone().requires_grad_()
    stats = rlkernels.token_stats(logits, rows.targets, outputs=("entropy", "lse"))
    assert stats.logp.equal(expected.logp)
    assert stats.entropy.equal(expected.entropy)
    assert stats.lse.equal(expected.lse)
    (dlogits,) = torch.autograd.grad([stats.logp, stats.entropy, stats.lse], logits, list(upstream))
    assert dlogits.equal(backward(rows, expected, upstream)[0])


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


def triton_prefix_counts(ids: Tensor, lengths: Tensor, group_of: Tensor, groups: int) -> Tensor:
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(group_of, minlength=groups).cumsum(0)])
    counts = torch.full(ids.shape, -1, dtype=torch.int32, device=DEVICE)
    arguments = (ids, lengths, group_of.argsort(stable=True), starts)
    prefix_counts.prefix_counts(*(value.to(DEVICE) for value in arguments), counts)
    return counts.cpu()


@pytest.mark.parametrize(
    ("group_of", "width"),
    [
        pytest.param([0, 0, 0, 0, 0, 0], 12, id="one group"),
        pytest.param([2, 0, 3, 0, 2, 2, 3, 2], 12, id="ragged groups, interleaved, one of them empty"),
        pytest.param([0], 1, id="one token"),
        pytest.param([0, 0], 0, id="no tokens"),
        pytest.param([], 4, id="no rows"),
    ],
)
def test_prefix_counts_match_the_definition(group_of: list[int], width: int, generator: torch.Generator) -> None:
    rows = len(group_of)
    ids = torch.randint(0, 2, (rows, width), generator=generator)  # two tokens, so that long prefixes are shared
    lengths = torch.randint(0, width + 1, (rows,), generator=generator)
    groups = torch.tensor(group_of, dtype=torch.int64)
    expected = prefix_counts_by_definition(ids, lengths, groups)
    assert triton_prefix_counts(ids, lengths, groups, 4).equal(expected)


def test_prefixes_that_end_around_a_block() -> None:
    block = configs.PREFIX_TOKENS.block
    ends = [block - 1, block, block + 1, 2 * block, 2 * block + 5, 0]
    width = 2 * block + 7
    ids = torch.zeros(len(ends), width, dtype=torch.int64)
    for row, end in enumerate(ends):
        ids[row, end] = 2**40 + row  # differs beyond 32 bits
    group_of = torch.zeros(len(ends), dtype=torch.int64)
    expected = torch.ones(len(ends), width, dtype=torch.int32)
    for row, end in enumerate(ends):
        for other in ends[:row] + ends[row + 1 :]:
            expected[row, : min(end, other)] += 1
    assert triton_prefix_counts(ids, torch.full((len(ends),), width), group_of, 1).equal(expected)
    # the same prefixes, now because the rows end there
    ids.zero_()
    assert triton_prefix_counts(ids, torch.tensor(ends), group_of, 1).equal(
        torch.where(torch.arange(width) < torch.tensor(ends)[:, None], expected, 1)
    )


@pytest.mark.slow
def test_every_kernel_compiles_for_amd_without_spilling(tmp_path: Path) -> None:
    """For NVIDIA: tests/test_gpu_static.py."""
    result = subprocess.run(
        [sys.executable, str(BENCH / "triton_targets.py"), "gfx942"],
        env=environment_of_compiler() | {"TRITON_CACHE_DIR": str(tmp_path)},  # compiled now, whatever was before
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    print(result.stdout)
    usage = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(usage) > 70
    assert all(line["spills"] == 0 for line in usage)
