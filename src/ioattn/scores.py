"""Score terms: what happens to a scaled score before the mask, each formula written once.

A term is plain arithmetic on values that may be floats, torch tensors, Triton blocks or vectors of LLVM IR; the only
name it uses besides arithmetic is `tanh`, which `compose.bind` replaces by the compiler's own.
`step` maps a score to the next score; `dstep` maps the gradient of the result to the gradient of the input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Value = Any
"""A score in whatever form a backend computes with."""

OperandKind = Literal["scalar", "head", "tile"]
"""One number for the whole problem, one per query head, or one per score."""


def tanh(x: Value) -> Value:
    """Stands for the backend's hyperbolic tangent; `compose.bind` replaces it."""
    raise NotImplementedError("bind the term to a compiler first: compose.bind")


@dataclass(frozen=True)
class Term:
    """One change of the scores: its operand, its formula and the formula's derivative.

    `step(score, distance, operand)` and `dstep(dscore, score, distance, operand)`, where `score` is the value that
    `step` received and `distance = abs(i + Nk - Nq - j)`.
    """

    name: str
    operand: OperandKind
    step: Callable[[Value, Value, Value], Value]
    dstep: Callable[[Value, Value, Value, Value], Value]


def _softcap_step(score, distance, operand):  # type: ignore[no-untyped-def]
    return operand * tanh(score * (1.0 / operand))


def _softcap_dstep(dscore, score, distance, operand):  # type: ignore[no-untyped-def]
    squashed = tanh(score * (1.0 / operand))
    return dscore * (1.0 - squashed * squashed)


def _alibi_step(score, distance, operand):  # type: ignore[no-untyped-def]
    return score - operand * distance


def _bias_step(score, distance, operand):  # type: ignore[no-untyped-def]
    return score + operand


def _additive_dstep(dscore, score, distance, operand):  # type: ignore[no-untyped-def]
    return dscore


SOFTCAP = Term("softcap", "scalar", _softcap_step, _softcap_dstep)
ALIBI = Term("alibi", "head", _alibi_step, _additive_dstep)
BIAS = Term("bias", "tile", _bias_step, _additive_dstep)

ORDER = (SOFTCAP, ALIBI, BIAS)
"""The order in which terms apply, after `scale * q @ k.T` and before the mask."""
