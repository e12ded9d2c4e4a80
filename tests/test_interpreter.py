"""Triton's interpreter as the tests speed it up gives the same types, shapes and bits as it does by itself."""

from __future__ import annotations

import itertools
import operator
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

triton = pytest.importorskip("triton", minversion="3.6", reason="Triton is not installed")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs Triton's interpreter: TRITON_INTERPRET=1", allow_module_level=True)

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

Found = dict[str, Any]

DTYPES = ("int1", "int32", "int64", "uint8", "float16", "bfloat16", "float32", "float64")
SHAPES: tuple[tuple[int, ...], ...] = ((), (8,), (1, 8), (4, 1), (4, 8))
SHAPE_PAIRS = [((), ()), ((), (4, 8)), ((8,), ()), ((8,), (4, 8)), ((4, 1), (1, 8)), ((4, 8), (4, 8)), ((8,), (1,))]
# No subnormal ones: the interpreter by itself makes other bfloat16 numbers of them.
NUMBERS = (0, 3, -2, 2**31 - 1, 2**40, 0.0, -0.0, 2.5, float("inf"), float("nan"), True)
FLOATS = [0.0, -0.0, 1.5, -2.75, 2e-38, 3e38, float("inf"), float("nan")]
OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and_", "or_", "xor", "lshift", "rshift")
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")

UNAIDED = f"""
import pickle, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_interpreter
test_interpreter.patch_language()
sys.stdout.buffer.write(pickle.dumps(test_interpreter.results()))
"""


def patch_language() -> None:
    """What the interpreter does at each launch."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))


def tensor(dtype: str, shape: tuple[int, ...], special: bool = True) -> Any:
    """Numbers of either sign, without a zero unless `special`, which has whatever the type holds."""
    kind, size = getattr(tl, dtype), int(np.prod(shape))
    if kind.is_floating():
        numbers = np.resize(FLOATS if special else [1.5, -2.75], size).astype(np.float32)
        with np.errstate(over="ignore"):
            data = (numbers.view("u4") >> 16).astype("u2") if dtype == "bfloat16" else numbers.astype(dtype)
    else:
        data = np.resize([0, 1, 2, 5] if special else [1, 3], size).astype(interpreter._get_np_dtype(kind))
    data = data.reshape(shape or (1,))
    return tl.tensor(interpreter.TensorHandle(data, kind), tl.block_type(kind, list(shape)) if shape else kind)


def pointer(dtype: str, shape: tuple[int, ...]) -> Any:
    kind = tl.pointer_type(getattr(tl, dtype))
    data = np.arange(int(np.prod(shape)), dtype=np.uint64).reshape(shape or (1,)) + 4096
    return tl.tensor(interpreter.TensorHandle(data, kind), tl.block_type(kind, list(shape)) if shape else kind)


def described(compute: Callable[..., Any], *operands: Any) -> Any:
    """Type and bits of a result, spread out to the type's shape."""
    try:
        with np.errstate(all="ignore"):
            made = compute(*operands)
    except Exception:
        return "an error"
    if not isinstance(made, tl.tensor):
        return repr(made)
    shape, data = tuple(getattr(made.type, "shape", (1,))), made.handle.data
    if compute in (tl.minimum, tl.maximum):
        # Of zeros NumPy takes one or the other, by how they lie in memory and by the processor.
        negative_zero = 0x8000 if made.handle.dtype.scalar == tl.bfloat16 else 0
        data = np.where(data == negative_zero, data.dtype.type(0), data)
    return str(made.type), str(made.handle.dtype), np.broadcast_to(data, shape).tobytes()


def pairs(first: tuple[str, ...] = DTYPES, second: tuple[str, ...] = DTYPES) -> Iterator[tuple[str, Any, Any]]:
    for a, b in itertools.product(first, second):
        for one, other in SHAPE_PAIRS:
            yield f"{a}{one} {b}{other}", tensor(a, one), tensor(b, other, special=False)


def of_two_tensors() -> Found:
    found = {}
    for name in OPERATORS + COMPARISONS:
        for operands, x, y in pairs():
            found[f"{name} {operands}"] = described(getattr(operator, name), x, y)
    return found


def of_numbers() -> Found:
    found = {}
    for name, dtype, shape, number in itertools.product(OPERATORS + COMPARISONS, DTYPES, ((), (4, 8)), NUMBERS):
        if (number == 0 and name in ("floordiv", "mod")) or (number not in range(32) and "shift" in name):
            continue
        compute, x = getattr(operator, name), tensor(dtype, shape)
        found[f"{name} {dtype}{shape} {number!r}"] = described(compute, x, number)
        found[f"{name} {dtype}{shape} constant {number!r}"] = described(compute, x, tl.constexpr(number))
        if number and "shift" not in name:
            found[f"{name} {number!r} {dtype}{shape}"] = described(compute, number, tensor(dtype, shape, special=False))
    return found


def of_functions() -> Found:
    found = {}
    for operands, x, y in pairs():
        found[f"minimum {operands}"] = described(tl.minimum, x, y)
        found[f"maximum {operands}"] = described(tl.maximum, x, y)
        for shape in ((), (4, 8)):
            found[f"where {shape} {operands}"] = described(tl.where, tensor("int1", shape), x, y)
    for (a, b), shape in itertools.product(itertools.product(DTYPES, DTYPES), SHAPES):
        found[f"{a}{shape} to {b}"] = described(tensor(a, shape).to, getattr(tl, b))
        found[f"{a}{shape} {b} bits"] = described(lambda x, b: x.to(b, bitcast=True), tensor(a, shape), getattr(tl, b))
    for dtype, number in itertools.product(DTYPES, NUMBERS):
        found[f"where {dtype} {number!r}"] = described(tl.where, tensor("int1", (4, 8)), tensor(dtype, (4, 8)), number)
        found[f"full {dtype} {number!r}"] = described(tl.full, (4, 8), number, getattr(tl, dtype))
        found[f"minimum {dtype} {number!r}"] = described(tl.minimum, tensor(dtype, (8,)), number)
        found[f"maximum {number!r} {dtype}"] = described(tl.maximum, number, tensor(dtype, (8,)))
    return found


def of_places() -> Found:
    found = {}
    for to, one, other, dtype in itertools.product(("int1", "float16"), SHAPES, SHAPES, ("int32", "uint8", "float32")):
        place, x = pointer(to, one), tensor(dtype, other)
        found[f"pointer to {to}{one} + {dtype}{other}"] = described(operator.add, place, x)
        found[f"{dtype}{other} + pointer to {to}{one}"] = described(operator.add, x, place)
        found[f"pointer to {to}{one} - {dtype}{other}"] = described(operator.sub, place, x)
        found[f"pointer to {to}{one} + 3"] = described(operator.add, place, 3)
    whole = slice(None)
    for shape, index in itertools.product(SHAPES, (None, (None, whole), (whole, None), (whole, whole, None), (whole,))):
        found[f"{shape}[{index}]"] = described(operator.getitem, tensor("float32", shape), index)
    found["arange"] = described(tl.arange, 0, 8), described(tl.arange, 8, 16), described(tl.arange, 0, 8)
    return found


def results() -> Found:
    return of_two_tensors() | of_numbers() | of_functions() | of_places()


def test_results_are_those_of_the_interpreter_by_itself() -> None:
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", UNAIDED], capture_output=True, check=True)
    expected, found = pickle.loads(run.stdout), results()
    assert {key: (value, expected[key]) for key, value in found.items() if value != expected[key]} == {}
    assert found.keys() == expected.keys()
