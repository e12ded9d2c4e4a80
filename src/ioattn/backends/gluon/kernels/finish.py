"""The end of a tile: divide by the row sums, look for NaN that masked keys have brought in, store."""

from ioattn.backends.gluon.kernels.approximate import log2, reciprocal
from ioattn.backends.gluon.kernels.call import INF, LN2
from ioattn.backends.gluon.kernels.names import fence_async_shared, gl, gluon, store_tile, tma
from ioattn.backends.gluon.kernels.row_sums import put_together, sum_rows
from ioattn.backends.gluon.kernels.tiles import GROUP_ROWS


@gluon.jit
def finish(call, post, state, row, group):
    """Divide by the row sums and store: out by TMA where the tile is whole, the LSE by pointers."""
    tile = call.board.read(post)
    config: gl.constexpr = call.config
    layouts: gl.constexpr = call.layouts
    memory = call.memory
    row_sum = put_together(state.row_sum, layouts.row, config.thread_sums)
    is_empty = row_sum == 0.0
    inverse = gl.where(is_empty, 0.0, reciprocal(row_sum))
    # An empty row has summed zeros: the result is 0, or NaN of hidden keys, and the tile is done again without them.
    out = state.acc * gl.convert_layout(inverse, layouts.acc_row)[:, None]
    if config.cleans:
        sums = sum_rows(out, config.thread_sums)
        call.board.report(post, group, put_together(sums, layouts.acc_row, config.thread_sums) * 0.0)
    if config.out_parts == 2:
        HALF: gl.constexpr = config.dim_v // 2
        left, right = out.reshape([GROUP_ROWS, 2, HALF]).permute([0, 2, 1]).split()
        store_out(call, tile, left, row, 0, group)
        store_out(call, tile, right, row, HALF, group)
    else:
        store_out(call, tile, out, row, 0, group)
    lse = gl.where(is_empty, -INF, (state.row_max + log2(row_sum)) * LN2)
    rows = row + gl.arange(0, GROUP_ROWS, layouts.row)
    at = tile.batch * memory.lse_batch + tile.head * memory.lse_head + tile.q_offset
    gl.store(memory.lse + at + rows, lse, mask=rows < tile.len_q)


@gluon.jit
def store_out(call, tile, out, row, FIRST: gl.constexpr, group):
    """Store a tile's columns from `FIRST` on.

    By TMA; by pointers where the tile reaches past its sequence, or where the loader is to put it right.
    """
    config: gl.constexpr = call.config
    memory = call.memory
    out_tile = call.out_tiles.index(group)
    tma.store_wait(0)
    out_rows = out_tile.reshape([GROUP_ROWS, out.shape[1]])
    out_rows.store(out.to(out_tile.dtype))
    if config.cleans:
        if (row + GROUP_ROWS <= tile.len_q) & (tile.is_again == 0):
            fence_async_shared()
            store_tile(memory.out_desc, [tile.batch, tile.head, tile.q_offset + row, FIRST], out_tile)
        else:
            drain_stores(row)
            store_rows(memory, tile, row, FIRST, out_rows.load(call.layouts.copy))
    else:
        fence_async_shared()
        store_tile(memory.out_desc, [tile.batch, tile.head, row, FIRST], out_tile)


@gluon.jit
def drain_stores(row):
    """Wait until the copy engine has written what this group gave it: `store_wait` only waits until it has been read.

    The result of a tile that is done again must not be overtaken by the one before.
    """
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [row], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def store_rows(memory, tile, row, FIRST: gl.constexpr, out):
    """Store the rows of a tile that reaches past its sequence; the next rows belong to another."""
    layout: gl.constexpr = out.type.layout
    rows = row + gl.arange(0, out.shape[0], gl.SliceLayout(1, layout))
    cols = FIRST + gl.arange(0, out.shape[1], gl.SliceLayout(0, layout))
    at = tile.batch * memory.out_batch + tile.head * memory.out_head + (tile.q_offset + rows) * memory.out_row
    inside = (rows < tile.len_q)[:, None] & (cols < memory.dim_v)[None, :]
    gl.store(memory.out + at[:, None] + cols[None, :], out, mask=inside)
