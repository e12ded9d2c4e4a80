"""The host side: from a problem and its tensors to launches of the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ioattn.backends.triton import config
from ioattn.backends.triton.arguments import (
    Box,
    Form,
    Inputs,
    Limits,
    Matrix,
    Numbers,
    Repeats,
    Rows,
    Upstream,
    is_wide,
    padded,
)
from ioattn.backends.triton.config import Tiles
from ioattn.backends.triton.kernels.backward import bias_kernel, delta_kernel, key_value_kernel, query_kernel
from ioattn.backends.triton.kernels.forward import forward_kernel
from ioattn.backends.triton.kernels.tiles import tanh
from ioattn.compose import Formula, Function, fold
from ioattn.problem import Gradients, Problem, Tensors
from ioattn.scores import Term

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether Triton runs kernels in its interpreter, on the CPU: decided when Triton was imported."""


class Launch(NamedTuple):
    """One kernel with all that it is run with."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    tiles: Tiles

    def run(self) -> None:
        """Start the kernel on the current stream, if there is anything to do."""
        if self.programs:
            options = {"num_warps": self.tiles.num_warps, "num_stages": self.tiles.num_stages}
            self.kernel[(self.programs,)](*self.arguments, **options)


def forward(problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor) -> None:
    """Write softmax(S) V to `out` and log(rowsum(exp(S))) to `lse`."""
    with _on(problem.device):
        forward_launch(problem, tensors, out, lse).run()


def backward(
    problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, grads: Gradients
) -> None:
    """Write the gradients of q, k and v, and those of bias and sinks where wanted, to `grads`."""
    delta = torch.empty_like(lse)
    with _on(problem.device):
        if grads.dbias is not None:
            grads.dbias.zero_()
        for launch in backward_launches(problem, tensors, out, lse, dout, dlse, delta, grads):
            launch.run()
        if grads.dsinks is not None and tensors.sinks is not None:
            grads.dsinks.copy_(_sink_gradient(problem, tensors.sinks, lse, delta))


def forward_launch(problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor) -> Launch:
    """The launch that overwrites `out` and `lse`."""
    tiles = config.choose(problem, "forward")
    packed = problem.packed
    inputs = _inputs(tensors, packed)
    out_matrix = Matrix.of(out, packed)
    form = _form(problem, tiles, is_wide(*inputs[:3], out_matrix))
    count = _tiles(problem.len_q, tiles.q_tile)
    numbers = _numbers(problem, tensors, problem.heads, count)
    arguments = (inputs, out_matrix, Rows.of(lse, packed), numbers, form, _formula(problem.terms).step)
    return Launch(forward_kernel, count * problem.heads * (problem.batch + packed), arguments, tiles)


def backward_launches(
    problem: Problem,
    tensors: Tensors,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    delta: Tensor,
    grads: Gradients,
) -> Iterator[Launch]:
    """The launches that overwrite `delta` and `grads`, in order."""
    packed = problem.packed
    inputs = _inputs(tensors, packed)
    matrices = [Matrix.of(x, packed) for x in (out, dout, *grads[:4])]
    wide = is_wide(*inputs[:3], *matrices)
    out_matrix, dout_matrix, dq, dk, dv, dbias = matrices
    upstream = Upstream(dout_matrix, Rows.of(lse, packed), Rows.of(delta, packed))
    formula = _formula(problem.terms)

    tiles = config.choose(problem, "delta")
    rows = tensors.q.shape[0] if packed else problem.len_q
    count = _tiles(rows, tiles.q_tile)
    numbers = _numbers(problem, tensors, problem.heads, count)
    form = _form(problem, tiles, wide)
    arguments: tuple[Any, ...] = (out_matrix, dout_matrix, Rows.of(dlse, packed), upstream.delta, numbers, form)
    yield Launch(delta_kernel, count * problem.heads * (1 if packed else problem.batch), arguments, tiles)

    tiles = config.choose(problem, "key_value")
    count = _tiles(problem.len_k, tiles.k_tile)
    numbers = _numbers(problem, tensors, problem.kv_heads, count)
    arguments = (inputs, upstream, dk, dv, numbers, _form(problem, tiles, wide), formula.step, formula.dstep)
    yield Launch(key_value_kernel, count * problem.kv_heads * (problem.batch + packed), arguments, tiles)

    tiles = config.choose(problem, "query")
    count = _tiles(problem.len_q, tiles.q_tile)
    numbers = _numbers(problem, tensors, problem.heads, count)
    own_bias = dbias if _repeats_nothing(problem) else None
    arguments = (inputs, upstream, dq, own_bias, numbers, _form(problem, tiles, wide), formula.step, formula.dstep)
    yield Launch(query_kernel, count * problem.heads * (problem.batch + packed), arguments, tiles)

    if dbias is not None and own_bias is None:
        yield _bias_launch(problem, tensors, inputs, upstream, dbias, wide)


def _bias_launch(
    problem: Problem, tensors: Tensors, inputs: Inputs, upstream: Upstream, dbias: Matrix, wide: bool
) -> Launch:
    assert problem.bias is not None
    batches, heads, rows = problem.bias
    tiles = config.choose(problem, "bias")
    count = _tiles(problem.len_q, tiles.q_tile)
    one_row = rows == 1
    repeats = Repeats(problem.batch // batches, problem.heads // heads, count if one_row else 1)
    numbers = _numbers(problem, tensors, problem.heads, 1 if one_row else count)
    arguments = (inputs, upstream, dbias, repeats, numbers, _form(problem, tiles, wide), _formula(problem.terms).step)
    programs = _tiles(problem.len_k, tiles.k_tile) * numbers.tiles * heads * batches
    return Launch(bias_kernel, programs, (*arguments, one_row), tiles)


def _sink_gradient(problem: Problem, sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The sink is one more key whose value is zero: dsink = P_sink * (0 - delta), over batch and queries."""
    sinks = sinks.float()[:, None]
    weights = torch.where(lse == -torch.inf, 0, torch.exp(sinks - lse))
    terms = torch.where(weights == 0, 0, weights * delta)
    return -terms.sum(-1) if problem.packed else -terms.sum((0, -1))


def _repeats_nothing(problem: Problem) -> bool:
    return problem.bias == (problem.batch, problem.heads, problem.len_q)


def _inputs(tensors: Tensors, packed: bool) -> Inputs:
    matrices = (Matrix.of(x, packed) for x in tensors[:5])
    return Inputs(*matrices, tensors.alibi_slopes, tensors.sinks, tensors.cu_seqlens_q, tensors.cu_seqlens_k)


def _numbers(problem: Problem, tensors: Tensors, heads: int, tiles: int) -> Numbers:
    band, packed = problem.band, problem.packed
    # No offset is farther out than this, so that sums with these limits stay within 32 bits.
    reach = problem.len_q + problem.len_k + abs(band.shift)
    lo = None if band.lo is None else min(max(band.lo, -reach), reach)
    hi = None if band.hi is None else min(max(band.hi, -reach), reach)
    return Numbers(
        batch=problem.batch,
        heads=heads,
        len_q=problem.len_q,
        len_k=problem.len_k,
        rows_q=tensors.q.shape[0] if packed else problem.len_q,
        rows_k=tensors.k.shape[0] if packed else problem.len_k,
        tiles=tiles,
        band=Limits(lo, hi, band.shift),
        scale=float(problem.scale),
        softcap=None if problem.softcap is None else float(problem.softcap),
    )


def _form(problem: Problem, tiles: Tiles, wide: bool) -> Form:
    d, dv = (problem.dim, padded(problem.dim), wide), (problem.dim_v, padded(problem.dim_v), wide)
    return Form(
        Q=_constant(Box(tiles.q_tile, *d)),
        K=_constant(Box(tiles.k_tile, *d)),
        V=_constant(Box(tiles.k_tile, *dv)),
        OUT=_constant(Box(tiles.q_tile, *dv)),
        GROUP=problem.group,
        HIDES=problem.band.bounded or problem.mask is not None,
        APART=True,
        BOTTOM_RIGHT=problem.align == "bottom-right",
        LATE=not problem.terms and not problem.sinks and problem.scale > 0,
        PRECISION=tiles.precision,
        UPCAST=INTERPRETED and problem.dtype == torch.bfloat16,
    )


def _constant(box: Box) -> Any:
    """A part of a constant is a constant of its own to Triton's compiler; its interpreter knows no constants."""
    return box if INTERPRETED else tl.constexpr(Box(*map(tl.constexpr, box)))


def _tiles(rows: int, tile: int) -> int:
    return -(-rows // tile)


@lru_cache
def _formula(terms: tuple[Term, ...]) -> Formula:
    return fold(terms, {"tanh": tanh}, _compiled)


def _compiled(function: Function) -> Function:
    if INTERPRETED:
        return function
    scope = function.__globals__
    if "slot" in scope:
        # Triton lets a kernel read only such globals as say that they are constant.
        scope["slot"] = tl.constexpr(scope["slot"])
    return triton.jit(function)  # type: ignore[no-any-return]


def _on(device: torch.device) -> Any:
    """Triton launches on the current device; make it the tensors'."""
    return torch.cuda.device(device.index if device.type == "cuda" else -1)
