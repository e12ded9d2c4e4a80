"""Walks of the Hopper backward in which a group lets pass what only the other one sees: what is done with each block.

The device functions that say so are plain integer arithmetic: they run here in Python.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_code import NUMBERS, Plain, constructor

from ioattn.backends.gluon import backward_config as table
from ioattn.masks import Band
from ioattn.problem import Problem

pytest.importorskip("triton", minversion="3.6", reason="Triton is not installed")

from ioattn.backends.gluon.kernels import backward_call, differentiate, key_tiles, load_backward, seen

CAUSAL = Band(hi=0)
PROBLEMS = {
    "causal": {"band": CAUSAL},
    "causal-odd": {"band": CAUSAL, "len_q": 1001, "len_k": 1001},
    "more-queries": {"band": CAUSAL, "len_q": 1500, "len_k": 600},
    "more-keys": {"band": CAUSAL, "len_q": 600, "len_k": 1500},
    "top-left": {"band": CAUSAL, "align": "top-left", "len_q": 600, "len_k": 1500},
    "top-left-queries": {"band": CAUSAL, "align": "top-left", "len_q": 1500, "len_k": 610},
    "shifted": {"band": Band(hi=0, shift=-300)},
    "window": {"band": Band(lo=-256, hi=0)},
    "window-odd": {"band": Band(lo=-300, hi=0), "len_k": 1037},
    "narrow": {"band": Band(lo=-3, hi=2), "len_q": 1300, "len_k": 1100},
    "wide": {"band": Band(lo=-200, hi=333), "len_q": 1100, "len_k": 1300},
    "left": {"band": Band(lo=-64), "len_q": 900, "len_k": 1100},
    "ahead": {"band": Band(lo=100, hi=500)},
    "few-keys": {"band": CAUSAL, "len_k": 40},
}
HALF = 64


@pytest.fixture(autouse=True)
def _run_device_code_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_tiles, "Queries", constructor("Queries", key_tiles.Queries))
    monkeypatch.setattr(seen, "KeyTile", constructor("KeyTile", key_tiles.KeyTile))
    monkeypatch.setattr(seen, "Seen", constructor("Seen", seen.Seen))
    monkeypatch.setattr(seen, "GROUP_KEYS", HALF)
    monkeypatch.setattr(differentiate, "seen_by", seen.seen_by.fn)
    for module in (backward_call, key_tiles, seen, differentiate, load_backward):
        monkeypatch.setattr(module, "gl", NUMBERS)


def problem(**features: Any) -> Problem:
    sizes = {"batch": 1, "heads": 2, "kv_heads": 2, "len_q": 1024, "len_k": 1024, "scale": 1.0} | features
    return Problem(dim=128, dim_v=128, dtype=torch.bfloat16, device=torch.device("cuda", 0), **sizes)


def band_of(wanted: Problem, config: table.BackwardConfig) -> Plain:
    return Plain(
        key_tiles.QueryBand,
        lo=wanted.band.lo,
        hi=wanted.band.hi,
        shift=wanted.band.shift,
        has_lo=config.has_lo,
        has_hi=config.has_hi,
        bottom_right=config.bottom_right,
        masks=config.masks,
        turns=config.rotate,
        cut=config.parts and not config.masks,
    )


def walks(wanted: Problem, k_start: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[list[Any]]]:
    """The blocks that the loader loads for a tile of keys, and what each group does with which block."""
    config = table.choose(wanted)
    assert config.skips
    band = band_of(wanted, config)
    tile = seen.KeyTile(1, 0, 0, k_start, 0, wanted.len_k, wanted.len_q, 0, 0, 1, 0)
    call = SimpleNamespace(config=config, band=band)
    loaded: list[int] = []
    monkeypatch.setattr(load_backward, "load_keys", lambda *_: None)
    monkeypatch.setattr(load_backward, "load_block", lambda *given: loaded.append(given[-1]))
    load_backward.load_seen.fn(call, tile, 0, None, None, None, None, None)
    done: list[list[Any]] = [[], []]
    monkeypatch.setattr(
        differentiate, "step", lambda *given: done[given[-1]].append((given[4], "masked" if given[7] else "whole"))
    )
    monkeypatch.setattr(differentiate, "let_pass", lambda *given: done[given[-1]].append((given[3], "passed")))
    for group in (0, 1):
        queries = band.queries(tile, config.keys, config.rows)
        differentiate.walk_seen.fn(call, tile, 0, queries, None, group)
    return loaded, done


@pytest.mark.parametrize("features", PROBLEMS.values(), ids=PROBLEMS)
def test_groups_do_for_each_block_what_its_pairs_need(
    features: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = problem(**features)
    band, rows = wanted.band, table.choose(wanted).rows
    shift = band.shift + (wanted.len_k - wanted.len_q if wanted.align == "bottom-right" else 0)
    offset = torch.arange(wanted.len_k)[None, :] - torch.arange(wanted.len_q)[:, None] - shift
    sees = torch.ones_like(offset, dtype=torch.bool)
    if band.hi is not None:
        sees &= offset <= band.hi
    if band.lo is not None:
        sees &= offset >= band.lo
    for k_start in range(0, wanted.len_k, 2 * HALF):
        loaded, done = walks(wanted, k_start, monkeypatch)
        assert loaded == sorted(set(loaded))
        for group, steps in enumerate(done):
            assert [block for block, _ in steps] == loaded, "the group takes other blocks than those that are loaded"
            first = k_start + group * HALF
            own = sees[:, first : first + HALF]
            needed = {row // rows for row in own.any(1).nonzero().flatten().tolist()}
            worked = {block for block, what in steps if what != "passed"}
            assert worked == needed
            for block, what in steps:
                pairs = own[block * rows : (block + 1) * rows]
                whole = pairs.shape[1] == HALF and bool(pairs.all())
                assert what == "passed" or (what == "whole") <= whole, "a hidden pair is not masked"
                if whole:
                    assert what == "whole", "a mask that hides nothing"


@pytest.mark.parametrize("heads", [2, 8])
def test_the_parts_of_a_walk_cover_it_once(heads: int) -> None:
    """Of heads that share keys, too, each part walks over a stretch of the queries of all of them."""
    wanted = problem(heads=heads, len_q=4160, len_k=4096)
    config = table.choose(wanted)
    assert config.parts
    band, parts = band_of(wanted, config), table.split(wanted)[2]
    call = SimpleNamespace(config=config, group=wanted.group)
    blocks: list[int] = []
    for part in range(parts):
        tile = seen.KeyTile(1, 0, 0, 128, 0, wanted.len_k, wanted.len_q, 0, part, parts, 0)
        queries = band.queries(tile, config.keys, config.rows)
        blocks += range(queries.whole, queries.whole_end)
        assert not queries.edges
        assert backward_call.BackwardCall.members.fn(call, tile) == (0, wanted.group)
    assert blocks == list(range(65))
