"""The backward: recomputes each tile of weights and walks over keys once, as `backends/eager.py` writes it.

A task is a chunk of keys of one key/value head, for every query head of its group (or for all heads and batches that
share one gradient of a bias). It alone adds to dk and dv of its keys, which it keeps in scratch, and to dq of its
queries; with more than one chunk each writes a partial dq, and the host adds those up in order. So the bits depend
neither on the number of threads nor on their timing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ioattn.backends.cpu import packing
from ioattn.backends.cpu.arguments import Sequence
from ioattn.backends.cpu.ir import F32, I64, Function, Module, Type, Value
from ioattn.backends.cpu.jit import Target
from ioattn.backends.cpu.softmax import Recipe, dsoftmax_step
from ioattn.backends.cpu.tiles import LOG2E
from ioattn.backends.cpu.worker import Panel, Seen, Worker


def backward(target: Target, recipe: Recipe) -> str:
    """The IR of the worker that adds up the gradients."""
    return str(_Backward(target, recipe).module)


class _Chunk(NamedTuple):
    """The keys of a task in the form that the products read: rows of k and v, and k once more in pairs of rows."""

    seq: Sequence
    number: Value
    first: Value
    end: Value
    k: Value
    k_row: Value
    v: Value
    v_row: Value
    k_pairs: Value
    k_pairs_row: Value


class _Backward(Worker):
    """Builds the worker; a method per step of a task."""

    def _build_kernels(self) -> None:
        super()._build_kernels()
        module, target, recipe = self.module, self.target, self.recipe
        self.stage_fp32 = (
            packing.stage(module, target, "stage_fp32", recipe.dtype) if recipe.paired else self.stage_input
        )
        self.add_to_dq = self.value_product("add_to_dq", "add")
        self.add_to_dq_guarded = self.value_product("add_to_dq_guarded", "add", guard="b")
        weights_row = self.row_size // 2 if recipe.paired else self.row_size
        self.add_to_dk = self.row_product("add_to_dk", weights_row)
        self.add_to_dk_guarded = self.row_product("add_to_dk_guarded", weights_row, guard="a")
        self.dsoftmax_full = dsoftmax_step(module, target, "dsoftmax_full", recipe, partial=False)
        self.dsoftmax_partial = dsoftmax_step(module, target, "dsoftmax_partial", recipe, partial=True)
        self.start_gradient = _start_gradient(module, target, recipe)
        self.clear = _clear(module, target)
        self.unstage_gradient = packing.unstage(module, target, "unstage_gradient", recipe.dtype)
        self.unstage_partial = packing.unstage(module, target, "unstage_partial", "fp32")
        if recipe.dbias:
            self.unstage_dbias = packing.unstage(module, target, "unstage_dbias", "fp32", how="add")
            self.sum_queries = _sum_queries(module, target, recipe.vectors)

    def task(self, task: Value) -> None:
        """A chunk of keys, for the heads and batches whose gradients meet."""
        f, args = self.f, self.args
        groups = args.heads // args.head_members
        tasks_per_chunk = args.batches // args.batch_members * groups
        # Under a causal band the first keys are seen by most queries: longest first.
        number, rest = task // tasks_per_chunk, task % tasks_per_chunk
        batch, head = rest // groups * args.batch_members, rest % groups * args.head_members
        with f.loop(batch, batch + args.batch_members) as b:
            seq = Sequence(args, b)
            first = number * args.chunk_keys
            end = f.smallest(seq.len_k, first + args.chunk_keys)
            with f.when(first < end), f.loop(head, head + args.head_members, args.group) as first_head:
                chunk = self._start_chunk(seq, number, (first, end), first_head // args.group)
                with f.loop(first_head, first_head + args.group) as h:
                    self._head(chunk, h)
                self._finish_chunk(chunk, first_head // args.group)

    def _start_chunk(self, seq: Sequence, number: Value, keys: tuple[Value, Value], kv_head: Value) -> _Chunk:
        f, args, scratch = self.f, self.args, self.scratch
        first, end = keys
        count = end - first
        f.call(self.clear, scratch.dk_acc, count * args.dim_padded)
        f.call(self.clear, scratch.dv_acc, count * args.dim_v_padded)
        k, v = (seq.key(name, kv_head, first) for name in "kv")
        k_row, v_row = args.k_row, args.v_row
        if self.recipe.staged:
            k, k_row = self.stage_keys("k", k, count)
            v, v_row = self.stage_keys("v", v, count)
        k_pairs, k_pairs_row = k, k_row
        if self.recipe.paired:
            k_pairs, k_pairs_row = scratch.k_pairs, args.dim_padded * 4
            f.call(self.interleave, k, k_row, k_pairs, k_pairs_row, count, args.dim_padded)
        f.call(self.find_nonfinite, k_pairs, k_pairs_row, self.depth(count), args.dim, scratch.found)
        return _Chunk(seq, number, first, end, k, k_row, v, v_row, k_pairs, k_pairs_row)

    def _head(self, chunk: _Chunk, head: Value) -> None:
        """All queries of one head that see the chunk, block by block."""
        f, args, seq = self.f, self.args, chunk.seq
        start, stop = seq.query_range(chunk.first, chunk.end)
        with f.loop(start, stop, args.block_rows) as first:
            rows = f.smallest(stop - first, args.block_rows)
            panels = (rows + (self.panel_rows - 1)) // self.panel_rows
            with f.loop(0, panels) as number:
                self._start_panel(self.panel(seq, head, first, number))
            k_start, k_end = seq.key_range(first, first + rows)
            # Block boundaries do not move with the queries, so that pairs of keys stay pairs.
            blocks_start = f.largest(k_start - chunk.first, 0) // args.block_keys * args.block_keys + chunk.first
            with f.loop(blocks_start, f.smallest(k_end, chunk.end), args.block_keys) as k_first:
                k_last = f.smallest(k_first + args.block_keys, chunk.end)
                with f.loop(0, panels) as number:
                    panel = self.panel(seq, head, first, number)
                    with self.seen(panel, (k_first, k_last)) as seen:
                        dead = self._note(panel, "dead").load(I64).differs(0)
                        self._step(chunk, panel, replace(seen, partial=seen.partial | dead))
            with f.loop(0, panels) as number:
                self._finish_panel(chunk, self.panel(seq, head, first, number))

    def _tile(self, region: str, panel: Panel, words: Value) -> Value:
        """A panel's part of a region with `words` 32-bit words per query."""
        return getattr(self.scratch, region) + panel.number * words * self.row_size

    def _rows(self, region: str, panel: Panel) -> tuple[Value, Value]:
        """A panel's rows of q or dout for a product along the queries, and their distance."""
        args = self.args
        dim = "dim" if region == "q" else "dim_v"
        if self.recipe.paired:
            padded = getattr(args, f"{dim}_padded")
            return getattr(self.scratch, f"{region}_pairs") + panel.number * padded * (self.row_size // 2), padded * 4
        words = getattr(args, f"{dim}_words")
        return self._tile(f"{region}_rows", panel, words), words * 4

    def _state(self, panel: Panel) -> Value:
        return self.scratch.state + panel.number * (4 * self.row_size)

    def _note(self, panel: Panel, name: str) -> Value:
        """Where it says whether q or dout of a panel is not finite, or the panel has queries that saw nothing."""
        return self._state(panel) + (2 * self.row_size + 8 * ("q", "dout", "dead").index(name))

    def _start_panel(self, panel: Panel) -> None:
        """Pack q and dout both ways, and compute delta = rowsum(dO * O) - dLSE."""
        f, args, scratch = self.f, self.args, self.scratch
        for name, dim, words in (("q", args.dim, args.dim_words), ("dout", args.dim_v, args.dim_v_words)):
            tile = self._tile(f"{name}_tile", panel, words)
            rows, row_bytes = getattr(scratch, f"{name}_rows"), words * 4
            if not self.recipe.paired:
                rows, row_bytes = self._rows(name, panel)
            self.pack_queries(name, panel, rows, tile)
            if self.recipe.paired:
                pairs, pairs_row = self._rows(name, panel)
                f.call(self.interleave, rows, row_bytes, pairs, pairs_row, panel.rows, pairs_row // 4)
                rows, row_bytes = pairs, pairs_row
            f.call(self.find_nonfinite, rows, row_bytes, self.depth(panel.rows), dim, self._note(panel, name))
        f.call(self.clear, self._tile("dq_acc", panel, args.dim_padded), args.dim_padded * self.panel_rows)
        dout_rows, out_rows = self._fp32_rows("dout", panel), self._fp32_rows("out", panel)
        seq = panel.seq
        dlse = args.dlse + (
            args.dlse_batch * seq.batch + args.dlse_head * panel.head + args.dlse_row * (seq.start_q + panel.row)
        )
        f.call(
            self.start_gradient, self._state(panel), seq.lse(panel.head, panel.row), dlse, args.dlse_row,
            f.convert("zext", args.given("dlse"), I64), panel.rows, dout_rows, out_rows, args.dim_v_padded * 4,
        )  # fmt: skip

    def _fp32_rows(self, name: str, panel: Panel) -> Value:
        """A panel of dout or out as fp32 rows."""
        f, args = self.f, self.args
        if name == "dout" and not self.recipe.paired:
            return self._rows("dout", panel)[0]
        rows = getattr(self.scratch, f"{name}_fp32")
        src = panel.seq.query(name, panel.head, panel.row)
        row, col = getattr(args, f"{name}_row"), getattr(args, f"{name}_col")
        padded = args.dim_v_padded
        f.call(self.stage_fp32, src, row, col, panel.rows, args.dim_v, rows, padded * 4, panel.rows, padded, 1.0)
        return rows

    def _step(self, chunk: _Chunk, panel: Panel, seen: Seen) -> None:
        """One panel of queries against some keys: P, dP, dS, and what they add to the three gradients."""
        f, args, scratch = self.f, self.args, self.scratch
        at, count = seen.first - chunk.first, seen.count
        q_tile = self._tile("q_tile", panel, args.dim_words)
        dout_tile = self._tile("dout_tile", panel, args.dim_v_words)
        self.scores(chunk.k + at * chunk.k_row, chunk.k_row, q_tile, count, scratch.scores, args.dim)
        self.scores(chunk.v + at * chunk.v_row, chunk.v_row, dout_tile, count, scratch.dscores, args.dim_v)
        if self.recipe.bias:
            self.score_tile("bias", self.stage_bias, panel, seen.first, count)
        dsoftmax = (
            scratch.scores, scratch.dscores, count, self._state(panel), *self.context(panel, seen),
            scratch.weights, scratch.dscore_rows, scratch.dscore_pairs, scratch.dbias_tile,
        )  # fmt: skip
        with f.when(seen.partial):
            f.call(self.dsoftmax_partial, *dsoftmax)
        with f.unless(seen.partial):
            f.call(self.dsoftmax_full, *dsoftmax)
        if self.recipe.dbias:
            self._add_to_dbias(panel, seen)
        paired = self.recipe.paired
        weights, dscores = (scratch.weights, scratch.dscore_rows) if paired else (scratch.scores, scratch.dscores)
        self._add_rows("dout", weights, scratch.dv_acc, args.dim_v_padded, panel, seen, at)
        self._add_rows("q", dscores, scratch.dk_acc, args.dim_padded, panel, seen, at)
        k = chunk.k_pairs + (at // 2 if paired else at) * chunk.k_pairs_row
        add_to_dq = (
            k, 4, chunk.k_pairs_row, scratch.dscore_pairs if paired else dscores, 0,
            self._tile("dq_acc", panel, args.dim_padded), 0, args.dim, self.depth(count), scratch.scores,
        )  # fmt: skip
        guarded = seen.partial & scratch.found.load(I64).differs(0)
        with f.when(guarded):
            f.call(self.add_to_dq_guarded, *add_to_dq)
        with f.unless(guarded):
            f.call(self.add_to_dq, *add_to_dq)

    def _add_rows(self, name, weights, acc, padded, panel, seen, at) -> None:  # type: ignore[no-untyped-def]
        """dv += P^T dO, or dk += dS^T Q."""
        f = self.f
        rows, row = self._rows(name, panel)
        call = (
            weights, 0, rows, row, acc + at * padded * 4, padded * 4, seen.count, self.depth(panel.rows),
            padded // self.target.lanes,
        )  # fmt: skip
        found = self._note(panel, name).load(I64)
        guarded = seen.partial & found.differs(0)
        with f.when(guarded):
            f.call(self.add_to_dk_guarded, *call)
        with f.unless(guarded):
            f.call(self.add_to_dk, *call)

    def _add_to_dbias(self, panel: Panel, seen: Seen) -> None:
        """Add a tile to the gradient of the bias, summed over what the bias broadcasts."""
        f, args, scratch = self.f, self.args, self.scratch
        dst = args.row("dbias", panel.seq.batch, panel.head, panel.row) + args.dbias_col * seen.first
        shared = args.dbias_row.equals(0)
        with f.when(shared):
            f.call(self.sum_queries, scratch.dbias_tile, dst, args.dbias_col, seen.count)
        with f.unless(shared):
            lanes = self.target.lanes
            padded = (seen.count + (lanes - 1)) // lanes * lanes
            rows = scratch.bias_rows
            f.call(self.transpose, scratch.dbias_tile, self.row_size, rows, padded * 4, padded, self.panel_rows)
            f.call(
                self.unstage_dbias, rows, padded * 4, dst, args.dbias_row, args.dbias_col, panel.rows, seen.count,
                args.slot("one"), 0,
            )  # fmt: skip

    def _finish_panel(self, chunk: _Chunk, panel: Panel) -> None:
        """Write dq of a panel, or this chunk's part of it."""
        f, args, scratch, seq = self.f, self.args, self.scratch, panel.seq
        row_bytes = args.dim_padded * 4
        rows = scratch.out_fp32
        f.call(
            self.transpose, self._tile("dq_acc", panel, args.dim_padded), self.row_size, rows, row_bytes,
            args.dim_padded, self.panel_rows,
        )  # fmt: skip
        scale = args.slot("scale")
        with f.when(args.chunks.equals(1)):
            dq = seq.query("dq", panel.head, panel.row)
            f.call(self.unstage_gradient, rows, row_bytes, dq, args.dq_row, args.dq_col, panel.rows, args.dim, scale, 0)
        with f.unless(args.chunks.equals(1)):
            dq = args.partial + (
                args.partial_chunk * chunk.number
                + args.partial_batch * seq.batch
                + args.partial_head * panel.head
                + (seq.start_q + panel.row) * args.dim * 4
            )
            f.call(self.unstage_partial, rows, row_bytes, dq, args.dim * 4, 4, panel.rows, args.dim, scale, 0)

    def _finish_chunk(self, chunk: _Chunk, kv_head: Value) -> None:
        f, args, scratch = self.f, self.args, self.scratch
        for name, dim, factor in (("dk", "dim", "key_gradient_factor"), ("dv", "dim_v", "one")):
            acc, row_bytes = getattr(scratch, f"{name}_acc"), getattr(args, f"{dim}_padded") * 4
            row, col = getattr(args, f"{name}_row"), getattr(args, f"{name}_col")
            dst = chunk.seq.key(name, kv_head, chunk.first)
            f.call(
                self.unstage_gradient, acc, row_bytes, dst, row, col, chunk.end - chunk.first, getattr(args, dim),
                args.slot(factor), 0,
            )  # fmt: skip


def _start_gradient(module: Module, target: Target, recipe: Recipe) -> Function:
    """lse, in the unit of the scores, and delta; a query that saw nothing gets lse inf, so that its weights are 0."""
    f = module.function(
        "start_gradient",
        ("ptr state, ptr lse, ptr dlse, i64 dlse_row, i64 has_dlse, i64 rows, ptr dout, ptr out, i64 row_bytes"),
    )
    a, panel_rows = f.args, recipe.vectors * target.lanes
    vector = Type("float", target.lanes)
    dead = f.variable(0)
    with f.loop(0, a.rows) as row:
        lse = (a.lse + row * 4).load(F32)
        dead.value = dead.value | f.convert("zext", lse.equals(float("-inf")), I64)
        lse = f.select(lse.equals(float("-inf")), f.constant(float("inf"), F32), lse if recipe.natural else lse * LOG2E)
        total = f.variable(0.0, vector)
        with f.loop(0, a.row_bytes, 4 * target.lanes) as at:
            dout, out = ((x + (row * a.row_bytes + at)).load(vector) for x in (a.dout, a.out))
            total.value = f.fma(dout, out, total.value)
        delta = f.variable(f.total(total.value))
        with f.when(a.has_dlse.differs(0)):
            delta.value = delta.value - (a.dlse + row * a.dlse_row).load(F32)
        (a.state + row * 4).store(lse)
        (a.state + (row + panel_rows) * 4).store(delta.value)
    (a.state + (2 * panel_rows * 4 + 16)).store(dead.value)
    with f.loop(a.rows, panel_rows) as row:
        (a.state + row * 4).store(f.constant(float("inf"), F32))
        (a.state + (row + panel_rows) * 4).store(f.constant(0.0, F32))
    return f


def _clear(module: Module, target: Target) -> Function:
    """Zero `words` 32-bit words, whole vectors."""
    f = module.function("clear", "ptr dst, i64 words")
    with f.loop(0, f.args.words, target.lanes) as at:
        (f.args.dst + at * 4).store(f.constant(0.0, Type("float", target.lanes)))
    return f


def _sum_queries(module: Module, target: Target, vectors: int) -> Function:
    """Add the sum over a panel's queries of each row of a tile to `dst`."""
    f = module.function("sum_queries", "ptr tile, ptr dst, i64 col, i64 count")
    vector, size = Type("float", target.lanes), 4 * target.lanes
    with f.loop(0, f.args.count) as row:
        parts = [(f.args.tile + (row * vectors + v) * size).load(vector) for v in range(vectors)]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        place = f.args.dst + row * f.args.col
        place.store(place.load(F32) + f.total(total))
    return f
