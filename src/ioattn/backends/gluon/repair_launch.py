"""Compiles and launches the kernels that compute gradients again where hidden NaN may have reached them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import ASTSource

from ioattn.backends.gluon.backward_config import BackwardConfig
from ioattn.backends.gluon.kernels import repair
from ioattn.backends.gluon.launch import compiled, strides_of
from ioattn.compose import fold
from ioattn.launching import Arguments
from ioattn.problem import DTYPES, Problem
from ioattn.scores import Term

TILE = 32
PROGRAMS = 528
"""Four per processor of an H200; each walks over its share of the tiles, if the flag is up."""

STRIDES = ("i64",) * 3


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    """Hyperbolic tangent, exact to about 1e-7; infinities give 1 and -1."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))


def _jit(function: Any) -> Any:
    """`triton.jit`, with the position of a term as a constant and in the name: the compiler tells functions by name."""
    scope = function.__globals__
    if isinstance(scope.get("slot"), int):
        function.__qualname__ = f"{function.__name__}_{scope['slot']}"
        scope["slot"] = tl.constexpr(scope["slot"])
    return triton.jit(function)


@functools.lru_cache(maxsize=64)
def _steps(terms: tuple[Term, ...]) -> tuple[Any, Any]:
    if not terms:
        return None, None
    formula = fold(terms, {"tanh": tanh}, _jit)
    return formula.step, formula.dstep


@functools.lru_cache(maxsize=256)
def compile_repair(
    config: BackwardConfig, dtype: torch.dtype, terms: tuple[Term, ...], slopes: str | None
) -> tuple[Any, Any]:
    """The compiled kernels of dK and dV, and of dQ; needs no GPU."""
    name = f"*{DTYPES[dtype]}"
    offsets = "*i32" if config.sequences else "constexpr"
    given: dict[str, Any] = dict.fromkeys(("q", "k", "v", "dout"), name) | {"lse_rows": "*fp32", "delta_rows": "*fp32"}
    tail = {
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets,
        "slopes": f"*{slopes}" if slopes else "constexpr",
        "softcap": "fp32",
        "scale": "fp32",
        "sizes": ("i32",) * 6,
        "dims": ("i32",) * 2,
        "band": ("i32",) * 3,
    }
    step, dstep = _steps(terms)
    constants = {
        "step": step,
        "dstep": dstep,
        "TILE": TILE,
        "DIM": config.dim,
        "SEQUENCES": config.sequences,
        "FORM": (config.has_lo, config.has_hi, config.bottom_right, config.has_softcap),
    }
    kernels = []
    for function, outputs in ((repair.repair_keys, ("dk", "dv")), (repair.repair_queries, ("dq",))):
        signature: dict[str, Any] = {"flag": "*i32"}
        for key, kind in (given | dict.fromkeys(outputs, name)).items():
            signature[key] = kind
            if not key.endswith("_rows"):
                signature[f"{key}_strides"] = STRIDES
        signature |= tail | dict.fromkeys(constants, "constexpr")
        values = {(i,): constants.get(k) for i, (k, kind) in enumerate(signature.items()) if kind == "constexpr"}
        source = ASTSource(function, signature, values, {})
        kernels.append(compiled(source, 8 if config.dim > 128 else 4))
    return kernels[0], kernels[1]


def repair_arguments(
    problem: Problem, config: BackwardConfig, head_rows: int, x: Any, written: Sequence[Tensor]
) -> Arguments:
    """What a kernel is handed that computes again what is not finite in `written`, if the flag is up.

    `x` are the backward's operands; a head has `head_rows` of LSE and delta.
    """
    band = problem.band
    return (
        *(x.flag, *_with_strides(x.q, x.k, x.v, x.dout), x.lse_rows, x.delta_rows, *_with_strides(*written)),
        *(x.cu_seqlens_q, x.cu_seqlens_k, x.slopes, problem.softcap or 0.0, problem.scale),
        (problem.batch, problem.len_q, problem.len_k, problem.heads, problem.kv_heads, head_rows),
        *((problem.dim, problem.dim_v), (band.lo or 0, band.hi or 0, band.shift)),
        *(*_steps(problem.terms), TILE, config.dim, config.sequences),
        (config.has_lo, config.has_hi, config.bottom_right, config.has_softcap),
    )


def _with_strides(*tensors: Tensor) -> Iterator[Any]:
    for x in tensors:
        yield from (x, strides_of(x))
