"""Decoding in float32 for a few rows, by multiply-adds: exact to rounding, and memory is what takes the time.

A tile of keys is [SIDE, keys, chunks, SPAN]: a few threads hold a key, SPAN columns of each chunk of its columns, and
SIDE keys lie side by side in the threads of a program. Each of those places has its own running maximum and sums, so
that a step shuffles nothing but the sums over columns; they meet after the last key.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ioattn.backends.triton.kernels.decode import finished, visible_to
from ioattn.backends.triton.kernels.pieces import (
    Piece,
    along_columns,
    columns_in,
    decoded,
    keys_in,
    load_keys_of,
    page_at,
    piece_of,
    places_of,
    store_lse,
    walk_of,
)
from ioattn.backends.triton.kernels.tiles import EDGE, FULL, INF, LOG2E, device, or_zero


@triton.jit
def few_rows_kernel(inputs, out, lse, numbers, form: tl.constexpr, step: tl.constexpr):
    """What `decode_kernel` does."""
    numbers = decoded(numbers)
    piece = piece_of(inputs, numbers, form)
    walk = walk_of(piece, inputs, numbers, form)
    queries = ()
    row_max = ()
    row_sum = ()
    acc = ()
    for r in tl.static_range(form.Q.ROWS):
        queries += (load_query(row_of(piece, r, form), inputs, numbers, form),)
        row_max += (tl.full((form.SIDE,), -INF, tl.float32),)
        row_sum += (tl.full((form.SIDE,), 0.0, tl.float32),)
        acc += (tl.full((form.SIDE, form.V.WIDTH // form.SPAN, form.SPAN), 0.0, tl.float32),)
    page = page_at(walk.full_start, piece, walk, inputs, numbers, form.K, form, FULL)
    last_page = page
    for k_start in tl.range(walk.full_start, walk.full_end, form.K.ROWS, num_stages=form.STAGES):
        row_max, row_sum, acc = attend_rows(
            row_max, row_sum, acc, queries, page, k_start, walk, piece, inputs, numbers, form, step, FULL
        )
        page = page_at(k_start + form.K.ROWS, piece, walk, inputs, numbers, form.K, form, FULL)
        last_page = tl.maximum(last_page, page)
    if form.PAGE != 0 and form.PAGE < form.K.ROWS:
        last_page = tl.max(last_page)
    TILE: tl.constexpr = form.EDGE_K.ROWS
    edges_before = (walk.full_start - walk.start) // TILE
    edges = edges_before + (walk.end - walk.full_end + TILE - 1) // TILE
    for edge in tl.range(edges, num_stages=1):
        k_start = walk.start + edge * TILE
        if edge >= edges_before:
            k_start = walk.full_end + (edge - edges_before) * TILE
        edge_page = page_at(k_start, piece, walk, inputs, numbers, form.EDGE_K, form, EDGE)
        row_max, row_sum, acc = attend_rows(
            row_max, row_sum, acc, queries, edge_page, k_start, walk, piece, inputs, numbers, form, step, EDGE
        )
        if form.PAGE != 0 and form.PAGE < form.EDGE_K.ROWS:
            edge_page = tl.max(edge_page)
        last_page = tl.maximum(last_page, edge_page)
    bad = piece.bad
    if form.PAGE != 0:
        bad = bad | (last_page >= numbers.pages.to(tl.uint32))
    for r in tl.static_range(form.Q.ROWS):
        row = row_of(piece, r, form)
        store_row(row_max[r], row_sum[r], acc[r], bad, out, lse, row, inputs, numbers, form)


@device
def row_of(piece, r: tl.constexpr, form: tl.constexpr):
    """The piece as one of its rows sees it."""
    row = piece.first_row + r
    head = piece.kv_head.to(tl.int32) * form.GROUP + row % form.GROUP
    return Piece(
        piece.batch,
        piece.kv_head,
        piece.number,
        piece.first_row,
        row // form.GROUP,
        head,
        piece.len_k,
        piece.shift,
        piece.bad,
    )


@device
def load_query(row, inputs, numbers, form: tl.constexpr):
    """The query of a row, once for each of the keys side by side: so loaded, it lies in threads as keys do."""
    q = inputs.q
    first = q.ptr + row.batch * q.batch + row.head.to(tl.int64) * q.head + row.token.to(tl.int64) * q.row
    column = columns_in(form.Q, form)
    exists = tl.where(row.token < numbers.len_q, column, form.Q.COLUMNS) < form.Q.COLUMNS
    pointers = first + (column * q.column + tl.full((form.SIDE, 1, 1, 1), 0, tl.int32))
    return tl.load(pointers, mask=exists, other=0.0)  # [SIDE, 1, chunks, SPAN]


@device
def attend_rows(
    row_max, row_sum, acc, queries, page, k_start, walk, piece, inputs, numbers, form: tl.constexpr, step: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """The online softmax over one tile of keys, in each place for itself."""
    K: tl.constexpr = form.K if KIND == FULL else form.EDGE_K
    V: tl.constexpr = form.V if KIND == FULL else form.EDGE_V
    k_tile = load_keys_of(inputs.k, page, k_start, walk, piece, inputs, numbers, K, form, KIND)
    v_tile = load_keys_of(inputs.v, page, k_start, walk, piece, inputs, numbers, V, form, KIND)
    col = k_start + keys_in(K, form)
    factor = numbers.scale * LOG2E if form.LATE else LOG2E
    new_max = ()
    new_sum = ()
    new_acc = ()
    for r in tl.static_range(form.Q.ROWS):
        row = row_of(piece, r, form)
        # First over the chunks, which one thread holds.
        scores = finished(tl.sum(tl.sum(k_tile * queries[r], 2), 2), row.token, col, row, inputs, numbers, form, step)
        if KIND != FULL:
            visible = visible_to(row.token + tl.zeros_like(col), col, row, inputs, numbers)
            scores = tl.where(visible, scores, -INF)
        top = tl.maximum(row_max[r], tl.max(scores, 1))
        shift = or_zero(top)
        weights = tl.exp2((scores - shift[:, None]) * factor)
        rescale = tl.exp2((row_max[r] - shift) * factor)
        weighed = along_columns(weights, form) * v_tile
        if KIND != FULL and form.SEVERAL:
            # A hidden weight is 0, but 0 * NaN is NaN.
            weighed = tl.where(along_columns(visible, form), weighed, 0.0)
        new_max += (top,)
        new_sum += (rescale * row_sum[r] + tl.sum(weights, 1),)
        new_acc += (rescale[:, None, None] * acc[r] + tl.sum(weighed, 1),)
    return new_max, new_sum, new_acc


@device
def store_row(place_max, place_sum, acc, bad, out, lse, row, inputs, numbers, form: tl.constexpr):
    """Merge the places, divide by the sum of the weights, and write a row of `out` and `lse` or of the partial ones."""
    factor = numbers.scale * LOG2E if form.LATE else LOG2E
    row_max = tl.max(place_max, 0)
    if inputs.sinks is not None and not form.SPLIT:
        sink = tl.load(inputs.sinks + row.head).to(tl.float32)
        row_max = tl.maximum(row_max, sink)
    shift = or_zero(row_max)
    rescale = tl.exp2((place_max - shift) * factor)
    row_sum = tl.sum(rescale * place_sum, 0)
    if inputs.sinks is not None and not form.SPLIT:
        row_sum += tl.exp2((sink - shift) * LOG2E)
    row_sum = tl.where(bad, float("nan"), row_sum)
    acc = tl.sum(rescale[:, None, None] * acc, 0) / tl.where(row_sum == 0, 1.0, row_sum)
    if form.LATE:
        row_max *= numbers.scale
    row_of_out, row_of_lse, step_of_out = places_of(out, lse, row, numbers, form)
    column = tl.reshape(columns_in(form.V, form), (form.V.WIDTH // form.SPAN, form.SPAN))
    pointers = row_of_out + column * step_of_out
    exists = row.token < numbers.len_q
    kept = tl.where(exists, column, form.V.COLUMNS) < form.V.COLUMNS
    tl.store(pointers, acc.to(pointers.dtype.element_ty), mask=kept)
    store_lse(row_of_lse, row_max, row_sum, exists, form)
