"""What the host decides once per problem: the recipe, block sizes, scratch, and the address of the compiled worker.

Nothing here depends on the number of threads, so that results do not either.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ioattn.backends.cpu import jit, launch
from ioattn.backends.cpu.arguments import FIELDS, SLOTS, STRIDES, TENSORS, fill
from ioattn.backends.cpu.backward import backward
from ioattn.backends.cpu.decode import decode
from ioattn.backends.cpu.forward import forward
from ioattn.backends.cpu.jit import Target
from ioattn.backends.cpu.rows import STATE_WORDS
from ioattn.backends.cpu.softmax import Recipe
from ioattn.backends.cpu.tiles import LOG2E, widest
from ioattn.problem import DTYPES, Problem

_FAR = 2**40
"""Stands for no bound of the band until a sequence's shift is added."""

FORWARD_KEYS = 96
BACKWARD_KEYS = 96
"""Keys per block: a tile of scores, in the backward two, stays in the first-level cache."""

DECODE_KEYS = 512
"""Keys per block over which few queries decode: long runs of keys and of values, which processors fetch ahead."""

BLOCK_ROWS = 192
"""Queries per block: keys that were staged or paired once serve this many."""

_CACHE = 44 * 1024
"""Bytes of the first-level cache that a panel may fill."""

CHUNK_KEYS = 1024
SHARED_CHUNK_KEYS = 192
"""Keys are split into chunks, for tasks that would be too few otherwise, of at least this many; the smaller number
holds where heads or batches share the gradient of a bias, and nothing else could run side by side."""


def _prefers_decode(problem: Problem, recipe: Recipe) -> bool:
    """Whether lanes should run along the head dimension instead of along queries.

    On a 2-core AVX-512 machine, 8 key/value heads of 4096 keys, D 64: that takes 130 us and 27 us more per query that
    shares them; lanes along queries take 350 us per query head in fp32 and 212 us in pairs, for up to 16 queries.
    """
    rows = problem.group * problem.len_q
    return 0 < rows <= (7 if recipe.paired else 13) * problem.group - 5


@dataclass
class Plan:
    """A worker and the argument block that it starts from, ready but for addresses and strides."""

    problem: Problem
    address: int
    block: launch.Block
    tasks: int
    scratch: int
    flops: float
    chunks: int = 1
    partial: int = 0
    counters: int = 0

    def prepare(self, example: dict[str, Tensor], dlse: Tensor | None = None) -> Callable[..., None]:
        """What runs the worker, in scratch of each call's own, on tensors of these names that lie like these."""
        if self.tasks == 0:
            return lambda tensors, dlse=None: None
        ready = type(self.block).from_buffer_copy(self.block)
        for name, x in example.items():
            first = _STRIDE_SLOTS.get(name)
            if first is not None:
                ready[first : first + 4] = strides(x, self.problem.packed)
        if dlse is not None:
            steps = [4 * step for step in dlse.stride()]
            ready[SLOTS["dlse_row"]], ready[SLOTS["dlse_head"]] = steps[-1], steps[-2]
            ready[SLOTS["dlse_batch"]] = 0 if self.problem.packed else steps[0]
        slots = [SLOTS[name] for name in example]
        dlse_slot, workspace_slot, partial_slot = SLOTS["dlse"], SLOTS["workspace"], SLOTS["partial"]

        def run(tensors: Iterable[Tensor], dlse: Tensor | None = None) -> None:
            block = type(ready).from_buffer_copy(ready)
            for slot, x in zip(slots, tensors, strict=True):
                block[slot] = x.data_ptr()
            if dlse is not None:
                block[dlse_slot] = dlse.data_ptr()
            threads = min(torch.get_num_threads(), self.tasks)
            workspace = torch.empty(self.partial + threads * self.scratch, dtype=torch.uint8, device="cpu")
            place = workspace.data_ptr()
            if self.counters:
                workspace[: self.counters] = 0
                block[partial_slot] = place
            block[workspace_slot] = place + self.partial
            launch.run(self.address, block, self.tasks, threads, self.flops)

        return run


_STRIDE_SLOTS = {tensor: SLOTS[f"{tensor}_{STRIDES[0]}"] for tensor in TENSORS}


def strides(x: Tensor, packed: bool) -> list[ctypes.c_int64 | int]:
    """Bytes from one batch, head, row and column to the next; 0 where a dimension is broadcast."""
    size = x.element_size()
    if packed:
        row, head, col = x.stride()
        return [0, head * size, row * size, col * size]
    return [0 if length == 1 else step * size for length, step in zip(x.shape, x.stride(), strict=True)]


def _recipe(problem: Problem, target: Target, bias: torch.dtype | None, dbias: bool) -> Recipe:
    dtype = DTYPES[problem.dtype]
    # Pairs cannot be scaled when they are packed; a scale that is not positive would turn the maximum around.
    # Heads narrower than a vector would mostly multiply padding.
    wide = min(problem.dim, problem.dim_v) >= target.lanes
    paired = dtype == "bf16" and target.dpbf16 and problem.scale > 0 and wide
    whole = problem.dim % target.lanes == 0 and problem.dim_v % target.lanes == 0
    return Recipe(
        dtype=dtype,
        vectors=_vectors(target, problem.len_q, problem.dim),
        paired=paired,
        staged=problem.alignment == 0 or (not whole if paired else dtype != "fp32"),
        natural=not paired or bool(problem.terms) or problem.sinks,
        terms=tuple(term.name for term in problem.terms),
        bias=None if bias is None else DTYPES[bias],
        mask=problem.mask is not None,
        dbias=dbias,
    )


def _vectors(target: Target, rows: int, dim: int) -> int:
    """The width of a query panel: the widest that fits the first-level cache and wastes few lanes.

    A panel's packed queries and a tile of scores stay in the cache together: 89% of the FMA peak at D 128 with 3
    vectors, 86% with 4 that do not fit (2-core AVX-512 machine, 48 KiB).
    """
    fitting = [v for v in range(1, widest(target) + 1) if (dim + FORWARD_KEYS) * v * target.lanes * 4 <= _CACHE] or [1]
    waste = {vectors: -rows % (vectors * target.lanes) for vectors in fitting}
    few = max(min(waste.values()), rows // 50)
    return max(vectors for vectors in fitting if waste[vectors] <= few)


@lru_cache(maxsize=256)
def _address(build: Callable[[Target, Recipe], str], target: Target, recipe: Recipe) -> int:
    return jit.load(build(target, recipe), target)


def _padded(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def _common_values(problem: Problem, target: Target, recipe: Recipe) -> dict[str, Any]:
    """The slots that every worker reads."""
    band, lanes = problem.band, target.lanes
    factor = problem.scale * (1.0 if recipe.natural else LOG2E)
    cells = 2 if recipe.paired else 1
    return {
        "batches": problem.batch,
        "heads": problem.heads,
        "group": problem.group,
        "len_q": problem.len_q,
        "len_k": problem.len_k,
        "dim": problem.dim,
        "dim_v": problem.dim_v,
        "dim_padded": _padded(problem.dim, lanes),
        "dim_v_padded": _padded(problem.dim_v, lanes),
        # 32-bit words of a packed query: fp32, or pairs of bfloat16.
        "dim_words": _padded(-(-problem.dim // cells), lanes),
        "dim_v_words": _padded(-(-problem.dim_v // cells), lanes),
        "lo": -_FAR if band.lo is None else band.lo,
        "hi": _FAR if band.hi is None else band.hi,
        "shift": band.shift,
        "bottom_right": int(problem.align == "bottom-right"),
        "query_factor": factor,
        "factor": factor,
        "scale": problem.scale,
        "softcap": problem.softcap or 0.0,
        "one": 1.0,
    }


def _regions(sizes: dict[str, int]) -> tuple[dict[str, int], int]:
    """Offsets of scratch regions of these sizes, on cache lines, and their total."""
    offsets, total = {}, 0
    for region, size in sizes.items():
        offsets[f"at_{region}"] = total
        total += _padded(size, 64)
    return offsets, _padded(total, 4096)


def _score_regions(recipe: Recipe, tile: int) -> dict[str, int]:
    """Scratch next to a score tile: its bias and its mask, before and after transposing."""
    present = {"bias": recipe.bias is not None, "mask": recipe.mask}
    names = [name for name, needed in present.items() if needed]
    return {"found": 64} | {f"{name}_{form}": tile for name in names for form in ("rows", "tile")}


def plan_forward(problem: Problem, lse: tuple[int, ...], bias: torch.dtype | None) -> Plan:
    """The forward of a problem."""
    target = _host()
    recipe = _recipe(problem, target, bias, dbias=False)
    if _prefers_decode(problem, recipe):
        return plan_decode(problem, lse, bias)
    values = _common_values(problem, target, recipe)
    panel_rows = recipe.vectors * target.lanes
    panels = _block_panels(problem, panel_rows, problem.batch * problem.heads)
    cell, keys = 2 if recipe.paired else 4, FORWARD_KEYS
    dim, dim_v, words = values["dim_padded"], values["dim_v_padded"], values["dim_words"]
    offsets, scratch = _regions(
        {
            "q_rows": panel_rows * words * 4,
            "q_tile": panels * panel_rows * words * 4,
            "acc": panels * panel_rows * dim_v * 4,
            "scores": keys * panel_rows * 4,
            "weights": keys * panel_rows * 2 if recipe.paired else 0,
            "k_rows": keys * dim * cell if recipe.staged else 0,
            "v_rows": keys * dim_v * cell if recipe.staged else 0,
            "v_pairs": keys * dim_v * 2 if recipe.paired else 0,
            "state": panels * 3 * panel_rows * 4,
            "out_rows": panel_rows * dim_v * 4,
            **_score_regions(recipe, keys * panel_rows * 4),
        }
    )
    block_rows = panels * panel_rows
    blocks = -(-problem.len_q // block_rows)
    values |= {"blocks": blocks, "block_rows": block_rows, "block_keys": keys, "workspace_step": scratch}
    values |= _lse_strides(lse) | offsets
    tasks = problem.batch * problem.heads * blocks
    return Plan(problem, _address(forward, target, recipe), _block(values), tasks, scratch, _flops(problem))


def plan_decode(problem: Problem, lse: tuple[int, ...], bias: torch.dtype | None = None) -> Plan:
    """The forward of a problem with few queries, or with a cache."""
    target, cache = _host(), problem.cache
    recipe = _decode_recipe(problem, target, bias)
    values = _common_values(problem, target, recipe)
    dim, dim_v, keys = values["dim_padded"], values["dim_v_padded"], DECODE_KEYS
    rows = problem.group * problem.len_q
    offsets, scratch = _regions(
        {
            "q_rows": rows * dim * 4,
            "scores": rows * keys * 4,
            "k_rows": keys * dim * 4 if recipe.staged else 0,
            "v_rows": keys * dim_v * 4 if recipe.staged else 0,
            "acc": rows * dim_v * 4,
            "row_sum": 64,
            "starts": 64,
            "out_rows": dim_v * 4,
            # Masks are staged in whole vectors from any key on.
            **_score_regions(recipe, (keys + target.lanes) * 4),
        }
    )
    pairs = problem.batch * problem.kv_heads
    chunks = cache.splits if cache is not None and cache.splits else _chunks(problem, pairs, keys)[0]
    chunk_bytes = rows * (dim_v + STATE_WORDS) * 4
    values |= {
        "block_keys": keys,
        "chunks": chunks,
        "partial_batch": pairs * 64,
        "partial_head": chunks * chunk_bytes,
        "partial_chunk": chunk_bytes,
        "workspace_step": scratch,
        **_lse_strides(lse),
        **offsets,
    }
    if cache is not None:
        values |= {"appended": cache.appended, "page": cache.page or 0}
        values["table_row"] = 0 if cache.page is None else 4 * (problem.len_k // cache.page)
    partial = _padded(pairs * (64 + chunks * chunk_bytes), 64)
    address = _address(decode, target, recipe)
    return Plan(problem, address, _block(values), pairs * chunks, scratch, _flops(problem), 1, partial, pairs * 64)


def _decode_recipe(problem: Problem, target: Target, bias: torch.dtype | None) -> Recipe:
    whole = problem.dim % target.lanes == 0 and problem.dim_v % target.lanes == 0
    recipe = _recipe(problem, target, bias, dbias=False)
    recipe = recipe._replace(vectors=1, paired=False, natural=True, staged=not whole or problem.alignment == 0)
    if problem.cache is None:
        return recipe
    tree = problem.cache.tree is not None
    return recipe._replace(paged=problem.cache.page is not None, tree=tree, mask=tree)


def _wanted_tasks() -> int:
    """Enough for every core to stay busy to the end; not of threads, whose number must not change the bits."""
    return max(8, 2 * (os.cpu_count() or 1))


def _block_panels(problem: Problem, panel_rows: int, heads: int) -> int:
    """Query panels per block: fewer where blocks would be too few tasks."""
    share = -(-heads * problem.len_q // _wanted_tasks())
    return max(1, min(BLOCK_ROWS, _padded(share, panel_rows), _padded(problem.len_q, panel_rows)) // panel_rows)


def _chunks(problem: Problem, groups: int, multiple: int, least: int = CHUNK_KEYS) -> tuple[int, int]:
    """How many chunks the keys are split into so that there are enough tasks, and how many keys one holds."""
    wanted = min(-(-_wanted_tasks() // max(1, groups)), problem.len_k // least)
    keys = max(_padded(-(-problem.len_k // max(1, wanted)), multiple), multiple)
    return max(1, -(-problem.len_k // keys)), keys


def plan_backward(problem: Problem, lse: tuple[int, ...], bias: torch.dtype | None, dbias: bool) -> Plan:
    """The backward of a problem; `dbias` says whether the bias wants a gradient."""
    target = _host()
    recipe = _recipe(problem, target, bias, dbias)
    values = _common_values(problem, target, recipe)
    panel_rows = recipe.vectors * target.lanes
    panels = max(1, min(BLOCK_ROWS, _padded(problem.len_q, panel_rows)) // panel_rows)
    # Everything that adds to one element of dbias happens in one task, in order.
    shared = problem.bias if dbias and problem.bias is not None else (0, 0, 0)
    batch_members = problem.batch if shared[0] == 1 else 1
    head_members = problem.heads if shared[1] == 1 else problem.group
    groups = (problem.batch // max(1, batch_members)) * (problem.heads // head_members)
    least = SHARED_CHUNK_KEYS if 1 in shared[:2] else CHUNK_KEYS
    chunks, chunk_keys = _chunks(problem, groups, BACKWARD_KEYS, least)
    offsets, scratch = _regions(_backward_sizes(recipe, values, panels, panel_rows, min(chunk_keys, problem.len_k + 1)))
    rows = lse[-1]
    values |= {
        "block_rows": panels * panel_rows,
        "block_keys": BACKWARD_KEYS,
        "chunks": chunks,
        "chunk_keys": chunk_keys,
        "batch_members": batch_members,
        "head_members": head_members,
        "partial_head": rows * problem.dim * 4,
        "partial_batch": problem.heads * rows * problem.dim * 4,
        "partial_chunk": (1 if problem.packed else problem.batch) * problem.heads * rows * problem.dim * 4,
        # Queries that were scaled when they were packed give dk scaled.
        "key_gradient_factor": problem.scale if recipe.paired else 1.0,
        "workspace_step": scratch,
        **_lse_strides(lse),
        **offsets,
    }
    tasks = groups * chunks
    address = _address(backward, target, recipe)
    return Plan(problem, address, _block(values), tasks, scratch, 2.5 * _flops(problem), chunks)


def _backward_sizes(
    recipe: Recipe, values: dict[str, Any], panels: int, panel_rows: int, chunk_keys: int
) -> dict[str, int]:
    """Scratch of a backward task."""
    dim, dim_v = values["dim_padded"], values["dim_v_padded"]
    words, words_v = values["dim_words"], values["dim_v_words"]
    paired, rows, tile = recipe.paired, panels * panel_rows, BACKWARD_KEYS * panel_rows * 4
    cell, row_panels = 2 if paired else 4, panel_rows if paired else rows
    chunk = _padded(chunk_keys, 2)
    return {
        "q_rows": row_panels * words * 4,
        "q_tile": rows * words * 4,
        "q_pairs": rows * dim * 2 if paired else 0,
        "dout_rows": row_panels * words_v * 4,
        "dout_tile": rows * words_v * 4,
        "dout_pairs": rows * dim_v * 2 if paired else 0,
        "dout_fp32": panel_rows * dim_v * 4 if paired else 0,
        "out_fp32": panel_rows * max(dim, dim_v) * 4,
        "scores": tile,
        "dscores": tile,
        "weights": tile // 2 if paired else 0,
        "dscore_rows": tile // 2 if paired else 0,
        "dscore_pairs": tile // 2 if paired else 0,
        "k_rows": chunk * dim * cell if recipe.staged else 0,
        "v_rows": chunk * dim_v * cell if recipe.staged else 0,
        "k_pairs": chunk * dim * 2 if paired else 0,
        "state": panels * 4 * panel_rows * 4,
        "dq_acc": rows * dim * 4,
        "dk_acc": chunk * dim * 4,
        "dv_acc": chunk * dim_v * 4,
        "dbias_tile": tile if recipe.dbias else 0,
        **_score_regions(recipe, tile),
    }


def _host() -> Target:
    target = jit.host()
    if target is None:
        raise RuntimeError(f"the cpu backend cannot run here: {jit.unusable()}")
    return target


def _block(values: dict[str, Any]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(FIELDS))(*fill(values))


def _lse_strides(lse: tuple[int, ...]) -> dict[str, int]:
    head = 4 * lse[-1]
    return {"lse_head": head, "lse_batch": head * lse[-2]}


def _flops(problem: Problem) -> float:
    area = problem.band_of(problem.len_q, problem.len_k).area(problem.len_q, problem.len_k)
    return 2.0 * problem.batch * problem.heads * area * (problem.dim + problem.dim_v)
