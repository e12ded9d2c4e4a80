"""`ioattn io chapter`: every number of the background documents, beside ours."""

from __future__ import annotations

import typer

from ioattn.cli.io import options as o
from ioattn.io.chapter import claims
from ioattn.io.text import table


def chapter(as_json: o.AsJson = False) -> None:
    """Each number of the chapter on attention's traffic (000) and of the explanation (002), reproduced or corrected."""
    found = claims()
    if as_json:
        keys = ("where", "what", "theirs", "ours", "unit", "same", "why")
        typer.echo(o.as_text([{key: getattr(c, key) for key in keys} for c in found]))
        return
    rows = [(c.where, c.what, c.printed, c.computed) for c in found]
    lines = table(("where", "what", "printed", "ours"), rows, left=2).splitlines()
    verdicts = ["verdict", "-------", *(c.verdict for c in found)]
    width = max(map(len, lines))
    typer.echo("\n".join(f"{line.ljust(width)}  {verdict}" for line, verdict in zip(lines, verdicts, strict=True)))
    same = sum(c.same for c in found)
    typer.echo(f"\n{len(found)} numbers: {same} the same, {len(found) - same} differ")
