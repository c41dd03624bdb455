"""How the linear path cuts up `hidden @ weight.T`, so that `[N, V]` never exists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

SEGMENT = 4096  # kSegment of csrc/row_math.h: what a row's sums are reduced in
DEFAULT_CHUNK_BYTES = 32 << 20
_WIDEST_TILE = 16384  # wider ones are no faster as GEMMs and fall out of the cache
_NARROWEST_TILE = 256


class Blocks(NamedTuple):
    """Rows and columns of a chunk of logits."""

    rows: int
    columns: int

    def row_ranges(self, count: int) -> Iterator[slice]:
        return _ranges(count, self.rows)

    def column_ranges(self, vocab: int) -> Iterator[slice]:
        return _ranges(vocab, self.columns)


def _ranges(count: int, step: int) -> Iterator[slice]:
    for begin in range(0, count, step):
        yield slice(begin, min(begin + step, count))


def forward_blocks(rows: int, hidden_size: int, vocab: int, itemsize: int, chunk_bytes: int) -> Blocks:
    """Whole segments, so that a row's bits depend on its logits alone; fewer rows where the chunk is small.

    A chunk also holds the `[rows, H]` product of a tile with the weight, which the frozen head needs.
    """
    columns = _columns(rows, hidden_size, itemsize, chunk_bytes) // SEGMENT * SEGMENT
    columns = min(max(columns, SEGMENT), _WIDEST_TILE, vocab)
    rows_that_fit = chunk_bytes // ((columns + hidden_size) * itemsize)
    return Blocks(max(1, min(rows, rows_that_fit)), columns)


def backward_blocks(rows: int, hidden_size: int, vocab: int, itemsize: int, chunk_bytes: int) -> Blocks:
    """All rows at once, so that a tile of the weight's gradient is one GEMM, accumulated in float32 inside it."""
    columns = _columns(rows, hidden_size, itemsize, chunk_bytes) // _NARROWEST_TILE * _NARROWEST_TILE
    return Blocks(max(1, rows), min(max(columns, _NARROWEST_TILE), _WIDEST_TILE, vocab))


def explain(rows: int, hidden_size: int, vocab: int, itemsize: int, chunk_bytes: int) -> list[str]:
    """The schedule in words, and what it costs beside the logits that it does without."""
    sizes = (rows, hidden_size, vocab, itemsize, chunk_bytes)
    forward, backward = forward_blocks(*sizes), backward_blocks(*sizes)
    gemm = 2 * rows * hidden_size * vocab / 1e12
    largest = max(blocks.rows * blocks.columns for blocks in (forward, backward)) * itemsize
    return [
        f"logits [{rows:,}, {vocab:,}] would take {_mib(rows * vocab * itemsize)}, and their gradient as much again",
        f"forward   1 GEMM of {gemm:.3g} TFLOP, in {_count(forward, rows, vocab)} of {_shape(forward)}: "
        "a tile's logits are reduced to row states and dropped",
        f"backward  3 GEMMs, in {_count(backward, rows, vocab)} of {_shape(backward)}: "
        "a tile's logits are made again, turned into their gradient in place, and multiplied into "
        "dhidden (summed in float32) and dweight (finished by one GEMM)",
        "frozen    2 GEMMs in forward and none in backward: dlogp/dhidden is kept in float32 "
        f"({_mib(4 * rows * hidden_size)}); a gradient through entropy or lse makes the logits again",
        f"memory    one chunk of {_mib(largest)} and a float32 [N, H] of {_mib(4 * rows * hidden_size)}",
        "rows that are masked, and in backward rows without a gradient, enter no GEMM",
    ]


def _count(blocks: Blocks, rows: int, vocab: int) -> str:
    count = -(-rows // blocks.rows) * -(-vocab // blocks.columns)
    return f"{count} tile{'s' if count > 1 else ''}"


def _shape(blocks: Blocks) -> str:
    return f"[{blocks.rows:,}, {blocks.columns:,}]"


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


def _columns(rows: int, hidden_size: int, itemsize: int, chunk_bytes: int) -> int:
    return max(0, chunk_bytes // (max(1, rows) * itemsize) - hidden_size)
