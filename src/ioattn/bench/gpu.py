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
from ioattn.bench.goals import Goal
from ioattn.bench.peers import Attention, gpu_peers, ours
from ioattn.bench.run import Row, call, errors_of, reference, results, row
from ioattn.bench.timer import Timing, alternate_on_gpu, until_return
from ioattn.cases import CASES, inputs_of
from ioattn.io.traffic import Direction

NAMES: Mapping[Direction, tuple[str, ...]] = {"forward": ("out",), "backward": ("dq", "dk", "dv")}


@dataclass(frozen=True)
class Measured:
    """One case, dtype and direction; `fault` says what is wrong with ours, `missing` which peers failed and how."""

    asked: Goal
    dtype: str
    direction: Direction
    rows: tuple[Row, ...] = ()
    fault: str | None = None
    missing: Mapping[str, str] | None = None
    memory: tuple[int, int] | None = None
    """Bytes that the call took at its peak, and those of its outputs, LSE, gradients and delta."""


def compile_all(wanted: Sequence[tuple[Goal, str]], backend: str, processes: int) -> None:
    """Compile the kernels of the cases into the cache; a kernel that fails will fail again where it is reported."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(_compile, asked, dtype, backend) for asked, dtype in wanted]:
            done.exception()


def _compile(asked: Goal, dtype: str, backend: str) -> None:
    """Run the case with one group of heads: kernels are chosen by the lengths, so these stay."""
    case = CASES[asked.case]
    group = case.sizes[1] // (case.kv_heads or case.sizes[1])
    small = replace(case, sizes=(1, 2 * group, *case.sizes[2:]), kv_heads=2)
    tensors = inputs_of(small.problem(dtype), device="cuda")
    results(ours(small, tensors, backend), tensors, "backward" in asked.directions)


def compare_on_gpu(asked: Goal, dtype: str, backend: str, rounds: int) -> Iterator[Measured]:
    """Each direction of a case against each peer that takes it; a wrong result is reported and not timed.

    The error of a row is that of its worst result, relative to float64 in the Euclidean norm, over the first heads.
    """
    case, backward = CASES[asked.case], "backward" in asked.directions
    problem = case.problem(dtype)
    tensors = inputs_of(problem, device="cuda")
    runs = {f"ioattn:{backend}": ours(case, tensors, backend), **gpu_peers(problem)}
    truth, limits = reference(case, tensors, backward)
    found, missing = _try_all(runs, tensors, backward)
    mine = next(iter(runs))
    for direction in asked.directions:
        if mine in missing:
            yield Measured(asked, dtype, direction, fault=missing[mine])
            continue
        errors = errors_of(truth, found[mine])
        wrong = [f"{x} is off by {errors[x]:.2g}" for x in NAMES[direction] if not errors[x] <= limits[x]]
        if wrong:
            yield Measured(asked, dtype, direction, fault=", ".join(wrong))
            continue
        able = [name for name in found if set(NAMES[direction]) <= set(found[name])]
        timings = alternate_on_gpu([call(runs[name], tensors, direction) for name in able], rounds)
        rows = tuple(
            row(problem, direction, name, timing, _relative(truth, found[name], direction), "cuda")
            for name, timing in zip(able, timings, strict=True)
        )
        memory = _memory(runs[mine], tensors, direction)
        yield Measured(asked, dtype, direction, rows, missing=missing, memory=memory)


def _try_all(
    runs: Mapping[str, Attention], tensors: Mapping[str, Tensor], backward: bool
) -> tuple[dict[str, dict[str, Tensor]], dict[str, str]]:
    """What each gives, its gradients left out if it has none; and why some give nothing."""
    found, missing = {}, {}
    for name, run in runs.items():
        for wanted in (True, False) if backward else (False,):
            try:
                found[name] = results(run, tensors, wanted)
                break
            except Exception as error:  # whatever a compiler or a peer says: the other rows are still wanted
                direction = "backward" if wanted else "forward"
                missing[name] = (
                    f"{direction}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                )
    mine = next(iter(runs))
    return found, missing if mine not in missing else {mine: missing[mine]}


def _relative(truth: Mapping[str, Tensor], result: Mapping[str, Tensor], direction: Direction) -> float:
    def error(name: str) -> float:
        known = truth[name]
        return float((result[name][:1, : known.shape[1]].double() - known).norm() / known.norm())

    return max(map(error, NAMES[direction]))


def _memory(attention: Attention, tensors: Mapping[str, Tensor], direction: Direction) -> tuple[int, int]:
    """Bytes at the peak of a call beyond its inputs, and those that it must have."""
    run = call(attention, tensors, direction)
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
