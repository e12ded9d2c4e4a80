"""Checks the Triton backend on this GPU, then times its kernels with other tiles than the table's.

    python benchmarks/triton_tiles.py [--seconds 280] [--only bf16:128] > tiles.txt

First every feature against float64, by the rule of the tests; do not trust a rate after a FAIL. Then the host's time
per call, and for each element size, width and mask the candidates below in TFLOP/s, best first. Several processes at
once check, and compile the candidates into Triton's cache, which the timing then finds.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from torch import Tensor

import ioattn
from ioattn.backends.triton import config, launch
from ioattn.backends.triton.config import Tiles

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

CANDIDATES: dict[tuple[str, str, int], list[Tiles]] = {
    ("forward", "bf16", 64): [
        Tiles(128, 64, 4, 3),
        Tiles(128, 128, 8, 2),
        Tiles(128, 64, 4, 2),
        Tiles(128, 64, 8, 3),
        Tiles(64, 64, 4, 3),
        Tiles(128, 128, 4, 2),
    ],
    ("forward", "bf16", 128): [
        Tiles(128, 128, 8, 2),
        Tiles(128, 64, 8, 3),
        Tiles(128, 64, 8, 2),
        Tiles(128, 64, 4, 2),
        Tiles(64, 64, 4, 2),
    ],
    ("forward", "bf16", 256): [Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 2), Tiles(64, 64, 4, 2)],
    ("key_value", "bf16", 64): [
        Tiles(64, 128, 8, 2),
        Tiles(64, 128, 8, 3),
        Tiles(32, 128, 8, 2),
        Tiles(32, 128, 4, 2),
        Tiles(64, 64, 4, 2),
        Tiles(64, 64, 4, 3),
    ],
    ("key_value", "bf16", 128): [
        Tiles(64, 128, 8, 2),
        Tiles(64, 128, 8, 1),
        Tiles(32, 128, 8, 2),
        Tiles(64, 64, 8, 2),
        Tiles(64, 64, 4, 2),
        Tiles(32, 64, 4, 2),
    ],
    ("key_value", "bf16", 256): [Tiles(32, 64, 8, 2), Tiles(64, 64, 8, 1), Tiles(32, 64, 4, 1)],
    ("query", "bf16", 64): [
        Tiles(128, 128, 8, 2),
        Tiles(128, 64, 8, 3),
        Tiles(128, 64, 4, 2),
        Tiles(64, 64, 4, 3),
        Tiles(128, 64, 8, 2),
    ],
    ("query", "bf16", 128): [
        Tiles(128, 64, 8, 2),
        Tiles(64, 128, 8, 2),
        Tiles(64, 64, 4, 2),
        Tiles(128, 32, 8, 2),
        Tiles(128, 128, 8, 1),
    ],
    ("query", "bf16", 256): [Tiles(64, 64, 8, 2), Tiles(128, 32, 8, 1), Tiles(64, 32, 8, 2)],
    ("forward", "fp32", 64): [
        Tiles(128, 64, 8, 2, "bf16x6"),
        Tiles(128, 32, 4, 2, "bf16x6"),
        Tiles(64, 64, 4, 2, "bf16x6"),
        Tiles(128, 32, 8, 2, "bf16x6"),
        Tiles(64, 32, 4, 2, "bf16x6"),
        Tiles(128, 64, 8, 2, "tf32x3"),
    ],
    ("forward", "fp32", 128): [
        Tiles(128, 32, 8, 2, "bf16x6"),
        Tiles(64, 32, 4, 2, "bf16x6"),
        Tiles(128, 64, 8, 1, "bf16x6"),
        Tiles(64, 32, 4, 1, "bf16x6"),
        Tiles(128, 32, 8, 2, "tf32x3"),
    ],
    ("key_value", "fp32", 64): [
        Tiles(32, 128, 8, 2, "bf16x6"),
        Tiles(32, 64, 4, 2, "bf16x6"),
        Tiles(32, 128, 8, 1, "bf16x6"),
        Tiles(16, 128, 8, 2, "bf16x6"),
        Tiles(32, 64, 8, 2, "bf16x6"),
        Tiles(32, 128, 8, 2, "tf32x3"),
    ],
    ("key_value", "fp32", 128): [
        Tiles(16, 64, 8, 2, "bf16x6"),
        Tiles(16, 64, 4, 2, "bf16x6"),
        Tiles(16, 128, 8, 1, "bf16x6"),
        Tiles(32, 64, 8, 1, "bf16x6"),
        Tiles(16, 64, 4, 1, "tf32x3"),
    ],
    ("query", "fp32", 64): [
        Tiles(64, 32, 4, 2, "bf16x6"),
        Tiles(128, 32, 8, 2, "bf16x6"),
        Tiles(64, 64, 8, 2, "bf16x6"),
        Tiles(64, 32, 4, 2, "tf32x3"),
    ],
    ("query", "fp32", 128): [
        Tiles(64, 32, 8, 2, "bf16x6"),
        Tiles(64, 16, 4, 2, "bf16x6"),
        Tiles(64, 32, 4, 1, "bf16x6"),
        Tiles(128, 16, 8, 2, "bf16x6"),
        Tiles(64, 32, 8, 2, "tf32x3"),
    ],
}

MATMULS = {"forward": 2, "key_value": 4, "query": 3}


class Job(NamedTuple):
    """One kernel with one choice of tiles on one kind of problem."""

    direction: str
    dtype: str
    dim: int
    causal: bool
    tiles: Tiles


def jobs(only: str) -> Iterator[Job]:
    for (direction, dtype, dim), candidates in CANDIDATES.items():
        if only in f"{dtype}:{dim}":
            yield from (Job(direction, dtype, dim, causal, t) for causal in (False, True) for t in candidates)


def call(job: Job, length: int, batch: int, heads: int) -> Callable[[], None]:
    """A function that launches the job's kernel alone on problem-sized random tensors."""
    q, k, v = (torch.randn(batch, heads, length, job.dim, device="cuda", dtype=DTYPES[job.dtype]) for _ in range(3))
    tensors = ioattn.problem.Tensors(q, k, v)
    problem = ioattn.problem.Problem.of(tensors, ioattn.problem.Options(hi=0 if job.causal else None))
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device="cuda")
    choose = config.choose
    config.choose = lambda p, d, g: job.tiles if d == job.direction else choose(p, d, g)
    try:
        if job.direction == "forward":
            kernels = launch.prepare_forward(problem, tensors, out, launch.gpu_of(q.device))
            arguments = launch.forward_arguments(problem, tensors, out, lse)
        else:
            launch.forward(problem, tensors, out, lse)
            grads = ioattn.problem.Gradients(*(torch.empty_like(x) for x in (q, k, v)))
            at = 1 if job.direction == "key_value" else 2
            kernels = launch.prepare_backward(problem, tensors, out, out, grads, launch.gpu_of(q.device))[at]
            delta = torch.zeros_like(lse)
            arguments = launch.backward_arguments(problem, tensors, out, lse, out, None, (delta, None), grads)[at]
    finally:
        config.choose = choose
    return lambda: run_all(kernels, arguments)


def run_all(kernels: list[launch.Prepared], arguments: tuple[Any, ...]) -> None:
    for kernel in kernels:
        kernel(arguments)


def compile_job(job: Job) -> tuple[Job, str | None]:
    try:
        call(job, 256, 2, 2)()
        torch.cuda.synchronize()
    except Exception as error:
        return job, f"{type(error).__name__}: {str(error).splitlines()[-1][:90] if str(error) else ''}"
    return job, None


def milliseconds(run: Callable[[], Any], repeats: int = 12) -> float:
    """Median time on the device, after a warm-up."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def in_processes(function: Callable[[Any], Any], wanted: list[Any]) -> Iterator[Any]:
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        yield from (done.result() for done in as_completed([pool.submit(function, each) for each in wanted]))


def time_all(compiled: dict[Job, str | None], deadline: float) -> None:
    key = Job._fields.index("tiles")
    for group, members in itertools.groupby(sorted(compiled, key=lambda j: j[:key]), key=lambda j: j[:key]):
        direction, dtype, dim, causal = group
        rows: list[tuple[float, str]] = []
        for job in members:
            name = f"{job.tiles[0]}x{job.tiles[1]} w{job.tiles[2]} s{job.tiles[3]} {job.tiles[4]}"
            if compiled[job] or time.time() > deadline:
                rows.append((0.0, f"{name}: {compiled[job] or 'no time left'}"))
                continue
            length, heads = 8192 if dtype == "bf16" else 4096, 2048 // dim
            run = call(job, length, 2, heads)
            flops = MATMULS[direction] * 2 * 2 * heads * length**2 * dim / (2 if causal else 1)
            rows.append((flops / milliseconds(run) / 1e9, name))
        print(f"{direction} {dtype} D{dim} {'causal' if causal else 'full'}")
        for rate, name in sorted(rows, reverse=True):
            print(f"    {rate:7.1f}  {name}", flush=True)


FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (100, 30)},
    "softcap alibi": {"softcap": 2.0, "alibi_slopes": (4,), "causal": True},
    "bias": {"bias": (2, 4, 333, 401)},
    "bias repeated": {"bias": (1, 4, 1, 401), "sinks": (4,)},
    "mask": {"mask": (2, 1, 333, 401)},
    "NaN hidden": {"causal": True, "poison": True},
}


class Check(NamedTuple):
    """One problem to compare with float64."""

    dtype: torch.dtype
    dim: int
    dim_v: int
    feature: str


def checks() -> Iterator[Check]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for dim, dim_v in ((64, 64), (128, 128), (40, 72), (256, 256)):
            yield from (Check(dtype, dim, dim_v, feature) for feature in FEATURES)


def run_check(check: Check) -> str:
    try:
        fault = faults(check.dtype, check.dim, check.dim_v, dict(FEATURES[check.feature]))
    except Exception as error:
        fault = f"{type(error).__name__}: {str(error)[-300:]}"
    name = f"{str(check.dtype)[6:]} D{check.dim}/{check.dim_v} {check.feature}"
    return f"{'FAIL' if fault else 'ok  '} {name} {fault}"


def faults(dtype: torch.dtype, dim: int, dim_v: int, features: dict[str, Any]) -> str:
    torch.manual_seed(0)
    shapes = {"q": (2, 4, 333, dim), "k": (2, 2, 401, dim), "v": (2, 2, 401, dim_v)}
    given = {n: torch.randn(s, device="cuda").to(dtype) for n, s in shapes.items()}
    poison = features.pop("poison", False)
    for name in ("alibi_slopes", "bias", "mask", "sinks"):
        if name in features:
            x = torch.randn(features.pop(name), device="cuda")
            given[name] = x > -0.5 if name == "mask" else x.abs() if name == "alibi_slopes" else x
    if poison:
        given["v"][:, 0, -7:] = torch.nan
    dout = torch.randn(2, 4, 333, dim_v, device="cuda").to(dtype)
    truth = results({n: x if n == "mask" else x.double() for n, x in given.items()}, dout.double(), features, "eager")
    plain, ours = results(given, dout, features, "eager"), results(given, dout, features, "triton")
    found = []
    for name, want in truth.items():
        if not torch.equal(ours[name].isfinite(), want.isfinite()):
            found.append(f"{name}: finite elsewhere")
            continue
        finite = want.isfinite()
        if not finite.any():
            continue
        error, own = ((x[name].double() - want)[finite].abs().max() for x in (ours, plain))
        largest = want[finite].abs().max()
        limit = 2 * (own + torch.finfo(dtype).eps * largest)
        if error > limit:
            found.append(f"{name}: {error / largest:.1e} of {limit / largest:.1e}")
    return "; ".join(found)


def results(given: dict[str, Tensor], dout: Tensor, options: dict[str, Any], backend: str) -> dict[str, Tensor]:
    leaves = {n: x.clone().requires_grad_(n in ("q", "k", "v", "bias", "sinks")) for n, x in given.items()}
    out, lse = ioattn.attention(**leaves, **options, return_lse=True, backend=backend)
    wanted = [n for n, x in leaves.items() if x.requires_grad]
    gradients = torch.autograd.grad((out, lse), [leaves[n] for n in wanted], (dout, torch.ones_like(lse)))
    named = {f"d{n}": g for n, g in zip(wanted, gradients, strict=True)}
    return {"out": out.detach(), "lse": lse.detach(), **named}


def host_times() -> None:
    """Microseconds from call to return, the device being idle enough."""
    q = torch.randn(1, 4, 1024, 128, device="cuda", dtype=torch.bfloat16)
    calls = {
        "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q),
        "triton": lambda: ioattn.attention(q, q, q, backend="triton"),
        "triton causal": lambda: ioattn.attention(q, q, q, causal=True, backend="triton"),
    }
    for name, run in calls.items():
        times = []
        for _ in range(300):
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        print(f"host {name}: {1e6 * statistics.median(times):.1f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=280)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    deadline = time.time() + options.seconds
    for line in in_processes(run_check, list(checks())):
        print(line, flush=True)
    host_times()
    compiled = dict(in_processes(compile_job, list(jobs(options.only))))
    print(f"compiled {len(compiled)} in {options.seconds - (deadline - time.time()):.0f} s", flush=True)
    time_all(compiled, deadline)


if __name__ == "__main__":
    main()
