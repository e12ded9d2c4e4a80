"""What the kernels share on the device: places, ranges of tiles, loads, scores, visibility, products.

The counterpart of `_Scores` in `backends/eager.py`. `row` and `col` are the numbers of queries and keys, of any two
shapes that broadcast to a tile: the forward and dQ hold scores as `[Q, K]`, dK and dV as `[K, Q]`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ioattn.backends.triton.arguments import Numbers

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

PTX = tl.constexpr(not INTERPRETED.value and torch.version.hip is None)
"""Whether NVIDIA's assembly may be used."""

device = (lambda function: function) if INTERPRETED.value else triton.jit
"""Decorates what kernels call. Not in the interpreter: it patches all of `tl` for each call of a decorated function."""

LOG2E = tl.constexpr(1.4426950408889634)
INF = tl.constexpr(float("inf"))

FULL = tl.constexpr("full")
"""A tile whose every score is visible: no test."""
EDGE = tl.constexpr("edge")
"""A tile with hidden scores, which are masked by select."""
EXACT = tl.constexpr("exact")
"""An edge whose products leave out values that are inf or NaN: `add_special` adds what is visible of them."""


class Sequence(NamedTuple):
    """Where the rows of one sequence start, how many it has, and the shift of its band."""

    batch: Any
    start_q: Any
    start_k: Any
    len_q: Any
    len_k: Any
    shift: Any


class Task(NamedTuple):
    """One head of one sequence, and the tensors that it is a part of.

    Kernels make it themselves: what a Triton function returns is no longer a constant.
    """

    inputs: Any
    numbers: Any
    head: Any
    seq: Any
    scales: Any


class Halves(NamedTuple):
    """An operand of products as a sum of two in float16, each in pieces."""

    high: Any
    low: Any


class Queries(NamedTuple):
    """A tile of queries and what the backward knows of them."""

    start: Any
    q: Any
    dout: Any
    lse: Any
    delta: Any
    factor: Any


class Keys(NamedTuple):
    """A tile of keys and values."""

    start: Any
    k: Any
    v: Any


@device
def decoded(numbers):
    """The numbers themselves: see `arguments.encoded`."""
    return Numbers(
        numbers.batch >> 2,
        numbers.heads >> 2,
        numbers.len_q >> 2,
        numbers.len_k >> 2,
        numbers.rows_q >> 2,
        numbers.rows_k >> 2,
        numbers.tiles >> 2,
        numbers.section >> 2,
        numbers.shift >> 2,
        numbers.scale,
        numbers.q_factor,
    )


@device
def place(numbers, LATE_ROWS_ARE_LONG: tl.constexpr):
    """(batch, head, tile) of this program: the heads of a section are neighbours and share the L2 cache."""
    program = tl.program_id(0)
    heads = tl.num_programs(0) // numbers.tiles
    start = program // (numbers.section * numbers.tiles) * numbers.section
    section = tl.minimum(numbers.section, heads - start)
    program -= start * numbers.tiles
    tile = program // section
    if LATE_ROWS_ARE_LONG:
        # Late queries of a causal band see the most keys: the longest tiles go first.
        tile = numbers.tiles - 1 - tile
    at = start + program % section
    return (at // numbers.heads).to(tl.int64), (at % numbers.heads).to(tl.int64), tile


@device
def sequence_of(batch, inputs, numbers, form: tl.constexpr):
    """Sequence number `batch`; number `numbers.batch` of a packed call is the slack behind the last one."""
    start_q = batch * 0
    start_k = batch * 0
    len_q = numbers.len_q
    len_k = numbers.len_k
    if inputs.starts_q is not None:
        slack = batch == numbers.batch
        start_q = tl.load(inputs.starts_q + batch).to(tl.int64)
        start_k = tl.load(inputs.starts_k + batch).to(tl.int64)
        len_q = tl.load(inputs.starts_q + batch + 1, mask=batch < numbers.batch, other=0)
        len_k = tl.load(inputs.starts_k + batch + 1, mask=batch < numbers.batch, other=0)
        len_q = tl.where(slack, numbers.rows_q, len_q) - start_q.to(tl.int32)
        len_k = tl.where(slack, numbers.rows_k, len_k) - start_k.to(tl.int32)
        batch = batch * 0
    if form.EVEN:
        len_k = len_k // 16 * 16
    shift = numbers.shift
    if form.BOTTOM_RIGHT:
        shift += len_k - len_q
    return Sequence(batch, start_q, start_k, len_q, len_k, shift)


@device
def row_at(matrix, batch, head, row):
    """The address of a row."""
    return matrix.ptr + batch * matrix.batch + head * matrix.head + row * matrix.row


@device
def rows_of(box: tl.constexpr):
    """The rows of a tile, from 0, in the order in which the tile holds them: see `scores.py`."""
    row = tl.arange(0, box.ROWS)
    if box.ORDER == "columns":
        row = row & -32 | (row & 6) << 2 | (row & 24) >> 2 | row & 1
    elif box.ORDER == "rows":
        row = row & -16 | (row & 7) << 1 | (row & 8) >> 3
    return row


@device
def pointers_at(matrix, first, start, box: tl.constexpr, PIECE: tl.constexpr):
    """The addresses of one piece of the tile that starts at row `start` behind row `first`."""
    row = rows_of(box)[:, None]
    column = (PIECE * box.PIECE + tl.arange(0, box.PIECE))[None, :]
    if box.WIDE:
        row = row.to(tl.int64)
        column = column.to(tl.int64)
    return first + tl.cast(start, tl.int64) * matrix.row + (row * matrix.row + column * matrix.column)


@device
def exists_at(start, n, box: tl.constexpr, PIECE: tl.constexpr):
    """Which elements of the piece exist in a matrix of n rows."""
    exists = (start + rows_of(box) < n)[:, None]
    if box.COLUMNS != box.WIDTH:
        exists = exists & (PIECE * box.PIECE + tl.arange(0, box.PIECE) < box.COLUMNS)[None, :]
    return exists


@device
def load_tile(matrix, first, start, n, box: tl.constexpr, KIND: tl.constexpr):
    """The tile, in one piece, that starts at row `start` behind row `first`; what does not exist is 0."""
    pointers = pointers_at(matrix, first, start, box, 0)
    if KIND != FULL:
        tile = tl.load(pointers, mask=exists_at(start, n, box, 0), other=0.0)
    elif box.COLUMNS != box.WIDTH:
        tile = tl.load(pointers, mask=(tl.arange(0, box.WIDTH) < box.COLUMNS)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile  # [ROWS, WIDTH]


@device
def load_operand(matrix, first, start, n, box: tl.constexpr, form: tl.constexpr, KIND: tl.constexpr):
    """A tile as products take it: as it is, or in halves, which lie side by side in memory and fill the tile."""
    if form.PRECISION == "fp16x3":
        exists = None
        other = None
        if KIND != FULL:
            exists = (start + rows_of(box) < n)[:, None]
            other = 0.0
        high = ()
        low = ()
        for piece in tl.static_range(box.WIDTH // box.PIECE):
            pointers = pointers_at(matrix, first, start, box, piece)
            high += (tl.load(pointers, mask=exists, other=other),)
            low += (tl.load(pointers + box.WIDTH, mask=exists, other=other),)
        operand = Halves(high, low)
    else:
        operand = load_tile(matrix, first, start, n, box, KIND)
    return operand


@device
def zeros_for(box: tl.constexpr):
    """A tile of sums, in pieces."""
    pieces = ()
    for _ in tl.static_range(box.WIDTH // box.PIECE):
        pieces += (tl.zeros((box.ROWS, box.PIECE), tl.float32),)
    return pieces


@device
def store_tile(pieces, factor, matrix, first, start, n, box: tl.constexpr):
    """Overwrite what exists of a tile, in the matrix's type, with factor times the pieces."""
    for piece in tl.static_range(box.WIDTH // box.PIECE):
        pointers = pointers_at(matrix, first, start, box, piece)
        value = rounded(pieces[piece] * factor, matrix.ptr.dtype.element_ty)
        tl.store(pointers, value, mask=exists_at(start, n, box, piece))


@device
def scaled_by_way_of(matrix, first, tile, start, n, factor, box: tl.constexpr):
    """A tile times a power of two, by way of memory: of the tile that the results will overwrite.

    What is loaded, and nothing else, Triton hands the tensor cores in shared memory; registers have no room for it.
    """
    store_tile((tile.to(tl.float32),), factor, matrix, first, start, n, box)
    tl.debug_barrier()
    return load_tile(matrix, first, start, n, box, EDGE)


@device
def rounded(x, DTYPE: tl.constexpr):
    """x in another type, rounded to nearest; the interpreter alone cuts bits off where that is bfloat16."""
    if INTERPRETED and DTYPE == tl.bfloat16 and x.dtype == tl.float32:  # noqa: SIM300
        bits = x.to(tl.int32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        x = tl.where(x == x, (bits & -65536).to(tl.float32, bitcast=True), x)
    return x.to(DTYPE)


@device
def clear_slack(matrix, start, end, head, tile, numbers, box: tl.constexpr):
    """Zero the rows `[start, end)` behind the last packed sequence; the launch's tiles share them."""
    first = row_at(matrix, 0, head, 0)
    for at in range(start + tile * box.ROWS, end, numbers.tiles * box.ROWS):
        store_tile(zeros_for(box), 1.0, matrix, first, at, end, box)


@device
def load_rows(rows, task, start, KIND: tl.constexpr, TILE: tl.constexpr):
    """One number per query of a tile; 0 where there is no query."""
    row = start + tl.arange(0, TILE)
    pointers = row_at(rows, task.seq.batch, task.head, task.seq.start_q) + row.to(tl.int64) * rows.row
    exists = None
    other = None
    if KIND != FULL:
        exists = row < task.seq.len_q
        other = 0.0
    return tl.load(pointers, mask=exists, other=other).to(tl.float32)  # [TILE]


@device
def load_q(task, start, form: tl.constexpr, KIND: tl.constexpr):
    """A tile of Q."""
    q = task.inputs.q
    first = row_at(q, task.seq.batch, task.head, task.seq.start_q)
    return load_operand(q, first, start, task.seq.len_q, form.Q, form, KIND)


@device
def one_of(tile):
    """One of the numbers along the last axis."""
    for _ in tl.static_range(8):
        if tile.shape[2] > 1:
            tile = tl.split(tile.reshape(tile.shape[0], tile.shape[1], tile.shape[2] // 2, 2))[0]
    return tile.reshape(tile.shape[0], tile.shape[1])


@device
def load_keys(task, start, form: tl.constexpr, KIND: tl.constexpr):
    """A tile of keys and values."""
    k = task.inputs.k
    v = task.inputs.v
    kv_head = task.head // form.GROUP
    first_k = row_at(k, task.seq.batch, kv_head, task.seq.start_k)
    first_v = row_at(v, task.seq.batch, kv_head, task.seq.start_k)
    k_tile = load_operand(k, first_k, start, task.seq.len_k, form.K, form, KIND)
    return Keys(start, k_tile, load_operand(v, first_v, start, task.seq.len_k, form.V, form, KIND))


@device
def margin_at(pairs, task, KIND: tl.constexpr):
    """Negative for scores that the band or the end of a sequence hides; None where nothing does."""
    margin = None
    row = pairs.row
    col = pairs.col
    if KIND != FULL:
        shift = task.seq.shift
        last = task.seq.len_k - 1
        if task.inputs.hi is not None:
            last = tl.minimum(last, row + (shift + (task.inputs.hi >> 2)))
        # A row that does not exist sees nothing: its last key is -1.
        margin = (last | (task.seq.len_q - 1 - row >> 31)) - col
        if task.inputs.lo is not None:
            margin = margin | (col - (row + (shift + (task.inputs.lo >> 2))))
    return margin


@device
def keep(margin, visible, x, OTHER: tl.constexpr):
    """x where scores count, OTHER, which is 0 or -inf, elsewhere: given what `margin_at` and `mask_at` found.

    By assembly: LLVM would compare the whole tile, pack the results into words and take these apart again, 8
    instructions per score instead of 2, or select after rounding to 16 bits, 3.
    """
    BITS: tl.constexpr = "0f00000000" if OTHER == 0 else "0fFF800000"
    if margin is not None:
        if PTX:
            late: tl.constexpr = "{ .reg .pred p; setp.lt.s32 p, $2, 0; selp.f32 $0, " + BITS + ", $1, p; }"
            x = tl.inline_asm_elementwise(late, "=f,f,r", [x, margin], tl.float32, True, 1)
        else:
            x = tl.where(margin >= 0, x, OTHER)
    if visible is not None:
        if PTX:
            masked: tl.constexpr = "{ .reg .pred p; setp.eq.s32 p, $2, 0; selp.f32 $0, " + BITS + ", $1, p; }"
            x = tl.inline_asm_elementwise(masked, "=f,f,r", [x, visible], tl.float32, True, 1)
        else:
            x = tl.where(visible != 0, x, OTHER)
    return x


@device
def keep_where_cut(cut, pairs, task, x, OTHER: tl.constexpr):
    """`keep_in_band` of a tile that the band cuts; `cut` is None in a loop without such tiles."""
    if cut is not None:
        if cut:
            x = keep_in_band(pairs, task, x, OTHER)
    return x


@device
def keep_in_band(pairs, task, x, OTHER: tl.constexpr):
    """x where a band with two sides keeps scores, OTHER elsewhere, of a tile whose rows and columns all exist."""
    lo = task.inputs.lo >> 2
    hi = task.inputs.hi >> 2
    place = pairs.col - (pairs.row + (task.seq.shift + lo))
    if PTX:
        # One comparison without sign for both sides: 3 instructions per score, not 5.
        BITS: tl.constexpr = "0f00000000" if OTHER == 0 else "0fFF800000"
        outside: tl.constexpr = "{ .reg .pred p; setp.ge.u32 p, $2, $3; selp.f32 $0, " + BITS + ", $1, p; }"
        width = tl.maximum(hi - lo + 1, 0)
        x = tl.inline_asm_elementwise(outside, "=f,f,r,r", [x, place, width], tl.float32, True, 1)
    else:
        x = tl.where((place >= 0) & (place <= hi - lo), x, OTHER)
    return x


@device
def opaque(x):
    """x, of which LLVM cannot know where it comes from."""
    if PTX:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, True, 1)
    return x


@device
def product_of(a, b):
    """a * b, rounded before anything is added to it: neither LLVM nor the assembler makes a multiply-add of it."""
    product = a * b
    if PTX:
        product = tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, True, 1)
    return product


@device
def score_scale(task):
    """What makes a product of Q and K a score."""
    return task.numbers.scale * task.scales.q * task.scales.k


@device
def is_finite(x):
    """Whether every element of a tile is a finite number."""
    # One reduction over both axes: one after the other did not compile for sm_100 in Triton 3.6.
    return tl.max(((tl.abs(x) < INF) == 0).to(tl.int32)) == 0


@device
def or_zero(x):
    """-inf becomes 0, so that exp(-inf - max) of a row that has seen nothing is 0 and not exp(-inf + inf)."""
    return tl.where(x == -INF, 0.0, x)
