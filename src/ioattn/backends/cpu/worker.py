"""What the forward's and the backward's workers share: micro-kernels, a frame, and the tiles of bias and mask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from ioattn.backends.cpu import packing
from ioattn.backends.cpu.arguments import Arguments, Scratch, Sequence, clamped
from ioattn.backends.cpu.ir import F32, I64, Function, Module, Type, Value
from ioattn.backends.cpu.jit import ENTRY, Target
from ioattn.backends.cpu.softmax import UNBOUNDED, Recipe
from ioattn.backends.cpu.tiles import Layout, product, tile_of, widest


class Panel(NamedTuple):
    """A panel of queries of one head: its first row, how many rows there are, and its number within the block."""

    seq: Sequence
    head: Value
    row: Value
    rows: Value
    number: Value


@dataclass(frozen=True)
class Seen:
    """The keys that a panel meets in one step, the last that any query sees, and whether each score needs a test."""

    first: Value
    count: Value
    limit: Value
    partial: Value


class Worker:
    """Builds a worker: the function every thread runs, and the micro-kernels it calls."""

    def __init__(self, target: Target, recipe: Recipe):
        self.module, self.target, self.recipe = Module(), target, recipe
        self.panel_rows = target.lanes * recipe.vectors
        self.row_size = 4 * self.panel_rows
        self.q_cell = 2 if recipe.paired else 4
        self._build_kernels()
        self.f = self.module.function(ENTRY, "ptr block", exported=True)
        self.args = Arguments(self.f)
        self.scratch: Scratch = self.args.scratch()
        with self.f.tasks(self.args.slot("task"), self.args.last_task) as task:
            self.task(task)

    def task(self, task: Value) -> None:
        """Emit the work of one task."""
        raise NotImplementedError

    def _build_kernels(self) -> None:
        module, target, recipe = self.module, self.target, self.recipe
        self.stage_input = packing.stage(module, target, "stage_input", recipe.dtype, raw=recipe.paired)
        self.transpose = packing.transpose(module, target, "transpose")
        self.find_nonfinite = packing.find_nonfinite(
            module, target, "find_nonfinite", "bf16" if recipe.paired else "fp32"
        )
        if recipe.paired:
            self.interleave = packing.interleave(module, target, "interleave")
        if recipe.bias:
            self.stage_bias = packing.stage(module, target, "stage_bias", recipe.bias)
        if recipe.mask:
            self.stage_mask = packing.stage(module, target, "stage_mask", "bool")
            self.survey = _survey(module, target)
        # Scores^T = K Q^T: rows of K are the broadcast operand as they lie.
        layout = Layout(a_step=4, b_step=self.row_size, c_row=self.row_size)
        tile = tile_of(target, recipe.vectors)
        self.key_product = product(module, target, "key_product", tile, layout, start="zero", paired=recipe.paired)

    def value_product(self, name: str, start: str, guard: str = "") -> Function:
        """acc^T += V^T weights: columns of V are the rows of the broadcast operand."""
        layout = Layout(a_row=4, b_step=self.row_size, c_row=self.row_size)
        tile = tile_of(self.target, self.recipe.vectors)
        return product(
            self.module, self.target, name, tile, layout, start=start, paired=self.recipe.paired, guard=guard
        )

    def row_product(self, name: str, weights_row: int | None = None, guard: str = "") -> Function:
        """acc[row] += weights[row][depth] rows[depth]: lanes are columns of the head dimension."""
        module, target, paired = self.module, self.target, self.recipe.paired
        arguments = (
            "ptr weights, i64 weights_row, ptr rows, i64 row, ptr acc, i64 acc_row, i64 count, i64 depth, i64 vectors"
        )
        f = module.function(name, arguments)
        a, size = f.args, 4 * target.lanes
        layout = Layout(a_row=weights_row, a_step=4)
        first: Value | int = 0
        for vectors in sorted({widest(target), 2, 1}, reverse=True):
            tile = tile_of(target, vectors)
            one = product(module, target, f"{name}_{vectors}", tile, layout, start="add", paired=paired, guard=guard)
            end = a.vectors - (a.vectors - first) % vectors
            with f.loop(first, end, vectors) as at:
                f.call(
                    one, a.weights, a.weights_row, 0, a.rows + at * size, a.row, a.acc + at * size, a.acc_row, a.count,
                    a.depth, a.acc,
                )  # fmt: skip
            first = end
        return f

    def depth(self, count: Value) -> Value:
        """Steps of a product over `count` elements."""
        return (count + 1) // 2 if self.recipe.paired else count

    def panel(self, seq: Sequence, head: Value, first: Value, number: Value) -> Panel:
        """Panel `number` of the block that starts at query `first`."""
        row = first + number * self.panel_rows
        return Panel(seq, head, row, self.f.smallest(seq.len_q - row, self.panel_rows), number)

    def pack_queries(self, name: str, panel: Panel, rows: Value, tile: Value) -> None:
        """Copy a panel of q or dout to `rows`, zeros below it, and transpose it to `tile`."""
        f, args = self.f, self.args
        dim, words = (getattr(args, f"{'dim' if name == 'q' else 'dim_v'}{suffix}") for suffix in ("", "_words"))
        src = panel.seq.query(name, panel.head, panel.row)
        row, col = getattr(args, f"{name}_row"), getattr(args, f"{name}_col")
        factor = args.query_factor if name == "q" else 1.0
        cells = words * (4 // self.q_cell)
        f.call(self.stage_input, src, row, col, panel.rows, dim, rows, words * 4, self.panel_rows, cells, factor)
        f.call(self.transpose, rows, words * 4, tile, self.row_size, self.panel_rows, words)

    def stage_keys(self, name: str, src: Value, count: Value) -> tuple[Value, Value]:
        """Copies of `count` rows of k or v, and their distance."""
        args, dim = self.args, "dim" if name == "k" else "dim_v"
        dst, cols, padded = getattr(self.scratch, f"{name}_rows"), getattr(args, dim), getattr(args, f"{dim}_padded")
        row, col = getattr(args, f"{name}_row"), getattr(args, f"{name}_col")
        self.f.call(self.stage_input, src, row, col, count, cols, dst, padded * self.q_cell, count, padded, 1.0)
        return dst, padded * self.q_cell

    def scores(self, keys: Value, keys_row: Value, tile: Value, count: Value, out: Value, dim: Value) -> None:
        """`out` = keys times a packed tile of queries (or of dO, for values)."""
        self.f.call(self.key_product, keys, keys_row, 4, tile, 0, out, 0, count, self.depth(dim), out)

    @contextmanager
    def seen(self, panel: Panel, keys: tuple[Value, Value]) -> Iterator[Seen]:
        """Run the block if the panel sees any of the keys `[keys[0], keys[1])`, with those it sees."""
        f, seq, end = self.f, panel.seq, panel.row + panel.rows
        seen_first, seen_end = seq.key_range(panel.row, end)
        first, last = f.largest(seen_first, keys[0]), f.smallest(seen_end, keys[1])
        if self.recipe.paired:
            # Whole pairs, counted from the block's first key: what they hold beyond the band is masked like the rest.
            first = first - (first - keys[0]) % 2
        limit = last - 1 - first
        if self.recipe.paired:
            last = f.smallest(last + (last - first) % 2, keys[1])
        with f.when(first < last):
            full_first, full_end = seq.full_key_range(panel.row, end)
            partial = (first < full_first) | (last > full_end)
            if not self.recipe.mask:
                yield Seen(first, last - first, limit, partial)
                return
            self.score_tile("mask", self.stage_mask, panel, first, last - first)
            found = self.scratch.found + 8
            f.call(self.survey, self.scratch.mask_tile, (last - first) * self.panel_rows, found)
            flags = found.load(I64)
            with f.when((flags & 2).differs(0)):
                yield Seen(first, last - first, limit, partial | (flags & 1).differs(0))

    def score_tile(self, name: str, stage: Function, panel: Panel, first: Value, count: Value) -> None:
        """A tile of bias or mask, transposed to the layout of scores, in scratch."""
        f, args, scratch = self.f, self.args, self.scratch
        src = args.row(name, panel.seq.batch, panel.head, panel.row) + getattr(args, f"{name}_col") * first
        rows, tile = getattr(scratch, f"{name}_rows"), getattr(scratch, f"{name}_tile")
        padded = (count + (self.target.lanes - 1)) // self.target.lanes * self.target.lanes
        row, col = getattr(args, f"{name}_row"), getattr(args, f"{name}_col")
        f.call(stage, src, row, col, panel.rows, count, rows, padded * 4, self.panel_rows, padded, 1.0)
        f.call(self.transpose, rows, padded * 4, tile, self.row_size, self.panel_rows, padded)

    def context(self, panel: Panel, seen: Seen) -> tuple[Value | int | float, ...]:
        """Where a tile lies, in the order of the softmax kernels' arguments."""
        f, args, scratch, seq = self.f, self.args, self.scratch, panel.seq
        lo, hi = (clamped(f, x + panel.row - seen.first, -UNBOUNDED, UNBOUNDED) for x in (seq.lo, seq.hi))
        slope = (args.slopes + panel.head * 4).load(F32) if "alibi" in self.recipe.terms else 0.0
        diagonal = panel.row + seq.len_k - seq.len_q - seen.first
        return lo, hi, seen.limit, diagonal, args.factor, args.softcap, slope, scratch.bias_tile, scratch.mask_tile


def _survey(module: Module, target: Target) -> Function:
    """Whether a mask tile hides a score (`found` bit 0) and whether it shows one (bit 1)."""
    f = module.function("survey", "ptr tile, i64 words, ptr found")
    vector = Type("i32", target.lanes)
    seen = [f.variable(f.constant(0, Type("i1", target.lanes))) for _ in range(2)]
    with f.loop(0, f.args.words, target.lanes) as at:
        shown = (f.args.tile + at * 4).load(vector).differs(0)
        for flags, found in zip(seen, (shown ^ f.constant(1, shown.type), shown), strict=True):
            flags.value = flags.value | found
    hidden, shown = (f.convert("zext", f.any(flags.value), I64) for flags in seen)
    f.args.found.store(hidden | (shown << 1))
    return f
