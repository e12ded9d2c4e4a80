"""Attention step by step, every intermediate matrix in slow memory: what FlashAttention is measured against.

A matrix product keeps its thin operand (K, V or dO: N x d) on the chip and streams the other, so that every operand
moves once. That is what a matrix product behind an L2 cache comes close to, and how such counts are usually made; it
needs N x d elements on the chip. Score matrices are stored in the inputs' dtype. A mask hides scores, it skips
nothing.
"""

from __future__ import annotations

import torch

from ioattn.io.memory import Memory, Slow
from ioattn.io.schedules.task import Task, length, or_one, or_zero

Slows = dict[str, Slow]

ALL = slice(None)


def forward_three_pass(task: Task, memory: Memory) -> Slows:
    """S = scale * Q K^T, P = softmax(S) reading S three times, O = P V."""
    S, P = _scores(task, memory), task.new_scores(memory, "P")
    with memory.step("P = softmax(S)"):
        for head, _ in task.heads():
            for rows in task.grid.query_tiles():
                _softmax_rows_three_pass(task, memory, S, P, (*head, rows))
    return {"O": _output(task, memory, P), "P": P}


def forward_fused(task: Task, memory: Memory) -> Slows:
    """The same with a softmax that keeps whole rows of S on the chip, so that it reads S once."""
    S, P = _scores(task, memory), task.new_scores(memory, "P")
    with memory.step("P = softmax(S)"):
        for head, _ in task.heads():
            for rows in memory.each(task.grid.query_tiles()):
                scores = memory.load(S, *head, rows, dtype=memory.compute)
                if task.problem.len_k:
                    row_max = memory.alloc(scores.amax(-1))
                    weights = scores.sub_(or_zero(row_max)[:, None]).exp_()
                    row_sum = memory.alloc(weights.sum(-1))
                    memory.store(P, weights / or_one(row_sum)[:, None], *head, rows)
    return {"O": _output(task, memory, P), "P": P}


def _scores(task: Task, memory: Memory) -> Slow:
    q, k = task.place(memory, "Q", "K")
    S = task.new_scores(memory, "S")
    with memory.step("S = Q K^T"):
        for kv_head, heads in memory.each(task.groups()):
            k_all = memory.load(k, *kv_head, ALL)  # [Nk, D]
            for head in heads:
                for rows in memory.each(task.grid.query_tiles()):
                    q_tile = memory.load(q, *head, rows)
                    for cols in memory.each(task.grid.key_tiles()):
                        scores = memory.alloc(memory.matmul(q_tile, k_all[cols].mT))
                        task.grid.mask(scores.mul_(task.problem.scale), rows, cols)
                        memory.store(S, scores, *head, rows, cols)
    return S


def _softmax_rows_three_pass(task: Task, memory: Memory, S: Slow, P: Slow, at: tuple[int, int, slice]) -> None:
    with memory.region():
        row_max = memory.full(-torch.inf, length(at[-1]))
        row_sum = memory.zeros(length(at[-1]))
        for cols in memory.each(task.grid.key_tiles()):
            scores = memory.load(S, *at, cols, dtype=memory.compute)
            row_max.copy_(torch.maximum(row_max, scores.amax(-1)))
        for cols in memory.each(task.grid.key_tiles()):
            scores = memory.load(S, *at, cols, dtype=memory.compute)
            row_sum.add_(scores.sub_(or_zero(row_max)[:, None]).exp_().sum(-1))
        for cols in memory.each(task.grid.key_tiles()):
            scores = memory.load(S, *at, cols, dtype=memory.compute)
            weights = scores.sub_(or_zero(row_max)[:, None]).exp_()
            memory.store(P, weights.div_(or_one(row_sum)[:, None]), *at, cols)


def _output(task: Task, memory: Memory, P: Slow) -> Slow:
    (v,) = task.place(memory, "V")
    out = task.new_like_q(memory, "O", task.problem.dim_v)
    with memory.step("O = P V"):
        _row_product(task, memory, P, v, out, 1.0)
    return out


def backward_three_pass(task: Task, memory: Memory) -> Slows:
    """Four products and the softmax between them, which reads P and dP twice: for the row sums, then for dS."""
    return _backward(task, memory, _softmax_backward_two_pass)


def backward_fused(task: Task, memory: Memory) -> Slows:
    """The same with a softmax that keeps whole rows of P and dP on the chip."""
    return _backward(task, memory, _softmax_backward_fused)


def _backward(task: Task, memory: Memory, softmax_backward) -> Slows:  # type: ignore[no-untyped-def]
    q, k, v, dout, P = task.place(memory, "Q", "K", "V", "dO", "P")
    dP, dS = task.new_scores(memory, "dP"), task.new_scores(memory, "dS")
    grads = {
        "dQ": task.new_like_q(memory, "dQ", task.problem.dim),
        "dK": task.new_like_k(memory, "dK", task.problem.dim),
        "dV": task.new_like_k(memory, "dV", task.problem.dim_v),
    }
    with memory.step("dV = P^T dO"):
        _column_product(task, memory, P, dout, grads["dV"], 1.0)
    with memory.step("dP = dO V^T"):
        for kv_head, heads in memory.each(task.groups()):
            v_all = memory.load(v, *kv_head, ALL)  # [Nk, Dv]
            for head in heads:
                for rows in memory.each(task.grid.query_tiles()):
                    dout_tile = memory.load(dout, *head, rows)
                    for cols in memory.each(task.grid.key_tiles()):
                        dweights = memory.alloc(memory.matmul(dout_tile, v_all[cols].mT))
                        memory.store(dP, dweights, *head, rows, cols)
    with memory.step("dS = P * (dP - rowsum(P * dP))"):
        for head, _ in task.heads():
            for rows in task.grid.query_tiles():
                softmax_backward(task, memory, P, dP, dS, (*head, rows))
    with memory.step("dQ = dS K"):
        _row_product(task, memory, dS, k, grads["dQ"], task.problem.scale)
    with memory.step("dK = dS^T Q"):
        _column_product(task, memory, dS, q, grads["dK"], task.problem.scale)
    return grads


def _softmax_backward_two_pass(
    task: Task, memory: Memory, P: Slow, dP: Slow, dS: Slow, at: tuple[int, int, slice]
) -> None:
    with memory.region():
        delta = memory.zeros(length(at[-1]))
        for cols in memory.each(task.grid.key_tiles()):
            weights, dweights = (memory.load(x, *at, cols, dtype=memory.compute) for x in (P, dP))
            delta.add_(weights.mul_(dweights).sum(-1))
        for cols in memory.each(task.grid.key_tiles()):
            weights, dweights = (memory.load(x, *at, cols, dtype=memory.compute) for x in (P, dP))
            memory.store(dS, dweights.sub_(delta[:, None]).mul_(weights), *at, cols)


def _softmax_backward_fused(
    task: Task, memory: Memory, P: Slow, dP: Slow, dS: Slow, at: tuple[int, int, slice]
) -> None:
    with memory.region():
        weights, dweights = (memory.load(x, *at, dtype=memory.compute) for x in (P, dP))
        delta = memory.alloc((weights * dweights).sum(-1))
        memory.store(dS, dweights.sub_(delta[:, None]).mul_(weights), *at)


def _row_product(task: Task, memory: Memory, matrix: Slow, operand: Slow, out: Slow, factor: float) -> None:
    """out = factor * matrix @ operand: the operand of a key/value head stays on the chip, rows of `out` are summed."""
    for kv_head, heads in memory.each(task.groups()):
        operand_all = memory.load(operand, *kv_head, ALL)  # [Nk, columns]
        for head in heads:
            for rows in memory.each(task.grid.query_tiles()):
                acc = memory.zeros(length(rows), operand_all.shape[1])
                for cols in memory.each(task.grid.key_tiles()):
                    tile = memory.load(matrix, *head, rows, cols)
                    acc.add_(memory.matmul(tile, operand_all[cols]))
                memory.store(out, acc.mul_(factor), *head, rows)


def _column_product(task: Task, memory: Memory, matrix: Slow, operand: Slow, out: Slow, factor: float) -> None:
    """out = factor * matrix^T @ operand, summed over the heads of a group, whose operands all stay on the chip."""
    for kv_head, heads in memory.each(task.groups()):
        operands = [memory.load(operand, *head, ALL) for head in heads]  # G of [Nq, columns]
        for cols in memory.each(task.grid.key_tiles()):
            acc = memory.zeros(length(cols), operands[0].shape[1])
            for head, operand_all in zip(heads, operands, strict=True):
                for rows in memory.each(task.grid.query_tiles()):
                    tile = memory.load(matrix, *head, rows, cols)
                    acc.add_(memory.matmul(tile.mT, operand_all[rows]))
            memory.store(out, acc.mul_(factor), *kv_head, cols)
