"""What a program of decoding does: which piece of which keys it walks over, where they lie, where its results go.

A program may be set up while the kernel in front of it runs. Until that has ended it reads nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from ioattn.backends.triton.arguments import CacheNumbers
from ioattn.backends.triton.kernels.tiles import FULL, device, row_at


class Piece(NamedTuple):
    """One piece of the keys of one sequence and head, and the tile of rows that attends to it.

    token and head say what each row is. `bad` holds where the length is none that the cache can have.
    """

    batch: Any
    kv_head: Any
    number: Any
    first_row: Any
    token: Any
    head: Any
    len_k: Any
    shift: Any
    bad: Any


class Walk(NamedTuple):
    """Keys of a piece: `[start, full_start)` and `[full_end, end)` have hidden scores, those between have none.

    `start` is the start of a tile; keys before `first` are hidden from every row.
    """

    first: Any
    start: Any
    full_start: Any
    full_end: Any
    end: Any


@device
def decoded(numbers):
    """The numbers themselves: see `arguments.encoded`."""
    return CacheNumbers(
        numbers.kv_heads >> 2,
        numbers.len_q >> 2,
        numbers.capacity >> 2,
        numbers.pages >> 2,
        numbers.columns >> 2,
        numbers.appended >> 2,
        numbers.pieces >> 2,
        numbers.tiles >> 2,
        numbers.scale,
    )


@device
def after_the_kernel_before(x, form: tl.constexpr):
    """x >= 0 as it is, when the kernel in front of this one has ended: comes before the first read of memory.

    This program may have been set up before that. The wait depends on x, or the assembler would move it in front of
    what x is computed from. The kernel behind may be set up before the wait already: it waits for this one, and so for
    all before it. On an H200 B1 N1024 took 5.07 us then, not 5.21, B1 N8192 12.63, not 12.70.
    """
    if form.EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        x = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ge.s32 p, $1, 0; @p griddepcontrol.wait; mov.b32 $0, $1; }",
            "=r,r", [x], tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    return x


@device
def piece_of(inputs, numbers, form: tl.constexpr):
    """What this program does. Neighbours share keys and values: first the tiles of rows, then the pieces of a head."""
    program = tl.program_id(0)
    first_row = program % numbers.tiles * form.Q.ROWS
    at = program // numbers.tiles
    number = at % numbers.pieces
    at = at // numbers.pieces
    kv_head = (at % numbers.kv_heads).to(tl.int64)
    batch = at // numbers.kv_heads
    batch = after_the_kernel_before(batch, form).to(tl.int64)
    before = tl.load(inputs.lengths + batch)
    row = first_row + tl.arange(0, form.Q.ROWS)
    head = kv_head.to(tl.int32) * form.GROUP + row % form.GROUP
    bad = (before < 0) | (before > numbers.capacity - numbers.appended)
    len_k = tl.where(bad, 0, before + numbers.appended)
    return Piece(batch, kv_head, number, first_row, row // form.GROUP, head, len_k, len_k - numbers.len_q, bad)


@device
def walk_of(piece, inputs, numbers, form: tl.constexpr):
    """`Band.key_range` and `Band.full_key_range` of the tile's tokens in whole tiles of keys, cut to the piece."""
    first = piece.first_row // form.GROUP
    last = tl.minimum((piece.first_row + form.Q.ROWS - 1) // form.GROUP, numbers.len_q - 1)
    n = piece.len_k
    start = n * 0
    full_start = n * 0
    end = n
    full_end = n
    if inputs.lo is not None:
        start = tl.minimum(tl.maximum(first + piece.shift + (inputs.lo >> 2), 0), n)
        full_start = tl.minimum(tl.maximum(last + piece.shift + (inputs.lo >> 2), 0), n)
    if inputs.hi is not None:
        end = tl.minimum(tl.maximum(last + piece.shift + (inputs.hi >> 2) + 1, 0), n)
        full_end = tl.minimum(tl.maximum(first + piece.shift + (inputs.hi >> 2) + 1, 0), n)
    if inputs.tree is not None:
        full_end = tl.minimum(full_end, tl.maximum(piece.shift, 0))
    TILE: tl.constexpr = form.K.ROWS
    first_key = start
    start = start // TILE * TILE
    tiles = tl.maximum(end - start + TILE - 1, 0) // TILE
    share = (tiles + numbers.pieces - 1) // numbers.pieces * TILE
    start = start + piece.number * share
    end = tl.maximum(tl.minimum(end, start + share), start)
    full_start = tl.minimum(tl.maximum((full_start + TILE - 1) // TILE * TILE, start), start + share)
    full_end = tl.minimum(full_end // TILE * TILE, start + share)
    none_full = (full_end <= full_start) | (end <= start)
    full_start = tl.where(none_full, start, full_start)
    full_end = tl.where(none_full, start, full_end)
    return Walk(first_key, start, full_start, full_end, end)


@device
def keys_in(box: tl.constexpr, form: tl.constexpr):
    """The keys of a tile, counted from its first: [ROWS], or [SIDE, ROWS // SIDE]."""
    if form.SIDE == 0:
        keys = tl.arange(0, box.ROWS)
    else:
        keys = tl.arange(0, form.SIDE)[:, None] + (tl.arange(0, box.ROWS // form.SIDE) * form.SIDE)[None, :]
    return keys


@device
def columns_in(box: tl.constexpr, form: tl.constexpr):
    """The columns of a tile, as they meet its keys."""
    if form.SIDE == 0:
        columns = tl.arange(0, box.WIDTH)[None, :]
    else:
        first = (tl.arange(0, box.WIDTH // form.SPAN) * form.SPAN)[:, None]
        columns = (first + tl.arange(0, form.SPAN)[None, :])[None, None, :, :]
    return columns


@device
def along_columns(x, form: tl.constexpr):
    """One number per key, as it meets the columns of a tile."""
    return x[:, None] if form.SIDE == 0 else x[:, :, None, None]


@device
def page_at(k_start, piece, walk, inputs, numbers, box: tl.constexpr, form: tl.constexpr, KIND: tl.constexpr):
    """Where the keys from `k_start` on lie: one page, or where pages are shorter than a tile one for each key.

    Without a table a sequence is a page. As the table has it, but unsigned: one that does not exist is larger than all
    that do. Where no row sees the key: page 0.
    """
    page = piece.batch
    if form.PAGE != 0:
        columns = inputs.table + piece.batch * numbers.columns + k_start // form.PAGE
        if form.PAGE >= box.ROWS:
            page = tl.load(columns, mask=k_start < piece.len_k, other=0).to(tl.uint32, bitcast=True)
        else:
            row = keys_in(box, form)
            used = k_start + row < piece.len_k
            if KIND != FULL and inputs.lo is not None:
                used = used & (k_start + row >= walk.first)
            page = tl.load(columns + row // form.PAGE, mask=used, other=0).to(tl.uint32, bitcast=True)
    return page


@device
def load_keys_of(
    matrix, page, k_start, walk, piece, inputs, numbers, box: tl.constexpr, form: tl.constexpr, KIND: tl.constexpr
):
    """A tile of keys or values; what no row sees is not read and 0, a page that does not exist is read as page 0."""
    row = keys_in(box, form)
    column = columns_in(box, form)
    head = matrix.ptr + piece.kv_head * matrix.head
    if form.PAGE == 0:
        first = head + page * matrix.batch + tl.cast(k_start, tl.int64) * matrix.row
        if box.WIDE:
            places = along_columns(row.to(tl.int64), form) * matrix.row
            pointers = first + (places + column.to(tl.int64) * matrix.column)
        else:
            pointers = first + (along_columns(row, form) * matrix.row + column * matrix.column)
    else:
        page = tl.where(page < numbers.pages.to(tl.uint32), page, 0).to(tl.int64) * matrix.batch
        if form.PAGE >= box.ROWS:
            first = head + page + tl.cast(k_start % form.PAGE, tl.int64) * matrix.row
            pointers = first + (along_columns(row, form) * matrix.row + column * matrix.column)
        else:
            inside = (row % form.PAGE).to(tl.int64) * matrix.row
            pointers = (along_columns(head + inside, form) + column * matrix.column) + along_columns(page, form)
    exists = None
    other = None
    if KIND != FULL:
        exists = along_columns(k_start + row < walk.end, form)
        if inputs.lo is not None:
            exists = exists & along_columns(k_start + row >= walk.first, form)
        other = 0.0
        if box.COLUMNS != box.WIDTH:
            exists = exists & (column < box.COLUMNS)
    elif box.COLUMNS != box.WIDTH:
        exists = column < box.COLUMNS
        other = 0.0
    return tl.load(pointers, mask=exists, other=other)  # [K, WIDTH]


@device
def places_of(out, lse, piece, numbers, form: tl.constexpr):
    """Where the results of the piece's rows start, and how far apart the columns of `out` are."""
    if form.SPLIT:
        heads = numbers.kv_heads * form.GROUP
        row = (piece.batch * heads + piece.head) * numbers.len_q + piece.token
        row = row * numbers.pieces + piece.number
        rows_of_out = out + row * form.V.COLUMNS
        rows_of_lse = lse + 2 * row
        step_of_out = 1
    else:
        head = piece.head.to(tl.int64)
        token = piece.token.to(tl.int64)
        rows_of_out = row_at(out, piece.batch, head, token)
        rows_of_lse = row_at(lse, piece.batch, head, token)
        step_of_out = out.column
    return rows_of_out, rows_of_lse, step_of_out


@device
def store_lse(places, row_max, row_sum, exists, form: tl.constexpr):
    """The LSE of rows, or of a piece the maximum and the sum of the weights.

    Pieces are weighed by exp(LSE), and near 1e4 neighbours among the float32 numbers are 1e-3 apart.
    """
    if form.SPLIT:
        tl.store(places, row_max, mask=exists)
        tl.store(places + 1, row_sum, mask=exists)
    else:
        tl.store(places, row_max + tl.log(row_sum), mask=exists)
