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
    """How a decoding kernel is cut: `config.Tiles`, and whether scores are [keys, rows]."""

    q_tile: int
    k_tile: int
    num_warps: int
    num_stages: int
    precision: str = "ieee"
    turned: bool = False

    @property
    def launch(self) -> Tiles:
        """What a launch knows of them."""
        return Tiles(*self[:5])


INTERPRETER = CacheTiles(16, 32, 4, 1)
"""For Triton's interpreter: small, so that small cases cross many tiles."""

INTERPRETER_PROCESSORS = 8
"""Stands for a GPU's in the interpreter, so that small cases are split, too."""

OVERHEAD_TILES = 3.0
"""What starting and ending a piece costs, in the time of tiles of keys: queries in, partial results out, empty pipe."""

MAX_PIECES = 256
"""The most pieces that the heuristic takes."""


class Row(NamedTuple):
    """The choice up to a width, the larger one of D and Dv padded to a power of two: keys, warps, stages, precision."""

    max_width: int
    k_tile: int
    num_warps: int
    num_stages: int
    precision: str = "ieee"
    turned: bool = False


TABLE: dict[int, tuple[Row, ...]] = {
    2: (Row(64, 128, 4, 3), Row(128, 64, 4, 3), Row(256, 32, 4, 3)),
    4: (Row(64, 64, 4, 3, "tf32x3"), Row(128, 32, 4, 3, "tf32x3"), Row(256, 16, 4, 3, "tf32x3")),
}
"""By element size: about 32 KiB of K and V per stage."""


def choose(problem: Problem, gpu: Gpu | None) -> CacheTiles:
    """The tiles of a decoding kernel; `gpu` is None in Triton's interpreter."""
    rows = min(MAX_ROWS, padded(problem.group * problem.len_q))
    if gpu is None:
        return INTERPRETER._replace(q_tile=rows)
    width = max(padded(problem.dim), padded(problem.dim_v))
    row = next(row for row in TABLE[problem.dtype.itemsize] if width <= row.max_width)
    turned = row.turned and gpu.family == "wgmma"
    tiles = CacheTiles(rows, row.k_tile, row.num_warps, row.num_stages, row.precision, turned)
    while shared_bytes(problem, tiles) > gpu.shared_memory and tiles.num_stages > 1:
        tiles = tiles._replace(num_stages=tiles.num_stages - 1)
    return tiles


def shared_bytes(problem: Problem, tiles: CacheTiles) -> int:
    """Shared memory that a decoding kernel needs: K and V per stage, Q, and weights on their way; all checked compiled.

    A stage less where operands pass through registers; operands in several parts take twice the room.
    """
    size, stages = problem.dtype.itemsize, tiles.num_stages if tiles.turned else max(1, tiles.num_stages - 1)
    rows = tiles.q_tile * (padded(problem.dim) + tiles.k_tile) * size * (2 if size == 4 else 1)
    return stages * tiles.k_tile * (padded(problem.dim) + padded(problem.dim_v)) * size + rows


def pieces(problem: Problem, tiles: CacheTiles, gpu: Gpu | None) -> int:
    """How many pieces the keys of a sequence are cut into: as asked, or what ends first if all sequences are full."""
    assert problem.cache is not None
    if problem.cache.splits:
        return problem.cache.splits
    processors = INTERPRETER_PROCESSORS if gpu is None else gpu.processors
    # As many programs run side by side as shared memory lets one processor hold, at most 2: registers hold no more.
    beside = 1 if gpu is None else max(1, min(2, gpu.shared_memory // shared_bytes(problem, tiles)))
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
