"""Faults that shipped kernels had: empty work, hidden data, masks, windows and heads. Ids: A, B and F."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attend import Shape, Target, check, dense, normal, offsets, packed, run
from oracle import Case

import ioattn
from ioattn import registry
from ioattn.problem import Gradients, Options, Problem, Tensors


@pytest.mark.parametrize(("n_q", "n_k"), [(5, 2), (140, 75)])
def test_a1_causal_with_more_queries_than_keys(backend: Target, n_q: int, n_k: int) -> None:
    case = dense(backend, Shape(n_q=n_q, n_k=n_k), causal=True)
    result = check(backend, case)
    blind = n_q - n_k
    assert (result["out"][:, :, :blind] == 0).all()
    assert (result["dq"][:, :, :blind] == 0).all()
    assert (result["lse"][:, :, :blind] == -torch.inf).all()
    assert torch.allclose(result["out"][:, :, blind], case.tensors["v"][:, :, 0])


def test_a3_row_of_the_most_negative_finite_bias_is_a_mean(backend: Target) -> None:
    case = dense(backend, Shape(heads=1, n_q=3, dim=4), bias=(3, 3))
    bias = torch.ones(3, 3, device=backend.device)
    bias[0] = torch.finfo(torch.float32).min
    out = check(backend, case.replace(bias=bias), gradients=False)["out"]
    assert torch.allclose(out[0, 0, 0], case.tensors["v"][0, 0].mean(0), rtol=1e-6)


@pytest.mark.parametrize("hidden", [(0, 200), (60, 250), (0, 256)], ids=str)
def test_a5_long_run_of_minus_infinity_before_the_visible_keys(backend: Target, hidden: tuple[int, int]) -> None:
    case = dense(backend, Shape(n_q=3, n_k=257), bias=(2, 3, 257))
    case.tensors["bias"][..., slice(*hidden)] = -torch.inf
    check(backend, case)


def test_a7_lse_of_empty_rows_is_minus_infinity_in_half_precision(backend: Target) -> None:
    case = packed(backend, [40, 70], [17, 70], torch.bfloat16, causal=True)
    assert (check(backend, case)["lse"][:, :23] == -torch.inf).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [128, 192])
@pytest.mark.parametrize("n_q", [1, 64, 128, 256])
def test_a9_no_keys(backend: Target, n_q: int, dim: int, causal: bool) -> None:
    result = check(backend, dense(backend, Shape(n_q=n_q, n_k=0, dim=dim), causal=causal))
    assert (result["out"] == 0).all()
    assert (result["lse"] == -torch.inf).all()


@pytest.mark.parametrize("shape", [Shape(2, 2, 0, 9), Shape(2, 2, 9, 0), Shape(0, 2, 9, 9)], ids=["Nq", "Nk", "B"])
def test_a11_backward_of_nothing(backend: Target, shape: Shape) -> None:
    case = dense(backend, shape)
    result = check(backend, case)
    for name in "qkv":
        assert result[f"d{name}"].shape == case.tensors[name].shape
        assert not result[f"d{name}"].any()


def test_a13_packed_with_one_key_for_many_queries(backend: Target) -> None:
    case = packed(backend, [76, 34, 146], [1, 1, 1], torch.float16, dim=32, causal=True)
    case = case.replace(q=case.tensors["q"] * 3, k=case.tensors["k"] * 3)
    case = Case(case.tensors, torch.ones_like(case.dout), None, case.options)
    out = check(backend, case)["out"]
    last = case.tensors["cu_seqlens_q"][1:].long() - 1
    assert torch.equal(out[last], case.tensors["v"])
    out[last] = 0
    assert not out.any()


@pytest.mark.parametrize("shrink", [8, pytest.param(1, marks=pytest.mark.gpu)])
def test_a15_packed_sequences_without_queries(backend: Target, shrink: int) -> None:
    lengths = ([0, 1208 // shrink, 840 // shrink, 0], [2538 // shrink, 1742 // shrink, 840 // shrink, 3072 // shrink])
    case = packed(backend, *lengths, heads=4, kv_heads=1, dim=256, causal=True)
    result = check(backend, case)
    for name in ("dk", "dv"):
        assert not result[name][: lengths[1][0]].any()
        assert not result[name][sum(lengths[1][:3]) :].any()


def guarded(*shape: int, like: Target, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor between two canary rows, and the store that shows whether they were touched."""
    store = torch.full((shape[0] + 2, *shape[1:]), 77.0, device=like.device, dtype=dtype)
    return store[1:-1], store


@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_a17_nothing_is_written_outside_of_the_outputs(backend: Target, layout: str) -> None:
    if layout == "packed":
        case = packed(backend, [9, 40, 0, 17], [0, 33, 5, 70], sinks=True, causal=True)
        lse_shape: tuple[int, ...] = (2, 66)
    else:
        case = dense(backend, Shape(2, 2, 33, 70), sinks=True, causal=True)
        lse_shape = (2, 2, 33)
    tensors = Tensors(**case.tensors)
    problem = Problem.of(tensors, Options(hi=0))
    engine = registry.choose(problem, backend.name)
    views, stores = {}, {}
    shapes = {"out": case.dout.shape, "lse": lse_shape, **{f"d{n}": case.tensors[n].shape for n in ("q", "k", "v")}}
    for name, shape in {**shapes, "dsinks": (2,)}.items():
        views[name], stores[name] = guarded(*shape, like=backend)
    out, lse = views.pop("out"), views.pop("lse")
    engine.forward(problem, tensors, out, lse)
    engine.backward(problem, tensors, out, lse, case.dout, case.dlse, Gradients(**views))
    expected = run(backend, case)
    rounding = {"rtol": 1e-5, "atol": 1e-5}
    for name, value in {"out": out, "lse": lse, **views}.items():
        assert torch.allclose(value, expected[name], **rounding), name
        assert (stores[name][[0, -1]] == 77.0).all(), name


def test_a19_merge_of_parts_that_saw_nothing() -> None:
    outs, lses = torch.randn(2, 400, 8), torch.randn(2, 400)
    both, one = torch.arange(400) % 4 == 0, torch.arange(400) % 10 == 1
    lses[:, both], lses[1, one & ~both] = -torch.inf, -torch.inf
    outs[1, one & ~both] = 0
    out, lse = ioattn.merge(outs, lses)
    assert not out[both].any()
    assert (lse[both] == -torch.inf).all()
    assert torch.equal(out[one & ~both], outs[0, one & ~both])
    assert torch.equal(lse[one & ~both], lses[0, one & ~both])


def test_a21_mask_cut_from_a_longer_one(backend: Target) -> None:
    case = dense(backend, Shape(2, 1, 2, 2))
    long = torch.ones(1, 1, 256, 256, dtype=torch.bool, device=backend.device).tril()
    masked = check(backend, case.replace(mask=long[..., :2, :2]))
    causal = run(backend, Case(case.tensors, case.dout, case.dlse, {"causal": True}))
    for name in masked:
        assert torch.allclose(masked[name], causal[name], atol=1e-6), name


def test_b3_rows_allocated_past_the_last_sequence(backend: Target) -> None:
    case = packed(backend, [21], [21], heads=16, kv_heads=1, dim=128, slack=3, causal=True)
    for name in "qkv":
        case.tensors[name][21:] = torch.nan
    result = check(backend, case)
    assert result["out"][:21].isfinite().all()
    assert not result["out"][21:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_b5_nan_key_is_masked_by_selection(backend: Target, dtype: torch.dtype) -> None:
    case = dense(backend, Shape(n_q=7, n_k=70), dtype, mask=(70,))
    case.tensors["mask"][:] = torch.arange(70, device=backend.device) != 33
    for name in "kv":
        case.tensors[name][:, :, 33] = torch.nan
    assert check(backend, case)["out"].isfinite().all()


@pytest.mark.parametrize("n_k", [1, 255, 257, 300])
def test_b7_one_zero_query_gives_the_mean_and_the_logarithm_of_the_count(backend: Target, n_k: int) -> None:
    case = dense(backend, Shape(heads=8, n_q=1, n_k=n_k, dim=128))
    result = check(backend, case.replace(q=torch.zeros_like(case.tensors["q"])))
    assert torch.allclose(result["lse"], torch.full_like(result["lse"], math.log(n_k)), rtol=3e-7)
    assert torch.allclose(result["out"][:, :, 0], case.tensors["v"].mean(2), atol=1e-6)


@pytest.mark.parametrize("lengths", [[128, 64, 100], [128, 1], [127, 129]], ids=str)
def test_b9_packed_backward_on_dirty_memory(backend: Target, lengths: list[int]) -> None:
    check(backend, packed(backend, lengths, lengths, torch.bfloat16, dim=64))
    check(backend, packed(backend, lengths, lengths, torch.float32, dim=64, causal=True))


@pytest.mark.parametrize("causal", ["top-left", "bottom-right", True])
def test_f1_one_causal_query_over_eight_keys(backend: Target, causal: bool | str) -> None:
    case = dense(backend, Shape(n_q=1, n_k=8), causal=causal)
    out = check(backend, case)["out"]
    assert torch.allclose(out[:, :, 0], case.tensors["v"][:, :, 0]) == (causal == "top-left")


def test_f3_an_open_window_is_plain_causal_and_minus_one_is_refused(backend: Target) -> None:
    case = dense(backend, Shape(2, 4, 70, dim=128), torch.bfloat16, causal=True, deterministic=True)
    plain = check(backend, case)
    opened = check(backend, Case(case.tensors, case.dout, case.dlse, {**case.options, "window": (None, 0)}))
    assert all(torch.equal(plain[name], opened[name]) for name in plain)
    with pytest.raises(ValueError, match="window"):
        ioattn.attention(**case.tensors, causal=True, window=(-1, 0))


def test_f5_negative_right_side_is_refused(backend: Target) -> None:
    q = normal(1, 1, 8, 16, like=backend)
    with pytest.raises(ValueError, match=r"window is \(-1, -3\)"):
        ioattn.attention(q, q, q, causal=True, window=(-1, -3), backend=backend.name)


@pytest.mark.parametrize("window", [(None, 0), (0, None), (3, 0), (0, 3), (0, 0)], ids=str)
def test_f7_zero_is_a_bound(backend: Target, window: tuple[int | None, int | None]) -> None:
    check(backend, dense(backend, Shape(n_q=40), window=window))


@pytest.mark.parametrize("n_k", [30, 64, 100])
def test_f9_window_that_falls_before_the_first_key(backend: Target, n_k: int) -> None:
    result = check(backend, dense(backend, Shape(n_q=129, n_k=n_k), window=(32, 64)))
    blind = max(129 - n_k - 64, 0)
    assert (result["lse"][:, :, :blind] == -torch.inf).all()
    assert result["lse"][:, :, blind:].isfinite().all()


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (40, 8), (64, 4)])
def test_f11_neighbouring_query_heads_share_a_key_head(backend: Target, heads: int, kv_heads: int) -> None:
    case = dense(backend, Shape(1, heads, 3, 5, kv_heads=kv_heads))
    shared = check(backend, case)["out"]
    repeated = {n: case.tensors[n].repeat_interleave(heads // kv_heads, 1) for n in "kv"}
    assert torch.allclose(shared, run(backend, case.replace(**repeated), gradients=False)["out"], atol=1e-6)


def test_f13_group_of_six(backend: Target, natural_tiles: None) -> None:
    n_k = 500 if backend.interpreted else 4096
    check(backend, dense(backend, Shape(2, 12, 1, n_k, 16, kv_heads=2)))


def test_f17_each_packed_sequence_has_its_own_length(backend: Target) -> None:
    """One query per sequence over very different numbers of keys: what a split over keys must bound by each."""
    check(backend, packed(backend, [1] * 5, [1, 700, 3, 257, 64], heads=4, kv_heads=1, dim=64, sinks=True))


@pytest.mark.parametrize("dim", [8, 192, 320, 512])
def test_f23_head_dimensions_work_or_are_refused_by_name(backend: Target, dim: int) -> None:
    case = dense(backend, Shape(n_q=20, dim=dim))
    reasons = dict(ioattn.explain(*(case.tensors[n] for n in "qkv")).verdicts)[backend.name]
    if not reasons:
        check(backend, case)
        return
    with pytest.raises(ioattn.UnsupportedProblemError, match=str(dim)):
        ioattn.attention(**case.tensors, backend=backend.name)


def test_offsets_of_zero_sequences_and_of_one(backend: Target) -> None:
    options: dict[str, Any] = {"backend": backend.name}
    q = normal(4, 2, 8, like=backend)
    none = ioattn.attention_varlen(q, q, q, offsets([], backend), offsets([], backend), **options)
    assert not none.any()
    one = ioattn.attention_varlen(q, q, q, offsets([4], backend), offsets([4], backend), **options)
    dense_out = ioattn.attention(*(q.transpose(0, 1)[None],) * 3, **options)
    assert torch.allclose(one, dense_out[0].transpose(0, 1), atol=1e-6)
