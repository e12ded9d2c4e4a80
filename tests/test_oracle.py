"""The oracle and the tolerance themselves: against torch, against sums by hand, and on wrong answers."""

from __future__ import annotations

import pytest
import torch
from attend import DTYPES, Shape, Target, dense, packed
from oracle import exact
from tolerance import assert_close, plain

CPU = Target("eager", "cpu")
SHAPE = Shape(2, 4, 33, 70, 16, kv_heads=2)


@pytest.mark.parametrize("features", [{}, {"causal": "top-left"}, {"mask": (2, 1, 33, 70)}, {"bias": (2, 4, 33, 70)}])
def test_oracle_agrees_with_torch(features: dict[str, object]) -> None:
    case = dense(CPU, SHAPE, torch.float64, **features)
    leaves = {name: case.tensors[name].clone().requires_grad_() for name in "qkv"}
    mask = case.tensors.get("mask", case.tensors.get("bias"))
    causal = bool(features.get("causal"))
    out = torch.nn.functional.scaled_dot_product_attention(
        **dict(zip(("query", "key", "value"), leaves.values(), strict=True)),
        attn_mask=mask,
        is_causal=causal,
        enable_gqa=True,
    )
    truth = exact(case)
    assert torch.allclose(out, truth["out"])
    no_lse = type(case)(case.tensors, case.dout, None, case.options)
    for name, gradient in zip("qkv", torch.autograd.grad(out, list(leaves.values()), case.dout), strict=True):
        assert torch.allclose(gradient, exact(no_lse)[f"d{name}"])


def test_oracle_by_hand() -> None:
    """Three queries over two keys, bottom-right: the first sees nothing, the second one key, the third both."""
    case = dense(CPU, Shape(heads=1, n_q=3, n_k=2, dim=1), causal=True, sinks=True, softcap=2.0, scale=1.0, alibi=True)
    q, k, v = (case.tensors[name].double().flatten() for name in "qkv")
    sink = case.tensors["sinks"].double()[0]
    truth = exact(case)
    scores = 2 * torch.tanh(q[2] * k / 2) - 0.5 * torch.tensor([1.0, 0.0], dtype=torch.float64)
    total = sink.exp() + scores.exp().sum()
    assert truth["out"].flatten()[0] == 0
    assert torch.isclose(truth["lse"].flatten()[0], sink)
    assert torch.isclose(truth["lse"].flatten()[2], total.log())
    assert torch.isclose(truth["out"].flatten()[2], (scores.exp() * v).sum() / total)


def test_pairwise_path_agrees_with_matrix_products() -> None:
    case = dense(CPU, SHAPE, causal=True, bias=(33, 70), sinks=True)
    truth = exact(case)
    case.dout[1, 1, 5, 0] = torch.nan
    pairwise = exact(case)
    for name in ("out", "lse"):
        assert torch.allclose(truth[name], pairwise[name])
    others = torch.arange(4) != 1
    assert torch.allclose(truth["dq"][:, others], pairwise["dq"][:, others])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_attention_is_close_to_the_oracle(dtype: torch.dtype) -> None:
    for case in (dense(CPU, SHAPE, dtype, causal=True, bias=(33, 70), sinks=True), packed(CPU, [5, 9], [7, 3], dtype)):
        truth, other = exact(case), plain(case, order=1)
        assert set(truth) == set(other)
        for name, value in other.items():
            finite = truth[name].isfinite()
            error = (value.double() - truth[name])[finite].abs().max()
            assert error <= 8 * torch.finfo(dtype).eps * truth[name][finite].abs().max(), name


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv", "dbias", "dsinks"])
@pytest.mark.parametrize("wrong", [1e-4, torch.nan, torch.inf])
def test_tolerance_refuses_one_wrong_element(name: str, wrong: float) -> None:
    case = dense(CPU, SHAPE, bias=(33, 70), sinks=True)
    result = {key: value.float() for key, value in exact(case).items()}
    assert_close(result, case)
    result[name].flatten()[3 if name != "dsinks" else 1 :][0].add_(wrong)
    with pytest.raises(AssertionError, match=f"^{name}: "):
        assert_close(result, case)


def test_tolerance_refuses_a_number_in_place_of_nan() -> None:
    case = dense(CPU, SHAPE)
    case.tensors["v"][0, 0, 0, 0] = torch.nan
    result = {key: value.float() for key, value in exact(case).items()}
    assert_close(result, case)
    result["out"] = result["out"].nan_to_num()
    with pytest.raises(AssertionError, match="out: NaN positions differ"):
        assert_close(result, case)


def test_uninitialised_memory_is_poisoned() -> None:
    like = torch.zeros(3, 2)
    for fresh in (torch.empty(3), torch.empty_like(like), torch.empty_strided((2, 2), (1, 2)), like.new_empty(4)):
        assert fresh.isnan().all()
    assert (torch.empty(3, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
