"""Micro-kernels: matrix products that keep a tile in registers, and the functions of a vector that softmax needs.

Lanes are queries. A score tile is S^T, `count` keys by `vectors` vectors of queries: K is broadcast element by element
from its own rows, Q^T is packed once, and maximum, sum and rescaling of a query run down its lane. `paired` products
take bfloat16 operands two by two along the summed dimension, for the instruction that multiplies and adds pairs.

A weight of -0.0 marks a masked score. It adds nothing to a product of finite numbers; `guarded` products, used where
the other operand is not finite, skip it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ioattn.backends.cpu.ir import BF16, F16, F32, I16, I32, Function, Module, Type, Value, Variable
from ioattn.backends.cpu.jit import Target

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
NEGATIVE_ZERO = -(2**31)
"""The bits of -0.0, as an int32."""


SIZES = {"fp32": 4, "fp16": 2, "bf16": 2, "bool": 1}
"""Bytes of one element."""


class Tile(NamedTuple):
    """A register tile: so many broadcast rows by so many vectors of lanes are summed at once."""

    rows: int
    vectors: int


_TILES = {16: {1: 16, 2: 8, 3: 8, 4: 6}, 8: {1: 8, 2: 4, 3: 4}, 4: {1: 12, 2: 8, 3: 6, 4: 4}}
"""Broadcast rows by lanes and vectors: as many as the registers hold next to the operands."""


def tile_of(target: Target, vectors: int) -> Tile:
    """The register tile of a target for panels of that many vectors."""
    return Tile(_TILES[target.lanes][vectors], vectors)


def widest(target: Target) -> int:
    """The most vectors a panel may have."""
    return max(_TILES[target.lanes])


class Layout(NamedTuple):
    """Strides in bytes that are known when the kernel is built; None is a run-time argument."""

    a_row: int | None = None
    a_step: int | None = None
    b_step: int | None = None
    c_row: int | None = None


def read(f: Function, place: Value, dtype: str, lanes: int = 0) -> Value:
    """One element, or `lanes` neighbours, as fp32."""
    if dtype == "fp32":
        return place.load(Type("float", lanes))
    if dtype == "fp16":
        return place.load(Type(F16.element, lanes)).to(F32)
    if dtype == "bf16":
        word = f.convert("zext", place.load(Type("i16", lanes)), Type("i32", lanes))
        return (word << 16).bits(Type("float", lanes))
    return f.select(place.load(Type("i8", lanes)).differs(0), f.constant(1.0, Type("float", lanes)), 0.0)


def read_columns(f: Function, place: Value, dtype: str, lanes: int, vectors: int) -> list[Value]:
    """Neighbouring columns as `vectors` vectors of fp32: of bfloat16, the even and the odd columns of every two.

    A 32-bit word holds an even and an odd column, and a shift or a mask makes it one of them; neighbours apart would
    take a move across lanes and a shift each. A single vector is read as it lies.
    """
    if dtype != "bf16" or vectors == 1:
        return [read(f, place + n * lanes * SIZES[dtype], dtype, lanes) for n in range(vectors)]
    words = [(place + n * lanes * 4).load(Type("float", lanes)) for n in range(vectors // 2)]
    return [half(f, word) for word in words for half in (_low, _high)]


def product(
    module: Module, target: Target, name: str, tile: Tile, layout: Layout, *, start: str, paired: bool, guard: str = ""
) -> Function:
    """C[count][vectors] = start + A[count][depth] B[depth][vectors], A broadcast, summed from zero and added once.

    start: "zero" overwrites C, "add" adds to it, "rescale" multiplies it by the vectors at `factors` first.
    guard: which operand holds the weights that are skipped where they are -0.0: "a", "b" or none.
    """
    arguments = "ptr a, i64 a_row, i64 a_step, ptr b, i64 b_step, ptr c, i64 c_row, i64 count, i64 depth, ptr factors"
    f = module.function(name, arguments)
    emit = _Product(f, target, layout, start, paired, guard)
    first: Value | int = 0
    # Row by row only where the skipping costs more than the rows.
    sizes = [1] if guard else sorted({tile.rows, 4 if tile.rows > 4 else 1, 1}, reverse=True)
    for rows in sizes:
        stop = f.args.count if rows == 1 else f.args.count - (f.args.count - first) % rows
        with f.loop(first, stop, rows) as row:
            emit.tile(row, Tile(rows, tile.vectors))
        first = stop
    return f


class _Product:
    """What the tiles of one product function share."""

    def __init__(self, f: Function, target: Target, layout: Layout, start: str, paired: bool, guard: str):
        self.f, self.start, self.paired, self.guard = f, start, paired, guard
        self.vector = Type("float", target.lanes)
        self.size = 4 * target.lanes
        args = f.args
        self.a_row, self.a_step, self.b_step, self.c_row = (
            run_time if known is None else f.constant(known)
            for known, run_time in zip(layout, (args.a_row, args.a_step, args.b_step, args.c_row), strict=True)
        )

    def tile(self, row: Value, tile: Tile) -> None:
        f, depth = self.f, self.f.args.depth
        acc = [f.variable(0.0, self.vector) for _ in range(tile.rows * tile.vectors)]
        a, b = f.variable(f.args.a + row * self.a_row), f.variable(f.args.b)
        # One step of a large tile hides the loop; a small one is unrolled until it does.
        unroll = 1 if self.guard else max(1, min(4, 32 // len(acc)))
        whole = depth - depth % unroll if unroll > 1 else depth
        with f.loop(0, whole, unroll):
            for _ in range(unroll):
                self._step(a, b, acc, tile)
        if unroll > 1:
            with f.loop(whole, depth):
                self._step(a, b, acc, tile)
        self._finish(row, acc, tile)

    def _step(self, a: Variable, b: Variable, acc: list[Variable], tile: Tile) -> None:
        f, a_at, b_at = self.f, a.value, b.value
        lanes = [(b_at + v * self.size).load(self.vector) for v in range(tile.vectors)]
        for r in range(tile.rows):
            broadcast = f.constant((a_at + self.a_row * r).load(F32), self.vector)
            for v in range(tile.vectors):
                total = acc[r * tile.vectors + v]
                total.value = self._multiply_add(broadcast, lanes[v], total.value)
        a.value = a_at + self.a_step
        b.value = b_at + self.b_step

    def _multiply_add(self, a: Value, b: Value, total: Value) -> Value:
        f = self.f
        if self.paired and not self.guard:
            return dot_pairs(f, total, b, a)
        if not self.guard:
            return f.fma(a, b, total)
        words = self.vector.of(I32)
        a_parts, b_parts = ([x] for x in (a, b))
        if self.paired:
            a_parts, b_parts = ([_low(f, x), _high(f, x)] for x in (a, b))
        for x, y in zip(a_parts, b_parts, strict=True):
            weight = (x if self.guard == "a" else y).bits(words)
            total = f.select(weight.differs(NEGATIVE_ZERO), f.fma(x, y, total), total)
        return total

    def _finish(self, row: Value, acc: list[Variable], tile: Tile) -> None:
        f, c = self.f, self.f.args.c + row * self.c_row
        for v in range(tile.vectors):
            factor = (f.args.factors + v * self.size).load(self.vector) if self.start == "rescale" else None
            for r in range(tile.rows):
                place, total = c + (self.c_row * r + v * self.size), acc[r * tile.vectors + v].value
                if factor is not None:
                    total = f.fma(place.load(self.vector), factor, total)
                elif self.start == "add":
                    total = place.load(self.vector) + total
                place.store(total)


def dot_pairs(f: Function, total: Value, a: Value, b: Value) -> Value:
    """`total + a[2i] * b[2i] + a[2i + 1] * b[2i + 1]` of bfloat16 pairs, through the processor's instruction."""
    pairs = Type("bfloat", 2 * total.type.lanes)
    bits = 32 * total.type.lanes
    return f.intrinsic(f"llvm.x86.avx512bf16.dpbf16ps.{bits}", total.type, total, a.bits(pairs), b.bits(pairs))


def _low(f: Function, x: Value) -> Value:
    return (x.bits(x.type.of(I32)) << 16).bits(x.type)


def _high(f: Function, x: Value) -> Value:
    return (x.bits(x.type.of(I32)) & -65536).bits(x.type)


def to_bfloat_bits(f: Function, x: Value, target: Target) -> Value:
    """The nearest bfloat16, ties to even, as 16-bit integers."""
    if target.dpbf16 and x.type.lanes:
        return x.to(BF16).bits(x.type.of(I16))
    word = x.bits(x.type.of(I32))
    rounded = word + (((word >> 16) & 1) + 0x7FFF)
    # Rounding could carry a NaN's payload into the sign: set its quiet bit instead.
    return (f.select(x.differs(x), word | 0x400000, rounded) >> 16).to(I16)


def pack_pair(f: Function, low: Value, high: Value, target: Target) -> Value:
    """Two vectors as one of bfloat16 pairs, in 32-bit words."""
    words = low.type.of(I32)
    a, b = (f.convert("zext", to_bfloat_bits(f, x, target), words) for x in (low, high))
    return a | (b << 16)


_EXP2 = (
    1.0,
    0.6931471824645996,
    0.24022647738456726,
    0.055503323674201965,
    0.00961843691766262,
    0.0013398875016719103,
    0.00015353361959569156,
)
"""2**f for |f| <= 1/2 in powers of f: relative error 2e-9, far below the rounding of the sum."""

_ROUND = 12582912.0
"""1.5 * 2**23 rounds what is added to it to an integer."""


def exp2(f: Function, x: Value) -> Value:
    """2**x for x < 128, down to the smallest denormal number; NaN for NaN."""
    x = f.largest(-160.0, x)
    shifted = x + _ROUND
    whole = shifted - _ROUND
    fraction = x - whole
    total = f.constant(_EXP2[-1], x.type)
    for coefficient in _EXP2[-2::-1]:
        total = f.fma(total, fraction, f.constant(coefficient, x.type))
    if x.type.lanes == 16:
        # AVX-512 has an instruction for it.
        return f.intrinsic(
            "llvm.x86.avx512.mask.scalef.ps.512", x.type, total, whole, total, f.constant(-1, I16), f.constant(4, I32)
        )
    # 2**whole may be too small for one factor.
    exponent = whole.to(I32)
    half = f.binary("ashr", exponent, 1)
    for part in (half, exponent - half):
        total = total * (part + 127 << 23).bits(x.type)
    return total


def add_log(f: Function, a: Value, x: Value) -> Value:
    """`a + log(x)` of a positive x, with no rounding but the last that is felt; NaN for NaN."""
    word = x.bits(x.type.of(I32))
    # The exponent at which the mantissa lies in [sqrt(1/2), sqrt(2)).
    exponent = word - 0x3F3504F3 & -0x800000
    mantissa = (word - exponent).bits(x.type)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    total = f.constant(2.0 / 9.0, x.type)
    for power in (7, 5, 3, 1):
        total = f.fma(total, square, f.constant(2.0 / power, x.type))
    whole = exponent.to(F32) * 2.0**-23
    # 0.693145751953125 has 15 trailing zeros: its product with an exponent is exact.
    high, low = whole * 0.693145751953125, f.fma(1.428606820309417e-06, whole, ratio * total)
    result = a + high
    part = result - a
    lost = (a - (result - part)) + (high - part)
    result = f.select(f.magnitude(a).equals(float("inf")), a, result + (lost + low))
    return f.select(x.differs(x), x, result)


_TANH = (-0.33333316445350647, 0.13332585990428925, -0.05385230854153633, 0.021071678027510643, -0.006274237297475338)
"""(tanh(x) - x) / x**3 in powers of x**2 for |x| <= 0.55: relative error of tanh 1e-9."""


def tanh(x: Value) -> Value:
    """The hyperbolic tangent, with a small relative error near 0, too."""
    f = x.function
    size = f.magnitude(x)
    square = x * x
    total = f.constant(_TANH[-1], x.type)
    for coefficient in _TANH[-2::-1]:
        total = f.fma(total, square, f.constant(coefficient, x.type))
    near = f.fma(x * square, total, x)
    far = 1.0 - 2.0 / (exp2(f, f.smallest(40.0, size * (2.0 * LOG2E))) + 1.0)
    sign = x.bits(x.type.of(I32)) & NEGATIVE_ZERO
    signed = (far.bits(sign.type) | sign).bits(x.type)
    # The comparison is false for a NaN, and `near` keeps it.
    return f.select(size > 0.55, signed, near)
