"""`ioattn io predict`: bytes, FLOPs and the roofline of a problem under schedules, from formulas."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from ioattn.cases import label
from ioattn.cli.io import options as o
from ioattn.io.machine import Machine
from ioattn.io.results import Measured, measured_points
from ioattn.io.roofline import Bound, best_blocks, bound
from ioattn.io.sweep import AXES, Axis, Point, sweep
from ioattn.io.text import duration, rate, size, table
from ioattn.io.tiles import Blocks
from ioattn.io.traffic import FORMULAS, Direction
from ioattn.problem import Problem

RIGHT_SCHEDULES = [name for name in FORMULAS if name != "as-printed"]


def predict(
    case: o.Case = None,
    shape: o.Shape = None,
    kv_heads: o.KvHeads = None,
    len_k: o.LenK = None,
    dim_v: o.DimV = None,
    dtype: o.Dtype = None,
    causal: o.Causal = False,
    top_left: o.TopLeft = False,
    window: o.Window = None,
    schedule: Annotated[list[str] | None, typer.Option(help=f"Any of {', '.join(RIGHT_SCHEDULES)}; all.")] = None,
    backward: Annotated[bool, typer.Option("--backward", help="The backward, without its forward.")] = False,
    machine: o.MachineName = "h100",
    block_q: o.BlockQ = 64,
    block_k: o.BlockK = 64,
    splits: o.Splits = 8,
    best: Annotated[bool, typer.Option("--best-blocks", help="The best blocks that fit the machine's SRAM.")] = False,
    measured_us: Annotated[float | None, typer.Option(help="A time you measured: how far from each bound?")] = None,
    sweep_axis: Annotated[str | None, typer.Option("--sweep", metavar="|".join(AXES))] = None,
    results: Annotated[Any, typer.Option("--results", metavar="DIR", help="Show these measured points too.")] = None,
    as_json: o.AsJson = False,
    plot: o.Plot = None,
    theme: o.ThemeName = "light",
) -> None:
    """What each schedule moves for a problem, which roof binds and the least time; nothing is run.

    Without a problem, the one of the background chapter: B1 H1 N4096 D64 fp16.
    """
    with o.user_errors():
        problem = o.chosen_problem(
            case,
            shape,
            dtype,
            kv_heads=kv_heads,
            len_k=len_k,
            dim_v=dim_v,
            causal=o.aligned(causal, top_left),
            window=window,
        )
        direction: Direction = "backward" if backward else "forward"
        names = _schedules(schedule, direction)
        on, blocks = o.machine(machine), Blocks(block_q, block_k, splits)
        if sweep_axis is not None:
            for option, value in (("best-blocks", best), ("measured-us", measured_us), ("results", results)):
                o.alone(option, value, "with --sweep")
            wide = dataclasses.replace(problem, band=o.chosen_band(case, shape, causal or top_left, window))
            series = {n: sweep(cast(Axis, sweep_axis), wide, on, n, direction, blocks) for n in names}
            _show_sweep(cast(Axis, sweep_axis), series, as_json, plot, theme)
            return
        if measured_us is not None and not 0 < measured_us < math.inf:
            raise ValueError(f"measured-us is {measured_us:g}; it must be positive")
        if as_json:
            o.alone("results", results, "with --json")
        bounds = [bound(problem, on, n, direction, _blocks(problem, n, direction, on, blocks, best)) for n in names]
        points = [] if results is None else _points(results, on, direction)
        if plot is not None:
            from ioattn.io.plot import traffic_and_roofline

            traffic_and_roofline(bounds, points, plot, theme)
    if as_json:
        reached = [{"reached": b.reached(measured_us * 1e-6)} if measured_us else {} for b in bounds]
        typer.echo(o.as_text([b.to_dict() | more for b, more in zip(bounds, reached, strict=True)]))
        return
    typer.echo(_text(bounds, measured_us))
    if results is not None:
        typer.echo(_measured_text(points, on, Path(results)))


def _schedules(asked: list[str] | None, direction: Direction) -> list[str]:
    names = o.each("schedule", asked, FORMULAS)
    return names if asked else [name for name in RIGHT_SCHEDULES if direction in FORMULAS[name]]


def _blocks(problem: Problem, name: str, direction: Direction, machine: Machine, given: Blocks, best: bool) -> Blocks:
    if not best or name in ("naive", "fused-softmax"):
        return given
    found = best_blocks(problem, name, direction, machine.sram)
    if found is None:
        raise ValueError(f"no blocks of {name} fit the {size(machine.sram)} of {machine.name}; use a smaller D")
    return Blocks(found.q, found.k, given.splits)


def _points(folder: str, machine: Machine, direction: Direction) -> list[Measured]:
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"results is {folder!r}; it must be a folder of result files")
    # A decode is a forward.
    same = [p for p in measured_points(path) if (p.direction == "backward") == (direction == "backward")]
    return [p for p in same if p.ran_on(machine)]


def _measured_text(points: list[Measured], machine: Machine, folder: Path) -> str:
    if not points:
        return f"no measured points of {machine.name} in {folder}, in this direction"
    header = ("measured on " + machine.name, "direction", "implementation", "FLOP/s", "FLOP/B")
    rows = [
        (label(p.problem), p.direction, p.implementation, rate(p.flops_per_s), f"{p.intensity:.4g}") for p in points
    ]
    note = "FLOP/B: useful FLOPs per byte that a GPU's counters saw, where they were read, else per compulsory byte."
    return f"{table(header, rows, left=3)}\n\n{note}"


def _text(bounds: list[Bound], measured_us: float | None) -> str:
    first = bounds[0]
    machine = first.machine
    head = [
        f"{label(first.problem)}, {first.direction}, on {machine.title}",
        f"ridge {first.peak / machine.bandwidth:.0f} FLOP per byte = {first.peak_kind} peak {rate(first.peak)} / "
        f"{machine.bandwidth / 1e12:.3g} TB/s",
        f"compulsory {size(first.compulsory)}, {first.useful_flops / 1e9:.4g} useful GFLOP: no schedule takes under "
        f"{duration(first.floor_seconds)}",
        "",
    ]
    header = ["schedule", "blocks", "read", "written", "total", "GFLOP", "FLOP/B", "binds", "at most", "least time"]
    header += ["on chip", "fits", "extra memory"] + (["reached"] if measured_us else [])
    rows = []
    for b in bounds:
        t = b.traffic
        row = [b.schedule, b.blocks, size(t.read), size(t.written), size(t.total), f"{t.flops / 1e9:.4g}"]
        row += [f"{t.intensity:.3g}", b.binds, rate(b.attainable), duration(b.seconds)]
        row += [size(t.on_chip), "yes" if b.fits_chip else "no", size(t.extra)]
        rows.append(row + ([f"{b.reached(measured_us * 1e-6):.0%}"] if measured_us else []))
    notes = ["", *_notes(bounds)]
    return "\n".join([*head, table(header, rows), *notes, "", *(_steps(b) for b in bounds)])


def _notes(bounds: list[Bound]) -> list[str]:
    machine, problem = bounds[0].machine, bounds[0].problem
    kv = problem.len_k * (problem.dim + problem.dim_v) * problem.dtype.itemsize
    verdict = "its L2 can catch re-reads of them" if kv < machine.l2 else "re-reads of them reach slow memory"
    notes = [
        "Every byte is counted as slow memory's; caches only help. "
        f"K and V of one head are {size(kv)}, the L2 of {machine.name} is {size(machine.l2)}: {verdict}."
    ]
    if any(not b.fits_chip for b in bounds):
        notes.append(f"fits: no = more than the {size(machine.sram)} of one core; the cache has to hold it.")
    return notes


def _steps(b: Bound) -> str:
    rows = [(m.step, m.tensor, size(m.read), size(m.written)) for m in b.traffic.moves]
    held = ", ".join(f"{name} {size(n)}" for name, n in b.traffic.tiles.items())
    head = f"{b.schedule}: on chip at its fullest {held}"
    return f"{head}\n{table(('step', 'tensor', 'read', 'written'), rows, left=2)}\n"


def _show_sweep(axis: Axis, series: dict[str, list[Point]], as_json: bool, plot: Path | None, theme: Any) -> None:
    if plot is not None:
        from ioattn.io.plot import sweep_plot

        sweep_plot(axis, series, plot, theme)
    if as_json:
        listed = [{axis: p.at, **p.bound.to_dict()} for points in series.values() for p in points]
        typer.echo(o.as_text(listed))
        return
    header = (axis, "schedule", "blocks", "total", "compulsory", "FLOP/B", "binds", "least time")
    rows = [(at, name, *_cells(b)) for name, points in series.items() for at, b in points]
    typer.echo(table(header, rows))


def _cells(b: Bound) -> tuple[object, ...]:
    moved = (size(b.traffic.total), size(b.compulsory), f"{b.traffic.intensity:.3g}")
    return (b.blocks, *moved, b.binds, duration(b.seconds))
