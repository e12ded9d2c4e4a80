"""Decoding over a cache: every feature, layout and split agrees with float64, and nothing past a length is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attend import DTYPES, Target, normal
from decoding import Decoding, Sizes, build, check, compare, run

import ioattn

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "not causal": {"causal": False},
    "window": {"window": (20, 0)},
    "window both sides": {"window": (9, 2), "causal": False},
    "scale": {"scale": -0.7},
    "scale 0": {"scale": 0.0},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "tree": {"tree": "one"},
    "trees": {"tree": "each"},
    "everything": {"window": (30, 0), "softcap": 2.0, "alibi": True, "sinks": True},
    "everything on trees": {"window": (30, 30), "softcap": 2.0, "alibi": True, "sinks": True, "tree": "each"},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page", [None, 16], ids=["contiguous", "paged"])
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_features(backend: Target, features: dict[str, Any], page: int | None, dtype: torch.dtype) -> None:
    sizes = Sizes(n_q=3, page=page, dtype=dtype)
    check(backend, build(backend, sizes, num_splits=2, **features))


@pytest.mark.parametrize("page", [None, 16], ids=["contiguous", "paged"])
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_features_of_few_rows(backend: Target, features: dict[str, Any], page: int | None) -> None:
    """Two heads and two tokens in float32: few enough for multiply-adds in place of tensor cores."""
    sizes = Sizes(n_q=2, page=page, dim=40, dim_v=64, lengths=(37, 2, 0, 100))
    check(backend, build(backend, sizes, num_splits=2 if page else 1, **features))


@pytest.mark.parametrize("n_q", [1, 2, 8, 33, 128])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (8, 1)], ids=lambda h: f"{h[0]}-{h[1]}")
def test_query_tokens_and_groups(backend: Target, n_q: int, heads: tuple[int, int]) -> None:
    sizes = Sizes(lengths=(128, 200), n_q=n_q, heads=heads[0], kv_heads=heads[1], capacity=256, page=64)
    check(backend, build(backend, sizes))


@pytest.mark.parametrize("splits", [0, 1, 2, 3, 8, 33])
@pytest.mark.parametrize("page", [None, 32], ids=["contiguous", "paged"])
def test_splits(backend: Target, splits: int, page: int | None) -> None:
    """Also more splits than keys: the empty ones have no say, and a sink counts once."""
    sizes = Sizes(lengths=(0, 1, 5, 130, 256), n_q=2, capacity=256, page=page)
    check(backend, build(backend, sizes, sinks=True), num_splits=splits)


@pytest.mark.parametrize("page", [16, 32, 64, 128, 256, 1024])
def test_pages(backend: Target, page: int) -> None:
    check(backend, build(backend, Sizes(lengths=(1, 15, 16, 17, 300), capacity=320, page=page), num_splits=2))


@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
def test_empty_sequences(backend: Target, sinks: bool) -> None:
    case = build(backend, Sizes(lengths=(0, 0, 4), n_q=6), sinks=sinks)
    result = check(backend, case)
    # Of 6 queries over 4 keys, the first two see none.
    empty = torch.cat([result["lse"][:2].flatten(), result["lse"][2, :, :2].flatten()])
    expected = case.tensors["sinks"].repeat_interleave(6).repeat(2) if sinks else None
    assert (empty == -torch.inf).all() if expected is None else torch.equal(empty[:48], expected[:48])


@pytest.mark.parametrize("shape", [(0, 2, 1), (2, 2, 0)], ids=["no sequences", "no queries"])
def test_empty_results(backend: Target, shape: tuple[int, int, int]) -> None:
    batch, heads, n_q = shape
    cache = torch.zeros(batch, heads, 32, 16, device=backend.device)
    lengths = torch.zeros(batch, dtype=torch.int32, device=backend.device)
    out = ioattn.attention_decode(
        torch.zeros(batch, heads, n_q, 16, device=backend.device),
        cache,
        cache,
        cache_seqlens=lengths,
        backend=backend.name,
    )
    assert out.shape == (batch, heads, n_q, 16)


@pytest.mark.parametrize("dims", [(8, 8), (40, 24), (64, 128), (128, 128), (256, 256), (72, 200)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_dimensions(backend: Target, dims: tuple[int, int], dtype: torch.dtype) -> None:
    sizes = Sizes(lengths=(70, 3), n_q=2, dim=dims[0], dim_v=dims[1], page=32, dtype=dtype)
    check(backend, build(backend, sizes, num_splits=2))


@pytest.mark.parametrize("page", [None, 16], ids=["contiguous", "paged"])
@pytest.mark.parametrize("appended", [1, 3, 40])
def test_append_writes_its_rows_and_no_other(backend: Target, page: int | None, appended: int) -> None:
    case = build(backend, Sizes(lengths=(40, 41, 57, 128), n_q=3, appended=appended, page=page))
    given = case.copied()
    compare(run(backend, given), case)
    for name in ("k", "v"):
        before, after = case.tensors[f"{name}_cache"], given.tensors[f"{name}_cache"]
        changed = ~((before == after) | (before.isnan() & after.isnan())).all(-1)
        assert changed.sum() == appended * len(case.sizes.lengths) * case.sizes.kv_heads
        assert torch.equal(after[changed].sort(0)[0], case.tensors[f"{name}_new"].flatten(0, 2).sort(0)[0])
    assert torch.equal(given.tensors["cache_seqlens"], case.tensors["cache_seqlens"])


@pytest.mark.parametrize("page", [None, 16], ids=["contiguous", "paged"])
def test_one_token_after_the_other_is_all_at_once(backend: Target, page: int | None) -> None:
    """Appending tokens one by one, each attending when it arrives, is causal attention."""
    whole = build(backend, Sizes(lengths=(24, 24), n_q=24, capacity=32, page=page, appended=24))
    result = run(backend, whole.copied())
    grown = whole.copied()
    steps = []
    for step in range(24):
        rows = slice(step, step + 1)
        now = {name: grown.tensors[name][:, :, rows] for name in ("q", "k_new", "v_new")}
        now["cache_seqlens"] = torch.full_like(grown.tensors["cache_seqlens"], step)
        steps.append(run(backend, Decoding(grown.sizes, grown.tensors | now, grown.options)))
    each = {name: torch.cat([step[name] for step in steps], 2) for name in result}
    compare(each, whole)
    compare(result, whole)


LAYOUTS = {
    "pages of rows of heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every second page": lambda x: x.repeat_interleave(2, 0)[::2],
    "columns apart": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "odd rows": lambda x: torch.cat([x, x[..., :3]], -1)[..., : x.shape[-1]],
    "keys beside values": lambda x: torch.stack([x, x], 1)[:, 1],
}


@pytest.mark.parametrize("page", [None, 16], ids=["contiguous", "paged"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides(backend: Target, layout: Any, page: int | None, dtype: torch.dtype) -> None:
    case = build(backend, Sizes(n_q=2, page=page, appended=1, dtype=dtype, lengths=(7, 20)))
    laid_out = {name: layout(case.tensors[name]) for name in ("k_cache", "v_cache")}
    laid_out["q"] = case.tensors["q"].transpose(1, 2).contiguous().transpose(1, 2)
    given = Decoding(case.sizes, case.tensors | laid_out, case.options)
    result = run(backend, given, num_splits=2)
    compare(result, case)
    assert result["out"].transpose(1, 2).is_contiguous()


def test_one_length_for_all(backend: Target) -> None:
    case = build(backend, Sizes(lengths=(50, 50)))
    every = run(backend, case)
    one = {name: x for name, x in case.tensors.items() if name != "cache_seqlens"}
    out = ioattn.attention_decode(**one, cache_seqlens=50, backend=backend.name)
    assert torch.equal(every["out"], out)


@pytest.mark.parametrize("page", [None, 16], ids=["contiguous", "paged"])
def test_nan_and_infinity_of_hidden_rows_stay_hidden(backend: Target, page: int | None) -> None:
    """A draft that another does not see, a row before the window: whatever they hold has no way to its result."""
    for where, value in (("k", torch.nan), ("v", torch.nan), ("v", torch.inf), ("v", -torch.inf), ("k", torch.inf)):
        case = build(
            backend, Sizes(lengths=(40, 64), n_q=4, page=page, kv_heads=1, appended=4), window=(20, 40), tree="one"
        )
        case.tensors["tree_mask"][:] = torch.eye(4, dtype=torch.bool)
        for rows, fresh in zip(case.sequences, case.tensors[f"{where}_new"], strict=True):
            fresh[:, 2] = value
            rows[where][:, :, -2] = value
            # Before every window; in the cache itself, too.
            rows[where][:, :, 0] = value
        first = case.tensors[f"{where}_cache"]
        places = [0, 1] if page is None else case.tensors["block_table"][:, 0].tolist()
        for place in places:
            first[place, :, 0] = value
        check(backend, case, num_splits=2)


def test_nan_in_a_visible_row_is_seen(backend: Target) -> None:
    case = build(backend, Sizes(lengths=(40, 64)))
    case.tensors["v_cache"][1, :, 5] = torch.nan
    case.sequences[1]["v"][:, :, 5] = torch.nan
    result = check(backend, case, num_splits=3)
    assert result["out"][1].isnan().all()
    assert result["out"][0].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("name", ["k", "v"])
def test_visible_nan_and_infinity_count(backend: Target, name: str, value: float, dtype: torch.dtype) -> None:
    """Also where a float32 product is one of several parts, of which an infinity has none."""
    case = build(backend, Sizes(lengths=(100, 100), capacity=128, dtype=dtype), num_splits=2)
    for row in (3, 99):
        case.tensors[f"{name}_cache"][0, 0, row, 5] = value
        case.sequences[0][name][0, 0, row, 5] = value
    check(backend, case)


def test_equal_calls_have_equal_bits(backend: Target) -> None:
    case = build(backend, Sizes(lengths=(300, 17), capacity=512, page=16, dtype=torch.bfloat16))
    first, second = (run(backend, case) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_unsplit_results_do_not_depend_on_the_batch(backend: Target) -> None:
    """With num_splits=1 a sequence has the same bits alone and among others."""
    together = build(backend, Sizes(lengths=(100, 17, 64)))
    among = run(backend, together, num_splits=1)
    names = ("q", "k_cache", "v_cache", "cache_seqlens")
    alone = Decoding(replace(together.sizes, lengths=(17,)), {n: together.tensors[n][1:2] for n in names}, {})
    assert torch.equal(run(backend, alone, num_splits=1)["out"][0], among["out"][1])


@pytest.mark.parametrize("splits", [0, 3])
@pytest.mark.parametrize("kv_heads", [8, 1])
@pytest.mark.parametrize("value", [0.0, 1e4])
def test_uniform_scores_give_the_mean(backend: Target, value: float, kv_heads: int, splits: int) -> None:
    """Padded lanes at the end of a tile must not count: lse is then the logarithm of the length plus the score.

    A float32 near 1e4 does not hold that logarithm: pieces have to be added without it.
    """
    sizes = Sizes(lengths=(77, 129), heads=8, kv_heads=kv_heads, dim=128, capacity=256, page=16)
    case = build(backend, sizes, scale=1 / 128, num_splits=splits)
    keys = case.tensors["k_cache"]
    keys[~keys.isnan()] = 1.0
    case.tensors["q"].fill_(value)
    for rows in case.sequences:
        rows["k"].fill_(1.0)
    check(backend, case)


def test_long_cache_with_short_sequences(backend: Target, natural_tiles: None) -> None:
    sizes = Sizes(lengths=(3, 4096, 0, 17), capacity=8192, heads=2, kv_heads=1)
    check(backend, build(backend, sizes))


@pytest.mark.gpu
@pytest.mark.parametrize("page", [None, 64], ids=["contiguous", "paged"])
@pytest.mark.parametrize("n_q", [1, 8, 16])
@pytest.mark.parametrize("features", [FEATURES["plain"], FEATURES["everything on trees"]], ids=["plain", "everything"])
def test_a_head_for_every_processor(features: dict[str, Any], n_q: int, page: int | None) -> None:
    """Where heads fill an H200 tiles are turned or have 64 rows, and those at edges are copied ahead."""
    sizes = Sizes((700, 0, 7, 257), n_q, 128, 32, 128, capacity=768, page=page, dtype=torch.bfloat16)
    target = Target("triton", "cuda")
    check(target, build(target, sizes, **features))


def test_random_input_of_the_oracle_differs(backend: Target) -> None:
    """The comparison can fail: a result for other keys is not taken."""
    case = build(backend, Sizes())
    result = run(backend, case)
    case.sequences[0]["k"][:] = normal(*case.sequences[0]["k"].shape, like=backend, seed=77)
    with pytest.raises(AssertionError, match="sequence 0"):
        compare(result, case)
