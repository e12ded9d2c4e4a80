"""The hyperbolic tangent, which Triton does not have on every device: accurate everywhere, or as scores need it."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import triton.language as tl

from ioattn.backends.triton import shortcuts
from ioattn.backends.triton.kernels.tiles import LOG2E, PTX, device, opaque, score_scale


@device
def tanh(x):
    """The hyperbolic tangent; near 0, where `tanh_of_scores` cancels, its series up to x^7."""
    square = x * x
    near = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(opaque(square) < 0.04, near, tanh_of_scores(x))


@device
def tanh_of_scores(x):
    """The hyperbolic tangent with an error of 1e-7, also near 0: enough where it decides about 16-bit results."""
    return 1.0 - 2.0 * reciprocal(1.0 + tl.exp2(x * (2.0 * LOG2E)))


@device
def reciprocal(x):
    """1 / x within an ulp, for x >= 1: a division is ten instructions."""
    number = 1.0 / x
    if PTX:
        number = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return number


ONE = tl.constexpr(2.0**15)
"""What 2^x + 1 is counted in units of: eight numbers between 2^-15 and 2^15 have a finite product that is not 0."""

NEAR = tl.constexpr(shortcuts.NEAR)

SERIES = (0.9999998569638378, -0.3333072562881707, 0.13258404464135523, -0.046956804453286885)
"""Of x, x^3, x^5 and x^7: up to NEAR with an error of 9e-8, relative 2.5e-7, as computed."""

A1, A3, A5, A7 = map(tl.constexpr, SERIES)

SHORT_SERIES = (0.999991712301, -0.332481327, 0.120136527)
"""Of x, x^3 and x^5: relative 8.3e-6, for gradients in bfloat16, which keeps 2e-3."""

B1, B3, B5 = map(tl.constexpr, SHORT_SERIES)


def bits(x: float) -> str:
    """A number as PTX writes it in float32."""
    return "0f" + struct.pack(">f", x).hex().upper()


def _two_ways(declared: str, first: int, count: int, near: list[str], far: list[str]) -> str:
    """Assembly that runs `near` where all of a warp's numbers, operands from `first` on, are below 2, else `far`.

    Of what is 2 or more, inf or NaN, and of nothing else, the highest bit of the exponent is set.
    """
    test = [f"or.b32 o, ${first}, ${first + 1};"]
    test += [f"lop3.b32 o, o, ${first + i}, ${first + i + 1}, 0xFE;" for i in range(2, count, 2)]
    test += ["and.b32 o, o, 0x40000000;", "setp.ne.b32 p, o, 0;", "vote.sync.any.pred p, p, 0xFFFFFFFF;"]
    lines = [".reg .pred p;", ".reg .b32 o;", declared, *test, "@p bra FAR;", *near, "bra DONE;", "FAR:", *far]
    return "{ " + " ".join([*lines, "DONE: }"])


def _polynomial(x: str, coefficients: Sequence[str]) -> list[str]:
    """Assembly that makes v of which x v is the odd polynomial in x."""
    lines = [f"mul.f32 u, {x}, {x};", f"fma.rn.f32 v, u, {coefficients[-1]}, {coefficients[-2]};"]
    return lines + [f"fma.rn.f32 v, v, u, {a};" for a in coefficients[-3::-1]]


def _eight_reciprocals(columns: tuple[int, ...]) -> list[str]:
    """Assembly that makes -1 / (2^-15 + 2^x) of the x in eight operands, with one reciprocal."""
    lines = []
    for i, column in enumerate(columns):
        lines.append(f"min.NaN.f32 a{i}, ${column}, 0f41700000; ex2.approx.ftz.f32 a{i}, a{i};")
        lines.append(f"add.f32 a{i}, a{i}, 0f38000000;")
    lines += [f"mul.f32 p{i}{i + 1}, a{i}, a{i + 1};" for i in (0, 2, 4, 6)]
    lines += ["mul.f32 p03, p01, p23;", "mul.f32 t47, p45, p67;", "mul.f32 r, p03, t47;", "rcp.approx.ftz.f32 r, r;"]
    lines += ["neg.f32 r, r;", "mul.f32 t03, r, t47;", "mul.f32 t47, r, p03;"]
    for i, half, other in ((0, "t03", "p23"), (2, "t03", "p01"), (4, "t47", "p67"), (6, "t47", "p45")):
        lines.append(f"mul.f32 r, {half}, {other};")
        lines.append(f"mul.f32 ${columns[i]}, r, a{i + 1}; mul.f32 ${columns[i + 1]}, r, a{i};")
    return lines


def _tanh_code(count: int, series: Sequence[float]) -> str:
    """Assembly of `tanh_in_units`: operands are results, x and the coefficients of the polynomial."""
    near, far = [], [f"mul.f32 w, ${2 * count}, {bits(2.0 * LOG2E.value / series[0])};"]
    for i in range(count):
        x = f"${count + i}"
        near += [*_polynomial(x, [f"${(2 + k) * count}" for k in range(len(series))]), f"mul.f32 ${i}, {x}, v;"]
        far += [f"mul.f32 u, {x}, w;", "ex2.approx.ftz.f32 u, u;"]
        far += ["add.f32 u, u, 0f3F800000;", "rcp.approx.ftz.f32 u, u;", f"fma.rn.f32 ${i}, u, 0fC0000000, 0f3F800000;"]
    return _two_ways(".reg .f32 u, v, w;", count, count, near, far)


def _capped_code(count: int) -> str:
    """Assembly of `capped`: operands are results, x, cap, unit and shift.

    Of the scores of a thread every second pair belongs to another row, and a NaN must not get there.
    """
    cap, unit, shift = f"${2 * count}", f"${3 * count}", 4 * count
    near = [f"mul.f32 u, {cap}, {unit};", f"mul.f32 v, {unit}, {unit};", f"mul.f32 c0, u, {bits(SERIES[0])};"]
    for i, a in enumerate(SERIES[1:], 1):
        near += ["mul.f32 u, u, v;", f"mul.f32 c{i}, u, {bits(a)};"]
    far = [f"mul.f32 u, {unit}, {bits(2.0 * LOG2E.value)};", f"mul.f32 v, {cap}, {bits(2.0 / ONE.value)};"]
    for i in range(count):
        near += _polynomial(f"${count + i}", ["c0", "c1", "c2", "c3"])
        near += [f"neg.f32 w, ${shift + i};", f"fma.rn.f32 ${i}, ${count + i}, v, w;"]
        far.append(f"fma.rn.f32 ${i}, ${count + i}, u, 0fC1700000;")
    for at in range(0, count, 16):
        for columns in ((0, 1, 4, 5, 8, 9, 12, 13), (2, 3, 6, 7, 10, 11, 14, 15)):
            far += _eight_reciprocals(tuple(at + column for column in columns))
    for i in range(count):
        far += [f"sub.f32 w, {cap}, ${shift + i};", f"fma.rn.f32 ${i}, ${i}, v, w;"]
    names = ", ".join([*(f"a{i}" for i in range(8)), *(f"c{i}" for i in range(4)), "p01, p23, p45, p67, p03, t03, t47"])
    return _two_ways(f".reg .f32 {names}, r, u, v, w;", count, count, near, far)


def operands_of(count: int, inputs: int) -> str:
    """The constraints of assembly that makes so many numbers out of as many of each input."""
    return ",".join(["=&f"] * count + ["f"] * (count * inputs))


TANH_16 = tl.constexpr(_tanh_code(16, SERIES))
TANH_32 = tl.constexpr(_tanh_code(32, SERIES))
TANH_OPERANDS_16 = tl.constexpr(operands_of(16, 5))
TANH_OPERANDS_32 = tl.constexpr(operands_of(32, 5))
SHORT_16 = tl.constexpr(_tanh_code(16, SHORT_SERIES))
SHORT_32 = tl.constexpr(_tanh_code(32, SHORT_SERIES))
SHORT_OPERANDS_16 = tl.constexpr(operands_of(16, 4))
SHORT_OPERANDS_32 = tl.constexpr(operands_of(32, 4))
CAPPED_16 = tl.constexpr(_capped_code(16))
CAPPED_32 = tl.constexpr(_capped_code(32))
CAPPED_OPERANDS_16 = tl.constexpr(operands_of(16, 4))
CAPPED_OPERANDS_32 = tl.constexpr(operands_of(32, 4))


@device
def in_units(product, task, form: tl.constexpr):
    """(x, unit) of which softcap's tanh is that of x * unit; a unit is at most NEAR / 2."""
    if form.SCALED:
        unit = score_scale(task) / (task.numbers.q_factor * task.inputs.softcap)
    else:
        product *= score_scale(task) * (2.0 / NEAR) / task.inputs.softcap
        unit = NEAR / 2
    return product, unit


@device
def squashed_of(product, task, form: tl.constexpr):
    """Softcap's tanh, by the same steps wherever it is asked for."""
    product, unit = in_units(product, task, form)
    return short_tanh(product, unit, form.NEAR) if form.SHORT else tanh_in_units(product, unit, form.NEAR)


@device
def tanh_in_units(x, unit, COUNT: tl.constexpr):
    """tanh(x * unit) with an error of 1e-7, of COUNT numbers of a thread together if that is not 0.

    By a polynomial where all x of a warp are below 2, as scores far below softcap are, and NaN reaches no other.
    """
    square = unit * unit
    a = unit * A1
    b = unit * square * A3
    c = unit * (square * square) * A5
    d = unit * (square * square) * square * A7
    if PTX and COUNT == 32:
        x = tl.inline_asm_elementwise(TANH_32, TANH_OPERANDS_32, [x, a, b, c, d], tl.float32, True, 32)
    elif PTX and COUNT == 16:
        x = tl.inline_asm_elementwise(TANH_16, TANH_OPERANDS_16, [x, a, b, c, d], tl.float32, True, 16)
    else:
        x = tanh_of_scores(x * unit)
    return x


@device
def short_tanh(x, unit, COUNT: tl.constexpr):
    """The same with an error of 3e-6 near 0, and one multiply-add less."""
    square = unit * unit
    a = unit * B1
    b = unit * square * B3
    c = unit * (square * square) * B5
    if PTX and COUNT == 32:
        x = tl.inline_asm_elementwise(SHORT_32, SHORT_OPERANDS_32, [x, a, b, c], tl.float32, True, 32)
    elif PTX and COUNT == 16:
        x = tl.inline_asm_elementwise(SHORT_16, SHORT_OPERANDS_16, [x, a, b, c], tl.float32, True, 16)
    else:
        x = tanh_of_scores(x * unit)
    return x


@device
def capped(x, cap, unit, shift, COUNT: tl.constexpr):
    """cap * tanh(x * unit) - shift, as `tanh_in_units`; `unit` is at most NEAR / 2.

    What is not near takes a reciprocal for eight: the unit of special functions bounds a kernel with softcap. NaN
    reaches seven neighbours in the row, none if COUNT is 0.
    """
    if PTX and COUNT == 32:
        x = tl.inline_asm_elementwise(CAPPED_32, CAPPED_OPERANDS_32, [x, cap, unit, shift], tl.float32, True, 32)
    elif PTX and COUNT == 16:
        x = tl.inline_asm_elementwise(CAPPED_16, CAPPED_OPERANDS_16, [x, cap, unit, shift], tl.float32, True, 16)
    else:
        x = tanh_of_scores(x * unit) * cap - shift
    return x
