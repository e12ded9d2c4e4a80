"""Times the Triton backend's kernels with many tiles on this GPU, for the table in its `config.py`.

Several processes compile the trials into Triton's cache and compare what each computes with float64; then one process
times those that are right, alone. A process in which something failed ends: after a fault the GPU answers it nothing.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

import ioattn
from ioattn.backends.triton import config, halves, launch
from ioattn.backends.triton.call import Prepared
from ioattn.backends.triton.config import Direction, Gpu, Tiles
from ioattn.backends.triton.launch import ForwardSteps, Steps
from ioattn.bench.timer import alternate_on_gpu
from ioattn.cases import DTYPE_NAMES
from ioattn.launching import Arguments
from ioattn.problem import Gradients, Options, Problem, Tensors

DIRECTIONS: tuple[Direction, ...] = ("forward", "key_value", "query")
PRODUCTS = {"forward": 2, "key_value": 4, "query": 3}
"""Matrix products per pair of tiles: what rates are counted by."""

STEPS: dict[tuple[Direction, bool], tuple[str, ...]] = {
    ("forward", False): ("whole",),
    ("forward", True): ("halves",),
    ("key_value", False): ("key", "value"),
    ("key_value", True): ("halves_key", "halves_value"),
    ("query", False): ("query",),
    ("query", True): ("halves_query",),
}
"""The kernels of a direction: with whole numbers, and with halves. The pass before the latter is not timed."""

RESULTS = {"forward": ("out",), "key_value": ("dk", "dv"), "query": ("dq",)}
DIMS = (64, 128, 256)

MAX_SUMS = 224
"""Registers of a thread that sums and scores may fill."""


class Trial(NamedTuple):
    """One kernel with one choice of tiles."""

    direction: Direction
    dtype: str
    dim: int
    causal: bool
    tiles: Tiles

    def __str__(self) -> str:
        q_tile, k_tile, warps, stages, precision, apart, _ = self.tiles
        name = f"{self.direction} {self.dtype} D{self.dim} {'causal' if self.causal else 'full'}"
        return f"{name} {q_tile}x{k_tile} w{warps} s{stages} {precision}{' apart' if apart else ''}"


def trials(gpu: Gpu) -> Iterator[Trial]:
    """Everything that might be fast: no rows computed twice, sums in registers, operands in shared memory."""
    for direction, dtype, dim, causal in itertools.product(DIRECTIONS, ("bf16", "fp32"), DIMS, (False, True)):
        x = torch.empty(1, 1, 4096, dim, dtype=DTYPE_NAMES[dtype], device="meta")
        problem = Problem.of(Tensors(x, x, x), Options(hi=0 if causal else None))
        for tiles in _tiles(direction, dtype, dim):
            if config.shared_bytes(problem, direction, tiles, gpu) <= gpu.shared_memory:
                yield Trial(direction, dtype, dim, causal, tiles)


def _tiles(direction: Direction, dtype: str, dim: int) -> Iterator[Tiles]:
    precisions = ("ieee",) if dtype == "bf16" else ("bf16x6", "fp16x3")
    for rows, warps in ((64, 4), (128, 8), (128, 4)):
        for other, stages, precision in itertools.product((16, 32, 64, 128), (1, 2, 3, 4), precisions):
            for apart in (False, True) if direction == "key_value" else (False,):
                sums = 2 * dim if direction == "key_value" and not apart else dim
                if rows * (sums + other) <= MAX_SUMS * 32 * warps:
                    sizes = (other, rows) if direction == "key_value" else (rows, other)
                    yield Tiles(*sizes, warps, stages, precision, apart)


class _Run(NamedTuple):
    """A kernel that is ready to be launched, and what it writes."""

    start: Callable[[], None]
    results: dict[str, Tensor]
    inputs: dict[str, Tensor]


def _prepare(trial: Trial, batch: int, heads: int, len_q: int, len_k: int) -> _Run:
    def normal(rows: int) -> Tensor:
        return torch.randn(batch, heads, rows, trial.dim, device="cuda").to(DTYPE_NAMES[trial.dtype])

    q, k, v, dout = (normal(rows) for rows in (len_q, len_k, len_k, len_q))
    tensors, gpu = Tensors(q, k, v), launch.gpu_of(q.device)
    problem = Problem.of(tensors, Options(hi=0 if trial.causal else None))
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    choose = config.choose

    def choose_trial(problem: Problem, direction: Direction, gpu: Gpu | None, in_registers: bool = False) -> Tiles:
        return trial.tiles if direction == trial.direction else choose(problem, direction, gpu)

    config.choose = choose_trial
    try:
        forward = launch.prepare_forward(problem, tensors, out, gpu)
        grads = Gradients(*map(torch.empty_like, (q, k, v)))
        backward = launch.prepare_backward(problem, tensors, out, dout, grads, gpu)
    finally:
        config.choose = choose
    room = halves.room_for(problem, halves.wanted(forward), tensors, None)
    steps = _with_arguments(forward, launch.forward_arguments(problem, tensors, out, lse, room))
    if trial.direction != "forward":
        _start([pair for pairs in steps.values() for pair in pairs])
        room = halves.room_for(problem, halves.wanted(backward), tensors, dout)
        others = (out, lse, dout, None, None, None, *launch.rows_for(problem, lse))
        steps = _with_arguments(backward, launch.backward_arguments(problem, tensors, grads, others, room, backward))
    _start([pair for name in ("delta", "measure", "split") for pair in steps.get(name, [])])
    names = STEPS[trial.direction, trial.tiles.precision == config.FP16X3]
    kernels = [pair for name in names for pair in steps[name]]
    results = {"out": out, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}
    wanted = {name: results[name] for name in RESULTS[trial.direction]}
    return _Run(lambda: _start(kernels), wanted, {"q": q, "k": k, "v": v, "dout": dout})


def _with_arguments(
    steps: ForwardSteps | Steps, given: Sequence[Arguments]
) -> dict[str, list[tuple[Prepared, Arguments]]]:
    pairs = zip(steps._fields, steps, given, strict=True)
    return {name: [(kernel, arguments) for kernel in group] for name, group, arguments in pairs}


def _start(kernels: Sequence[tuple[Prepared, Arguments]]) -> None:
    for kernel, arguments in kernels:
        kernel(arguments)


def fault_of(trial: Trial) -> str | None:
    """What is wrong with a trial on a small problem, compared with float64, or None."""
    torch.manual_seed(0)
    run = _prepare(trial, 2, 2, 200, 333)
    run.start()
    torch.cuda.synchronize()
    truth, plain = (_eager(run.inputs, trial.causal, dtype) for dtype in (torch.float64, DTYPE_NAMES[trial.dtype]))
    for name, value in run.results.items():
        error, own = ((x.double() - truth[name]).abs().max().item() for x in (value, plain[name]))
        limit = 2 * (own + torch.finfo(value.dtype).eps * truth[name].abs().max().item())
        if not error <= limit:
            return f"{name} is off by {error:.1e}; {limit:.1e} is the limit"
    return None


def _eager(inputs: dict[str, Tensor], causal: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    leaves = [inputs[name].to(dtype).requires_grad_() for name in "qkv"]
    out = ioattn.attention(*leaves, causal=causal, backend="eager")
    assert isinstance(out, Tensor)
    grads = torch.autograd.grad(out, leaves, inputs["dout"].to(dtype))
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))


def rate_of(trial: Trial, rounds: int) -> float:
    """TFLOP/s at 4096 to 8192 rows, H * D = 2048, counting the products that the kernel's definition needs."""
    length, heads = 8192 if trial.dtype == "bf16" else 4096, 2048 // trial.dim
    (timing,) = alternate_on_gpu([_prepare(trial, 2, heads, length, length).start], rounds)
    flops = PRODUCTS[trial.direction] * 2 * 2 * heads * length**2 * trial.dim / (2 if trial.causal else 1)
    return flops / timing.median_us / 1e6


def check_all(wanted: Sequence[Trial], processes: int) -> Iterator[tuple[Trial, str | None]]:
    """Each trial with its fault, checked by several processes at once, in the order in which they finish."""
    waiting: list[Trial] = list(reversed(wanted))
    working: dict[Connection, tuple[Any, Trial]] = {}
    while waiting or working:
        while waiting and len(working) < processes:
            _begin(working, waiting.pop())
        for pipe in cast(list[Connection], wait(list(working))):
            process, trial = working.pop(pipe)
            fault: str | None
            try:
                fault, usable = pipe.recv()
            except EOFError:
                fault, usable = "its process died", False
            yield trial, fault
            if usable and waiting:
                working[pipe] = (process, waiting[-1])
                pipe.send(waiting.pop())
            else:
                pipe.close()


def _begin(working: dict[Connection, tuple[Any, Trial]], trial: Trial) -> None:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    ours.send(trial)
    working[ours] = (process, trial)


def _work(pipe: Any) -> None:
    """Check trials until there are no more, or until one fails in a way that leaves the GPU unusable."""
    while True:
        try:
            trial = pipe.recv()
        except (EOFError, ConnectionError):
            return
        try:
            answer = (fault_of(trial), True)
        except Exception as error:
            lines = str(error).splitlines() or [""]
            answer = (f"{type(error).__name__}: {lines[0]}", "CUDA" not in str(error))
        try:
            pipe.send(answer)
        except ConnectionError:  # nobody waits for it: the time is over
            return
        if not answer[1]:
            return


def table_rows(rates: dict[Trial, float], gpu_name: str) -> list[str]:
    """A row of the table for each kernel, element size and width: the tiles with the best mean over full and causal."""
    lines = []
    for (direction, dtype, dim), group in itertools.groupby(sorted(rates), key=lambda t: t[:3]):
        means: dict[Tiles, list[float]] = {}
        for trial in group:
            means.setdefault(trial.tiles, []).append(rates[trial])
        both = {tiles: found for tiles, found in means.items() if len(found) == 2} or means
        best = max(both, key=lambda tiles: statistics.geometric_mean(both[tiles]))
        parts = [str(x) if not isinstance(x, str) else f'"{x}"' for x in best[:5]]
        call = (
            f"Tiles({', '.join(parts[: 4 if best.precision == 'ieee' else 5])}{', apart=True' if best.apart else ''})"
        )
        speed = " / ".join(f"{rate:.0f}" for rate in both[best])
        lines.append(f'{direction} {dtype}: Row({dim}, ({call},), "{speed} TFLOP/s full / causal on {gpu_name}"),')
    return lines
