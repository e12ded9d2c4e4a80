"""Hardware counters of attention on a GPU, through Nsight Compute's command line, `ncu`.

`ncu` runs the workload (`ioattn.bench.workload`) as a child and prints one CSV row per kernel and metric. Every row's
own unit is read; nothing is assumed of it. Caches are flushed before each kernel unless asked otherwise: then every
kernel starts cold, and what it leaves in the L2 at its end is counted neither as its write nor as the next one's read.

At the L2 only what SMs ask for is counted. The plain counters (`lts__t_sectors_op_write`) count a byte again when it
crosses from one half of the L2 to the other: on an H200 every byte written is 1.5 bytes in them, and 1 in these.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass

IMPLEMENTATIONS = ("naive", "sdpa", "ioattn")
"""What can be measured: torch's separate steps, torch's fused attention, ours."""

METRICS = {
    "dram_read": "dram__bytes_read.sum",
    "dram_written": "dram__bytes_write.sum",
    "l2_read": "lts__t_sectors_srcunit_tex_op_read.sum",
    "l2_written": "lts__t_sectors_srcunit_tex_op_write.sum",
    "l2_reduced": "lts__t_sectors_srcunit_tex_op_red.sum",
    "spilled": "smsp__inst_executed_op_local_st.sum",
    "nanoseconds": "gpu__time_duration.sum",
}
"""What is asked of `ncu`: bytes at DRAM, sectors at the L2, stores of spilled registers, time."""

BACKEND = "ioattn runs on backend "
"""How the workload begins the line that names the backend of ours."""

_BASES = {"dram": ("byte", 1), "lts_": ("sector", 32), "smsp": ("inst", 128), "gpu_": ("second", 1)}
"""A metric's unit by its first letters, and what one counts as: a warp stores 128 bytes of a register."""

_SCALES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_SECONDS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}


class MeasureError(RuntimeError):
    """Counters cannot be read here; the message says why and what would change it."""


@dataclass(frozen=True)
class Counters:
    """Bytes by level, summed over the kernels of one workload, and their time.

    DRAM: between slow memory and the L2. L2: between the L2 and the SMs; `l2_reduced` are additions that the L2 does by
    itself, which cross once. `spilled` is the part of `l2_written` that is registers without room; `backend` is that
    of ours.
    """

    kernels: tuple[str, ...]
    dram_read: int
    dram_written: int
    l2_read: int
    l2_written: int
    l2_reduced: int = 0
    spilled: int = 0
    nanoseconds: int = 0
    backend: str = ""

    @property
    def dram(self) -> int:
        """Bytes between slow memory and the L2."""
        return self.dram_read + self.dram_written

    @property
    def l2(self) -> int:
        """Bytes between the L2 and the SMs."""
        return self.l2_read + self.l2_written + self.l2_reduced


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
    lines = list(lines)
    backend = next((line.removeprefix(BACKEND).strip() for line in lines if line.startswith(BACKEND)), "")
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
            totals[key] += _count(row[at], units[at], metric)
    return Counters(tuple(row[names.index("Kernel Name")] for row in kernels), **totals, backend=backend)


def _count(number: str, unit: str, metric: str) -> int:
    """A cell in bytes or nanoseconds: `ncu` scales by powers of 1000 unless told to print base units."""
    base, size = _BASES[metric[:4]]
    factor = _seconds(unit, metric) if base == "second" else _scale(unit, base, metric)
    try:
        value = float(number.replace(",", ""))
    except ValueError:
        raise ValueError(f"{metric} is {number!r}; it must be a number") from None
    if not 0 <= value < float("inf"):
        raise ValueError(f"{metric} is {number!r}; it must be finite and not negative")
    return round(value * factor) * size


def _scale(unit: str, base: str, metric: str) -> int:
    # "" is ncu's own way of writing base units of a pure count.
    if unit != "" and not unit.removesuffix("s").endswith(base):
        raise ValueError(f"{metric} is in {unit!r}; it must be in {base}s, with K, M, G or T")
    prefix = unit.removesuffix("s").removesuffix(base)
    factor = _SCALES.get(prefix, _BINARY.get(prefix))
    if factor is None:
        raise ValueError(f"{metric} is in {unit!r}, whose prefix {prefix!r} is unknown")
    return factor


def _seconds(unit: str, metric: str) -> int:
    # Older versions write nsecond, newer ones ns.
    short = unit.removesuffix("econd")
    if short not in _SECONDS:
        raise ValueError(f"{metric} is in {unit!r}; it must be in ns, us, ms or s")
    return _SECONDS[short]
