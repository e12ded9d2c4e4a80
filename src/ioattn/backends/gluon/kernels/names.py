"""Gluon's names, the same from Triton 3.6 to the newest: the one file that knows how they moved."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
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

__all__ = [
    "GluonASTSource",
    "aggregate",
    "fence_async_shared",
    "gl",
    "gluon",
    "load_tile",
    "mbarrier",
    "store_tile",
    "tma",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
