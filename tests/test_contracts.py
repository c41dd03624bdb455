"""What every operation of `operations.py` promises beside its values, whoever computes it.

Nothing is modified, every element is written, and bits depend on values alone: not on strides, gradient modes, earlier
calls, threads or who else is calling.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import contracts
import pytest
import torch
from contracts import (
    assert_close,
    assert_passes,
    both_passes,
    cases,
    chosen,
    dtypes_of,
    gradients_of,
    is_exact,
    upstream_of,
    with_leaves,
    without_trained_tokens,
)
from operations import NOT_LISTED, OPERATIONS, Draw, Operation, Sizes
from torch import Generator, Tensor

import rlkernels
from rlkernels import credit

operation = contracts.prepared_operation
everywhere = pytest.mark.parametrize("operation, backend", cases(), indirect=True)
DIFFERENTIABLE = [operation for operation in OPERATIONS if operation.leaves]
with_gradient = pytest.mark.parametrize("operation, backend", cases(DIFFERENTIABLE), indirect=True)
# of promises that are kept above the kernels
above_kernels = pytest.mark.parametrize(
    "operation, backend", cases(DIFFERENTIABLE, ["cpu", "reference"], on_gpu=False), indirect=True
)


def test_the_list_has_every_function() -> None:
    listed = {operation.name.split("-")[0] for operation in OPERATIONS}
    assert set(credit.__all__) - listed == NOT_LISTED
    losses_and_statistics = {name for name in rlkernels.__all__ if name.endswith(("_stats", "_loss"))}
    assert losses_and_statistics <= listed
    assert len({operation.name for operation in OPERATIONS}) == len(OPERATIONS)


# Nothing is modified


@everywhere
def test_inputs_and_upstream_are_not_modified(operation: Operation, backend: str, generator: Generator) -> None:
    for dtype in dtypes_of(operation, backend):
        inputs = with_leaves(operation, operation.inputs(Draw(generator, dtype)))
        outputs = chosen(operation, operation.call(**inputs))
        upstream = upstream_of(outputs)
        watched = {**inputs, **{f"upstream of {name}": value for name, value in upstream.items()}}
        before = {name: (value._version, value.detach().clone()) for name, value in watched.items()}
        if outputs:
            leaves = [inputs[name] for name in operation.leaves]
            torch.autograd.grad(list(outputs.values()), leaves, list(upstream.values()))
        for name, value in watched.items():
            version, copy = before[name]
            assert value._version == version and value.detach().equal(copy), name


@everywhere
def test_earlier_results_stay(operation: Operation, backend: str, generator: Generator) -> None:
    """Neither outputs nor gradients are buffers that a later call takes again, nor one another's, nor an input's."""
    inputs = operation.inputs(Draw(generator))
    passes = both_passes(operation, inputs)
    results = [value for value in (*passes.outputs.values(), *passes.gradients.values()) if value.numel()]
    for one, other in itertools.combinations(results, 2):
        if one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr():  # columns of one buffer
            assert one.storage_offset() != other.storage_offset()
    taken = {value.untyped_storage().data_ptr() for value in inputs.values()}
    for name, value in passes.outputs.items():
        # a loss hands out the log-probabilities that it was given
        assert name in ("logp", "entropy") or value.untyped_storage().data_ptr() not in taken, name
    kept = [value.clone() for value in results]
    both_passes(operation, operation.inputs(Draw(generator)))
    assert all(value.equal(before) for value, before in zip(results, kept, strict=True))


@above_kernels
def test_a_change_before_backward_is_noticed_or_does_not_matter(
    operation: Operation, backend: str, generator: Generator
) -> None:
    given = operation.inputs(Draw(generator))
    expected = both_passes(operation, given).gradients
    noticed = []
    for name, value in given.items():
        leaves = with_leaves(operation, given)
        inputs = leaves | {name: leaves[name].clone()}
        outputs = operation.call(**inputs)
        changed = inputs[name].detach() if value.dtype == torch.bool else inputs[name].detach().mul_(2)
        if value.dtype == torch.bool:
            changed.logical_not_()
        try:
            gradients = gradients_of(operation, outputs, leaves)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error), error
            noticed.append(name)
        else:
            assert_close(gradients, expected, exactly=True)
    print(noticed)


# Every element is written


@everywhere
def test_no_uninitialised_value_comes_out(operation: Operation, backend: str, generator: Generator) -> None:
    """Memory holds NaN, or the largest integer, before it is written; nothing of it is left."""
    for dtype in dtypes_of(operation, backend):
        for inputs in (
            operation.inputs(Draw(generator, dtype)),
            without_trained_tokens(operation.inputs(Draw(generator, dtype, Sizes(2, 3, 9, 4)))),
        ):
            expected = both_passes(operation, inputs)
            with poisoned_memory():
                actual = both_passes(operation, inputs)
            assert_passes(actual, expected)
            for name, value in (*actual.outputs.items(), *actual.gradients.items()):
                assert value.isfinite().all(), name


class poisoned_memory:
    def __enter__(self) -> None:
        self._before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        assert torch.empty(3).isnan().all()

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(self._before[0])
        torch.utils.deterministic.fill_uninitialized_memory = self._before[1]


EMPTY = {
    "no-sequences": Sizes(sequences=0),
    "no-tokens": Sizes(length=0),
    "nothing-trained": Sizes(),
}


@everywhere
@pytest.mark.parametrize("kind", EMPTY)
def test_nothing_to_do(kind: str, operation: Operation, backend: str, generator: Generator) -> None:
    """Shapes as ever; every number finite, every gradient 0."""
    inputs = operation.inputs(Draw(generator, sizes=EMPTY[kind]))
    if kind == "no-sequences" and "batch.cu_seqlens" in inputs:
        with pytest.raises(ValueError, match=r"cu_seqlens: expected shape \[B \+ 1\] with B >= 1"):
            operation.call(**inputs)
        return
    if kind == "nothing-trained":
        full, inputs = inputs, without_trained_tokens(inputs)
        is_nothing = any(inputs[name] is not full[name] for name in inputs)
    else:
        is_nothing = any(value.numel() == 0 for value in inputs.values())
    ordinary = both_passes(operation, operation.inputs(Draw(generator)))
    passes = both_passes(operation, inputs)
    assert passes.outputs.keys() == ordinary.outputs.keys()
    for name, value in passes.outputs.items():
        like = ordinary.outputs[name]
        assert (value.dtype, value.ndim) == (like.dtype, like.ndim), name
        assert value.isfinite().all(), name
    for name, value in passes.gradients.items():
        assert value.shape == inputs[name].shape and value.dtype == inputs[name].dtype, name
        assert not is_nothing or not value.any(), name


# Bits depend on values alone


def beside(value: Tensor) -> Tensor:
    """What lies between the elements of a strided tensor: whoever reads it is found out."""
    if value.dtype == torch.bool:
        return ~value
    return torch.full_like(value, torch.nan if value.is_floating_point() else 10**6)


def transposed(value: Tensor) -> Tensor:
    reverse = tuple(reversed(range(value.ndim)))
    return value.permute(reverse).contiguous().permute(reverse)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "every-other-element": lambda value: torch.stack([value, beside(value)], -1)[..., 0],
    "transposed": transposed,
    "from-an-odd-offset": lambda value: (
        torch.cat([beside(value).reshape(-1)[:1], value.reshape(-1)])[1:].view(value.shape) if value.numel() else value
    ),
    "expanded": lambda value: value[:1].expand_as(value) if value.is_floating_point() and value.ndim else value,
}


# test_token_stats.py lays out logits for Triton
@pytest.mark.parametrize("operation, backend", cases(backends=["cpu", "cuda", "reference"]), indirect=True)
@pytest.mark.parametrize("form", FORMS)
def test_strides_of_inputs(form: str, operation: Operation, backend: str, generator: Generator) -> None:
    for dtype in dtypes_of(operation, backend):
        inputs = {name: FORMS[form](value) for name, value in operation.inputs(Draw(generator, dtype)).items()}
        dense = {name: value.clone(memory_format=torch.contiguous_format) for name, value in inputs.items()}
        actual, expected = both_passes(operation, inputs), both_passes(operation, dense)
        assert_passes(actual, expected, is_exact(operation, backend), dtype)


@above_kernels
@pytest.mark.parametrize("form", FORMS)
def test_strides_of_upstream(form: str, operation: Operation, backend: str, generator: Generator) -> None:
    for dtype in dtypes_of(operation, backend):
        inputs = with_leaves(operation, operation.inputs(Draw(generator, dtype)))
        leaves = [inputs[name] for name in operation.leaves]
        gradients = []
        for is_dense in (False, True):
            outputs = chosen(operation, operation.call(**inputs))
            upstream = [FORMS[form](value) for value in upstream_of(outputs).values()]
            if is_dense:
                upstream = [value.clone(memory_format=torch.contiguous_format) for value in upstream]
            found = torch.autograd.grad(list(outputs.values()), leaves, upstream)
            gradients.append(dict(zip(operation.leaves, found, strict=True)))
        assert_close(*gradients, is_exact(operation, backend), dtype)


@everywhere
def test_gradient_modes(operation: Operation, backend: str, generator: Generator) -> None:
    """Without gradients the bits of training, so that a policy's first ratio is 1."""
    for dtype in dtypes_of(operation, backend):
        inputs = with_leaves(operation, operation.inputs(Draw(generator, dtype)))
        outputs = operation.call(**inputs)
        with_gradient = {name for name, value in outputs.items() if value.requires_grad}
        assert with_gradient == set(operation.differentiable)
        expected = {name: value.detach() for name, value in outputs.items()}
        everything = {
            name: value.detach().requires_grad_(value.is_floating_point() and value.ndim > 0)
            for name, value in inputs.items()
        }
        if operation.leaves == ():
            assert not any(value.requires_grad for value in operation.call(**everything).values())
        others = [operation.call(**{name: value.detach() for name, value in inputs.items()})]
        with torch.no_grad():
            others.append(operation.call(**inputs))
        with torch.inference_mode():
            others.append(operation.call(**inputs))
            others.append(operation.call(**{name: value.clone() for name, value in inputs.items()}))
        for other in others:
            assert not any(value.requires_grad for value in other.values())
            # with gradients the parts' losses are added up
            assert_close(other, expected, not operation.parts, dtype)
            assert all(other[name].equal(expected[name]) for name in ("logp", "entropy") if name in expected)


@everywhere
def test_same_bits_again(operation: Operation, backend: str, generator: Generator) -> None:
    inputs = operation.inputs(Draw(generator))
    assert_passes(both_passes(operation, inputs), both_passes(operation, inputs))


SPLITS = {
    "one-row": Sizes(1, 1, 9001),
    "fewer-rows-than-threads": Sizes(1, 3, 9001),
    "several-rows": Sizes(3, 7, 9001),
    "many-sequences": Sizes(64, 101, 5, 4),
}


@pytest.mark.parametrize("operation, backend", cases([o for o in OPERATIONS if o.has_kernels], ["cpu"]), indirect=True)
@pytest.mark.parametrize("split", SPLITS)
def test_number_of_threads(
    split: str, operation: Operation, backend: str, thread_counts: tuple[int, ...], generator: Generator
) -> None:
    for dtype in dtypes_of(operation, backend):
        inputs = operation.inputs(Draw(generator, dtype, SPLITS[split]))
        results = []
        for count in thread_counts:
            torch.set_num_threads(count)
            results.append(both_passes(operation, inputs))
        for other in results[1:]:
            assert_passes(other, results[0], is_exact(operation, backend), dtype)


@pytest.mark.parametrize("operation, backend", cases(backends=["cpu", "reference"], on_gpu=False), indirect=True)
def test_four_threads_at_once(operation: Operation, backend: str, generator: Generator) -> None:
    inputs = operation.inputs(Draw(generator, sizes=Sizes(vocab=9001)))
    expected = both_passes(operation, inputs)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: both_passes(operation, inputs), range(12)))
    for result in results:
        assert_passes(result, expected, exactly=is_exact(operation, backend))


# Backward, again and in part


@with_gradient
def test_second_backward(operation: Operation, backend: str, generator: Generator) -> None:
    """Also after whoever got the first gradient has changed it."""
    for dtype in dtypes_of(operation, backend):
        inputs = with_leaves(operation, operation.inputs(Draw(generator, dtype)))
        outputs = operation.call(**inputs)
        first = gradients_of(operation, outputs, inputs, retain_graph=True)
        kept = {name: value.clone() for name, value in first.items()}
        for value in first.values():
            value.fill_(torch.nan)
        second = gradients_of(operation, outputs, inputs, retain_graph=True)
        assert_close(second, kept, not operation.chooses_path, dtype)
        assert_close(gradients_of(operation, outputs, inputs), second, exactly=True)
        with pytest.raises(RuntimeError, match="second time"):
            gradients_of(operation, outputs, inputs)


@above_kernels
def test_linear_in_the_upstream(operation: Operation, backend: str, generator: Generator) -> None:
    """Outputs one at a time give gradients that add up to all outputs' own; one with none gives none."""
    inputs = with_leaves(operation, operation.inputs(Draw(generator)))
    outputs = chosen(operation, operation.call(**inputs))
    leaves, upstream = [inputs[name] for name in operation.leaves], upstream_of(outputs)
    total = [torch.zeros_like(leaf) for leaf in leaves]
    for name, output in outputs.items():
        found = torch.autograd.grad(
            output, leaves, 0.5 * upstream[name], retain_graph=True, allow_unused=operation.name.startswith("logp")
        )
        total = [sum_ if part is None else sum_ + 2 * part for sum_, part in zip(total, found, strict=True)]
    expected = gradients_of(operation, outputs, inputs)
    assert_close(dict(zip(operation.leaves, total, strict=True)), expected, exactly=False)

    outputs = operation.call(**inputs)
    unused = sum(leaf.sum() for leaf in leaves) + sum(value.detach().sum() for value in outputs.values())
    for leaf, gradient in zip(leaves, torch.autograd.grad(unused, leaves), strict=True):
        assert gradient.equal(torch.ones_like(leaf))


@above_kernels
def test_any_subset_of_inputs(operation: Operation, backend: str, generator: Generator) -> None:
    """Only what requires a gradient gets one, the same whatever else does."""
    given = operation.inputs(Draw(generator))
    expected = both_passes(operation, given)
    for needs in itertools.product([False, True], repeat=len(operation.leaves)):
        some = tuple(itertools.compress(operation.leaves, needs))
        part = operation._replace(leaves=some)
        if not some:
            assert not any(value.requires_grad for value in operation.call(**with_leaves(part, given)).values())
            continue
        passes = both_passes(part, given)
        assert_close(passes.gradients, {name: expected.gradients[name] for name in some}, exactly=False)
        assert_close(passes.outputs, expected.outputs, exactly=not operation.parts)


@above_kernels
def test_gradients_accumulate(operation: Operation, backend: str, generator: Generator) -> None:
    given = operation.inputs(Draw(generator))
    expected = both_passes(operation, given).gradients
    inputs = with_leaves(operation, given)
    for name in operation.leaves:
        inputs[name].grad = torch.full_like(inputs[name], 7.0)
    for _ in range(2):
        outputs = chosen(operation, operation.call(**inputs))
        torch.autograd.backward(list(outputs.values()), list(upstream_of(outputs).values()))
    for name in operation.leaves:
        torch.testing.assert_close(inputs[name].grad, 7 + 2 * expected[name], rtol=1e-5, atol=1e-5)


@above_kernels
def test_second_derivatives(operation: Operation, backend: str, generator: Generator) -> None:
    """Refused by kernels, which would cut the graph; right where PyTorch forms them."""
    given = operation.inputs(Draw(generator, torch.float64, Sizes(2, 2, 5, 3)))
    inputs = with_leaves(operation, given)
    outputs = operation.call(**inputs)
    if operation.refuses_second_derivatives and backend != "reference":
        with pytest.raises(RuntimeError, match=r"create_graph=True.*set_backend\('reference'\)"):
            gradients_of(operation, outputs, inputs, create_graph=True)
        return

    def function(*leaves: Tensor) -> tuple[Any, ...]:
        outputs = operation.call(**inputs | dict(zip(operation.leaves, leaves, strict=True)))
        return tuple(chosen(operation, outputs).values())

    if operation.stops_gradients:
        gradients_of(operation, outputs, inputs, create_graph=True)
        return
    assert torch.autograd.gradgradcheck(function, [inputs[name] for name in operation.leaves], fast_mode=True)
