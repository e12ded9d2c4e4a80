"""`ioattn demo`: the same model trained on standard attention and on ioattn, then lengths only one of them reaches."""

from __future__ import annotations

import importlib.util
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

import ioattn
from ioattn import registry
from ioattn.cli.demo import memory
from ioattn.cli.demo.memory import Measurement, Task, human, matrices_bytes
from ioattn.cli.demo.model import ByteModel, Shape, io_attention, read_text, standard_attention, train

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)

CHECKED_ROWS = 64
SHOWN_STEPS = 6


@dataclass(frozen=True)
class Plan:
    """How much the demo does; `tokens` are measured on ioattn, those of `standard_tokens` that fit also without it."""

    shape: Shape
    tokens: tuple[int, ...]
    standard_tokens: tuple[int, ...]
    read: int


CPU_PLAN = Plan(Shape(), (1024, 2048, 4096, 8192, 16384, 32768), (1024, 2048, 4096, 8192), read=16384)
GPU_PLAN = Plan(
    Shape(layers=4, width=256, context=1024, batch=8, steps=100),
    (4096, 8192, 16384, 32768, 65536, 131072),
    (4096, 8192, 16384, 32768),
    read=32768,
)
QUICK_PLAN = Plan(
    Shape(layers=1, heads=2, width=32, context=64, batch=2, steps=8), (256, 512, 1024), (256, 512), read=1024
)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("demo-output"),
    quick: Annotated[bool, typer.Option("--quick", help="Seconds instead of a minute or two; small sizes.")] = False,
) -> None:
    """Train a small transformer on Python's documentation twice, compare; then go where N x N matrices do not fit.

    Prints both losses, the measured memory against the number of tokens, and the error of sampled rows against
    float64; exit code 1 if that error is larger than rounding explains.
    """
    _prepare(out)
    console = Console(highlight=False)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    plan = QUICK_PLAN if quick else GPU_PLAN if device.type == "cuda" else CPU_PLAN
    text = read_text()
    console.print(f"[bold]ioattn demo[/] on {device}: {len(text):,} bytes of the documentation inside Python")
    model, losses = _train_twice(console, plan.shape, text[: -plan.read - 1], device)
    measured = _measure_memory(console, plan, device)
    _read_at_once(console, model, text[-plan.read - 1 :].to(device, torch.long))
    good = _report_errors(console, measured["ioattn"])
    _draw(console, out, losses, measured, device)
    if not good:
        raise typer.Exit(1)


def _prepare(out: Path) -> None:
    """Make the folder before the work of minutes, not after."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"{str(out)!r}; it must be a folder that can be made: {error.strerror}") from None
    if not os.access(out, os.W_OK):
        raise typer.BadParameter(f"{str(out)!r}; it must be a folder that can be written to")


def _train_twice(
    console: Console, shape: Shape, text: Tensor, device: torch.device
) -> tuple[ByteModel, dict[str, list[float]]]:
    """The model on ioattn, and the losses of both."""
    console.print(
        f"\n[bold]1[/]  The same model, seed and data, trained twice"
        f"\n   layers {shape.layers}, heads {shape.heads}, width {shape.width}, {shape.steps} steps of "
        f"{shape.batch} x {shape.context} bytes"
    )
    losses: dict[str, list[float]] = {}
    for name, attend in (("standard", standard_attention), ("ioattn", io_attention)):
        with _progress(console) as progress:
            bar = progress.add_task(f"{name:<8}", total=shape.steps, note="")

            def advance(loss: float, progress: Progress = progress, bar: int = bar) -> None:
                progress.update(bar, advance=1, note=f"loss {loss:.4f}")  # type: ignore[arg-type]

            model, losses[name] = train(shape, attend, text, device, advance)
    _show_losses(console, losses)
    q = torch.empty(shape.batch, shape.heads, shape.context, shape.width // shape.heads, device=device)
    verdict = ioattn.explain(q, q, q, causal=True, alibi_slopes=shape.slopes(device))
    console.print(f"   attention ran on backend [bold]{verdict.chosen}[/], of {', '.join(registry.names())}")
    return model, losses


def _show_losses(console: Console, losses: dict[str, list[float]]) -> None:
    pairs = list(zip(losses["standard"], losses["ioattn"], strict=True))
    differences = [abs(a - b) for a, b in pairs]
    table = Table("step", "standard", "ioattn", "difference", box=None, padding=(0, 3))
    for column in table.columns:
        column.justify = "right"
    last = len(pairs) - 1
    for step in sorted({round(last * i / (SHOWN_STEPS - 1)) for i in range(SHOWN_STEPS)}):
        a, b = pairs[step]
        table.add_row(f"{step + 1}", f"{a:.7f}", f"{b:.7f}", f"{differences[step]:.1e}")
    console.print(table)
    console.print(f"   largest difference of the loss over all {len(pairs)} steps: [bold]{max(differences):.1e}[/]")


def _measure_memory(console: Console, plan: Plan, device: torch.device) -> dict[str, dict[int, Measurement]]:
    """Measurements by implementation and number of tokens, each made in a process of its own."""
    console.print(
        f"\n[bold]2[/]  Extra memory of forward + backward, each in a fresh process"
        f"\n   one head, D {memory.DIM}, causal, fp32"
    )
    fits = [n for n in plan.standard_tokens if memory.standard_fits(n, device)]
    tasks = [Task("standard", n, str(device)) for n in fits]
    tasks += [Task("ioattn", n, str(device), checked_rows=CHECKED_ROWS) for n in plan.tokens]
    measured: dict[str, dict[int, Measurement]] = {"standard": {}, "ioattn": {}}
    with _progress(console) as progress:
        bar = progress.add_task("measure ", total=len(tasks), note="")
        for task in tasks:
            progress.update(bar, note=f"{task.implementation}, {task.tokens:,} tokens")
            measured[task.implementation][task.tokens] = memory.measure(task)
            progress.update(bar, advance=1)
    table = Table("tokens", "S and P alone", "standard", "ioattn", "time", "backend", box=None, padding=(0, 2))
    for column in table.columns[:-1]:
        column.justify = "right"
    for n, ours in measured["ioattn"].items():
        theirs = measured["standard"].get(n)
        standard = "not run" if theirs is None else human(theirs.extra_bytes)
        needed = human(matrices_bytes(n))
        table.add_row(f"{n:,}", needed, standard, human(ours.extra_bytes), f"{ours.seconds:.2f} s", ours.backend)
    console.print(table)
    return measured


def _read_at_once(console: Console, model: ByteModel, tokens: Tensor) -> None:
    """Forward + backward of the trained model over a text many times longer than it was trained on."""
    read, shape = len(tokens) - 1, model.shape
    start = time.perf_counter()
    loss = model(tokens[None])
    loss.backward()
    value = loss.item()
    console.print(
        f"\n[bold]3[/]  The model trained on ioattn reads {read:,} unseen bytes at once"
        f"\n   loss {value:.4f} nats per byte; forward + backward took {time.perf_counter() - start:.1f} s"
        f"\n   standard attention would keep P of every layer and head: "
        f"{human(matrices_bytes(read, shape.layers * shape.heads) // 2)}"
    )


def _report_errors(console: Console, measured: dict[int, Measurement]) -> bool:
    """Print the errors of the sampled rows of the longest problem; whether those of every length are explained."""
    tokens, longest = max(measured.items())
    console.print(f"\n[bold]4[/]  {CHECKED_ROWS} rows of the {tokens:,} tokens against float64")
    for name, (error, allowed) in longest.errors.items():
        console.print(f"   {name:<3} largest error [bold]{error:.1e}[/], rounding explains {allowed:.1e}")
    wrong = [n for n, m in measured.items() if any(not error <= allowed for error, allowed in m.errors.values())]
    for n in wrong:
        console.print(f"   [red]wrong at {n:,} tokens[/]: {measured[n].errors}")
    return not wrong


def _draw(
    console: Console,
    out: Path,
    losses: dict[str, list[float]],
    measured: dict[str, dict[int, Measurement]],
    device: torch.device,
) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        console.print("\nno picture: it needs matplotlib; install it with  pip install 'ioattn[viz]'", markup=False)
        return
    from ioattn.cli.demo import picture

    extra = {name: {n: m.extra_bytes for n, m in by_tokens.items()} for name, by_tokens in measured.items()}
    path = picture.draw(out / "ioattn-demo.png", losses, extra, memory.available_bytes(device))
    console.print(f"\npicture: [bold]{path.resolve()}[/]", soft_wrap=True)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("   {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TextColumn("{task.fields[note]}"), console=console)
