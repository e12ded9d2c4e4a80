"""`ioattn io decode`: the bytes of one decoding step over a key/value cache, contiguous or in pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ioattn.cli import words
from ioattn.cli.io import options as o
from ioattn.io import decode as formulas
from ioattn.io.decode import Decode
from ioattn.io.ledger import Traffic
from ioattn.io.machine import Machine
from ioattn.io.text import duration, rate, size, table
from ioattn.io.tiles import Blocks

SPLITS = tuple(2**i for i in range(9))


def decode(
    lengths: Annotated[
        Any, typer.Option(parser=words.integers, metavar="N,N,...", help="Keys of each sequence of a batch.")
    ] = "131072",
    batch: Annotated[int, typer.Option(help="So many times these sequences.")] = 1,
    heads: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
    dtype: Annotated[Any, typer.Option(parser=words.one_of(o.DTYPE_NAMES), metavar="|".join(o.DTYPE_NAMES))] = "bf16",
    queries: Annotated[int, typer.Option(help="Queries of a sequence: 1, or drafted tokens to check.")] = 1,
    left: Annotated[int | None, typer.Option(help="Keys before its own that a query sees; all.")] = None,
    page: Annotated[int | None, typer.Option(help="Tokens of a page; a contiguous cache.")] = None,
    append: Annotated[int, typer.Option(help="New keys of each sequence, put into its cache first.")] = 0,
    splits: Annotated[int, typer.Option(help="Pieces of the keys; 1 needs no merge.")] = 1,
    block_q: o.BlockQ = 64,
    block_k: o.BlockK = 128,
    machine: o.MachineName = "h200",
    verify: Annotated[bool, typer.Option("--count", help="Run it over the counting memory too.")] = False,
    as_json: o.AsJson = False,
    plot: o.Plot = None,
    theme: o.ThemeName = "light",
) -> None:
    """What one decoding step moves: K and V once for a group of heads, lengths, page tables, partial results.

    --plot draws what is moved besides K and V against the number of splits, for some lengths and pages.
    """
    with o.user_errors():
        if batch < 1:
            raise ValueError(f"batch is {batch}; it must be at least 1")
        step = Decode(
            lengths * batch, heads, kv_heads, dim, dtype, queries, left, page, append, Blocks(block_q, block_k, splits)
        )
        on, moved = o.machine(machine), formulas.predict(step)
        peak, kind = on.peak(step.problem(0).dtype)
        if plot is not None:
            _draw(step, plot, theme)
        checked = _count(step, moved) if verify else None
    if as_json:
        typer.echo(o.as_text(_as_dict(step, moved, on, checked)))
    else:
        typer.echo(_text(step, moved, on, f"{kind} peak {rate(peak)}"))
        if checked is not None:
            typer.echo(checked)


def _text(step: Decode, moved: Traffic, on: Machine, peak: str) -> str:
    kv = _kv_read(moved)
    tokens = sum(step.lengths)
    cache = "contiguous" if step.page is None else f"pages of {step.page}"
    head = f"B{len(step.lengths)} H{step.heads}/{step.kv_heads} D{step.dim} {step.dtype}, {step.len_q} queries each"
    rows = [(m.step, m.tensor, size(m.read), size(m.written)) for m in moved.moves]
    least = duration(max(moved.total / on.bandwidth, moved.flops / on.peak(step.problem(0).dtype)[0]))
    return "\n".join(
        [
            f"{head} over {tokens} keys, {cache}, {step.blocks.splits} splits, on {on.title}, {peak}\n",
            table(("step", "tensor", "read", "written"), rows, left=2),
            f"\n{size(moved.total)}, of them K and V {size(kv)} ({kv / moved.total if moved.total else 0:.2%}); "
            f"compulsory {size(step.compulsory)}",
            f"{moved.intensity:.3g} FLOP/B, ridge {on.ridge(step.problem(0).dtype):.0f}: at least {least} per step",
            f"{step.tasks} tasks that need nothing of each other, for {on.cores} cores; "
            f"{size(moved.on_chip)} on chip, {size(moved.extra)} of extra memory",
        ]
    )


def _kv_read(moved: Traffic) -> int:
    return sum(m.read for m in moved.moves if m.tensor in ("K", "V"))


def _as_dict(step: Decode, moved: Traffic, on: Machine, checked: str | None) -> dict[str, Any]:
    return {
        **dataclasses.asdict(step),
        "machine": on.name,
        "moves": [dataclasses.asdict(m) for m in moved.moves],
        "bytes": moved.total,
        "kv_bytes": _kv_read(moved),
        "compulsory_bytes": step.compulsory,
        "flops": moved.flops,
        "intensity": moved.intensity,
        "seconds_bytes": moved.total / on.bandwidth,
        "tasks": step.tasks,
        "on_chip_bytes": moved.on_chip,
        "extra_bytes": moved.extra,
        "checked": checked,
    }


def _count(step: Decode, predicted: Traffic) -> str:
    """Runs the step and states what was found; raises ValueError where a count or a result is wrong."""
    from ioattn.io.schedules.decode import checks, count, inputs_of

    held = sum(step.lengths) * step.kv_heads * 2 * step.dim * 8
    o.check_room("this step", 6 * held + 8 * 6 * step.len_q * max(step.lengths) + predicted.extra)
    inputs = inputs_of(step)
    with o.progress("decode", predicted.total) as on_move:
        counted = count(step, inputs, predicted.on_chip, on_move)
    with o.busy("checking against float64"):
        found = checks(step, inputs, counted.results)
    same = sorted(map(str, counted.traffic.moves)) == sorted(map(str, predicted.moves))
    wrong = [c for c in found if not c.holds]
    if not same or wrong or counted.traffic.flops != predicted.flops:
        raise ValueError(f"this step is not as predicted: {counted.traffic.total} bytes counted, {wrong}")
    error = max((c.error for c in found), default=0.0)
    return f"counted as predicted, to the byte; O within {error:.2g} of float64"


def _draw(step: Decode, path: Path, theme: Any) -> None:
    from ioattn.io.plot import Line, lines

    at = [float(n) for n in SPLITS]
    curves = [
        Line(at, _besides_kv(step, length, page), f"{length} keys, {'contiguous' if page is None else f'page {page}'}")
        for length in sorted({1024, 8192, max(*step.lengths, 1)})
        for page in (None, 16)
    ]
    title = f"one sequence, H{step.heads}/{step.kv_heads} D{step.dim} {step.dtype}, {step.len_q} queries"
    lines(title, "splits", "bytes besides K and V, % of K and V", curves, path, theme, log="xy")


def _besides_kv(step: Decode, length: int, page: int | None) -> Sequence[float]:
    found = []
    for splits in SPLITS:
        blocks = dataclasses.replace(step.blocks, splits=splits)
        moved = formulas.predict(dataclasses.replace(step, lengths=(length,), page=page, appended=0, blocks=blocks))
        kv = _kv_read(moved)
        found.append(100 * (moved.total - kv) / kv)
    return found
