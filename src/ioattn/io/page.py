"""The page: one self-contained HTML file made of the files in `web/` and the machines' and benchmarks' numbers."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from ioattn.cases import label
from ioattn.io.machine import KNOWN
from ioattn.io.results import Measured, measured_points


def write_page(out: Path, results: Path) -> int:
    """Write the page to `out` with the measured points in `results`; returns how many there are.

    Raises:
        ValueError: if a result file lacks its columns, or `out` is in no folder.
    """
    if not out.parent.is_dir():
        raise ValueError(f"out is {str(out)!r}; its folder must exist")
    points = [_point(point) for point in measured_points(results)]
    machines = [
        {
            "name": machine.name,
            "title": machine.title,
            "bandwidth": machine.bandwidth,
            "sram": machine.sram,
            "peak16": machine.peak(torch.float16)[0],
            "peak32": machine.peak(torch.float32)[0],
        }
        for machine in KNOWN.values()
    ]
    # "<" opens and ends elements wherever it stands in a script.
    data = json.dumps({"machines": machines, "measured": points}).replace("<", "\\u003c")
    page = _file("page.html")
    parts = {"style": "page.css", "schedules": "schedules.js", "softmax": "softmax.js", "view": "view.js"}
    for name, file in parts.items():
        page = page.replace("{{" + name + "}}", _file(file).replace('"use strict";\n', "").strip())
    out.write_text(page.replace("{{data}}", data), encoding="utf-8")
    return len(points)


def _file(name: str) -> str:
    return (resources.files("ioattn.io") / "web" / name).read_text(encoding="utf-8")


def _point(point: Measured) -> dict[str, Any]:
    return {
        "machine": next((machine.name for machine in KNOWN.values() if point.ran_on(machine)), None),
        "itemsize": point.problem.dtype.itemsize,
        "intensity": point.intensity,
        "rate": point.flops_per_s,
        "case": label(point.problem),
        "direction": point.direction,
        "implementation": point.implementation,
        "counted": point.dram_bytes is not None,
    }
