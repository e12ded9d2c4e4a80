"""Key tiles whose walk over queries is cut into parts: programs that have them pass sums of dK and dV on, in order.

Only the last part stores dK and dV. Each adds to what the parts before have left in global memory, so that the result
is the same in each run. A part waits only for one with a lower number, which some program has drawn before: the wait
always ends.
"""

from ioattn.backends.gluon.kernels.backward_call import GROUP_KEYS
from ioattn.backends.gluon.kernels.names import gl, gluon, thread_barrier


@gluon.jit
def add_parts_before(call, tile, dk, dv, GROUP: gl.constexpr):
    """dK and dV with those of the parts before, once they are there."""
    if call.config.parts:
        if tile.part > 0:
            while gl.atomic_add(turn_of(call, tile, GROUP), 0, sem="acquire") < tile.part:
                pass
            at = place_of_sums(call, tile, GROUP)
            dk += gl.load(at)
            dv += gl.load(at + GROUP_KEYS * call.config.dim)
    return dk, dv


@gluon.jit
def is_last_part(call, tile):
    """Whether no other part adds to the tile's sums."""
    is_last = gl.to_tensor(True)
    if call.config.parts:
        is_last = tile.part + 1 == tile.parts
    return is_last


@gluon.jit
def leave_for_next(call, tile, dk, dv, GROUP: gl.constexpr):
    """Leave the sums for the next part."""
    if call.config.parts:
        at = place_of_sums(call, tile, GROUP)
        gl.store(at, dk)
        gl.store(at + GROUP_KEYS * call.config.dim, dv)
        thread_barrier()
        gl.atomic_add(turn_of(call, tile, GROUP), 1, sem="release")


@gluon.jit
def turn_of(call, tile, GROUP: gl.constexpr):
    """Where the tile's parts are counted whose sums are there."""
    return call.parts.turns + tile.slot * 2 + GROUP


@gluon.jit
def place_of_sums(call, tile, GROUP: gl.constexpr):
    """Where a tile's sums of dK lie, 8 columns after 8: a warp's copies are of 256 bytes."""
    DIM: gl.constexpr = call.config.dim
    layout: gl.constexpr = call.layouts.acc
    rows = gl.arange(0, GROUP_KEYS, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, DIM, gl.SliceLayout(0, layout))[None, :]
    start = call.parts.sums + (tile.slot * 2 + GROUP).to(gl.int64) * (2 * GROUP_KEYS * DIM)
    return start + (cols // 8 * (8 * GROUP_KEYS) + rows * 8 + cols % 8)
