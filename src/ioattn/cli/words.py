"""Words of a command line as values: sizes, windows, bytes, dtypes, files to write. One parser for every command."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import typer

UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


def sizes(form: str) -> Callable[[str], tuple[int, ...]]:
    """A parser of integers separated by commas, as many as `form` has names.

    >>> sizes("B,H,N,D")("1,16, 4096,64")
    (1, 16, 4096, 64)
    """

    def parse(text: str) -> tuple[int, ...]:
        words = [word.strip() for word in text.split(",")]
        if len(words) != form.count(",") + 1 or not all(map(_is_number, words)):
            raise typer.BadParameter(f"{text!r}; it must be {form}, integers")
        return tuple(map(int, words))

    return parse


def integers(text: str) -> tuple[int, ...]:
    """Integers separated by commas, at least one.

    >>> integers("4096,17")
    (4096, 17)
    """
    words = [word.strip() for word in text.split(",")]
    if not all(map(_is_number, words)):
        raise typer.BadParameter(f"{text!r}; it must be integers separated by commas")
    return tuple(map(int, words))


def window(text: str) -> tuple[int | None, int | None]:
    """LEFT,RIGHT, each an integer or `none` for unbounded.

    >>> window("255,none")
    (255, None)
    """
    words = [word.strip().lower() for word in text.split(",")]
    if len(words) != 2 or not all(_is_number(word) or word == "none" for word in words):
        raise typer.BadParameter(f"{text!r}; it must be LEFT,RIGHT, each an integer or 'none' for unbounded")
    left, right = (None if word == "none" else int(word) for word in words)
    return left, right


def n_bytes(text: str) -> int:
    """Bytes, with K, M or G for powers of 1024.

    >>> n_bytes("228K")
    233472
    """
    number, unit = (text[:-1], text[-1].lower()) if text[-1:].isalpha() else (text, "")
    if unit not in UNITS or not _is_number(number):
        raise typer.BadParameter(f"{text!r}; it must be a number of bytes, with K, M or G for powers of 1024")
    return int(number) * UNITS[unit]


def one_of(known: Sequence[str] | Mapping[str, object]) -> Callable[[str], str]:
    """A parser that takes only these words."""

    def parse(text: str) -> str:
        if text not in known:
            raise typer.BadParameter(f"{text!r}; it must be one of {', '.join(known)}")
        return text

    return parse


def file_to_write(*endings: str) -> Callable[[str], Path]:
    """A parser of the path of a file that may be written: one of these endings, in a folder that exists."""

    def parse(text: str) -> Path:
        path = Path(text)
        if path.suffix not in endings:
            raise typer.BadParameter(f"{text!r}; it must end in {' or '.join(endings)}")
        if not path.parent.is_dir():
            raise typer.BadParameter(f"{text!r}; its folder must exist")
        if path.is_dir():
            raise typer.BadParameter(f"{text!r} is a folder; it must be a file")
        return path

    return parse


def _is_number(word: str) -> bool:
    """Whether it is a decimal integer of at most 4000 digits: Python refuses to read more."""
    return word.isascii() and word.isdecimal() and len(word) <= 4000
