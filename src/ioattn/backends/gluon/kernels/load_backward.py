"""The loader of the backward: one warp group that walks the tiles of keys and fills the rings by TMA."""

from ioattn.backends.gluon.kernels.key_tiles import no_key_tile
from ioattn.backends.gluon.kernels.names import gl, gluon
from ioattn.backends.gluon.kernels.pipeline import start


@gluon.jit
def load_backward(call, schedule, k_desc, v_desc, q_desc, dout_desc, lse_desc, delta_desc):
    """The loader: posts tiles, then keeps K, V and the rings of Q and dO filled."""
    post = start(2)
    kv_place = start(1)
    place = start(call.config.stages)
    ends = schedule.ends()
    key_tiles = schedule.key_tiles(ends)
    n_tiles = schedule.n_tiles(key_tiles)
    index = gl.program_id(0)
    while index < n_tiles:
        tile, q_offset = schedule.tile(index, key_tiles, ends)
        call.board.post(post, tile)
        coord = [tile.batch, tile.head, tile.k_offset + tile.k_start, 0]
        call.keys.fill(kv_place, k_desc, coord)
        call.values.fill(kv_place, v_desc, coord)
        place = load_queries(call, tile, q_offset, place, q_desc, dout_desc, lse_desc, delta_desc)
        index = schedule.next()
        post = post.next()
        kv_place = kv_place.again()
    schedule.reset(index, n_tiles)
    call.board.post(post, no_key_tile())


@gluon.jit
def load_queries(call, tile, q_offset, place, q_desc, dout_desc, lse_desc, delta_desc):
    """Load Q, dO and what goes with their rows, for every head that shares the keys, in the groups' order."""
    ROWS: gl.constexpr = call.config.rows
    queries = call.band.queries(tile, call.config.keys, ROWS)
    edges = queries.edges
    steps = edges + queries.whole_end - queries.whole
    for member in range(call.group):
        head = tile.head * call.group + member
        row = tile.row + member * call.head_rows
        for step in range(steps):
            block = queries.inner(step - edges)
            if call.config.masks:
                block = gl.where(step < edges, queries.edge(step), block)
            coord = [tile.batch, head, q_offset + block * ROWS, 0]
            call.queries.fill(place, q_desc, coord, lse_desc, row + block * ROWS)
            call.douts.fill_free(place, dout_desc, coord, delta_desc, row + block * ROWS)
            place = place.next()
    return place
