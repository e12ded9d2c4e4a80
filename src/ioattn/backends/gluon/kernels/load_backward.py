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
    descs = (q_desc, dout_desc, lse_desc, delta_desc)
    ends = schedule.ends()
    key_tiles = schedule.key_tiles(ends)
    n_tiles = schedule.n_tiles(key_tiles)
    n_units = schedule.n_units(n_tiles)
    index = schedule.first()
    while index < n_units:
        tile, q_offset = schedule.unit(index, n_tiles, key_tiles, ends)
        call.board.post(post, tile)
        if call.config.skips:
            place = load_seen(call, tile, q_offset, place, kv_place, k_desc, v_desc, descs)
        else:
            load_keys(call, tile, kv_place, k_desc, v_desc)
            place = load_queries(call, tile, q_offset, place, descs)
        index = schedule.next()
        post = post.next()
        kv_place = kv_place.again()
    schedule.reset(index, n_units)
    call.board.post(post, no_key_tile())


@gluon.jit
def load_keys(call, tile, kv_place, k_desc, v_desc):
    """Load K and V, first what is let go first."""
    coord = [tile.batch, tile.head, tile.k_offset + tile.k_start, 0]
    if call.config.lean:
        call.values.fill(kv_place, v_desc, coord)
        call.keys.fill(kv_place, k_desc, coord)
    else:
        call.keys.fill(kv_place, k_desc, coord)
        call.values.fill(kv_place, v_desc, coord)


@gluon.jit
def load_seen(call, tile, q_offset, place, kv_place, k_desc, v_desc, descs):
    """Load a tile in the order of `walk_seen`, its first block before its keys: those of the tile before are in use."""
    queries = call.band.queries(tile, call.config.keys, call.config.rows)
    early = gl.minimum(queries.count(), 1)
    for n in range(early):
        place = load_block(call, tile, q_offset, place, descs, 0, queries.first + n)
    load_keys(call, tile, kv_place, k_desc, v_desc)
    for n in range(early, queries.count()):
        place = load_block(call, tile, q_offset, place, descs, 0, queries.first + n)
    return place


@gluon.jit
def load_queries(call, tile, q_offset, place, descs):
    """Load Q, dO and what goes with their rows, for every head that shares the keys, in the groups' order."""
    config: gl.constexpr = call.config
    queries = call.band.queries(tile, config.keys, config.rows)
    if config.stretch > 0:
        place = load_backwards(call, tile, q_offset, queries, place, descs)
    else:
        first_member, last_member = call.members(tile)
        for member in range(first_member, last_member):
            for step in range(queries.edges + queries.whole_end - queries.whole):
                block = queries.inner(step - queries.edges)
                if config.masks:
                    block = gl.where(step < queries.edges, queries.edge(step), block)
                place = load_block(call, tile, q_offset, place, descs, member, block)
    return place


@gluon.jit
def load_backwards(call, tile, q_offset, queries, place, descs):
    """The same in the order of `walk_backwards`."""
    STRETCH: gl.constexpr = call.config.stretch
    first_member, last_member = call.members(tile)
    if call.config.has_lo:
        for member in range(first_member, last_member):
            for n in range(queries.edges - queries.before):
                block = queries.edge(queries.edges - 1 - n)
                place = load_block(call, tile, q_offset, place, descs, member, block)
    for n in range(queries.stretches(STRETCH)):
        first, last = queries.stretch(n, STRETCH)
        for member in range(first_member, last_member):
            for back in range(last - first):
                place = load_block(call, tile, q_offset, place, descs, member, last - 1 - back)
    if call.config.masks:
        for member in range(first_member, last_member):
            for n in range(queries.before):
                block = queries.edge(queries.before - 1 - n)
                place = load_block(call, tile, q_offset, place, descs, member, block)
    return place


@gluon.jit
def load_block(call, tile, q_offset, place, descs, member, block):
    """Load one block of queries of one head."""
    q_desc, dout_desc, lse_desc, delta_desc = descs
    ROWS: gl.constexpr = call.config.rows
    row = tile.row + member * call.head_rows + block * ROWS
    coord = [tile.batch, tile.head * call.group + member, q_offset + block * ROWS, 0]
    call.queries.fill(place, q_desc, coord, lse_desc, row)
    call.douts.fill_free(place, dout_desc, coord, delta_desc, row)
    return place.next()
