"""Attention on Hopper: warp-specialised kernels for sm_90 in Gluon. FP16 and BF16, head dimensions up to 256.

`config` picks a kernel, `launch` compiles and launches it; `backward_config` and `backward_launch` do so for the
gradients. In `kernels`, `forward` and `backward` are the kernels, the files that they import are their roles, and
`names` holds what differs between versions of Triton.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ioattn.backends.gluon import config
from ioattn.problem import DTYPES, Gradients, Problem, Tensors

name = "gluon"


def unusable() -> str | None:
    """Why this machine cannot run the kernels, or None."""
    if not torch.cuda.is_available():
        return "needs a Hopper GPU, and torch sees no GPU"
    if torch.version.hip is not None:
        return "needs a Hopper GPU, and this torch is built for ROCm"
    if all(torch.cuda.get_device_capability(i) != (9, 0) for i in range(torch.cuda.device_count())):
        return f"needs a Hopper GPU (compute capability 9.0), and this is {torch.cuda.get_device_name()}"
    if importlib.util.find_spec("triton") is None:
        return "needs Triton 3.6 or newer, and it is not installed; pip install triton"
    version = importlib.metadata.version("triton")
    if tuple(map(int, version.split(".")[:2])) < (3, 6):
        return f"needs Triton 3.6 or newer, and this is {version}; pip install --upgrade triton"
    return None


def objections(problem: Problem) -> list[str]:
    """Why the kernels do not take this problem; empty if they do."""
    device = problem.device
    if device.type != "cuda":
        return [f"runs on Hopper GPUs, not on {device.type}"]
    if torch.cuda.get_device_capability(device) != (9, 0):
        return [f"{torch.cuda.get_device_name(device)} is no Hopper GPU (compute capability 9.0)"]
    reasons = {
        "has no kernels for a key/value cache": problem.cache is not None,
        f"dtype is {DTYPES[problem.dtype]}; takes fp16 and bf16": problem.dtype not in (torch.float16, torch.bfloat16),
        f"head dimension is {max(problem.dim, problem.dim_v)}; takes up to 256": max(problem.dim, problem.dim_v) > 256,
        f"value dimension is {problem.dim_v}; the copy engine stores multiples of 8": problem.dim_v % 8 != 0,
        f"head dimension is {problem.dim}; the copy engine stores its gradient by multiples of 8": problem.dim % 8 != 0,
        f"q, k, v start or stride at multiples of {problem.alignment} bytes; the copy engine needs 16": (
            problem.alignment < 16
        ),
        "bias is not supported": problem.bias is not None,
        "mask is not supported": problem.mask is not None,
        f"packs {problem.batch} sequences; takes up to {config.MAX_SEQUENCES}": (
            problem.packed and problem.batch > config.MAX_SEQUENCES
        ),
    }
    return [reason for reason, applies in reasons.items() if applies]


def forward(problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor) -> None:
    """Write attention's `out` and `lse`."""
    prepare_forward(problem, tensors, out, lse)(tensors, out, lse)


def prepare_forward(
    problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor
) -> Callable[[Tensors, Tensor, Tensor], None]:
    """What writes attention's `out` and `lse` for tensors that lie like these."""
    if out.numel() == 0 and lse.numel() == 0:
        return lambda tensors, out, lse: None
    if tensors.k.numel() == 0:
        return partial(_no_keys, problem)
    from ioattn.backends.gluon import launch  # imports Triton
    from ioattn.launching import on_device

    with torch.cuda.device(problem.device):
        return on_device(problem.device, launch.prepare(problem, tensors, out, lse))


def backward(
    problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, grads: Gradients
) -> None:
    """Write the gradients of q, k and v, and that of sinks where wanted, to `grads`."""
    given = (tensors, out, lse, dout, dlse, grads)
    prepare_backward(problem, *given)(*given)


def prepare_backward(
    problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, grads: Gradients
) -> Callable[..., None]:
    """What writes the gradients for tensors that lie like these."""
    if tensors.q.numel() == 0 or tensors.k.numel() == 0:
        return partial(_no_products, problem)
    from ioattn.backends.gluon import backward_launch  # imports Triton
    from ioattn.launching import on_device

    with torch.cuda.device(problem.device):
        return on_device(problem.device, backward_launch.prepare(problem, tensors, out, lse, dout, dlse, grads))


def _no_products(
    problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, grads: Gradients
) -> None:
    for grad in grads:
        if grad is not None:
            grad.zero_()
    if grads.dsinks is not None and dlse is not None:
        # Only the sinks are left of the sums, and the LSE is the sink.
        grads.dsinks.copy_(torch.where(lse == -math.inf, 0, dlse).sum(-1 if problem.packed else (0, -1)))


def _no_keys(problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor) -> None:
    out.zero_()
    lse.fill_(-math.inf)
    if tensors.sinks is None:
        return
    if tensors.cu_seqlens_q is None:
        lse.copy_(tensors.sinks[:, None].expand_as(lse))
    else:
        used = torch.arange(lse.shape[1], device=lse.device) < tensors.cu_seqlens_q[-1]
        lse.copy_(torch.where(used, tensors.sinks[:, None].to(lse.dtype), lse))
