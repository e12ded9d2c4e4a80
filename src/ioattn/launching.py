"""Starts compiled kernels by Triton's launchers, from 3.6 on; Gluon's, which take the copy engine's maps, by address.

Triton's own way to a kernel asks each tensor for its address and the driver about each address, makes the copy engine's
tensor maps anew, and calls hooks that nobody has set. Here arguments are written down once, as an expression in the
addresses of tensors, and later calls evaluate it. Kernels without such maps start sooner: see `driver.py`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs

try:
    from triton.backends.nvidia.driver import make_tensordesc_arg
except ImportError:
    make_tensordesc_arg = None

Arguments = tuple[Any, ...]

MAX_MAPS = 1024
"""Addresses of one operand whose tensor maps are remembered, 256 bytes each."""

MAX_KERNELS = 2048
"""Loaded kernels that are remembered."""


class Launch:
    """A compiled kernel, loaded on the current device, on so many programs; it starts on that device's stream."""

    def __init__(self, kernel: Any, programs: int) -> None:
        self.kernel, self.programs = kernel, programs
        self.run, self.function, self.packed = kernel.run, kernel.function, kernel.packed_metadata
        driver = triton.runtime.driver.active
        self.stream_of, self.device = driver.get_current_stream, driver.get_current_device()

    def __call__(self, *arguments: Any) -> None:
        """Start the kernel, whose device is still the current one."""
        if is_watched():
            self.kernel[(self.programs, 1, 1)](*arguments)
            return
        stream = self.stream_of(self.device)
        self.run(self.programs, 1, 1, stream, self.function, self.packed, None, None, None, *arguments)


def is_watched() -> bool:
    """Whether someone, a profiler for one, wants to be told of each launch."""
    hooks = knobs.runtime
    return bool(getattr(hooks.launch_enter_hook, "calls", True) or getattr(hooks.launch_exit_hook, "calls", True))


class Descriptor(NamedTuple):
    """A tensor as the copy engine sees it: what Triton's launcher reads of a descriptor that the host has made."""

    base: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str = "zero"
    round_f32_to_tf32: bool = False


class _Address(int):
    """An address that Triton takes for a tensor."""

    def data_ptr(self) -> int:
        return self


class _TensorMaps(dict[int, Any]):
    """The copy engine's tensor maps of one operand, by address."""

    def __init__(self, descriptor: Descriptor, tile: Any) -> None:
        super().__init__()
        self.descriptor, self.tile = descriptor._replace(base=None), tile

    def __missing__(self, address: int) -> Any:
        if len(self) >= MAX_MAPS:
            self.clear()
        descriptor = self.descriptor._replace(base=_Address(address))
        more = [None] * (make_tensordesc_arg.__code__.co_argcount - 2)  # one since Triton 3.9
        found = self[address] = make_tensordesc_arg(descriptor, self.tile, *more)[0]
        return found


class Call:
    """A kernel on its arguments, which `describe` makes of the tensors, and later calls of their addresses alone."""

    def __init__(
        self,
        kernel: Any,
        programs: int,
        describe: Callable[[Sequence[Any]], Arguments],
        tensors: Sequence[Tensor | None],
    ) -> None:
        signature = kernel.src.signature.values()

        def arguments(given: Sequence[Any]) -> Arguments:
            pairs = zip(describe(given), signature, strict=True)
            return tuple(x for x, kind in pairs if kind != "constexpr")

        written = by_address(arguments, tensors, kernel.metadata.tensordesc_meta or ())
        if written is None:
            raise ValueError(f"{kernel.name} is handed a tensor that is none of its call's")
        self.arguments = written
        device = triton.runtime.driver.active.get_current_device()
        self.launch = Launch(_with_tensor_maps(kernel, device), programs)

    def start(self, addresses: Sequence[int | None]) -> None:
        """Start the kernel on tensors that lie like those that it was made for."""
        self.launch(*self.arguments(addresses))


def addresses_of(tensors: Sequence[Tensor | None]) -> list[int | None]:
    """Where they start."""
    return [None if x is None else x.data_ptr() for x in tensors]


def by_address(
    describe: Callable[[Sequence[Any]], Arguments], tensors: Sequence[Tensor | None], tiles: Sequence[Any] = ()
) -> Callable[[Sequence[int | None]], Arguments] | None:
    """What `describe` makes of tensors of this layout, as a function of their addresses; None where it makes copies.

    It is an expression that is written down once: in a tenth of the time. `tiles` says what the copy engine moves for
    each descriptor.
    """
    apart = [None if x is None else x.detach() for x in tensors]
    places = {id(x): i for i, x in enumerate(apart) if x is not None}
    scope: dict[str, Any] = {}

    def written(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"at[{places[id(value)]}]"
        if isinstance(value, Descriptor):
            name, tile = f"maps_{len(scope)}", tiles[len(scope)]
            scope[name] = _TensorMaps(value, tile)
            return f"{name}[{written(value.base)}], {value.shape!r}, {value.strides!r}"
        return f"({''.join(written(x) + ',' for x in value)})" if isinstance(value, tuple) else repr(value)

    try:
        text = f"lambda at: {written(describe(apart))}"
    except KeyError:
        return None
    made: Callable[[Sequence[int | None]], Arguments] = eval(text, {"inf": math.inf, "nan": math.nan, **scope})
    return made


@lru_cache(maxsize=MAX_KERNELS)
def _with_tensor_maps(kernel: Any, device: int) -> Any:
    """A compiled kernel whose launcher takes no constants, and tensor maps instead of descriptors to make them of.

    There is one for each device, as Triton loads a kernel on one only; Triton 3.6 never unloads it.
    """
    signature: dict[str, Any] = {}
    for name, kind in kernel.src.signature.items():
        if isinstance(kind, str) and kind.startswith("tensordesc"):
            rank = kind[: kind.index("]")].count(",") + 1
            signature |= {name: "nvTmaDesc", f"{name}.shape": ("i32",) * rank, f"{name}.strides": ("i64",) * rank}
        elif kind != "constexpr":
            signature[name] = kind
    other = copy.copy(kernel)
    other.module = other.function = other._run = None
    other.src = SimpleNamespace(signature=signature, constants={}, fn=kernel.src.fn)
    other.metadata = kernel.metadata._replace(tensordesc_meta=None)
    return other


def on_device(device: torch.device, run: Callable[..., None]) -> Callable[..., None]:
    """`run` with the tensors' device as the current one, on which Triton launches."""
    if device.type != "cuda" or torch.cuda.device_count() == 1:
        return run

    def moved(*arguments: Any) -> None:
        if device.index == torch.cuda.current_device():
            run(*arguments)
            return
        with torch.cuda.device(device):
            run(*arguments)

    return moved
