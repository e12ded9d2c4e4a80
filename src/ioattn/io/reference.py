"""Untiled attention in any dtype, and the error that a result may have: what the schedules' results are checked by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ioattn.io.tiles import Blocks, Grid
from ioattn.problem import Problem


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


def check(problem: Problem, given: Mapping[str, Tensor], results: Mapping[str, Tensor]) -> list[Check]:
    """The largest error of each of O, dQ, dK and dV against float64, and its bound.

    The bound is 2 * (the error of the plain computation in the problem's dtype + eps * the largest true value).

    Raises:
        ValueError: if the problem is in float64, for which nothing here is more exact.
    """
    if problem.dtype == torch.float64:
        raise ValueError("dtype is fp64; it must be fp16, bf16 or fp32: the check's truth is float64 itself")
    exact = plain(problem, given, torch.float64)
    rounded = plain(problem, given, problem.dtype)
    eps = torch.finfo(problem.dtype).eps
    checks = []
    for name in (n for n in exact if n in results):
        truth = exact[name]
        largest = float(truth.abs().max()) if truth.numel() else 0.0
        bound = 2 * (_distance(rounded[name], truth) + eps * largest)
        checks.append(Check(name, _distance(results[name], truth), bound))
    return checks


def plain(problem: Problem, given: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """O = softmax(scale * Q K^T) V computed whole in `dtype`, and where dO is given dQ, dK, dV by autograd."""
    wanted = "dO" in given
    q, k, v = (given[name].to(dtype).detach().requires_grad_(wanted) for name in ("Q", "K", "V"))
    hidden = ~Grid.of(problem, Blocks()).visible(slice(0, problem.len_q), slice(0, problem.len_k))
    outs = []
    for head in range(problem.heads):  # one at a time: the score matrix of a head is large enough
        scores = problem.scale * (q[:, head] @ k[:, head // problem.group].mT)
        # Half precision cannot hold the scores' -inf differences; a fully hidden row is 0, not NaN.
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1).masked_fill(hidden, 0)
        outs.append(weights @ v[:, head // problem.group])
    out = torch.stack(outs, 1)
    if not wanted:
        return {"O": out}
    grads = torch.autograd.grad(out, (q, k, v), given["dO"].to(dtype))
    return {"O": out.detach(), **dict(zip(("dQ", "dK", "dV"), grads, strict=True))}


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b).abs().max()) if b.numel() else 0.0
