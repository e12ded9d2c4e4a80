"""What the backward loads of a tile of queries: Q, dO, and LSE and delta of each row."""

from __future__ import annotations

import triton.language as tl

from ioattn.backends.triton.arguments import Rows
from ioattn.backends.triton.kernels.tiles import (
    EDGE,
    FULL,
    LOG2E,
    Queries,
    device,
    load_operand,
    load_q,
    load_rows,
    load_tile,
    one_of,
    or_zero,
    row_at,
)

UNSEEN = tl.constexpr(3.4028234663852886e38)
"""In place of the LSE of a query that saw nothing: exp(score - this) is 0."""

NEAR_LSE = tl.constexpr(1024.0)
"""An LSE up to here is rounded in powers of two by less than it is rounded itself at this number, 6e-5."""


@device
def load_queries(task, upstream, start, form: tl.constexpr, KIND: tl.constexpr):
    """A tile of queries; the LSE of one that saw nothing is 0, which makes exp(-inf - lse) 0 and not NaN."""
    q = load_q(task, start, form, KIND)
    first = row_at(upstream.dout, task.seq.batch, task.head, task.seq.start_q)
    dout = load_operand(upstream.dout, first, start, task.seq.len_q, form.OUT, form, KIND)
    if upstream.delta is None:
        lse, delta = load_pairs(upstream.lse, task, start, form, KIND)
    else:
        lse = or_zero(load_rows(upstream.lse, task, start, KIND, form.Q.ROWS))
        if form.FUSED:
            lse *= LOG2E
        if upstream.out is None:
            delta = load_rows(upstream.delta, task, start, KIND, form.Q.ROWS)
        else:
            delta = delta_of(dout, upstream, task, start, form)
        if form.BY_BLOCK:
            lse, delta = by_block(lse, delta)
    factor = 1.0
    if form.SPLIT:
        factor = load_rows(factor_rows(upstream), task, start, KIND, form.Q.ROWS)
    return Queries(start, q, dout, lse, delta, factor)


@device
def by_block(lse, delta):
    """The LSE in powers of two if all of the tile's are near 0, else as it is; the lowest bit of delta says so.

    Far from 0 it would be rounded too coarsely once more. dK and dV read both as dQ's kernel leaves them.
    """
    far = tl.max(((tl.abs(lse) <= NEAR_LSE) == 0).to(tl.int32), 0)
    flagged = delta.to(tl.int32, bitcast=True) & -2 | far
    return tl.where(far != 0, lse, lse * LOG2E), flagged.to(tl.float32, bitcast=True)


@device
def load_pairs(rows, task, start, form: tl.constexpr, KIND: tl.constexpr):
    """The LSE, in powers of two if FUSED, and delta of a tile of queries, side by side in memory; 0 where none is.

    dQ's kernel wrote them, UNSEEN for queries that saw nothing. The LSE by itself each step would compare and convert
    again, and of two rows of 64 numbers each thread would copy all that it needs: 345 instructions in a step of dK and
    dV at D 64, not 264.
    """
    TILE: tl.constexpr = form.Q.ROWS
    row = tl.arange(0, TILE)
    # Of fewer numbers than threads, too, each thread would copy all that it needs.
    TIMES: tl.constexpr = max(1, form.THREADS // (2 * TILE))
    first = row_at(rows, task.seq.batch, task.head, task.seq.start_q + tl.cast(start, tl.int64))
    pointers = first + (2 * row[:, None] + (tl.arange(0, 2 * TIMES) & 1)[None, :])
    exists = None
    other = None
    if KIND != FULL:
        exists = (start + row < task.seq.len_q)[:, None]
        other = 0.0
    both = tl.load(pointers, mask=exists, other=other)
    if TIMES > 1:
        both = one_of(both.reshape(TILE, TIMES, 2).permute(0, 2, 1))
    return tl.split(both)  # [TILE], [TILE]


@device
def factor_rows(upstream):
    """The factors of exp(-lse), which lie as the LSE does."""
    lse = upstream.lse
    return Rows(upstream.factor, lse.batch, lse.head, lse.row)


@device
def delta_of(dout, upstream, task, start, form: tl.constexpr):
    """rowsum(dO * O) - dLSE of a tile of queries.

    Where dQ's kernel makes it, and not one of its own, a whole backward with a window has 301 TFLOP/s, not 294 (H200).
    """
    first = row_at(upstream.out, task.seq.batch, task.head, task.seq.start_q)
    out = load_tile(upstream.out, first, start, task.seq.len_q, form.OUT, EDGE)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if upstream.dlse is not None:
        delta -= load_rows(upstream.dlse, task, start, EDGE, form.Q.ROWS)
    return delta


@device
def load_seeing_queries(task, upstream, start, form: tl.constexpr):
    """The same at an edge; NaN that arrives at one that saw nothing, its biases being -inf, goes no farther."""
    queries = load_queries(task, upstream, start, form, EDGE)
    dout = queries.dout
    delta = queries.delta
    if task.inputs.bias is not None:
        if upstream.delta is None:
            sees = queries.lse != UNSEEN
        else:
            sees = load_rows(upstream.lse, task, start, EDGE, form.Q.ROWS) != -float("inf")
        if form.PRECISION != "fp16x3":  # there is no NaN in halves
            dout = tl.where(sees[:, None], dout, tl.zeros_like(dout))
        nothing = 0.0
        if form.BY_BLOCK:
            nothing = (delta.to(tl.int32, bitcast=True) & 1).to(tl.float32, bitcast=True)
        delta = tl.where(sees, delta, nothing)
    return Queries(start, queries.q, dout, queries.lse, delta, queries.factor)
