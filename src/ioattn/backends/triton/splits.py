"""How a decoding problem is cut: tiles of rows and keys, and how many pieces the keys of a sequence are cut into.

All of it follows from shapes alone, never from lengths: a captured graph stays valid when lengths change, and equal
shapes give equal bits.
"""

from __future__ import annotations

from typing import NamedTuple

from ioattn.backends.triton.arguments import padded
from ioattn.backends.triton.config import Gpu, Tiles
from ioattn.problem import Problem

MAX_ROWS = 64
"""Rows of one tile: the query heads of a group times the new tokens; more of them are several tiles."""


class CacheTiles(NamedTuple):
    """How a decoding kernel is cut."""

    q_tile: int
    k_tile: int
    num_warps: int
    num_stages: int
    precision: str = "ieee"
    turned: bool = False
    """Tiles of scores are [keys, rows]."""
    registers: int | None = None
    """The most that a thread may have, where the compiler would otherwise take so many that fewer programs fit."""
    beside: int = 2
    """How many programs should share a processor."""
    lanes: int = 0
    """How many threads share a key and multiply it without tensor cores; 0: tensor cores."""
    edge_stages: int = 1
    """Of the loop over the tiles at the edges of what rows see."""
    apart: bool = True
    """Weights are summed for each place of a tile of keys, not over its keys: no step waits for other warps' sums.

    In turned tiles and of up to 16 rows. On an H200 8 tokens at B16 N8192 took 132.5 us then, not 134.0, one 124.3, not
    124.6.
    """

    @property
    def launch(self) -> Tiles:
        """What a launch knows of them."""
        return Tiles(*self[:5])


INTERPRETER = CacheTiles(16, 32, 4, 1)
"""For Triton's interpreter: small, so that small cases cross many tiles."""

INTERPRETER_FEW_ROWS = CacheTiles(1, 32, 1, 1, lanes=8)
"""The same without tensor cores."""

INTERPRETER_PROCESSORS = 8
"""Stands for a GPU's in the interpreter, so that small cases are split, too."""

OVERHEAD_TILES = 3.0
"""What starting and ending a piece costs, in the time of tiles of keys: queries in, partial results out, empty pipe."""

MAX_PIECES = 256
"""The most pieces that the heuristic takes."""

LARGE = CacheTiles(16, 128, 8, 3, beside=1)
"""Where there is a head for every processor, on GPUs before Hopper: not timed there. `SEVERAL` is made of it."""

SEVERAL = LARGE._replace(turned=True, edge_stages=3)
"""8 tokens at B16 N8192: 4.10 TB/s, 1.05 of one token's time; of the tiles at edges one stage less 4.05. In a run with
one stage of them 3.97, not turned 0.98 of that, with 64 keys 0.92."""

MANY_HEADS = CacheTiles(16, 64, 4, 3, turned=True)
"""Two heads and more for each processor, one token: B64 N4096 at 4.37 TB/s, 4.34 with 128 keys on 8 warps."""

MANY_ROWS = CacheTiles(64, 64, 4, 3, edge_stages=2)
"""64 rows: weights go from one product to the next in registers. Turned around they pass through shared memory, and
maxima from warp to warp: 2.27 TB/s for 16 tokens at B16 N8192. In one piece for each processor 3.91, in two 3.28; B1
N131072 in 32 pieces 3.91. In another run 4.03, with one stage at edges 3.98."""

ONE_EACH = CacheTiles(16, 64, 4, 4, beside=1)
"""One token, and one head for each processor: B16 N8192 at 4.34 TB/s, 4.31 with 128 keys on 8 warps and 3 stages, 4.24
and 4.27 with 3 and 5 stages of 64 keys. Or fewer heads and many keys, one piece for each processor: B1 N131072 4.28, in
32 pieces, of which two share a processor, 4.25. 8 tokens in another run 3.46, in 32 3.89. B1 N8192 12.75 us in graphs
of 8 calls, 12.38 of 32; in 32 pieces 13.01 and 12.79, with a stage more 13.23 and 12.79."""

MANY_TILES = 7
"""More tiles of 64 keys for each processor are many: 8 at B1 N8192, and alike at B2 N4096 to B8 N1024, not timed."""

SHORT_PAGES = CacheTiles(16, 128, 8, 4, beside=1)
"""One head for each processor, in pages shorter than a tile: B16 N8192 in pages of 16 at 4.07 TB/s, 3.80 with 64 keys
in 2 pieces, 3.24 with 64 keys in one: 4 warps make the addresses of a tile too slowly."""

MANY_SHORT_PAGES = CacheTiles(16, 64, 4, 4, apart=False)
"""Two heads and more for each: B64 N4096 at 4.29 TB/s, 4.11 with 128 keys. Two programs per processor, not three: 512
heads on 132 processors then end more evenly."""

SMALL = {
    (2, 64): CacheTiles(16, 128, 4, 3),
    (2, 128): CacheTiles(16, 64, 4, 3),
    (2, 256): CacheTiles(16, 32, 4, 3),
    (4, 64): CacheTiles(16, 64, 4, 3, "tf32x3"),
    (4, 128): CacheTiles(16, 32, 4, 3, "tf32x3"),
    (4, 256): CacheTiles(16, 16, 4, 3, "tf32x3"),
}
"""By element size and width, the larger one of D and Dv padded to a power of two: 32 KiB of K and V per stage. At D 128
on an H200 4.17 TB/s at B1 N131072 in 32 pieces. In float32 3.32 TB/s at B16 N8192; the three products of TF32 side by
side, each from zero as float32 needs it, 3.32, and where they go on in the tensor cores 3.84 with an error of 1e-5."""


FEW_ROWS = {
    64: CacheTiles(1, 64, 4, 4, lanes=8),
    128: CacheTiles(1, 32, 4, 3, lanes=8),
    256: CacheTiles(1, 16, 4, 4, lanes=16),
}
"""In float32, by width, for up to MAX_FEW_ROWS rows: multiply-adds, 4 for each number read, take a third of the time
that reading takes, and are exact to rounding. 4 rows at B16 N8192: 4.24 TB/s, with 4 stages 4.22, with 16 lanes and
4 stages 4.24, with 64 keys on 8 warps 4.25, by tensor cores 3.28."""

MAX_FEW_ROWS = 4
"""Queries and their sums take 32 registers a row at D 128. In twice as many threads 8 rows at B16 N8192 reach 3.63 TB/s
with an error of 6e-7, by tensor cores 3.57 with 1.2e-6; but 5 rows, which are computed as 8, would spill."""


def choose(problem: Problem, gpu: Gpu | None) -> CacheTiles:
    """The tiles of a decoding kernel; `gpu` is None in Triton's interpreter."""
    assert problem.cache is not None
    rows, size = problem.group * problem.len_q, problem.dtype.itemsize
    width = max(64, padded(problem.dim), padded(problem.dim_v))
    few = size == 4 and rows <= MAX_FEW_ROWS and padded(problem.dim) == padded(problem.dim_v)
    if gpu is None:
        tiles = INTERPRETER_FEW_ROWS if few else INTERPRETER._replace(q_tile=padded(rows))
    elif few:
        tiles = FEW_ROWS[width]
    else:
        tiles = tiles_of_halves(problem, rows, gpu) if (size, width) == (2, 128) else SMALL[size, width]
    lanes = min(tiles.lanes, padded(problem.dim) // 4)
    tiles = tiles._replace(q_tile=max(tiles.q_tile, min(MAX_ROWS, 1 << (rows - 1).bit_length())), lanes=lanes)
    if gpu is None:
        return tiles._replace(q_tile=min(MAX_ROWS, tiles.q_tile))
    while shared_bytes(problem, tiles) > gpu.shared_memory and tiles.num_stages > 1:
        tiles = tiles._replace(num_stages=tiles.num_stages - 1)
    while shared_bytes(problem, tiles) > gpu.shared_memory and tiles.k_tile > 16:
        tiles = tiles._replace(k_tile=tiles.k_tile // 2, num_warps=4, turned=False)
    return tiles


def tiles_of_halves(problem: Problem, rows: int, gpu: Gpu) -> CacheTiles:
    """Those of 16 bits at D 128, by how many heads and tiles there are for each processor, and by the pages."""
    assert problem.cache is not None
    small = SMALL[2, 128]
    heads = problem.batch * problem.kv_heads * count(rows, MAX_ROWS)
    share = heads / gpu.processors
    if problem.cache.page is not None and problem.cache.page < 64:
        if share >= 1.8:
            return MANY_SHORT_PAGES
        return SHORT_PAGES if 0.9 <= share <= 1 and rows <= 16 else small
    if gpu.family == "wgmma" and rows > MAX_ROWS // 2:
        return MANY_ROWS._replace(beside=1) if share >= 0.9 else MANY_ROWS
    if share < 0.9:
        tiles = heads * count(keys_in_reach(problem), ONE_EACH.k_tile)
        return ONE_EACH if problem.len_q == 1 and tiles > MANY_TILES * gpu.processors else small
    if gpu.family == "mma":
        return LARGE
    return SEVERAL if problem.len_q > 1 else MANY_HEADS if share >= 1.8 else ONE_EACH


def shared_bytes(problem: Problem, tiles: CacheTiles) -> int:
    """Shared memory that a decoding kernel needs: K and V per stage, Q, and weights on their way; all checked compiled.

    A stage less where operands pass through registers, as they do but for tiles of 64 rows of a first operand; operands
    in several parts take twice the room. Turned tiles keep Q as it was, too.
    """
    whole = tiles.turned or tiles.q_tile >= MAX_ROWS
    size, stages = problem.dtype.itemsize, tiles.num_stages if whole else max(1, tiles.num_stages - 1)
    q_columns = padded(problem.dim) * (2 if tiles.turned else 1)
    weights = 0 if whole and not tiles.turned and size == 2 else tiles.k_tile
    rows = tiles.q_tile * (q_columns + weights) * size * (2 if size == 4 else 1)
    if tiles.lanes:
        # Keys whose columns lie apart in memory go through it on their way to the threads that multiply them.
        rows = tiles.k_tile * padded(problem.dim) * size
    return stages * tiles.k_tile * (padded(problem.dim) + padded(problem.dim_v)) * size + rows


def pieces(problem: Problem, tiles: CacheTiles, gpu: Gpu | None) -> int:
    """How many pieces the keys of a sequence are cut into: as asked, or what ends first if all sequences are full."""
    assert problem.cache is not None
    if problem.cache.splits:
        return problem.cache.splits
    processors = INTERPRETER_PROCESSORS if gpu is None else gpu.processors
    beside = 1
    if gpu is not None:
        # Each program takes 1 KiB more than it asks for.
        beside = max(1, min(tiles.beside, (gpu.shared_memory + 1024) // (shared_bytes(problem, tiles) + 1024)))
    programs = problem.batch * problem.kv_heads * count(problem.group * problem.len_q, tiles.q_tile)
    most = max(1, min(MAX_PIECES, count(keys_in_reach(problem), tiles.k_tile)))
    return min(range(1, most + 1), key=lambda n: (duration(programs, n, processors * beside, most), n))


def duration(programs: int, number: int, slots: int, tiles: int) -> float:
    """Tiles that one slot walks over, one after the other, when `number` pieces are cut from `tiles` tiles of keys.

    Programs that fill a fraction of the slots share the memory's bandwidth, so a last wave costs its fraction.
    """
    per_piece = count(tiles, number) + (OVERHEAD_TILES if number > 1 else 0)
    waves = programs * number / slots
    return max(1.0, waves, (waves + -(-programs * number // slots)) / 2) * per_piece


def keys_in_reach(problem: Problem) -> int:
    """The most keys that the queries of a full sequence see."""
    start, end = problem.band_of(problem.len_q, problem.len_k).key_range(0, problem.len_q, problem.len_k)
    return end - start


def count(size: int, tile: int) -> int:
    """How many tiles cover `size`."""
    return -(-size // tile)
