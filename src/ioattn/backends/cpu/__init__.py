"""Attention on CPUs: LLVM vector code written by Python, on torch's own threads.

Reads like `backends/eager.py`, with the same names, in `forward.py` and `backward.py`; `tiles.py`, `packing.py` and
`softmax.py` hold the micro-kernels, `ir.py` the builder, `jit.py` the compiler and its cache, `launch.py` the threads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ioattn import caches
from ioattn.backends.cpu import jit
from ioattn.backends.cpu.plan import plan_backward, plan_decode, plan_forward
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
    prepare_forward(problem, tensors, out, lse)(tensors, out, lse)


def prepare_forward(
    problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor
) -> Callable[[Tensors, Tensor, Tensor], None]:
    """`forward`, for tensors that lie like these."""
    plan = plan_forward(problem, lse.shape, None if tensors.bias is None else tensors.bias.dtype)
    start = plan.prepare({"out": out, "lse": lse, **_inputs(tensors)})

    def run(tensors: Tensors, out: Tensor, lse: Tensor) -> None:
        start((out, lse, *_inputs(tensors).values()))
        if problem.packed:
            end = _ends(tensors)[0]
            out[end:] = 0
            lse[:, end:] = -torch.inf

    return run


def decode(problem: Problem, tensors: CacheTensors, out: Tensor, lse: Tensor) -> None:
    """Write attention over a cache to `out` and its log-sum-exp to `lse`."""
    prepare_decode(problem, tensors, out, lse)(tensors, out, lse)


def prepare_decode(
    problem: Problem, tensors: CacheTensors, out: Tensor, lse: Tensor
) -> Callable[[CacheTensors, Tensor, Tensor], None]:
    """`decode`, for tensors that lie like these."""
    start = plan_decode(problem, lse.shape).prepare({"out": out, "lse": lse, **_cache_inputs(tensors)})

    def run(tensors: CacheTensors, out: Tensor, lse: Tensor) -> None:
        start((out, lse, *_cache_inputs(tensors).values()))

    return run


def append(problem: Problem, tensors: CacheTensors, k_new: Tensor, v_new: Tensor) -> None:
    """Write new rows behind the lengths of a cache, in place."""
    caches.append(tensors, k_new, v_new)


def backward(
    problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, grads: Gradients
) -> None:
    """Write the gradients of q, k and v, and those of bias and sinks where wanted, to `grads`."""
    given = (tensors, out, lse, dout, dlse, grads)
    prepare_backward(problem, *given)(*given)


def prepare_backward(
    problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, grads: Gradients
) -> Callable[..., None]:
    """`backward`, for tensors that lie like these."""
    bias = None if tensors.bias is None else tensors.bias.dtype
    plan = plan_backward(problem, lse.shape, bias, grads.dbias is not None)
    shape = (plan.chunks, *lse.shape, problem.dim)

    def arrays(
        tensors: Tensors, out: Tensor, lse: Tensor, dout: Tensor, grads: Gradients
    ) -> tuple[dict[str, Tensor], Tensor | None, Tensor | None]:
        dbias = _zeroed(grads.dbias)
        partial = torch.zeros(shape, dtype=torch.float32, device="cpu") if plan.chunks > 1 else None
        found = {"out": out, "lse": lse, "dout": dout, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}
        found |= {name: x for name, x in (("dbias", dbias), ("partial", partial)) if x is not None}
        return found | _inputs(tensors), dbias, partial

    start = plan.prepare(arrays(tensors, out, lse, dout, grads)[0], dlse)

    def run(tensors: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, grads: Gradients) -> None:
        if problem.band.bounded or problem.packed or problem.len_k == 0:
            # Queries that see no key are in no task.
            grads.dq.zero_()
        given, dbias, partial = arrays(tensors, out, lse, dout, grads)
        start(given.values(), dlse)
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

    return run


def _zeroed(dbias: Tensor | None) -> Tensor | None:
    """Zeros to sum a bias's gradient in: the gradient itself where it is fp32."""
    if dbias is None or dbias.dtype == torch.float32:
        return dbias if dbias is None else dbias.zero_()
    return torch.zeros_like(dbias).float()


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


def _cache_inputs(tensors: CacheTensors) -> dict[str, Tensor]:
    tree = tensors.tree_mask
    optional = {
        "table": None if tensors.block_table is None else tensors.block_table.contiguous(),
        "tree": None if tree is None else tree[:, None],
        "slopes": None if tensors.alibi_slopes is None else tensors.alibi_slopes.float().contiguous(),
        "sinks": None if tensors.sinks is None else tensors.sinks.float().contiguous(),
    }
    inputs = {"q": tensors.q, "k": tensors.k_cache, "v": tensors.v_cache, "lengths": tensors.cache_seqlens.contiguous()}
    return inputs | {name: x for name, x in optional.items() if x is not None}


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
