"""Decoding over a key/value cache: bytes of one step over sequences of their own lengths, contiguous or in pages.

The rows of all query heads that share a key/value head are stacked into one tile, so K and V are read once for the
group. `blocks.splits` pieces of the keys run in parallel: with 1 the result is written at once, with more every piece
writes a partial result of fp32 and a merge reads them. Causal attention is aligned at the end of the cache, and only
what the queries see is cut into pieces. In a paged cache each tile of keys first reads the table entries of the pages
that it touches, int32.

`predict` is a formula; `ioattn.io.schedules.decode` runs the same over a counting memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from ioattn.cases import problem_of
from ioattn.io.ledger import Move, Traffic
from ioattn.io.tiles import Blocks, Grid, slices
from ioattn.io.traffic import compulsory, useful_flops
from ioattn.problem import Problem

INDEX = 4
"""Bytes of a length and of a table entry."""


@dataclass(frozen=True)
class Decode:
    """One step: `len_q` queries for each sequence, whose cache holds `lengths` keys after `appended` were added.

    `page` is the number of tokens of a page, None for a contiguous cache; `left` the window before a query, None for
    all keys.
    """

    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    dim: int
    dtype: str = "bf16"
    len_q: int = 1
    left: int | None = None
    page: int | None = None
    appended: int = 0
    blocks: Blocks = field(default_factory=lambda: Blocks(64, 128, 1))

    def __post_init__(self) -> None:
        least = {"len_q": 1, "page": 1, "appended": 0}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ValueError(f"{name} is {value}; it must be at least {bound}")
        if not self.lengths or min(self.lengths) < self.appended:
            raise ValueError(f"lengths are {self.lengths}; there must be some, each with its {self.appended} new keys")
        self.problem(self.lengths[0])

    def problem(self, length: int) -> Problem:
        """One sequence of this length, as a problem of its own."""
        window = None if self.left is None else (self.left, 0)
        sizes = (1, self.heads, self.len_q, self.dim)
        return problem_of(sizes, self.dtype, kv_heads=self.kv_heads, len_k=length, causal=True, window=window)

    def walk(self, length: int) -> Walk:
        """How the tiles of one sequence are walked over."""
        return Walk(Grid.of(self.problem(length), self.blocks, packed_group=True), self.page)

    @cached_property
    def sequences(self) -> Counter[int]:
        """How many sequences there are of each length."""
        return Counter(self.lengths)

    @property
    def tasks(self) -> int:
        """Pieces of work that need nothing of each other."""
        walks = {length: self.walk(length) for length in self.sequences}
        each = {n: len(list(w.grid.query_tiles())) * max(1, len(w.pieces())) for n, w in walks.items()}
        return self.kv_heads * sum(each[length] * n for length, n in self.sequences.items())

    @property
    def compulsory(self) -> int:
        """Bytes of Q, O and of the keys and values that are seen, once each, and of what is appended, twice."""
        seen = sum(n * compulsory(self.problem(length)) for length, n in self.sequences.items())
        item = self.problem(self.lengths[0]).dtype.itemsize
        return seen + 2 * len(self.lengths) * self.appended * self.kv_heads * 2 * self.dim * item

    @property
    def useful_flops(self) -> int:
        """FLOPs of the scores that are seen."""
        return sum(n * useful_flops(self.problem(length)) for length, n in self.sequences.items())


@dataclass(frozen=True)
class Walk:
    """The tiles of one key/value head of one sequence."""

    grid: Grid
    page: int | None

    def pieces(self) -> list[slice]:
        """The keys that any query sees, whole tiles, in as many pieces as there are splits and tiles."""
        start, stop = self.grid.keys_for(0, self.grid.rows)
        block, splits = self.grid.blocks.k, self.grid.blocks.splits
        tiles = -(-(stop - start) // block)
        return list(slices(start, stop, max(1, -(-tiles // splits)) * block))

    def key_tiles(self, rows: slice, piece: slice) -> Iterator[slice]:
        """The tiles of a piece that a query tile sees."""
        return slices(*self._inside(rows, piece), self.grid.blocks.k)

    def pages(self, keys: slice) -> range:
        """The pages that a range of keys touches, by their place in the sequence."""
        page = self.page or 1
        return range(keys.start // page, -(-keys.stop // page) if keys.stop > keys.start else keys.start // page)

    def entries(self, rows: slice, piece: slice) -> int:
        """Table entries that the tiles of a piece read: one per page that a tile touches."""
        start, stop = self._inside(rows, piece)
        if self.page is None or start >= stop:
            return 0
        block = self.grid.blocks.k
        tiles = -(-(stop - start) // block)
        both = math.lcm(self.page, block)  # a page that begins with a tile is counted with the tile
        return tiles + _multiples(self.page, start, stop) - _multiples(both, start, stop)

    def _inside(self, rows: slice, piece: slice) -> tuple[int, int]:
        start, stop = self.grid.keys_for(rows.start, rows.stop)
        start = max(start, piece.start)
        return start, max(start, min(stop, piece.stop))


def predict(it: Decode) -> Traffic:
    """What one step moves, byte for byte what `schedules.decode.count` finds.

    >>> step = predict(Decode((131072,), 32, 8, 128))
    >>> step.of("K", "V") == 131072 * 8 * 128 * 2 * 2
    True
    """
    found: Counter[tuple[str, str, str]] = Counter()
    flops = 0
    for length, n in it.sequences.items():
        moves, pairs = _sequence(it, length)
        for key, n_bytes in moves.items():
            found[key] += n * n_bytes
        flops += n * 2 * it.kv_heads * pairs * 2 * it.dim
    names = dict.fromkeys((step, tensor) for step, tensor, _ in found)
    moves_of = (Move(*name, found[(*name, "read")], found[(*name, "written")]) for name in names)
    steps = [_tiles_on_chip(it, length) for length in it.sequences]
    fullest = max((tiles for each in steps for tiles in each), key=lambda tiles: sum(tiles.values()))
    moved = tuple(m for m in moves_of if m.read or m.written)
    return Traffic(moved, flops, sum(fullest.values()), _extra(it), fullest)


def _sequence(it: Decode, length: int) -> tuple[dict[tuple[str, str, str], int], int]:
    """Bytes by step, tensor and way for one sequence, and scores per key/value head."""
    walk, item, heads = it.walk(length), it.problem(length).dtype.itemsize, it.kv_heads
    visits, n_rows = walk.grid.visits(), walk.grid.rows
    pieces, tiles = walk.pieces(), list(walk.grid.query_tiles())
    sums = it.problem(length).compute_dtype.itemsize
    wide = n_rows * it.dim * heads
    moves = _appended(it, walk, length)
    if it.blocks.splits == 1:
        step, tasks, passes = "decode", len(tiles), 1
    else:
        step, tasks, passes = "partial results", len(tiles) * len(pieces), len(pieces)
    moves[step, "lengths", "read"] = heads * tasks * INDEX
    moves[step, "Q", "read"] = passes * wide * item
    entries = sum(walk.entries(rows, piece) for rows in tiles for piece in pieces)
    moves[step, "table", "read"] = heads * entries * INDEX
    for tensor in ("K", "V"):
        moves[step, tensor, "read"] = heads * visits.key_rows * it.dim * item
    if it.blocks.splits != 1:
        partial = {"partial O": passes * wide * sums, "partial LSE": passes * n_rows * heads * sums}
        moves |= {(step, tensor, "written"): n_bytes for tensor, n_bytes in partial.items()}
        step = "merge"
        moves[step, "lengths", "read"] = heads * len(tiles) * INDEX
        moves |= {(step, tensor, "read"): n_bytes for tensor, n_bytes in partial.items()}
    moves[step, "O", "written"] = wide * item
    moves[step, "LSE", "written"] = n_rows * heads * sums
    return moves, visits.pairs


def _appended(it: Decode, walk: Walk, length: int) -> dict[tuple[str, str, str], int]:
    if not it.appended:
        return {}
    new = it.appended * it.kv_heads * it.dim * it.problem(length).dtype.itemsize
    touched = len(walk.pages(slice(length - it.appended, length))) if it.page else 0
    moves = {("append", "lengths", "read"): INDEX, ("append", "table", "read"): touched * INDEX}
    for tensor in ("K", "V"):
        moves["append", f"new {tensor}", "read"] = moves["append", tensor, "written"] = new
    return moves


def _extra(it: Decode) -> int:
    """Slow memory besides Q, K, V and O: partial results, LSE, lengths and tables."""
    total = 0
    for length, n in it.sequences.items():
        walk, sums = it.walk(length), it.problem(length).compute_dtype.itemsize
        rows = walk.grid.rows * it.kv_heads
        partial = len(walk.pieces()) * rows * (it.dim + 1) * sums if it.blocks.splits != 1 else 0
        table = len(walk.pages(slice(0, length))) * INDEX if it.page else 0
        total += n * (rows * sums + partial + INDEX + table)
    return total


def _tiles_on_chip(it: Decode, length: int) -> list[dict[str, int]]:
    """What each step holds at its fullest, in bytes."""
    walk, p = it.walk(length), it.problem(length)
    item, sums, bq = p.dtype.itemsize, p.compute_dtype.itemsize, min(it.blocks.q, walk.grid.rows)
    bk = min(it.blocks.k, length)
    touched = max((len(walk.pages(tile)) for tile in _distinct_tiles(walk)), default=0) if it.page else 0
    walking = {
        "lengths, table": INDEX * (1 + touched),
        "q_tile": bq * it.dim * item,
        "k_tile, v_tile": 2 * bk * it.dim * item,
        "scores": bq * bk * sums,
        "acc": bq * it.dim * sums,
        "row_max, row_sum and their next": (4 if bk else 2) * bq * sums,
    }
    steps = [walking]
    if it.blocks.splits != 1:
        acc = {"acc": bq * it.dim * sums, "partial out": bq * it.dim * sums, "row statistics": 5 * bq * sums}
        steps.append({"lengths": INDEX} | acc)
    if it.appended:
        entries = len(walk.pages(slice(length - it.appended, length))) if it.page else 0
        steps.append({"lengths, table": INDEX * (1 + entries), "new rows": it.appended * it.kv_heads * it.dim * item})
    return steps


def _distinct_tiles(walk: Walk) -> Iterator[slice]:
    """Tiles that touch the most pages: their offset within a page repeats after as many as the page is long."""
    start, stop = walk.grid.keys_for(0, walk.grid.rows)
    block = walk.grid.blocks.k
    return slices(start, min(stop, start + block * (walk.page or 1)), block)


def _multiples(of: int, start: int, stop: int) -> int:
    """Multiples in the open interval (start, stop)."""
    return max(0, (stop - 1) // of - start // of)
