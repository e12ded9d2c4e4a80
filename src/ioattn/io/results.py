"""Measured points: the benchmark's CSV files, as far as they hold problems that the laboratory knows."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ioattn.cases import from_line
from ioattn.io.machine import Machine
from ioattn.io.traffic import Direction, compulsory, useful_flops
from ioattn.problem import Problem

COLUMNS = ("case", "direction", "implementation", "rate", "unit", "machine")

_FLOPS = {"TFLOP/s": 1e12, "GFLOP/s": 1e9}


@dataclass(frozen=True)
class Measured:
    """One row of a result file: what ran, on what, its FLOP/s over the useful FLOPs, and its bytes at DRAM if known."""

    problem: Problem
    direction: str
    implementation: str
    machine: str
    flops_per_s: float
    dram_bytes: int | None = None

    @property
    def intensity(self) -> float:
        """Useful FLOPs per byte at DRAM where counters were read, else per compulsory byte.

        The second is where the point stands if caches catch every re-read.
        """
        direction: Direction = "backward" if self.direction == "backward" else "forward"
        moved = self.dram_bytes or compulsory(self.problem, direction)
        return useful_flops(self.problem, direction) / moved

    def ran_on(self, machine: Machine) -> bool:
        """Whether the row's machine is this one: it holds its name as a word, or is part of its title."""
        here = self.machine.lower()
        named = re.search(rf"(?<![a-z0-9]){re.escape(machine.name.lower())}(?![a-z0-9])", here) is not None
        return (named and machine.name != "this") or (here != "" and here in machine.title.lower())


def measured_points(folder: Path) -> list[Measured]:
    """The rows of every CSV file in `folder` whose case and unit are understood; none where there is no folder.

    Raises:
        ValueError: naming a file that lacks the columns of a result file, or a row whose rate is no number.
    """
    return [point for path in sorted(folder.glob("*.csv")) for point in _points(path)]


def _points(path: Path) -> Iterator[Measured]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        missing = set(COLUMNS) - set(rows.fieldnames or ())
        if missing:
            raise ValueError(f"{path} lacks the columns {', '.join(sorted(missing))}; it must be a result file")
        for row in rows:
            if any(row[column] is None for column in COLUMNS):
                raise ValueError(f"{path}:{rows.line_num} is cut short; it must have every column of its first line")
            problem = from_line(row["case"])
            if problem is None or not row["rate"] or not compulsory(problem) or row.get("caches") == "kept":
                continue  # with caches kept from call to call, bytes at DRAM say nothing of the call
            flops_per_s = _flops_per_s(problem, row["unit"], _rate(row["rate"], f"{path}:{rows.line_num}"))
            if flops_per_s is not None:
                words = (row["direction"], row["implementation"], row["machine"])
                yield Measured(problem, *words, flops_per_s, _dram_bytes(row, f"{path}:{rows.line_num}"))


def _dram_bytes(row: Mapping[str, str], where: str) -> int | None:
    if "dram_read" not in row:
        return None
    try:
        return int(row["dram_read"]) + int(row["dram_written"])
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{where}: dram_read and dram_written must be integers") from None


def _rate(text: str, where: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise ValueError(f"{where}: rate is {text!r}; it must be a positive number")
    return rate


def _flops_per_s(problem: Problem, unit: str, rate: float) -> float | None:
    if unit in _FLOPS:
        return rate * _FLOPS[unit]
    if unit == "TB/s":
        # A decode's rate is that of K and V.
        kv_bytes = problem.batch * problem.kv_heads * problem.len_k * (problem.dim + problem.dim_v)
        return rate * 1e12 / (kv_bytes * problem.dtype.itemsize) * useful_flops(problem)
    return None
