"""A user's own batch: where it first stops being finite, and how far each backend is from float64."""

from __future__ import annotations

import dataclasses
import errno
import numbers
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

import rlkernels
from rlkernels import backends, checks
from rlkernels.batch import PolicyBatch
from rlkernels.losses import PolicyLoss, linear_policy_loss, logp_policy_loss, policy_loss
from rlkernels.objectives import Objective
from rlkernels.recipes import ObjectiveFunction, resolve
from rlkernels.reductions import Normalizer
from rlkernels.segments import Segments

_LOSSES = {("logits",): policy_loss, ("hidden", "weight"): linear_policy_loss, ("logp",): logp_policy_loss}
_SOURCES = ("logits", "hidden", "weight", "bias", "logp", "entropy")
_KEYWORDS = ("bias", "entropy")
_OF_BATCH = ("old_logp", "ref_logp", "advantages", "weight", "policy_weight")
_NOT_BY_TOKEN = ("weight", "bias", "loss")
_OBJECTIVES = {
    name: value
    for name, value in vars(rlkernels).items()
    if isinstance(value, type) and issubclass(value, Objective) and value is not Objective
}


class NonFinite(NamedTuple):
    """A quantity that is not finite somewhere in the trained tokens; the first place."""

    quantity: str  # "logits", "batch.old_logp", "logp", "gradient of weight", ...
    sequence: int | None  # None: it is not by token
    token: int | None  # within the sequence
    position: tuple[int, ...]  # within the token's row, or in the whole tensor
    value: float  # NaN, inf or -inf
    entries: int  # that are not finite, of all sequences

    def __str__(self) -> str:
        place = "" if self.sequence is None else f" of sequence {self.sequence}, token {self.token}"
        position = f" at {list(self.position)}" if self.position else ""
        return f"{self.quantity}{place}{position}: {self.value} ({self.entries} in all)"


class Deviation(NamedTuple):
    """Of one quantity under one backend: the largest error, in units of the largest exact magnitude."""

    backend: str
    quantity: str  # "logp", "entropy", "loss of a token", "loss", "gradient of logits", ...
    error: float
    torch_error: float  # of plain PyTorch in the inputs' dtype


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `compare_with_reference` found; `str()` of it is a report.

    Attributes:
        non_finite: inputs first, then what is computed from them in float64, in order.
        deviations: of each quantity under each backend that ran.
        unavailable: backend -> why it did not run.
    """

    non_finite: tuple[NonFinite, ...]
    deviations: tuple[Deviation, ...]
    unavailable: Mapping[str, str]

    @property
    def first(self) -> NonFinite | None:
        """The first thing that is not finite: where training went wrong, if it did."""
        return self.non_finite[0] if self.non_finite else None

    def __str__(self) -> str:
        lines = ["everything is finite in float64"]
        if self.first is not None:
            lines = [f"first not finite: {self.first}", *(f"then: {found}" for found in self.non_finite[1:])]
        lines += ["", "largest error against float64, of the largest magnitude (plain PyTorch's in this dtype)"]
        for deviation in self.deviations:
            lines.append(
                f"{deviation.backend:<10} {deviation.quantity:<20} {deviation.error:.1e} ({deviation.torch_error:.1e})"
            )
        return "\n".join([*lines, *(f"{name}: not run: {reason}" for name, reason in self.unavailable.items())])


def compare_with_reference(
    batch: PolicyBatch,
    objective: str | Objective | ObjectiveFunction = "grpo",
    *,
    logits: Tensor | None = None,
    hidden: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    logp: Tensor | None = None,
    entropy: Tensor | None = None,
    reduction: str | None = None,
    normalizer: Normalizer | None = None,
    **options: Any,
) -> Comparison:
    """Looks for the first non-finite value of a loss, and for each backend's distance from float64.

        error = max |x - x_float64| / max |x_float64|,   over what is finite in float64

    One loss, forward and backward, under every backend that can run on the tensors' device, and in float64 by the
    definition, which needs several times the memory of the logits: give it a batch of a few sequences.

    Args:
        batch, objective, reduction, normalizer: as in `policy_loss`.
        logits: for `policy_loss`, or the following in its place. None of them is changed or gets a gradient.
        hidden, weight, bias: for `linear_policy_loss`.
        logp, entropy: for `logp_policy_loss`.
        options: `temperature`, `softcap`, `logit_scale` of these functions.

    Returns:
        `Comparison(non_finite, deviations, unavailable)`; `print` it.

    Raises:
        TypeError, ValueError: none or several of `logits`, `hidden` and `logp`, or what the loss itself refuses.

    Example:
        >>> import torch, rlkernels
        >>> from rlkernels.testing import compare_with_reference
        >>> old_logp = torch.tensor([[-1.0, float("nan")], [-2.0, -1.0]])
        >>> batch = rlkernels.PolicyBatch(torch.tensor([[1, 2], [0, 1]]), torch.tensor([1.0, -1.0]), old_logp=old_logp)
        >>> print(compare_with_reference(batch, logits=torch.zeros(2, 2, 3)).first)
        batch.old_logp of sequence 0, token 1: nan (1 in all)
    """
    sources = {"logits": logits, "hidden": hidden, "weight": weight, "bias": bias, "logp": logp, "entropy": entropy}
    call = _Call.of(batch, objective, {**sources, "reduction": reduction, "normalizer": normalizer, **options})
    plain = call.run("reference")  # first: what the loss refuses, it says of what was given
    exact = call.in_float64().run("reference")
    deviations, unavailable = [], {}
    for name in backends.NAMES[1:]:
        reason = _why_not(name, call.tokens.device)
        if reason is not None:
            unavailable[name] = reason
            continue
        found = plain if name == "reference" else call.run(name)
        for quantity, values in found.items():
            errors = (_error(each[quantity], exact[quantity]) for each in ({quantity: values}, plain))
            deviations.append(Deviation(name, quantity, *errors))
    return Comparison(tuple(call.non_finite(exact)), tuple(deviations), unavailable)


def save_call(
    path: str | Path,
    batch: PolicyBatch,
    objective: str | Objective = "grpo",
    **arguments: Any,
) -> None:
    """Writes what `compare_with_reference` takes to a file, for `python -m rlkernels doctor --batch`.

    The loss is computed once, without gradients, to refuse what it would refuse later. The file appears whole or not at
    all, and holds copies of the tensors, not of what they are views of.

    Args:
        path: of a new file.
        batch, objective, arguments: as `compare_with_reference` takes them, but for callables, one's own subclasses
            of `Objective` and generators: hand those to `compare_with_reference` directly.

    Raises:
        FileExistsError: there is such a file.
        TypeError, ValueError: what the loss itself refuses, or a value that is neither tensor, number, string nor None.

    Example:
        >>> import pathlib, tempfile, torch, rlkernels
        >>> from rlkernels.testing import load_call, save_call
        >>> path = pathlib.Path(tempfile.mkdtemp(), "batch.pt")
        >>> batch = rlkernels.PolicyBatch(torch.tensor([[1, 2]]), torch.tensor([1.0]))
        >>> save_call(path, batch, "dapo", logits=torch.zeros(1, 2, 5), temperature=0.7)
        >>> sorted(load_call(path))
        ['batch', 'logits', 'objective', 'temperature']
    """
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    values = {name: _storable(name, value) for name, value in arguments.items()}
    stored_objective = _stored_objective(objective)  # first: the loss would run a callable, or draw from a generator
    _Call.of(batch, objective, values).check()
    stored = {"batch": _stored_batch(batch), "objective": stored_objective}
    stored |= {name: _compact(value) for name, value in values.items()}
    with _new_file(Path(path)) as file:
        torch.save(stored, file)


def load_call(path: str | Path) -> dict[str, Any]:
    """The keyword arguments of `compare_with_reference` that `save_call` wrote; runs no code from the file.

    Of what the file names, nothing is called but this package's objectives.

    Args:
        path: of the file.

    Returns:
        Keyword arguments, tensors on the CPU.

    Raises:
        ValueError: a file that is not `save_call`'s.
        OSError: it cannot be read.

    Example:
        >>> import pathlib, tempfile, torch, rlkernels
        >>> from rlkernels.testing import compare_with_reference, load_call, save_call
        >>> path = pathlib.Path(tempfile.mkdtemp(), "batch.pt")
        >>> batch = rlkernels.PolicyBatch(torch.tensor([[1, 2]]), torch.tensor([1.0]))
        >>> save_call(path, batch, logits=torch.zeros(1, 2, 5))
        >>> compare_with_reference(**load_call(path)).first is None
        True
    """
    expected = f"{path}: expected a file of rlkernels.testing.save_call"
    with open(path, "rb") as file:
        try:
            stored = torch.load(file, map_location="cpu", weights_only=True)
        except MemoryError:
            raise
        except Exception:  # bytes that are something else may raise anything, with advice that is not ours
            raise ValueError(f"{expected}, got another or a damaged one") from None
    if not _is_mapping(stored) or not {"batch", "objective"} <= stored.keys():
        raise ValueError(f"{expected}, got one without a batch and an objective")
    batch, objective = stored.pop("batch"), stored.pop("objective")
    is_instance = _is_mapping(objective) and objective.keys() == {"class", "fields"}
    # a list, since what stands there may have no hash
    if is_instance and (objective["class"] not in list(_OBJECTIVES) or not _is_mapping(objective["fields"])):
        raise ValueError(f"{expected}, got an objective that is none of {', '.join(sorted(_OBJECTIVES))}")
    if not (is_instance or isinstance(objective, str)) or not _is_mapping(batch):
        raise ValueError(f"{expected}, got a batch or an objective of another form")
    try:
        values = {name: _storable(name, value) for name, value in stored.items()}
        if is_instance:
            objective = _OBJECTIVES[objective["class"]](**objective["fields"])
        return {"batch": PolicyBatch(**batch), "objective": objective, **values}
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{expected}, got {' '.join(str(error).split())}") from None


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) for name in value)


def _storable(name: str, value: Any) -> Any:
    """The value in a type that `torch.load` takes without running code."""
    if value is None or isinstance(value, bool | Tensor):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"{name}: expected a tensor, number, string or None, got {checks.describe(value)}")


def _compact(value: Any) -> Any:
    """A tensor on the CPU without graph, hooks, or the rest of what it is a view of; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach().as_subclass(Tensor).cpu()
    is_part = value.untyped_storage().nbytes() > value.numel() * value.element_size()
    return value.clone() if is_part else value


def _stored_batch(batch: PolicyBatch) -> dict[str, Any]:
    tensors = {name: _compact(value) for name, value in vars(batch).items() if isinstance(value, Tensor)}
    return {**tensors, "extras": {name: _compact(value) for name, value in batch.extras.items()}}


def _stored_objective(objective: str | Objective) -> Any:
    resolve(objective, None)
    if isinstance(objective, str):
        return str.__str__(objective)
    if type(objective) not in _OBJECTIVES.values():
        raise TypeError(
            "objective: expected a recipe's name or an objective of this package, which a file can hold, "
            f"got {checks.describe(objective)}; hand it to compare_with_reference directly"
        )
    fields = {name: _compact(_storable(f"objective.{name}", value)) for name, value in vars(objective).items()}
    return {"class": type(objective).__name__, "fields": fields}


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that has its name once it is whole."""
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(unfinished, "xb") as file:
            yield file
        path.touch(exist_ok=False)  # another process may have made it since
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _loss_of(sources: Mapping[str, Tensor]) -> Any:
    found = tuple(name for name in sources if name not in _KEYWORDS)
    is_stray = ("bias" in sources and "hidden" not in sources) or ("entropy" in sources and "logp" not in sources)
    if found not in _LOSSES or is_stray:
        raise ValueError(
            "logits, hidden, logp: expected logits alone, or hidden and weight (and bias), or logp (and entropy), "
            f"got {', '.join(sources) or 'none'}"
        )
    for name, value in sources.items():
        checks.require_tensor(name, value)
        checks.require_dtype(name, value, checks.FLOAT_DTYPES)
    return _LOSSES[found]


def _why_not(name: str, device: torch.device) -> str | None:
    reason = backends.why_unavailable(name)
    if reason is not None:
        return reason
    try:
        with _selected(name):
            backends.choose(device)
    except RuntimeError as error:
        return str(error)
    return None


@contextmanager
def _selected(backend: str) -> Iterator[None]:
    previous = rlkernels.set_backend(backend)
    try:
        yield
    finally:
        rlkernels.set_backend(previous)


def _error(values: Tensor, exact: Tensor) -> float:
    is_finite = exact.isfinite()
    if not bool(is_finite.any()):
        return 0.0
    difference = (values.double() - exact)[is_finite].abs().nan_to_num(torch.inf).max()
    scale = exact[is_finite].abs().max()
    return float(difference / scale) if scale > 0 else float(difference)


class _Call(NamedTuple):
    """One loss of one batch."""

    loss: Any
    sources: Mapping[str, Tensor]
    batch: PolicyBatch
    objective: str | Objective | ObjectiveFunction
    reduction: str | None
    normalizer: Normalizer | None
    options: Mapping[str, Any]

    @classmethod
    def of(cls, batch: PolicyBatch, objective: Any, arguments: Mapping[str, Any]) -> _Call:
        options = dict(arguments)
        given = {name: options.pop(name, None) for name in _SOURCES}
        sources = {name: value for name, value in given.items() if value is not None}
        reduction, normalizer = options.pop("reduction", None), options.pop("normalizer", None)
        return cls(_loss_of(sources), sources, batch, objective, reduction, normalizer, options)

    def check(self) -> None:
        """Raises what the loss raises; leaves the random numbers of objectives that draw some to the training."""
        devices = [self.tokens.device] if self.tokens.is_cuda else []
        # the one selected may be for another device than that of the saved tensors
        with _selected("auto"), torch.no_grad(), torch.random.fork_rng(devices):
            self._evaluate(self.sources, reduction=self.reduction, normalizer=self.normalizer)

    @property
    def tokens(self) -> Tensor:
        """What is given by token first of all."""
        return next(iter(self.sources.values()))

    def in_float64(self) -> _Call:
        batch = self.batch.to(self.tokens.device)
        for name in _OF_BATCH:
            value = getattr(batch, name)
            setattr(batch, name, None if value is None else value.double())
        batch.extras = {name: value.double() for name, value in batch.extras.items()}
        sources = {name: value.double() for name, value in self.sources.items()}
        return self._replace(sources=sources, batch=batch)

    def run(self, backend: str) -> dict[str, Tensor]:
        leaves = {name: value.detach().clone().requires_grad_() for name, value in self.sources.items()}
        with _selected(backend), torch.enable_grad():
            by_token = self._evaluate(leaves, reduction="none", normalizer=None)
            out = self._evaluate(leaves, reduction=self.reduction, normalizer=self.normalizer)
            gradients = torch.autograd.grad(out.loss, list(leaves.values()), allow_unused=True)
        found = {} if "logp" in leaves else {"logp": by_token.logp}
        if by_token.entropy is not None and "entropy" not in leaves:
            found["entropy"] = by_token.entropy
        found |= {"loss of a token": by_token.loss.detach(), "loss": out.loss.detach()}
        for name, gradient in zip(leaves, gradients, strict=True):
            if gradient is not None:
                found[f"gradient of {name}"] = gradient
        return found

    def _evaluate(self, leaves: Mapping[str, Tensor], **how: Any) -> PolicyLoss:
        positional = [value for name, value in leaves.items() if name not in _KEYWORDS]
        keywords = {name: value for name, value in leaves.items() if name in _KEYWORDS}
        out: PolicyLoss = self.loss(*positional, self.batch, self.objective, **keywords, **how, **self.options)
        return out

    def non_finite(self, exact: Mapping[str, Tensor]) -> Iterator[NonFinite]:
        """In the inputs, then in what follows from them."""
        batch = self.batch.to("cpu")
        like = batch.targets if batch.targets is not None else self.tokens
        places = _Places.of(batch, Segments(tuple(like.shape), batch.cu_seqlens))
        for name, value in self.sources.items():
            # -inf takes a token out of the vocabulary
            yield from places.first_bad(name, value, may_be_minus_inf=name in ("logits", "bias"))
        extras = {f"extras[{name!r}]": value for name, value in batch.extras.items()}
        for name, value in {**{name: getattr(batch, name) for name in _OF_BATCH}, **extras}.items():
            if value is not None:
                yield from places.first_bad(f"batch.{name}", batch.per_token(value, places.segments, value.dtype))
        for name, value in exact.items():
            yield from places.first_bad(name, value)


class _Places(NamedTuple):
    """Where flat tokens are, and which of them are trained."""

    segments: Segments
    sequence: Tensor  # [N]
    is_trained: Tensor  # [N]

    @classmethod
    def of(cls, batch: PolicyBatch, segments: Segments) -> _Places:
        sequence = segments.expand(torch.arange(segments.count))
        is_trained = torch.ones_like(sequence, dtype=torch.bool) if batch.mask is None else batch.mask.reshape(-1)
        return cls(segments, sequence, is_trained)

    def first_bad(self, quantity: str, values: Tensor, may_be_minus_inf: bool = False) -> Iterator[NonFinite]:
        values = values.cpu()
        is_bad = ~values.isfinite() & ~(may_be_minus_inf & (values == -torch.inf))
        is_by_token = quantity.removeprefix("gradient of ") not in _NOT_BY_TOKEN
        if is_by_token:
            tokens = self.segments.tokens
            values, is_bad = values.reshape(tokens, -1), is_bad.reshape(tokens, -1) & self.is_trained[:, None]
        if not bool(is_bad.any()):
            return
        place = is_bad.nonzero()[0].tolist()
        value, count = float(values[tuple(place)]), int(is_bad.sum())
        if not is_by_token:
            yield NonFinite(quantity, None, None, tuple(place), value, count)
            return
        row, column = place
        sequence = int(self.sequence[row])
        token = row - int((self.sequence == sequence).nonzero()[0])
        yield NonFinite(quantity, sequence, token, (column,) if values.shape[1] > 1 else (), value, count)
