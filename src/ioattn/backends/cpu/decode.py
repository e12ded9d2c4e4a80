"""The forward for few queries, and over a cache: lanes run along the head dimension, k and v are read at full width.

A task is a chunk of keys of one key/value head, for all queries that read it: the whole group of a grouped-query
problem shares each row of k and v. Rows are read where they lie, also 16-bit ones and those of pages; few queries read
four streams of them side by side. A task leaves row_max, row_sum and acc of its queries in the `partial` workspace;
whoever finishes the last chunk of a head merges them, in the order of the chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from ioattn.backends.cpu import packing
from ioattn.backends.cpu.arguments import Sequence
from ioattn.backends.cpu.ir import F32, I1, I32, I64, PTR, Function, Type, Value
from ioattn.backends.cpu.jit import Target
from ioattn.backends.cpu.rows import (
    KEYS,
    STATE_WORDS,
    add_values,
    fetch_rows,
    join_columns,
    merge_row,
    move_on,
    row_scores,
    row_softmax,
    split_columns,
    start_row,
)
from ioattn.backends.cpu.softmax import Recipe
from ioattn.backends.cpu.tiles import SIZES
from ioattn.backends.cpu.worker import Worker

ROWS_AT_ONCE = (4, 1)
"""Queries whose scores are summed at once, so that a key that was read, and perhaps converted, serves all of them."""

GROUP_BYTES = 4096
"""Of k or v that are worked on at once, while the next as many are fetched: 2 and 8 KiB did no better."""

STREAM_BYTES = 1024
"""Of each stream that are read before the next one's turn, where strips of v go over the same rows again."""

LEAST_KEYS = 64
"""Of a stretch that is read as streams, `KEYS` of them side by side.

Processors fetch ahead along each, but not from one 4 KiB page into the next; while one waits there, others go on."""


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


class _Stretch(NamedTuple):
    """Keys of a block that lie in one page, or in `KEYS` whole ones (`pages`), perhaps to be read side by side."""

    first: Value
    length: Value
    streams: Value
    pages: Value


class _Rows(NamedTuple):
    """A stretch's rows of k or v: the first, their distance in bytes, and the next page's first, if there are pages."""

    first: Value
    step: Value
    beyond: Value | None


class _Part(NamedTuple):
    """Rows of k or v that are read together: the first's number, and what says how they lie (`rows._ORDER`)."""

    first: Value
    order: tuple[Value, ...]


class _Decode(Worker):
    """Builds the worker; a method per step of a task."""

    def _build_kernels(self) -> None:
        super()._build_kernels()
        module, target, recipe = self.module, self.target, self.recipe
        self.row_type = "fp32" if recipe.staged else recipe.dtype
        self.row_scores = {n: row_scores(module, target, n, self.row_type) for n in ROWS_AT_ONCE}
        self.row_softmax = row_softmax(module, target, recipe)
        self.start_row = start_row(module, target)
        self.merge_row = merge_row(module, target, recipe.dtype)
        self.add_values = {n: add_values(module, target, n, self.row_type) for n in ROWS_AT_ONCE}
        self.add_guarded = {n: add_values(module, target, n, self.row_type, guarded=True) for n in ROWS_AT_ONCE}
        self.fetch_rows = fetch_rows(module)
        self.split_columns, self.join_columns = split_columns(module, target), join_columns(module, target)
        self.move_on = move_on(module, target)
        self.find_nonfinite = packing.find_nonfinite(module, target, "find_nonfinite_in_words", self.row_type)
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
            block = self.scratch.acc + index * args.dim_v_padded * 4
            f.call(self.start_row, state + index * self._row_bytes(), block, args.dim_v_padded)
        start, end = seq.key_range(f.constant(0), seq.len_q)
        blocks = (end - start + (args.block_keys - 1)) // args.block_keys
        chunk = (blocks + (args.chunks - 1)) // args.chunks * args.block_keys
        first = start + number * chunk
        last = f.smallest(end, first + chunk)
        if self.recipe.paged:
            self.last_page = f.largest(last - 1, 0) // args.page
        with f.loop(first, last, args.block_keys) as k_first:
            self._block(seq, kv_head, state, (k_first, last))
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
        if self.row_type == "bf16":
            with f.loop(0, args.group * seq.len_q) as index:
                f.call(self.split_columns, self.scratch.q_rows + index * row_bytes, args.dim_padded)

    def _block(self, seq: Sequence, kv_head: Value, state: Value, keys: tuple[Value, Value]) -> None:
        """All queries against the first block of some keys."""
        f, args, scratch = self.f, self.args, self.scratch
        first, last = keys
        count = f.smallest(last - first, args.block_keys)
        rows, scores_row = args.group * seq.len_q, args.block_keys * 4
        few = rows < ROWS_AT_ONCE[0]
        # Several queries of FP32 read k faster side by side, too, v and 16-bit rows in the order of memory.
        with self._stretches(first, count, few | int(self.row_type == "fp32")) as k:
            self._score(self._rows_of("k", seq, kv_head, first, k), k, rows)
        self._show_before_tree(seq, first, count)
        with f.loop(0, rows) as index:
            row, scores = self._row(seq, kv_head, index), scratch.scores + index * scores_row
            self._softmax(row, scores, state + index * self._row_bytes(), first, count)
        full_first, full_end = seq.full_key_range(f.constant(0), seq.len_q)
        if self.recipe.tree:
            full_end = f.smallest(full_end, seq.len_k - seq.len_q)
        partial = (first < full_first) | (first + count > full_end) | int(self.recipe.mask and not self.recipe.tree)
        with self._stretches(first, count, few) as v:
            values = self._rows_of("v", seq, kv_head, first, v)
            guarded = self._guarded(values, v, partial)
            with f.when(guarded):
                self._add(self.add_guarded, values, v, rows)
            with f.unless(guarded):
                self._add(self.add_values, values, v, rows)
        with f.loop(0, rows) as index:
            block = scratch.acc + index * args.dim_v_padded * 4
            f.call(self.move_on, state + index * self._row_bytes(), block, args.dim_v_padded)

    def _guarded(self, v: _Rows, stretch: _Stretch, partial: Value) -> Value:
        """Whether values of a block in which scores may be masked are not finite."""
        f, args, found = self.f, self.args, self.scratch.found
        guarded = f.variable(0)
        with f.when(partial), f.loop(0, f.select(stretch.pages, KEYS, f.constant(1))) as i:
            count = f.select(stretch.pages, args.page, stretch.length)
            words = args.dim_v * SIZES[self.row_type] // 4
            f.call(self.find_nonfinite, (self.scratch.starts + i * 8).load(PTR), v.step, count, words, found)
            guarded.value = guarded.value | found.load(I64)
        return guarded.value.differs(0)

    def _score(self, k: _Rows, stretch: _Stretch, rows: Value) -> None:
        """Scores of all queries against a stretch of keys."""
        args, scratch = self.args, self.scratch
        scores_row, q_row = args.block_keys * 4, args.dim_padded * 4
        for part in self._parts(k, stretch, args.dim_padded, rows):
            scores = scratch.scores + (stretch.first + part.first) * 4
            for index, n in self._rows_at_once(rows):
                self.f.call(
                    self.row_scores[n], scratch.q_rows + index * q_row, q_row, args.dim_padded,
                    scores + index * scores_row, scores_row, *part.order,
                )  # fmt: skip

    def _add(self, kernels: dict[int, Function], v: _Rows, stretch: _Stretch, rows: Value) -> None:
        """The block's sums of all queries += their weights times a stretch of values."""
        args, scratch = self.args, self.scratch
        scores_row, acc_row = args.block_keys * 4, args.dim_v_padded * 4
        for part in self._parts(v, stretch, args.dim_v_padded, rows):
            weights = scratch.scores + (stretch.first + part.first) * 4
            for index, n in self._rows_at_once(rows):
                self.f.call(
                    kernels[n], weights + index * scores_row, scores_row, scratch.acc + index * acc_row, acc_row,
                    args.dim_v_padded // self.target.lanes, *part.order,
                )  # fmt: skip

    def _parts(self, x: _Rows, stretch: _Stretch, words: Value, rows: Value) -> Iterator[_Part]:
        """The rows of a stretch in the order in which they are read: as streams, or group by group as they lie."""
        f, size, tiles = self.f, words * SIZES[self.row_type], stretch.length // KEYS
        step, apart = f.select(stretch.streams, 1, f.constant(KEYS)), f.select(stretch.streams, tiles, 1)
        group = f.largest(f.select(stretch.streams, STREAM_BYTES, f.constant(GROUP_BYTES // KEYS)) // size, 1)
        with f.loop(0, tiles, group) as tile:
            first = tile * step
            there, number = self._next_group(x, first + group * step, group * KEYS, stretch.length)
            with f.when((rows < ROWS_AT_ONCE[0]) & (stretch.streams ^ 1)):
                f.call(self.fetch_rows, there, x.step, number, size)
            to_group = f.convert("ptrtoint", there, I64) - f.convert("ptrtoint", x.first + first * x.step, I64)
            ahead = f.select(stretch.streams, x.step, to_group)
            order = (first * x.step, x.step, f.smallest(tiles - tile, group), step, apart, f.constant(0), ahead)
            yield _Part(first, (self.scratch.starts, *order))
        whole, none = tiles * KEYS, f.constant(0)
        yield _Part(
            whole, (self.scratch.starts, whole * x.step, x.step, none, step, apart, stretch.length % KEYS, none)
        )

    def _next_group(self, rows: _Rows, start: Value, step: Value, count: Value) -> tuple[Value, Value]:
        """Where the rows to fetch lie, and how many they are: the group from `start` on, or the first of next page."""
        f, place, number = self.f, rows.first + start * rows.step, self.f.smallest(count - start, step)
        if rows.beyond is None:
            return place, number
        inside = start < count
        return f.select(inside, place, rows.beyond), f.select(inside, number, f.smallest(step, self.args.page))

    def _rows_at_once(self, rows: Value) -> Iterator[tuple[Value, int]]:
        """A loop over the queries in fours, then one over what is left: the first of each step, how many."""
        done: Value | int = 0
        for n in ROWS_AT_ONCE:
            stop = rows if n == 1 else rows - (rows - done) % n
            with self.f.loop(done, stop, n) as index:
                yield index, n
            done = stop

    @contextmanager
    def _stretches(self, first: Value, count: Value, side_by_side: Value) -> Iterator[_Stretch]:
        """Runs for each stretch of the block's keys."""
        f, args = self.f, self.args
        if not self.recipe.paged:
            yield _Stretch(f.constant(0), count, side_by_side & (count >= LEAST_KEYS), f.constant(0, I1))
            return
        at = f.variable(0)
        with f.loop(first // args.page, (first + count + (args.page - 1)) // args.page), f.when(at.value < count):
            in_page, left = (first + at.value) % args.page, count - at.value
            pages = side_by_side & in_page.equals(0) & (args.page * KEYS <= left) & int(not self.recipe.staged)
            length = f.select(pages, args.page * KEYS, f.smallest(args.page - in_page, left))
            yield _Stretch(at.value, length, side_by_side & (length >= LEAST_KEYS), pages)
            at.value = at.value + length

    def _rows_of(self, name: str, seq: Sequence, kv_head: Value, block: Value, stretch: _Stretch) -> _Rows:
        """Rows of k or v, copies where they must be staged; notes where streams of them begin."""
        f, args, number = self.f, self.args, block + stretch.first
        page = number // args.page if self.recipe.paged else f.constant(0)
        first, step = self._place(name, seq, kv_head, page, number), getattr(args, f"{name}_row")
        if self.recipe.staged:
            first, step = self.stage_keys(name, first, stretch.length)
        apart, beyond = f.select(stretch.streams, stretch.length // KEYS, 1) * step, None
        for i in reversed(range(KEYS)):
            start = first + apart * i
            if self.recipe.paged and not self.recipe.staged and i:
                following = f.smallest(page + i, self.last_page)
                beyond = self._place(name, seq, kv_head, following, following * args.page)
                start = f.select(stretch.pages, beyond, start)
            (self.scratch.starts + 8 * i).store(start)
        return _Rows(first, step, beyond)

    def _place(self, name: str, seq: Sequence, kv_head: Value, page: Value, first: Value) -> Value:
        """Where a row of k or v lies."""
        args = self.args
        if not self.recipe.paged:
            return seq.key(name, kv_head, first)
        entry = args.table + (seq.batch * args.table_row + page * 4)
        return args.row(name, entry.load(I32).to(I64), kv_head, first - page * args.page)

    def _show_before_tree(self, seq: Sequence, first: Value, count: Value) -> None:
        """All keys of the block visible: what a tree hides is written over them for each query."""
        if not self.recipe.tree:
            return
        f, args = self.f, self.args
        words = Type("i32", self.target.lanes)
        with f.loop(0, args.block_keys, self.target.lanes) as at:
            (self.scratch.mask_rows + at * 4).store(f.constant(1, words))

    def _mask_by_tree(self, row: _Row, first: Value, count: Value) -> None:
        """The query's ancestors among the block's keys: node 0 is key `len_k - len_q`."""
        f, args, seq = self.f, self.args, row.seq
        before = seq.len_k - seq.len_q
        start = f.largest(first, before)
        with f.when(start < first + count):
            src = args.row("tree", seq.batch, f.constant(0), row.query) + args.tree_col * (start - before)
            dst, nodes = self.scratch.mask_rows + (start - first) * 4, first + count - start
            f.call(self.stage_mask, src, 0, args.tree_col, 1, nodes, dst, 0, 1, nodes, 1.0)

    def _softmax(self, row: _Row, scores: Value, state: Value, first: Value, count: Value) -> None:
        f, args, scratch, seq = self.f, self.args, self.scratch, row.seq
        if self.recipe.tree:
            self._mask_by_tree(row, first, count)
        stages = {"bias": self.recipe.bias is not None, "mask": self.recipe.mask and not self.recipe.tree}
        for name, stage in stages.items():
            if stage:
                src = args.row(name, seq.batch, row.head, row.query) + getattr(args, f"{name}_col") * first
                col, dst = getattr(args, f"{name}_col"), getattr(scratch, f"{name}_rows")
                kernel = self.stage_bias if name == "bias" else self.stage_mask
                f.call(kernel, src, 0, col, 1, count, dst, 0, 1, args.block_keys, 1.0)
        slope = (args.slopes + row.head * 4).load(F32) if "alibi" in self.recipe.terms else 0.0
        place = row.query - first
        last = f.smallest(seq.hi + place, count - 1)
        f.call(
            self.row_softmax, scores, count, state, seq.lo + place, last,
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
        if self.row_type == "bf16":
            f.call(self.join_columns, scratch.out_rows, args.dim_v_padded)
        out = row.seq.query("out", row.head, row.query)
        f.call(self.unstage_out, scratch.out_rows, 0, out, 0, args.out_col, 1, args.dim_v, scratch.row_sum, 0)
