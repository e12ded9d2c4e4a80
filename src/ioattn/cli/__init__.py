"""The command line. A sub-command is a module with a typer `app`, imported when it is asked for."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import ioattn

COMMANDS = {
    "bench": "ioattn.cli.bench",
    "demo": "ioattn.cli.demo",
    "doctor": "ioattn.cli.doctor",
    "io": "ioattn.cli.io",
    "why": "ioattn.cli.why",
}
"""Sub-commands and where they live; a new one is a module and a row here."""


class _LazyGroup(TyperGroup):
    """Imports a sub-command's module only to run it or to list it in the help."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        command = typer.main.get_command(importlib.import_module(COMMANDS[cmd_name]).app)
        command.name = cmd_name
        return command


app = typer.Typer(cls=_LazyGroup, rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@app.callback(no_args_is_help=True, invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False) -> None:
    """Exact attention that moves as few bytes as the hardware allows, and shows you the bytes."""
    if version:
        typer.echo(f"ioattn {ioattn.__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point of the `ioattn` command."""
    app()
