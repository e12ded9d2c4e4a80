"""A compute group of the backward where dK and dV of 64 keys fill the registers of two groups: D over 128.

Each group owns half of the columns of dK and dV. One makes the scores and the weights, the other the gradient of the
weights and of the scores; both go through shared memory, and are left operands from there. dQ has a kernel of its own.
Notation is that of `ioattn.backends.eager`.
"""

from ioattn.backends.gluon.kernels.backward_call import GROUP_KEYS
from ioattn.backends.gluon.kernels.differentiate import sees
from ioattn.backends.gluon.kernels.names import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    seen_as,
    store_tile,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ioattn.backends.gluon.kernels.pipeline import Cursor, start


@aggregate
class WideSums:
    """What a compute group carries from step to step."""

    dk: gl.tensor
    dv: gl.tensor
    place: Cursor
    turn: Cursor

    @gluon.constexpr_function
    def __init__(self, dk, dv, place, turn):
        self.dk = dk
        self.dv = dv
        self.place = place
        self.turn = turn


@gluon.jit
def differentiate_wide(call, GROUP: gl.constexpr):
    """One compute group: half of the columns of each tile."""
    post = start(2)
    kv_place = start(1)
    place = start(call.config.stages)
    turn = start(call.config.exchanges)
    tile = call.board.read(post)
    while tile.alive != 0:
        place, turn = walk_wide(call, post, kv_place, place, turn, GROUP)
        call.board.release(post)
        post = post.next()
        kv_place = kv_place.again()
        tile = call.board.read(post)


@gluon.jit
def walk_wide(call, post, kv_place, place, turn, GROUP: gl.constexpr):
    """Half of dK and dV: a walk over the queries that see the tile, of every head that shares it."""
    config: gl.constexpr = call.config
    ROWS: gl.constexpr = config.rows
    KEYS: gl.constexpr = config.keys
    HALF: gl.constexpr = config.dim // 2
    tile = call.board.read(post)
    queries = call.band.queries(tile, KEYS, ROWS)
    zero = gl.zeros([GROUP_KEYS, HALF], gl.float32, call.layouts.acc)
    sums = WideSums(zero, zero, place, turn)
    k_tile = call.keys.get(kv_place)
    v_tile = call.values.get(kv_place)
    for member in range(call.group):
        head = tile.head * call.group + member
        row = tile.row + member * call.head_rows
        if config.masks:
            for n in range(queries.edges):
                sums = step_wide(call, tile, k_tile, v_tile, row, queries.edge(n), head, sums, True, GROUP)
        for block in range(queries.start(), queries.whole_end):
            sums = step_wide(call, tile, k_tile, v_tile, row, block, head, sums, False, GROUP)
        if config.rotate:
            for block in range(queries.whole, queries.start()):
                sums = step_wide(call, tile, k_tile, v_tile, row, block, head, sums, False, GROUP)
    # Read again: what is not held on to need not be in registers all the way.
    tile = call.board.read(post)
    # Only this group reads K, or V, and so may put its results there.
    if GROUP == 0:
        staged = call.keys.buffers.index(0)
    else:
        staged = call.values.buffers.index(0)
    layout: gl.constexpr = call.dk.desc.layout
    halves = seen_as(staged, call.dk.desc.dtype, [2, 1, 1, GROUP_KEYS, HALF], layout)
    store_half(call, tile, sums.dv, call.dv, halves.index(0), GROUP)
    store_half(call, tile, sums.dk * call.scoring.scale, call.dk, halves.index(1), GROUP)
    tma.store_wait(0)
    call.keys.release(kv_place)
    call.values.release(kv_place)
    return sums.place, sums.turn


@gluon.jit
def step_wide(call, tile, k_tile, v_tile, row, block, head, sums, MASKED: gl.constexpr, GROUP: gl.constexpr):
    """One block of queries: what it adds to half of dK and dV."""
    config: gl.constexpr = call.config
    layouts: gl.constexpr = call.layouts
    ROWS: gl.constexpr = config.rows
    HALF: gl.constexpr = config.dim // 2
    dtype: gl.constexpr = k_tile.dtype
    place = sums.place
    turn = sums.turn
    zero = gl.zeros([GROUP_KEYS, ROWS], gl.float32, layouts.scores)
    q_tile = call.queries.get(place)
    if GROUP == 0:
        raw = warpgroup_mma(k_tile, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        lse = call.queries.of_rows(place, layouts.col)[None, :]
        raw = warpgroup_mma_wait(0, deps=[raw])
        keys = tile.k_start + gl.arange(0, GROUP_KEYS, layouts.row)[:, None]
        rows = block * ROWS + gl.arange(0, ROWS, layouts.col)[None, :]
        scores = call.scoring.shape(raw, tile, rows, keys, head)
        weights = gl.exp2(scores * call.scoring.factor() - lse)
        if MASKED:
            weights = gl.where(sees(call, tile, block, gl.int32, 0), weights, 0.0)
        call.weights.put(turn, 0, weights.to(dtype))
        if config.has_softcap:
            call.sloped.put(turn, 0, call.scoring.unshape(weights, raw, tile, rows, keys, head).to(dtype))
        dout_tile = call.douts.get(place)
    else:
        dout_tile = call.douts.get(place)
        dweights = warpgroup_mma(v_tile, dout_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        delta = call.douts.of_rows(place, layouts.col)[None, :]
        if config.has_softcap:
            weights = call.sloped.get(turn).load(layouts.scores).to(gl.float32)
            call.sloped.release(turn)
        else:
            weights = call.weights.get(turn).load(layouts.scores).to(gl.float32)
        dweights = warpgroup_mma_wait(0, deps=[dweights])
        dscores = weights * (dweights - delta)
        if MASKED:
            dscores = gl.where(sees(call, tile, block, gl.int32, 0), dscores, 0.0)
        call.dscores.put(turn, 0, dscores.to(dtype))
    half: gl.constexpr = GROUP * HALF
    dv = warpgroup_mma(call.weights.get(turn), dout_tile.slice(half, HALF, 1), sums.dv, is_async=True)
    dk = warpgroup_mma(call.dscores.get(turn), q_tile.slice(half, HALF, 1), sums.dk, is_async=True)
    dv = warpgroup_mma_wait(1, deps=[dv])
    call.weights.release(turn)
    dk = warpgroup_mma_wait(0, deps=[dk])
    call.dscores.release(turn)
    call.queries.release(place)
    return WideSums(dk, dv, place.next(), turn.next())


@gluon.jit
def store_half(call, tile, result, target, staged, GROUP: gl.constexpr):
    """Store the group's half of the columns of dK or dV."""
    HALF: gl.constexpr = call.config.dim // 2
    rows = staged.reshape([GROUP_KEYS, HALF])
    rows.store(result.to(target.desc.dtype))
    coord = [tile.batch, tile.head, tile.k_offset + tile.k_start, GROUP * HALF]
    if call.config.sequences > 0:
        if tile.k_start + GROUP_KEYS <= tile.len_k:
            fence_async_shared()
            store_tile(target.desc, coord, staged)
        else:
            target.store(tile, tile.k_start, GROUP * HALF, rows.load(call.layouts.copy))
    else:
        fence_async_shared()
        store_tile(target.desc, coord, staged)
