"""The forward for few queries: lanes run along the head dimension, so that keys and values are read at full width.

A task is a chunk of keys of one key/value head, for all queries that read it: the whole group of a grouped-query
problem shares each row of k and v. A task leaves row_max, row_sum and acc of its queries in the `partial` workspace;
whoever finishes the last chunk of a head merges them, in the order of the chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

from ioattn.backends.cpu import packing
from ioattn.backends.cpu.arguments import Sequence
from ioattn.backends.cpu.ir import F32, I32, I64, Function, Module, Type, Value
from ioattn.backends.cpu.jit import Target
from ioattn.backends.cpu.softmax import Recipe
from ioattn.backends.cpu.tiles import LOG2E, add_log, exp2
from ioattn.backends.cpu.worker import Worker

STATE_WORDS = 16
"""Words in front of the acc of a query in `partial`: row_max, row_sum, and padding to a cache line."""


def decode(target: Target, recipe: Recipe) -> str:
    """The IR of the worker that overwrites `out` and `lse`."""
    return str(_Decode(target, recipe).module)


@dataclass(frozen=True)
class _Row:
    """One query of one head, number `index` of those that share a key/value head."""

    seq: Sequence
    head: Value
    query: Value
    index: Value


class _Decode(Worker):
    """Builds the worker; a method per step of a task."""

    def _build_kernels(self) -> None:
        super()._build_kernels()
        module, target, recipe = self.module, self.target, self.recipe
        self.row_scores = _row_scores(module, target)
        self.row_softmax = _row_softmax(module, target, recipe)
        self.start_row = _start_row(module, target)
        self.merge_row = _merge_row(module, target, recipe.dtype)
        self.accumulate = self.row_product("accumulate")
        self.accumulate_guarded = self.row_product("accumulate_guarded", guard="a")
        self.unstage_out = packing.unstage(module, target, "unstage_out", recipe.dtype, how="divide")

    def task(self, task: Value) -> None:
        """A chunk of keys of one key/value head."""
        f, args = self.f, self.args
        number, pair = task % args.chunks, task // args.chunks
        kv_heads = args.heads // args.group
        seq, kv_head = Sequence(args, pair // kv_heads), pair % kv_heads
        rows = args.group * seq.len_q
        self._pack_queries(seq, kv_head)
        state = self._state(pair, number)
        with f.loop(0, rows) as index:
            f.call(self.start_row, state + index * self._row_bytes(), args.dim_v_padded)
        start, end = seq.key_range(f.constant(0), seq.len_q)
        chunk = number * args.chunk_keys
        first, last = f.largest(start, chunk), f.smallest(end, chunk + args.chunk_keys)
        with f.loop(first, last, args.block_keys) as k_first:
            self._block(seq, kv_head, state, k_first, f.smallest(last - k_first, args.block_keys))
        finished = f.fetch_add(args.partial + pair * 64, 1, "acq_rel")
        with f.when(finished.equals(args.chunks - 1)), f.loop(0, rows) as index:
            self._finish_row(self._row(seq, kv_head, index), self._state(pair, f.constant(0)))

    def _row(self, seq: Sequence, kv_head: Value, index: Value) -> _Row:
        return _Row(seq, kv_head * self.args.group + index // seq.len_q, index % seq.len_q, index)

    def _row_bytes(self) -> Value:
        return (self.args.dim_v_padded + STATE_WORDS) * 4

    def _state(self, pair: Value, number: Value) -> Value:
        """Where a chunk's results lie: behind one counter per key/value head, chunk after chunk."""
        args = self.args
        return args.partial + args.partial_batch + pair * args.partial_head + number * args.partial_chunk

    def _pack_queries(self, seq: Sequence, kv_head: Value) -> None:
        f, args = self.f, self.args
        row_bytes = args.dim_padded * 4
        with f.loop(0, args.group) as member:
            src = seq.query("q", kv_head * args.group + member, 0)
            dst = self.scratch.q_rows + member * seq.len_q * row_bytes
            f.call(
                self.stage_input, src, args.q_row, args.q_col, seq.len_q, args.dim, dst, row_bytes, seq.len_q,
                args.dim_padded, args.query_factor,
            )  # fmt: skip

    def _block(self, seq: Sequence, kv_head: Value, state: Value, first: Value, count: Value) -> None:
        """All queries against a block of keys."""
        f, args, scratch = self.f, self.args, self.scratch
        k, v = (seq.key(name, kv_head, first) for name in "kv")
        k_row, v_row = args.k_row, args.v_row
        if self.recipe.staged:
            k, k_row = self.stage_keys("k", k, count)
            v, v_row = self.stage_keys("v", v, count)
        scores_row = args.block_keys * 4
        with f.loop(0, args.group * seq.len_q) as index:
            q, scores = scratch.q_rows + index * args.dim_padded * 4, scratch.scores + index * scores_row
            f.call(self.row_scores, q, k, k_row, count, args.dim_padded, scores)
            self._softmax(self._row(seq, kv_head, index), scores, state + index * self._row_bytes(), first, count)
        accumulate = (
            scratch.scores, scores_row, v, v_row, state + STATE_WORDS * 4, self._row_bytes(), args.group * seq.len_q,
            count, args.dim_v_padded // self.target.lanes,
        )  # fmt: skip
        full_first, full_end = seq.full_key_range(f.constant(0), seq.len_q)
        partial = (first < full_first) | (first + count > full_end) | int(self.recipe.mask)
        scratch.found.store(f.constant(0))
        with f.when(partial):
            f.call(self.find_nonfinite, v, v_row, count, args.dim_v, scratch.found)
        guarded = scratch.found.load(I64).differs(0)
        with f.when(guarded):
            f.call(self.accumulate_guarded, *accumulate)
        with f.unless(guarded):
            f.call(self.accumulate, *accumulate)

    def _softmax(self, row: _Row, scores: Value, state: Value, first: Value, count: Value) -> None:
        f, args, scratch, seq = self.f, self.args, self.scratch, row.seq
        for name, stage in (("bias", self.recipe.bias), ("mask", self.recipe.mask)):
            if stage:
                src = args.row(name, seq.batch, row.head, row.query) + getattr(args, f"{name}_col") * first
                col, dst = getattr(args, f"{name}_col"), getattr(scratch, f"{name}_rows")
                kernel = self.stage_bias if name == "bias" else self.stage_mask
                f.call(kernel, src, 0, col, 1, count, dst, 0, 1, args.block_keys, 1.0)
        slope = (args.slopes + row.head * 4).load(F32) if "alibi" in self.recipe.terms else 0.0
        place = row.query - first
        last = f.smallest(seq.hi + place, count - 1)
        f.call(
            self.row_softmax, scores, count, state, args.dim_v_padded, seq.lo + place, last,
            place + seq.len_k - seq.len_q, args.softcap, slope, scratch.bias_rows, scratch.mask_rows,
        )  # fmt: skip

    def _finish_row(self, row: _Row, states: Value) -> None:
        """Merge the chunks of one query and write its output."""
        f, args, scratch = self.f, self.args, self.scratch
        sink = f.variable(float("-inf"), F32)
        with f.when(args.given("sinks")):
            sink.value = (args.sinks + row.head * 4).load(F32)
        lse, states = row.seq.lse(row.head, row.query), states + row.index * self._row_bytes()
        f.call(
            self.merge_row, states, args.partial_chunk, args.chunks, sink.value, scratch.out_rows, args.dim_v_padded,
            lse, scratch.row_sum,
        )  # fmt: skip
        out = row.seq.query("out", row.head, row.query)
        f.call(self.unstage_out, scratch.out_rows, 0, out, 0, args.out_col, 1, args.dim_v, scratch.row_sum, 0)


def _row_scores(module: Module, target: Target) -> Function:
    """The scores of one query against `count` keys, four keys at a time."""
    f = module.function("row_scores", "ptr q, ptr k, i64 k_row, i64 count, i64 dim, ptr scores")
    a, vector = f.args, Type("float", target.lanes)
    whole = a.count - a.count % 4
    for first, stop, keys in ((0, whole, 4), (whole, a.count, 1)):
        with f.loop(first, stop, keys) as key:
            k = a.k + key * a.k_row
            sums = [f.variable(0.0, vector) for _ in range(keys)]
            with f.loop(0, a.dim, target.lanes) as at:
                q = (a.q + at * 4).load(vector)
                for i, total in enumerate(sums):
                    total.value = f.fma(q, (k + (a.k_row * i + at * 4)).load(vector), total.value)
            for i, total in enumerate(sums):
                (a.scores + (key + i) * 4).store(f.total(total.value))
    return f


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


def _row_softmax(module: Module, target: Target, recipe: Recipe) -> Function:
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


def _start_row(module: Module, target: Target) -> Function:
    """row_max -inf, row_sum 0 and acc 0."""
    f = module.function("start_row", "ptr state, i64 acc_words")
    f.args.state.store(f.constant(float("-inf"), F32))
    (f.args.state + 4).store(f.constant(0.0, F32))
    with f.loop(0, f.args.acc_words, target.lanes) as at:
        (f.args.state + (at * 4 + STATE_WORDS * 4)).store(f.constant(0.0, Type("float", target.lanes)))
    return f


def _merge_row(module: Module, target: Target, dtype: str) -> Function:
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
