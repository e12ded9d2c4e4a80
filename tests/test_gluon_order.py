"""`deterministic=True` of the Hopper backward: tiles of keys add to dQ in one order, and no order of events stops them.

The device functions that say which tile comes next, which blocks of queries it sees and when it is its turn are plain
integer arithmetic: they run here in Python.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_code import NUMBERS, Plain, Pointer, constructor

from ioattn.backends.gluon import backward_config as table
from ioattn.masks import Band
from ioattn.problem import Problem

pytest.importorskip("triton", minversion="3.6", reason="Triton is not installed")

from ioattn.backends.gluon.kernels import backward_call, differentiate, in_order, key_tiles, load_backward

CAUSAL = Band(hi=0)
PROBLEMS = {
    "full": {},
    "full-odd": {"len_q": 1000, "len_k": 1000},
    "few-keys": {"len_q": 900, "len_k": 100},
    "causal": {"band": CAUSAL},
    "causal-odd": {"band": CAUSAL, "len_q": 1001, "len_k": 1001},
    "more-queries": {"band": CAUSAL, "len_q": 1500, "len_k": 600},
    "more-keys": {"band": CAUSAL, "len_q": 600, "len_k": 1500},
    "top-left": {"band": CAUSAL, "align": "top-left", "len_q": 600, "len_k": 1500},
    "top-left-shifted": {"band": Band(hi=0, shift=37), "align": "top-left", "len_q": 600, "len_k": 1500},
    "top-left-queries": {"band": CAUSAL, "align": "top-left", "len_q": 1500, "len_k": 600},
    "shifted": {"band": Band(hi=0, shift=-300)},
    "window": {"band": Band(lo=-300, hi=0)},
    "window-tiles": {"band": Band(lo=-257, hi=0)},
    "narrow": {"band": Band(lo=-3, hi=2), "len_q": 1300, "len_k": 1100},
    "wide": {"band": Band(lo=-200, hi=333), "len_q": 1100, "len_k": 1300},
    "left": {"band": Band(lo=-64), "len_q": 900, "len_k": 1100},
    "ahead": {"band": Band(lo=100, hi=500)},
    "grouped": {"heads": 8},
    "grouped-causal": {"heads": 8, "band": CAUSAL},
    "grouped-window": {"heads": 8, "band": Band(lo=-300, hi=0)},
    "parts": {"len_q": 4096, "len_k": 4096, "batch": 3},
    "grouped-full-parts": {"len_q": 4096, "len_k": 4096, "heads": 6, "batch": 3},
    "grouped-parts": {"len_q": 4096, "len_k": 4096, "band": CAUSAL, "heads": 8},
    "one-head": {"heads": 2, "batch": 1, "band": CAUSAL, "len_q": 2048, "len_k": 2048},
}


LENGTHS = (0, 700, 1, 1300, 128, 0, 333)
"""Of the sequences of packed problems."""

PACKED = {
    "packed": {"packed": True},
    "packed-causal": {"packed": True, "band": CAUSAL},
    "packed-window": {"packed": True, "band": Band(lo=-257, hi=0)},
    "packed-grouped": {"packed": True, "band": CAUSAL, "heads": 4},
}


def problem(dim: int, **features: Any) -> Problem:
    sizes = {"batch": 2, "heads": 2, "kv_heads": 2, "len_q": 1024, "len_k": 1024, "scale": 1.0} | features
    if sizes.get("packed"):
        sizes |= {"batch": len(LENGTHS), "len_q": max(LENGTHS), "len_k": max(LENGTHS)}
    device = torch.device("cuda", 0)
    return Problem(dim=dim, dim_v=dim, dtype=torch.bfloat16, device=device, deterministic=True, **sizes)


@pytest.fixture(autouse=True)
def _run_device_code_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KeyTile", "Queries"):
        monkeypatch.setattr(key_tiles, name, constructor(name, getattr(key_tiles, name)))
    monkeypatch.setattr(key_tiles, "padded_start", key_tiles.padded_start.fn)
    monkeypatch.setattr(in_order, "add_backwards", in_order.add_backwards.fn)
    for module in (backward_call, key_tiles, in_order, load_backward, differentiate):
        monkeypatch.setattr(module, "gl", NUMBERS)


class Kernel:
    """The units of a problem in the order in which they are drawn, and the blocks that each role walks over."""

    def __init__(self, wanted: Problem) -> None:
        self.config = config = table.choose(wanted)
        assert config.in_order
        assert config.draws
        lengths = LENGTHS if wanted.packed else (wanted.len_q,) * wanted.batch
        starts = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
        rows = starts[-1] + 50 if wanted.packed else wanted.len_q
        self.per_head = -(-wanted.len_k // config.keys)
        self.ends: Any = self.per_head
        if wanted.packed:
            spans = [*(b - a for a, b in itertools.pairwise(starts)), rows - starts[-1]]
            self.ends = torch.tensor([-(-span // config.keys) for span in spans]).cumsum(0)
            self.per_head = int(self.ends[-1])
        self.tiles = self.per_head * wanted.kv_heads * (1 if wanted.packed else wanted.batch)
        whole, together, parts = table.split(wanted) if config.parts else (self.tiles, 1, 1)
        self.units = whole + (self.tiles - whole) * parts
        order = {
            "batch": len(lengths),
            "len_q": rows,
            "len_k": rows if wanted.packed else wanted.len_k,
            "heads": wanted.kv_heads,
            "section": table.section(wanted),
            "head_rows": table.head_rows(wanted, rows),
            "group": wanted.group,
            "whole": whole,
            "together": together,
            "parts": parts,
            "is_cut": config.parts,
            "draws": config.draws,
            "keys": config.keys,
            "sequences": config.sequences,
            "across": config.across,
            "descending": config.descending,
            "cu_seqlens_q": Pointer(starts),
            "cu_seqlens_k": Pointer(starts),
        }
        self.schedule = Plain(key_tiles.KeySchedule, **order)
        band = {
            "lo": wanted.band.lo or 0,
            "hi": wanted.band.hi or 0,
            "shift": wanted.band.shift,
            "has_lo": config.has_lo,
            "has_hi": config.has_hi,
            "bottom_right": config.bottom_right,
            "masks": config.masks,
            "turns": config.rotate,
            "descending": config.descending,
            "cut": config.parts and not config.masks,
        }
        self.band = Plain(key_tiles.QueryBand, **band)
        shared = {"config": config, "band": self.band, "group": wanted.group, "head_rows": self.schedule.head_rows}
        self.call = Plain(backward_call.BackwardCall, **shared)

    def drawn(self) -> Iterator[Any]:
        for index in range(self.units):
            yield self.schedule.unit(index, self.tiles, self.per_head, self.ends)[0]

    def loaded(self, tile: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
        seen = []
        monkeypatch.setattr(load_backward, "load_block", lambda *x: seen.append(x[-2:]))
        if self.config.stretch > 0:
            load_backward.load_backwards.fn(self.call, tile, 0, self.queries(tile), None, None)
        else:
            load_backward.load_queries.fn(self.call, tile, 0, None, None)
        return seen

    def multiplied(self, tile: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, bool]]:
        """Head, block, and whether it is masked."""
        seen = []

        def step(call: Any, tile: Any, drift: int, row: int, block: int, head: int, *rest: Any) -> None:
            member = head - tile.head * call.group
            assert row == tile.row + member * call.head_rows
            seen.append((member, block, rest[1]))

        monkeypatch.setattr(differentiate, "step", step)
        walk = differentiate.walk_backwards if self.config.stretch > 0 else differentiate.walk_forwards
        walk.fn(self.call, tile, 0, self.queries(tile), None, 0)
        return seen

    def added(self, tile: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
        seen = []
        monkeypatch.setattr(in_order, "add_block", lambda *x: seen.append(x[3:5]))
        monkeypatch.setattr(in_order, "start", lambda size: SimpleNamespace(next=lambda: None))
        posts = iter([tile, SimpleNamespace(alive=0)])
        self.call.board = SimpleNamespace(read=lambda post: next(posts), release=lambda post: None)
        in_order.add_in_order.fn(self.call, 0)
        return seen

    def queries(self, tile: Any) -> Any:
        return self.band.queries(tile, self.config.keys, self.config.rows)

    def turns(self, tile: Any, walk: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Each block's place in the workspace, and how many tiles must have added to it before."""
        keys, rows = self.config.keys, self.config.rows
        places = [(tile.row + member * self.call.head_rows) // rows + block for member, block in walk]
        return [
            (at, self.band.tiles_before(tile, block, keys, rows)) for at, (_, block) in zip(places, walk, strict=True)
        ]


@pytest.mark.parametrize("name", PROBLEMS | PACKED)
@pytest.mark.parametrize("dim", [64, 128])
def test_tiles_add_to_each_block_in_the_order_in_which_they_are_drawn(
    dim: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel(problem(dim, **(PROBLEMS | PACKED)[name]))
    added: dict[int, int] = defaultdict(int)
    for tile in kernel.drawn():
        walk = kernel.added(tile, monkeypatch)
        assert walk == kernel.loaded(tile, monkeypatch)
        assert walk == [(member, block) for member, block, _ in kernel.multiplied(tile, monkeypatch)]
        assert len(set(walk)) == len(walk)
        for place, before in kernel.turns(tile, walk):
            assert before == added[place], "it would wait for a tile that is drawn after it, or for none"
            added[place] += 1


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("dim", [64, 128])
def test_every_pair_that_the_band_keeps_is_walked_over_once(
    dim: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = problem(dim, **PROBLEMS[name])
    kernel = Kernel(wanted)
    keys, rows = kernel.config.keys, kernel.config.rows
    i, j = torch.arange(wanted.len_q)[:, None], torch.arange(wanted.len_k)[None, :]
    band = wanted.band_of(wanted.len_q, wanted.len_k)
    offset = j - i - band.shift
    kept = torch.ones(wanted.len_q, wanted.len_k, dtype=torch.bool)
    kept &= torch.tensor(True) if band.lo is None else offset >= band.lo
    kept &= torch.tensor(True) if band.hi is None else offset <= band.hi
    walked: dict[tuple[int, int, int, int], list[bool]] = defaultdict(list)
    for tile in kernel.drawn():
        for member, block, masked in kernel.multiplied(tile, monkeypatch):
            walked[tile.batch, tile.head * wanted.group + member, tile.k_start // keys, block].append(masked)
    for tile, block in itertools.product(range(-(-wanted.len_k // keys)), range(-(-wanted.len_q // rows))):
        part = kept[block * rows : (block + 1) * rows, tile * keys : (tile + 1) * keys]
        for batch, head in itertools.product(range(wanted.batch), range(wanted.heads)):
            found = walked[batch, head, tile, block]
            assert len(found) <= 1
            assert found or not part.any()
            if found and not found[0]:
                assert part.all()
                assert part.shape[1] == keys, "keys that do not exist are not masked"
    if kernel.config.fresh:
        blocks = table.head_rows(wanted, wanted.len_q) // rows
        for batch, head, block in itertools.product(range(wanted.batch), range(wanted.heads), range(blocks)):
            assert walked[batch, head, 0, block], "nothing is stored to a block that is not cleared"


@pytest.mark.parametrize("name", PROBLEMS | PACKED)
@pytest.mark.parametrize("programs", [1, 2, 7, 132])
def test_no_order_of_events_stops_the_programs(programs: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks of a program are in its buffers; of those whose turn it is, some are added at random."""
    kernel = Kernel(problem(128, **(PROBLEMS | PACKED)[name]))
    undrawn = [(tile, kernel.turns(tile, kernel.added(tile, monkeypatch))) for tile in kernel.drawn()][::-1]
    work: list[tuple[Any, list[tuple[int, int]]]] = []
    events, added, parts_done = random.Random(0), Counter[int](), Counter[int]()
    while undrawn or work:
        while undrawn and len(work) < programs:
            work.append(undrawn.pop())
        able = [(left, turn) for _, left in work for turn in left[:2] if added[turn[0]] == turn[1]]
        for left, turn in events.sample(able, events.randint(min(1, len(able)), len(able))):
            added[turn[0]] += 1
            left.remove(turn)
        # A part ends once those before it have left their sums.
        ended = [unit for unit in work if not unit[1] and parts_done[unit[0].slot] >= unit[0].part]
        assert able or ended, "the programs wait for each other"
        for unit in ended:
            parts_done[unit[0].slot] += unit[0].parts > 1
            work.remove(unit)


def test_heads_of_a_section_are_many_where_their_tiles_would_wait_or_end_alone() -> None:
    sizes = {"heads": 32, "kv_heads": 32, "len_q": 16384, "len_k": 16384}
    full, causal = problem(128, **sizes), problem(128, **sizes, band=CAUSAL)
    assert table.section(full) == table.LEAST_HEADS
    assert table.section(causal) == 1
    assert table.section(replace(causal, deterministic=False)) == table.LEAST_CAUSAL_HEADS
    assert table.section(replace(full, deterministic=False)) == 1
    assert table.section(problem(64, **sizes)) == table.LEAST_SHORT_HEADS


@pytest.mark.parametrize(
    ("dim", "features", "in_order"),
    [
        (128, {}, True),
        (64, {"band": CAUSAL}, True),
        (128, {"band": CAUSAL}, False),
        (128, {"band": CAUSAL, "len_q": 512, "len_k": 512}, True),
        (64, {"len_q": 2048}, False),
        (64, {"len_k": 2048}, False),
        (64, {"len_q": 1000}, False),
        (64, {"heads": 4}, False),
        (64, {"packed": True}, False),
        (64, {"band": Band(lo=-64, hi=0)}, False),
        (64, {"band": CAUSAL, "len_k": 512}, False),
        (256, {}, False),
    ],
)
def test_what_is_in_order_unasked(dim: int, features: dict[str, Any], in_order: bool) -> None:
    wanted = problem(dim, **features)
    assert table.choose(replace(wanted, deterministic=False)).in_order == in_order
    assert table.choose(wanted).in_order == (dim < 256)
