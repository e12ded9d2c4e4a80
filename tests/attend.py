"""Building cases and running them on the package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from oracle import DIFFERENTIABLE, Case, Result
from tolerance import assert_close
from torch import Tensor

import ioattn
from ioattn import registry

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Target:
    """A backend and the device it is tested on."""

    name: str
    device: str

    def __str__(self) -> str:
        return f"{self.name}-{self.device}"

    @property
    def interpreted(self) -> bool:
        """Whether kernels run in Triton's interpreter, where each tile takes 2 ms and sizes have to be small."""
        return self.name == "triton" and self.device == "cpu"


@dataclass(frozen=True)
class Shape:
    """Sizes of a dense case, in DESIGN's symbols; None means like the query's."""

    batch: int = 1
    heads: int = 2
    n_q: int = 65
    n_k: int | None = None
    dim: int = 16
    dim_v: int | None = None
    kv_heads: int | None = None

    @property
    def keys(self) -> int:
        return self.n_q if self.n_k is None else self.n_k

    @property
    def scores(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.n_q, self.keys


def normal(*shape: int, like: Target, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """The same standard normal numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(like.device, dtype)


def dense(target: Target, shape: Shape = Shape(), dtype: torch.dtype = torch.float32, **features: Any) -> Case:
    """A dense case of normal numbers.

    `bias` and `mask` are the sizes to build (any rank up to 4); `alibi` and `sinks` are switches; the rest are options.
    """
    kv_heads = shape.heads if shape.kv_heads is None else shape.kv_heads
    dim_v = shape.dim if shape.dim_v is None else shape.dim_v
    make = {"like": target, "dtype": dtype}
    tensors = {
        "q": normal(shape.batch, shape.heads, shape.n_q, shape.dim, seed=1, **make),
        "k": normal(shape.batch, kv_heads, shape.keys, shape.dim, seed=2, **make),
        "v": normal(shape.batch, kv_heads, shape.keys, dim_v, seed=3, **make),
    }
    bias, bias_dtype = features.pop("bias", None), features.pop("bias_dtype", dtype)
    if bias is not None:
        tensors["bias"] = normal(*bias, like=target, dtype=bias_dtype, seed=4)
    mask = features.pop("mask", None)
    if mask is not None:
        tensors["mask"] = normal(*mask, like=target, seed=5) > -0.5
    tensors |= _per_head(target, shape.heads, features)
    dout = normal(shape.batch, shape.heads, shape.n_q, dim_v, seed=6, **make)
    dlse = normal(shape.batch, shape.heads, shape.n_q, like=target, dtype=lse_dtype(dtype), seed=7)
    return Case(tensors, dout, dlse, features)


def packed(
    target: Target, q_lens: list[int], k_lens: list[int], dtype: torch.dtype = torch.float32, **features: Any
) -> Case:
    """A packed case of normal numbers; `heads`, `kv_heads`, `dim`, `dim_v` and `slack` rows default to small values."""
    heads, dim = features.pop("heads", 2), features.pop("dim", 16)
    kv_heads, dim_v = features.pop("kv_heads", heads), features.pop("dim_v", dim)
    slack = features.pop("slack", 0)
    rows_q, rows_k = sum(q_lens) + slack, sum(k_lens) + slack
    make = {"like": target, "dtype": dtype}
    tensors = {
        "q": normal(rows_q, heads, dim, seed=1, **make),
        "k": normal(rows_k, kv_heads, dim, seed=2, **make),
        "v": normal(rows_k, kv_heads, dim_v, seed=3, **make),
        "cu_seqlens_q": offsets(q_lens, target),
        "cu_seqlens_k": offsets(k_lens, target),
        **_per_head(target, heads, features),
    }
    dlse = normal(heads, rows_q, like=target, dtype=lse_dtype(dtype), seed=7)
    return Case(tensors, normal(rows_q, heads, dim_v, seed=6, **make), dlse, features)


def offsets(lengths: list[int], target: Target) -> Tensor:
    """Cumulative lengths as int32."""
    return torch.tensor([0, *lengths], device=target.device).cumsum(0).int()


def _per_head(target: Target, heads: int, features: dict[str, Any]) -> dict[str, Tensor]:
    tensors = {}
    if features.pop("alibi", False):
        tensors["alibi_slopes"] = 0.5 ** torch.arange(1, heads + 1, device=target.device, dtype=torch.float32)
    if features.pop("sinks", False):
        tensors["sinks"] = normal(heads, like=target, seed=8)
    return tensors


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of the LSE for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def skip_where_it_objects(target: Target, case: Case) -> None:
    """Skip, with the reasons, where a fast backend declines the case; the specification may not decline any."""
    reasons = dict(ioattn.explain(**case.tensors, **case.options).verdicts)[target.name]
    if reasons and target.name != "eager":
        pytest.skip(f"{target.name} objects: {'; '.join(reasons)}")


def run(target: Target, case: Case, gradients: bool = True, **options: Any) -> Result:
    """What the package returns for a case: out, lse and, if wanted, the gradient of each differentiable input."""
    skip_where_it_objects(target, case)
    # Where the backend leaves gradients to others, nobody may be named: preference then finds it for the forward.
    asked = None if gradients and registry.is_forward_only(target.name) else target.name
    leaves = {name: x.detach().requires_grad_(gradients and name in DIFFERENTIABLE) for name, x in case.tensors.items()}
    operation = ioattn.attention_varlen if case.packed else ioattn.attention
    out, lse = operation(**leaves, **case.options, return_lse=True, backend=asked, **options)
    result = {"out": out.detach(), "lse": lse.detach()}
    if not gradients:
        return result
    wanted = [name for name in DIFFERENTIABLE if name in leaves]
    outputs, given = ((out,), (case.dout,)) if case.dlse is None else ((out, lse), (case.dout, case.dlse))
    computed = torch.autograd.grad(outputs, [leaves[name] for name in wanted], given)
    return result | {f"d{name}": gradient for name, gradient in zip(wanted, computed, strict=True)}


def check(target: Target, case: Case, gradients: bool = True, **options: Any) -> Result:
    """Run a case and compare everything with float64."""
    result = run(target, case, gradients, **options)
    for name, value in result.items():
        source = case.tensors.get(name.removeprefix("d"), case.tensors["q"])
        assert value.dtype == (lse_dtype(case.dtype) if name == "lse" else source.dtype), name
    assert_close(result, case)
    return result
