"""How the linear path cuts up `hidden @ weight.T`, so that `[N, V]` never exists.

Ways from hidden states to gradients, and what they cost: GEMMs of 2 N H V operations each, and bytes beyond inputs and
requested gradients.

| schedule | GEMMs | bytes |
|---|---|---|
| recompute | 4: logits, logits again, dhidden, dweight | a tile of logits + 4 N H |
| keep | 4 - k: a share k of the logits stays from forward to backward | `chunk_bytes` + 4 N H |
| direction | 2: logits, dlogp / dhidden | a tile of logits + 8 N H |
| gradient in forward | 3, and dweight read and written in float32 for each part of the rows | `chunk_bytes` + 4 N H |

A frozen head takes the direction. A trained one keeps as many logits as `chunk_bytes` holds, k = 0 being recomputation,
with the vocabulary outermost: dweight is finished tile by tile. Gradient in forward has the rows outermost, P parts of
whole sequences, and must hold a float32 dweight beside a part's logits. It asks for GEMMs that add to a float32 sum,
which PyTorch has on GPUs alone, for an objective and a reduction known in advance, and for logits that are not float16,
whose gradients vanish before a gradient scaler's factor arrives. With `BALANCE` GEMM operations in the time of a byte,
it is taken where 3 + 4 BALANCE P / N < 4 - k.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

SEGMENT = 4096  # kSegment of csrc/row_math.h: what a row's sums are reduced in
DEFAULT_CHUNK_BYTES = 512 << 20
_TILE_BYTES = 24 << 20  # of a tile with few rows, which stays near the cache
_SLACK_BYTES = 8 << 20  # of a chunk: what GEMMs need for themselves, and rounding to whole pages
_WIDEST_TILE = 16384  # wider ones are no faster as GEMMs and fall out of the cache
_NARROWEST_TILE = 256
_FEWEST_ROWS = 4096  # of a part: below, a GPU's GEMMs are no longer bound by arithmetic
_BALANCE = 300  # H100: 989e12 bfloat16 operations and 3.35e12 bytes a second; A100 and MI300X lie at 160 and 250


class Blocks(NamedTuple):
    """Rows and columns of a tile of logits."""

    rows: int
    columns: int

    def row_ranges(self, count: int) -> Iterator[slice]:
        return _ranges(slice(0, count), self.rows)

    def column_ranges(self, vocab: int) -> Iterator[slice]:
        return _ranges(slice(0, vocab), self.columns)


def _ranges(whole: slice, step: int) -> Iterator[slice]:
    for begin in range(whole.start, whole.stop, step):
        yield slice(begin, min(begin + step, whole.stop))


class Problem(NamedTuple):
    """Sizes of `hidden [N, H]` and `weight [V, H]`, and what the logits' buffer may take."""

    rows: int
    hidden_size: int
    vocab: int
    itemsize: int
    chunk_bytes: int

    @property
    def _logits_bytes(self) -> int:
        return max(self.chunk_bytes // 2, self.chunk_bytes - _SLACK_BYTES)

    @property
    def tile_bytes(self) -> int:
        """The share of the chunk for the logits at work: narrow tiles of many rows would add to dhidden too often."""
        one_segment = self.rows * (SEGMENT + self.hidden_size) * self.itemsize
        return min(self._logits_bytes, max(_TILE_BYTES, one_segment))

    def forward_blocks(self) -> Blocks:
        """Whole segments, so that a row's bits depend on its logits alone; fewer rows where the chunk is small.

        A tile also holds the `[rows, H]` product with the weight, which the frozen head needs.
        """
        columns = min(max(self._columns() // SEGMENT * SEGMENT, SEGMENT), _WIDEST_TILE, max(1, self.vocab))
        rows_that_fit = self.tile_bytes // ((columns + self.hidden_size) * self.itemsize)
        return Blocks(max(1, min(self.rows, rows_that_fit)), columns)

    def backward_blocks(self) -> Blocks:
        """All rows at once, so that a tile of the weight's gradient is one GEMM, accumulated in float32 inside it."""
        columns = max(self._columns() // _NARROWEST_TILE * _NARROWEST_TILE, _NARROWEST_TILE)
        return Blocks(max(1, self.rows), min(columns, _WIDEST_TILE, max(1, self.vocab)))

    def tile_size(self) -> int:
        """Logits of the larger tile: forward and backward take a buffer of one size, so that they share it."""
        return max(blocks.rows * blocks.columns for blocks in (self.forward_blocks(), self.backward_blocks()))

    def _columns(self) -> int:
        return max(0, self.tile_bytes // (max(1, self.rows) * self.itemsize) - self.hidden_size)

    def kept_logits(self) -> int:
        """How many logits forward may keep for backward, at most all of them."""
        return self.rows * self.kept_columns((self._logits_bytes - self.tile_bytes) // self.itemsize)

    def kept_columns(self, capacity: int) -> int:
        """The vocabulary's first columns that a buffer of so many logits holds: all, or whole tiles of forward's."""
        columns = capacity // max(1, self.rows)
        tile = self.forward_blocks().columns
        return self.vocab if columns >= self.vocab else columns // tile * tile


def has_wide_gemms(device: torch.device) -> bool:
    """Whether a GEMM of 16-bit matrices can write and add to float32."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and "dtype_out" in torch.ops.aten.addmm.overloads()


def parts(problem: Problem, sequence: int, device: torch.device) -> int:
    """Parts of whole sequences of so many tokens in which to form gradients in forward; 0: keep or recompute."""
    return _parts(problem, sequence) if has_wide_gemms(device) else 0


def _parts(problem: Problem, sequence: int) -> int:
    rows, hidden_size, vocab, itemsize, chunk_bytes = problem
    spare = chunk_bytes - 4 * vocab * hidden_size - _SLACK_BYTES
    # all logits of a part, and a tile of their gradient
    rows_that_fit = min(
        (spare - _TILE_BYTES) // (vocab * itemsize), spare // ((vocab + SEGMENT + hidden_size) * itemsize)
    )
    rows_that_fit = rows_that_fit // max(1, sequence) * sequence
    if rows_that_fit < _FEWEST_ROWS:
        return 0
    count = -(-rows // rows_that_fit)
    share_kept = problem.kept_logits() / max(1, rows * vocab)
    return count if 4 * _BALANCE * count < (1 - share_kept) * rows else 0


def backward_tiles(forward: Problem, backward: Problem, kept: int) -> Iterator[tuple[slice, slice | None]]:
    """Columns of backward's tiles and, where forward kept their logits, the tile of forward's that holds them."""
    step = backward.backward_blocks().columns
    for whole in forward.forward_blocks().column_ranges(kept):
        for columns in _ranges(whole, step):
            yield columns, whole
    for columns in _ranges(slice(kept, backward.vocab), step):
        yield columns, None


def explain(problem: Problem) -> list[str]:
    """The schedules in words, and what they cost beside the logits that they do without."""
    rows, hidden_size, vocab, itemsize, chunk_bytes = problem
    forward, backward = problem.forward_blocks(), problem.backward_blocks()
    gemm = 2 * rows * hidden_size * vocab / 1e12
    tile = problem.tile_size() * itemsize
    kept = problem.kept_logits()
    share = kept / max(1, rows * vocab)
    again = {0.0: "made again", 1.0: "read again"}.get(share, f"read again ({share:.0%} of them) or made again")
    count = _parts(problem, sequence=1)
    on_gpu = (
        f"3 GEMMs in forward, in {count} parts of up to {-(-rows // count):,} rows (whole sequences), whose gradients "
        f"are summed in float32 ({_mib(4 * vocab * hidden_size)})"
        if count
        else "the same; gradients formed in forward would save too little, or not fit into chunk_bytes"
    )
    return [
        f"logits [{rows:,}, {vocab:,}] would take {_mib(rows * vocab * itemsize)}, and their gradient as much again; "
        f"a GEMM is {gemm:.3g} TFLOP",
        f"forward   1 GEMM, in {_count(forward, rows, vocab)} of {_shape(forward)}: "
        f"a tile's logits are reduced to row states; {_mib(kept * itemsize)} of them are kept, the rest is dropped",
        f"backward  {3 - share:.3g} GEMMs, in {_count(backward, rows, vocab)} of {_shape(backward)}: "
        f"a tile's logits are {again}, turned into their gradient, and multiplied into "
        "dhidden (summed in float32) and dweight (finished by one GEMM)",
        f"on a GPU  {on_gpu}",
        "frozen    2 GEMMs in forward and none in backward: dlogp/dhidden is kept in float32 "
        f"({_mib(4 * rows * hidden_size)}), no logits; a gradient through entropy or lse makes the logits again",
        f"memory    chunk_bytes of {_mib(chunk_bytes)} hold {_mib(kept * itemsize)} of kept logits and a tile of "
        f"{_mib(tile)}; beside them a float32 [N, H] of {_mib(4 * rows * hidden_size)}",
        "rows that are masked, and in backward rows without a gradient, enter no GEMM "
        "(on a GPU where PolicyBatch.rows tells which)",
    ]


def _count(blocks: Blocks, rows: int, vocab: int) -> str:
    count = -(-rows // blocks.rows) * -(-vocab // blocks.columns)
    return f"{count} tile{'s' if count > 1 else ''}"


def _shape(blocks: Blocks) -> str:
    return f"[{blocks.rows:,}, {blocks.columns:,}]"


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
