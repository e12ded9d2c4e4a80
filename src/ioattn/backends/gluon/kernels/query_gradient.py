"""dQ by a kernel of its own, in one order: two more products than in the common kernel, but no sums in global memory.

A tile is query rows that walk over keys, as in the forward: the schedule, the band and the board are the forward's.
Each compute group owns 64 rows and needs no other. Notation is that of `ioattn.backends.eager`.
"""

from ioattn.backends.gluon.kernels.backward_call import Derivative
from ioattn.backends.gluon.kernels.call import INF
from ioattn.backends.gluon.kernels.names import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    store_tile,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ioattn.backends.gluon.kernels.pipeline import Cursor, Ring, Turns, ring, start, turns
from ioattn.backends.gluon.kernels.tiles import GROUP_ROWS, Band, Board, Divisor, Schedule, board, no_tile


@aggregate
class QueryLayouts:
    """How the tiles of one compute group lie in its registers."""

    scores: gl.constexpr
    acc: gl.constexpr
    operand: gl.constexpr
    row: gl.constexpr
    col: gl.constexpr
    copy: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, keys, dim):
        scores = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, keys, 16])
        acc = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, dim, 16])
        self.scores = gl.constexpr(scores)
        self.acc = gl.constexpr(acc)
        self.operand = gl.constexpr(gl.DotOperandLayout(0, acc, 2))
        self.row = gl.constexpr(gl.SliceLayout(1, scores))
        self.col = gl.constexpr(gl.SliceLayout(0, scores))
        lanes = min(32, dim // 8)
        self.copy = gl.constexpr(gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0]))


@aggregate
class Rows:
    """What is in global memory per row: dQ, LSE (in powers of two) and delta. The flag says that dQ is not finite."""

    dq_desc: tma.tensor_descriptor
    lse: gl.tensor
    delta: gl.tensor
    batch: gl.tensor
    head: gl.tensor
    flag: object
    dq: object
    dq_head: object
    dq_row: object
    dim: object

    @gluon.constexpr_function
    def __init__(self, dq_desc, lse, delta, strides, flag, dq, dq_strides):
        self.dq_desc = dq_desc
        self.lse = lse
        self.delta = delta
        self.batch, self.head = strides
        self.flag = gl.constexpr(None) if flag is None else flag
        self.dq = gl.constexpr(None) if dq is None else dq
        self.dq_head, self.dq_row, self.dim = (gl.constexpr(None),) * 3 if dq_strides is None else dq_strides

    @gluon.jit
    def read(self, numbers, tile, row, layout: gl.constexpr, other: gl.constexpr):
        """The numbers of the 64 rows from `row` on; `other` for rows that the sequence does not have."""
        rows = row + gl.arange(0, GROUP_ROWS, layout)
        at = tile.batch.to(gl.int64) * self.batch + tile.head.to(gl.int64) * self.head + tile.q_offset
        return gl.load(numbers + at + rows, mask=rows < tile.len_q, other=other)

    @gluon.jit
    def store(self, tile, row, values):
        """Store the rows from `row` on that belong to the tile's sequence; the next ones belong to another."""
        layout: gl.constexpr = values.type.layout
        rows = row + gl.arange(0, values.shape[0], gl.SliceLayout(1, layout))
        cols = gl.arange(0, values.shape[1], gl.SliceLayout(0, layout))
        at = tile.head * self.dq_head + (tile.q_offset + rows) * self.dq_row
        inside = (rows < tile.len_q)[:, None] & (cols < self.dim)[None, :]
        gl.store(self.dq + at[:, None] + cols[None, :], values, mask=inside)


@aggregate
class QueryCall:
    """All that the roles of one launch share."""

    queries: Ring
    douts: Ring
    keys: Ring
    values: Ring
    board: Board
    turns: Turns
    band: Band
    scoring: Derivative
    rows: Rows
    kv_group: Divisor
    layouts: QueryLayouts
    config: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, rings, board, turns, band, scoring, rows, kv_group, config):
        self.queries, self.douts, self.keys, self.values = rings
        self.board = board
        self.turns = turns
        self.band = band
        self.scoring = scoring
        self.rows = rows
        self.kv_group = kv_group
        self.layouts = QueryLayouts(config.keys, config.dim)
        self.config = gl.constexpr(config)


@gluon.jit
def load_tiles(call, schedule, q_desc, dout_desc, k_desc, v_desc):
    """The loader: posts tiles and keeps the rings of Q, dO, K and V filled."""
    GROUPS: gl.constexpr = call.config.groups
    KEYS: gl.constexpr = call.config.keys
    TILE_ROWS: gl.constexpr = GROUP_ROWS * GROUPS
    post = start(2)
    round_q = start(GROUPS)
    k_place = start(call.config.k_stages)
    v_place = start(call.config.v_stages)
    ends = schedule.ends()
    row_tiles = schedule.row_tiles(ends)
    n_tiles = schedule.n_tiles(row_tiles)
    index = gl.program_id(0)
    while index < n_tiles:
        tile = schedule.tile(index, row_tiles, ends, index < 0)
        call.board.post(post, tile)
        for group in gl.static_range(GROUPS):
            coord = [tile.batch, tile.head, tile.q_offset + tile.q_start + group * GROUP_ROWS, 0]
            call.queries.fill(round_q.at(group), q_desc, coord)
            call.douts.fill(round_q.at(group), dout_desc, coord)
        round_q = round_q.again()
        keys = call.band.blocks(tile, tile.q_start, TILE_ROWS, KEYS)
        kv_head = call.kv_group.quotient(tile.head)
        for step in range(keys.last - keys.first):
            coord = [tile.batch, kv_head, tile.k_offset + (keys.last - 1 - step) * KEYS, 0]
            call.keys.fill(k_place, k_desc, coord)
            call.values.fill(v_place, v_desc, coord)
            k_place = k_place.next()
            v_place = v_place.next()
        index = schedule.next(index)
        post = post.next()
    schedule.reset(index, n_tiles)
    call.board.post(post, no_tile())


@aggregate
class Places:
    """Where a group is in the rings of K and V, and in the order of the groups."""

    k: Cursor
    v: Cursor
    turn: Cursor
    drift: gl.tensor
    q: gl.tensor

    @gluon.constexpr_function
    def __init__(self, k, v, turn, drift, q):
        self.k = k
        self.v = v
        self.turn = turn
        self.drift = drift
        self.q = q

    @gluon.jit
    def next(self):
        """One block on.

        The place of Q and dO drifts by zero: seen as constant, 32 descriptors of their parts are held in registers, and
        at D 256 dQ leaves none.
        """
        return Places(self.k.next(), self.v.next(), self.turn.again(), self.drift, self.q + self.drift)


@gluon.jit
def differentiate_rows(call, GROUP: gl.constexpr):
    """One compute group: 64 query rows of each tile."""
    post = start(2)
    q_place = start(call.config.groups).at(GROUP)
    zero = gl.to_tensor(0)
    places = Places(start(call.config.k_stages), start(call.config.v_stages), start(1), zero, zero + GROUP)
    tile = call.board.read(post)
    while tile.alive != 0:
        places = walk_keys(call, post, q_place, places, GROUP)
        call.board.release(post)
        post = post.next()
        q_place = q_place.again()
        tile = call.board.read(post)
    tma.store_wait(0)


@gluon.jit
def walk_keys(call, post, q_place, places, GROUP: gl.constexpr):
    """dQ of the group's rows: a walk over the keys that they see; the tile's other blocks are let pass."""
    config: gl.constexpr = call.config
    layouts: gl.constexpr = call.layouts
    KEYS: gl.constexpr = config.keys
    DIM: gl.constexpr = config.dim
    TILE_ROWS: gl.constexpr = GROUP_ROWS * config.groups
    tile = call.board.read(post)
    row = tile.q_start + GROUP * GROUP_ROWS
    block_keys = call.band.blocks(tile, tile.q_start, TILE_ROWS, KEYS)
    keys = call.band.blocks(tile, row, GROUP_ROWS, KEYS).within(block_keys)
    lse = call.rows.read(call.rows.lse, tile, row, layouts.row, INF)
    delta = call.rows.read(call.rows.delta, tile, row, layouts.row, 0.0)
    call.queries.get(q_place)
    call.douts.get(q_place)
    places = Places(places.k, places.v, places.turn, tile.alive - 1, q_place.index)
    dq = gl.zeros([GROUP_ROWS, DIM], gl.float32, layouts.acc)
    places = let_pass(call, places, block_keys.last - keys.last, GROUP)
    if config.masks:
        for n in range(keys.last - keys.masked):
            dq = add_keys(call, tile, lse, delta, row, keys.last - 1 - n, dq, places, True, GROUP)
            places = places.next()
    for n in range(keys.masked - keys.full):
        dq = add_keys(call, tile, lse, delta, row, keys.masked - 1 - n, dq, places, False, GROUP)
        places = places.next()
    if config.has_lo:
        for n in range(keys.full - keys.first):
            dq = add_keys(call, tile, lse, delta, row, keys.full - 1 - n, dq, places, True, GROUP)
            places = places.next()
    places = let_pass(call, places, keys.first - block_keys.first, GROUP)
    call.douts.release(q_place)
    if call.rows.flag is not None:
        poison = gl.sum(dq * 0.0, 1)
        if gl.max(gl.where(poison == 0.0, 0, 1), 0) != 0:
            gl.store(call.rows.flag, 1)
    # Read again: what is not held on to need not be in registers all the way.
    tile = call.board.read(post)
    store_dq(call, tile, dq * call.scoring.scale, q_place, tile.q_start + GROUP * GROUP_ROWS)
    call.queries.release(q_place)
    return places


@gluon.jit
def let_pass(call, places, n, GROUP: gl.constexpr):
    """Release `n` blocks that other groups of the tile see and this one does not."""
    for _ in range(n):
        call.turns.wait(GROUP, places.turn)
        call.turns.pass_on(GROUP)
        call.keys.get(places.k)
        call.keys.release(places.k)
        call.values.get(places.v)
        call.values.release(places.v)
        places = places.next()
    return places


@gluon.jit
def add_keys(call, tile, lse, delta, row, block, dq, places, MASKED: gl.constexpr, GROUP: gl.constexpr):
    """Add what one block of keys contributes to dQ."""
    config: gl.constexpr = call.config
    layouts: gl.constexpr = call.layouts
    KEYS: gl.constexpr = config.keys
    zero = gl.zeros([GROUP_ROWS, KEYS], gl.float32, layouts.scores)
    q_tile = call.queries.tile(start(config.groups).at(places.q))
    dout_tile = call.douts.tile(start(config.groups).at(places.q))
    k_tile = call.keys.get(places.k)
    call.turns.wait(GROUP, places.turn)
    raw = warpgroup_mma(q_tile, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    v_tile = call.values.get(places.v)
    dweights = warpgroup_mma(dout_tile, v_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    call.turns.pass_on(GROUP)
    raw = warpgroup_mma_wait(1, deps=[raw])
    rows = row + gl.arange(0, GROUP_ROWS, layouts.row)[:, None]
    cols = block * KEYS + gl.arange(0, KEYS, layouts.col)[None, :]
    scores = call.scoring.shape(raw, tile, rows, cols, tile.head)
    weights = gl.exp2(scores * call.scoring.factor() - lse[:, None])
    if MASKED:
        weights = gl.where(sees_keys(call, tile, row, block, gl.int32), weights, 0.0)
    dweights = warpgroup_mma_wait(0, deps=[dweights])
    call.values.release(places.v)
    dscores = weights * (dweights - delta[:, None])
    if MASKED:
        # Compared anew, and as another type: held on to, so many predicates would be packed and unpacked.
        dscores = gl.where(sees_keys(call, tile, row, block, gl.float32), dscores, 0.0)
    dscores = call.scoring.unshape(dscores, raw, tile, rows, cols, tile.head)
    left = gl.convert_layout(dscores.to(k_tile.dtype), layouts.operand)
    dq = warpgroup_mma(left, k_tile, dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=[dq])
    call.keys.release(places.k)
    return dq


@gluon.jit
def sees_keys(call, tile, row, block, number: gl.constexpr):
    """Whether each of the group's rows sees each key of the block, compared as `number`."""
    KEYS: gl.constexpr = call.config.keys
    band = call.band
    # A thread holds columns 8 a + 2 lane + b. Counting from its lane makes a and b constants of each instruction.
    cols = gl.arange(0, KEYS, call.layouts.col)[None, :]
    origin = block * KEYS + (cols & 6)
    rows = row + gl.arange(0, GROUP_ROWS, call.layouts.row)[:, None] - origin
    cols = (cols & ~6).to(number)
    shift = band.shift_of(tile)
    below = tile.len_k - 1 - origin
    if band.has_hi:
        below = gl.minimum(rows + (shift + band.hi), below)
    kept = cols <= below.to(number)
    if band.has_lo:
        kept = kept & (cols >= (rows + (shift + band.lo)).to(number))
    return kept


@gluon.jit
def store_dq(call, tile, dq, q_place, row):
    """Store 64 rows of dQ through the buffer of Q."""
    DIM: gl.constexpr = call.config.dim
    buffer = call.queries.buffers.index(q_place.index)
    staged = buffer.reshape([GROUP_ROWS, DIM])
    staged.store(dq.to(buffer.dtype))
    if call.config.sequences > 0:
        if row + GROUP_ROWS <= tile.len_q:
            fence_async_shared()
            store_tile(call.rows.dq_desc, [tile.batch, tile.head, tile.q_offset + row, 0], buffer)
        else:
            call.rows.store(tile, row, staged.load(call.layouts.copy))
    else:
        fence_async_shared()
        store_tile(call.rows.dq_desc, [tile.batch, tile.head, row, 0], buffer)
    tma.store_wait(0)


@gluon.jit
def differentiate_rows_0(call):
    """The first group."""
    differentiate_rows(call, 0)


@gluon.jit
def differentiate_rows_1(call):
    """The second group."""
    differentiate_rows(call, 1)


@gluon.jit
def query_gradient(
    q_desc,
    dout_desc,
    k_desc,
    v_desc,
    dq_desc,
    lse,
    delta,
    row_strides,
    flag,
    dq,
    dq_strides,
    cu_seqlens_q,
    cu_seqlens_k,
    slopes,
    counter,
    sizes,
    divisors,
    band,
    scale,
    softcap,
    config: gl.constexpr,
    step: gl.constexpr,
    dstep: gl.constexpr,
):
    """The kernel: sets the stage, then the loader and the compute groups run side by side."""
    GROUPS: gl.constexpr = config.groups
    rings = (
        ring(q_desc, GROUPS, 1),
        ring(dout_desc, GROUPS, 1),
        ring(k_desc, config.k_stages, GROUPS),
        ring(v_desc, config.v_stages, GROUPS),
    )
    call = QueryCall(
        rings,
        board(GROUPS),
        turns(GROUPS, config.ping_pong),
        Band(band[0], band[1], band[2], config.has_lo, config.has_hi, config.bottom_right),
        Derivative(scale, softcap, slopes, step, dstep, config.has_softcap),
        Rows(dq_desc, lse, delta, row_strides, flag, dq, dq_strides),
        Divisor(divisors[12:15], True),
        config,
    )
    schedule = Schedule(counter, cu_seqlens_q, cu_seqlens_k, sizes, divisors, config)
    gl.warp_specialize(
        [
            (load_tiles, (call, schedule, q_desc, dout_desc, k_desc, v_desc)),
            (differentiate_rows_0, (call,)),
            (differentiate_rows_1, (call,)),
        ],
        [4, 4],
        [config.registers, config.registers],
    )
