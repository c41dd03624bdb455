"""What bad input is told: the argument's name, what was expected, what came."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

_check_device_values = False


def set_checks(enabled: bool) -> bool:
    """Check values that only the device knows (labels, temperatures, lengths) and raise on bad ones.

    Off by default: reading them back makes the host wait for the GPU. Unchecked, a bad label or temperature
    gives NaN in its own row and is never used as an address. CPU tensors are always checked.

    Args:
        enabled: True to check them, False not to.

    Returns:
        The previous setting.

    Example:
        >>> import rlkernels
        >>> previous = rlkernels.set_checks(True)
        >>> rlkernels.set_checks(previous)
        True
    """
    global _check_device_values
    previous, _check_device_values = _check_device_values, bool(enabled)
    return previous


def values_are_checked(device: torch.device) -> bool:
    return (device.type == "cpu" or _check_device_values) and not torch.compiler.is_compiling()


def describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)} on {value.device}".replace("torch.", "")
    return f"{type(value).__name__} {value!r}"


def require_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {describe(value)}")
    if value.is_nested:
        raise TypeError(f"{name}: expected a dense tensor, got a nested one")
    what = shard(value)
    if what is not None:
        raise ValueError(f"{name}: expected a whole tensor, got {what}; see rlkernels.distributed.full_weight")


def is_dtensor(value: Any) -> bool:
    return type(value).__name__ == "DTensor"  # torch.distributed may not be built in


def shard(value: Tensor) -> str | None:
    """What a tensor is that holds but a part of another, or nothing of it."""
    if is_dtensor(value):
        return "a DTensor"
    # DeepSpeed's attribute of a parameter: its shape while it is gathered
    if value.shape != getattr(value, "ds_shape", value.shape):
        return "a parameter that ZeRO-3 has partitioned"
    return None


def refuse_transforms(function: str, *tensors: Tensor | None) -> None:
    """Derivatives that kernels do not have must not come out as zeros."""
    if torch.compiler.is_compiling():
        return
    is_forward_mode = forward_ad._current_level >= 0 and any(
        tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
    )
    if is_forward_mode or torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            f"{function}: expected reverse-mode autograd, got a torch.func transform or forward-mode derivatives; "
            "use set_backend('reference') for those"
        )


def require_strided(name: str, value: Tensor) -> None:
    if value.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got layout {value.layout} of {describe(value)}")


def require_dtype(name: str, value: Tensor, dtypes: Iterable[torch.dtype]) -> None:
    dtypes = tuple(dtypes)
    if value.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name}: expected dtype {names}, got {describe(value)}")


def require_shape(name: str, value: Tensor, *allowed: tuple[int, ...]) -> None:
    if tuple(value.shape) not in [tuple(shape) for shape in allowed]:
        shapes = " or ".join(str(list(shape)) for shape in dict.fromkeys(allowed))
        raise ValueError(f"{name}: expected shape {shapes}, got {describe(value)}")


def require_reals(name: str, value: Tensor, *shape: int | str) -> None:
    """Real numbers; a size that is a letter may be any."""
    require_tensor(name, value)
    if value.is_complex():
        raise TypeError(f"{name}: expected real numbers, got {describe(value)}")
    require_sizes(name, value, *shape)


def require_like(reference_name: str, reference: Tensor, **others: Tensor) -> None:
    """Real numbers in the reference's shape, on its device."""
    for name, tensor in others.items():
        require_reals(name, tensor, *reference.shape)
    require_same_device(reference_name, reference, **others)


def require_floats(name: str, value: Any, *shape: int | str) -> None:
    """A float tensor; a size that is a letter may be any."""
    require_tensor(name, value)
    require_dtype(name, value, FLOAT_DTYPES)
    require_sizes(name, value, *shape)


def require_sizes(name: str, value: Tensor, *shape: int | str) -> None:
    fits = value.ndim == len(shape) and all(
        isinstance(size, str) or size == actual for size, actual in zip(shape, value.shape, strict=True)
    )
    if not fits:
        expected = ", ".join(map(str, shape))
        raise ValueError(f"{name}: expected shape [{expected}], got {describe(value)}")


def require_same_device(reference_name: str, reference: Tensor, **others: Tensor | None) -> None:
    for name, tensor in others.items():
        if tensor is not None and tensor.device != reference.device:
            raise ValueError(f"{name}: expected on {reference.device} like {reference_name}, got {describe(tensor)}")


def require_number(
    name: str, value: Any, *, above: float = -math.inf, at_least: float = -math.inf, at_most: float = math.inf
) -> None:
    """A finite number in the given range. A compiled number may be symbolic; the operations check values again."""
    if torch.compiler.is_compiling():
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a number, got {describe(value)}")
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    if not math.isfinite(number) or number <= above or number < at_least or number > at_most:
        limits = ((" > ", above), (" >= ", at_least), (" <= ", at_most))
        bounds = " and".join(f"{sign}{limit:g}" for sign, limit in limits if math.isfinite(limit))
        raise ValueError(f"{name}: expected a finite number{bounds}, got {value!r}")


def require_no_gradient(name: str, value: Tensor) -> None:
    if value.requires_grad:
        raise ValueError(f"{name}: expected a tensor without gradient (none is computed), got one that requires it")


def require_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    choices = tuple(choices)
    if value not in choices or (isinstance(value, bool) and 1 in choices):  # True == 1
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")


def check_row_values(
    targets: Tensor,
    vocab: int,
    ignore_index: int,
    temperature: Tensor,
    softcap: Tensor | None,
    logit_scale: Tensor,
) -> None:
    """The values of a statistics call, where the host may look at them; the C++ backend has its own check."""
    if not values_are_checked(targets.device):
        return
    used = targets != ignore_index
    bad = used & ((targets < 0) | (targets >= vocab))
    if bad.any():
        row = int(bad.nonzero()[0])
        raise ValueError(
            f"targets: expected labels in [0, {vocab}) or ignore_index {ignore_index}, "
            f"got {int(targets[row])} at row {row}"
        )
    check_scaling(used, temperature, softcap, logit_scale)


def check_scaling(used: Tensor, temperature: Tensor, softcap: Tensor | None, logit_scale: Tensor) -> None:
    """The values of what scales the logits of the rows in use."""
    if not values_are_checked(used.device):
        return
    per_row = temperature[used] if temperature.numel() > 1 else temperature
    for name, values in (("temperature", per_row), ("softcap", softcap), ("logit_scale", logit_scale)):
        if values is not None and values.numel() and not bool(((values > 0) & values.isfinite()).all()):
            raise ValueError(f"{name}: expected finite numbers > 0, got {values.tolist()}")


def check_values(name: str, values: Tensor, good: Tensor, expected: str, *numbers: int) -> None:
    """`good` of each value, where the host may look at it; the error shows the first that is not.

    Sizes in the message are given apart: formatted by the caller, torch.compile would compile again for each.
    """
    if values_are_checked(values.device) and not bool(good.all()):
        index = tuple((~good).nonzero()[0].tolist())
        value = values[index].tolist()
        raise ValueError(f"{name}: expected {expected.format(*numbers)}, got {value} at {list(index)}")


def check_indices(name: str, index: Tensor, count: int, device: torch.device) -> None:
    """Rising indices below `count`; their values where the host may look at them."""
    require_tensor(name, index)
    require_dtype(name, index, INTEGER_DTYPES)
    if index.ndim != 1:
        raise ValueError(f"{name}: expected shape [M], got {describe(index)}")
    if index.device != device:
        raise ValueError(f"{name}: expected on {device} like the tokens, got {describe(index)}")
    if values_are_checked(device) and index.numel():
        is_rising = bool((index[1:] > index[:-1]).all())
        if not is_rising or index[0] < 0 or index[-1] >= count:
            raise ValueError(f"{name}: expected rising indices in [0, {count}), got {index.tolist()}")


def check_row_numbers(name: str, rows: Tensor, targets: Tensor, used: Tensor, count: int) -> None:
    """Like `targets`, numbers of `count` stored rows; where not `used`, anything."""
    require_tensor(name, rows)
    require_dtype(name, rows, INTEGER_DTYPES)
    require_shape(name, rows, tuple(targets.shape))
    require_same_device("targets", targets, **{name: rows})
    if count == 0 and rows.numel():
        raise ValueError(f"{name}: expected no rows, since there are none to take, got {describe(rows)}")
    good = ~used | ((rows >= 0) & (rows < count))
    check_values(name, rows, good, "rows in [0, {}) where targets are not ignored", count)


def require_tokens(name: str, value: Tensor, mask: Tensor | None) -> None:
    """Floats `[B, T]`, and a mask of that shape, unless it is None."""
    require_floats(name, value, "B", "T")
    if mask is not None:
        require_like(name, value, mask=mask)
