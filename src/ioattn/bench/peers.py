"""What others offer for the same computation: torch's attention, with a mask made beforehand where it needs one."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import ioattn
from ioattn.cases import Case
from ioattn.masks import EVERYTHING, Band
from ioattn.problem import DTYPES, Problem

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

FUSED = {
    "fp32": {"efficient": SDPBackend.EFFICIENT_ATTENTION},
    "bf16": {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION},
    "fp16": {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION},
}
"""Torch's fused attention on GPUs."""

FLASH = {"fa3": "fa3_fwd_interface", "fa4": "flash_attn.cute"}
"""Modules with a `flash_attn_func`."""


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
        return "math", _softcapped(case.options["softcap"], tensors["q"].shape[-1] ** -0.5)
    causal = bool(case.options.get("causal"))
    if causal and tensors["q"].shape[2] != tensors["k"].shape[2]:
        raise ValueError(f"{case}: torch's is_causal is top-left; it needs as many queries as keys")
    mask = _mask_of(case, tensors)
    grouped = tensors["q"].shape[1] != tensors["k"].shape[1]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)

    return "sdpa", run


def gpu_peers(problem: Problem) -> dict[str, Attention]:
    """What takes the problem on this GPU, by name: torch's fused kernels, FA3 and FA4 where they are installed."""
    plain = problem.band in (EVERYTHING, Band(hi=0)) and problem.len_q == problem.len_k and problem.softcap is None
    if problem.bias or problem.mask or problem.alibi or problem.sinks:
        return {}
    peers = {name: _fused(problem, backend) for name, backend in FUSED[DTYPES[problem.dtype]].items()} if plain else {}
    if problem.dtype in (torch.float16, torch.bfloat16):
        found = {name: _flash(problem, module) for name, module in FLASH.items()}
        peers |= {name: run for name, run in found.items() if run is not None}
    return peers


def _fused(problem: Problem, backend: SDPBackend) -> Attention:
    causal, grouped = problem.band.bounded, problem.group > 1

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    return run


def _flash(problem: Problem, module: str) -> Attention | None:
    """A flash_attn_func, which has its heads behind its rows; some give the LSE too. None if it is not installed."""
    try:
        function = importlib.import_module(module).flash_attn_func
    except Exception:  # these load compiled code that may not fit this torch or this driver, and fail in any way
        return None
    options: dict[str, Any] = {"causal": problem.band.hi == 0}
    if problem.band.lo is not None:
        options["window_size"] = (-problem.band.lo, 0)
    if problem.softcap is not None:
        options["softcap"] = problem.softcap

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = function(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options)
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out.transpose(1, 2)

    return run


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
