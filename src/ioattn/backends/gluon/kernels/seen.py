"""Which blocks of a walk one compute group sees: some see only the other one's half of the keys.

At the edge of a band a block of 64 queries may see 64 of a tile's 128 keys: the group that has the others lets it pass.
"""

from ioattn.backends.gluon.kernels.backward_call import GROUP_KEYS
from ioattn.backends.gluon.kernels.key_tiles import KeyTile
from ioattn.backends.gluon.kernels.names import aggregate, gl, gluon


@aggregate
class Seen:
    """What a group sees of the blocks from `first` to `last`: nothing up to `start` and from `end` on, all of those
    from `whole` to `whole_end`, and of the rest a part.
    """

    first: gl.tensor
    start: gl.tensor
    whole: gl.tensor
    whole_end: gl.tensor
    end: gl.tensor
    last: gl.tensor

    @gluon.constexpr_function
    def __init__(self, first, start, whole, whole_end, end, last):
        self.first = first
        self.start = start
        self.whole = whole
        self.whole_end = whole_end
        self.end = end
        self.last = last


@gluon.jit
def seen_by(band, tile, queries, rows: gl.constexpr, group):
    """What a group sees of the blocks of `queries` that see its tile."""
    half = KeyTile(
        *(tile.alive, tile.batch, tile.head, tile.k_start + group * GROUP_KEYS, tile.k_offset, tile.len_k, tile.len_q),
        *(tile.row, tile.part, tile.parts, tile.slot),
    )
    own = band.queries(half, GROUP_KEYS, rows)
    first = queries.first
    last = first + queries.count()
    start = gl.minimum(gl.maximum(own.first, first), last)
    whole = gl.minimum(gl.maximum(own.whole, start), last)
    whole_end = gl.minimum(gl.maximum(own.whole_end, whole), last)
    end = gl.minimum(gl.maximum(own.first + own.count(), whole_end), last)
    return Seen(first, start, whole, whole_end, end, last)
