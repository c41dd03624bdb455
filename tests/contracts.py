"""How the contract tests call the operations of `operations.py`: each on each backend, both passes, and compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from operations import FLOAT_DTYPES, OPERATIONS, Operation, Tensors

from rlkernels import backends

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture
def prepared_operation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Operation:
    """A module's `operation`."""
    return request.param.prepared(monkeypatch)


def cases(
    operations: Iterable[Operation] = OPERATIONS, backends: Iterable[str] | None = None, on_gpu: bool = True
) -> list[Any]:
    """Parameters (operation, backend), each backend that an operation has code of its own for."""
    pairs = []
    for operation in operations:
        names = [name for name in operation.backends if backends is None or name in backends]
        pairs += [pytest.param(operation, name, id=f"{operation.name}-{name}") for name in names]
        if on_gpu:
            pairs += [
                pytest.param(operation, name, id=f"{operation.name}-{name} on a GPU", marks=pytest.mark.gpu)
                for name in ("cuda", "triton")
                if operation.has_kernels and (backends is None or name in backends)
            ]
    return pairs


def dtypes_of(operation: Operation, backend: str) -> Iterator[torch.dtype]:
    """All of them by the C++ kernels, whose bodies differ most; one in Triton's interpreter."""
    some = FLOAT_DTYPES[1:2] if backend == "triton" and backends.triton_is_interpreted else FLOAT_DTYPES[1:3]
    for dtype in operation.dtypes:
        if backend == "cpu" or dtype in some:
            print(dtype)
            yield dtype


def without_trained_tokens(inputs: Tensors) -> Tensors:
    """The inputs with nothing left that counts."""
    nothing = {"targets": -100, "mask": 0, "correct": 0, "lengths": 0, "answer_mask": 0, "think_mask": 0}
    fills = {name: nothing.get(name.removeprefix("batch.")) for name in inputs}
    return {
        name: value if fills[name] is None else torch.full_like(value, fills[name]) for name, value in inputs.items()
    }


class Passes(NamedTuple):
    """What a call gave, detached, and the gradients of sum(upstream * output)."""

    outputs: Tensors
    gradients: Tensors


def upstream_of(outputs: Tensors) -> Tensors:
    """Of either sign, none of them 0, the same for every call."""
    return {
        name: (torch.arange(value.numel(), device=value.device) * 5 % 17 / 4 - 2.125).to(value.dtype).view(value.shape)
        for name, value in outputs.items()
    }


def with_leaves(operation: Operation, inputs: Tensors) -> Tensors:
    """The inputs, detached, those that gradients reach as leaves of a new graph; strides stay."""
    return {name: value.detach().requires_grad_(name in operation.leaves) for name, value in inputs.items()}


def chosen(operation: Operation, outputs: Tensors) -> Tensors:
    return {name: outputs[name] for name in operation.differentiable}


def gradients_of(operation: Operation, outputs: Tensors, inputs: Tensors, **options: Any) -> Tensors:
    outputs, leaves = chosen(operation, outputs), [inputs[name] for name in operation.leaves]
    if not outputs:
        return {}
    upstream = list(upstream_of(outputs).values())
    found = torch.autograd.grad(list(outputs.values()), leaves, upstream, **options)
    return dict(zip(operation.leaves, found, strict=True))


def both_passes(operation: Operation, inputs: Tensors) -> Passes:
    inputs = with_leaves(operation, inputs)
    outputs = operation.call(**inputs)
    gradients = gradients_of(operation, outputs, inputs)
    return Passes({name: value.detach() for name, value in outputs.items()}, gradients)


def is_exact(operation: Operation, backend: str) -> bool:
    """Whether bits depend on values alone. PyTorch's sums may go another way where strides or threads differ."""
    return operation.has_kernels and not operation.uses_gemms and backend != "reference"


def assert_close(actual: Tensors, expected: Tensors, exactly: bool, dtype: torch.dtype = torch.float32) -> None:
    """To the bit, or to what may be lost in values of `dtype`, that of the inputs."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if value.dtype == torch.bool and not exactly:
            continue  # rounding may break a tie
        tolerance = 0.0 if exactly or not value.is_floating_point() else TOLERANCE[dtype]
        largest = max(0.1, float(value.abs().nan_to_num().max())) if tolerance and value.numel() else 0.0
        torch.testing.assert_close(
            actual[name],
            value,
            rtol=tolerance,
            atol=tolerance * largest,
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def assert_passes(actual: Passes, expected: Passes, exactly: bool = True, dtype: torch.dtype = torch.float32) -> None:
    assert_close(actual.outputs, expected.outputs, exactly, dtype)
    assert_close(actual.gradients, expected.gradients, exactly, dtype)
