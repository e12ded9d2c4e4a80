"""Cases of decoding: a cache full of NaN into which only the rows that a sequence has are written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from attend import Target, normal
from oracle import Case, Result
from tolerance import assert_close
from torch import Tensor

import ioattn
from ioattn import caches, registry
from ioattn.caches import CacheTensors, DecodeOptions

NOWHERE = (-1, 2**31 - 1, 10**6, -(2**31))
"""What a block table holds where no page is."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a case; `lengths` count what lies in the cache when the queries look at it, appended rows included."""

    lengths: tuple[int, ...] = (37, 1, 64, 100)
    n_q: int = 1
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    dim_v: int | None = None
    capacity: int = 128
    page: int | None = None
    appended: int = 0
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Decoding:
    """One call: arguments by name, options, and the dense rows of each sequence for the oracle."""

    sizes: Sizes
    tensors: dict[str, Tensor]
    options: dict[str, Any]
    sequences: list[dict[str, Tensor]] = field(default_factory=list)

    def copied(self, **others: Tensor) -> Decoding:
        """The same call on tensors of its own, some of them exchanged."""
        tensors = {name: x.clone() for name, x in self.tensors.items()} | others
        return Decoding(self.sizes, tensors, self.options, self.sequences)

    def dense(self, b: int) -> Case:
        """Sequence `b` as a dense call."""
        options = {name: x for name, x in self.options.items() if name in ("causal", "window", "scale", "softcap")}
        extras = {name: self.tensors[name] for name in ("alibi_slopes", "sinks") if name in self.tensors}
        q = self.tensors["q"][b : b + 1]
        k, v = self.sequences[b]["k"], self.sequences[b]["v"]
        tree = self.tensors.get("tree_mask")
        options["causal"] = options.get("causal", True) and tree is None
        if tree is not None:
            tree = tree if tree.dim() == 2 else tree[b % len(tree)]
            extras["mask"] = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
            for node in range(max(0, q.shape[2] - k.shape[2]), q.shape[2]):
                extras["mask"][0, 0, :, k.shape[2] - q.shape[2] + node] = tree[:, node]
        return Case({"q": q, "k": k, "v": v, **extras}, torch.zeros(*q.shape[:3], v.shape[-1]).to(q), None, options)


def build(target: Target, sizes: Sizes = Sizes(), **features: Any) -> Decoding:
    """A case of normal numbers. `alibi`, `sinks` and `tree` ("one" or "each") are switches; the rest are options."""
    s = sizes
    dim_v = s.dim if s.dim_v is None else s.dim_v
    batch = len(s.lengths)
    make = {"like": target, "dtype": s.dtype}
    tensors = {"q": normal(batch, s.heads, s.n_q, s.dim, seed=1, **make)}
    sequences = [
        {
            "k": normal(1, s.kv_heads, n, s.dim, seed=100 + b, **make),
            "v": normal(1, s.kv_heads, n, dim_v, seed=200 + b, **make),
        }
        for b, n in enumerate(s.lengths)
    ]
    tensors |= _per_head(target, s, features)
    tree = features.pop("tree", None)
    if tree is not None:
        drawn = normal(*((batch,) if tree == "each" else ()), s.n_q, s.n_q, like=target, seed=9) > 0
        tensors["tree_mask"] = drawn.tril() | torch.eye(s.n_q, dtype=torch.bool, device=target.device)
    before = [n - s.appended for n in s.lengths]
    tensors["cache_seqlens"] = torch.tensor(before, dtype=torch.int32, device=target.device)
    for name, columns in (("k", s.dim), ("v", dim_v)):
        tensors |= _cache(target, s, name, columns, sequences)
    return Decoding(s, tensors, features, sequences)


def _per_head(target: Target, s: Sizes, features: dict[str, Any]) -> dict[str, Tensor]:
    tensors = {}
    if features.pop("alibi", False):
        tensors["alibi_slopes"] = 0.5 ** torch.arange(1, s.heads + 1, device=target.device, dtype=torch.float32)
    if features.pop("sinks", False):
        tensors["sinks"] = normal(s.heads, like=target, seed=8)
    return tensors


def _cache(target: Target, s: Sizes, name: str, columns: int, sequences: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The cache of keys or values with all but the appended rows, those rows, and the block table."""
    batch, page = len(s.lengths), s.capacity if s.page is None else s.page
    per_sequence = -(-s.capacity // page)
    count = batch if s.page is None else batch * per_sequence + 3
    cache = torch.full((count, s.kv_heads, page, columns), torch.nan, dtype=s.dtype, device=target.device)
    where = torch.arange(count)[:, None] if s.page is None else _pages(batch, per_sequence)
    table = torch.tensor(NOWHERE).repeat(batch, per_sequence)[:, :per_sequence].clone()
    for b, rows in enumerate(sequences):
        n = s.lengths[b] - s.appended
        for at in range(0, s.lengths[b], page):
            table[b, at // page] = where[b, at // page]
            end = min(at + page, n)
            if at < end:
                cache[where[b, at // page], :, : end - at] = rows[name][0, :, at:end]
    tensors = {f"{name}_cache": cache}
    if s.appended:
        fresh = [rows[name][:, :, rows[name].shape[2] - s.appended :] for rows in sequences]
        tensors[f"{name}_new"] = torch.cat(fresh)
    if s.page is not None:
        tensors["block_table"] = table.to(target.device, torch.int32)
    return tensors


def _pages(batch: int, per_sequence: int) -> Tensor:
    """Pages in no order; the first three of all are nobody's."""
    generator = torch.Generator().manual_seed(10)
    return (torch.randperm(batch * per_sequence, generator=generator) + 3).view(batch, per_sequence)


def skip_where_it_objects(target: Target, case: Decoding) -> None:
    """Skip, with the reasons, where a fast backend declines the case; the specification may not decline any."""
    given = {name: case.tensors.get(name) for name in CacheTensors._fields}
    options = DecodeOptions.of(True, None, None, None, case.options.get("num_splits", 0), False, False)
    reasons = registry.reasons_against(target.name, caches.describe(CacheTensors.of(**given), options))
    if reasons and target.name != "eager":
        pytest.skip(f"{target.name} objects: {'; '.join(reasons)}")


def run(target: Target, case: Decoding, **options: Any) -> Result:
    """What the package returns for a case."""
    skip_where_it_objects(target, case)
    out, lse = ioattn.attention_decode(
        **case.tensors, **{**case.options, **options}, return_lse=True, backend=target.name
    )
    return {"out": out, "lse": lse}


def check(target: Target, case: Decoding, **options: Any) -> Result:
    """Run a case and compare every sequence with float64."""
    case = case.copied()
    result = run(target, case, **options)
    assert result["out"].dtype == case.sizes.dtype
    assert result["lse"].dtype == (torch.float64 if case.sizes.dtype == torch.float64 else torch.float32)
    compare(result, case)
    return result


def compare(result: Result, case: Decoding) -> None:
    """Fail unless every sequence of a result is within its tolerance."""
    for b in range(len(case.sizes.lengths)):
        try:
            assert_close({name: x[b : b + 1] for name, x in result.items()}, case.dense(b))
        except AssertionError as error:
            raise AssertionError(f"sequence {b} of {case.sizes.lengths[b]} keys: {error}") from None
