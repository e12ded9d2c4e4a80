"""Micro-kernels of the decoding worker: lanes run along the head dimension for products, along keys for the softmax.

The state of a query is row_max, row_sum, padding to a cache line, and acc.
"""

from __future__ import annotations

from ioattn.backends.cpu.ir import F32, I32, Function, Module, Type, Value, Variable
from ioattn.backends.cpu.jit import Target
from ioattn.backends.cpu.softmax import Recipe
from ioattn.backends.cpu.tiles import LOG2E, SIZES, add_log, exp2, read

STATE_WORDS = 16
"""Words in front of the acc of a query: row_max, row_sum, and padding to a cache line."""

KEYS = 4
"""Keys whose scores are summed at once; their sums then fill one vector of four."""


def row_scores(module: Module, target: Target, rows: int, dtype: str) -> Function:
    """The scores of `rows` queries against `count` keys, which are read and converted once for all of them.

    Keys are read in memory's order, one after the other: processors then fetch ahead by themselves.
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
                with f.loop(0, a.dim, target.lanes) as at:
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
    "ptr scores, i64 count, ptr state, i64 acc_words, i64 first, i64 last, i64 diagonal, "
    "float softcap, float slope, ptr bias, ptr mask"
)


def row_softmax(module: Module, target: Target, recipe: Recipe) -> Function:
    """One step of the online softmax of one query: scores become weights, row_max, row_sum and acc move on.

    Keys `first` to `last` of the block are visible; key j is abs(diagonal - j) away.
    """
    f = module.function("row_softmax", _ROW_SOFTMAX)
    a, row, lanes = f.args, _RowScores(f, target, recipe), target.lanes
    largest = f.variable(float("-inf"), row.vector)
    with f.loop(0, a.count, lanes) as at:
        x = f.select(row.visible(at), row.finished(at), float("-inf"))
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
    with f.loop(0, a.acc_words, lanes) as at:
        place = a.state + (at * 4 + STATE_WORDS * 4)
        place.store(place.load(row.vector) * rescale)
    return f


def start_row(module: Module, target: Target) -> Function:
    """row_max -inf, row_sum 0 and acc 0."""
    f = module.function("start_row", "ptr state, i64 acc_words")
    f.args.state.store(f.constant(float("-inf"), F32))
    (f.args.state + 4).store(f.constant(0.0, F32))
    with f.loop(0, f.args.acc_words, target.lanes) as at:
        (f.args.state + (at * 4 + STATE_WORDS * 4)).store(f.constant(0.0, Type("float", target.lanes)))
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
