"""Compiles and launches the Hopper backward: delta and a cleared buffer, the kernel, dQ in its dtype."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.compiler import ASTSource

from ioattn.backends.gluon import backward_config as table
from ioattn.backends.gluon.backward_config import BackwardConfig, QueryConfig
from ioattn.backends.gluon.config import divisors as forward_divisors
from ioattn.backends.gluon.config import section as forward_section
from ioattn.backends.gluon.kernels import around
from ioattn.backends.gluon.kernels import backward as kernels
from ioattn.backends.gluon.kernels.approximate import tanh
from ioattn.backends.gluon.kernels.names import GluonASTSource, gl
from ioattn.backends.gluon.kernels.query_gradient import query_gradient
from ioattn.backends.gluon.launch import _jit, compiled, counter, describe, strides_of
from ioattn.backends.gluon.repair_launch import PROGRAMS, compile_repair, repair_arguments
from ioattn.compose import Formula, fold
from ioattn.launching import Arguments, Call, Descriptor, addresses_of
from ioattn.problem import DTYPES, Gradients, Problem, Tensors

ROWS = 64
"""Rows of a tile before and after the kernel."""

FLAT = 256
"""Columns of the sums of dQ as the copy engine sees them: the most that a box of it has."""


class BackwardPlan(NamedTuple):
    """What a problem and the dtypes of its operands fix before its tensors are known.

    `query` is the kernel of dQ alone with its configuration, or None where the common kernel sums dQ as well.
    """

    config: BackwardConfig
    steps: tuple[Any, Any]
    kernel: Any
    before: Any
    after: Any
    query: tuple[QueryConfig, Any] | None
    repairs: Any
    processors: int


@functools.lru_cache(maxsize=1024)
def plan(
    problem: Problem, slopes: torch.dtype | None, sinks: torch.dtype | None, dlse: torch.dtype | None
) -> BackwardPlan:
    """Configurations and kernels of a problem."""
    config = table.choose(problem)
    steps = steps_of(problem)
    names = [x and DTYPES[x] for x in (slopes, sinks, dlse)]
    query = None
    if not config.sums_dq:
        own = table.choose_query(problem)
        query = own, compile_query(own, problem.dtype, steps, names[0])
    return BackwardPlan(
        config,
        steps,
        compile_backward(config, problem.dtype, steps, names[0]),
        compile_prepare(config, problem.dtype, names[2], names[1]),
        compile_convert(config, problem.dtype) if query is None else None,
        query,
        compile_repair(config, problem.dtype, problem.terms, names[0]) if config.cleans else None,
        torch.cuda.get_device_properties(problem.device).multi_processor_count,
    )


def steps_of(problem: Problem) -> tuple[Any, Any]:
    """The score terms and their derivative as two device functions, or None where there are none."""
    formula = _folded(problem.terms) if problem.terms else None
    return (None, None) if formula is None else (formula.step, formula.dstep)


@functools.lru_cache(maxsize=64)
def _folded(terms: tuple[Any, ...]) -> Formula:
    return fold(terms, {"tanh": tanh}, _jit)


@functools.lru_cache(maxsize=256)
def compile_backward(config: BackwardConfig, dtype: torch.dtype, steps: tuple[Any, Any], slopes: str | None) -> Any:
    """The compiled kernel; needs no GPU. `slopes` is a dtype's name, or None where there are none."""
    signature = _signature(config, DTYPES[dtype], slopes)
    given = {"config": config, "step": steps[0], "dstep": steps[1]}
    aligned = {(list(signature).index("part_sums"),): [["tt.divisibility", 16]]} if config.parts else {}
    return _build(GluonASTSource, kernels.backward, signature, given, aligned)


def _signature(config: BackwardConfig, name: str, slopes: str | None) -> dict[str, Any]:
    """The types of the kernel's arguments, for q of the type `name`."""
    element = {"fp16": gl.float16, "bf16": gl.bfloat16}[name]

    def tile(rows: int, dim: int) -> str:
        layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, dim], element)
        return f"tensordesc<{name}[1,1,{rows},{dim}],{layout!r}>"

    row_layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    numbers = f"tensordesc<fp32[{config.rows}],{row_layout!r}>"
    dq_layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    dq_tile = f"tensordesc<fp32[{math.prod(config.dq_shape) // FLAT},{FLAT}],{dq_layout!r}>"
    pointer, strides = (f"*{name}", ("i64", "i64", "i32")) if config.sequences else ("constexpr",) * 2
    offsets = "*i32" if config.sequences else "constexpr"
    return {
        "q_desc": tile(config.rows, config.dim),
        "k_desc": tile(config.keys, config.dim),
        "v_desc": tile(config.keys, config.dim),
        "dout_desc": tile(config.rows, config.dim),
        **dict.fromkeys(("lse_desc", "delta_desc"), numbers),
        "dq_desc": dq_tile if config.sums_dq else "constexpr",
        **dict.fromkeys(("dk_desc", "dv_desc"), tile(64, config.columns)),
        "dk": pointer,
        "dk_strides": strides,
        "dv": pointer,
        "dv_strides": strides,
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets,
        "slopes": f"*{slopes}" if slopes else "constexpr",
        "counter": "*i32",
        **_parts(config),
        "sizes": ("i32",) * 5,
        "rows": ("i32",) * 2,
        "band": ("i32",) * 3,
        "scale": "fp32",
        "softcap": "fp32" if config.has_softcap else "constexpr",
        "config": "constexpr",
        "step": "constexpr",
        "dstep": "constexpr",
    }


def _parts(config: BackwardConfig) -> dict[str, Any]:
    """What the parts of tiles leave for each other, and which tiles are cut."""
    return {
        "part_sums": "*fp32" if config.parts else "constexpr",
        "part_turns": "*i32" if config.parts else "constexpr",
        "dq_turns": "*i32" if config.in_order else "constexpr",
        "split": ("i32",) * 3 if config.parts else "constexpr",
    }


@functools.lru_cache(maxsize=256)
def compile_query(config: QueryConfig, dtype: torch.dtype, steps: tuple[Any, Any], slopes: str | None) -> Any:
    """The compiled kernel of dQ alone; needs no GPU."""
    name = DTYPES[dtype]
    element = {"fp16": gl.float16, "bf16": gl.bfloat16}[name]

    def tile(rows: int) -> str:
        layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, config.dim], element)
        return f"tensordesc<{name}[1,1,{rows},{config.dim}],{layout!r}>"

    offsets = "*i32" if config.sequences else "constexpr"
    signature = {
        "q_desc": tile(64),
        "dout_desc": tile(64),
        "k_desc": tile(config.keys),
        "v_desc": tile(config.keys),
        "dq_desc": tile(64),
        "lse": "*fp32",
        "delta": "*fp32",
        "row_strides": ("i64",) * 2,
        "flag": "*i32" if config.cleans else "constexpr",
        "dq": f"*{name}" if config.sequences else "constexpr",
        "dq_strides": ("i64", "i64", "i32") if config.sequences else "constexpr",
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets,
        "slopes": f"*{slopes}" if slopes else "constexpr",
        "counter": "*i32",
        "sizes": ("i32",) * 5,
        "divisors": ("i32",) * 15,
        "band": ("i32",) * 3,
        "scale": "fp32",
        "softcap": "fp32" if config.has_softcap else "constexpr",
        "config": "constexpr",
        "step": "constexpr",
        "dstep": "constexpr",
    }
    given = {"config": config, "step": steps[0], "dstep": steps[1]}
    return _build(GluonASTSource, query_gradient, signature, given, {})


@functools.lru_cache(maxsize=256)
def compile_prepare(config: BackwardConfig, dtype: torch.dtype, dlse: str | None, sinks: str | None) -> Any:
    """The compiled pass before the kernel; needs no GPU. `dlse` and `sinks` are dtype names, or None."""
    signature = {
        "out": f"*{DTYPES[dtype]}",
        "out_strides": ("i64",) * 3,
        "dout": f"*{DTYPES[dtype]}",
        "dout_strides": ("i64",) * 3,
        "lse": "*fp32",
        "lse_strides": ("i64",) * 2,
        "dlse": f"*{dlse}" if dlse else "constexpr",
        "dlse_strides": ("i64",) * 3,
        "lse_rows": "*fp32",
        "delta_rows": "*fp32",
        "dq_rows": "*fp32" if config.sums_dq and not config.fresh else "constexpr",
        "dq_turns": "*i32" if config.in_order else "constexpr",
        "flat_rows": "*fp32" if config.sequences and not config.sums_dq else "constexpr",
        "sinks": f"*{sinks}" if sinks else "constexpr",
        "sink_terms": "*fp32" if sinks else "constexpr",
        "flag": "*i32" if config.cleans else "constexpr",
        "q": f"*{DTYPES[dtype]}" if config.cleans else "constexpr",
        "q_strides": ("i64",) * 3,
        "cu_seqlens": "*i32" if config.sequences else "constexpr",
        "sizes": ("i32",) * 6,
    }
    return _compile_around(around.prepare, signature, config)


@functools.lru_cache(maxsize=256)
def compile_convert(config: BackwardConfig, dtype: torch.dtype) -> Any:
    """The compiled pass after the kernel; needs no GPU."""
    signature = {
        "dq_rows": "*fp32",
        "dq": f"*{DTYPES[dtype]}",
        "dq_strides": ("i64",) * 3,
        "flag": "*i32" if config.cleans else "constexpr",
        "cu_seqlens": "*i32" if config.sequences else "constexpr",
        "sizes": ("i32",) * 5,
        "scale": "fp32",
    }
    return _compile_around(around.convert, signature, config, TRANSPOSED=config.transposed)


def _compile_around(function: Any, signature: dict[str, Any], config: BackwardConfig, **more: bool) -> Any:
    given = {"ROWS": ROWS, "DIM": config.dim, "SEQUENCES": config.sequences, **more}
    signature |= dict.fromkeys(given, "constexpr")
    # What torch allocates, and what the copy engine can reach, starts at a multiple of 16 bytes.
    aligned = {"out", "dout", "q", "lse_rows", "delta_rows", "dq_rows", "dq"}
    attributes = {(i,): [["tt.divisibility", 16]] for i, k in enumerate(signature) if k in aligned}
    return _build(ASTSource, function, signature, given, attributes)


def _build(source: Any, function: Any, signature: dict[str, Any], given: dict[str, Any], attributes: Any) -> Any:
    """A compiled kernel; what the signature calls a constant is in `given`, or None."""
    constants = {(i,): given.get(k) for i, (k, kind) in enumerate(signature.items()) if kind == "constexpr"}
    return compiled(source(function, signature, constants, attributes))


class Operands(NamedTuple):
    """Every tensor of a backward: those of `Tensors`, what the forward left, the gradients, and scratch."""

    q: Any
    k: Any
    v: Any
    bias: Any
    mask: Any
    slopes: Any
    sinks: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    out: Any
    lse: Any
    dout: Any
    dlse: Any
    dq: Any
    dk: Any
    dv: Any
    dbias: Any
    dsinks: Any
    counter: Any
    lse_rows: Any
    delta_rows: Any
    dq_rows: Any
    """dQ as it is summed, where the common kernel does so."""
    flat_lse: Any
    flat_delta: Any
    """LSE and delta without gaps between sequences, for the kernel of dQ alone."""
    sink_terms: Any
    dq_turns: Any
    """Tiles of keys that have added to each block of dQ, where they do so in order."""
    part_sums: Any
    """dK and dV of tiles whose walk is cut into parts."""
    part_turns: Any
    """Parts of each tile whose sums are there."""
    flag: Any
    """Raised where a gradient must be computed again."""


class Shape(NamedTuple):
    """What a problem and its tensors' sizes fix: rows of queries and keys in memory, and those of scratch."""

    rows_q: int
    rows_k: int
    entries: int
    head_rows: int
    total: int

    @classmethod
    def of(cls, problem: Problem, tensors: Tensors) -> Shape:
        """The sizes of this call."""
        packed = problem.packed
        rows_q, rows_k = (len(tensors.q), len(tensors.k)) if packed else (problem.len_q, problem.len_k)
        entries, head_rows = 1 if packed else problem.batch, table.head_rows(problem, rows_q)
        return cls(rows_q, rows_k, entries, head_rows, entries * problem.heads * head_rows)


def scratch(problem: Problem, shape: Shape, config: BackwardConfig, sinks: bool) -> tuple[Tensor | None, ...]:
    """The last of the `Operands`, from `lse_rows` on."""
    new = functools.partial(torch.empty, dtype=torch.float32, device=problem.device)
    flat = problem.packed and not config.sums_dq
    cut = table.key_tiles(problem) - table.split(problem)[0] if config.parts else 0
    return (
        *new((2, shape.total)),
        new((shape.total, config.dim)) if config.sums_dq else None,
        *(new((2, problem.heads, shape.rows_q)) if flat else (None, None)),
        new(shape.total // ROWS) if sinks else None,
        torch.empty(shape.total // ROWS, dtype=torch.int32, device=problem.device) if config.in_order else None,
        new((cut, 2, 2, 64 * config.dim)) if cut else None,
        *zeros(problem.device, 2 * cut, int(config.cleans)),
    )


def zeros(device: torch.device, *sizes: int) -> tuple[Tensor | None, ...]:
    """So many zeros each, cleared together; None where there are none."""
    together = sum(sizes)
    parts = torch.zeros(together, dtype=torch.int32, device=device).split(sizes) if together else [None] * len(sizes)
    return tuple(part if size else None for part, size in zip(parts, sizes, strict=True))


def prepare(
    problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, grads: Gradients
) -> Callable[..., None]:
    """What writes the gradients for tensors that lie like these, of which q and k are not empty."""
    device, sinks = problem.device, grads.dsinks is not None
    use = plan(problem, *map(_dtype, (tensors.alibi_slopes, tensors.sinks if sinks else None, dlse)))
    shape = Shape.of(problem, tensors)

    def operands(
        tensors: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, grads: Gradients
    ) -> Operands:
        rest = (counter(device), *scratch(problem, shape, use.config, sinks))
        return Operands(*tensors, addressable(out), lse, addressable(dout), dlse, *grads, *rest)

    example = operands(tensors, out, lse, dout, dlse, grads)

    def call_of(kernel: Any, programs: int, arguments: Callable[..., Arguments]) -> Call:
        return Call(kernel, programs, lambda x: arguments(problem, use, shape, Operands(*x)), example)

    calls = [call_of(*launch) for launch in _launches(problem, use, shape)]

    def run(tensors: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, grads: Gradients) -> None:
        given = operands(tensors, out, lse, dout, dlse, grads)
        addresses = addresses_of(given)
        for call in calls:
            call.start(addresses)
        if sinks:
            given.dsinks.copy_(given.sink_terms.view(shape.entries, problem.heads, -1).sum((0, 2)))

    return run


def _launches(problem: Problem, use: BackwardPlan, shape: Shape) -> Iterator[tuple[Any, int, Callable[..., Arguments]]]:
    """The kernels in order: each with the number of its programs and what it is handed."""

    def persistent(tiles: int) -> int:
        return use.processors if problem.packed else min(use.processors, tiles)

    yield use.before, shape.total // ROWS, _before
    tiles = -(-problem.len_k // use.config.keys) * problem.kv_heads * problem.batch
    whole, _, parts = table.split(problem) if use.config.parts else (tiles, 0, 1)
    yield use.kernel, persistent(whole + (tiles - whole) * parts), _key_value
    if use.query is None:
        yield use.after, shape.total // ROWS, _after
    else:
        config, kernel = use.query
        tiles = -(-problem.len_q // (64 * config.groups)) * problem.heads * problem.batch
        yield kernel, persistent(tiles), _query
    if use.repairs is not None:
        keys, queries = use.repairs
        yield keys, PROGRAMS, _repair_keys
        yield queries, PROGRAMS, _repair_queries


def _before(problem: Problem, use: BackwardPlan, shape: Shape, x: Operands) -> Arguments:
    return (
        *(x.out, strides_of(x.out), x.dout, strides_of(x.dout), x.lse, _row_strides(x.lse)[:2]),
        *(x.dlse, (0, 0, 0) if x.dlse is None else _row_strides(x.dlse)),
        *(x.lse_rows, x.delta_rows, None if use.config.fresh else x.dq_rows, x.dq_turns, x.flat_lse),
        *(None if x.sink_terms is None else x.sinks, x.sink_terms, x.flag, x.q, strides_of(x.q), x.cu_seqlens_q),
        (problem.batch, problem.heads, shape.rows_q, shape.head_rows, problem.dim_v, problem.dim),
        *(ROWS, use.config.dim, use.config.sequences),
    )


def _key_value(problem: Problem, use: BackwardPlan, shape: Shape, x: Operands) -> Arguments:
    """dK and dV, and dQ where the kernel sums it."""
    config, total = use.config, (shape.total,)
    return (
        *map(describe, (x.q, x.k, x.v, x.dout)),
        *(Descriptor(x.lse_rows, total, (1,)), Descriptor(x.delta_rows, total, (1,))),
        None if x.dq_rows is None else Descriptor(x.dq_rows, (shape.total * config.dim // FLAT, FLAT), (FLAT, 1)),
        *map(describe, (x.dk, x.dv)),
        *(x.dk, (*strides_of(x.dk)[1:], problem.dim)),
        *(x.dv, (*strides_of(x.dv)[1:], problem.dim_v)),
        *(x.cu_seqlens_q, x.cu_seqlens_k, x.slopes, x.counter),
        *(x.part_sums, x.part_turns, x.dq_turns, table.split(problem) if config.parts else None),
        (problem.batch, shape.rows_q, shape.rows_k, problem.kv_heads, table.section(problem)),
        (shape.head_rows, problem.group),
        *(_band(problem), problem.scale, problem.softcap, config, *use.steps),
    )


def _query(problem: Problem, use: BackwardPlan, shape: Shape, x: Operands) -> Arguments:
    """dQ alone."""
    assert use.query is not None
    rows = x.lse_rows, x.delta_rows, (problem.heads * shape.head_rows, shape.head_rows)
    if x.flat_lse is not None:
        rows = x.flat_lse, x.flat_delta, (0, shape.rows_q)
    return (
        *map(describe, (x.q, x.dout, x.k, x.v, x.dq)),
        *(*rows, x.flag, x.dq, (*strides_of(x.dq)[1:], problem.dim)),
        *(x.cu_seqlens_q, x.cu_seqlens_k, x.slopes, x.counter),
        (problem.batch, shape.rows_q, shape.rows_k, problem.heads, forward_section(problem)),
        forward_divisors(problem, 64 * use.query[0].groups, use.query[0].longest_first),
        *(_band(problem), problem.scale, problem.softcap, use.query[0], *use.steps),
    )


def _after(problem: Problem, use: BackwardPlan, shape: Shape, x: Operands) -> Arguments:
    """dQ in its dtype, out of its sums."""
    config = use.config
    sizes = (problem.batch, problem.heads, shape.rows_q, shape.head_rows, problem.dim)
    return (
        *(x.dq_rows, x.dq, strides_of(x.dq), x.flag, x.cu_seqlens_q, sizes, problem.scale),
        *(ROWS, config.dim, config.sequences, config.transposed),
    )


def _repair_keys(problem: Problem, use: BackwardPlan, shape: Shape, x: Operands) -> Arguments:
    return repair_arguments(problem, use.config, shape.head_rows, x, (x.dk, x.dv))


def _repair_queries(problem: Problem, use: BackwardPlan, shape: Shape, x: Operands) -> Arguments:
    return repair_arguments(problem, use.config, shape.head_rows, x, (x.dq,))


def _band(problem: Problem) -> tuple[int, int, int]:
    return problem.band.lo or 0, problem.band.hi or 0, problem.band.shift


def addressable(x: Tensor) -> Tensor:
    """`x`, or a copy of it where the copy engine could not reach it: gradients come with any strides, 0 too."""
    strides = [stride for size, stride in zip(x.shape[:-1], x.stride(), strict=False) if size > 1]
    if x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(s > 0 and s % 8 == 0 for s in strides):
        return x
    return x.contiguous()


def _row_strides(x: Tensor) -> tuple[int, ...]:
    """The same for one number per row, `(B, H, N)` or packed `(H, T)`."""
    return x.stride() if x.dim() == 3 else (0, *x.stride())


def _dtype(x: Tensor | None) -> torch.dtype | None:
    return None if x is None else x.dtype
