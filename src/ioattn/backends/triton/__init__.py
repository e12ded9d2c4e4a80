"""Attention in Triton, for every GPU that Triton compiles for; without one, in Triton's interpreter.

The backend that takes nearly everything: each feature in forward and backward, FP32 on tensor cores at FP32 accuracy,
FP16 and BF16. Bitwise deterministic: no result is ever summed by atomics. Nothing here imports Triton until a problem
is run, so that `ioattn` works where Triton is not installed.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable

import torch
from torch import Tensor

from ioattn.caches import CacheTensors
from ioattn.problem import DTYPES, Gradients, Problem, Tensors

name = "triton"

MAX_DIM = 256
"""The widest head dimension: a tile of 64 rows of wider ones no longer fits in registers."""

MAX_ROWS = 2**28
"""The longest sequence: indices of queries and keys, times four, are 32-bit, and so are their sums."""

MAX_PROGRAMS = 2**31 - 1
"""The most programs of one launch."""

MIN_CAPABILITY = (8, 0)
"""Compute capability of the oldest NVIDIA GPUs that the kernels are compiled for in the tests."""


def unusable() -> str | None:
    """Why this machine cannot run the backend and what would change that, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install 'ioattn[gpu]'"
    try:
        from ioattn.backends.triton import launch
    except Exception as error:
        return f"Triton cannot be imported: {type(error).__name__}: {error}"
    if not launch.INTERPRETED and not torch.cuda.is_available():
        return "no GPU that torch can use (TRITON_INTERPRET=1 runs Triton kernels on the CPU, slowly, for tests)"
    return None


def objections(problem: Problem) -> list[str]:
    """Why the backend does not take this problem; empty if it does."""
    reasons = []
    if problem.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        reasons.append(f"dtype is {DTYPES[problem.dtype]}; this backend computes in fp16, bf16 and fp32")
    for symbol, dim in (("D", problem.dim), ("Dv", problem.dim_v)):
        if dim > MAX_DIM:
            reasons.append(f"{symbol} is {dim}; this backend holds head dimensions up to {MAX_DIM} in registers")
    if max(problem.len_q, problem.len_k) >= MAX_ROWS:
        reasons.append(f"a sequence has {max(problem.len_q, problem.len_k)} rows; this backend counts below {MAX_ROWS}")
    tiles = math.ceil(max(problem.len_q, problem.len_k) / 16)
    if (problem.batch + 1) * problem.heads * tiles > MAX_PROGRAMS:
        reasons.append(f"{problem.batch} x {problem.heads} heads of {tiles} tiles are too many programs of one launch")
    # Where Triton cannot be used at all, `unusable` says so.
    return reasons or ([] if unusable() else _device_objections(problem))


def forward(problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor) -> None:
    """Write softmax(S) V to `out` and log(rowsum(exp(S))) to `lse`."""
    prepare_forward(problem, tensors, out, lse)(tensors, out, lse)


def prepare_forward(
    problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor
) -> Callable[[Tensors, Tensor, Tensor], None]:
    """`forward`, for tensors that lie like these."""
    from ioattn.backends.triton import launch

    return launch.prepare(problem, tensors, out, lse)


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
    from ioattn.backends.triton import launch

    return launch.prepare_gradients(problem, tensors, out, lse, dout, dlse, grads)


def decode(problem: Problem, tensors: CacheTensors, out: Tensor, lse: Tensor) -> None:
    """Write attention over a cache to `out` and its log-sum-exp to `lse`."""
    prepare_decode(problem, tensors, out, lse)(tensors, out, lse)


def prepare_decode(
    problem: Problem, tensors: CacheTensors, out: Tensor, lse: Tensor
) -> Callable[[CacheTensors, Tensor, Tensor], None]:
    """`decode`, for tensors that lie like these."""
    from ioattn.backends.triton import decoding

    return decoding.prepare_attention(problem, tensors, out, lse)


def append(problem: Problem, tensors: CacheTensors, k_new: Tensor, v_new: Tensor) -> None:
    """Write new rows behind the lengths of a cache, in place."""
    prepare_append(problem, tensors, k_new, v_new)(tensors, k_new, v_new)


def prepare_append(
    problem: Problem, tensors: CacheTensors, k_new: Tensor, v_new: Tensor
) -> Callable[[CacheTensors, Tensor, Tensor], None]:
    """`append`, for tensors that lie like these."""
    from ioattn.backends.triton import decoding

    return decoding.prepare_rows(problem, tensors, k_new, v_new)


def _device_objections(problem: Problem) -> list[str]:
    from ioattn.backends.triton import config, launch

    device = problem.device
    if launch.INTERPRETED:
        return []
    if device.type != "cuda":
        return [f"device is {device.type}; this backend runs on GPUs"]
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        major, minor = torch.cuda.get_device_capability(device)
        return [f"compute capability is {major}.{minor}; this backend needs {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}"]
    return config.objections(problem, launch.gpu_of(device))
