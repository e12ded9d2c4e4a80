"""How far a backend may be from float64: twice what untiled attention in the same type is, plus rounding.

`plain` is the textbook forward and backward, computed as a backend computes it: 16-bit inputs, float32 scores and sums,
weights and score gradients rounded to 16 bits before their products, or not. It runs in several such ways and orders of
summation, because one can be exact by luck.
"""

from __future__ import annotations

import torch
from oracle import Case, Result, each_sequence, exact, finish_scores, scale_of, softmax, visible
from torch import Tensor

SAFETY = 2
"""The factor: a backend may sum in another order and round once more."""

FLUSHED = torch.finfo(torch.float32).tiny
"""Below it float32 is subnormal, and GPUs, nobody else, take such a weight for zero."""

ORDERS = 8
"""Orders of summation: as written, and shuffled."""


def assert_close(actual: Result, case: Case, truth: Result | None = None) -> None:
    """Fail, with the worst element of each tensor, unless every tensor in `actual` is within its tolerance."""
    truth = exact(case) if truth is None else truth
    others = [plain(case, order) for order in range(ORDERS)]
    faults = [
        fault
        for name, value in actual.items()
        if (fault := difference(name, value, truth[name], [other[name] for other in others]))
    ]
    if faults:
        raise AssertionError("\n".join(faults))


def difference(name: str, actual: Tensor, truth: Tensor, others: list[Tensor]) -> str | None:
    """What is wrong with `actual`, or None."""
    if actual.shape != truth.shape:
        return f"{name}: shape {tuple(actual.shape)}, expected {tuple(truth.shape)}"
    value = actual.detach().double()
    for kind, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = (test(value) != test(truth)).nonzero()
        if len(wrong):
            at = tuple(wrong[0].tolist())
            return f"{name}: {kind} positions differ at {len(wrong)} places: {value[at]} at {at}, not {truth[at]}"
    finite = truth.isfinite()
    if not finite.any():
        return None
    own = max((other.to(actual.dtype).double() - truth)[finite].abs().max().item() for other in others)
    largest = truth[finite].abs().max().item()
    flushed = FLUSHED if actual.is_cuda else 0.0
    limit = SAFETY * (own + torch.finfo(actual.dtype).eps * largest + flushed)
    error = torch.where(finite, (value - truth).abs(), 0)
    if not error.max() > limit:
        return None
    at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    return (
        f"{name}: error {error.max():.3e} at {at}: {value[at]:.9g}, expected {truth[at]:.9g}; limit {limit:.3e} "
        f"(plain attention {own:.3e}, largest {largest:.3g}); {int((error > limit).sum())} of {error.numel()} beyond"
    )


def plain(case: Case, order: int) -> Result:
    """Untiled attention and its gradients in the case's own type."""
    return each_sequence(case, lambda dense: _plain_dense(dense, _Sums(order)))


class _Sums:
    """Sums and matrix products, taken in one of several ways."""

    def __init__(self, order: int) -> None:
        self.order = order

    def of(self, x: Tensor) -> Tensor:
        return self._shuffled(x, -1).sum(-1)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return self._shuffled(a, -1) @ self._shuffled(b, -2)

    def stored(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """An operand of a matrix product, rounded to `dtype` in every second way."""
        return x.to(dtype).to(x.dtype) if self.order % 2 == 0 else x

    def _shuffled(self, x: Tensor, dim: int) -> Tensor:
        if self.order == 0:
            return x
        generator = torch.Generator().manual_seed(self.order)
        return x.index_select(dim, torch.randperm(x.shape[dim], generator=generator).to(x.device))


def _plain_dense(case: Case, sums: _Sums) -> Result:
    compute = torch.float64 if case.dtype == torch.float64 else torch.float32
    tame = {n: x.detach().to(compute) for n, x in case.tensors.items() if x.is_floating_point()}
    tame = {n: torch.where(x.isnan() | (x.isinf() if n in "qkv" else False), 0, x) for n, x in tame.items()}
    dout = torch.where(case.dout.isfinite(), case.dout, 0).to(compute)
    group = tame["q"].shape[1] // tame["k"].shape[1]
    k, v = (tame[name].repeat_interleave(group, dim=1) for name in "kv")

    keep = visible(case)
    scores = finish_scores(case, scale_of(case) * sums.product(tame["q"], k.transpose(-1, -2)), tame)
    weights, lse = softmax(scores, keep, tame.get("sinks"))
    out = sums.product(sums.stored(weights, case.dtype), v).to(case.dtype)

    delta = sums.of(dout * out.to(compute))
    if case.dlse is not None:
        delta = delta - torch.where(case.dlse.isfinite(), case.dlse, 0).to(compute)
    # The backward recomputes the scores, perhaps summed in another order, and has only the LSE to make weights of them.
    raw = scale_of(case) * _Sums(sums.order + 1).product(tame["q"], k.transpose(-1, -2))
    scores = finish_scores(case, raw, tame)
    weights = torch.where(keep & (lse[..., None] != -torch.inf), (scores - lse[..., None]).exp(), 0)
    dscores = weights * (sums.product(dout, v.transpose(-1, -2)) - delta[..., None])
    softcap = case.options.get("softcap")
    draw = dscores if softcap is None else dscores * (1 - torch.tanh(raw / softcap) ** 2)
    draw = scale_of(case) * sums.stored(draw, case.dtype)
    result = {
        "out": out,
        "lse": lse,
        "dq": sums.product(draw, k),
        "dk": _sum_group(sums.product(draw.transpose(-1, -2), tame["q"]), group),
        "dv": _sum_group(sums.product(sums.stored(weights, case.dtype).transpose(-1, -2), dout), group),
    }
    if "bias" in tame:
        result["dbias"] = dscores.expand(raw.shape).sum_to_size(tame["bias"].shape)
    if "sinks" in tame:
        share = torch.where(lse == -torch.inf, 0, (tame["sinks"][:, None] - lse).exp())
        result["dsinks"] = -sums.of((share * delta).sum(0))
    return result


def _sum_group(x: Tensor, group: int) -> Tensor:
    """Sum over the query heads that share a key/value head."""
    return x.unflatten(1, (x.shape[1] // group, group)).sum(2)
