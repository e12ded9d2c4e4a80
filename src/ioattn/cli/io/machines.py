"""`ioattn io machines`: the table of known machines, and how to describe another."""

from __future__ import annotations

from typing import Annotated

import typer

from ioattn.cli.io import options as o
from ioattn.io.machine import GB, KNOWN, Machine, to_dict
from ioattn.io.text import size, table


def machines(
    name: Annotated[list[str] | None, typer.Argument(help="Machines, `this`, or .toml files; all known ones.")] = None,
    as_json: o.AsJson = False,
) -> None:
    """What the known machines can do and where the numbers come from; `this` is measured.

    A .toml file describes another: title, bandwidth_tb, sram_kib, l2_mib, memory_gb, sms, source, and a table
    [tflops] with some of fp16, bf16, tf32, fp32, fp64.
    """
    with o.user_errors():
        chosen = [o.machine(each) for each in name or KNOWN]
    if as_json:
        typer.echo(o.as_text([to_dict(machine) for machine in chosen]))
        return
    header = ("machine", "TB/s", "fp16", "bf16", "tf32", "fp32", "fp64", "ridge", "SRAM/core", "L2", "memory", "cores")
    typer.echo(table(header, [_row(machine) for machine in chosen]))
    typer.echo("\nRates in TFLOP/s, dense; ridge in FLOP per byte at the highest 16-bit rate.")
    for machine in chosen:
        typer.echo(f"{machine.name}: {machine.title}. {machine.source}{''.join(f'; {note}' for note in machine.notes)}")


_KINDS = ("fp16", "bf16", "tf32", "fp32", "fp64")


def _row(machine: Machine) -> list[str]:
    rates = [f"{machine.flops[k] / 1e12:.4g}" if k in machine.flops else "-" for k in _KINDS]
    best = max(machine.flops.get("fp16", 0), machine.flops.get("bf16", 0))
    ridge = f"{best / machine.bandwidth:.0f}" if best else "-"
    sizes = [size(machine.sram), size(machine.l2), f"{machine.memory / GB:.0f} GB", str(machine.cores)]
    return [machine.name, f"{machine.bandwidth / 1e12:.4g}", *rates, ridge, *sizes]
