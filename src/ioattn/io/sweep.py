"""One quantity varied, the rest kept: how a schedule's bytes follow block size, sequence length, SRAM or heads."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple, get_args

from ioattn.io.machine import KIB, Machine
from ioattn.io.roofline import Bound, best_blocks, bound
from ioattn.io.tiles import Blocks
from ioattn.io.traffic import Direction
from ioattn.problem import Problem

Axis = Literal["block", "seqlen", "sram", "heads"]

AXES: tuple[str, ...] = get_args(Axis)

UNITS = {"block": "queries and keys per tile", "seqlen": "sequence length", "sram": "SRAM, KiB", "heads": "query heads"}


class Point(NamedTuple):
    """The value of the varied quantity and the bound there."""

    at: int
    bound: Bound


def sweep(
    axis: Axis, problem: Problem, machine: Machine, schedule: str, direction: Direction, blocks: Blocks
) -> list[Point]:
    """The bound at each value of `axis`, powers of two around the problem's own.

    `block` sets both sides of the tile; `seqlen` sets Nq and scales Nk; `heads` keeps Hk where the group stays whole;
    `sram` takes the best blocks that fit each size and skips sizes where none fits. `problem.band` is taken as it is: a
    side that hides nothing at the problem's own lengths may hide something at longer ones.

    Raises:
        ValueError: if the axis does not exist.
    """
    if axis not in AXES:
        raise ValueError(f"sweep is {axis!r}; it must be one of {', '.join(AXES)}")
    if axis == "block":
        sizes = [Blocks(2**i, 2**i, blocks.splits) for i in range(4, 10)]
        return [Point(b.q, bound(problem, machine, schedule, direction, b)) for b in sizes]
    if axis == "sram":
        found = ((2**i, best_blocks(problem, schedule, direction, 2**i * KIB)) for i in range(3, 13))
        return [Point(at, bound(problem, machine, schedule, direction, b)) for at, b in found if b is not None]
    varied = _lengths(problem) if axis == "seqlen" else _heads(problem)
    return [Point(at, bound(p, machine, schedule, direction, blocks)) for at, p in varied]


def _lengths(problem: Problem) -> list[tuple[int, Problem]]:
    if problem.len_q == 1:  # decoding: the keys grow, the query stays
        return [(2**i, _resized(problem, 1, 2**i)) for i in range(9, 18)]
    ratio = problem.len_k / max(problem.len_q, 1)
    return [(2**i, _resized(problem, 2**i, max(1, round(2**i * ratio)))) for i in range(9, 18)]


def _resized(problem: Problem, len_q: int, len_k: int) -> Problem:
    """The problem at other lengths, without sides of its band that hide nothing there."""
    return dataclasses.replace(problem, len_q=len_q, len_k=len_k, band=problem.band.within(len_q + len_k))


def _heads(problem: Problem) -> list[tuple[int, Problem]]:
    heads = [2**i for i in range(8)]
    return [
        (h, dataclasses.replace(problem, heads=h, kv_heads=problem.kv_heads if h % problem.kv_heads == 0 else h))
        for h in heads
    ]
