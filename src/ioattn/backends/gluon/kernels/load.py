"""The loader: one warp group that walks the tiles and copies Q, K and V into rings of shared memory by TMA."""

from ioattn.backends.gluon.kernels.names import fence_async_shared, gl, gluon, mbarrier
from ioattn.backends.gluon.kernels.pipeline import start
from ioattn.backends.gluon.kernels.tiles import GROUP_ROWS, no_tile


@gluon.jit
def load(call, schedule, q_desc, k_desc, v_desc):
    """The loader: posts tiles and keeps the rings of Q, K and V filled."""
    slot = gl.allocate_shared_memory(gl.int32, [32 * gl.num_warps()], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    post = start(2)
    q_round = start(call.config.query_stages)
    place = start(call.config.stages)
    landed = start(1)
    ends = schedule.ends()
    row_tiles = schedule.row_tiles(ends)
    n_tiles = schedule.n_tiles(row_tiles)
    index = gl.program_id(0)
    current = gl.where(index < n_tiles, index, -1)
    newer = gl.to_tensor(-1)
    older = gl.to_tensor(-1)
    again = index < 0
    while current >= 0:
        tile = schedule.tile(current, row_tiles, ends, again)
        if call.config.cleans:
            if again:
                call.board.post(post, tile)
                load_queries(call, tile, q_round, q_desc)
                place, landed = load_again(call, tile, post, place, landed, k_desc, v_desc)
            else:
                place = load_once(call, tile, post, q_round, place, q_desc, k_desc, v_desc)
        else:
            place = load_once(call, tile, post, q_round, place, q_desc, k_desc, v_desc)
        q_round = q_round.next(by_masks=True)
        post = post.next()
        older = newer
        newer = gl.where(again, -1, current)
        drawn = schedule.draw(again == 0)
        suspect = is_suspect(call, post)
        index = gl.where(again, index, schedule.number(drawn, slot))
        current, newer, again = choose(call, post, index, newer, older, suspect, n_tiles)
    schedule.reset(index, n_tiles)
    call.board.post(post, no_tile())


@gluon.jit
def is_suspect(call, post):
    """Whether the tile that was posted here is to be done again, once it is done."""
    suspect = call.kv_group.by < 0  # false, as a scalar of the device
    if call.config.cleans:
        call.board.acquire(post)
        suspect = call.board.is_suspect(post)
    return suspect


@gluon.jit
def choose(call, post, index, newer, older, suspect, n_tiles):
    """The tile to work on, the one posted last, and whether the first has been done before.

    A tile whose result has a NaN is done again with V cleaned, because the NaN may come from masked keys: a masked
    weight is zero, but zero times infinity is not. `newer` and `older` are the tiles posted last and before it, the
    latter at the post that is about to be used; -1 if there is none, or if it has been cleaned already.
    """
    current = gl.where(index < n_tiles, index, -1)
    again = index < 0
    if call.config.cleans:
        again = (older >= 0) & suspect
        current = gl.where(again, older, current)
        if (current < 0) & (newer >= 0):
            call.board.acquire(post.next())
            again = call.board.is_suspect(post.next())
            current = gl.where(again, newer, -1)
            newer = gl.to_tensor(-1)
    return current, newer, again


@gluon.jit
def load_queries(call, tile, q_round, q_desc):
    """Load every group's rows of a tile."""
    GROUPS: gl.constexpr = call.config.groups
    for group in gl.static_range(GROUPS):
        row = tile.q_offset + tile.q_start + group * GROUP_ROWS
        call.queries.fill(q_round.at(q_round.index * GROUPS + group), q_desc, [tile.batch, tile.head, row, 0])


@gluon.jit
def load_once(call, tile, post, q_round, place, q_desc, k_desc, v_desc):
    """Post the tile; load the queries and the blocks of K and V that its rows see, from the last to the first.

    The first block of K goes before all else: its buffer is free before the groups are done with the last tile's end.
    """
    KEYS: gl.constexpr = call.config.keys
    TILE_ROWS: gl.constexpr = GROUP_ROWS * call.config.groups
    keys = call.band.blocks(tile, tile.q_start, TILE_ROWS, KEYS)
    kv_head = call.kv_group.quotient(tile.head)
    coord = [tile.batch, kv_head, tile.k_offset + (keys.last - 1) * KEYS, 0]
    some = keys.last > keys.first
    if some:
        call.keys.fill(place, k_desc, coord)
    call.board.post(post, tile)
    load_queries(call, tile, q_round, q_desc)
    if some:
        call.values.fill(place, v_desc, coord)
        place = place.next()
    for step in range(some.to(gl.int32), keys.last - keys.first):
        coord = [tile.batch, kv_head, tile.k_offset + (keys.last - 1 - step) * KEYS, 0]
        call.keys.fill(place, k_desc, coord)
        call.values.fill(place, v_desc, coord)
        place = place.next()
    return place


@gluon.jit
def load_again(call, tile, post, place, landed, k_desc, v_desc):
    """The same for a tile that is done again: with V cleaned, and put right afterwards.

    Apart from `load_once`, because a loader that touches what it loads needs a fence before each copy: with both in one
    loop, 5-8% of the causal forward (H200, D 128 and 256).
    """
    KEYS: gl.constexpr = call.config.keys
    TILE_ROWS: gl.constexpr = GROUP_ROWS * call.config.groups
    keys = call.band.blocks(tile, tile.q_start, TILE_ROWS, KEYS)
    kv_head = call.kv_group.quotient(tile.head)
    for step in range(keys.last - keys.first):
        block = keys.last - 1 - step
        coord = [tile.batch, kv_head, tile.k_offset + block * KEYS, 0]
        call.keys.fill(place, k_desc, coord)
        if keys.masks(block):
            call.values.fill_for(place, v_desc, coord, call.landed.index(0))
            mbarrier.wait(call.landed.index(0), landed.parity)
            landed = landed.again()
            drop_infinite(call.values.tile(place))
            fence_async_shared()
            call.values.mark_full(place)
        else:
            call.values.fill(place, v_desc, coord)
        place = place.next()
    call.board.wait_until_done(post)
    for block in range(keys.first, keys.last):
        if keys.masks(block):
            for key in range(block * KEYS, gl.minimum((block + 1) * KEYS, tile.len_k)):
                restore(call, tile, key)
    return place, landed


@gluon.jit
def restore(call, tile, key):
    """Add what `drop_infinite` took out of a row of V to the rows of the result that see it: any weight times it."""
    ROWS: gl.constexpr = 8
    TILE_ROWS: gl.constexpr = GROUP_ROWS * call.config.groups
    DIM_V: gl.constexpr = call.config.dim_v
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    memory = call.memory
    col = gl.arange(0, DIM_V, gl.SliceLayout(0, layout))
    head = tile.batch * memory.v_batch + call.kv_group.quotient(tile.head) * memory.v_head
    at = head + (tile.k_offset + key) * memory.v_row
    v_row = gl.load(memory.v + at + col, mask=col < memory.dim_v, other=0.0).to(gl.float32)
    lost = gl.where(v_row * 0.0 == 0.0, 0.0, v_row)
    if gl.max(gl.where(lost == 0.0, 0, 1), 0) != 0:
        for first in range(0, TILE_ROWS, ROWS):
            row = tile.q_start + first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
            seen = (row < tile.len_q) & call.band.keeps(tile, row, key, 0)
            inside = seen[:, None] & (col < memory.dim_v)[None, :]
            there = tile.batch * memory.out_batch + tile.head * memory.out_head + (tile.q_offset + row) * memory.out_row
            out_ptrs = memory.out + there[:, None] + col[None, :]
            out = gl.load(out_ptrs, mask=inside, other=0.0)
            gl.store(out_ptrs, (out.to(gl.float32) + lost[None, :]).to(out.dtype), mask=inside)


@gluon.jit
def drop_infinite(v_tile):
    """Set to zero what is infinite or NaN in a tile, in slices that fit a loader's registers."""
    DIM: gl.constexpr = v_tile.shape[1]
    ROWS: gl.constexpr = 1024 // DIM if DIM < 256 else 8  # not less than the 8 rows of a swizzle pattern
    PARTS: gl.constexpr = v_tile.shape[0] // ROWS
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    for part in gl.static_range(PARTS):
        values = v_tile.slice(part * ROWS, ROWS, 0).load(layout)
        v_tile.slice(part * ROWS, ROWS, 0).store(gl.where(values * 0.0 == 0.0, values, gl.zeros_like(values)))
