"""`ioattn bench`: measures this machine against torch's own attention, and stores what it measured."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from ioattn import registry
from ioattn.bench import plot as figures
from ioattn.bench.goals import CPU_GOALS, GPU_FEATURES, GPU_GOALS, Goal
from ioattn.bench.gpu import Measured, compare_on_gpu, compile_all, host_times
from ioattn.bench.limits import first_call, fma_peak
from ioattn.bench.run import Comparison, Row, compare, write

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@app.callback()
def bench() -> None:
    """Speed against torch's own attention, in turns and in one process."""


@app.command()
def cpu(
    quick: Annotated[bool, typer.Option("--quick", help="A tenth of the time per case.")] = False,
    only: Annotated[str, typer.Option("--only", help="Cases whose name and dtype match this expression.")] = ".",
    output: Annotated[Path, typer.Option("--output", help="Where the CSV file goes.")] = Path("benchmarks/results"),
) -> None:
    """The CPU backend against torch's scaled_dot_product_attention.

    Each result is checked against float64 first; a wrong one is not timed.
    """
    console = Console(highlight=False, soft_wrap=True)
    reason = registry.load("cpu").unusable()
    if reason is not None:
        raise typer.BadParameter(f"the cpu backend does not work here: {reason}")
    peak = fma_peak()
    cold, warm = first_call()
    console.print(
        f"fp32 FMA peak {peak:.0f} GFLOP/s; first call {cold:.2f} s to compile, {warm * 1e3:.0f} ms from cache"
    )
    comparisons = []
    wanted = [(goal, dtype) for goal in CPU_GOALS for dtype in goal.dtypes if re.search(only, f"{goal.case} {dtype}")]
    for goal, dtype in wanted:
        for comparison in compare(goal, dtype, "cpu", *((0.3, 2) if quick else (3.0, 5))):
            comparisons.append(comparison)
            console.print(_line(comparison))
            if comparison.rows:
                path = write(list(comparison.rows), output, "cpu")
    console.print(_table(comparisons, peak))
    if any(comparison.rows for comparison in comparisons):
        console.print(f"stored in {path}")
    if any(comparison.fault for comparison in comparisons):
        raise typer.Exit(1)


@app.command()
def gpu(
    backend: Annotated[str, typer.Option("--backend", help="The backend to measure.")] = "triton",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds.")] = False,
    only: Annotated[str, typer.Option("--only", help="Cases whose name and dtype match this expression.")] = ".",
    direction: Annotated[str, typer.Option("--direction", help="forward, backward or both.")] = "both",
    seconds: Annotated[float, typer.Option("--seconds", help="Start no case after this many seconds.")] = 3600,
    processes: Annotated[int, typer.Option("--processes", help="How many compile kernels.")] = 8,
    output: Annotated[Path, typer.Option("--output", help="Where the CSV file goes.")] = Path("benchmarks/results"),
) -> None:
    """A GPU backend against torch's fused attention; what each feature costs, memory, time on the host.

    Each result is checked against float64 first; a wrong one is not timed.
    """
    end = time.monotonic() + seconds
    console = Console(highlight=False, soft_wrap=True)
    _require_gpu(backend)
    wanted = [
        (goal, dtype)
        for goal in _in_direction((*GPU_GOALS, *GPU_FEATURES), direction)
        for dtype in goal.dtypes
        if re.search(only, f"{goal.case} {dtype}")
    ]
    compile_all(wanted, backend, processes)
    for name, timing in host_times(backend).items():
        console.print(f"host time {name}: {timing.median_us:.1f} us")
    faults, plain, path = 0, dict[str, float](), None
    for goal, dtype in wanted:
        if time.monotonic() > end:
            console.print(f"{goal.case} {dtype}: no time left")
            continue
        for measured in compare_on_gpu(goal, dtype, backend, 8 if quick else 20):
            if measured.rows:
                path = write(list(measured.rows), output, backend)
            faults += measured.fault is not None
            if goal.case == GPU_FEATURES[0].case and measured.rows:
                plain[measured.direction] = measured.rows[0].rate
            console.print(_gpu_line(measured, plain if goal.case.startswith("with-") else {}))
    if faults:
        raise typer.Exit(1)
    if path is not None:
        console.print(f"stored in {path}")
    elif not wanted:
        console.print(f"no case matches {only!r}")


@app.command()
def plot(
    results: Annotated[Path, typer.Argument(help="A CSV file that `bench` wrote.", exists=True, dir_okay=False)],
    output: Annotated[Path, typer.Option("--output", help="Where the figures go.")] = Path("docs/figures"),
) -> None:
    """Draw a results file, light and dark: rates over the length, and the ratio of each case to the best peer."""
    drawn = []
    stem = re.sub(r"-\d{4}-\d{2}-\d{2}$", "", results.stem)
    output.mkdir(parents=True, exist_ok=True)
    for direction in ("forward", "backward", "decode"):
        rates = figures.read(results, direction)
        name = stem if stem.endswith(direction) else f"{stem}-{direction}"
        for kind, draw in (("rates", figures.over_length), ("ratios", figures.against_best)):
            for theme in figures.THEMES:
                path = output / f"{name}-{kind}-{theme}.svg"
                if draw(rates, path, theme):
                    drawn.append(path)
    if not drawn:
        raise typer.BadParameter(f"{results} has no case with a peer and none at two lengths: nothing to draw")
    typer.echo("\n".join(map(str, drawn)))


def _in_direction(goals: Iterable[Goal], direction: str) -> list[Goal]:
    if direction not in ("forward", "backward", "both"):
        raise typer.BadParameter(f"--direction is {direction!r}; it must be forward, backward or both")
    if direction == "both":
        return list(goals)
    kept = [replace(goal, directions=tuple(d for d in goal.directions if d == direction)) for goal in goals]
    return [goal for goal in kept if goal.directions]


@app.command()
def tune(
    only: Annotated[str, typer.Option("--only", help="Trials whose line matches this expression.")] = ".",
    seconds: Annotated[
        float, typer.Option("--seconds", help="Check trials for 60% of this time, then time them.")
    ] = 3600,
    rounds: Annotated[int, typer.Option("--rounds", help="How often each trial is timed.")] = 10,
    processes: Annotated[int, typer.Option("--processes", help="How many compile kernels.")] = 8,
) -> None:
    """Time the Triton backend's kernels with other tiles on this GPU, and print the rows of its table.

    Each trial is compared with float64 first; a wrong one is named and not timed.
    """
    _require_gpu("triton")
    from ioattn.backends.triton import launch
    from ioattn.bench import tune

    start = time.monotonic()
    gpu = launch.gpu_of(torch.device("cuda", torch.cuda.current_device()))
    if gpu is None:
        raise typer.BadParameter("TRITON_INTERPRET is set: nothing here would run on the GPU")
    wanted = [trial for trial in tune.trials(gpu) if re.search(only, str(trial))]
    right = []
    for trial, fault in tune.check_all(wanted, processes):
        if fault is None:
            right.append(trial)
        else:
            typer.echo(f"{trial}: {fault}")
        if time.monotonic() > start + 0.6 * seconds:
            typer.echo(f"{len(wanted) - len(right)} trials are wrong or were not checked in time")
            break
    rates = {}
    for trial in sorted(right):
        if time.monotonic() < start + seconds:
            rates[trial] = tune.rate_of(trial, rounds)
            typer.echo(f"{rates[trial]:7.1f}  {trial}")
    for line in tune.table_rows(rates, torch.cuda.get_device_name()):
        typer.echo(line)


def _require_gpu(backend: str) -> None:
    registry.check_name(backend)
    reason = registry.unusable(backend)
    if reason is None and not torch.cuda.is_available():
        reason = "no GPU that torch can use"
    if reason is not None:
        raise typer.BadParameter(f"the {backend} backend cannot be measured here: {reason}")


def _gpu_line(measured: Measured, plain: Mapping[str, float]) -> str:
    name = f"{measured.asked.case} {measured.dtype} {measured.direction}"
    if measured.fault:
        return f"{name}: WRONG {measured.fault}"
    parts = [f"{row.implementation} {row.rate:.1f} ({row.error:.1e})" for row in measured.rows]
    mine, *peers = measured.rows
    parts += [f"{mine.rate / row.rate:.2f}x {row.implementation}" for row in peers]
    parts += [f"no {peer}: {reason}" for peer, reason in (measured.missing or {}).items()]
    if measured.direction in plain:
        parts.append(f"{mine.rate / plain[measured.direction]:.2f} of plain")
    if measured.memory:
        taken, needed = measured.memory
        parts.append(f"memory {taken / 2**20:.1f} of {needed / 2**20:.1f} MiB")
    return f"{name}: {', '.join(parts)}"


def _line(comparison: Comparison) -> str:
    name = f"{comparison.asked.case} {comparison.dtype} {comparison.direction}"
    return f"{name}: {comparison.fault or f'{comparison.speedup:.2f}x'}"


def _table(comparisons: list[Comparison], peak: float) -> Table:
    table = Table(title="ioattn against torch")
    for column in (
        "case",
        "dtype",
        "direction",
        "ioattn",
        "torch",
        "speedup",
        "goal",
        "of FMA peak",
        "error",
        "torch's",
    ):
        table.add_column(column, justify="left" if column in ("case", "dtype", "direction") else "right")
    for comparison in comparisons:
        cells = (comparison.asked.case, comparison.dtype, comparison.direction)
        if comparison.fault:
            table.add_row(*cells, "wrong", comparison.fault)
        else:
            table.add_row(*cells, *_cells(comparison, peak))
    return table


def _cells(comparison: Comparison, peak: float) -> tuple[str, ...]:
    mine, peer = comparison.rows
    goal = comparison.goal
    verdict = "" if goal is None else f"{goal:g}x" if comparison.speedup >= goal else f"{goal:g}x missed"
    speeds = [_speed(row) for row in (mine, peer)]
    share = f"{mine.rate / peak:.0%}" if comparison.dtype == "fp32" else ""
    return (*speeds, f"{comparison.speedup:.2f}x", verdict, share, f"{mine.error:.1e}", f"{peer.error:.1e}")


def _speed(row: Row) -> str:
    return f"{row.median_us:.1f} us" if row.median_us < 2000 else f"{row.rate:.0f} {row.unit}"
