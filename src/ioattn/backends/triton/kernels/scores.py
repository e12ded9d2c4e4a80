"""What belongs to each score besides its product: distances, the operands of terms, the bias and the boolean mask.

The tensor cores of Hopper leave neighbouring scores in neighbouring threads, two columns or one row each. The order of
keys in a tile is free, as sums over keys do not depend on it: keys are taken so that the scores of one thread belong to
keys side by side in memory, and a thread reads its part of a bias or a mask straight into registers, many bytes at a
time. Position 32a + 8c + 2t + b of a tile's columns, of thread t, is key 32a + 8t + 2c + b ("columns"); position
16a + 8b + g of its rows, of thread g, is key 16a + 2g + b ("rows"), in queries 8c + 2t + b of thread t.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from ioattn.backends.triton.kernels.tiles import EXACT, FULL, PTX, device, one_of, rounded, row_at, rows_of

COVER_4 = tl.constexpr(
    "{ .reg .b32 t, u; lop3.b32 t, $4, $5, 0x01010101, 0xE0; mul.lo.u32 t, t, 255;"
    " prmt.b32 u, t, t, 0x1100; mov.b32 {$0, $1}, u; prmt.b32 u, t, t, 0x3322; mov.b32 {$2, $3}, u; }"
)
"""Four bytes, 0 or 1, as four times 16 bits."""
COVER_2_2 = tl.constexpr(
    "{ .reg .b32 t, u; lop3.b32 t, $4, $6, 0x01010101, 0xE0; prmt.b32 t, t, $5, 0x5410; mul.lo.u32 t, t, 255;"
    " prmt.b32 u, t, t, 0x2200; mov.b32 {$0, $2}, u; prmt.b32 u, t, t, 0x3311; mov.b32 {$1, $3}, u; }"
)
"""The same, of two words of two bytes; those of one key side by side in a register."""

VEIL_4 = tl.constexpr(
    "{ .reg .b32 t; mad.lo.u32 t, $4, -128, 0x80808080; prmt.b32 $0, t, 0, 0x8044; prmt.b32 $1, t, 0, 0x9144;"
    " prmt.b32 $2, t, 0, 0xA244; prmt.b32 $3, t, 0, 0xB344; }"
)
"""Four bytes, 1 or 0, as four numbers, 0 or -inf: a byte of 0x80, and in front of it its sign eight times."""


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
def veil_at(words, task, form: tl.constexpr, KIND: tl.constexpr):
    """0 where the boolean mask shows a score, -inf where it hides it; None where there is none, or none in words.

    To be added to the scores: where they are a product, Triton has the tensor cores start from it, it is made while
    they multiply the tile before, and the mask costs nothing behind the product, which all weights wait for. NaN and
    inf among the hidden scores become NaN, and that is repaired.
    """
    veil = None
    if task.inputs.mask is not None and form.K.ORDER == "columns" and PTX and KIND != EXACT:
        parts = ()
        for i in tl.static_range(len(words[1])):
            given = [words[1][i]]
            parts += tl.inline_asm_elementwise(
                VEIL_4, "=f,=f,=f,=f,r", given, (tl.float32, tl.float32, tl.float32, tl.float32), True, 1
            )
        veil = in_order(parts, form)
    return veil


@device
def cover_at(pairs, words, product, task, form: tl.constexpr):
    """The mask over numbers of 16 bits: all bits where a score is visible, none where it is hidden, or None.

    One instruction then hides two numbers, where `keep` takes two for each, and no predicates have to be kept for the
    next use. The words seem to depend on the product: else they would be used before it, and each step wait for memory.
    """
    mask = task.inputs.mask
    cover = None
    if mask is not None:
        if form.K.ORDER == "" or not PTX:
            cover = -((mask_at(pairs, words, task, form) != 0).to(tl.int16))
        else:
            parts = ()
            if form.K.ORDER == "columns":
                own = product.reshape(form.Q.ROWS, form.K.ROWS // 32, 4, 4, 2).permute(0, 1, 3, 2, 4)
                own = one_of(own.reshape(form.Q.ROWS, form.K.ROWS // 8, 8))
                for i in tl.static_range(len(words[1])):
                    given = [words[1][i], own]
                    parts += tl.inline_asm_elementwise(
                        COVER_4, "=h,=h,=h,=h,r,r", given, (tl.int16, tl.int16, tl.int16, tl.int16), True, 1
                    )
            else:
                own = product.reshape(form.K.ROWS // 16, 2, 8, form.Q.ROWS // 8, 4, 2).permute(0, 2, 4, 3, 1, 5)
                own = one_of(own.reshape(form.K.ROWS // 2, 4, form.Q.ROWS // 2))
                for i in tl.static_range(len(words[1]) // 2):
                    given = [words[1][2 * i], words[1][2 * i + 1], own]
                    parts += tl.inline_asm_elementwise(
                        COVER_2_2, "=h,=h,=h,=h,r,r,r", given, (tl.int16, tl.int16, tl.int16, tl.int16), True, 1
                    )
            cover = in_order(parts, form)
    return cover


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
def store_scores(values, matrix, pairs, task):
    """Write one number per pair of a tile to a matrix of all pairs."""
    first = row_at(matrix, task.seq.batch, task.head, pairs.row.to(tl.int64))
    exists = (pairs.row < task.seq.len_q) & (pairs.col < task.seq.len_k)
    pointers = first + pairs.col.to(tl.int64) * matrix.column
    tl.store(pointers, rounded(values, matrix.ptr.dtype.element_ty), mask=exists)


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
def next_words(words, q_start, k_start, task, form: tl.constexpr, NOW: tl.constexpr):
    """The words of the next tile, where there is one and they are to be loaded NOW; else those at hand.

    With a branch in a step, in front of it, or the assembler moves them to the step's end.
    """
    if NOW and q_start is not None and k_start is not None:
        words = words_at(q_start, k_start, task, form, FULL)
    return words


@device
def load_words(matrix, q_start, k_start, task, form: tl.constexpr, KIND: tl.constexpr):
    """Elements side by side: for columns 8 keys of a query; for rows 2 keys each of queries 2t, 2t + 1, 2t + 8, ..."""
    seq = task.seq
    words = ()
    if form.K.ORDER == "columns":
        # All keys of a full tile exist, not all queries.
        row = tl.minimum(q_start + tl.arange(0, form.Q.ROWS), seq.len_q - 1)
        first = row_at(matrix, seq.batch, task.head, 0) + row.to(tl.int64)[:, None] * matrix.row
        col = 8 * tl.arange(0, form.K.ROWS // 8)[None, :]
        if KIND == FULL:
            # What is the same in all steps first: 11 instructions of 350 less in a forward with a bias.
            pointers = first + col + tl.cast(k_start, tl.int64)
        else:
            pointers = first + tl.minimum(k_start + col, seq.len_k - 8)
        words = loaded(pointers, 8, KIND)
    else:
        # And here all queries, not all keys.
        col = tl.minimum(k_start + 2 * tl.arange(0, form.K.ROWS // 2), seq.len_k - 2)
        row = 2 * tl.arange(0, 4)
        first = row_at(matrix, seq.batch, task.head, tl.cast(q_start, tl.int64))
        # Addresses that go on by the same step for all threads need no register each.
        even = first + (row.to(tl.int64)[None, :] * matrix.row + col[:, None])
        for i in tl.static_range(form.Q.ROWS // 8):
            odd = even + matrix.row
            if KIND != FULL:
                last = seq.len_q - 1 - q_start - 8 * i
                even = first + (tl.minimum(row, last).to(tl.int64)[None, :] * matrix.row + col[:, None])
                odd = first + (tl.minimum(row + 1, last).to(tl.int64)[None, :] * matrix.row + col[:, None])
                first += 8 * tl.cast(matrix.row, tl.int64)
            words += loaded(even, 2, KIND) + loaded(odd, 2, KIND)
            even += 8 * tl.cast(matrix.row, tl.int64)
    return words


@device
def loaded(pointers, COUNT: tl.constexpr, KIND: tl.constexpr):
    """COUNT elements from each pointer on, as 32-bit words.

    By assembly, as Triton would read what lies side by side in a row with threads side by side, and then pass it on to
    those that need it, through shared memory. For full tiles not by loads of what nobody writes (`.nc`): the assembler
    would move them behind the next barrier, and behind the copies into shared memory that follow it.
    """
    SIZE: tl.constexpr = COUNT * max(8, pointers.dtype.element_ty.primitive_bitwidth) // 8
    LOAD: tl.constexpr = "ld.global." if KIND == FULL else "ld.global.nc."
    PURE: tl.constexpr = KIND != FULL
    words = ()
    if not PTX:
        if SIZE == 2:
            words += (tl.load(pointers.to(tl.pointer_type(tl.int16), bitcast=True)).to(tl.int32),)
        else:
            pointers = pointers.to(tl.pointer_type(tl.int32), bitcast=True)
            for i in tl.static_range(SIZE // 4):
                words += (tl.load(pointers + i),)
    elif SIZE == 2:
        two: tl.constexpr = "{ .reg .b16 t; " + LOAD + "b16 t, [$1]; cvt.u32.u16 $0, t; }"
        words += (tl.inline_asm_elementwise(two, "=r,l", [pointers.to(tl.int64)], tl.int32, PURE, 1),)
    elif SIZE == 4:
        four: tl.constexpr = LOAD + "b32 $0, [$1];"
        words += (tl.inline_asm_elementwise(four, "=r,l", [pointers.to(tl.int64)], tl.int32, PURE, 1),)
    elif SIZE == 8:
        eight: tl.constexpr = LOAD + "v2.b32 {$0, $1}, [$2];"
        words += tl.inline_asm_elementwise(eight, "=r,=r,l", [pointers.to(tl.int64)], (tl.int32, tl.int32), PURE, 1)
    else:
        most: tl.constexpr = LOAD + "v4.b32 {$0, $1, $2, $3}, [$4];"
        for i in tl.static_range(SIZE // 16):
            at = pointers.to(tl.int64) + 16 * i
            words += tl.inline_asm_elementwise(
                most, "=r,=r,=r,=r,l", [at], (tl.int32, tl.int32, tl.int32, tl.int32), PURE, 1
            )
    return words


@device
def in_order(parts, form: tl.constexpr):
    """A tile of scores, of what threads hold side by side: `parts` of [Q, K / 8], or of [K / 2, 4]."""
    # [.., len(parts)], the bits of a part's number being axes.
    for _ in tl.static_range(8):
        if len(parts) > 1:
            halves = ()
            for i in tl.static_range(len(parts) // 2):
                halves += (tl.join(parts[i], parts[i + len(parts) // 2]),)
            parts = halves
    if form.K.ORDER == "columns":
        # [Q, a t, c, b]
        tile = parts[0].reshape(form.Q.ROWS, form.K.ROWS // 32, 4, 4, 2).permute(0, 1, 3, 2, 4)
        tile = tile.reshape(form.Q.ROWS, form.K.ROWS)
    else:
        # [a g, t, c, b of the query, b of the key]
        tile = parts[0].reshape(form.K.ROWS // 16, 8, 4, form.Q.ROWS // 8, 2, 2).permute(0, 5, 1, 3, 2, 4)
        tile = tile.reshape(form.K.ROWS, form.Q.ROWS)
    return tile
