"""The options that the laboratory's commands share, and the values behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from ioattn.io.problems import DTYPE_NAMES, NAMED, problem_of
from ioattn.problem import Problem


def _sizes(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if len(words) != 4 or not all(word.strip().isdecimal() for word in words):
        raise typer.BadParameter(f"{text!r}; it must be B,H,N,D, integers")
    return tuple(map(int, words))


def _window(text: str) -> tuple[int | None, int | None]:
    words = [word.strip() for word in text.split(",")]
    if len(words) != 2 or not all(word.isdecimal() or word == "none" for word in words):
        raise typer.BadParameter(f"{text!r}; it must be LEFT,RIGHT, each an integer or 'none' for unbounded")
    left, right = (None if word == "none" else int(word) for word in words)
    return left, right


def _bytes(text: str) -> int:
    units = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
    number, unit = (text[:-1], text[-1].lower()) if text[-1:].isalpha() else (text, "")
    if unit not in units or not number.isdecimal():
        raise typer.BadParameter(f"{text!r}; it must be a number of bytes, with K, M or G for powers of 1024")
    return int(number) * units[unit]


# Typer reads the parsers; the annotations would make it ask for several words instead of one.
Case = Annotated[str | None, typer.Option(metavar="|".join(NAMED), help="A problem by name, instead of --shape.")]
Shape = Annotated[Any, typer.Option(parser=_sizes, metavar="B,H,N,D")]
KvHeads = Annotated[int | None, typer.Option(help="Key/value heads, H unless given.")]
LenK = Annotated[int | None, typer.Option(help="Keys, N unless given.")]
DimV = Annotated[int | None, typer.Option(help="Columns of V, D unless given.")]
Dtype = Annotated[str, typer.Option(metavar="|".join(DTYPE_NAMES))]
Causal = Annotated[bool, typer.Option("--causal", help="Aligned bottom-right.")]
Window = Annotated[Any, typer.Option(parser=_window, metavar="LEFT,RIGHT", help="'none': unbounded.")]
Sram = Annotated[Any, typer.Option(parser=_bytes, metavar="BYTES", help="Such as 100K.")]
BlockQ = Annotated[int, typer.Option(help="Queries of a tile.")]
BlockK = Annotated[int, typer.Option(help="Keys of a tile.")]
Splits = Annotated[int, typer.Option(help="Pieces that split-kv cuts the keys into.")]
MachineName = Annotated[str, typer.Option("--machine", help="v100, a100, h100, h200, b200, this, or a .toml file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Plot = Annotated[Any, typer.Option("--plot", metavar="FILE", help="Draw to this .png or .svg file.")]
ThemeName = Annotated[str, typer.Option("--theme", metavar="light|dark")]


@contextmanager
def user_errors() -> Iterator[None]:
    """Errors in what the user asked for end the command with their message, not with a traceback."""
    try:
        yield
    except (ValueError, ModuleNotFoundError, MemoryError) as error:
        raise typer.BadParameter(str(error)) from None


def chosen_problem(case: str | None, shape: tuple[int, ...] | None, dtype: str, **options: Any) -> Problem:
    """The problem of a command line: a named one, or one by its sizes.

    Raises:
        ValueError: if both or neither are given, or what `problem_of` raises.
    """
    if case is not None and shape is not None:
        raise ValueError(f"case is {case!r} and shape is {shape}; give one of them")
    if case is None and shape is None:
        case = "chapter"
    if case is not None:
        if case not in NAMED:
            raise ValueError(f"case is {case!r}; it must be one of {', '.join(NAMED)}")
        given = [name for name, value in options.items() if value not in (None, False)]
        if given:
            raise ValueError(f"{', '.join(given)} given with a named case; describe the problem by --shape instead")
        return NAMED[case]
    assert shape is not None
    return problem_of(shape, dtype, **options)


def each(names: list[str], known: Callable[[str], bool], every: list[str]) -> list[str]:
    """The names asked for, all of `every` where none was.

    Raises:
        ValueError: naming the first that is not known.
    """
    for name in names:
        if not known(name):
            raise ValueError(f"schedule is {name!r}; it must be one of {', '.join(every)}")
    return names or every
