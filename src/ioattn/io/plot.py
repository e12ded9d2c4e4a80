"""The laboratory's figures, PNG or SVG, light or dark; matplotlib is imported when one is drawn."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ioattn.cases import label
from ioattn.io.results import Measured
from ioattn.io.roofline import Bound
from ioattn.io.sweep import UNITS, Axis, Point
from ioattn.io.text import size

Theme = Literal["light", "dark"]

# Okabe and Ito's palette, which readers with any colour vision tell apart; the order of schedules is its order.
COLOURS = {
    "naive": "#D55E00",
    "fused-softmax": "#E69F00",
    "fa1": "#CC79A7",
    "fa2": "#0072B2",
    "two-pass": "#56B4E9",
    "split-kv": "#009E73",
    "as-printed": "#999999",
}
CYCLE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
MARKS = "osD^vPX"
MARKERS = dict(zip(COLOURS, "XPDo^sv", strict=True))


@dataclass(frozen=True)
class Line:
    """One curve: its values, its label and how it is told apart."""

    x: Sequence[float]
    y: Sequence[float]
    label: str
    dashed: bool = False


@contextmanager
def figure(
    path: Path, theme: Theme, width: float = 7.5, height: float = 4.2, columns: int = 1, rows: int = 1
) -> Iterator[Any]:
    """Axes to draw on, written to `path` on leaving; an array of them `(rows, columns)` if there are rows.

    Raises:
        ValueError: if the path ends in neither .png nor .svg, or the theme does not exist.
        ModuleNotFoundError: without matplotlib, saying how to get it.
    """
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"plot is {str(path)!r}; it must end in .png or .svg")
    if theme not in ("light", "dark"):
        raise ValueError(f"theme is {theme!r}; it must be 'light' or 'dark'")
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError("plots need matplotlib: pip install 'ioattn[viz]'") from None
    ink, paper = ("#1b1b1b", "#ffffff") if theme == "light" else ("#e8e8e8", "#16181c")
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style: Any = {
        **dict.fromkeys(inked, ink),
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor", "legend.facecolor"), paper),
        "font.size": 10,
        "grid.color": ink,
        "grid.alpha": 0.18,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.framealpha": 0.85,
        "legend.edgecolor": "none",
        "svg.fonttype": "none",  # text stays text: searchable, and a tenth of the size
        "svg.hashsalt": "ioattn",  # the same figure is the same file
    }
    with mpl.rc_context(style):
        fig = Figure(figsize=(width, height), layout="constrained")
        axes = fig.subplots(rows, columns, squeeze=rows == 1)
        yield axes
        path.parent.mkdir(parents=True, exist_ok=True)
        fig.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)


def traffic_and_roofline(bounds: Sequence[Bound], measured: Sequence[Measured], path: Path, theme: Theme) -> None:
    """Left: bytes of each schedule, by tensor. Right: the roofline and where each schedule stands under it.

    Raises:
        ValueError: if no schedule moves anything, or as `figure` does.
    """
    if not any(b.traffic.total for b in bounds):
        raise ValueError(f"problem is {label(bounds[0].problem)}; a plot needs one whose schedules move something")
    with figure(path, theme, width=12, height=4.8, columns=2) as (left, right):
        _bars(left, bounds)
        _roofline(right, bounds, measured)


def _bars(axes: Any, bounds: Sequence[Bound]) -> None:
    scale, unit = _byte_unit(max(b.traffic.total for b in bounds))
    tensors = list(dict.fromkeys(move.tensor for b in bounds for move in b.traffic.moves))
    # The smallest tensors would be slivers with a legend entry each.
    large = [t for t in tensors if max(b.traffic.of(t) / max(b.traffic.total, 1) for b in bounds) > 0.02]
    names = [b.schedule for b in bounds][::-1]
    starts = [0.0] * len(bounds)
    groups = [(t, [t]) for t in large] + [("other", [t for t in tensors if t not in large])]
    hatches = ("", "//", "\\\\", "xx", "--", "||", "++", "/", "\\")
    for i, (group, members) in enumerate(g for g in groups if g[1]):
        widths = [b.traffic.of(*members) / scale for b in bounds][::-1]
        # The remainder is plain grey, so that it is no tensor's colour.
        named = CYCLE[:-1]
        colour, hatch = _shade(axes, named[i % len(named)]), hatches[i % len(hatches)]
        if group == "other":
            colour, hatch = CYCLE[-1], ""
        axes.barh(names, widths, left=starts, label=group, color=colour, hatch=hatch, edgecolor="white", linewidth=0.4)
        starts = [a + b for a, b in zip(starts, widths, strict=True)]
    for name, total in zip(names, starts, strict=True):
        axes.text(total, name, f" {total:.4g}", va="center")
    axes.axvline(bounds[0].compulsory / scale, linestyle="--", color=axes.xaxis.label.get_color(), linewidth=1)
    axes.text(bounds[0].compulsory / scale, len(names) - 0.45, " compulsory", fontsize=8.5, va="bottom")
    axes.set(xlabel=f"bytes moved, {unit}", title=f"{label(bounds[0].problem)}\n{bounds[0].direction}")
    axes.set_xlim(0, 1.16 * max(starts))
    axes.margins(y=0.1)
    axes.legend(fontsize=8.5, ncols=2, loc="lower right")


def _roofline(axes: Any, bounds: Sequence[Bound], measured: Sequence[Measured]) -> None:
    machine, peak, kind = bounds[0].machine, bounds[0].peak, bounds[0].peak_kind
    ridge = peak / machine.bandwidth
    shown = [b.traffic.intensity for b in bounds if b.traffic.total] + [m.intensity for m in measured]
    low, high = min([*shown, ridge]) / 3, max([*shown, ridge]) * 4
    ink = axes.xaxis.label.get_color()
    axes.loglog([low, ridge, high], [low * machine.bandwidth / 1e12, peak / 1e12, peak / 1e12], color=ink, linewidth=2)
    axes.text(low * 1.6, low * machine.bandwidth / 1e12, f"{machine.bandwidth / 1e12:.3g} TB/s", fontsize=9)
    axes.vlines(ridge, 0, peak / 1e12, linestyle=":", color=ink, linewidth=1)
    axes.text(high, peak / 1e12 * 1.08, f"{kind} peak {peak / 1e12:.4g}", ha="right", fontsize=9)
    axes.text(ridge, low * machine.bandwidth / 1e12, f" ridge {ridge:.0f}", fontsize=9)
    for b in (b for b in bounds if b.traffic.total):
        words = f"{b.schedule}: {b.attainable / 1e12:.3g} TFLOP/s at {b.traffic.intensity:.3g}"
        style = {
            "color": _shade(axes, COLOURS[b.schedule]),
            "marker": MARKERS[b.schedule],
            "markersize": 9,
            "linestyle": "none",
        }
        axes.plot(b.traffic.intensity, b.attainable / 1e12, label=words, **style)
    for i, name in enumerate(dict.fromkeys(m.implementation for m in measured)):
        points = [m for m in measured if m.implementation == name]
        xs, ys = [m.intensity for m in points], [m.flops_per_s / 1e12 for m in points]
        axes.plot(
            xs,
            ys,
            "+x1234|_"[i % 8],
            color=_shade(axes, CYCLE[i % len(CYCLE)]),
            markersize=8,
            label=f"measured: {name}",
        )
    axes.set(xlabel="intensity, FLOP per byte of slow memory", ylabel="TFLOP/s", title=machine.title)
    # Room above the roof for the list of names, in as many columns as keep it short.
    entries = len(axes.get_legend_handles_labels()[0])
    columns = 1 if entries <= 6 else 2
    share = min(0.03 + 0.052 * -(-entries // columns), 0.6)
    bottom = min([low * machine.bandwidth, *(m.flops_per_s for m in measured)]) / 1e12 / 1.5
    axes.set_ylim(bottom, peak / 1e12 * (peak / 1e12 / bottom) ** (share / (1 - share)) * 1.5)
    axes.legend(fontsize=8.5, loc="upper left", ncols=columns)


def sweep_plot(axis: Axis, series: Mapping[str, Sequence[Point]], path: Path, theme: Theme) -> None:
    """Bytes of each schedule against the varied quantity, log-log, with the compulsory floor."""
    anything = next((points for points in series.values() if any(p.bound.traffic.total for p in points)), None)
    if anything is None:
        raise ValueError(f"no schedule moves anything at any value of {axis}; a plot needs one that does")
    problem, direction = anything[0].bound.problem, anything[0].bound.direction
    with figure(path, theme) as axes:
        for name, points in series.items():
            xs, ys = [p.at for p in points], [p.bound.traffic.total for p in points]
            axes.loglog(xs, ys, color=_shade(axes, COLOURS[name]), marker=MARKERS[name], label=name, base=2)
        xs, floor = [p.at for p in anything], [p.bound.compulsory for p in anything]
        axes.loglog(xs, floor, "--", color=axes.xaxis.label.get_color(), label="compulsory", base=2)
        at = sorted({p.at for points in series.values() for p in points})
        axes.set_xticks(at, [str(x) for x in at] if axis == "sram" else map(_short, at))
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda value, _: size(value))
        axes.set(xlabel=UNITS[axis], ylabel="bytes moved", title=f"{_without(axis, label(problem))}, {direction}")
        axes.legend(fontsize=8.5)


def lines(
    title: str, xlabel: str, ylabel: str, curves: Sequence[Line], path: Path, theme: Theme, log: str = ""
) -> None:
    """Curves on one pair of axes; `log` names the logarithmic axes, "x", "y" or "xy"."""
    with figure(path, theme) as axes:
        for i, curve in enumerate(curves):
            marker = "osD^vPX"[i % 7]
            dashes = "--" if curve.dashed else "-"
            axes.plot(
                curve.x, curve.y, dashes, color=_shade(axes, CYCLE[i % len(CYCLE)]), marker=marker, label=curve.label
            )
        if "x" in log:
            axes.set_xscale("log", base=2)
            at = sorted({x for curve in curves for x in curve.x})
            axes.set_xticks(at, map(_short, at))
        if "y" in log:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        if log:
            axes.minorticks_off()
        axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
        axes.legend(fontsize=8.5)


def _shade(axes: Any, colour: str) -> str:
    """The palette's dark blue and sky blue are exchanged for lighter ones on a dark ground."""
    on_dark = {"#0072B2": "#56B4E9", "#56B4E9": "#B8E2FA"}
    return on_dark.get(colour, colour) if sum(axes.get_facecolor()[:3]) < 1.5 else colour


def _short(x: float) -> str:
    """A tick's label: powers of two from 1024 on as multiples of K."""
    return f"{x / 1024:g}K" if x >= 1024 and x % 1024 == 0 else f"{x:g}"


def _without(axis: Axis, title: str) -> str:
    """A problem's line without what varies in the plot."""
    return re.sub({"seqlen": r"N\d+(x\d+)? ", "heads": r"H\d+(/\d+)? "}.get(axis, "^$"), "", title)


def _byte_unit(largest: float) -> tuple[float, str]:
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if largest >= 2**power:
            return 2.0**power, unit
    return 1.0, "bytes"
