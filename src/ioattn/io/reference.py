"""Untiled attention, exact and in a problem's own dtype: what a schedule's result is checked against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ioattn.io.schedules.task import or_zero
from ioattn.io.threads import one_thread
from ioattn.io.tiles import Blocks, Grid
from ioattn.problem import Problem

Values = Mapping[str, Tensor]

FEW_SCORES = 2**14
"""Up to so many scores per head a single rounded computation may be exact by luck, so that several are made."""


@dataclass(frozen=True)
class Check:
    """The error of one result: `error <= bound` is what is asked of it."""

    name: str
    error: float
    bound: float

    @property
    def holds(self) -> bool:
        """False for an error that is NaN, too."""
        return self.error <= self.bound


def check(problem: Problem, given: Values, results: Values) -> list[Check]:
    """The largest error of each of O, dQ, dK and dV against float64, and its bound.

    The bound is 2 * (the error of untiled attention in the problem's dtype + eps * the largest true value).

    Raises:
        ValueError: if the problem is in float64, for which nothing here is more exact.
    """
    check_checkable(problem)
    with one_thread() if problem.len_q * problem.len_k <= FEW_SCORES else nullcontext():
        return list(_checks(problem, given, results))


def _checks(problem: Problem, given: Values, results: Values) -> Iterator[Check]:
    truth = exact(problem, given)
    ways = list(_rounded_ways(problem, given))
    for name in (n for n in truth if n in results):
        own = max(_distance(way[name], truth[name]) for way in ways)
        finite = truth[name][truth[name].isfinite()]
        largest = float(finite.abs().max()) if finite.numel() else 0.0
        bound = 2 * (own + torch.finfo(problem.dtype).eps * largest)
        yield Check(name, _distance(results[name], truth[name]), bound)


def check_checkable(problem: Problem) -> None:
    """Raise ValueError if `check` would, before anything is run."""
    if problem.dtype == torch.float64:
        raise ValueError("dtype is fp64; it must be fp16, bf16 or fp32: the check's truth is float64 itself")


def exact(problem: Problem, given: Values) -> dict[str, Tensor]:
    """O, and where dO is given dQ, dK and dV, in float64."""
    return _every_step_in(problem, given, torch.float64, torch.arange(problem.len_k))


def _rounded_ways(problem: Problem, given: Values) -> Iterator[dict[str, Tensor]]:
    """Untiled attention with what the naive steps round, and with what FlashAttention rounds; in several key orders."""
    few = problem.len_q * problem.len_k <= FEW_SCORES
    for seed in range(8 if few else 1):
        shuffled = torch.randperm(problem.len_k, generator=torch.Generator().manual_seed(seed))
        order = shuffled if few else torch.arange(problem.len_k)
        yield _every_step_in(problem, given, problem.dtype, order)
        yield _sums_unrounded(problem, given, order)


def _every_step_in(problem: Problem, given: Values, dtype: torch.dtype, order: Tensor) -> dict[str, Tensor]:
    """O = softmax(scale * Q K^T) V with each step in `dtype`, and where dO is given dQ, dK, dV by autograd."""
    wanted = "dO" in given
    q, k, v = (given[name].to(dtype).detach().requires_grad_(wanted) for name in ("Q", "K", "V"))
    hidden = _hidden(problem)[:, order]
    out = torch.empty(*q.shape[:3], problem.dim_v, dtype=dtype)
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for head in range(problem.heads):  # one at a time: the score matrix of a head is large enough
        k_head, v_head = (x[:, head // problem.group, order] for x in (k, v))
        scores = problem.scale * (q[:, head] @ k_head.mT)
        # The second fill makes 0 of a row that sees no key, and of its gradient.
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1).masked_fill(hidden, 0)
        of_head = weights @ v_head
        out[:, head] = of_head.detach()
        if wanted:
            added = torch.autograd.grad(of_head, (q, k, v), given["dO"][:, head].to(dtype))
            grads = [total.add_(part) for total, part in zip(grads, added, strict=True)]
    return {"O": out, **(dict(zip(("dQ", "dK", "dV"), grads, strict=True)) if wanted else {})}


def _sums_unrounded(problem: Problem, given: Values, order: Tensor) -> dict[str, Tensor]:
    """Scores and sums in the compute dtype; O, and P and dS before their products, in the problem's dtype."""
    full = problem.compute_dtype
    q, k, v = (given[name].to(full) for name in ("Q", "K", "V"))
    results = {"O": torch.empty(*q.shape[:3], problem.dim_v, dtype=problem.dtype)}
    if "dO" in given:
        results |= {"dQ": torch.empty_like(q), "dK": torch.zeros_like(k), "dV": torch.zeros_like(v)}
    hidden = _hidden(problem)[:, order]
    for head in range(problem.heads):
        kv_head = head // problem.group
        k_head, v_head = k[:, kv_head, order], v[:, kv_head, order]
        scores = (problem.scale * (q[:, head] @ k_head.mT)).masked_fill(hidden, -torch.inf)
        weights = torch.exp(scores - or_zero(scores.logsumexp(-1, keepdim=True)))
        stored = weights.to(problem.dtype).to(full)
        results["O"][:, head] = stored @ v_head
        if "dO" in given:
            dout = given["dO"][:, head].to(full)
            delta = (dout * results["O"][:, head]).sum(-1, keepdim=True)
            dproduct = problem.scale * weights * (dout @ v_head.mT - delta)
            dproduct = dproduct.to(problem.dtype).to(full)
            results["dQ"][:, head] = dproduct @ k_head
            results["dK"][:, kv_head, order] += dproduct.mT @ q[:, head]
            results["dV"][:, kv_head, order] += stored.mT @ dout
    return {name: value.to(problem.dtype) for name, value in results.items()}


def _hidden(problem: Problem) -> Tensor:
    return ~Grid.of(problem, Blocks()).visible(slice(0, problem.len_q), slice(0, problem.len_k))


def _distance(a: Tensor, b: Tensor) -> float:
    """The largest difference; NaN where one is NaN or infinite and the other is not that same value."""
    a = a.double()
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(same, 0, a - b).abs().max()) if b.numel() else 0.0
