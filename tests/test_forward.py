"""Output and LSE against float64, for every feature, type, size and layout of the inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attend import DTYPES, Shape, Target, check, dense, normal, run
from features import FEATURES, LAYOUTS, laid_out
from oracle import Case

SIZES = (1, 7, 63, 65, 257)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("feature", FEATURES)
def test_feature(backend: Target, feature: str, dtype: torch.dtype) -> None:
    check(backend, dense(backend, Shape(2, 4, 50, 81, 32), dtype, **FEATURES[feature]), gradients=False)


@pytest.mark.parametrize("causal", [False, True, "top-left"], ids=str)
@pytest.mark.parametrize("n_k", SIZES)
@pytest.mark.parametrize("n_q", SIZES)
def test_sizes(backend: Target, n_q: int, n_k: int, causal: bool | str) -> None:
    check(backend, dense(backend, Shape(n_q=n_q, n_k=n_k), causal=causal), gradients=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [8, 16, 40, 64, 72, 80, 96, 128, 160, 192, 256])
def test_head_dimensions(backend: Target, dim: int, dtype: torch.dtype) -> None:
    check(backend, dense(backend, Shape(n_q=33, n_k=70, dim=dim), dtype, causal=True), gradients=False)


@pytest.mark.parametrize(("dim", "dim_v"), [(1, 1), (3, 5), (8, 64), (64, 8), (40, 72), (192, 128)])
def test_value_dimension_differs(backend: Target, dim: int, dim_v: int) -> None:
    result = check(backend, dense(backend, Shape(n_q=33, n_k=70, dim=dim, dim_v=dim_v)), gradients=False)
    assert result["out"].shape[-1] == dim_v


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (12, 4), (5, 1), (40, 8)])
def test_head_groups(backend: Target, heads: int, kv_heads: int) -> None:
    check(backend, dense(backend, Shape(2, heads, 9, 40, kv_heads=kv_heads)), gradients=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(backend: Target, layout: str, dtype: torch.dtype) -> None:
    case = dense(backend, Shape(2, 4, 33, 70, 16, kv_heads=2), dtype, causal=True)
    check(backend, laid_out(case, layout), gradients=False)


@pytest.mark.parametrize("layout", ["contiguous", "heads last", "queries outermost"])
def test_out_keeps_the_dimension_order_of_q(backend: Target, layout: str) -> None:
    case = laid_out(dense(backend, Shape(2, 4, 33, 70, 16, kv_heads=2)), layout)
    out = run(backend, case, gradients=False)["out"]
    assert out.stride() == torch.empty_like(case.tensors["q"]).stride()


@pytest.mark.parametrize("name", ["bias", "mask"])
@pytest.mark.parametrize("sizes", [(70,), (33, 70), (1, 70), (4, 33, 70), (1, 1, 70), (2, 1, 33, 70), (2, 4, 1, 70)])
def test_bias_and_mask_broadcast_from_the_right(backend: Target, name: str, sizes: tuple[int, ...]) -> None:
    features: dict[str, Any] = {name: sizes}
    check(backend, dense(backend, Shape(2, 4, 33, 70), **features), gradients=False)


@pytest.mark.parametrize("expand", [(2, 4, 33, 70), (2, 1, 33, 70)])
def test_bias_and_mask_may_be_expanded_or_transposed(backend: Target, expand: tuple[int, ...]) -> None:
    case = dense(backend, Shape(2, 4, 33, 70), bias=(1, 1, 33, 70), mask=(1, 1, 33, 70))
    bias = case.tensors["bias"].expand(expand)
    mask = case.tensors["mask"].mT.contiguous().mT
    check(backend, case.replace(bias=bias, mask=mask), gradients=False)


def test_float32_bias_on_half_inputs_is_not_rounded(backend: Target) -> None:
    """A bias of 4097 and 4096 differs by one score; in bfloat16 both are 4096."""
    case = dense(backend, Shape(heads=1, n_q=2, n_k=2), torch.bfloat16)
    bias = torch.tensor([[4097.0, 4096.0]], device=backend.device)
    check(backend, case.replace(bias=bias, q=torch.zeros_like(case.tensors["q"])), gradients=False)


def test_default_scale_is_that_of_the_query_dimension(backend: Target) -> None:
    case = dense(backend, Shape(dim=64, dim_v=16))
    named = Case(case.tensors, case.dout, case.dlse, {"scale": 0.125})
    one, other = (run(backend, c, gradients=False)["out"] for c in (case, named))
    assert torch.equal(one, other)


def test_lse_only_on_request(backend: Target) -> None:
    import ioattn

    q = normal(1, 2, 5, 8, like=backend)
    out, lse = ioattn.attention(q, q, q, return_lse=True, backend=backend.name)
    assert torch.equal(ioattn.attention(q, q, q, backend=backend.name), out)
    assert lse.shape == (1, 2, 5)
    assert lse.dtype == torch.float32


def test_float64(backend: Target) -> None:
    case = dense(backend, Shape(2, 4, 50, 81, 32, kv_heads=2), torch.float64, causal=True, softcap=2.0)
    check(backend, case, gradients=False)


def test_second_call_with_other_strides_and_types(backend: Target) -> None:
    """A kernel compiled for the first call must not be reused where it no longer fits."""
    case = dense(backend, Shape(2, 4, 33, 70, 16, kv_heads=2), bias=(1, 1, 33, 70))
    for layout in LAYOUTS:
        check(backend, laid_out(case, layout), gradients=False)
    for bias in ((2, 4, 33, 70), (2, 1, 1, 70), (1, 4, 1, 70)):
        for dtype in DTYPES:
            check(backend, dense(backend, Shape(2, 4, 33, 70, 16), dtype, bias=bias), gradients=False)
