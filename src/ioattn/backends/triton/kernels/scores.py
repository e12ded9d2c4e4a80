"""What belongs to each score besides its product: distances, the operands of terms, the bias and the boolean mask.

The tensor cores of Hopper leave neighbouring scores in neighbouring threads, two columns or one row each. The order of
keys in a tile is free, as sums over keys do not depend on it: keys are taken so that the scores of one thread belong to
keys side by side in memory, and a thread reads its part of a bias or a mask straight into registers, many bytes at a
time. Position 32a + 8c + 2t + b of a tile's columns, of thread t, is key 32a + 8t + 2c + b ("columns"); position
16a + 8b + g of its rows, of thread g, is key 16a + 2g + b ("rows").
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from ioattn.backends.triton.kernels.tiles import FULL, PTX, device, row_at, rows_of

LOAD_2 = tl.constexpr("{ .reg .b16 t; ld.global.nc.b16 t, [$1]; cvt.u32.u16 $0, t; }")
LOAD_4 = tl.constexpr("ld.global.nc.b32 $0, [$1];")
LOAD_8 = tl.constexpr("ld.global.nc.v2.b32 {$0, $1}, [$2];")
LOAD_16 = tl.constexpr("ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];")


class Pairs(NamedTuple):
    """A tile of pairs of queries and keys: their numbers, of two shapes that broadcast to the tile, and the first."""

    row: Any
    col: Any
    q_start: Any
    k_start: Any


@device
def pairs_at(q_start, k_start, form: tl.constexpr):
    """A tile [Q, K]."""
    row = (q_start + tl.arange(0, form.Q.ROWS))[:, None]
    return Pairs(row, (k_start + rows_of(form.K))[None, :], q_start, k_start)


@device
def turned_pairs_at(q_start, k_start, form: tl.constexpr):
    """A tile [K, Q]."""
    row = (q_start + tl.arange(0, form.Q.ROWS))[None, :]
    return Pairs(row, (k_start + rows_of(form.K))[:, None], q_start, k_start)


@device
def distance_at(pairs, task):
    """abs(i + Nk - Nq - j) where a term asks for it."""
    distance = 0.0
    if task.inputs.slopes is not None:
        distance = tl.abs(pairs.row + (task.seq.len_k - task.seq.len_q) - pairs.col).to(tl.float32)
    return distance


@device
def operands_at(pairs, words, task, form: tl.constexpr):
    """The operands of the score terms, in the terms' order."""
    operands = ()
    if task.inputs.softcap is not None:
        operands += (task.inputs.softcap,)
    if task.inputs.slopes is not None:
        operands += (tl.load(task.inputs.slopes + task.head).to(tl.float32),)
    if task.inputs.bias is not None:
        operands += (bias_at(pairs, words[0], task, form),)
    return operands


@device
def bias_at(pairs, words, task, form: tl.constexpr):
    """The tile of the bias in float32."""
    bias = task.inputs.bias
    if form.K.ORDER == "":
        tile = load_scores(bias, pairs, task).to(tl.float32)
    else:
        parts = ()
        for i in tl.static_range(len(words)):
            if bias.ptr.dtype.element_ty == tl.float32:
                parts += (words[i].to(tl.float32, bitcast=True),)
            elif bias.ptr.dtype.element_ty == tl.bfloat16:
                parts += (
                    (words[i] << 16).to(tl.float32, bitcast=True),
                    (words[i] & -65536).to(tl.float32, bitcast=True),
                )
            else:
                low = words[i].to(tl.int16).to(tl.float16, bitcast=True)
                parts += (low.to(tl.float32), (words[i] >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32))
        tile = in_order(parts, form)
    return tile


@device
def mask_at(pairs, words, task, form: tl.constexpr):
    """0 where the boolean mask hides a score; None where there is no mask. To test a bit is one instruction."""
    mask = task.inputs.mask
    visible = None
    if mask is not None:
        if form.K.ORDER == "":
            visible = load_scores(mask, pairs, task).to(tl.int32)
        else:
            parts = ()
            for i in tl.static_range(len(words[1])):
                word = words[1][i]
                parts += (word & 1, word & 0x100)
                if form.K.ORDER == "columns":
                    parts += (word & 0x10000, word & 0x1000000)
            visible = in_order(parts, form)
    return visible


@device
def load_scores(matrix, pairs, task):
    """The elements of a bias or a mask that belong to these scores; what does not exist is 0.

    Issued before the product that makes the scores: to hide the latency, and because the layout of what comes last is
    the one that Triton keeps its rows' maxima in.
    """
    row = pairs.row
    col = pairs.col
    pointers = row_at(matrix, task.seq.batch, task.head, row.to(tl.int64)) + col.to(tl.int64) * matrix.column
    if matrix.ptr.dtype.element_ty == tl.int1:
        pointers = pointers.to(tl.pointer_type(tl.int8), bitcast=True)
    return tl.load(pointers, mask=(row < task.seq.len_q) & (col < task.seq.len_k), other=0)


@device
def words_at(q_start, k_start, task, form: tl.constexpr, KIND: tl.constexpr):
    """What a thread needs of the bias and of the mask, as 32-bit words; nothing where keys lie in their own order.

    Where one does not exist, something else that does is read: it is hidden, or belongs to a row that is not stored.
    """
    bias = ()
    mask = ()
    if form.K.ORDER != "":
        if task.inputs.bias is not None:
            bias = load_words(task.inputs.bias, q_start, k_start, task, form, KIND)
        if task.inputs.mask is not None:
            mask = load_words(task.inputs.mask, q_start, k_start, task, form, KIND)
    return bias, mask


@device
def load_words(matrix, q_start, k_start, task, form: tl.constexpr, KIND: tl.constexpr):
    """Elements side by side: 8 for columns of keys, 2 for rows."""
    seq = task.seq
    COUNT: tl.constexpr = 8 if form.K.ORDER == "columns" else 2
    col = k_start + COUNT * tl.arange(0, form.K.ROWS // COUNT)
    row = tl.arange(0, form.Q.ROWS)
    if form.K.ORDER == "columns":
        # All keys of a full tile exist, not all queries.
        if KIND != FULL:
            col = tl.minimum(col, seq.len_k - COUNT)
        row = tl.minimum(q_start + row, seq.len_q - 1)
        first = row_at(matrix, seq.batch, task.head, 0)
        pointers = first + row.to(tl.int64)[:, None] * matrix.row + col[None, :]
    else:
        # And here all queries, not all keys.
        col = tl.minimum(col, seq.len_k - COUNT)
        if KIND != FULL:
            row = tl.minimum(row, seq.len_q - 1 - q_start)
        first = row_at(matrix, seq.batch, task.head, tl.cast(q_start, tl.int64))
        pointers = first + (row.to(tl.int64)[None, :] * matrix.row + col[:, None])
    return loaded(pointers, COUNT)


@device
def loaded(pointers, COUNT: tl.constexpr):
    """COUNT elements from each pointer on, as 32-bit words.

    By assembly, as Triton would read what lies side by side in a row with threads side by side, and then pass it on to
    those that need it, through shared memory.
    """
    SIZE: tl.constexpr = COUNT * max(8, pointers.dtype.element_ty.primitive_bitwidth) // 8
    words = ()
    if not PTX:
        if SIZE == 2:
            words += (tl.load(pointers.to(tl.pointer_type(tl.int16), bitcast=True)).to(tl.int32),)
        else:
            pointers = pointers.to(tl.pointer_type(tl.int32), bitcast=True)
            for i in tl.static_range(SIZE // 4):
                words += (tl.load(pointers + i),)
    elif SIZE == 2:
        words += (tl.inline_asm_elementwise(LOAD_2, "=r,l", [pointers.to(tl.int64)], tl.int32, True, 1),)
    elif SIZE == 4:
        words += (tl.inline_asm_elementwise(LOAD_4, "=r,l", [pointers.to(tl.int64)], tl.int32, True, 1),)
    elif SIZE == 8:
        words += tl.inline_asm_elementwise(LOAD_8, "=r,=r,l", [pointers.to(tl.int64)], (tl.int32, tl.int32), True, 1)
    else:
        for i in tl.static_range(SIZE // 16):
            at = pointers.to(tl.int64) + 16 * i
            words += tl.inline_asm_elementwise(
                LOAD_16, "=r,=r,=r,=r,l", [at], (tl.int32, tl.int32, tl.int32, tl.int32), True, 1
            )
    return words


@device
def in_order(parts, form: tl.constexpr):
    """A tile of scores, of what threads hold side by side: `parts` are 8 of [Q, K / 8] or 2 of [K / 2, Q]."""
    if form.K.ORDER == "columns":
        # [Q, a t, b, c0, c1], of which key 2c + b is part number 4 c1 + 2 c0 + b.
        early = tl.join(tl.join(parts[0], parts[1]), tl.join(parts[2], parts[3]))
        late = tl.join(tl.join(parts[4], parts[5]), tl.join(parts[6], parts[7]))
        tile = tl.join(early, late).reshape(form.Q.ROWS, form.K.ROWS // 32, 4, 2, 2, 2)
        tile = tile.permute(0, 1, 5, 4, 2, 3).reshape(form.Q.ROWS, form.K.ROWS)
    else:
        tile = tl.join(parts[0], parts[1]).reshape(form.K.ROWS // 16, 8, form.Q.ROWS, 2)
        tile = tile.permute(0, 3, 1, 2).reshape(form.K.ROWS, form.Q.ROWS)
    return tile
