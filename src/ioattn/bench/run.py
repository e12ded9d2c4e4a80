"""Runs cases: checks our result against float64 first, then times it and its peer in turns."""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor

from ioattn.bench.goals import Goal
from ioattn.bench.peers import Attention, ours, torch_peer
from ioattn.bench.timer import Timing, alternate
from ioattn.cases import CASES, Case, inputs_of
from ioattn.io.machine import cpu_name
from ioattn.io.traffic import Direction, useful_flops
from ioattn.problem import Problem


@dataclass(frozen=True)
class Row:
    """One measurement, as a line of the results file."""

    date: str
    commit: str
    machine: str
    torch: str
    triton: str
    case: str
    direction: str
    implementation: str
    median_us: float
    spread: float
    rate: float
    unit: str
    error: float


@dataclass(frozen=True)
class Comparison:
    """Ours and the peer on one case, direction and dtype; `fault` is set and nothing else if ours is wrong."""

    asked: Goal
    dtype: str
    direction: Direction
    rows: tuple[Row, ...] = ()
    fault: str | None = None

    @property
    def speedup(self) -> float:
        """How many times faster than the peer."""
        mine, peer = self.rows
        return peer.median_us / mine.median_us

    @property
    def goal(self) -> float | None:
        """How many times faster than the peer it is to be."""
        return self.asked.speedups.get((self.dtype, self.direction))


def compare(asked: Goal, dtype: str, backend: str, budget_s: float, rounds: int) -> Iterator[Comparison]:
    """Each direction of a case; a wrong result is reported and not timed."""
    case, backward = CASES[asked.case], "backward" in asked.directions
    problem = case.problem(dtype)
    tensors = inputs_of(problem)
    mine = ours(case, tensors, backend)
    peer_name, peer = torch_peer(case, tensors)
    truth, limits = reference(case, tensors, backward)
    errors = [errors_of(truth, results(run, tensors, backward)) for run in (mine, peer)]
    for direction in asked.directions:
        names = ("out",) if direction == "forward" else ("dq", "dk", "dv")
        wrong = [f"{name} is off by {errors[0][name]:.2g}" for name in names if not errors[0][name] <= limits[name]]
        if wrong:
            yield Comparison(asked, dtype, direction, fault=", ".join(wrong))
            continue
        timings = alternate([call(run, tensors, direction) for run in (mine, peer)], budget_s, rounds)
        rows = (
            row(problem, direction, label, timing, max(error[name] for name in names))
            for label, timing, error in zip((f"ioattn:{backend}", peer_name), timings, errors, strict=True)
        )
        yield Comparison(asked, dtype, direction, tuple(rows))


def write(rows: list[Row], directory: Path, topic: str) -> Path:
    """Store rows as `<machine>-<topic>-<date>.csv` in `directory`; returns the file.

    Earlier rows of the same cases and directions give way, so that those of one case always come from one run.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{rows[0].machine}-{topic}-{rows[0].date}.csv"
    columns = [column.name for column in fields(Row)]
    lines = [{name: str(value) for name, value in asdict(row).items()} for row in rows]
    measured = {(line["case"], line["direction"]) for line in lines}
    if path.exists():
        with path.open(newline="") as file:
            kept = [line for line in csv.DictReader(file) if (line["case"], line["direction"]) not in measured]
        lines = kept + lines
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(lines)
    return path


def machine_name(device: str = "cpu") -> str:
    """The GPU, such as `h200`; of a CPU its cores and the widest instruction set, such as `2-core-avx512`."""
    if device == "cuda":
        return torch.cuda.get_device_name().lower().removeprefix("nvidia ").replace(" ", "-")
    return cpu_name()


def call(run: Attention, tensors: Mapping[str, Tensor], direction: Direction) -> Callable[[], object]:
    """What is timed: one forward, or one backward of a forward that is done."""
    inputs = [tensors[name] for name in "qkv"]
    if direction == "forward":
        return lambda: run(*inputs)
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = run(*leaves)
    return lambda: torch.autograd.grad(out, leaves, tensors["dout"], retain_graph=True)


def results(run: Attention, tensors: Mapping[str, Tensor], backward: bool) -> dict[str, Tensor]:
    """Output and gradients."""
    leaves = [tensors[name].detach().requires_grad_(backward) for name in "qkv"]
    out = run(*leaves)
    grads = torch.autograd.grad(out, leaves, tensors["dout"]) if backward else ()
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=False))


def reference(case: Case, tensors: Mapping[str, Tensor], backward: bool) -> tuple[dict[str, Tensor], dict[str, float]]:
    """float64 results of the first group of heads, and how far ours may be from them.

    That is twice the error of the readable version in the same dtype, plus rounding.
    """
    first = _first_group(tensors)
    wide = {name: x.double() if x.is_floating_point() else x for name, x in first.items()}
    truth = results(ours(case, wide, "eager"), wide, backward)
    plain = errors_of(truth, results(ours(case, first, "eager"), first, backward))
    eps = torch.finfo(tensors["q"].dtype).eps
    return truth, {name: 2 * (plain[name] + eps * x.abs().max().item()) for name, x in truth.items()}


def errors_of(truth: Mapping[str, Tensor], results: Mapping[str, Tensor]) -> dict[str, float]:
    """The largest error of each result in the heads whose truth is known."""
    return {name: (results[name][:1, : x.shape[1]].double() - x).abs().max().item() for name, x in truth.items()}


def _first_group(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    group = tensors["q"].shape[1] // tensors["k"].shape[1]
    first = {name: x[:1, : 1 if name in "kv" else group] for name, x in tensors.items() if x.dim() == 4}
    return first | {name: x[:group] for name, x in tensors.items() if x.dim() == 1}


def row(problem: Problem, direction: Direction, label: str, timing: Timing, error: float, device: str = "cpu") -> Row:
    """One measurement with what it was measured on."""
    unit, flops = ("TFLOP/s", 1e12) if device == "cuda" else ("GFLOP/s", 1e9)
    return Row(
        date=datetime.date.today().isoformat(),
        commit=source_commit(),
        machine=machine_name(device),
        torch=torch.__version__,
        triton=version_of("triton"),
        case=str(replace(problem, device=torch.device(device))),
        direction=direction,
        implementation=label,
        median_us=round(timing.median_us, 2),
        spread=round(timing.spread, 3),
        rate=round(useful_flops(problem, direction) / (timing.median_us * 1e-6) / flops, 1),
        unit=unit,
        error=error,
    )


def version_of(package: str) -> str:
    """The installed version, or nothing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def source_commit() -> str:
    """The commit of the source tree, or nothing outside of one."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()
