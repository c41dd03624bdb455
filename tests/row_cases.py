"""The row kernels of Triton and of CUDA, rows for them, and what the definition makes of those."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import NamedTuple

import host_device
import pytest
import torch
from tolerance import CONSTANT, assert_as_exact_as_torch
from torch import Generator, Tensor

from rlkernels import backends, reference
from rlkernels.backends import cuda
from rlkernels.ops.rows import Rows, RowStats, SavedStats, Tile, Upstream, Wanted, compute_dtype, empty_row_stats
from rlkernels.schedules import SEGMENT

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
EVERYTHING = Wanted(*[True] * len(Wanted._fields))
PLAIN = Wanted(entropy=True, lse=True, log_sum_sq_probs=False, mean_logits=False, is_top1=False)  # as losses need
STATISTICS = ("logp", "entropy", "lse", "log_sum_sq_probs", "mean_logits")
IGNORE = -100
MANY_SEGMENTS = 65 * SEGMENT + 1  # more than CUDA's kernels merge at once
MANY, FEW = 1, 100  # rows, for a device of so many multiprocessors: few are split

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


class Case(NamedTuple):
    logits: Tensor  # [outer, inner, V] float64; copied to another dtype with its strides and offset
    targets: Tensor
    temperature: Tensor | float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0


def gaussian(vocab: int, generator: Generator, count: int = 3) -> Case:
    logits = 4 * torch.randn(1, count, vocab, dtype=torch.float64, generator=generator)
    return Case(logits, torch.randint(vocab, (count,), generator=generator))


def odd_strides(generator: Generator) -> Case:
    """Rows that start at every remainder of 16 bytes, and not at the storage's beginning."""
    stored = 4 * torch.randn(2, 12, 9007, dtype=torch.float64, generator=generator)
    return Case(stored[:, 1:5, 3:9004], torch.randint(9001, (8,), generator=generator))


def columns_apart(generator: Generator) -> Case:
    stored = 4 * torch.randn(5003, 3, dtype=torch.float64, generator=generator)
    return Case(stored.T.unsqueeze(0), torch.randint(5003, (3,), generator=generator))


def scaled(generator: Generator) -> Case:
    temperature = torch.tensor([0.3, 0.7, 1.0, 1.3, 4.0])
    return gaussian(5003, generator, 5)._replace(temperature=temperature, logit_scale=1.7)


def capped(case: Case) -> Case:
    """With logits on either side of the cap."""
    return case._replace(logit_scale=5 * case.logit_scale, softcap=30.0)


def with_ignored(generator: Generator) -> Case:
    case = gaussian(1003, generator, 5)
    case.targets[[0, 3]] = IGNORE
    case.logits[0, 3] = torch.nan
    return case._replace(temperature=torch.tensor([1.0, 2.0, 1.0, -1.0, 1.0]))


def minus_infinity(generator: Generator) -> Case:
    case = gaussian(9001, generator, 5)
    logits = case.logits[0]
    logits[0, :SEGMENT] = -torch.inf  # the first segment
    logits[1, SEGMENT:] = -torch.inf  # all but the first
    logits[2, case.targets[2]] = -torch.inf
    logits[3, :-1] = -torch.inf  # all but the last column
    logits[4, ::2] = -torch.inf
    return case


def common_offset(generator: Generator) -> Case:
    case = gaussian(1003, generator, 5)
    return case._replace(logits=case.logits + 1e6)


def confident(generator: Generator) -> Case:
    case = gaussian(1003, generator, 15)
    lead = torch.tensor([8.0, 12.0, 60.0], dtype=torch.float64).repeat(5)
    case.logits[0, torch.arange(15), case.targets] = case.logits[0].amax(-1) + lead
    return case


CASES: dict[str, Callable[[Generator], Case]] = {
    "one column": lambda g: gaussian(1, g),  # probability 1 exactly
    "fewer columns than 16 bytes hold": lambda g: gaussian(5, g),
    "fewer columns than threads": lambda g: gaussian(31, g),
    "odd vocabulary": lambda g: gaussian(1003, g),  # part of a segment
    "one segment": lambda g: gaussian(SEGMENT, g),
    "a segment and a column": lambda g: gaussian(SEGMENT + 1, g),
    "whole segments": lambda g: gaussian(2 * SEGMENT, g),  # nothing masked
    "segments and a column": lambda g: gaussian(3 * SEGMENT + 1, g),
    "one row": lambda g: gaussian(5000, g, 1),
    "no rows": lambda g: gaussian(1003, g, 0),  # no launch
    "odd strides": odd_strides,  # two row strides, rows not aligned
    "odd strides, softcap": lambda g: capped(odd_strides(g)),
    "columns apart": columns_apart,
    "columns apart, softcap": lambda g: capped(columns_apart(g)),
    "temperature a row": scaled,
    "temperature a row, softcap": lambda g: capped(scaled(g)),
    "ignored": with_ignored,  # whatever their logits and temperature hold
    "minus infinity": minus_infinity,
    "minus infinity, softcap": lambda g: minus_infinity(g)._replace(softcap=30.0),  # finite, unlike padding
    "common offset": common_offset,  # p rebuilt from lse would be lost
    "confident": confident,  # 1 - p cancels
}


NOT_COMPARABLE = {
    ("common offset", torch.float16): "float16 ends at 65504",
    ("common offset", torch.float64): "the definition differentiates lse through its rounded value",
    ("confident", torch.float64): "the definition cancels as well, so it is not exact",
}


def targets_in_every_tile(generator: Generator, vocab: int = 9001) -> Case:
    """Targets at the ends of segments, one that is the highest logit, and an ignored row of NaN."""
    case = gaussian(vocab, generator, 7)
    case.targets[:4] = torch.tensor([0, SEGMENT - 1, SEGMENT, vocab - 1])
    case.targets[4] = case.logits[0, 4].argmax()
    case.targets[5] = IGNORE
    case.logits[0, 5] = torch.nan
    return case


TILED: dict[str, Callable[[Generator], Case]] = {
    "vocabulary of 16s": lambda g: targets_in_every_tile(g, 8240),
    "odd vocabulary": targets_in_every_tile,  # rows of whole tiles are aligned, others are not
    "softcap": lambda g: capped(targets_in_every_tile(g)._replace(temperature=0.7, logit_scale=1.3)),
    "minus infinity": minus_infinity,
    "temperature a row": lambda g: capped(scaled(g)),  # the wider tile is the whole row
}


def in_dtype(logits: Tensor, dtype: torch.dtype, device: str) -> Tensor:
    """With the strides, and the distance from the storage's beginning, in elements."""
    count = logits.untyped_storage().nbytes() // logits.itemsize
    stored = torch.empty(0, dtype=logits.dtype).set_(logits.untyped_storage(), 0, (count,))
    return stored.to(device, dtype).as_strided(logits.shape, logits.stride(), logits.storage_offset())


def make_rows(case: Case, dtype: torch.dtype, device: str) -> Rows:
    def number(value: Tensor | float) -> Tensor:
        # rounded to float32 whatever the dtype, so that all compute with the same numbers
        return torch.as_tensor(value, dtype=torch.float32).to(device, compute_dtype(dtype)).reshape(-1)

    return Rows(
        in_dtype(case.logits, dtype, device),
        case.targets.to(device),
        number(case.temperature),
        None if case.softcap is None else number(case.softcap),
        number(case.logit_scale),
        IGNORE,
    )


def in_float64(rows: Rows) -> Rows:
    return Rows(*(value.double() if torch.is_tensor(value) and value.is_floating_point() else value for value in rows))


def upstream_of(rows: Rows) -> Upstream:
    """Gradients of either sign, none of them 0, that every dtype holds exactly."""
    n = rows.targets.shape[0]
    gradients = torch.arange(3 * n).reshape(3, n) * 5 % 17 / 4 - 2.125
    return Upstream(*gradients.to(rows.logits.device, compute_dtype(rows.logits.dtype)).unbind(0))


def unwritten_stats(rows: Rows, wanted: Wanted) -> RowStats:
    outputs = empty_row_stats(rows, wanted)
    for output in outputs:
        output.fill_(True if output.dtype == torch.bool else torch.nan)
    return outputs


def each_alone() -> Iterator[tuple[str, Wanted]]:
    for index, name in enumerate(Wanted._fields):
        yield name, Wanted(*(i == index for i in range(len(Wanted._fields))))


def tiles_of(rows: Rows, width: int) -> Iterator[tuple[Rows, Tile]]:
    """Tiles of the rows from left to right, each with logits of its own."""
    vocab = rows.logits.shape[-1]
    for start in range(0, vocab, width):
        logits = rows.logits[..., start : start + width].clone(memory_format=torch.contiguous_format)
        yield rows._replace(logits=logits), Tile(start, vocab)


class RowKernels(NamedTuple):
    """A backend's kernels, as the operations call them."""

    backend: str
    device: str
    stats: ModuleType  # token_stats_forward, token_stats_backward, empty_states
    sweep: ModuleType  # scale_unless_one
    prefixes: ModuleType  # prefix_counts
    prefix_block: int  # positions that are counted at once
    stored: Callable[[Tensor, torch.dtype], Tensor]  # what storing makes of values of the compute dtype

    def forward(self, rows: Rows, wanted: Wanted = EVERYTHING) -> RowStats:
        outputs = unwritten_stats(rows, wanted)
        self.stats.token_stats_forward(rows, outputs)
        return outputs

    def forward_in_tiles(self, rows: Rows, wanted: Wanted = EVERYTHING) -> RowStats:
        outputs = unwritten_stats(rows, wanted)
        states = self.stats.empty_states(rows.targets.shape[0], rows.logits).fill_(torch.nan)
        for tile_rows, tile in tiles_of(rows, SEGMENT):
            self.stats.token_stats_forward(tile_rows, outputs, tile, states)
        return outputs

    def backward(self, rows: Rows, outputs: RowStats, upstream: Upstream, skew: int = 0) -> Tensor:
        """Into memory that begins `skew` elements after a multiple of 16 bytes."""
        memory = rows.logits.new_full((skew + rows.logits.numel(),), torch.nan)
        dlogits = memory[skew:].view(rows.logits.shape)
        self.stats.token_stats_backward(rows, saved_of(outputs), upstream, dlogits)
        return dlogits

    def backward_in_tiles(
        self, rows: Rows, outputs: RowStats, upstream: Upstream, width: int, dtarget: Tensor | None
    ) -> Tensor:
        """Each tile's gradient in the place of its logits; `[N, V]`."""
        dlogits = []
        for tile_rows, tile in tiles_of(rows, width):
            logits = tile_rows.logits
            self.stats.token_stats_backward(tile_rows, saved_of(outputs), upstream, logits, tile, dtarget)
            dlogits.append(logits[0])
        return torch.cat(dlogits, -1)

    def prefix_counts(self, ids: Tensor, lengths: Tensor, group_of: Tensor, groups: int) -> Tensor:
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(group_of, minlength=groups).cumsum(0)])
        counts = torch.full(ids.shape, -1, dtype=torch.int32, device=self.device)
        arguments = (ids, lengths, group_of.argsort(stable=True), starts)
        self.prefixes.prefix_counts(*(value.to(self.device) for value in arguments), counts)
        return counts.cpu()


def saved_of(outputs: RowStats) -> SavedStats:
    return SavedStats(outputs.row_max, outputs.log_sum_exp, outputs.entropy)


# CPU tensors: where host_device.use() has made them run there
CUDA = RowKernels("cuda", host_device.device(), cuda, cuda, cuda, 256, Tensor.to)


def stored_by_interpreter(values: Tensor, dtype: torch.dtype) -> Tensor:
    """It truncates to bfloat16 where a GPU rounds."""
    if dtype == torch.bfloat16:
        values = (values.view(torch.int32) & -(1 << 16)).view(torch.float32)
    return values.to(dtype)


def triton_kernels() -> RowKernels:
    """On a GPU, or in the interpreter."""
    pytest.importorskip("triton")
    from rlkernels.triton_kernels import configs, policy_sweep, prefix_counts, token_stats

    stored = stored_by_interpreter if backends.triton_is_interpreted else Tensor.to
    return RowKernels(
        "triton", host_device.device(), token_stats, policy_sweep, prefix_counts, configs.PREFIX_TOKENS.block, stored
    )


def reference_passes(rows: Rows, upstream: Upstream) -> tuple[RowStats, Tensor]:
    logits = rows.logits.detach().requires_grad_()
    outputs = reference.row_stats(rows._replace(logits=logits))
    gradients = [d.to(outputs.logp.dtype) for d in upstream]
    (dlogits,) = torch.autograd.grad([outputs.logp, outputs.entropy, outputs.lse], logits, gradients)
    return RowStats(*(value.detach() for value in outputs)), dlogits


def pytorch_passes(kernels: RowKernels, rows: Rows, upstream: Upstream) -> tuple[RowStats, Tensor]:
    """What PyTorch makes of rows in their own dtype, its gradient stored as the kernels store theirs."""
    compute = compute_dtype(rows.logits.dtype)
    stats, dlogits = reference_passes(rows._replace(logits=rows.logits.to(compute)), upstream)
    return stats, kernels.stored(dlogits, rows.logits.dtype)


def with_term(magnitude: float, *results: Tensor) -> list[Tensor]:
    """Results whose tolerance is also relative to `magnitude`, which cancelled in them."""
    return [torch.cat([x.double().flatten(), x.new_full((1,), magnitude, dtype=torch.float64)]) for x in results]


def assert_both_passes_match_the_definition(kernels: RowKernels, rows: Rows) -> None:
    upstream = upstream_of(rows)
    outputs = kernels.forward(rows)
    dlogits = kernels.backward(rows, outputs, upstream)

    own, own_dlogits = pytorch_passes(kernels, rows, upstream)
    exact, exact_dlogits = reference_passes(in_float64(rows), upstream)
    dtype, compute = rows.logits.dtype, compute_dtype(rows.logits.dtype)
    # z is softcap / temperature times a tanh that is rounded near 1
    capped_z = 0.0 if rows.softcap is None else (rows.softcap / rows.temperature).max().item()
    assert outputs.is_top1.equal(exact.is_top1)
    for field in STATISTICS:
        results = (getattr(stats, field) for stats in (outputs, own, exact))
        # the sum of exponentials is at least 1, and so is what it is rounded in
        assert_as_exact_as_torch(*with_term(max(1.0, capped_z), *results), compute, field)
    largest = exact_dlogits.abs().max().item() if exact_dlogits.numel() else 0.0
    lost_in_z = capped_z * CONSTANT[compute] / CONSTANT[dtype]
    assert_as_exact_as_torch(*with_term(largest * lost_in_z, dlogits, own_dlogits, exact_dlogits), dtype, "dlogits")


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.nan_to_num(nan=123.0).equal(b.nan_to_num(nan=123.0)) and a.isnan().equal(b.isnan())


def prefix_counts_by_definition(ids: Tensor, lengths: Tensor, group_of: Tensor) -> Tensor:
    """Every pair and every position by itself."""
    inside = torch.arange(ids.shape[1]) < lengths[:, None]
    shared = (ids[:, None] == ids).cummin(-1).values & inside & (group_of[:, None] == group_of)[..., None]
    return torch.where(inside, shared.sum(1), 1).int()
