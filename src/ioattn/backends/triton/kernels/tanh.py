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
