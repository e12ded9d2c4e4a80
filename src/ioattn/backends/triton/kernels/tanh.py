"""The hyperbolic tangent, which Triton does not have on every device: accurate everywhere, or as scores need it."""

from __future__ import annotations

import triton.language as tl

from ioattn.backends.triton.kernels.tiles import LOG2E, PTX, device, opaque


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


SQUASHED_ONE = tl.constexpr(2.0**15)
"""What `squashed` counts as 1: eight numbers between 2^-15 and 2^15 have a finite product that is not 0."""


def _eight_reciprocals(columns: tuple[int, ...]) -> str:
    """Assembly that makes -1 / (2^-15 + 2^x) of eight x of 16, those in `columns`, with one reciprocal."""
    lines = ["neg.f32 r, r;", "mul.f32 t03, r, t47;", "mul.f32 t47, r, p03;"]
    for i, column in enumerate(columns):
        loaded = f"min.NaN.f32 a{i}, ${16 + column}, 0f41700000; ex2.approx.ftz.f32 a{i}, a{i};"
        lines.insert(i, f"{loaded} add.f32 a{i}, a{i}, 0f38000000;")
    products = [f"mul.f32 p{i}{i + 1}, a{i}, a{i + 1};" for i in (0, 2, 4, 6)]
    products += ["mul.f32 p03, p01, p23;", "mul.f32 t47, p45, p67;", "mul.f32 r, p03, t47;", "rcp.approx.ftz.f32 r, r;"]
    lines[8:8] = products
    for i, half, other in ((0, "t03", "p23"), (2, "t03", "p01"), (4, "t47", "p67"), (6, "t47", "p45")):
        lines.append(f"mul.f32 r, {half}, {other};")
        lines.append(f"mul.f32 ${columns[i]}, r, a{i + 1}; mul.f32 ${columns[i + 1]}, r, a{i};")
    names = ", ".join([*(f"a{i}" for i in range(8)), "p01", "p23", "p45", "p67", "p03", "t03", "t47", "r"])
    return "{ .reg .f32 " + names + "; " + " ".join(lines) + " }"


SIXTEEN = tl.constexpr(
    _eight_reciprocals((0, 1, 4, 5, 8, 9, 12, 13)) + " " + _eight_reciprocals((2, 3, 6, 7, 10, 11, 14, 15))
)
"""Sixteen reciprocals by those of two products: the unit of special functions is what bounds a kernel with softcap.

Of the scores of a thread every second pair belongs to another row, and a NaN must not get there."""
OPERANDS = tl.constexpr(",".join(["=f"] * 16 + ["f"] * 16))


@device
def squashed(x, ALONE: tl.constexpr):
    """What tanh is made of: -2^15 / (1 + 2^x) at x = 2 log2(e) y is 2^15 (tanh y - 1) / 2.

    NaN reaches seven neighbours in the row, or none if ALONE.
    """
    if PTX and not ALONE:
        x = tl.inline_asm_elementwise(SIXTEEN, OPERANDS, [x - 15.0], tl.float32, True, 16)
    else:
        x = reciprocal(1.0 + tl.exp2(x)) * -SQUASHED_ONE
    return x
