"""A second look at the tiles that are not finite, where the band or a mask hides scores.

A hidden weight is 0, but 0 * NaN is NaN: NaN or inf in a row of V that a query does not see would reach it through the
tile that holds them both, and the same goes for Q, K and dO in the backward. Instead of a test per tile in the loops
that count, these kernels look at the results once, leave a tile alone if it is finite, as nearly always, and otherwise
compute it again with care. A program looks at several tiles: what one costs is its start and a wait for memory.

They stand on their own because inside of the kernels they repair they cost the loops their registers: 154 spills per
step in dK and dV at D128 on sm_90.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ioattn.backends.triton.config import TILES_AT_ONCE
from ioattn.backends.triton.kernels.backward import add_keys, add_queries, parts_of, store_keys, sum_for
from ioattn.backends.triton.kernels.forward import attend, rows_after, scaled, sink_or_nothing, store_results, total_of
from ioattn.backends.triton.kernels.products import add_special, scales_of
from ioattn.backends.triton.kernels.queries import load_seeing_queries
from ioattn.backends.triton.kernels.ranges import edge_start, every_tile, key_ranges, query_ranges
from ioattn.backends.triton.kernels.scores import mask_at, pairs_at, turned_pairs_at, words_at
from ioattn.backends.triton.kernels.tiles import (
    EDGE,
    EXACT,
    Keys,
    Queries,
    Task,
    decoded,
    device,
    is_finite,
    load_keys,
    load_q,
    load_tile,
    margin_at,
    place,
    row_at,
    sequence_of,
    store_tile,
    zeros_for,
)

AT_ONCE = tl.constexpr(TILES_AT_ONCE)


@device
def is_sound(matrix, first, start, step, n, box: tl.constexpr, COUNT: tl.constexpr):
    """Whether nothing hidden has reached COUNT tiles of results, `step` rows apart, as far as they start below row n.

    It would have reached every row of a tile, as 0 * NaN is NaN for all of them: one row tells. In float32 all are
    read: a product of halves may have overflown in any.
    """
    if matrix.ptr.dtype.element_ty == tl.float32:
        sound = start >= 0
        for at in range(start, tl.minimum(start + tl.cast(step, tl.int64) * COUNT, n), step):
            sound = sound & is_finite(load_tile(matrix, first, at, n, box, EDGE))
    else:
        row = (start + tl.arange(0, COUNT).to(tl.int64) * step)[:, None]
        column = tl.arange(0, box.WIDTH).to(tl.int64)[None, :]
        pointers = first + (row * matrix.row + column * matrix.column)
        sound = is_finite(tl.load(pointers, mask=(row < n) & (column < box.COLUMNS), other=0.0))
    return sound


@triton.jit
def repair_forward_kernel(inputs, out, lse, numbers, form: tl.constexpr, step: tl.constexpr):
    """Overwrite the tiles of `out` and `lse` again that are not finite: of the program's, `numbers.tiles` apart."""
    numbers = decoded(numbers)
    batch, head, tile = place(numbers, False)
    seq = sequence_of(batch, inputs, numbers, form)
    start = tile * form.Q.ROWS
    stride = numbers.tiles * form.Q.ROWS
    first = row_at(out, seq.batch, head, seq.start_q)
    if is_sound(out, first, start, stride, seq.len_q, form.OUT, AT_ONCE):
        return
    scales = scales_of(inputs, seq.batch, head // form.GROUP, numbers.heads // form.GROUP, form)
    task = Task(inputs, numbers, head, seq, scales)
    for q_start in range(start, seq.len_q, stride):
        if is_sound(out, first, q_start, stride, seq.len_q, form.OUT, 1) == 0:
            repair_out(out, lse, q_start, task, form, step)


@device
def repair_out(out, lse, q_start, task, form: tl.constexpr, step: tl.constexpr):
    """Overwrite one tile of `out` and `lse`."""
    q_tile = scaled(load_q(task, q_start, form, EDGE), task, form.SCALED)
    ranges = every_tile(key_ranges(q_start, task, form), form.K.ROWS)
    row_max, row_sum = sink_or_nothing(task, form)
    acc = zeros_for(form.OUT)
    for edge in range(ranges.edges):
        k_start = edge_start(edge, ranges, form.K.ROWS)
        words = words_at(q_start, k_start, task, form, EDGE)
        pairs = pairs_at(q_start, k_start, form)
        row_max, row_sum, acc = attend(row_max, row_sum, acc, q_tile, words, pairs, None, task, form, step, EXACT)
    for edge in range(ranges.edges):
        keys = load_keys(task, edge_start(edge, ranges, form.K.ROWS), form, EDGE)
        acc = add_special_values(acc, q_start, keys, task, form)
    row_max, rest = rows_after(row_max, form)
    store_results(row_max, rest, total_of(row_sum, form), acc, out, lse, q_start, task, form)


@device
def is_visible(pairs, task, form: tl.constexpr):
    """Which scores of a tile count."""
    words = words_at(pairs.q_start, pairs.k_start, task, form, EDGE)
    visible = margin_at(pairs, task, EXACT) >= 0
    mask = mask_at(pairs, words, task, form)
    if mask is not None:
        visible = visible & (mask != 0)
    return visible


@device
def add_special_values(acc, q_start, keys, task, form: tl.constexpr):
    """Add what is infinite or NaN in one tile of V, where it is visible."""
    pairs = pairs_at(q_start, keys.start, form)
    visible = is_visible(pairs, task, form)
    return (add_special(acc[0], visible, keys.v, form, False),)


@triton.jit
def repair_key_value_kernel(
    inputs, upstream, dk, dv, numbers, form: tl.constexpr, step: tl.constexpr, dstep: tl.constexpr
):
    """The same for `dk` and `dv`, both unless both are finite; either may be None."""
    numbers = decoded(numbers)
    batch, kv_head, tile = place(numbers, False)
    seq = sequence_of(batch, inputs, numbers, form)
    start = tile * form.K.ROWS
    stride = numbers.tiles * form.K.ROWS
    if are_sound(dk, dv, kv_head, start, stride, seq, form, AT_ONCE):
        return
    scales = scales_of(inputs, seq.batch, kv_head, numbers.heads, form)
    for k_start in range(start, seq.len_k, stride):
        if are_sound(dk, dv, kv_head, k_start, stride, seq, form, 1) == 0:
            task = Task(inputs, numbers, kv_head * form.GROUP, seq, scales)
            repair_keys(dk, dv, k_start, kv_head, task, upstream, form, step, dstep)


@device
def are_sound(dk, dv, kv_head, start, step, seq, form: tl.constexpr, COUNT: tl.constexpr):
    """`is_sound` of both."""
    sound = start >= 0
    if dk is not None:
        sound = is_sound(dk, row_at(dk, seq.batch, kv_head, seq.start_k), start, step, seq.len_k, form.K, COUNT)
    if dv is not None:
        first = row_at(dv, seq.batch, kv_head, seq.start_k)
        sound = sound & is_sound(dv, first, start, step, seq.len_k, form.V, COUNT)
    return sound


@device
def repair_keys(dk, dv, k_start, kv_head, task, upstream, form: tl.constexpr, step: tl.constexpr, dstep: tl.constexpr):
    """Overwrite one tile of `dk` and `dv`."""
    keys = load_keys(task, k_start, form, EDGE)
    keys = Keys(k_start, scaled(keys.k, task, form.SCALED), keys.v)
    dk_tile = sum_for(dk, form.K)
    dv_tile = sum_for(dv, form.V)
    ranges = every_tile(query_ranges(k_start, task, form), form.Q.ROWS)
    for head in range(kv_head * form.GROUP, (kv_head + 1) * form.GROUP):
        own = Task(task.inputs, task.numbers, head, task.seq, task.scales)
        for edge in range(ranges.edges):
            queries = load_seeing_queries(own, upstream, edge_start(edge, ranges, form.Q.ROWS), form)
            words = words_at(queries.start, k_start, own, form, EDGE)
            dk_tile, dv_tile, _ = add_queries(
                dk_tile, dv_tile, queries, keys, words, None, None, own, dk, dv, form, step, dstep, EXACT
            )
        for edge in range(ranges.edges):
            queries = load_seeing_queries(own, upstream, edge_start(edge, ranges, form.Q.ROWS), form)
            dk_tile, dv_tile = add_special_queries(dk_tile, dv_tile, queries, k_start, own, dk, dv, form)
    store_keys(dk_tile, dv_tile, dk, dv, kv_head, k_start, task, form)


@device
def add_special_queries(dk_tile, dv_tile, queries, k_start, task, dk, dv, form: tl.constexpr):
    """Add what is infinite or NaN in one tile of Q and of dO, where it is visible."""
    pairs = turned_pairs_at(queries.start, k_start, form)
    visible = is_visible(pairs, task, form)
    if dk is not None:
        dk_tile = (add_special(dk_tile[0], visible, queries.q, form, True),)
    if dv is not None:
        dv_tile = (add_special(dv_tile[0], visible, queries.dout, form, False),)
    return dk_tile, dv_tile


@triton.jit
def repair_query_kernel(
    inputs, upstream, dq, dbias, totals, numbers, form: tl.constexpr, step: tl.constexpr, dstep: tl.constexpr
):
    """The same for `dq`; in `dbias` and `totals` hidden scores are 0 already."""
    numbers = decoded(numbers)
    batch, head, tile = place(numbers, False)
    seq = sequence_of(batch, inputs, numbers, form)
    start = tile * form.Q.ROWS
    stride = numbers.tiles * form.Q.ROWS
    first = row_at(dq, seq.batch, head, seq.start_q)
    if is_sound(dq, first, start, stride, seq.len_q, form.Q, AT_ONCE):
        return
    scales = scales_of(inputs, seq.batch, head // form.GROUP, numbers.heads // form.GROUP, form)
    task = Task(inputs, numbers, head, seq, scales)
    for q_start in range(start, seq.len_q, stride):
        if is_sound(dq, first, q_start, stride, seq.len_q, form.Q, 1) == 0:
            repair_dq(dq, q_start, task, upstream, form, step, dstep)


@device
def repair_dq(dq, q_start, task, upstream, form: tl.constexpr, step: tl.constexpr, dstep: tl.constexpr):
    """Overwrite one tile of `dq`."""
    queries = load_seeing_queries(task, upstream, q_start, form)
    q = scaled(queries.q, task, form.SCALED)
    queries = Queries(queries.start, q, queries.dout, queries.lse, queries.delta, queries.factor)
    dq_factor = task.numbers.scale
    if form.SPLIT:
        # As in the kernel that is repaired, to the bit.
        power, correction = parts_of(queries.factor)
        queries = Queries(queries.start, queries.q, queries.dout, queries.lse, queries.delta, power)
        dq_factor = (dq_factor * correction)[:, None]
    dq_tile = zeros_for(form.Q)
    sums = tl.zeros((form.Q.ROWS,), tl.float32)
    ranges = every_tile(key_ranges(q_start, task, form), form.K.ROWS)
    for edge in range(ranges.edges):
        keys = load_keys(task, edge_start(edge, ranges, form.K.ROWS), form, EDGE)
        words = words_at(q_start, keys.start, task, form, EDGE)
        dq_tile, sums, _, _ = add_keys(
            dq_tile, sums, sums, queries, keys, words, None, task, None, None, form, step, dstep, EXACT
        )
    for edge in range(ranges.edges):
        keys = load_keys(task, edge_start(edge, ranges, form.K.ROWS), form, EDGE)
        dq_tile = add_special_keys(dq_tile, q_start, keys, task, form)
    first = row_at(dq, task.seq.batch, task.head, task.seq.start_q)
    store_tile(dq_tile, dq_factor, dq, first, q_start, task.seq.len_q, form.Q)


@device
def add_special_keys(dq_tile, q_start, keys, task, form: tl.constexpr):
    """Add what is infinite or NaN in one tile of K, where it is visible."""
    pairs = pairs_at(q_start, keys.start, form)
    visible = is_visible(pairs, task, form)
    return (add_special(dq_tile[0], visible, keys.k, form, True),)
