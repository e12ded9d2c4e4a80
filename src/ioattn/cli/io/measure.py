"""`ioattn io measure`: a GPU's own counters beside the prediction."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from ioattn.cli.io import options as o
from ioattn.io import measure as counters
from ioattn.io.problems import label
from ioattn.io.text import size, table
from ioattn.io.tiles import Blocks
from ioattn.io.traffic import Direction, compulsory, predict
from ioattn.problem import Problem

PREDICTED_BY = {"naive": "naive", "sdpa": "fa2", "ioattn": "fa2"}
"""The schedule that stands beside each implementation."""


def measure(
    case: o.Case = None,
    shape: o.Shape = None,
    dtype: o.Dtype = "fp16",
    causal: o.Causal = False,
    backward: Annotated[bool, typer.Option("--backward", help="The backward, without its forward.")] = False,
    implementation: Annotated[list[str] | None, typer.Option(help="naive, sdpa, ioattn; all of them.")] = None,
    block_q: Annotated[int, typer.Option(help="Queries of a tile that the prediction assumes.")] = 128,
    block_k: Annotated[int, typer.Option(help="Keys of a tile that the prediction assumes.")] = 128,
    as_json: o.AsJson = False,
) -> None:
    """Bytes at DRAM and L2 of naive, SDPA's and ioattn's attention, read by ncu on a GPU, beside the prediction.

    Without a problem, the exercise of the background chapter: one head, N 4096, d 64, FP16.
    """
    direction: Direction = "backward" if backward else "forward"
    with o.user_errors():
        problem = o.chosen_problem(case, shape, dtype, causal=causal)
        if problem.group != 1 or problem.len_q != problem.len_k:
            raise ValueError(f"problem is {problem}; it must have as many keys as queries and one head count")
        names = implementation or list(PREDICTED_BY)
        for name in names:
            if name not in PREDICTED_BY:
                raise ValueError(f"implementation is {name!r}; it must be one of {', '.join(PREDICTED_BY)}")
    sizes, is_causal = (problem.batch, problem.heads, problem.len_q, problem.dim), problem.band.bounded
    dtype_name = str(problem).split()[3]
    try:
        found = {name: counters.measure(name, sizes, dtype_name, is_causal, backward) for name in names}
    except counters.MeasureError as error:
        typer.echo(f"cannot measure: {error}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        listed = {name: {**dataclasses.asdict(c), "dram": c.dram, "l2": c.l2} for name, c in found.items()}
        predictions = {
            name: predict(problem, PREDICTED_BY[name], direction, Blocks(block_q, block_k)) for name in names
        }
        predicted = {name: {"read": t.read, "written": t.written} for name, t in predictions.items()}
        typer.echo(json.dumps({"problem": label(problem), "measured": listed, "predicted": predicted}, indent=2))
        return
    typer.echo(text(problem, direction, found, Blocks(block_q, block_k)))


def text(problem: Problem, direction: Direction, found: dict[str, counters.Counters], blocks: Blocks) -> str:
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


def explain(
    problem: Problem, direction: Direction, schedule: str, measured: counters.Counters, blocks: Blocks
) -> list[str]:
    """Sentences on the gap between the prediction and each level of the memory."""
    predicted, least = predict(problem, schedule, direction, blocks), compulsory(problem, direction)
    lines = []
    if measured.dram < predicted.total:
        caught = 1 - measured.dram / predicted.total
        lines.append(
            f"DRAM saw {size(measured.dram)} of the {size(predicted.total)} predicted: the L2 caught {caught:.0%}, "
            + (
                "re-reads of K and V."
                if schedule == "fa2"
                else "rereads of S and P, and writes it had not passed on yet."
            )
        )
    else:
        lines.append(
            f"DRAM saw {measured.dram / predicted.total:.2f} times the prediction: these kernels make more passes "
            "(or larger copies) than the schedule."
        )
    if measured.dram < least:
        lines.append(f"DRAM saw less than the compulsory {size(least)}: results were still in the L2 at the end.")
    ratio = measured.l2 / predicted.total if predicted.total else float("inf")
    rest = {
        True: "smaller than predicted: its query tile is larger, or tiles are shared between SMs.",
        False: "what every tile asks for, before any cache of memory; above 1 are smaller tiles and extra passes.",
    }
    lines.append(f"L2 saw {size(measured.l2)}, {ratio:.2f} of the prediction: {rest[ratio < 0.95]}")
    return lines
