"""Attention on CPUs: LLVM vector code written by Python, on torch's own threads.

Reads like `backends/eager.py`, with the same names, in `forward.py` and `backward.py`; `tiles.py`, `packing.py` and
`softmax.py` hold the micro-kernels, `ir.py` the builder, `jit.py` the compiler and its cache, `launch.py` the threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ioattn.backends.cpu import jit
from ioattn.backends.cpu.plan import Plan, bias_dtype, plan_forward
from ioattn.problem import Gradients, Problem, Tensors

name = "cpu"


def unusable() -> str | None:
    """Why this machine cannot run the backend and what would change that, or None."""
    return jit.unusable()


def objections(problem: Problem) -> list[str]:
    """float64 and other devices; everything else is on the fast path."""
    reasons = []
    if problem.device.type != "cpu":
        reasons.append(f"runs on cpu, not on {problem.device.type}")
    if problem.dtype == torch.float64:
        reasons.append("computes in fp32, float64 inputs ask for more")
    return reasons


def forward(problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor) -> None:
    """Write softmax(S) V to `out` and log(rowsum(exp(S))) to `lse`."""
    plan_forward(problem, bias_dtype(tensors.bias)).run(
        {
            "q": tensors.q, "k": tensors.k, "v": tensors.v, "out": out, "lse": lse,
            "bias": tensors.bias, "mask": tensors.mask,
            "sinks": None if tensors.sinks is None else tensors.sinks.float(),
            "slopes": None if tensors.alibi_slopes is None else tensors.alibi_slopes.float(),
        }
    )
