"""`ioattn io cases`: the table of named problems."""

from __future__ import annotations

import typer

from ioattn.bench.goals import CPU_GOALS, GPU_FEATURES, GPU_GOALS
from ioattn.cases import CASES, label
from ioattn.cli.io import options as o
from ioattn.io.text import table


def cases(as_json: o.AsJson = False) -> None:
    """The named problems that --case takes and that the benchmarks run.

    The dtype is the one a case is asked about in unless --dtype names another.
    """
    cpu, gpu = ({goal.case: goal.dtypes for goal in goals} for goals in (CPU_GOALS, (*GPU_GOALS, *GPU_FEATURES)))
    found = [(name, label(case.problem()), cpu.get(name, ()), gpu.get(name, ())) for name, case in CASES.items()]
    if as_json:
        keys = ("name", "problem", "timed_on_cpu_in", "timed_on_gpu_in")
        typer.echo(o.as_text([dict(zip(keys, row, strict=True)) for row in found]))
        return
    rows = [(name, line, " ".join(on_cpu), " ".join(on_gpu)) for name, line, on_cpu, on_gpu in found]
    typer.echo(table(("case", "problem", "`bench cpu` in", "`bench gpu` in"), rows, left=4))
