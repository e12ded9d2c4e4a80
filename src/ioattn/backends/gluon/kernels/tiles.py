"""Which tile of queries a block works on next, which keys its rows see, and how the loader tells the compute groups.

A tile is `groups * 64` query rows of one head. The loader walks the tiles and posts each on a board in shared memory;
the compute groups read it there. Key ranges are half-open and counted in blocks of `keys` keys.
"""

from ioattn.backends.gluon.kernels.names import aggregate, gl, gluon, mbarrier
from ioattn.backends.gluon.kernels.pipeline import barriers

GROUP_ROWS = gl.constexpr(64)
"""Query rows of one compute group: what a warp group's matrix instruction covers."""

POST_WORDS = gl.constexpr(8)


@aggregate
class Tile:
    """One tile of work: its head, its first query, and where its sequence lies in memory."""

    alive: gl.tensor
    is_again: gl.tensor
    batch: gl.tensor
    head: gl.tensor
    q_start: gl.tensor
    q_offset: gl.tensor
    len_q: gl.tensor
    k_offset: gl.tensor
    len_k: gl.tensor

    @gluon.constexpr_function
    def __init__(self, alive, is_again, batch, head, q_start, q_offset, len_q, k_offset, len_k):
        self.alive = alive
        self.is_again = is_again
        self.batch = batch
        self.head = head
        self.q_start = q_start
        self.q_offset = q_offset
        self.len_q = len_q
        self.k_offset = k_offset
        self.len_k = len_k


@aggregate
class Divisor:
    """A number to divide by without a division: `config.divisor` says how."""

    by: gl.tensor
    factor: gl.tensor
    shift: gl.tensor
    known: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, words, known):
        self.by, self.factor, self.shift = words
        self.known = gl.constexpr(known)

    @gluon.jit
    def quotient(self, n):
        """`n // by`, of a number that is not negative."""
        if self.known:
            high = gl.umulhi((n * 2).to(gl.uint32), self.factor.to(gl.uint32)).to(gl.uint32)
            quotient = (high >> self.shift.to(gl.uint32)).to(gl.int32)
        else:
            quotient = n // self.by
        return quotient

    @gluon.jit
    def or_else(self, other, condition):
        """The divisor itself where the condition holds, else the other."""
        by = gl.where(condition, self.by, other.by)
        factor = gl.where(condition, self.factor, other.factor)
        shift = gl.where(condition, self.shift, other.shift)
        return Divisor((by, factor, shift), self.known)


@aggregate
class Keys:
    """The blocks of keys that some rows touch, `[first, last)`, and those that they see whole, `[full, masked)`."""

    first: gl.tensor
    full: gl.tensor
    masked: gl.tensor
    last: gl.tensor

    @gluon.constexpr_function
    def __init__(self, first, full, masked, last):
        self.first = first
        self.full = full
        self.masked = masked
        self.last = last

    @gluon.jit
    def masks(self, block):
        """Whether some row does not see some key of the block."""
        return (block < self.full) | (block >= self.masked)

    @gluon.jit
    def within(self, outer):
        """The same blocks, with an empty range moved to the end of `outer`."""
        some = self.last > self.first
        return Keys(
            gl.where(some, self.first, outer.last),
            gl.where(some, self.full, outer.last),
            gl.where(some, self.masked, outer.last),
            gl.where(some, self.last, outer.last),
        )


@aggregate
class Band:
    """`ioattn.masks.Band` on the device: key j is kept for query i when `lo <= j - i - shift <= hi`."""

    lo: gl.tensor
    hi: gl.tensor
    shift: gl.tensor
    has_lo: gl.constexpr
    has_hi: gl.constexpr
    bottom_right: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, lo, hi, shift, has_lo, has_hi, bottom_right):
        self.lo = lo
        self.hi = hi
        self.shift = shift
        self.has_lo = gl.constexpr(has_lo)
        self.has_hi = gl.constexpr(has_hi)
        self.bottom_right = gl.constexpr(bottom_right)

    @gluon.jit
    def shift_of(self, tile):
        """The shift that aligns the sequence of a tile."""
        shift = self.shift
        if self.bottom_right:
            shift += tile.len_k - tile.len_q
        return shift

    @gluon.jit
    def blocks(self, tile, row, rows: gl.constexpr, keys: gl.constexpr):
        """The blocks of keys that queries `[row, row + rows)` of the tile's sequence touch and see whole."""
        shift = self.shift_of(tile)
        last_row = gl.minimum(row + rows, tile.len_q) - 1
        start = gl.to_tensor(0)
        whole_start = start
        end = tile.len_k
        whole_end = end
        if self.has_lo:
            start = gl.maximum(row + shift + self.lo, 0)
            whole_start = gl.maximum(last_row + shift + self.lo, 0)
        if self.has_hi:
            end = gl.minimum(last_row + shift + self.hi + 1, end)
            whole_end = gl.minimum(row + shift + self.hi + 1, end)
        empty = (last_row < row) | (end <= start)
        first = gl.where(empty, 0, start // keys)
        last = gl.where(empty, 0, (end + keys - 1) // keys)
        masked = gl.minimum(gl.maximum(whole_end, 0) // keys, last)
        full = gl.minimum((whole_start + keys - 1) // keys, last)
        masked = gl.maximum(masked, first)
        return Keys(first, gl.minimum(gl.maximum(full, first), masked), masked, last)

    @gluon.jit
    def see_half(self, tile, row, rows: gl.constexpr, block, keys: gl.constexpr):
        """Whether queries `[row, row + rows)` of the tile's sequence see nothing of a block's second half."""
        last_row = gl.minimum(row + rows, tile.len_q) - 1
        return last_row + self.shift_of(tile) + self.hi < block * keys + keys // 2

    @gluon.jit
    def keeps(self, tile, rows, cols, origin):
        """Whether each query in `rows` sees each key in `cols`, both counted from `origin`; shapes broadcast."""
        below = tile.len_k - 1 - origin
        shift = self.shift_of(tile)
        if self.has_hi:
            below = gl.minimum(rows + (shift + self.hi), below)
        kept = cols <= below
        if self.has_lo:
            kept = kept & (cols >= rows + (shift + self.lo))
        return kept


@aggregate
class Board:
    """Where the loader posts tiles: a ring of two posts, each with a word per row that is NaN if the row's result is.

    A group leaves its words without a barrier, and the loader, which has time, puts them together: reduced by the group
    itself they cost D 64 causal 1 to 3% and D 256 causal 1 to 2% (H200).
    """

    posts: gl.shared_memory_descriptor
    poison: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    readers: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, posts, poison, full, empty, readers):
        self.posts = posts
        self.poison = poison
        self.full = full
        self.empty = empty
        self.readers = gl.constexpr(readers)

    @gluon.jit
    def acquire(self, cursor):
        """Wait until every group is done with the tile that was posted here before."""
        mbarrier.wait(self.empty.index(cursor.index), cursor.parity ^ 1)

    @gluon.jit
    def wait_until_done(self, cursor):
        """Wait until every group is done with the tile that is posted here now."""
        mbarrier.wait(self.empty.index(cursor.index), cursor.parity)

    @gluon.jit
    def post(self, cursor, tile):
        """Post a tile, once the groups are done with the one before at this place."""
        word = gl.arange(0, POST_WORDS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        words = gl.where(word == 0, tile.alive + 2 * tile.is_again, tile.batch)
        words = gl.where(word == 2, tile.head, words)
        words = gl.where(word == 3, tile.q_start, words)
        words = gl.where(word == 4, tile.q_offset, words)
        words = gl.where(word == 5, tile.len_q, words)
        words = gl.where(word == 6, tile.k_offset, words)
        words = gl.where(word == 7, tile.len_k, words)
        self.acquire(cursor)
        self.posts.index(cursor.index).store(words)
        mbarrier.arrive(self.full.index(cursor.index), count=1)

    @gluon.jit
    def read(self, cursor):
        """The tile at this place, once it is posted."""
        mbarrier.wait(self.full.index(cursor.index), cursor.parity)
        layout: gl.constexpr = gl.BlockedLayout([POST_WORDS], [32], [gl.num_warps()], [0])
        words = self.posts.index(cursor.index).load(layout)
        word = gl.arange(0, POST_WORDS, layout)
        state = _pick(words, word, 0)
        return Tile(
            state & 1,
            state >> 1,
            _pick(words, word, 1),
            _pick(words, word, 2),
            _pick(words, word, 3),
            _pick(words, word, 4),
            _pick(words, word, 5),
            _pick(words, word, 6),
            _pick(words, word, 7),
        )

    @gluon.jit
    def release(self, cursor):
        """Say that this group is done with the tile."""
        mbarrier.arrive(self.empty.index(cursor.index), count=1)

    @gluon.jit
    def report(self, cursor, group, poison):
        """Leave one number per row of a group: zero, or NaN if something in the row's result is not finite."""
        self.poison.index(cursor.index * self.readers + group).store(poison)

    @gluon.jit
    def is_suspect(self, cursor):
        """Whether a result of the tile posted here is not finite."""
        # Every warp reads all of it, so that none waits for another.
        layout: gl.constexpr = gl.BlockedLayout([GROUP_ROWS // 32], [32], [gl.num_warps()], [0])
        finite = gl.full([GROUP_ROWS], True, gl.int1, layout)
        for group in gl.static_range(self.readers):
            finite = finite & (self.poison.index(cursor.index * self.readers + group).load(layout) == 0.0)
        return gl.max(gl.where(finite, 0, 1), 0) != 0


@gluon.jit
def _pick(words, word, which: gl.constexpr):
    return gl.sum(gl.where(word == which, words, 0), 0)


@gluon.jit
def board(readers: gl.constexpr, arrivals: gl.constexpr = 1):
    """A board that `readers` groups read."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    posts = gl.allocate_shared_memory(gl.int32, [2, POST_WORDS], layout)
    poison = gl.allocate_shared_memory(gl.float32, [2 * readers, GROUP_ROWS], layout)
    zeros = gl.full([GROUP_ROWS], 0.0, gl.float32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    for i in gl.static_range(2 * readers):
        poison.index(i).store(zeros)  # the first tiles' words are read before any is left; D 64 without 397 / 405
    return Board(posts, poison, barriers(2, 1), barriers(2, readers * arrivals), readers)


@aggregate
class Schedule:
    """The order of tiles. Heads go in sections whose keys and values stay in the L2 cache together; inside one the
    longest rows come first. A block draws its next tile from a counter.

    Packed sequences are counted off against `cu_seqlens`; the rows past the last one form a sequence of -1 keys, which
    not even a sink is added to.
    """

    counter: gl.tensor
    cu_seqlens_q: object
    cu_seqlens_k: object
    batch: gl.tensor
    len_q: gl.tensor
    len_k: gl.tensor
    heads: gl.tensor
    section: gl.tensor
    per_section: Divisor
    inner: Divisor
    inner_last: Divisor
    per_batch: Divisor
    rows: gl.constexpr
    sequences: gl.constexpr
    longest_first: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, counter, cu_seqlens_q, cu_seqlens_k, sizes, divisors, config):
        self.counter = counter
        self.cu_seqlens_q = gl.constexpr(None) if cu_seqlens_q is None else cu_seqlens_q
        self.cu_seqlens_k = gl.constexpr(None) if cu_seqlens_k is None else cu_seqlens_k
        self.batch, self.len_q, self.len_k, self.heads, self.section = sizes
        dense = config.sequences == 0
        self.per_section = Divisor(divisors[0:3], dense)
        self.inner = Divisor(divisors[3:6], config.longest_first or dense)
        self.inner_last = Divisor(divisors[6:9], config.longest_first or dense)
        self.per_batch = Divisor(divisors[9:12], True)
        self.rows = gl.constexpr(64 * config.groups)
        self.sequences = gl.constexpr(config.sequences)
        self.longest_first = gl.constexpr(config.longest_first)

    @gluon.jit
    def ends(self):
        """How many row tiles the first 1, 2, ... sequences have; one number for dense problems."""
        tiles = (self.len_q + self.rows - 1) // self.rows
        if self.sequences > 0:
            layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
            sequence = gl.arange(0, self.sequences, layout)
            first = gl.load(self.cu_seqlens_q + sequence, mask=sequence <= self.batch, other=0)
            last = gl.load(self.cu_seqlens_q + sequence + 1, mask=sequence < self.batch, other=0)
            last = gl.where(sequence == self.batch, self.len_q, last)
            tiles = gl.associative_scan((last - first + self.rows - 1) // self.rows, 0, _add)
        return tiles

    @gluon.jit
    def row_tiles(self, ends):
        """Row tiles of one head."""
        tiles = ends
        if self.sequences > 0:
            tiles = gl.max(ends, 0)
        return tiles

    @gluon.jit
    def n_tiles(self, row_tiles):
        """Tiles of the whole problem."""
        tiles = row_tiles * self.heads
        if self.sequences == 0:
            tiles *= self.batch
        return tiles

    @gluon.jit
    def next(self, index):
        """The number of the tile to do after number `index`."""
        return gl.num_programs(0) + gl.atomic_add(self.counter, 1, sem="relaxed")

    @gluon.jit
    def draw(self, is_wanted):
        """Ask the counter for a number, if one is wanted; `number` waits for it.

        The first thread asks. That it adds 1 is hidden from the assembler, which would wait for the result at once.
        """
        lane = gl.arange(0, 32 * gl.num_warps(), gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        return gl.atomic_add(self.counter + lane * 0, lane + 1, mask=(lane == 0) & is_wanted, sem="relaxed")

    @gluon.jit
    def number(self, drawn, slot):
        """The number that `draw` asked for; it goes to all threads by way of `slot`, shared memory."""
        slot.store(drawn)
        one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        return gl.num_programs(0) + gl.max(slot.slice(0, 1, 0).load(one), 0)

    @gluon.jit
    def reset(self, index, n_tiles):
        """Set the counter back for the next launch: every tile is drawn once, so one block draws the last number."""
        if index == gl.num_programs(0) + n_tiles - 1:
            gl.store(self.counter, 0)

    @gluon.jit
    def tile(self, index, row_tiles, ends, again):
        """The index-th tile."""
        all_heads = self.heads
        if self.sequences == 0:
            all_heads *= self.batch
        per_section = row_tiles * self.section
        if self.per_section.known:
            before = self.per_section.quotient(index)
        else:
            before = index // per_section
        first = before * self.section
        rest = index - before * per_section
        inner = self.inner.or_else(self.inner_last, first + self.section <= all_heads)
        if self.longest_first:
            line = inner.quotient(rest)
            row_tile = row_tiles - 1 - line
            head = first + rest - line * inner.by
        else:
            line = rest // row_tiles
            if inner.known:
                line = inner.quotient(rest)
            row_tile = rest - line * row_tiles
            head = first + line
        if self.sequences > 0:
            tile = self.packed_tile(head, row_tile, ends, again.to(gl.int32))
        else:
            batch = self.per_batch.quotient(head)
            zero = gl.to_tensor(0)
            alive = gl.to_tensor(1)
            q_start = row_tile * self.rows
            tile = Tile(
                alive, again.to(gl.int32), batch, head - batch * self.heads, q_start, zero, self.len_q, zero, self.len_k
            )
        return tile

    @gluon.jit
    def packed_tile(self, head, row_tile, ends, again):
        """The tile of packed sequences at a row tile counted over all of them."""
        before = gl.where(ends <= row_tile, 1, 0)
        sequence = gl.sum(before, 0)
        row_tile -= gl.max(gl.where(before != 0, ends, 0), 0)
        is_slack = sequence >= self.batch
        q_offset = gl.load(self.cu_seqlens_q + sequence)
        k_offset = gl.load(self.cu_seqlens_k + sequence)
        after = gl.minimum(sequence + 1, self.batch)
        q_end = gl.where(is_slack, self.len_q, gl.load(self.cu_seqlens_q + after))
        k_end = gl.where(is_slack, k_offset - 1, gl.load(self.cu_seqlens_k + after))
        q_start = row_tile * self.rows
        return Tile(
            gl.to_tensor(1),
            again,
            gl.to_tensor(0),
            head,
            q_start,
            q_offset,
            q_end - q_offset,
            k_offset,
            k_end - k_offset,
        )


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def no_tile():
    """What is posted when the work is done."""
    zero = gl.to_tensor(0)
    return Tile(zero, zero, zero, zero, zero, zero, zero, zero, zero)
