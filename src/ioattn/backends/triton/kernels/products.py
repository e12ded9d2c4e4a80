"""Matrix products on the device: of halves, in parts or whole, and with what is not finite."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from ioattn.backends.triton.kernels.tiles import EXACT, FULL, INF, INTERPRETED, device, rounded

FP16X3 = tl.constexpr("fp16x3")

TF32_APART = tl.constexpr("tf32x3 apart")
"""As "tf32x3", three products of TF32 parts, but each from zero: a third of the steps that wait for each other."""


class Scales(NamedTuple):
    """Powers of two that bring the largest value of an operand below 2^15; see `multiply`."""

    q: Any
    k: Any
    v: Any
    dout: Any
    weights: Any
    dscores: Any


@device
def scales_of(inputs, batch, kv_head, numbers, kv_heads, form: tl.constexpr):
    """The scales of one key/value head and the query heads that share it; 1 where there is no use for them."""
    q = 1.0
    k = 1.0
    v = 1.0
    dout = 1.0
    weights = 1.0
    dscores = 1.0
    if form.PRECISION == FP16X3:
        plane = numbers.batch * kv_heads
        tops = inputs.tops + batch * kv_heads + kv_head
        top_v = tl.load(tops + 2 * plane)
        top_dout = tl.load(tops + 3 * plane)
        q = scale_of(tl.load(tops))
        k = scale_of(tl.load(tops + plane))
        v = scale_of(top_v)
        dout = scale_of(top_dout)
        weights = 32768.0
        # |dP| and |delta| are both at most Dv max|dO| max|V|, but for dLSE.
        dscores = scale_of(2.0 * form.V.COLUMNS * top_dout * top_v + tl.load(tops + 4 * plane))
    return Scales(q, k, v, dout, weights, dscores)


@device
def scale_of(top):
    """The power of two that brings `top` to between 2^14 and 2^15; NaN where it is not finite."""
    exponent = (top.to(tl.int32, bitcast=True) >> 23) - 127
    scale = (tl.minimum(tl.maximum(14 - exponent, -100), 100) + 127 << 23).to(tl.float32, bitcast=True)
    return tl.where(top < INF, scale, float("nan"))


@device
def multiply(
    a, a_scale, b, b_scale, acc, form: tl.constexpr, KIND: tl.constexpr, TRANSPOSED: tl.constexpr, WIDE: tl.constexpr
):
    """a @ b, or a @ b^T, added to acc where there is one, in float32.

    With "fp16x3" operands are scaled by powers of two and split into two halves of 11 bits, x = hi + lo, of which lo lo
    is left out: float32's accuracy at half of the products of "bf16x6", but for values below 2^-17 of the largest one,
    whose error is 2^-40 of that one; in a WIDE operand a, 2^-28 and 2^-51. Sums stay scaled where they go on, in acc.
    Edges take bf16x6, so that what is hidden cannot cost what is visible its digits; what is not finite makes
    everything NaN, and is the business of `repair.py`.
    """
    if form.PRECISION != FP16X3:
        product = dot(rounded(a, b.dtype), tl.trans(b) if TRANSPOSED else b, acc, form)
    elif KIND != FULL:
        product = dot(a * a_scale, tl.trans(b * b_scale) if TRANSPOSED else b * b_scale, acc, form)
    else:
        a = a * a_scale
        b = b * b_scale
        a_high = a.to(tl.float16)
        b_high = b.to(tl.float16)
        a_low = a - a_high.to(tl.float32)
        b_low = (b - b_high.to(tl.float32)).to(tl.float16)
        b_near = b_high
        if WIDE:
            a_low *= 2048.0
            b_near = (b_high.to(tl.float32) * (1.0 / 2048.0)).to(tl.float16)
        if TRANSPOSED:
            b_high = tl.trans(b_high)
            b_low = tl.trans(b_low)
            b_near = tl.trans(b_near)
        product = tl.dot(a_high, b_low, acc)
        product = tl.dot(a_low.to(tl.float16), b_near, product)
        product = tl.dot(a_high, b_high, product)
    if form.PRECISION == FP16X3 and acc is None:
        product *= unscaled(a_scale, b_scale)
    return product


@device
def unscaled(a_scale, b_scale):
    """What undoes two scales."""
    return (1.0 / a_scale) * (1.0 / b_scale)


@device
def dot(a, b, acc, form: tl.constexpr):
    """a @ b, added to acc where there is one, in float32.

    In float64 in the interpreter. It cannot multiply bfloat16, and NumPy sums an element of a float32 product in an
    order that depends on its place in the tile: forward and backward would see different scores of one pair.
    """
    if INTERPRETED:
        product = tl.dot(a.to(tl.float64), b.to(tl.float64), out_dtype=tl.float64).to(tl.float32)
        if acc is not None:
            product += acc
    elif form.PRECISION == FP16X3:
        product = tl.dot(a, b, acc, input_precision="bf16x6")
    elif form.PRECISION == TF32_APART:
        product = dot_of_parts(a, b, acc)
    else:
        product = tl.dot(a, b, acc, input_precision=form.PRECISION)
    return product


@device
def dot_of_parts(a, b, acc):
    """a @ b, added to acc where there is one, of float32 in parts x = high + low of 11 bits; low low is left out.

    Each product starts from zero, and sums are made outside of tensor cores: these cut their sum off towards zero after
    every 8 terms, which over 4096 keys adds up to 1e-5 of the result on an H200. `less` is -low: the compiler would
    start the large product from a small one that is added to it, and does not from one that is subtracted. NaN among
    the small ones comes of an infinity, whose low part is inf - inf.
    """
    a_high = high_part(a)
    b_high = high_part(b)
    product = tl.dot(a_high, b_high, input_precision="tf32")
    less_a = or_no_number(tl.dot(less_part(a, a_high), b_high, input_precision="tf32"))
    less_b = or_no_number(tl.dot(a_high, less_part(b, b_high), input_precision="tf32"))
    product -= less_a + less_b
    if acc is not None:
        product += acc
    return product


@device
def high_part(x):
    """x without the bits that TF32 has no room for."""
    return (x.to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)


@device
def less_part(x, high):
    """What `high_part` left away, with the other sign, to be cut by a TF32 product: rounded to nearest."""
    return ((high - x).to(tl.int32, bitcast=True) + 0x1000).to(tl.float32, bitcast=True)


@device
def or_no_number(x):
    """NaN becomes 0."""
    return tl.where(x == x, x, 0.0)


@device
def only_finite(values, KIND: tl.constexpr):
    """The values of a product with weights; in an exact tile 0 for NaN and inf, which `add_special` adds later."""
    if KIND == EXACT:
        values = tl.where(tl.abs(values) < INF, values, 0.0).to(values.dtype)
    return values


@device
def add_special(acc, visible, values, form: tl.constexpr, SIGNED: tl.constexpr):
    """What visible NaN and inf among the values make of a sum over the finite ones, as IEEE has it.

    The hidden ones have no say: their weight is 0 already, but 0 * NaN is NaN. Weights > 0 give an infinity of the
    value's sign, or NaN. SIGNED weights are dS, which is 0 or NaN wherever Q or K is infinite: NaN.
    """
    if SIGNED:
        acc = tl.where(sees(visible, (tl.abs(values) < INF) == 0, values.dtype, form), float("nan"), acc)
    else:
        acc += tl.where(sees(visible, values == INF, values.dtype, form), INF, 0.0)
        acc -= tl.where(sees(visible, values == -INF, values.dtype, form), INF, 0.0)
        acc = tl.where(sees(visible, values != values, values.dtype, form), float("nan"), acc)
    return acc


@device
def sees(visible, special, DTYPE: tl.constexpr, form: tl.constexpr):
    """Which sums have a special value among their visible ones."""
    return dot(visible.to(DTYPE), special.to(DTYPE), None, form) > 0
