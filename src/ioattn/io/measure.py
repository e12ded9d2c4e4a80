"""Hardware counters of attention on a GPU, through Nsight Compute's command line, `ncu`.

`ncu` runs the workload (`ioattn.bench.workload`) as a child and prints one CSV row per kernel and metric. Every row's
own unit is read; nothing is assumed of it. Caches are flushed before each kernel unless asked otherwise: then every
kernel starts cold, and what it leaves in the L2 at its end is counted neither as its write nor as the next one's read.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ioattn.cases import label
from ioattn.io.text import size, table
from ioattn.io.tiles import Blocks
from ioattn.io.traffic import Direction, compulsory, predict
from ioattn.problem import Problem

PREDICTED_BY = {"naive": "naive", "sdpa": "fa2", "ioattn": "fa2"}
"""The schedule that stands beside each implementation."""

_MATRICES = "re-reads of matrices, and writes that it had not passed on when a kernel ended"

CAUGHT: Mapping[tuple[str, Direction], str] = {
    ("naive", "forward"): _MATRICES,
    ("naive", "backward"): _MATRICES,
    ("fa2", "forward"): "re-reads of K and V",
    ("fa2", "backward"): "re-reads of Q and dO, and additions to dQ",
}
"""What of a schedule's bytes an L2 keeps from the DRAM."""

METRICS = {
    "dram_read": "dram__bytes_read.sum",
    "dram_written": "dram__bytes_write.sum",
    "l2_read": "lts__t_sectors_op_read.sum",
    "l2_written": "lts__t_sectors_op_write.sum",
    "l2_reduced": "lts__t_sectors_op_red.sum",
}
"""What is asked of `ncu`; L2 counts sectors."""

SECTOR = 32
"""Bytes of an L2 sector."""

_SCALES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


class MeasureError(RuntimeError):
    """Counters cannot be read here; the message says why and what would change it."""


@dataclass(frozen=True)
class Counters:
    """Bytes by level, summed over the kernels of one workload."""

    kernels: tuple[str, ...]
    dram_read: int
    dram_written: int
    l2_read: int
    l2_written: int

    @property
    def dram(self) -> int:
        """Bytes between slow memory and the L2."""
        return self.dram_read + self.dram_written

    @property
    def l2(self) -> int:
        """Bytes between the L2 and the SMs."""
        return self.l2_read + self.l2_written


@dataclass(frozen=True)
class Call:
    """One call to measure: "naive", "sdpa" or "ioattn" on q, k, v of (B, H, N, D); a backward without its forward."""

    implementation: str
    sizes: tuple[int, int, int, int]
    dtype: str
    causal: bool = False
    backward: bool = False


def command(call: Call, warm: bool = False) -> list[str]:
    """The `ncu` command line that measures a call, each kernel on flushed caches or on what the one before left."""
    workload = [sys.executable, "-m", "ioattn.bench.workload", call.implementation, *map(str, call.sizes), call.dtype]
    workload += [str(int(call.causal)), str(int(call.backward))]
    options = ["--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(METRICS.values())]
    options += ["--cache-control", "none" if warm else "all", "--clock-control", "none", "--target-processes", "all"]
    options += ["--profile-from-start", "off"]  # the workload turns the profiler on around the measured call
    return ["ncu", *options, *workload]


def measure(call: Call, warm: bool = False) -> Counters:
    """The counters of one call; `warm` leaves the caches as the kernel before left them.

    Raises:
        MeasureError: without a GPU or `ncu`, without permission to read counters, or if the workload fails.
        ValueError: if ncu's output cannot be understood.
    """
    reason = unusable()
    if reason is not None:
        raise MeasureError(reason)
    done = subprocess.run(command(call, warm), capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    if "ERR_NVGPUCTRPERM" in output:
        raise MeasureError(
            "the driver lets only administrators read the GPU's counters (ERR_NVGPUCTRPERM); run as root, or load the "
            "nvidia module with NVreg_RestrictProfilingToAdminUsers=0"
        )
    if "LibraryNotLoaded" in output or "Failed to initialize the profiler" in output:
        raise MeasureError("ncu cannot reach the GPU's counters here, as in some virtual machines; use another machine")
    if done.returncode != 0:
        last = "\n".join(output.strip().splitlines()[-12:])
        raise MeasureError(f"ncu ended with code {done.returncode}; its last lines:\n{last}")
    return parse(done.stdout.splitlines())


def unusable() -> str | None:
    """Why counters cannot be read on this machine, or None."""
    import torch

    if not torch.cuda.is_available():
        return "torch sees no CUDA GPU here; counters are read on one. `ioattn io predict` and `count` need none"
    if torch.version.hip is not None:
        return "this torch is built for ROCm; counters are read with NVIDIA's ncu"
    if shutil.which("ncu") is None:
        return "ncu is not on the PATH; it comes with the CUDA toolkit and as Nsight Compute"
    return None


def parse(lines: Iterable[str]) -> Counters:
    """Counters from `ncu --csv --page raw`: a row of names, a row of units, a row per kernel.

    Lines before the names (the workload's own, and ncu's that begin with ==) are skipped.

    Raises:
        ValueError: if the table, a metric or a kernel is missing, or a number or unit cannot be read.
    """
    # Not stripped: the first column may be empty.
    rows = [row for row in csv.reader(line for line in lines if not line.startswith("==")) if row]
    start = next((i for i, row in enumerate(rows) if "Kernel Name" in row and METRICS["dram_read"] in row), None)
    if start is None or len(rows) < start + 3:
        raise ValueError("ncu printed no table of kernels; the workload ran no kernel inside the measured range")
    names, units, kernels = rows[start], rows[start + 1], rows[start + 2 :]
    missing = [metric for metric in METRICS.values() if metric not in names]
    if missing:
        raise ValueError(f"ncu's table lacks {', '.join(missing)}; it has {', '.join(names)}")
    totals = dict.fromkeys(METRICS, 0)
    for row in kernels:
        if len(row) != len(names):
            raise ValueError(f"a row of ncu's table has {len(row)} cells; it must have {len(names)}: {row}")
        for key, metric in METRICS.items():
            at = names.index(metric)
            totals[key] += _bytes(row[at], units[at], metric)
    kernel_names = tuple(row[names.index("Kernel Name")] for row in kernels)
    written = totals["l2_written"] + totals["l2_reduced"]
    return Counters(kernel_names, totals["dram_read"], totals["dram_written"], totals["l2_read"], written)


def _bytes(number: str, unit: str, metric: str) -> int:
    """A cell as bytes: `ncu` scales by powers of 1000 unless told to print base units, and counts L2 in sectors."""
    base, size = ("sector", SECTOR) if metric.startswith("lts") else ("byte", 1)
    prefix = unit.removesuffix("s").removesuffix(base)
    # "" is ncu's own way of writing base units of a pure count.
    if unit != "" and not unit.removesuffix("s").endswith(base):
        raise ValueError(f"{metric} is in {unit!r}; it must be in {base}s, with K, M, G or T")
    factor = _SCALES.get(prefix, _BINARY.get(prefix))
    if factor is None:
        raise ValueError(f"{metric} is in {unit!r}, whose prefix {prefix!r} is unknown")
    try:
        value = float(number.replace(",", ""))
    except ValueError:
        raise ValueError(f"{metric} is {number!r}; it must be a number") from None
    if not 0 <= value < float("inf"):
        raise ValueError(f"{metric} is {number!r}; it must be finite and not negative")
    return round(value * factor) * size


def text(problem: Problem, direction: Direction, found: dict[str, Counters], blocks: Blocks) -> str:
    """The table of measured and predicted bytes, and what explains the difference at each level."""
    rows = []
    for name, c in found.items():
        t = predict(problem, PREDICTED_BY[name], direction, blocks)
        moved = (c.dram_read, c.dram_written, c.l2_read, c.l2_written)
        predicted = (f"{PREDICTED_BY[name]} {blocks}", size(t.read), size(t.written))
        rows.append((name, *map(size, moved), *predicted, len(c.kernels)))
    header = ("implementation", "DRAM read", "written", "L2 read", "written", "predicted", "read", "written", "kernels")
    least = compulsory(problem, direction)
    lines = [f"{label(problem)}, {direction}; compulsory {size(least)}", "", table(header, rows), ""]
    for name, c in found.items():
        lines += [f"{name}: {line}" for line in explain(problem, direction, PREDICTED_BY[name], c, blocks)]
    return "\n".join(lines)


def explain(problem: Problem, direction: Direction, schedule: str, measured: Counters, blocks: Blocks) -> list[str]:
    """Sentences on the gap between the prediction and each level of the memory."""
    predicted, least = predict(problem, schedule, direction, blocks), compulsory(problem, direction)
    lines = []
    if measured.dram < predicted.total:
        caught = 1 - measured.dram / predicted.total
        seen = f"DRAM saw {size(measured.dram)} of the {size(predicted.total)} predicted"
        lines.append(f"{seen}: the L2 caught {caught:.0%}, {CAUGHT[schedule, direction]}.")
    else:
        ratio = measured.dram / predicted.total
        lines.append(f"DRAM saw {ratio:.2f} times the prediction: these kernels make more passes than the schedule.")
    if measured.dram < least:
        lines.append(f"DRAM saw less than the compulsory {size(least)}: results were still in the L2 at the end.")
    ratio = measured.l2 / predicted.total if predicted.total else float("inf")
    if ratio < 0.95:
        why = "larger tiles than the prediction's, or tiles that SMs share"
    else:
        why = "what every tile asks for, before the L2 catches any; above 1 are smaller tiles and extra passes"
    lines.append(f"L2 saw {size(measured.l2)}, {ratio:.2f} of the prediction: {why}.")
    return lines
