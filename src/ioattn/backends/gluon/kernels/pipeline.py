"""Rings of shared-memory buffers between warp roles: who may fill or read a buffer, and when.

A ring has one barrier per buffer for "full" and one for "empty". A role walks a ring with a `Cursor`; the parity that
the barriers need lives there and nowhere else.
"""

from ioattn.backends.gluon.kernels.names import aggregate, fence_async_shared, gl, gluon, load_tile, mbarrier


@aggregate
class Cursor:
    """A role's place in a ring: which buffer, and whether it has gone round an even or odd number of times."""

    index: gl.tensor
    parity: gl.tensor
    size: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, index, parity, size):
        self.index = index
        self.parity = parity
        self.size = gl.constexpr(size)

    @gluon.jit
    def next(self, by_masks: gl.constexpr = False):
        """The next buffer. `by_masks`: with fewer instructions where there are two or four."""
        if self.size == 1:
            then = self.again()
        elif by_masks and self.size == 2:
            then = Cursor(self.index ^ 1, self.parity ^ self.index, self.size)
        elif by_masks and self.size == 4:
            index = self.index + 1
            then = Cursor(index & 3, self.parity ^ (index >> 2), self.size)
        else:
            index = self.index + 1
            round_trip = index == self.size
            then = Cursor(gl.where(round_trip, 0, index), self.parity ^ round_trip.to(gl.int32), self.size)
        return then

    @gluon.jit
    def previous(self):
        """The buffer before."""
        first = self.index == 0
        return Cursor(gl.where(first, self.size - 1, self.index - 1), self.parity ^ first.to(gl.int32), self.size)

    @gluon.jit
    def again(self):
        """The same buffer, one round later."""
        return Cursor(self.index, self.parity ^ 1, self.size)

    @gluon.jit
    def at(self, index):
        """Another buffer in the same round."""
        return Cursor(gl.to_tensor(index), self.parity, self.size)


@gluon.jit
def start(size: gl.constexpr):
    """The first buffer of a ring of `size`, in the first round."""
    return Cursor(gl.to_tensor(0), gl.to_tensor(0), size)


@aggregate
class Ring:
    """Tiles that a loader fills by TMA and `readers` compute groups drain."""

    buffers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: object
    rows: gl.constexpr
    dim: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, buffers, full, empty, rows, dim):
        self.buffers = buffers
        self.full = full
        self.empty = gl.constexpr(None) if empty is None else empty
        self.rows = gl.constexpr(rows)
        self.dim = gl.constexpr(dim)

    @gluon.jit
    def acquire(self, cursor):
        """Wait until every reader has released the buffer."""
        mbarrier.wait(self.empty.index(cursor.index), cursor.parity ^ 1)

    @gluon.jit
    def fill(self, cursor, desc, coord):
        """Once the buffer is free, copy a tile into it; `get` returns when the copy has landed."""
        self.fill_for(cursor, desc, coord, self.full.index(cursor.index))

    @gluon.jit
    def fill_for(self, cursor, desc, coord, landed):
        """The same with another barrier than "full", for a loader that works on the tile before it says `mark_full`."""
        self.acquire(cursor)
        mbarrier.expect(landed, desc.block_type.nbytes)
        load_tile(desc, coord, landed, self.buffers.index(cursor.index))

    @gluon.jit
    def mark_full(self, cursor):
        """Say that the tile is ready, after `fill_for`."""
        mbarrier.arrive(self.full.index(cursor.index), count=1)

    @gluon.jit
    def get(self, cursor):
        """Wait until the buffer is full; its tile as `[rows, dim]`."""
        mbarrier.wait(self.full.index(cursor.index), cursor.parity)
        return self.tile(cursor)

    @gluon.jit
    def tile(self, cursor):
        """The buffer as `[rows, dim]`."""
        return self.buffers.index(cursor.index).reshape([self.rows, self.dim])

    @gluon.jit
    def release(self, cursor):
        """Say that this reader is done with the buffer."""
        mbarrier.arrive(self.empty.index(cursor.index), count=1)

    @gluon.jit
    def until_released(self, cursor):
        """Wait until every reader has said so, in the cursor's round; at once in the round before the first."""
        mbarrier.wait(self.empty.index(cursor.index), cursor.parity)


@gluon.jit
def barriers(n: gl.constexpr, count: gl.constexpr, used: gl.constexpr = True):
    """`n` barriers that complete after `count` arrivals; None unless they are `used`.

    The compiler gives the memory of barriers that nobody waits for to something else, but the hardware still takes it
    for barriers: when the GPU goes over to another process and back, it writes their state there again (H200).
    """
    bars = None
    if used:
        bars = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(n):
            mbarrier.init(bars.index(i), count=count)
    return bars


@gluon.jit
def ring(desc, size: gl.constexpr, readers: gl.constexpr, released: gl.constexpr = True):
    """A ring of `size` buffers for the blocks of `desc`, each drained by `readers` groups, and `released` by them."""
    shape: gl.constexpr = desc.block_type.shape
    buffers = gl.allocate_shared_memory(desc.dtype, [size, shape[0], shape[1], shape[2], shape[3]], desc.layout)
    return Ring(buffers, barriers(size, 1), barriers(size, readers, released), shape[2], shape[3])


@aggregate
class RowRing:
    """Tiles of rows with one number per row, which a loader fills together and `readers` compute groups drain."""

    tiles: Ring
    numbers: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, tiles, numbers):
        self.tiles = tiles
        self.numbers = numbers

    @gluon.jit
    def fill(self, cursor, desc, coord, numbers_desc, row):
        """Once the buffer is free, copy a tile and the numbers of its rows into it."""
        self.tiles.acquire(cursor)
        self.fill_free(cursor, desc, coord, numbers_desc, row)

    @gluon.jit
    def fill_free(self, cursor, desc, coord, numbers_desc, row):
        """The same for a buffer that is known to be free, as its readers release it together with another ring's."""
        full = self.tiles.full.index(cursor.index)
        mbarrier.expect(full, desc.block_type.nbytes + numbers_desc.block_type.nbytes)
        load_tile(numbers_desc, [row], full, self.numbers.index(cursor.index))
        load_tile(desc, coord, full, self.tiles.buffers.index(cursor.index))

    @gluon.jit
    def get(self, cursor):
        """Wait until the buffer is full; its tile as `[rows, dim]`."""
        return self.tiles.get(cursor)

    @gluon.jit
    def of_rows(self, cursor, layout: gl.constexpr):
        """The numbers of the rows, once `get` has returned."""
        return self.numbers.index(cursor.index).load(layout)

    @gluon.jit
    def release(self, cursor):
        """Say that this reader is done with the buffer."""
        self.tiles.release(cursor)

    @gluon.jit
    def until_released(self, cursor):
        """Wait until every reader has said so, in the cursor's round."""
        self.tiles.until_released(cursor)


@gluon.jit
def row_ring(desc, numbers_desc, size: gl.constexpr, readers: gl.constexpr, released: gl.constexpr):
    """A ring of `size` buffers for the blocks of `desc` and as many numbers as they have rows."""
    rows: gl.constexpr = numbers_desc.block_type.shape[0]
    numbers = gl.allocate_shared_memory(gl.float32, [size, rows], numbers_desc.layout)
    return RowRing(ring(desc, size, readers, released), numbers)


@aggregate
class Exchange:
    """Buffers that compute groups fill, together or one of them, for groups to read.

    `released`: who fills a buffer waits until its readers have released it. Else the groups see to that in other ways.
    """

    buffers: gl.shared_memory_descriptor
    full: object
    empty: object
    released: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, buffers, full, empty, released):
        self.buffers = buffers
        self.full = gl.constexpr(None) if full is None else full
        self.empty = gl.constexpr(None) if empty is None else empty
        self.released = gl.constexpr(released)

    @gluon.jit
    def put(self, cursor, start: gl.constexpr, part):
        """Write rows from `start` on, and say so."""
        self.write(cursor, start, part)
        self.mark_written(cursor)

    @gluon.jit
    def write(self, cursor, start: gl.constexpr, part):
        """Write rows from `start` on, once every reader has released what was here before."""
        if self.released:
            mbarrier.wait(self.empty.index(cursor.index), cursor.parity ^ 1)
        self.buffers.index(cursor.index).slice(start, part.shape[0], 0).store(part)

    @gluon.jit
    def mark_written(self, cursor):
        """Say that this group's part is there."""
        fence_async_shared()
        mbarrier.arrive(self.full.index(cursor.index), count=1)

    @gluon.jit
    def get(self, cursor, wanted=True):
        """The whole, once every writer has written its part; at once if it is not `wanted`."""
        mbarrier.wait(self.full.index(cursor.index), cursor.parity, pred=wanted)
        return self.buffers.index(cursor.index)

    @gluon.jit
    def release(self, cursor):
        """Say that this group has read it."""
        if self.released:
            mbarrier.arrive(self.empty.index(cursor.index), count=1)


@gluon.jit
def exchange(
    dtype: gl.constexpr,
    rows: gl.constexpr,
    cols: gl.constexpr,
    size: gl.constexpr,
    writers: gl.constexpr,
    readers: gl.constexpr,
):
    """`size` buffers of `[rows, cols]` that `writers` groups fill, each its part, and `readers` groups read."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, cols], dtype)
    buffers = gl.allocate_shared_memory(dtype, [size, rows, cols], layout)
    released: gl.constexpr = writers == 1
    return Exchange(buffers, barriers(size, writers), barriers(size, readers, released), released)


@aggregate
class Turns:
    """Lets compute groups issue their matrix products in turn, so that one group's softmax hides another's."""

    bars: object
    groups: gl.constexpr
    used: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, bars, groups, used):
        self.bars = gl.constexpr(None) if bars is None else bars
        self.groups = gl.constexpr(groups)
        self.used = gl.constexpr(used)

    @gluon.jit
    def wait(self, group: gl.constexpr, cursor):
        """Wait for the turn of `group`."""
        if self.used:
            mbarrier.wait(self.bars.index(group), cursor.parity)

    @gluon.jit
    def pass_on(self, group: gl.constexpr):
        """Give the turn to the group after `group`."""
        if self.used:
            mbarrier.arrive(self.bars.index((group + 1) % self.groups), count=1)


@gluon.jit
def turns(groups: gl.constexpr, used: gl.constexpr, arrivals: gl.constexpr = 1):
    """Turns of `groups` groups, the first one first; none are taken unless `used`."""
    bars = barriers(groups, arrivals, used)
    if used:
        mbarrier.arrive(bars.index(0), count=arrivals)
    return Turns(bars, groups, used)
