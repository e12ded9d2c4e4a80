"""The registered operators of decoding, `ioattn::decode` and `ioattn::append`, and their fakes.

`append` writes new rows into the cache and says so in its schema, so that a compiler orders it before the `decode` that
reads them. Neither has a derivative: decoding is inference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ioattn import caches, registry
from ioattn.caches import CacheTensors, DecodeOptions
from ioattn.ops import as_written, empty_in_order, is_plain
from ioattn.plans import Layout, Plan, layout_key, remember

_TENSOR_COUNT = len(CacheTensors._fields)
_OPTION_COUNT = len(DecodeOptions._fields)

_library = torch.library.Library("ioattn", "FRAGMENT")
_library.define(
    "decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cache_seqlens, Tensor? block_table, Tensor? tree_mask, "
    "Tensor? alibi_slopes, Tensor? sinks, SymInt? lo, SymInt? hi, float? scale, float? softcap, SymInt appended, "
    "SymInt splits, bool checked, str? backend) -> (Tensor out, Tensor lse)"
)
_library.define(
    "append(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor cache_seqlens, Tensor? block_table, Tensor k_new, "
    "Tensor v_new, bool checked, str? backend) -> ()"
)


def decode(tensors: CacheTensors, options: DecodeOptions, backend: str | None) -> tuple[Tensor, Tensor]:
    """Attention of queries over a cache."""
    if is_plain(tensors):
        return _run_decode(tensors, options, backend)
    return _decode_op(*tensors, *options, backend)


def append(tensors: CacheTensors, k_new: Tensor, v_new: Tensor, checked: bool, backend: str | None) -> None:
    """Write new rows behind the lengths of a cache, in place."""
    given = (*tensors[:5], k_new, v_new)
    if is_plain(given):
        _run_append(tensors, k_new, v_new, checked, backend)
    else:
        caches.check(tensors)
        caches.check_new_rows(tensors, k_new, v_new)
        _append_op(*given, checked, backend)


_plans: dict[Any, Plan] = {}


def _plan_for(
    tensors: CacheTensors, options: DecodeOptions, backend: str | None, rows: tuple[Tensor, Tensor] | None = None
) -> Plan:
    """The plan of a decode, or with new rows that of their append."""
    key = (layout_key(tensors), options, backend, None if rows is None else layout_key(rows))
    plan = _plans.get(key)
    if plan is None:
        problem = caches.describe(tensors, options)
        if rows is not None:
            caches.check_new_rows(tensors, *rows)
        results = rows or _allocate(tensors)
        chosen = registry.choose(problem, backend)
        run = registry.prepare("append" if rows else "decode", chosen, problem, tensors, *results)
        plan = remember(_plans, key, Plan(tuple(map(Layout.of, results)), run))
    return plan


def _run_decode(tensors: CacheTensors, options: DecodeOptions, backend: str | None) -> tuple[Tensor, Tensor]:
    plan = _plan_for(tensors, options, backend)
    _check_values(tensors, options.appended, options.checked)
    out, lse = plan.results[0].empty(), plan.results[1].empty()
    plan.run(tensors, out, lse)
    return out, lse


def _run_append(tensors: CacheTensors, k_new: Tensor, v_new: Tensor, checked: bool, backend: str | None) -> None:
    appended = k_new.shape[2]
    plan = _plan_for(tensors, DecodeOptions(appended=appended, checked=checked), backend, (k_new, v_new))
    _check_values(tensors, appended, checked)
    plan.run(tensors, k_new, v_new)


def _check_values(tensors: CacheTensors, appended: int, checked: bool) -> None:
    """On a CPU nobody waits for lengths and pages, so they are always checked."""
    if checked or tensors.q.device.type == "cpu":
        caches.check_values(tensors, appended)


def _decode(*args: Any) -> tuple[Tensor, Tensor]:
    tensors, options = CacheTensors(*args[:_TENSOR_COUNT]), DecodeOptions(*args[_TENSOR_COUNT:-1])
    with as_written(tensors.q.device.type):
        return _run_decode(tensors, options, args[-1])


def _decode_fake(*args: Any) -> tuple[Tensor, Tensor]:
    tensors = CacheTensors(*args[:_TENSOR_COUNT])
    caches.check(tensors)
    return _allocate(tensors)


def _allocate(tensors: CacheTensors) -> tuple[Tensor, Tensor]:
    q = tensors.q
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return empty_in_order(q, tensors.v_cache.shape[-1]), torch.empty(q.shape[:-1], dtype=dtype, device=q.device)


def _append(*args: Any) -> None:
    *places, k_new, v_new, checked, backend = args
    _run_append(CacheTensors(*places), k_new, v_new, checked, backend)


def _append_fake(*args: Any) -> None:
    *places, k_new, v_new, _, _ = args
    tensors = CacheTensors(*places)
    caches.check(tensors)
    caches.check_new_rows(tensors, k_new, v_new)


_library.impl("decode", _decode, "CompositeExplicitAutograd")
_library.impl("append", _append, "CompositeExplicitAutograd")
torch.library.register_fake("ioattn::decode", _decode_fake, lib=_library)
torch.library.register_fake("ioattn::append", _append_fake, lib=_library)
_decode_op = torch.ops.ioattn.decode.default
_append_op = torch.ops.ioattn.append.default
