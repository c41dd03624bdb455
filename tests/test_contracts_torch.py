"""What of PyTorch every operation of `operations.py` composes with: compiler, autocast, scaler, checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import contracts
import host_device
import pytest
import torch
from contracts import (
    assert_close,
    assert_passes,
    both_passes,
    cases,
    chosen,
    gradients_of,
    is_exact,
    upstream_of,
    with_leaves,
)
from operations import LEARNED, OPERATIONS, STATISTICS, Draw, Operation, Sizes, Tensors
from torch import Generator, Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from versions import traced_whole_after_2_7

import rlkernels

operation = contracts.prepared_operation
DIFFERENTIABLE = [operation for operation in OPERATIONS if operation.leaves]
WITH_KERNELS = [operation for operation in OPERATIONS if operation.has_kernels]
# each way through a backend's kernels once, where its interpreter takes its time
FEW = [operation for operation in DIFFERENTIABLE if operation.name in ("token_stats", "linear_token_stats")]

NAMESPACE = "rlkernels::"
UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def on_cases(operations: list[Operation], backends: list[str] | None = None, few: list[str] | None = None) -> Any:
    """Every operation on some backends, a few on others."""
    return pytest.mark.parametrize(
        "operation, backend", cases(operations, backends) + cases(FEW, few or [], on_gpu=False), indirect=True
    )


def function_of_leaves(operation: Operation, inputs: Tensors) -> Callable[..., tuple[Tensor, ...]]:
    """Its differentiable outputs, of its leaves in order."""

    def function(*leaves: Tensor) -> tuple[Tensor, ...]:
        outputs = operation.call(**inputs | dict(zip(operation.leaves, leaves, strict=True)))
        return tuple(chosen(operation, outputs).values())

    return function


# Registered operations


class Recorded(TorchDispatchMode):
    """The calls of registered operations, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if isinstance(func, torch._ops.OpOverload) and func.namespace == "rlkernels":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def registered() -> set[str]:
    return {name for name in torch._C._dispatch_get_all_op_names() if name.startswith(NAMESPACE)}


def calls_of(operation: Operation, generator: Generator) -> list[tuple[Any, tuple[Any, ...]]]:
    inputs = operation.inputs(Draw(generator, sizes=Sizes(2, 3, 11, 4)))
    with Recorded() as recorded:
        both_passes(operation, inputs)
    leaves = {inputs[name].data_ptr() for name in operation.leaves}

    def as_called(func: Any, argument: Any) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        has_gradient = torch._library.custom_ops.OPDEFS[func._schema.name]._backward_fn is not None
        return argument.detach().requires_grad_(has_gradient and argument.data_ptr() in leaves)

    return [(func, tuple(as_called(func, argument) for argument in arguments)) for func, arguments in recorded.calls]


def test_every_registered_operation_is_called(generator: Generator) -> None:
    rlkernels.set_backend("cpu")
    called = {func.name() for operation in WITH_KERNELS for func, _ in calls_of(operation, generator)}
    assert {name.split(".")[0] for name in called} == {name.split(".")[0] for name in registered()}


@on_cases(WITH_KERNELS, ["cpu"], ["cuda", "triton"])
def test_opcheck(operation: Operation, backend: str, generator: Generator) -> None:
    """Schema, fake, autograd registration, and the compiler's view, of the calls as they are made."""
    calls = {}
    for func, arguments in calls_of(operation, generator):
        pattern = tuple(
            argument if isinstance(argument, bool) else isinstance(argument, Tensor) for argument in arguments
        )
        calls[func, pattern] = func, arguments
    assert calls
    for func, arguments in calls.values():
        # what is kept for backward holds what no row needed, unwritten, so that two runs are not alike
        is_kept = func.name() == "rlkernels::linear_token_stats"
        torch.library.opcheck(func, arguments, test_utils=UTILITIES[:-1] if is_kept else UTILITIES)


@on_cases(DIFFERENTIABLE, ["cpu", "cuda", "reference"], ["triton"])
def test_gradients_are_those_of_the_values(operation: Operation, backend: str, generator: Generator) -> None:
    """By finite differences in float64; where the definition stops gradients, the definition's."""
    inputs = with_leaves(operation, operation.inputs(Draw(generator, torch.float64, Sizes(2, 2, 5, 3))))
    if operation.stops_gradients:
        actual = both_passes(operation, inputs)
        rlkernels.set_backend("reference")
        assert_passes(actual, both_passes(operation, inputs), exactly=False, dtype=torch.float64)
        return
    leaves = [inputs[name] for name in operation.leaves]
    function, options = function_of_leaves(operation, inputs), {"nondet_tol": 1e-12 * operation.chooses_path}
    assert torch.autograd.gradcheck(function, leaves, fast_mode=backend != "cpu", **options)


# The compiler


@traced_whole_after_2_7
@on_cases(OPERATIONS, ["cpu"], ["cuda", "reference"])
def test_compiles_whole_and_once_for_any_length_and_number(
    operation: Operation,
    backend: str,
    generator: Generator,
) -> None:
    """Every 0-d tensor has another value at each call; the second length compiles it for any.

    Backward is compiled of what `test_training_step.py` has not.
    """
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager" if operation in (*STATISTICS, *LEARNED) else "eager")
    compiled = operation._replace(call=torch.compile(operation.call, fullgraph=True, backend=counter))
    for length in (5, 12, 9):
        inputs = operation.inputs(Draw(generator, sizes=Sizes(length=length)))
        assert_passes(both_passes(compiled, inputs), both_passes(operation, inputs), exactly=False)
    assert 1 <= counter.frame_count <= 2


# Precision


@on_cases(DIFFERENTIABLE, ["cpu", "reference"], ["cuda", "triton"])
def test_autocast(operation: Operation, backend: str, generator: Generator) -> None:
    """Nothing changes where no GEMM is; gradients are in their inputs' dtypes."""
    inputs = operation.inputs(Draw(generator))
    plain = both_passes(operation, inputs)
    with torch.autocast(host_device.device(), torch.bfloat16):
        under = both_passes(operation, inputs)
    if not operation.uses_gemms:
        assert_passes(under, plain, exactly=is_exact(operation, backend))
    for name, gradient in under.gradients.items():
        assert gradient.dtype == inputs[name].dtype and gradient.isfinite().all(), name
        torch.testing.assert_close(gradient, plain.gradients[name], rtol=0.1, atol=0.1 * float(gradient.abs().max()))


SMALL = 2.0**-24  # of a loss: its gradients are below what float16 can hold


@on_cases([operation for operation in DIFFERENTIABLE if torch.float16 in operation.dtypes], ["cpu", "reference"])
@pytest.mark.parametrize("overflows", [False, True], ids=["step", "overflow"])
def test_gradient_scaler(overflows: bool, operation: Operation, backend: str, generator: Generator) -> None:
    """float16 inputs, float32 masters: gradients survive scaled, and one that overflows skips the step."""
    given = operation.inputs(Draw(generator, torch.float16))
    wide = {name: value.float() if value.dtype == torch.float16 else value for name, value in given.items()}
    exact = both_passes(operation, wide)
    masters = {name: torch.nn.Parameter(given[name].float()) for name in operation.leaves}
    before = {name: master.detach().clone() for name, master in masters.items()}
    optimizer = torch.optim.SGD(masters.values(), lr=1 / SMALL)
    scaler = torch.amp.GradScaler(host_device.device(), init_scale=2.0**80 if overflows else 1 / SMALL)
    outputs = chosen(operation, operation.call(**given | {name: master.half() for name, master in masters.items()}))
    upstream = upstream_of(outputs)
    loss = sum((SMALL * upstream[name] * value).sum() for name, value in outputs.items())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    for name, master in masters.items():
        moved = before[name] - master.detach()
        if overflows:
            assert not moved.any(), name
        else:
            expected = exact.gradients[name]
            torch.testing.assert_close(moved, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max()))
    assert (scaler.get_scale() < 2.0**80) if overflows else (scaler.get_scale() == 1 / SMALL)


# Recomputation


@on_cases(DIFFERENTIABLE, ["cpu", "reference"], ["cuda", "triton"])
@pytest.mark.parametrize("is_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpoint(is_reentrant: bool, operation: Operation, backend: str, generator: Generator) -> None:
    """Run once more in backward, if need be, to the same bits."""
    inputs = with_leaves(operation, operation.inputs(Draw(generator)))
    function, leaves, runs = function_of_leaves(operation, inputs), [inputs[name] for name in operation.leaves], []

    def recorded(*leaves: Tensor) -> tuple[Tensor, ...]:
        results = function(*leaves)
        runs.append([value.detach().clone() for value in results])
        return results

    gradients = []
    for is_checkpointed in (False, True):
        with set_checkpoint_early_stop(False):  # else the recomputation ends before it is looked at
            results = (
                checkpoint(recorded, *leaves, use_reentrant=is_reentrant) if is_checkpointed else recorded(*leaves)
            )
            outputs = dict(zip(operation.differentiable, results, strict=True))
            for leaf in leaves:
                leaf.grad = None
            torch.autograd.backward(results, list(upstream_of(outputs).values()))
        gradients.append({name: leaf.grad for name, leaf in zip(operation.leaves, leaves, strict=True)})
    assert_close(gradients[1], gradients[0], exactly=True)
    assert len(runs) <= 3
    for one, other in itertools.pairwise(runs):
        # the parts' losses are added up where there is a gradient
        torch.testing.assert_close(one, other, rtol=1e-6 * bool(operation.parts), atol=0)


def test_every_leaf_has_a_gradient(generator: Generator) -> None:
    """Drawn inputs that are all clipped, say, would show nothing."""
    for operation in DIFFERENTIABLE:
        inputs = with_leaves(operation, operation.inputs(Draw(generator)))
        gradients = gradients_of(operation, operation.call(**inputs), inputs)
        assert all(gradient.any() for gradient in gradients.values()), operation.name
