"""Device functions of the Hopper backward that are plain integer arithmetic, run in Python."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

FIELDS = {
    "KeyTile": "alive batch head k_start k_offset len_k len_q row part parts slot",
    "Queries": "first before edges whole whole_end turned",
    "Seen": "first start whole whole_end end last",
}
"""What device classes are made of, in order."""


class Pointer:
    """Numbers in memory, from one of them on."""

    def __init__(self, numbers: list[int], at: int = 0) -> None:
        self.numbers, self.at = numbers, at

    def __add__(self, by: int) -> Pointer:
        return Pointer(self.numbers, self.at + by)


class Plain:
    """An object whose methods are a device class's, run as Python."""

    def __init__(self, kind: Any, **fields: Any) -> None:
        self._kind = kind
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Any:
        return functools.partial(getattr(self._kind, name).fn, self)


def constructor(name: str, kind: Any) -> Callable[..., Plain]:
    """What stands in for a device class."""
    return lambda *given: Plain(kind, **dict(zip(FIELDS[name].split(), given, strict=True)))


def choose(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(condition, torch.Tensor):
        return torch.where(condition, torch.as_tensor(a), torch.as_tensor(b))
    return a if condition else b


NUMBERS = SimpleNamespace(
    where=choose,
    minimum=min,
    maximum=max,
    sum=lambda x, axis: int(x.sum()),
    max=lambda x, axis: int(x.max()),
    load=lambda pointer: pointer.numbers[pointer.at],
    to_tensor=lambda x: x,
    constexpr=lambda x: x,
)
"""What device functions know as `gl`, for numbers."""
