"""`ioattn io count`: run a schedule over the counting memory; bytes and the result, both checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import Tensor

from ioattn.cases import inputs_of, label
from ioattn.cli.io import options as o
from ioattn.io import schedules, traffic
from ioattn.io.ledger import Traffic
from ioattn.io.reference import Check, check, check_checkable
from ioattn.io.tensors import read_tensor
from ioattn.io.text import size, table
from ioattn.io.tiles import Blocks
from ioattn.problem import DTYPES, Problem

File = Annotated[Any, typer.Option(metavar="FILE", help="A .npy or .safetensors file instead of random numbers.")]


def count(
    case: o.Case = None,
    shape: o.Shape = None,
    kv_heads: o.KvHeads = None,
    len_k: o.LenK = None,
    dim_v: o.DimV = None,
    dtype: o.Dtype = None,
    causal: o.Causal = False,
    top_left: o.TopLeft = False,
    window: o.Window = None,
    schedule: Annotated[list[str] | None, typer.Option(help=f"Any of {', '.join(schedules.SCHEDULES)}; fa2.")] = None,
    backward: Annotated[bool, typer.Option("--backward", help="The backward, without its forward.")] = False,
    sram: o.Sram = None,
    block_q: o.BlockQ = 64,
    block_k: o.BlockK = 64,
    splits: o.Splits = 8,
    q: File = None,
    k: File = None,
    v: File = None,
    dout: File = None,
    seed: int = 0,
    as_json: o.AsJson = False,
) -> None:
    """Run schedules over a chip of --sram bytes that counts what moves; exit code 1 if a check fails.

    Checked: the count against the prediction, to the byte, and the result against float64. Without --sram the chip is
    as large as the prediction says that the schedule needs. Tensors from files give the sizes; --dout goes with
    --backward. A .safetensors file holds them as q, k, v and dout.
    """
    direction: traffic.Direction = "backward" if backward else "forward"
    with o.user_errors():
        given = _given({"q": q, "k": k, "v": v, "dout": dout}, direction)
        if given:
            sizes = {"case": case, "shape": shape, "kv-heads": kv_heads, "len-k": len_k, "dim-v": dim_v, "dtype": dtype}
            for option, value in sizes.items():
                o.alone(option, value, "with tensors, which have their own sizes")
            shape, kv_heads, len_k, dim_v, dtype = _sizes_of(given)
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
        names = o.each("schedule", schedule or ["fa2"], schedules.SCHEDULES)
        blocks = Blocks(block_q, block_k, splits)
        predictions = [traffic.predict(problem, name, direction, blocks) for name in names]
        check_checkable(problem)
        _check_room(problem, predictions)
        inputs = given or random_inputs(problem, seed)
        reports = [
            _run(problem, name, direction, inputs, predicted, (blocks, sram))
            for name, predicted in zip(names, predictions, strict=True)
        ]
    if as_json:
        typer.echo(o.as_text([report.to_dict() for report in reports]))
    else:
        typer.echo("\n\n".join(map(str, reports)))
    if not all(report.holds for report in reports):
        raise typer.Exit(1)


NAMES = {"q": "Q", "k": "K", "v": "V", "dout": "dO"}
"""Tensors as options and files call them, and as the schedules do."""


class _Report:
    """One schedule's prediction, count and checks."""

    def __init__(self, title: str, predicted: Traffic, counted: Traffic, checks: list[Check]) -> None:
        self.title, self.predicted, self.counted, self.checks = title, predicted, counted, checks

    @property
    def same(self) -> bool:
        one, other = (sorted(map(str, t.moves)) for t in (self.predicted, self.counted))
        return one == other and self.predicted.flops == self.counted.flops

    @property
    def holds(self) -> bool:
        return self.same and all(c.holds for c in self.checks)

    def __str__(self) -> str:
        predicted = {(m.step, m.tensor): m for m in self.predicted.moves}
        rows = []
        for m in self.counted.moves:
            p = predicted.get((m.step, m.tensor))
            rows.append((m.step, m.tensor, *((p.read, p.written) if p else ("-", "-")), m.read, m.written))
        header = ("step", "tensor", "predicted read", "written", "counted read", "written")
        lines = [self.title, table(header, rows, left=2)]
        verdict = "predicted == counted, to the byte" if self.same else "PREDICTION AND COUNT DIFFER"
        t = self.counted
        lines.append(f"total {t.total} bytes = {size(t.total)}, {t.flops / 1e9:.4g} GFLOP: {verdict}")
        lines.append(f"on chip {t.on_chip} bytes at most, {size(t.extra)} of extra slow memory")
        lines += [
            f"{c.name} vs float64: error {c.error:.3g}, {'within' if c.holds else 'BEYOND'} its bound {c.bound:.3g}"
            for c in self.checks
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        sides = {"predicted": self.predicted, "counted": self.counted}
        numbers: dict[str, Any] = {
            side: {
                "moves": [{"step": m.step, "tensor": m.tensor, "read": m.read, "written": m.written} for m in t.moves],
                "bytes": t.total,
                "flops": t.flops,
                "on_chip_bytes": t.on_chip,
                "extra_bytes": t.extra,
            }
            for side, t in sides.items()
        }
        checks = [{"tensor": c.name, "error": c.error, "bound": c.bound, "holds": c.holds} for c in self.checks]
        return {"title": self.title, **numbers, "same": self.same, "checks": checks}


def _run(
    problem: Problem,
    name: str,
    direction: traffic.Direction,
    inputs: Mapping[str, Tensor],
    predicted: Traffic,
    chip: tuple[Blocks, int | None],
) -> _Report:
    blocks, sram = chip
    with o.progress(f"{name} {direction}", predicted.total) as on_move:
        counted = schedules.count(problem, name, direction, inputs, blocks, sram, on_move)
    used = {n: x for n, x in inputs.items() if direction == "backward" or n != "dO"}
    title = f"{label(problem)}, {name} {direction}, blocks {blocks}"
    with o.busy("checking against float64"):
        return _Report(title, predicted, counted.traffic, check(problem, used, counted.results))


def random_inputs(problem: Problem, seed: int) -> dict[str, Tensor]:
    """Q, K, V and dO of a problem, normally distributed."""
    return {NAMES[name]: x for name, x in inputs_of(problem, seed).items()}


def _check_room(problem: Problem, predictions: list[Traffic]) -> None:
    """Raise MemoryError rather than let the machine run out: slow memory is this machine's."""
    p = problem
    inputs = p.batch * (p.heads * p.len_q + p.kv_heads * p.len_k) * (p.dim + p.dim_v) * p.dtype.itemsize
    # The checks compute one head's scores at a time, with a few float64 matrices of them, and every tensor in float64.
    needed = 8 * inputs + max(t.extra for t in predictions) + 4 * 8 * p.batch * p.len_q * p.len_k
    o.check_room(label(p), needed)


def _given(files: Mapping[str, str | None], direction: traffic.Direction) -> dict[str, Tensor]:
    if direction == "forward":
        o.alone("dout", files["dout"], "without --backward")
    given = {NAMES[name]: read_tensor(Path(path), name) for name, path in files.items() if path is not None}
    missing = [name for name in ("q", "k", "v") if NAMES[name] not in given]
    if given and missing:
        raise ValueError(f"--{', --'.join(missing)} missing; give --q, --k and --v together")
    if given and direction == "backward" and "dO" not in given:
        raise ValueError("--dout is missing; the backward of tensors from files needs it")
    return given


def _sizes_of(given: Mapping[str, Tensor]) -> tuple[tuple[int, ...], int, int, int, str]:
    q, k, v = given["Q"], given["K"], given["V"]
    for name, x in given.items():
        if x.dim() != 4 or x.dtype not in DTYPES or x.dtype != q.dtype:
            raise ValueError(
                f"{name} is {x.dtype} of shape {tuple(x.shape)}; it must be (B, H, N, D) of one float dtype"
            )
    expected = {"K": (q.shape[0], *k.shape[1:3], q.shape[3]), "V": (*k.shape[:3], v.shape[3])}
    expected["dO"] = (*q.shape[:3], v.shape[3])
    for name, sizes in expected.items():
        if name in given and tuple(given[name].shape) != sizes:
            raise ValueError(f"{name} has shape {tuple(given[name].shape)}; it must be {sizes}")
    return tuple(q.shape), k.shape[1], k.shape[2], v.shape[3], DTYPES[q.dtype]
