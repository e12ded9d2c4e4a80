"""`ioattn io measure`: a GPU's own counters beside the prediction."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from ioattn.cases import label
from ioattn.cli.io import options as o
from ioattn.io import levels
from ioattn.io import measure as counters
from ioattn.io.tiles import Blocks
from ioattn.io.traffic import Direction, check_covered, compulsory
from ioattn.masks import Band
from ioattn.problem import DTYPES, Problem


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
        names, blocks = o.each("implementation", implementation, counters.IMPLEMENTATIONS), Blocks(block_q, block_k)
        _check_measurable(problem)
        sizes = (problem.batch, problem.heads, problem.len_q, problem.dim)
        calls = {n: counters.Call(n, sizes, DTYPES[problem.dtype], problem.band.bounded, backward) for n in names}
        try:
            found = {}
            for name, call in calls.items():
                with o.busy(f"{name} under ncu"):
                    found[name] = counters.measure(call, warm)
        except counters.MeasureError as error:
            typer.echo(f"cannot measure: {error}", err=True)
            raise typer.Exit(1) from None
        compared = levels.compare(problem, direction, found, blocks)
    if as_json:
        listed = {it.implementation: _as_dict(it, compulsory(problem, direction)) for it in compared}
        typer.echo(o.as_text({"problem": label(problem), "direction": direction, "warm": warm, "measured": listed}))
        return
    typer.echo(levels.text(problem, direction, compared, blocks))


def _check_measurable(problem: Problem) -> None:
    check_covered(problem)
    if problem.group != 1 or problem.len_q != problem.len_k or problem.dim != problem.dim_v:
        raise ValueError(
            f"problem is {label(problem)}; it must have as many keys as queries, one head count and one head dim"
        )
    if problem.band.bounded and problem.band != Band(hi=0):
        raise ValueError(f"problem is {label(problem)}; its band must be full or causal, which all three can compute")
    if not min(problem.batch, problem.len_q):
        raise ValueError(f"problem is {label(problem)}; it must have a batch and rows, or no kernel would run")


def _as_dict(it: levels.Comparison, least: int) -> dict[str, Any]:
    predicted, crossing = it.predicted, levels.at_l2(it.predicted)
    return {
        "counters": dataclasses.asdict(it.counters),
        "schedule": it.schedule,
        "predicted": {"read": predicted.read, "written": predicted.written, "at_l2": crossing._asdict()},
        "explained": levels.explain(it, least),
    }
