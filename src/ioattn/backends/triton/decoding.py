"""The host side of decoding: from a problem and its cache to launches of the kernels.

As in `launch`, what follows from shapes and strides alone is prepared once. Nothing here looks at lengths or pages: the
device reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ioattn.backends.triton import splits
from ioattn.backends.triton.arguments import (
    Box,
    CacheForm,
    CacheInputs,
    CacheNumbers,
    Matrix,
    Rows,
    encoded,
    is_wide,
    padded,
)
from ioattn.backends.triton.call import INTERPRETED, Call, Prepared
from ioattn.backends.triton.config import Gpu
from ioattn.backends.triton.kernels.decode import append_kernel, combine_kernel, decode_kernel
from ioattn.backends.triton.kernels.few_rows import few_rows_kernel
from ioattn.backends.triton.launch import (
    constant_box,
    formula_of,
    gpu_of,
    limits_of,
)
from ioattn.backends.triton.splits import CacheTiles
from ioattn.caches import CacheTensors
from ioattn.launching import Arguments, on_device
from ioattn.problem import Problem

COMBINE = CacheTiles(16, 16, 1, 1)
COMBINE_COLUMNS = 32
COMBINE_PIECES = (8, 32)
"""The tile of partial results that a program holds: at most 4 KiB, 32 registers of each thread of a warp. At B1 N8192
in 16 pieces both kernels took 12.9 us on an H200, and 13.7 with 64 columns on 4 warps."""

MAX_EXACT_KEYS = 32
"""Keys of a tile whose values are looked at for NaN and inf that only some rows see: more of them fill registers."""

MAX_EXACT_KEYS_OF_MANY_ROWS = 16
"""With 64 rows on 4 warps 32 keys fill them, too, and the assembler then waits for each product of the whole kernel."""

MAX_ROWS_APART = 16
"""Of tiles that are not turned and have a sum for each place: with 32 rows at D 256 their loop would spill 31 times."""


class Launch(Prepared):
    """A kernel that may be set up while the one before it still runs, and that may have a limit on its registers."""

    def __init__(
        self, kernel: Any, programs: int, constant: tuple[Any, ...], tiles: CacheTiles, early: bool = False
    ) -> None:
        super().__init__(kernel, programs, constant, tiles.launch)
        self.early, self.registers = early, tiles.registers

    @property
    def options(self) -> dict[str, Any]:
        """As every kernel's, and these two."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {**super().options, **({"launch_pdl": True} if self.early else {}), **limit}


def prepare_attention(
    problem: Problem, tensors: CacheTensors, out: Tensor, lse: Tensor
) -> Callable[[CacheTensors, Tensor, Tensor], None]:
    """What writes attention over the cache to `out` and its log-sum-exp to `lse`, for tensors that lie like these."""
    number, main, combine = prepare_decode(problem, tensors, out, gpu_of(problem.device))

    def describe(x: Sequence[Any]) -> list[Arguments]:
        inputs = inputs_of(problem, CacheTensors(*x[:-4]))
        return decode_arguments(inputs, x[-4], x[-3], None if combine is None else (x[-2], x[-1]))

    groups = [[main]] if combine is None else [[main], [combine]]
    call = Call(groups, describe)

    def run(tensors: CacheTensors, out: Tensor, lse: Tensor) -> None:
        call((*tensors, out, lse, *_partial_results(problem, number)))

    return on_device(problem.device, run)


def prepare_rows(
    problem: Problem, tensors: CacheTensors, k_new: Tensor, v_new: Tensor
) -> Callable[[CacheTensors, Tensor, Tensor], None]:
    """What writes new rows behind the lengths of the cache, in place; a place that does not exist is not written."""

    def describe(x: Sequence[Any]) -> list[Arguments]:
        return [(inputs_of(problem, CacheTensors(*x[:-2])), Matrix.of(x[-2]), Matrix.of(x[-1]))]

    call = Call([[prepare_append(problem, tensors, k_new, v_new)]], describe)

    def run(tensors: CacheTensors, k_new: Tensor, v_new: Tensor) -> None:
        call((*tensors, k_new, v_new))

    return on_device(problem.device, run)


def decode_arguments(
    inputs: CacheInputs, out: Tensor, lse: Tensor, partial: tuple[Tensor, Tensor] | None
) -> list[Arguments]:
    """The arguments that hold tensors of the kernel that attends, and with partial results of the one that combines."""
    results = (Matrix.of(out), Rows.of(lse, False))
    return [(inputs, *results)] if partial is None else [(inputs, *partial), (*partial, *results, inputs.sinks)]


def _partial_results(problem: Problem, number: int) -> tuple[Tensor | None, Tensor | None]:
    """Memory for the outputs of all pieces, and their maxima and sums of weights, if there are several."""
    if number == 1:
        return None, None
    rows = problem.batch * problem.heads * problem.len_q * number
    out = torch.empty(rows * problem.dim_v, dtype=torch.float32, device=problem.device)
    return out, torch.empty(2 * rows, dtype=torch.float32, device=problem.device)


def prepare_decode(
    problem: Problem, tensors: CacheTensors, out: Tensor, gpu: Gpu | None
) -> tuple[int, Prepared, Prepared | None]:
    """The number of pieces, the kernel that attends to one, and where there are several the one that combines them."""
    tiles = splits.choose(problem, gpu)
    number = splits.pieces(problem, tiles, gpu)
    return number, *prepare_pieces(problem, tensors, out, gpu, tiles, number)


def prepare_pieces(
    problem: Problem, tensors: CacheTensors, out: Tensor, gpu: Gpu | None, tiles: CacheTiles, number: int
) -> tuple[Prepared, Prepared | None]:
    """Both kernels for tiles and a number of pieces."""
    split = number > 1
    early = gpu is not None and gpu.capability >= (9, 0)
    form = _form(problem, tensors, tiles, split, early)
    row_tiles = splits.count(problem.group * problem.len_q, tiles.q_tile)
    numbers = _numbers(problem, tensors, number, row_tiles)
    step = formula_of(problem).step
    programs = problem.batch * problem.kv_heads * row_tiles * number
    kernel = few_rows_kernel if tiles.lanes else decode_kernel
    main = Launch(kernel, programs, (numbers, form, step), tiles, early)
    if not split:
        return main, None
    columns = min(COMBINE_COLUMNS, padded(problem.dim_v))
    at_once = next(n for n in COMBINE_PIECES if number <= n or n == COMBINE_PIECES[-1])
    form = form._replace(V=constant_box(Box(at_once, problem.dim_v, columns, False)))
    column_tiles = splits.count(problem.dim_v, columns)
    rows = problem.batch * problem.heads * problem.len_q
    numbers = numbers._replace(tiles=encoded(column_tiles))
    return main, Launch(combine_kernel, rows * column_tiles, (numbers, form), COMBINE, early)


def prepare_append(problem: Problem, tensors: CacheTensors, k_new: Tensor, v_new: Tensor) -> Prepared:
    """The kernel that copies new rows to their places."""
    rows = k_new.shape[2]
    numbers = _numbers(problem, tensors, 1, 1)
    form = _form(problem, tensors, CacheTiles(16, 16, 1, 1), False, False)
    return Launch(append_kernel, problem.batch * problem.kv_heads * rows, (numbers, form), CacheTiles(16, 16, 1, 1))


def inputs_of(problem: Problem, tensors: CacheTensors) -> CacheInputs:
    """The arguments of the kernels that hold the call's tensors."""
    tree = tensors.tree_mask
    lo, hi = limits_of(problem)
    softcap = None if problem.softcap is None else float(problem.softcap)
    return CacheInputs(
        q=Matrix.of(tensors.q),
        k=Matrix.of(tensors.k_cache),
        v=Matrix.of(tensors.v_cache),
        lengths=tensors.cache_seqlens.contiguous(),
        table=None if tensors.block_table is None else tensors.block_table.contiguous(),
        tree=None if tree is None else Matrix(tree, tree.stride(0) * (len(tree) != 1), 0, *tree.stride()[1:]),
        slopes=None if tensors.alibi_slopes is None else tensors.alibi_slopes.contiguous(),
        sinks=None if tensors.sinks is None else tensors.sinks.contiguous(),
        lo=lo,
        hi=hi,
        softcap=softcap,
    )


def _numbers(problem: Problem, tensors: CacheTensors, number: int, tiles: int) -> CacheNumbers:
    assert problem.cache is not None
    return CacheNumbers(
        kv_heads=encoded(problem.kv_heads),
        len_q=encoded(problem.len_q),
        capacity=encoded(problem.len_k),
        pages=encoded(tensors.k_cache.shape[0]),
        columns=encoded(0 if tensors.block_table is None else tensors.block_table.shape[1]),
        appended=encoded(problem.cache.appended),
        pieces=encoded(number),
        tiles=encoded(tiles),
        scale=problem.scale,
    )


def _form(problem: Problem, tensors: CacheTensors, tiles: CacheTiles, split: bool, early: bool) -> CacheForm:
    assert problem.cache is not None
    wide = is_wide(Matrix.of(tensors.k_cache), Matrix.of(tensors.v_cache))
    several = problem.len_q > 1
    many = tiles.q_tile >= splits.MAX_ROWS and not tiles.turned
    edge = min(tiles.k_tile, MAX_EXACT_KEYS_OF_MANY_ROWS if many else MAX_EXACT_KEYS) if several else tiles.k_tile
    side = 32 * tiles.num_warps // tiles.lanes if tiles.lanes else 0
    edge = max(edge, side)
    d, dv = (problem.dim, padded(problem.dim), wide), (problem.dim_v, padded(problem.dim_v), wide)
    return CacheForm(
        Q=constant_box(Box(tiles.q_tile, *d)),
        K=constant_box(Box(tiles.k_tile, *d)),
        V=constant_box(Box(tiles.k_tile, *dv)),
        EDGE_K=constant_box(Box(edge, *d)),
        EDGE_V=constant_box(Box(edge, *dv)),
        GROUP=problem.group,
        SEVERAL=several,
        PAGE=problem.cache.page or 0,
        SPLIT=split,
        LATE=not problem.terms and not problem.sinks and problem.scale > 0,
        TURNED=tiles.turned,
        EARLY=early,
        PRECISION=tiles.precision,
        UPCAST=INTERPRETED and problem.dtype == torch.bfloat16,
        SIDE=side,
        SPAN=4 * tiles.lanes,
        STAGES=tiles.num_stages,
        APART=tiles.apart and (tiles.turned or tiles.q_tile <= MAX_ROWS_APART),
        EDGE_STAGES=tiles.edge_stages,
    )
