"""`ioattn io page`: one HTML file that shows tiles move."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ioattn.cli.io.options import user_errors
from ioattn.io.page import write_page


def page(
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("ioattn-io.html"),
    results: Annotated[Path, typer.Option(help="A folder of result files, for the measured points.")] = Path(
        "benchmarks/results"
    ),
) -> None:
    """Write one self-contained HTML file: tiles between slow memory and the chip, counters, online softmax, roofline.

    It needs no network. Measured points are those of the CSV files in --results, if there are any.
    """
    with user_errors():
        points = write_page(out, results)
    typer.echo(f"wrote {out} ({out.stat().st_size / 1024:.0f} KiB, {points} measured points)")
