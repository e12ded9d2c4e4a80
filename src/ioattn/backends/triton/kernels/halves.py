"""The pass before "fp16x3": Q, K, V and dO in halves.

x = high + low, both in float16, of 11 bits each: with the sign of low, 23 bits. float16 has 5 bits of exponent, so each
head's numbers are first multiplied by the power of two that brings the largest to between 2^14 and 2^15. What is below
2^-17 of the largest keeps 2^-39 of that one instead of its own 23 bits.

A head whose numbers do not fit is computed by another kernel, with other products. They fit if all are finite, and if
in each row and in each column that is not all zeros the largest is at least 2^-16 of the head's largest.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ioattn.backends.triton.kernels.products import power_of_two
from ioattn.backends.triton.kernels.tiles import EDGE, decoded, device, load_tile, row_at

MAXIMA = tl.constexpr(257)
"""Per operand and head: the largest of each of 256 columns, and one number for the rows."""

MOST = tl.constexpr(0x7FFFFFFF)
"""Without their sign the bits of numbers, as integers, have the order of the numbers; NaN comes after infinity."""

RANGE = tl.constexpr(16)
"""Rows and columns may differ by this power of two."""

SMALLEST = tl.constexpr(-100)
LARGEST = tl.constexpr(100)
"""Exponents of the largest number that leave room for those of a product."""


@triton.jit
def measure_kernel(inputs, dout, maxima, numbers, form: tl.constexpr):
    """Raise `maxima`, which start at 0, to those of one tile of Q, K, V or dO."""
    numbers = decoded(numbers)
    operand, batch, head, tile = place_of_split(numbers)
    if operand == 0:
        measure(inputs.q, 0, batch, head, form.GROUP, tile, numbers.rows_q, maxima, numbers, form, form.Q)
    elif operand == 1:
        measure(inputs.k, 1, batch, head, 1, tile, numbers.rows_k, maxima, numbers, form, form.K)
    elif operand == 2:
        measure(inputs.v, 2, batch, head, 1, tile, numbers.rows_k, maxima, numbers, form, form.V)
    elif dout is not None:
        measure(dout, 3, batch, head, form.GROUP, tile, numbers.rows_q, maxima, numbers, form, form.OUT)


@device
def measure(
    x, operand, batch, head, GROUP: tl.constexpr, tile, n, maxima, numbers, form: tl.constexpr, box: tl.constexpr
):
    """The largest of each column, and the smallest of the largest of each row, counted down from MOST."""
    start = tile * box.ROWS
    kv_heads = numbers.heads // form.GROUP
    if (start < n) & (head // GROUP < kv_heads):
        values = load_tile(x, row_at(x, batch, head, 0), start, n, box, EDGE)
        bits = values.to(tl.int32, bitcast=True) & MOST
        columns = tl.max(bits, 0)
        rows = tl.max(bits, 1)
        lowest = tl.max(tl.where(rows == 0, 0, MOST - rows), 0)
        at = maxima + ((batch * kv_heads + head // GROUP) * 4 + operand) * MAXIMA
        tl.atomic_max(at + tl.arange(0, box.WIDTH), columns, mask=columns != 0)
        tl.atomic_max(at + MAXIMA - 1, lowest)


@triton.jit
def split_kernel(inputs, dout, maxima, halves, scales, numbers, form: tl.constexpr):
    """Write one tile of Q, K, V or dO in halves, and what undoes their scale: NaN where they do not fit."""
    numbers = decoded(numbers)
    operand, batch, head, tile = place_of_split(numbers)
    if operand == 0:
        split_tile(
            inputs.q, halves.q, 0, batch, head, form.GROUP, tile, numbers.rows_q, maxima, scales, numbers, form, form.Q
        )
    elif operand == 1:
        split_tile(inputs.k, halves.k, 1, batch, head, 1, tile, numbers.rows_k, maxima, scales, numbers, form, form.K)
    elif operand == 2:
        split_tile(inputs.v, halves.v, 2, batch, head, 1, tile, numbers.rows_k, maxima, scales, numbers, form, form.V)
    elif dout is not None:
        split_tile(
            dout, halves.dout, 3, batch, head, form.GROUP, tile, numbers.rows_q, maxima, scales, numbers, form, form.OUT
        )
    if dout is None:
        if operand == 0:
            tl.store(scales + (batch * (numbers.heads // form.GROUP) + head // form.GROUP) * 4 + 3, 1.0)


@device
def split_tile(
    x,
    halves,
    operand,
    batch,
    head,
    GROUP: tl.constexpr,
    tile,
    n,
    maxima,
    scales,
    numbers,
    form: tl.constexpr,
    box: tl.constexpr,
):
    """One tile of one operand; columns beyond the last are filled with zeros."""
    start = tile * box.ROWS
    kv_heads = numbers.heads // form.GROUP
    if (start < n) & (head // GROUP < kv_heads):
        place = (batch * kv_heads + head // GROUP) * 4 + operand
        columns = tl.load(maxima + place * MAXIMA + tl.arange(0, box.WIDTH))
        top = tl.max(columns, 0)
        lowest = tl.min(tl.where(columns == 0, MOST, columns), 0)
        lowest = tl.minimum(lowest, MOST - tl.load(maxima + place * MAXIMA + MAXIMA - 1))
        exponent = tl.where(top == 0, 0, (top >> 23) - 127)
        fits = (top >> 23) - (lowest >> 23) <= RANGE
        fits = fits & (exponent >= SMALLEST) & (exponent <= LARGEST)
        if tile == 0:
            tl.store(scales + place, tl.where(fits, power_of_two(exponent - 14), float("nan")))
        if fits:
            values = load_tile(x, row_at(x, batch, head, 0), start, n, box, EDGE)
            values *= power_of_two(14 - exponent)
            high = values.to(tl.float16)
            row = start + tl.arange(0, box.ROWS)
            exists = (row < n)[:, None]
            pointers = row_at(halves, batch, head, row.to(tl.int64))[:, None] + tl.arange(0, box.WIDTH)[None, :]
            tl.store(pointers, high, mask=exists)
            tl.store(pointers + box.WIDTH, (values - high.to(tl.float32)).to(tl.float16), mask=exists)


@device
def place_of_split(numbers):
    """(operand, batch, head, tile) of this program: K and V have fewer heads than there are programs for them."""
    program = tl.program_id(0)
    tile = program % numbers.tiles
    at = program // numbers.tiles
    head = at % numbers.heads
    at = at // numbers.heads
    return at // numbers.batch, (at % numbers.batch).to(tl.int64), head.to(tl.int64), tile
