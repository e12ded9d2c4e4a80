"""What others offer for the same computation: torch's attention, with a mask made beforehand where it needs one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import ioattn
from ioattn.cases import Case

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(case: Case, tensors: Mapping[str, Tensor], backend: str | None) -> Attention:
    """`ioattn.attention` on the case."""
    extras: dict[str, Any] = {name: tensors[name] for name in ("bias", "mask") if name in tensors}

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
        return "math", _softcapped(case.options["softcap"], tensors["q"].shape[-1] ** -0.5)
    causal = bool(case.options.get("causal"))
    if causal and tensors["q"].shape[2] != tensors["k"].shape[2]:
        raise ValueError(f"{case}: torch's is_causal is top-left; it needs as many queries as keys")
    mask = _mask_of(case, tensors)
    grouped = tensors["q"].shape[1] != tensors["k"].shape[1]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)

    return "sdpa", run


def _mask_of(case: Case, tensors: Mapping[str, Tensor]) -> Tensor | None:
    window = case.options.get("window")
    if window is not None:
        len_q, len_k = tensors["q"].shape[2], tensors["k"].shape[2]
        offset = torch.arange(len_k) - torch.arange(len_q)[:, None] - (len_k - len_q)
        left, right = (float("inf") if side is None else side for side in window)
        return (offset >= -left) & (offset <= right)
    return tensors.get("bias", tensors.get("mask"))


def _softcapped(softcap: float, scale: float) -> Attention:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = softcap * torch.tanh(q @ k.mT * (scale / softcap))
        return scores.softmax(-1) @ v

    return run
