"""What holds for every input: random shapes, strides, dtypes, masks, packings and options against float64.

Hypothesis draws what a case is made of and shrinks that; the numbers come from a generator whose seed it draws.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tolerance import CONSTANT
from torch import Generator, Tensor

import rlkernels
from rlkernels import (
    CISPO,
    DPPO,
    DRO,
    GMPO,
    GRPO,
    GSPO,
    LUSPO,
    NFT,
    SAPO,
    VESPO,
    GSPOToken,
    Metrics,
    PolicyBatch,
    Reinforce,
    checks,
    credit,
    global_normalizer,
    linear_token_stats,
    token_stats,
)
from rlkernels.stats import OUTPUTS, TokenStats

INF, NAN = math.inf, math.nan
DIFFERENTIABLE = ("logp", "entropy", "lse")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
COMPARED = ("cpu", "cuda", "triton")
SLOWNESS = {"cpu": 1, "reference": 2, "cuda": 2, "triton": 12}
compared = pytest.mark.parametrize("backend", COMPARED, indirect=True)


def for_all(backend: str, examples: int, property_: Callable[..., None], *drawn: st.SearchStrategy[Any]) -> None:
    """Of so many examples those that an interpreted or emulated backend has time for."""
    run = settings(
        max_examples=max(5, examples // SLOWNESS[backend]),
        deadline=None,
        database=None,
        derandomize="RLKERNELS_TEST_SEED" in os.environ,
        phases=tuple(Phase) if backend == "cpu" else (Phase.generate,),  # shrinking would take minutes
        suppress_health_check=list(HealthCheck),
    )(given(*drawn)(property_))
    try:
        run()
    finally:
        rlkernels.set_backend(backend)


seeds = st.integers(0, 2**32 - 1)


def drawn_from(seed: int) -> Generator:
    return Generator().manual_seed(seed)


def same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


# Statistics


ROW_KINDS: dict[str, Callable[[Tensor, Generator], Tensor]] = {
    "as drawn": lambda row, g: row,
    "rounded": lambda row, g: row.round(),  # ties
    "minus infinity": lambda row, g: torch.where(torch.rand(len(row), generator=g) < 0.5, -INF, row),
    "one finite": lambda row, g: torch.full_like(row, -INF).index_fill(0, _column(row, g), 1.0),
    "offset": lambda row, g: row + 3e4,
    "far offset": lambda row, g: row - 1e7,
    "certain": lambda row, g: row.index_add(0, _column(row, g), row.new_tensor([30.0])),
    "one huge": lambda row, g: row.index_fill(0, _column(row, g), 1e30),
    "one hugely negative": lambda row, g: row.index_fill(0, _column(row, g), -1e30),
    "tiny": lambda row, g: row * 1e-30,
}
BAD_ROWS: dict[str, Callable[[Tensor, Generator], Tensor]] = {
    "NaN": lambda row, g: row.index_fill(0, _column(row, g), NAN),
    "plus infinity": lambda row, g: row.index_fill(0, _column(row, g), INF),
    "nowhere": lambda row, g: torch.full_like(row, -INF),
}


def _column(row: Tensor, generator: Generator) -> Tensor:
    return torch.randint(len(row), (1,), generator=generator)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "part of wider rows": lambda x: torch.nn.functional.pad(x, (2, 3), value=NAN)[..., 2:-3],
    "every second row": lambda x: torch.stack([x, torch.full_like(x, NAN)], 1).flatten(0, 1)[::2],
    "every second column": lambda x: torch.stack([x, torch.full_like(x, NAN)], -1).flatten(-2)[..., ::2],
    "columns apart": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "one row for all": lambda x: x[:1].expand(x.shape),
}


class Sweep(NamedTuple):
    logits: Tensor
    targets: Tensor
    options: dict[str, Any]
    upstream: dict[str, Tensor]


@st.composite
def sweeps(draw: st.DrawFn, bad: bool = False) -> Sweep:
    g = drawn_from(draw(seeds))
    dtype = draw(st.sampled_from(DTYPES))
    vocab = draw(st.sampled_from([1, 2, 3, 5, 8, 15, 16, 17, 33, 63, 127, 129, 300, 4097]))
    shape = draw(st.sampled_from([(3,), (1,), (2, 2), (2, 1, 2), (0,), (2, 0)]))
    scale = draw(st.sampled_from([1.0, 0.0, 0.01, 4.0, 30.0]))
    logits = scale * torch.randn(*shape, vocab, generator=g, dtype=torch.float64)
    kinds = ROW_KINDS | (BAD_ROWS if bad else {})
    for row in logits.view(-1, vocab):
        kind = draw(st.sampled_from(list(kinds)))
        changed = kinds[kind](row, g)
        if kind not in BAD_ROWS and not changed.isfinite().any():
            changed = row
        row.copy_(changed)
    if dtype == torch.float16:
        logits = torch.where(logits.isfinite(), logits.clamp(-6e4, 6e4), logits)
    layout = draw(st.sampled_from(list(LAYOUTS)))
    logits = LAYOUTS[layout](logits.to(dtype)) if logits.numel() else logits.to(dtype)
    temperature: Any = draw(st.sampled_from([1.0, 0.7, "0-d", "[B]", "full", 1e-2, 1e3]))
    if isinstance(temperature, str):
        sizes = {"0-d": (), "[B]": shape[:1], "full": shape}[temperature]
        temperature = torch.rand(sizes, generator=g) + 0.25
    ignored = draw(st.sampled_from([-100, 0, vocab - 1, 255, -1]))
    is_ignored = torch.rand(shape, generator=g) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    options = {
        "temperature": temperature,
        "softcap": draw(st.sampled_from([None, None, 30.0, 1.0, 0.01, 1e3])),
        "logit_scale": draw(st.sampled_from([1.0, 1.0, 0.125, 5.0])),
        "ignore_index": ignored,
    }
    upstream = {
        name: draw(st.sampled_from([0.0, 1.0, 1.0])) * torch.randn(shape, generator=g, dtype=torch.float64)
        for name in DIFFERENTIABLE
    }
    targets = torch.where(is_ignored, ignored, torch.randint(vocab, shape, generator=g))
    return Sweep(logits, targets, options, upstream)


def both_passes(sweep: Sweep, backend: str, logits: Tensor) -> tuple[TokenStats, Tensor]:
    rlkernels.set_backend(backend)
    leaf = logits.detach().requires_grad_()
    stats = token_stats(leaf, sweep.targets, outputs=OUTPUTS, **sweep.options)
    total = sum((getattr(stats, name) * up.to(stats.logp.dtype)).sum() for name, up in sweep.upstream.items())
    (dlogits,) = torch.autograd.grad(total, leaf)
    return TokenStats(*(value.detach() for value in stats)), dlogits


def magnitude_of_z(sweep: Sweep) -> Tensor:
    """`[rows]`: what the options' roundings are relative to."""
    x = sweep.logits.double().flatten(0, -2) * sweep.options["logit_scale"]
    if sweep.options["softcap"] is not None:
        x = x.clamp(-sweep.options["softcap"], sweep.options["softcap"])
    x = torch.where(x.isfinite(), x, 0)
    return x.abs().amax(-1) / slope_of_z(sweep, 1.0)


def slope_of_z(sweep: Sweep, scale: float) -> Tensor:
    """`[rows]`: 1 / temperature is the largest dz/dx; its inverse with scale 1."""
    temperature = torch.as_tensor(sweep.options["temperature"]).double()
    while temperature.ndim and temperature.ndim < sweep.targets.ndim:
        temperature = temperature.unsqueeze(-1)
    return scale * temperature.expand(sweep.targets.shape).reshape(-1)


@compared
def test_statistics(backend: str) -> None:
    """-inf, ties, offsets, certainty and huge logits, in any dtype, strides and options, row by row."""

    def check(sweep: Sweep) -> None:
        dtype = sweep.logits.dtype
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        before = sweep.logits.clone()
        stats, dlogits = both_passes(sweep, backend, sweep.logits)
        same(sweep.logits.detach(), before)
        alike = both_passes(sweep, backend, sweep.logits.clone(memory_format=torch.contiguous_format))
        same((*stats, dlogits), (*alike[0], alike[1]))
        exact, exact_dlogits = both_passes(sweep, "reference", sweep.logits.double())
        own, own_dlogits = both_passes(sweep, "reference", sweep.logits.to(compute))
        used = (sweep.targets != sweep.options["ignore_index"]).flatten()
        z, vocab = magnitude_of_z(sweep), sweep.logits.shape[-1]
        for name in ("logp", *OUTPUTS[:-1]):
            actual, expected, torchs = (getattr(s, name).flatten().double() for s in (stats, exact, own))
            assert (actual[~used] == 0).all()
            bound = 2 * (torchs - expected).abs().nan_to_num() + CONSTANT[compute] * (1 + z + expected.abs())
            close = ((actual - expected).abs() <= bound) | (actual == expected)
            assert close.all(), (name, actual, expected)
            assert not actual.isnan().any()
        same(stats.is_top1, own.is_top1)
        assert (stats.logp <= 0).all() and (stats.entropy >= -CONSTANT[compute]).all()
        assert (stats.entropy <= math.log(vocab) * (1 + 1e-5) + CONSTANT[compute]).all()
        actual, expected = (d.flatten(0, -2).double() for d in (dlogits, exact_dlogits))
        torchs = own_dlogits.to(dtype).flatten(0, -2).double()
        assert actual.isfinite().all() or not torchs.isfinite().all()
        assert (actual[~used] == 0).all()
        largest = torch.stack([up.flatten().abs() for up in sweep.upstream.values()]).amax(0)
        terms = largest * sweep.options["logit_scale"] / slope_of_z(sweep, 1.0)
        # the definition itself differentiates through a rounded lse
        bound = 2 * (torchs - expected).abs().nan_to_num(INF).amax(-1)
        bound += CONSTANT[dtype] * expected.abs().amax(-1) + 50 * CONSTANT[compute] * terms * (1 + z)
        assert ((actual - expected).abs().amax(-1).nan_to_num() <= bound).all(), (actual, expected)

    for_all(backend, 150, check, sweeps())


def test_bad_rows_stay_alone(backend: str) -> None:
    """NaN, +inf and rows that are -inf throughout are NaN; every other row has the bits that it has without them."""

    def check(sweep: Sweep) -> None:
        rows = sweep.logits.flatten(0, -2)
        is_bad = rows.isnan().any(-1) | (rows == INF).any(-1)
        if sweep.options["softcap"] is None:
            is_bad |= (rows == -INF).all(-1)
        used = (sweep.targets != sweep.options["ignore_index"]).flatten()
        stats, dlogits = both_passes(sweep, backend, sweep.logits)
        harmless = torch.where(is_bad.view(*sweep.targets.shape, 1), 0.0, sweep.logits.double()).to(sweep.logits.dtype)
        clean, clean_dlogits = both_passes(sweep, backend, harmless)
        good = ~(is_bad & used)
        for value, expected in zip((*stats, dlogits), (*clean, clean_dlogits), strict=True):
            width = value.shape[sweep.targets.ndim :]
            same(value.reshape(-1, *width)[good], expected.reshape(-1, *width)[good])
        if sweep.options["softcap"] is None:
            assert not (stats.is_top1.flatten() & is_bad).any()
        nan_rows = is_bad & used & ~(rows == INF).any(-1)
        assert stats.logp.flatten()[nan_rows].isnan().all()
        assert stats.lse.flatten()[nan_rows].isnan().all()
        wants = torch.stack([up.flatten() != 0 for up in sweep.upstream.values()]).any(0)
        if sweep.options["softcap"] is None:
            assert dlogits.reshape(-1, rows.shape[-1])[is_bad & used & wants].isnan().all()

    for_all(backend, 60, check, sweeps(bad=True))


@compared
def test_any_label(backend: str) -> None:
    """A bad label raises where the host may look and else poisons its own row; an ignored one may be any integer."""

    def check(seed: int, label: int, ignored: int) -> None:
        g = drawn_from(seed)
        logits, targets = torch.randn(3, 7, generator=g), torch.randint(7, (3,), generator=g)
        targets = torch.where(targets == ignored, (ignored + 1) % 7, targets)
        good = token_stats(logits, targets, ignore_index=ignored)
        one_ignored = token_stats(logits, targets.index_fill(0, torch.tensor([1]), ignored), ignore_index=ignored)
        assert one_ignored.logp[1] == one_ignored.entropy[1] == 0
        others = torch.tensor([0, 2])
        same(one_ignored.logp[others], good.logp[others])
        if 0 <= label < 7 or label == ignored:
            return
        bad = targets.index_fill(0, torch.tensor([1]), label)
        with pytest.raises(ValueError, match=r"targets: expected labels in \[0, 7\)"):
            token_stats(logits, bad, ignore_index=ignored)
        if backend == "cpu":  # its C++ looks itself
            return
        with mock.patch.object(checks, "values_are_checked", lambda device: False):
            leaf = logits.clone().requires_grad_()
            stats = token_stats(leaf, bad, ignore_index=ignored)
            stats.logp.sum().backward()
        assert stats.logp.isnan().tolist() == [False, True, False]
        assert leaf.grad.isnan().any(-1).tolist() == [False, True, False]
        same(stats.logp[others].detach(), good.logp[others])

    int64s = st.one_of(st.integers(-3, 9), st.integers(-(2**63), 2**63 - 1))
    for_all(backend, 40, check, seeds, int64s, int64s)


# From hidden states


@compared
def test_linear_statistics(backend: str) -> None:
    """Any chunk, subset of gradients, bias, masked garbage and rows: float64's values, within what PyTorch loses."""

    def check(
        seed: int, sizes: tuple[int, int, int], chunk_bytes: int | None, needs: tuple[bool, ...], data: Any
    ) -> None:
        g = drawn_from(seed)
        rows, width, vocab = sizes
        dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
        with_bias, spoiled = data.draw(st.booleans()), data.draw(st.sampled_from([0.0, NAN, INF]))
        options = {
            "temperature": data.draw(st.sampled_from([1.0, 0.5])),
            "softcap": data.draw(st.sampled_from([None, 3.0])),
        }
        targets = torch.randint(vocab, (rows,), generator=g)
        ignored = torch.rand(rows, generator=g) < data.draw(st.sampled_from([0.0, 0.4, 1.0]))
        targets = torch.where(ignored, -100, targets)
        tensors = [torch.randn(*shape, generator=g).to(dtype) for shape in ((rows, width), (vocab, width), (vocab,))]
        tensors[0] = torch.where(ignored[:, None], spoiled, tensors[0])
        upstream = torch.randn(3, rows, generator=g, dtype=torch.float64)
        kept = data.draw(st.booleans())

        def run(name: str, wide: torch.dtype, **more: Any) -> list[Tensor]:
            rlkernels.set_backend(name)
            leaves = [t.to(wide).requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
            hidden, weight, bias = leaves
            named = {"bias": bias} if with_bias else {}
            stats = linear_token_stats(hidden, weight, targets, outputs=OUTPUTS, **named, **options, **more)
            wanted = [leaf for leaf in leaves[: 3 if with_bias else 2] if leaf.requires_grad]
            total = (stats.logp * upstream[0]).sum()
            if kept:
                total = total + (stats.entropy * upstream[1]).sum() + (stats.lse * upstream[2]).sum()
            gradients = torch.autograd.grad(total, wanted) if wanted else []
            assert [gradient.dtype for gradient in gradients] == [wide] * len(wanted)
            return [value.detach().double() for value in (*stats[:5], *gradients)]

        index = (~ignored).nonzero().squeeze(1)
        more = {"rows": index} if data.draw(st.booleans()) else {}
        actual = run(backend, dtype, chunk_bytes=chunk_bytes, **more)
        exact, own = run("reference", torch.float64), run("reference", dtype)
        for value, expected, torchs in zip(actual, exact, own, strict=True):
            if expected.numel() == 0:
                continue
            scale = max(1.0, expected.abs().max().item())
            loose = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
            bound = 2 * (torchs - expected).abs().max().item() + loose * scale
            assert value.isfinite().all()
            assert (value - expected).abs().max() <= bound

    sizes = st.tuples(st.sampled_from([0, 1, 2, 5]), st.sampled_from([1, 3, 8]), st.sampled_from([1, 2, 7, 300, 601]))
    chunks = st.sampled_from([None, 1, 1000, 20_000])
    for_all(backend, 60, check, seeds, sizes, chunks, st.tuples(*[st.booleans()] * 3), st.data())


# Losses


def numbers(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


@st.composite
def objectives(draw: st.DrawFn) -> Any:
    """Every class, every field."""
    reductions = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum")
    shared = {
        "log_ratio_clamp": draw(numbers(None, None, 0.3, 20.0, 1000.0)),
        "kl_coef": draw(numbers(0.0, 0.1, 2.0)),
        "entropy_coef": draw(numbers(0.0, 0.5, -0.2)),
        "entropy_reduction": draw(numbers(*reductions)),
    }
    if shared["kl_coef"]:
        shared |= {
            "kl_estimator": draw(numbers("k1", "k2", "k3")),
            "kl_clamp": draw(numbers(None, 0.1, 10.0)),
            "kl_importance_weighted": draw(st.booleans()),
        }
    level = {"level": draw(numbers("token", "sequence_mean", "sequence_product"))}
    of_sequence = {"level": draw(numbers("sequence_mean", "sequence_product"))}
    clip = {
        "clip_low": draw(numbers(0.0, 0.2, 0.5, 1.0, 2.0)),
        "clip_high": draw(numbers(0.0, 0.2, 0.28, 5.0, 1e9)),
        "dual_clip": draw(numbers(None, 1.5, 3.0)),
        "ratio_cap": draw(numbers(None, 0.5, 1.1, 4.0)),
    }
    share = {name: draw(numbers(0.0, 0.05, 0.2)) for name in ("threshold_low", "threshold_high")}
    makers: dict[str, Callable[[], Any]] = {
        "grpo": lambda: GRPO(**level, **clip, **shared),
        "gspo": lambda: GSPO(**of_sequence, **clip, **shared),
        "gspo_token": lambda: GSPOToken(**of_sequence, **clip, **shared),
        "luspo": lambda: LUSPO(**of_sequence, **clip, **shared),
        "gmpo": lambda: GMPO(
            log_clip_low=draw(numbers(0.1, 0.4)), clip_level=draw(numbers(None, "token", "sequence")), **shared
        ),
        "cispo": lambda: CISPO(
            ratio_max=draw(numbers(0.9, 1.2, 5.0)), ratio_min=draw(numbers(None, 0.0, 0.8)), **level, **shared
        ),
        "sapo": lambda: SAPO(
            tau_pos=draw(numbers(0.1, 1.0, 10.0)), tau_neg=draw(numbers(0.5, 20.0)), **level, **shared
        ),
        "nft": lambda: NFT(
            min_ratio=draw(numbers(1e-3, 0.5, 1.0, 2.0)),
            prompt_weight=draw(numbers("uniform", "failure_rate", "sqrt_failure_odds")),
            negative_weight=draw(numbers(0.0, 1.0, -1.0)),
            rate_clamp=draw(numbers((0.02, 0.98), (0.1, 0.1))),
            log_ratio_max=draw(numbers(0.1, 10.0, 200.0)),
            **level,
            **shared,
        ),
        "reinforce": lambda: Reinforce(**shared),
        "vespo": lambda: VESPO(k_neg=draw(numbers(0.0, 3.0)), **shared),
        "dppo": lambda: DPPO(
            divergence=draw(numbers("tv", "kl")), ratio_max=draw(numbers(None, 2.0)), **share, **shared
        ),
        "dro": lambda: DRO(beta=draw(numbers(0.1, 1.0)), **shared),
    }
    return makers[draw(st.sampled_from(list(makers)))]()


class Tokens(NamedTuple):
    """A batch by sequence, ragged: every per-token value lies in one row of `values` for all sequences in turn."""

    objective: Any
    lengths: list[int]
    values: dict[str, Tensor]  # [N] each: logp, entropy and the batch's
    by_sequence: dict[str, Tensor]  # [B] each
    reduction: str
    normalizer: Any
    factor: float


EXTREME = (0.0, 80.0, -80.0, 89.0, -89.0, 200.0, -200.0, 1e4, -1e4)


@st.composite
def token_batches(draw: st.DrawFn, extreme: bool = True) -> Tokens:
    g = drawn_from(draw(seeds))
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    count, sequences = sum(lengths), len(lengths)
    objective = draw(objectives())

    def normal(size: int = count) -> Tensor:
        return torch.randn(size, generator=g, dtype=torch.float64)

    def apart() -> Tensor:
        """Log ratios: small, large, or as large as floats get."""
        values = normal() * draw(numbers(0.0, 0.01, 0.3, 2.0))
        if extreme and draw(st.booleans()):
            picked = torch.randint(len(EXTREME), (count,), generator=g)
            values = torch.where(torch.rand(count, generator=g) < 0.25, torch.tensor(EXTREME).double()[picked], values)
        return values

    def zeroed(values: Tensor) -> Tensor:
        return torch.where(torch.rand(values.shape, generator=g) < draw(numbers(0.0, 0.3)), 0.0, values)

    logp = -torch.rand(count, generator=g, dtype=torch.float64) * draw(numbers(0.01, 1.0, 10.0))
    values = {"logp": logp, "entropy": 3 * torch.rand(count, generator=g, dtype=torch.float64)}
    by_sequence: dict[str, Tensor] = {}
    if draw(st.booleans()) or extreme:
        values["old_logp"] = logp - apart()
    if objective.kl_coef:
        values["ref_logp"] = logp + apart()
    values["mask"] = (torch.rand(count, generator=g) < draw(numbers(0.3, 0.8, 1.0))).double()
    if draw(st.booleans()):
        values["weight"] = zeroed(torch.rand(count, generator=g, dtype=torch.float64))
    has_weight = not isinstance(objective, VESPO) and draw(st.booleans())
    for name in ("advantages", "policy_weight") if has_weight else ("advantages",):
        place, size = draw(numbers((values, count), (by_sequence, sequences)))
        place[name] = zeroed(normal(size))
    if isinstance(objective, NFT):
        by_sequence["success_rate"] = torch.rand(sequences, generator=g, dtype=torch.float64)
    names = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "token_sum", "none")
    reduction = draw(numbers(*names))
    normalizer = None
    if reduction == "seq_mean_token_sum_norm" or (reduction != "none" and draw(st.booleans())):
        normalizer = draw(numbers(3.0, torch.tensor(7), torch.tensor(2.5), 0))
    return Tokens(objective, lengths, values, by_sequence, reduction, normalizer, draw(numbers(1.0, -2.0, 0.5)))


def rows_of(values: Tensor, lengths: list[int], width: int, fill: float) -> Tensor:
    """`[N]` -> padded `[B, width]`."""
    parts = values.split(lengths)
    return torch.stack([torch.nn.functional.pad(part, (0, width - len(part)), value=fill) for part in parts])


class Result(NamedTuple):
    loss: Tensor  # 0-d, or [N]
    dlogp: Tensor  # [N]
    dentropy: Tensor  # [N]
    metrics: Metrics


def evaluate(tokens: Tokens, layout: str, dtype: torch.dtype, garbage: float | None = None, more: int = 0) -> Result:
    """In a layout, `packed` or `padded` by so many `more`; `garbage` wherever nothing is trained."""
    width = max(tokens.lengths) + more
    count = sum(tokens.lengths)
    kept = tokens.values["mask"] != 0

    def laid_out(name: str, values: Tensor) -> Tensor:
        values = values.to(dtype)
        if garbage is not None and name != "mask":
            values = torch.where(kept, values, garbage)
        fill = 0.0 if name == "mask" or garbage is None else garbage
        return values if layout == "packed" else rows_of(values, tokens.lengths, width, fill)

    placed = {name: laid_out(name, values) for name, values in tokens.values.items()}
    leaf, entropy = placed.pop("logp").clone().requires_grad_(), placed.pop("entropy").clone().requires_grad_()
    by_sequence = {name: values.to(dtype)[:, None] for name, values in tokens.by_sequence.items()}
    extras = {name: by_sequence.pop(name) for name in ("success_rate",) if name in by_sequence}
    borders = torch.tensor([0, *torch.tensor(tokens.lengths).cumsum(0)]) if layout == "packed" else None
    batch = PolicyBatch(None, **placed, **by_sequence, extras=extras, cu_seqlens=borders)
    options = {"reduction": tokens.reduction, "normalizer": tokens.normalizer, "entropy": entropy}
    out = rlkernels.logp_policy_loss(leaf, batch, tokens.objective, **options)
    gradients = torch.autograd.grad((tokens.factor * out.loss).sum(), [leaf, entropy], allow_unused=True)

    def flat(values: Tensor | None) -> Tensor:
        if values is None:
            return torch.zeros(count, dtype=dtype)
        if layout == "packed":
            return values.detach()
        inside = torch.arange(width) < torch.tensor(tokens.lengths)[:, None]
        assert (values.detach()[~inside] == 0).all()
        return values.detach()[inside]

    loss = flat(out.loss) if tokens.reduction == "none" else out.loss.detach()
    return Result(loss, flat(gradients[0]), flat(gradients[1]), out.metrics)


def assert_results(actual: Result, expected: Result, tolerance: float) -> None:
    """Relative to the largest gradient, which is as large as the terms that cancel in the loss."""
    scale = max([1.0, *(x.abs().max().item() for x in (expected.dlogp, expected.loss) if x.numel())])
    for name in ("loss", "dlogp", "dentropy"):
        values = (getattr(result, name).double() for result in (actual, expected))
        torch.testing.assert_close(
            *values, rtol=tolerance, atol=tolerance * scale, msg=lambda text, n=name: f"{n}: {text}"
        )
    assert list(actual.metrics) == list(expected.metrics)
    ratio = max(1.0, expected.metrics["ratio_max"].double().item())
    # terms that cancel: of equal ratios far from 1, and of estimates that ratios multiply
    cancelling = {"ratio_variance": ratio**2, "ref_kl": 100 * ratio}
    for name, value in expected.metrics.items():
        assert actual.metrics[name].isfinite(), name
        atol = 1e-6 * cancelling.get(name, 1.0)
        torch.testing.assert_close(actual.metrics[name].double(), value.double(), rtol=1e-6, atol=atol, msg=name)


@compared
def test_losses(backend: str) -> None:
    """Every objective and option, ratios from 0 to beyond every limit: finite, and the definition's."""

    def check(tokens: Tokens, layout: str) -> None:
        rlkernels.set_backend(backend)
        actual = evaluate(tokens, layout, torch.float64)
        single = evaluate(tokens, layout, torch.float32)
        rlkernels.set_backend("reference")
        assert_results(actual, evaluate(tokens, layout, torch.float64), 1e-9)
        # an estimate of up to e^80 times a ratio of up to e^80 is more than float32 holds
        product = tokens.objective.kl_importance_weighted and tokens.objective.kl_clamp is None
        for result in (actual,) if product else (actual, single):
            assert all(value.isfinite().all() for value in result[:3])
            assert all(value.isfinite() for value in result.metrics.values())

    for_all(backend, 250, check, token_batches(), numbers("packed", "padded"))


def test_garbage_under_the_mask(backend: str) -> None:
    """Nothing that is not trained can be felt, by any objective: not a bit changes."""

    def check(tokens: Tokens, layout: str, garbage: float, dtype: torch.dtype) -> None:
        clean = evaluate(tokens, layout, dtype, garbage=0.0)
        dirty = evaluate(tokens, layout, dtype, garbage=garbage)
        same(dirty[:3], clean[:3])
        same(dict(dirty.metrics), dict(clean.metrics))

    garbage = numbers(NAN, INF, -INF, 1e38, -200.0)
    for_all(backend, 100, check, token_batches(), numbers("packed", "padded"), garbage, numbers(*DTYPES[::3]))


def test_layout_does_not_matter(backend: str) -> None:
    """Packed, padded to any width, sequences in another order, and in micro-batches: one loss, one gradient."""

    def check(tokens: Tokens, more: int, cut: int, turned: bool) -> None:
        packed = evaluate(tokens, "packed", torch.float64)
        assert_results(evaluate(tokens, "padded", torch.float64, garbage=NAN, more=more), packed, 1e-9)
        if tokens.reduction == "none":
            return
        order = list(range(len(tokens.lengths)))
        order = order[::-1] if turned else order
        borders = torch.tensor([0, *torch.tensor(tokens.lengths).cumsum(0)]).tolist()
        index = torch.cat([torch.arange(borders[i], borders[i + 1]) for i in order])
        parts = []
        normalizer, objective = tokens.normalizer, tokens.objective
        if normalizer is None:
            width = max(tokens.lengths)
            mask = rows_of(tokens.values["mask"], tokens.lengths, width, 0.0)
            normalizer = global_normalizer(mask, tokens.reduction)
        for chosen in (order[:cut], order[cut:]):
            if not chosen:
                continue
            inside = torch.cat([torch.arange(borders[i], borders[i + 1]) for i in chosen])
            part = tokens._replace(
                objective=objective,
                lengths=[tokens.lengths[i] for i in chosen],
                values={name: values[inside] for name, values in tokens.values.items()},
                by_sequence={name: values[torch.tensor(chosen)] for name, values in tokens.by_sequence.items()},
                normalizer=normalizer,
            )
            parts.append(evaluate(part, "packed", torch.float64))
        whole = Result(packed.loss, packed.dlogp[index], packed.dentropy[index], packed.metrics)
        together = Result(
            sum(part.loss for part in parts),
            torch.cat([part.dlogp for part in parts]),
            torch.cat([part.dentropy for part in parts]),
            Metrics.merge([part.metrics for part in parts]),
        )
        # the bonus adds up where its reduction is the loss's
        if objective.entropy_coef == 0 or objective.entropy_reduction == tokens.reduction:
            assert_results(together, whole, 1e-9)

    batches = token_batches(extreme=False)
    for_all(backend, 100, check, batches, st.integers(0, 3), st.integers(0, 4), st.booleans())


@compared
def test_losses_from_logits_and_hidden_states(backend: str) -> None:
    """The gradient reaches the logits and the head: of any layout, strides, dtype, mask and objective."""

    def check(objective: Any, seed: int, layout: str, strides: str, dtype: torch.dtype, spoiled: float) -> None:
        g = drawn_from(seed)
        sequences, width, vocab = 2, 3, 17
        count = sequences * width
        logits = torch.randn(count, vocab, generator=g).to(dtype)
        targets = torch.randint(vocab, (count,), generator=g)
        mask = torch.rand(count, generator=g) < 0.7
        if strides != "one row for all":
            logits[~mask] = spoiled
        old = -torch.rand(count, generator=g) * 3
        extras = {"success_rate": torch.rand(sequences, generator=g)}
        advantages = torch.randn(sequences, generator=g)
        named = {"mask": mask, "old_logp": old, "ref_logp": old + 0.1}
        if layout == "padded":
            named = {name: value.view(sequences, width) for name, value in named.items()}
            batch = PolicyBatch(targets.view(sequences, width), advantages, **named, extras=extras)
        else:
            borders = torch.tensor([0, 2, count])
            batch = PolicyBatch(targets, advantages, **named, extras=extras, cu_seqlens=borders)
        stored = LAYOUTS[strides](logits)
        options = {"reduction": "token_mean", "normalizer": 5.0}

        def from_logits(name: str, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            rlkernels.set_backend(name)
            leaf = logits.detach().requires_grad_()
            view = leaf.unflatten(0, (sequences, width)) if layout == "padded" else leaf
            out = rlkernels.policy_loss(view, batch, objective, temperature=0.7, **options)
            return out.loss.detach(), torch.autograd.grad(2 * out.loss, leaf)[0].double(), out.logp.flatten()

        def from_hidden(name: str) -> tuple[Tensor, Tensor, Tensor]:
            rlkernels.set_backend(name)
            unit = torch.where(mask[:, None], torch.eye(count), spoiled).to(dtype)
            leaf = torch.where(mask[:, None], logits, 0.0).T.contiguous().requires_grad_()
            unit = unit.view(sequences, width, count) if layout == "padded" else unit
            out = rlkernels.linear_policy_loss(unit, leaf, batch, objective, temperature=0.7, chunk_bytes=1, **options)
            return out.loss.detach(), torch.autograd.grad(2 * out.loss, leaf)[0].T.double(), out.logp.flatten()

        exact = from_logits("reference", stored.double())
        tolerance = {torch.float32: 1e-5, torch.float64: 1e-9, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
        results = [from_logits(backend, stored)]
        if strides == "contiguous":
            results.append(from_hidden(backend))
        for loss, gradient, logp in results:
            scale = max(1.0, exact[1].abs().max().item(), abs(exact[0].item()))
            torch.testing.assert_close(logp.double(), exact[2].double(), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(loss.double(), exact[0], rtol=2e-5, atol=2e-5 * scale)
            torch.testing.assert_close(gradient, exact[1], rtol=tolerance, atol=tolerance * scale)

    drawn = (objectives(), seeds, numbers("packed", "padded"), st.sampled_from(list(LAYOUTS)))
    for_all(backend, 80, check, *drawn, numbers(*DTYPES), numbers(0.0, NAN, INF))


# Credit


MASKED: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "whiten": lambda x, y, mask: credit.whiten(x, mask),
    "rollout weights of tokens": lambda x, y, mask: credit.rollout_weights(x, y, mask),
    "rollout weights of sequences": lambda x, y, mask: credit.rollout_weights(x, y, mask, level="sequence"),
    "rollout weights, geometric": lambda x, y, mask: credit.rollout_weights(x, y, mask, level="geometric", mode="mask"),
    "replay weights": lambda x, y, mask: credit.replay_weights(x, mask),
    "generalised advantages": lambda x, y, mask: tuple(
        torch.where(mask != 0, value, 0) for value in credit.generalized_advantages(x, y, mask, gamma=0.9, lam=0.9)
    ),
    "value loss": lambda x, y, mask: credit.value_loss(x, y, y + 1, mask),
    "process rewards": lambda x, y, mask: credit.implicit_process_rewards(x, y, mask, batch_norm=True),
    "PRIME": lambda x, y, mask: torch.where(
        mask != 0, credit.prime_advantages(x, torch.arange(4.0) % 3, mask, 2, whiten=True), 0
    ),
    "PRM loss": lambda x, y, mask: credit.implicit_prm_loss(x, y, mask, torch.tensor([0.0, 1.0, 1.0, 0.0])),
    "reference probability": lambda x, y, mask: credit.reference_probability_reward(x, mask),
    "VeriFree": lambda x, y, mask: credit.verifree_advantages(
        x, mask * (torch.arange(5) < 2), mask * (torch.arange(5) > 1), 2
    ),
    "pooled states": lambda x, y, mask: credit.pool_hidden(x[..., None], mask),
}


@pytest.mark.parametrize("name", MASKED)
def test_credit_reads_nothing_under_the_mask(name: str) -> None:
    def check(seed: int, share: float, garbage: float, dtype: torch.dtype) -> None:
        g = drawn_from(seed)
        mask = (torch.rand(4, 5, generator=g) < share).float()
        x, y = (-torch.rand(4, 5, generator=g, dtype=dtype) for _ in range(2))
        clean = MASKED[name](x, y, mask)
        dirty = MASKED[name](*(torch.where(mask != 0, value, garbage) for value in (x, y)), mask)
        same(dirty, clean)
        for value in clean if isinstance(clean, tuple) else (clean,):
            assert value.isfinite().all()

    drawn = (seeds, numbers(0.0, 0.3, 0.8), numbers(NAN, INF, -INF, 1e30), numbers(torch.float32, torch.float64))
    for_all("cpu", 25, check, *drawn)


@pytest.mark.parametrize("function", ["group_advantages", "leave_one_out_advantages"])
def test_groups_leave_no_trace_in_each_other(function: str) -> None:
    """In any order of rows, whatever stands in other groups or in rejected rows; exactly 0 for equal rewards."""

    def check(seed: int, groups: list[int], rejected: float, offset: float) -> None:
        g = drawn_from(seed)
        ids = torch.tensor(groups)
        rewards = torch.randint(3, ids.shape, generator=g).float() / 2 + offset
        rewards = torch.where(torch.rand(ids.shape, generator=g) < 0.2, rejected, rewards)
        advantages = getattr(credit, function)(rewards, ids)
        assert advantages.isfinite().all()
        order = torch.randperm(len(ids), generator=g)
        torch.testing.assert_close(getattr(credit, function)(rewards[order], ids[order]), advantages[order])
        for group in set(groups):
            own = ids == group
            torch.testing.assert_close(getattr(credit, function)(rewards[own], ids[own]), advantages[own])
            others_spoiled = torch.where(own, rewards, NAN)
            same(getattr(credit, function)(others_spoiled, ids)[own], advantages[own])
            valid = rewards[own][rewards[own].isfinite()]
            if len(valid.unique()) < 2:
                assert (advantages[own] == 0).all()

    ids = st.lists(st.integers(0, 3), min_size=1, max_size=10)
    for_all("cpu", 60, check, seeds, ids, numbers(NAN, INF, -INF), numbers(0.0, 0.1, 1e6))
