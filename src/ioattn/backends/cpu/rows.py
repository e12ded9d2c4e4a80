"""Micro-kernels of the decoding worker: lanes run along the head dimension for products, along keys for the softmax.

The state of a query is row_max, row_sum, the factor that acc is due, padding to a cache line, and acc.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ioattn.backends.cpu.ir import F32, I32, PTR, Function, Module, Type, Value, Variable
from ioattn.backends.cpu.jit import Target
from ioattn.backends.cpu.softmax import Recipe
from ioattn.backends.cpu.tiles import LOG2E, NEGATIVE_ZERO, SIZES, add_log, exp2, read_columns

STATE_WORDS = 16
"""Words in front of the acc of a query: row_max, row_sum, its factor, and padding to a cache line."""

KEYS = 4
"""Keys of a tile: whose rows one step of a kernel reads."""

LINE = 64
"""Bytes of a cache line."""

_STRIPS: dict[int, dict[int, tuple[int, ...]]] = {
    16: {4: (4, 2, 1), 1: (8, 2, 1)},
    8: {4: (2, 1), 1: (8, 2, 1)},
    4: {4: (4, 2, 1), 1: (8, 2, 1)},
}
"""Vectors of acc that stay in registers, by lanes and by queries summed at once: what is left over takes fewer."""


def fetch_rows(module: Module) -> Function:
    """Ask for the cache lines of `count` rows of `size` bytes, in the order of memory, without waiting for them."""
    f = module.function("fetch_rows", "ptr rows, i64 row, i64 count, i64 size")
    a = f.args
    with f.loop(0, a.count) as i, f.loop(0, a.size, LINE) as at:
        f.prefetch(a.rows + (a.row * i + at))
    return f


def split_columns(module: Module, target: Target) -> Function:
    """Reorder a row of fp32 as `read_columns` reads bfloat16: of every two vectors the even columns, then the odd."""
    return _reorder(module, target, "split_columns", [*range(0, 2 * target.lanes, 2), *range(1, 2 * target.lanes, 2)])


def join_columns(module: Module, target: Target) -> Function:
    """Undo `split_columns`."""
    lanes = target.lanes
    return _reorder(module, target, "join_columns", [half + i for i in range(lanes) for half in (0, lanes)])


def _reorder(module: Module, target: Target, name: str, columns: list[int]) -> Function:
    f = module.function(name, "ptr row, i64 words")
    a, vector = f.args, Type("float", target.lanes)
    with f.loop(0, a.words - a.words % len(columns), len(columns)) as at:
        low, high = a.row + at * 4, a.row + (at + target.lanes) * 4
        x, y = low.load(vector), high.load(vector)
        low.store(f.shuffle(x, y, columns[: target.lanes]))
        high.store(f.shuffle(x, y, columns[target.lanes :]))
    return f


_ORDER = "ptr starts, i64 first, i64 row, i64 tiles, i64 step, i64 apart, i64 rest, i64 ahead"
"""Which rows a kernel reads, and in which order.

A tile is a row of each of `KEYS` streams, which begin `first` bytes after the addresses at `starts`, and the next tile
lies `step` rows further on. Rows that are left (`rest`) follow the first stream's beginning. What several queries need
takes long enough to ask on the way for what lies `ahead` bytes on. A score or weight lies where its row does: from
stream to stream it is `apart` rows.
"""


def row_scores(module: Module, target: Target, rows: int, dtype: str) -> Function:
    """The scores of `rows` queries against keys that are read and converted once for all of them."""
    f = module.function(f"row_scores_{rows}", f"ptr q, i64 q_row, i64 dim, ptr scores, i64 scores_row, {_ORDER}")
    a, dots, together = f.args, _Dots(f, target, rows, dtype), KEYS // min(rows, 2)
    streams = _streams(f)
    with f.loop(0, a.tiles) as tile:
        for first in range(0, KEYS, together):
            keys = [stream + tile * a.step * a.row for stream in streams[first : first + together]]
            if rows > 1:
                for key in keys:
                    with f.loop(0, a.dim * SIZES[dtype], LINE) as at:
                        f.prefetch(key + (a.ahead + at))
            places = [a.scores + (tile * a.step + a.apart * (first + i)) * 4 for i in range(together)]
            _store_totals(f, dots.sums(keys), [place + a.scores_row * r for r in range(rows) for place in places])
    with f.loop(0, a.rest) as key:
        for r, total in enumerate(dots.sums([streams[0] + key * a.row])):
            (a.scores + (a.scores_row * r + key * 4)).store(f.total(total))
    return f


def _streams(f: Function) -> list[Value]:
    """Where the streams begin."""
    return [(f.args.starts + 8 * i).load(PTR) + f.args.first for i in range(KEYS)]


def _store_totals(f: Function, sums: list[Value], places: list[Value]) -> None:
    """The total of each vector, at its place."""
    for i in range(0, len(sums), 4):
        totals = _four_totals(f, sums[i : i + 4])
        for lane, place in enumerate(places[i : i + 4]):
            place.store(f.lane(totals, lane))


class _Dots:
    """Emits products of some keys with all queries; their sums, lane by lane, stay in registers."""

    def __init__(self, f: Function, target: Target, rows: int, dtype: str):
        self.f, self.rows, self.dtype = f, rows, dtype
        self.vector = Type("float", target.lanes)
        self.chains = 2 if rows == 1 else 1
        """Sums of a query and a key: eight additions that do not wait for each other keep two units busy."""

    def sums(self, keys: list[Value]) -> list[Value]:
        """Of query 0 with each key, then of query 1, and so on."""
        f, dim, lanes = self.f, self.f.args.dim, self.vector.lanes
        acc = [[f.variable(0.0, self.vector) for _ in range(self.chains)] for _ in range(self.rows * len(keys))]
        whole = dim - dim % (2 * lanes)
        with f.loop(0, whole, 2 * lanes) as at:
            self._add(keys, at, 2, acc)
        with f.loop(whole, dim, lanes) as at:
            self._add(keys, at, 1, acc)
        return [_sum(parts) for parts in acc]

    def _add(self, keys: list[Value], at: Value, vectors: int, acc: list[list[Variable]]) -> None:
        """The products of `vectors` vectors of columns, from column `at` on."""
        f, a, lanes = self.f, self.f.args, self.vector.lanes
        x = [read_columns(f, key + at * SIZES[self.dtype], self.dtype, lanes, vectors) for key in keys]
        for n in range(vectors):
            for r in range(self.rows):
                q = (a.q + (a.q_row * r + at * 4 + n * lanes * 4)).load(self.vector)
                for i in range(len(keys)):
                    total = acc[r * len(keys) + i][n % self.chains]
                    total.value = f.fma(q, x[i][n], total.value)


def _sum(parts: list[Variable]) -> Value:
    total = parts[0].value
    for part in parts[1:]:
        total = total + part.value
    return total


def _four_totals(f: Function, sums: list[Value]) -> Value:
    """The totals of four vectors as one vector: sums of neighbours, twice, then of halves."""
    a, b, c, d = sums
    x = _neighbours(f, _neighbours(f, a, b), _neighbours(f, c, d))
    while x.type.lanes > 4:
        half = x.type.lanes // 2
        x = f.shuffle(x, x, list(range(half))) + f.shuffle(x, x, list(range(half, 2 * half)))
    return x


def _neighbours(f: Function, a: Value, b: Value) -> Value:
    """Sums of two neighbours, of `a` and then of `b` within each four lanes, where a shuffle costs least."""
    lanes = a.type.lanes
    even = [operand + four + lane for four in range(0, lanes, 4) for operand in (0, lanes) for lane in (0, 2)]
    return f.shuffle(a, b, even) + f.shuffle(a, b, [lane + 1 for lane in even])


def add_values(module: Module, target: Target, rows: int, dtype: str, guarded: bool = False) -> Function:
    """acc of `rows` queries += their weights times values that are read and converted once for all of them.

    Strips of v are read whose sums stay in registers. `guarded` skips a weight of -0.0, which marks a masked score, for
    values that are not finite. For several queries the streams must be neighbours: they read in the order of memory.
    """
    f = module.function(
        f"add_values_{rows}{'_guarded' if guarded else ''}",
        f"ptr weights, i64 weights_row, ptr acc, i64 acc_row, i64 vectors, {_ORDER}",
    )
    a, streams, done = f.args, _streams(f), f.constant(0)
    strips = _Strips(f, target, rows, dtype, guarded, streams[0] + a.ahead)
    # Wider strips leave no registers for the skipping.
    for vectors in [n for n in _STRIPS[target.lanes][rows] if n <= 2 or not guarded]:
        end = a.vectors - (a.vectors - done) % vectors
        with f.loop(done, end, vectors) as at, strips.sums(at, vectors) as acc:
            with f.loop(0, a.tiles) as tile:
                if rows > 1:
                    strips.fetch(vectors)
                    for i in range(KEYS):
                        strips.add(streams[0] + (tile * KEYS + i) * a.row, tile * KEYS + i, at, acc)
                else:
                    values = [stream + tile * a.step * a.row for stream in streams]
                    strips.fetch_strip(values, at + vectors, vectors)
                    for i, value in enumerate(values):
                        strips.add(value, tile * a.step + a.apart * i, at, acc)
            with f.loop(0, a.rest) as key:
                strips.add(streams[0] + key * a.row, key, at, acc)
        done = end
    return f


class _Strips:
    """Emits the steps of `add_values`: the sums of some vectors of acc of all queries stay in registers."""

    def __init__(self, f: Function, target: Target, rows: int, dtype: str, guarded: bool, ahead: Value):
        self.f, self.rows, self.dtype, self.guarded = f, rows, dtype, guarded
        self.vector = Type("float", target.lanes)
        self.size = SIZES[dtype] * target.lanes
        self.ahead, self.line = f.variable(ahead), f.variable(0)

    @contextmanager
    def sums(self, at: Value, vectors: int) -> Iterator[list[list[Variable]]]:
        """acc from vector `at` on, which the block adds to."""
        f, a, size = self.f, self.f.args, 4 * self.vector.lanes
        places = [[a.acc + (a.acc_row * r + (at + n) * size) for n in range(vectors)] for r in range(self.rows)]
        acc = [[f.variable(place.load(self.vector)) for place in row] for row in places]
        yield acc
        for row, totals in zip(places, acc, strict=True):
            for place, total in zip(row, totals, strict=True):
                place.store(total.value)

    def add(self, value: Value, key: Value, at: Value, acc: list[list[Variable]]) -> None:
        """The row at `value`, from vector `at` on, times the weights of number `key`."""
        f, a = self.f, self.f.args
        x = read_columns(f, value + at * self.size, self.dtype, self.vector.lanes, len(acc[0]))
        for r, totals in enumerate(acc):
            weight = f.constant((a.weights + (a.weights_row * r + key * 4)).load(F32), self.vector)
            for total, columns in zip(totals, x, strict=True):
                added = f.fma(weight, columns, total.value)
                if self.guarded:
                    added = f.select(weight.bits(self.vector.of(I32)).differs(NEGATIVE_ZERO), added, total.value)
                total.value = added

    def fetch_strip(self, values: list[Value], at: Value, vectors: int) -> None:
        """Ask for a strip of some rows."""
        for value in values:
            for line in range(0, vectors * self.size, LINE):
                self.f.prefetch(value + (at * self.size + line))

    def fetch(self, vectors: int) -> None:
        """As many lines as a tile's strip has; a row's end is looked for once per tile, which may ask beyond it."""
        f, a, size = self.f, self.f.args, vectors * self.size * KEYS
        place, after = self.ahead.value + self.line.value, self.line.value + size
        for line in range(0, size, LINE):
            f.prefetch(place + line)
        inside = after < a.vectors * self.size
        self.line.value = f.select(inside, after, 0)
        self.ahead.value = f.select(inside, self.ahead.value, self.ahead.value + a.row)


class _RowScores:
    """Reads the scores of one query; lanes are keys."""

    def __init__(self, f: Function, target: Target, recipe: Recipe):
        self.f, self.recipe = f, recipe
        self.vector, self.words = Type("float", target.lanes), Type("i32", target.lanes)
        # Any bound beyond the block says the same as its edge, and fits 32 bits.
        edges = (f.smallest(f.largest(x, -1), f.args.count).to(I32) for x in (f.args.first, f.args.last))
        self.first, self.last = (f.constant(edge, self.words) for edge in edges)

    def _keys(self, at: Value) -> Value:
        return self.f.lane_numbers(self.words.lanes) + self.f.constant(at.to(I32), self.words)

    def place(self, at: Value) -> Value:
        """The address of the score of key `at`."""
        return self.f.args.scores + at * 4

    def visible(self, at: Value) -> Value:
        """Which of the keys from `at` on the query sees."""
        keys = self._keys(at)
        seen = (keys >= self.first) & (keys <= self.last)
        return seen & (self.f.args.mask + at * 4).load(self.words).differs(0) if self.recipe.mask else seen

    def finished(self, at: Value) -> Value:
        """The scores from `at` on after all terms."""
        f, args, distance = self.f, self.f.args, None
        if "alibi" in self.recipe.terms:
            distance = f.magnitude(f.constant(args.diagonal.to(I32), self.words) - self._keys(at)).to(F32)
        scalars = {"softcap": args.softcap, "alibi": args.slope}
        operands = tuple(
            (args.bias + at * 4).load(self.vector) if name == "bias" else f.constant(scalars[name], self.vector)
            for name in self.recipe.terms
        )
        return self.recipe.formula.step(self.place(at).load(self.vector), distance, operands)


_ROW_SOFTMAX = (
    "ptr scores, i64 count, ptr state, i64 first, i64 last, i64 diagonal, "
    "float softcap, float slope, ptr bias, ptr mask"
)


def row_softmax(module: Module, target: Target, recipe: Recipe) -> Function:
    """One step of the online softmax of one query: scores become weights, row_max and row_sum move on.

    The factor for acc is left in the state, for `move_on`. Keys `first` to `last` of the block are visible; key j is
    abs(diagonal - j) away.
    """
    f = module.function("row_softmax", _ROW_SOFTMAX)
    a, row, lanes = f.args, _RowScores(f, target, recipe), target.lanes
    largest = f.variable(float("-inf"), row.vector)
    with f.loop(0, a.count, lanes) as at:
        x = f.select(row.visible(at), row.finished(at), float("-inf"))
        if recipe.terms:
            row.place(at).store(x)
        largest.value = f.largest(x, largest.value)
    row_max = a.state.load(F32)
    new_max = f.variable(row_max)
    for lane in range(lanes):
        new_max.value = f.largest(f.lane(largest.value, lane), new_max.value)
    finite = f.select(new_max.value.equals(float("-inf")), f.constant(0.0, F32), new_max.value)
    rescale = exp2(f, (row_max - finite) * LOG2E)
    total = f.variable(0.0, row.vector)
    with f.loop(0, a.count, lanes) as at:
        x = exp2(f, (row.place(at).load(row.vector) - finite) * LOG2E)
        x = f.select(row.visible(at), x, -0.0)
        row.place(at).store(x)
        total.value = total.value + x
    a.state.store(new_max.value)
    row_sum = a.state + 4
    row_sum.store(f.fma(row_sum.load(F32), rescale, f.total(total.value)))
    (a.state + 8).store(rescale)
    return f


def move_on(module: Module, target: Target) -> Function:
    """acc of one query = acc times the factor in the state + the block's sum, which becomes zero."""
    f = module.function("move_on", "ptr state, ptr block, i64 acc_words")
    a, vector = f.args, Type("float", target.lanes)
    rescale = f.constant((a.state + 8).load(F32), vector)
    with f.loop(0, a.acc_words, target.lanes) as at:
        place, block = a.state + (at * 4 + STATE_WORDS * 4), a.block + at * 4
        place.store(f.fma(place.load(vector), rescale, block.load(vector)))
        block.store(f.constant(0.0, vector))
    return f


def start_row(module: Module, target: Target) -> Function:
    """row_max -inf, row_sum 0, acc 0, and the first block's sum 0."""
    f = module.function("start_row", "ptr state, ptr block, i64 acc_words")
    a, zeros = f.args, f.constant(0.0, Type("float", target.lanes))
    a.state.store(f.constant(float("-inf"), F32))
    (a.state + 4).store(f.constant(0.0, F32))
    with f.loop(0, a.acc_words, target.lanes) as at:
        (a.state + (at * 4 + STATE_WORDS * 4)).store(zeros)
        (a.block + at * 4).store(zeros)
    return f


def merge_row(module: Module, target: Target, dtype: str) -> Function:
    """Chunks of one query become its acc, row_sum and lse; a sink counts as one chunk whose value is zero."""
    f = module.function(
        "merge_row",
        ("ptr states, i64 step, i64 chunks, float sink, ptr acc, i64 acc_words, ptr lse, ptr row_sum"),
    )
    a, vector = f.args, Type("float", target.lanes)
    row_max = f.variable(a.sink)
    with f.loop(0, a.chunks) as chunk:
        row_max.value = f.largest((a.states + chunk * a.step).load(F32), row_max.value)
    finite = f.select(row_max.value.equals(float("-inf")), f.constant(0.0, F32), row_max.value)
    row_sum = f.variable(exp2(f, (a.sink - finite) * LOG2E))
    with f.loop(0, a.acc_words, target.lanes) as at:
        (a.acc + at * 4).store(f.constant(0.0, vector))
    with f.loop(0, a.chunks) as chunk:
        state = a.states + chunk * a.step
        weight = exp2(f, (state.load(F32) - finite) * LOG2E)
        row_sum.value = f.fma(weight, (state + 4).load(F32), row_sum.value)
        with f.loop(0, a.acc_words, target.lanes) as at:
            place = a.acc + at * 4
            part = (state + (at * 4 + STATE_WORDS * 4)).load(vector)
            place.store(f.fma(weight, part, place.load(vector)))
    total = row_sum.value
    a.row_sum.store(total)
    a.lse.store(add_log(f, row_max.value, total))
    return f
