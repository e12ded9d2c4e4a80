"""Folds score terms into one function for a given compiler.

A backend hands its own primitives and its own decorator; it gets back two functions that it calls once per tile:
`step(score, distance, operands)` and `dstep(dscore, score, distance, operands)`, with `operands` a tuple in the order
of the terms. One function, not a tuple of functions: a compiler's cache key then covers every formula in it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ioattn.scores import Term

Function = Callable[..., Any]


@dataclass(frozen=True)
class Formula:
    """The folded terms: `step` and `dstep`, ready to call from the backend's kernels."""

    step: Function
    dstep: Function


def bind(function: Function, names: Mapping[str, Any], compiler: Callable[[Function], Function]) -> Function:
    """`function` re-created with `names` as globals it may use, then passed through `compiler`.

    >>> from ioattn.scores import SOFTCAP
    >>> bind(SOFTCAP.step, {"tanh": lambda x: x}, lambda f: f)(3.0, 0, 2.0)
    3.0
    """
    scope = {**function.__globals__, **names}
    return compiler(types.FunctionType(function.__code__, scope, function.__name__))


def fold(
    terms: Sequence[Term], names: Mapping[str, Any], compiler: Callable[[Function], Function] = lambda f: f
) -> Formula:
    """All `terms` as one `Formula`, compiled with the primitives in `names` (at least `tanh`)."""
    step, dstep = bind(_identity_step, {}, compiler), bind(_identity_dstep, {}, compiler)
    for slot, term in enumerate(terms):
        leaf = {
            "slot": slot,
            "term_step": bind(term.step, names, compiler),
            "term_dstep": bind(term.dstep, names, compiler),
        }
        before = {"before_step": step, "before_dstep": dstep}
        step = bind(_then_step, {**leaf, **before}, compiler)
        dstep = bind(_then_dstep, {**leaf, **before}, compiler)
    return Formula(step, dstep)


# What `fold` fills in for each term through `bind`; these values are never called.
slot = 0
term_step: Function = lambda *_: None  # noqa: E731
term_dstep = before_step = before_dstep = term_step


def _identity_step(score, distance, operands):  # type: ignore[no-untyped-def]
    return score


def _identity_dstep(dscore, score, distance, operands):  # type: ignore[no-untyped-def]
    return dscore


def _then_step(score, distance, operands):  # type: ignore[no-untyped-def]
    return term_step(before_step(score, distance, operands), distance, operands[slot])


def _then_dstep(dscore, score, distance, operands):  # type: ignore[no-untyped-def]
    reached = before_step(score, distance, operands)
    dreached = term_dstep(dscore, reached, distance, operands[slot])
    return before_dstep(dreached, score, distance, operands)
