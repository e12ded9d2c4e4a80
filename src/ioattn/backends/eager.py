"""FlashAttention in plain torch: the specification that every other backend is read and tested against.

The score matrix S = scale * Q K^T exists one tile at a time. The forward keeps three numbers per query while it walks
over the keys (Milakov and Gimelshein 2018; Dao 2023, Algorithm 1):

    row_max   the largest score so far, m
    row_sum   the sum of exp(score - m) so far, l
    acc       the sum of exp(score - m) * v so far, not yet divided

A tile with a larger score makes `row_max` grow; what was summed before is multiplied by exp(old max - new max). At the
end out = acc / l and lse = m + log(l). The backward recomputes each tile of P = exp(S - lse) instead of having stored
it (Dao 2023, Algorithm 2), with delta = rowsum(dO * O) - dLSE computed once per query:

    dV = P^T dO        dP = dO V^T        dS = P * (dP - delta)        dQ = scale * dS K        dK = scale * dS^T Q

Memory is O(N): the largest temporary is one tile. Every tensor is viewed with the group axis of grouped-query
attention, [B, Hk, G, rows, columns]; the keys and values of a group have G = 1 and broadcast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ioattn import caches
from ioattn.caches import CacheTensors
from ioattn.compose import fold
from ioattn.merge import merge
from ioattn.problem import Gradients, Problem, Tensors

name = "eager"

TILE_SCORES = 2**18
"""Scores in one tile, over all heads: 1 MiB in fp32, of which a dozen copies live at a time and stay in cache.

Forward + backward of 8192 causal tokens with ALiBi, one head, D 64, fp32, on a 2-core AVX-512 machine: 0.36 s; with
2**20, 0.85 s.
"""


def unusable() -> str | None:
    """None: plain torch runs everywhere."""
    return None


def objections(problem: Problem) -> list[str]:
    """None at all: this backend takes every valid problem."""
    return []


def forward(problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor) -> None:
    """Write softmax(S) V to `out` and log(rowsum(exp(S))) to `lse`."""
    out.zero_()
    lse.fill_(-torch.inf)
    for seq in _sequences(problem, tensors):
        scores_of, v = _Scores(problem, tensors, seq), seq.view(tensors.v, seq.keys)
        out_rows, lse_rows = seq.view(out, seq.queries), seq.view_lse(lse)
        for rows in scores_of.query_tiles():
            keys = scores_of.band.key_range(rows.start, rows.stop, scores_of.len_k)
            acc, row_max, row_sum = _attend(scores_of, v, rows, keys, scores_of.sink_or_nothing(rows))
            # A row that saw no key has row_sum 0 (or only its sink's 1) and acc 0: out 0.
            out_rows[..., rows, :] = acc / torch.where(row_sum == 0, 1, row_sum)[..., None]
            lse_rows[..., rows] = row_max + row_sum.log()


def _attend(
    scores_of: _Scores, v: Tensor, rows: slice, keys: tuple[int, int], start: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The online softmax of a tile of queries over the keys `[keys[0], keys[1])`: acc, row_max and row_sum."""
    dtype = scores_of.problem.compute_dtype
    row_max, row_sum = start
    acc = torch.zeros(*row_max.shape, v.shape[-1], dtype=dtype, device=v.device)
    for cols in _slices(*keys, scores_of.tile_size):
        _, scores, visible = scores_of.tile(rows, cols)
        v_tile = v[..., cols, :].to(dtype)
        new_max = torch.maximum(row_max, scores.amax(-1))
        weights = torch.exp(scores - _or_zero(new_max)[..., None])
        rescale = torch.exp(row_max - _or_zero(new_max))
        row_sum = rescale * row_sum + weights.sum(-1)
        acc = rescale[..., None] * acc + _masked_matmul(weights, visible, v_tile)
        row_max = new_max
    return acc, row_max, row_sum


def decode(problem: Problem, tensors: CacheTensors, out: Tensor, lse: Tensor) -> None:
    """`forward` of each sequence over its rows of the cache, in `num_splits` pieces that `merge` puts together."""
    cache = problem.cache
    assert cache is not None
    for b, before in enumerate(tensors.cache_seqlens.tolist()):
        length = before + cache.appended
        k, v = caches.rows_of(tensors, b, length)
        tree = tensors.tree_mask
        tree = None if tree is None else _visible_nodes(tree[b % len(tree)], length)
        mask = None if tree is None else (1, 1, problem.len_q)
        single = replace(problem, batch=1, len_k=length, cache=None, mask=mask)
        extras = {"mask": tree, "alibi_slopes": tensors.alibi_slopes, "sinks": tensors.sinks}
        scores_of = _Scores(single, Tensors(tensors.q[b : b + 1], k, v, **extras), _dense(problem))
        out_rows, lse_rows = (x[b : b + 1].unflatten(1, (problem.kv_heads, -1)) for x in (out, lse))
        for rows in scores_of.query_tiles():
            merged, lse_rows[..., rows] = _merged(scores_of, v.unflatten(1, (problem.kv_heads, -1)), rows, cache.splits)
            out_rows[..., rows, :] = merged


def append(problem: Problem, tensors: CacheTensors, k_new: Tensor, v_new: Tensor) -> None:
    """Write new rows behind the lengths of the cache, in place."""
    caches.append(tensors, k_new, v_new)


def _merged(scores_of: _Scores, v: Tensor, rows: slice, splits: int) -> tuple[Tensor, Tensor]:
    """The pieces of a tile of queries, each with its own row_max and row_sum; a sink is one more piece."""
    start, end = scores_of.band.key_range(rows.start, rows.stop, scores_of.len_k)
    size = -(-(end - start) // max(1, splits))
    outs, maxima, sums = [], [], []
    for piece in range(max(1, splits)):
        keys = (min(start + piece * size, end), min(start + (piece + 1) * size, end))
        acc, row_max, row_sum = _attend(scores_of, v, rows, keys, scores_of.nothing(rows))
        outs.append(acc / torch.where(row_sum == 0, 1, row_sum)[..., None])
        maxima.append(row_max)
        sums.append(row_sum)
    if scores_of.problem.sinks:
        outs.append(torch.zeros_like(outs[0]))
        maxima.append(scores_of.sinks.expand_as(maxima[0]))
        sums.append(torch.ones_like(sums[0]))
    # Relative to the largest score: near 1e4 a float32 LSE does not hold the logarithm of the sum.
    peak = _or_zero(torch.stack(maxima).amax(0))
    out, lse = merge(torch.stack(outs), torch.stack(maxima) - peak + torch.stack(sums).log())
    return out, lse + peak


def _visible_nodes(tree: Tensor, length: int) -> Tensor:
    """An ancestor matrix as a mask `(1, 1, Nq, length)`: every key before the last Nq is visible."""
    nodes = tree.shape[0]
    before = torch.ones(nodes, max(0, length - nodes), dtype=torch.bool, device=tree.device)
    return torch.cat([before, tree[:, max(0, nodes - length) :]], 1)[None, None]


def backward(
    problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, grads: Gradients
) -> None:
    """Write the gradients of q, k and v, and those of bias and sinks where wanted, to `grads`."""
    dtype = problem.compute_dtype
    dbias = None if grads.dbias is None else torch.zeros_like(grads.dbias, dtype=dtype)
    dsinks = None if grads.dsinks is None else torch.zeros_like(grads.dsinks, dtype=dtype)
    for grad in (grads.dq, grads.dk, grads.dv):
        grad.zero_()
    for seq in _sequences(problem, tensors):
        scores_of, lse_rows = _Scores(problem, tensors, seq), seq.view_lse(lse)
        # Nothing that arrives at an empty row, not even a NaN, has a way to its scores.
        empty = lse_rows == -torch.inf
        dout_rows = torch.where(empty[..., None], 0, seq.view(dout, seq.queries).to(dtype))
        delta = (dout_rows * seq.view(out, seq.queries).to(dtype)).sum(-1)
        if dlse is not None:
            delta = torch.where(empty, 0, delta - seq.view_lse(dlse))
        if dsinks is not None:
            # The sink is one more key whose value is zero: dsink = P_sink * (0 - delta), over batch and queries.
            sink_weights = torch.exp(scores_of.sinks - _or_zero(lse_rows))
            dsinks -= torch.where(sink_weights == 0, 0, sink_weights * delta).sum((0, -1)).flatten()
        _backward_sequence(scores_of, _Upstream(dout_rows, lse_rows, delta), grads, dbias)
    for wanted, total in ((grads.dbias, dbias), (grads.dsinks, dsinks)):
        if wanted is not None and total is not None:
            wanted.copy_(total)


class _Upstream(NamedTuple):
    """What the backward knows of each query of a sequence."""

    dout: Tensor  # [B, Hk, G, Nq, Dv]
    lse: Tensor  # [B, Hk, G, Nq]
    delta: Tensor  # [B, Hk, G, Nq]


def _backward_sequence(scores_of: _Scores, upstream: _Upstream, grads: Gradients, dbias: Tensor | None) -> None:
    """Outer loop over keys, inner loop over queries: dK and dV of a tile are complete when it is left."""
    problem, seq, dtype = scores_of.problem, scores_of.seq, scores_of.problem.compute_dtype
    dq = torch.zeros(scores_of.q.shape, dtype=dtype, device=problem.device)
    v, dk_rows, dv_rows = (seq.view(x, seq.keys) for x in (scores_of.tensors.v, grads.dk, grads.dv))
    for cols in scores_of.key_tiles():
        k_tile, v_tile = scores_of.k[..., cols, :].to(dtype), v[..., cols, :].to(dtype)
        dk, dv = torch.zeros_like(k_tile), torch.zeros_like(v_tile)
        for rows in scores_of.query_tiles_for(cols):
            q_tile, dout_tile = scores_of.q[..., rows, :].to(dtype), upstream.dout[..., rows, :]
            raw, scores, visible = scores_of.tile(rows, cols)
            seen_by = None if visible is None else visible.mT
            weights = torch.exp(scores - _or_zero(upstream.lse[..., rows])[..., None])
            dscores = weights * (dout_tile @ v_tile.mT - upstream.delta[..., rows, None])
            if visible is not None:
                # Where a row's lse is NaN, exp has not made the hidden weights zero.
                weights, dscores = torch.where(visible, weights, 0), torch.where(visible, dscores, 0)
            if dbias is not None:
                _add_broadcast(dbias, dscores, rows, cols)
            dproduct = problem.scale * scores_of.dterms(dscores, raw, rows, cols)
            dv += _masked_matmul(weights.mT, seen_by, dout_tile).sum(2, keepdim=True)
            dk += _masked_matmul(dproduct.mT, seen_by, q_tile).sum(2, keepdim=True)
            dq[..., rows, :] += _masked_matmul(dproduct, visible, k_tile)
        dk_rows[..., cols, :] = dk
        dv_rows[..., cols, :] = dv
    seq.view(grads.dq, seq.queries).copy_(dq)


class _Scores:
    """The score matrix of one sequence: it is never whole, `tile` computes a piece of it."""

    def __init__(self, problem: Problem, tensors: Tensors, seq: _Sequence) -> None:
        self.problem, self.tensors, self.seq = problem, tensors, seq
        self.q, self.k = seq.view(tensors.q, seq.queries), seq.view(tensors.k, seq.keys)
        self.len_q, self.len_k = self.q.shape[-2], self.k.shape[-2]
        self.band = problem.band_of(self.len_q, self.len_k)
        self.formula = fold(problem.terms, {"tanh": torch.tanh})
        self.sinks = seq.per_head(tensors.sinks, problem.compute_dtype)
        self.slopes = seq.per_head(tensors.alibi_slopes, problem.compute_dtype)
        heads = max(1, self.q.shape[:-2].numel())
        self.tile_size = max(16, int((TILE_SCORES / heads) ** 0.5))

    def tile(self, rows: slice, cols: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        """scale * Q K^T, the same after score terms and mask, and what is visible (None: all of it)."""
        dtype = self.problem.compute_dtype
        raw = self.problem.scale * (self.q[..., rows, :].to(dtype) @ self.k[..., cols, :].to(dtype).mT)
        scores = self.formula.step(raw, self._distance(rows, cols), self._operands(rows, cols))
        visible = self._visible(rows, cols)
        return raw, scores if visible is None else torch.where(visible, scores, -torch.inf), visible

    def dterms(self, dscores: Tensor, raw: Tensor, rows: slice, cols: slice) -> Tensor:
        """The gradient of scale * Q K^T from that of the scores."""
        return self.formula.dstep(dscores, raw, self._distance(rows, cols), self._operands(rows, cols))

    def sink_or_nothing(self, rows: slice) -> tuple[Tensor, Tensor]:
        """`row_max` and `row_sum` before the first key: a sink counts as one key whose value is zero."""
        row_max, row_sum = self.nothing(rows)
        if self.problem.sinks:
            row_max = row_max.maximum(self.sinks)
            row_sum = (row_max != -torch.inf).to(row_max.dtype)
        return row_max, row_sum

    def nothing(self, rows: slice) -> tuple[Tensor, Tensor]:
        """`row_max` and `row_sum` of no key at all."""
        like = self.q[..., rows, 0]
        row_max = torch.full(like.shape, -torch.inf, dtype=self.problem.compute_dtype, device=like.device)
        return row_max, torch.zeros_like(row_max)

    def query_tiles(self) -> Iterator[slice]:
        return _slices(0, self.len_q, self.tile_size)

    def key_tiles(self) -> Iterator[slice]:
        return _slices(0, self.len_k, self.tile_size)

    def query_tiles_for(self, cols: slice) -> Iterator[slice]:
        return _slices(*self.band.query_range(cols.start, cols.stop, self.len_q), self.tile_size)

    def _visible(self, rows: slice, cols: slice) -> Tensor | None:
        mask = None if self.tensors.mask is None else self.seq.per_score(self.tensors.mask, rows, cols)
        if self.band.is_full((rows.start, rows.stop), (cols.start, cols.stop)):
            return mask
        offset = self._positions(cols) - self._positions(rows)[:, None] - self.band.shift
        visible = torch.ones_like(offset, dtype=torch.bool)
        if self.band.lo is not None:
            visible &= offset >= self.band.lo
        if self.band.hi is not None:
            visible &= offset <= self.band.hi
        return visible if mask is None else visible & mask

    def _distance(self, rows: slice, cols: slice) -> Tensor | None:
        if not self.problem.alibi:
            return None
        return (self._positions(rows)[:, None] + self.len_k - self.len_q - self._positions(cols)).abs()

    def _operands(self, rows: slice, cols: slice) -> tuple[Tensor | float | None, ...]:
        bias = self.tensors.bias
        values = {
            "softcap": self.problem.softcap,
            "alibi": self.slopes[..., None],
            "bias": None if bias is None else self.seq.per_score(bias, rows, cols),
        }
        return tuple(values[term.name] for term in self.problem.terms)

    def _positions(self, tile: slice) -> Tensor:
        return torch.arange(tile.start, tile.stop, device=self.problem.device)


@dataclass(frozen=True)
class _Sequence:
    """Which rows of the tensors form one dense problem, and views of them with a group axis, [B, Hk, G, rows, ...]."""

    kv_heads: int
    packed: bool
    queries: slice
    keys: slice

    def view(self, x: Tensor, rows: slice) -> Tensor:
        dense = x[rows].transpose(0, 1)[None] if self.packed else x
        return dense.unflatten(1, (self.kv_heads, -1))

    def view_lse(self, lse: Tensor) -> Tensor:
        dense = lse[None, :, self.queries] if self.packed else lse
        return dense.unflatten(1, (self.kv_heads, -1))

    def per_head(self, x: Tensor | None, dtype: torch.dtype) -> Tensor:
        """`x` as [Hk, G, 1], so that it broadcasts against one number per row."""
        return torch.empty(0) if x is None else x.to(dtype).unflatten(0, (self.kv_heads, -1))[..., None]

    def per_score(self, x: Tensor, rows: slice, cols: slice) -> Tensor:
        """The tile of a bias or mask, whose batch and heads may still be broadcast."""
        tile = x[..., rows if x.shape[-2] > 1 else slice(None), cols].expand(-1, -1, rows.stop - rows.start, -1)
        return tile.unsqueeze(2) if x.shape[1] == 1 else tile.unflatten(1, (self.kv_heads, -1))


def _sequences(problem: Problem, tensors: Tensors) -> Iterator[_Sequence]:
    if not problem.packed:
        if 0 not in tensors.q.shape[:-1]:
            yield _dense(problem)
        return
    assert tensors.cu_seqlens_q is not None
    assert tensors.cu_seqlens_k is not None
    starts_q, starts_k = tensors.cu_seqlens_q.tolist(), tensors.cu_seqlens_k.tolist()
    for b in range(problem.batch):
        queries, keys = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
        if queries.start < queries.stop:
            yield _Sequence(problem.kv_heads, True, queries, keys)


def _dense(problem: Problem) -> _Sequence:
    return _Sequence(problem.kv_heads, False, slice(None), slice(None))


def _slices(start: int, end: int, size: int) -> Iterator[slice]:
    return (slice(at, min(at + size, end)) for at in range(start, end, size))


def _or_zero(x: Tensor) -> Tensor:
    """-inf becomes 0, so that exp(-inf - max) of a row that has seen nothing is 0 and not exp(-inf + inf)."""
    return torch.where(x == -torch.inf, 0, x)


def _masked_matmul(weights: Tensor, visible: Tensor | None, values: Tensor) -> Tensor:
    """weights @ values, where a masked weight contributes nothing, even to values that are inf or NaN.

    Its weight is zero already, but 0 * NaN is NaN. So the finite values are summed alone, and what the others add is
    counted: an infinity if all that an output sees are infinities of one sign and no weight is zero, else NaN.
    """
    if visible is None:
        return weights @ values
    finite = values.isfinite()
    seen = visible.to(weights.dtype) @ (~finite).to(weights.dtype)
    signs = weights.sign() @ torch.where(values.isinf(), values.sign(), 0)
    infinite = torch.where(signs.abs() == seen, signs * torch.inf, torch.nan)
    return weights @ torch.where(finite, values, 0) + torch.where(seen == 0, 0, infinite)


def _add_broadcast(dbias: Tensor, dscores: Tensor, rows: slice, cols: slice) -> None:
    """Add `dscores` to its tile of `dbias`, summed over what the bias broadcasts."""
    tile = dbias[..., rows if dbias.shape[-2] > 1 else slice(None), cols]
    tile += dscores.flatten(1, 2).sum_to_size(tile.shape)
