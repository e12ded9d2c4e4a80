"""Which tiles a loop visits: those that hide nothing in one loop, and the edges around them in a second one.

Of a window, which has as many edges as a row has, all tiles that exist as a whole go through one loop.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from ioattn.backends.triton.kernels.tiles import device


class Ranges(NamedTuple):
    """Tiles that a loop visits: `[full_start, full_end)` without a test, and `edges` tiles around them."""

    start: Any
    full_start: Any
    full_end: Any
    edges: Any


@device
def key_ranges(q_start, task, form: tl.constexpr):
    """The key tiles that the queries of the tile at `q_start` see."""
    seq = task.seq
    lo = None
    hi = None
    if task.inputs.lo is not None:
        lo = task.inputs.lo >> 2
    if task.inputs.hi is not None:
        hi = task.inputs.hi >> 2
    last = tl.minimum(q_start + form.Q.ROWS, seq.len_q) - 1
    return ranges_of(lo, hi, seq.shift, q_start, last, seq.len_k, form.K.ROWS)


@device
def query_ranges(k_start, task, form: tl.constexpr):
    """The query tiles that see the keys of the tile at `k_start`: the same closed forms, the band mirrored."""
    seq = task.seq
    lo = None
    hi = None
    if task.inputs.hi is not None:
        lo = -(task.inputs.hi >> 2)
    if task.inputs.lo is not None:
        hi = -(task.inputs.lo >> 2)
    last = tl.minimum(k_start + form.K.ROWS, seq.len_k) - 1
    return ranges_of(lo, hi, -seq.shift, k_start, last, seq.len_q, form.Q.ROWS)


@device
def ranges_of(lo, hi, shift, first, last, n, TILE: tl.constexpr):
    """`Band.key_range` and `Band.full_key_range` of rows `first` to `last`, in whole tiles of TILE of the n columns."""
    start = first * 0
    full_start = first * 0
    end = n
    full_end = n
    if lo is not None:
        start = tl.minimum(tl.maximum(first + shift + lo, 0), n)
        full_start = tl.minimum(tl.maximum(last + shift + lo, 0), n)
    if hi is not None:
        end = tl.minimum(tl.maximum(last + shift + hi + 1, 0), n)
        full_end = tl.minimum(tl.maximum(first + shift + hi + 1, 0), n)
    start = start // TILE * TILE
    end = tl.maximum(start, end)
    full_start = (full_start + TILE - 1) // TILE * TILE
    full_end = full_end // TILE * TILE
    none_full = full_end <= full_start
    full_start = tl.where(none_full, start, full_start)
    full_end = tl.where(none_full, start, full_end)
    edges = (full_start - start) // TILE + (end - full_end + TILE - 1) // TILE
    return Ranges(start, full_start, full_end, edges)


@device
def edge_start(index, ranges, TILE: tl.constexpr):
    """Where edge number `index` starts: first those before the full tiles, then those behind them."""
    at = ranges.start + index * TILE
    return at + tl.where(at >= ranges.full_start, ranges.full_end - ranges.full_start, 0)


@device
def in_one_loop(ranges, n, task, TILE: tl.constexpr, form: tl.constexpr):
    """The same tiles; of a band with two sides all that exist as a whole are full ones, and `is_cut` tells them apart.

    A window has as many edges as a row has, and each loop fills its pipeline anew. Where only one side cuts, a branch
    in every step costs more than that.
    """
    if task.inputs.lo is not None and task.inputs.hi is not None and not form.SPLIT:
        end = ranges.start + ranges.edges * TILE + (ranges.full_end - ranges.full_start)
        whole_end = tl.minimum(end, n // TILE * TILE)
        ranges = Ranges(ranges.start, ranges.start, whole_end, (end - whole_end) // TILE)
    return ranges


@device
def is_cut(at, ranges, task, form: tl.constexpr):
    """Whether the band cuts the tile at `at`, given the ranges of two loops; None where there are two."""
    cut = None
    if task.inputs.lo is not None and task.inputs.hi is not None and not form.SPLIT:
        cut = (at < ranges.full_start) | (at >= ranges.full_end)
    return cut


@device
def every_tile(ranges, TILE: tl.constexpr):
    """The same tiles, all of them edges."""
    edges = ranges.edges + (ranges.full_end - ranges.full_start) // TILE
    return Ranges(ranges.start, ranges.start, ranges.start, edges)
