"""Faults that shipped kernels had: strides, aliasing, caches and sizes. Ids: D and E."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attend import DTYPES, Shape, Target, check, dense, normal, run
from features import laid_out
from oracle import Case
from tolerance import assert_close

import ioattn


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_d1_gradient_of_a_sum_has_stride_zero(backend: Target, dtype: torch.dtype) -> None:
    case = dense(backend, Shape(1, 5, 2, dim=8), dtype, causal=True, deterministic=True)
    ones = torch.ones_like(case.dout)
    filled = Case(case.tensors, ones, None, case.options)
    expanded = check(backend, Case(case.tensors, ones[:1, :1, :1, :1].expand(ones.shape), None, case.options))
    if backend.device == "cpu":  # GPU kernels are compiled for such strides apart, and sum in another order
        assert all(torch.equal(value, expanded[name]) for name, value in run(backend, filled).items())


def test_d3_gradient_that_is_a_slice(backend: Target) -> None:
    case = dense(backend, Shape(n_q=33, n_k=70), causal=True)
    leaves = {name: case.tensors[name].clone().requires_grad_() for name in "qkv"}
    out = ioattn.attention(**leaves, causal=True, backend=backend.name)
    wide = torch.cat([out, torch.zeros_like(out)], -1)
    dwide = torch.cat([case.dout, torch.full_like(case.dout, torch.nan)], -1)
    wide.backward(dwide)
    truth = Case(case.tensors, case.dout, None, case.options)
    assert_close({f"d{name}": x.grad for name, x in leaves.items()}, truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_d5_transposed_queries_and_values_over_contiguous_keys(backend: Target, dtype: torch.dtype) -> None:
    case = dense(backend, Shape(2, 4, 131, dim=64), dtype)
    check(backend, laid_out(case, "heads last", "qv"))


def test_d7_gradient_of_keys_that_were_cut_off_is_zero(backend: Target) -> None:
    case = dense(backend, Shape(n_q=200, n_k=328, dim=64))
    leaves = {name: case.tensors[name].clone().requires_grad_() for name in "qkv"}
    k, v = (leaves[name][:, :, :-128] for name in "kv")
    ioattn.attention(leaves["q"], k, v, backend=backend.name).backward(case.dout)
    for name in "kv":
        assert not leaves[name].grad[:, :, -128:].any()
    cut = Case({"q": case.tensors["q"], "k": k.detach(), "v": v.detach()}, case.dout)
    assert_close({"dq": leaves["q"].grad, "dk": leaves["k"].grad[:, :, :-128]}, cut)


@pytest.mark.parametrize("dim", [64, 256, 512])
@pytest.mark.parametrize("n_k", [33, 65, 66])
def test_d9_keys_expanded_over_heads_with_a_mask(backend: Target, n_k: int, dim: int) -> None:
    case = dense(backend, Shape(2, 4, 17, n_k, dim), torch.bfloat16, mask=(2, 1, 17, n_k))
    check(backend, laid_out(case, "one head expanded", "kv"))


@pytest.mark.parametrize("offset", [1, 2, 3])
@pytest.mark.parametrize("names", ["q", "k", "v", "qkv"])
def test_d11_storage_offset(backend: Target, names: str, offset: int) -> None:
    case = dense(backend, Shape(n_q=33, n_k=70, dim=64))
    moved = {}
    for name in names:
        store = torch.full((case.tensors[name].numel() + offset,), torch.nan, device=backend.device)
        moved[name] = store[offset:].view(case.tensors[name].shape).copy_(case.tensors[name])
    check(backend, case.replace(**moved))


@pytest.mark.parametrize("layout", ["row padded", "offset by one"])
def test_d11_unaligned_rows_in_half_precision(backend: Target, layout: str) -> None:
    check(backend, laid_out(dense(backend, Shape(n_q=33, n_k=70, dim=64), torch.bfloat16), layout))


def test_d13_second_call_differs_only_in_what_a_cache_key_forgets(backend: Target) -> None:
    shape = Shape(2, 4, 33, 70, 64, kv_heads=2)
    for dtype in (torch.float32, torch.bfloat16):
        for layout in ("contiguous", "offset by one", "row padded", "columns strided", "one head expanded"):
            check(backend, laid_out(dense(backend, shape, dtype), layout))
    for bias in ((2, 4, 33, 70), (1, 4, 33, 70), (2, 1, 33, 70), (2, 4, 1, 70), (1, 1, 1, 70)):
        check(backend, dense(backend, shape, bias=bias))
        check(backend, dense(backend, shape, torch.bfloat16, bias=bias, bias_dtype=torch.float32))


@pytest.mark.parametrize(("dim", "dim_v", "n_q", "n_k"), [(32, 24, 33, 70), (64, 128, 129, 200), (128, 64, 129, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_d15_values_of_another_dimension(
    backend: Target, dim: int, dim_v: int, n_q: int, n_k: int, dtype: torch.dtype
) -> None:
    check(backend, dense(backend, Shape(n_q=n_q, n_k=n_k, dim=dim, dim_v=dim_v), dtype))


@pytest.mark.parametrize("dim", [8, 40, 72, 80, 96, 128, 160])
def test_d17_every_column_counts(backend: Target, dim: int) -> None:
    """Only the last column of q and k differs between keys, so that dropping it would make the weights uniform."""
    case = dense(backend, Shape(n_q=9, n_k=40, dim=dim))
    q, k = torch.zeros_like(case.tensors["q"]), torch.zeros_like(case.tensors["k"])
    q[..., -1], k[..., -1] = 3.0, case.tensors["k"][..., -1]
    check(backend, case.replace(q=q, k=k))


def test_d21_only_the_additive_mask_wants_a_gradient(backend: Target) -> None:
    case = dense(backend, Shape(1, 1, 64, dim=16), bias=(64, 64))
    bias = case.tensors["bias"].clone().requires_grad_()
    out = ioattn.attention(**{**case.tensors, "bias": bias}, backend=backend.name)
    out.backward(case.dout)
    assert_close({"dbias": bias.grad}, Case(case.tensors, case.dout, None, case.options))


@pytest.mark.parametrize("batch", [8300, pytest.param(15_000, marks=pytest.mark.gpu)])
def test_e1_a_batch_of_single_tokens(backend: Target, natural_tiles: None, batch: int) -> None:
    """With one key, out is v and dv is dout; dq and dk cancel to the rounding of `dP - delta`."""
    case = dense(backend, Shape(4 if backend.interpreted else batch, 16, 1, dim=128), torch.bfloat16)
    result = run(backend, Case(case.tensors, case.dout, None, case.options))
    assert torch.equal(result["out"], case.tensors["v"])
    assert torch.equal(result["dv"], case.dout)
    rounding = torch.finfo(torch.bfloat16).eps * 128**-0.5 * 128
    assert result["dq"].abs().max() < rounding
    assert result["dk"].abs().max() < rounding


@pytest.mark.gpu
@pytest.mark.parametrize("n", [65_537, 73_728])
def test_e3_mask_with_more_than_2_to_the_32_elements(backend: Target, natural_tiles: None, n: int) -> None:
    q, k, v = (normal(1, 1, n, 64, like=backend, dtype=torch.bfloat16, seed=seed) for seed in range(3))
    mask = torch.ones(n, n, dtype=torch.bool, device=backend.device).tril_()
    masked = attend_or_skip(backend, q, k, v, mask=mask)
    causal = ioattn.attention(q, k, v, causal=True, backend=backend.name)
    assert torch.allclose(masked.float(), causal.float(), atol=1e-2)


@pytest.mark.gpu
def test_e5_four_million_keys(backend: Target, natural_tiles: None) -> None:
    q = normal(1, 1, 2048, 128, like=backend, dtype=torch.bfloat16)
    k, v = (torch.randn(1, 1, 2**22, 128, device=backend.device, dtype=torch.bfloat16) for _ in range(2))
    whole = attend_or_skip(backend, q, k, v, causal=True)
    older = ioattn.attention(q, k[:, :, :-4096], v[:, :, :-4096], return_lse=True, backend=backend.name)
    newer = ioattn.attention(q, k[:, :, -4096:], v[:, :, -4096:], causal=True, return_lse=True, backend=backend.name)
    out, _ = ioattn.merge(*(torch.stack([a.float(), b.float()]) for a, b in zip(older, newer, strict=True)))
    assert torch.allclose(whole.float(), out, atol=1e-3)


@pytest.mark.parametrize("packing", [False, True])
def test_e7_more_sequences_than_a_launch_dimension_holds(backend: Target, natural_tiles: None, packing: bool) -> None:
    count = 70 if backend.interpreted else 70_000
    q, k, v = (normal(count, 1, 1, 16, like=backend, seed=seed) for seed in range(3))
    if packing and backend.name == "eager":
        pytest.skip("eager walks over packed sequences one by one")
    if packing:
        cu = torch.arange(count + 1, device=backend.device, dtype=torch.int32)
        flat = (x.squeeze(1) for x in (q, k, v))
        out = ioattn.attention_varlen(*flat, cu, cu, backend=backend.name)[:, None]
    else:
        out = attend_or_skip(backend, q, k, v)
    assert torch.allclose(out, v)


@pytest.mark.parametrize(
    ("batch", "n_q", "n_k"), [(3, 20, 2000), pytest.param(32, 500, 350_000, marks=pytest.mark.gpu)]
)
def test_e9_a_batch_equals_its_members(backend: Target, natural_tiles: None, batch: int, n_q: int, n_k: int) -> None:
    dtype = torch.bfloat16
    n_k = 200 if backend.interpreted else n_k
    q = normal(batch, 12, n_q, 64, like=backend, dtype=dtype)
    k = torch.randn(batch, 12, n_k, 64, device=backend.device, dtype=dtype)
    whole = attend_or_skip(backend, q, k, k)
    for b in (0, batch // 2, batch - 1):
        alone = ioattn.attention(q[b : b + 1], k[b : b + 1], k[b : b + 1], backend=backend.name)
        assert torch.allclose(whole[b].float(), alone[0].float(), atol=1e-3)


def attend_or_skip(target: Target, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """The operation, or a skip with the reasons where a fast backend declines."""
    described = {name: value for name, value in options.items() if name != "return_lse"}
    reasons = dict(ioattn.explain(q, k, v, **described).verdicts)[target.name]
    if reasons and target.name != "eager":
        pytest.skip("; ".join(reasons))
    return ioattn.attention(q, k, v, backend=target.name, **options)
