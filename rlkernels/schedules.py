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


def _columns(rows: int, hidden_size: int, itemsize: int, chunk_bytes: int) -> int:
    return max(0, chunk_bytes // (max(1, rows) * itemsize) - hidden_size)
