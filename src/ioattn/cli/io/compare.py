"""`ioattn io compare`: two loops side by side, what is on the chip at each line and what each line moves."""

from __future__ import annotations

from typing import Annotated

import typer

from ioattn.cases import label
from ioattn.cli.io import options as o
from ioattn.io.loops import Line, backward_sums, line_bytes
from ioattn.io.text import size, table
from ioattn.io.tiles import Blocks
from ioattn.io.traffic import Direction
from ioattn.problem import Problem

_FORWARD = """\
m, l and O: in {0} they live in slow memory between passes over the keys, read and written in each; in {1} they live
on the chip from the first key tile of a query tile to its last. K and V the other way round: {0} reads them once,
{1} once per query tile. {1}'s query tiles need nothing of each other, so they run in parallel."""

_BACKWARD = """\
Why the backward has keys outside again: one of the sums has to leave the chip. Keys outside, it is dQ: {0} read and
written here. Queries outside, it would be dK and dV: {1}."""


def compare(
    first: Annotated[str, typer.Argument(metavar="fa1|fa2")] = "fa1",
    second: Annotated[str, typer.Argument(metavar="fa1|fa2")] = "fa2",
    case: o.Case = None,
    shape: o.Shape = None,
    kv_heads: o.KvHeads = None,
    len_k: o.LenK = None,
    dim_v: o.DimV = None,
    dtype: o.Dtype = None,
    causal: o.Causal = False,
    top_left: o.TopLeft = False,
    window: o.Window = None,
    backward: Annotated[bool, typer.Option("--backward", help="The backward's loops.")] = False,
    block_q: o.BlockQ = 64,
    block_k: o.BlockK = 64,
    as_json: o.AsJson = False,
) -> None:
    """FA1 and FA2 line by line: where Q, K, V, O, m and l live and what each line moves over the whole run."""
    direction: Direction = "backward" if backward else "forward"
    with o.user_errors():
        problem = o.chosen_problem(
            case,
            shape,
            dtype,
            kv_heads=kv_heads,
            len_k=len_k,
            dim_v=dim_v,
            causal=o.aligned(causal, top_left),
            window=window,
        )
        blocks = Blocks(block_q, block_k)
        sides = {name: line_bytes(problem, name, direction, blocks) for name in (first, second)}
    if as_json:
        listed = {
            name: [{"line": line.code, "on_chip": line.chip.split(), "bytes": moved} for line, moved in lines]
            for name, lines in sides.items()
        }
        typer.echo(o.as_text(listed))
        return
    typer.echo(_text(problem, direction, blocks, sides))


def _text(problem: Problem, direction: Direction, blocks: Blocks, sides: dict[str, list[tuple[Line, int]]]) -> str:
    header = [text for name in sides for text in (name, "moves", "on chip")]
    columns = [[(line.code, size(moved) if moved else "", line.chip) for line, moved in s] for s in sides.values()]
    rows = [[text for cells in pair for text in cells] for pair in zip(*columns, strict=True)]
    rows.append([text for lines in sides.values() for text in ("in all", size(sum(m for _, m in lines)), "")])
    lines = [f"{label(problem)}, {direction}, blocks {blocks}", "", table(header, rows, left=len(header)), ""]
    lines.append("On chip: after the line, S and P the tile of scores and of weights. Everything else: in slow memory.")
    if direction == "forward":
        lines.append(_FORWARD.format("fa1", "fa2"))
    else:
        swap = backward_sums(problem, blocks)
        lines.append(_BACKWARD.format(size(swap.keys_outside), size(swap.queries_outside)))
    return "\n".join(lines)
