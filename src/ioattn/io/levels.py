"""Measured bytes beside predicted ones, level by level: DRAM under the L2, the L2 under the SMs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ioattn.cases import label
from ioattn.io.ledger import Traffic
from ioattn.io.measure import Counters
from ioattn.io.text import duration, size, table
from ioattn.io.tiles import Blocks
from ioattn.io.traffic import Direction, compulsory, predict
from ioattn.problem import Problem


class Crossing(NamedTuple):
    """Bytes between the L2 and the SMs."""

    read: int
    written: int
    reduced: int


def schedule_of(implementation: str, direction: Direction, kernels: Sequence[str]) -> str:
    """The schedule that an implementation follows, as far as its bytes go.

    Torch's softmax keeps a row in registers, so its forward reads S once; its backward multiplies P and dP in one
    kernel and sums in another, so it reads them twice. A backward of ours with a kernel for the queries does not add
    to dQ in memory: it passes over the scores twice.
    """
    if implementation == "naive":
        return "fused-softmax" if direction == "forward" else "naive"
    passes_twice = direction == "backward" and any("query_kernel" in name for name in kernels)
    return "two-pass" if passes_twice else "fa2"


def at_l2(traffic: Traffic) -> Crossing:
    """What a schedule moves between the L2 and the SMs: an addition to dQ in memory crosses once, without its read."""
    added = [m for m in traffic.moves if m.tensor == "dQ sum" and m.read and m.written]
    reads, writes = sum(m.read for m in added), sum(m.written for m in added)
    return Crossing(traffic.read - reads, traffic.written - writes, writes)


def _named(implementation: str, counters: Counters) -> str:
    return f"{implementation}:{counters.backend}" if counters.backend else implementation


class Comparison(NamedTuple):
    """One implementation's counters, the schedule that stands beside them and what it moves."""

    implementation: str
    counters: Counters
    schedule: str
    predicted: Traffic


def compare(problem: Problem, direction: Direction, found: Mapping[str, Counters], blocks: Blocks) -> list[Comparison]:
    """Each implementation's counters beside the prediction of its schedule at these blocks.

    Raises:
        ValueError: if the problem is not covered by the schedules.
    """
    names = {name: schedule_of(name, direction, c.kernels) for name, c in found.items()}
    return [Comparison(n, c, names[n], predict(problem, names[n], direction, blocks)) for n, c in found.items()]


def text(problem: Problem, direction: Direction, compared: Sequence[Comparison], blocks: Blocks) -> str:
    """The table of measured and predicted bytes, and what explains the difference at each level."""
    rows: list[tuple[Any, ...]] = []
    for name, c, schedule, t in compared:
        moved = (c.dram_read, c.dram_written, c.l2_read, c.l2_written, c.l2_reduced)
        took = duration(c.nanoseconds / 1e9) if c.nanoseconds else ""
        rows.append((_named(name, c), "measured", *map(size, moved), took, len(c.kernels)))
        rows.append(("", f"{schedule} {blocks}", *map(size, (t.read, t.written, *at_l2(t))), "", ""))
    header = ("", "", "DRAM read", "written", "L2 read", "written", "added", "time", "kernels")
    least = compulsory(problem, direction)
    lines = [f"{label(problem)}, {direction}; compulsory {size(least)}", "", table(header, rows, left=2), ""]
    for it in compared:
        lines += [f"{it.implementation}: {line}" for line in explain(it, least)]
    return "\n".join(lines)


def explain(it: Comparison, least: int) -> list[str]:
    """Sentences on the gap between the prediction and each level of the memory; `least` are the compulsory bytes."""
    lines = [_at_dram(it)]
    c, crossing = it.counters, at_l2(it.predicted)
    if c.dram < least:
        lines.append(f"DRAM saw less than the compulsory {size(least)}: results were still in the L2 at the end.")
    ratio = c.l2_read / crossing.read if crossing.read else 1.0
    lines.append(f"L2: SMs read {size(c.l2_read)}, {ratio:.2f} of the prediction: {_why_read(it.schedule, ratio)}.")
    lines.append(_at_l2_written(c, crossing))
    return lines


def _at_dram(it: Comparison) -> str:
    c, t = it.counters, it.predicted
    if it.schedule in ("naive", "fused-softmax"):
        read = f"DRAM read {size(c.dram_read)}, {_ratio(c.dram_read, t.read)} of the prediction"
        kept = max(0, t.written - c.dram_written)
        wrote = f"and wrote {size(c.dram_written)} of {size(t.written)}"
        if c.dram_read > 1.1 * t.read:
            return f"{read}, {wrote}: these kernels make more passes than the schedule."
        return f"{read}, {wrote}: {size(kept)} were still in the L2 when a kernel ended."
    caught = 1 - c.dram / t.total if t.total else 0.0
    seen = f"DRAM saw {size(c.dram)} of {size(t.total)}"
    if caught <= 0:
        return f"{seen}: the L2 caught nothing."
    additions = ", and additions to dQ" if at_l2(t).reduced else ""
    return f"{seen}: the L2 caught {caught:.0%}, re-reads of tiles{additions}."


def _why_read(schedule: str, ratio: float) -> str:
    if schedule in ("naive", "fused-softmax"):
        return "products read their thin operands again for every tile" if ratio > 1.05 else "as predicted"
    if ratio < 0.95:
        return "larger tiles, or SMs that ask for one tile at one time and are served at once"
    return "as predicted" if ratio < 1.05 else "smaller tiles or more passes than the prediction's"


def _at_l2_written(c: Counters, crossing: Crossing) -> str:
    stored, predicted = c.l2_written + c.l2_reduced, crossing.written + crossing.reduced
    line = f"L2: SMs wrote or added {size(stored)}, {_ratio(stored, predicted)} of the prediction"
    return f"{line}; {size(c.spilled)} of it are registers that did not fit." if c.spilled else f"{line}."


def _ratio(measured: float, predicted: float) -> str:
    return f"{measured / predicted:.2f}" if predicted else "more than the nothing"
