"""Attention on CPUs: LLVM vector code written by Python, on torch's own threads.

Reads like `backends/eager.py`, with the same names, in `forward.py` and `backward.py`; `tiles.py`, `packing.py` and
`softmax.py` hold the micro-kernels, `ir.py` the builder, `jit.py` the compiler and its cache, `launch.py` the threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ioattn import caches
from ioattn.backends.cpu import jit
from ioattn.backends.cpu.plan import Plan, plan_backward, plan_decode, plan_forward
from ioattn.caches import CacheTensors
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
    bias = None if tensors.bias is None else tensors.bias.dtype
    plan = _planned(problem, (bias,), lambda: plan_forward(problem, lse.shape, bias))
    inputs = _inputs(tensors)
    inputs["out"], inputs["lse"] = out, lse
    plan.run(inputs)
    if problem.packed:
        end = _ends(tensors)[0]
        out[end:] = 0
        lse[:, end:] = -torch.inf


def decode(problem: Problem, tensors: CacheTensors, out: Tensor, lse: Tensor) -> None:
    """Write attention over a cache to `out` and its log-sum-exp to `lse`."""
    plan = _planned(problem, ("decode",), lambda: plan_decode(problem, lse.shape))
    tree = tensors.tree_mask
    optional = {
        "table": None if tensors.block_table is None else tensors.block_table.contiguous(),
        "tree": None if tree is None else tree[:, None],
        "slopes": None if tensors.alibi_slopes is None else tensors.alibi_slopes.float().contiguous(),
        "sinks": None if tensors.sinks is None else tensors.sinks.float().contiguous(),
    }
    inputs = {"q": tensors.q, "k": tensors.k_cache, "v": tensors.v_cache, "out": out, "lse": lse}
    inputs["lengths"] = tensors.cache_seqlens.contiguous()
    plan.run(inputs | {name: x for name, x in optional.items() if x is not None})


def append(problem: Problem, tensors: CacheTensors, k_new: Tensor, v_new: Tensor) -> None:
    """Write new rows behind the lengths of a cache, in place."""
    caches.append(tensors, k_new, v_new)


def backward(
    problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, grads: Gradients
) -> None:
    """Write the gradients of q, k and v, and those of bias and sinks where wanted, to `grads`."""
    bias = None if tensors.bias is None else tensors.bias.dtype
    wants = grads.dbias is not None
    plan = _planned(problem, (bias, wants), lambda: plan_backward(problem, lse.shape, bias, wants))
    if problem.band.bounded or problem.packed or problem.len_k == 0:
        # Queries that see no key are in no task.
        grads.dq.zero_()
    dbias = None
    if grads.dbias is not None:
        dbias = grads.dbias.zero_() if grads.dbias.dtype == torch.float32 else torch.zeros_like(grads.dbias).float()
    partial = None
    if plan.chunks > 1:
        partial = torch.zeros(plan.chunks, *lse.shape, problem.dim)
    arrays = {"out": out, "lse": lse, "dout": dout, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}
    workspaces = {name: x for name, x in (("dbias", dbias), ("partial", partial)) if x is not None}
    plan.run(_inputs(tensors) | arrays | workspaces, dlse)
    if partial is not None:
        for part in partial[1:]:
            partial[0] += part
        grads.dq.copy_(partial[0].transpose(0, 1) if problem.packed else partial[0])
    if problem.packed:
        end = _ends(tensors)[1]
        grads.dk[end:] = 0
        grads.dv[end:] = 0
    if grads.dbias is not None and dbias is not None and dbias is not grads.dbias:
        grads.dbias.copy_(dbias)
    if grads.dsinks is not None:
        grads.dsinks.copy_(_sink_gradient(problem, tensors, out, lse, dout, dlse))


def _inputs(tensors: Tensors) -> dict[str, Tensor]:
    q, k, v, *others = tensors
    inputs = {"q": q, "k": k, "v": v}
    if any(x is not None for x in others):
        per_head = {"sinks": tensors.sinks, "slopes": tensors.alibi_slopes}
        offsets = {"starts_q": tensors.cu_seqlens_q, "starts_k": tensors.cu_seqlens_k}
        inputs |= {name: x for name, x in (("bias", tensors.bias), ("mask", tensors.mask)) if x is not None}
        inputs |= {name: x.float().contiguous() for name, x in per_head.items() if x is not None}
        inputs |= {name: x.contiguous() for name, x in offsets.items() if x is not None}
    return inputs


def _ends(tensors: Tensors) -> tuple[int, int]:
    """The rows of packed tensors that belong to sequences; behind them lies slack."""
    assert tensors.cu_seqlens_q is not None
    assert tensors.cu_seqlens_k is not None
    return int(tensors.cu_seqlens_q[-1]), int(tensors.cu_seqlens_k[-1])


def _sink_gradient(
    problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Tensor:
    """The sink is one more key whose value is zero: dsink = P_sink * (0 - delta), over batch and queries."""
    assert tensors.sinks is not None
    if problem.packed:
        end = _ends(tensors)[0]
        out, dout, lse = out[:end].transpose(0, 1), dout[:end].transpose(0, 1), lse[:, :end]
        dlse = None if dlse is None else dlse[:, :end]
    delta = (dout.float() * out.float()).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    weights = torch.exp(tensors.sinks.float()[:, None] - lse.masked_fill(lse == -torch.inf, 0))
    product = torch.where(weights == 0, 0, weights * delta)
    return -(product.sum(-1) if problem.packed else product.sum((0, -1)))


_plans: dict[Any, Plan] = {}
_MAX_PLANS = 1024


def _planned(problem: Problem, options: tuple[Any, ...], make: Callable[[], Plan]) -> Plan:
    """The plan of a problem, found by the identity of the Problem: hashing one takes longer than a small call."""
    key = (id(problem), *options)
    plan = _plans.get(key)
    if plan is None or plan.problem is not problem:
        plan = make()
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    return plan
