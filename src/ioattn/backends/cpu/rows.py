"""Micro-kernels of the decoding worker: lanes run along the head dimension for products, along keys for the softmax.

The state of a query is row_max, row_sum, the factor that acc is due, padding to a cache line, and acc.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ioattn.backends.cpu.ir import F32, I32, Function, Module, Type, Value, Variable
from ioattn.backends.cpu.jit import Target
from ioattn.backends.cpu.softmax import Recipe
from ioattn.backends.cpu.tiles import LOG2E, NEGATIVE_ZERO, SIZES, add_log, exp2, read

STATE_WORDS = 16
"""Words in front of the acc of a query: row_max, row_sum, its factor, and padding to a cache line."""

KEYS = 4
"""Keys whose scores are summed at once; their sums then fill one vector of four."""

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


def row_scores(module: Module, target: Target, rows: int, dtype: str) -> Function:
    """The scores of `rows` queries against `count` keys, which are read and converted once for all of them.

    Keys are read one after the other, in the order of memory: four streams of them took 1.3 times as long.
    """
    f = module.function(
        f"row_scores_{rows}",
        "ptr q, i64 q_row, ptr k, i64 k_row, i64 count, i64 dim, ptr scores, i64 scores_row",
    )
    a, vector = f.args, Type("float", target.lanes)
    whole = a.count - a.count % KEYS
    for first, stop, keys in ((0, whole, KEYS), (whole, a.count, 1)):
        with f.loop(first, stop, keys) as key:
            k = a.k + key * a.k_row
            sums = [[f.variable(0.0, vector) for _ in range(keys)] for _ in range(rows)]
            for i in range(keys):
                for number in f.unrolled(a.dim // target.lanes, 4):
                    at = number * target.lanes
                    x = read(f, k + (a.k_row * i + at * SIZES[dtype]), dtype, target.lanes)
                    for r in range(rows):
                        sums[r][i].value = f.fma((a.q + (a.q_row * r + at * 4)).load(vector), x, sums[r][i].value)
            for r in range(rows):
                place = a.scores + (a.scores_row * r + key * 4)
                place.store(_four_totals(f, sums[r]) if keys == KEYS else f.total(sums[r][0].value))
    return f


def _four_totals(f: Function, sums: list[Variable]) -> Value:
    """The totals of four vectors as one vector: sums of neighbours, twice, then of halves."""
    a, b, c, d = (x.value for x in sums)
    x = _neighbours(f, _neighbours(f, a, b), _neighbours(f, c, d))
    while x.type.lanes > KEYS:
        half = x.type.lanes // 2
        x = f.shuffle(x, x, list(range(half))) + f.shuffle(x, x, list(range(half, 2 * half)))
    return x


def _neighbours(f: Function, a: Value, b: Value) -> Value:
    """Sums of two neighbours, of `a` and then of `b` within each four lanes, where a shuffle costs least."""
    lanes = a.type.lanes
    even = [operand + four + lane for four in range(0, lanes, 4) for operand in (0, lanes) for lane in (0, 2)]
    return f.shuffle(a, b, even) + f.shuffle(a, b, [lane + 1 for lane in even])


def add_values(module: Module, target: Target, rows: int, dtype: str, guarded: bool = False) -> Function:
    """acc of `rows` queries += their weights times `count` values, which are read and converted once for all of them.

    Strips of v are read whose sums stay in registers, and processors do not fetch ahead along strips. What several
    queries need takes long enough to ask on the way for the rows from `ahead` on, in the order of memory. `guarded`
    skips a weight of -0.0, which marks a masked score, for values that are not finite.
    """
    name = f"add_values_{rows}{'_guarded' if guarded else ''}"
    f = module.function(
        name,
        "ptr weights, i64 weights_row, ptr v, i64 v_row, i64 count, ptr acc, i64 acc_row, i64 vectors, ptr ahead",
    )
    a, strips, done = f.args, _Strips(f, target, rows, dtype, guarded), f.constant(0)
    whole = a.count - a.count % KEYS
    # The widest strips leave no registers for the skipping.
    for vectors in _STRIPS[target.lanes][rows][guarded:]:
        end = a.vectors - (a.vectors - done) % vectors
        with f.loop(done, end, vectors) as at, strips.sums(at, vectors) as acc:
            for first, stop, keys in ((0, whole, KEYS), (whole, a.count, 1)):
                with f.loop(first, stop, keys) as key:
                    if rows > 1:
                        strips.fetch(vectors, keys)
                    for i in range(keys):
                        strips.add(key + i, at, acc)
        done = end
    return f


class _Strips:
    """Emits the steps of `add_values`: the sums of some vectors of acc of all queries stay in registers."""

    def __init__(self, f: Function, target: Target, rows: int, dtype: str, guarded: bool):
        self.f, self.rows, self.dtype, self.guarded = f, rows, dtype, guarded
        self.vector = Type("float", target.lanes)
        self.size = SIZES[dtype] * target.lanes
        self.ahead, self.line = f.variable(f.args.ahead), f.variable(0)

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

    def add(self, key: Value, at: Value, acc: list[list[Variable]]) -> None:
        """The weights of a key times its value, from vector `at` on."""
        f, a = self.f, self.f.args
        v = a.v + (key * a.v_row + at * self.size)
        x = [read(f, v + n * self.size, self.dtype, self.vector.lanes) for n in range(len(acc[0]))]
        for r, totals in enumerate(acc):
            weight = f.constant((a.weights + (a.weights_row * r + key * 4)).load(F32), self.vector)
            for total, value in zip(totals, x, strict=True):
                added = f.fma(weight, value, total.value)
                if self.guarded:
                    added = f.select(weight.bits(self.vector.of(I32)).differs(NEGATIVE_ZERO), added, total.value)
                total.value = added

    def fetch(self, vectors: int, keys: int) -> None:
        """As many lines as a step reads; a row's end is looked for once per step, which may ask for some beyond it."""
        f, a, lines = self.f, self.f.args, vectors * self.size * keys // LINE
        place = self.ahead.value + self.line.value
        for line in range(lines):
            f.prefetch(place + line * LINE)
        after = self.line.value + lines * LINE
        inside = after < a.vectors * self.size
        self.line.value = f.select(inside, after, 0)
        self.ahead.value = f.select(inside, self.ahead.value, self.ahead.value + a.v_row)


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
