"""CoRT: counterfactual contrasts of logits and of hidden states, the weights made of them, and its rewards."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rlkernels
from rlkernels import checks
from rlkernels.credit import (
    all_or_nothing,
    constraint_satisfaction_rate,
    contrast_by_span,
    counterfactual_contrast,
    group_advantages,
    linear_counterfactual_contrast,
    replay_weights,
    smoothstep_ramp,
)
from rlkernels.ops.rows import compute_dtype

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
IGNORE = -100
INF, NAN = torch.inf, torch.nan

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


class Pair(NamedTuple):
    """Logits of two prompts of different lengths, with one response; its rows in either."""

    logits_with: Tensor
    logits_without: Tensor
    targets: Tensor  # [B, T]
    rows_with: Tensor
    rows_without: Tensor

    def contrast(self, **options: Any) -> Tensor:
        rows = {"rows_with": self.rows_with, "rows_without": self.rows_without}
        return counterfactual_contrast(self.logits_with, self.logits_without, self.targets, **rows | options)


def make_pair(generator: Generator, dtype: torch.dtype = torch.float32, vocab: int = 5003) -> Pair:
    """Three responses of at most four tokens behind prompts of 3 to 5 tokens, and of 1 to 3; padding is ignored."""
    responses, length = 3, 4
    logits_with = (3 * torch.randn(responses, 9, vocab, generator=generator)).to(dtype)
    logits_without = (3 * torch.randn(responses, 7, vocab, generator=generator)).to(dtype)
    targets = torch.randint(vocab, (responses, length), generator=generator)
    tokens = torch.arange(length)

    def rows_of(starts: list[int], width: int) -> Tensor:
        return torch.arange(responses)[:, None] * width + torch.tensor(starts)[:, None] + tokens

    rows_with, rows_without = rows_of([2, 4, 3], 9), rows_of([0, 2, 1], 7)
    targets[1, 3:] = IGNORE
    rows_with[1, 3:] = 10**6  # not read
    rows_without[1, 3:] = -1
    return Pair(logits_with, logits_without, targets, rows_with, rows_without)


def gathered(vectors: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
    """A copy of the rows of each target, anything at ignored ones."""
    return vectors.flatten(0, -2)[torch.where(targets == IGNORE, 0, rows)]


def expected_of(pair: Pair, **options: Any) -> Tensor:
    logp_with, logp_without = (
        rlkernels.token_stats(gathered(logits, rows, pair.targets), pair.targets, outputs=(), **options).logp
        for logits, rows in ((pair.logits_with, pair.rows_with), (pair.logits_without, pair.rows_without))
    )
    return logp_with - logp_without


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"temperature": 0.7, "logit_scale": 1.3},
    "softcap": {"softcap": 5.0, "temperature": torch.tensor([0.5, 1.0, 2.0])},
    "temperature-a-token": {"temperature": torch.linspace(0.5, 2, 12).view(3, 4)},
}


@by_dtype
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_bits_are_those_of_token_stats(
    options: dict[str, Any], dtype: torch.dtype, backend: str, generator: Generator
) -> None:
    pair = make_pair(generator, dtype)
    actual, expected = pair.contrast(**options), expected_of(pair, **options)
    assert actual.dtype == compute_dtype(dtype)
    assert actual.equal(expected)
    assert actual[1, 3] == 0


def test_value_is_the_definition(generator: Generator, backend: str) -> None:
    pair = make_pair(generator, torch.float64)
    z_with, z_without = (
        gathered(logits, rows, pair.targets) / 0.7
        for logits, rows in ((pair.logits_with, pair.rows_with), (pair.logits_without, pair.rows_without))
    )
    for i, j in [(0, 0), (0, 3), (1, 2), (2, 1)]:
        y = pair.targets[i, j]
        expected = z_with[i, j].log_softmax(0)[y] - z_without[i, j].log_softmax(0)[y]
        assert pair.contrast(temperature=0.7)[i, j].item() == pytest.approx(expected.item(), abs=1e-12)


def test_without_rows_logits_lie_like_targets(generator: Generator, backend: str) -> None:
    """Strided logits, read in place."""
    logits_with = torch.randn(2, 6, 1001, generator=generator)[:, 1:]
    logits_without = torch.randn(1001, 2, 5, generator=generator).movedim(0, -1)
    targets = torch.randint(1001, (2, 5), generator=generator)
    expected = rlkernels.token_stats(logits_with, targets).logp - rlkernels.token_stats(logits_without, targets).logp
    assert counterfactual_contrast(logits_with, logits_without, targets).equal(expected)
    rows = torch.arange(10).view(2, 5)
    by_rows = counterfactual_contrast(logits_with, logits_without, targets, rows_with=rows)
    assert by_rows.equal(expected)


def test_any_order_and_any_integer_dtype(generator: Generator, backend: str) -> None:
    logits = torch.randn(6, 300, generator=generator)
    rows = torch.tensor([5, 0, 0, 3], dtype=torch.int32)
    targets = torch.tensor([1, 2, 299, 0], dtype=torch.int16)
    zeros = torch.zeros(4, 300)
    actual = counterfactual_contrast(logits, zeros, targets, rows_with=rows)
    expected = rlkernels.token_stats(logits[rows], targets).logp - rlkernels.token_stats(zeros, targets).logp
    assert actual.equal(expected)


def test_equal_contexts_have_no_contrast(generator: Generator, backend: str) -> None:
    logits = torch.randn(2, 3, 500, generator=generator)
    targets = torch.randint(500, (2, 3), generator=generator)
    assert not counterfactual_contrast(logits, logits.clone(), targets).any()


def test_the_factual_term_may_be_known(generator: Generator, backend: str) -> None:
    pair = make_pair(generator)
    targets = pair.targets
    logp = rlkernels.token_stats(gathered(pair.logits_with, pair.rows_with, targets), targets, outputs=()).logp
    logp[1, 3] = NAN  # ignored
    known = counterfactual_contrast(
        None, pair.logits_without, targets, rows_without=pair.rows_without, logp_with=logp.requires_grad_()
    )
    assert known.equal(pair.contrast())
    assert not known.requires_grad


def test_one_factual_pass_serves_several_contexts(generator: Generator, backend: str) -> None:
    """One criterion removed at a time: contexts in one tensor, found by rows, or stacked."""
    pair = make_pair(generator)
    rows = torch.stack([pair.rows_without, torch.where(pair.targets == IGNORE, -7, pair.rows_without + 1)])
    several = pair.contrast(rows_without=rows)
    assert several.shape == (2, 3, 4)
    for actual, rows_of_one in zip(several, rows, strict=True):
        assert actual.equal(pair.contrast(rows_without=rows_of_one))

    stacked = torch.randn(5, 3, 4, 5003, generator=generator)
    several = counterfactual_contrast(pair.logits_with, stacked, pair.targets, rows_with=pair.rows_with)
    for actual, logits in zip(several, stacked, strict=True):
        assert actual.equal(pair._replace(logits_without=logits).contrast(rows_without=None))


def test_ignored_logits_are_not_read(generator: Generator, backend: str) -> None:
    pair = make_pair(generator)
    expected = pair.contrast()
    unused = torch.ones(3 * 9, dtype=torch.bool)
    unused[pair.rows_with[pair.targets != IGNORE]] = False
    pair.logits_with.view(-1, 5003)[unused] = NAN
    assert pair.contrast().equal(expected)


@pytest.mark.parametrize("name", ["cuda", "triton"])
@pytest.mark.parametrize("few", [False, True])
def test_bad_rows_and_labels_on_a_gpu_give_nan(
    name: str,
    few: bool,
    select_backend: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    generator: Generator,
) -> None:
    """Where only the kernel sees them: never an address."""
    select_backend(name)
    if few and name == "cuda":
        from rlkernels.backends import cuda

        monkeypatch.setattr(cuda, "limits", lambda device: cuda.Limits(100, 0))  # rows split over blocks
    monkeypatch.setattr(checks, "values_are_checked", lambda device: False)
    pair = make_pair(generator)
    expected = pair.contrast()
    bad = {(0, 0): 27, (0, 1): -1, (2, 3): 2**62, (2, 0): -(2**63)}
    for place, row in bad.items():
        pair.rows_with[place] = row
    pair.targets[1, 0] = 5003
    places = torch.zeros(3, 4, dtype=torch.bool)
    for place in (*bad, (1, 0)):
        places[place] = True
    actual = pair.contrast()
    assert actual.isnan().equal(places)
    assert actual[~places].equal(expected[~places])


@pytest.mark.parametrize("by_rows", [False, True])
def test_hidden_states_give_the_bits_of_their_statistics(by_rows: bool, backend: str, generator: Generator) -> None:
    hidden_with = torch.randn(2, 7, 16, generator=generator)
    hidden_without = torch.randn(2, 5, 16, generator=generator)
    weight, bias = torch.randn(301, 16, generator=generator), torch.randn(301, generator=generator)
    targets = torch.randint(301, (2, 3), generator=generator)
    targets[1, 2] = IGNORE
    options = {"bias": bias, "temperature": torch.tensor([0.5, 2.0]), "softcap": 9.0, "logit_scale": 0.5}
    aligned_with, aligned_without, rows = hidden_with[:, 3:6], hidden_without[:, :3], {}
    if by_rows:
        tokens = torch.arange(3)
        rows = {"rows_with": tokens + torch.tensor([[3], [10]]), "rows_without": tokens + torch.tensor([[0], [5]])}
    else:
        hidden_with, hidden_without = aligned_with, aligned_without

    logp_with, logp_without = (
        rlkernels.linear_token_stats(hidden, weight, targets, **options).logp
        for hidden in (aligned_with, aligned_without)
    )
    actual = linear_counterfactual_contrast(hidden_with, hidden_without, weight, targets, **rows, **options)
    assert actual.equal(logp_with - logp_without)
    rows.pop("rows_with", None)
    actual = linear_counterfactual_contrast(
        None, hidden_without, weight, targets, logp_with=logp_with, **rows, **options, chunk_bytes=1
    )
    torch.testing.assert_close(actual, logp_with - logp_without)


def test_only_aligned_rows_of_hidden_states_are_read(generator: Generator, backend: str) -> None:
    hidden = torch.full((40, 8), NAN)
    rows = torch.tensor([7, 30, -5])
    hidden[rows[:2]] = torch.randn(2, 8, generator=generator)
    weight = torch.randn(20, 8, generator=generator)
    targets = torch.tensor([3, 4, IGNORE])
    contrast = linear_counterfactual_contrast(hidden, torch.zeros(3, 8), weight, targets, rows_with=rows)
    expected = hidden[rows[:2]].matmul(weight.T).log_softmax(-1)[[0, 1], targets[:2]] + math.log(20)
    torch.testing.assert_close(contrast[:2], expected)
    assert contrast[2] == 0


def test_bad_rows_of_hidden_states_give_nan_unchecked(monkeypatch: pytest.MonkeyPatch, generator: Generator) -> None:
    monkeypatch.setattr(checks, "values_are_checked", lambda device: False)
    hidden, weight = torch.randn(5, 8, generator=generator), torch.randn(20, 8, generator=generator)
    contrast = linear_counterfactual_contrast(
        hidden,
        hidden,
        weight,
        torch.tensor([0, 1, 2]),
        rows_with=torch.tensor([4, 5, -1]),
        rows_without=torch.arange(3),
    )
    assert contrast.isnan().tolist() == [False, True, True]


class Allocations(TorchDispatchMode):
    """Bytes of the largest storage that is made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return out


def test_no_temporary_grows_with_the_vocabulary(generator: Generator) -> None:
    pair = make_pair(generator, vocab=9001)
    with Allocations() as allocations:
        pair.contrast(temperature=0.5, softcap=9.0)
    assert 0 < allocations.largest <= 12 * 8  # one int64 a target


ROWS, ZEROS = torch.zeros(4, dtype=torch.int64), torch.zeros(4)


@pytest.mark.parametrize(
    "change, error, name",
    [
        ({"logits_with": None}, ValueError, "logits_with"),
        ({"logits_with": [0.0]}, TypeError, "logits_with"),
        ({"logits_with": torch.zeros(5, 3)}, ValueError, "logits_with"),
        ({"logits_with": torch.zeros(4, 3, dtype=torch.int64)}, TypeError, "logits_with"),
        ({"logits_with": torch.zeros(4, 3, device="meta")}, ValueError, "logits_with"),
        ({"logits_without": None}, TypeError, "logits_without"),
        ({"logits_without": torch.zeros(()), "logits_with": None, "logp_with": ZEROS}, ValueError, "logits_without"),
        ({"logits_without": torch.zeros(4, 0), "logits_with": None, "logp_with": ZEROS}, ValueError, "logits_without"),
        ({"logits_without": torch.zeros(4, 2)}, ValueError, "logits_with"),
        ({"logits_without": torch.zeros(0, 4, 3)}, ValueError, "logits_without"),
        ({"targets": torch.zeros(4)}, TypeError, "targets"),
        ({"targets": torch.tensor([0, 1, 2, 3])}, ValueError, "targets"),
        ({"rows_with": ROWS.float()}, TypeError, "rows_with"),
        ({"rows_with": ROWS[:3]}, ValueError, "rows_with"),
        ({"rows_with": ROWS + 4}, ValueError, "rows_with"),
        ({"rows_with": ROWS - 1}, ValueError, "rows_with"),
        ({"rows_with": ROWS, "logits_with": torch.zeros(0, 3)}, ValueError, "rows_with"),
        ({"rows_without": 3}, TypeError, "rows_without"),
        ({"rows_without": torch.stack([ROWS, ROWS + 9])}, ValueError, "rows_without"),
        ({"rows_without": torch.zeros(0, 4, dtype=torch.int64)}, ValueError, "rows_without"),
        ({"logp_with": ZEROS}, ValueError, "logits_with"),
        ({"logits_with": None, "logp_with": ZEROS, "rows_with": ROWS}, ValueError, "rows_with"),
        ({"logits_with": None, "logp_with": torch.zeros(5)}, ValueError, "logp_with"),
        ({"logits_with": None, "logp_with": ROWS}, TypeError, "logp_with"),
        ({"temperature": 0.0}, ValueError, "temperature"),
        ({"softcap": torch.zeros(())}, ValueError, "softcap"),
        ({"ignore_index": None}, TypeError, "ignore_index"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("name_of_backend", ["cpu", "reference"])
def test_bad_contrast_arguments(change: dict, error: type[Exception], name: str, name_of_backend: str) -> None:
    rlkernels.set_backend(name_of_backend)
    arguments = {"logits_with": torch.zeros(4, 3), "logits_without": torch.zeros(4, 3), "targets": ROWS}
    with pytest.raises(error, match=f"^{name}:"):
        counterfactual_contrast(**(arguments | change))


@pytest.mark.parametrize(
    "change, error, name",
    [
        ({"hidden_with": None}, ValueError, "hidden_with"),
        ({"hidden_with": torch.zeros(4, 5)}, ValueError, "hidden_with"),
        ({"hidden_without": torch.zeros(3, 2)}, ValueError, "hidden_without"),
        ({"hidden_without": None}, TypeError, "hidden_without"),
        ({"weight": None}, TypeError, "weight"),
        ({"rows_without": ROWS + 4}, ValueError, "rows_without"),
        ({"chunk_bytes": 0}, ValueError, "chunk_bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_linear_contrast_arguments(change: dict, error: type[Exception], name: str) -> None:
    arguments = {
        "hidden_with": torch.zeros(4, 2),
        "hidden_without": torch.zeros(4, 2),
        "weight": torch.zeros(3, 2),
        "targets": ROWS,
    }
    with pytest.raises(error, match=f"^{name}:"):
        linear_counterfactual_contrast(**(arguments | change))


def weights_by_hand(
    contrast: list[float], mask: list[int], sharpness: float, offset: float, strength: float, ramp: float
) -> list[float]:
    raw = [
        1 + strength * ramp * (1 / (1 + math.exp(-sharpness * (D - offset))) - 0.5) if valid else 0.0
        for D, valid in zip(contrast, mask, strict=True)
    ]
    mean = sum(raw) / max(1, sum(mask))
    return [w / mean if valid else 0.0 for w, valid in zip(raw, mask, strict=True)]


rows_of_contrast = st.lists(st.tuples(st.floats(-40, 40), st.integers(0, 1)), min_size=1, max_size=12)


@settings(max_examples=80, deadline=None)
@given(rows_of_contrast, st.floats(0, 8), st.floats(-3, 3), st.floats(0, 1.99), st.floats(0, 1))
def test_weights_are_the_formula_and_have_mean_one(
    row: list[tuple[float, int]], sharpness: float, offset: float, strength: float, ramp: float
) -> None:
    contrast, mask = (list(column) for column in zip(*row, strict=True))
    options = {"sharpness": sharpness, "offset": offset, "strength": strength, "ramp": ramp}
    weights = replay_weights(torch.tensor([contrast], dtype=torch.float64), torch.tensor([mask]), **options)[0]
    assert weights.tolist() == pytest.approx(weights_by_hand(contrast, mask, **options), abs=1e-12)
    if any(mask):
        assert weights.sum().item() / sum(mask) == pytest.approx(1, abs=1e-12)
    assert ((weights > 0) == torch.tensor(mask, dtype=torch.bool)).all()


def test_weights_are_exactly_one_where_nothing_tells_tokens_apart(generator: Generator) -> None:
    contrast = torch.randn(2, 5, generator=generator)
    contrast[0, 0], contrast[1, 1] = NAN, INF
    ones = torch.ones(2, 5)
    for options in ({"ramp": 0.0}, {"strength": 0.0}, {"sharpness": 0.0}):
        assert replay_weights(contrast, ones, **options).equal(ones)
    single = torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 0, 0]])
    assert replay_weights(contrast, single).equal(single.float())


def test_masked_contrasts_are_selected_away() -> None:
    contrast = torch.tensor([[0.5, NAN, -INF], [INF, -INF, 0.0]])
    weights = replay_weights(contrast, torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]))
    torch.testing.assert_close(weights, torch.tensor([[1.0, 0.0, 0.0], [1.25, 0.75, 1.0]]))


def test_without_normalisation_the_mean_moves() -> None:
    weights = replay_weights(torch.full((1, 3), 100.0), torch.tensor([[1, 1, 0]]), normalize=False)
    torch.testing.assert_close(weights, torch.tensor([[1.25, 1.25, 0.0]]))


def test_dtypes_of_weights(generator: Generator) -> None:
    contrast, mask = torch.randn(2, 5, generator=generator), torch.ones(2, 5, dtype=torch.bool)
    assert replay_weights(contrast.double().requires_grad_(), mask).dtype == torch.float64
    for dtype in (torch.float32, torch.bfloat16):
        assert replay_weights(contrast.to(dtype), mask).dtype == torch.float32
    assert not replay_weights(contrast.requires_grad_(), mask).requires_grad


@pytest.mark.parametrize(
    "change, error, name",
    [
        ({"contrast": torch.zeros(3)}, ValueError, "contrast"),
        ({"contrast": torch.zeros(2, 3).long()}, TypeError, "contrast"),
        ({"mask": torch.zeros(2, 4)}, ValueError, "mask"),
        ({"mask": None}, TypeError, "mask"),
        ({"sharpness": -1.0}, ValueError, "sharpness"),
        ({"offset": INF}, ValueError, "offset"),
        ({"strength": 2.0}, ValueError, "strength"),
        ({"strength": -0.1}, ValueError, "strength"),
        ({"ramp": 1.5}, ValueError, "ramp"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_weight_arguments(change: dict, error: type[Exception], name: str) -> None:
    with pytest.raises(error, match=f"^{name}:"):
        replay_weights(**({"contrast": torch.zeros(2, 3), "mask": torch.ones(2, 3)} | change))


def test_the_bound_is_of_strength_times_ramp() -> None:
    weights = replay_weights(torch.tensor([[-1e9, 1e9]]), torch.ones(1, 2), strength=3.0, ramp=0.5)
    torch.testing.assert_close(weights, torch.tensor([[0.25, 1.75]]))


@settings(max_examples=100, deadline=None)
@given(st.integers(-5, 300), st.integers(0, 100), st.integers(0, 100))
def test_ramp_rises_smoothly(step: int, warmup: int, length: int) -> None:
    ramp = smoothstep_ramp(step, warmup, length)
    if step <= warmup:
        assert ramp == 0
    elif step >= warmup + length:
        assert ramp == 1
    else:
        u = (step - warmup) / length
        assert ramp == pytest.approx(3 * u**2 - 2 * u**3)
    assert ramp <= smoothstep_ramp(step + 1, warmup, length)


def test_a_ramp_of_no_length_is_a_step() -> None:
    assert [smoothstep_ramp(step, 10, 0) for step in (9, 10, 11)] == [0.0, 0.0, 1.0]
    with pytest.raises(ValueError, match=r"^length:"):
        smoothstep_ramp(1, 0, -1)
    with pytest.raises(TypeError, match=r"^step:"):
        smoothstep_ramp(None, 0, 1)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_spans_are_summed_one_by_one(data: st.DataObject) -> None:
    length = data.draw(st.integers(0, 8))
    rows = st.lists(st.floats(-9, 9, width=32), min_size=length, max_size=length)
    contrast, mask = data.draw(rows), data.draw(st.lists(st.booleans(), min_size=length, max_size=length))
    span = st.tuples(st.integers(0, length), st.integers(0, length)).map(sorted)
    spans = data.draw(st.lists(span, max_size=4))
    options = {"mask": torch.tensor([mask], dtype=torch.bool)}
    arguments = torch.tensor([contrast], dtype=torch.float64), torch.tensor(spans, dtype=torch.int32).view(1, -1, 2)
    inside = [[D for D, m in zip(contrast[a:b], mask[a:b], strict=True) if m] for a, b in spans]
    sums, means = (contrast_by_span(*arguments, **options, reduction=name)[0].tolist() for name in ("sum", "mean"))
    assert sums == pytest.approx([sum(values) for values in inside])
    assert means == pytest.approx([sum(values) / max(1, len(values)) for values in inside])


def test_what_is_outside_a_span_does_not_reach_it() -> None:
    contrast = torch.tensor([[NAN, 1.0, INF, 3.0], [2.0, 2.0, 2.0, 2.0]]).requires_grad_()
    spans = torch.tensor([[[1, 2], [1, 4]], [[0, 4], [0, 0]]])
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0]])
    result = contrast_by_span(contrast, spans, mask=mask)
    assert result.tolist() == [[1.0, 2.0], [2.0, 0.0]]
    assert not result.requires_grad


@pytest.mark.parametrize(
    "change, error, name",
    [
        ({"spans": torch.tensor([[[0, 4]]])}, ValueError, "spans"),
        ({"spans": torch.tensor([[[2, 1]]])}, ValueError, "spans"),
        ({"spans": torch.tensor([[0, 1]])}, ValueError, "spans"),
        ({"spans": torch.zeros(1, 1, 2)}, TypeError, "spans"),
        ({"mask": torch.ones(1, 2)}, ValueError, "mask"),
        ({"reduction": "max"}, ValueError, "reduction"),
        ({"contrast": torch.zeros(3)}, ValueError, "contrast"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_span_arguments(change: dict, error: type[Exception], name: str) -> None:
    with pytest.raises(error, match=f"^{name}:"):
        contrast_by_span(**({"contrast": torch.zeros(1, 3), "spans": torch.tensor([[[0, 1]]])} | change))


def test_rates_of_satisfied_criteria() -> None:
    satisfied = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, NAN], [0.5, 1.0, NAN], [NAN, NAN, NAN]])
    rate, everything = constraint_satisfaction_rate(satisfied), all_or_nothing(satisfied)
    torch.testing.assert_close(rate, torch.tensor([2 / 3, 1.0, 0.75, NAN]), equal_nan=True)
    torch.testing.assert_close(everything, torch.tensor([0.0, 1.0, 0.0, NAN]), equal_nan=True)
    assert group_advantages(rate, 4, scale="none")[3] == 0  # a response nobody could judge is left out
    for dtype in (torch.bool, torch.int64, torch.uint8):
        assert constraint_satisfaction_rate(satisfied[:1].to(dtype)).item() == pytest.approx(2 / 3)
        assert all_or_nothing(satisfied[:2, :2].to(dtype)).tolist() == [1.0, 1.0]
    assert all_or_nothing(satisfied.double()).dtype == torch.float64
    for reward in (constraint_satisfaction_rate, all_or_nothing):
        with pytest.raises(ValueError, match=r"^satisfied:"):
            reward(torch.tensor([[2.0]]))
        with pytest.raises(ValueError, match=r"^satisfied:"):
            reward(torch.zeros(3))


@pytest.mark.parametrize("recipe", ["grpo", "dapo", "gspo_token"])
def test_composes_with_other_methods(recipe: str, backend: str, generator: Generator) -> None:
    """A batch with CoRT's per-token advantages: a gradient for the trained policy, by the definition of the loss."""
    pair = make_pair(generator, torch.float64, vocab=30)
    mask = pair.targets != IGNORE
    rewards = constraint_satisfaction_rate(torch.tensor([[1, 1], [0, 1], [0, 0]]))
    contrast = pair.contrast()
    weights = replay_weights(contrast, mask)
    advantages = group_advantages(rewards.double(), 3)[:, None] * weights
    logits = torch.randn(3, 4, 30, generator=generator, dtype=torch.float64).requires_grad_()
    logp = torch.log_softmax(logits, -1).gather(-1, pair.targets.clamp(min=0)[..., None])[..., 0]
    old_logp = logp.detach() + 0.3 * torch.randn(3, 4, generator=generator, dtype=torch.float64)
    out = rlkernels.policy_loss(
        logits, rlkernels.PolicyBatch(pair.targets, advantages, mask=mask, old_logp=old_logp), recipe
    )
    (gradient,) = torch.autograd.grad(out.loss, logits)

    counts = mask.sum(-1, keepdim=True)
    log_ratio = torch.where(mask, logp - old_logp, 0)
    low, high, share = {
        "grpo": (0.2, 0.2, mask / counts / 3),
        "dapo": (0.2, 0.28, mask / mask.sum()),
        "gspo_token": (3e-4, 4e-4, mask / counts / 3),
    }[recipe]
    if recipe == "gspo_token":
        log_ratio = (log_ratio.sum(-1, keepdim=True) / counts).detach() + logp - logp.detach()
    ratio = log_ratio.exp()
    terms = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    loss = torch.where(mask, share * terms, 0).sum()
    (expected,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(out.loss, loss)
    torch.testing.assert_close(gradient, expected)


def test_weights_keep_sign_and_clipping(generator: Generator) -> None:
    """What the weights may not do: change which tokens are clipped, or the surrogate's homogeneity in A."""
    pair = make_pair(generator, torch.float64, vocab=30)
    mask = pair.targets != IGNORE
    weights = replay_weights(pair.contrast(), mask, strength=1.9)
    advantages = torch.tensor([1.0, -0.5, -2.0], dtype=torch.float64)
    logp = torch.randn(3, 4, generator=generator, dtype=torch.float64).requires_grad_()
    old_logp = logp.detach() + 0.3 * torch.randn(3, 4, generator=generator, dtype=torch.float64)

    def gradient(**fields: Any) -> Tensor:
        batch = rlkernels.PolicyBatch(None, mask=mask, old_logp=old_logp, **fields)
        return torch.autograd.grad(rlkernels.logp_policy_loss(logp, batch, "grpo").loss, logp)[0]

    plain = gradient(advantages=advantages)
    weighted = gradient(advantages=advantages[:, None] * weights)
    torch.testing.assert_close(weighted, plain * weights)
    torch.testing.assert_close(weighted, gradient(advantages=advantages, weight=weights))


def test_weights_cancel_under_a_ratio_of_the_sequence(generator: Generator) -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0]])
    weights = replay_weights(torch.randn(3, 4, generator=generator, dtype=torch.float64), mask)
    advantages = torch.tensor([1.0, -0.5, -2.0], dtype=torch.float64)
    logp = torch.randn(3, 4, generator=generator, dtype=torch.float64).requires_grad_()
    old_logp = logp.detach() + 1e-4 * torch.randn(3, 4, generator=generator, dtype=torch.float64)

    def gradient(recipe: str, advantages: Tensor) -> Tensor:
        batch = rlkernels.PolicyBatch(None, advantages, mask=mask, old_logp=old_logp)
        return torch.autograd.grad(rlkernels.logp_policy_loss(logp, batch, recipe).loss, logp)[0]

    for recipe in ("gspo", "gmpo"):
        weighted = gradient(recipe, advantages[:, None] * weights)
        torch.testing.assert_close(weighted, gradient(recipe, advantages))
