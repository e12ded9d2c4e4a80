"""`ioattn io page`: one HTML file that shows tiles move."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ioattn.cli import words
from ioattn.cli.io.options import user_errors
from ioattn.io.page import write_page

RESULTS = Path("benchmarks/results")


def page(
    out: Annotated[
        Any, typer.Option("--out", "-o", parser=words.file_to_write(".html"), metavar="FILE", help="The file to write.")
    ] = "ioattn-io.html",
    results: Annotated[
        Path | None, typer.Option(help=f"A folder of result files, for the measured points; {RESULTS} if it is there.")
    ] = None,
) -> None:
    """Write one self-contained HTML file: tiles between slow memory and the chip, counters, online softmax, roofline.

    It needs no network. Measured points are those of the CSV files in --results.
    """
    with user_errors():
        if results is not None and not results.is_dir():
            raise ValueError(f"results is {str(results)!r}; it must be a folder of result files")
        points = write_page(out, results or RESULTS)
    typer.echo(f"wrote {out} ({out.stat().st_size / 1024:.0f} KiB, {points} measured points)")
