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


FOUR = tl.constexpr(
    "{ .reg .f32 a, b, c, d, p, q, r; "
    "min.NaN.f32 a, $4, 0f41F80000; min.NaN.f32 b, $5, 0f41F80000; "
    "min.NaN.f32 c, $6, 0f41F80000; min.NaN.f32 d, $7, 0f41F80000; "
    "ex2.approx.ftz.f32 a, a; ex2.approx.ftz.f32 b, b; ex2.approx.ftz.f32 c, c; ex2.approx.ftz.f32 d, d; "
    "add.f32 a, a, 0f3F800000; add.f32 b, b, 0f3F800000; add.f32 c, c, 0f3F800000; add.f32 d, d, 0f3F800000; "
    "mul.f32 p, a, b; mul.f32 q, c, d; mul.f32 r, p, q; rcp.approx.ftz.f32 r, r; neg.f32 r, r; "
    "mul.f32 q, q, r; mul.f32 p, p, r; "
    "mul.f32 $0, q, b; mul.f32 $1, q, a; mul.f32 $2, p, d; mul.f32 $3, p, c; }"
)
"""Four reciprocals by that of the product: the unit of special functions is what bounds a kernel with softcap.

No number is above 2^31, so that the product of four is finite."""


@device
def squashed(x):
    """What tanh is made of: -1 / (1 + 2^x) at x = 2 log2(e) y is (tanh y - 1) / 2."""
    if PTX:
        x = tl.inline_asm_elementwise(FOUR, "=f,=f,=f,=f,f,f,f,f", [x], tl.float32, True, 4)
    else:
        x = -1.0 / (1.0 + tl.exp2(x))
    return x
