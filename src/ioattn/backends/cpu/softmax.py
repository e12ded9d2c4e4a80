"""What happens to a tile of scores between the matrix products: terms, mask, softmax, and the same backwards.

A tile is S^T: row j of it holds the scores of one key for all queries of the panel. Scores reach these kernels as the
product left them; `Recipe` says what is in them already. Exponentials are powers of two, so somewhere a score meets
log2(e).
"""

from __future__ import annotations

from typing import NamedTuple

from ioattn.backends.cpu.ir import F32, I32, Function, Module, Type, Value
from ioattn.backends.cpu.jit import Target
from ioattn.backends.cpu.tiles import LOG2E, exp2, pack_pair, tanh, to_bfloat_bits
from ioattn.compose import Formula, fold
from ioattn.scores import ORDER

UNBOUNDED = 2**30
"""Stands for no bound of the band: further away than any key, and safe to add a lane's number to."""

_CONTEXT = "i64 lo, i64 hi, i64 limit, i64 diagonal, float factor, float softcap, float slope, ptr bias, ptr mask"
"""What a tile needs to know of its place: lane r sees rows lo + r to hi + r, as far as `limit`, the last row that any
query sees, and is `diagonal` + r - j away from row j."""


class Recipe(NamedTuple):
    """What a worker is compiled for; everything else is a run-time argument.

    `vectors` is the width of a query panel. `paired` products read bfloat16 as it is, others fp32; `staged` copies keys
    and values to scratch first, because of their type or their strides. Scores are in `natural` units, or carry log2(e)
    from the start: that saves an instruction, costs the last bit and has no room for a bias of -3.4e38. Keys of a cache
    may be `paged`; a `tree` is a mask of its last keys.
    """

    dtype: str
    vectors: int
    paired: bool
    staged: bool
    natural: bool
    terms: tuple[str, ...] = ()
    bias: str | None = None
    mask: bool = False
    dbias: bool = False
    paged: bool = False
    tree: bool = False

    @property
    def formula(self) -> Formula:
        """The terms as one function on vectors."""
        return fold([term for term in ORDER if term.name in self.terms], {"tanh": tanh})

    @property
    def scaled_queries(self) -> bool:
        """Whether queries are multiplied by the scale when they are packed; pairs keep their bits instead."""
        return not self.paired


class _ScoreTile:
    """Reads a tile: which scores are visible, and what they become."""

    def __init__(self, f: Function, target: Target, recipe: Recipe, partial: bool):
        self.f, self.target, self.recipe, self.partial = f, target, recipe, partial
        self.vector = Type("float", target.lanes)
        self.words = Type("i32", target.lanes)
        self.size, self.row_size = 4 * target.lanes, 4 * target.lanes * recipe.vectors
        self.formula = recipe.formula
        # Without terms the scale of paired scores, which is positive, can wait for the exponential.
        self.scales_later = recipe.paired and not recipe.natural
        self.rewrites = bool(recipe.terms) or (recipe.paired and recipe.natural)
        self.lanes = [f.lane_numbers(target.lanes) + v * target.lanes for v in range(recipe.vectors)]
        self.factor = f.constant(f.args.factor, self.vector)
        operands = {"softcap": f.args.softcap, "alibi": f.args.slope}
        self.scalars = {name: f.constant(x, self.vector) for name, x in operands.items() if name in recipe.terms}

        def bounds(x: Value) -> list[Value]:
            return [lanes + f.constant(x.to(I32), self.words) for lanes in self.lanes]

        self.alive: list[Value] | None = None
        if partial:
            self.first = bounds(f.args.lo)
            # Lanes without a query must not see what no query sees: a NaN there would reach sums over queries.
            self.last = [f.smallest(x, f.constant(f.args.limit.to(I32), self.words)) for x in bounds(f.args.hi)]
        if "alibi" in recipe.terms:
            self.diagonal = bounds(f.args.diagonal)

    def at(self, row: Value, v: int) -> Value:
        """The byte offset of vector `v` of a row."""
        return row * self.row_size + v * self.size

    def visible(self, row: Value, v: int) -> Value | None:
        """Which lanes see the row's key; None in a tile where all do."""
        if not self.partial:
            return None
        key = self.f.constant(row.to(I32), self.words)
        seen = (key >= self.first[v]) & (key <= self.last[v])
        if self.alive is not None:
            seen = seen & self.alive[v]
        if self.recipe.mask:
            seen = seen & (self.f.args.mask + self.at(row, v)).load(self.words).differs(0)
        return seen

    def masked(self, x: Value, row: Value, v: int, hidden: float) -> Value:
        seen = self.visible(row, v)
        return x if seen is None else self.f.select(seen, x, hidden)

    def raw(self, product: Value) -> Value:
        """scale * Q K^T, times log2(e) unless the recipe is natural."""
        return product if self.recipe.scaled_queries else product * self.factor

    def reach(self, raw: Value, row: Value, v: int) -> Value:
        """The score after all terms."""
        return self.formula.step(raw, self._distance(row, v), self._operands(row, v))

    def exponential(self, score: Value, shift: Value) -> Value:
        """exp(score - shift)."""
        x = score - shift
        return exp2(self.f, x * LOG2E if self.recipe.natural else x)

    def dreach(self, dscore: Value, raw: Value, row: Value, v: int) -> Value:
        """The gradient of scale * Q K^T from that of the score."""
        return self.formula.dstep(dscore, raw, self._distance(row, v), self._operands(row, v))

    def _distance(self, row: Value, v: int) -> Value | None:
        if "alibi" not in self.recipe.terms:
            return None
        return self.f.magnitude(self.diagonal[v] - self.f.constant(row.to(I32), self.words)).to(F32)

    def _operands(self, row: Value, v: int) -> tuple[Value, ...]:
        bias = {"bias": (self.f.args.bias + self.at(row, v)).load(self.vector)} if "bias" in self.recipe.terms else {}
        values = self.scalars | bias
        return tuple(values[name] for name in self.recipe.terms)


def softmax_step(module: Module, target: Target, name: str, recipe: Recipe, partial: bool) -> Function:
    """One step of the online softmax: scores become `weights`, and `state` moves on.

    `state` holds row_max, row_sum and the factor by which earlier results shrink, a panel each. fp32 weights overwrite
    the scores; paired ones go two keys to a word.
    """
    f = module.function(name, f"ptr scores, ptr weights, i64 count, ptr state, {_CONTEXT}")
    tile, vectors = _ScoreTile(f, target, recipe, partial), range(recipe.vectors)
    state = [[(f.args.state + (part * tile.row_size + v * tile.size)) for v in vectors] for part in range(3)]
    new_max = _tile_max(tile)
    row_max = [place.load(tile.vector) for place in state[0]]
    if tile.scales_later:
        new_max = [x * tile.factor for x in new_max]
    new_max = [f.largest(a, b) for a, b in zip(new_max, row_max, strict=True)]
    # A row that has seen nothing has row_max -inf; -inf - -inf would be NaN.
    finite = [f.select(x.equals(float("-inf")), f.constant(0.0, x.type), x) for x in new_max]
    rescale = [tile.exponential(old, new) for old, new in zip(row_max, finite, strict=True)]
    sums = _tile_weights(tile, finite)
    for v in vectors:
        state[0][v].store(new_max[v])
        state[1][v].store(f.fma(state[1][v].load(tile.vector), rescale[v], sums[v]))
        state[2][v].store(rescale[v])
    return f


def _tile_max(tile: _ScoreTile) -> list[Value]:
    """The largest score of each lane; what changes on the way is written back."""
    f, scores, rewrite = tile.f, tile.f.args.scores, tile.rewrites
    largest = [f.variable(float("-inf"), tile.vector) for _ in range(tile.recipe.vectors)]
    with f.loop(0, f.args.count) as row:
        for v, found in enumerate(largest):
            place = scores + tile.at(row, v)
            x = place.load(tile.vector)
            if rewrite:
                x = tile.reach(tile.raw(x), row, v)
            x = tile.masked(x, row, v, float("-inf"))
            if rewrite:
                place.store(x)
            found.value = f.largest(x, found.value)
    return [found.value for found in largest]


def _tile_weights(tile: _ScoreTile, row_max: list[Value]) -> list[Value]:
    """Write the weights and return their sums by lane."""
    f = tile.f
    sums = [f.variable(0.0, tile.vector) for _ in row_max]
    negated = [-x for x in row_max]

    def weight(row: Value, v: int) -> Value:
        x = (f.args.scores + tile.at(row, v)).load(tile.vector)
        late = tile.scales_later
        x = exp2(f, f.fma(x, tile.factor, negated[v])) if late else tile.exponential(x, row_max[v])
        x = tile.masked(x, row, v, -0.0)
        sums[v].value = sums[v].value + x
        return x

    if not tile.recipe.paired:
        with f.loop(0, f.args.count) as row:
            for v in range(len(sums)):
                (f.args.scores + tile.at(row, v)).store(weight(row, v))
        return [x.value for x in sums]
    even = f.args.count - f.args.count % 2
    with f.loop(0, even, 2) as row:
        for v in range(len(sums)):
            _store_pair(tile, row, v, weight(row, v), weight(row + 1, v))
    with f.loop(even, f.args.count) as row:
        for v in range(len(sums)):
            _store_pair(tile, row, v, weight(row, v), f.constant(-0.0, tile.vector))
    return [x.value for x in sums]


def _store_pair(tile: _ScoreTile, row: Value, v: int, low: Value, high: Value) -> None:
    (tile.f.args.weights + tile.at(row // 2, v)).store(pack_pair(tile.f, low, high, tile.target))


def dsoftmax_step(module: Module, target: Target, name: str, recipe: Recipe, partial: bool) -> Function:
    """Scores become weights P, and dP becomes dS = P * (dP - delta), carried back through the terms.

    `state` holds lse (in base 2 unless natural) and delta, a panel each. fp32 results overwrite their sources; paired
    ones go to `weight_rows` and `dscore_rows`, pairs along the queries, and `dscore_pairs`, pairs along the keys. The
    gradient before the terms goes to `dbias`, where a bias wants it.
    """
    outputs = "ptr weight_rows, ptr dscore_rows, ptr dscore_pairs, ptr dbias"
    f = module.function(name, f"ptr scores, ptr dscores, i64 count, ptr state, {_CONTEXT}, {outputs}")
    tile = _ScoreTile(f, target, recipe, partial)
    step = _GradientStep(tile)
    if not recipe.paired:
        with f.loop(0, f.args.count) as row:
            for v in range(recipe.vectors):
                weight, dscore = step.at(row, v)
                (f.args.scores + tile.at(row, v)).store(weight)
                (f.args.dscores + tile.at(row, v)).store(dscore)
        return f
    even = f.args.count - f.args.count % 2
    with f.loop(0, even, 2) as row:
        for v in range(recipe.vectors):
            step.store_pair(row, v, whole=True)
    with f.loop(even, f.args.count) as row:
        for v in range(recipe.vectors):
            step.store_pair(row, v, whole=False)
    return f


class _GradientStep:
    """The body of `dsoftmax_step` for one vector of a row."""

    def __init__(self, tile: _ScoreTile):
        self.tile, f = tile, tile.f
        vectors = range(tile.recipe.vectors)
        self.lse = [(f.args.state + v * tile.size).load(tile.vector) for v in vectors]
        # A query that saw nothing takes part in nothing, whatever gradient arrives at it.
        tile.alive = [x.differs(float("inf")) for x in self.lse]
        self.delta = [(f.args.state + (tile.row_size + v * tile.size)).load(tile.vector) for v in vectors]

    def at(self, row: Value, v: int) -> tuple[Value, Value]:
        tile, f = self.tile, self.tile.f
        product, dweight = ((x + tile.at(row, v)).load(tile.vector) for x in (f.args.scores, f.args.dscores))
        raw = tile.raw(product)
        if tile.scales_later:
            weight = exp2(f, f.fma(product, tile.factor, -self.lse[v]))
        else:
            weight = tile.exponential(tile.reach(raw, row, v), self.lse[v])
        weight = tile.masked(weight, row, v, -0.0)
        dscore = weight * (dweight - self.delta[v])
        if tile.recipe.dbias:
            (f.args.dbias + tile.at(row, v)).store(tile.masked(dscore, row, v, 0.0))
        if tile.recipe.terms:
            dscore = tile.dreach(dscore, raw, row, v)
        if tile.partial:
            # Adding 0.0 turns a visible -0.0 into 0.0: the sign of zero is the mark of a masked score.
            dscore = tile.masked(dscore + 0.0, row, v, -0.0)
        return weight, dscore

    def store_pair(self, row: Value, v: int, whole: bool) -> None:
        """Rows `row` and, if `whole`, `row + 1`."""
        tile, f, args = self.tile, self.tile.f, self.tile.f.args
        nothing = f.constant(-0.0, tile.vector)
        dscores = []
        for at in (row, row + 1) if whole else (row,):
            weight, dscore = self.at(at, v)
            for place, x in ((args.weight_rows, weight), (args.dscore_rows, dscore)):
                (place + (at * (tile.row_size // 2) + v * (tile.size // 2))).store(to_bfloat_bits(f, x, tile.target))
            dscores.append(dscore)
        pair = pack_pair(f, dscores[0], dscores[1] if whole else nothing, tile.target)
        (args.dscore_pairs + tile.at(row // 2, v)).store(pair)
