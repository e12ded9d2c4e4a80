"""A compute group: one warp group that owns 64 query rows of each tile.

It issues the scores of the next block of keys before it multiplies the weights of this one with V, so that the tensor
cores work while it computes exponentials. Notation and order of operations are those of `ioattn.backends.eager`.
"""

from ioattn.backends.gluon.kernels.call import INF, LOWEST
from ioattn.backends.gluon.kernels.finish import finish
from ioattn.backends.gluon.kernels.names import aggregate, gl, gluon, tma, warpgroup_mma, warpgroup_mma_wait
from ioattn.backends.gluon.kernels.pipeline import Cursor, start
from ioattn.backends.gluon.kernels.row_sums import add_block, spread
from ioattn.backends.gluon.kernels.tiles import GROUP_ROWS


@aggregate
class State:
    """Online softmax of one compute group, and its place in the rings of K and V."""

    acc: gl.tensor
    row_max: gl.tensor
    row_sum: gl.tensor
    place: Cursor
    turn: Cursor

    @gluon.constexpr_function
    def __init__(self, acc, row_max, row_sum, place, turn):
        self.acc = acc
        self.row_max = row_max
        self.row_sum = row_sum
        self.place = place
        self.turn = turn

    @gluon.jit
    def ahead(self, by_masks: gl.constexpr):
        """The same softmax, one block further in the rings."""
        return State(self.acc, self.row_max, self.row_sum, self.place.next(by_masks), self.turn)


@gluon.jit
def group_number(call):
    """Which compute group this is, by the number of its threads: all groups may run one machine code."""
    group = gl.to_tensor(0)
    if call.config.groups > 1:
        group = gl.inline_asm_elementwise(
            "mov.u32 $0, %tid.x; shr.u32 $0, $0, 7; add.u32 $0, $0, $1; shfl.sync.idx.b32 $0, $0, 0, 31, -1;",
            "=&r,r",
            [gl.to_tensor(-1)],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
    return group


@gluon.jit
def compute(call):
    """One compute group: 64 query rows of each tile."""
    group = group_number(call)
    post = start(2)
    q_round = start(call.config.query_stages)
    place = start(call.config.stages)
    turn = start(1)
    tile = call.board.read(post)
    while tile.alive != 0:
        part = group
        if call.config.by_turns:
            part = group ^ post.index
        q_place = q_round.at(q_round.index * call.config.groups + part)
        row = tile.q_start + part * GROUP_ROWS
        place, turn = attend(call, tile, row, post, q_place, place, turn, group)
        call.board.release(post)
        post = post.next()
        q_round = q_round.next(by_masks=True)
        tile = call.board.read(post)
    tma.store_wait(0)


@gluon.jit
def attend(call, tile, row, post, q_place, place, turn, group):
    """Attention of 64 rows over the blocks they see; the tile's other blocks are let pass."""
    config: gl.constexpr = call.config
    layouts: gl.constexpr = call.layouts
    KEYS: gl.constexpr = config.keys
    TILE_ROWS: gl.constexpr = GROUP_ROWS * config.groups
    DIM_V: gl.constexpr = config.dim_v
    block_keys = call.band.blocks(tile, tile.q_start, TILE_ROWS, KEYS)
    keys = call.band.blocks(tile, row, GROUP_ROWS, KEYS).within(block_keys)
    rows = row + gl.arange(0, GROUP_ROWS, layouts.row)
    row_max, row_sum = call.scoring.first_row_state(tile, GROUP_ROWS, layouts.row)
    if config.finite_max:
        row_max = gl.where(row_max == -INF, LOWEST, row_max)  # a NaN of a sink stays
    row_sum = spread(row_sum, gl.zeros([GROUP_ROWS, KEYS], gl.float32, layouts.scores), config.thread_sums)
    acc = gl.zeros([GROUP_ROWS, DIM_V], gl.float32, layouts.acc)
    q_tile = call.queries.get(q_place)
    place, turn = let_pass(call, place, turn, block_keys.last - keys.last, group)
    state = State(acc, row_max, row_sum, place, turn)
    top = gl.minimum(keys.masked + 1, keys.last)
    if config.has_hi:
        for n in range(keys.last - top):
            state = step_alone(call, tile, q_tile, rows, keys.last - 1 - n, state, group)
    state = pipeline(call, tile, q_tile, q_place, row, rows, keys, top, state, group)
    if config.has_lo:
        for n in range(keys.full - keys.first):
            state = step_alone(call, tile, q_tile, rows, keys.full - 1 - n, state, group)
    if config.has_lo:
        call.queries.release(q_place)
    place, turn = let_pass(call, state.place, state.turn, keys.first - block_keys.first, group)
    finish(call, post, state, row, group)
    return place, turn


@gluon.jit
def pipeline(call, tile, q_tile, q_place, row, rows, keys, top, state, group):
    """The blocks below `top`, of which only the first may need a mask, with the products next to the softmax.

    Of that one, rows that see no more meet half. Where no masked blocks follow, the queries are given back before the
    last product with V.
    """
    early: gl.constexpr = not call.config.has_lo
    if top > keys.full:
        summed = 0
        if call.config.has_hi:
            summed = keys.last - top
        KEYS: gl.constexpr = call.config.keys
        if call.config.halves:
            if (top - 1 > keys.full) & call.band.see_half(tile, row, GROUP_ROWS, top - 1, KEYS):
                state, half = begin(call, tile, q_tile, rows, top - 1, state, summed, group, KEYS // 2)
                top -= 1
                state, weights = step(call, tile, q_tile, rows, top - 1, state, half, group)
            else:
                state, weights = begin(call, tile, q_tile, rows, top - 1, state, summed, group, KEYS)
        else:
            state, weights = begin(call, tile, q_tile, rows, top - 1, state, summed, group, KEYS)
        for n in range(top - 1 - keys.full):
            state, weights = step(call, tile, q_tile, rows, top - 2 - n, state, weights, group)
        if early:
            call.queries.release(q_place)
        state = end(call, state, weights)
    elif early:
        call.queries.release(q_place)
    return state


@gluon.jit
def let_pass(call, place, turn, n, group):
    """Release `n` blocks that other groups of the tile see and this one does not."""
    for _ in range(n):
        call.turns.wait(group, turn)
        call.keys.get(place)
        call.keys.release(place)
        call.values.get(place)
        call.values.release(place)
        call.turns.pass_on(group)
        place = place.next()
        turn = turn.again()
    return place, turn


@gluon.jit
def begin(call, tile, q_tile, rows, block, state, summed, group, KEYS: gl.constexpr):
    """The first block of the pipeline, and the only one in it that may need a mask: nothing to overlap with yet.

    `summed`: how many blocks came before. After none there is nothing to scale. `KEYS`: how many keys of the block.
    """
    scores = multiply_keys(call, q_tile, state, group, KEYS)
    call.turns.pass_on(group)
    scores = warpgroup_mma_wait(0, deps=[scores])
    call.keys.release(state.place)
    scores = shape_scores(call, tile, scores, rows, block, call.config.masks)
    factor = call.scoring.factor()
    row_max = gl.maximum(state.row_max, gl.convert_layout(gl.max(scores, 1), call.layouts.row) * factor)
    weights, decay, row_sum = exponentials(call, scores, row_max, state.row_max, state.row_sum, factor)
    acc = state.acc
    if summed != 0:
        acc = acc * gl.convert_layout(decay, call.layouts.acc_row)[:, None]
    weights = gl.convert_layout(weights.to(q_tile.dtype), call.layouts.weights)
    return State(acc, row_max, row_sum, state.place, state.turn.again()), weights


@gluon.jit
def step(call, tile, q_tile, rows, block, state, weights, group):
    """One block of keys: its scores and softmax, while the weights of the block before meet their tile of V.

    `state.place` is where that tile lies; weights of half a block meet its first half.
    """
    ahead = state.ahead(call.config.place_masks)
    scores = multiply_keys(call, q_tile, ahead, group, call.config.keys)
    v_tile = call.values.get(state.place)
    if weights.shape[1] < call.config.keys:
        v_tile = v_tile.slice(0, weights.shape[1], 0)
    acc = warpgroup_mma(weights, v_tile, state.acc, is_async=True)
    call.turns.pass_on(group)
    scores = warpgroup_mma_wait(1, deps=[scores])
    call.keys.release(ahead.place)
    scores = shape_scores(call, tile, scores, rows, block, False)
    factor = call.scoring.factor()
    row_max = gl.maximum(state.row_max, gl.max(scores, 1) * factor)
    if call.config.wait_after_max:
        call.values.get(state.place)  # has landed already: keeps the compiler from moving the wait below up to here
        acc = warpgroup_mma_wait(0, deps=[acc])
        call.values.release(state.place)
    weights, decay, row_sum = exponentials(call, scores, row_max, state.row_max, state.row_sum, factor)
    if not call.config.wait_after_max:
        acc = warpgroup_mma_wait(0, deps=[acc])
        call.values.release(state.place)
    decay = gl.convert_layout(decay, call.layouts.acc_row)[:, None]
    if call.config.scales_changed:
        acc = scale_changed(acc, decay)
    else:
        acc = acc * decay
    weights = gl.convert_layout(weights.to(q_tile.dtype), call.layouts.weights)
    return State(acc, row_max, row_sum, ahead.place, ahead.turn.again()), weights


@gluon.jit
def scale_changed(acc, decay):
    """`acc * decay` by multiplications that do nothing where the factor is 1: as many instructions, less energy."""
    acc, decay = gl.broadcast(acc, decay)
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.neu.f32 p, $2, 0f3F800000; mov.b32 $0, $1; @p mul.f32 $0, $1, $2; }",
        "=f,f,f",
        [acc, decay],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def end(call, state, weights):
    """The last weights meet their tile of V."""
    v_tile = call.values.get(state.place)
    acc = warpgroup_mma(weights, v_tile, state.acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    call.values.release(state.place)
    place = state.place.next(call.config.place_masks)
    return State(acc, state.row_max, state.row_sum, place, state.turn)


@gluon.jit
def step_alone(call, tile, q_tile, rows, block, state, group):
    """A masked block outside the pipeline.

    A branch around the mask inside the pipeline makes the compiler wait for the product with V before the softmax, not
    in its middle: 7% (H200, D 128, N 16384). A loop of its own in there makes it unpack and repack the weights.
    """
    state, weights = begin(call, tile, q_tile, rows, block, state, 1, group, call.config.keys)
    return end(call, state, weights)


@gluon.jit
def multiply_keys(call, q_tile, state, group, KEYS: gl.constexpr):
    """Start the product of the queries with the tile of K at `state.place`, with all its keys or the first half."""
    k_tile = call.keys.get(state.place)
    call.turns.wait(group, state.turn)
    if call.config.keys == KEYS:
        zero = gl.zeros([GROUP_ROWS, KEYS], gl.float32, call.layouts.scores)
    else:
        zero = gl.zeros([GROUP_ROWS, KEYS], gl.float32, call.layouts.half_scores)
        k_tile = k_tile.slice(0, KEYS, 0)
    return warpgroup_mma(q_tile, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def shape_scores(call, tile, scores, rows, block, MASKED: gl.constexpr):
    """Apply the score terms and, where the block is not seen whole, the mask."""
    layout: gl.constexpr = scores.type.layout
    cols = gl.arange(0, scores.shape[1], gl.SliceLayout(0, layout))[None, :]
    # A thread holds columns 8 a + 2 lane + b. Counting from its lane makes a and b constants of each instruction.
    lane = cols & 6
    cols = cols & ~6
    origin = block * call.config.keys + lane
    rows = gl.convert_layout(rows, gl.SliceLayout(1, layout))[:, None] - origin
    scores = call.scoring.apply(scores, tile, rows, cols)
    if MASKED:
        scores = gl.where(call.band.keeps(tile, rows, cols, origin), scores, -INF)
    return scores


@gluon.jit
def exponentials(call, scores, row_max, old_max, row_sum, factor):
    """Weights of a block, the factor by which what was summed before shrinks, and the new row sums."""
    finite_max = row_max
    if not call.config.finite_max:
        finite_max = gl.where(row_max == -INF, 0.0, row_max)  # a row that has seen no key yet: exp2(-inf - 0) is 0
    of_row: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    weights = gl.exp2(scores * factor - gl.convert_layout(finite_max, of_row)[:, None])
    decay = gl.exp2(old_max - finite_max)
    return weights, decay, add_block(row_sum, decay, weights, call.config.thread_sums, call.config.early_decay)
