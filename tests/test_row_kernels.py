"""What the row kernels of Triton and of CUDA promise alike. Those of CUDA run on the CPU, by csrc/host_device/."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import host_device
import pytest
import torch
from row_cases import (
    CASES,
    CUDA,
    EVERYTHING,
    FEW,
    IGNORE,
    MANY,
    NOT_COMPARABLE,
    PLAIN,
    SEGMENT,
    STATISTICS,
    TILED,
    RowKernels,
    assert_both_passes_match_the_definition,
    by_dtype,
    each_alone,
    gaussian,
    make_rows,
    prefix_counts_by_definition,
    same_bits,
    targets_in_every_tile,
    tiles_of,
    triton_kernels,
    unwritten_stats,
    upstream_of,
)
from test_policy_objective import logits_batch
from torch import Generator

import rlkernels
from rlkernels import checks
from rlkernels.ops.rows import RowStats, Tile, Upstream, Wanted, compute_dtype

# infinities and NaN are computed with here on purpose; NumPy, under the interpreter, remarks on them
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.fixture(params=["triton", "cuda", "cuda, split rows", *host_device.ON_A_GPU])
def kernels(
    request: pytest.FixtureRequest, select_backend: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> RowKernels:
    if request.node.get_closest_marker("gpu"):
        select_backend(request.param)
        return triton_kernels() if request.param == "triton" else CUDA
    if request.param == "triton":
        return triton_kernels()
    multiprocessors = FEW if request.param == "cuda, split rows" else MANY
    host_device.use(request.getfixturevalue("host_device_kernels"), monkeypatch, multiprocessors)
    return CUDA


# where splitting makes no difference, or none but what test_cuda_emulated.py shows to the bit
unsplit = pytest.mark.parametrize("kernels", ["triton", "cuda"], indirect=True)
each_wanted = pytest.mark.parametrize("wanted", [PLAIN, EVERYTHING], ids=["plain", "full"])
each_softcap = pytest.mark.parametrize("softcap", [None, 5.0])


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where only the kernel sees the values."""
    monkeypatch.setattr(checks, "values_are_checked", lambda device: False)


@unsplit
@by_dtype
@pytest.mark.parametrize("name", CASES)
def test_both_passes_match_the_definition(
    name: str, dtype: torch.dtype, kernels: RowKernels, generator: Generator
) -> None:
    if (name, dtype) in NOT_COMPARABLE:
        pytest.skip(NOT_COMPARABLE[name, dtype])
    assert_both_passes_match_the_definition(kernels, make_rows(CASES[name](generator), dtype, kernels.device))


@by_dtype
@each_softcap
def test_an_output_does_not_depend_on_the_others(
    softcap: float | None, dtype: torch.dtype, kernels: RowKernels, generator: Generator
) -> None:
    rows = make_rows(gaussian(5003, generator, 2)._replace(softcap=softcap), dtype, kernels.device)
    everything = kernels.forward(rows)
    for name, wanted in each_alone():
        outputs = kernels.forward(rows, wanted)
        for field in ("logp", name, "row_max", "log_sum_exp"):
            assert getattr(outputs, field).equal(getattr(everything, field)), field
        assert sum(output.numel() > 0 for output in outputs) == 4


@pytest.mark.parametrize("arrived", range(1, 8), ids="{:03b}".format)
def test_gradients_that_did_not_arrive_count_as_zero(arrived: int, kernels: RowKernels, generator: Generator) -> None:
    rows = make_rows(gaussian(1003, generator), torch.float32, kernels.device)
    outputs = kernels.forward(rows)
    full = upstream_of(rows)
    present = [bool(arrived >> i & 1) for i in range(3)]
    as_none = Upstream(*(d if here else None for d, here in zip(full, present, strict=True)))
    as_zero = Upstream(*(d * here for d, here in zip(full, present, strict=True)))
    assert kernels.backward(rows, outputs, as_none).equal(kernels.backward(rows, outputs, as_zero))


def test_a_row_has_the_same_bits_in_any_batch(kernels: RowKernels, generator: Generator) -> None:
    case = gaussian(9000, generator, 5)
    whole = make_rows(case, torch.bfloat16, kernels.device)
    alone = whole._replace(logits=whole.logits[:, 3:4].clone(), targets=whole.targets[3:4])
    whole_stats, alone_stats = kernels.forward(whole), kernels.forward(alone)
    for a, b in zip(whole_stats, alone_stats, strict=True):
        assert a[3:4].equal(b)
    upstream = upstream_of(whole)
    whole_gradient = kernels.backward(whole, whole_stats, upstream)
    alone_gradient = kernels.backward(alone, alone_stats, Upstream(*(d[3:4] for d in upstream)))
    assert whole_gradient[:, 3:4].equal(alone_gradient)


@by_dtype
@pytest.mark.parametrize("name", TILED)
def test_tiles_give_the_bits_of_whole_rows(
    name: str, dtype: torch.dtype, kernels: RowKernels, generator: Generator
) -> None:
    rows = make_rows(TILED[name](generator), dtype, kernels.device)
    whole = kernels.forward(rows)
    count, vocab = rows.targets.shape[0], rows.logits.shape[-1]
    used = rows.targets != IGNORE
    for wanted, width in itertools.product((PLAIN, EVERYTHING), (SEGMENT, 2 * SEGMENT)):
        outputs = unwritten_stats(rows, wanted)
        states = kernels.stats.empty_states(count, rows.logits).fill_(torch.nan)
        maximum = torch.full_like(states[:, 0], -torch.inf)
        for tile_rows, tile in tiles_of(rows, min(width, vocab)):
            assert outputs.logp.isnan().all()
            kernels.stats.token_stats_forward(tile_rows, outputs, tile, states)
            if rows.softcap is None:
                maximum = maximum.maximum(tile_rows.logits[0].amax(-1))
                assert states[used, 0].equal(maximum[used])
        for field, a, b in zip(RowStats._fields, outputs, whole, strict=True):
            assert same_bits(a, b[: a.numel()]), (field, wanted, width)
        assert states[~used].isnan().all()


@by_dtype
def test_a_tile_of_no_columns_finishes(dtype: torch.dtype, kernels: RowKernels, generator: Generator) -> None:
    """Behind the last column; how shards of a vocabulary finish merged states."""
    rows = make_rows(targets_in_every_tile(generator), dtype, kernels.device)
    whole = kernels.forward(rows)
    outputs = unwritten_stats(rows, EVERYTHING)
    states = kernels.stats.empty_states(rows.targets.shape[0], rows.logits)
    vocab = rows.logits.shape[-1]
    for tile_rows, tile in tiles_of(rows, SEGMENT):
        unfinished = Tile(tile.start, vocab + 16)  # as if other columns were to come
        kernels.stats.token_stats_forward(tile_rows, outputs, unfinished, states)
    nothing = tile_rows._replace(logits=tile_rows.logits[..., :0])
    kernels.stats.token_stats_forward(nothing, outputs, Tile(vocab, vocab), states)
    for field, a, b in zip(RowStats._fields, outputs, whole, strict=True):
        assert same_bits(a, b), field


def test_a_statistic_in_tiles_does_not_depend_on_the_others(kernels: RowKernels, generator: Generator) -> None:
    rows = make_rows(targets_in_every_tile(generator), torch.float32, kernels.device)
    everything = kernels.forward(rows)
    for name, wanted in each_alone():
        outputs = kernels.forward_in_tiles(rows, wanted)
        for field in ("logp", name, "row_max", "log_sum_exp"):
            assert same_bits(getattr(outputs, field), getattr(everything, field)), field


@by_dtype
@pytest.mark.parametrize("name", ["odd vocabulary", "softcap"])
def test_the_gradient_takes_the_place_of_the_logits(
    name: str, dtype: torch.dtype, kernels: RowKernels, generator: Generator
) -> None:
    rows = make_rows(TILED[name](generator), dtype, kernels.device)
    outputs = kernels.forward(rows)
    upstream = upstream_of(rows)
    for gradient in upstream:
        gradient[6] = 0.0
    whole = kernels.backward(rows, outputs, upstream)[0]
    has_gradient = rows.targets != IGNORE
    has_gradient[6] = False
    column = rows.targets[has_gradient]
    for width in (1792, SEGMENT, 9001):  # backward's tiles need not be whole segments
        assert same_bits(kernels.backward_in_tiles(rows, outputs, upstream, width, None), whole), width

        # the target's gradient apart, as it is before it is stored
        dtarget = torch.full_like(outputs.logp, torch.nan)
        result = kernels.backward_in_tiles(rows, outputs, upstream, width, dtarget)
        assert dtarget.isnan().equal(~has_gradient), width  # not written
        assert not result[has_gradient, column].any(), width
        result[has_gradient, column] = kernels.stored(dtarget[has_gradient], dtype)
        assert same_bits(result, whole), width


@pytest.mark.usefixtures("unchecked")
def test_a_bad_label_poisons_its_row_in_every_tile(kernels: RowKernels, generator: Generator) -> None:
    case = gaussian(9001, generator, 2)._replace(targets=torch.tensor([9001, 9000]))
    rows = make_rows(case, torch.float32, kernels.device)
    outputs = kernels.forward_in_tiles(rows)
    assert outputs.logp.isnan().tolist() == [True, False]
    dtarget = torch.zeros_like(outputs.logp)
    dlogits = kernels.backward_in_tiles(rows, outputs, upstream_of(rows), SEGMENT, dtarget)
    assert dlogits[0].isnan().all()
    assert dlogits[1].isfinite().all()
    assert dtarget.isfinite().all()
    assert dtarget[1] != 0


@pytest.mark.parametrize("second", [11, 4500], ids=["same segment", "later segment"])
@each_softcap
def test_the_first_maximum_is_top1(
    second: int, softcap: float | None, kernels: RowKernels, generator: Generator
) -> None:
    case = gaussian(5003, generator, 2)._replace(targets=torch.tensor([10, second]), softcap=softcap)
    case.logits.clamp_(max=10.0)
    case.logits[0, :, [10, second]] = 12.0
    outputs = kernels.forward(make_rows(case, torch.float32, kernels.device))
    assert outputs.is_top1.tolist() == [True, False]


def test_rows_without_coefficients_are_not_read(kernels: RowKernels, generator: Generator) -> None:
    rows = make_rows(gaussian(5003, generator), torch.float32, kernels.device)
    outputs = kernels.forward(rows)
    rows.logits[0, 1] = torch.nan
    zero = torch.tensor([1.0, 0.0, 1.0], device=kernels.device)
    dlogits = kernels.backward(rows, outputs, Upstream(zero, None, zero))[0]
    assert dlogits.isfinite().all()
    assert dlogits.any(-1).tolist() == [True, False, True]


# in the first segment, in the last, and in the column of the target
@pytest.mark.parametrize("column", [7, 4999, 4321])
@each_softcap
@each_wanted
def test_nan_stays_visible(
    wanted: Wanted, softcap: float | None, column: int, kernels: RowKernels, generator: Generator
) -> None:
    case = gaussian(5003, generator, 2)._replace(targets=torch.tensor([4321, 4321]), softcap=softcap)
    case.logits[0, 0, column] = torch.nan
    rows = make_rows(case, torch.float32, kernels.device)
    outputs = kernels.forward(rows, wanted)
    dlogits = kernels.backward(rows, outputs, upstream_of(rows))[0]
    for field in STATISTICS:
        value = getattr(outputs, field)
        assert value.isnan().tolist() == [True, False][: value.numel()], field
    assert not outputs.is_top1[:1].any()
    assert dlogits[0].isnan().all()
    assert dlogits[1].isfinite().all()


@each_wanted
def test_a_row_of_minus_infinity_has_no_distribution(wanted: Wanted, kernels: RowKernels, generator: Generator) -> None:
    case = gaussian(5003, generator, 2)
    case.logits[0, 0] = -torch.inf
    rows = make_rows(case, torch.float32, kernels.device)
    outputs = kernels.forward(rows, wanted)
    dlogits = kernels.backward(rows, outputs, upstream_of(rows))[0]
    for field in ("logp", "entropy", "lse", "log_sum_sq_probs"):
        value = getattr(outputs, field)
        assert value.isnan().tolist() == [True, False][: value.numel()], field
    assert not outputs.is_top1[:1].any()
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
@each_wanted
@each_softcap
@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_value_poisons_its_own_row(
    name: str, softcap: float | None, wanted: Wanted, kernels: RowKernels, generator: Generator
) -> None:
    good_case = gaussian(1003, generator)._replace(temperature=torch.ones(3), softcap=softcap)
    bad_case = good_case._replace(targets=good_case.targets.clone(), temperature=good_case.temperature.clone())
    bad_case.targets[1], bad_case.temperature[1] = BAD_ROWS[name]
    good, bad = (make_rows(case, torch.float32, kernels.device) for case in (good_case, bad_case))
    good_stats, bad_stats = kernels.forward(good, wanted), kernels.forward(bad, wanted)
    for field in RowStats._fields:
        a, b = getattr(good_stats, field), getattr(bad_stats, field)
        if a.numel():
            assert a[[0, 2]].equal(b[[0, 2]]), field
            assert field == "row_max" or (not b[1] if field == "is_top1" else b.isnan()[1]), field
    upstream = upstream_of(good)
    a, b = kernels.backward(good, good_stats, upstream)[0], kernels.backward(bad, bad_stats, upstream)[0]
    assert a[[0, 2]].equal(b[[0, 2]])
    assert b[1].isnan().all()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("value", [0.0, -1.0, torch.inf, torch.nan])
@pytest.mark.parametrize("name", ["softcap", "logit_scale"])
def test_a_bad_number_poisons_every_row_in_use(
    name: str, value: float, kernels: RowKernels, generator: Generator
) -> None:
    case = gaussian(1003, generator, 2)._replace(**{name: value})
    case.targets[0] = IGNORE
    rows = make_rows(case, torch.float32, kernels.device)
    outputs = kernels.forward(rows)
    assert outputs.logp[0] == 0
    assert outputs.logp.isnan()[1]
    dlogits = kernels.backward(rows, outputs, upstream_of(rows))[0]
    assert not dlogits[0].any()
    assert dlogits[1].isnan().all()


@unsplit
def test_a_bad_label_is_reported_where_the_host_may_look(kernels: RowKernels, generator: Generator) -> None:
    case = gaussian(5, generator, 2)
    case.targets[1] = 5
    rlkernels.set_checks(True)
    with pytest.raises(ValueError, match=r"targets: expected labels in \[0, 5\).*got 5 at row 1"):
        kernels.forward(make_rows(case, torch.float32, kernels.device))


@unsplit
@by_dtype
@pytest.mark.parametrize("factor", [1.0, 1 / 3])
def test_scaling_looks_at_the_factor(
    factor: float, dtype: torch.dtype, kernels: RowKernels, generator: Generator
) -> None:
    values = torch.randn(9001, generator=generator).to(kernels.device, dtype)[1:]
    by = torch.tensor(factor, dtype=compute_dtype(dtype), device=kernels.device)
    expected = kernels.stored(values.to(by.dtype) * by, dtype)
    kernels.sweep.scale_unless_one(values, by)
    assert values.equal(expected)


@unsplit
def test_public_function_with_autograd(kernels: RowKernels, generator: Generator) -> None:
    """The whole way gives what calling the kernels gives."""
    rows = make_rows(gaussian(1003, generator), torch.float32, kernels.device)
    expected = kernels.forward(rows)
    upstream = upstream_of(rows)
    rlkernels.set_backend(kernels.backend)
    logits = rows.logits[0].clone().requires_grad_()
    stats = rlkernels.token_stats(logits, rows.targets, outputs=("entropy", "lse"))
    assert stats.logp.equal(expected.logp)
    assert stats.entropy.equal(expected.entropy)
    assert stats.lse.equal(expected.lse)
    (dlogits,) = torch.autograd.grad([stats.logp, stats.entropy, stats.lse], logits, list(upstream))
    assert dlogits.equal(kernels.backward(rows, expected, upstream)[0])


@unsplit
def test_linear_loss_in_tiles(kernels: RowKernels, generator: Generator) -> None:
    """Through the vocabulary's tiles, against whole logits in plain PyTorch."""
    hidden = torch.randn(3, 5, 16, generator=generator).to(kernels.device)
    weight = torch.randn(9001, 16, generator=generator).to(kernels.device)
    batch = logits_batch(generator, 9001).to(kernels.device)
    results = []
    for name in (kernels.backend, "reference"):
        rlkernels.set_backend(name)
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        loss = rlkernels.linear_policy_loss(*leaves, batch, "dapo").loss
        results.append((loss, *torch.autograd.grad(loss, leaves)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@unsplit
@pytest.mark.parametrize(
    ("group_of", "width"),
    [
        pytest.param([0, 0, 0, 0, 0, 0], 12, id="one group"),
        pytest.param([2, 0, 3, 0, 2, 2, 3, 2], 300, id="ragged groups, interleaved, one of them empty"),
        pytest.param([0], 1, id="one token"),
        pytest.param([0, 0], 0, id="no tokens"),
        pytest.param([], 4, id="no rows"),
    ],
)
def test_prefix_counts_match_the_definition(
    group_of: list[int], width: int, kernels: RowKernels, generator: Generator
) -> None:
    rows = len(group_of)
    ids = torch.randint(0, 2, (rows, width), generator=generator)  # two tokens, so that long prefixes are shared
    if width > 12:
        ids[:, : width // 2] = ids[:1, : width // 2]
    lengths = torch.randint(0, width + 1, (rows,), generator=generator)
    groups = torch.tensor(group_of, dtype=torch.int64)
    expected = prefix_counts_by_definition(ids, lengths, groups)
    assert kernels.prefix_counts(ids, lengths, groups, 4).equal(expected)


@unsplit
def test_prefixes_that_end_around_a_block(kernels: RowKernels) -> None:
    block = kernels.prefix_block
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
    assert kernels.prefix_counts(ids, torch.full((len(ends),), width), group_of, 1).equal(expected)
    # the same prefixes, now because the rows end there
    ids.zero_()
    assert kernels.prefix_counts(ids, torch.tensor(ends), group_of, 1).equal(
        torch.where(torch.arange(width) < torch.tensor(ends)[:, None], expected, 1)
    )
