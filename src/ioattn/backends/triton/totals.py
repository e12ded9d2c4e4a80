"""What the host makes of the sums of dS over the keys: a better delta, and the gradients of sinks."""

from __future__ import annotations

import torch
from torch import Tensor


def sink_weights(sinks: Tensor | None, lse: Tensor) -> Tensor:
    """P of the sink, per head and query."""
    if sinks is None:
        return lse.new_zeros(())
    return torch.where(lse == -torch.inf, 0, torch.exp(sinks.float()[:, None] - lse))


def sink_gradients(weights: Tensor, totals: Tensor, packed: bool) -> Tensor:
    """The sink is one more key whose value is zero: dsink = P_sink * (0 - delta), over batch and queries."""
    return -torch.where(weights == 0, 0, weights * totals).sum(-1 if packed else (0, -1))


COARSE_LSE = 2.0**20
"""From here on an LSE in float32 holds log(rowsum) to less than 1/16, and the weights of a row no longer sum to 1."""


def make_delta(totals: Tensor, delta: Tensor, dlse: Tensor | None, lse: Tensor, sink_weights: Tensor) -> None:
    """Turn sums of dS over the keys into a better delta: for what sums dS over many queries, sinks and repeated biases.

    delta was made of an output that may have been rounded to 16 bits, and its error has one sign for a whole row. The
    sum of dS is sum(P dP) - delta * (1 - P_sink), and delta in full is sum(P dP) - dLSE.
    """
    totals += delta * (1 - sink_weights)
    if dlse is not None:
        totals -= dlse
    torch.where(lse.abs() < COARSE_LSE, totals, delta, out=totals)
