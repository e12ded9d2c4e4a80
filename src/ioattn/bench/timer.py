"""Times functions against each other: in turns, so that a change of clock or load meets all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


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


def _timing(samples: list[float]) -> Timing:
    middle = statistics.median(samples)
    if len(samples) < 4:
        return Timing(middle, (max(samples) - min(samples)) / middle)
    low, _, high = statistics.quantiles(samples, n=4)
    return Timing(middle, (high - low) / middle)
