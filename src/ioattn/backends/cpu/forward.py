"""The forward: tiled attention with an online softmax, as `backends/eager.py` writes it.

A task is one block of queries of one head. It packs the block's panels of queries once, walks over the keys that its
band shows, and keeps row_max, row_sum and acc of each panel in scratch. One task alone computes a row, so the bits do
not depend on the number of threads.
"""

from __future__ import annotations

from typing import NamedTuple

from ioattn.backends.cpu import packing
from ioattn.backends.cpu.arguments import Sequence
from ioattn.backends.cpu.ir import F32, I64, Function, Module, Type, Value
from ioattn.backends.cpu.jit import Target
from ioattn.backends.cpu.softmax import Recipe, softmax_step
from ioattn.backends.cpu.tiles import LN2, LOG2E, add_log
from ioattn.backends.cpu.worker import Panel, Seen, Worker


def forward(target: Target, recipe: Recipe) -> str:
    """The IR of the worker that overwrites `out` and `lse`."""
    return str(_Forward(target, recipe).module)


class _KeyBlock(NamedTuple):
    """A block of keys and values in the form that the products read; paired values lie two rows to one."""

    first: Value
    end: Value
    k: Value
    k_row: Value
    v: Value
    v_row: Value


class _Forward(Worker):
    """Builds the worker; a method per step of a task."""

    def _build_kernels(self) -> None:
        super()._build_kernels()
        module, target, recipe = self.module, self.target, self.recipe
        self.accumulate = self.value_product("accumulate", "rescale")
        self.accumulate_guarded = self.value_product("accumulate_guarded", "rescale", guard="b")
        self.softmax_full = softmax_step(module, target, "softmax_full", recipe, partial=False)
        self.softmax_partial = softmax_step(module, target, "softmax_partial", recipe, partial=True)
        self.start_state = _start_state(module, target, recipe)
        self.finish_state = _finish_state(module, target, recipe)
        self.unstage_out = packing.unstage(module, target, "unstage_out", recipe.dtype, how="divide")

    def task(self, task: Value) -> None:
        """A block of queries of one head."""
        f, args = self.f, self.args
        head = task // args.blocks
        # The last queries see most keys under a causal band: longest first, so that no thread ends with a long task.
        block = args.blocks - 1 - task % args.blocks
        seq, head = Sequence(args, head // args.heads), head % args.heads
        first = block * args.block_rows
        rows = f.smallest(seq.len_q - first, args.block_rows)
        with f.when(rows > 0):
            panels = (rows + (self.panel_rows - 1)) // self.panel_rows
            with f.loop(0, panels) as number:
                self._start_panel(self.panel(seq, head, first, number))
            start, end = seq.key_range(first, first + rows)
            with f.loop(start, end, args.block_keys) as k_first:
                count = f.smallest(end - k_first, args.block_keys)
                keys = self._key_block(seq, head, k_first, count)
                self._note_nonfinite(seq, (first, first + rows), keys)
                with f.loop(0, panels) as number:
                    panel = self.panel(seq, head, first, number)
                    with self.seen(panel, (keys.first, keys.end)) as seen:
                        self._step(panel, keys, seen)
            with f.loop(0, panels) as number:
                self._finish_panel(self.panel(seq, head, first, number))

    def _q_tile(self, panel: Panel) -> Value:
        return self.scratch.q_tile + panel.number * self.args.dim_words * self.row_size

    def _acc(self, panel: Panel) -> Value:
        return self.scratch.acc + panel.number * self.args.dim_v_padded * self.row_size

    def _state(self, panel: Panel) -> Value:
        return self.scratch.state + panel.number * (3 * self.row_size)

    def _start_panel(self, panel: Panel) -> None:
        f, args, scratch = self.f, self.args, self.scratch
        self.pack_queries("q", panel, scratch.q_rows, self._q_tile(panel))
        sink = f.variable(float("-inf"), F32)
        with f.when(args.given("sinks")):
            sink.value = (args.sinks + panel.head * 4).load(F32)
        f.call(self.start_state, self._state(panel), self._acc(panel), args.dim_v_padded * self.panel_rows, sink.value)

    def _key_block(self, seq: Sequence, head: Value, first: Value, count: Value) -> _KeyBlock:
        """Keys and values of a block, where the products can read them."""
        f, args, scratch = self.f, self.args, self.scratch
        k, v = (seq.key(name, head // args.group, first) for name in "kv")
        k_row, v_row = args.k_row, args.v_row
        if self.recipe.staged:
            k, k_row = self.stage_keys("k", k, count)
            v, v_row = self.stage_keys("v", v, count)
        if self.recipe.paired:
            f.call(self.interleave, v, v_row, scratch.v_pairs, args.dim_v_padded * 4, count, args.dim_v_padded)
            v, v_row = scratch.v_pairs, args.dim_v_padded * 4
        return _KeyBlock(first, first + count, k, k_row, v, v_row)

    def _note_nonfinite(self, seq: Sequence, queries: tuple[Value, Value], keys: _KeyBlock) -> None:
        """Whether products of partly masked tiles must skip masked weights: 0 * NaN is not 0."""
        f, found = self.f, self.scratch.found
        found.store(f.constant(0))
        start, end = seq.full_key_range(*queries)
        partial = (keys.first < start) | (keys.end > end) | int(self.recipe.mask)
        with f.when(partial):
            f.call(self.find_nonfinite, keys.v, keys.v_row, self.depth(keys.end - keys.first), self.args.dim_v, found)

    def _step(self, panel: Panel, keys: _KeyBlock, seen: Seen) -> None:
        """One panel of queries against the keys of the block that it sees."""
        f, args, scratch = self.f, self.args, self.scratch
        at, count = seen.first - keys.first, seen.count
        self.scores(keys.k + at * keys.k_row, keys.k_row, self._q_tile(panel), count, scratch.scores, args.dim)
        if self.recipe.bias:
            self.score_tile("bias", self.stage_bias, panel, seen.first, count)
        weights = scratch.weights if self.recipe.paired else scratch.scores
        state = self._state(panel)
        softmax = (scratch.scores, weights, count, state, *self.context(panel, seen))
        with f.when(seen.partial):
            f.call(self.softmax_partial, *softmax)
        with f.unless(seen.partial):
            f.call(self.softmax_full, *softmax)
        v = keys.v + (at // 2 if self.recipe.paired else at) * keys.v_row
        accumulate = (
            v, 4, keys.v_row, weights, 0, self._acc(panel), 0, args.dim_v, self.depth(count), state + 2 * self.row_size
        )  # fmt: skip
        guarded = seen.partial & scratch.found.load(I64).differs(0)
        with f.when(guarded):
            f.call(self.accumulate_guarded, *accumulate)
        with f.unless(guarded):
            f.call(self.accumulate, *accumulate)

    def _finish_panel(self, panel: Panel) -> None:
        f, args, scratch = self.f, self.args, self.scratch
        row_bytes = args.dim_v_padded * 4
        lse = panel.seq.lse(panel.head, panel.row)
        f.call(self.finish_state, self._state(panel), lse, panel.rows)
        f.call(
            self.transpose, self._acc(panel), self.row_size, scratch.out_rows, row_bytes, args.dim_v_padded,
            self.panel_rows,
        )  # fmt: skip
        out = panel.seq.query("out", panel.head, panel.row)
        f.call(
            self.unstage_out, scratch.out_rows, row_bytes, out, args.out_row, args.out_col, panel.rows, args.dim_v,
            self._state(panel) + self.row_size, 4,
        )  # fmt: skip


def _start_state(module: Module, target: Target, recipe: Recipe) -> Function:
    """acc 0, and row_max and row_sum before the first key: a sink counts as one key whose value is zero."""
    f = module.function("start_state", "ptr state, ptr acc, i64 acc_words, float sink")
    vector, size, vectors = Type("float", target.lanes), 4 * target.lanes, recipe.vectors
    sink = f.args.sink if recipe.natural else f.args.sink * LOG2E
    row_sum = f.select(sink.equals(float("-inf")), f.constant(0.0, F32), 1.0)
    for v in range(vectors):
        (f.args.state + v * size).store(f.constant(sink, vector))
        (f.args.state + (vectors + v) * size).store(f.constant(row_sum, vector))
    with f.loop(0, f.args.acc_words, target.lanes) as at:
        (f.args.acc + at * 4).store(f.constant(0.0, vector))
    return f


def _finish_state(module: Module, target: Target, recipe: Recipe) -> Function:
    """row_max + log(row_sum) to `lse`."""
    f = module.function("finish_state", "ptr state, ptr lse, i64 rows")
    vector, size, vectors = Type("float", target.lanes), 4 * target.lanes, recipe.vectors
    for v in range(vectors):
        row_max, row_sum = ((f.args.state + (part * vectors + v) * size).load(vector) for part in range(2))
        row_max = row_max if recipe.natural else row_max * LN2
        (f.args.state + v * size).store(add_log(f, row_max, row_sum))
    with f.loop(0, f.args.rows) as row:
        (f.args.lse + row * 4).store((f.args.state + row * 4).load(F32))
    return f
