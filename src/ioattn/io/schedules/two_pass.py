"""A backward that adds to nothing in slow memory: dK and dV in one pass over the scores, dQ in another.

Each pass keeps its own sums on the chip: keys outside for dK and dV, queries outside for dQ. The price is that both
recompute S and dP, 7 matrix products instead of 5. No two tiles add to one row, so the result does not depend on their
order: it is what a deterministic backward does. Its forward is `fa2`'s.
"""

from __future__ import annotations

from torch import Tensor

from ioattn.io.memory import Memory, Slow
from ioattn.io.schedules.fa2 import delta_of_rows
from ioattn.io.schedules.task import Head, Task, or_zero

Rows = tuple[Slow, Slow, Slow, Slow]
"""What is read by query rows: Q, dO, LSE, delta."""


def backward(task: Task, memory: Memory) -> dict[str, Slow]:
    """delta once per row, then a pass with keys outside and one with queries outside."""
    q, k, v, dout, lse = task.place(memory, "Q", "K", "V", "dO", "LSE")
    by_rows = (q, dout, lse, delta_of_rows(task, memory, dout))
    dk, dv = _key_pass(task, memory, by_rows, k, v)
    return {"dQ": _query_pass(task, memory, by_rows, k, v), "dK": dk, "dV": dv}


def _key_pass(task: Task, memory: Memory, by_rows: Rows, k: Slow, v: Slow) -> tuple[Slow, Slow]:
    problem, grid = task.problem, task.grid
    dk, dv = task.new_like_k(memory, "dK", problem.dim), task.new_like_k(memory, "dV", problem.dim_v)
    with memory.step("dK, dV"):
        for kv_head, heads in task.groups():
            for cols in memory.each(grid.key_tiles()):
                k_tile, v_tile = memory.load(k, *kv_head, cols), memory.load(v, *kv_head, cols)
                dk_acc, dv_acc = memory.zeros(*k_tile.shape), memory.zeros(*v_tile.shape)
                for head in heads:
                    for rows in memory.each(grid.query_tiles_for(cols)):
                        q_tile, dout_tile, lse_rows, delta_rows = _load(memory, by_rows, head, rows)
                        scores = grid.mask(_scores(task, memory, q_tile, k_tile), rows, cols)
                        weights = scores.sub_(or_zero(lse_rows)[:, None]).exp_()
                        dv_acc.add_(memory.matmul(weights.mT, dout_tile))
                        dscores = memory.alloc(memory.matmul(dout_tile, v_tile.mT))
                        dscores.sub_(delta_rows[:, None]).mul_(weights).mul_(problem.scale)
                        dk_acc.add_(memory.matmul(dscores.mT, q_tile))
                memory.store(dk, dk_acc, *kv_head, cols)
                memory.store(dv, dv_acc, *kv_head, cols)
    return dk, dv


def _query_pass(task: Task, memory: Memory, by_rows: Rows, k: Slow, v: Slow) -> Slow:
    problem, grid = task.problem, task.grid
    dq = task.new_like_q(memory, "dQ", problem.dim)
    with memory.step("dQ"):
        for head, kv_head in task.heads():
            for rows in memory.each(grid.query_tiles()):
                q_tile, dout_tile, lse_rows, delta_rows = _load(memory, by_rows, head, rows)
                dq_acc = memory.zeros(*q_tile.shape)
                for cols in memory.each(grid.key_tiles_for(rows)):
                    k_tile, v_tile = memory.load(k, *kv_head, cols), memory.load(v, *kv_head, cols)
                    scores = grid.mask(_scores(task, memory, q_tile, k_tile), rows, cols)
                    weights = scores.sub_(or_zero(lse_rows)[:, None]).exp_()
                    dscores = memory.alloc(memory.matmul(dout_tile, v_tile.mT))
                    dscores.sub_(delta_rows[:, None]).mul_(weights).mul_(problem.scale)
                    dq_acc.add_(memory.matmul(dscores, k_tile))
                memory.store(dq, dq_acc, *head, rows)
    return dq


def _load(memory: Memory, by_rows: Rows, head: Head, rows: slice) -> list[Tensor]:
    return [memory.load(x, *head, rows) for x in by_rows]


def _scores(task: Task, memory: Memory, q_tile: Tensor, k_tile: Tensor) -> Tensor:
    return memory.alloc(memory.matmul(q_tile, k_tile.mT)).mul_(task.problem.scale)
