"""Figures of a results file: rates over the sequence length, and how far ours is from the best peer of each case."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ioattn.cases import from_line
from ioattn.io.plot import CYCLE, MARKS, Theme, figure
from ioattn.problem import Problem

OURS = "ioattn:"
THEMES: tuple[Theme, ...] = ("light", "dark")
NAMES = {
    "cudnn": "cuDNN",
    "fa2": "FlashAttention 2",
    "fa3": "FlashAttention 3",
    "fa4": "FlashAttention 4",
    "efficient": "torch efficient",
    "sdpa": "torch SDPA",
}


@dataclass(frozen=True)
class Rate:
    """One row of a results file. `problem` is None where the case has more than sizes and a band."""

    case: str
    implementation: str
    rate: float
    unit: str
    problem: Problem | None


def read(path: Path, direction: str) -> list[Rate]:
    """The rows of one direction."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["direction"] == direction and row["rate"]]
    return [
        Rate(row["case"], row["implementation"], float(row["rate"]), row["unit"], from_line(row["case"]))
        for row in rows
    ]


def over_length(rates: Sequence[Rate], path: Path, theme: Theme) -> bool:
    """One panel per head dimension and mask, full above causal: the rate of each implementation over N.

    Returns:
        Whether there is anything to draw: plain cases of at least two lengths in one dtype.
    """
    plain = [(r, r.problem) for r in rates if r.problem is not None and _is_plain(r.problem)]
    common = max((p.dtype for _, p in plain), key=[p.dtype for _, p in plain].count, default=None)
    shown = [(r, p) for r, p in plain if p.dtype == common]
    dims = sorted({p.dim for _, p in shown})
    if len({p.len_q for _, p in shown}) < 2:
        return False
    names = _ours_first({r.implementation for r, _ in shown})
    with figure(path, theme, width=1 + 3.4 * len(dims), height=6.2, columns=len(dims), rows=2) as panels:
        for axes, (causal, dim) in zip(panels.flat, ((c, d) for c in (False, True) for d in dims), strict=True):
            chosen = [(r, p.len_q) for r, p in shown if p.dim == dim and p.band.bounded == causal]
            _lines(axes, chosen, names)
            axes.set_title(f"D {dim}, {'causal' if causal else 'full'}", fontsize=10)
            axes.set_ylabel(shown[0][0].unit if dim == dims[0] else "")
        panels.flat[0].legend(fontsize=8.5, loc="lower right")
    return True


def _lines(axes: Any, rates: Iterable[tuple[Rate, int]], names: Sequence[str]) -> None:
    lengths = sorted({n for _, n in rates})
    for i, name in enumerate(names):
        line = sorted((n, r.rate) for r, n in rates if r.implementation == name)
        if line:
            style = {"color": CYCLE[i % len(CYCLE)], "marker": MARKS[i % len(MARKS)], "markersize": 5}
            axes.plot(*zip(*line, strict=True), label=shown_name(name), linewidth=1.3 if i else 2.4, **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
    axes.minorticks_off()
    axes.set_ylim(0)
    axes.set_xlabel("N")


def against_best(rates: Sequence[Rate], path: Path, theme: Theme) -> bool:
    """One bar per case: our rate over that of the best peer, whose name stands beside it.

    Returns:
        Whether any case has a peer.
    """
    bars = []
    for case in dict.fromkeys(r.case for r in rates):
        mine = [r.rate for r in rates if r.case == case and r.implementation.startswith(OURS)]
        peers = {r.rate: r.implementation for r in rates if r.case == case and not r.implementation.startswith(OURS)}
        if mine and peers:
            bars.append((case.replace(" cuda", "").replace(" cpu", ""), max(mine) / max(peers), peers[max(peers)]))
    if not bars:
        return False
    with figure(path, theme, width=7.5, height=0.9 + 0.22 * len(bars)) as axes:
        for at, (_, value, peer) in enumerate(reversed(bars)):
            axes.barh(at, value, color=CYCLE[0 if value >= 1 else 1], height=0.7)
            axes.text(0.01, at, f"{value:.2f}  {shown_name(peer)}", va="center", fontsize=8.5, color="white")
        axes.set_yticks(range(len(bars)), [case for case, _, _ in reversed(bars)], fontsize=8.5)
        axes.axvline(1, color=axes.xaxis.label.get_color(), linewidth=1, linestyle="--")
        axes.set_xlim(0, 1.05 * max(value for _, value, _ in bars))
        axes.set_xlabel("rate of ioattn over that of the best peer, by name")
        axes.grid(visible=False, axis="y")
        axes.margins(y=0.01)
    return True


def shown_name(implementation: str) -> str:
    """As it is written in a legend."""
    return NAMES.get(implementation, implementation.replace(":", " "))


def _ours_first(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (not name.startswith(OURS), name))


def _is_plain(p: Problem) -> bool:
    return p.len_q == p.len_k and p.group == 1 and p.dim == p.dim_v and p.band.lo is None
