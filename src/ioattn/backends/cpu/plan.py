"""What the host decides once per problem: the recipe, block sizes, scratch, and the address of the compiled worker.

Nothing here depends on the number of threads, so that results do not either.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ioattn.backends.cpu import jit, launch
from ioattn.backends.cpu.arguments import FIELDS, SLOTS, STRIDES, fill
from ioattn.backends.cpu.forward import forward
from ioattn.backends.cpu.jit import Target
from ioattn.backends.cpu.softmax import Recipe
from ioattn.backends.cpu.tiles import LOG2E, tile_of, widest
from ioattn.problem import DTYPES, Problem

_FAR = 2**40
"""Stands for no bound of the band until a sequence's shift is added."""

FORWARD_KEYS = 128
"""Keys per block of the forward."""

FORWARD_ROWS = 192
"""Queries per block: a block of keys, staged or paired once, serves this many."""


@dataclass
class Plan:
    """A worker and the argument block that it starts from, ready but for addresses and strides."""

    problem: Problem
    address: int
    block: ctypes.Array[ctypes.c_int64]
    tasks: int
    scratch: int
    flops: float

    def run(self, tensors: dict[str, Tensor | None], shared_scratch: int = 0) -> None:
        """Run the worker on these tensors, in scratch of this call's own."""
        if self.tasks == 0:
            return
        block = type(self.block).from_buffer_copy(self.block)
        for name, x in tensors.items():
            if x is not None:
                block[SLOTS[name]] = x.data_ptr()
                if f"{name}_row" in SLOTS:
                    first = SLOTS[f"{name}_batch"]
                    block[first : first + 4] = strides(x, self.problem.packed)
        threads = min(torch.get_num_threads(), self.tasks)
        workspace = torch.empty(shared_scratch + threads * self.scratch, dtype=torch.uint8)
        block[SLOTS["partial"]] = workspace.data_ptr()
        block[SLOTS["workspace"]] = workspace.data_ptr() + shared_scratch
        launch.run(self.address, block, self.tasks, threads, self.flops)


def strides(x: Tensor, packed: bool) -> tuple[int, ...]:
    """Bytes from one batch, head, row and column to the next; 0 where a dimension is broadcast."""
    size = x.element_size()
    if packed:
        row, head, col = x.stride()
        return 0, head * size, row * size, col * size
    return tuple([0 if length == 1 else step * size for length, step in zip(x.shape, x.stride(), strict=True)])


def recipe_of(problem: Problem, target: Target, vectors: int, dbias: bool = False, bias: str | None = None) -> Recipe:
    """What the workers for a problem are compiled for."""
    dtype = DTYPES[problem.dtype]
    # Pairs cannot be scaled when they are packed; a scale that is not positive would turn the maximum around.
    paired = dtype == "bf16" and target.dpbf16 and problem.scale > 0
    whole = problem.dim % target.lanes == 0 and problem.dim_v % target.lanes == 0
    staged = problem.alignment == 0 or (not whole if paired else dtype != "fp32")
    return Recipe(
        dtype, vectors, paired, staged, tuple(term.name for term in problem.terms), bias, problem.mask is not None, dbias
    )


def vectors_of(target: Target, rows: int) -> int:
    """The width of a query panel: the widest that wastes the fewest lanes."""
    def waste(vectors: int) -> int:
        return -rows % (vectors * target.lanes)

    return min(range(widest(target), 0, -1), key=waste)


@lru_cache(maxsize=256)
def _address(build: Any, target: Target, recipe: Recipe) -> int:
    return jit.load(build(target, recipe), target)


def padded(x: int, multiple: int) -> int:
    """`x` rounded up."""
    return -(-x // multiple) * multiple


def common_values(problem: Problem, target: Target, recipe: Recipe) -> dict[str, Any]:
    """The slots that every worker reads."""
    band = problem.band
    natural = LOG2E if not recipe.terms else 1.0
    return {
        "heads": problem.heads,
        "group": problem.group,
        "len_q": problem.len_q,
        "len_k": problem.len_k,
        "dim": problem.dim,
        "dim_v": problem.dim_v,
        "dim_padded": padded(problem.dim, target.lanes * (2 if recipe.paired else 1)),
        "dim_v_padded": padded(problem.dim_v, target.lanes * (2 if recipe.paired else 1)),
        "lo": -_FAR if band.lo is None else band.lo,
        "hi": _FAR if band.hi is None else band.hi,
        "shift": band.shift,
        "bottom_right": int(problem.align == "bottom-right"),
        "query_factor": problem.scale * natural,
        "factor": problem.scale * natural,
        "scale": problem.scale,
        "softcap": problem.softcap or 0.0,
    }


def regions(sizes: dict[str, int]) -> tuple[dict[str, int], int]:
    """Offsets of scratch regions of these sizes, on cache lines, and their total."""
    offsets, total = {}, 0
    for region, size in sizes.items():
        offsets[f"at_{region}"] = total
        total += padded(size, 64) + 64
    return offsets, padded(total, 4096)


def score_regions(recipe: Recipe, panel_rows: int, keys: int) -> dict[str, int]:
    """Scratch of one score tile: bias and mask tiles lie next to it."""
    tile = keys * panel_rows * 4
    sizes = {"found": 64}
    for name, present in (("bias", recipe.bias), ("mask", recipe.mask)):
        if present:
            sizes |= {f"{name}_rows": tile, f"{name}_tile": tile}
    return sizes


def bias_dtype(bias: Tensor | None) -> str | None:
    """The type of a bias, which may be fp32 next to 16-bit inputs."""
    return None if bias is None else DTYPES[bias.dtype]


def plan_forward(problem: Problem, bias: str | None) -> Plan:
    """The forward of a problem."""
    target = jit.host()
    assert target is not None
    recipe = recipe_of(problem, target, vectors_of(target, problem.len_q), bias=bias)
    panel_rows = tile_of(target, recipe.vectors).vectors * target.lanes
    values = common_values(problem, target, recipe)
    cell = 2 if recipe.paired else 4
    panels = max(1, min(FORWARD_ROWS, padded(problem.len_q, panel_rows)) // panel_rows)
    dim, dim_v, keys = values["dim_padded"], values["dim_v_padded"], FORWARD_KEYS
    sizes = {
        "q_rows": panel_rows * dim * cell,
        "q_tile": panels * panel_rows * dim * cell,
        "acc": panels * panel_rows * dim_v * 4,
        "scores": keys * panel_rows * 4,
        "weights": keys * panel_rows * 2 if recipe.paired else 0,
        "k_rows": keys * dim * cell if recipe.staged else 0,
        "v_rows": keys * dim_v * cell if recipe.staged else 0,
        "v_pairs": keys * dim_v * 2 if recipe.paired else 0,
        "state": panels * 3 * panel_rows * 4,
        "factors": panel_rows * 4,
        "out_rows": panel_rows * dim_v * 4,
        **score_regions(recipe, panel_rows, keys),
    }
    offsets, scratch = regions(sizes)
    block_rows = panels * panel_rows
    blocks = -(-problem.len_q // block_rows)
    lse_head = 4 * problem.len_q
    values |= {
        "blocks": blocks,
        "block_rows": block_rows,
        "block_keys": keys,
        "workspace_step": scratch,
        "lse_head": lse_head,
        "lse_batch": lse_head * problem.heads,
        **offsets,
    }
    block = (ctypes.c_int64 * len(FIELDS))(*fill(values))
    area = problem.band_of(problem.len_q, problem.len_k).area(problem.len_q, problem.len_k)
    flops = 2.0 * problem.batch * problem.heads * area * (problem.dim + problem.dim_v)
    return Plan(problem, _address(forward, target, recipe), block, problem.batch * problem.heads * blocks, scratch, flops)


__all__ = ["STRIDES", "Plan", "plan_forward", "strides"]
