"""What makes the scores of a problem cheaper than their formula: what is known of their size, and powers of two."""

from __future__ import annotations

import math

import torch

from ioattn.problem import Problem
from ioattn.scores import BIAS, SOFTCAP

BOUNDED_SOFTCAP = 30
"""Up to this softcap exp(score) is between 2^-44 and 2^44: far from the ends of bfloat16, 2^-126 and 2^127."""

NEAR = 0.42
"""Up to here a polynomial is tanh: see `kernels/tanh.py`."""

SMALLEST_FACTOR = -24
"""Of queries in bfloat16, as a power of two: below 2^-102 one would lose digits."""


def is_small(problem: Problem) -> bool:
    """Whether a short way to tanh is accurate enough: the error of a score is that of its tanh times softcap."""
    return problem.dtype != torch.float32 and problem.softcap is not None and problem.softcap <= 100


def is_squashed(problem: Problem) -> bool:
    """Whether softcap is all that happens to scores, and may take the short way."""
    return problem.terms == (SOFTCAP,) and not problem.sinks and is_small(problem)


def is_bounded(problem: Problem) -> bool:
    """Whether scores stay so close to 0 that a forward's weights may be exp(score), in 16 bits."""
    if not is_squashed(problem) or problem.dtype != torch.bfloat16 or problem.softcap is None:
        return False
    return problem.softcap <= BOUNDED_SOFTCAP


def takes_first(problem: Problem) -> bool:
    """Whether the first keys may decide about the unit of a forward's sums: where every query sees them."""
    return is_squashed(problem) and not is_bounded(problem) and not problem.band.bounded and problem.mask is None


def carries_units(problem: Problem) -> bool:
    """Whether, with a bias, a weight's exponent is one multiply-add, in units that steps hand on.

    H200, B4 N4096: D 64 359 against 354 TFLOP/s, in another run 331 against 320; FP16 324 against 302. At D 128 all
    maxima would come in front of all exponentials, which then wait: 373, where it was 434.
    """
    return problem.bias is not None and problem.dtype != torch.float32 and max(problem.dim, problem.dim_v) <= 64


def sums_by_thread(problem: Problem) -> bool:
    """Whether the threads of a row meet for its sum only when all keys have been seen.

    H200, B4 N4096: D 64 483 against 472 TFLOP/s, D 128 544 against 516. At D 256 it spills: causal 445 against 509.
    With a bias at D 128 it was timed with such multiply-adds only.
    """
    widest = max(problem.dim, problem.dim_v)
    return problem.dtype != torch.float32 and widest <= (128 if problem.bias is None else 64)


def is_scaled(problem: Problem, backward: bool) -> bool:
    """Whether queries, for dK and dV keys, are multiplied by `q_factor`.

    Not in the backward where dV has a kernel of its own, without the tile that keys pass through. With a bias the
    backward went from 268 to 292 TFLOP/s at D 64 (H200); above that it was not timed.
    """
    widest = max(problem.dim, problem.dim_v)
    return q_factor(problem) != 1.0 and not (backward and widest > (128 if problem.bias is None else 64))


def is_fused_by_block(problem: Problem) -> bool:
    """Whether, with a bias, the backward asks of each block of queries if a weight's exponent may be one multiply-add.

    H200, B4 N4096, D 64: with the words of the next tile in front of the branch, and dP beside the exponentials, 4860
    to 4590 us (4.3 GB of bias: 5620 to 5160). Blocks are of dQ's kernel: dK and dV take no more queries at a time.
    """
    return problem.bias is not None and is_scaled(problem, backward=True)


def q_factor(problem: Problem) -> float:
    """A power of two that queries or keys are multiplied by, exactly; 1 where none helps.

    With a bias it is the scale, if that is one: tensor cores then start from the bias. With softcap it makes 2 of a
    score where the polynomial ends, or more.
    """
    if problem.dtype != torch.bfloat16 or problem.dim != problem.dim_v or not problem.scale > 0:
        return 1.0
    power = 0
    if problem.terms == (BIAS,) and math.frexp(problem.scale)[0] == 0.5:
        power = math.frexp(problem.scale)[1] - 1
    elif is_squashed(problem) and problem.softcap is not None:
        power = math.ceil(math.log2(problem.scale * 2 / (problem.softcap * NEAR)))
    return 2.0**power if SMALLEST_FACTOR <= power < 0 else 1.0
