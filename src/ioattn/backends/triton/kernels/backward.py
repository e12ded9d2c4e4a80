"""The backward: dQ by tiles of queries, dK and dV by tiles of keys, the bias's gradient by its own tiles.

Reads like `eager._backward_sequence`. P is recomputed from the scores and the LSE three times, once per kernel, and in
return every gradient is summed by the one program that owns it, in one order: no atomics, bitwise the same from run to
run, no workspace but delta. dK and dV hold scores as [K, Q], so that P^T and dS^T are made where they are used.

In float32 the largest error would be that of the LSE, of 9 as a rule, and of exponents near -12: up to 5e-7 each, and
relative errors of the weights. So the LSE is split, and dQ's kernel, which sees all weights of a row, comes first and
finds out by how much they miss their sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ioattn.backends.triton.arguments import Rows
from ioattn.backends.triton.kernels.products import (
    add_product,
    belongs_to_others,
    multiply,
    only_finite,
    power_of_two,
    scales_of,
)
from ioattn.backends.triton.kernels.queries import UNSEEN, factor_rows, load_queries, load_seeing_queries
from ioattn.backends.triton.kernels.ranges import edge_start, every_tile, in_one_loop, is_cut, key_ranges, query_ranges
from ioattn.backends.triton.kernels.scores import (
    cover_at,
    distance_at,
    mask_at,
    next_words,
    operands_at,
    pairs_at,
    store_scores,
    turned_pairs_at,
    words_at,
)
from ioattn.backends.triton.kernels.tiles import (
    EDGE,
    FULL,
    LOG2E,
    Keys,
    Queries,
    Task,
    clear_slack,
    decoded,
    device,
    keep,
    keep_where_cut,
    load_keys,
    load_rows,
    load_tile,
    margin_at,
    place,
    rounded,
    row_at,
    scaled_by_way_of,
    sequence_of,
    store_tile,
    zeros_for,
)
from ioattn.backends.triton.kernels.weights import dproduct_of, exponents_of

LN2_HIGH = tl.constexpr(45426 / 2**16)
"""Multiples of it are exact in float32."""
LN2_LOW = tl.constexpr(0.6931471805599453 - 45426 / 2**16)


@triton.jit
def delta_kernel(out, dlse, lse, upstream, numbers, form: tl.constexpr):
    """delta = rowsum(dO * O) - dLSE for one tile of queries, and the LSE in two parts.

    For float32: in 16 bits dQ's kernel makes delta, and the LSE stays whole. Packed rows are one sequence here.
    """
    numbers = decoded(numbers)
    batch, head, tile = place(numbers, False)
    start = tile * form.OUT.ROWS
    out_tile = load_tile(out, row_at(out, batch, head, 0), start, numbers.rows_q, form.OUT, EDGE)
    dout = upstream.dout
    dout_tile = load_tile(dout, row_at(dout, batch, head, 0), start, numbers.rows_q, form.OUT, EDGE)
    total = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    row = start + tl.arange(0, form.OUT.ROWS)
    exists = row < numbers.rows_q
    row = row.to(tl.int64)
    if dlse is not None:
        total -= tl.load(row_at(dlse, batch, head, row), mask=exists, other=0.0)
    tl.store(row_at(upstream.delta, batch, head, row), total, mask=exists)
    rest, factor = split_lse(tl.load(row_at(lse, batch, head, row), mask=exists, other=0.0))
    tl.store(row_at(upstream.lse, batch, head, row), rest, mask=exists)
    tl.store(row_at(factor_rows(upstream), batch, head, row), factor, mask=exists)


@device
def split_lse(lse):
    """(rest, factor) of which exp(-lse) = factor * exp(-rest): a power of two, and what is left, below 0.35.

    Far from 0 the scores are not more accurate than the LSE, and nothing may overflow: there the rest is all of it.
    """
    exponent = tl.where(tl.abs(lse) < 64.0, tl.floor(lse * LOG2E + 0.5), 0.0)
    rest = (lse - exponent * LN2_HIGH) - exponent * LN2_LOW
    return rest, power_of_two(-exponent.to(tl.int32))


@triton.jit
def key_value_kernel(inputs, upstream, dk, dv, numbers, form: tl.constexpr, step: tl.constexpr, dstep: tl.constexpr):
    """Overwrite one tile of `dk` and `dv`: a walk over the queries that see it, of every head that shares it.

    One of the two may be None: then the other comes at the cost of one product, two of four, less than both.
    """
    numbers = decoded(numbers)
    batch, kv_head, tile = place(numbers, False)
    seq = sequence_of(batch, inputs, numbers, form)
    if inputs.scales is not None:
        if belongs_to_others(inputs, seq.batch, kv_head, numbers.heads, numbers, form):
            return
    scales = scales_of(inputs, seq.batch, kv_head, numbers.heads, form)
    task = Task(inputs, numbers, kv_head * form.GROUP, seq, scales)
    if inputs.starts_q is not None and batch == numbers.batch:
        if dk is not None:
            clear_slack(dk, seq.start_k, numbers.rows_k, kv_head, tile, numbers, form.K)
        if dv is not None:
            clear_slack(dv, seq.start_k, numbers.rows_k, kv_head, tile, numbers, form.V)
        return
    k_start = tile * form.K.ROWS
    if k_start >= seq.len_k:
        return
    keys = keys_at(k_start, dk, kv_head, task, form)
    dk_tile = sum_for(dk, form.K)
    dv_tile = sum_for(dv, form.V)
    separate = query_ranges(k_start, task, form)
    ranges = in_one_loop(separate, seq.len_q, task, form.Q.ROWS, form)
    for head in range(kv_head * form.GROUP, (kv_head + 1) * form.GROUP):
        task = Task(inputs, numbers, head, seq, scales)
        # A tile ahead: see the forward.
        words = words_at(ranges.full_start, k_start, task, form, EDGE)
        for q_start in range(ranges.full_start, ranges.full_end, form.Q.ROWS):
            queries = load_queries(task, upstream, q_start, form, FULL)
            cut = is_cut(q_start, separate, task, form)
            next_start = tl.minimum(q_start + form.Q.ROWS, ranges.full_end - form.Q.ROWS)
            dk_tile, dv_tile, words = add_queries(
                dk_tile, dv_tile, queries, keys, words, cut, next_start, task, dk, dv, form, step, dstep, FULL
            )
        for edge in range(ranges.edges):
            queries = load_queries(task, upstream, edge_start(edge, ranges, form.Q.ROWS), form, EDGE)
            words = words_at(queries.start, k_start, task, form, EDGE)
            dk_tile, dv_tile, _ = add_queries(
                dk_tile, dv_tile, queries, keys, words, None, None, task, dk, dv, form, step, dstep, EDGE
            )
    store_keys(dk_tile, dv_tile, dk, dv, kv_head, k_start, task, form)


@device
def keys_at(k_start, dk, kv_head, task, form: tl.constexpr):
    """The tile of keys and values."""
    keys = load_keys(task, k_start, form, EDGE)
    if form.SCALED:
        seq = task.seq
        first = row_at(dk, seq.batch, kv_head, seq.start_k)
        k = scaled_by_way_of(dk, first, keys.k, k_start, seq.len_k, task.numbers.q_factor, form.K)
        keys = Keys(k_start, k, keys.v)
    return keys


@device
def sum_for(matrix, box: tl.constexpr):
    """Zeros for the sum of a tile, or for nothing."""
    return () if matrix is None else zeros_for(box)


@device
def store_keys(dk_tile, dv_tile, dk, dv, kv_head, k_start, task, form: tl.constexpr):
    """Write the finished sums of a tile of keys."""
    seq = task.seq
    if dk is not None:
        first = row_at(dk, seq.batch, kv_head, seq.start_k)
        store_tile(dk_tile, task.numbers.scale * task.scales.q, dk, first, k_start, seq.len_k, form.K)
    if dv is not None:
        first = row_at(dv, seq.batch, kv_head, seq.start_k)
        store_tile(dv_tile, task.scales.dout, dv, first, k_start, seq.len_k, form.V)


@device
def add_queries(
    dk_tile,
    dv_tile,
    queries,
    keys,
    words,
    cut,
    next_start,
    task,
    dk,
    dv,
    form: tl.constexpr,
    step: tl.constexpr,
    dstep: tl.constexpr,
    KIND: tl.constexpr,
):
    """Add what one tile of queries contributes to a tile of dK and dV; scores are [K, Q]. And the next tile's words."""
    pairs = turned_pairs_at(queries.start, keys.start, form)
    operands = operands_at(pairs, words, task, form)
    distance = distance_at(pairs, task)
    product = multiply(keys.k, queries.q, form)
    mask = mask_at(pairs, words, task, form) if form.SPLIT else None
    cover = None if form.SPLIT else cover_at(pairs, words, product, task, form)
    words = next_words(words, next_start, keys.start, task, form, form.BY_BLOCK)
    weights, dweights = weights_beside(product, distance, operands, queries, keys, dk, task, form, step)
    # As soon as the last ones are used: behind the copies of the next tile they, and the copies behind them, come late.
    words = next_words(words, next_start, keys.start, task, form, not form.BY_BLOCK)
    margin = margin_at(pairs, task, KIND)
    # Where a row's lse is NaN, exp has not made the hidden weights zero.
    weights = keep_where_cut(cut, pairs, task, keep(margin, mask, weights, 0.0), 0.0)
    if dv is not None:
        dv_tile = add_product(dv_tile, weights, cover, only_finite(queries.dout, KIND), form)
    if dk is not None:
        if len(dweights) == 0:
            dweights = (multiply(keys.v, queries.dout, form) * (task.scales.v * task.scales.dout),)
        dscores = keep(margin, mask, weights * (dweights[0] - queries.delta[None, :]), 0.0)
        dscores = keep_where_cut(cut, pairs, task, dscores, 0.0)
        dproduct = dproduct_of(dscores, product, distance, operands, task, form, dstep)
        dk_tile = add_product(dk_tile, dproduct, cover, only_finite(queries.q, KIND), form)
    return dk_tile, dv_tile, words


@device
def weights_beside(product, distance, operands, queries, keys, dk, task, form: tl.constexpr, step: tl.constexpr):
    """The weights of a tile, [K, Q], and dP in a tuple, which is empty where it is to be made later.

    Where exponents come out of a branch, which nothing crosses, dP in front of the weights lets them be made while the
    tensor cores are at it: softcap 2900 to 2700 us, a bias 2790 to 2710; without a branch 2180 to 2285 (H200, D 64;
    above that it was not timed).
    """
    exponents = exponents_of(
        product, distance, operands, queries.lse[None, :], queries.delta[None, :], task, form, step
    )
    dweights = ()
    if dk is not None and form.K.WIDTH <= 64 and (form.SQUASHED or form.BY_BLOCK):
        dweights = (multiply(keys.v, queries.dout, form) * (task.scales.v * task.scales.dout),)
    weights = tl.exp2(exponents)
    if form.SPLIT:
        weights *= queries.factor[None, :]
    return weights, dweights


@triton.jit
def query_kernel(
    inputs, upstream, dq, dbias, totals, numbers, form: tl.constexpr, step: tl.constexpr, dstep: tl.constexpr
):
    """Overwrite one tile of `dq`, what the walk touches of the gradient of a bias that repeats nothing, and `totals`.

    `totals` are the sums of dS over the keys, wanted for the gradient of sinks.
    """
    numbers = decoded(numbers)
    batch, head, tile = place(numbers, inputs.hi is not None)
    seq = sequence_of(batch, inputs, numbers, form)
    if inputs.scales is not None:
        if belongs_to_others(inputs, seq.batch, head // form.GROUP, numbers.heads // form.GROUP, numbers, form):
            return
    scales = scales_of(inputs, seq.batch, head // form.GROUP, numbers.heads // form.GROUP, form)
    task = Task(inputs, numbers, head, seq, scales)
    if inputs.starts_q is not None and batch == numbers.batch:
        clear_slack(dq, seq.start_q, numbers.rows_q, head, tile, numbers, form.Q)
        return
    q_start = tile * form.Q.ROWS
    if q_start >= seq.len_q:
        return
    queries = queries_at(q_start, upstream, dq, dbias, task, form)
    dq_tile = zeros_for(form.Q)
    total = tl.zeros((form.Q.ROWS,), tl.float32)
    sums = tl.zeros((form.Q.ROWS,), tl.float32)
    ranges = key_ranges(q_start, task, form)
    words = words_at(q_start, ranges.full_start, task, form, EDGE)
    for k_start in range(ranges.full_start, ranges.full_end, form.K.ROWS):
        keys = load_keys(task, k_start, form, FULL)
        next_start = tl.minimum(k_start + form.K.ROWS, ranges.full_end - form.K.ROWS)
        dq_tile, total, sums, words = add_keys(
            dq_tile, total, sums, queries, keys, words, next_start, task, dbias, totals, form, step, dstep, FULL
        )
        if not form.BY_BLOCK:
            # Made again: from in front of the products a step of FP16 at D 64 has 400 instructions, not 395.
            next_start = tl.minimum(k_start + form.K.ROWS, ranges.full_end - form.K.ROWS)
            words = words_at(q_start, next_start, task, form, FULL)
    # As in the forward.
    if ranges.edges > 0:
        for edge in range(ranges.edges):
            keys = load_keys(task, edge_start(edge, ranges, form.K.ROWS), form, EDGE)
            words = words_at(q_start, keys.start, task, form, EDGE)
            dq_tile, total, sums, _ = add_keys(
                dq_tile, total, sums, queries, keys, words, None, task, dbias, totals, form, step, dstep, EDGE
            )
    if inputs.bias is not None and dbias is None:
        dq_tile, total = of_seeing_queries(dq_tile, total, upstream, q_start, task, form)
    store_queries(dq_tile, total, sums, queries, upstream, dq, totals, task, form)


@device
def queries_at(q_start, upstream, dq, dbias, task, form: tl.constexpr):
    """The tile of queries; writes its delta where that is made here."""
    if dbias is None:
        # Not those that see alone: what has passed a select comes to the tensor cores by way of registers.
        queries = load_queries(task, upstream, q_start, form, EDGE)
    else:
        queries = load_seeing_queries(task, upstream, q_start, form)
    if upstream.out is not None:
        store_rows(queries.delta, upstream.delta, q_start, task, form)
        if not form.SPLIT:
            # Beside delta, in front of it: see `load_pairs`.
            seen = load_rows(upstream.lse, task, q_start, EDGE, form.Q.ROWS) != -float("inf")
            before = Rows(upstream.delta.ptr - 1, upstream.delta.batch, upstream.delta.head, upstream.delta.row)
            store_rows(tl.where(seen, queries.lse, UNSEEN), before, q_start, task, form)
    if form.SCALED:
        first = row_at(dq, task.seq.batch, task.head, task.seq.start_q)
        q = scaled_by_way_of(dq, first, queries.q, q_start, task.seq.len_q, task.numbers.q_factor, form.Q)
        queries = Queries(queries.start, q, queries.dout, queries.lse, queries.delta, queries.factor)
    return queries


@device
def of_seeing_queries(dq_tile, total, upstream, q_start, task, form: tl.constexpr):
    """The same sums; NaN that arrives at a query that saw nothing, its biases being -inf, goes no farther."""
    sees = load_rows(upstream.lse, task, q_start, EDGE, form.Q.ROWS) != -float("inf")
    kept = ()
    for i in tl.static_range(len(dq_tile)):
        kept += (tl.where(sees[:, None], dq_tile[i], 0.0),)
    return kept, tl.where(sees, total, 0.0)


@device
def store_queries(dq_tile, total, sums, queries, upstream, dq, totals, task, form: tl.constexpr):
    """Write the finished sums of a tile of queries."""
    seq = task.seq
    dq_factor = task.numbers.scale * task.scales.k
    if form.SPLIT:
        correction = correction_of(sums, queries, task)
        store_rows(queries.factor * correction, factor_rows(upstream), queries.start, task, form)
        dq_factor = (dq_factor * correction)[:, None]
        total *= correction
    first = row_at(dq, seq.batch, task.head, seq.start_q)
    store_tile(dq_tile, dq_factor, dq, first, queries.start, seq.len_q, form.Q)
    if totals is not None:
        store_rows(total, totals, queries.start, task, form)


@device
def store_rows(values, rows, start, task, form: tl.constexpr):
    """Write one number per query of a tile."""
    row = start + tl.arange(0, form.Q.ROWS)
    pointers = row_at(rows, task.seq.batch, task.head, task.seq.start_q + row.to(tl.int64))
    tl.store(pointers, values, mask=row < task.seq.len_q)


@device
def correction_of(sums, queries, task):
    """What makes the weights of a row sum to 1, its sink's included, where they miss it as the LSE's rounding explains.

    They miss it by more where the LSE is that of these keys and others.
    """
    if task.inputs.sinks is not None:
        sink = tl.load(task.inputs.sinks + task.head).to(tl.float32)
        sums += tl.exp2((sink - queries.lse) * LOG2E) * queries.factor
    lse = queries.lse - tl.log(queries.factor)
    rounding = tl.minimum(4.8e-7 * (tl.abs(lse) + 4.0), 0.25)
    return tl.where(tl.abs(sums - 1.0) <= rounding, 1.0 / sums, 1.0)


@device
def parts_of(factor):
    """The power of two, and the correction close to 1 that dQ's kernel multiplied it with."""
    power = (factor.to(tl.int32, bitcast=True) + 0x400000 & 0x7F800000).to(tl.float32, bitcast=True)
    return power, factor / power


@device
def add_keys(
    dq_tile,
    total,
    sums,
    queries,
    keys,
    words,
    next_start,
    task,
    dbias,
    totals,
    form: tl.constexpr,
    step: tl.constexpr,
    dstep: tl.constexpr,
    KIND: tl.constexpr,
):
    """Add what one tile of keys contributes to a tile of dQ and to the sums of dS and of weights; scores are [Q, K].

    The last result are the words of the next tile where `Form.BY_BLOCK`, else those of this one.
    """
    pairs = pairs_at(queries.start, keys.start, form)
    operands = operands_at(pairs, words, task, form)
    distance = distance_at(pairs, task)
    product = multiply(queries.q, keys.k, form)
    # What is stored of dS, or summed besides, is in float32.
    EARLY: tl.constexpr = form.SPLIT or dbias is not None or totals is not None
    mask = mask_at(pairs, words, task, form) if EARLY else None
    cover = None if EARLY else cover_at(pairs, words, product, task, form)
    words = next_words(words, queries.start, next_start, task, form, form.BY_BLOCK)
    weights = weights_at(product, distance, operands, queries, task, form, step)
    if form.SPLIT:
        sums += tl.sum(keep(margin_at(pairs, task, KIND), mask, weights, 0.0), 1)
    dscores = dscores_of(weights, queries, keys, task, form)
    dscores = keep(margin_at(pairs, task, KIND), mask, dscores, 0.0)
    if dbias is not None:
        store_scores(dscores, dbias, pairs, task)
    if totals is not None:
        total += tl.sum(dscores, 1)
    dproduct = dproduct_of(dscores, product, distance, operands, task, form, dstep)
    dq_tile = add_product(dq_tile, dproduct, cover, only_finite(keys.k, KIND), form)
    return dq_tile, total, sums, words


@device
def weights_at(product, distance, operands, queries, task, form: tl.constexpr, step: tl.constexpr):
    """The weights of a tile, [Q, K], before the mask."""
    exponents = exponents_of(
        product, distance, operands, queries.lse[:, None], queries.delta[:, None], task, form, step
    )
    weights = tl.exp2(exponents)
    if form.SPLIT:
        weights *= queries.factor[:, None]
    return weights


@device
def dscores_of(weights, queries, keys, task, form: tl.constexpr):
    """The gradient of the finished scores of a tile, [Q, K], before the mask."""
    dweights = multiply(queries.dout, keys.v, form) * (task.scales.v * task.scales.dout)
    return weights * (dweights - queries.delta[:, None])


@triton.jit
def bias_kernel(
    inputs, upstream, dbias, repeats, numbers, form: tl.constexpr, step: tl.constexpr, ONE_ROW: tl.constexpr
):
    """Overwrite one tile of the gradient of a bias: the sum of dS over the batches, heads and queries it repeats for.

    `repeats` counts them, in tiles of queries where the bias is ONE_ROW for all. One program sums a part of them, in
    one order, and writes it where `dbias` has the batches of that part.
    """
    numbers = decoded(numbers)
    key_tiles = (numbers.len_k + form.K.ROWS - 1) // form.K.ROWS
    program = tl.program_id(0)
    k_start = program % key_tiles * form.K.ROWS
    own_tile = program // key_tiles % numbers.tiles
    own = program // key_tiles // numbers.tiles
    repeated_batches = repeats.batches >> 2
    repeated_heads = repeats.heads >> 2
    repeated_tiles = repeats.tiles >> 2
    parts = repeats.parts >> 2
    own_heads = numbers.heads // repeated_heads
    own_batches = numbers.batch // repeated_batches
    own_head = own % own_heads
    own_batch = own // own_heads % own_batches
    part = own // own_heads // own_batches
    count = repeated_batches * repeated_heads * repeated_tiles
    total = tl.zeros((form.Q.ROWS, form.K.ROWS), tl.float32)
    scales = scales_of(inputs, 0, 0, numbers.heads, form)
    for at in range(count * part // parts, count * (part + 1) // parts):
        head = own_head + at // repeated_tiles % repeated_heads
        batch = own_batch + at // repeated_tiles // repeated_heads
        seq = sequence_of(batch.to(tl.int64), inputs, numbers, form)
        task = Task(inputs, numbers, head.to(tl.int64), seq, scales)
        q_start = (own_tile + at % repeated_tiles) * form.Q.ROWS
        ranges = every_tile(key_ranges(q_start, task, form), form.K.ROWS)
        if (k_start >= ranges.start) & (k_start < ranges.start + ranges.edges * form.K.ROWS):
            queries = load_seeing_queries(task, upstream, q_start, form)
            total += dscores_at(queries, load_keys(task, k_start, form, EDGE), task, form, step)
    column = k_start + tl.arange(0, form.K.ROWS)
    batch = (part * own_batches + own_batch).to(tl.int64)
    pointers = row_at(dbias, batch, own_head.to(tl.int64), 0) + column.to(tl.int64) * dbias.column
    exists = column < numbers.len_k
    if ONE_ROW:
        tl.store(pointers, rounded(tl.sum(total, 0), dbias.ptr.dtype.element_ty), mask=exists)
    else:
        row = own_tile * form.Q.ROWS + tl.arange(0, form.Q.ROWS)
        pointers = pointers[None, :] + row.to(tl.int64)[:, None] * dbias.row
        exists = exists[None, :] & (row < numbers.len_q)[:, None]
        tl.store(pointers, rounded(total, dbias.ptr.dtype.element_ty), mask=exists)


@device
def dscores_at(queries, keys, task, form: tl.constexpr, step: tl.constexpr):
    """The gradient of the finished scores of a tile, [Q, K]."""
    pairs = pairs_at(queries.start, keys.start, form)
    words = words_at(queries.start, keys.start, task, form, EDGE)
    operands = operands_at(pairs, words, task, form)
    mask = mask_at(pairs, words, task, form)
    product = multiply(queries.q, keys.k, form)
    weights = weights_at(product, distance_at(pairs, task), operands, queries, task, form, step)
    dscores = dscores_of(weights, queries, keys, task, form)
    return keep(margin_at(pairs, task, EDGE), mask, dscores, 0.0)
