"""Which tile of keys a block of the backward works on next, and which queries see it.

The counterpart of `tiles.py`: there a tile is query rows and walks over keys, here it is keys and walks over queries.
Query ranges are half-open and counted in blocks of `rows` queries.
"""

from ioattn.backends.gluon.kernels.names import aggregate, gl, gluon, mbarrier
from ioattn.backends.gluon.kernels.pipeline import barriers

WORDS = gl.constexpr(16)


@aggregate
class KeyTile:
    """One tile of keys of one key/value head, and where its sequence lies.

    `row` is where the sequence's queries, of the first head that shares the keys, start in the workspace.
    """

    alive: gl.tensor
    batch: gl.tensor
    head: gl.tensor
    k_start: gl.tensor
    k_offset: gl.tensor
    len_k: gl.tensor
    len_q: gl.tensor
    row: gl.tensor
    part: gl.tensor
    parts: gl.tensor
    slot: gl.tensor

    @gluon.constexpr_function
    def __init__(self, alive, batch, head, k_start, k_offset, len_k, len_q, row, part, parts, slot):
        self.alive = alive
        self.batch = batch
        self.head = head
        self.k_start = k_start
        self.k_offset = k_offset
        self.len_k = len_k
        self.len_q = len_q
        self.row = row
        self.part = part
        self.parts = parts
        self.slot = slot


@aggregate
class Queries:
    """The blocks of queries that see a tile of keys: first those that need a mask, then those that see it whole.

    Of the `edges` masked blocks, `before` lie at the start of the range and the others at its end.
    """

    first: gl.tensor
    before: gl.tensor
    edges: gl.tensor
    whole: gl.tensor
    whole_end: gl.tensor
    turned: object

    @gluon.constexpr_function
    def __init__(self, first, before, edges, whole, whole_end, turned):
        self.first = first
        self.before = before
        self.edges = edges
        self.whole = whole
        self.whole_end = whole_end
        self.turned = gl.constexpr(None) if turned is None else turned

    @gluon.jit
    def start(self):
        """The first of the whole blocks that the walk comes to; it goes on with the first one after the last."""
        start = self.whole
        if self.turned is not None:
            start += self.turned
        return start

    @gluon.jit
    def inner(self, step):
        """The block of a step among the whole ones."""
        block = self.whole + step
        if self.turned is not None:
            block += self.turned
            block = gl.where(block < self.whole_end, block, block - (self.whole_end - self.whole))
        return block

    @gluon.jit
    def stretches(self, blocks: gl.constexpr):
        """Into how many stretches of so many blocks the whole ones fall."""
        return (self.whole_end - self.whole + blocks - 1) // blocks

    @gluon.jit
    def stretch(self, n, blocks: gl.constexpr):
        """The first block of the n-th stretch from the end, and the one after its last."""
        last = self.whole_end - n * blocks
        return gl.maximum(last - blocks, self.whole), last

    @gluon.jit
    def count(self):
        """How many blocks the walk has."""
        return self.edges + self.whole_end - self.whole

    @gluon.jit
    def edge(self, step):
        """The block of a step among the masked ones."""
        return gl.where(step < self.before, self.first + step, self.whole_end + (step - self.before))


@aggregate
class QueryBand:
    """`ioattn.masks.Band` seen from the keys: query i sees key j when `lo <= j - i - shift <= hi`."""

    lo: object
    hi: object
    shift: object
    has_lo: gl.constexpr
    has_hi: gl.constexpr
    bottom_right: gl.constexpr
    masks: gl.constexpr
    turns: gl.constexpr
    cut: gl.constexpr
    descending: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, band, config):
        self.lo, self.hi, self.shift = band if config.has_lo or config.has_hi else (gl.constexpr(0),) * 3
        self.has_lo = gl.constexpr(config.has_lo)
        self.has_hi = gl.constexpr(config.has_hi)
        self.bottom_right = gl.constexpr(config.bottom_right)
        self.masks = gl.constexpr(config.masks)
        self.turns = gl.constexpr(config.rotate)
        self.descending = gl.constexpr(config.descending)
        self.cut = gl.constexpr(config.parts and not config.masks)

    @gluon.jit
    def shift_of(self, tile):
        """The shift that aligns the sequence of a tile."""
        shift = gl.to_tensor(self.shift)
        if self.bottom_right:
            shift += tile.len_k - tile.len_q
        return shift

    @gluon.jit
    def queries(self, tile, keys: gl.constexpr, rows: gl.constexpr):
        """The blocks of queries that see the tile. Rows past the sequence have weight zero and need no mask."""
        k_end = gl.minimum(tile.k_start + keys, tile.len_k)
        shift = self.shift_of(tile)
        start = gl.to_tensor(0)
        whole_start = start
        end = tile.len_q
        if self.has_hi:
            start = gl.maximum(tile.k_start - shift - self.hi, 0)
            whole_start = gl.maximum(k_end - 1 - shift - self.hi, 0)
        if self.has_lo:
            end = gl.minimum(k_end - shift - self.lo, tile.len_q)
        empty = (end <= start) | (k_end <= tile.k_start)
        first = gl.where(empty, 0, start // rows)
        last = gl.where(empty, 0, (end + rows - 1) // rows)
        whole = gl.minimum((whole_start + rows - 1) // rows, last)
        whole_end = last
        if self.has_lo:
            seen = gl.maximum(tile.k_start - shift - self.lo + 1, 0)
            whole_end = gl.where(seen >= tile.len_q, last, gl.maximum(gl.minimum(seen // rows, last), first))
        if self.masks:
            ragged = tile.k_start + keys > tile.len_k
            whole = gl.where(ragged, last, whole)
        whole = gl.maximum(whole, first)
        whole_end = gl.maximum(whole_end, whole)
        edges = whole - first + last - whole_end
        if self.cut:
            blocks = whole_end - whole
            whole_end = whole + (tile.part + 1) * blocks // tile.parts
            whole += tile.part * blocks // tile.parts
        if self.turns:
            # Blocks that work on one head start at different queries, so that they do not add to the same dQ at once.
            turned = (tile.k_start // rows) % gl.maximum(whole_end - whole, 1)
            queries = Queries(first, whole - first, edges, whole, whole_end, turned)
        else:
            queries = Queries(first, whole - first, edges, whole, whole_end, None)
        return queries

    @gluon.jit
    def tiles_before(self, tile, block, keys: gl.constexpr, rows: gl.constexpr):
        """How many tiles of keys before this one are seen by a block of queries that sees this one."""
        before = tile.k_start // keys
        if self.descending:
            last = gl.minimum(block * rows + (rows - 1), tile.len_q - 1) + self.shift_of(tile) + self.hi
            before = gl.minimum(last, tile.len_k - 1) // keys - before
        elif self.has_lo:
            before -= gl.maximum(block * rows + self.shift_of(tile) + self.lo, 0) // keys
        return before

    @gluon.jit
    def keeps(self, tile, keys, queries, origin, number: gl.constexpr):
        """Whether each key is seen by each query, both counted from `origin`, compared as `number`; shapes broadcast.

        One comparison per element and side: what does not depend on the query, the end of the keys, moves a limit.
        """
        shift = self.shift_of(tile)
        exists = keys < tile.len_k - origin
        queries = queries.to(number)
        if self.has_hi:
            kept = queries >= gl.where(exists, keys - (shift + self.hi), FAR).to(number)
            if self.has_lo:
                kept = kept & (queries <= (keys - (shift + self.lo)).to(number))
        elif self.has_lo:
            kept = queries <= gl.where(exists, keys - (shift + self.lo), -FAR).to(number)
        else:
            kept = queries >= gl.where(exists, 0, FAR).to(number)
        return kept


FAR = gl.constexpr(1 << 20)
"""More than the queries of a block."""


@aggregate
class KeyBoard:
    """Where the loader posts tiles for the compute groups: a ring of two posts."""

    posts: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, posts, full, empty):
        self.posts = posts
        self.full = full
        self.empty = empty

    @gluon.jit
    def post(self, cursor, tile):
        """Post a tile, once the groups are done with the one before at this place."""
        word = gl.arange(0, WORDS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        words = gl.where(word == 0, tile.alive, tile.batch)
        words = gl.where(word == 2, tile.head, words)
        words = gl.where(word == 3, tile.k_start, words)
        words = gl.where(word == 4, tile.k_offset, words)
        words = gl.where(word == 5, tile.len_k, words)
        words = gl.where(word == 6, tile.len_q, words)
        words = gl.where(word == 7, tile.row, words)
        words = gl.where(word == 8, tile.part, words)
        words = gl.where(word == 9, tile.parts, words)
        words = gl.where(word == 10, tile.slot, words)
        mbarrier.wait(self.empty.index(cursor.index), cursor.parity ^ 1)
        self.posts.index(cursor.index).store(words)
        mbarrier.arrive(self.full.index(cursor.index), count=1)

    @gluon.jit
    def read(self, cursor):
        """The tile at this place, once it is posted."""
        mbarrier.wait(self.full.index(cursor.index), cursor.parity)
        layout: gl.constexpr = gl.BlockedLayout([WORDS], [32], [gl.num_warps()], [0])
        words = self.posts.index(cursor.index).load(layout)
        word = gl.arange(0, WORDS, layout)
        return KeyTile(
            _pick(words, word, 0),
            _pick(words, word, 1),
            _pick(words, word, 2),
            _pick(words, word, 3),
            _pick(words, word, 4),
            _pick(words, word, 5),
            _pick(words, word, 6),
            _pick(words, word, 7),
            _pick(words, word, 8),
            _pick(words, word, 9),
            _pick(words, word, 10),
        )

    @gluon.jit
    def release(self, cursor):
        """Say that this group is done with the tile."""
        mbarrier.arrive(self.empty.index(cursor.index), count=1)


@gluon.jit
def _pick(words, word, which: gl.constexpr):
    return gl.sum(gl.where(word == which, words, 0), 0)


@gluon.jit
def key_board(readers: gl.constexpr):
    """A board that `readers` groups read."""
    posts = gl.allocate_shared_memory(gl.int32, [2, WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return KeyBoard(posts, barriers(2, 1), barriers(2, readers))


@aggregate
class KeySchedule:
    """The order of key tiles. Heads go in sections whose queries stay in the L2 cache together, in a section the tiles
    with the most queries come first, and a block draws its next tile from a counter.

    Packed sequences are counted off against `cu_seqlens_k`; the rows past the last one form a sequence without queries.
    """

    counter: gl.tensor
    cu_seqlens_q: object
    cu_seqlens_k: object
    batch: gl.tensor
    len_q: gl.tensor
    len_k: gl.tensor
    heads: gl.tensor
    section: gl.tensor
    head_rows: gl.tensor
    group: gl.tensor
    whole: object
    together: object
    parts: object
    is_cut: gl.constexpr
    draws: gl.constexpr
    keys: gl.constexpr
    sequences: gl.constexpr
    across: gl.constexpr
    descending: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, counter, cu_seqlens_q, cu_seqlens_k, sizes, rows, split, config):
        self.counter = counter
        self.cu_seqlens_q = gl.constexpr(None) if cu_seqlens_q is None else cu_seqlens_q
        self.cu_seqlens_k = gl.constexpr(None) if cu_seqlens_k is None else cu_seqlens_k
        self.batch, self.len_q, self.len_k, self.heads, self.section = sizes
        self.head_rows, self.group = rows
        self.whole, self.together, self.parts = split if config.parts else (gl.constexpr(1),) * 3
        self.is_cut = gl.constexpr(config.parts)
        self.draws = gl.constexpr(config.draws)
        self.keys = gl.constexpr(config.keys)
        self.sequences = gl.constexpr(config.sequences)
        self.descending = gl.constexpr(config.descending)
        self.across = gl.constexpr(config.across)

    @gluon.jit
    def ends(self):
        """How many key tiles the first 1, 2, ... sequences have; one number for dense problems."""
        tiles = (self.len_k + self.keys - 1) // self.keys
        if self.sequences > 0:
            sequence = gl.arange(0, self.sequences, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
            first = gl.load(self.cu_seqlens_k + sequence, mask=sequence <= self.batch, other=0)
            last = gl.load(self.cu_seqlens_k + sequence + 1, mask=sequence < self.batch, other=0)
            last = gl.where(sequence == self.batch, self.len_k, last)
            tiles = gl.associative_scan((last - first + self.keys - 1) // self.keys, 0, _add)
        return tiles

    @gluon.jit
    def key_tiles(self, ends):
        """Key tiles of one head."""
        tiles = ends
        if self.sequences > 0:
            tiles = gl.max(ends, 0)
        return tiles

    @gluon.jit
    def n_tiles(self, key_tiles):
        """Tiles of the whole problem."""
        tiles = key_tiles * self.heads
        if self.sequences == 0:
            tiles *= self.batch
        return tiles

    @gluon.jit
    def first(self):
        """The number of the tile to do first.

        Where tiles wait for those of lower numbers it is drawn, too: programs that do not run yet must have none.
        """
        index = gl.program_id(0)
        if self.draws:
            index = self.next()
        return index

    @gluon.jit
    def next(self):
        """The number of the tile to do next."""
        index = gl.atomic_add(self.counter, 1, sem="relaxed")
        if not self.draws:
            index += gl.num_programs(0)
        return index

    @gluon.jit
    def n_units(self, n_tiles):
        """Tiles and parts of tiles that are drawn."""
        units = n_tiles
        if self.is_cut:
            units += (n_tiles - self.whole) * (gl.to_tensor(self.parts) - 1)
        return units

    @gluon.jit
    def unit(self, index, n_tiles, key_tiles, ends):
        """What is drawn as number `index`: first whole tiles, then so many tiles at a time, part by part."""
        zero = gl.to_tensor(0)
        one = gl.to_tensor(1)
        if self.is_cut:
            is_part = index >= self.whole
            over = gl.where(is_part, index - self.whole, 0)
            per_turn = gl.to_tensor(self.together) * self.parts
            first = over // per_turn * self.together
            rest = over % per_turn
            width = gl.minimum(self.together, n_tiles - self.whole - first)
            slot = first + rest % width
            number = gl.where(is_part, self.whole + slot, index)
            found = self.tile(number, key_tiles, ends, rest // width, gl.where(is_part, self.parts, one), slot)
        else:
            found = self.tile(index, key_tiles, ends, zero, one, zero)
        return found

    @gluon.jit
    def reset(self, index, n_tiles):
        """Set the counter back for the next launch: every tile is drawn once, so one block draws the last number."""
        if index == gl.num_programs(0) + n_tiles - 1:
            gl.store(self.counter, 0)

    @gluon.jit
    def tile(self, index, key_tiles, ends, part, parts, slot):
        """The index-th tile, and where its sequence's queries start."""
        all_heads = self.heads
        if self.sequences == 0:
            all_heads *= self.batch
        per_section = key_tiles * self.section
        first = index // per_section * self.section
        rest = index % per_section
        width = gl.minimum(self.section, all_heads - first)
        if self.across:
            key_tile = rest // width
            head = first + rest % width
            if self.descending:
                key_tile = key_tiles - 1 - key_tile
        else:
            key_tile = rest % key_tiles
            head = first + rest // key_tiles
        q_offset = gl.to_tensor(0)
        alive = gl.to_tensor(1)
        row = head * self.group * self.head_rows
        if self.sequences > 0:
            before = gl.where(ends <= key_tile, 1, 0)
            sequence = gl.sum(before, 0)
            key_tile -= gl.max(gl.where(before != 0, ends, 0), 0)
            q_offset = gl.load(self.cu_seqlens_q + sequence)
            k_offset = gl.load(self.cu_seqlens_k + sequence)
            after = gl.minimum(sequence + 1, self.batch)
            is_slack = sequence >= self.batch
            len_q = gl.load(self.cu_seqlens_q + after) - q_offset
            len_k = gl.where(is_slack, self.len_k, gl.load(self.cu_seqlens_k + after)) - k_offset
            row += padded_start(q_offset, sequence)
            zero = gl.to_tensor(0)
            tile = KeyTile(alive, zero, head, key_tile * self.keys, k_offset, len_k, len_q, row, part, parts, slot)
        else:
            batch = head // self.heads
            k_start = key_tile * self.keys
            head = head % self.heads
            tile = KeyTile(alive, batch, head, k_start, q_offset, self.len_k, self.len_q, row, part, parts, slot)
        return tile, q_offset


PAD = gl.constexpr(128)
"""Each packed sequence starts at a multiple of this many rows of the workspace, so that no tile holds two of them."""


@gluon.jit
def padded_start(offset, sequence):
    """Where a packed sequence starts in the workspace, given the sum of the lengths before it."""
    return (offset + sequence * PAD + (PAD - 1)) // PAD * PAD


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def no_key_tile():
    """What is posted when the work is done."""
    zero = gl.to_tensor(0)
    return KeyTile(zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero)
