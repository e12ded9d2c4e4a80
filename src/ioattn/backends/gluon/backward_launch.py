"""Compiles and launches the Hopper backward: delta and a cleared buffer, the kernel, dQ in its dtype."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.compiler import ASTSource

from ioattn.backends.gluon import backward_config as table
from ioattn.backends.gluon.backward_config import BackwardConfig, QueryConfig
from ioattn.backends.gluon.config import section as forward_section
from ioattn.backends.gluon.kernels import around
from ioattn.backends.gluon.kernels import backward as kernels
from ioattn.backends.gluon.kernels.names import GluonASTSource, gl
from ioattn.backends.gluon.kernels.query_gradient import query_gradient
from ioattn.backends.gluon.launch import TARGET, _jit, counter, describe, strides_of, tanh
from ioattn.backends.gluon.repair_launch import compile_repair, mend
from ioattn.compose import Formula, fold
from ioattn.launching import Descriptor
from ioattn.problem import DTYPES, Gradients, Problem, Tensors

ROWS = 64
"""Rows of a tile before and after the kernel."""


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
    name = DTYPES[dtype]
    element = {"fp16": gl.float16, "bf16": gl.bfloat16}[name]

    def tile(rows: int, dim: int) -> str:
        layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, dim], element)
        return f"tensordesc<{name}[1,1,{rows},{dim}],{layout!r}>"

    row_layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    numbers = f"tensordesc<fp32[{config.rows}],{row_layout!r}>"
    dq_layout = gl.NVMMASharedLayout.get_default_for(list(config.dq_tile), gl.float32)
    dq_tile = f"tensordesc<fp32[{config.dq_tile[0]},{config.dq_tile[1]}],{dq_layout!r}>"
    offsets = "*i32" if config.sequences else "constexpr"
    signature = {
        "q_desc": tile(config.rows, config.dim),
        "k_desc": tile(config.keys, config.dim),
        "v_desc": tile(config.keys, config.dim),
        "dout_desc": tile(config.rows, config.dim),
        **dict.fromkeys(("lse_desc", "delta_desc"), numbers),
        "dq_desc": dq_tile if config.sums_dq else "constexpr",
        **dict.fromkeys(("dk_desc", "dv_desc"), tile(64, config.columns)),
        "dk": f"*{name}" if config.sequences else "constexpr",
        "dk_strides": ("i64", "i64", "i32") if config.sequences else "constexpr",
        "dv": f"*{name}" if config.sequences else "constexpr",
        "dv_strides": ("i64", "i64", "i32") if config.sequences else "constexpr",
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets,
        "slopes": f"*{slopes}" if slopes else "constexpr",
        "counter": "*i32",
        "sizes": ("i32",) * 5,
        "rows": ("i32",) * 2,
        "band": ("i32",) * 3,
        "scale": "fp32",
        "softcap": "fp32" if config.has_softcap else "constexpr",
        "config": "constexpr",
        "step": "constexpr",
        "dstep": "constexpr",
    }
    given = {"config": config, "step": steps[0], "dstep": steps[1]}
    return _build(GluonASTSource, kernels.backward, signature, given, {})


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
        "kv_group": "i32",
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
        "dq_rows": "*fp32" if config.sums_dq else "constexpr",
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
    return _compile_around(around.convert, signature, config)


def _compile_around(function: Any, signature: dict[str, Any], config: BackwardConfig) -> Any:
    given = {"ROWS": ROWS, "DIM": config.dim, "SEQUENCES": config.sequences}
    signature |= dict.fromkeys(given, "constexpr")
    # What torch allocates, and what the copy engine can reach, starts at a multiple of 16 bytes.
    aligned = {"out", "dout", "q", "lse_rows", "delta_rows", "dq_rows", "dq"}
    attributes = {(i,): [["tt.divisibility", 16]] for i, k in enumerate(signature) if k in aligned}
    return _build(ASTSource, function, signature, given, attributes)


def _build(source: Any, function: Any, signature: dict[str, Any], given: dict[str, Any], attributes: Any) -> Any:
    """A compiled kernel; what the signature calls a constant is in `given`, or None."""
    constants = {(i,): given.get(k) for i, (k, kind) in enumerate(signature.items()) if kind == "constexpr"}
    return triton.compile(source(function, signature, constants, attributes), target=TARGET, options={"num_warps": 4})


def backward(
    problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, grads: Gradients
) -> None:
    """Write the gradients; the problem has no objections and no empty tensors."""
    sinks = tensors.sinks if grads.dsinks is not None else None
    use = plan(problem, *map(_dtype, (tensors.alibi_slopes, sinks, dlse)))
    config = use.config
    out, dout = addressable(out), addressable(dout)
    rows_q = tensors.q.shape[0] if problem.packed else problem.len_q
    entries = 1 if problem.packed else problem.batch
    head_rows = table.head_rows(problem, rows_q)
    total = entries * problem.heads * head_rows
    new = functools.partial(torch.empty, dtype=torch.float32, device=problem.device)
    lse_rows, delta_rows = new((2, total))
    dq_rows = new((total, config.dim)) if config.sums_dq else None
    flat_rows = new((2, problem.heads, rows_q)) if problem.packed and not config.sums_dq else None
    terms = None if sinks is None else new(total // ROWS)
    flag = torch.zeros(1, dtype=torch.int32, device=problem.device) if config.cleans else None
    grid = (total // ROWS, 1, 1)
    sizes = (problem.batch, problem.heads, rows_q, head_rows)
    constants = (ROWS, config.dim, config.sequences)
    use.before[grid](
        *(out, strides_of(out), dout, strides_of(dout), lse, _row_strides(lse)[:2]),
        *(dlse, (0, 0, 0) if dlse is None else _row_strides(dlse)),
        *(lse_rows, delta_rows, dq_rows, flat_rows, sinks, terms, flag, tensors.q, strides_of(tensors.q)),
        *(tensors.cu_seqlens_q, (*sizes, problem.dim_v, problem.dim), *constants),
    )
    _differentiate(problem, tensors, dout, (lse_rows, delta_rows, dq_rows), grads, use)
    if dq_rows is not None:
        sums = (dq_rows, grads.dq, strides_of(grads.dq), flag, tensors.cu_seqlens_q)
        use.after[grid](*sums, (*sizes, problem.dim), problem.scale, *constants)
    elif flat_rows is not None:
        _differentiate_queries(problem, tensors, dout, (*flat_rows, (0, rows_q)), flag, grads.dq, use)
    else:
        rows = (lse_rows, delta_rows, (problem.heads * head_rows, head_rows))
        _differentiate_queries(problem, tensors, dout, rows, flag, grads.dq, use)
    if flag is not None:
        mend(problem, tensors, dout, (lse_rows, delta_rows, head_rows), flag, grads, use.repairs, config)
    if grads.dsinks is not None and terms is not None:
        grads.dsinks.copy_(terms.view(entries, problem.heads, -1).sum((0, 2)))


def _differentiate(
    problem: Problem,
    tensors: Tensors,
    dout: Tensor,
    workspace: tuple[Tensor, Tensor, Tensor | None],
    grads: Gradients,
    use: BackwardPlan,
) -> None:
    """Launch the kernel of dK and dV, and of dQ where it sums it."""
    q, k, v, config, band = tensors.q, tensors.k, tensors.v, use.config, problem.band
    lse_rows, delta_rows, dq_rows = workspace
    total = len(lse_rows)
    rows_q, rows_k = (q.shape[0], k.shape[0]) if problem.packed else (problem.len_q, problem.len_k)
    tiles = -(-problem.len_k // config.keys) * problem.kv_heads * problem.batch
    use.kernel[(use.processors if problem.packed else min(use.processors, tiles), 1, 1)](
        *map(describe, (q, k, v, dout)),
        Descriptor(lse_rows, (total,), (1,)),
        Descriptor(delta_rows, (total,), (1,)),
        None if dq_rows is None else Descriptor(dq_rows, (total, config.dim), (config.dim, 1)),
        describe(grads.dk),
        describe(grads.dv),
        *(grads.dk, (*strides_of(grads.dk)[1:], problem.dim)),
        *(grads.dv, (*strides_of(grads.dv)[1:], problem.dim_v)),
        *(tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.alibi_slopes, counter(problem.device)),
        (problem.batch, rows_q, rows_k, problem.kv_heads, table.section(problem)),
        (table.head_rows(problem, rows_q), problem.group),
        (band.lo or 0, band.hi or 0, band.shift),
        *(problem.scale, problem.softcap, config, *use.steps),
    )


def _differentiate_queries(
    problem: Problem,
    tensors: Tensors,
    dout: Tensor,
    rows: tuple[Tensor, Tensor, tuple[int, int]],
    flag: Tensor | None,
    dq: Tensor,
    use: BackwardPlan,
) -> None:
    """Launch the kernel of dQ alone; `rows` are LSE, delta and their strides of batch and head."""
    assert use.query is not None
    q, k, v, band = tensors.q, tensors.k, tensors.v, problem.band
    config, kernel = use.query
    tiles = -(-problem.len_q // (64 * config.groups)) * problem.heads * problem.batch
    len_q, len_k = (q.shape[0], k.shape[0]) if problem.packed else (problem.len_q, problem.len_k)
    kernel[(use.processors if problem.packed else min(use.processors, tiles), 1, 1)](
        *map(describe, (q, dout, k, v, dq)),
        *rows,
        flag,
        *(dq, (*strides_of(dq)[1:], problem.dim)),
        *(tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.alibi_slopes, counter(problem.device)),
        (problem.batch, len_q, len_k, problem.heads, forward_section(problem)),
        problem.group,
        (band.lo or 0, band.hi or 0, band.shift),
        *(problem.scale, problem.softcap, config, *use.steps),
    )


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
