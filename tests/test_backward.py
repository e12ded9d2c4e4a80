"""The gradient of every input against float64 autograd, for every feature, type, size and layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attend import DTYPES, Shape, Target, check, dense, run
from features import FEATURES, LAYOUTS, laid_out
from oracle import Case
from tolerance import assert_close

import ioattn

SIZES = (1, 7, 63, 65, 257)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("feature", FEATURES)
def test_feature(backend: Target, feature: str, dtype: torch.dtype) -> None:
    check(backend, dense(backend, Shape(2, 4, 50, 81, 32, kv_heads=2), dtype, **FEATURES[feature]))


@pytest.mark.parametrize("causal", [False, True], ids=str)
@pytest.mark.parametrize("n_k", SIZES)
@pytest.mark.parametrize("n_q", SIZES)
def test_sizes(backend: Target, n_q: int, n_k: int, causal: bool) -> None:
    check(backend, dense(backend, Shape(n_q=n_q, n_k=n_k), causal=causal))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [8, 16, 40, 64, 72, 80, 96, 128, 160, 256])
def test_head_dimensions(backend: Target, dim: int, dtype: torch.dtype) -> None:
    check(backend, dense(backend, Shape(n_q=33, n_k=70, dim=dim), dtype, causal=True))


@pytest.mark.parametrize(("dim", "dim_v"), [(1, 1), (3, 5), (8, 64), (64, 8), (40, 72), (192, 128)])
def test_value_dimension_differs(backend: Target, dim: int, dim_v: int) -> None:
    check(backend, dense(backend, Shape(n_q=33, n_k=70, dim=dim, dim_v=dim_v)))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (12, 4), (5, 1), (40, 8)])
def test_head_groups(backend: Target, heads: int, kv_heads: int) -> None:
    check(backend, dense(backend, Shape(2, heads, 9, 40, kv_heads=kv_heads)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(backend: Target, layout: str, dtype: torch.dtype) -> None:
    case = dense(backend, Shape(2, 4, 33, 70, 16, kv_heads=2), dtype, causal=True)
    check(backend, laid_out(case, layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_dout(backend: Target, layout: str) -> None:
    case = dense(backend, Shape(2, 4, 33, 70, 16, kv_heads=2), causal=True)
    check(backend, Case(case.tensors, LAYOUTS[layout](case.dout), case.dlse, case.options))


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1), (2, 4, 1)])
def test_stride_zero_dlse(backend: Target, sizes: tuple[int, ...]) -> None:
    case = dense(backend, Shape(2, 4, 33, 70))
    assert case.dlse is not None
    dlse = case.dlse[: sizes[0], : sizes[1], : sizes[2]].expand(case.dlse.shape)
    check(backend, Case(case.tensors, case.dout, dlse, case.options))


@pytest.mark.parametrize("layout", ["contiguous", "heads last", "queries outermost"])
def test_gradients_keep_the_dimension_order_of_their_inputs(backend: Target, layout: str) -> None:
    case = laid_out(dense(backend, Shape(2, 4, 33, 70, 16, kv_heads=2)), layout)
    result = run(backend, case)
    for name in "qkv":
        assert result[f"d{name}"].stride() == torch.empty_like(case.tensors[name]).stride()


def test_mixed_layouts(backend: Target) -> None:
    case = dense(backend, Shape(2, 4, 33, 70, 16, kv_heads=2), causal=True)
    check(backend, laid_out(laid_out(case, "heads last", "q"), "slice of rows", "v"))


@pytest.mark.parametrize(
    "sizes", [(70,), (33, 70), (1, 70), (4, 1, 70), (2, 1, 33, 70), (1, 4, 33, 70), (2, 4, 33, 70)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bias_gradient_is_summed_over_what_was_broadcast(
    backend: Target, sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    check(backend, dense(backend, Shape(2, 4, 33, 70, 16, kv_heads=2), dtype, bias=sizes, causal=True))


def test_float32_bias_of_half_inputs_gets_a_float32_gradient(backend: Target) -> None:
    check(backend, dense(backend, Shape(2, 4, 33, 70), torch.bfloat16, bias=(33, 70), bias_dtype=torch.float32))


def test_expanded_bias(backend: Target) -> None:
    case = dense(backend, Shape(2, 4, 33, 70), bias=(1, 1, 33, 70))
    check(backend, case.replace(bias=case.tensors["bias"].expand(2, 4, 33, 70)))


@pytest.mark.parametrize("wanted", ["q", "k", "v", "bias", "sinks"])
def test_only_one_input_needs_a_gradient(backend: Target, wanted: str) -> None:
    case = dense(backend, Shape(2, 4, 33, 70), bias=(4, 33, 70), sinks=True)
    leaves = {name: x.clone().requires_grad_(name == wanted) for name, x in case.tensors.items()}
    out, lse = ioattn.attention(**leaves, return_lse=True, backend=backend.name)
    (gradient,) = torch.autograd.grad((out, lse), leaves[wanted], (case.dout, case.dlse))
    assert_close({f"d{wanted}": gradient}, case)


@pytest.mark.parametrize("through", ["out", "lse"])
def test_loss_of_one_output_alone(backend: Target, through: str) -> None:
    case = dense(backend, Shape(2, 4, 33, 70), sinks=True, softcap=2.0)
    zero = torch.zeros_like(case.dout) if through == "lse" else case.dout
    case = Case(case.tensors, zero, case.dlse if through == "lse" else None, case.options)
    leaves = {name: x.clone().requires_grad_() for name, x in case.tensors.items()}
    out, lse = ioattn.attention(**leaves, **case.options, return_lse=True, backend=backend.name)
    used, given = (out, case.dout) if through == "out" else (lse, case.dlse)
    gradients = torch.autograd.grad(used, list(leaves.values()), given, materialize_grads=True)
    assert_close({f"d{n}": x for n, x in zip(leaves, gradients, strict=True)}, case)


@pytest.mark.parametrize("features", [{}, {"bias": (4, 33, 70), "sinks": True}], ids=["plain", "terms"])
def test_float64(backend: Target, features: dict[str, Any]) -> None:
    check(backend, dense(backend, Shape(2, 4, 33, 70, 16, kv_heads=2), torch.float64, causal=True, **features))


def test_gradients_add_up_over_two_calls(backend: Target) -> None:
    q = dense(backend).tensors["q"].requires_grad_()
    ioattn.attention(q, q, q, backend=backend.name).sum().backward()
    once = q.grad.clone()
    ioattn.attention(q, q, q, backend=backend.name).sum().backward()
    assert torch.allclose(q.grad, once + once)


def test_one_tensor_as_query_key_and_value(backend: Target) -> None:
    case = dense(backend)
    x = case.tensors["q"].clone().requires_grad_()
    ioattn.attention(x, x, x, causal=True, backend=backend.name).backward(case.dout)
    apart = Case({name: x.detach() for name in "qkv"}, case.dout, None, {"causal": True})
    parts = run(backend, apart)
    assert torch.allclose(x.grad, parts["dq"] + parts["dk"] + parts["dv"])
    assert_close(parts, apart)
