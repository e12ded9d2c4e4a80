"""Times decoding over a key/value cache on this GPU against FA3, FlashInfer and torch's backends, in TB/s of K and V.

    python benchmarks/decode.py [--only B16] [--tiles] [--csv decode.csv] [--milliseconds 120] [--rounds 1]

Each time is that of a call inside of a CUDA graph which holds calls over several caches, together larger than the L2
cache, so that none is found there. Replays are queued behind a pause of the device, and only the device's time between
events counts: none waits for the host to start its graph. `+host` is the time of calls from Python on an idle device,
with all that the host does. Before it is timed, a result is compared with float64. `--tiles` also times other tiles and
numbers of pieces than the heuristic's. `--compile I/N` only compiles a share of the kernels into Triton's cache, so
that several processes can do it side by side.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib
import importlib.util
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import ioattn
from ioattn import caches
from ioattn.backends.triton import decoding, splits
from ioattn.backends.triton.launch import gpu_of
from ioattn.backends.triton.splits import CacheTiles
from ioattn.caches import CacheTensors, DecodeOptions

ROTATION_BYTES = 256 * 2**20
"""The caches that take turns: more than four times the L2 cache of an H200."""

QUEUED = 5
"""Replays behind one pause."""

PAUSE_CYCLES = 1_000_000
"""Of the device's clock, 0.5 ms at 2 GHz: in that time the host queues them."""

PAGE = 64
"""Rows of a page where FlashInfer reads a contiguous cache."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    """One decoding step of a model with 32 query and 8 key/value heads of D 128."""

    batch: int
    keys: int
    n_q: int = 1
    page: int | None = None
    dtype: str = "bf16"
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    rows_first: bool = False
    """The cache lies in memory as (batch, rows, heads, columns), as flash-attn's does."""

    def __str__(self) -> str:
        page = "" if self.page is None else f" page{self.page}"
        order = " rows-first" if self.rows_first else ""
        return (
            f"B{self.batch} H{self.heads}/{self.kv_heads} N{self.n_q}x{self.keys} D{self.dim} {self.dtype}{page}{order}"
        )

    @property
    def bytes(self) -> int:
        """K and V, once."""
        return 2 * self.batch * self.kv_heads * self.keys * self.dim * DTYPES[self.dtype].itemsize

    @property
    def copies(self) -> int:
        """How many caches take turns."""
        return max(2, -(-ROTATION_BYTES // self.bytes))


LONG, MIDDLE, MANY, SHORT, SHORTEST = (
    Case(1, 131072), Case(16, 8192), Case(64, 4096), Case(1, 8192), Case(1, 1024),
)  # fmt: skip
CASES = (
    *(LONG, MIDDLE, MANY, SHORT, SHORTEST),
    *(Case(16, 8192, page=page) for page in (16, 64, 256)),
    *(Case(16, 8192, page=page, rows_first=True) for page in (16, 64, 256)),
    Case(64, 4096, page=16),
    Case(16, 8192, rows_first=True),
    Case(16, 8192, n_q=8),
    Case(1, 131072, n_q=8),
    Case(16, 8192, dtype="fp32"),
    Case(1, 131072, dtype="fp32"),
    Case(16, 8192, heads=8),
    Case(16, 8192, dim=64),
)

TUNED = (
    *(MIDDLE, SHORT, SHORTEST),
    *(Case(16, 8192, dtype="fp32"), Case(64, 4096, page=16)),
)
"""The cases that `--tiles` is for."""

TILES = {
    "bf16": (
        CacheTiles(16, 64, 4, 3), CacheTiles(16, 64, 4, 4), CacheTiles(16, 64, 4, 4, beside=1),
        CacheTiles(16, 128, 8, 3, beside=1), CacheTiles(16, 128, 8, 4, beside=1),
        CacheTiles(16, 64, 4, 3, turned=True), CacheTiles(16, 128, 8, 3, turned=True, beside=1),
    ),
    "fp32": (
        CacheTiles(16, 32, 4, 3, "tf32x3"), CacheTiles(8, 32, 4, 3, "tf32x3"),
        CacheTiles(8, 32, 4, 3, "tf32x3", registers=168, beside=3),
    ),
}  # fmt: skip
"""How else the kernel may be cut, for `--tiles`."""


NAMES = ("ioattn:triton", "cudnn", "fa2", "fa3")
"""Whose calls are also timed from Python."""


class Workload(NamedTuple):
    """The tensors of a case: caches that take turns, and the oracle's result for the first of them."""

    case: Case
    each: list[CacheTensors]
    exact: Tensor


def workload(case: Case) -> Workload:
    """Random caches of full sequences."""
    torch.manual_seed(0)
    make: dict[str, Any] = {"device": "cuda", "dtype": DTYPES[case.dtype]}
    lengths = torch.full((case.batch,), case.keys, dtype=torch.int32, device="cuda")
    page = case.keys if case.page is None else case.page
    count = case.batch * case.keys // page
    table = None
    if case.page is not None:
        table = torch.randperm(count, device="cuda", dtype=torch.int32).view(case.batch, -1)
    each = []
    for _ in range(case.copies):
        # Tokens before heads, as models make them: FlashInfer takes no other order, and would copy.
        q = torch.randn(case.batch, case.n_q, case.heads, case.dim, **make).transpose(1, 2)
        shape = (count, case.kv_heads, page, case.dim)
        if case.rows_first:
            k, v = (torch.randn(shape[0], shape[2], shape[1], shape[3], **make).transpose(1, 2) for _ in range(2))
        else:
            k, v = (torch.randn(shape, **make) for _ in range(2))
        each.append(CacheTensors(q, k, v, lengths, table))
    return Workload(case, each, exact(each[0], case))


def exact(tensors: CacheTensors, case: Case) -> Tensor:
    """In float64, one key/value head of one sequence after the other."""
    out = torch.empty(tensors.q.shape, dtype=torch.float64, device="cuda")
    group = case.heads // case.kv_heads
    hidden = torch.ones(case.n_q, case.keys, dtype=torch.bool, device="cuda").triu(case.keys - case.n_q + 1)
    for b in range(case.batch):
        k, v = caches.rows_of(tensors, b, case.keys)
        for h in range(case.kv_heads):
            q = tensors.q[b, h * group : (h + 1) * group].double()
            scores = (q @ k[0, h].double().mT * case.dim**-0.5).masked_fill(hidden, -torch.inf)
            out[b, h * group : (h + 1) * group] = scores.softmax(-1) @ v[0, h].double()
    return out


Call = Callable[[CacheTensors], Tensor]


def ours(tensors: CacheTensors) -> Tensor:
    """The public operation."""
    out = ioattn.attention_decode(
        tensors.q,
        tensors.k_cache,
        tensors.v_cache,
        cache_seqlens=tensors.cache_seqlens,
        block_table=tensors.block_table,
        backend="triton",
    )
    assert isinstance(out, Tensor)
    return out


def candidate(case: Case, example: CacheTensors, tiles: CacheTiles, number: int, early: bool = True) -> Call:
    """The kernels with these tiles and this number of pieces."""
    problem = caches.describe(example, DecodeOptions(hi=0))
    gpu = gpu_of(example.q.device)
    if not early and gpu is not None:
        gpu = gpu._replace(capability=(8, 9))
    main, combine = decoding.prepare_pieces(problem, example, example.q, gpu, tiles, number)
    rows = case.batch * case.heads * case.n_q

    def call(tensors: CacheTensors) -> Tensor:
        out, lse = torch.empty_like(tensors.q), torch.empty(tensors.q.shape[:3], device="cuda")
        inputs, partial = decoding.inputs_of(problem, tensors), None
        if combine is not None:
            partial = tuple(torch.empty(rows * number * size, device="cuda") for size in (case.dim, 2))
        kernels = [main] if combine is None else [main, combine]
        for kernel, arguments in zip(kernels, decoding.decode_arguments(inputs, out, lse, partial), strict=True):
            kernel(arguments)
        return out

    return call


def candidates(case: Case, example: CacheTensors) -> Iterator[tuple[str, Call]]:
    """Other tiles with their own heuristic's number of pieces, then other numbers with the table's tiles."""
    problem = caches.describe(example, DecodeOptions(hi=0))
    gpu = gpu_of(example.q.device)
    chosen = splits.choose(problem, gpu)
    for tiles in TILES["fp32" if case.dtype == "fp32" else "bf16"]:
        named = tiles._replace(q_tile=max(tiles.q_tile, chosen.q_tile))
        number = splits.pieces(problem, named, gpu)
        turned = " turned" if named.turned else f" {named.registers} registers" if named.registers else ""
        cut = (
            f"{named.q_tile}x{named.k_tile} {named.num_warps} warps {named.num_stages} stages {named.precision}{turned}"
        )
        yield f"{cut} /{number}", candidate(case, example, named, number)
    best = splits.pieces(problem, chosen, gpu)
    for number in sorted({max(1, best // 2), best * 3 // 2, best * 2} - {best}):
        yield f"chosen tiles /{number}", candidate(case, example, chosen, number)
    if best > 1:
        yield f"chosen tiles, combined late /{best}", candidate(case, example, chosen, best, early=False)


def peers(case: Case, example: CacheTensors) -> Iterator[tuple[str, Call]]:
    """Whoever takes the case: cuDNN and FA2 through torch and FA3 over contiguous caches, and FlashInfer."""
    grouped = case.heads != case.kv_heads

    def sdpa(backend: SDPBackend) -> Call:
        def call(tensors: CacheTensors) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(tensors.q, tensors.k_cache, tensors.v_cache, enable_gqa=grouped)

        return call

    if case.page is None and case.n_q == 1:
        if case.dtype == "fp32":
            yield "efficient", sdpa(SDPBackend.EFFICIENT_ATTENTION)
        else:
            yield "cudnn", sdpa(SDPBackend.CUDNN_ATTENTION)
            yield "fa2", sdpa(SDPBackend.FLASH_ATTENTION)
    if case.dtype != "fp32":
        yield "fa3", fa3
        if not missing("flashinfer"):
            yield "flashinfer", flashinfer(case, example)


def missing(module: str) -> bool:
    """Whether a peer is not installed."""
    return importlib.util.find_spec(module) is None


def fa3(tensors: CacheTensors) -> Tensor:
    """FA3 with its own choice of splits; its rows come before its heads."""
    out = importlib.import_module("fa3_fwd_interface").flash_attn_with_kvcache(
        tensors.q.transpose(1, 2),
        tensors.k_cache.transpose(1, 2),
        tensors.v_cache.transpose(1, 2),
        cache_seqlens=tensors.cache_seqlens,
        page_table=tensors.block_table,
        causal=True,
    )
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def flashinfer(case: Case, example: CacheTensors) -> Call:
    """FlashInfer's kernels for tensor cores, planned once, as a server does for all layers of a step.

    Its work is split at pages: a contiguous cache is given to it as pages of 64 rows.
    """
    package: Any = importlib.import_module("flashinfer")
    page = case.page or PAGE
    pages = case.keys // page
    make: dict[str, Any] = {"dtype": torch.int32, "device": "cuda"}
    first = torch.arange(case.batch, **make)[:, None] * (pages if case.rows_first else pages * case.kv_heads)
    table = first + torch.arange(pages, **make) if example.block_table is None else example.block_table
    starts, full = torch.arange(case.batch + 1, **make), torch.full((case.batch,), page, **make)
    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    shape = (case.heads, case.kv_heads, case.dim, page)
    types = {"q_data_type": DTYPES[case.dtype], "kv_data_type": DTYPES[case.dtype]}
    layout = "NHD" if case.rows_first else "HND"
    if case.n_q == 1:
        wrapper = package.BatchDecodeWithPagedKVCacheWrapper(workspace, layout, use_tensor_cores=True)
        wrapper.plan(starts * pages, table.flatten(), full, *shape, **types)
    else:
        wrapper = package.BatchPrefillWithPagedKVCacheWrapper(workspace, layout, backend="fa2")
        wrapper.plan(starts * case.n_q, starts * pages, table.flatten(), full, *shape, causal=True, **types)

    def call(tensors: CacheTensors) -> Tensor:
        rows = tensors.q.transpose(1, 2).reshape(-1, case.heads, case.dim)
        out: Tensor = wrapper.run(rows, tuple(paged(case, cache) for cache in (tensors.k_cache, tensors.v_cache)))
        return out.view(case.batch, case.n_q, case.heads, case.dim).transpose(1, 2)

    return call


def paged(case: Case, cache: Tensor) -> Tensor:
    """A cache as FlashInfer takes it: pages, heads and rows, or rows and heads."""
    if case.rows_first:
        rows = cache.transpose(1, 2)
        return rows if case.page else rows.reshape(-1, PAGE, case.kv_heads, case.dim)
    if case.page:
        return cache
    # The pages of a sequence's heads lie one after the other: its own are those of its first head.
    count = ((case.batch - 1) * case.kv_heads + 1) * (case.keys // PAGE)
    size = (count, case.kv_heads, PAGE, case.dim)
    return cache.as_strided(size, (PAGE * case.dim, case.keys * case.dim, case.dim, 1))


def check(work: Workload, call: Call) -> float:
    """The largest error of a call relative to the largest value of the result; ValueError if it is wrong."""
    error = ((call(work.each[0]).double() - work.exact).abs().max() / work.exact.abs().max()).item()
    limit = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 2e-6}[work.case.dtype]
    if not error < limit:
        raise ValueError(f"wrong: relative error {error:.1e}")
    return error


def in_graph(work: Workload, call: Call, milliseconds: float) -> tuple[float, float]:
    """Microseconds of one call inside of a graph of calls over all caches, and the quartiles' relative distance."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for tensors in work.each[:2]:
            call(tensors)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for tensors in work.each:
            call(tensors)
    return _time(graph.replay, len(work.each), milliseconds, QUEUED)


def from_python(work: Workload, call: Call, milliseconds: float) -> tuple[float, float]:
    """The same for calls that Python makes one after the other, on a device that waits for them."""

    def calls() -> None:
        for tensors in work.each:
            call(tensors)

    return _time(calls, len(work.each), milliseconds)


def _time(run: Callable[[], None], calls: int, milliseconds: float, queued: int = 1) -> tuple[float, float]:
    """The device's time of runs, so many of them queued behind a pause; a run alone starts on an idle device."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    samples: list[float] = []
    while len(samples) < 5 or (sum(samples) < milliseconds and len(samples) < 100):
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(queued)]
        if queued > 1:
            torch.cuda._sleep(PAUSE_CYCLES)
        for start, end in events:
            start.record()
            run()
            end.record()
        events[-1][1].synchronize()
        samples += [start.elapsed_time(end) for start, end in events]
    low, middle, high = statistics.quantiles(samples, n=4)
    return middle * 1e3 / calls, (high - low) / middle


def copy_rate(milliseconds: float) -> float:
    """TB/s, read and written, of copying 1 GiB."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    return 2 * 2**30 / _time(copy, 1, milliseconds, QUEUED)[0] / 1e6


@lru_cache
def stamp() -> list[str]:
    """The columns that are the same in every row."""
    triton = importlib.import_module("triton")
    return [datetime.date.today().isoformat(), "", torch.cuda.get_device_name(), torch.__version__, triton.__version__]


def report(case: Case, name: str, timing: tuple[float, float], error: float, rows: list[list[str]]) -> None:
    """Print one line and keep it."""
    us, spread = timing
    rate = case.bytes / us / 1e6
    sys.stdout.write(
        f"{case!s:<42} {name:<38} {us:9.1f} us  {rate:6.3f} TB/s  spread {spread:.3f}  error {error:.1e}\n"
    )
    sys.stdout.flush()
    rows.append(
        [*stamp(), str(case), "decode", name, f"{us:.2f}", f"{spread:.3f}", f"{rate:.3f}", "TB/s", f"{error:.1e}"]
    )


def implementations(case: Case, example: CacheTensors, tiles: bool) -> Iterator[tuple[str, Call]]:
    """Ours, the peers, and if wanted the candidates."""
    yield "ioattn:triton", ours
    yield from peers(case, example)
    if tiles and case in TUNED:
        yield from candidates(case, example)


def measure(case: Case, options: argparse.Namespace, rows: list[list[str]]) -> None:
    """All implementations of one case, in turns as often as asked."""
    work = workload(case)
    right = [(name, call, check(work, call)) for name, call in working(case, work, options.tiles)]
    turns = [[in_graph(work, call, options.milliseconds) for _, call, _ in right] for _ in range(options.rounds)]
    for (name, call, error), taken in zip(right, zip(*turns, strict=True), strict=True):
        times, spreads = zip(*taken, strict=True)
        report(case, name, (statistics.median(times), statistics.median(spreads)), error, rows)
        if case in (SHORT, SHORTEST) and name in NAMES:
            report(case, f"{name}+host", from_python(work, call, options.milliseconds), error, rows)
    del work
    torch.cuda.empty_cache()


def working(case: Case, work: Workload, tiles: bool) -> Iterator[tuple[str, Call]]:
    """The implementations that run this case in a graph; what the others say is printed."""
    for name, call in implementations(case, work.each[0], tiles):
        try:
            in_graph(work, call, 0)
            yield name, call
        except Exception as fault:
            sys.stdout.write(f"{case!s:<42} {name:<38} {type(fault).__name__}: {str(fault).splitlines()[0][:90]}\n")


def compile_share(share: str, cases: list[Case], tiles: bool) -> None:
    """Run a share of the kernels once, on small caches of the same form."""
    index, count = map(int, share.split("/"))
    jobs: list[Callable[[], object]] = []
    for case in cases:
        example = workload(Case(**{**vars(case), "batch": 2, "keys": max(1024, case.page or 0)})).each[0]
        forms = _forms(case, example) if tiles and case in TUNED else ()
        calls = [ours, *(candidate(case, example, *form) for form in (cut_of(case), *forms))]
        jobs += [lambda call=call, example=example: call(example) for call in calls]
    for job in jobs[index::count]:
        try:
            job()
        except Exception as fault:
            sys.stdout.write(f"{type(fault).__name__}: {str(fault)[:200]}\n")


def cut_of(case: Case) -> tuple[CacheTiles, int]:
    """The tiles and pieces of the case itself, from tensors without memory."""
    gpu = gpu_of(torch.device("cuda", torch.cuda.current_device()))
    rows = case.keys if case.page is None else case.page
    dtype = DTYPES[case.dtype]
    with torch.device("meta"):
        q = torch.empty(case.batch, case.heads, case.n_q, case.dim, dtype=dtype)
        cache = torch.empty(case.batch * case.keys // rows, case.kv_heads, rows, case.dim, dtype=dtype)
        lengths = torch.empty(case.batch, dtype=torch.int32)
        table = None if case.page is None else torch.empty(case.batch, case.keys // rows, dtype=torch.int32)
    problem = caches.describe(CacheTensors(q, cache, cache, lengths, table), DecodeOptions(hi=0))
    tiles = splits.choose(problem, gpu)
    return tiles, splits.pieces(problem, tiles, gpu)


def _forms(case: Case, example: CacheTensors) -> Iterator[tuple[CacheTiles, int]]:
    chosen = splits.choose(caches.describe(example, DecodeOptions(hi=0)), gpu_of(example.q.device))
    for tiles in (chosen, *TILES["fp32" if case.dtype == "fp32" else "bf16"]):
        for number in (1, 40):
            yield tiles, number


def main() -> None:
    """Parse the options and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose line holds this")
    parser.add_argument("--tiles", action="store_true", help="also other tiles and numbers of pieces")
    parser.add_argument("--csv", default="", help="write the rows to this file")
    parser.add_argument("--milliseconds", type=float, default=120, help="per measurement")
    parser.add_argument("--rounds", type=int, default=1, help="measurements of each, in turns, whose median counts")
    parser.add_argument("--compile", default="", help="I/N: only compile this share")
    options = parser.parse_args()
    cases = [case for case in CASES if options.only in str(case)]
    if options.compile:
        compile_share(options.compile, cases, options.tiles)
        return
    absent = [module for module in ("fa3_fwd_interface", "flashinfer") if missing(module)]
    sys.stdout.write(f"copy {copy_rate(options.milliseconds):.3f} TB/s; peers not installed: {absent}\n")
    rows: list[list[str]] = []
    for case in cases:
        measure(case, options, rows)
    if options.csv:
        with Path(options.csv).open("w", newline="") as file:
            columns = "date,commit,machine,torch,triton,case,direction,implementation,median_us,spread,rate,unit,error"
            csv.writer(file).writerows([columns.split(","), *rows])


if __name__ == "__main__":
    main()
