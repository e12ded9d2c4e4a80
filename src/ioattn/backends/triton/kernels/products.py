"""Matrix products on the device: of halves, in parts or whole, and with what is not finite."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from ioattn.backends.triton.kernels.tiles import EXACT, INF, INTERPRETED, PTX, device, opaque, rounded

FP16X3 = tl.constexpr("fp16x3")


class Scales(NamedTuple):
    """What undoes the powers of two that halves were scaled with: see `halves.py`. 1 where there are none."""

    q: Any
    k: Any
    v: Any
    dout: Any


@device
def scales_of(inputs, batch, kv_head, kv_heads, form: tl.constexpr):
    """The scales of one key/value head and the query heads that share it."""
    q = 1.0
    k = 1.0
    v = 1.0
    dout = 1.0
    if form.PRECISION == FP16X3:
        at = inputs.scales + (batch * kv_heads + kv_head) * 4
        q = tl.load(at)
        k = tl.load(at + 1)
        v = tl.load(at + 2)
        dout = tl.load(at + 3)
    return Scales(q, k, v, dout)


@device
def belongs_to_others(inputs, batch, kv_head, kv_heads, numbers, form: tl.constexpr):
    """Whether this head is computed by the kernel with the other products: in halves where they are accurate."""
    at = inputs.scales + (batch * kv_heads + kv_head) * 4
    # What was scaled is below 2^15: D |scale| max|Q| max|K| is below 2^17. What does not fit has a scale of NaN.
    fits = form.Q.COLUMNS * tl.abs(numbers.scale) * (tl.load(at) * tl.load(at + 1)) < 1.0 / 8192
    dweights = tl.load(at + 2) * tl.load(at + 3)
    fits = fits & (dweights > 1e-36) & (dweights < 1e30)
    return fits != (form.PRECISION == FP16X3)


@device
def multiply(a, b, form: tl.constexpr):
    """a @ b^T, of two operands that were loaded.

    Of halves three products are summed, the small ones first. Tensor cores cut off what does not fit in their sums, and
    only what follows the first large product costs digits that count; the sums of pieces are added outside of them.
    """
    if form.PRECISION == FP16X3:
        product = None
        for piece in tl.static_range(len(a.high)):
            product = dot(a.high[piece], tl.trans(b.low[piece]), product, form)
            product = dot(a.low[piece], tl.trans(b.high[piece]), product, form)
        product = dot(a.high[0], tl.trans(b.high[0]), product, form)
        for piece in tl.static_range(1, len(a.high)):
            # Opaque, or Triton would let the tensor cores add it.
            product += opaque(dot(a.high[piece], tl.trans(b.high[piece]), None, form))
    else:
        product = dot(a, tl.trans(b), None, form)
    return product


@device
def add_product(acc, weights, cover, values, form: tl.constexpr):
    """acc + weights @ values, of weights that were computed and, in 16 bits, may have a cover (`scores.cover_at`).

    Halves of weights are scaled row by row.
    """
    if form.PRECISION == FP16X3:
        exponent = exponent_of(tl.max(tl.abs(weights), 1))
        weights = weights * power_of_two(14 - exponent)[:, None]
        acc = add_halves(acc, 1.0, weights, values, power_of_two(exponent - 14)[:, None], form)
    else:
        acc = (dot(covered(weights, cover, values.dtype), values, acc[0], form),)
    return acc


@device
def covered(x, cover, DTYPE: tl.constexpr):
    """x in another type, and 0 where a cover, if there is one, hides it, NaN as well."""
    if cover is None:
        x = rounded(x, DTYPE)
    elif PTX:
        TYPE: tl.constexpr = "f16x2" if DTYPE == tl.float16 else "bf16x2"  # noqa: SIM300
        pair: tl.constexpr = "{ .reg .b32 t; cvt.rn." + TYPE + ".f32 t, $2, $1; and.b32 $0, t, $3; }"
        x = tl.inline_asm_elementwise(pair, "=r,r,r,r", [x, cover], DTYPE.value, True, 2)
    else:
        x = rounded(tl.where(cover != 0, x, 0.0), DTYPE)
    return x


@device
def add_halves(acc, acc_factor, weights, values, factor, form: tl.constexpr):
    """acc_factor * acc + factor * (weights @ values), of weights below 2^15 that were computed.

    Added outside of the tensor cores, which do not round to nearest.
    """
    high = weights.to(tl.float16)
    low = (weights - high.to(tl.float32)).to(tl.float16)
    sums = ()
    for piece in tl.static_range(len(acc)):
        product = dot(high, values.low[piece], None, form)
        product = dot(low, values.high[piece], product, form)
        product = dot(high, values.high[piece], product, form)
        sums += (acc_factor * acc[piece] + product * factor,)
    return sums


@device
def exponent_of(top):
    """The exponent of a number >= 0; not less than what 2^14 can be divided by."""
    return tl.maximum((top.to(tl.int32, bitcast=True) >> 23) - 127, -112)


@device
def power_of_two(exponent):
    """2 to an integer power from -126 to 127."""
    return (exponent + 127 << 23).to(tl.float32, bitcast=True)


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
        product = tl.dot(a, b, acc)
    else:
        if form.PRECISION == "tf32":
            a = nearest_tf32(a)
            b = nearest_tf32(b)
        product = tl.dot(a, b, acc, input_precision=form.PRECISION)
    return product


@device
def nearest_tf32(x):
    """Rounded to TF32: tensor cores cut off, which is up to twice as far, and always towards zero."""
    if PTX:
        x = tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,f", [x], tl.int32, True, 1)
        x = x.to(tl.float32, bitcast=True)
    return x


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
    special = (tl.abs(values) < INF) == 0
    if SIGNED:
        acc = tl.where(sees(visible, special, values.dtype, form), float("nan"), acc)
    else:
        acc += tl.where(sees(visible, values == INF, values.dtype, form), INF, 0.0)
        acc -= tl.where(sees(visible, values == -INF, values.dtype, form), INF, 0.0)
        # In the interpreter a bfloat16 that is NaN equals itself.
        is_nan = special & (tl.abs(values) != INF)
        acc = tl.where(sees(visible, is_nan, values.dtype, form), float("nan"), acc)
    return acc


@device
def sees(visible, special, DTYPE: tl.constexpr, form: tl.constexpr):
    """Which sums have a special value among their visible ones."""
    # By way of float32: the interpreter makes zeros of truths in bfloat16.
    return dot(rounded(tl.where(visible, 1.0, 0.0), DTYPE), rounded(tl.where(special, 1.0, 0.0), DTYPE), None, form) > 0
