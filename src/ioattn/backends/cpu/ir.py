"""A small builder of LLVM vector IR: values with operators, loops and branches as `with` blocks.

It writes the IR as text and needs nothing installed; `jit` compiles the text. Variables live on the stack, where LLVM's
first pass turns them into registers, so that neither the builder nor its reader meets a phi node. Integers are signed
and 64 bits wide unless a type says otherwise; memory is addressed in bytes and need not be aligned.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple, TypeAlias

FLOATS = ("half", "bfloat", "float")


class Type(NamedTuple):
    """A scalar (`lanes` 0) or a vector of scalars."""

    element: str
    lanes: int = 0

    def __str__(self) -> str:
        return f"<{self.lanes} x {self.element}>" if self.lanes else self.element

    @property
    def is_float(self) -> bool:
        """Whether the elements are floating point numbers."""
        return self.element in FLOATS

    def of(self, element: Type) -> Type:
        """The type with as many lanes of another element."""
        return Type(element.element, self.lanes)


I1, I8, I16, I32, I64 = (Type(f"i{bits}") for bits in (1, 8, 16, 32, 64))
F16, BF16, F32 = (Type(name) for name in FLOATS)
PTR = Type("ptr")


class Value:
    """One SSA value; arithmetic on it appends instructions to the function that it belongs to."""

    __slots__ = ("function", "name", "type")

    def __init__(self, function: Function, kind: Type, name: str):
        self.function, self.type, self.name = function, kind, name

    def __add__(self, other: Operand) -> Value:
        if self.type == PTR:
            return self.function.offset(self, other)
        return self.function.binary("add", self, other)

    def __sub__(self, other: Operand) -> Value:
        return self.function.binary("sub", self, other)

    def __mul__(self, other: Operand) -> Value:
        return self.function.binary("mul", self, other)

    def __rsub__(self, other: Operand) -> Value:
        return self.function.binary("sub", other, self)

    def __truediv__(self, other: Operand) -> Value:
        return self.function.binary("div", self, other)

    def __rtruediv__(self, other: Operand) -> Value:
        return self.function.binary("div", other, self)

    def __floordiv__(self, other: Operand) -> Value:
        """Integer division, for operands that are not negative."""
        return self.function.binary("sdiv", self, other)

    def __mod__(self, other: Operand) -> Value:
        return self.function.binary("srem", self, other)

    def __and__(self, other: Operand) -> Value:
        return self.function.binary("and", self, other)

    def __or__(self, other: Operand) -> Value:
        return self.function.binary("or", self, other)

    def __xor__(self, other: Operand) -> Value:
        return self.function.binary("xor", self, other)

    def __lshift__(self, other: Operand) -> Value:
        return self.function.binary("shl", self, other)

    def __rshift__(self, other: Operand) -> Value:
        """The logical shift: zeros come in from the left."""
        return self.function.binary("lshr", self, other)

    def __neg__(self) -> Value:
        return self.function.negate(self)

    def __lt__(self, other: Operand) -> Value:
        return self.function.compare("lt", self, other)

    def __le__(self, other: Operand) -> Value:
        return self.function.compare("le", self, other)

    def __gt__(self, other: Operand) -> Value:
        return self.function.compare("gt", self, other)

    def __ge__(self, other: Operand) -> Value:
        return self.function.compare("ge", self, other)

    def equals(self, other: Operand) -> Value:
        """Whether both are equal; false for a NaN."""
        return self.function.compare("eq", self, other)

    def differs(self, other: Operand) -> Value:
        """Whether they are unequal; true for a NaN."""
        return self.function.compare("ne", self, other)

    def load(self, kind: Type) -> Value:
        """What this pointer points at."""
        return self.function.emit(kind, f"load {kind}, ptr {self.name}, align 1")

    def store(self, value: Value) -> None:
        """Write to where this pointer points."""
        self.function.line(f"store {value.type} {value.name}, ptr {self.name}, align 1")

    def bits(self, kind: Type) -> Value:
        """The same bits read as another kind."""
        return self.function.convert("bitcast", self, kind)

    def to(self, element: Type) -> Value:
        """The nearest value of another element type; integers are signed, bool is 0 or 1."""
        return self.function.cast(self, element)

    __radd__ = __add__
    __rmul__ = __mul__
    __rand__ = __and__


Operand: TypeAlias = "Value | int | float"


class Variable:
    """A named place on the stack: read and write `value`."""

    def __init__(self, function: Function, kind: Type, place: str):
        self._function, self._type, self._place = function, kind, place

    @property
    def value(self) -> Value:
        """What the variable holds at this point of the program."""
        return self._function.emit(self._type, f"load {self._type}, ptr {self._place}")

    @value.setter
    def value(self, new: Operand) -> None:
        new = self._function.constant(new, self._type)
        self._function.line(f"store {new.type} {new.name}, ptr {self._place}")


class Module:
    """Functions under construction and the intrinsics they call."""

    def __init__(self) -> None:
        self._functions: dict[str, Function] = {}
        self._intrinsics: set[str] = set()

    def function(self, name: str, arguments: str, exported: bool = False) -> Function:
        """A new function without a result; only an exported one can be looked up after compiling.

        `arguments` are LLVM types and names: "ptr src, i64 rows, float factor".
        """
        if name in self._functions:
            raise ValueError(f"function {name!r} exists; names must be unique in a module")
        self._functions[name] = Function(self, name, exported, arguments)
        return self._functions[name]

    def declare(self, result: str, name: str, arguments: str) -> None:
        """Note an intrinsic that some function calls."""
        self._intrinsics.add(f"declare {result} @{name}({arguments})")

    def __str__(self) -> str:
        bodies = "\n".join(str(function) for function in self._functions.values())
        # Micro-kernels stay functions of their own: inlined, they would compete for registers.
        return "\n".join(sorted(self._intrinsics)) + f"\n{bodies}\nattributes #0 = {{ noinline nounwind }}\n"


class Function:
    """One function under construction; `args` holds its arguments by name."""

    def __init__(self, module: Module, name: str, exported: bool, arguments: str):
        self.module, self.name = module, name
        formals = [argument.split() for argument in arguments.split(",")]
        self.args = SimpleNamespace(**{key: Value(self, Type(kind), f"%{key}") for kind, key in formals})
        formal = ", ".join(f"{kind} %{key}" for kind, key in formals)
        self._head = f"define {'' if exported else 'internal '}void @{name}({formal}) #0 {{\nentry:"
        self._stack: list[str] = []
        self._lines: list[str] = []
        self._count = 0
        self._types = [Type(kind) for kind, _ in formals]

    def __str__(self) -> str:
        return "\n".join([self._head, *self._stack, "br label %body", "body:", *self._lines, "ret void", "}"])

    def line(self, text: str) -> None:
        """Append a line that has no result."""
        self._lines.append(text)

    def _name(self) -> str:
        self._count += 1
        return f"%t{self._count}"

    def emit(self, kind: Type, text: str) -> Value:
        """Append an instruction and return its result."""
        name = self._name()
        self._lines.append(f"{name} = {text}")
        return Value(self, kind, name)

    def constant(self, x: Operand, kind: Type = I64) -> Value:
        """`x` as a value of `kind`: numbers become constants, a scalar is copied to every lane."""
        if isinstance(x, Value):
            return self._splat(x, kind) if x.type != kind else x
        if kind.lanes:
            inner = ", ".join([f"{kind.element} {_literal(x, kind)}"] * kind.lanes)
            return Value(self, kind, f"<{inner}>")
        return Value(self, kind, _literal(x, kind))

    def lane_numbers(self, lanes: int, element: Type = I32) -> Value:
        """The vector 0, 1, 2, ..."""
        return Value(self, Type(element.element, lanes), f"<{', '.join(f'{element} {i}' for i in range(lanes))}>")

    def _splat(self, x: Value, kind: Type) -> Value:
        if x.type.lanes or x.type.element != kind.element:
            raise TypeError(f"{x.type} given where {kind} is needed; convert it first")
        first = self.emit(kind, f"insertelement {kind} poison, {x.type} {x.name}, i32 0")
        return self.emit(
            kind, f"shufflevector {kind} {first.name}, {kind} poison, <{kind.lanes} x i32> zeroinitializer"
        )

    def _pair(self, a: Operand, b: Operand) -> tuple[Value, Value]:
        if isinstance(a, Value) and (not isinstance(b, Value) or a.type.lanes or not b.type.lanes):
            return a, self.constant(b, a.type)
        assert isinstance(b, Value)
        return self.constant(a, b.type), b

    def binary(self, operation: str, a: Operand, b: Operand) -> Value:
        """An instruction on two operands of one type, at least one of them a value."""
        x, y = self._pair(a, b)
        prefix = "f" if x.type.is_float else ""
        return self.emit(x.type, f"{prefix}{operation} {x.type} {x.name}, {y.name}")

    def compare(self, relation: str, a: Operand, b: Operand) -> Value:
        """An ordered comparison: false for a NaN, except "ne"."""
        x, y = self._pair(a, b)
        if x.type.is_float:
            kind, code = "fcmp", "une" if relation == "ne" else f"o{relation}"
        else:
            kind, code = "icmp", relation if relation in ("eq", "ne") else f"s{relation}"
        return self.emit(x.type.of(I1), f"{kind} {code} {x.type} {x.name}, {y.name}")

    def negate(self, x: Value) -> Value:
        """The same number with the other sign."""
        if x.type.is_float:
            return self.emit(x.type, f"fneg {x.type} {x.name}")
        return self.binary("sub", 0, x)

    def offset(self, pointer: Value, by: Operand) -> Value:
        """A pointer `by` bytes further on."""
        step = self.constant(by)
        return self.emit(PTR, f"getelementptr i8, ptr {pointer.name}, i64 {step.name}")

    def convert(self, operation: str, x: Value, kind: Type) -> Value:
        """A conversion by its LLVM name, nothing if the type is right already."""
        if x.type == kind:
            return x
        return self.emit(kind, f"{operation} {x.type} {x.name} to {kind}")

    def cast(self, x: Value, element: Type) -> Value:
        """The nearest value of another element type; see `Value.to`."""
        old, new = x.type, x.type.of(element)
        if old == new:
            return x
        if old.element == "i1":
            return self.convert("uitofp" if new.is_float else "zext", x, new)
        if old.is_float and new.is_float:
            wider = FLOATS.index(new.element) > FLOATS.index(old.element)
            return self.convert("fpext" if wider else "fptrunc", x, new)
        if new.is_float:
            return self.convert("sitofp", x, new)
        if old.is_float:
            return self.convert("fptosi", x, new)
        return self.convert("sext" if int(new.element[1:]) > int(old.element[1:]) else "trunc", x, new)

    def select(self, condition: Value, yes: Operand, no: Operand) -> Value:
        """Lane by lane `yes` where the condition holds, else `no`."""
        x, y = self._pair(yes, no)
        mask = self.constant(condition, x.type.of(I1)) if x.type.lanes else condition
        return self.emit(x.type, f"select {mask.type} {mask.name}, {x.type} {x.name}, {y.type} {y.name}")

    def shuffle(self, a: Value, b: Value, order: list[int]) -> Value:
        """The lanes `order` of `a` followed by `b`."""
        result = Type(a.type.element, len(order))
        mask = ", ".join(f"i32 {lane}" for lane in order)
        return self.emit(result, f"shufflevector {a.type} {a.name}, {b.type} {b.name}, <{len(order)} x i32> <{mask}>")

    def intrinsic(self, name: str, result: Type, *arguments: Value) -> Value:
        """Call one of LLVM's own functions."""
        types = ", ".join(str(x.type) for x in arguments)
        self.module.declare(str(result), name, types)
        passed = ", ".join(f"{x.type} {x.name}" for x in arguments)
        return self.emit(result, f"call {result} @{name}({passed})")

    def fma(self, a: Operand, b: Value, c: Value) -> Value:
        """`a * b + c`, rounded once."""
        x = self.constant(a, b.type)
        return self.intrinsic(f"llvm.fma.{_suffix(b.type)}", b.type, x, b, c)

    def largest(self, a: Operand, b: Operand) -> Value:
        """The larger of two; of floats, `b` when either is a NaN."""
        x, y = self._pair(a, b)
        return self.select(x > y, x, y)

    def smallest(self, a: Operand, b: Operand) -> Value:
        """The smaller of two; of floats, `b` when either is a NaN."""
        x, y = self._pair(a, b)
        return self.select(x < y, x, y)

    def magnitude(self, x: Value) -> Value:
        """The absolute value."""
        if x.type.is_float:
            return self.intrinsic(f"llvm.fabs.{_suffix(x.type)}", x.type, x)
        return self.select(x < 0, -x, x)

    def total(self, x: Value) -> Value:
        """The sum of all lanes, added up as a balanced tree."""
        while x.type.lanes > 1:
            half = x.type.lanes // 2
            low, high = list(range(half)), list(range(half, 2 * half))
            x = self.shuffle(x, x, low) + self.shuffle(x, x, high)
        return self.lane(x, 0)

    def lane(self, x: Value, index: int) -> Value:
        """One element of a vector."""
        return self.emit(Type(x.type.element), f"extractelement {x.type} {x.name}, i32 {index}")

    def any(self, x: Value) -> Value:
        """Whether any lane of a vector of bits is set."""
        return self.intrinsic(f"llvm.vector.reduce.or.v{x.type.lanes}i1", I1, x)

    def variable(self, start: Operand, kind: Type = I64) -> Variable:
        """A stack variable that starts as `start`."""
        kind = start.type if isinstance(start, Value) else kind
        place = self._name()
        self._stack.append(f"{place} = alloca {kind}")
        made = Variable(self, kind, place)
        made.value = start
        return made

    def fetch_add(self, counter: Value, by: int, ordering: str = "monotonic") -> Value:
        """Add to a counter that threads share and return what it held before."""
        return self.emit(I64, f"atomicrmw add ptr {counter.name}, i64 {by} {ordering}")

    def prefetch(self, place: Value) -> None:
        """Ask for the cache line at an address, which need not be one of the program's."""
        self.module.declare("void", "llvm.prefetch.p0", "ptr, i32, i32, i32")
        self.line(f"call void @llvm.prefetch.p0(ptr {place.name}, i32 0, i32 3, i32 1)")

    def call(self, callee: Function, *arguments: Operand) -> None:
        """Call a function of this module."""
        values = [self.constant(x, kind) for x, kind in zip(arguments, callee._types, strict=True)]
        self.line(f"call void @{callee.name}({', '.join(f'{x.type} {x.name}' for x in values)})")

    def _label(self) -> str:
        self._count += 1
        return f"b{self._count}"

    @contextmanager
    def loop(self, start: Operand, stop: Operand, step: Operand = 1) -> Iterator[Value]:
        """Run the block for each of `range(start, stop, step)`, with a positive step."""
        counter, end = self.variable(start), self.constant(stop)
        head, body, done = self._label(), self._label(), self._label()
        self.line(f"br label %{head}\n{head}:")
        index = counter.value
        self.line(f"br i1 {(index < end).name}, label %{body}, label %{done}\n{body}:")
        yield index
        counter.value = index + step
        self.line(f"br label %{head}\n{done}:")

    def unrolled(self, stop: Value, times: int) -> Iterator[Value]:
        """A loop over `range(stop)` in steps of `times`, then one over what is left, for a block without yields."""
        whole = stop - stop % times
        with self.loop(0, whole, times) as index:
            for i in range(times):
                yield index + i
        with self.loop(whole, stop) as index:
            yield index

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """Run the block if the condition holds."""
        body, done = self._label(), self._label()
        self.line(f"br i1 {condition.name}, label %{body}, label %{done}\n{body}:")
        yield
        self.line(f"br label %{done}\n{done}:")

    @contextmanager
    def unless(self, condition: Value) -> Iterator[None]:
        """Run the block if the condition does not hold."""
        with self.when(condition ^ 1):
            yield

    @contextmanager
    def tasks(self, counter: Value, count: Value) -> Iterator[Value]:
        """Run the block for every task number below `count` that this thread draws from the shared counter."""
        head, body, done = self._label(), self._label(), self._label()
        self.line(f"br label %{head}\n{head}:")
        task = self.fetch_add(counter, 1)
        self.line(f"br i1 {(task < count).name}, label %{body}, label %{done}\n{body}:")
        yield task
        self.line(f"br label %{head}\n{done}:")


def _suffix(kind: Type) -> str:
    short = {"float": "f32", "half": "f16", "bfloat": "bf16"}.get(kind.element, kind.element)
    return f"v{kind.lanes}{short}" if kind.lanes else short


def _literal(x: int | float, kind: Type) -> str:
    if not kind.is_float:
        return str(int(x))
    if math.isnan(x):
        return "0x7FF8000000000000"
    single = struct.unpack("<f", struct.pack("<f", x))[0]
    return f"0x{struct.unpack('<Q', struct.pack('<d', single))[0]:016X}"
