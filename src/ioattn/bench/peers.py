"""What others offer for the same computation: torch's attention, with a mask made beforehand where it needs one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import ioattn
from ioattn.bench.cases import Case

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

FUSED = {
    "fp32": {"efficient": SDPBackend.EFFICIENT_ATTENTION},
    "bf16": {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION},
    "fp16": {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION},
}
"""Torch's fused attention on GPUs."""


def ours(case: Case, tensors: Mapping[str, Tensor], backend: str | None) -> Attention:
    """`ioattn.attention` on the case."""
    extras: dict[str, Any] = {name: x for name, x in tensors.items() if name not in ("q", "k", "v", "dout")}

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = ioattn.attention(q, k, v, backend=backend, **case.options, **extras)
        assert isinstance(out, Tensor)
        return out

    return run


def torch_peer(case: Case, tensors: Mapping[str, Tensor]) -> tuple[str, Attention]:
    """The fastest thing in torch that computes the case, and its name.

    A window, a bias and a boolean mask become one `attn_mask`, made here and not timed. Softcap has no place in torch's
    attention: its peer is the plain formula in torch's operators.
    """
    if "softcap" in case.options:
        return "math", _softcapped(case.options["softcap"], case.dim**-0.5)
    causal = bool(case.options.get("causal"))
    if causal and case.len_q != case.len_k:
        raise ValueError(f"{case.name}: torch's is_causal is top-left; it needs as many queries as keys")
    mask = _mask_of(case, tensors)
    grouped = bool(case.kv_heads) and case.kv_heads != case.heads

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)

    return "sdpa", run


def fused_peers(case: Case, dtype: str) -> dict[str, Attention]:
    """Each of torch's fused kernels by name, for a case without features; the causal one is top-left."""
    if set(case.options) - {"causal"} or case.bias or case.mask or case.alibi or case.sinks or case.kv_heads:
        return {}
    causal = bool(case.options.get("causal"))

    def of(backend: SDPBackend) -> Attention:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=causal)

        return run

    return {name: of(backend) for name, backend in FUSED[dtype].items()}


def _mask_of(case: Case, tensors: Mapping[str, Tensor]) -> Tensor | None:
    window = case.options.get("window")
    if window is not None:
        offset = torch.arange(case.len_k) - torch.arange(case.len_q)[:, None] - (case.len_k - case.len_q)
        left, right = (float("inf") if side is None else side for side in window)
        return (offset >= -left) & (offset <= right)
    return tensors.get("bias", tensors.get("mask"))


def _softcapped(softcap: float, scale: float) -> Attention:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = softcap * torch.tanh(q @ k.mT * (scale / softcap))
        return scores.softmax(-1) @ v

    return run
