"""A second look at gradients that are not finite, where the band or the end of a sequence hides something.

A hidden weight is 0, but 0 * NaN is NaN: NaN or inf in a hidden row of K, V, Q or dO reaches a gradient through a tile
that holds it. The kernels raise a flag when that may have happened; then, and only then, these compute each tile
that is not finite again: products of what is finite, and what the visible rest makes of the sum. In Triton's own
language, as speed does not matter here.
"""

import triton
import triton.language as tl

from ioattn.backends.gluon.kernels.around import LOG2E, PAD

INF = tl.constexpr(float("inf"))


@triton.jit
def load_rows(x, strides, entry, head, first, row, exists, dim, DIM: tl.constexpr):
    """Rows of one head, `[rows, DIM]`; zeros where they do not exist."""
    col = tl.arange(0, DIM)
    at = entry * strides[0] + head * strides[1] + (first + row) * strides[2]
    return tl.load(x + at[:, None] + col[None, :], mask=exists[:, None] & (col < dim)[None, :], other=0.0)


@triton.jit
def store_rows(x, strides, entry, head, first, row, exists, dim, values, DIM: tl.constexpr):
    """Store rows of one head, `[rows, DIM]`, where they exist."""
    col = tl.arange(0, DIM)
    at = entry * strides[0] + head * strides[1] + (first + row) * strides[2]
    inside = exists[:, None] & (col < dim)[None, :]
    tl.store(x + at[:, None] + col[None, :], values.to(x.dtype.element_ty), mask=inside)


@triton.jit
def sequence_of(entry, sizes, cu_seqlens_q, cu_seqlens_k, SEQUENCES: tl.constexpr):
    """Where the queries, the keys and the workspace of a sequence start, and its lengths."""
    q_first = entry * 0
    k_first = entry * 0
    row_first = entry * 0
    len_q = sizes[1]
    len_k = sizes[2]
    if SEQUENCES > 0:
        q_first = tl.load(cu_seqlens_q + entry).to(tl.int64)
        k_first = tl.load(cu_seqlens_k + entry).to(tl.int64)
        len_q = tl.load(cu_seqlens_q + entry + 1) - q_first.to(tl.int32)
        len_k = tl.load(cu_seqlens_k + entry + 1) - k_first.to(tl.int32)
        row_first = (q_first + entry * PAD + (PAD - 1)) // PAD * PAD
    return q_first, k_first, row_first, len_q, len_k


@triton.jit
def shift_of(band, len_q, len_k, BOTTOM_RIGHT: tl.constexpr):
    """The shift that aligns a sequence."""
    shift = band[2]
    if BOTTOM_RIGHT:
        shift += len_k - len_q
    return shift


@triton.jit
def sees(query, key, len_q, len_k, shift, band, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """Whether each query sees each key; shapes broadcast."""
    seen = (query < len_q) & (key < len_k)
    if HAS_LO:
        seen = seen & (key - query - shift >= band[0])
    if HAS_HI:
        seen = seen & (key - query - shift <= band[1])
    return seen


@triton.jit
def is_finite(x):
    """Whether every element is a finite number."""
    return tl.max(((tl.abs(x) < INF) == 0).to(tl.int32)) == 0


@triton.jit
def finite(x):
    """`x` with zeros for what is not finite."""
    return tl.where(tl.abs(x) < INF, x, 0.0).to(x.dtype)


@triton.jit
def count(seen, special, dtype: tl.constexpr):
    """How many special elements of each column each row of `seen` sees."""
    return tl.dot(seen.to(dtype), special.to(dtype))


@triton.jit
def gradients(raw, dweights, seen, lse, delta, distance, operands, step: tl.constexpr, dstep: tl.constexpr):
    """Weights, and the gradient of the scaled products, of a tile; zero where nothing is seen."""
    scores = raw
    if step is not None:
        scores = step(raw, distance, operands)
    seen = seen & (lse != INF)
    weights = tl.where(seen, tl.exp2(scores * LOG2E - lse), 0.0)
    dscores = tl.where(seen, weights * (dweights - delta), 0.0)
    if dstep is not None:
        dscores = dstep(dscores, raw, distance, operands)
    return seen, weights, dscores


@triton.jit
def operands_of(softcap, slopes, head, HAS_SOFTCAP: tl.constexpr):
    """One operand per term, in the terms' order."""
    if HAS_SOFTCAP and slopes is not None:
        operands = (softcap, tl.load(slopes + head).to(tl.float32))
    elif slopes is not None:
        operands = (tl.load(slopes + head).to(tl.float32),)
    else:
        operands = (softcap,)
    return operands


@triton.jit
def repair_keys(
    flag, q, q_strides, k, k_strides, v, v_strides, dout, dout_strides, lse_rows, delta_rows, dk, dk_strides, dv,
    dv_strides, cu_seqlens_q, cu_seqlens_k, slopes, softcap, scale, sizes, dims, band, step: tl.constexpr,
    dstep: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, SEQUENCES: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """dK and dV again, where they are not finite. FORM: whether there are lo, hi, alignment bottom-right, softcap."""
    if tl.load(flag) == 0:
        return
    tiles = (sizes[2] + TILE - 1) // TILE
    group = sizes[3] // sizes[4]
    dtype: tl.constexpr = q.dtype.element_ty
    for program in range(tl.program_id(0), tiles * sizes[4] * sizes[0], tl.num_programs(0)):
        kv_head = (program // tiles % sizes[4]).to(tl.int64)
        entry = (program // tiles // sizes[4]).to(tl.int64)
        q_first, k_first, row_first, len_q, len_k = sequence_of(entry, sizes, cu_seqlens_q, cu_seqlens_k, SEQUENCES)
        place = entry if SEQUENCES == 0 else entry * 0
        shift = shift_of(band, len_q, len_k, FORM[2])
        key = program % tiles * TILE + tl.arange(0, TILE)
        exists = key < len_k
        dk_old = load_rows(dk, dk_strides, place, kv_head, k_first, key, exists, dims[0], DIM)
        dv_old = load_rows(dv, dv_strides, place, kv_head, k_first, key, exists, dims[1], DIM)
        if (is_finite(dk_old) & is_finite(dv_old)) == 0:
            k_tile = load_rows(k, k_strides, place, kv_head, k_first, key, exists, dims[0], DIM)
            v_tile = load_rows(v, v_strides, place, kv_head, k_first, key, exists, dims[1], DIM)
            dk_tile = tl.zeros([TILE, DIM], tl.float32)
            dv_tile = tl.zeros([TILE, DIM], tl.float32)
            for member in range(group):
                head = kv_head * group + member
                row_at = (place * sizes[3] + head) * sizes[5] + row_first
                for start in range(0, len_q, TILE):
                    query = start + tl.arange(0, TILE)
                    there = query < len_q
                    q_tile = load_rows(q, q_strides, place, head, q_first, query, there, dims[0], DIM)
                    dout_tile = load_rows(dout, dout_strides, place, head, q_first, query, there, dims[1], DIM)
                    lse = tl.load(lse_rows + row_at + query)[None, :]
                    delta = tl.load(delta_rows + row_at + query)[None, :]
                    seen = sees(query[None, :], key[:, None], len_q, len_k, shift, band, FORM[0], FORM[1])
                    raw = tl.dot(k_tile, tl.trans(q_tile)) * scale
                    dweights = tl.dot(v_tile, tl.trans(dout_tile))
                    distance = tl.abs((query[None, :] + (len_k - len_q) - key[:, None]).to(tl.float32))
                    operands = operands_of(softcap, slopes, head, FORM[3])
                    seen, weights, dscores = gradients(raw, dweights, seen, lse, delta, distance, operands, step, dstep)
                    dv_tile = tl.dot(weights.to(dtype), finite(dout_tile), dv_tile)
                    dk_tile = tl.dot(dscores.to(dtype), finite(q_tile), dk_tile)
                    dv_tile += tl.where(count(seen, dout_tile == INF, dtype) > 0, INF, 0.0)
                    dv_tile -= tl.where(count(seen, dout_tile == -INF, dtype) > 0, INF, 0.0)
                    dv_tile = tl.where(count(seen, dout_tile != dout_tile, dtype) > 0, float("nan"), dv_tile)
                    dk_tile = tl.where(count(seen, (tl.abs(q_tile) < INF) == 0, dtype) > 0, float("nan"), dk_tile)
            store_rows(dk, dk_strides, place, kv_head, k_first, key, exists, dims[0], dk_tile * scale, DIM)
            store_rows(dv, dv_strides, place, kv_head, k_first, key, exists, dims[1], dv_tile, DIM)


@triton.jit
def repair_queries(
    flag, q, q_strides, k, k_strides, v, v_strides, dout, dout_strides, lse_rows, delta_rows, dq, dq_strides,
    cu_seqlens_q, cu_seqlens_k, slopes, softcap, scale, sizes, dims, band, step: tl.constexpr, dstep: tl.constexpr,
    TILE: tl.constexpr, DIM: tl.constexpr, SEQUENCES: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """dQ again, where it is not finite."""
    if tl.load(flag) == 0:
        return
    tiles = (sizes[1] + TILE - 1) // TILE
    group = sizes[3] // sizes[4]
    dtype: tl.constexpr = q.dtype.element_ty
    for program in range(tl.program_id(0), tiles * sizes[3] * sizes[0], tl.num_programs(0)):
        head = (program // tiles % sizes[3]).to(tl.int64)
        entry = (program // tiles // sizes[3]).to(tl.int64)
        q_first, k_first, row_first, len_q, len_k = sequence_of(entry, sizes, cu_seqlens_q, cu_seqlens_k, SEQUENCES)
        place = entry if SEQUENCES == 0 else entry * 0
        shift = shift_of(band, len_q, len_k, FORM[2])
        query = program % tiles * TILE + tl.arange(0, TILE)
        there = query < len_q
        dq_old = load_rows(dq, dq_strides, place, head, q_first, query, there, dims[0], DIM)
        if is_finite(dq_old) == 0:
            q_tile = load_rows(q, q_strides, place, head, q_first, query, there, dims[0], DIM)
            dout_tile = load_rows(dout, dout_strides, place, head, q_first, query, there, dims[1], DIM)
            row_at = (place * sizes[3] + head) * sizes[5] + row_first
            lse = tl.load(lse_rows + row_at + query, mask=there, other=INF)[:, None]
            delta = tl.load(delta_rows + row_at + query, mask=there, other=0.0)[:, None]
            dq_tile = tl.zeros([TILE, DIM], tl.float32)
            for start in range(0, len_k, TILE):
                key = start + tl.arange(0, TILE)
                exists = key < len_k
                k_tile = load_rows(k, k_strides, place, head // group, k_first, key, exists, dims[0], DIM)
                v_tile = load_rows(v, v_strides, place, head // group, k_first, key, exists, dims[1], DIM)
                seen = sees(query[:, None], key[None, :], len_q, len_k, shift, band, FORM[0], FORM[1])
                raw = tl.dot(q_tile, tl.trans(k_tile)) * scale
                dweights = tl.dot(dout_tile, tl.trans(v_tile))
                distance = tl.abs((query[:, None] + (len_k - len_q) - key[None, :]).to(tl.float32))
                operands = operands_of(softcap, slopes, head, FORM[3])
                seen, _, dscores = gradients(raw, dweights, seen, lse, delta, distance, operands, step, dstep)
                dq_tile = tl.dot(dscores.to(dtype), finite(k_tile), dq_tile)
                dq_tile = tl.where(count(seen, (tl.abs(k_tile) < INF) == 0, dtype) > 0, float("nan"), dq_tile)
            store_rows(dq, dq_strides, place, head, q_first, query, there, dims[0], dq_tile * scale, DIM)
