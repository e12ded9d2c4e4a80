"""A GPU backend against torch's fused attention: checked against float64, timed in turns, its memory counted.

Kernels are compiled beforehand by several processes, on small tensors, into Triton's cache on disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import ioattn
from ioattn.bench.cases import Case, Direction
from ioattn.bench.peers import fused_peers, ours
from ioattn.bench.run import TORCH_DTYPES, Row, call, errors_of, reference, results, row
from ioattn.bench.timer import Timing, alternate_on_gpu, until_return

NAMES: Mapping[Direction, tuple[str, ...]] = {"forward": ("out",), "backward": ("dq", "dk", "dv")}


@dataclass(frozen=True)
class Measured:
    """One case, dtype and direction; `fault` says what is wrong with ours, `missing` which peers failed and how."""

    case: Case
    dtype: str
    direction: Direction
    rows: tuple[Row, ...] = ()
    fault: str | None = None
    missing: Mapping[str, str] | None = None
    memory: tuple[int, int] | None = None
    """Bytes that the call took at its peak, and those of its outputs, LSE, gradients and delta."""


def compile_all(wanted: Sequence[tuple[Case, str]], backend: str, processes: int) -> None:
    """Compile the kernels of the cases into the cache; a kernel that fails will fail again where it is reported."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(_compile, case, dtype, backend) for case, dtype in wanted]:
            done.exception()


def _compile(case: Case, dtype: str, backend: str) -> None:
    group = case.heads // (case.kv_heads or case.heads)
    kv_heads = 2 if case.kv_heads else 0
    small = replace(case, batch=2, heads=2 * group, kv_heads=kv_heads, len_q=256, len_k=256)
    tensors = small.tensors(TORCH_DTYPES[dtype], device="cuda")
    results(ours(small, tensors, backend), tensors, "backward" in case.directions)


def compare_on_gpu(case: Case, dtype: str, backend: str, rounds: int) -> Iterator[Measured]:
    """Both directions of a case against each peer that takes it; a wrong result is reported and not timed.

    The error of a row is that of its worst result, relative to float64 in the Euclidean norm, over the first heads.
    """
    tensors = case.tensors(TORCH_DTYPES[dtype], device="cuda")
    runs = {f"ioattn:{backend}": ours(case, tensors, backend), **fused_peers(case, dtype)}
    truth, limits = reference(case, tensors)
    found, missing = {}, {}
    for name, run in runs.items():
        try:
            found[name] = results(run, tensors, "backward" in case.directions)
        except Exception as error:  # whatever a compiler or a peer says: the other rows are still wanted
            missing[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    mine = next(iter(runs))
    for direction in case.directions:
        if mine in missing:
            yield Measured(case, dtype, direction, fault=missing[mine])
            continue
        errors = errors_of(truth, found[mine])
        wrong = [f"{x} is off by {errors[x]:.2g}" for x in NAMES[direction] if not errors[x] <= limits[x]]
        if wrong:
            yield Measured(case, dtype, direction, fault=", ".join(wrong))
            continue
        timings = alternate_on_gpu([call(runs[name], tensors, direction) for name in found], rounds)
        rows = tuple(
            row(case, tensors, direction, name, timing, _relative(truth, found[name], direction))
            for name, timing in zip(found, timings, strict=True)
        )
        memory = _memory(case, tensors, backend, direction)
        yield Measured(case, dtype, direction, rows, missing=missing, memory=memory)


def _relative(truth: Mapping[str, Tensor], result: Mapping[str, Tensor], direction: Direction) -> float:
    def error(name: str) -> float:
        known = truth[name]
        return float((result[name][:1, : known.shape[1]].double() - known).norm() / known.norm())

    return max(map(error, NAMES[direction]))


def _memory(case: Case, tensors: Mapping[str, Tensor], backend: str, direction: Direction) -> tuple[int, int]:
    """Bytes at the peak of a call beyond its inputs, and those that it must have."""
    run = call(ours(case, tensors, backend), tensors, direction)
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    taken = torch.cuda.max_memory_allocated() - before
    rows = tensors["q"].shape[:3].numel() * 4  # LSE in the forward, delta in the backward
    written = ("dout",) if direction == "forward" else ("q", "k", "v")
    return taken, rows + sum(tensors[name].numel() * tensors[name].element_size() for name in written)


def host_times(backend: str, rounds: int = 300) -> dict[str, Timing]:
    """Time from call to return of ours and of torch's, on (1, 4, 1024, 128) in bf16, an idle device and no gradient."""
    q = torch.randn(1, 4, 1024, 128, device="cuda", dtype=torch.bfloat16)
    calls = {
        "sdpa": lambda: scaled_dot_product_attention(q, q, q),
        "sdpa causal": lambda: scaled_dot_product_attention(q, q, q, is_causal=True),
        f"ioattn:{backend}": lambda: ioattn.attention(q, q, q, backend=backend),
        f"ioattn:{backend} causal": lambda: ioattn.attention(q, q, q, causal=True, backend=backend),
    }
    return dict(zip(calls, until_return(list(calls.values()), rounds), strict=True))
