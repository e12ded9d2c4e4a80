"""Read a GPU's counters for the laboratory's problems and write them as text and JSON.

    PYTHONPATH=src python benchmarks/io_counters.py FOLDER

The first problem is also read with caches left as they are between kernels.

Needs `ncu` on the PATH, a CUDA GPU and permission to read its counters; takes about ten seconds per row.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import torch

from ioattn.cases import label, problem_of
from ioattn.io.measure import PREDICTED_BY, Call, Counters, MeasureError, measure, text, unusable
from ioattn.io.tiles import Blocks
from ioattn.io.traffic import Direction

CASES = (
    ((1, 1, 4096, 64), "fp16", False),
    ((1, 16, 8192, 128), "bf16", False),
    ((1, 16, 8192, 128), "bf16", True),
)

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


def main(folder: Path) -> int:
    """Measure every case; a case that fails is written as its error, and the exit code is then 1."""
    folder.mkdir(parents=True, exist_ok=True)
    records, pages, failed = [], [torch.cuda.get_device_name()], False
    for (sizes, dtype, causal), warm in [*((case, False) for case in CASES), (CASES[0], True)]:
        problem = problem_of(sizes, dtype, causal=causal)
        for direction in DIRECTIONS:
            found: dict[str, Counters] = {}
            for name in PREDICTED_BY:
                try:
                    found[name] = measure(Call(name, sizes, dtype, causal, direction == "backward"), warm)
                except (MeasureError, ValueError) as error:
                    failed = True
                    pages.append(f"{label(problem)}, {direction}, {name}: {error}")
            asked = {"case": label(problem), "direction": direction, "warm": warm}
            records += [asked | {"implementation": n, **dataclasses.asdict(c)} for n, c in found.items()]
            pages.append(("warm: " if warm else "") + text(problem, direction, found, Blocks(128, 128)))
            (folder / "io_counters.txt").write_text("\n\n".join(pages) + "\n")
            (folder / "io_counters.json").write_text(json.dumps(records, indent=2) + "\n")
    sys.stdout.write("\n\n".join(pages) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    if (reason := unusable()) is not None:
        raise SystemExit(f"cannot measure: {reason}")
    raise SystemExit(main(Path(sys.argv[1])))
