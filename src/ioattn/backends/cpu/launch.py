"""Runs a compiled worker on torch's threads.

Every thread calls the same worker with the same argument block and draws task numbers from a counter in it. The
threads are those of the OpenMP runtime that torch itself has loaded: `torch.get_num_threads()` holds, and torch's
workers, which spin for a while after each of its operators, are used instead of fought.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

Block = ctypes.Array[ctypes.c_int64]

SLICE = 2e11
"""Floating point operations after which a long launch comes back to Python, where Ctrl-C is seen: about a second."""

_WORKER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@lru_cache(maxsize=1024)
def worker(address: int) -> Callable[[Any], None]:
    """The function at an address, callable without the interpreter's lock."""
    return _WORKER(address)


def run(address: int, block: Block, tasks: int, threads: int, flops: float) -> None:
    """Run tasks 0 to `tasks`, in slices; `block` starts with the slots task, last task and thread, zero so far."""
    if flops <= SLICE:
        block[1] = tasks
        fan_out(address, block, threads)
        return
    per_slice = max(4 * threads, int(tasks * SLICE / max(flops, 1)))
    for first in range(0, tasks, per_slice):
        last = min(first + per_slice, tasks)
        block[0], block[1], block[2] = first, last, 0
        fan_out(address, block, min(threads, last - first))


def fan_out(address: int, block: ctypes.Array[Any], threads: int) -> None:
    """Call the worker once on each of `threads` threads, and wait for all."""
    if threads == 1:
        worker(address)(block)
        return
    openmp = None if _forked else _openmp()
    if openmp is not None:
        openmp(address, block, threads, 0)
        return
    call = worker(address)
    futures = [_pool().submit(call, block) for _ in range(threads - 1)]
    call(block)
    for future in futures:
        future.result()


@lru_cache
def _openmp() -> Callable[..., None] | None:
    """`GOMP_parallel` of the runtime that libtorch_cpu is linked to, None where torch has another one."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        entry = ctypes.CDLL(str(path)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    entry.restype = None
    return entry


@lru_cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1), thread_name_prefix="ioattn")


_forked = False


def _after_fork() -> None:
    """In a forked child OpenMP's threads do not exist but its runtime believes they do; Python threads still work."""
    global _forked  # noqa: PLW0603
    _forked = True
    _pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
