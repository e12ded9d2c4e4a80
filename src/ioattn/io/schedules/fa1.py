"""FlashAttention's own order (Dao et al. 2022, Algorithms 1 and 4): outer loop over keys, inner loop over queries.

K and V are read once. Q is read again in every pass over the keys, and O, m and l live in slow memory between passes:
read and written in each. O is kept normalised, so the old sum has to multiply it before the new sum divides it.
A query tile's first pass starts from nothing on the chip instead of reading initial values.
"""

from __future__ import annotations

import torch

from ioattn.io.memory import Memory, Slow
from ioattn.io.schedules.task import Task, length, or_one, or_zero


def forward(task: Task, memory: Memory) -> dict[str, Slow]:
    """O, and the row maxima m and row sums l that the backward needs."""
    problem, grid = task.problem, task.grid
    q, k, v = task.place(memory, "Q", "K", "V")
    out = task.new_like_q(memory, "O", problem.dim_v)
    m, l = task.new_rows(memory, "m"), task.new_rows(memory, "l")  # noqa: E741
    with memory.step("forward"):
        for kv_head, heads in task.groups():
            for cols in memory.each(grid.key_tiles()):
                k_tile, v_tile = memory.load(k, *kv_head, cols), memory.load(v, *kv_head, cols)
                for head in heads:
                    for rows in memory.each(grid.query_tiles_for(cols)):
                        q_tile = memory.load(q, *head, rows)
                        if grid.is_first(rows, cols):
                            acc = memory.zeros(length(rows), problem.dim_v)
                            row_max, row_sum = memory.full(-torch.inf, length(rows)), memory.zeros(length(rows))
                        else:
                            acc = memory.load(out, *head, rows, dtype=memory.compute)
                            row_max, row_sum = memory.load(m, *head, rows), memory.load(l, *head, rows)
                        scores = memory.alloc(memory.matmul(q_tile, k_tile.mT))
                        grid.mask(scores.mul_(problem.scale), rows, cols)
                        new_max = memory.alloc(torch.maximum(row_max, scores.amax(-1)))
                        weights = scores.sub_(or_zero(new_max)[:, None]).exp_()
                        old_sum = row_sum.mul_(torch.exp(row_max - or_zero(new_max)))
                        new_sum = memory.alloc(old_sum + weights.sum(-1))
                        acc.mul_(old_sum[:, None]).add_(memory.matmul(weights, v_tile))
                        memory.store(out, acc.div_(or_one(new_sum)[:, None]), *head, rows)
                        memory.store(m, new_max, *head, rows)
                        memory.store(l, new_sum, *head, rows)
        _write_blind_rows(task, memory, {out: 0.0, m: -torch.inf, l: 0.0})
    return {"O": out, "m": m, "l": l}


def backward(task: Task, memory: Memory) -> dict[str, Slow]:
    """dK and dV are summed on the chip; dQ lives in slow memory between passes; delta is computed in each pass."""
    problem, grid = task.problem, task.grid
    q, k, v, out, dout, m, l = task.place(memory, "Q", "K", "V", "O", "dO", "m", "l")  # noqa: E741
    dq = task.new_like_q(memory, "dQ", problem.dim)
    dk, dv = task.new_like_k(memory, "dK", problem.dim), task.new_like_k(memory, "dV", problem.dim_v)
    with memory.step("backward"):
        for kv_head, heads in task.groups():
            for cols in memory.each(grid.key_tiles()):
                k_tile, v_tile = memory.load(k, *kv_head, cols), memory.load(v, *kv_head, cols)
                dk_acc, dv_acc = memory.zeros(*k_tile.shape), memory.zeros(*v_tile.shape)
                for head in heads:
                    for rows in memory.each(grid.query_tiles_for(cols)):
                        at = (*head, rows)
                        q_tile, out_tile, dout_tile = (memory.load(x, *at) for x in (q, out, dout))
                        row_max, row_sum = memory.load(m, *at), memory.load(l, *at)
                        if grid.is_first(rows, cols):
                            dq_acc = memory.zeros(*q_tile.shape)
                        else:
                            dq_acc = memory.load(dq, *at, dtype=memory.compute)
                        scores = memory.alloc(memory.matmul(q_tile, k_tile.mT))
                        grid.mask(scores.mul_(problem.scale), rows, cols)
                        weights = scores.sub_(or_zero(row_max)[:, None]).exp_().div_(or_one(row_sum)[:, None])
                        dv_acc.add_(memory.matmul(weights.mT, dout_tile))
                        delta = memory.alloc((dout_tile.to(memory.compute) * out_tile).sum(-1))
                        dscores = memory.alloc(memory.matmul(dout_tile, v_tile.mT))
                        dscores.sub_(delta[:, None]).mul_(weights).mul_(problem.scale)
                        memory.store(dq, dq_acc.add_(memory.matmul(dscores, k_tile)), *at)
                        dk_acc.add_(memory.matmul(dscores.mT, q_tile))
                memory.store(dk, dk_acc, *kv_head, cols)
                memory.store(dv, dv_acc, *kv_head, cols)
        _write_blind_rows(task, memory, {dq: 0.0})
    return {"dQ": dq, "dK": dk, "dV": dv}


def _write_blind_rows(task: Task, memory: Memory, targets: dict[Slow, float]) -> None:
    """Rows that no pass has reached, because they see no key, still need their values."""
    for head, _ in task.heads():
        for rows in task.grid.blind_query_tiles():
            for target, value in targets.items():
                memory.store(target, torch.tensor(value), *head, rows)
