"""The forward: tiled attention with an online softmax, as `backends/eager.py` writes it.

A task is one block of queries of one head. It packs the block's panels of queries once, walks over the keys its band
shows, and keeps row_max, row_sum and acc of each panel in scratch: one task alone computes a row, so that the bits do
not depend on the number of threads.
"""

from __future__ import annotations

from ioattn.backends.cpu import packing
from ioattn.backends.cpu.arguments import Arguments, Scratch, Sequence, clamped
from ioattn.backends.cpu.ir import F32, I32, I64, PTR, Function, Module, Type, Value
from ioattn.backends.cpu.jit import ENTRY, Target
from ioattn.backends.cpu.softmax import UNBOUNDED, Recipe, softmax_step
from ioattn.backends.cpu.tiles import LN2, LOG2E, Layout, log2, product, tile_of


class Kernels:
    """The micro-kernels that every worker calls, built when first used."""

    def __init__(self, target: Target, recipe: Recipe):
        self.module, self.target, self.recipe = Module(), target, recipe
        self.tile = tile_of(target, recipe.vectors)
        self.panel_rows = target.lanes * recipe.vectors
        self.row_size = 4 * self.panel_rows
        self.q_cell = 2 if recipe.paired else 4
        self.stage_input = packing.stage(self.module, target, "stage_input", recipe.dtype, raw=recipe.paired)
        self.transpose = packing.transpose(self.module, target, "transpose")
        self.find_nonfinite = packing.find_nonfinite(self.module, target, "find_nonfinite", recipe.paired)
        if recipe.paired:
            self.interleave = packing.interleave(self.module, target, "interleave")
        panels = Layout(a_step=4, b_step=self.row_size, c_row=self.row_size)
        self.key_product = product(
            self.module, target, "key_product", self.tile, panels, start="zero", paired=recipe.paired
        )
        if recipe.bias:
            self.stage_bias = packing.stage(self.module, target, "stage_bias", recipe.bias)
        if recipe.mask:
            self.stage_mask = packing.stage(self.module, target, "stage_mask", "bool")
            self.survey = survey(self.module, target)

    def value_product(self, name: str, start: str, guard: str = "") -> Function:
        """acc^T += V^T weights: rows of V are columns of the broadcast operand."""
        layout = Layout(a_row=4, b_step=self.row_size, c_row=self.row_size)
        return product(
            self.module, self.target, name, self.tile, layout, start=start, paired=self.recipe.paired, guard=guard
        )


def survey(module: Module, target: Target) -> Function:
    """Whether a mask tile hides a score (`found` bit 0) and whether it shows one (bit 1)."""
    f = module.function("survey", tile=PTR, words=I64, found=PTR)
    vector = Type("i32", target.lanes)
    seen = [f.variable(f.constant(0, Type("i1", target.lanes))) for _ in range(2)]
    with f.loop(0, f.args.words, target.lanes) as at:
        shown = (f.args.tile + at * 4).load(vector).differs(0)
        for flags, found in zip(seen, (shown ^ f.constant(1, shown.type), shown), strict=True):
            flags.value = flags.value | found
    hidden, shown = (f.convert("zext", f.any(flags.value), I64) for flags in seen)
    f.args.found.store(hidden | (shown << 1))
    return f


def start_state(module: Module, target: Target, vectors: int) -> Function:
    """acc 0, and row_max and row_sum before the first key: a sink counts as one key whose value is zero."""
    f = module.function("start_state", state=PTR, acc=PTR, acc_words=I64, sink=F32)
    vector, size = Type("float", target.lanes), 4 * target.lanes
    sink = f.args.sink * LOG2E
    row_sum = f.select(sink.equals(float("-inf")), f.constant(0.0, F32), 1.0)
    for v in range(vectors):
        (f.args.state + v * size).store(f.constant(sink, vector))
        (f.args.state + (vectors + v) * size).store(f.constant(row_sum, vector))
    with f.loop(0, f.args.acc_words, target.lanes) as at:
        (f.args.acc + at * 4).store(f.constant(0.0, vector))
    return f


def finish_state(module: Module, target: Target, vectors: int) -> Function:
    """1 / row_sum to `factors` (0 for a row that saw nothing), and row_max + log(row_sum) to `lse`."""
    f = module.function("finish_state", state=PTR, factors=PTR, lse=PTR, rows=I64)
    vector, size = Type("float", target.lanes), 4 * target.lanes
    for v in range(vectors):
        row_max, row_sum = ((f.args.state + (part * vectors + v) * size).load(vector) for part in range(2))
        inverse = 1.0 / row_sum
        (f.args.factors + v * size).store(f.select(row_sum.equals(0.0), f.constant(0.0, vector), inverse))
        (f.args.state + v * size).store((row_max + log2(f, row_sum)) * LN2)
    with f.loop(0, f.args.rows) as row:
        (f.args.lse + row * 4).store((f.args.state + row * 4).load(F32))
    return f


def forward(target: Target, recipe: Recipe) -> str:
    """The IR of the worker that overwrites `out` and `lse`."""
    return str(_Forward(target, recipe).module)


class _Forward(Kernels):
    """Builds the worker; a method per step of a task."""

    def __init__(self, target: Target, recipe: Recipe):
        super().__init__(target, recipe)
        module, vectors = self.module, recipe.vectors
        self.accumulate = self.value_product("accumulate", "rescale")
        self.accumulate_guarded = self.value_product("accumulate_guarded", "rescale", guard="b")
        self.softmax_full = softmax_step(module, target, "softmax_full", recipe, partial=False)
        self.softmax_partial = softmax_step(module, target, "softmax_partial", recipe, partial=True)
        self.start_state, self.finish_state = (make(module, target, vectors) for make in (start_state, finish_state))
        self.unstage_out = packing.unstage(module, target, "unstage_out", recipe.dtype)
        self.f = module.function(ENTRY, exported=True, block=PTR)
        self.args = Arguments(self.f)
        self.scratch: Scratch = self.args.scratch()
        with self.f.tasks(self.args.slot("task"), self.args.last_task) as task:
            self._task(task)

    def _task(self, task: Value) -> None:
        f, args = self.f, self.args
        head_index = task // args.blocks
        # The last queries see most keys under a causal band: longest first, so that no thread ends with a long task.
        block = args.blocks - 1 - task % args.blocks
        seq, head = Sequence(args, head_index // args.heads), head_index % args.heads
        first = block * args.block_rows
        rows = f.smallest(seq.len_q - first, args.block_rows)
        with f.when(rows > 0):
            panels = (rows + (self.panel_rows - 1)) // self.panel_rows
            with f.loop(0, panels) as panel:
                self._start_panel(seq, head, first, panel)
            start, end = seq.key_range(first, first + rows)
            with f.loop(start, end, args.block_keys) as k_first:
                count = f.smallest(end - k_first, args.block_keys)
                keys = self._key_block(seq, head, (first, first + rows), (k_first, count))
                with f.loop(0, panels) as panel:
                    self._step(seq, head, keys, first + panel * self.panel_rows, panel)
            with f.loop(0, panels) as panel:
                self._finish_panel(seq, head, first + panel * self.panel_rows, panel)

    def _panel_rows_from(self, seq: Sequence, row: Value) -> Value:
        return self.f.smallest(seq.len_q - row, self.panel_rows)

    def q_tile(self, panel: Value) -> Value:
        return self.scratch.q_tile + panel * self.args.dim_padded * (self.q_cell * self.panel_rows)

    def acc(self, panel: Value) -> Value:
        return self.scratch.acc + panel * self.args.dim_v_padded * self.row_size

    def state(self, panel: Value) -> Value:
        return self.scratch.state + panel * (3 * self.row_size)

    def _start_panel(self, seq: Sequence, head: Value, first: Value, panel: Value) -> None:
        f, args, scratch = self.f, self.args, self.scratch
        row = first + panel * self.panel_rows
        row_bytes = args.dim_padded * self.q_cell
        f.call(
            self.stage_input, seq.query("q", head, row), args.q_row, args.q_col, self._panel_rows_from(seq, row),
            args.dim, scratch.q_rows, row_bytes, self.panel_rows, args.dim_padded, args.query_factor,
        )  # fmt: skip
        words = row_bytes // 4
        f.call(self.transpose, scratch.q_rows, row_bytes, self.q_tile(panel), self.row_size, self.panel_rows, words)
        sink = f.variable(float("-inf"), F32)
        with f.when(args.given("sinks")):
            sink.value = (args.sinks + head * 4).load(F32)
        f.call(
            self.start_state, self.state(panel), self.acc(panel), args.dim_v_padded * self.panel_rows, sink.value
        )

    def _key_block(
        self, seq: Sequence, head: Value, queries: tuple[Value, Value], keys: tuple[Value, Value]
    ) -> KeyBlock:
        """Keys and values of a block, where the products can read them."""
        f, args, scratch = self.f, self.args, self.scratch
        first, count = keys
        kv_head = head // args.group
        k, v = (seq.key(name, kv_head, first) for name in "kv")
        k_row, v_row = args.k_row, args.v_row
        if self.recipe.staged:
            k, k_row = self.stage_keys("k", k, count, args.dim, args.dim_padded)
            v, v_row = self.stage_keys("v", v, count, args.dim_v, args.dim_v_padded)
        v_count = count
        if self.recipe.paired:
            pair_row = args.dim_v_padded * 4
            f.call(self.interleave, v, v_row, scratch.v_pairs, pair_row, count, args.dim_v_padded)
            v, v_row, v_count = scratch.v_pairs, pair_row, (count + 1) // 2
        start, end = seq.full_key_range(*queries)
        full = (first >= start) & (first + count <= end)
        scratch.found.store(f.constant(0))
        if self.recipe.mask:
            full = full & f.constant(0, full.type)
        with f.unless(full):
            f.call(self.find_nonfinite, v, v_row, v_count, args.dim_v, scratch.found)
        return KeyBlock(first, count, k, k_row, v, v_row, kv_head)

    def stage_keys(self, name: str, src: Value, count: Value, cols: Value, padded: Value) -> tuple[Value, Value]:
        """Copies of `count` rows of k or v, and their distance."""
        args, row_bytes = self.args, padded * self.q_cell
        dst = getattr(self.scratch, f"{name}_rows")
        row, col = getattr(args, f"{name}_row"), getattr(args, f"{name}_col")
        self.f.call(self.stage_input, src, row, col, count, cols, dst, row_bytes, count, padded, 1.0)
        return dst, row_bytes

    def _step(self, seq: Sequence, head: Value, keys: KeyBlock, row: Value, panel: Value) -> None:
        """One panel of queries against the keys of the block that it sees."""
        f = self.f
        end = row + self._panel_rows_from(seq, row)
        seen_first, seen_end = seq.key_range(row, end)
        first, last = f.largest(seen_first, keys.first), f.smallest(seen_end, keys.first + keys.count)
        if self.recipe.paired:
            first = first - (first - keys.first) % 2
        with f.when(first < last):
            full_first, full_end = seq.full_key_range(row, end)
            partial = f.variable(f.convert("zext", (first < full_first) | (last > full_end), I64))
            skip = f.variable(f.constant(0))
            count = last - first
            if self.recipe.mask:
                self.mask_tile(seq, head, row, first, count, partial, skip)
            with f.when(skip.value.equals(0)):
                self._attend(seq, head, keys, (row, panel), (first, count), partial.value.differs(0))

    def mask_tile(self, seq, head, row, first, count, partial, skip) -> None:  # type: ignore[no-untyped-def]
        """Transpose a tile of the mask; it may show that the tile is partial, or that nothing in it is visible."""
        f, scratch = self.f, self.scratch
        self.score_tile(seq, "mask", self.stage_mask, head, (row, first), count)
        f.call(self.survey, scratch.mask_tile, count * self.panel_rows, scratch.found + 8)
        found = (scratch.found + 8).load(I64)
        partial.value = partial.value | (found & 1)
        skip.value = f.convert("zext", (found & 2).equals(0), I64)

    def score_tile(self, seq: Sequence, name: str, stage: Function, head: Value, at: tuple[Value, Value], count: Value) -> None:
        """A tile of bias or mask, transposed to the layout of scores, in scratch."""
        f, args, scratch = self.f, self.args, self.scratch
        row, first = at
        src = args.row(name, seq.batch, head, row) + getattr(args, f"{name}_col") * first
        rows, tile = getattr(scratch, f"{name}_rows"), getattr(scratch, f"{name}_tile")
        lanes = self.target.lanes
        padded = (count + (lanes - 1)) // lanes * lanes
        row_bytes = padded * 4
        f.call(
            stage, src, getattr(args, f"{name}_row"), getattr(args, f"{name}_col"), self._panel_rows_from(seq, row),
            count, rows, row_bytes, self.panel_rows, padded, 1.0,
        )  # fmt: skip
        f.call(self.transpose, rows, row_bytes, tile, self.row_size, self.panel_rows, padded)

    def context(self, seq: Sequence, head: Value, row: Value, first: Value) -> tuple[Value | int | float, ...]:
        """The arguments that say where a tile lies, in the order of the softmax kernels."""
        f, args, scratch = self.f, self.args, self.scratch
        lo, hi = (clamped(f, x + row - first, -UNBOUNDED, UNBOUNDED) for x in (seq.lo, seq.hi))
        slope = f.variable(0.0, F32)
        if "alibi" in self.recipe.terms:
            slope.value = (args.slopes + head * 4).load(F32)
        diagonal = row + seq.len_k - seq.len_q - first
        return lo, hi, diagonal, args.factor, args.softcap, slope.value, scratch.bias_tile, scratch.mask_tile

    def _attend(self, seq, head, keys, query, seen, partial) -> None:  # type: ignore[no-untyped-def]
        f, args, scratch = self.f, self.args, self.scratch
        (row, panel), (first, count) = query, seen
        at = first - keys.first
        depth = args.dim if not self.recipe.paired else (args.dim + 1) // 2
        f.call(
            self.key_product, keys.k + at * keys.k_row, keys.k_row, 4, self.q_tile(panel), 0, scratch.scores, 0, count,
            depth, scratch.scores,
        )  # fmt: skip
        if self.recipe.bias:
            self.score_tile(seq, "bias", self.stage_bias, head, (row, first), count)
        place = self.context(seq, head, row, first)
        weights = scratch.weights if self.recipe.paired else scratch.scores
        v, depth = keys.v + at * keys.v_row, count
        if self.recipe.paired:
            v, depth = keys.v + at // 2 * keys.v_row, (count + 1) // 2
        acc, state = self.acc(panel), self.state(panel)
        products = (v, 4, keys.v_row, weights, 0, acc, 0, args.dim_v, depth, state + 2 * self.row_size)
        with f.when(partial):
            f.call(self.softmax_partial, scratch.scores, weights, count, state, *place)
        with f.unless(partial):
            f.call(self.softmax_full, scratch.scores, weights, count, state, *place)
        guarded = partial & scratch.found.load(I64).differs(0)
        with f.when(guarded):
            f.call(self.accumulate_guarded, *products)
        with f.unless(guarded):
            f.call(self.accumulate, *products)

    def _finish_panel(self, seq: Sequence, head: Value, row: Value, panel: Value) -> None:
        f, args, scratch = self.f, self.args, self.scratch
        rows, row_bytes = self._panel_rows_from(seq, row), args.dim_v_padded * 4
        f.call(self.finish_state, self.state(panel), scratch.factors, seq.lse(head, row), rows)
        f.call(self.transpose, self.acc(panel), self.row_size, scratch.out_rows, row_bytes, args.dim_v_padded, self.panel_rows)
        f.call(
            self.unstage_out, scratch.out_rows, row_bytes, seq.query("out", head, row), args.out_row, args.out_col,
            rows, args.dim_v, scratch.factors, 4,
        )  # fmt: skip


class KeyBlock:
    """A block of keys and values in the form that the products read; paired values lie two rows to one."""

    def __init__(self, first: Value, count: Value, k: Value, k_row: Value, v: Value, v_row: Value, head: Value):
        self.first, self.count, self.head = first, count, head
        self.k, self.k_row, self.v, self.v_row = k, k_row, v, v_row
