"""Plans: what follows from the layouts of a call's tensors and from its options, made once and looked up afterwards.

A plan is found by a key of layouts. The plan of the last call with the same options is recognised sooner, by guards of
torch's compiler: the one C call per tensor with which compiled code makes sure that it may run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_PLANS = 4096


class Layout(NamedTuple):
    """How memory of a result lies, and what allocates it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    allocate: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor] | None

    @classmethod
    def of(cls, x: Tensor) -> Layout:
        """The layout of a tensor."""
        device = x.device
        known = device.type == "cpu" or (device.type == "cuda" and torch.cuda.device_count() == 1)
        # What torch's own compiler allocates with, on the current device: 2 us where `torch.empty` takes 4 (H200).
        allocate = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None) if known else None
        return cls(tuple(x.shape), x.stride(), x.dtype, device, allocate)

    def empty(self) -> Tensor:
        """New memory that lies so."""
        shape, strides, dtype, device, allocate = self
        if allocate is not None:
            return allocate(shape, strides, dtype)
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def layout_key(tensors: Sequence[Tensor | None]) -> Any:
    """Everything about tensors but their numbers; whether they start at a multiple of 16 bytes depends on the address.

    A compiled kernel takes these for granted, so that what was checked or prepared holds for every equal key.
    """
    return tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15) for x in tensors])


@dataclass(slots=True)
class Plan:
    """A checked call, ready for tensors of the layouts that it was made for."""

    results: tuple[Any, ...]
    """A `Layout` each, or None for a gradient that nobody wants."""
    run: Callable[..., None]
    seen: tuple[Any, Any, Any, bool] | None = None
    """What q, k and v of the last plain call were like, as guards of torch's compiler; whether one has a gradient."""

    def watch(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Remember what these are like: `is_plain` has found nothing, and all else about them is in the plan's key."""
        if self.recognised(q, k, v) is None and _are_aligned(q, k, v):
            guards = [guard for x in (q, k, v) for guard in _guards_of(x)]
            if len(guards) == 3:
                self.seen = (*guards, q.requires_grad or k.requires_grad or v.requires_grad)

    def recognised(self, q: Any, k: Any, v: Any) -> bool | None:
        """None unless these are like those that were watched, and no mode, transform or autocast sees them.

        Else whether one of them has a gradient. A guard compares type, dispatch keys with those that the thread adds,
        dtype, device, sizes, strides and `requires_grad`.
        """
        if self.seen is None:
            return None
        one, two, three, has_gradients = self.seen
        alike = one.check(q) and two.check(k) and three.check(v) and _are_aligned(q, k, v)
        return has_gradients if alike else None


def _are_aligned(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 == 0


def _guards_of(x: Tensor) -> Iterator[Any]:
    """The guard that torch's compiler would put before code for this tensor; none where torch has another kind."""
    kind: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)
    with suppress(Exception):
        guard = kind(x, dynamic_dims_sizes=[list(x.shape)], dynamic_dims_strides=[list(x.stride())])
        if guard.check(x):
            yield guard


def remember(plans: dict[Any, Plan], key: Any, plan: Plan) -> Plan:
    """Keep a plan, and forget all others before there are too many."""
    if len(plans) >= MAX_PLANS:
        plans.clear()
    plans[key] = plan
    return plan
