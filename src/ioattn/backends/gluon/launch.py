"""Compiles and launches the Hopper kernels; the only host code here that touches Triton."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from ioattn.assembler import sound_assembler
from ioattn.backends.gluon import config as table
from ioattn.backends.gluon.config import Config
from ioattn.backends.gluon.kernels import forward as kernels
from ioattn.backends.gluon.kernels.approximate import tanh
from ioattn.backends.gluon.kernels.names import GluonASTSource, gl, gluon
from ioattn.backends.gluon.one_code import UnfamiliarCodeError, shared_by
from ioattn.compose import fold
from ioattn.launching import Arguments, Call, Descriptor, addresses_of
from ioattn.problem import DTYPES, Problem, Tensors

TARGET = GPUTarget("cuda", 90, 32)


class Plan(NamedTuple):
    """What a problem and the dtypes of its per-head operands fix before its tensors are known."""

    config: Config
    formula: Any
    kernel: Any
    section: int
    grid: int


def describe(x: Tensor) -> Descriptor:
    """A tensor as a 4-D TMA descriptor `(B, H, N, D)`; packed tensors `(T, H, D)` become a batch of one.

    The stride of a dimension of size 1 is never used, but must be a multiple of 16 bytes to be accepted.
    """
    if x.dim() == 3:
        n, h, d = x.shape
        s_n, s_h, _ = x.stride()
        return Descriptor(x, (1, h, n, d), (8, 8 if h == 1 else s_h, 8 if n == 1 else s_n, 1))
    b, h, n, d = x.shape
    s_b, s_h, s_n, _ = x.stride()
    return Descriptor(x, (b, h, n, d), (8 if b == 1 else s_b, 8 if h == 1 else s_h, 8 if n == 1 else s_n, 1))


def strides_of(x: Tensor) -> tuple[int, ...]:
    """Strides of batch, head and row; packed tensors `(T, H, D)` are a batch of one."""
    return x.stride()[:3] if x.dim() == 4 else (0, x.stride(1), x.stride(0))


@functools.lru_cache(maxsize=1024)
def plan(problem: Problem, slopes: torch.dtype | None, sinks: torch.dtype | None) -> Plan:
    """Configuration, kernel and grid of a problem."""
    config = table.choose(problem)
    formula = formula_of(problem)
    kernel = compile_forward(config, problem.dtype, formula, slopes and DTYPES[slopes], sinks and DTYPES[sinks])
    tiles = -(-problem.len_q // config.tile_rows) * problem.heads * problem.batch
    processors = torch.cuda.get_device_properties(problem.device).multi_processor_count
    blocks = processors * config.beside
    grid = blocks if problem.packed else min(blocks, tiles)
    return Plan(config, formula, kernel, table.section(problem), grid)


@functools.lru_cache(maxsize=64)
def _folded(terms: tuple[Any, ...]) -> Any:
    return fold(terms, {"tanh": tanh}, _jit).step


def formula_of(problem: Problem) -> Any:
    """The score terms as one device function, or None where the scale can ride on the exponent."""
    return _folded(problem.terms) if problem.terms or problem.scale <= 0 else None


def _jit(function: Any) -> Any:
    """`gluon.jit`, with the position of a term as a constant and in the name: the compiler tells functions by name."""
    scope = function.__globals__
    if isinstance(scope.get("slot"), int):
        function.__qualname__ = f"{function.__name__}_{scope['slot']}"
        scope["slot"] = gl.constexpr(scope["slot"])
    return gluon.jit(function)


@functools.lru_cache(maxsize=256)
def compile_forward(config: Config, dtype: torch.dtype, formula: Any, slopes: str | None, sinks: str | None) -> Any:
    """The compiled kernel; needs no GPU. `slopes` and `sinks` are dtype names, or None where there are none."""
    kinds = (dtype, formula, slopes, sinks)
    try:
        return _compile_forward(config, *kinds, shared_by(config.groups, config.by_warp))
    except UnfamiliarCodeError as fault:
        warnings.warn(f"each compute group gets a copy of the code, up to 15% slower: {fault}", stacklevel=2)
        return _compile_forward(replace(config, by_warp=False), *kinds, nullcontext())


def _compile_forward(
    config: Config,
    dtype: torch.dtype,
    formula: Any,
    slopes: str | None,
    sinks: str | None,
    way: AbstractContextManager[None],
) -> Any:
    signature = _signature(config, DTYPES[dtype], slopes, sinks)
    given = {"config": config, "formula": formula}
    constants = {(i,): given.get(k) for i, (k, kind) in enumerate(signature.items()) if kind == "constexpr"}
    source = GluonASTSource(kernels.forward, signature, constants, {})
    return compiled(source, registers=config.start_registers, way=way)


def _signature(config: Config, name: str, slopes: str | None, sinks: str | None) -> dict[str, Any]:
    """The types of the kernel's arguments, for q of the type `name`."""
    element = {"fp16": gl.float16, "bf16": gl.bfloat16}[name]

    def tile(rows: int, dim: int) -> str:
        layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, dim], element)
        return f"tensordesc<{name}[1,1,{rows},{dim}],{layout!r}>"

    offsets = "*i32" if config.sequences else "constexpr"
    return {
        "q_desc": tile(table.GROUP_ROWS, config.dim),
        "k_desc": tile(config.keys, config.dim),
        "v_desc": tile(config.keys, config.dim_v),
        "out_desc": tile(table.GROUP_ROWS, config.dim_v // config.out_parts),
        "out": f"*{name}",
        "out_strides": ("i64",) * 3,
        "lse": "*fp32",
        "lse_strides": ("i64",) * 2,
        "v": f"*{name}",
        "v_strides": ("i64",) * 3,
        "dim_v": "i32",
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets,
        "slopes": f"*{slopes}" if slopes else "constexpr",
        "sinks": f"*{sinks}" if sinks else "constexpr",
        "counter": "*i32",
        "sizes": ("i32",) * 5,
        "divisors": ("i32",) * 15,
        "band": ("i32",) * 3,
        "scale": "fp32",
        "softcap": "fp32",
        "config": "constexpr",
        "formula": "constexpr",
    }


def compiled(
    source: Any, warps: int = 4, registers: int | None = None, way: AbstractContextManager[None] | None = None
) -> Any:
    """A kernel's machine code for Hopper, with all that Triton knows about it."""
    with sound_assembler(), way or nullcontext():
        return triton.compile(source, target=TARGET, options={"num_warps": warps, "maxnreg": registers})


def prepare(
    problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor, use: Plan | None = None
) -> Callable[[Tensors, Tensor, Tensor], None]:
    """What writes `out` and `lse` for tensors that lie like these, of which none is empty."""
    device, planned = problem.device, use or plan(problem, _dtype(tensors.alibi_slopes), _dtype(tensors.sinks))

    def describe(x: Sequence[Any]) -> Arguments:
        return arguments(problem, planned, Tensors(*x[:-3]), *x[-3:])

    call = Call(planned.kernel, planned.grid, describe, (*tensors, out, lse, counter(device)))

    def run(tensors: Tensors, out: Tensor, lse: Tensor) -> None:
        # A captured graph's counter is this call's alone, and must live until the kernel has started.
        given = (*tensors, out, lse, counter(device))
        call.start(addresses_of(given))

    return run


def arguments(problem: Problem, use: Plan, tensors: Tensors, out: Tensor, lse: Tensor, counter: Tensor) -> Arguments:
    """What the kernel is handed."""
    q, k, v = tensors[:3]
    len_q, lse_strides, out_strides, v_strides = problem.len_q, lse.stride()[:2], out.stride()[:3], v.stride()[:3]
    if problem.packed:
        len_q, lse_strides = q.shape[0], (0, lse.stride(0))
        out_strides, v_strides = (0, out.stride(1), out.stride(0)), (0, v.stride(1), v.stride(0))
    band = problem.band
    return (
        *map(describe, (q, k, v, out)),
        *(out, out_strides, lse, lse_strides, v, v_strides, problem.dim_v),
        *(tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.alibi_slopes, tensors.sinks, counter),
        (problem.batch, len_q, problem.len_k, problem.heads, use.section),
        table.divisors(problem, use.config.tile_rows, use.config.longest_first),
        (band.lo or 0, band.hi or 0, band.shift),
        *(problem.scale, problem.softcap or 0.0, use.config, use.formula),
    )


_counters: dict[tuple[int, int], Tensor] = {}


def counter(device: torch.device) -> Tensor:
    """The tile counter of the current stream; each kernel leaves it at zero.

    Kernels of one stream follow each other, so they can share it. A captured graph may run on any: it gets its own.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    index = device.index or 0
    key = (index, triton.runtime.driver.active.get_current_stream(index))
    found = _counters.get(key)
    if found is None:
        found = _counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return found


def _dtype(x: Tensor | None) -> torch.dtype | None:
    return None if x is None else x.dtype
