"""The demo's picture: both loss curves with their difference, and memory against the number of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ioattn.cli.demo.memory import human, matrices_bytes

# Okabe and Ito's palette: told apart with any kind of colour vision, and in grey by their lightness and dashes.
STANDARD, OURS, NEUTRAL = "#E69F00", "#0072B2", "#555555"


def draw(path: Path, losses: dict[str, list[float]], extra: dict[str, dict[int, int]], available: int | None) -> Path:
    """Write the picture to `path`.

    Args:
        path: a file name that ends in .png.
        losses: by implementation, "standard" and "ioattn", the loss at each step, nats per byte.
        extra: by implementation and number of tokens, the measured extra bytes.
        available: bytes of memory that the device has free, drawn as a line; None: not known.
    """
    figure = Figure(figsize=(12, 5.5), layout="constrained", dpi=130)
    grid = figure.add_gridspec(2, 2, height_ratios=(2.2, 1))
    loss_axes = figure.add_subplot(grid[0, 0])
    _draw_losses(loss_axes, losses)
    _draw_difference(figure.add_subplot(grid[1, 0], sharex=loss_axes), losses)
    _draw_memory(figure.add_subplot(grid[:, 1]), extra, available)
    figure.savefig(path)
    return path


def _draw_losses(axes: Any, losses: dict[str, list[float]]) -> None:
    steps = range(1, len(losses["ioattn"]) + 1)
    # One curve lies on the other: the broad one stays visible on both sides of the narrow, dashed one.
    axes.plot(steps, losses["standard"], color=STANDARD, linewidth=6, label="standard attention")
    axes.plot(steps, losses["ioattn"], color=OURS, linewidth=1.8, linestyle=(0, (4, 2)), label="ioattn")
    axes.set_title("Training loss: same seed, same data")
    axes.set_ylabel("loss (nats per byte)")
    axes.tick_params(labelbottom=False)
    axes.legend(frameon=False)
    _tidy(axes)


def _draw_difference(axes: Any, losses: dict[str, list[float]]) -> None:
    differences = [abs(a - b) for a, b in zip(losses["standard"], losses["ioattn"], strict=True)]
    axes.plot(range(1, len(differences) + 1), differences, ".", color=NEUTRAL, markersize=5)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    top = max(*differences, 1e-9)
    axes.set_ylim(-0.08 * top, 1.15 * top)
    axes.set_ylabel("|difference|")
    axes.set_xlabel(f"step (largest difference {max(differences):.1e})")
    _tidy(axes)


def _draw_memory(axes: Any, extra: dict[str, dict[int, int]], available: int | None) -> None:
    tokens = sorted(extra["ioattn"])
    needed = [matrices_bytes(n) for n in tokens]
    axes.plot(tokens, needed, ":", color=STANDARD, linewidth=2.2, label="standard: S and P alone, 8 N² bytes")
    for name, colour, marker in (("standard", STANDARD, "s"), ("ioattn", OURS, "o")):
        if extra[name]:
            points = sorted(extra[name].items())
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, linewidth=2, label=f"{name}: measured")
    if available is not None and available < 40 * max(needed):
        axes.axhline(available, color=NEUTRAL, linewidth=1, linestyle="--")
        axes.annotate(
            f"memory available here, {available / 2**30:.0f} GiB",
            (tokens[0], available),
            xytext=(0, 4),
            textcoords="offset points",
            color=NEUTRAL,
            fontsize=9,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    _label_last(axes, tokens[-1], needed[-1], STANDARD)
    _label_last(axes, tokens[-1], extra["ioattn"][tokens[-1]], OURS)
    axes.set_xlim(right=tokens[-1] * 2.6)
    axes.set_title("Extra memory of forward + backward")
    axes.set_xlabel("tokens N (one head, D 64, fp32, causal)")
    axes.xaxis.set_major_locator(FixedLocator(tokens))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: _short(size)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 0.93))
    _tidy(axes)


def _label_last(axes: Any, tokens: int, size: int, colour: str) -> None:
    axes.annotate(
        human(size),
        (tokens, size),
        xytext=(9, 0),
        textcoords="offset points",
        va="center",
        color=colour,
        fontweight="bold",
    )


def _short(size: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:g} {unit}"
    return f"{size:g} B"


def _tidy(axes: Any) -> None:
    axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
