"""`ioattn io cases`: the table of named problems."""

from __future__ import annotations

import typer

from ioattn.bench.goals import CPU_GOALS
from ioattn.cases import CASES, label
from ioattn.cli.io import options as o
from ioattn.io.text import table


def cases(as_json: o.AsJson = False) -> None:
    """The named problems that --case takes and that the benchmarks run.

    The dtype is the one a case is asked about in unless --dtype names another.
    """
    timed = {goal.case: goal.dtypes for goal in CPU_GOALS}
    rows = [(name, label(case.problem()), " ".join(timed.get(name, ()))) for name, case in CASES.items()]
    if as_json:
        listed = [{"name": name, "problem": line, "timed_in": list(timed.get(name, ()))} for name, line, _ in rows]
        typer.echo(o.as_text(listed))
        return
    typer.echo(table(("case", "problem", "timed by `ioattn bench cpu` in"), rows, left=3))
