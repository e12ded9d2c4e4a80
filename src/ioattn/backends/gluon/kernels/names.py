"""Gluon's names, the same from Triton 3.6 to the newest: the one file that knows how they moved."""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

try:
    from triton.experimental.gluon import GluonASTSource, aggregate  # Triton 3.9
except ImportError:
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.language.core import _aggregate as aggregate

load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@builtin
def _reduce_tile(desc, coord, src, _semantic=None):
    """Triton 3.6 can emit the copy engine's reductions, but has no name for them."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


@builtin
def seen_as(buffer, dtype, shape, layout, _semantic=None):
    """A buffer in shared memory as one of another type, shape and layout: a method whose name has changed."""
    sizes = [_unwrap_if_constexpr(size) for size in shape]
    return _semantic.memdesc_reinterpret(buffer, _unwrap_if_constexpr(dtype), sizes, _unwrap_if_constexpr(layout))


HAS_REGISTERS = not hasattr(gl, "barrier")
"""Whether loops leave registers for operands: those of Triton 3.9 have 60 more instructions, and would spill."""

thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
add_tile = tma.async_atomic_add if hasattr(tma, "async_atomic_add") else _reduce_tile

__all__ = [
    "HAS_REGISTERS",
    "GluonASTSource",
    "add_tile",
    "aggregate",
    "fence_async_shared",
    "gl",
    "gluon",
    "load_tile",
    "mbarrier",
    "seen_as",
    "store_tile",
    "thread_barrier",
    "tma",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
