"""Partial results over disjoint keys become one: split-KV, ring attention and sinks all end here."""

from __future__ import annotations

import torch
from torch import Tensor


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Combine attention over disjoint sets of keys into attention over their union.

        lse = logsumexp(lses)        out = sum_s exp(lses[s] - lse) * outs[s]

    Keep the partial outputs in fp32: each rounding of a partial to 16 bits stays in the sum.

    Args:
        outs: partial outputs, `(S, ..., Dv)`, S partials of the same queries; fp32 or fp64.
        lses: their log-sum-exps, natural logarithm, `(S, ...)`; -inf where a partial saw no key.

    Returns:
        out `(..., Dv)` and lse `(...)`. Where no partial saw a key: 0 and -inf. Where only one did: exactly that one.

    Raises:
        ValueError: if the shapes do not fit.
        TypeError: if an argument is no tensor, or a 16-bit one.

    Example:
        >>> q, k, v = torch.randn(3, 1, 2, 8, 16).unbind()
        >>> parts = [attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(0, 3), slice(3, 8))]
        >>> out, lse = merge(torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]))
        >>> torch.allclose(out, attention(q, k, v), atol=1e-6)
        True

    Source: Dao, Haziza, Massa, Sizov 2023, "Flash-Decoding for long-context inference".
    """
    for name, x in (("outs", outs), ("lses", lses)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor")
    if lses.dim() == 0 or lses.shape[0] == 0:
        raise ValueError(f"lses has shape {tuple(lses.shape)}; it must be (S, ...) with at least one partial")
    if lses.device != outs.device:
        raise ValueError(f"lses is on {lses.device}; it must be on outs' device, {outs.device}")
    if outs.shape[:-1] != lses.shape:
        raise ValueError(f"lses has shape {tuple(lses.shape)}; it must be {tuple(outs.shape[:-1])}, as outs without Dv")
    for name, x in (("outs", outs), ("lses", lses)):
        if x.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"{name} is {x.dtype}; it must be float32 or float64, partial results are not rounded")
    # Both results are the same for every peak: it has no gradient.
    peak = lses.detach().amax(0)
    weights = torch.exp(lses - torch.where(peak == -torch.inf, 0, peak))
    total = weights.sum(0)
    # Where nobody saw a key, log(1) instead of log(0), whose derivative is infinite: peak is -inf already.
    total = torch.where(total == 0, 1, total)
    share = weights / total
    # A partial without keys holds zeros, but a caller may hand over garbage: it is left out, not multiplied by zero.
    kept = torch.where(share[..., None] == 0, 0, outs)
    return (share[..., None] * kept).sum(0), peak + total.log()
