"""`ioattn bench`: measures this machine against torch's own attention, and stores what it measured."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ioattn import registry
from ioattn.bench.goals import CPU_GOALS
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
