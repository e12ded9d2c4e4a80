"""A published form of the online softmax that is wrong as printed, run so that it can be seen to fail.

It divides by the new row sum in every step but does not multiply by the old one:

    O = (exp(m_old - m_new) * O + P V) / l_new

After the first step O is normalised already, so the old term lacks a factor l_old. Either leave O undivided until the
end (`fa2`), or carry the factor: (l_old * exp(m_old - m_new) * O + P V) / l_new (`fa1`). Its traffic is that of `fa2`.
"""

from __future__ import annotations

import torch

from ioattn.io.memory import Memory, Slow
from ioattn.io.schedules.task import Task, length, or_one, or_zero


def forward(task: Task, memory: Memory) -> dict[str, Slow]:
    """What the printed update computes; right only where a query sees a single key tile."""
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
                    acc.div_(or_one(row_sum)[:, None])
                    row_max.copy_(new_max)
                memory.store(out, acc, *head, rows)
                memory.store(lse, row_max.add_(row_sum.log_()), *head, rows)
    return {"O": out, "LSE": lse}
