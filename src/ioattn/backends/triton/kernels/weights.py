"""The weights of a tile of the backward, and what softcap makes of their gradient."""

from __future__ import annotations

import triton.language as tl

from ioattn.backends.triton.kernels.tanh import bits, operands_of, squashed_of
from ioattn.backends.triton.kernels.tiles import LOG2E, PTX, device, score_scale


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


BLOCK_16 = tl.constexpr(_block_code(16))
BLOCK_32 = tl.constexpr(_block_code(32))
BLOCK_OPERANDS_16 = tl.constexpr(operands_of(16, 3))
BLOCK_OPERANDS_32 = tl.constexpr(operands_of(32, 3))


@device
def exponents_by_block(scores, lse, delta, COUNT: tl.constexpr):
    """log2 of exp(scores - lse), by one multiply-add each in blocks whose LSE is near 0: see `queries.by_block`."""
    if PTX and COUNT == 32:
        exponents = tl.inline_asm_elementwise(BLOCK_32, BLOCK_OPERANDS_32, [scores, lse, delta], tl.float32, True, 32)
    elif PTX and COUNT == 16:
        exponents = tl.inline_asm_elementwise(BLOCK_16, BLOCK_OPERANDS_16, [scores, lse, delta], tl.float32, True, 16)
    else:
        far = (delta.to(tl.int32, bitcast=True) & 1) != 0
        exponents = tl.where(far, (scores - lse) * LOG2E, scores * LOG2E - lse)
    return exponents


@device
def exponents_of(product, distance, operands, lse, delta, task, form: tl.constexpr, step: tl.constexpr):
    """log2 of exp(scores - lse) of a tile whose scores start as `product`; `lse` and `delta` broadcast to it."""
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
            exponents = exponents_by_block(scores, lse, delta, form.NEAR)
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
