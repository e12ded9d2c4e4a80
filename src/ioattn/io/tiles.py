"""Which tiles of the score matrix a schedule visits, and how much they hold together.

Tiles start at multiples of the block sizes, as a kernel's do. A tile is visited when the band keeps at least one of
its elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ioattn.masks import Band
from ioattn.problem import Problem


@dataclass(frozen=True)
class Blocks:
    """Queries and keys of one tile, and the number of pieces that split-KV cuts the keys into."""

    q: int = 64
    k: int = 64
    splits: int = 8

    def __post_init__(self) -> None:
        for name, value in (("block_q", self.q), ("block_k", self.k), ("splits", self.splits)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")

    def __str__(self) -> str:
        return f"{self.q}x{self.k}"


class Visits(NamedTuple):
    """Sums over the visited tiles of one head; rows are query rows."""

    key_rows: int
    """Keys loaded when every query tile walks over its keys."""
    query_rows: int
    """Queries loaded when every key tile walks over its queries."""
    pairs: int
    """Scores computed."""
    live_queries: int
    """Queries in tiles that see at least one key tile."""


@dataclass(frozen=True)
class Grid:
    """The tiles of one head, or of `group` heads whose rows are interleaved: row r is query r // group."""

    len_q: int
    len_k: int
    blocks: Blocks
    band: Band
    group: int = 1

    @classmethod
    def of(cls, problem: Problem, blocks: Blocks, packed_group: bool = False) -> Grid:
        """The tiles of one head of `problem`, or of all heads of a group together."""
        band = problem.band_of(problem.len_q, problem.len_k)
        return cls(problem.len_q, problem.len_k, blocks, band, problem.group if packed_group else 1)

    @cached_property
    def rows(self) -> int:
        """Rows of the score matrix."""
        return self.len_q * self.group

    def query_tiles(self) -> Iterator[slice]:
        """All query tiles."""
        return slices(0, self.rows, self.blocks.q)

    def key_tiles(self) -> Iterator[slice]:
        """All key tiles."""
        return slices(0, self.len_k, self.blocks.k)

    def key_tiles_for(self, rows: slice) -> Iterator[slice]:
        """The key tiles that a query tile visits."""
        return slices(*self.keys_for(rows.start, rows.stop), self.blocks.k)

    def query_tiles_for(self, cols: slice) -> Iterator[slice]:
        """The query tiles that visit a key tile."""
        return slices(*self.rows_for(cols.start, cols.stop), self.blocks.q)

    def _sees_keys(self, rows: slice) -> bool:
        start, stop = self.keys_for(rows.start, rows.stop)
        return start < stop

    def is_first(self, rows: slice, cols: slice) -> bool:
        """Whether no earlier key tile is visited by these rows."""
        return self.keys_for(rows.start, rows.stop)[0] == cols.start

    def blind_query_tiles(self) -> Iterator[slice]:
        """The query tiles that visit no key tile."""
        return (rows for rows in self.query_tiles() if not self._sees_keys(rows))

    def keys_for(self, start: int, stop: int) -> tuple[int, int]:
        """The keys of the visited tiles of rows `[start, stop)`, as one range."""
        queries = start // self.group, (stop - 1) // self.group + 1
        return _aligned(self.band.key_range(*queries, self.len_k), self.blocks.k, self.len_k)

    def rows_for(self, start: int, stop: int) -> tuple[int, int]:
        """The rows of the visited tiles of keys `[start, stop)`, as one range."""
        first, last = self.band.query_range(start, stop, self.len_q)
        return _aligned((first * self.group, last * self.group), self.blocks.q, self.rows)

    def pieces(self) -> Iterator[slice]:
        """The keys of each piece of split-KV, whole tiles; fewer pieces than asked for where there are fewer tiles."""
        tiles = -(-self.len_k // self.blocks.k)
        per_piece = -(-tiles // self.blocks.splits) * self.blocks.k
        return slices(0, self.len_k, max(per_piece, 1))

    def mask(self, scores: Tensor, rows: slice, cols: slice) -> Tensor:
        """`scores` with -inf written where the band hides a key; in place."""
        queries = (rows.start // self.group, (rows.stop - 1) // self.group + 1)
        if self.band.is_full(queries, (cols.start, cols.stop)):
            return scores
        return scores.masked_fill_(~self.visible(rows, cols), -torch.inf)

    def visible(self, rows: slice, cols: slice) -> Tensor:
        """Which scores of a tile the band keeps."""
        queries = torch.arange(rows.start, rows.stop)[:, None] // self.group
        offset = torch.arange(cols.start, cols.stop) - queries - self.band.shift
        visible = torch.ones_like(offset, dtype=torch.bool)
        if self.band.lo is not None:
            visible &= offset >= self.band.lo
        if self.band.hi is not None:
            visible &= offset <= self.band.hi
        return visible

    def visits(self) -> Visits:
        """The sums that traffic is made of, from one range per tile row; without a band, from the sizes alone."""
        return _visits(self)


def slices(start: int, stop: int, size: int) -> Iterator[slice]:
    """`[start, stop)` in pieces of `size`, the last one shorter where it must be."""
    return (slice(at, min(at + size, stop)) for at in range(start, stop, size))


@lru_cache(maxsize=4096)
def _visits(grid: Grid) -> Visits:
    n_rows, n_keys = grid.rows, grid.len_k
    if not grid.band.bounded:
        query_tiles, key_tiles = -(-n_rows // grid.blocks.q), -(-n_keys // grid.blocks.k)
        return Visits(query_tiles * n_keys, key_tiles * n_rows, n_rows * n_keys, n_rows if n_keys else 0)
    key_rows = pairs = live = query_rows = 0
    for start, stop in _tiles_at_once(n_rows, grid.blocks.q):
        reached = _reached(grid.band, start // grid.group, (stop - 1) // grid.group, n_keys)
        widths, heights = _aligned_widths(reached, grid.blocks.k, n_keys), stop - start
        key_rows, pairs = key_rows + int(widths.sum()), pairs + int((heights * widths).sum())
        live += int(heights[widths > 0].sum())
    across = Band(_negative(grid.band.hi), _negative(grid.band.lo), -grid.band.shift)
    for start, stop in _tiles_at_once(n_keys, grid.blocks.k):
        first, last = _reached(across, start, stop - 1, grid.len_q)
        reached = first * grid.group, last * grid.group
        query_rows += int(_aligned_widths(reached, grid.blocks.q, n_rows).sum())
    return Visits(key_rows, query_rows, pairs, live)


def _tiles_at_once(n: int, block: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Where the tiles of `[0, n)` start and stop, 2^18 at a time: a loop over those of a long band takes seconds."""
    for piece in slices(0, n, block * 2**18):
        start = torch.arange(piece.start, piece.stop, block)
        yield start, (start + block).clamp(max=n)


def _reached(band: Band, first: Tensor, last: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """`Band.key_range` of the inclusive ranges `[first, last]`, all at once; empty where the start passes the end."""
    empty = band.lo is not None and band.hi is not None and band.lo > band.hi
    start = torch.zeros_like(first) if band.lo is None else (first + (band.shift + band.lo)).clamp(0, n)
    end = torch.full_like(last, n) if band.hi is None else (last + (band.shift + band.hi + 1)).clamp(0, n)
    return start, torch.zeros_like(end) if empty else end


def _aligned_widths(reached: tuple[Tensor, Tensor], block: int, n: int) -> Tensor:
    start, end = reached
    widths = ((end + (block - 1)) // block * block).clamp(max=n) - start // block * block
    return torch.where(start < end, widths, 0)


def _negative(bound: int | None) -> int | None:
    return None if bound is None else -bound


def _aligned(keys: tuple[int, int], block: int, n: int) -> tuple[int, int]:
    start, stop = keys
    if start >= stop:
        return 0, 0
    return start // block * block, min(-(-stop // block) * block, n)
