"""Decoding over a key/value cache: its tensors, its options, every check of them, and the append of new rows.

The counterpart of `problem.py` for queries that meet a cache. A contiguous cache is a row of pages that hold one whole
sequence each, so that one set of formulas serves both: key `j` of sequence `b` lies in row `j % page` of page
`block_table[b, j // page]`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ioattn.masks import Band
from ioattn.problem import (
    DTYPES,
    Cache,
    Options,
    Problem,
    check_per_head,
    check_tensor,
    row_alignment,
)

MIN_PAGE = 16
"""The smallest page, in keys."""

MAX_SPLITS = 2**15
"""More pieces than that no GPU's grid takes in its second dimension."""


class CacheTensors(NamedTuple):
    """The inputs of one decoding call.

    q `(B, H, Nq, D)`. Contiguous: k_cache `(B, Hk, N, D)`, v_cache `(B, Hk, N, Dv)`. Paged: `(pages, Hk, page, D)` and
    `(pages, Hk, page, Dv)` with block_table int32 `(B, T)`. cache_seqlens int32 `(B,)`. tree_mask bool `(B, Nq, Nq)` or
    `(1, Nq, Nq)`. alibi_slopes and sinks `(H,)`. Strides are free.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor
    block_table: Tensor | None = None
    tree_mask: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None

    @classmethod
    def of(
        cls, q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Any, **extras: Tensor | None
    ) -> CacheTensors:
        """The inputs with tree_mask seen as 3-D and one length for all seen as one per sequence."""
        for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
            check_tensor(name, x, "a torch.Tensor")
        for name, extra in extras.items():
            if extra is not None:
                check_tensor(name, extra, "a torch.Tensor or None")
        tree = extras.get("tree_mask")
        if tree is not None and tree.dim() == 2:
            extras["tree_mask"] = tree[None]
        return cls(q, k_cache, v_cache, _lengths(cache_seqlens, q), **extras)

    @property
    def page(self) -> int:
        """How many keys lie in one stretch of memory."""
        return self.k_cache.shape[2]

    @property
    def capacity(self) -> int:
        """The most keys of one sequence."""
        return self.page if self.block_table is None else self.page * self.block_table.shape[1]


class DecodeOptions(NamedTuple):
    """The settings of one decoding call that are not tensors, in the order of the registered operator's arguments."""

    lo: int | None = None
    hi: int | None = None
    scale: float | None = None
    softcap: float | None = None
    appended: int = 0
    splits: int = 0
    checked: bool = False

    @classmethod
    def of(
        cls,
        causal: bool,
        window: tuple[int | None, int | None] | None,
        scale: float | None,
        softcap: float | None,
        num_splits: int,
        check: bool,
        tree: bool,
    ) -> DecodeOptions:
        """The options behind the public arguments; raises ValueError or TypeError for what they cannot be.

        A tree says itself what is causal.
        """
        if window is None and not torch.compiler.is_compiling():
            try:
                return _usual_options(causal, scale, softcap, num_splits, check, tree)
            except TypeError:
                pass  # of a wrong type or without a hash; below it is said which
        return cls._checked(causal, window, scale, softcap, num_splits, check, tree)

    @classmethod
    def _checked(
        cls,
        causal: bool,
        window: tuple[int | None, int | None] | None,
        scale: float | None,
        softcap: float | None,
        num_splits: int,
        check: bool,
        tree: bool,
    ) -> DecodeOptions:
        for name, flag in (("causal", causal), ("check", check)):
            if not isinstance(flag, bool):
                raise TypeError(f"{name} is {flag!r}; it must be True or False")
        band = Options.of(causal and not tree, window, scale, softcap, deterministic=False)
        if isinstance(num_splits, bool) or not isinstance(num_splits, int):
            raise TypeError(f"num_splits is {num_splits!r}; it must be an int, 0 to choose")
        if not 0 <= num_splits <= MAX_SPLITS:
            raise ValueError(f"num_splits is {num_splits}; it must be from 0 (to choose) to {MAX_SPLITS}")
        return cls(band.lo, band.hi, scale, softcap, 0, num_splits, check)


@lru_cache(maxsize=1024, typed=True)
def _usual_options(
    causal: bool, scale: float | None, softcap: float | None, num_splits: int, check: bool, tree: bool
) -> DecodeOptions:
    return DecodeOptions._checked(causal, None, scale, softcap, num_splits, check, tree)


def describe(tensors: CacheTensors, options: DecodeOptions) -> Problem:
    """The problem of these inputs, checked; raises ValueError or TypeError naming the argument at fault."""
    check(tensors)
    q, k, v = tensors[:3]
    len_q, capacity = q.shape[2], tensors.capacity
    tree = tensors.tree_mask
    return Problem(
        batch=q.shape[0],
        heads=q.shape[1],
        kv_heads=k.shape[1],
        len_q=len_q,
        len_k=capacity,
        dim=q.shape[-1],
        dim_v=v.shape[-1],
        dtype=q.dtype,
        device=q.device,
        scale=q.shape[-1] ** -0.5 if options.scale is None else float(options.scale),
        band=Band(options.lo, options.hi).within(len_q + capacity),
        softcap=None if options.softcap is None else float(options.softcap),
        alibi=tensors.alibi_slopes is not None,
        sinks=tensors.sinks is not None,
        alignment=row_alignment(q, k, v),
        cache=Cache(
            page=None if tensors.block_table is None else tensors.page,
            appended=options.appended,
            splits=options.splits,
            tree=None if tree is None else tree.shape[0],
            checked=options.checked,
        ),
    )


def check(tensors: CacheTensors) -> None:
    """Raise ValueError or TypeError, naming the argument, unless shapes, types and devices fit."""
    _check_caches(tensors)
    _check_places(tensors)
    q, tree = tensors.q, tensors.tree_mask
    for name, value in (("alibi_slopes", tensors.alibi_slopes), ("sinks", tensors.sinks)):
        check_per_head(name, value, q)
    if tree is None:
        return
    if tree.dtype != torch.bool:
        raise TypeError(f"tree_mask is {tree.dtype}; it must be a bool tensor")
    if tree.dim() != 3 or tree.shape[0] not in (1, q.shape[0]) or tree.shape[1:] != (q.shape[2], q.shape[2]):
        raise ValueError(
            f"tree_mask has shape {tuple(tree.shape)}; it must be (Nq, Nq) or (B, Nq, Nq) with B = {q.shape[0]} and "
            f"Nq = {q.shape[2]}"
        )
    if tree.device != q.device:
        raise ValueError(f"tree_mask is on {tree.device}; it must be on q's device, {q.device}")


def check_new_rows(tensors: CacheTensors, k_new: Tensor, v_new: Tensor) -> None:
    """Raise ValueError or TypeError unless the new rows fit the cache's heads, columns, type and device."""
    for name, x, cache in (("k_new", k_new, tensors.k_cache), ("v_new", v_new, tensors.v_cache)):
        if x.dtype != cache.dtype:
            raise TypeError(f"{name} is {x.dtype}; it must have the cache's dtype, {cache.dtype}")
        if x.device != cache.device:
            raise ValueError(f"{name} is on {x.device}; it must be on the cache's device, {cache.device}")
        wanted = (tensors.q.shape[0], cache.shape[1], cache.shape[-1])
        if x.dim() != 4 or (x.shape[0], x.shape[1], x.shape[3]) != wanted:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; it must be (B, Hk, new rows, columns) = ({wanted[0]}, "
                f"{wanted[1]}, new rows, {wanted[2]})"
            )
    if v_new.shape[2] != k_new.shape[2]:
        raise ValueError(f"v_new has {v_new.shape[2]} rows; it must have as many as k_new, {k_new.shape[2]}")
    if k_new.shape[2] > tensors.capacity:
        raise ValueError(f"k_new has {k_new.shape[2]} rows; a sequence of the cache holds {tensors.capacity}")


def check_values(tensors: CacheTensors, appended: int) -> None:
    """Raise ValueError unless every length fits the cache and every page in use exists; on a GPU this waits for it."""
    lengths, table, capacity = tensors.cache_seqlens, tensors.block_table, tensors.capacity
    for b, length in enumerate(lengths.tolist()):
        if not 0 <= length <= capacity - appended:
            behind = f" behind which {appended} are appended" if appended else ""
            raise ValueError(
                f"cache_seqlens[{b}] is {length}{behind}; it must be at least 0 and fit the {capacity} rows of a "
                "sequence"
            )
    if table is None:
        return
    pages = tensors.k_cache.shape[0]
    used = (torch.arange(table.shape[1], device=table.device) * tensors.page)[None] < lengths[:, None] + appended
    wrong = (used & ((table < 0) | (table >= pages))).nonzero().tolist()
    if wrong:
        b, column = wrong[0]
        raise ValueError(
            f"block_table[{b}, {column}] is {int(table[b, column])}; it must be from 0 to {pages - 1}, the last page"
        )


def append(tensors: CacheTensors, k_new: Tensor, v_new: Tensor) -> None:
    """Write row `i` of k_new and v_new to row `cache_seqlens + i` of each sequence, in place; the lengths stay."""
    rows = torch.arange(k_new.shape[2], device=k_new.device)
    at = tensors.cache_seqlens.long()[:, None] + rows  # [B, new rows]
    pages = torch.arange(at.shape[0], device=at.device)[:, None].expand_as(at)
    if tensors.block_table is not None:
        pages = tensors.block_table.long().gather(1, at // tensors.page)
    for cache, fresh in ((tensors.k_cache, k_new), (tensors.v_cache, v_new)):
        # Two index tensors around a slice: their dimensions come first, [B, new rows, Hk, columns].
        cache[pages, :, at % tensors.page] = fresh.transpose(1, 2)


def rows_of(tensors: CacheTensors, b: int, length: int) -> tuple[Tensor, Tensor]:
    """The first `length` keys and values of a sequence, `(1, Hk, length, columns)`; out of pages a copy."""
    if tensors.block_table is None:
        return tensors.k_cache[b : b + 1, :, :length], tensors.v_cache[b : b + 1, :, :length]
    pages = tensors.block_table[b, : -(-length // tensors.page)].long()
    k, v = (
        cache.index_select(0, pages).transpose(0, 1).flatten(1, 2)[None, :, :length]
        for cache in (tensors.k_cache, tensors.v_cache)
    )
    return k, v


def _lengths(cache_seqlens: Any, q: Tensor) -> Tensor:
    if isinstance(cache_seqlens, int) and not isinstance(cache_seqlens, bool):
        return torch.full(q.shape[:1], cache_seqlens, dtype=torch.int32, device=q.device)
    check_tensor("cache_seqlens", cache_seqlens, "an int32 torch.Tensor of shape (B,), or an int")
    lengths: Tensor = cache_seqlens
    return lengths


def _check_caches(tensors: CacheTensors) -> None:
    q, k, v = tensors[:3]
    for name, x in (("q", q), ("k_cache", k), ("v_cache", v)):
        layout = (
            "B, H, Nq, D" if name == "q" else "pages, Hk, page, D" if tensors.block_table is not None else "B, Hk, N, D"
        )
        if x.dim() != 4:
            raise ValueError(f"{name} has {x.dim()} dimensions; it must have 4: ({layout})")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} is {x.dtype}; it must be float16, bfloat16, float32 or float64")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} is {x.dtype}; it must have q's dtype, {q.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}; it must be on q's device, {q.device}")
        if x.shape[1] == 0 or x.shape[-1] == 0:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must have at least one head and one column")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"v_cache has shape {tuple(v.shape)}; all but its columns must be k_cache's, {tuple(k.shape)}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k_cache has head dimension {k.shape[-1]}; it must have q's, {q.shape[-1]}")
    if q.shape[1] % k.shape[1] != 0:
        raise ValueError(f"q has {q.shape[1]} heads; it must have a multiple of the {k.shape[1]} heads of the cache")


def _check_places(tensors: CacheTensors) -> None:
    """Lengths and block table: where the rows of a sequence are."""
    q, k, lengths, table = tensors.q, tensors.k_cache, tensors.cache_seqlens, tensors.block_table
    batch = q.shape[0]
    for name, x, form in (
        ("cache_seqlens", lengths, f"(B,) = ({batch},)"),
        ("block_table", table, f"(B, T) = ({batch}, T)"),
    ):
        if x is None:
            continue
        if x.dtype != torch.int32:
            raise TypeError(f"{name} is {x.dtype}; it must be an int32 tensor")
        if x.dim() != (1 if name == "cache_seqlens" else 2) or x.shape[0] != batch:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {form}")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}; it must be on q's device, {q.device}")
    if table is None and k.shape[0] != batch:
        raise ValueError(f"k_cache has batch size {k.shape[0]}; without a block_table it must have q's, {batch}")
    page = k.shape[2]
    if table is not None and (page < MIN_PAGE or page & (page - 1) != 0):
        raise ValueError(f"k_cache has pages of {page} rows; they must have a power of two, at least {MIN_PAGE}")
