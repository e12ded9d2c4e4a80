"""Attention in float64 without tiles: what every backend is compared with.

Written from the definition and independently of the package, so that a mistake cannot hide in both. Gradients come from
torch autograd. With non-finite inputs every (query, key) pair is formed on its own, so that a hidden pair has no say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Result = dict[str, Tensor]

DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")


@dataclass(frozen=True)
class Case:
    """One call: tensors by argument name, the other options, and the gradients that flow into out and lse."""

    tensors: dict[str, Tensor]
    dout: Tensor
    dlse: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def packed(self) -> bool:
        return "cu_seqlens_q" in self.tensors

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors["q"].dtype

    def offsets(self) -> list[tuple[slice, slice]]:
        """The query rows and the key rows of each sequence of a packed case."""
        q, k = (self.tensors[f"cu_seqlens_{side}"].tolist() for side in "qk")
        return [(slice(a, b), slice(c, d)) for a, b, c, d in zip(q[:-1], q[1:], k[:-1], k[1:], strict=True)]

    def replace(self, **tensors: Tensor) -> Case:
        """The same case with some of its tensors exchanged."""
        return Case({**self.tensors, **tensors}, self.dout, self.dlse, self.options)


def exact(case: Case) -> Result:
    """Output, LSE and the gradient of every differentiable input, in float64."""
    return each_sequence(case, _exact_dense)


def each_sequence(case: Case, dense: Callable[[Case], Result]) -> Result:
    """`dense` on a dense case; on a packed one, `dense` on each sequence, put together again."""
    if not case.packed:
        return dense(case)
    rows_q, heads, _ = case.tensors["q"].shape
    parts = [dense(_sequence(case, at_q, at_k)) for at_q, at_k in case.offsets()]
    like = {"dtype": parts[0]["out"].dtype if parts else torch.float64, "device": case.dout.device}
    whole = {
        "out": torch.zeros(case.dout.shape, **like),
        "lse": torch.full((heads, rows_q), -torch.inf, **like),
        **{f"d{name}": torch.zeros(case.tensors[name].shape, **like) for name in "qkv"},
    }
    for (at_q, at_k), part in zip(case.offsets(), parts, strict=True):
        whole["lse"][:, at_q] = part["lse"][0]
        for name, at in (("out", at_q), ("dq", at_q), ("dk", at_k), ("dv", at_k)):
            whole[name][at] = part[name][0].transpose(0, 1)
    if "sinks" in case.tensors:
        whole["dsinks"] = sum((part["dsinks"] for part in parts), torch.zeros(heads, **like))
    return whole


def _sequence(case: Case, at_q: slice, at_k: slice) -> Case:
    rows = {"q": at_q, "k": at_k, "v": at_k}
    dense = {name: case.tensors[name][at].transpose(0, 1)[None] for name, at in rows.items()}
    per_head = {name: case.tensors[name] for name in ("alibi_slopes", "sinks") if name in case.tensors}
    dlse = None if case.dlse is None else case.dlse[None, :, at_q]
    return Case({**dense, **per_head}, case.dout[at_q].transpose(0, 1)[None], dlse, case.options)


def visible(case: Case) -> Tensor:
    """Which (query, key) pairs a dense case keeps, `(B, H, Nq, Nk)` with broadcast dimensions of size 1."""
    n_q, n_k = case.tensors["q"].shape[2], case.tensors["k"].shape[2]
    rows = torch.arange(n_q, device=case.dout.device)[:, None]
    keys = torch.arange(n_k, device=case.dout.device)[None, :]
    causal = case.options.get("causal", False)
    offset = keys - rows - (0 if causal == "top-left" else n_k - n_q)
    left, right = case.options.get("window") or (None, None)
    keep = torch.ones_like(offset, dtype=torch.bool)
    if causal:
        keep = keep & (offset <= 0)
    if left is not None:
        keep = keep & (offset >= -left)
    if right is not None:
        keep = keep & (offset <= right)
    mask = case.tensors.get("mask")
    return keep[None, None] if mask is None else keep & mask


def finish_scores(case: Case, raw: Tensor, leaves: dict[str, Tensor]) -> Tensor:
    """Scores after softcap, ALiBi and bias, from `scale * q @ k.T`; the mask is the caller's."""
    softcap = case.options.get("softcap")
    scores = raw if softcap is None else softcap * torch.tanh(raw / softcap)
    if "alibi_slopes" in case.tensors:
        n_q, n_k = raw.shape[-2:]
        rows = torch.arange(n_q, device=raw.device)[:, None]
        distance = (rows + n_k - n_q - torch.arange(n_k, device=raw.device)).abs()
        scores = scores - case.tensors["alibi_slopes"].to(raw.dtype)[:, None, None] * distance
    return scores if "bias" not in leaves else scores + leaves["bias"]


def scale_of(case: Case) -> float:
    """The scale of a case, the default one spelled out."""
    scale = case.options.get("scale")
    return case.tensors["q"].shape[-1] ** -0.5 if scale is None else scale


def softmax(scores: Tensor, keep: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights and LSE of masked scores; a row without a visible key has weights 0 and LSE -inf (or its sink)."""
    scores = torch.where(keep, scores, -torch.inf)
    virtual = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    if sinks is not None:
        virtual = sinks[:, None, None].expand_as(virtual)
    row_max = torch.cat([scores, virtual], -1).amax(-1, keepdim=True).detach()
    row_max = torch.where(row_max == -torch.inf, 0, row_max)
    powers = torch.where(keep, (scores - row_max).exp(), 0)
    row_sum = powers.sum(-1, keepdim=True) + (virtual - row_max).exp()
    empty = row_sum == 0
    row_sum = torch.where(empty, 1, row_sum)
    lse = torch.where(empty, -torch.inf, row_sum.log() + row_max)
    return powers / row_sum, lse.squeeze(-1)


def _exact_dense(case: Case) -> Result:
    leaves = {
        name: case.tensors[name].detach().double().clone().requires_grad_()
        for name in DIFFERENTIABLE
        if name in case.tensors
    }
    out, lse = _exact_forward(case, leaves)
    dlse = torch.zeros_like(lse) if case.dlse is None else case.dlse.double()
    given = (case.dout.double(), dlse)
    gradients = torch.autograd.grad((out, lse), tuple(leaves.values()), given, materialize_grads=True)
    named = {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return {"out": out.detach(), "lse": lse.detach(), **named}


def _exact_forward(case: Case, leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    keep = visible(case)
    finite = all(x.isfinite().all() for x in (q, k, v, case.dout))
    finite = finite and not ("bias" in leaves and leaves["bias"].isnan().any())
    raw = scale_of(case) * (q @ k.transpose(-1, -2) if finite else _pair_products(keep, q, k))
    weights, lse = softmax(finish_scores(case, raw, leaves), keep, leaves.get("sinks"))
    if finite:
        return weights @ v, lse
    return (weights[..., None] * torch.where(keep[..., None], v[:, :, None], 0)).sum(-2), lse


def _pair_products(keep: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """`q @ k.T` with hidden pairs never multiplied."""
    q_pairs = torch.where(keep[..., None], q[:, :, :, None], 0)  # [B, H, Nq, Nk, D]
    k_pairs = torch.where(keep[..., None], k[:, :, None], 0)
    return (q_pairs * k_pairs).sum(-1)
