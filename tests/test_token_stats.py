"""What `token_stats` computes: values and gradients against float64, on every backend.

Inputs are fresh random numbers in every run. A result may lose twice what PyTorch itself loses in the same
dtype, plus the rounding of its own storage (`tolerance.py`). Numbers given as options are exact in every dtype,
so that all sides compute with the same ones.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import host_device
import pytest
import torch
import torch.nn.functional as F
from tolerance import assert_as_exact_as_torch
from torch import Generator, Tensor

import rlkernels
from rlkernels import backends, reference
from rlkernels.stats import OUTPUTS, TokenStats, make_rows, token_stats

NATIVE = "rlkernels._native"
HALF_DTYPES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALF_DTYPES)
DIFFERENTIABLE = ("logp", "entropy", "lse")
IGNORE = -100
SEGMENT = 4096  # columns that are reduced in one piece; see csrc/row_math.h


# The reference is the definition: where it would be compared with itself, it is left out.
kernels = pytest.mark.parametrize("backend", ["cpu", "triton"], indirect=True)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


backend = host_device.backend_anywhere


@pytest.fixture(autouse=True)
def interpreter_rounds_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter truncates float32 to bfloat16, where every GPU rounds to the nearest."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    convert = interpreter._convert_float

    def convert_rounding(value: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(value, source, target, mode)
        return torch.tensor(value).bfloat16().view(torch.uint16).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert_rounding)


class Case(NamedTuple):
    logits: Tensor  # [N, V]
    targets: Tensor  # [N]
    options: dict[str, Any] = {}  # noqa: RUF012

    def to(self, device: str) -> Case:
        def move(value: Any) -> Any:
            return value.to(device) if isinstance(value, Tensor) else value

        return Case(
            self.logits.to(device),
            self.targets.to(device),
            {name: move(value) for name, value in self.options.items()},
        )


def gaussian(
    generator: Generator,
    dtype: torch.dtype,
    n: int = 6,
    vocab: int = 9001,
    scale: float = 4.0,
    **options: Any,
) -> Case:
    """Two whole segments and a part of one by default."""
    logits = scale * torch.randn(n, vocab, generator=generator, dtype=torch.float64)
    return Case(logits.to(dtype), random_targets(generator, (n,), vocab), options)


def flat(generator: Generator, dtype: torch.dtype, n: int, vocab: int, **options: Any) -> Case:
    """No column dominates, so that no result of the few there are is tiny beside the rounding of s >= 1."""
    logits = (8.0 if vocab > 1000 else 1.0) * (2 * torch.rand(n, vocab, generator=generator) - 1)
    return Case(logits.to(dtype), random_targets(generator, (n,), vocab), options)


def random_targets(generator: Generator, shape: tuple[int, ...], vocab: int) -> Tensor:
    return torch.randint(vocab, shape, generator=generator)


def random_upstream(generator: Generator, n: int, device: str = "cpu") -> dict[str, Tensor]:
    """Gradients with respect to the statistics, exact in every dtype, of either sign, none of them 0 or 1."""
    values = torch.randint(-8, 8, (len(DIFFERENTIABLE), n), generator=generator) / 4 + 0.125
    return dict(zip(DIFFERENTIABLE, values.to(device), strict=True))


def torch_stats(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = IGNORE,
) -> TokenStats:
    """The statistics as one writes them in PyTorch, all of it in the dtype of `logits`."""
    used = targets != ignore_index
    z = torch.where(used[:, None], logits, 0.0)
    if logit_scale != 1.0:
        z = z * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    if isinstance(temperature, Tensor):
        z = z / torch.where(used, temperature, 1.0).to(z.dtype)[:, None]
    elif temperature != 1.0:
        z = z / temperature
    log_probs = F.log_softmax(z, dim=-1)
    labels = torch.where(used, targets, 0)[:, None]
    p_log_p = log_probs.exp() * log_probs.masked_fill(z == -torch.inf, 0.0)
    return TokenStats(
        *(
            torch.where(used, value, 0.0)
            for value in (
                log_probs.gather(-1, labels).squeeze(-1),
                -p_log_p.sum(-1),
                torch.logsumexp(z, dim=-1),
                torch.logsumexp(2 * log_probs, dim=-1),
                z.mean(dim=-1),
            )
        ),
        is_top1=None,
    )


def exact_stats(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = IGNORE,
) -> TokenStats:
    """The definition, in float64, on the logits as their dtype has rounded them."""
    rows = make_rows(logits.double(), targets, temperature, softcap, logit_scale, ignore_index)
    return TokenStats(*reference.row_stats(rows)[: len(TokenStats._fields)])


def all_stats(logits: Tensor, targets: Tensor, **options: Any) -> TokenStats:
    return token_stats(logits, targets, outputs=OUTPUTS, **options)


def run(stats_of: Callable[..., TokenStats], case: Case, upstream: dict[str, Tensor]) -> tuple[TokenStats, Tensor]:
    """Statistics, and the gradient of sum(upstream * statistic) with respect to the logits."""
    logits = case.logits.detach().requires_grad_()
    stats = stats_of(logits, case.targets, **case.options)
    arrived = [getattr(stats, name) for name in upstream]
    weights = [d.to(stat.dtype) for d, stat in zip(upstream.values(), arrived, strict=True)]
    (dlogits,) = torch.autograd.grad(arrived, logits, weights)
    return TokenStats(*(None if stat is None else stat.detach() for stat in stats)), dlogits


def assert_exact(case: Case, upstream: dict[str, Tensor]) -> None:
    """Every statistic and the gradient of the selected backend, judged by PyTorch's own error."""
    stats, dlogits = run(all_stats, case, upstream)
    own, own_dlogits = run(torch_stats, case, upstream)
    exact, exact_dlogits = run(exact_stats, case, upstream)
    assert dlogits.dtype == case.logits.dtype
    assert torch.equal(stats.is_top1, exact.is_top1)
    judged = {name: [getattr(s, name) for s in (stats, own, exact)] for name in ("logp", *OUTPUTS[:-1])}
    judged["dlogits"] = [dlogits, own_dlogits, exact_dlogits]
    # a mean cancels: its error is judged by the mean magnitude of what was added
    magnitude = exact_stats(case.logits.abs(), case.targets, **case.options).mean_logits.nan_to_num(posinf=0.0)
    judged["mean_logits"] = [mean + 2 * magnitude for mean in judged["mean_logits"]]
    for name, (actual, torch_result, truth) in judged.items():
        # a yardstick that overflowed would pass anything
        assert torch_result[truth.isfinite()].isfinite().all(), f"{name}: PyTorch's own is not finite"
        assert_as_exact_as_torch(
            actual, torch_result, truth, dlogits.dtype if name == "dlogits" else stats.logp.dtype, name
        )


# Shapes


@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("n", [0, 1, 37], ids="N={}".format)
@pytest.mark.parametrize(
    "vocab",
    [
        1,  # probability 1: nothing may be left of the gradient of logp
        5,  # fewer columns than a vector has lanes
        1003,  # odd, one partial segment
        32003,  # Llama 2 with three added tokens: odd, so rows are not aligned
        151936,  # Qwen 2.5
    ],
    ids="V={}".format,
)
def test_shapes(backend: str, vocab: int, n: int, dtype: torch.dtype, generator: Generator) -> None:
    if backend == "triton" and n * vocab > 2**21 and host_device.device() == "cpu":
        n = 3  # the interpreter takes a fifth of a second for each of these rows
    device = host_device.device()
    case = flat(generator, dtype, n, vocab, temperature=0.75).to(device)
    assert_exact(case, random_upstream(generator, n, device))


# Values


def at_ten_thousand(generator: Generator, dtype: torch.dtype) -> Case:
    """Nearly every exponential underflows, and a target's logp is about -1e4."""
    case = gaussian(generator, dtype)
    return case._replace(logits=(2e4 * torch.rand(case.logits.shape, generator=generator) - 1e4).to(dtype))


def two_levels_at_ten_thousand(generator: Generator, dtype: torch.dtype) -> Case:
    """Half of the columns share the maximum, so the entropy is ln(V / 2)."""
    case = gaussian(generator, dtype)
    return case._replace(logits=torch.where(case.logits > 0, 1e4, -1e4).to(dtype))


def shared_offset(generator: Generator, dtype: torch.dtype) -> Case:
    """p rebuilt from a float32 lse would be lost: at 1e6 it keeps 4 bits behind the point."""
    case = gaussian(generator, torch.float64)
    return case._replace(logits=(case.logits + 1e6).to(dtype))


def confident(generator: Generator, dtype: torch.dtype) -> Case:
    """1 - p cancels: p_y > 0.99 from the first row on, and 1 - 1e-26 in the last."""
    margin = torch.cat([torch.linspace(11.0, 24.0, 14), torch.tensor([60.0])]).double()
    case = gaussian(generator, torch.float64, n=len(margin), scale=1.0)
    case.logits[torch.arange(len(margin)), case.targets] = case.logits.amax(-1) + margin
    return case._replace(logits=case.logits.to(dtype))


def minus_infinity(generator: Generator, dtype: torch.dtype) -> Case:
    case = gaussian(generator, dtype, n=9)
    logits, targets = case.logits, case.targets
    inf = torch.inf
    logits[0, :SEGMENT] = -inf  # the first segment, which has no maximum then
    logits[1, SEGMENT:] = -inf  # every later one
    logits[2, targets[2]] = -inf  # the target: logp is -inf, its gradient finite
    logits[3, :] = -inf  # all but the target
    logits[3, targets[3]] = 1.0
    logits[4, :] = -inf  # all but another column
    logits[4, (targets[4] + 1) % logits.shape[1]] = 1.0
    logits[5, ::2] = -inf
    logits[6, 0] = -inf
    logits[7, -1] = -inf
    logits[8, SEGMENT : 2 * SEGMENT] = -inf  # a segment between others
    return case


def ignored(generator: Generator, dtype: torch.dtype) -> Case:
    """Whatever stands in an ignored row, its temperature included, leaves no trace."""
    case = gaussian(generator, dtype, temperature=torch.tensor([1.0, math.nan, 0.5, 0.0, 1.0, 2.0]))
    case.targets[[1, 3, 5]] = IGNORE
    case.logits[1] = torch.nan
    case.logits[3] = torch.inf
    case.logits[5] = -torch.inf
    return case


def uniform(generator: Generator, dtype: torch.dtype) -> Case:
    return Case(torch.full((6, 9001), -0.625, dtype=dtype), random_targets(generator, (6,), 9001))


VALUES: dict[str, Callable[[Generator, torch.dtype], Case]] = {
    "logits at +-1e4": at_ten_thousand,
    "two levels at +-1e4": two_levels_at_ten_thousand,
    "shared offset of 1e6": shared_offset,
    "confident": confident,
    "minus infinity": minus_infinity,
    "ignored": ignored,
    "uniform": uniform,
    "temperature of each row": lambda g, dtype: gaussian(
        g, dtype, temperature=torch.tensor([0.25, 0.625, 0.75, 1.0, 1.5, 3.0])
    ),
    "temperature near zero": lambda g, dtype: gaussian(g, dtype, scale=1 / 8, temperature=1 / 64),
    "logit scale (Granite)": lambda g, dtype: gaussian(g, dtype, scale=32.0, logit_scale=0.125),
    # Gemma 2's cap, logits up to three times above it
    "B73 softcap": lambda g, dtype: gaussian(g, dtype, scale=25.0, softcap=30.0),
    "B73 softcap, scale and temperature": lambda g, dtype: gaussian(
        g, dtype, scale=25.0, softcap=30.0, logit_scale=0.75, temperature=0.625
    ),
    # tanh' is 1e-5: 1 - tanh^2 would be mostly rounding
    "softcap, saturated": lambda g, dtype: gaussian(g, dtype, scale=40.0, softcap=30.0),
    # e^-2|u| underflows in some columns
    "softcap far below the logits": lambda g, dtype: gaussian(g, dtype, scale=400.0, softcap=4.0),
    # tanh is nearly linear: (1 - e) / (1 + e) cancels
    "softcap far above the logits": lambda g, dtype: gaussian(g, dtype, softcap=1024.0),
    # up to the end of tanh's series
    "softcap a hundred times the logits": lambda g, dtype: flat(g, dtype, 6, 900, softcap=101.0),
    "softcap, minus infinity": lambda g, dtype: minus_infinity(g, dtype)._replace(options={"softcap": 30.0}),
}


@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("values", VALUES)
def test_values(backend: str, values: str, dtype: torch.dtype, generator: Generator) -> None:
    if values == "shared offset of 1e6" and dtype == torch.float16:
        pytest.skip("float16 ends at 65504")
    case = VALUES[values](generator, dtype).to(host_device.device())
    assert_exact(case, random_upstream(generator, case.targets.shape[0], host_device.device()))


@kernels
@pytest.mark.parametrize("values", VALUES)
def test_values_in_float64(backend: str, values: str, generator: Generator) -> None:
    """The definition itself has float64's rounding; logits of 1e6 are 1e-10 apart."""
    case = VALUES[values](generator, torch.float64).to(host_device.device())
    upstream = random_upstream(generator, case.targets.shape[0], host_device.device())
    limit = 1e-9 if values == "shared offset of 1e6" else 1e-12
    close = {"rtol": limit, "atol": limit}
    torch.testing.assert_close(run(all_stats, case, upstream), run(exact_stats, case, upstream), **close)


@pytest.mark.parametrize("only", DIFFERENTIABLE)
@pytest.mark.parametrize("values", ["confident", "minus infinity", "B73 softcap"])
def test_gradient_of_one_statistic(backend: str, values: str, only: str, generator: Generator) -> None:
    """No larger term hides its error."""
    case = VALUES[values](generator, torch.float32).to(host_device.device())
    upstream = random_upstream(generator, case.targets.shape[0], host_device.device())
    assert_exact(case, {only: upstream[only]})


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=name_of)
def test_half_precision_is_rounded_once(backend: str, dtype: torch.dtype, generator: Generator) -> None:
    """Statistics of 16-bit logits are those of the same logits in float32; the gradient is its rounded one."""
    device = host_device.device()
    case = gaussian(generator, dtype, temperature=0.75).to(device)
    upstream = random_upstream(generator, case.targets.shape[0], device)
    stats, dlogits = run(all_stats, case, upstream)
    wide_stats, wide_dlogits = run(all_stats, case._replace(logits=case.logits.float()), upstream)
    torch.testing.assert_close(stats, wide_stats, rtol=1e-6, atol=1e-6)
    half_ulp = torch.finfo(dtype).eps / 2
    smallest = torch.finfo(dtype).smallest_normal * half_ulp
    torch.testing.assert_close(dlogits.float(), wide_dlogits, rtol=1.01 * half_ulp, atol=smallest)


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float64), ids=name_of)
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf], ids=["NaN", "-NaN", "inf"])
@pytest.mark.parametrize(
    "column", [0, 700, SEGMENT, 9000], ids=["first", "inside", "second segment", "past the last vector"]
)
def test_nan_stays_visible_in_its_row(
    backend: str, column: int, bad: float, dtype: torch.dtype, generator: Generator
) -> None:
    case = gaussian(generator, dtype, n=3)
    case.targets[1] = 1500
    case.logits[1, column] = torch.tensor(math.nan).copysign(torch.tensor(bad)) if math.isnan(bad) else bad
    case = case.to(host_device.device())
    stats, dlogits = run(all_stats, case, random_upstream(generator, 3, host_device.device()))
    for value in (stats.logp, stats.entropy, stats.log_sum_sq_probs):
        assert value.isnan().tolist() == [False, True, False]
    assert dlogits[1].isnan().all()
    assert dlogits[[0, 2]].isfinite().all()


def test_row_without_a_distribution_is_nan(backend: str, generator: Generator) -> None:
    """B09: a row that is -inf throughout has none; its neighbours do not notice."""
    case = gaussian(generator, torch.float32, n=3)
    case.logits[1] = -torch.inf
    case.targets[1] = 0
    case = case.to(host_device.device())
    stats, dlogits = run(all_stats, case, random_upstream(generator, 3, host_device.device()))
    for name in ("logp", "entropy", "lse", "log_sum_sq_probs"):
        assert getattr(stats, name).isnan().tolist() == [False, True, False], name
    assert not stats.is_top1[1]
    assert dlogits[1].isnan().all()
    assert dlogits[[0, 2]].isfinite().all()


# Layouts: every view gives what its contiguous copy gives, and the gradient reaches what it is a view of


class Layout(NamedTuple):
    shape: tuple[int, ...]  # of the leaf
    view: Callable[[Tensor], Tensor]


LAYOUTS = {
    "B102 [S, B, V] transposed": Layout((4, 2, 1003), lambda z: z.transpose(0, 1)),
    "B102 all but the last position": Layout((2, 5, 1003), lambda z: z[:, :-1]),
    "B102 last positions": Layout((2, 5, 1003), lambda z: z[:, -3:]),
    "B102 padded vocabulary": Layout((6, 1024), lambda z: z[:, :1003]),
    "B102 vocabulary from an odd offset": Layout((6, 1024), lambda z: z[:, 7:1010]),
    "B102 every other row": Layout((12, 1003), lambda z: z[::2]),
    "B102 expanded rows": Layout((1, 1003), lambda z: z.expand(6, 1003)),
    "B102 expanded sequences": Layout((1, 3, 1003), lambda z: z.expand(2, 3, 1003)),
    "B102 columns first": Layout((1003, 6), lambda z: z.T),  # column stride 6
    "B102 every other column": Layout((6, 9001), lambda z: z[:, ::2]),  # more than a segment is gathered
    "B102 expanded columns": Layout((6, 1), lambda z: z.expand(6, 1003)),  # column stride 0
    "[V]": Layout((1003,), lambda z: z),
    "[V] with stride": Layout((1003, 3), lambda z: z[:, 1]),
    "[B, T, G, V]": Layout((2, 3, 2, 1003), lambda z: z),
    "[B, T, G, V] permuted": Layout((2, 3, 2, 1003), lambda z: z.permute(2, 0, 1, 3)),  # no common row stride
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(backend: str, layout: str, dtype: torch.dtype, generator: Generator) -> None:
    shape, view = LAYOUTS[layout]
    device = host_device.device()
    leaf = (4 * torch.randn(shape, generator=generator)).to(device, dtype).requires_grad_()
    tokens = view(leaf).shape[:-1]
    targets = random_targets(generator, tokens, view(leaf).shape[-1]).to(device)
    upstream = [(torch.randint(-8, 8, tokens, generator=generator) / 4 + 0.125).to(device) for _ in range(3)]

    def both_passes(logits: Tensor) -> tuple[TokenStats, Tensor]:
        stats = all_stats(logits, targets, temperature=0.75)
        (dleaf,) = torch.autograd.grad([getattr(stats, name) for name in DIFFERENTIABLE], leaf, upstream)
        return stats, dleaf

    stats, dleaf = both_passes(view(leaf))
    copy_stats, copy_dleaf = both_passes(view(leaf).contiguous())
    assert all(stat.shape == tokens for stat in stats)
    assert (dleaf.dtype, dleaf.shape) == (leaf.dtype, leaf.shape)
    # bit-equal from the kernels; PyTorch's own reductions may add in another order where strides differ
    exactly = backend != "reference"
    tolerance = 0 if exactly else 1e-5
    torch.testing.assert_close(stats, copy_stats, rtol=tolerance, atol=tolerance)
    tolerance = 0 if exactly else torch.finfo(dtype).eps + 1e-5
    torch.testing.assert_close(dleaf, copy_dleaf, rtol=tolerance, atol=tolerance)


# Options


@pytest.mark.parametrize(
    "form",
    [
        lambda t: 0.75,
        lambda t: torch.tensor(0.75),
        lambda t: torch.tensor(0.75, dtype=torch.float64),
        lambda t: torch.full(t.shape[:1], 0.75),
        lambda t: torch.full(t.shape, 0.75),
        lambda t: torch.full(t.shape, 0.75, dtype=torch.bfloat16),
        lambda t: torch.tensor(0.75).expand(t.shape),
    ],
    ids=["number", "0-d", "0-d float64", "[B]", "like targets", "bfloat16", "stride 0"],
)
def test_forms_of_temperature(backend: str, form: Callable[[Tensor], Any], generator: Generator) -> None:
    device = host_device.device()
    case = gaussian(generator, torch.float32, vocab=37).to(device)
    logits, targets = case.logits.view(2, 3, 37), case.targets.view(2, 3)
    temperature = form(targets)
    if isinstance(temperature, Tensor):
        temperature = temperature.to(device)
    stats = all_stats(logits, targets, temperature=temperature)
    divided = all_stats(logits / 0.75, targets)
    torch.testing.assert_close(stats, divided, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", ["[B]", "like targets"])
def test_temperature_reaches_its_own_rows(backend: str, shape: str, generator: Generator) -> None:
    device = host_device.device()
    case = gaussian(generator, torch.float32, vocab=37).to(device)
    logits, targets = case.logits.view(2, 3, 37), case.targets.view(2, 3)
    temperature = torch.tensor([0.5, 2.0]) if shape == "[B]" else torch.linspace(0.5, 3.0, 6).view(2, 3)
    temperature = temperature.to(device)
    stats = all_stats(logits, targets, temperature=temperature)
    divided = all_stats(logits / temperature.view(2, -1, 1), targets)
    torch.testing.assert_close(stats, divided, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["softcap", "logit_scale"])
def test_numbers_may_be_0d_tensors(backend: str, name: str, generator: Generator) -> None:
    device = host_device.device()
    case = gaussian(generator, torch.float32).to(device)
    upstream = random_upstream(generator, 6, device)
    plain, by_number, by_tensor = (
        run(all_stats, case._replace(options=options), upstream)
        for options in ({}, {name: 2.5}, {name: torch.tensor(2.5, device=device)})
    )
    torch.testing.assert_close(by_number, by_tensor, rtol=0, atol=0)
    assert not torch.equal(by_number[0].logp, plain[0].logp), "the option had no effect"


@pytest.mark.parametrize("outputs", [(), *([name] for name in OUTPUTS), ("lse", "is_top1"), OUTPUTS], ids=str)
def test_outputs(backend: str, outputs: Sequence[str], generator: Generator) -> None:
    """What is asked for has the same bits whatever else is; the rest is None."""
    case = gaussian(generator, torch.bfloat16).to(host_device.device())
    stats = token_stats(case.logits, case.targets, outputs=outputs)
    everything = all_stats(case.logits, case.targets)
    assert torch.equal(stats.logp, everything.logp)
    for name in OUTPUTS:
        if name in outputs:
            assert torch.equal(getattr(stats, name), getattr(everything, name)), name
        else:
            assert getattr(stats, name) is None, name


def test_defaults(backend: str, generator: Generator) -> None:
    case = gaussian(generator, torch.bfloat16).to(host_device.device())
    stats = rlkernels.token_stats(case.logits, case.targets)
    assert stats._fields == ("logp", "entropy", "lse", "log_sum_sq_probs", "mean_logits", "is_top1")
    assert [stat is None for stat in stats] == [False, False, True, True, True, True]
    assert stats.logp.dtype == stats.entropy.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=name_of)
def test_target_dtypes_and_strides(backend: str, dtype: torch.dtype, generator: Generator) -> None:
    """B104"""
    case = gaussian(generator, torch.float32, vocab=101)
    wide = torch.full((6, 4), 77, dtype=dtype)
    wide[:, 2] = case.targets.to(dtype)
    case, targets = case.to(host_device.device()), wide.to(host_device.device())[:, 2]
    assert targets.stride() == (4,)
    assert torch.equal(token_stats(case.logits, targets).logp, token_stats(case.logits, case.targets).logp)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_first_maximum_is_top1(backend: str, dtype: torch.dtype) -> None:
    """B105: of equal logits the first one wins, in one segment and across segments."""
    logits = torch.zeros(6, 9001, dtype=dtype)
    for row, columns in enumerate([(5, 6), (5, 6), (100, 4096), (100, 4096), (0, 9000), (0, 9000)]):
        logits[row, list(columns)] = 2.0
    targets = torch.tensor([5, 6, 100, 4096, 0, 9000])
    stats = all_stats(logits.to(host_device.device()), targets.to(host_device.device()))
    assert stats.is_top1.tolist() == [True, False] * 3


@pytest.mark.parametrize("label", [255, 1, -1, -100, 2**40, -(2**63)], ids=str)
def test_any_integer_marks_ignored_rows(backend: str, label: int, generator: Generator) -> None:
    """B13: also one inside [0, V)."""
    device = host_device.device()
    case = gaussian(generator, torch.float32, n=4, vocab=3, ignore_index=label).to(device)
    case.targets[:] = torch.tensor([0, 2, label, 0])
    stats, dlogits = run(all_stats, case, random_upstream(generator, 4, device))
    assert [float(stat[2]) for stat in stats] == [0.0] * 6
    assert (dlogits[2] == 0).all()
    kept = case.targets != label
    alone = token_stats(case.logits[kept], case.targets[kept])
    assert torch.equal(stats.logp[kept], alone.logp)
    assert (dlogits[kept] != 0).all()


# Bounds, and softcaps that saturate


@pytest.mark.parametrize("vocab", [32003, 129920, 151936, 262144], ids="V={}".format)
def test_bounds(backend: str, vocab: int, generator: Generator) -> None:
    """B06: a probability is at most 1, and an entropy at most that of the uniform distribution."""
    case = gaussian(generator, torch.float32, n=3, vocab=vocab)
    case.logits[1] *= 10  # a single column has most of the mass
    case.logits[2] /= 100  # nearly uniform
    case.targets[1] = case.logits[1].argmax()
    case = case.to(host_device.device())
    stats = token_stats(case.logits, case.targets)
    assert (stats.logp <= 0).all()
    assert (stats.entropy >= 0).all()
    assert (stats.entropy <= math.log(vocab) * (1 + 1e-6)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_softcap_of_nearly_certain_tokens(backend: str, dtype: torch.dtype, generator: Generator) -> None:
    """The target's gradient is 1 - p of the very capped logits that the statistics saw; 0 where there is one column."""
    if backend == "reference":
        pytest.skip("float32 cancels there")
    peaks = torch.tensor([20.0, 25.0, 30.0])
    logits = torch.randn(3, 50, generator=generator).scatter(1, torch.zeros(3, 1, dtype=torch.int64), peaks[:, None])
    for width in (50, 1):
        leaf = logits[:, :width].to(dtype).requires_grad_()
        exact = leaf.detach().double().requires_grad_()
        for values in (leaf, exact):
            token_stats(values, torch.zeros(3, dtype=torch.int64), softcap=30.0, temperature=0.7).logp.sum().backward()
        if width == 1:
            assert (leaf.grad == 0).all()
        else:
            torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=2e-2, atol=2e-8)


# The C++ kernels: one body for each instruction set, chosen at run time


@pytest.fixture(params=[] if backends.why_unavailable("cpu") else importlib.import_module(NATIVE).available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    native = importlib.import_module(NATIVE)
    selected = native.current_isa()
    rlkernels.set_backend("cpu")
    native.set_isa(request.param)
    yield request.param
    native.set_isa(selected)


@pytest.mark.parametrize("values", VALUES)
def test_values_on_every_isa(isa: str, values: str, generator: Generator) -> None:
    """In float32; how other dtypes are loaded and stored is shown by the tails."""
    test_values("cpu", values, torch.float32, generator)


# four vectors of 16 lanes at a time, then one vector, then single columns: every remainder of each
TAILS = (*range(1, 18), 31, 33, 47, 49, *range(63, 66), *range(79, 82), 127, 129, SEGMENT - 1, SEGMENT + 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("options", [{}, {"softcap": 4.0}], ids=["plain", "softcap"])
def test_every_tail_on_every_isa(isa: str, options: dict[str, float], dtype: torch.dtype, generator: Generator) -> None:
    for vocab in TAILS:
        case = flat(generator, dtype, 8, vocab, **options)
        assert_exact(case, random_upstream(generator, 8))


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float64), ids=name_of)
def test_nan_on_every_isa(isa: str, dtype: torch.dtype, generator: Generator) -> None:
    for column in (0, 700, SEGMENT, 9000):
        for bad in (math.nan, -math.nan, math.inf):
            test_nan_stays_visible_in_its_row("cpu", column, bad, dtype, generator)


# whole cache lines, of which the last columns are whole rounds and single vectors; rows that start anywhere
@pytest.mark.parametrize("vocab", [SEGMENT + 5 * 32, SEGMENT + 163])
@pytest.mark.parametrize("softcap", [None, 4.0], ids=["plain", "softcap"])
@pytest.mark.parametrize("dtype", (*DTYPES, torch.float64), ids=name_of)
def test_gradients_past_the_caches_on_every_isa(
    isa: str, dtype: torch.dtype, softcap: float | None, vocab: int, generator: Generator
) -> None:
    """From 32 MiB on they are written by other instructions: the bits are those of smaller parts."""
    n = (32 << 20) // (vocab * dtype.itemsize) + 1
    targets = torch.randint(vocab, (n,), generator=generator).masked_fill(torch.arange(n) % 5 == 0, IGNORE)
    upstream = torch.randn(2, n, generator=generator)
    half = n // 2 + 1
    noise = 3 * torch.randn(2 * vocab, generator=generator)
    logits = torch.stack([noise[i % vocab :][:vocab] for i in range(n)]).to(dtype)

    def of_statistics(leaf: Tensor, rows: slice) -> Tensor:
        stats = token_stats(leaf, targets[rows], outputs=("entropy",), softcap=softcap)
        return (stats.logp * upstream[0, rows] + stats.entropy * upstream[1, rows]).sum()

    def of_one_sweep(leaf: Tensor, rows: slice, entropy_coef: float) -> Tensor:
        batch = rlkernels.PolicyBatch(targets[rows, None], upstream[0, rows])
        objective = rlkernels.GRPO(entropy_coef=entropy_coef, entropy_reduction="token_sum")
        return rlkernels.policy_loss(leaf[:, None], batch, objective, reduction="token_sum", softcap=softcap).loss

    for loss in (of_statistics, partial(of_one_sweep, entropy_coef=0.0), partial(of_one_sweep, entropy_coef=0.1)):
        whole, *parts = (
            torch.autograd.grad(loss(leaf, rows), leaf)[0]
            for rows in (slice(None), slice(half), slice(half, None))
            for leaf in [logits[rows].clone().requires_grad_()]
        )
        assert torch.equal(whole, torch.cat(parts))


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=name_of)
def test_ties_are_rounded_to_even_on_every_isa(isa: str, dtype: torch.dtype) -> None:
    """Equal logits: a gradient is exactly -u / 128, for u half way between two numbers of the dtype."""
    u = 1 + (2 * torch.arange(64) + 1) * torch.finfo(dtype).eps / 2
    logits = torch.zeros(len(u), 128, dtype=dtype, requires_grad=True)
    logp = token_stats(logits, torch.full((len(u),), 127)).logp
    (gradient,) = torch.autograd.grad(logp, logits, u)
    expected = (-u / 128).to(dtype)
    assert torch.equal(gradient[:, :127], expected[:, None].expand(-1, 127))
