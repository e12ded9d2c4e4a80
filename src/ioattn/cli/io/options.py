"""The options that the laboratory's commands share, and the values behind them."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from ioattn.cases import CASES, DTYPE_NAMES, problem_of
from ioattn.cases import Case as NamedCase
from ioattn.cli import words
from ioattn.io.machine import Machine, machine_of, memory_size
from ioattn.io.text import size
from ioattn.masks import Band
from ioattn.problem import Align, Problem

# Typer reads the parsers; the annotations would make it ask for several words instead of one.
Case = Annotated[str | None, typer.Option(metavar="NAME", help="A problem by name instead of --shape: see `cases`.")]
Shape = Annotated[Any, typer.Option(parser=words.sizes("B,H,N,D"), metavar="B,H,N,D")]
KvHeads = Annotated[int | None, typer.Option(help="Key/value heads, H unless given.")]
LenK = Annotated[int | None, typer.Option(help="Keys, N unless given.")]
DimV = Annotated[int | None, typer.Option(help="Columns of V, D unless given.")]
Dtype = Annotated[
    Any, typer.Option(parser=words.one_of(DTYPE_NAMES), metavar="|".join(DTYPE_NAMES), help="A case's own, else fp16.")
]
Causal = Annotated[bool, typer.Option("--causal", help="Aligned bottom-right.")]
TopLeft = Annotated[bool, typer.Option("--top-left", help="Causal, aligned top-left.")]
Window = Annotated[Any, typer.Option(parser=words.window, metavar="LEFT,RIGHT", help="'none': unbounded.")]
Sram = Annotated[Any, typer.Option(parser=words.n_bytes, metavar="BYTES", help="Such as 100K.")]
BlockQ = Annotated[int, typer.Option(help="Queries of a tile.")]
BlockK = Annotated[int, typer.Option(help="Keys of a tile.")]
Splits = Annotated[int, typer.Option(help="Pieces that split-kv cuts the keys into.")]
MachineName = Annotated[str, typer.Option("--machine", help="v100, a100, h100, h200, b200, this, or a .toml file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Plot = Annotated[
    Any,
    typer.Option(parser=words.file_to_write(".png", ".svg"), metavar="FILE", help="Draw to this .png or .svg file."),
]
ThemeName = Annotated[
    Any, typer.Option("--theme", parser=words.one_of(("light", "dark")), metavar="light|dark", help="Of the plot.")
]


@contextmanager
def user_errors() -> Iterator[None]:
    """Errors in what the user asked for end the command with their message, not with a traceback."""
    try:
        yield
    except (ValueError, ModuleNotFoundError, MemoryError, OSError) as error:
        raise typer.BadParameter(str(error)) from None


def chosen_problem(case: str | None, shape: tuple[int, ...] | None, dtype: str | None, **options: Any) -> Problem:
    """The problem of a command line: a named one, or one by its sizes; the chapter's where neither is given.

    Raises:
        ValueError: if both are given, or sizes besides a name, or what `problem_of` raises.
    """
    if shape is not None and case is not None:
        raise ValueError(f"case is {case!r} and shape is {shape}; give one of them")
    if shape is not None:
        return problem_of(shape, dtype or "fp16", **options)
    given = [
        f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None and value is not False
    ]
    if given:
        raise ValueError(f"{', '.join(given)} given without --shape; a named case has its own")
    return named_case(case).problem(dtype)


def machine(name: str) -> Machine:
    """The machine of that name; where it has to be measured, with a sign of life on a terminal."""
    if name != "this":
        return machine_of(name)
    with busy("measuring this machine"):
        return machine_of(name)


def check_room(what: str, needed: int) -> None:
    """Raise MemoryError, rather than let this machine run out, if running `what` needs more bytes than it has."""
    memory = memory_size()
    if memory and needed > memory:
        raise MemoryError(
            f"running and checking {what} takes about {size(needed)}, this machine has {size(memory)}; "
            "use smaller sizes, or leave the running: predictions need no memory"
        )


@contextmanager
def busy(title: str) -> Iterator[None]:
    """A moving line on standard error, where that is a terminal, while something takes seconds."""
    from rich.console import Console

    with Console(stderr=True).status(title):
        yield


@contextmanager
def progress(title: str, total: int) -> Iterator[Any]:
    """A bar of the bytes moved, on standard error where that is a terminal; it goes when it is done."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=total < 2**24) as bar:
        task = bar.add_task(title, total=total)
        yield lambda n_bytes: bar.update(task, advance=n_bytes)


def aligned(causal: bool, top_left: bool) -> bool | Align:
    """What `attention` calls these options."""
    return "top-left" if top_left else causal


def named_case(case: str | None) -> NamedCase:
    """The case of that name, the chapter's for None; raises ValueError, with the names, where there is none."""
    if case is not None and case not in CASES:
        raise ValueError(f"case is {case!r}; it must be one of {', '.join(CASES)}")
    return CASES[case or "chapter"]


def chosen_band(case: str | None, shape: tuple[int, ...] | None, causal: bool, window: Any) -> Band:
    """The band asked for, with sides that hide nothing at the problem's own lengths but may at others."""
    return named_case(case).band if shape is None else Band.of(causal, window)


def each(what: str, names: list[str] | None, known: Collection[str]) -> list[str]:
    """The names asked for, each once, or all of `known` where none was.

    Raises:
        ValueError: naming the first that is not known.
    """
    for name in names or ():
        if name not in known:
            raise ValueError(f"{what} is {name!r}; it must be one of {', '.join(known)}")
    return list(dict.fromkeys(names or known))


def alone(name: str, value: Any, without: str) -> None:
    """Raise ValueError if an option is given where it would do nothing."""
    if value is not None and value is not False:
        raise ValueError(f"--{name} is given {without}; it would do nothing there")


def as_text(value: Any) -> str:
    """JSON; what is infinite or no number is null, for which JSON has no word."""
    return json.dumps(_finite(value), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
