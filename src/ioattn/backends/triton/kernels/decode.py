"""Decoding: a program walks over one piece of the keys of one key/value head, for all queries that read them.

Reads like `eager.decode`. A tile of scores is [rows, keys], or turned around, [keys, rows], where tensor cores take
at least 64 rows of a first operand: keys are many, and K and V then never pass through registers. The
query heads of a group, times the new tokens, are the rows of one tile, so that K and V
are read once. A row of the tile is `token * GROUP + member`. Pieces leave normalised partial outputs, maxima and sums
of weights in float32; `combine_kernel` is `merge.merge`, with the sink as one more piece.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ioattn.backends.triton.kernels.pieces import (
    after_the_kernel_before,
    decoded,
    load_keys_of,
    page_at,
    piece_of,
    places_of,
    store_lse,
    walk_of,
)
from ioattn.backends.triton.kernels.products import dot, only_finite
from ioattn.backends.triton.kernels.tiles import EDGE, EXACT, FULL, INF, LOG2E, device, is_finite, or_zero, row_at


@triton.jit
def decode_kernel(inputs, out, lse, numbers, form: tl.constexpr, step: tl.constexpr):
    """Overwrite the rows of one tile for one piece: of `out` and `lse` themselves, or of the partial results."""
    numbers = decoded(numbers)
    piece = piece_of(inputs, numbers, form)
    attend_to_piece(piece, inputs, out, lse, numbers, form, step)


@device
def attend_to_piece(piece, inputs, out, lse, numbers, form: tl.constexpr, step: tl.constexpr):
    """Results of a piece: of its full tiles of keys, then of those at the edges of what its rows see."""
    walk = walk_of(piece, inputs, numbers, form)
    q_tile = load_rows_of_q(piece, inputs, numbers, form)
    if form.TURNED:
        q_tile = tl.trans(q_tile)
    row_max = tl.full((form.Q.ROWS,), -INF, tl.float32)
    if inputs.sinks is not None and not form.SPLIT:
        row_max = tl.zeros_like(row_max) + tl.load(inputs.sinks + piece.head).to(tl.float32)
    row_max, row_sum, acc, last_page = over_full_tiles(row_max, q_tile, walk, piece, inputs, numbers, form, step)
    row_max, row_sum, acc, last_page = over_edges(
        row_max, row_sum, acc, last_page, q_tile, walk, piece, inputs, numbers, form, step
    )
    # Nobody takes what was made of a wrong length or of a page that does not exist for a result.
    bad = piece.bad
    if form.PAGE != 0:
        bad = bad | (last_page >= numbers.pages.to(tl.uint32))
    row_sum = tl.where(bad, float("nan"), row_sum)
    store_results(row_max, row_sum, acc, out, lse, piece, numbers, form)


@device
def over_full_tiles(row_max, q_tile, walk, piece, inputs, numbers, form: tl.constexpr, step: tl.constexpr):
    """The tiles of keys that all rows see. A row starts with its sink, if it has one: a weight of 1."""
    row_sum = (row_max != -INF).to(tl.float32)
    if form.APART:
        row_sum = spread(row_sum, form)
    if form.TURNED:
        acc = tl.zeros((form.V.WIDTH, form.Q.ROWS), tl.float32)
    else:
        acc = tl.zeros((form.Q.ROWS, form.V.WIDTH), tl.float32)
    page = page_at(walk.full_start, piece, walk, inputs, numbers, form.K, form, FULL)
    last_page = page
    for k_start in range(walk.full_start, walk.full_end, form.K.ROWS):
        row_max, row_sum, acc = attend(
            row_max, row_sum, acc, q_tile, page, k_start, walk, piece, inputs, numbers, form, step, FULL
        )
        # A tile ahead, so that nobody waits for it.
        page = page_at(k_start + form.K.ROWS, piece, walk, inputs, numbers, form.K, form, FULL)
        last_page = tl.maximum(last_page, page)
    if form.APART:
        row_sum = tl.sum(row_sum, 0 if form.TURNED else 1)
    if form.PAGE != 0 and form.PAGE < form.K.ROWS:
        last_page = tl.max(last_page, 0)
    return row_max, row_sum, acc, last_page


@device
def over_edges(
    row_max, row_sum, acc, last_page, q_tile, walk, piece, inputs, numbers, form: tl.constexpr, step: tl.constexpr
):
    """The tiles before and after those."""
    TILE: tl.constexpr = form.EDGE_K.ROWS
    edges_before = (walk.full_start - walk.start) // TILE
    edges = edges_before + (walk.end - walk.full_end + TILE - 1) // TILE
    for edge in tl.range(edges, num_stages=form.EDGE_STAGES):
        k_start = walk.start + edge * TILE
        if edge >= edges_before:
            k_start = walk.full_end + (edge - edges_before) * TILE
        edge_page = page_at(k_start, piece, walk, inputs, numbers, form.EDGE_K, form, EDGE)
        row_max, row_sum, acc = attend(
            row_max, row_sum, acc, q_tile, edge_page, k_start, walk, piece, inputs, numbers, form, step, EDGE
        )
        if form.PAGE != 0 and form.PAGE < form.EDGE_K.ROWS:
            edge_page = tl.max(edge_page, 0)
        last_page = tl.maximum(last_page, edge_page)
    return row_max, row_sum, acc, last_page


@device
def load_rows_of_q(piece, inputs, numbers, form: tl.constexpr):
    """The queries of all rows."""
    q = inputs.q
    first = q.ptr + piece.batch * q.batch
    rows = piece.head.to(tl.int64) * q.head + piece.token.to(tl.int64) * q.row
    column = tl.arange(0, form.Q.WIDTH)
    exists = (piece.token < numbers.len_q)[:, None] & (column < form.Q.COLUMNS)[None, :]
    return tl.load(first + rows[:, None] + column[None, :] * q.column, mask=exists, other=0.0)  # [ROWS, WIDTH]


@device
def spread(row_sum, form: tl.constexpr):
    """A sum for each place of a tile of scores, so that no step adds up what different warps hold; all at the first."""
    first = along_keys(tl.arange(0, form.K.ROWS) == 0, form)
    return tl.where(first, along_rows(row_sum, form), 0.0)


@device
def attend(
    row_max, row_sum, acc, q_tile, page, k_start, walk, piece, inputs, numbers, form: tl.constexpr, step: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """The online softmax over one tile of keys."""
    K: tl.constexpr = form.K if KIND == FULL else form.EDGE_K
    V: tl.constexpr = form.V if KIND == FULL else form.EDGE_V
    k_tile = load_keys_of(inputs.k, page, k_start, walk, piece, inputs, numbers, K, form, KIND)
    v_tile = load_keys_of(inputs.v, page, k_start, walk, piece, inputs, numbers, V, form, KIND)
    token = along_rows(piece.token, form)
    col = k_start + along_keys(tl.arange(0, K.ROWS), form)
    scores = dot(k_tile, q_tile, None, form) if form.TURNED else dot(q_tile, tl.trans(k_tile), None, form)
    factor = numbers.scale * LOG2E if form.LATE else LOG2E
    scores = finished(scores, token, col, piece, inputs, numbers, form, step)
    visible = None
    if KIND != FULL:
        visible = visible_to(token, col, piece, inputs, numbers)
        scores = tl.where(visible, scores, -INF)
    KEYS: tl.constexpr = 0 if form.TURNED else 1
    new_max = tl.maximum(row_max, tl.max(scores, KEYS))
    shift = or_zero(new_max)
    weights = tl.exp2((scores - along_rows(shift, form)) * factor)
    rescale = tl.exp2((row_max - shift) * factor)
    if KIND == FULL and form.APART:
        row_sum = along_rows(rescale, form) * row_sum + weights
    else:
        row_sum = rescale * row_sum + tl.sum(weights, KEYS)
    acc = along_rows(rescale, form) * acc
    if KIND == FULL or not form.SEVERAL:
        # Of one token no score alone is hidden: what is not visible was not read.
        acc = weigh(weights.to(v_tile.dtype), v_tile, acc, form)
    else:
        acc = weigh(weights.to(v_tile.dtype), only_finite(v_tile, EXACT), acc, form)
        if is_finite(v_tile) == 0:
            acc = add_special_values(acc, visible, v_tile, form)
    return new_max, row_sum, acc


@device
def finished(scores, token, col, piece, inputs, numbers, form: tl.constexpr, step: tl.constexpr):
    """The scores after all terms."""
    if not form.LATE:
        distance = 0.0
        if inputs.slopes is not None:
            distance = tl.abs(token + piece.shift - col).to(tl.float32)
        scores = step(scores * numbers.scale, distance, operands_of(piece, inputs, form))
    return scores


@device
def along_rows(x, form: tl.constexpr):
    """One number per row, as it meets a tile of scores."""
    if form.SIDE == 0:
        x = x[None, :] if form.TURNED else x[:, None]
    return x


@device
def along_keys(x, form: tl.constexpr):
    """One number per key, as it meets a tile of scores."""
    return x[:, None] if form.TURNED else x[None, :]


@device
def weigh(weights, values, acc, form: tl.constexpr):
    """The product of weights and values, added to acc where there is one."""
    return dot(tl.trans(values), weights, acc, form) if form.TURNED else dot(weights, values, acc, form)


@device
def add_special_values(acc, visible, v_tile, form: tl.constexpr):
    """Exactly what is visible of NaN and inf among the values: a hidden weight is 0, but 0 * NaN is NaN."""
    seen = visible.to(v_tile.dtype)
    acc += tl.where(weigh(seen, (v_tile == INF).to(v_tile.dtype), None, form) > 0, INF, 0.0)
    acc -= tl.where(weigh(seen, (v_tile == -INF).to(v_tile.dtype), None, form) > 0, INF, 0.0)
    return tl.where(weigh(seen, (v_tile != v_tile).to(v_tile.dtype), None, form) > 0, float("nan"), acc)


@device
def operands_of(piece, inputs, form: tl.constexpr):
    """The operands of the score terms, in the terms' order."""
    operands = ()
    if inputs.softcap is not None:
        operands += (inputs.softcap,)
    if inputs.slopes is not None:
        operands += (along_rows(tl.load(inputs.slopes + piece.head).to(tl.float32), form),)
    return operands


@device
def visible_to(token, col, piece, inputs, numbers):
    """Which scores count."""
    visible = (token < numbers.len_q) & (col < piece.len_k)
    offset = col - token - piece.shift
    if inputs.lo is not None:
        visible = visible & (offset >= (inputs.lo >> 2))
    if inputs.hi is not None:
        visible = visible & (offset <= (inputs.hi >> 2))
    if inputs.tree is not None:
        tree = inputs.tree
        node = col - piece.shift
        pointers = row_at(tree, piece.batch, 0, token.to(tl.int64)) + node.to(tl.int64) * tree.column
        drafted = visible & (node >= 0)
        visible = visible & ((node < 0) | (tl.load(pointers, mask=drafted, other=0) != 0))
    return visible


@device
def store_results(row_max, row_sum, acc, out, lse, piece, numbers, form: tl.constexpr):
    """Divide by the sum of the weights and write `out` and `lse`, or a piece's part of the partial results."""
    if form.TURNED:
        acc = tl.trans(acc)
    # A row that saw no key has row_sum 0 (or only its sink's 1) and acc 0: out 0.
    acc = acc / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
    if form.LATE:
        row_max *= numbers.scale
    exists = piece.token < numbers.len_q
    column = tl.arange(0, form.V.WIDTH)[None, :]
    rows_of_out, rows_of_lse, step_of_out = places_of(out, lse, piece, numbers, form)
    kept = exists[:, None] & (column < form.V.COLUMNS)
    pointers = rows_of_out[:, None] + column * step_of_out
    tl.store(pointers, acc.to(pointers.dtype.element_ty), mask=kept)
    store_lse(rows_of_lse, row_max, row_sum, exists, form)


@triton.jit
def combine_kernel(partial, softmaxes, out, lse, sinks, numbers, form: tl.constexpr):
    """Overwrite some columns of one row of `out`, and its `lse`, from the results of all pieces.

    Of each piece `softmaxes` holds the maximum of the scores and the sum of the weights. A sink counts as one piece
    whose value is zero. The pieces are walked over in tiles, as keys are.
    """
    numbers = decoded(numbers)
    program = tl.program_id(0)
    row = program // numbers.tiles
    column = program % numbers.tiles * form.V.WIDTH + tl.arange(0, form.V.WIDTH)
    token = (row % numbers.len_q).to(tl.int64)
    at = row // numbers.len_q
    heads = numbers.kv_heads * form.GROUP
    head = (at % heads).to(tl.int64)
    batch = after_the_kernel_before(at // heads, form).to(tl.int64)
    row = row.to(tl.int64) * numbers.pieces
    row_max = tl.full((), -INF, tl.float32)
    if sinks is not None:
        row_max = tl.load(sinks + head).to(tl.float32)
    row_sum = (row_max != -INF).to(tl.float32)
    acc = tl.zeros((form.V.WIDTH,), tl.float32)
    kept = column < form.V.COLUMNS
    for first in range(0, numbers.pieces, form.V.ROWS):
        piece = first + tl.arange(0, form.V.ROWS)
        exists = piece < numbers.pieces
        maxima = tl.load(softmaxes + 2 * (row + piece), mask=exists, other=-INF)
        sums = tl.load(softmaxes + 2 * (row + piece) + 1, mask=exists, other=0.0)
        pointers = partial + (row + piece)[:, None] * form.V.COLUMNS + column[None, :]
        outs = tl.load(pointers, mask=exists[:, None] & kept[None, :], other=0.0)
        new_max = tl.maximum(row_max, tl.max(maxima, 0))
        shift = or_zero(new_max)
        weights = sums * tl.exp2((maxima - shift) * LOG2E)
        rescale = tl.exp2((row_max - shift) * LOG2E)
        row_sum = rescale * row_sum + tl.sum(weights, 0)
        # A piece without a say is left out, not multiplied by zero.
        acc = rescale * acc + tl.sum(tl.where(weights[:, None] == 0, 0.0, weights[:, None] * outs), 0)
        row_max = new_max
    acc = acc / tl.where(row_sum == 0, 1.0, row_sum)
    pointers = row_at(out, batch, head, token) + column * out.column
    tl.store(pointers, acc.to(pointers.dtype.element_ty), mask=kept)
    if program % numbers.tiles == 0:
        tl.store(row_at(lse, batch, head, token), row_max + tl.log(row_sum))


@triton.jit
def append_kernel(inputs, k_new, v_new, numbers, form: tl.constexpr):
    """Write one new row of one head to its place in the cache; a place that does not exist is not written."""
    numbers = decoded(numbers)
    program = tl.program_id(0)
    row = program % numbers.appended
    at = program // numbers.appended
    kv_head = (at % numbers.kv_heads).to(tl.int64)
    batch = (at // numbers.kv_heads).to(tl.int64)
    before = tl.load(inputs.lengths + batch)
    fits = (before >= 0) & (before <= numbers.capacity - numbers.appended)
    key = tl.where(fits, before + row, 0)
    page = batch
    if form.PAGE != 0:
        page = tl.load(inputs.table + batch * numbers.columns + key // form.PAGE, mask=fits, other=-1).to(tl.int64)
        fits = fits & (page >= 0) & (page < numbers.pages)
        key = key % form.PAGE
    copy_row(k_new, inputs.k, batch, kv_head, row, page, key, fits, form.K)
    copy_row(v_new, inputs.v, batch, kv_head, row, page, key, fits, form.V)


@device
def copy_row(source, target, batch, kv_head, row, page, key, fits, box: tl.constexpr):
    """One row of new keys or values into the cache."""
    column = tl.arange(0, box.WIDTH)
    if box.WIDE:
        column = column.to(tl.int64)
    kept = tl.where(fits, column, box.COLUMNS) < box.COLUMNS
    fresh = tl.load(row_at(source, batch, kv_head, row.to(tl.int64)) + column * source.column, mask=kept)
    tl.store(row_at(target, page, kv_head, key.to(tl.int64)) + column * target.column, fresh, mask=kept)
