"""Faults that shipped kernels had: numerics. Ids: C."""

from __future__ import annotations

import math

import pytest
import torch
from attend import Shape, Target, check, dense, normal, packed, run
from oracle import Case, exact

import ioattn


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n", [64, 150])
def test_c1_lse_below_minus_88_in_the_last_tile(backend: Target, n: int, dtype: torch.dtype) -> None:
    """A padded key scored 0 gets the weight exp(0 - lse), which overflows when every real score is about -120."""
    case = dense(backend, Shape(heads=1, n_q=n, dim=64), dtype, mask=(n, n))
    q, k = 0.1 * case.tensors["q"], 0.1 * case.tensors["k"]
    q[..., 0], k[..., 0] = 1, -120 * 8
    case.tensors["mask"][:] = True
    result = check(backend, case.replace(q=q, k=k))
    assert (result["lse"] < -88).all()
    assert result["dq"].isfinite().all()


@pytest.mark.parametrize("level", [-5e4, -2.45e5, -1e30])
def test_c3_no_finite_stand_in_for_minus_infinity(backend: Target, level: float) -> None:
    case = dense(backend, Shape(n_q=33, dim=128), bias=(33, 33), causal=True)
    case = case.replace(bias=torch.full((33, 33), level, device=backend.device), q=torch.zeros_like(case.tensors["q"]))
    result = check(backend, case)
    assert torch.allclose(result["out"][:, :, -1], case.tensors["v"].mean(2), atol=1e-6)


@pytest.mark.parametrize("n", [129, 200])
@pytest.mark.parametrize("causal", [False, True])
def test_c5_large_inputs_with_a_partial_last_tile(backend: Target, n: int, causal: bool) -> None:
    case = dense(backend, Shape(2, 5, n, dim=32), torch.bfloat16, causal=causal)
    larger = {"q": case.tensors["q"] * 5, "k": case.tensors["k"] * 3, "v": case.tensors["v"] * 3}
    assert check(backend, case.replace(**larger))["dq"].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_c7_negative_scale(backend: Target, dtype: torch.dtype) -> None:
    case = dense(backend, Shape(n_q=65), dtype, scale=-0.5)
    check(backend, case.replace(q=8 * case.tensors["q"]))


def test_c9_bias_carries_the_base_of_the_exponential(backend: Target) -> None:
    """Two keys whose biases differ by ln 3: weights 3/4 and 1/4."""
    bias = torch.tensor([[math.log(3.0), 0.0]], device=backend.device)
    q, v = torch.zeros(1, 1, 1, 8, device=backend.device), torch.zeros(1, 1, 2, 8, device=backend.device)
    v[:, :, 0] = 1
    out = ioattn.attention(q, torch.zeros_like(v), v, bias=bias, backend=backend.name)
    assert torch.allclose(out, torch.full_like(out, 0.75), rtol=3e-7)


@pytest.mark.parametrize("scale", [0.05, 2.0])
def test_c11_scale_does_not_touch_the_bias(backend: Target, scale: float) -> None:
    case = dense(backend, Shape(n_q=33, n_k=70), scale=scale, bias=(2, 33, 70))
    truth = exact(case)
    reference = torch.nn.functional.scaled_dot_product_attention(
        *(case.tensors[n].double() for n in "qkv"), attn_mask=case.tensors["bias"].double(), scale=scale
    )
    assert torch.allclose(truth["out"], reference)
    check(backend, case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_a_sink_that_is_nan_reaches_its_head(backend: Target, causal: bool, dtype: torch.dtype) -> None:
    """As long as row maxima start at the sink: a maximum of a NaN and a number is the number."""
    case = dense(backend, Shape(2, 2, 70, dim=128), dtype, sinks=True, causal=causal)
    case.tensors["sinks"][1] = math.nan
    out = run(backend, case, gradients=False)["out"]
    assert out[:, 0].isfinite().all()
    assert out[:, 1].isnan().all()


@pytest.mark.parametrize("feature", ["causal", "bias", "packed"])
def test_c13_softcap_of_scores_far_beyond_the_cap(backend: Target, feature: str) -> None:
    if feature == "packed":
        case = packed(backend, [40, 7], [70, 30], softcap=30.0, causal=True)
    else:
        features = {"causal": True} if feature == "causal" else {"bias": (2, 40, 70)}
        case = dense(backend, Shape(n_q=40, n_k=70), softcap=30.0, **features)
    case = case.replace(q=case.tensors["q"] * 12, k=case.tensors["k"] * 4)
    check(backend, case)


@pytest.mark.parametrize("features", [{}, {"softcap": 5.0}, {"window": (3, 0)}], ids=["plain", "softcap", "window"])
def test_c15_sink_counts_once_however_keys_are_split(backend: Target, features: dict[str, object]) -> None:
    """The part with the first keys carries the sink; parts may be empty or wholly outside of the window."""
    case = dense(backend, Shape(n_q=1, n_k=257), sinks=True, **features)
    whole = check(backend, case, gradients=False)
    q, k, v = (case.tensors[name] for name in "qkv")
    parts = []
    for start, end in ((0, 0), (0, 64), (64, 128), (128, 250), (250, 257)):
        options = dict(case.options)
        mask = None
        if "window" in options:
            left, _ = options.pop("window")
            positions = torch.arange(start, end, device=backend.device)
            mask = (positions >= 256 - left)[None, :]
        sinks = case.tensors["sinks"] if start == end else None
        keys = slice(start, end)
        parts.append(
            ioattn.attention(
                q,
                k[:, :, keys],
                v[:, :, keys],
                mask=mask,
                sinks=sinks,
                return_lse=True,
                backend=backend.name,
                **options,
            )
        )
    out, lse = ioattn.merge(*(torch.stack(x) for x in zip(*parts, strict=True)))
    assert torch.allclose(out, whole["out"], atol=1e-6)
    assert torch.allclose(lse, whole["lse"], atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_c17_gradient_through_the_lse_alone(backend: Target, dtype: torch.dtype) -> None:
    case = dense(backend, Shape(n_q=33, n_k=70, kv_heads=1), dtype, causal=True)
    dlse = torch.full_like(case.dlse, 1 / case.dlse.numel())
    result = check(backend, Case(case.tensors, torch.zeros_like(case.dout), dlse, case.options))
    assert result["dq"].any()
    assert result["dk"].any()
    assert not result["dv"].any()


def test_c19_float32_is_float32(backend: Target) -> None:
    """Uniform weights over values that TF32 or BF16 would round: the mean must come out to float32's accuracy."""
    v = 1 + torch.arange(128, device=backend.device).view(1, 1, 128, 1).expand(1, 1, 128, 16) * 2.0**-14
    out = ioattn.attention(torch.zeros_like(v), torch.zeros_like(v), v, backend=backend.name)
    assert torch.allclose(out.double(), v.double().mean(2, keepdim=True), rtol=3e-7, atol=0)


def test_c19_float32_scores_are_float32(backend: Target) -> None:
    check(backend, dense(backend, Shape(n_q=130, n_k=257, dim=64)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_c21_nan_queries_give_nan(backend: Target, dtype: torch.dtype) -> None:
    q = torch.full((1, 2, 9, 16), torch.nan, dtype=dtype, device=backend.device)
    k = normal(1, 2, 20, 16, like=backend, dtype=dtype)
    out, lse = ioattn.attention(q, k, k, return_lse=True, backend=backend.name)
    assert out.isnan().all()
    assert lse.isnan().all()


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_nan_query_gives_nan_to_no_other(backend: Target, softcap: float | None) -> None:
    """Neighbouring scores may be computed together."""
    q, k = (normal(1, 2, 40, 16, like=backend, dtype=torch.bfloat16) for _ in range(2))
    q[0, 1, 5, 3] = torch.nan
    out = run(backend, Case({"q": q, "k": k, "v": k}, q, options={"softcap": softcap}), gradients=False)["out"]
    assert out[0, 1, 5].isnan().all()
    assert out.isnan().any(-1).sum() == 1


@pytest.mark.parametrize("parts", [2, 8, 32])
def test_c23_error_does_not_grow_with_the_number_of_parts(backend: Target, parts: int) -> None:
    case = dense(backend, Shape(n_q=9, n_k=256))
    q, k, v = (case.tensors[name] for name in "qkv")
    pieces = [
        ioattn.attention(q, *kv, return_lse=True, backend=backend.name)
        for kv in zip(k.chunk(parts, 2), v.chunk(parts, 2), strict=True)
    ]
    out, lse = ioattn.merge(*(torch.stack(x) for x in zip(*pieces, strict=True)))
    truth = exact(case)
    assert (out.double() - truth["out"]).abs().max() < 8 * torch.finfo(torch.float32).eps * truth["out"].abs().max()
    assert (lse.double() - truth["lse"]).abs().max() < 4 * torch.finfo(torch.float32).eps * truth["lse"].abs().max()


def test_c25_no_nan_in_a_hundred_repeats(backend: Target, natural_tiles: None) -> None:
    case = dense(backend, Shape(1, 4, 129, dim=256, kv_heads=1), torch.float16)
    first = check(backend, case, gradients=False)["out"]
    for _ in range(3 if backend.interpreted else 99):
        assert torch.equal(run(backend, case, gradients=False)["out"], first)
