"""Which backend runs a problem, and why the others do not.

A backend is a module under `ioattn.backends` with the functions of `Backend`. Adding one is a folder and a row below.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, Protocol, cast

from torch import Tensor

from ioattn.caches import CacheTensors
from ioattn.problem import Gradients, Problem, Tensors

MODULES = {
    "gluon": "ioattn.backends.gluon",
    "triton": "ioattn.backends.triton",
    "cpu": "ioattn.backends.cpu",
    "eager": "ioattn.backends.eager",
}
"""Backends in order of preference; a module is imported when it is first asked."""


Step = Literal["forward", "backward", "decode", "append"]


class Backend(Protocol):
    """What a backend module provides.

    One without a `backward` says so by `forward_only = True`: its `out` and `lse` are like any other backend's, so the
    first of those that has one differentiates them. One that objects to every problem with a cache needs no `decode`
    and no `append`.

    Next to `forward`, `backward`, `decode` and `append` there may be a `prepare_forward` and so on with the same
    arguments. It gives a function of the arguments but the problem, for later calls whose tensors lie like these, and
    must not keep these.
    """

    name: str

    def unusable(self) -> str | None:
        """Why this machine cannot run the backend and what would change that, or None."""

    def objections(self, problem: Problem) -> list[str]:
        """Why the backend does not take this problem; empty if it does."""

    def forward(self, problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor) -> None:
        """Overwrite every element of `out` and `lse`."""

    def backward(
        self,
        problem: Problem,
        tensors: Tensors,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        grads: Gradients,
    ) -> None:
        """Overwrite every element of every tensor in `grads`."""

    def decode(self, problem: Problem, tensors: CacheTensors, out: Tensor, lse: Tensor) -> None:
        """`forward` over a cache, for a problem that has one: overwrite every element of `out` and `lse`."""

    def append(self, problem: Problem, tensors: CacheTensors, k_new: Tensor, v_new: Tensor) -> None:
        """Write new rows behind the lengths of the cache, in place; a place that does not exist is not written."""


class UnsupportedProblemError(ValueError):
    """The named backend, or every backend, objects to the problem; the message lists the reasons."""


@dataclass(frozen=True)
class Explanation:
    """The verdict of every backend on one problem; `str()` is the list that `ioattn why` prints."""

    problem: Problem
    chosen: str | None
    verdicts: tuple[tuple[str, tuple[str, ...]], ...]

    def __str__(self) -> str:
        lines = [str(self.problem)]
        for name, reasons in self.verdicts:
            verdict = "; ".join(reasons) if reasons else "runs it" if name == self.chosen else "could run it"
            lines.append(f"  {name:<7} {verdict}")
        return "\n".join(lines)


def names() -> tuple[str, ...]:
    """The backends that exist, most preferred first."""
    return tuple(MODULES)


def check_name(name: str) -> None:
    """Raise ValueError with the names that exist unless `name` is one of them."""
    if name not in names():  # a tuple: also what has no hash is not in it
        raise ValueError(f"backend is {name!r}; it must be one of {', '.join(map(repr, MODULES))}, or None to choose")


@lru_cache
def load(name: str) -> Backend:
    """The backend of that name; raises ValueError with the names that exist."""
    check_name(name)
    return cast(Backend, importlib.import_module(MODULES[name]))


def is_forward_only(name: str) -> bool:
    """Whether the backend leaves gradients to others."""
    return getattr(load(name), "forward_only", False)


def reasons_against(name: str, problem: Problem, backward: bool = False) -> tuple[str, ...]:
    """Why backend `name` cannot run `problem` here, or its backward; empty if it can."""
    broken = unusable(name)
    if broken:
        return (broken,)
    return ("has no backward",) if backward and is_forward_only(name) else tuple(load(name).objections(problem))


def unusable(name: str) -> str | None:
    """Why this machine cannot run backend `name` at all, or None."""
    try:
        return load(name).unusable()
    except ImportError as error:
        return f"it cannot be imported: {error}"


@lru_cache(maxsize=4096)
def choose(problem: Problem, name: str | None = None, backward: bool = False) -> Backend:
    """The first backend without objections, or the named one; never a substitute for a named one.

    With `backward`, the one that differentiates.

    Raises:
        ValueError: if no backend has that name.
        UnsupportedProblemError: with each reason of each backend that was asked.
    """
    if name is not None:
        check_name(name)
    asked = names() if name is None else (name,)
    against = []
    for candidate in asked:
        reasons = reasons_against(candidate, problem, backward)
        if not reasons:
            return load(candidate)
        against.append(f"{candidate}: {'; '.join(reasons)}")
    raise UnsupportedProblemError(f"no backend that was asked runs {problem} ({' | '.join(against)})")


def prepare(step: Step, backend: Backend, problem: Problem, *given: Any) -> Callable[..., None]:
    """A step of a backend on this problem, ready for arguments that lie like those given."""
    maker: Callable[..., Callable[..., None]] | None = getattr(backend, f"prepare_{step}", None)
    return partial(getattr(backend, step), problem) if maker is None else maker(problem, *given)


def explain(problem: Problem) -> Explanation:
    """Every backend's verdict on `problem`, in order of preference."""
    verdicts = tuple((name, reasons_against(name, problem)) for name in names())
    return Explanation(problem, next((name for name, reasons in verdicts if not reasons), None), verdicts)
