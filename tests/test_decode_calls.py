"""Decoding as an operation: errors, lengths out of range, torch.compile, opcheck, CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attend import Target, normal
from decoding import Decoding, Sizes, build, compare, run, skip_where_it_objects
from torch import Tensor

import ioattn
from ioattn import caches, registry
from ioattn.caches import CacheTensors, DecodeOptions

INT_MAX = 2**31 - 1


def call(case: Decoding, **changes: Any) -> Any:
    return ioattn.attention_decode(**{**case.tensors, **case.options, **changes})


def case_for(page: int | None = 16, appended: int = 0) -> Decoding:
    return build(Target("eager", "cpu"), Sizes(lengths=(20, 40), n_q=2, page=page, appended=appended))


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "3-D queries": ({"q": torch.zeros(2, 4, 16)}, ValueError, r"q has 3 dimensions; it must have 4: \(B, H, Nq, D\)"),
    "no tensor": ({"k_cache": [1.0]}, TypeError, "k_cache is a list; it must be a torch.Tensor"),
    "other type": ({"v_cache": torch.zeros(19, 2, 16, 16).half()}, TypeError, "v_cache is torch.float16; it must have"),
    "integers": ({"q": torch.zeros(2, 4, 2, 16, dtype=torch.int32)}, TypeError, "q is torch.int32; it must be float16"),
    "rows differ": ({"v_cache": torch.zeros(18, 2, 16, 16)}, ValueError, "v_cache has shape .* must be k_cache's"),
    "dimension": ({"q": torch.zeros(2, 4, 2, 8)}, ValueError, "k_cache has head dimension 16; it must have q's, 8"),
    "heads": ({"q": torch.zeros(2, 3, 2, 16)}, ValueError, "q has 3 heads; it must have a multiple of the 2 heads"),
    "long lengths": ({"cache_seqlens": torch.tensor([1, 2])}, TypeError, "cache_seqlens is torch.int64; it must be"),
    "lengths' size": (
        {"cache_seqlens": torch.ones(3, dtype=torch.int32)}, ValueError, r"cache_seqlens has shape \(3,\)",
    ),
    "no lengths": ({"cache_seqlens": None}, TypeError, "cache_seqlens is a NoneType; it must be an int32"),
    "a flag for lengths": ({"cache_seqlens": True}, TypeError, "cache_seqlens is a bool"),
    "table's size": (
        {"block_table": torch.zeros(3, 8, dtype=torch.int32)}, ValueError, r"block_table has shape \(3, 8\)",
    ),
    "table's type": ({"block_table": torch.zeros(2, 8)}, TypeError, "block_table is torch.float32; it must"),
    "no table": ({"block_table": None}, ValueError, "k_cache has batch size 19; without a block_table it"),
    "tree's type": ({"tree_mask": torch.zeros(2, 2)}, TypeError, "tree_mask is torch.float32; it must be a bool"),
    "tree's size": ({"tree_mask": torch.zeros(3, 3) > 0}, ValueError, r"tree_mask has shape \(1, 3, 3\)"),
    "slopes": ({"alibi_slopes": torch.zeros(2)}, ValueError, r"alibi_slopes has shape \(2,\); it must be"),
    "causal": ({"causal": "top-left"}, TypeError, "causal is 'top-left'; it must be True or False"),
    "window": ({"window": (-1, 0)}, ValueError, "window is .*; it must be"),
    "softcap": ({"softcap": 0.0}, ValueError, "softcap is 0.0; it must be positive"),
    "splits": ({"num_splits": -1}, ValueError, "num_splits is -1; it must be from 0"),
    "split": ({"num_splits": 1.5}, TypeError, "num_splits is 1.5; it must be an int"),
    "check": ({"check": 1}, TypeError, "check is 1; it must be True or False"),
    "one new": ({"k_new": torch.zeros(2, 2, 1, 16)}, ValueError, "v_new is None; k_new and v_new must be"),
    "backend": ({"backend": "cuda"}, ValueError, "backend is 'cuda'; it must be one of"),
    "gradient": ({"q": torch.zeros(2, 4, 2, 16, requires_grad=True)}, ValueError, "requires a gradient"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), WRONG.values(), ids=WRONG)
def test_errors(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(case_for(), **changes)


WRONG_ROWS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "type": ({"k_new": torch.zeros(2, 2, 1, 16).half()}, TypeError, "k_new is torch.float16; it must have the cache's"),
    "columns": ({"v_new": torch.zeros(2, 2, 1, 8)}, ValueError, r"v_new has shape .*; it must be \(B, Hk, new rows"),
    "rows": ({"v_new": torch.zeros(2, 2, 3, 16)}, ValueError, "v_new has 3 rows; it must have as many as k_new, 1"),
    "too many": (
        {"k_new": torch.zeros(2, 2, 200, 16), "v_new": torch.zeros(2, 2, 200, 16)}, ValueError, "k_new has 200 rows"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), WRONG_ROWS.values(), ids=WRONG_ROWS)
def test_errors_of_new_rows_leave_the_cache_alone(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    case = case_for(appended=1)
    before = case.tensors["k_cache"].clone()
    with pytest.raises(error, match=message):
        call(case, **changes)
    assert torch.equal(case.tensors["k_cache"].nan_to_num(7), before.nan_to_num(7))


@pytest.mark.parametrize("page", [24, 8, 48])
def test_pages_are_powers_of_two(page: int) -> None:
    cache = torch.zeros(4, 2, page, 16)
    table = torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"k_cache has pages of {page} rows; they must have a power of two"):
        ioattn.attention_decode(torch.zeros(2, 2, 1, 16), cache, cache, cache_seqlens=3, block_table=table)


@pytest.mark.parametrize("length", [-1, 129, INT_MAX, -INT_MAX])
@pytest.mark.parametrize("page", [None, 16], ids=["contiguous", "paged"])
def test_a_length_that_does_not_fit_is_an_error(backend: Target, page: int | None, length: int) -> None:
    case = build(backend, Sizes(lengths=(20, 40), page=page))
    case.tensors["cache_seqlens"][1] = length
    with pytest.raises(ValueError, match=rf"cache_seqlens\[1\] is {length}; it must be at least 0 and fit the 128"):
        run(backend, case, check=True)


def test_an_append_that_does_not_fit_is_an_error_and_writes_nothing(backend: Target) -> None:
    case = build(backend, Sizes(lengths=(128, 40), page=16, appended=2))
    case.tensors["cache_seqlens"][0] = 127
    before = case.copied()
    with pytest.raises(ValueError, match=r"cache_seqlens\[0\] is 127 behind which 2 are appended; it must be"):
        run(backend, case, check=True)
    assert torch.equal(case.tensors["k_cache"].nan_to_num(7), before.tensors["k_cache"].nan_to_num(7))


@pytest.mark.parametrize("page", [-1, 19, INT_MAX])
def test_a_page_that_does_not_exist_is_an_error(backend: Target, page: int) -> None:
    case = build(backend, Sizes(lengths=(20, 40), page=16))
    case.tensors["block_table"][1, 2] = page
    with pytest.raises(ValueError, match=rf"block_table\[1, 2\] is {page}; it must be from 0 to 18, the last page"):
        run(backend, case, check=True)


def test_unused_entries_of_the_table_may_be_anything(backend: Target) -> None:
    case = build(backend, Sizes(lengths=(20, 40), page=16))
    case.tensors["block_table"][1, 3:] = torch.tensor([INT_MAX, -1, -INT_MAX, 99, -7], device=backend.device)
    compare(run(backend, case, check=True), case)


def unchecked(target: Target, case: Decoding, splits: int) -> dict[str, Tensor]:
    """What a backend that reads lengths on the device makes of them when nobody has checked them."""
    skip_where_it_objects(target, case)
    tensors = CacheTensors(**{name: case.tensors.get(name) for name in CacheTensors._fields})
    appended = case.sizes.appended
    problem = caches.describe(tensors, DecodeOptions(hi=0, splits=splits, appended=appended))
    module = registry.load(target.name)
    if appended:
        module.append(problem, tensors, case.tensors["k_new"], case.tensors["v_new"])
    out, lse = torch.empty_like(tensors.q), torch.empty(tensors.q.shape[:3], device=target.device)
    module.decode(problem, tensors, out, lse)
    return {"out": out, "lse": lse}


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("page", [None, 16, 64], ids=["contiguous", "page 16", "page 64"])
def test_unchecked_lengths_and_pages_give_nan_and_touch_nothing(backend: Target, page: int | None, splits: int) -> None:
    if backend.name != "triton":
        pytest.skip("checks lengths and pages in every call")
    for name, at, value in (
        ("cache_seqlens", 1, -1),
        ("cache_seqlens", 1, INT_MAX),
        ("cache_seqlens", 1, 128),
        ("block_table", (1, 0), -1),
        ("block_table", (1, 0), INT_MAX),
    ):
        if name not in ("cache_seqlens", *(() if page is None else ("block_table",))):
            continue
        case = build(backend, Sizes(lengths=(20, 37, 90), n_q=2, page=page, appended=1))
        case.tensors[name][at] = value
        given = case.copied()
        result = unchecked(backend, given, splits)
        assert result["out"][1].isnan().all()
        assert result["lse"][1].isnan().all()
        for b in (0, 2):
            alone = Decoding(Sizes(lengths=(case.sizes.lengths[b],), n_q=2), {"q": case.tensors["q"][b : b + 1]}, {})
            alone.sequences.append(case.sequences[b])
            compare({name: x[b : b + 1] for name, x in result.items()}, alone)
        changed = given.tensors["k_cache"].nan_to_num(7) != case.tensors["k_cache"].nan_to_num(7)
        wrong_length = name == "cache_seqlens"
        # The row that has no place is not written; where only the first page is wrong it has one.
        last_page_is_wrong = not wrong_length and page == 64
        assert changed.any(-1).sum() == 2 * (2 if wrong_length or last_page_is_wrong else 3)


@pytest.mark.parametrize("page", [None, 16], ids=["contiguous", "paged"])
@pytest.mark.parametrize("appended", [0, 1], ids=["read", "append"])
def test_compile(backend: Target, page: int | None, appended: int) -> None:
    case = build(backend, Sizes(lengths=(20, 40), n_q=2, page=page, appended=appended), sinks=True)
    skip_where_it_objects(backend, case)
    given = case.copied()

    def step(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        doubled = {**tensors, "q": tensors["q"] * 2}
        out, lse = ioattn.attention_decode(**doubled, return_lse=True, num_splits=2, backend=backend.name)
        return out + 1, lse

    out, lse = torch.compile(step, fullgraph=True, backend="aot_eager")(given.tensors)
    expected = build(backend, case.sizes, sinks=True)
    expected.tensors["q"] *= 2
    compare({"out": out - 1, "lse": lse}, expected)
    if appended:
        written = case.copied()
        run(backend, written)
        assert torch.equal(written.tensors["k_cache"].nan_to_num(7), given.tensors["k_cache"].nan_to_num(7))


@pytest.mark.parametrize("page", [None, 16], ids=["contiguous", "paged"])
def test_opcheck(backend: Target, page: int | None) -> None:
    case = build(backend, Sizes(lengths=(20, 40), n_q=2, page=page, appended=1), sinks=True, alibi=True, tree="each")
    skip_where_it_objects(backend, case)
    # opcheck compares what an operator left alone with ==, and NaN is not equal to itself.
    given = {name: x.nan_to_num(0.5) if x.is_floating_point() else x for name, x in case.tensors.items()}
    places = [given.get(name) for name in CacheTensors._fields[:5]]
    torch.library.opcheck(
        torch.ops.ioattn.append.default, (*places, given["k_new"], given["v_new"], False, backend.name)
    )
    tensors = [given.get(name) for name in CacheTensors._fields]
    options = DecodeOptions(lo=-30, hi=3, scale=0.3, softcap=2.0, appended=1, splits=2)
    torch.library.opcheck(torch.ops.ioattn.decode.default, (*tensors, *options, backend.name))


def test_the_append_is_ordered_before_what_reads_it_in_a_compiled_program(backend: Target) -> None:
    """Two steps in one program: the second sees the row of the first."""
    case = build(backend, Sizes(lengths=(20, 40), page=16))
    skip_where_it_objects(backend, case)
    rows = [normal(2, 2, 1, 16, like=backend, seed=60 + i) for i in range(4)]

    def two_steps(tensors: dict[str, Tensor], rows: list[Tensor]) -> tuple[Tensor, Tensor]:
        first = ioattn.attention_decode(**tensors, k_new=rows[0], v_new=rows[1], backend=backend.name)
        longer = {**tensors, "cache_seqlens": tensors["cache_seqlens"] + 1}
        return first, ioattn.attention_decode(**longer, k_new=rows[2], v_new=rows[3], backend=backend.name)

    compiled, plain = case.copied(), case.copied()
    got = torch.compile(two_steps, fullgraph=True, backend="aot_eager")(compiled.tensors, rows)
    expected = two_steps(plain.tensors, rows)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("page", [None, 16], ids=["contiguous", "paged"])
def test_a_captured_graph_follows_the_lengths(page: int | None) -> None:
    target = Target("triton", "cuda")
    case = build(target, Sizes(lengths=(20, 40), page=page, appended=1, capacity=512))
    static = case.copied().tensors
    warm = torch.cuda.Stream()
    with torch.cuda.stream(warm):
        call(case.copied(), backend="triton")
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = ioattn.attention_decode(**static, return_lse=True, backend="triton")
    for lengths in ((20, 40), (1, 512), (300, 2), (257, 256)):
        other = build(target, Sizes(lengths=lengths, page=page, appended=1, capacity=512))
        for name, x in static.items():
            x.copy_(other.tensors[name])
        graph.replay()
        compare({"out": out, "lse": lse}, other)


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    target = Target("triton", "cuda")
    case = build(target, Sizes(page=16, appended=1))
    call(case.copied(), backend="triton")
    given = case.copied()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(given, backend="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_explain_takes_a_cache() -> None:
    case = case_for()
    named = {"k": case.tensors["k_cache"], "v": case.tensors["v_cache"]}
    others = {name: x for name, x in case.tensors.items() if name not in ("k_cache", "v_cache")}
    explanation = ioattn.explain(**named, **others, causal=True)
    assert "cache(page 16)" in str(explanation)
    assert dict(explanation.verdicts)["eager"] == ()
    assert dict(explanation.verdicts)["gluon"]
    with pytest.raises(TypeError, match="explain got bias; tensors must be among cache_seqlens, block_table"):
        ioattn.explain(**named, **others, bias=torch.zeros(1))


def test_equal_shapes_are_cut_into_equal_pieces() -> None:
    """The heuristic sees shapes, not lengths: never more pieces than tiles of keys, and enough to fill a GPU."""
    splits = pytest.importorskip("ioattn.backends.triton.splits", exc_type=ImportError)
    config = pytest.importorskip("ioattn.backends.triton.config", exc_type=ImportError)
    gpu = config.Gpu((9, 0), 227 * 1024, 132)
    for batch, keys in ((1, 131072), (1, 8192), (1, 1024), (1, 64), (1, 1), (16, 8192), (64, 4096), (300, 512)):
        q = torch.empty(batch, 32, 1, 128, dtype=torch.bfloat16, device="meta")
        cache = torch.empty(batch, 8, keys, 128, dtype=torch.bfloat16, device="meta")
        lengths = torch.empty(batch, dtype=torch.int32, device="meta")
        problem = caches.describe(CacheTensors(q, cache, cache, lengths), DecodeOptions(hi=0))
        tiles = splits.choose(problem, gpu)
        number = splits.pieces(problem, tiles, gpu)
        assert 1 <= number <= -(-keys // tiles.k_tile)
        if batch * 8 * -(-keys // tiles.k_tile) >= 132:
            assert batch * 8 * number >= 128, (batch, keys, number)


@pytest.mark.parametrize(
    ("batch", "keys", "page", "cut"),
    [
        (1, 131072, None, (64, 4, 4, 16)),
        (1, 8192, None, (64, 4, 4, 16)),
        (1, 1024, None, (64, 4, 3, 16)),
        (16, 8192, None, (128, 8, 3, 1)),
        (16, 8192, 64, (128, 8, 3, 1)),
        (16, 8192, 16, (128, 8, 4, 1)),
        (64, 4096, None, (64, 4, 3, 1)),
        (64, 4096, 16, (64, 4, 4, 1)),
    ],
)
def test_cuts_that_were_the_fastest_on_an_h200(
    batch: int, keys: int, page: int | None, cut: tuple[int, int, int, int]
) -> None:
    """Keys of a tile, warps, stages and pieces, at H 32/8, D 128: rows in benchmarks/results."""
    splits = pytest.importorskip("ioattn.backends.triton.splits", exc_type=ImportError)
    config = pytest.importorskip("ioattn.backends.triton.config", exc_type=ImportError)
    gpu = config.Gpu((9, 0), 227 * 1024, 132)
    shape = (batch, 8, keys, 128) if page is None else (batch * keys // page, 8, page, 128)
    cache = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    q = torch.empty(batch, 32, 1, 128, dtype=torch.bfloat16, device="meta")
    lengths = torch.empty(batch, dtype=torch.int32, device="meta")
    table = None if page is None else torch.empty(batch, keys // page, dtype=torch.int32, device="meta")
    problem = caches.describe(CacheTensors(q, cache, cache, lengths, table), DecodeOptions(hi=0))
    tiles = splits.choose(problem, gpu)
    number = splits.pieces(problem, tiles, gpu)
    assert (tiles.q_tile, tiles.k_tile, tiles.num_warps, tiles.num_stages, number) == (16, *cut)
