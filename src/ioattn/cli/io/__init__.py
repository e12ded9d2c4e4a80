"""`ioattn io`: predict, count and measure the bytes that attention moves, and show them."""

from __future__ import annotations

import typer

from ioattn.cli.io.cases import cases
from ioattn.cli.io.chapter import chapter
from ioattn.cli.io.compare import compare
from ioattn.cli.io.count import count
from ioattn.cli.io.decode import decode
from ioattn.cli.io.elsewhere import flashconv, paged, speculative
from ioattn.cli.io.machines import machines
from ioattn.cli.io.measure import measure
from ioattn.cli.io.page import page
from ioattn.cli.io.predict import predict

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False, help=__doc__
)

for command in (
    predict,
    count,
    measure,
    chapter,
    compare,
    decode,
    page,
    paged,
    speculative,
    flashconv,
    machines,
    cases,
):
    app.command()(command)
