"""Starts compiled kernels by the CUDA driver's own call, on parameters that lie in memory already.

Triton's launcher is handed every number of every launch anew, and takes them out of nested tuples: 4.3 us per kernel of
forty arguments, without the driver's own time (2-core AVX-512 machine). Here they are written once, and a call writes
the addresses of its tensors, once for all of its kernels: an H200's host starts one kernel in 8 us, not 12, two in 13,
not 20.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

NUMBERS: dict[str, Any] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
"""What a number is in a kernel's parameters, by Triton's name of its type."""

SCRATCH = ("global_scratch_size", "profile_scratch_size")
"""Memories that Triton's launcher brings along, for what it adds to kernels on request."""

STARTS_EARLY = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_uint32), ("pad", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint32),
    )


class Queue:
    """Kernels that start one after the other on tensors that lie like those that they were compiled for."""

    def __init__(self, count: int) -> None:
        self.addresses: Any = (ctypes.c_uint64 * count)()
        self.launches: list[tuple[_Config, Any, Any, Any]] = []
        self.kept: list[Any] = []
        self.launch = _launch_function()
        self.lock = threading.Lock()

    def add(self, kernel: Any, programs: int, arguments: Iterable[Any], places: dict[int, int]) -> None:
        """A compiled kernel, loaded on the current device; `places` are those of the tensors, by their `id`.

        KeyError where an argument is none of these tensors, or a number of another kind, or where the kernel wants
        memory of Triton's.
        """
        wanted = [name for name in SCRATCH if getattr(kernel.metadata, name, 0)]
        if wanted:
            raise KeyError(wanted[0])
        parameters = []
        for kind, value in _flat(tuple(kernel.src.signature.values()), tuple(arguments)):
            if isinstance(value, Tensor):
                parameters.append(ctypes.addressof(self.addresses) + 8 * places[id(value)])
            else:
                self.kept.append(NUMBERS[kind](value))
                parameters.append(ctypes.addressof(self.kept[-1]))
        # Triton's two scratch memories.
        parameters += [ctypes.addressof(_NOTHING)] * 2
        warps, _, shared = kernel.packed_metadata
        config = _Config((programs, 1, 1), (32 * warps, 1, 1), shared)
        if kernel.metadata.launch_pdl:
            config.attributes = ctypes.pointer(_Attribute(STARTS_EARLY, 0, (1,)))
            config.attribute_count = 1
        array = (ctypes.c_void_p * len(parameters))(*parameters)
        self.launches.append((config, ctypes.byref(config), ctypes.c_void_p(kernel.function), array))

    def start(self, tensors: Sequence[Tensor | None], stream: int) -> bool:
        """Start the kernels; False if the driver refuses one."""
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        with self.lock:
            self.addresses[:] = addresses
            for config, pointer, function, parameters in self.launches:
                config.stream = stream
                if self.launch(pointer, function, parameters, None):
                    return False
        return True


_NOTHING = ctypes.c_uint64(0)


def _flat(kinds: Any, values: Any) -> Iterator[tuple[str, Any]]:
    """What is left of nested arguments without constants."""
    for kind, value in zip(kinds, values, strict=True):
        if isinstance(kind, tuple):
            yield from _flat(kind, value)
        elif kind != "constexpr":
            yield kind, value


@lru_cache
def _launch_function() -> Callable[..., int]:
    """The driver's cuLaunchKernelEx."""
    return ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
