"""Read a GPU's counters for named cases and store them as a result file of the laboratory.

    PYTHONPATH=src python benchmarks/io_counters.py FOLDER [--quick]

Writes `<machine>-io-<date>.csv`, the columns of every result file and those of `ioattn.io.measure.Counters`, and the
tables of `ioattn io measure` as text. The first case is also read with caches left as they are between kernels.

Needs `ncu` on the PATH, a CUDA GPU and permission to read its counters; takes about six seconds per row.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import datetime
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ioattn.bench.run import machine_name, row
from ioattn.bench.timer import Timing
from ioattn.cases import CASES, problem_of
from ioattn.io import levels
from ioattn.io.measure import IMPLEMENTATIONS, Call, Counters, MeasureError, measure, unusable
from ioattn.io.tiles import Blocks
from ioattn.io.traffic import Direction
from ioattn.problem import DTYPES, Problem

PROBLEMS = (CASES["chapter"].problem(), problem_of((1, 16, 8192, 128), "bf16"), CASES["train-8k"].problem())

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


def main(folder: Path, quick: bool) -> int:
    """Measure every case; one that fails is written as its error, and the exit code is then 1."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{machine_name('cuda')}-io-{datetime.date.today().isoformat()}"
    rows: list[dict[str, Any]] = []
    pages, failed = [torch.cuda.get_device_name()], False
    for problem, direction, warm in _asked(quick):
        found: dict[str, Counters] = {}
        for name in IMPLEMENTATIONS:
            if quick and name == "naive" and problem.band.bounded:
                continue
            try:
                found[name] = measure(_call(problem, direction, name), warm)
            except (MeasureError, ValueError) as error:
                failed = True
                pages.append(f"{problem}, {direction}, {name}: {error}")
        rows += [_row(problem, direction, name, c, warm) for name, c in found.items()]
        blocks = Blocks(128, 128)
        compared = levels.compare(problem, direction, found, blocks)
        pages.append(("caches kept: " if warm else "") + levels.text(problem, direction, compared, blocks))
        (folder / f"{stem}.txt").write_text("\n\n".join(pages) + "\n")
        if rows:
            _write(folder / f"{stem}.csv", rows)
    sys.stdout.write("\n\n".join(pages) + "\n")
    return 1 if failed else 0


def _asked(quick: bool) -> Iterator[tuple[Problem, Direction, bool]]:
    for problem in PROBLEMS:
        yield from ((problem, direction, False) for direction in DIRECTIONS)
    yield from ((PROBLEMS[0], direction, True) for direction in DIRECTIONS if not quick)


def _call(problem: Problem, direction: Direction, name: str) -> Call:
    p = problem
    sizes = (p.batch, p.heads, p.len_q, p.dim)
    return Call(name, sizes, DTYPES[p.dtype], p.band.bounded, direction == "backward")


def _row(problem: Problem, direction: Direction, name: str, c: Counters, warm: bool) -> dict[str, Any]:
    implementation = f"{name}:{c.backend}" if c.backend else name
    measured = row(problem, direction, implementation, Timing(c.nanoseconds / 1e3, 0.0), 0.0, "cuda")
    # One run without a reference beside it: neither a spread nor an error is known.
    known = dataclasses.asdict(measured) | {"spread": "", "error": ""}
    counters = {k: v for k, v in dataclasses.asdict(c).items() if k != "backend"} | {
        "kernels": "; ".join(kernel[:60] for kernel in c.kernels)
    }
    return known | {"caches": "kept" if warm else "flushed"} | counters


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quick", action="store_true", help="leave out the slowest rows and those with caches kept")
    asked = parser.parse_args()
    if (reason := unusable()) is not None:
        raise SystemExit(f"cannot measure: {reason}")
    raise SystemExit(main(asked.folder, asked.quick))
