"""`ioattn io measure`: a GPU's own counters beside the prediction."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from ioattn.cases import label
from ioattn.cli.io import options as o
from ioattn.io import measure as counters
from ioattn.io.tiles import Blocks
from ioattn.io.traffic import Direction, predict


def measure(
    case: o.Case = None,
    shape: o.Shape = None,
    dtype: o.Dtype = None,
    causal: o.Causal = False,
    backward: Annotated[bool, typer.Option("--backward", help="The backward, without its forward.")] = False,
    implementation: Annotated[list[str] | None, typer.Option(help="naive, sdpa, ioattn; all of them.")] = None,
    warm: Annotated[bool, typer.Option("--warm", help="Keep the caches between kernels, not flushed.")] = False,
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
        names = implementation or list(counters.PREDICTED_BY)
        for name in names:
            if name not in counters.PREDICTED_BY:
                raise ValueError(f"implementation is {name!r}; it must be one of {', '.join(counters.PREDICTED_BY)}")
    sizes, is_causal = (problem.batch, problem.heads, problem.len_q, problem.dim), problem.band.bounded
    dtype_name = str(problem).split()[3]
    try:
        calls = {name: counters.Call(name, sizes, dtype_name, is_causal, backward) for name in names}
        found = {name: counters.measure(call, warm) for name, call in calls.items()}
    except counters.MeasureError as error:
        typer.echo(f"cannot measure: {error}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        listed = {name: {**dataclasses.asdict(c), "dram": c.dram, "l2": c.l2} for name, c in found.items()}
        predictions = {
            name: predict(problem, counters.PREDICTED_BY[name], direction, Blocks(block_q, block_k)) for name in names
        }
        predicted = {name: {"read": t.read, "written": t.written} for name, t in predictions.items()}
        typer.echo(o.as_text({"problem": label(problem), "measured": listed, "predicted": predicted}))
        return
    typer.echo(counters.text(problem, direction, found, Blocks(block_q, block_k)))
