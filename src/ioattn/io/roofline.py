"""Time bounds: how long the bytes and the FLOPs of a schedule take at best, and which of the two binds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ioattn.cases import label
from ioattn.io.ledger import Traffic
from ioattn.io.machine import Machine
from ioattn.io.tiles import Blocks
from ioattn.io.traffic import Direction, compulsory, predict, useful_flops
from ioattn.masks import EVERYTHING
from ioattn.problem import Problem


@dataclass(frozen=True)
class Bound:
    """A schedule on a machine.

    `attainable` is the FLOP/s that the bytes allow, the roofline `min(peak, intensity * bandwidth)`. `floor_seconds`
    is the same question with every re-read caught by a cache: compulsory bytes and intermediate matrices only.
    """

    problem: Problem
    machine: Machine
    schedule: str
    direction: Direction
    blocks: Blocks
    traffic: Traffic
    compulsory: int
    useful_flops: int
    peak: float
    peak_kind: str
    seconds_bytes: float
    seconds_flops: float

    @property
    def seconds(self) -> float:
        """The least time if every byte counted goes to slow memory."""
        return max(self.seconds_bytes, self.seconds_flops)

    @property
    def binds(self) -> str:
        """Which roof: "bandwidth" or "compute"."""
        return "bandwidth" if self.seconds_bytes > self.seconds_flops else "compute"

    @property
    def attainable(self) -> float:
        """FLOP/s under the roofline."""
        return min(self.peak, self.traffic.intensity * self.machine.bandwidth)

    @property
    def floor_seconds(self) -> float:
        """The least time of any schedule: compulsory bytes, useful FLOPs."""
        return max(self.compulsory / self.machine.bandwidth, self.useful_flops / self.peak)

    @property
    def fits_chip(self) -> bool:
        """Whether the tiles fit the SRAM of one core."""
        return self.traffic.on_chip <= self.machine.sram

    def reached(self, seconds: float) -> float:
        """The share of the roofline that a measured time reaches."""
        return self.seconds / seconds

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON takes it."""
        t = self.traffic
        return {
            "problem": label(self.problem),
            "machine": self.machine.name,
            "schedule": self.schedule,
            "direction": self.direction,
            "block_q": self.blocks.q,
            "block_k": self.blocks.k,
            "splits": self.blocks.splits,
            "moves": [{"step": m.step, "tensor": m.tensor, "read": m.read, "written": m.written} for m in t.moves],
            "bytes": t.total,
            "bytes_read": t.read,
            "bytes_written": t.written,
            "flops": t.flops,
            "useful_flops": self.useful_flops,
            "intensity": t.intensity,
            "ridge": self.peak / self.machine.bandwidth,
            "binds": self.binds,
            "attainable_flops_per_s": self.attainable,
            "peak_flops_per_s": self.peak,
            "peak_kind": self.peak_kind,
            "seconds_bytes": self.seconds_bytes,
            "seconds_flops": self.seconds_flops,
            "seconds": self.seconds,
            "compulsory_bytes": self.compulsory,
            "floor_seconds": self.floor_seconds,
            "extra_bytes": t.extra,
            "on_chip_bytes": t.on_chip,
            "on_chip_tiles": dict(t.tiles),
            "fits_chip": self.fits_chip,
        }


def bound(
    problem: Problem, machine: Machine, schedule: str, direction: Direction = "forward", blocks: Blocks | None = None
) -> Bound:
    """The roofline of a problem under a schedule on a machine.

    Raises:
        ValueError: as `predict` does, or if the machine has no peak for the problem's dtype.

    Example:
        >>> from ioattn.cases import problem_of
        >>> from ioattn.io.machine import machine_of
        >>> it = bound(problem_of((1, 1, 4096, 64)), machine_of("h100"), "fa2")
        >>> f"{it.binds}, {it.attainable / 1e12:.0f} TFLOP/s"
        'bandwidth, 211 TFLOP/s'
    """
    blocks = blocks or Blocks()
    traffic = predict(problem, schedule, direction, blocks)
    peak, kind = machine.peak(problem.dtype)
    return Bound(
        problem=problem,
        machine=machine,
        schedule=schedule,
        direction=direction,
        blocks=blocks,
        traffic=traffic,
        compulsory=compulsory(problem, direction),
        useful_flops=useful_flops(problem, direction),
        peak=peak,
        peak_kind=kind,
        seconds_bytes=traffic.total / machine.bandwidth,
        seconds_flops=traffic.flops / peak,
    )


def best_blocks(problem: Problem, schedule: str, direction: Direction, sram: int) -> Blocks | None:
    """The blocks that move the fewest bytes of those that fit `sram`: multiples of 16, None where none fits.

    Of two that move as much, the one with more scores per tile.
    """
    full = dataclasses.replace(problem, band=EVERYTHING)
    sizes = sorted({*range(16, 257, 16), *(2**i for i in range(9, 18))})
    best = None
    for q in (s for s in sizes if s < 2 * max(problem.len_q, 16)):
        for k in (s for s in sizes if s < 2 * max(problem.len_k, 16)):
            # The chip's share does not depend on the band, and a long band takes milliseconds to add up.
            if predict(full, schedule, direction, Blocks(q, k)).on_chip > sram:
                continue
            key = (predict(problem, schedule, direction, Blocks(q, k)).total, -q * k)
            if best is None or key < best[0]:
                best = (key, Blocks(q, k))
    return best and best[1]
