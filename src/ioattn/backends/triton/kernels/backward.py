"""The backward: delta, then dK and dV by tiles of keys, dQ by tiles of queries, the bias's gradient by its own tiles.

Reads like `eager._backward_sequence`. P is recomputed from the scores and the LSE three times, once per kernel, and in
return every gradient is summed by the one program that owns it, in one order: no atomics, bitwise the same from run to
run, no workspace but delta. dK and dV hold scores as [K, Q], so that P^T and dS^T are made where they are used.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from ioattn.backends.triton.kernels.tiles import (
    EDGE,
    FULL,
    LOG2E,
    Task,
    clear_slack,
    distance_at,
    dot,
    edge_start,
    every_tile,
    key_ranges,
    load_rows,
    load_tile,
    only_finite,
    operands_at,
    or_zero,
    place,
    query_ranges,
    row_at,
    sequence_of,
    store_tile,
    visible_at,
)


@triton.jit(do_not_specialize=["numbers"])
def delta_kernel(out, dout, dlse, delta, numbers, form: tl.constexpr):
    """delta = rowsum(dO * O) - dLSE for one tile of queries; packed rows are one sequence here."""
    batch, head, tile = place(numbers, False)
    start = tile * form.OUT.ROWS
    out_tile = load_tile(out, row_at(out, batch, head, 0), start, numbers.rows_q, form.OUT, EDGE)
    dout_tile = load_tile(dout, row_at(dout, batch, head, 0), start, numbers.rows_q, form.OUT, EDGE)
    total = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    row = start + tl.arange(0, form.OUT.ROWS)
    exists = row < numbers.rows_q
    row = row.to(tl.int64)
    if dlse is not None:
        total -= tl.load(row_at(dlse, batch, head, row), mask=exists, other=0.0)
    tl.store(row_at(delta, batch, head, row), total, mask=exists)


@triton.jit(do_not_specialize=["numbers"])
def key_value_kernel(inputs, upstream, dk, dv, numbers, form: tl.constexpr, step: tl.constexpr, dstep: tl.constexpr):
    """Overwrite one tile of `dk` and `dv`: a walk over the queries that see it, of every head that shares it."""
    batch, kv_head, tile = place(numbers, False)
    seq = sequence_of(batch, inputs, numbers, form)
    if inputs.starts_q is not None:
        if batch == numbers.batch:
            clear_slack(dk, seq.start_k, numbers.rows_k, kv_head, tile, numbers, form.K)
            clear_slack(dv, seq.start_k, numbers.rows_k, kv_head, tile, numbers, form.V)
            return
    k_start = tile * form.K.ROWS
    if k_start >= seq.len_k:
        return
    k_tile = load_tile(inputs.k, row_at(inputs.k, seq.batch, kv_head, seq.start_k), k_start, seq.len_k, form.K, EDGE)
    v_tile = load_tile(inputs.v, row_at(inputs.v, seq.batch, kv_head, seq.start_k), k_start, seq.len_k, form.V, EDGE)
    dk_tile = tl.zeros((form.K.ROWS, form.K.WIDTH), tl.float32)
    dv_tile = tl.zeros((form.V.ROWS, form.V.WIDTH), tl.float32)
    ranges = query_ranges(k_start, Task(inputs, numbers, kv_head, seq), form)
    for member in range(0, form.GROUP):
        task = Task(inputs, numbers, kv_head * form.GROUP + member, seq)
        for q_start in range(ranges.full_start, ranges.full_end, form.Q.ROWS):
            dk_tile, dv_tile = add_queries(dk_tile, dv_tile, k_tile, v_tile, q_start, k_start, task, upstream, form, step, dstep, FULL)  # fmt: skip
        for edge in range(0, ranges.edges):
            q_start = edge_start(edge, ranges, form.Q.ROWS)
            dk_tile, dv_tile = add_queries(dk_tile, dv_tile, k_tile, v_tile, q_start, k_start, task, upstream, form, step, dstep, EDGE)  # fmt: skip
    dk_tile *= numbers.scale
    store_tile(dk_tile, dk, row_at(dk, seq.batch, kv_head, seq.start_k), k_start, seq.len_k, form.K)
    store_tile(dv_tile, dv, row_at(dv, seq.batch, kv_head, seq.start_k), k_start, seq.len_k, form.V)


@triton.jit
def add_queries(dk_tile, dv_tile, k_tile, v_tile, q_start, k_start, task, upstream, form: tl.constexpr, step: tl.constexpr, dstep: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """Add what one tile of queries contributes to a tile of dK and dV; scores are [K, Q]."""
    seq = task.seq
    q = task.inputs.q
    dout = upstream.dout
    row = (q_start + tl.arange(0, form.Q.ROWS))[None, :]
    col = (k_start + tl.arange(0, form.K.ROWS))[:, None]
    q_tile = load_tile(q, row_at(q, seq.batch, task.head, seq.start_q), q_start, seq.len_q, form.Q, KIND)
    dout_tile = load_tile(dout, row_at(dout, seq.batch, task.head, seq.start_q), q_start, seq.len_q, form.OUT, KIND)
    lse = load_rows(upstream.lse, task, q_start, KIND, form.Q.ROWS)
    delta = load_rows(upstream.delta, task, q_start, KIND, form.Q.ROWS)
    operands = operands_at(row, col, task)
    distance = distance_at(row, col, task)
    raw = dot(k_tile, tl.trans(q_tile), None, form) * task.numbers.scale
    scores = step(raw, distance, operands)
    weights = tl.exp2((scores - or_zero(lse)[None, :]) * LOG2E)
    if KIND != FULL:
        # Where a row's lse is NaN, exp has not made the hidden weights zero.
        visible = visible_at(row, col, task)
        weights = tl.where(visible, weights, 0.0)
    dv_tile = dot(weights.to(dout_tile.dtype), only_finite(dout_tile, KIND), dv_tile, form)
    dscores = weights * (dot(v_tile, tl.trans(dout_tile), None, form) - delta[None, :])
    if KIND != FULL:
        dscores = tl.where(visible, dscores, 0.0)
    dproduct = dstep(dscores, raw, distance, operands)
    dk_tile = dot(dproduct.to(q_tile.dtype), only_finite(q_tile, KIND), dk_tile, form)
    return dk_tile, dv_tile


@triton.jit(do_not_specialize=["numbers"])
def query_kernel(inputs, upstream, dq, dbias, numbers, form: tl.constexpr, step: tl.constexpr, dstep: tl.constexpr):
    """Overwrite one tile of `dq`, and what the walk touches of the gradient of a bias that repeats nothing."""
    batch, head, tile = place(numbers, True)
    seq = sequence_of(batch, inputs, numbers, form)
    task = Task(inputs, numbers, head, seq)
    if inputs.starts_q is not None:
        if batch == numbers.batch:
            clear_slack(dq, seq.start_q, numbers.rows_q, head, tile, numbers, form.Q)
            return
    q_start = tile * form.Q.ROWS
    if q_start >= seq.len_q:
        return
    dout = upstream.dout
    q_tile = load_tile(inputs.q, row_at(inputs.q, seq.batch, head, seq.start_q), q_start, seq.len_q, form.Q, EDGE)
    dout_tile = load_tile(dout, row_at(dout, seq.batch, head, seq.start_q), q_start, seq.len_q, form.OUT, EDGE)
    lse = or_zero(load_rows(upstream.lse, task, q_start, EDGE, form.Q.ROWS))
    delta = load_rows(upstream.delta, task, q_start, EDGE, form.Q.ROWS)
    dq_tile = tl.zeros((form.Q.ROWS, form.Q.WIDTH), tl.float32)
    ranges = key_ranges(q_start, task, form)
    for k_start in range(ranges.full_start, ranges.full_end, form.K.ROWS):
        dq_tile = add_keys(dq_tile, q_tile, dout_tile, lse, delta, q_start, k_start, task, dbias, form, step, dstep, FULL)
    for edge in range(0, ranges.edges):
        k_start = edge_start(edge, ranges, form.K.ROWS)
        dq_tile = add_keys(dq_tile, q_tile, dout_tile, lse, delta, q_start, k_start, task, dbias, form, step, dstep, EDGE)
    dq_tile *= numbers.scale
    store_tile(dq_tile, dq, row_at(dq, seq.batch, head, seq.start_q), q_start, seq.len_q, form.Q)


@triton.jit
def add_keys(dq_tile, q_tile, dout_tile, lse, delta, q_start, k_start, task, dbias, form: tl.constexpr, step: tl.constexpr, dstep: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """Add what one tile of keys contributes to a tile of dQ; scores are [Q, K]."""
    seq = task.seq
    inputs = task.inputs
    kv_head = task.head // form.GROUP
    row = (q_start + tl.arange(0, form.Q.ROWS))[:, None]
    col = (k_start + tl.arange(0, form.K.ROWS))[None, :]
    k_tile = load_tile(inputs.k, row_at(inputs.k, seq.batch, kv_head, seq.start_k), k_start, seq.len_k, form.K, KIND)
    v_tile = load_tile(inputs.v, row_at(inputs.v, seq.batch, kv_head, seq.start_k), k_start, seq.len_k, form.V, KIND)
    raw, dscores = dscores_of(q_tile, k_tile, v_tile, dout_tile, lse, delta, row, col, task, form, step)
    if KIND != FULL:
        dscores = tl.where(visible_at(row, col, task), dscores, 0.0)
    if dbias is not None:
        pointers = row_at(dbias, seq.batch, task.head, row.to(tl.int64)) + col.to(tl.int64) * dbias.column
        tl.store(pointers, dscores.to(dbias.ptr.dtype.element_ty), mask=(row < seq.len_q) & (col < seq.len_k))
    dproduct = dstep(dscores, raw, distance_at(row, col, task), operands_at(row, col, task))
    return dot(dproduct.to(k_tile.dtype), only_finite(k_tile, KIND), dq_tile, form)


@triton.jit
def dscores_of(q_tile, k_tile, v_tile, dout_tile, lse, delta, row, col, task, form: tl.constexpr, step: tl.constexpr):
    """scale * Q K^T of a tile and the gradient of its finished scores, before the mask."""
    raw = dot(q_tile, tl.trans(k_tile), None, form) * task.numbers.scale
    scores = step(raw, distance_at(row, col, task), operands_at(row, col, task))
    weights = tl.exp2((scores - lse[:, None]) * LOG2E)
    dscores = weights * (dot(dout_tile, tl.trans(v_tile), None, form) - delta[:, None])
    return raw, dscores


@triton.jit(do_not_specialize=["numbers", "repeats"])
def bias_kernel(inputs, upstream, dbias, repeats, numbers, form: tl.constexpr, step: tl.constexpr, ONE_ROW: tl.constexpr):  # fmt: skip
    """Overwrite one tile of the gradient of a bias: the sum of dS over the batches, heads and queries it repeats for.

    `repeats` counts them, in tiles of queries where the bias is ONE_ROW for all. One program sums them, in one order.
    """
    key_tiles = (numbers.len_k + form.K.ROWS - 1) // form.K.ROWS
    program = tl.program_id(0)
    k_start = program % key_tiles * form.K.ROWS
    own_tile = program // key_tiles % numbers.tiles
    own = program // key_tiles // numbers.tiles
    own_head = own % (numbers.heads // repeats.heads)
    own_batch = own // (numbers.heads // repeats.heads)
    total = tl.zeros((form.Q.ROWS, form.K.ROWS), tl.float32)
    for at in range(0, repeats.batches * repeats.heads * repeats.tiles):
        head = own_head + at // repeats.tiles % repeats.heads
        batch = own_batch + at // repeats.tiles // repeats.heads
        seq = sequence_of(batch.to(tl.int64), inputs, numbers, form)
        task = Task(inputs, numbers, head.to(tl.int64), seq)
        q_start = (own_tile + at % repeats.tiles) * form.Q.ROWS
        ranges = every_tile(key_ranges(q_start, task, form), form.K.ROWS)
        if (k_start >= ranges.start) & (k_start < ranges.start + ranges.edges * form.K.ROWS):
            total += dscores_at(q_start, k_start, task, upstream, form, step)
    column = k_start + tl.arange(0, form.K.ROWS)
    pointers = row_at(dbias, own_batch.to(tl.int64), own_head.to(tl.int64), 0) + column.to(tl.int64) * dbias.column
    exists = column < numbers.len_k
    if ONE_ROW:
        tl.store(pointers, tl.sum(total, 0).to(dbias.ptr.dtype.element_ty), mask=exists)
    else:
        row = own_tile * form.Q.ROWS + tl.arange(0, form.Q.ROWS)
        pointers = pointers[None, :] + row.to(tl.int64)[:, None] * dbias.row
        exists = exists[None, :] & (row < numbers.len_q)[:, None]
        tl.store(pointers, total.to(dbias.ptr.dtype.element_ty), mask=exists)


@triton.jit
def dscores_at(q_start, k_start, task, upstream, form: tl.constexpr, step: tl.constexpr):
    """The gradient of the finished scores of one tile, [Q, K]."""
    seq = task.seq
    inputs = task.inputs
    dout = upstream.dout
    kv_head = task.head // form.GROUP
    row = (q_start + tl.arange(0, form.Q.ROWS))[:, None]
    col = (k_start + tl.arange(0, form.K.ROWS))[None, :]
    q_tile = load_tile(inputs.q, row_at(inputs.q, seq.batch, task.head, 0), q_start, seq.len_q, form.Q, EDGE)
    k_tile = load_tile(inputs.k, row_at(inputs.k, seq.batch, kv_head, 0), k_start, seq.len_k, form.K, EDGE)
    v_tile = load_tile(inputs.v, row_at(inputs.v, seq.batch, kv_head, 0), k_start, seq.len_k, form.V, EDGE)
    dout_tile = load_tile(dout, row_at(dout, seq.batch, task.head, 0), q_start, seq.len_q, form.OUT, EDGE)
    lse = or_zero(load_rows(upstream.lse, task, q_start, EDGE, form.Q.ROWS))
    delta = load_rows(upstream.delta, task, q_start, EDGE, form.Q.ROWS)
    _, dscores = dscores_of(q_tile, k_tile, v_tile, dout_tile, lse, delta, row, col, task, form, step)
    return tl.where(visible_at(row, col, task), dscores, 0.0)
