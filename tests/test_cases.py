"""The table's rows about statistics: precision, -inf, labels, gradients, strides, heads. See `small_cases`.

`test_every_row_has_its_test` holds this file and the other `test_cases_*.py` to the whole table.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import host_device
import pytest
import small_cases
import torch
import torch.distributed as dist
from small_cases import (
    BACKENDS,
    IGNORE,
    INF,
    LN2,
    NAN,
    NOT_APPLICABLE,
    ROWS,
    assert_bits,
    assert_values,
    on_device,
    statistics,
    through_logits_and_hidden,
)
from tolerance import assert_as_exact_as_torch
from torch import Generator, Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import rlkernels
from rlkernels import GRPO, PolicyBatch, linear_policy_loss, linear_token_stats, policy_loss, token_stats
from rlkernels.backends import memory
from rlkernels.stats import OUTPUTS

pytest_generate_tests, backend = small_cases.by_row, small_cases.backend_of_row

linear_op = importlib.import_module("rlkernels.ops.linear_token_stats")  # the name is its operation's too

HALF = (torch.bfloat16, torch.float16)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=lambda dtype: str(dtype)[6:])


def leaf(*shape: int, generator: Generator, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return on_device((scale * torch.randn(*shape, generator=generator)).to(dtype)).requires_grad_()


def labels(*shape: int, vocab: int, generator: Generator) -> Tensor:
    return on_device(torch.randint(vocab, shape, generator=generator))


def test_every_row_has_its_test() -> None:
    """For each backend a row has a test, or a reason why not."""
    tests: dict[str, list[Callable[..., None]]] = {}
    for file in sorted(Path(__file__).parent.glob("test_cases*.py")):
        module = importlib.import_module(file.stem)
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if name.startswith("test_") and function is not test_every_row_has_its_test:
                tests.setdefault(small_cases.row_of(name), []).append(function)
    assert set(tests) == set(ROWS)
    assert set(NOT_APPLICABLE) <= set(ROWS)
    for row, functions in tests.items():
        runs = any("backend" in inspect.signature(function).parameters for function in functions)
        missing = set(NOT_APPLICABLE.get(row, {}))
        assert (missing < set(BACKENDS)) if runs else (missing == set(BACKENDS)), row


# Values


@through_logits_and_hidden
def test_B06_vocab_tail(path: str, backend: str) -> None:
    stats, _ = statistics(path, torch.full((4, 300), -50.0), [0, 1, 298, 299])
    assert_values(stats.logp, [-5.703782] * 4)
    assert_values(stats.entropy, [5.703782] * 4)


@pytest.mark.parametrize("vocab", [32003, 129920, 151936, 262144], ids="V={}".format)
def test_B06_bounds(vocab: int, backend: str, generator: Generator) -> None:
    logits = 4 * torch.randn(2, vocab, generator=generator)
    logits[1] *= 10  # a single column has most of the mass
    stats, _ = statistics("logits", logits, logits.argmax(-1))
    assert (stats.logp <= 0).all()
    assert ((stats.entropy >= 0) & (stats.entropy <= math.log(vocab) * (1 + 1e-6))).all()


@through_logits_and_hidden
def test_B07_softcap_of_the_tail(path: str, backend: str) -> None:
    assert_values(statistics(path, torch.full((1, 5), -20.0), [0], softcap=1.0).stats.logp, [-1.609438])


@through_logits_and_hidden
def test_B09_entropy_beside_infinity(path: str, backend: str) -> None:
    logits = on_device([[0.0, math.log(3), -INF, -INF]])
    before = logits.clone()
    stats, dlogits = statistics(path, logits, [1])
    assert_values(stats.entropy, [0.562335])
    assert_values(dlogits(stats.entropy.sum()), [[0.205990, -0.205990, 0.0, 0.0]])
    assert_bits(logits, before)
    # a row without any finite logit has no distribution
    nowhere, _ = statistics(path, torch.full((1, 3), -INF), [0])
    assert nowhere.entropy.isnan().all() and nowhere.logp.isnan().all()


@through_logits_and_hidden
@pytest.mark.parametrize(
    ("logits", "entropy"),
    [
        (torch.tensor([[0.0, -INF]]), 0.0),
        (torch.tensor([[0.0, 0.0, -INF]]), LN2),
        (torch.tensor([[65504.0, -65504.0]], dtype=torch.float16), 0.0),
    ],
    ids=["one finite", "two finite", "ends of float16"],
)
def test_B11_entropy(logits: Tensor, entropy: float, path: str, backend: str) -> None:
    stats, dlogits = statistics(path, logits, [0])
    assert_values(stats.entropy, [entropy])
    assert_values(dlogits(stats.entropy.sum()).float(), [[0.0] * logits.shape[1]])


@through_logits_and_hidden
@pytest.mark.parametrize("ignored", [255, 1, -7, 2**40], ids="ignored={}".format)
def test_B13_any_ignored_label(ignored: int, path: str, backend: str, generator: Generator) -> None:
    logits = torch.randn(4, 3, generator=generator)
    stats, dlogits = statistics(path, logits, [0, 2, ignored, 0], ignore_index=ignored)
    assert_values(stats.logp, F.log_softmax(logits, -1)[range(4), [0, 2, 0, 0]] * torch.tensor([1.0, 1.0, 0.0, 1.0]))
    assert stats.logp[2] == 0
    assert (dlogits(stats.logp.sum())[2] == 0).all()


@through_logits_and_hidden
@pytest.mark.parametrize("label", [-4, 5, 2**40, -(2**63)])
def test_B14_bad_labels_raise_on_the_host(label: int, path: str, backend: str) -> None:
    if host_device.device() != "cpu":
        rlkernels.set_checks(True)
    with pytest.raises(ValueError, match=rf"targets: expected labels in \[0, 5\).*got {label} at row 1"):
        statistics(path, torch.zeros(4, 5), [0, label, IGNORE, 1])


def test_B15_ignored_rows_read_no_table(backend: str) -> None:
    hidden = on_device([[NAN, 1.0], [0.0, 0.0]])
    weight, bias = on_device(torch.zeros(3, 2), torch.tensor([0.0, 0.0, math.log(2)]))
    weight, bias = weight.requires_grad_(), bias.requires_grad_()
    logp = linear_token_stats(hidden, weight, on_device([IGNORE, 2]), bias=bias).logp
    assert_values(logp, [0.0, -LN2])
    dweight, dbias = torch.autograd.grad(logp.sum(), [weight, bias])
    assert (dweight == 0).all()
    assert_values(dbias, [-0.25, -0.25, 0.5])


# Gradients


@through_logits_and_hidden
def test_B19_upstream_of_each_row(path: str, backend: str) -> None:
    hidden, targets = on_device([[1.0], [2.0]]), on_device([0, 0])
    weight, bias = on_device(torch.zeros(2, 1), torch.zeros(2))
    weight, bias = weight.requires_grad_(), bias.requires_grad_()
    if path == "logits":
        logp = token_stats(F.linear(hidden, weight, bias), targets).logp
    else:
        logp = linear_token_stats(hidden, weight, targets, bias=bias).logp
    for upstream, dweight, dbias in (([1.0, 3.0], [-3.5, 3.5], [-2.0, 2.0]), ([0.0, 1.0], [-1.0, 1.0], [-0.5, 0.5])):
        gradients = torch.autograd.grad(-logp, [weight, bias], on_device(upstream), retain_graph=True)
        assert_values(gradients[0][:, 0], dweight)
        assert_values(gradients[1], dbias)


@through_logits_and_hidden
def test_B20_linear_in_the_upstream(path: str, backend: str, generator: Generator) -> None:
    stats, dlogits = statistics(path, 3 * torch.randn(4, 7, generator=generator), [0, 6, 3, 3])
    once = dlogits(-stats.logp.sum())
    weights = on_device([2.0, 0.0, -1.0, 0.5])
    torch.testing.assert_close(dlogits((-stats.logp * weights).sum()), weights[:, None] * once)
    for k in (0.0, 1.0, 0.5, 1024.0):
        torch.testing.assert_close(dlogits(-stats.logp.sum() * k), k * once)


def test_B22_transposed_losses(backend: str, generator: Generator) -> None:
    logits, targets = leaf(2, 3, 5, generator=generator), labels(2, 3, vocab=5, generator=generator)
    weights = on_device(torch.arange(1.0, 7.0).view(3, 2))
    logp = token_stats(logits, targets).logp
    exact = F.log_softmax(logits, -1).gather(-1, targets[..., None])[..., 0]
    for turned in (lambda x: x.t().contiguous(), lambda x: x.t(), lambda x: x.reshape(3, 2), lambda x: x.flip(0).t()):
        actual, expected = (
            torch.autograd.grad((turned(value) * weights).sum(), logits, retain_graph=True)[0]
            for value in (logp, exact)
        )
        torch.testing.assert_close(actual, expected)


@through_logits_and_hidden
def test_B24_two_heads_on_the_same_logits(path: str, backend: str) -> None:
    hidden, bias = on_device(torch.zeros(1, 1), torch.zeros(2))
    logits = on_device(torch.zeros(1, 2)).requires_grad_() if path == "logits" else bias.requires_grad_()

    def stats_of(target: int) -> rlkernels.TokenStats:
        if path == "logits":
            return token_stats(logits, on_device([target]))
        return linear_token_stats(hidden, on_device(torch.zeros(2, 1)), on_device([target]), bias=logits)

    (-stats_of(0).logp - stats_of(1).logp).sum().backward()
    assert_values(logits.grad.flatten(), [0.0, 0.0])
    assert (logits == 0).all()
    assert_values(stats_of(0).entropy, [LN2])


@through_logits_and_hidden
@every_dtype
@pytest.mark.parametrize("requires_grad", [True, False], ids=["grad", "no grad"])
def test_B25_inputs_are_not_modified(
    requires_grad: bool, dtype: torch.dtype, path: str, backend: str, generator: Generator
) -> None:
    shape = (3, 11) if path == "logits" else (3, 4)
    tensors = [leaf(*shape, generator=generator, dtype=dtype), leaf(11, 4, generator=generator, dtype=dtype)]
    tensors = [tensor.requires_grad_(requires_grad) for tensor in tensors][: 1 if path == "logits" else 2]
    before = [tensor.detach().clone() for tensor in tensors]
    batch = PolicyBatch(labels(3, vocab=11, generator=generator), on_device([1.0, -1.0, 0.5]))
    for objective in (GRPO(entropy_coef=0.1), "gspo"):
        loss = (policy_loss if path == "logits" else linear_policy_loss)(*tensors, batch, objective).loss
        if requires_grad:
            loss.backward()
    assert_bits([tensor.detach() for tensor in tensors], before)


@through_logits_and_hidden
@pytest.mark.parametrize("order", [("logp", "entropy"), ("entropy", "logp")], ids="-".join)
def test_B26_order_of_statistics(order: tuple[str, str], path: str, backend: str) -> None:
    stats, dlogits = statistics(path, torch.tensor([[0.0, math.log(3)]]), [1])
    gradients = {name: dlogits(getattr(stats, name).sum()) for name in order}
    assert_values(stats.logp, [-0.287682])
    assert_values(stats.entropy, [0.562335])
    assert_values(gradients["logp"], [[-0.25, 0.25]])
    assert_values(gradients["entropy"], [[0.205990, -0.205990]])
    assert_values(dlogits(stats.logp.sum() + 0.5 * stats.entropy.sum()), [[-0.147005, 0.147005]])


@through_logits_and_hidden
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("objective", ["dapo", "gspo"])
def test_B27_second_backward(objective: str, dtype: torch.dtype, path: str, backend: str, generator: Generator) -> None:
    vocab = 600  # with the smallest chunks three tiles
    first = leaf(2, 3, vocab if path == "logits" else 8, generator=generator, dtype=dtype)
    tensors = [first] if path == "logits" else [first, leaf(vocab, 8, generator=generator, dtype=dtype)]
    targets = labels(2, 3, vocab=vocab, generator=generator)
    batch = PolicyBatch(targets, on_device([1.0, -1.0]), old_logp=on_device(torch.full((2, 3), -6.0)))
    for options in [{}] if path == "logits" else [{}, {"chunk_bytes": 1}]:
        function = policy_loss if path == "logits" else linear_policy_loss
        loss = function(*tensors, batch, objective, **options).loss
        once = torch.autograd.grad(loss, tensors, retain_graph=True)
        kept = [gradient.clone() for gradient in once]
        thrice = torch.autograd.grad(loss, tensors, on_device(3.0))
        assert_bits(list(once), kept)
        for three, one in zip(thrice, once, strict=True):  # formed anew: they differ by roundings of their terms
            difference = (three.float() - 3 * one.float()).abs().max()
            assert difference <= {torch.float32: 1e-5, torch.bfloat16: 2.0**-4}[dtype] * one.float().abs().max()


def test_B28_gradients_accumulate(backend: str, generator: Generator) -> None:
    hidden, weight = leaf(4, 3, generator=generator), leaf(9, 3, generator=generator)
    targets = labels(4, vocab=9, generator=generator)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    logp = F.log_softmax(exact[0] @ exact[1].T, -1).gather(-1, targets[:, None])
    dhidden, dweight = (gradient.float() for gradient in torch.autograd.grad(logp.sum(), exact))
    for calls in (1, 3):
        hidden.grad, weight.grad = None, torch.full_like(weight, 7.0)
        for _ in range(calls):
            linear_token_stats(hidden, weight, targets).logp.sum().backward()
        torch.testing.assert_close(weight.grad, 7 + calls * dweight)
        torch.testing.assert_close(hidden.grad, calls * dhidden)


B29_LOGITS = [
    [-0.1118, 0.0162, 0.0956],
    [-0.1134, 0.0088, 0.1046],
    [-0.1737, 0.1315, 0.0422],
    [-0.0921, 0.0728, 0.0194],
]


@through_logits_and_hidden
def test_B29_outputs_are_written_without_gradient(path: str, backend: str) -> None:
    with torch.no_grad():
        logits, targets = on_device(B29_LOGITS), on_device([0, 0, 0, 0])
        if path == "logits":
            stats = token_stats(logits, targets)
        else:
            stats = linear_token_stats(torch.eye(4).to(logits), logits.T, targets)
        loss = policy_loss(logits, PolicyBatch(targets, on_device([1.0] * 4)), "reinforce").loss
    assert_values(-stats.logp.mean(), 1.2258632)
    assert_values(loss, 1.2258632)


@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=3)), ids=str)
def test_B30_any_subset_needs_gradients(needs: tuple[bool, bool, bool], backend: str, generator: Generator) -> None:
    tensors = [leaf(3, 4, generator=generator), leaf(7, 4, generator=generator), leaf(7, generator=generator)]
    exact = [tensor.detach().double().requires_grad_(need) for tensor, need in zip(tensors, needs, strict=True)]
    for tensor, need in zip(tensors, needs, strict=True):
        tensor.requires_grad_(need)
    targets = labels(3, vocab=7, generator=generator)
    batch = PolicyBatch(targets, on_device([1.0, -1.0, 2.0]))
    hidden, weight, bias = tensors
    stats = linear_token_stats(hidden, weight, targets, bias=bias)
    losses = [
        stats.logp.sum() + stats.entropy.sum(),
        linear_policy_loss(hidden, weight, batch, GRPO(entropy_coef=-1.0), bias=bias, reduction="token_sum").loss,
    ]
    log_probs = F.log_softmax(F.linear(*exact), -1)
    logp = log_probs.gather(-1, targets[:, None])[:, 0]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    advantages = batch.advantages.double()
    expected = [logp.sum() + entropy.sum(), (-advantages * (logp - logp.detach()).exp()).sum() + entropy.mean()]
    for loss, expected_loss in zip(losses, expected, strict=True):
        assert loss.requires_grad == any(needs)
        torch.testing.assert_close(loss, expected_loss.float())
        for tensor in (*tensors, *exact):
            tensor.grad = None
        if any(needs):
            loss.backward()
            expected_loss.backward(retain_graph=True)
        for tensor, definition in zip(tensors, exact, strict=True):
            assert (tensor.grad is None) == (definition.grad is None)
            if tensor.grad is not None:
                torch.testing.assert_close(tensor.grad, definition.grad.float())


@through_logits_and_hidden
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_B31_without_gradient_the_same_bits(mode: Any, path: str, backend: str, generator: Generator) -> None:
    first = leaf(2, 3, 11 if path == "logits" else 4, generator=generator)
    tensors = [first] if path == "logits" else [first, leaf(11, 4, generator=generator)]
    targets = labels(2, 3, vocab=11, generator=generator)
    old_logp = on_device(torch.full((2, 3), -2.0))
    batch = PolicyBatch(targets, on_device([1.0, -1.0]), old_logp=old_logp)

    def run() -> list[Any]:
        of_tokens, of_batch = {
            "logits": (token_stats, policy_loss),
            "hidden": (linear_token_stats, linear_policy_loss),
        }[path]
        outs = [of_batch(*tensors, batch, objective) for objective in ("dapo", "gspo", GRPO(entropy_coef=0.1))]
        return [*of_tokens(*tensors, targets, outputs=OUTPUTS), *(out.loss for out in outs), outs[0].logp]

    with mode():
        without = run()
    assert not any(value.requires_grad for value in without)
    assert_bits([value.clone() for value in without], [value.detach() for value in run()])


class Allocations(TorchDispatchMode):
    """Bytes of the largest storage that is made; what registered operations make is theirs."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return out


def test_B32_frozen_heads_cost_nothing(backend: str, generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    vocab, width = (151_936, 64) if backend == "cpu" else (40_009, 16)  # interpreted kernels are slow
    hidden = leaf(2, width, generator=generator)
    weight = leaf(vocab, width, generator=generator, scale=0.2).requires_grad_(False)
    targets = labels(2, vocab=vocab, generator=generator)
    sizes = [0]

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            with Allocations() as allocations:
                out = function(*arguments, **named)
            sizes.append(allocations.largest)
            return out

        return run

    def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        sizes.append(math.prod(shape) * dtype.itemsize)
        return torch.empty(shape, dtype=dtype, device=device)

    monkeypatch.setattr(memory, "empty", empty)
    for name in ("linear_forward", "linear_backward"):
        monkeypatch.setattr(linear_op, name, counted(getattr(linear_op, name)))
    linear_token_stats(hidden, weight, targets).logp.sum().backward()
    assert weight.grad is None
    assert len(sizes) > 2 and 0 < max(sizes) < weight.numel() * weight.itemsize
    exact, logits = hidden.detach().double().requires_grad_(), weight.double()
    F.log_softmax(exact @ logits.T, -1).gather(-1, targets[:, None]).sum().backward()
    torch.testing.assert_close(hidden.grad, exact.grad.float(), rtol=1e-4, atol=1e-5)


def test_B33_adapters_of_the_head(backend: str, generator: Generator) -> None:
    hidden, targets = leaf(3, 4, generator=generator), labels(3, vocab=7, generator=generator)
    base = leaf(7, 4, generator=generator).requires_grad_(False)
    a, b = leaf(2, 4, generator=generator), leaf(7, 2, generator=generator)
    stats = linear_token_stats(hidden, base + 0.5 * b @ a, targets)
    exact = F.log_softmax(hidden @ (base + 0.5 * b @ a).T, -1).gather(-1, targets[:, None])
    actual = torch.autograd.grad(stats.logp.sum(), [a, b])
    torch.testing.assert_close(actual, torch.autograd.grad(exact.sum(), [a, b]))
    assert base.grad is None
    with pytest.raises(TypeError, match="weight: expected a tensor, got Linear"):
        linear_token_stats(hidden, torch.nn.Linear(4, 7), targets)


def test_B34_tied_weights(backend: str, generator: Generator) -> None:
    embedding, tokens = leaf(7, 4, generator=generator), labels(3, vocab=7, generator=generator)
    stats = linear_token_stats(embedding[tokens], embedding, tokens.flip(0))
    exact = F.log_softmax(embedding[tokens] @ embedding.T, -1).gather(-1, tokens.flip(0)[:, None])
    (actual,) = torch.autograd.grad(stats.logp.sum(), embedding)
    torch.testing.assert_close(actual, torch.autograd.grad(exact.sum(), embedding)[0])
    with pytest.raises(TypeError, match="weight: expected a tensor, got NoneType"):
        linear_token_stats(embedding[tokens], None, tokens)


@through_logits_and_hidden
def test_B35_every_term_is_scaled(path: str, backend: str, generator: Generator) -> None:
    stats, dlogits = statistics(path, torch.randn(3, 7, generator=generator), [0, 6, 3])
    terms = [-stats.logp.mean(), -0.1 * stats.entropy.mean(), 0.01 * (stats.lse**2).mean()]
    once = [dlogits(term) for term in terms]
    for k in (1.0, 4.0):
        torch.testing.assert_close(dlogits(sum(terms) * k), k * (once[0] + once[1] + once[2]))
        for term, gradient in zip(terms, once, strict=True):
            torch.testing.assert_close(dlogits(term * k), k * gradient)


def test_B36_slices_are_neither_copied_nor_modified(backend: str, generator: Generator) -> None:
    whole = leaf(2, 6, 4099, generator=generator)
    before = whole.detach().clone()
    targets = labels(2, 3, vocab=4099, generator=generator)
    with Allocations() as allocations:
        stats = token_stats(whole[:, -3:], targets, temperature=0.7)
    assert allocations.largest < 6 * 64
    (stats.logp.sum() + stats.entropy.sum()).backward()
    assert_bits(whole.detach(), before)
    assert (whole.grad[:, :3] == 0).all()


# Precision


@through_logits_and_hidden
@pytest.mark.parametrize(("vocab", "logp"), [(512, -6.238325), (151_936, -11.931215)])
def test_B38_many_equal_logits(vocab: int, logp: float, path: str, backend: str) -> None:
    stats, _ = statistics(path, torch.full((1, vocab), 3.0, dtype=torch.bfloat16), [7])
    assert stats.logp.dtype == stats.entropy.dtype == torch.float32
    assert_values(stats.logp, [logp], 1e-6)
    assert_values(stats.entropy, [-logp], 1e-6)


@through_logits_and_hidden
@pytest.mark.parametrize("offset", [0.0, 1e4, 1e6, -1e7], ids="c={:g}".format)
def test_B39_common_offset(offset: float, path: str, backend: str) -> None:
    stats, dlogits = statistics(path, torch.tensor([[2.0 + offset, -1.0 + offset]]), [0])
    assert_values(-stats.logp, [0.0485874])
    assert_values(dlogits(stats.logp.sum()), [[0.0474259, -0.0474259]])
    assert_values(statistics(path, torch.full((1, 2), 1e8), [0]).stats.logp, [-0.693147])


def test_B40_weight_gradient_of_many_rows(backend: str, generator: Generator) -> None:
    is_interpreted = backend in ("cuda", "triton") and host_device.device() == "cpu"
    rows = 257 if is_interpreted else 8192
    hidden = leaf(rows, 128, generator=generator, dtype=torch.bfloat16)
    weight = leaf(32, 128, generator=generator, dtype=torch.bfloat16, scale=0.1)
    targets = labels(rows, vocab=32, generator=generator)

    def dweight(weight: Tensor, logp: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return torch.autograd.grad(-logp(hidden.detach().to(weight.dtype)[:-1], weight).mean(), weight)[0]

    def naive(hidden: Tensor, weight: Tensor) -> Tensor:
        return F.log_softmax(hidden @ weight.T, -1).gather(-1, targets[1:, None])

    actual = dweight(weight, lambda hidden, weight: linear_token_stats(hidden, weight, targets[1:]).logp)
    exact = dweight(weight.detach().double().requires_grad_(), naive)
    assert_as_exact_as_torch(actual, dweight(weight, naive), exact, torch.bfloat16, "dweight")


def test_B41_float32_is_float32(backend: str, generator: Generator) -> None:
    hidden, weight = leaf(4, 1024, generator=generator), leaf(8, 1024, generator=generator, scale=0.05)
    targets = labels(4, vocab=8, generator=generator)

    def results(hidden: Tensor, weight: Tensor, logp: Tensor) -> list[Tensor]:
        return [logp.detach(), *torch.autograd.grad(logp.sum(), [hidden, weight])]

    actual = results(hidden, weight, linear_token_stats(hidden, weight, targets).logp)
    hidden, weight = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    logp = F.log_softmax(hidden @ weight.T, -1).gather(-1, targets[:, None])[:, 0]
    for value, exact in zip(actual, results(hidden, weight, logp), strict=True):
        assert (value.double() - exact).abs().max() < 1e-5 * exact.abs().max()


@every_dtype
def test_B42_on_policy_from_logits(dtype: torch.dtype, backend: str, generator: Generator) -> None:
    logits, targets = leaf(2, 4, 301, generator=generator, dtype=dtype), labels(2, 4, vocab=301, generator=generator)
    with torch.no_grad():
        old_logp = token_stats(logits, targets).logp
    alone = [token_stats(logits[i, j], targets[i, j]).logp for i in range(2) for j in range(4)]
    assert_bits(torch.stack(alone).view(2, 4).detach(), old_logp)
    for objective in ("dapo", "gspo"):
        out = policy_loss(logits, PolicyBatch(targets, on_device([1.0, -1.0]), old_logp=old_logp), objective)
        assert_on_policy(out.metrics)


@every_dtype
def test_B42_on_policy_from_hidden_states(dtype: torch.dtype, backend: str, generator: Generator) -> None:
    """With the same chunks: PyTorch's GEMMs, which make the logits, go by the number of their rows."""
    hidden, weight = leaf(2, 4, 16, generator=generator, dtype=dtype), leaf(601, 16, generator=generator, dtype=dtype)
    targets = labels(2, 4, vocab=601, generator=generator)
    for chunk_bytes in (1, None):
        with torch.no_grad():
            old_logp = linear_token_stats(hidden, weight, targets, chunk_bytes=chunk_bytes).logp
        batch = PolicyBatch(targets, on_device([1.0, -1.0]), old_logp=old_logp)
        for head_is_frozen in (False, True):
            head = weight.detach() if head_is_frozen else weight
            out = linear_policy_loss(hidden, head, batch, "dapo", chunk_bytes=chunk_bytes)
            assert_on_policy(out.metrics)


def assert_on_policy(metrics: rlkernels.Metrics) -> None:
    for name in ("approx_kl_k1", "approx_kl_k3", "clip_frac_low", "clip_frac_high", "ratio_variance"):
        assert metrics[name] == 0, name
    for name in ("ratio_mean", "ratio_min", "ratio_max"):
        assert metrics[name] == 1, name


# Temperature, softcap, scale, bias


@through_logits_and_hidden
def test_B67_temperature_once(path: str, backend: str) -> None:
    for temperature in (0.5, on_device([0.5])):
        stats, dlogits = statistics(path, torch.tensor([[0.0, 1.0]]), [1], temperature=temperature)
        assert_values(stats.logp, [-0.126928])
        assert_values(stats.entropy, [0.365334])
        assert_values(dlogits(stats.logp.sum()), [[-0.238406, 0.238406]])


@through_logits_and_hidden
@pytest.mark.parametrize("bad", [0.0, -1.0, NAN, INF], ids="T={}".format)
def test_B68_temperature_is_positive(bad: float, path: str, backend: str) -> None:
    if host_device.device() != "cpu":
        rlkernels.set_checks(True)
    for temperature in (bad, torch.tensor(bad), on_device([1.0, bad])):
        with pytest.raises(ValueError, match="temperature: expected"):
            statistics(path, torch.zeros(2, 3), [0, 1], temperature=temperature)


@through_logits_and_hidden
def test_B72_softcap(path: str, backend: str) -> None:
    stats, dlogits = statistics(path, torch.tensor([[124.0]]), [0], softcap=30.0)
    assert_values(stats.mean_logits, [29.984588], 1e-7)
    assert_values(stats.lse, [29.984588], 1e-7)
    assert_values(dlogits(stats.lse.sum()), [[0.001027]], 1e-3)


@through_logits_and_hidden
@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"logit_scale": 1.7}, {"softcap": 2.0, "logit_scale": 0.3}])
def test_B73_softcap_and_scale(options: dict[str, float], path: str, backend: str, generator: Generator) -> None:
    logits = 4 * torch.randn(3, 7, generator=generator)
    results = []
    for name in (backend, "reference"):
        rlkernels.set_backend(name)
        stats, dlogits = statistics(path, logits, [0, 6, 3], temperature=0.7, **options)
        results.append([*stats[:5], dlogits(stats.logp.sum() - stats.entropy.sum() + stats.lse.sum())])
    for value, expected in zip(*results, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)


def test_B74_bias(backend: str) -> None:
    hidden, weight = on_device(torch.zeros(1, 4), torch.zeros(2, 4))
    bias = on_device([0.0, math.log(3)]).requires_grad_()
    logp = linear_token_stats(hidden, weight, on_device([1]), bias=bias).logp
    assert_values(logp, [-0.287682])
    assert_values(torch.autograd.grad(2 * logp.sum(), bias)[0], [-0.5, 0.5])


# Devices, compiler, autocast


def test_B81_mixed_devices(backend: str) -> None:
    device, other = torch.device(host_device.device()), "meta"
    zeros, targets = on_device(torch.zeros(2, 3)), on_device([0, 1])
    with pytest.raises(ValueError, match=f"weight: expected on {device}.* like hidden, got .* on meta"):
        linear_token_stats(zeros, torch.zeros(5, 3, device=other), targets)
    with pytest.raises(ValueError, match=f"targets: expected on {device}.* like logits, got .* on meta"):
        token_stats(zeros, targets.to(other))
    with pytest.raises(ValueError, match=f"advantages: expected on meta like the tokens, got .* on {device}"):
        PolicyBatch(None, on_device([1.0, 1.0]), mask=torch.ones(2, 3, device=other))
    batch = PolicyBatch(None, torch.ones(2, device=other), mask=torch.ones(2, 3, device=other))
    with pytest.raises(ValueError, match=f"mask: expected on {device}.* like the tokens, got .* on meta"):
        rlkernels.logp_policy_loss(zeros, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["W float32", "W bfloat16"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
def test_B87_autocast(with_bias: bool, dtype: torch.dtype, backend: str, generator: Generator) -> None:
    hidden, weight = leaf(3, 4, generator=generator), leaf(7, 4, generator=generator, dtype=dtype)
    bias = leaf(7, generator=generator, dtype=dtype) if with_bias else None
    targets = labels(3, vocab=7, generator=generator)
    tensors = [hidden, weight] + ([bias] if bias is not None else [])
    for frozen in (False, True):
        weight.requires_grad_(not frozen)
        with torch.autocast(host_device.device(), torch.bfloat16):
            stats = linear_token_stats(hidden, weight, targets, bias=bias, outputs=("entropy", "lse"))
            loss = linear_policy_loss(hidden, weight, PolicyBatch(targets, on_device([1.0] * 3)), bias=bias).loss
        assert stats.logp.dtype == stats.lse.dtype == loss.dtype == torch.float32
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        exact = F.linear(hidden.double(), weight.double(), None if bias is None else bias.double())
        expected = F.log_softmax(exact, -1).gather(-1, targets[:, None])
        torch.testing.assert_close(stats.logp, expected[:, 0].float(), rtol=2e-2, atol=5e-2)
        for value in (stats.logp.sum(), -3 * loss):
            for tensor, gradient, reference in zip(
                wanted,
                torch.autograd.grad(value, wanted, retain_graph=True),
                torch.autograd.grad(expected.sum(), wanted, retain_graph=True),
                strict=True,
            ):
                assert gradient.dtype == tensor.dtype
                torch.testing.assert_close(gradient.float(), reference.float(), rtol=5e-2, atol=5e-2)


# Shapes, strides, dtypes


@pytest.mark.parametrize("shape", [(7 * 4,), (0,), (4, 7)], ids=str)
def test_B89_weights_that_are_not_whole(shape: tuple[int, ...], backend: str) -> None:
    hidden, targets = on_device(torch.zeros(2, 4), torch.tensor([0, 6]))
    with pytest.raises(ValueError, match=r"weight: expected shape \[V, H\] with H = 4.*got float32"):
        linear_token_stats(hidden, on_device(torch.zeros(shape)), targets)
    turned = linear_token_stats(hidden, on_device(torch.zeros(4, 7)).T, targets)  # a view of the right shape
    assert_values(turned.logp, [-math.log(7)] * 2)


def test_B89_sharded_weights(backend: str) -> None:
    from torch.distributed.tensor import DeviceMesh, DTensor, Shard

    device = host_device.device()
    store = dist.HashStore()
    dist.init_process_group("gloo" if device == "cpu" else "nccl", store=store, rank=0, world_size=1)
    try:
        weight = DTensor.from_local(torch.zeros(7, 4, device=device), DeviceMesh(device, [0]), [Shard(0)])
        with pytest.raises(ValueError, match=r"weight: expected a whole tensor, got a DTensor"):
            linear_token_stats(on_device(torch.zeros(2, 4)), weight, on_device([0, 6]))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)], ids=str)
@through_logits_and_hidden
def test_B101_no_rows(path: str, shape: tuple[int, ...], backend: str) -> None:
    first = on_device(torch.zeros(*shape, 5 if path == "logits" else 4)).requires_grad_()
    tensors = [first] if path == "logits" else [first, on_device(torch.zeros(5, 4)).requires_grad_()]
    targets = on_device(torch.zeros(shape, dtype=torch.int64))
    stats = (token_stats if path == "logits" else linear_token_stats)(*tensors, targets, outputs=OUTPUTS)
    assert all(value.shape == shape for value in stats)
    loss = (policy_loss if path == "logits" else linear_policy_loss)(
        *tensors, PolicyBatch(targets, on_device(torch.ones(shape[0] if len(shape) == 2 else 1))), "dapo"
    ).loss
    assert loss == 0
    for value in (stats.logp.sum() + stats.entropy.sum(), loss):
        for tensor, gradient in zip(tensors, torch.autograd.grad(value, tensors), strict=True):
            assert_bits(gradient, torch.zeros_like(tensor))


STRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda z: z.view(4, 2, 10)[..., :8].transpose(0, 1),
    "padded vocabulary": lambda z: z[:, :8],
    "all but the last": lambda z: z.view(2, 4, 10)[:, :-1],
    "every second row": lambda z: z[::2],
    "every second column": lambda z: z[:, ::2],
    "one row for all": lambda z: z[:1].expand(5, 10),
    "columns apart": lambda z: z.view(10, 8).T,
}


@pytest.mark.parametrize("form", STRIDED)
def test_B102_strided_logits(form: str, backend: str, generator: Generator) -> None:
    stored = leaf(8, 10, generator=generator, scale=2.0)
    view = STRIDED[form](stored)
    targets = labels(*view.shape[:-1], vocab=view.shape[-1], generator=generator)
    copy = view.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    results = []
    for logits in (view, copy):
        stats = token_stats(logits, targets, outputs=OUTPUTS)
        loss = policy_loss(logits, PolicyBatch(targets, on_device(torch.ones(view.shape[0]))), "reinforce").loss
        results.append((stats, loss, stats.logp.sum() + stats.entropy.sum()))
    for actual, expected in zip((*results[0][0], results[0][1]), (*results[1][0], results[1][1]), strict=True):
        if backend == "reference":  # PyTorch's sums follow the strides
            torch.testing.assert_close(actual, expected)
        else:
            assert_bits(actual.detach(), expected.detach())
    for index in (1, 2):
        (expected,) = torch.autograd.grad(results[1][index], copy, retain_graph=True)
        (scattered,) = torch.autograd.grad(view, stored, expected, retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(results[0][index], stored, retain_graph=True)[0], scattered)


def test_B103_strided_hidden_states_and_weights(backend: str, generator: Generator) -> None:
    hidden, weight = leaf(2, 6, 4, generator=generator), leaf(4, 7, generator=generator)
    for view in (hidden[:, -3:, :], hidden.transpose(0, 1), hidden[:, ::2], hidden[:1].expand(3, 6, 4)):
        targets = labels(*view.shape[:-1], vocab=7, generator=generator)
        logp = linear_token_stats(view, weight.T, targets).logp
        exact = F.log_softmax(view @ weight, -1).gather(-1, targets[..., None])[..., 0]
        torch.testing.assert_close(logp, exact)
        actual = torch.autograd.grad(logp.sum(), [hidden, weight])
        torch.testing.assert_close(actual, torch.autograd.grad(exact.sum(), [hidden, weight], retain_graph=True))


@through_logits_and_hidden
def test_B104_strided_arguments_of_any_dtype(path: str, backend: str, generator: Generator) -> None:
    stored = torch.zeros(6, 2, dtype=torch.int64)
    stored[:, 0] = torch.randint(5, (6,), generator=generator)
    targets = on_device(stored)[:, 0]
    advantages = on_device(torch.randn(6, 3, generator=generator))[:, 1]
    mask = on_device([1, 0, 1, 0, 0, 0, 1, 0, 1, 1, 1, 0])[::2]
    first = leaf(6, 5 if path == "logits" else 4, generator=generator)
    tensors = [first] if path == "logits" else [first, leaf(5, 4, generator=generator)]
    function = policy_loss if path == "logits" else linear_policy_loss

    def loss(targets: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        return function(*tensors, PolicyBatch(targets, advantages, mask=mask), "reinforce").loss.detach()

    expected = loss(targets.contiguous(), advantages.contiguous(), mask.contiguous())
    assert_bits(loss(targets, advantages, mask), expected)
    for dtype in (torch.int32, torch.int16, torch.int8, torch.uint8):
        assert_bits(loss(on_device(stored.to(dtype))[:, 0], advantages, mask), expected)
    for dtype in (torch.bool, torch.int64, torch.uint8, torch.float16):
        assert_bits(loss(targets, advantages, mask.to(dtype)), expected)
    with pytest.raises(TypeError, match=r"targets: expected dtype .*got bool"):
        loss(targets.bool(), advantages, mask)
    with pytest.raises(TypeError, match=r"targets: expected dtype .*got float32"):
        loss(targets.float(), advantages, mask)


def test_B108_hidden_states_that_are_logits(backend: str) -> None:
    hidden, weight = on_device(torch.zeros(2, 7), torch.zeros(7, 4))
    with pytest.raises(
        ValueError, match=r"weight: expected shape \[V, H\] with H = 7, the last size of hidden \[2, 7\]"
    ):
        linear_token_stats(hidden, weight, on_device([0, 1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@through_logits_and_hidden
def test_B110_checkpoint(path: str, dtype: torch.dtype, backend: str, generator: Generator) -> None:
    first = leaf(2, 3, 301 if path == "logits" else 8, generator=generator, dtype=dtype)
    tensors = [first] if path == "logits" else [first, leaf(301, 8, generator=generator, dtype=dtype)]
    targets = labels(2, 3, vocab=301, generator=generator)
    batch = PolicyBatch(targets, on_device([1.0, -1.0]), old_logp=on_device(torch.full((2, 3), -6.0)))
    logps: list[Tensor] = []

    def forward(*tensors: Tensor) -> Tensor:
        out = (policy_loss if path == "logits" else linear_policy_loss)(*tensors, batch, "dapo")
        logps.append(out.logp.clone())
        return out.loss

    plain = forward(*tensors)
    expected = torch.autograd.grad(plain, tensors)
    with set_checkpoint_early_stop(False):
        again = checkpoint(forward, *tensors, use_reentrant=False, determinism_check="default")
        assert_bits(again.detach(), plain.detach())
        assert_bits(torch.autograd.grad(again, tensors), expected)
    # a gradient formed in forward saves nothing to be computed again
    assert len(logps) in (2, 3)
    assert_bits(logps, [logps[0]] * len(logps))


def test_B92_saved_tensors(backend: str, generator: Generator) -> None:
    logits, targets = leaf(6, 1003, generator=generator), labels(6, vocab=1003, generator=generator)
    own_bytes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() != logits.untyped_storage().data_ptr():
            own_bytes.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        token_stats(logits, targets, outputs=OUTPUTS)
    assert sum(own_bytes) <= 6 * 64
