"""Times functions against each other: in turns, so that a change of clock or load meets all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Microseconds: the median, and the distance between the quartiles relative to it."""

    median_us: float
    spread: float


def alternate(functions: Sequence[Callable[[], object]], budget_s: float, rounds: int) -> list[Timing]:
    """Call the functions in turns for about `budget_s` seconds in all, at least `rounds` times each after a warm-up."""
    for function in functions:
        function()
    samples: list[list[float]] = [[] for _ in functions]
    end = time.perf_counter() + budget_s
    while len(samples[0]) < rounds or time.perf_counter() < end:
        for function, taken in zip(functions, samples, strict=True):
            start = time.perf_counter()
            function()
            taken.append((time.perf_counter() - start) * 1e6)
    return [_timing(taken) for taken in samples]


FLUSH_BYTES = 2**28
"""More than the L2 cache of any GPU."""

FLUSHES = 3
"""So many take 0.2 ms on an H200, in which a slow host, too, prepares a call."""


def balanced_orders(count: int) -> list[list[int]]:
    """Orders of 0, 1, ..., count - 1 in which each comes right behind each other one equally often (Williams, 1949).

    Example:
        >>> balanced_orders(4)
        [[0, 1, 3, 2], [1, 2, 0, 3], [2, 3, 1, 0], [3, 0, 2, 1]]
    """
    first = [(i + 1) // 2 if i % 2 else (count - i // 2) % count for i in range(count)]
    orders = [[(i + shift) % count for i in first] for shift in range(count)]
    return orders if count % 2 == 0 or count == 1 else orders + [order[::-1] for order in orders]


def alternate_on_gpu(functions: Sequence[Callable[[], object]], rounds: int) -> list[Timing]:
    """Time on the device of each function, called in turns, with nothing of its inputs in the L2 cache.

    At its power limit a GPU gives a call the clock that the call before it has left, so orders are balanced, by as many
    more rounds as that takes: in one order FA4 was 4% ahead of ours, in another 3% behind (H200, 64 heads on 8).
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    for function in functions:
        for _ in range(2):
            function()
    orders = balanced_orders(len(functions))
    rounds = -(-rounds // len(orders)) * len(orders)
    marks = [[[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)] for _ in functions]
    for i in range(rounds):
        for number in orders[i % len(orders)]:
            for _ in range(FLUSHES):
                flush.zero_()
            start, end = marks[number][i]
            start.record()
            functions[number]()
            end.record()
    torch.cuda.synchronize()
    return [_timing([1e3 * start.elapsed_time(end) for start, end in pairs]) for pairs in marks]


def until_return(functions: Sequence[Callable[[], object]], rounds: int) -> list[Timing]:
    """Time on the host until each function returns, called in turns on an idle device."""
    samples: list[list[float]] = [[] for _ in functions]
    for function in functions:
        function()
    for _ in range(rounds):
        for function, taken in zip(functions, samples, strict=True):
            torch.cuda.synchronize()
            start = time.perf_counter()
            function()
            taken.append((time.perf_counter() - start) * 1e6)
    return [_timing(taken) for taken in samples]


def _timing(samples: list[float]) -> Timing:
    middle = statistics.median(samples)
    if len(samples) < 4:
        return Timing(middle, (max(samples) - min(samples)) / middle)
    low, _, high = statistics.quantiles(samples, n=4)
    return Timing(middle, (high - low) / middle)
