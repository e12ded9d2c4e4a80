"""Extreme numbers: huge scores, empty rows, infinite biases, NaN in all places, odd scales."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attend import DTYPES, Shape, Target, check, dense, normal, packed, run
from oracle import Case, exact, visible
from tolerance import assert_close

import ioattn

SHAPE = Shape(2, 4, 33, 70, 16, kv_heads=2)

HIDING: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (9, 4)},
    "mask": {"mask": (2, 4, 33, 70)},
    "mask of padding": {"mask": (2, 1, 1, 70)},
    "mask of queries": {"mask": (2, 4, 33, 70), "causal": True, "sinks": True},
}


def stretched(case: Case, factor: float, names: str = "qk") -> Case:
    """The case with some of its inputs multiplied."""
    return case.replace(**{name: case.tensors[name] * factor for name in names})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [4.0, 30.0, 200.0])
def test_peaked_softmax(backend: Target, factor: float, dtype: torch.dtype) -> None:
    check(backend, stretched(dense(backend, SHAPE, dtype, causal=True), factor))


@pytest.mark.parametrize("order", ["growing", "falling"])
def test_row_max_moves_with_every_tile(backend: Target, order: str) -> None:
    case = dense(backend, Shape(heads=1, n_q=20, n_k=257, dim=16))
    ramp = torch.linspace(-40, 40, 257, device=backend.device)
    k = 0.1 * case.tensors["k"]
    k[..., 0] = ramp if order == "growing" else ramp.flip(0)
    q = case.tensors["q"].abs()
    check(backend, case.replace(q=q, k=k))


@pytest.mark.parametrize("level", [-1e30, -2.45e5, 2.45e5, 1e30])
def test_scores_far_from_zero_are_only_shifted(backend: Target, level: float) -> None:
    """softmax(x + c) = softmax(x): every sum of a tile must happen after the maximum is taken off."""
    case = dense(backend, SHAPE, bias=(1, 1, 1, 70))
    bias = torch.full_like(case.tensors["bias"], level)
    check(backend, case.replace(bias=bias))


@pytest.mark.parametrize("level", [-3.38e38, -1e9, -(2.0**27), -1e4, 2.0**27, 2.0**29, 1e9, 1e30])
@pytest.mark.parametrize("rows", ["all", "some", "a third of the keys"])
def test_biases_far_from_zero_beside_others(backend: Target, rows: str, level: float) -> None:
    """As -1e9 and the most negative number are in place of a mask: where all of a row is far, its bias cancels."""
    case = dense(backend, Shape(heads=1, n_q=9, n_k=144, dim=64), torch.bfloat16, bias=(1, 1, 9, 144))
    bias = case.tensors["bias"].clone()
    places = {
        "all": (...,),
        "some": (..., slice(2, 5), slice(None)),
        "a third of the keys": (..., slice(None, None, 3)),
    }
    bias[places[rows]] = level
    check(backend, case.replace(bias=bias), gradients=False)


@pytest.mark.parametrize("level", [0.0, 300.0])
def test_the_lse_of_many_keys_with_a_bias(backend: Target, level: float) -> None:
    """What a step adds to the error of a row's unit would add up."""
    case = dense(backend, Shape(heads=1, n_q=9, n_k=4096, dim=64), torch.bfloat16, bias=(1, 1, 9, 4096))
    check(backend, case.replace(bias=case.tensors["bias"] + level), gradients=False)


@pytest.mark.parametrize("softcap", [20.0, 100.0])
def test_infinite_queries_with_softcap_do_not_meet_keys_that_do_not_exist(backend: Target, softcap: float) -> None:
    """Which are 0 in the last tile, and their scores NaN."""
    case = dense(backend, Shape(heads=1, n_q=9, n_k=70), torch.bfloat16, softcap=softcap)
    q = case.tensors["q"].clone()
    q[..., 5, 3] = math.inf
    check(backend, case.replace(q=q), gradients=False)


@pytest.mark.parametrize("scale", [0.0, -0.5, -3.0, 1e-20, 20.0])
def test_scales(backend: Target, scale: float) -> None:
    check(backend, dense(backend, SHAPE, scale=scale, causal=True, sinks=True))


@pytest.mark.parametrize("features", HIDING.values(), ids=HIDING)
def test_scale_zero_is_the_mean_of_what_is_visible(backend: Target, features: dict[str, Any]) -> None:
    case = dense(backend, SHAPE, scale=0.0, **{k: v for k, v in features.items() if k != "sinks"})
    lse = run(backend, case, gradients=False)["lse"].cpu().double()
    counts = visible(case).expand(*SHAPE.scores).sum(-1).cpu()
    assert torch.allclose(lse, counts.double().log(), rtol=2e-7, atol=0)
    check(backend, case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_values_do_not_overflow(backend: Target, dtype: torch.dtype) -> None:
    """A convex combination of v stays within v's range, however many keys are summed."""
    case = dense(backend, Shape(heads=1, n_q=9, n_k=257), dtype)
    top = 0.9 * torch.finfo(dtype).max if dtype == torch.float16 else 1e30
    out = run(backend, case.replace(v=torch.full_like(case.tensors["v"], top)), gradients=False)["out"]
    assert torch.allclose(out.double(), torch.tensor(top, dtype=dtype).double(), rtol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_values_keep_their_relative_accuracy(backend: Target, dtype: torch.dtype) -> None:
    tiny = 1e-3 if dtype == torch.float16 else 1e-25
    case = stretched(dense(backend, SHAPE, dtype), tiny, "v")
    check(backend, Case(case.tensors, case.dout, None, case.options), gradients=False)


@pytest.mark.parametrize("rows", [[0], [32], [3, 4, 5], list(range(16)), list(range(33))], ids=len)
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_without_a_visible_key(backend: Target, rows: list[int], sinks: bool, dtype: torch.dtype) -> None:
    case = dense(backend, SHAPE, dtype, mask=(2, 1, 33, 70), sinks=sinks)
    case.tensors["mask"][:, :, rows] = False
    result = check(backend, case)
    assert (result["out"][:, :, rows] == 0).all()
    assert (result["dq"][:, :, rows] == 0).all()
    empty = case.tensors["sinks"][:, None] if sinks else torch.tensor(-torch.inf, device=backend.device)
    assert (result["lse"][:, :, rows] == empty).all()


def test_a_row_whose_every_score_is_minus_infinity_is_empty(backend: Target) -> None:
    case = dense(backend, SHAPE, bias=(1, 4, 33, 70))
    case.tensors["bias"][:, :, 5:9] = -torch.inf
    result = check(backend, case)
    assert (result["out"][:, :, 5:9] == 0).all()
    for name in ("dq", "dbias"):
        assert (result[name][:, :, 5:9] == 0).all()


@pytest.mark.parametrize("run_of", [(0, 40), (16, 32), (30, 70), (1, 70), (0, 69)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_run_of_minus_infinity_in_the_bias(backend: Target, run_of: tuple[int, int], dtype: torch.dtype) -> None:
    case = dense(backend, SHAPE, dtype, bias=(1, 1, 33, 70))
    case.tensors["bias"][..., slice(*run_of)] = -torch.inf
    result = check(backend, case)
    assert (result["dk"][:, :, slice(*run_of)] == 0).all()


@pytest.mark.parametrize("features", HIDING.values(), ids=HIDING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "dout", "dlse"])
def test_nan_reaches_what_sees_it_and_nothing_else(
    backend: Target, name: str, dtype: torch.dtype, features: dict[str, Any]
) -> None:
    case = dense(backend, SHAPE, dtype, bias=(2, 4, 33, 70), **features)
    inputs = {**case.tensors, "dout": case.dout, "dlse": case.dlse}
    inputs[name][1, 1, 17] = torch.nan
    check(backend, case)


@pytest.mark.parametrize("lengths", [[], [275, 5, 70]], ids=["dense", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nan_here_and_there_reaches_only_its_window(backend: Target, dtype: torch.dtype, lengths: list[int]) -> None:
    """So many rows and heads that one program looks after several tiles, of which some are to be repaired."""
    heads = 2 if backend.device == "cpu" else 40
    if lengths:
        case = packed(backend, lengths, lengths, dtype, heads=heads, window=(30, 20))
    else:
        case = dense(backend, Shape(1, heads, 275, 275, 16), dtype, window=(30, 20))
    for row, names in ((5, "qkv"), (150, "v"), (270, "qk")):
        for name in names:
            x = case.tensors[name].select(0 if lengths else 2, row)
            x[..., 3] = torch.nan
    check(backend, case)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hidden_keys_are_never_read(backend: Target, value: float, dtype: torch.dtype) -> None:
    case = dense(backend, SHAPE, dtype, mask=(2, 1, 1, 70), bias=(2, 1, 1, 70), deterministic=True)
    hidden = ~case.tensors["mask"][:, 0, 0]
    clean = run(backend, case)
    for name in "kv":
        case.tensors[name].masked_fill_(hidden[:, None, :, None], value)
    case.tensors["bias"].masked_fill_(~case.tensors["mask"], value)
    poisoned = run(backend, case)
    for name, expected in clean.items():
        assert torch.equal(poisoned[name], expected), name
    assert not poisoned["dk"].masked_select(hidden[:, None, :, None]).any()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("columns", [1, 16])
def test_keys_behind_a_mask_that_is_read_many_at_a_time(backend: Target, columns: int, value: float) -> None:
    """As it may be where the keys of a row are a multiple of 16. By one column scores are inf in some rows alone."""
    case = dense(backend, Shape(2, 4, 40, 160, 16, kv_heads=2), torch.bfloat16, mask=(1, 1, 40, 160))
    case.tensors["mask"][..., 5::16] = False
    case.tensors["mask"][..., 7, :] = False
    case.tensors["q"][:, :, 0, 0] = -1
    for name in "kv":
        case.tensors[name][:, :, 5::16, :columns] = value
    result = check(backend, case)
    assert (result["out"][:, :, 7] == 0).all()
    assert (result["lse"][:, :, 7] == -torch.inf).all()


@pytest.mark.parametrize("softcap", [20.0, 40.0])
def test_a_hidden_key_does_not_reach_rows_that_see_its_neighbours(backend: Target, softcap: float) -> None:
    """Scores side by side may be computed together."""
    case = dense(backend, Shape(2, 2, 64, 128, 16), torch.bfloat16, softcap=softcap, causal=True)
    case.tensors["k"][:, :, -1] = torch.nan
    result = check(backend, case, gradients=False)
    assert result["out"].isnan().any(-1).sum() == 4


@pytest.mark.parametrize("hidden", [math.nan, -math.inf])
def test_a_hidden_value_does_not_change_a_visible_infinity(backend: Target, hidden: float) -> None:
    case = dense(backend, SHAPE, mask=(70,))
    mask = case.tensors["mask"]
    mask[3], mask[4] = True, False
    case.tensors["v"][:, :, 3] = math.inf
    case.tensors["v"][:, :, 4] = hidden
    result = check(backend, case, gradients=False)
    assert (result["out"] == math.inf).all()


@pytest.mark.parametrize("name", ["dout", "dlse"])
@pytest.mark.parametrize("by", ["mask", "bias"])
def test_nothing_that_arrives_at_an_empty_row_goes_on(backend: Target, name: str, by: str) -> None:
    case = dense(backend, SHAPE, **{by: (1, 1, 33, 70)})
    case.tensors[by][:, :, 5:9] = False if by == "mask" else -torch.inf
    truth, before = exact(case), run(backend, case)
    {"dout": case.dout, "dlse": case.dlse}[name][:, :, 5:9] = torch.nan
    clean = case.dout.nan_to_num(0), case.dlse.nan_to_num(0)
    after = run(backend, case)
    assert_close(after, Case(case.tensors, *clean, case.options), truth)
    if backend.device == "cpu":  # what a GPU repairs is summed in another order
        assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_nan_in_queries_that_see_nothing_is_never_read(backend: Target) -> None:
    case = dense(backend, SHAPE, mask=(2, 1, 33, 1))
    mask = case.tensors["mask"].expand(2, 1, 33, 70)
    blind = ~case.tensors["mask"]
    for x in (case.tensors["q"], case.dout):
        x.masked_fill_(blind, torch.nan)
    case.dlse.masked_fill_(blind[..., 0], torch.nan)
    result = check(backend, case.replace(mask=mask))
    assert not result["dq"].masked_select(blind).any()


@pytest.mark.parametrize("features", HIDING.values(), ids=HIDING)
def test_infinite_values_reach_the_rows_that_see_them(backend: Target, features: dict[str, Any]) -> None:
    case = dense(backend, SHAPE, **features)
    case.tensors["v"][1, 1, 17] = torch.inf
    case.tensors["v"][0, 0, 40, 3] = -torch.inf
    check(backend, case, gradients=False)


def test_everything_nan_stays_nan(backend: Target) -> None:
    case = dense(backend, SHAPE)
    result = check(backend, case.replace(q=torch.full_like(case.tensors["q"], torch.nan)))
    assert result["out"].isnan().all()


@pytest.mark.parametrize("softcap", [3.0, 30.0, 31.0, 100.0, 101.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softcap_saturates(backend: Target, dtype: torch.dtype, softcap: float) -> None:
    check(backend, stretched(dense(backend, SHAPE, dtype, softcap=softcap, causal=True), 4 * softcap**0.5))


@pytest.mark.parametrize("softcap", [12.0, 30.0, 50.0])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("size", [1e-16, 1e16])
def test_values_of_any_size_where_every_score_is_at_the_cap(
    backend: Target, size: float, sign: int, softcap: float
) -> None:
    """Weights may be exp(score), without the maximum of a row taken off.

    The LSE is log(257) above one end of the range: at -5 its terms would nearly cancel, and no tolerance would fit.
    """
    case = dense(backend, Shape(heads=1, n_q=9, n_k=257), torch.bfloat16, softcap=softcap)
    k = 64 * case.tensors["k"].abs()
    case = case.replace(q=sign * case.tensors["q"].abs(), k=k, v=size * case.tensors["v"])
    check(backend, Case(case.tensors, case.dout, None, case.options), gradients=False)


@pytest.mark.parametrize("softcap", [9.0, 20.0, 100.0])
@pytest.mark.parametrize("later", [1.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_softcap_where_first_keys_say_nothing_of_the_rest(
    backend: Target, dtype: torch.dtype, later: float, softcap: float
) -> None:
    """The unit of sums may follow from the first keys: scores of later ones are 2 softcap above or below theirs."""
    case = dense(backend, Shape(heads=1, n_q=9, n_k=257), dtype, softcap=softcap)
    sign = torch.where(torch.arange(257, device=backend.device) < 130, -later, later).to(dtype)[:, None]
    k = 16 * sign * case.tensors["k"].abs()
    check(backend, case.replace(q=case.tensors["q"].abs(), k=k), gradients=False)


@pytest.mark.parametrize("softcap", [5.0, 20.0, 100.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softcap_where_scores_are_small_for_one_warp_and_not_for_the_next(
    backend: Target, dtype: torch.dtype, softcap: float
) -> None:
    """Small ones may go another way: a hundredth of softcap in 32 rows, half of it in a few of the others."""
    case = dense(backend, Shape(heads=1, n_q=128, n_k=192), dtype, softcap=softcap)
    row = torch.arange(128, device=backend.device)
    factor = torch.where(row < 32, 0.01, torch.where(row % 5 == 0, 0.5, 0.2)) * softcap
    check(backend, case.replace(q=(case.tensors["q"] * factor[:, None]).to(dtype)))


@pytest.mark.parametrize("sink", [-100.0, 0.0, 100.0, -math.inf])
def test_sinks_of_any_size(backend: Target, sink: float) -> None:
    case = dense(backend, SHAPE, sinks=True, causal=True)
    check(backend, case.replace(sinks=torch.full_like(case.tensors["sinks"], sink)))


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65])
def test_one_visible_key_is_copied(backend: Target, n: int) -> None:
    case = dense(backend, Shape(n_q=n), window=(0, 0))
    assert torch.allclose(check(backend, case, gradients=False)["out"], case.tensors["v"])


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("features", [{}, {"causal": True, "sinks": True, "alibi": True}], ids=["plain", "terms"])
def test_empty_shapes(backend: Target, sizes: tuple[int, int], batch: int, features: dict[str, Any]) -> None:
    shape = Shape(batch, 4, *sizes, 16, kv_heads=2)
    check(backend, dense(backend, shape, bias=(batch, 4, *sizes), mask=(batch, 4, *sizes), **features))


def test_parts_over_disjoint_keys_merge_to_the_whole(backend: Target) -> None:
    case = dense(backend, SHAPE)
    q, k, v = (case.tensors[name] for name in "qkv")
    parts = [
        ioattn.attention(q, k[:, :, a:b], v[:, :, a:b], return_lse=True, backend=backend.name)
        for a, b in ((0, 1), (1, 40), (40, 40), (40, 70))
    ]
    out, lse = ioattn.merge(*(torch.stack(x) for x in zip(*parts, strict=True)))
    whole = run(backend, case, gradients=False)
    assert torch.allclose(out, whole["out"], atol=1e-6)
    assert torch.allclose(lse, whole["lse"], atol=1e-6)


def test_inputs_are_left_as_they_were(backend: Target) -> None:
    case = dense(backend, SHAPE, bias=(2, 4, 33, 70), mask=(2, 4, 33, 70), sinks=True, alibi=True)
    before = {name: x.clone() for name, x in case.tensors.items()}
    dout, dlse = case.dout.clone(), case.dlse.clone()
    run(backend, case)
    assert all(torch.equal(case.tensors[name], x) for name, x in before.items())
    assert torch.equal(case.dout, dout)
    assert torch.equal(case.dlse, dlse)


def test_uniform_scores_give_exact_means(backend: Target) -> None:
    """With q = 0 every weight is 1 / N, and small integers sum without rounding."""
    v = normal(1, 2, 64, 16, like=backend).round()
    zeros = torch.zeros_like(v)
    out, lse = ioattn.attention(zeros, zeros, v, return_lse=True, backend=backend.name)
    assert torch.allclose(out, v.mean(-2, keepdim=True).expand_as(out), rtol=1e-6, atol=1e-7)
    assert torch.allclose(lse, torch.full_like(lse, math.log(64)), rtol=3e-7)
