"""A compute group of the backward: one warp group that owns 64 keys of each tile.

Scores are held as [K, Q], so that P^T and dS^T are left operands from registers in dV += P^T dO and dK += dS^T Q. For
dQ = dS K the groups exchange dS through shared memory, and add the result to FP32 sums in global memory by the copy
engine. That is done for the step before, so that no group waits for the other's dS in the middle of a step: 7% at D 128
on an H200. Notation is that of `ioattn.backends.eager`.

Products are issued so that the tensor cores have some to work on meanwhile: dP during the exponentials, dK during the
store of dQ. A product whose left operand is in registers holds up the warp until it runs, so dV is issued only once dS
is written: before dS was computed it cost 10%, after that but before dS was written 2% (H200, D 128). A group that
makes all of dQ in its turn does so first thing in a step, while the other multiplies: 5% at D 64.
"""

from ioattn.backends.gluon.kernels.backward_call import GROUP_KEYS
from ioattn.backends.gluon.kernels.names import (
    HAS_REGISTERS,
    add_tile,
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
from ioattn.backends.gluon.kernels.parts import add_parts_before, is_last_part, leave_for_next
from ioattn.backends.gluon.kernels.pipeline import Cursor, start
from ioattn.backends.gluon.kernels.seen import seen_by


@aggregate
class Sums:
    """What a compute group carries from step to step: its sums, the step before, and its place in the rings.

    `row` says where the rows of the step before lie in the workspace; it is negative in the first step of a tile. The
    place of K and V drifts by zero: seen as constant, the descriptors of their parts are held in registers that are
    needed otherwise.
    """

    dk: gl.tensor
    dv: gl.tensor
    row: gl.tensor
    place: Cursor
    turn: Cursor
    kv: gl.tensor

    @gluon.constexpr_function
    def __init__(self, dk, dv, row, place, turn, kv):
        self.dk = dk
        self.dv = dv
        self.row = row
        self.place = place
        self.turn = turn
        self.kv = kv


@aggregate
class Kept:
    """What stays as it is along a walk: a zero that the compiler does not know to be one, and keys for dQ, or None."""

    drift: gl.tensor
    k: object

    @gluon.constexpr_function
    def __init__(self, drift, k):
        self.drift = drift
        self.k = gl.constexpr(None) if k is None else k


@gluon.jit
def differentiate(call, GROUP: gl.constexpr):
    """One compute group: 64 keys of each tile."""
    post = start(2)
    kv_place = start(1)
    place = start(call.config.stages)
    turn = start(call.config.exchanges)
    tile = call.board.read(post)
    while tile.alive != 0:
        place, turn = walk(call, post, kv_place, place, turn, GROUP)
        call.board.release(post)
        post = post.next()
        kv_place = kv_place.again()
        tile = call.board.read(post)
    tma.store_wait(0)


@gluon.jit
def walk(call, post, kv_place, place, turn, GROUP: gl.constexpr):
    """dK and dV of the group's keys: a walk over the queries that see the tile, of every head that shares it."""
    config: gl.constexpr = call.config
    ROWS: gl.constexpr = config.rows
    KEYS: gl.constexpr = config.keys
    DIM: gl.constexpr = config.dim
    tile = call.board.read(post)
    queries = call.band.queries(tile, KEYS, ROWS)
    call.keys.get(kv_place)
    call.values.get(kv_place)
    if config.in_order:
        tma.store_wait(0)  # the other group may fill the buffer
    kept = Kept(tile.alive - 1, hold_keys(call, kv_place, GROUP))
    zero = gl.zeros([GROUP_KEYS, DIM], gl.float32, call.layouts.acc)
    sums = Sums(zero, zero, gl.to_tensor(-1), place, turn, kv_place.index)
    if config.stretch > 0:
        sums = walk_backwards(call, tile, kept, queries, sums, GROUP)
    elif config.skips:
        sums = walk_seen(call, tile, kept, queries, sums, GROUP)
    else:
        sums = walk_forwards(call, tile, kept, queries, sums, GROUP)
    if config.lean:
        call.values.release(kv_place)
    k_tile = call.keys.tile(start(1).at(sums.kv))
    catch_up(call, k_tile, kept, sums, GROUP)
    call.keys.release(kv_place)
    if not config.lean:
        call.values.release(kv_place)
    # Read again: what is not held on to need not be in registers all the way.
    tile = call.board.read(post)
    dk, dv = add_parts_before(call, tile, sums.dk, sums.dv, GROUP)
    if is_last_part(call, tile):
        store_rows(call, tile, dv, call.dv, sums.turn, GROUP)
        store_rows(call, tile, dk * call.scoring.scale, call.dk, sums.turn, GROUP)
    else:
        leave_for_next(call, tile, dk, dv, GROUP)
    return sums.place, sums.turn


@gluon.jit
def walk_forwards(call, tile, kept, queries, sums, GROUP: gl.constexpr):
    """The steps of a walk head after head, the masked blocks first."""
    first_member, last_member = call.members(tile)
    for member in range(first_member, last_member):
        head = tile.head * call.group + member
        row = tile.row + member * call.head_rows
        if call.config.masks:
            for n in range(queries.edges):
                sums = step(call, tile, kept, row, queries.edge(n), head, sums, True, GROUP)
        # A second loop where the walk starts in the middle: one index for both would cost registers.
        for block in range(queries.start(), queries.whole_end):
            sums = step(call, tile, kept, row, block, head, sums, False, GROUP)
        if call.config.rotate:
            for block in range(queries.whole, queries.start()):
                sums = step(call, tile, kept, row, block, head, sums, False, GROUP)
    return sums


@gluon.jit
def walk_seen(call, tile, kept, queries, sums, GROUP: gl.constexpr):
    """The steps of a walk in the order of queries, where the group lets pass what only the other one sees."""
    seen = seen_by(call.band, tile, queries, call.config.rows, GROUP)
    for block in range(seen.first, seen.start):
        sums = let_pass(call, kept, tile.row, block, sums, GROUP)
    for block in range(seen.start, seen.whole):
        sums = step(call, tile, kept, tile.row, block, tile.head, sums, True, GROUP)
    for block in range(seen.whole, seen.whole_end):
        sums = step(call, tile, kept, tile.row, block, tile.head, sums, False, GROUP)
    if call.config.has_lo:
        for block in range(seen.whole_end, seen.end):
            sums = step(call, tile, kept, tile.row, block, tile.head, sums, True, GROUP)
    for block in range(seen.end, seen.last):
        sums = let_pass(call, kept, tile.row, block, sums, GROUP)
    return sums


@gluon.jit
def let_pass(call, kept, row, block, sums, GROUP: gl.constexpr):
    """A block of which the group sees nothing: its dS is zero, and dQ of the step before is all that is to be made."""
    ROWS: gl.constexpr = call.config.rows
    place = sums.place
    call.queries.get(place)
    call.douts.get(place)
    k_tile = call.keys.tile(start(1).at(sums.kv))
    zero = gl.zeros([GROUP_KEYS, ROWS], k_tile.dtype, call.layouts.scores)
    call.queries.until_released(place.previous())
    call.dscores.put(sums.turn, GROUP * GROUP_KEYS, zero)
    catch_up(call, k_tile, kept, sums, GROUP)
    call.queries.release(place)
    return Sums(sums.dk, sums.dv, row + block * ROWS, place.next(), sums.turn.next(), sums.kv)


@gluon.jit
def walk_backwards(call, tile, kept, queries, sums, GROUP: gl.constexpr):
    """The steps of a walk from the last queries to the first: stretches of each head by turns, then the masked blocks.

    Programs that share keys' heads are at the same queries then, which are in the L2 cache.
    """
    STRETCH: gl.constexpr = call.config.stretch
    first_member, last_member = call.members(tile)
    if call.config.has_lo:
        for member in range(first_member, last_member):
            head = tile.head * call.group + member
            row = tile.row + member * call.head_rows
            for n in range(queries.edges - queries.before):
                sums = step(call, tile, kept, row, queries.edge(queries.edges - 1 - n), head, sums, True, GROUP)
    for n in range(queries.stretches(STRETCH)):
        first, last = queries.stretch(n, STRETCH)
        for member in range(first_member, last_member):
            head = tile.head * call.group + member
            row = tile.row + member * call.head_rows
            for back in range(last - first):
                sums = step(call, tile, kept, row, last - 1 - back, head, sums, False, GROUP)
    if call.config.masks:
        for member in range(first_member, last_member):
            head = tile.head * call.group + member
            row = tile.row + member * call.head_rows
            for n in range(queries.before):
                sums = step(call, tile, kept, row, queries.edge(queries.before - 1 - n), head, sums, True, GROUP)
    return sums


@gluon.jit
def step(call, tile, kept, row, block, head, sums, MASKED: gl.constexpr, GROUP: gl.constexpr):
    """One block of queries: what it adds to dK and dV, and what the keys add to its dQ."""
    config: gl.constexpr = call.config
    layouts: gl.constexpr = call.layouts
    ROWS: gl.constexpr = config.rows
    k_tile = call.keys.tile(start(1).at(sums.kv))
    v_tile = call.values.tile(start(1).at(sums.kv))
    dtype: gl.constexpr = k_tile.dtype
    place = sums.place
    zero = gl.zeros([GROUP_KEYS, ROWS], gl.float32, layouts.scores)
    if config.dq == "turns":
        catch_up(call, k_tile, kept, sums, GROUP)
    q_tile = call.queries.get(place)
    k_rows = k_tile.slice(GROUP * GROUP_KEYS, GROUP_KEYS, 0)
    raw = warpgroup_mma(k_rows, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    dout_tile = call.douts.get(place)
    v_rows = v_tile.slice(GROUP * GROUP_KEYS, GROUP_KEYS, 0)
    dweights = warpgroup_mma(v_rows, dout_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    raw, lse = wait_and_read(call.queries, place, raw, 1, ROWS, layouts.col)
    keys = tile.k_start + GROUP * GROUP_KEYS + gl.arange(0, GROUP_KEYS, layouts.row)[:, None]
    rows = block * ROWS + gl.arange(0, ROWS, layouts.col)[None, :]
    scores = call.scoring.shape(raw, tile, rows, keys, head)
    weights = gl.exp2(scores * call.scoring.factor() - lse[None, :])
    if MASKED:
        weights = gl.where(sees(call, tile, block, gl.int32, GROUP), weights, 0.0)
    dweights, delta = wait_and_read(call.douts, place, dweights, 0, ROWS, layouts.col)
    dscores = weights * (dweights - delta[None, :])
    if MASKED and not config.lean:  # else 0 times what is hidden: a NaN of V shows in dQ, and is repaired
        # Compared anew, and as another type: held on to, so many predicates are packed and unpacked, 300 instructions.
        dscores = gl.where(sees(call, tile, block, gl.float32, GROUP), dscores, 0.0)
    dscores = call.scoring.unshape(dscores, raw, tile, rows, keys, head).to(dtype)
    if config.dq == "halves":
        # After the step before, both groups have read what was here. In turns the group that reads it does so before
        # it writes the other buffer, which this one has waited for.
        call.queries.until_released(place.previous())
    call.dscores.write(sums.turn, GROUP * GROUP_KEYS, dscores)
    dv = warpgroup_mma(gl.convert_layout(weights.to(dtype), layouts.operand), dout_tile, sums.dv, is_async=True)
    call.dscores.mark_written(sums.turn)
    operand = gl.convert_layout(dscores, layouts.operand)
    if config.dq == "halves":
        dq = start_dq(call, k_tile, kept, sums, GROUP)
        dk = warpgroup_mma(operand, q_tile, sums.dk, is_async=True)
        dv, dq = warpgroup_mma_wait(1, deps=[dv, dq])
        if makes_dq(call, sums, GROUP):
            add_dq(call, dq, sums, GROUP)
        dk = warpgroup_mma_wait(0, deps=[dk])
    else:
        dk = warpgroup_mma(operand, q_tile, sums.dk, is_async=True)
        dv, dk = warpgroup_mma_wait(0, deps=[dv, dk])
    call.queries.release(place)
    return Sums(dk, dv, row + block * ROWS, place.next(), sums.turn.next(), sums.kv + kept.drift)


@gluon.jit
def wait_and_read(ring, place, product, others: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr):
    """Wait for a product until only `others` are on their way; and the numbers of the rows.

    They are read before, so that the wait hides how long that takes, unless so many do not fit in registers meanwhile.
    """
    if ROWS == 64:
        numbers = ring.of_rows(place, layout)
        product = warpgroup_mma_wait(others, deps=[product])
    else:
        product = warpgroup_mma_wait(others, deps=[product])
        numbers = ring.of_rows(place, layout)
    return product, numbers


@gluon.jit
def catch_up(call, k_tile, kept, sums, GROUP: gl.constexpr):
    """Make the group's part of dQ of the step before, with nothing beside it."""
    if makes_dq(call, sums, GROUP):
        add_dq(call, warpgroup_mma_wait(0, deps=[start_dq(call, k_tile, kept, sums, GROUP)]), sums, GROUP)


@gluon.jit
def makes_dq(call, sums, GROUP: gl.constexpr):
    """Whether there was a step before, and dQ of it, or part of it, is this group's."""
    exists = sums.row >= 0
    if call.config.dq == "turns":
        exists = exists & (sums.turn.index != GROUP)
    return exists


@gluon.jit
def sees(call, tile, block, number: gl.constexpr, GROUP: gl.constexpr):
    """Whether each of the group's keys is seen by each query of the block."""
    ROWS: gl.constexpr = call.config.rows
    layouts: gl.constexpr = call.layouts
    # A thread holds columns 8 a + 2 lane + b. Counting from its lane makes a and b constants of each instruction.
    cols = gl.arange(0, ROWS, layouts.col)[None, :]
    origin = block * ROWS + (cols & 6)
    keys = tile.k_start + GROUP * GROUP_KEYS + gl.arange(0, GROUP_KEYS, layouts.row)[:, None]
    return call.band.keeps(tile, keys - origin, cols & ~6, origin, number)


@gluon.jit
def start_dq(call, k_tile, kept, sums, GROUP: gl.constexpr):
    """Start the group's part of dQ = dS K of the step before, all of it or half of its columns, or of its transpose.

    The transpose is one product of 128 columns at D 64 where dS K is two of 64, which read K twice. At D 128 its left
    operand can stay in registers in part, and what follows, dK, holds up the warps as it is. Where there was no such
    step, what comes out means nothing.
    """
    SHAPE: gl.constexpr = call.config.dq_shape
    KEYS: gl.constexpr = call.config.keys
    HELD: gl.constexpr = held_keys(call.config)
    dscores = call.dscores.get(sums.turn.previous(), sums.row >= 0)
    k_tile = columns_of_dq(call, k_tile, GROUP)
    zero = gl.zeros(SHAPE, gl.float32, call.layouts.dq)
    if HELD > 0:
        dq = warpgroup_mma(kept.k, dscores.slice(0, HELD, 0), zero, use_acc=False, is_async=True)
        others = k_tile.slice(HELD, KEYS - HELD, 0).permute((1, 0))
        dq = warpgroup_mma(others, dscores.slice(HELD, KEYS - HELD, 0), dq, is_async=True)
    elif call.config.transposed:
        dq = warpgroup_mma(k_tile.permute((1, 0)), dscores, zero, use_acc=False, is_async=True)
    else:
        dq = warpgroup_mma(dscores.permute((1, 0)), k_tile, zero, use_acc=False, is_async=True)
    return dq


@gluon.jit
def columns_of_dq(call, k_tile, GROUP: gl.constexpr):
    """The columns of K that the group's part of dQ has."""
    if call.config.dq == "halves":
        COLUMNS: gl.constexpr = call.config.dim // 2
        k_tile = k_tile.slice(GROUP * COLUMNS, COLUMNS, 1)
    return k_tile


@gluon.constexpr_function
def held_keys(config):
    """How many keys `hold_keys` takes."""
    return config.held_keys if HAS_REGISTERS else 0


@gluon.jit
def hold_keys(call, kv_place, GROUP: gl.constexpr):
    """K^T of the first keys in registers, of the group's columns of dQ; or None."""
    HELD: gl.constexpr = held_keys(call.config)
    if HELD > 0:
        k_tile = columns_of_dq(call, call.keys.tile(kv_place), GROUP)
        held = k_tile.slice(0, HELD, 0).permute((1, 0)).load(call.layouts.held)
    else:
        held = None
    return held


@gluon.jit
def add_dq(call, dq, sums, GROUP: gl.constexpr):
    """Add the group's part of dQ to its sums, by way of shared memory in the order of registers.

    Each thread stores vectors of 16 bytes, and the copy engine adds one run of memory to another: D 128 is 3.5% faster
    than by rows, D 64 9% (H200).
    """
    config: gl.constexpr = call.config
    place = sums.turn.previous()
    if config.in_order:
        PARTS: gl.constexpr = config.dq_parts
        buffer = call.dq_tiles.index(place.index * PARTS + GROUP % PARTS)
        call.order.until_free(place)
    else:
        buffer = call.dq_tiles.index(GROUP)
    HEIGHT: gl.constexpr = buffer.shape[0]
    WIDTH: gl.constexpr = buffer.shape[1]
    tma.store_wait(0)
    seen_as(buffer, gl.float32, dq.shape, call.layouts.staged).store(dq)
    fence_async_shared()
    if config.in_order:
        call.order.hand_over(place)
    else:
        first = sums.row // (WIDTH // config.dim)
        if config.dq == "halves":
            first += GROUP * HEIGHT
        add_tile(call.dq_desc, [first, 0], buffer)


@gluon.jit
def store_rows(call, tile, result, target, turn, GROUP: gl.constexpr):
    """Store the group's 64 rows of dK or dV through its part of a buffer of dQ."""
    config: gl.constexpr = call.config
    DIM: gl.constexpr = config.dim
    row = tile.k_start + GROUP * GROUP_KEYS
    tma.store_wait(0)
    if config.in_order:
        # Half of the buffer that is filled next: the one before may still wait for its turn.
        call.order.until_free(turn)
        PARTS: gl.constexpr = config.dq_parts
        buffer = call.dq_tiles.index(turn.index * PARTS + GROUP % PARTS)
        SHARES: gl.constexpr = 3 - PARTS
        shares = seen_as(buffer, target.desc.dtype, [SHARES, 1, 1, GROUP_KEYS, DIM], target.desc.layout)
        staged = shares.index(GROUP % SHARES)
    else:
        buffer = call.dq_tiles.index(GROUP)
        staged = seen_as(buffer, target.desc.dtype, [1, 1, GROUP_KEYS, DIM], target.desc.layout)
    rows = staged.reshape([GROUP_KEYS, DIM])
    rows.store(result.to(target.desc.dtype))
    if call.config.sequences > 0:
        if row + GROUP_KEYS <= tile.len_k:
            fence_async_shared()
            store_tile(target.desc, [tile.batch, tile.head, tile.k_offset + row, 0], staged)
        else:
            target.store(tile, row, 0, rows.load(call.layouts.copy))
    else:
        fence_async_shared()
        store_tile(target.desc, [tile.batch, tile.head, row, 0], staged)
