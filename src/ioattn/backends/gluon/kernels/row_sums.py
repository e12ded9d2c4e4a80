"""Row sums of tiles: whole ones, or one for each of the four threads that hold a row.

Those of threads need no exchange per block of keys: they are put together once, at the end of a tile.
"""

from ioattn.backends.gluon.kernels.names import gl, gluon


@gluon.jit
def sum_rows(tile, by_thread: gl.constexpr):
    """The sum of each row, or, `by_thread`, of what each thread holds of it."""
    if by_thread:
        # A thread holds columns 8 a + 2 thread + b.
        ROWS: gl.constexpr = tile.shape[0]
        COLS: gl.constexpr = tile.shape[1]
        sums = gl.sum(gl.sum(tile.reshape([ROWS, COLS // 8, 4, 2]), 3), 1)
    else:
        sums = gl.sum(tile, 1)
    return sums


@gluon.jit
def add_block(sums, decay, weights, by_thread: gl.constexpr, early: gl.constexpr):
    """The sums with another block's weights, after what was summed before has shrunk.

    The assembler orders instructions by what waits for them. With `early`, what was summed before joins when a quarter
    of the weights is left: the decay is known by then, and what else it scales fills the gaps between the exponentials
    that remain. Joined last, it is computed last, and joined first, it holds up all exponentials.
    """
    if by_thread and early:
        ROWS: gl.constexpr = weights.shape[0]
        PAIRS: gl.constexpr = weights.shape[1] // 8
        pairs = gl.sum(weights.reshape([ROWS, PAIRS, 4, 2]), 3)
        layout: gl.constexpr = gl.SliceLayout(1, pairs.type.layout)
        decay = gl.convert_layout(decay, gl.SliceLayout(1, layout))[:, None]
        before = (gl.convert_layout(sums, layout) * decay)[:, None, :]
        place = gl.arange(0, PAIRS, gl.SliceLayout(0, gl.SliceLayout(2, pairs.type.layout)))[None, :, None]
        total = gl.sum(gl.where(place == PAIRS // 4 * 3, pairs + before, pairs), 1)
        total = gl.convert_layout(total, sums.type.layout)
    else:
        more = gl.convert_layout(sum_rows(weights, by_thread), sums.type.layout)
        if by_thread:
            decay = gl.convert_layout(decay, gl.SliceLayout(1, more.type.layout))[:, None]
        total = sums * decay + more
    return total


@gluon.jit
def spread(row_sum, zeros, by_thread: gl.constexpr):
    """Whole sums as such sums: the first thread of a row has all of it. `zeros` are weights, all of them 0."""
    sums = row_sum
    if by_thread:
        none = sum_rows(zeros, by_thread)
        layout: gl.constexpr = none.type.layout
        thread = gl.arange(0, 4, gl.SliceLayout(0, layout))[None, :]
        sums = gl.convert_layout(row_sum, gl.SliceLayout(1, layout))[:, None]
        sums = gl.where(thread == 0, sums + none, 0.0)
    return sums


@gluon.jit
def put_together(sums, layout: gl.constexpr, by_thread: gl.constexpr):
    """Whole sums again."""
    row_sum = sums
    if by_thread:
        row_sum = gl.convert_layout(gl.sum(sums, 1), layout)
    return row_sum
