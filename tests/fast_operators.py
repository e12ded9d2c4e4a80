"""Operators of tensors in Triton's interpreter: straight to NumPy where both operands have one plain type.

All else, such as mixed types, goes the interpreter's own way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

Handle = interpreter.TensorHandle
WHOLE = slice(None)

PLAIN = {"i": (tl.int32, tl.int64), "f": (tl.float32, tl.float64), "h": (tl.float16,), "b": (tl.int1,)}
CASTS = {(a, b) for a in "ifb" for b in "ifh"} | {("h", "f")}
"""Conversions that NumPy does as the interpreter does them, in one step."""


def patch_operators() -> None:
    """Replace the operators of a `tl` that the interpreter has patched."""
    tl.dtype.plain = "-"
    tl.pointer_type.plain = "p"
    for plain, dtypes in PLAIN.items():
        for dtype in dtypes:
            dtype.plain = plain
    for name, function, kinds in (
        ("add", np.add, "ifp"),
        ("sub", np.subtract, "if"),
        ("mul", np.multiply, "if"),
        ("truediv", np.divide, "f"),
        ("floordiv", lambda a, b: (a - np.fmod(a, b)) // b, "i"),
        ("mod", np.fmod, "if"),
        ("and", np.bitwise_and, "ib"),
        ("or", np.bitwise_or, "ib"),
        ("xor", np.bitwise_xor, "ib"),
        ("lshift", np.left_shift, "i"),
        ("rshift", np.right_shift, "i"),
    ):
        _patch(f"__{name}__", _operator, function, kinds)
        _patch(f"__r{name}__", _operator, lambda a, b, function=function: function(b, a), kinds.replace("p", ""))
    for name, function in (
        ("lt", np.less),
        ("le", np.less_equal),
        ("gt", np.greater),
        ("ge", np.greater_equal),
        ("eq", np.equal),
        ("ne", np.not_equal),
    ):
        _patch(f"__{name}__", _operator, function, "if", truth=True)
    _patch("__getitem__", _getitem)
    _patch("to", _to)
    tl.where = _where(tl.where)
    tl.minimum = _extreme(tl.minimum, np.minimum, np.fmin)
    tl.maximum = _extreme(tl.maximum, np.maximum, np.fmax)


def _patch(name: str, made: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    setattr(tl.tensor, name, made(getattr(tl.tensor, name), *args, **kwargs))


def _operator(slow: Callable[..., Any], function: Any, kinds: str, truth: bool = False) -> Callable[..., Any]:
    def operator(self: Any, other: Any) -> Any:
        if type(other) is tl.constexpr:
            other = other.value
        if type(other) is tl.tensor and self.dtype is not other.dtype and self.dtype.plain == other.dtype.plain == "i":
            self, other = _as_wide(self, other), _as_wide(other, self)
        dtype = self.dtype
        data = _beside(dtype, other) if dtype.plain in kinds else None
        if data is None:
            return slow(self, other)
        data = function(self.handle.data, data)
        made = self.type
        if type(other) is tl.tensor and other.type is not made and other.type.is_block():
            made = tl.block_type(dtype, data.shape)
        if truth:
            made = tl.block_type(tl.int1, data.shape) if made.is_block() else tl.int1
        return tl.tensor(Handle(data, dtype), made)

    return operator


def _as_wide(one: Any, other: Any) -> Any:
    return one.to(tl.int64) if other.dtype is tl.int64 else one


def _beside(dtype: Any, other: Any) -> Any:
    """What NumPy takes beside a tensor of `dtype`; None where it would not do as the interpreter does."""
    kind, plain = type(other), dtype.plain
    if kind is tl.tensor:
        if plain == "p" and other.dtype.plain == "i":
            return max(1, dtype.element_ty.primitive_bitwidth // 8) * other.handle.data.astype(np.uint64)
        return other.handle.data if other.dtype is dtype and plain != "p" else None
    if kind is int and plain in "if":
        return other if -(2**31) <= other < 2**31 else None
    return other if kind is float and plain == "f" else None


def _getitem(slow: Callable[..., Any]) -> Callable[..., Any]:
    def getitem(self: Any, index: Any) -> Any:
        if type(index) is tuple and self.type.is_block() and all(x is None or x == WHOLE for x in index):
            data = self.handle.data[index]
            return tl.tensor(Handle(data, self.dtype), tl.block_type(self.dtype, data.shape))
        return slow(self, index)

    return getitem


def _to(slow: Callable[..., Any]) -> Callable[..., Any]:
    def to(self: Any, dtype: Any, *how: Any, **named: Any) -> Any:
        source = self.dtype
        if how or named or (source.plain, dtype.plain) not in CASTS:
            return slow(self, dtype, *how, **named)
        if source is dtype:
            return self
        data = self.handle.data.astype(interpreter._get_np_dtype(dtype))
        return tl.tensor(Handle(data, dtype), tl.block_type(dtype, data.shape) if self.type.is_block() else dtype)

    return to


def _extreme(slow: Callable[..., Any], of_integers: Any, of_floats: Any) -> Callable[..., Any]:
    integers, floats = _operator(slow, of_integers, "i"), _operator(slow, of_floats, "f")

    def extreme(x: Any, y: Any, **how: Any) -> Any:
        if how or type(x) is not tl.tensor:
            return slow(x, y, **how)
        return (integers if x.dtype.plain == "i" else floats)(x, y)

    return extreme


def _where(slow: Callable[..., Any]) -> Callable[..., Any]:
    def where(condition: Any, x: Any, y: Any) -> Any:
        x, y = (a.value if type(a) is tl.constexpr else a for a in (x, y))
        dtype = x.dtype if type(x) is tl.tensor else getattr(y, "dtype", None)
        if dtype is None or type(condition) is not tl.tensor or condition.dtype is not tl.int1:
            return slow(condition, x, y)
        operands = _beside(dtype, x), _beside(dtype, y)
        if operands[0] is None or operands[1] is None:
            return slow(condition, x, y)
        data = np.where(condition.handle.data, *operands)
        blocks = any(type(a) is tl.tensor and a.type.is_block() for a in (condition, x, y))
        return tl.tensor(Handle(data, dtype), tl.block_type(dtype, data.shape) if blocks else dtype)

    return where
