"""`ioattn why`: every backend's verdict on a problem that is described by its sizes, without its tensors."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from ioattn import registry
from ioattn.cases import DTYPE_NAMES
from ioattn.cli import words
from ioattn.problem import Align, Options, Problem, Tensors

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)

Sizes = tuple[int, ...]


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        raise typer.BadParameter(f"{text!r}; it must be cpu, cuda or cuda:INDEX") from None
    return torch.device("cuda", 0) if device == torch.device("cuda") else device


# Typer reads the parsers; the annotations would make it ask for several words instead of one.
_DenseOption = Annotated[Any, typer.Option(parser=words.sizes("B,H,N,D"), metavar="B,H,N,D")]
_ScoreOption = Annotated[Any, typer.Option(parser=words.sizes("B,H,N"), metavar="B,H,N")]


@app.command()
def why(
    shape: _DenseOption,
    kv_shape: _DenseOption = None,
    dim_v: int | None = None,
    dtype: Annotated[Any, typer.Option(parser=words.one_of(DTYPE_NAMES), metavar="|".join(DTYPE_NAMES))] = "fp32",
    device: Annotated[Any, typer.Option(parser=_device, metavar="cpu|cuda[:INDEX]")] = "cpu",
    causal: Annotated[bool, typer.Option("--causal", help="Aligned bottom-right.")] = False,
    top_left: Annotated[bool, typer.Option("--top-left", help="Causal, aligned top-left.")] = False,
    window: Annotated[Any, typer.Option(parser=words.window, metavar="LEFT,RIGHT", help="'none': unbounded.")] = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: _ScoreOption = None,
    mask: _ScoreOption = None,
    alibi: Annotated[bool, typer.Option("--alibi")] = False,
    sinks: Annotated[bool, typer.Option("--sinks")] = False,
    packed: Annotated[bool, typer.Option("--packed", help="B sequences of up to N rows each.")] = False,
    deterministic: Annotated[bool, typer.Option("--deterministic")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Which backend would run this problem, and why no other; exit code 1 if none would.

    Nothing is computed or allocated: any size and any device may be asked about. Of a bias and a mask give the batch,
    heads and queries, 1 where they broadcast.
    """
    align: bool | Align = "top-left" if top_left else causal
    try:
        tensors = _tensors(shape, kv_shape or shape, dim_v, DTYPE_NAMES[dtype], packed)
        extras = _extras(tensors, {"bias": bias, "mask": mask}, alibi=alibi, sinks=sinks)
        longest = (shape[2], (kv_shape or shape)[2]) if packed else ()
        options = Options.of(align, window, scale, softcap, deterministic, *longest)
        problem = Problem.of(Tensors.of(**tensors, **extras), options)
    except (TypeError, ValueError, RuntimeError) as error:
        # RuntimeError: torch itself refuses sizes that, or whose product, pass 2^63; a trace may follow its first line.
        raise typer.BadParameter(str(error).partition("\n")[0]) from None
    verdict = registry.explain(dataclasses.replace(problem, device=device))
    typer.echo(_as_json(verdict) if as_json else str(verdict))
    if device.type == "cuda" and device.index >= torch.cuda.device_count():
        typer.echo(f"note: torch sees no {device} on this machine", err=True)
    if verdict.chosen is None:
        raise typer.Exit(1)


def _tensors(queries: Sizes, keys: Sizes, dim_v: int | None, dtype: torch.dtype, packed: bool) -> dict[str, Tensor]:
    """q, k, v and, for packed problems, the offsets: shapes without memory."""
    values = (*keys[:3], keys[3] if dim_v is None else dim_v)
    shapes = {"q": queries, "k": keys, "v": values}
    if packed:
        shapes = {name: (batch * rows, heads, dim) for name, (batch, heads, rows, dim) in shapes.items()}
    tensors = {name: torch.empty(sizes, dtype=dtype, device="meta") for name, sizes in shapes.items()}
    offsets = {"cu_seqlens_q": queries[0] + 1, "cu_seqlens_k": keys[0] + 1} if packed else {}
    return tensors | {name: torch.empty(size, dtype=torch.int32, device="meta") for name, size in offsets.items()}


def _extras(
    tensors: dict[str, Tensor], per_score: dict[str, Sizes | None], *, alibi: bool, sinks: bool
) -> dict[str, Tensor]:
    """The tensors that score terms and masks take, in the shapes that fit `tensors`."""
    q, k = tensors["q"], tensors["k"]
    extras = {
        name: torch.empty((*sizes, k.shape[-2]), dtype=torch.bool if name == "mask" else q.dtype, device="meta")
        for name, sizes in per_score.items()
        if sizes is not None
    }
    per_head = [name for name, wanted in (("alibi_slopes", alibi), ("sinks", sinks)) if wanted]
    return extras | {name: torch.empty(q.shape[1], device="meta") for name in per_head}


def _as_json(verdict: registry.Explanation) -> str:
    verdicts = [{"backend": name, "reasons": reasons} for name, reasons in verdict.verdicts]
    return json.dumps({"problem": str(verdict.problem), "chosen": verdict.chosen, "verdicts": verdicts}, indent=2)
