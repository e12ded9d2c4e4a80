"""The public operations: they turn arguments into a description and call the operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ioattn import cache_ops, caches, ops, registry
from ioattn.caches import CacheTensors, DecodeOptions
from ioattn.problem import Align, Options, Precision, Tensors

Window = tuple[int | None, int | None]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | Align = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    precision: Precision | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention in O(N) memory, differentiable in q, k, v, bias and sinks.

        S = scale * Q K^T -> softcap * tanh(S / softcap) -> S - slope * |i + Nk - Nq - j| -> S + bias -> mask
        out = softmax(S) V        lse = log(rowsum(exp(S)))

    Args:
        q: queries, `(B, H, Nq, D)`, float16, bfloat16, float32 or float64, any strides.
        k: keys, `(B, Hk, Nk, D)`, q's dtype. Query head h reads key/value head `h // (H // Hk)`.
        v: values, `(B, Hk, Nk, Dv)`, q's dtype.
        causal: True or "bottom-right": query i sees key j when `j <= i + Nk - Nq`. "top-left": when `j <= i`.
        window: (left, right), inclusive: query i, moved as for `causal`, sees keys `i - left` to `i + right`; None is
            unbounded on that side.
        scale: factor of Q K^T; default `1 / sqrt(D)`. Zero and negative values work.
        softcap: bound of the scores, positive.
        alibi_slopes: one slope per query head, `(H,)`; not differentiable.
        bias: added to the scores, broadcastable to `(B, H, Nq, Nk)` except for the keys; q's dtype or float32.
        mask: bool, True = visible, broadcastable like bias.
        sinks: one logit per query head, `(H,)`: exp(sink) joins the denominator and has no value.
        return_lse: also return the log-sum-exp, which is differentiable too.
        deterministic: bitwise equal gradients from run to run, or an error where a backend cannot.
        precision: "tf32" lets a backend round the operands of float32 products to 11 bits, where that is faster; it may
            be more accurate. None: float32's own accuracy.
        backend: a name from `ioattn.registry.names()`; None chooses the first that takes the problem.

    Returns:
        out `(B, H, Nq, Dv)`, q's dtype and dimension order; with `return_lse` also lse `(B, H, Nq)`, float32 (float64
        for float64 inputs), natural logarithm. A query that sees no key has out 0, lse -inf and gradients 0.

    Raises:
        ValueError, TypeError: naming the argument, what it is and what it must be.
        UnsupportedProblemError: if the named backend does not take the problem; a ValueError with the reasons.

    Example:
        >>> q, k, v = torch.randn(3, 2, 8, 1024, 64).unbind()
        >>> attention(q, k, v, causal=True).shape
        torch.Size([2, 8, 1024, 64])

    Source: Dao, Fu, Ermon, Rudra, Re 2022 (arXiv 2205.14135), Theorem 1; Dao 2023 (arXiv 2307.08691), Algorithms 1, 2.
    """
    options = Options.of(causal, window, scale, softcap, deterministic).at(precision)
    if bias is None and mask is None and alibi_slopes is None and sinks is None:
        again = ops.attend_again(q, k, v, options, backend)
        if again is not None:
            return again if return_lse else again[0]
    tensors = Tensors.of(q, k, v, bias=bias, mask=mask, alibi_slopes=alibi_slopes, sinks=sinks)
    return _attend(tensors, options, backend, return_lse)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool | Align = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    precision: Precision | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention within each of B sequences that lie one after another, without padding.

        out[a:b] = attention(q[a:b], k[c:d], v[c:d])  for a, b = cu_seqlens_q[s : s + 2], c, d = cu_seqlens_k[s : s + 2]

    Args:
        q: queries of all sequences, `(Tq, H, D)`.
        k: keys, `(Tk, Hk, D)`.
        v: values, `(Tk, Hk, Dv)`.
        cu_seqlens_q: int32 `(B + 1,)` on q's device, from 0, not decreasing. Rows past the last offset are slack: they
            are not read, their output and gradients are 0 and their lse is -inf. Sequences may be empty.
        cu_seqlens_k: the same for keys and values; lengths may differ from the queries'.
        max_seqlen_q: the longest query sequence. On a GPU, giving both lengths avoids a wait for the device and, with
            it, the check of the offsets' values; on a CPU they are always checked.
        max_seqlen_k: the longest key sequence.
        causal, window, scale, softcap, alibi_slopes, sinks, return_lse: as in `attention`, with Nq and Nk the lengths
            of each sequence.
        deterministic, precision, backend: as in `attention`.

    Returns:
        out `(Tq, H, Dv)`; with `return_lse` also lse `(H, Tq)`, float32, natural logarithm.

    Raises:
        ValueError, TypeError: naming the argument, what it is and what it must be.

    Example:
        >>> q = k = v = torch.randn(10, 4, 32)
        >>> offsets = torch.tensor([0, 3, 3, 10], dtype=torch.int32)
        >>> attention_varlen(q, k, v, offsets, offsets, causal=True).shape
        torch.Size([10, 4, 32])

    Source: Dao 2023 (arXiv 2307.08691), section 3.2, applied to each sequence.
    """
    tensors = Tensors.of(
        q,
        k,
        v,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
    )
    options = Options.of(causal, window, scale, softcap, deterministic, max_seqlen_q, max_seqlen_k).at(precision)
    return _attend(tensors, options, backend, return_lse)


def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | int,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    block_table: Tensor | None = None,
    causal: bool = True,
    window: Window | None = None,
    tree_mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    num_splits: int = 0,
    check: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of a few new queries over a key/value cache, split over the keys; not differentiable.

        K_b = the first L_b rows of sequence b        L_b = cache_seqlens[b] + rows of k_new
        out[b] = attention(q[b], K_b, V_b, causal=True)

    With k_new and v_new, their row `i` is first written to row `cache_seqlens[b] + i` of the cache, in place.

    Args:
        q: queries of the newest tokens, `(B, H, Nq, D)`, float16, bfloat16, float32 or float64, any strides.
        k_cache: `(B, Hk, N, D)`; paged: `(pages, Hk, page, D)`, a page of a power of two rows, at least 16. q's dtype,
            any strides: a cache laid out as `(pages, page, Hk, D)` is passed as `cache.transpose(1, 2)`.
        v_cache: the same with Dv columns.
        cache_seqlens: int32 `(B,)` on q's device, how many rows each sequence has before the append; an int means all.
            On a GPU lengths are read by the kernels, nobody waits for them.
        k_new: rows to append, `(B, Hk, rows, D)`; `cache_seqlens` itself is not changed.
        v_new: the same with Dv columns.
        block_table: int32 `(B, T)`: row `j` of sequence b is row `j % page` of page `block_table[b, j // page]`.
            Entries past a sequence's length are not read.
        causal: query i sees key j when `j <= i + L_b - Nq`: the last query sees all keys.
        window: (left, right), as in `attention`; it counts rows of the cache.
        tree_mask: bool `(Nq, Nq)` or `(B, Nq, Nq)`, instead of `causal` among the last Nq rows: query i sees row
            `L_b - Nq + j` when `tree_mask[i, j]`. For drafted tokens that form a tree: True for a token's ancestors and
            itself.
        scale, softcap, alibi_slopes, sinks: as in `attention`; ALiBi's distance, too, counts rows of the cache.
        num_splits: how many pieces each sequence's keys are cut into, to run side by side. 0 chooses from shapes alone,
            so that equal shapes give equal bits.
        check: on a GPU, wait for lengths and pages and raise ValueError for those out of range. Without it such a
            sequence gets NaN in out and lse, and nothing outside of the cache is read or written. On a CPU they are
            always checked.
        return_lse: also return the log-sum-exp.
        backend: a name from `ioattn.registry.names()`; None chooses the first that takes the problem.

    Returns:
        out `(B, H, Nq, Dv)`, q's dtype and dimension order; with `return_lse` also lse `(B, H, Nq)`, float32 (float64
        for float64 inputs), natural logarithm. A query that sees no key has out 0 and lse -inf.

    Raises:
        ValueError, TypeError: naming the argument, what it is and what it must be.
        UnsupportedProblemError: if the named backend does not take the problem; a ValueError with the reasons.

    Example:
        >>> k_cache, v_cache = torch.zeros(2, 1, 4, 256, 64).unbind()  # one sequence, 4 heads, room for 256 tokens
        >>> q, k_new, v_new = torch.randn(1, 8, 1, 64), torch.randn(1, 4, 1, 64), torch.randn(1, 4, 1, 64)
        >>> attention_decode(q, k_cache, v_cache, cache_seqlens=0, k_new=k_new, v_new=v_new).shape
        torch.Size([1, 8, 1, 64])

    Source: Dao, Haziza, Massa, Sizov 2023, "Flash-Decoding for long-context inference"; Kwon et al. 2023 (arXiv
    2309.06180) for pages; Miao et al. 2023 (arXiv 2305.09781) for trees.
    """
    tensors = CacheTensors.of(
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        block_table=block_table,
        tree_mask=tree_mask,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
    )
    options = DecodeOptions.of(causal, window, scale, softcap, num_splits, check, tree_mask is not None)
    if backend is not None:
        registry.check_name(backend)
    _refuse_gradients(tensors, k_new, v_new)
    if (k_new is None) != (v_new is None):
        raise ValueError(f"{'v_new' if v_new is None else 'k_new'} is None; k_new and v_new must be given together")
    if k_new is not None and v_new is not None:
        cache_ops.append(tensors, k_new, v_new, options.checked, backend)
        options = options._replace(appended=k_new.shape[2])
    out, lse = cache_ops.decode(tensors, options, backend)
    return (out, lse) if return_lse else out


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | Align = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    deterministic: bool = False,
    precision: Precision | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    **tensors: Tensor | None,
) -> registry.Explanation:
    """Which backend `attention`, `attention_varlen` or `attention_decode` would run here, and why no other.

    Args:
        q, k, v, causal, window, scale, softcap, deterministic, precision: as in `attention`.
        max_seqlen_q, max_seqlen_k: as in `attention_varlen`.
        tensors: bias, mask, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k. With cache_seqlens, k and v are caches,
            and block_table and tree_mask may be given, too.

    Returns:
        An `Explanation` with `problem`, `chosen` and `verdicts`; printing it gives one line per backend.

    Raises:
        ValueError, TypeError: as `attention` does.

    Example:
        >>> q = torch.randn(1, 2, 16, 64)
        >>> "eager" in str(explain(q, q, q, causal=True))
        True
    """
    cached = "cache_seqlens" in tensors
    known = CacheTensors._fields if cached else Tensors._fields
    unknown = sorted(set(tensors) - set(known))
    if unknown:
        raise TypeError(f"explain got {', '.join(unknown)}; tensors must be among {', '.join(known[3:])}")
    if cached:
        tree = tensors.get("tree_mask") is not None
        given = DecodeOptions.of(causal, window, scale, softcap, 0, False, tree)  # type: ignore[arg-type]
        return registry.explain(caches.describe(CacheTensors.of(q, k, v, **tensors), given))
    options = Options.of(causal, window, scale, softcap, deterministic, max_seqlen_q, max_seqlen_k).at(precision)
    return registry.explain(ops.describe(Tensors.of(q, k, v, **tensors), options))


def _refuse_gradients(tensors: CacheTensors, *new_rows: Tensor | None) -> None:
    """Decoding is inference: a gradient that would be wrong, or silently missing, is an error."""
    if ops.requires_grad((*tensors, *new_rows)):
        raise ValueError("an input requires a gradient; attention_decode has none: detach it, or use torch.no_grad()")


def _attend(tensors: Tensors, options: Options, backend: str | None, return_lse: bool) -> Any:
    slopes = tensors.alibi_slopes
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError(ops.NO_SLOPE_GRADIENT)
    if backend is not None:
        registry.check_name(backend)
    out, lse = ops.attend(tensors, options, backend)
    return (out, lse) if return_lse else out
