"""dQ summed in one order, for gradients that are bitwise the same from run to run: warps of their own add it.

The compute groups leave dQ of each block of queries in shared memory. Two warps take the blocks by turns: each waits
until the tiles before this one have added to the block's sums, adds, and counts the tile once the copy engine is done.
That takes longer than a step: with one warp D 128 N 8192 has 0.73 of the rate of sums in any order, with two 0.96
(H200). The first tile stores where every block has one, so that nothing is cleared before.

A tile waits only for tiles of lower numbers, which some program has drawn before: the wait always ends. Walks go in the
direction in which tiles that are drawn together come to each block in that order.
"""

from ioattn.backends.gluon.kernels.names import add_tile, aggregate, gl, gluon, mbarrier, store_tile, tma
from ioattn.backends.gluon.kernels.pipeline import barriers, start


@aggregate
class Order:
    """Which buffers hold a block's dQ, which are free, and how many tiles have added to each block's sums."""

    full: object
    empty: object
    turns: object

    @gluon.constexpr_function
    def __init__(self, full, empty, turns):
        self.full = gl.constexpr(None) if full is None else full
        self.empty = gl.constexpr(None) if empty is None else empty
        self.turns = gl.constexpr(None) if turns is None else turns

    @gluon.jit
    def until_free(self, cursor):
        """Wait until what was in the buffer has been read."""
        mbarrier.wait(self.empty.index(cursor.index), cursor.parity ^ 1)

    @gluon.jit
    def hand_over(self, cursor):
        """Say that this group's part of dQ is there."""
        mbarrier.arrive(self.full.index(cursor.index), count=1)


@gluon.jit
def order(turns, config: gl.constexpr):
    """The order of a kernel's sums, if they have one."""
    USED: gl.constexpr = config.in_order
    PARTS: gl.constexpr = config.dq_parts
    return Order(barriers(2, PARTS, USED), barriers(2, 1, USED), turns)


@gluon.jit
def add_0(call):
    """The first warp: every other block."""
    add_in_order(call, 0)


@gluon.jit
def add_1(call):
    """The second warp: the blocks between."""
    add_in_order(call, 1)


@gluon.jit
def add_in_order(call, ADDER: gl.constexpr):
    """Add the dQ of a program's tiles."""
    post = start(2)
    turn = start(call.config.exchanges)
    tile = call.board.read(post)
    while tile.alive != 0:
        queries = call.band.queries(tile, call.config.keys, call.config.rows)
        if call.config.stretch > 0:
            turn = add_backwards(call, tile, queries, turn, ADDER)
        else:
            first_member, last_member = call.members(tile)
            for member in range(first_member, last_member):
                for block in range(queries.first, queries.whole_end):
                    turn = add_block(call, tile, turn, member, block, ADDER)
        call.board.release(post)
        post = post.next()
        tile = call.board.read(post)


@gluon.jit
def add_backwards(call, tile, queries, turn, ADDER: gl.constexpr):
    """The blocks of a tile in the order of `walk_backwards`."""
    STRETCH: gl.constexpr = call.config.stretch
    first_member, last_member = call.members(tile)
    if call.config.has_lo:
        for member in range(first_member, last_member):
            for n in range(queries.edges - queries.before):
                turn = add_block(call, tile, turn, member, queries.edge(queries.edges - 1 - n), ADDER)
    for n in range(queries.stretches(STRETCH)):
        first, last = queries.stretch(n, STRETCH)
        for member in range(first_member, last_member):
            for back in range(last - first):
                turn = add_block(call, tile, turn, member, last - 1 - back, ADDER)
    if call.config.masks:
        for member in range(first_member, last_member):
            for n in range(queries.before):
                turn = add_block(call, tile, turn, member, queries.edge(queries.before - 1 - n), ADDER)
    return turn


@gluon.jit
def add_block(call, tile, turn, member, block, ADDER: gl.constexpr):
    """Add the dQ of one block, if that is this warp's."""
    config: gl.constexpr = call.config
    PARTS: gl.constexpr = config.dq_parts
    HEIGHT: gl.constexpr = call.dq_tiles.shape[1]
    WIDTH: gl.constexpr = call.dq_tiles.shape[2]
    if turn.index == ADDER:
        row = tile.row + member * call.head_rows + block * config.rows
        added = call.order.turns + row // config.rows
        before = call.band.tiles_before(tile, block, config.keys, config.rows)
        await_turn(added, before)
        mbarrier.wait(call.order.full.index(turn.index), turn.parity)
        for part in gl.static_range(PARTS):
            buffer = call.dq_tiles.index(turn.index * PARTS + part)
            place = [row // (WIDTH // config.dim) + part * HEIGHT, 0]
            if (before == 0) & config.fresh:
                store_tile(call.dq_desc, place, buffer)
            else:
                add_tile(call.dq_desc, place, buffer)
        tma.store_wait(0)
        mbarrier.arrive(call.order.empty.index(turn.index), count=1)
        end_turn(added)
    return turn.next()


@gluon.jit
def await_turn(added, before):
    """Wait until `before` tiles have added, and see what they have: one thread asks, and the warp goes on together."""
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred asks, early;
        .reg .b32 seen;
        elect.sync _|asks, 0xffffffff;
        mov.b32 seen, $2;
        AGAIN:
        @asks ld.acquire.gpu.global.b32 seen, [$1];
        setp.lt.s32 early, seen, $2;
        @early bra AGAIN;
        bar.warp.sync 0xffffffff;
        fence.proxy.async;
        mov.b32 $0, 0;
        }
        """,
        "=r,l,r",
        [added, before],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def end_turn(added):
    """Count this tile once the sums are in memory, which is later than when their sources have been read."""
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred tells;
        cp.async.bulk.wait_group 0;
        fence.proxy.async;
        bar.warp.sync 0xffffffff;
        elect.sync _|tells, 0xffffffff;
        @tells red.release.gpu.global.add.s32 [$1], 1;
        mov.b32 $0, 0;
        }
        """,
        "=r,l",
        [added],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
