"""What runs before and after the backward kernel: delta and a cleared buffer for dQ, and dQ in its own dtype.

In Triton's own language: they only read and write memory, and leave its layout to the compiler. The workspace has the
rows of each sequence at a multiple of 128: `head_rows` per head.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
PAD = tl.constexpr(128)


@triton.jit
def place(heads, head_rows, ROWS: tl.constexpr):
    """Batch entry, head and first row of the workspace of this program.

    From the last to the first: what is left in L2 is what the kernel begins with, or has ended with.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    tiles = head_rows // ROWS
    at = program // tiles
    return (at // heads).to(tl.int64), (at % heads).to(tl.int64), program % tiles * ROWS


@triton.jit
def placed(row, cu_seqlens, batch, total, SEQUENCES: tl.constexpr):
    """Offset, length and first row in the workspace of the packed sequence that holds a row of the workspace.

    The sequence after the last one is what lies behind it, up to `total` rows.
    """
    sequence = tl.arange(0, SEQUENCES)
    offsets = tl.load(cu_seqlens + sequence, mask=sequence <= batch, other=0)
    starts = (offsets + sequence * PAD + (PAD - 1)) // PAD * PAD
    at = tl.sum(((starts <= row) & (sequence <= batch)).to(tl.int32), 0) - 1
    offset = tl.load(cu_seqlens + at)
    end = tl.load(cu_seqlens + at + 1, mask=at < batch, other=total)
    return at, offset, end - offset, (offset + at * PAD + (PAD - 1)) // PAD * PAD


@triton.jit
def load_rows(x, strides, entry, head, row, exists, dim, DIM: tl.constexpr):
    """Rows of one head in FP32, `[rows, DIM]`; zeros where they do not exist.

    The mask of columns goes by eights: else the copies are by single elements.
    """
    col = tl.arange(0, DIM)
    at = tl.multiple_of(entry * strides[0] + head * strides[1] + row * strides[2], 8)
    inside = exists[:, None] & (col // 8 < dim // 8)[None, :]
    return tl.load(x + at[:, None] + col[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def prepare(
    out,
    out_strides,
    dout,
    dout_strides,
    lse,
    lse_strides,
    dlse,
    dlse_strides,
    lse_rows,
    delta_rows,
    dq_rows,
    dq_turns,
    flat_rows,
    sinks,
    sink_terms,
    flag,
    q,
    q_strides,
    cu_seqlens,
    sizes,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """For a tile of rows: delta = rowsum(dO * O) - dLSE, the LSE in powers of two, and zeros for dQ.

    The flag says that a row that some keys do not see is not finite: 0 * NaN is NaN. It is zero at first. `dq_turns`
    counts the tiles of keys that have added to dQ.

    Where dQ has a kernel of its own it needs no zeros, and that kernel finds LSE and delta of packed rows in
    `flat_rows`.

    A row without a key gets an LSE of infinity, which makes its weights zero, and a delta of zero. A sink is one more
    key whose value is zero: the gradient of its score is P_sink * (0 - delta), summed here over the tile.
    """
    batch, heads, len_q, head_rows, dim_v, dim = sizes
    entry, head, row = place(heads, head_rows, ROWS)
    at = row + tl.arange(0, ROWS)
    to = (entry * heads + head) * head_rows + at
    col = tl.arange(0, DIM)
    len_rows = len_q.to(tl.int64)
    if dq_rows is not None:
        tl.store(dq_rows + to[:, None] * DIM + col[None, :], tl.zeros([ROWS, DIM], tl.float32))
    if dq_turns is not None:
        tl.store(dq_turns + tl.program_id(0), 0)
    if SEQUENCES > 0:
        sequence, offset, len_q, start = placed(row, cu_seqlens, batch, len_q, SEQUENCES)
        at -= start
        in_memory = at < len_q
        exists = in_memory & (sequence < batch)
        source = (offset + at).to(tl.int64)
    else:
        exists = at < len_q
        in_memory = exists
        source = at.to(tl.int64)
    out_tile = load_rows(out, out_strides, entry, head, source, exists, dim_v, DIM)
    dout_tile = load_rows(dout, dout_strides, entry, head, source, exists, dim_v, DIM)
    delta = tl.sum(out_tile * dout_tile, 1)
    lse_at = entry * lse_strides[0] + head * lse_strides[1] + source
    row_lse = tl.load(lse + lse_at, mask=exists, other=float("-inf"))
    if dlse is not None:
        dlse_at = entry * dlse_strides[0] + head * dlse_strides[1]
        delta -= tl.load(dlse + dlse_at + source * dlse_strides[2], mask=exists, other=0.0).to(tl.float32)
    is_empty = row_lse == float("-inf")
    row_lse2 = tl.where(is_empty, float("inf"), row_lse * LOG2E)
    delta = tl.where(is_empty, 0.0, delta)
    tl.store(lse_rows + to, row_lse2)
    tl.store(delta_rows + to, delta)
    if flat_rows is not None:
        flat = head * len_rows + source
        tl.store(flat_rows + flat, row_lse2, mask=exists)
        tl.store(flat_rows + heads * len_rows + flat, delta, mask=exists)
    if flag is not None:
        # The kernel reads rows behind a sequence, too.
        unseen = load_rows(q, q_strides, entry, head, source, in_memory & is_empty, dim, DIM)
        behind = load_rows(dout, dout_strides, entry, head, source, in_memory & (exists == 0), dim_v, DIM)
        poison = dout_tile * 0.0 + behind * 0.0 + unseen * 0.0
        fine = (tl.sum(poison, 1) == 0.0) & ((exists == 0) | is_empty | (tl.abs(row_lse) < float("inf")))
        if tl.min(fine.to(tl.int32)) == 0:
            tl.store(flag, 1)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32)
        weights = tl.where(is_empty, 0.0, tl.exp2((sink - row_lse) * LOG2E))
        terms = tl.where(weights == 0.0, 0.0, weights * delta)
        tl.store(sink_terms + (entry * heads + head) * (head_rows // ROWS) + row // ROWS, -tl.sum(terms, 0))


@triton.jit
def in_order(sums, ROWS: tl.constexpr, DIM: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Rows of dQ out of parts of 64 by 64 that lie in the order of registers (`backward_call.register_order`)."""
    parts = tl.reshape(sums, [DIM // 64, 8, 4, 8, 4, 2, 2])
    rows = tl.permute(parts, [1, 4, 6, 0, 2, 5, 3]) if TRANSPOSED else tl.permute(parts, [2, 5, 3, 0, 1, 4, 6])
    return tl.reshape(rows, [ROWS, DIM])


@triton.jit
def convert(
    dq_rows,
    dq,
    dq_strides,
    flag,
    cu_seqlens,
    sizes,
    scale,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    SEQUENCES: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """A tile of dQ from the FP32 buffer, times the scale; zeros behind the last packed sequence.

    The flag says that some gradient is not finite.
    """
    batch, heads, len_q, head_rows, dim = sizes
    entry, head, row = place(heads, head_rows, ROWS)
    at = row + tl.arange(0, ROWS)
    first = (entry * heads + head) * head_rows + row
    col = tl.arange(0, DIM)
    if SEQUENCES > 0:
        _, offset, len_q, start = placed(row, cu_seqlens, batch, len_q, SEQUENCES)
        at -= start
        source = (offset + at).to(tl.int64)
    else:
        source = at.to(tl.int64)
    sums = tl.load(dq_rows + first * DIM + tl.arange(0, ROWS * DIM))
    values = in_order(sums, ROWS, DIM, TRANSPOSED) * scale
    if flag is not None:
        if tl.max(((tl.abs(values) < float("inf")) == 0).to(tl.int32)) != 0:
            tl.store(flag, 1)
    inside = (at < len_q)[:, None] & (col // 8 < dim // 8)[None, :]
    start_of_head = entry * dq_strides[0] + head * dq_strides[1]
    offset = tl.multiple_of(start_of_head + source * dq_strides[2], 8)
    tl.store(dq + offset[:, None] + col[None, :], values.to(dq.dtype.element_ty), mask=inside)
