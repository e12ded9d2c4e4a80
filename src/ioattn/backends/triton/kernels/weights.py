"""The weights of a tile of the backward, and what of softcap's derivative goes with them."""

from __future__ import annotations

from collections.abc import Sequence

import triton.language as tl

from ioattn.backends.triton.kernels.tanh import (
    SERIES,
    SHORT_SERIES,
    bits,
    in_units,
    operands_of,
    squashed_of,
    tanh_of_scores,
    two_ways,
)
from ioattn.backends.triton.kernels.tiles import LOG2E, PTX, device, score_scale

SLOPE = (-1.44267768, 0.23984228, -0.05801619)
"""Of x^2, x^4 and x^6: log2(1 - tanh(x)^2) up to NEAR, within 1.5e-7."""

SHORT_SLOPE = (-1.441904, 0.22562063)
"""Of x^2 and x^4: within 1.23e-5, which is 8.5e-6 of the derivative."""


def _ways(declared: str, first: int, count: int, near: list[str], far: list[str], early: bool) -> str:
    """`two_ways`, or, `early`, what is near in front of the branch, so that products run beside it."""
    code = two_ways(declared, first, count, [] if early else near, far)
    if not early:
        return code
    head, test = code.split(" or.b32", 1)
    test = test.replace("@p bra FAR; bra DONE; FAR:", "@!p bra DONE;")
    return head + " " + " ".join(near) + " or.b32" + test


def _exponent_code(count: int, odd: Sequence[float], even: Sequence[float]) -> str:
    """Assembly of exponents: operands are results, x, LSE, unit, cap and the coefficients of x, x^2, ..."""
    unit, cap, first = f"${3 * count}", f"${4 * count}", 5
    degree = len(odd) + len(even)
    near, far = [], [f"mul.f32 w, {unit}, {bits(2.0 * LOG2E.value)};"]
    for i in range(count):
        x, coefficients = f"${count + i}", [f"${(first + k) * count}" for k in range(degree)]
        near += [f"fma.rn.f32 v, {x}, {coefficients[-1]}, {coefficients[-2]};"]
        near += [f"fma.rn.f32 v, v, {x}, {a};" for a in coefficients[-3::-1]]
        near += [f"neg.f32 u, ${2 * count + i};", f"fma.rn.f32 ${i}, v, {x}, u;"]
        far += [f"mul.f32 v, {x}, w;", "ex2.approx.ftz.f32 v, v;", "add.f32 v, v, 0f3F800000;"]
        far += ["rcp.approx.ftz.f32 v, v;", "fma.rn.f32 v, v, 0fC0000000, 0f3F800000;"]
        far += [f"neg.f32 u, ${2 * count + i};", f"fma.rn.f32 u, v, {cap}, u;"]
        far += ["neg.f32 s, v;", "fma.rn.f32 v, s, v, 0f3F800000;", "lg2.approx.ftz.f32 v, v;", f"add.f32 ${i}, u, v;"]
    return _ways(".reg .f32 s, u, v, w;", count, count, near, far, False)


def _gated_code(count: int, odd: Sequence[float], even: Sequence[float]) -> str:
    """The same with the power of two taken, and in front of the branch."""
    unit, cap, first = f"${3 * count}", f"${4 * count}", 5
    degree = len(odd) + len(even)
    near, far = [], [f"mul.f32 w, {unit}, {bits(2.0 * LOG2E.value)};"]
    for i in range(count):
        x, coefficients = f"${count + i}", [f"${(first + k) * count}" for k in range(degree)]
        near += [f"fma.rn.f32 v, {x}, {coefficients[-1]}, {coefficients[-2]};"]
        near += [f"fma.rn.f32 v, v, {x}, {a};" for a in coefficients[-3::-1]]
        near += [f"neg.f32 u, ${2 * count + i};", f"fma.rn.f32 v, v, {x}, u;", f"ex2.approx.ftz.f32 ${i}, v;"]
        far += [f"mul.f32 v, {x}, w;", "ex2.approx.ftz.f32 v, v;", "add.f32 v, v, 0f3F800000;"]
        far += ["rcp.approx.ftz.f32 v, v;", "fma.rn.f32 v, v, 0fC0000000, 0f3F800000;"]
        far += [f"neg.f32 u, ${2 * count + i};", f"fma.rn.f32 u, v, {cap}, u;", "ex2.approx.ftz.f32 u, u;"]
        far += ["neg.f32 s, v;", "fma.rn.f32 v, s, v, 0f3F800000;", f"mul.f32 ${i}, u, v;"]
    return _ways(".reg .f32 s, u, v, w;", count, count, near, far, True)


def _both_code(count: int, odd: Sequence[float]) -> str:
    """Weights and derivatives, in front of the branch: operands are these two, x, LSE, unit, cap, coefficients."""
    unit, cap, first = f"${4 * count}", f"${5 * count}", 6
    near, far = [], [f"mul.f32 w, {unit}, {bits(2.0 * LOG2E.value)};"]
    for i in range(count):
        x, coefficients = f"${2 * count + i}", [f"${(first + k) * count}" for k in range(len(odd))]
        end = [f"neg.f32 u, ${3 * count + i};", f"fma.rn.f32 u, v, {cap}, u;", f"ex2.approx.ftz.f32 ${i}, u;"]
        end += ["neg.f32 u, v;", f"fma.rn.f32 ${count + i}, u, v, 0f3F800000;"]
        near += [f"mul.f32 u, {x}, {x};", f"fma.rn.f32 v, u, {coefficients[-1]}, {coefficients[-2]};"]
        near += [f"fma.rn.f32 v, v, u, {a};" for a in coefficients[-3::-1]] + [f"mul.f32 v, v, {x};", *end]
        far += [f"mul.f32 v, {x}, w;", "ex2.approx.ftz.f32 v, v;", "add.f32 v, v, 0f3F800000;"]
        far += ["rcp.approx.ftz.f32 v, v;", "fma.rn.f32 v, v, 0fC0000000, 0f3F800000;", *end]
    return _ways(".reg .f32 s, u, v, w;", 2 * count, count, near, far, True)


def both_operands(count: int, inputs: int) -> str:
    return ",".join(["=&f"] * (2 * count) + ["f"] * (count * inputs))


CODES = {
    (name, count, short): tl.constexpr(make(count))
    for count in (16, 32)
    for name, short, make in (
        ("exponent", False, lambda n: _exponent_code(n, SERIES, SLOPE)),
        ("exponent", True, lambda n: _exponent_code(n, SHORT_SERIES, SHORT_SLOPE)),
        ("gated", False, lambda n: _gated_code(n, SERIES, SLOPE)),
        ("gated", True, lambda n: _gated_code(n, SHORT_SERIES, SHORT_SLOPE)),
        ("both", False, lambda n: _both_code(n, SERIES)),
        ("both", True, lambda n: _both_code(n, SHORT_SERIES)),
    )
}
EX_16, EX_32 = CODES["exponent", 16, False], CODES["exponent", 32, False]
EXS_16, EXS_32 = CODES["exponent", 16, True], CODES["exponent", 32, True]
GA_16, GA_32 = CODES["gated", 16, False], CODES["gated", 32, False]
GAS_16, GAS_32 = CODES["gated", 16, True], CODES["gated", 32, True]
BO_16, BO_32 = CODES["both", 16, False], CODES["both", 32, False]
BOS_16, BOS_32 = CODES["both", 16, True], CODES["both", 32, True]
OPS9_16, OPS9_32 = tl.constexpr(operands_of(16, 9)), tl.constexpr(operands_of(32, 9))
OPS11_16, OPS11_32 = tl.constexpr(operands_of(16, 11)), tl.constexpr(operands_of(32, 11))
BOPS_16, BOPS_32 = tl.constexpr(both_operands(16, 8)), tl.constexpr(both_operands(32, 8))
BOPSS_16, BOPSS_32 = tl.constexpr(both_operands(16, 7)), tl.constexpr(both_operands(32, 7))

A1, A3, A5, A7 = map(tl.constexpr, SERIES)
A2, A4, A6 = map(tl.constexpr, SLOPE)
B1, B3, B5 = map(tl.constexpr, SHORT_SERIES)
B2, B4 = map(tl.constexpr, SHORT_SLOPE)


@device
def gated(product, lse, task, form: tl.constexpr, EARLY: tl.constexpr):
    """exp(scores - lse) times softcap's derivative, or its power of two, of scores that start as `product`.

    Of small scores the logarithm of both is one polynomial: 5 or 7 multiply-adds.
    """
    x, unit = in_units(product, task, form)
    cap = task.inputs.softcap * LOG2E
    square = unit * unit
    fourth = square * square
    COUNT: tl.constexpr = form.NEAR
    if PTX and COUNT != 0:
        if form.SHORT:
            given = [x, lse, unit, cap]
            given += [unit * (cap * B1), square * B2, unit * square * (cap * B3), fourth * B4]
            given += [unit * fourth * (cap * B5)]
            code: tl.constexpr = (GAS_32 if COUNT == 32 else GAS_16) if EARLY else (EXS_32 if COUNT == 32 else EXS_16)
            ops: tl.constexpr = OPS9_32 if COUNT == 32 else OPS9_16
            y = tl.inline_asm_elementwise(code, ops, given, tl.float32, True, COUNT)
        else:
            given = [x, lse, unit, cap]
            given += [unit * (cap * A1), square * A2, unit * square * (cap * A3), fourth * A4]
            given += [unit * fourth * (cap * A5), square * fourth * A6, unit * square * fourth * (cap * A7)]
            code: tl.constexpr = (GA_32 if COUNT == 32 else GA_16) if EARLY else (EX_32 if COUNT == 32 else EX_16)
            ops: tl.constexpr = OPS11_32 if COUNT == 32 else OPS11_16
            y = tl.inline_asm_elementwise(code, ops, given, tl.float32, True, COUNT)
    else:
        squashed = tanh_of_scores(x * unit)
        y = squashed * cap - lse
        if EARLY:
            y = tl.exp2(y) * (1.0 - squashed * squashed)
        else:
            y += tl.log2(1.0 - squashed * squashed)
    return y


@device
def both(product, lse, task, form: tl.constexpr):
    """exp(scores - lse), and softcap's derivative."""
    x, unit = in_units(product, task, form)
    cap = task.inputs.softcap * LOG2E
    square = unit * unit
    fourth = square * square
    COUNT: tl.constexpr = form.NEAR
    if PTX and COUNT != 0:
        if form.SHORT:
            given = [x, lse, unit, cap, unit * B1, unit * square * B3, unit * fourth * B5]
            code: tl.constexpr = BOS_32 if COUNT == 32 else BOS_16
            ops: tl.constexpr = BOPSS_32 if COUNT == 32 else BOPSS_16
            weights, slope = tl.inline_asm_elementwise(code, ops, given, (tl.float32, tl.float32), True, COUNT)
        else:
            given = [x, lse, unit, cap, unit * A1, unit * square * A3, unit * fourth * A5, unit * square * fourth * A7]
            code: tl.constexpr = BO_32 if COUNT == 32 else BO_16
            ops: tl.constexpr = BOPS_32 if COUNT == 32 else BOPS_16
            weights, slope = tl.inline_asm_elementwise(code, ops, given, (tl.float32, tl.float32), True, COUNT)
    else:
        squashed = tanh_of_scores(x * unit)
        weights = tl.exp2(squashed * cap - lse)
        slope = 1.0 - squashed * squashed
    return weights, slope


def _block_code(count: int) -> str:
    """Assembly of `exponents_by_block`: operands are results, scores, LSE and delta."""
    lines = [".reg .pred p;", ".reg .b32 o;", ".reg .f32 u;", f"and.b32 o, ${3 * count}, 1;", "setp.ne.b32 p, o, 0;"]
    lines += ["vote.sync.any.pred p, p, 0xFFFFFFFF;", "@p bra FAR;"]
    for i in range(count):
        lines += [f"neg.f32 u, ${2 * count + i};", f"fma.rn.f32 ${i}, ${count + i}, {bits(LOG2E.value)}, u;"]
    lines += ["bra DONE;", "FAR:"]
    for i in range(count):
        lines += [f"sub.f32 u, ${count + i}, ${2 * count + i};", f"mul.f32 ${i}, u, {bits(LOG2E.value)};"]
    return "{ " + " ".join([*lines, "DONE: }"])


BLOCK_16, BLOCK_32 = tl.constexpr(_block_code(16)), tl.constexpr(_block_code(32))
BLOCK_OPERANDS_16, BLOCK_OPERANDS_32 = tl.constexpr(operands_of(16, 3)), tl.constexpr(operands_of(32, 3))


@device
def exponents_by_block(scores, lse, delta, form: tl.constexpr):
    """Powers of two of weights: see `tiles.by_block`."""
    if PTX and form.NEAR == 32:
        y = tl.inline_asm_elementwise(BLOCK_32, BLOCK_OPERANDS_32, [scores, lse, delta], tl.float32, True, 32)
    elif PTX and form.NEAR == 16:
        y = tl.inline_asm_elementwise(BLOCK_16, BLOCK_OPERANDS_16, [scores, lse, delta], tl.float32, True, 16)
    else:
        far = (delta.to(tl.int32, bitcast=True) & 1) != 0
        y = tl.where(far, (scores - lse) * LOG2E, scores * LOG2E - lse)
    return y


@device
def exponents_of(product, distance, operands, lse, delta, task, form: tl.constexpr, step: tl.constexpr):
    """log2 of exp(scores - lse) of a tile whose scores start as `product`, with an `lse` that broadcasts to it."""
    scale = score_scale(task)
    if form.FUSED and form.LATE:
        exponents = product * (scale * LOG2E) - lse
    elif form.SQUASHED:
        exponents = squashed_of(product, task, form) * (task.inputs.softcap * LOG2E) - lse
    else:
        if not form.SCALED:
            product *= scale
        scores = step(product, distance, operands)
        if form.BY_BLOCK:
            exponents = exponents_by_block(scores, lse, delta, form)
        else:
            exponents = scores * LOG2E - lse if form.FUSED else (scores - lse) * LOG2E
    return exponents


@device
def dproduct_of(dscores, product, distance, operands, task, form: tl.constexpr, dstep: tl.constexpr):
    """The gradient of the scaled product, given that of the finished scores."""
    if form.SQUASHED:
        squashed = squashed_of(product, task, form)
        dproduct = dscores * (1.0 - squashed * squashed)
    else:
        dproduct = dstep(dscores, product * score_scale(task), distance, operands)
    return dproduct
