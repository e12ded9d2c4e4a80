"""One decoding step over a counting memory: append, partial results over pages or a contiguous cache, merge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ioattn.io.decode import Decode, Walk
from ioattn.io.memory import Memory, Slow
from ioattn.io.reference import Check, check
from ioattn.io.schedules import Counted
from ioattn.io.schedules.task import length as height
from ioattn.io.schedules.task import or_one, or_zero
from ioattn.io.threads import one_thread

Values = Mapping[str, Tensor]

Place = tuple[tuple[int, ...], slice]
"""The page, none in a contiguous cache, and rows within it."""


def inputs_of(it: Decode, seed: int = 0) -> list[dict[str, Tensor]]:
    """Q `(1, H, Nq, D)`, K and V `(1, Hk, length, D)` of each sequence, normally distributed."""
    generator = torch.Generator().manual_seed(seed)
    dtype, found = it.problem(0).dtype, []
    for length in it.lengths:
        sizes = {"Q": (it.heads, it.len_q), "K": (it.kv_heads, length), "V": (it.kv_heads, length)}
        found.append({n: torch.randn(1, *s, it.dim, generator=generator).to(dtype) for n, s in sizes.items()})
    return found


def count(
    it: Decode, given: Sequence[Values], capacity: int | None = None, on_move: Callable[[int], object] | None = None
) -> Counted:
    """Run one step over a chip of `capacity` bytes and count what it moves.

    The last `it.appended` keys and values are not in the cache at first: the step puts them there. Pages lie in slow
    memory in no order.

    Returns:
        "O" `(B, H, Nq, D)` and "LSE" `(B, H, Nq)`, and the count.

    Raises:
        CapacityError: if a tile does not fit.
    """
    memory = Memory(capacity, it.problem(0).compute_dtype, on_move)
    with one_thread():
        run = _Run(it, memory, given)
        if it.appended:
            run.append()
        if it.blocks.splits == 1:
            run.at_once()
        else:
            run.in_pieces()
        return Counted(run.results(), memory.traffic())


def checks(it: Decode, given: Sequence[Values], results: Values) -> list[Check]:
    """O of each sequence against float64, as `reference.check` does."""
    each = zip(it.lengths, given, results["O"], strict=True)
    return [found for n, values, out in each for found in check(it.problem(n), values, {"O": out[None]})]


@dataclass(frozen=True)
class _Run:
    it: Decode
    memory: Memory
    given: Sequence[Values]

    @cached_property
    def walks(self) -> list[Walk]:
        return [self.it.walk(length) for length in self.it.lengths]

    @cached_property
    def lengths(self) -> Slow:
        return self.memory.place("lengths", torch.tensor(self.it.lengths, dtype=torch.int32), extra=True)

    @cached_property
    def q(self) -> list[Slow]:
        """Q of each sequence, `(Hk, Nq * G, D)`: row r is query r // G of the group's head r % G."""
        stacked = [v["Q"][0].unflatten(0, (self.it.kv_heads, -1)).transpose(1, 2).flatten(1, 2) for v in self.given]
        return [self.memory.place("Q", rows) for rows in stacked]

    @cached_property
    def tables(self) -> list[Slow]:
        """Where the pages of each sequence lie: all numbers below their count, shuffled."""
        counts = [len(w.pages(slice(0, n))) if w.page else 0 for w, n in zip(self.walks, self.it.lengths, strict=True)]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).int()
        return [self.memory.place("table", part, extra=True) for part in order.split(counts)]

    @cached_property
    def caches(self) -> dict[str, list[Slow]]:
        """K and V: one tensor `(pages, page, Hk, D)` for all sequences, or `(length, Hk, D)` for each."""
        return {name: self._cache(name) for name in ("K", "V")}

    def _cache(self, name: str) -> list[Slow]:
        old = []
        for values, length in zip(self.given, self.it.lengths, strict=True):
            rows = values[name][0].transpose(0, 1).clone()  # [length, Hk, D]
            rows[length - self.it.appended :] = torch.nan
            old.append(rows)
        if self.it.page is None:
            return [self.memory.place(name, rows) for rows in old]
        n_pages = sum(len(self.memory.values(table)) for table in self.tables)
        pages = torch.full((n_pages, self.it.page, *old[0].shape[1:]), torch.nan, dtype=old[0].dtype)
        for rows, table in zip(old, self.tables, strict=True):
            for place, page in enumerate(self.memory.values(table).tolist()):
                part = rows[place * self.it.page : (place + 1) * self.it.page]
                pages[page, : len(part)] = part
        return [self.memory.place(name, pages)] * len(old)

    @cached_property
    def out(self) -> list[Slow]:
        dtype = self.it.problem(0).dtype
        return [self.memory.new("O", *self._rows(w), self.it.dim, dtype=dtype) for w in self.walks]

    @cached_property
    def lse(self) -> list[Slow]:
        return [self.memory.new("LSE", *self._rows(w), extra=True) for w in self.walks]

    def _rows(self, walk: Walk) -> tuple[int, int]:
        return self.it.kv_heads, walk.grid.rows

    def append(self) -> None:
        """New keys and values go where the lengths, and in a paged cache the table, say."""
        memory, added = self.memory, self.it.appended
        with memory.step("append"):
            for b in memory.each(range(len(self.walks))):
                memory.load(self.lengths, slice(b, b + 1))
                keys = slice(self.it.lengths[b] - added, self.it.lengths[b])
                places = self._places(b, keys)
                for name in ("K", "V"):
                    new = memory.place(f"new {name}", self.given[b][name][0].transpose(0, 1)[keys])
                    with memory.region():
                        tile, done = memory.load(new, slice(0, added)), 0
                        for page, rows in places:
                            into = (*page, rows)
                            memory.store(self.caches[name][b], tile[done : done + height(rows)], *into)
                            done += height(rows)

    def at_once(self) -> None:
        """One pass over all keys, without partial results."""
        with self.memory.step("decode"):
            for b, walk in enumerate(self.walks):
                (everything,) = walk.pieces() or [slice(0, 0)]
                for head in range(self.it.kv_heads):
                    for rows in self.memory.each(walk.grid.query_tiles()):
                        self._attend(b, head, rows, everything, (self.out[b], self.lse[b]), (head, rows))

    def in_pieces(self) -> None:
        """A partial result for each piece of the keys, then the merge."""
        memory, it = self.memory, self.it
        for b, walk in enumerate(self.walks):
            n_pieces = len(walk.pieces())
            partial_out = memory.new("partial O", n_pieces, *self._rows(walk), it.dim, extra=True)
            partial_lse = memory.new("partial LSE", n_pieces, *self._rows(walk), extra=True)
            for head in range(it.kv_heads):
                with memory.step("partial results"):
                    for i, piece in enumerate(walk.pieces()):
                        for rows in memory.each(walk.grid.query_tiles()):
                            self._attend(b, head, rows, piece, (partial_out, partial_lse), (i, head, rows))
                with memory.step("merge"):
                    for rows in memory.each(walk.grid.query_tiles()):
                        self._merge(b, head, rows, (partial_out, partial_lse), n_pieces)

    def _attend(
        self, b: int, head: int, rows: slice, piece: slice, into: tuple[Slow, Slow], at: tuple[int | slice, ...]
    ) -> None:
        memory, walk, scale = self.memory, self.walks[b], self.it.problem(0).scale
        memory.load(self.lengths, slice(b, b + 1))
        q_tile = memory.load(self.q[b], head, rows)
        row_max, row_sum = memory.full(-torch.inf, height(rows)), memory.zeros(height(rows))
        acc = memory.zeros(height(rows), self.it.dim)
        for cols in memory.each(walk.key_tiles(rows, piece)):
            places = self._places(b, cols)
            k_tile, v_tile = (self._gather(self.caches[name][b], places, head) for name in ("K", "V"))
            scores = memory.alloc(memory.matmul(q_tile, k_tile.mT))
            walk.grid.mask(scores.mul_(scale), rows, cols)
            new_max = memory.alloc(torch.maximum(row_max, scores.amax(-1)))
            weights = scores.sub_(or_zero(new_max)[:, None]).exp_()
            rescale = memory.alloc(torch.exp(row_max - or_zero(new_max)))
            row_sum.mul_(rescale).add_(weights.sum(-1))
            acc.mul_(rescale[:, None]).add_(memory.matmul(weights, v_tile))
            row_max.copy_(new_max)
        memory.store(into[0], acc.div_(or_one(row_sum)[:, None]), *at)
        memory.store(into[1], row_max.add_(row_sum.log_()), *at)

    def _merge(self, b: int, head: int, rows: slice, partial: tuple[Slow, Slow], n_pieces: int) -> None:
        memory = self.memory
        memory.load(self.lengths, slice(b, b + 1))
        row_max, row_sum = memory.full(-torch.inf, height(rows)), memory.zeros(height(rows))
        acc = memory.zeros(height(rows), self.it.dim)
        for i in memory.each(range(n_pieces)):
            out_tile, lse_rows = (memory.load(x, i, head, rows) for x in partial)
            new_max = memory.alloc(torch.maximum(row_max, lse_rows))
            weight = lse_rows.sub_(or_zero(new_max)).exp_()
            rescale = memory.alloc(torch.exp(row_max - or_zero(new_max)))
            row_sum.mul_(rescale).add_(weight)
            acc.mul_(rescale[:, None]).add_(out_tile.mul_(weight[:, None]))
            row_max.copy_(new_max)
        memory.store(self.out[b], acc.div_(or_one(row_sum)[:, None]), head, rows)
        memory.store(self.lse[b], row_max.add_(row_sum.log_()), head, rows)

    def _places(self, b: int, keys: slice) -> list[Place]:
        """Where these keys lie in the cache, page by page; reads the table."""
        if self.it.page is None:
            return [((), keys)]
        touched, page = self.walks[b].pages(keys), self.it.page
        entries = self.memory.load(self.tables[b], slice(touched.start, touched.stop)).tolist()
        starts = (max(keys.start - place * page, 0) for place in touched)
        stops = (min(keys.stop - place * page, page) for place in touched)
        return [((entry,), slice(*rows)) for entry, *rows in zip(entries, starts, stops, strict=True)]

    def _gather(self, cache: Slow, places: list[Place], head: int) -> Tensor:
        """The rows of one head at these places; each part's room is charged as it is loaded."""
        return torch.cat([self.memory.load(cache, *page, rows, head) for page, rows in places])

    def results(self) -> dict[str, Tensor]:
        """O `(B, H, Nq, D)` and LSE `(B, H, Nq)`: the rows unstacked, which is addressing and not traffic."""
        group = self.it.heads // self.it.kv_heads
        stacked = {"O": self.out, "LSE": self.lse}
        return {
            name: torch.stack(
                [self.memory.values(x).unflatten(1, (-1, group)).transpose(1, 2).flatten(0, 1) for x in xs]
            )
            for name, xs in stacked.items()
        }
