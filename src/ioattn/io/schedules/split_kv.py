"""Split-KV, or Flash-Decoding (Dao, Haziza, Massa, Sizov 2023): pieces of the keys in parallel, then a merge.

With one query per sequence there are too few query tiles to fill a GPU, so the keys are cut too. Each piece writes a
partial output and its log-sum-exp in fp32. The rows of all query heads that share a key/value head are stacked into
one tile: K and V are read once for the group, and the intensity of decoding is the size of the group.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ioattn.io.memory import Memory, Slow
from ioattn.io.schedules.task import Task, length, or_one, or_zero
from ioattn.io.tiles import Grid


def forward(task: Task, memory: Memory) -> dict[str, Slow]:
    """O and its log-sum-exp, through `blocks.splits` partial results."""
    p, grid = task.problem, Grid.of(task.problem, task.blocks, packed_group=True)
    q = memory.place("Q", _stacked(task.given["Q"], p.kv_heads))
    k, v = task.place(memory, "K", "V")
    pieces = list(grid.pieces())
    partial_out = memory.new("partial O", len(pieces), p.batch, p.kv_heads, grid.rows, p.dim_v, extra=True)
    partial_lse = memory.new("partial LSE", len(pieces), p.batch, p.kv_heads, grid.rows, extra=True)
    with memory.step("partial results"):
        for kv_head, _ in task.groups():
            for piece, keys in enumerate(pieces):
                for rows in memory.each(grid.query_tiles()):
                    q_tile = memory.load(q, *kv_head, rows)
                    row_max, row_sum = memory.full(-torch.inf, length(rows)), memory.zeros(length(rows))
                    acc = memory.zeros(length(rows), p.dim_v)
                    for cols in memory.each(_inside(grid.key_tiles_for(rows), keys)):
                        k_tile, v_tile = memory.load(k, *kv_head, cols), memory.load(v, *kv_head, cols)
                        scores = memory.alloc(memory.matmul(q_tile, k_tile.mT))
                        grid.mask(scores.mul_(p.scale), rows, cols)
                        new_max = memory.alloc(torch.maximum(row_max, scores.amax(-1)))
                        weights = scores.sub_(or_zero(new_max)[:, None]).exp_()
                        rescale = memory.alloc(torch.exp(row_max - or_zero(new_max)))
                        row_sum.mul_(rescale).add_(weights.sum(-1))
                        acc.mul_(rescale[:, None]).add_(memory.matmul(weights, v_tile))
                        row_max.copy_(new_max)
                    memory.store(partial_out, acc.div_(or_one(row_sum)[:, None]), piece, *kv_head, rows)
                    memory.store(partial_lse, row_max.add_(row_sum.log_()), piece, *kv_head, rows)
    return _merge(task, memory, grid, partial_out, partial_lse)


def _merge(task: Task, memory: Memory, grid: Grid, partial_out: Slow, partial_lse: Slow) -> dict[str, Slow]:
    """lse = logsumexp(partial lse), O = sum of exp(partial lse - lse) * partial O: an online softmax over pieces."""
    p = task.problem
    out = memory.new("O", p.batch, p.kv_heads, grid.rows, p.dim_v, dtype=p.dtype)
    lse = memory.new("LSE", p.batch, p.kv_heads, grid.rows, extra=True)
    with memory.step("merge"):
        for kv_head, _ in task.groups():
            for rows in memory.each(grid.query_tiles()):
                row_max, row_sum = memory.full(-torch.inf, length(rows)), memory.zeros(length(rows))
                acc = memory.zeros(length(rows), p.dim_v)
                for piece in memory.each(range(len(list(grid.pieces())))):
                    out_tile = memory.load(partial_out, piece, *kv_head, rows)
                    lse_rows = memory.load(partial_lse, piece, *kv_head, rows)
                    new_max = memory.alloc(torch.maximum(row_max, lse_rows))
                    weight = lse_rows.sub_(or_zero(new_max)).exp_()
                    rescale = memory.alloc(torch.exp(row_max - or_zero(new_max)))
                    row_sum.mul_(rescale).add_(weight)
                    acc.mul_(rescale[:, None]).add_(out_tile.mul_(weight[:, None]))
                    row_max.copy_(new_max)
                memory.store(out, acc.div_(or_one(row_sum)[:, None]), *kv_head, rows)
                memory.store(lse, row_max.add_(row_sum.log_()), *kv_head, rows)
    # Whose row is whose is addressing, not traffic.
    for stacked in (out, lse):
        memory.replace(stacked, _unstacked(memory.values(stacked), p.group))
    return {"O": out, "LSE": lse}


def _inside(tiles: Iterator[slice], keys: slice) -> Iterator[slice]:
    return (cols for cols in tiles if keys.start <= cols.start < keys.stop)


def _stacked(x: Tensor, kv_heads: int) -> Tensor:
    """`(B, H, N, ...)` as `(B, Hk, N * G, ...)`: row r is query r // G of the group's head r % G."""
    return x.unflatten(1, (kv_heads, -1)).transpose(2, 3).flatten(2, 3)


def _unstacked(x: Tensor, group: int) -> Tensor:
    return x.unflatten(2, (-1, group)).transpose(2, 3).flatten(1, 2)
