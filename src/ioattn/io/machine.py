"""What machines can do: peaks and bandwidths of known GPUs with their sources, of this machine, or from a TOML file."""

from __future__ import annotations

import os
import platform
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from ioattn.problem import DTYPES

KIB, MIB = 2**10, 2**20
GB, TB, TFLOPS = 10**9, 10**12, 10**12


@dataclass(frozen=True)
class Machine:
    """One chip and its slow memory.

    `flops` maps "fp16", "bf16", "tf32", "fp32" and "fp64" to dense FLOP/s of matrix products, multiply and add counted
    as two; what is missing is not supported in hardware. `sram` is what one core (SM) can hold for tiles, `l2` the
    last cache before slow memory, `memory` the size of slow memory, all in bytes; `bandwidth` in bytes/s.
    """

    name: str
    title: str
    bandwidth: float
    flops: Mapping[str, float]
    sram: int
    l2: int
    memory: int
    cores: int
    source: str
    notes: tuple[str, ...] = field(default=())

    def peak(self, dtype: torch.dtype) -> tuple[float, str]:
        """FLOP/s for problems of this dtype, and where the number comes from.

        FP32 means fp32 accuracy: IEEE units, or three TF32 products for one where that is more.

        Raises:
            ValueError: if the machine has no peak for the dtype.
        """
        name = DTYPES[dtype]
        candidates = [(self.flops[name], name)] if name in self.flops else []
        if name == "fp32" and "tf32" in self.flops:
            candidates.append((self.flops["tf32"] / 3, "3xTF32"))
        if not candidates:
            raise ValueError(f"machine {self.name} has no {name} peak; it has {', '.join(self.flops)}")
        return max(candidates)

    def ridge(self, dtype: torch.dtype) -> float:
        """FLOPs per byte from which on arithmetic binds."""
        return self.peak(dtype)[0] / self.bandwidth


def _gpu(
    name: str, title: str, bandwidth_tb: float, flops_t: dict[str, float], sizes: Mapping[str, float], source: str
) -> Machine:
    flops = {kind: rate * TFLOPS for kind, rate in flops_t.items()}
    return Machine(
        name=name,
        title=title,
        bandwidth=bandwidth_tb * TB,
        flops=flops,
        sram=round(sizes["sram_kib"] * KIB),
        l2=round(sizes["l2_mib"] * MIB),
        memory=round(sizes["memory_gb"] * GB),
        cores=round(sizes["sms"]),
        source=source,
    )


_HOPPER_FLOPS = {"fp16": 989.4, "bf16": 989.4, "tf32": 494.7, "fp32": 66.9, "fp64": 66.9}

KNOWN = {
    machine.name: machine
    for machine in (
        _gpu(
            "v100",
            "NVIDIA V100 SXM2 16 GB",
            0.9,
            {"fp16": 125.0, "fp32": 15.7, "fp64": 7.8},
            {"sram_kib": 96, "l2_mib": 6, "memory_gb": 16, "sms": 80},
            "NVIDIA, Tesla V100 GPU Architecture white paper, 2017, tables 1 and 2",
        ),
        _gpu(
            "a100",
            "NVIDIA A100 SXM 40 GB",
            1.555,
            {"fp16": 312.0, "bf16": 312.0, "tf32": 156.0, "fp32": 19.5, "fp64": 19.5},
            {"sram_kib": 164, "l2_mib": 40, "memory_gb": 40, "sms": 108},
            "NVIDIA, A100 Tensor Core GPU Architecture white paper, 2020, tables 1, 3 and 4",
        ),
        _gpu(
            "h100",
            "NVIDIA H100 SXM5 80 GB",
            3.35,
            _HOPPER_FLOPS,
            {"sram_kib": 228, "l2_mib": 50, "memory_gb": 80, "sms": 132},
            "NVIDIA, H100 Tensor Core GPU Architecture white paper, v1.04, tables 1 and 2 (dense rates)",
        ),
        _gpu(
            "h200",
            "NVIDIA H200 SXM 141 GB",
            4.8,
            _HOPPER_FLOPS,
            {"sram_kib": 228, "l2_mib": 60, "memory_gb": 141, "sms": 132},
            "NVIDIA, H200 data sheet, 2024 (dense rates); L2 as its driver reports it",
        ),
        _gpu(
            "b200",
            "NVIDIA B200 SXM 180 GB",
            8.0,
            {"fp16": 2250.0, "bf16": 2250.0, "tf32": 1125.0, "fp32": 75.0, "fp64": 37.0},
            {"sram_kib": 228, "l2_mib": 126, "memory_gb": 180, "sms": 148},
            "NVIDIA, HGX B200 data sheet, 2025, divided by its eight GPUs (dense rates); L2 as its driver reports it",
        ),
    )
}
"""Data-sheet peaks; what a machine reaches is less, `this` measures it."""


def machine_of(name: str) -> Machine:
    """The machine of that name: a known GPU, "this" (measured here), or the path of a TOML file.

    Raises:
        ValueError: if the name is none of these or the file does not describe a machine.

    Example:
        >>> f"{machine_of('h100').ridge(torch.float16):.0f} FLOPs per byte"
        '295 FLOPs per byte'
    """
    if name in KNOWN:
        return KNOWN[name]
    if name == "this":
        return measure()
    if Path(name).suffix == ".toml":
        return from_toml(Path(name))
    raise ValueError(f"machine is {name!r}; it must be one of {', '.join(KNOWN)}, this, or the path of a .toml file")


def from_toml(path: Path) -> Machine:
    """A machine described by a file: bandwidth in TB/s, FLOP/s in TFLOP/s, on-chip sizes in KiB and MiB, memory in GB.

        title = "my GPU"
        bandwidth_tb = 3.35
        sram_kib = 228
        l2_mib = 50
        memory_gb = 80
        sms = 132
        source = "where the numbers come from"
        [tflops]
        fp16 = 989.4

    Raises:
        ValueError: naming the file and the entry at fault.
    """
    try:
        entries: dict[str, Any] = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"machine file {path} cannot be read: {error}") from None
    numbers = ("bandwidth_tb", "sram_kib", "l2_mib", "memory_gb", "sms")
    for key in numbers:
        value = entries.get(key)
        if not _is_positive(value):
            raise ValueError(f"machine file {path}: {key} is {value!r}; it must be a positive number")
    if not isinstance(entries["sms"], int):
        raise ValueError(f"machine file {path}: sms is {entries['sms']!r}; it must be an integer")
    tflops = entries.get("tflops")
    known = (*DTYPES.values(), "tf32")
    if (
        not isinstance(tflops, dict)
        or not tflops
        or any(k not in known or not _is_positive(v) for k, v in tflops.items())
    ):
        raise ValueError(
            f"machine file {path}: tflops is {tflops!r}; it must map some of {', '.join(known)} to TFLOP/s"
        )
    unknown = set(entries) - {*numbers, "tflops", "title", "source"}
    if unknown:
        raise ValueError(
            f"machine file {path}: {', '.join(sorted(unknown))} is unknown; see `ioattn io machines --help`"
        )
    sizes = {key: entries[key] for key in numbers[1:]}
    title, source = str(entries.get("title", path.stem)), str(entries.get("source", path))
    return _gpu(path.stem, title, float(entries["bandwidth_tb"]), tflops, sizes, source)


def _is_positive(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 < value < float("inf")


def measure() -> Machine:
    """The machine this runs on: what a GPU's driver reports or the operating system's tables say, with measured rates.

    Bandwidth is that of a copy (read and write counted), FLOP/s that of a large matrix product, per dtype.
    """
    if torch.cuda.is_available():
        return _measured_gpu()
    return _measured_cpu()


def _measured_gpu() -> Machine:
    properties = torch.cuda.get_device_properties(0)
    device = torch.device("cuda", 0)
    flops = {}
    for kind in ("fp16", "bf16", "tf32", "fp32", "fp64"):
        torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
        dtype = torch.float32 if kind == "tf32" else next(d for d, name in DTYPES.items() if name == kind)
        flops[kind] = _matmul_rate(8192 if dtype.itemsize == 2 else 4096, dtype, device)
    torch.backends.cuda.matmul.allow_tf32 = False
    return Machine(
        name="this",
        title=properties.name,
        bandwidth=_copy_rate(2**30, device),
        flops=flops,
        sram=getattr(properties, "shared_memory_per_multiprocessor", 0),
        l2=properties.L2_cache_size,
        memory=properties.total_memory,
        cores=properties.multi_processor_count,
        source="measured here: copy of 1 GiB, matrix products",
    )


def _measured_cpu() -> Machine:
    device, caches = torch.device("cpu"), _cpu_caches()
    kinds = {name: dtype for dtype, name in DTYPES.items()}
    missing = tuple(f"the size of the L{level} cache is not reported here" for level in (2, 3) if level not in caches)
    return Machine(
        name="this",
        title=f"{cpu_name()}, {torch.get_num_threads()} threads",
        bandwidth=_copy_rate(2**28, device),
        # FP16 products are slow on most CPUs, and as fast at half the size.
        flops={kind: _matmul_rate(512 if kind == "fp16" else 1024, dtype, device) for kind, dtype in kinds.items()},
        sram=caches.get(2, 0),
        l2=caches.get(3, 0),
        memory=memory_size(),
        cores=torch.get_num_threads(),
        source="measured here: copy of 256 MiB, matrix products; L2 of a core as SRAM, L3 as the last cache",
        notes=missing,
    )


def _copy_rate(n_bytes: int, device: torch.device) -> float:
    source = torch.empty(n_bytes // 2, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return n_bytes / _best_seconds(lambda: target.copy_(source), device)


def _matmul_rate(n: int, dtype: torch.dtype, device: torch.device) -> float:
    a = torch.ones(n, n, dtype=dtype, device=device)
    return 2 * n**3 / _best_seconds(lambda: a @ a, device)


def _best_seconds(action: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """The shortest of a few runs after a first one; fewer where they are long, which wobble less."""
    seconds: list[float] = []
    while len(seconds) < repeats + 1 and (len(seconds) < 2 or sum(seconds) < 1.0):
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _cpu_caches() -> dict[int, int]:
    """Bytes by cache level, as Linux reports them for the first core; empty where it does not."""
    sizes = {}
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        text = (index / "size").read_text().strip()
        if text.endswith("K") and (index / "type").read_text().strip() != "Instruction":
            sizes[int((index / "level").read_text())] = int(text[:-1]) * KIB
    return sizes


def cpu_name() -> str:
    """Cores and the widest instruction set, such as `2-core-avx512`; what result files call a CPU."""
    capability = torch.backends.cpu.get_cpu_capability().lower()
    return f"{os.cpu_count()}-core-{platform.machine() if capability == 'default' else capability}"


def memory_size() -> int:
    """Bytes of this machine's main memory, 0 where the operating system does not say."""
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else ():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * KIB
    return 0


def to_dict(machine: Machine) -> dict[str, Any]:
    """The machine as JSON takes it."""
    return {f.name: dict(machine.flops) if f.name == "flops" else getattr(machine, f.name) for f in fields(machine)}
