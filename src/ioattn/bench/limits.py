"""What bounds a CPU, and what a first call costs, measured on the spot."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
import time

import torch

from ioattn.backends.cpu import jit, launch
from ioattn.backends.cpu.ir import Module, Type

_STEPS = 2_000_000
_SUMS = 24
"""Independent sums: more than the latency of an FMA times the number of them that start in one cycle."""


def fma_peak() -> float:
    """GFLOP/s of nothing but fp32 FMAs, on all of torch's threads; the best of seven runs."""
    target = jit.host()
    if target is None:
        raise RuntimeError(f"the peak is measured with generated code: {jit.unusable()}")
    sums = _SUMS if target.registers > 16 else 12
    threads = torch.get_num_threads()
    address, memory = jit.load(_fma_loop(target, sums), target), (ctypes.c_float * 1024)()
    best = float("inf")
    for _ in range(7):
        start = time.perf_counter()
        launch.fan_out(address, memory, threads)
        best = min(best, time.perf_counter() - start)
    return 2.0 * _STEPS * sums * target.lanes * threads / best / 1e9


def _fma_loop(target: jit.Target, sums: int) -> str:
    module = Module()
    f = module.function(jit.ENTRY, "ptr memory", exported=True)
    vector = Type("float", target.lanes)
    factor = f.args.memory.load(vector)
    totals = [f.variable(0.0, vector) for _ in range(sums)]
    with f.loop(0, _STEPS):
        for total in totals:
            total.value = f.fma(factor, factor, total.value)
    for i, total in enumerate(totals):
        (f.args.memory + 64 * i).store(total.value)
    return str(module)


_FIRST_CALL = """
import sys, time, pathlib, torch, ioattn
from ioattn import api, ops, registry
from ioattn.backends.cpu import jit
jit.cache_directory = lambda: pathlib.Path(sys.argv[1])
q = torch.randn(1, 2, 128, 64)
start = time.perf_counter()
ioattn.attention(q, q, q, causal=True, backend="cpu")
print(time.perf_counter() - start)
"""


def first_call() -> tuple[float, float]:
    """Seconds that the first call takes in a fresh process, with an empty cache and with a filled one."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-c", _FIRST_CALL, cache]
        times = [float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(2)]
    return times[0], times[1]
