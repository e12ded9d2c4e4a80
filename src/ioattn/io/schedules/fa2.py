"""FlashAttention-2's order (Dao 2023, Algorithms 1 and 2): the forward's outer loop is over queries.

Q is read once, and O, m and l never leave the chip until a query tile is done: that is what the swap saves. K and V are
read again for every query tile. The backward swaps back: with keys outside, dK and dV, two tensors, are summed on the
chip, and only dQ has to be added to in slow memory; with queries outside it would be the other way round.
"""

from __future__ import annotations

import torch

from ioattn.io.memory import Memory, Slow
from ioattn.io.schedules.task import Task, length, or_one, or_zero


def forward(task: Task, memory: Memory) -> dict[str, Slow]:
    """O, and the log-sum-exp of each row, the one statistic that the backward needs."""
    problem, grid = task.problem, task.grid
    q, k, v = task.place(memory, "Q", "K", "V")
    out, lse = task.new_like_q(memory, "O", problem.dim_v), task.new_rows(memory, "LSE")
    with memory.step("forward"):
        for head, kv_head in task.heads():
            for rows in memory.each(grid.query_tiles()):
                q_tile = memory.load(q, *head, rows)
                row_max, row_sum = memory.full(-torch.inf, length(rows)), memory.zeros(length(rows))
                acc = memory.zeros(length(rows), problem.dim_v)
                for cols in memory.each(grid.key_tiles_for(rows)):
                    k_tile, v_tile = memory.load(k, *kv_head, cols), memory.load(v, *kv_head, cols)
                    scores = memory.alloc(memory.matmul(q_tile, k_tile.mT))
                    grid.mask(scores.mul_(problem.scale), rows, cols)
                    new_max = memory.alloc(torch.maximum(row_max, scores.amax(-1)))
                    weights = scores.sub_(or_zero(new_max)[:, None]).exp_()
                    rescale = memory.alloc(torch.exp(row_max - or_zero(new_max)))
                    row_sum.mul_(rescale).add_(weights.sum(-1))
                    acc.mul_(rescale[:, None]).add_(memory.matmul(weights, v_tile))
                    row_max.copy_(new_max)
                memory.store(out, acc.div_(or_one(row_sum)[:, None]), *head, rows)
                memory.store(lse, row_max.add_(row_sum.log_()), *head, rows)
    return {"O": out, "LSE": lse}


def backward(task: Task, memory: Memory) -> dict[str, Slow]:
    """delta once per row, then key tiles outside; dQ is added to in fp32 and rounded at the end."""
    problem, grid = task.problem, task.grid
    q, k, v, dout, lse = task.place(memory, "Q", "K", "V", "dO", "LSE")
    delta = delta_of_rows(task, memory, dout)
    dq_acc = _zeroed_accumulator(task, memory)
    dk, dv = task.new_like_k(memory, "dK", problem.dim), task.new_like_k(memory, "dV", problem.dim_v)
    with memory.step("backward"):
        for kv_head, heads in task.groups():
            for cols in memory.each(grid.key_tiles()):
                k_tile, v_tile = memory.load(k, *kv_head, cols), memory.load(v, *kv_head, cols)
                dk_acc, dv_acc = memory.zeros(*k_tile.shape), memory.zeros(*v_tile.shape)
                for head in heads:
                    for rows in memory.each(grid.query_tiles_for(cols)):
                        at = (*head, rows)
                        q_tile, dout_tile = memory.load(q, *at), memory.load(dout, *at)
                        lse_rows, delta_rows = memory.load(lse, *at), memory.load(delta, *at)
                        scores = memory.alloc(memory.matmul(q_tile, k_tile.mT))
                        grid.mask(scores.mul_(problem.scale), rows, cols)
                        weights = scores.sub_(or_zero(lse_rows)[:, None]).exp_()
                        dv_acc.add_(memory.matmul(weights.mT, dout_tile))
                        dscores = memory.alloc(memory.matmul(dout_tile, v_tile.mT))
                        dscores.sub_(delta_rows[:, None]).mul_(weights).mul_(problem.scale)
                        dk_acc.add_(memory.matmul(dscores.mT, q_tile))
                        # An atomic addition: other key tiles add to the same rows, so each reads and writes.
                        dq_tile = memory.load(dq_acc, *at)
                        memory.store(dq_acc, dq_tile.add_(memory.matmul(dscores, k_tile)), *at)
                memory.store(dk, dk_acc, *kv_head, cols)
                memory.store(dv, dv_acc, *kv_head, cols)
    return {"dQ": _rounded(task, memory, dq_acc), "dK": dk, "dV": dv}


def delta_of_rows(task: Task, memory: Memory, dout: Slow) -> Slow:
    """delta = rowsum(dO * O), a pass of its own before the main loop."""
    (out,) = task.place(memory, "O")
    delta = task.new_rows(memory, "delta")
    with memory.step("delta = rowsum(dO * O)"):
        for head, _ in task.heads():
            for rows in memory.each(task.grid.query_tiles()):
                dout_tile, out_tile = memory.load(dout, *head, rows), memory.load(out, *head, rows)
                memory.store(delta, (dout_tile.to(memory.compute) * out_tile).sum(-1), *head, rows)
    return delta


def _zeroed_accumulator(task: Task, memory: Memory) -> Slow:
    p = task.problem
    dq_acc = memory.new("dQ sum", p.batch, p.heads, p.len_q, p.dim, extra=True)
    with memory.step("dQ sum = 0"):
        for head, _ in task.heads():
            for rows in task.grid.query_tiles():
                memory.store(dq_acc, torch.tensor(0.0), *head, rows)
    return dq_acc


def _rounded(task: Task, memory: Memory, dq_acc: Slow) -> Slow:
    dq = task.new_like_q(memory, "dQ", task.problem.dim)
    with memory.step("dQ = round(dQ sum)"):
        for head, _ in task.heads():
            for rows in memory.each(task.grid.query_tiles()):
                memory.store(dq, memory.load(dq_acc, *head, rows), *head, rows)
    return dq
