"""FA1 and FA2 line by line: what is on the chip at each line, and which bytes the line moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from ioattn.io.ledger import Traffic
from ioattn.io.tiles import Blocks, Grid
from ioattn.io.traffic import Direction, predict
from ioattn.problem import Problem

Way = Literal["read", "written"]


class Line(NamedTuple):
    """A line of an algorithm: what is on the chip after it, and the tensors it moves in which way and step."""

    code: str
    chip: str = ""
    tensors: tuple[str, ...] = ()
    way: Way = "read"
    step: str = ""

    def bytes_moved(self, traffic: Traffic) -> int:
        """Bytes that the line moves over the whole run."""
        moves = [m for m in traffic.moves if m.tensor in self.tensors and self.step in ("", m.step)]
        return sum(m.read if self.way == "read" else m.written for m in moves)


_FA1_FORWARD = (
    Line("for cols in key tiles:"),
    Line("  k_tile, v_tile = load K, V", "K V", ("K", "V")),
    Line("  for rows in query tiles:", "K V"),
    Line("    q_tile = load Q", "K V Q", ("Q",)),
    Line("    acc, row_max, row_sum = load O, m, l", "K V Q O m l", ("O", "m", "l")),
    Line("    scores = scale * q_tile @ k_tile.T", "K V Q O m l S"),
    Line("    new_max = max(row_max, rowmax(scores))", "K V Q O m l S"),
    Line("    weights = exp(scores - new_max)", "K V Q O m l P"),
    Line("    old_sum = row_sum * exp(row_max - new_max)", "K V Q O m l P"),
    Line("    new_sum = old_sum + rowsum(weights)", "K V Q O m l P"),
    Line("    acc = (old_sum*acc + weights@v_tile)/new_sum", "K V Q O m l"),
    Line("    store O, m, l = acc, new_max, new_sum", "K V", ("O", "m", "l"), "written"),
    Line(""),
    Line(""),
)

_FA2_FORWARD = (
    Line("for rows in query tiles:"),
    Line("  q_tile = load Q", "Q", ("Q",)),
    Line("  acc, row_max, row_sum = 0, -inf, 0", "Q O m l"),
    Line("  for cols in key tiles:", "Q O m l"),
    Line("    k_tile, v_tile = load K, V", "Q O m l K V", ("K", "V")),
    Line("    scores = scale * q_tile @ k_tile.T", "Q O m l K V S"),
    Line("    new_max = max(row_max, rowmax(scores))", "Q O m l K V S"),
    Line("    weights = exp(scores - new_max)", "Q O m l K V P"),
    Line("    rescale = exp(row_max - new_max)", "Q O m l K V P"),
    Line("    row_sum = rescale*row_sum + rowsum(weights)", "Q O m l K V P"),
    Line("    acc = rescale*acc + weights@v_tile", "Q O m l"),
    Line("    row_max = new_max", "Q O m l"),
    Line("  store O = acc / row_sum", "m l", ("O",), "written"),
    Line("  store LSE = row_max + log(row_sum)", "", ("LSE",), "written"),
)

_FA1_BACKWARD = (
    Line(""),
    Line(""),
    Line(""),
    Line("for cols in key tiles:"),
    Line("  k_tile, v_tile = load K, V", "K V", ("K", "V")),
    Line("  dk, dv = 0, 0", "K V dK dV"),
    Line("  for rows in query tiles:", "K V dK dV"),
    Line("    q_tile, dout_tile = load Q, dO", "K V dK dV Q dO", ("Q", "dO")),
    Line("    out_tile, row_max, row_sum = load O, m, l", "K V dK dV Q dO O m l", ("O", "m", "l")),
    Line("    scores = scale * q_tile @ k_tile.T", "K V dK dV Q dO O m l S"),
    Line("    weights = exp(scores - row_max) / row_sum", "K V dK dV Q dO O P"),
    Line("    dv += weights.T @ dout_tile", "K V dK dV Q dO O P"),
    Line("    delta = rowsum(dout_tile * out_tile)", "K V dK dV Q dO P"),
    Line("    ds = weights * (dout_tile@v_tile.T - delta)", "K V dK dV Q dS"),
    Line("    dq = load dQ", "K V dK dV Q dS dQ", ("dQ",)),
    Line("    store dQ = dq + scale * ds @ k_tile", "K V dK dV Q dS", ("dQ",), "written"),
    Line("    dk += scale * ds.T @ q_tile", "K V dK dV"),
    Line("  store dK, dV = dk, dv", "", ("dK", "dV"), "written"),
    Line(""),
    Line(""),
)

_FA2_BACKWARD = (
    Line("delta = rowsum(load dO * load O)", "", ("dO", "O"), "read", "delta = rowsum(dO * O)"),
    Line("store delta", "", ("delta",), "written"),
    Line("store dQ sum = 0", "", ("dQ sum",), "written", "dQ sum = 0"),
    Line("for cols in key tiles:"),
    Line("  k_tile, v_tile = load K, V", "K V", ("K", "V")),
    Line("  dk, dv = 0, 0", "K V dK dV"),
    Line("  for rows in query tiles:", "K V dK dV"),
    Line("    q_tile, dout_tile = load Q, dO", "K V dK dV Q dO", ("Q", "dO"), "read", "backward"),
    Line("    lse, delta = load LSE, delta", "K V dK dV Q dO L D", ("LSE", "delta"), "read", "backward"),
    Line("    scores = scale * q_tile @ k_tile.T", "K V dK dV Q dO L D S"),
    Line("    weights = exp(scores - lse)", "K V dK dV Q dO D P"),
    Line("    dv += weights.T @ dout_tile", "K V dK dV Q dO D P"),
    Line("", "K V dK dV Q dO D P"),
    Line("    ds = weights * (dout_tile@v_tile.T - delta)", "K V dK dV Q dS"),
    Line("    atomically: read dQ sum", "K V dK dV Q dS dQ", ("dQ sum",), "read", "backward"),
    Line("    and write dQ sum + scale * ds @ k_tile", "K V dK dV Q dS", ("dQ sum",), "written", "backward"),
    Line("    dk += scale * ds.T @ q_tile", "K V dK dV"),
    Line("  store dK, dV = dk, dv", "", ("dK", "dV"), "written"),
    Line("dq = load dQ sum", "dQ", ("dQ sum",), "read", "dQ = round(dQ sum)"),
    Line("store dQ = round(dq)", "", ("dQ",), "written"),
)

LOOPS: dict[str, dict[Direction, Sequence[Line]]] = {
    "fa1": {"forward": _FA1_FORWARD, "backward": _FA1_BACKWARD},
    "fa2": {"forward": _FA2_FORWARD, "backward": _FA2_BACKWARD},
}
"""The lines of each algorithm; the two of a direction stand beside each other."""


class Swap(NamedTuple):
    """Slow-memory bytes of the sums that leave the chip in a backward, for either loop outside."""

    keys_outside: int
    queries_outside: int


def backward_sums(problem: Problem, blocks: Blocks) -> Swap:
    """What is read and written to add up gradients that do not stay on the chip.

    With keys outside dK and dV stay and dQ is added to once per visited tile; with queries outside dQ stays and dK
    and dV, two tensors, are added to.
    """
    visits, c = Grid.of(problem, blocks).visits(), problem.compute_dtype.itemsize
    heads = problem.batch * problem.heads
    return Swap(
        keys_outside=2 * heads * visits.query_rows * problem.dim * c,
        queries_outside=2 * heads * visits.key_rows * (problem.dim + problem.dim_v) * c,
    )


def line_bytes(problem: Problem, name: str, direction: Direction, blocks: Blocks) -> list[tuple[Line, int]]:
    """Each line of an algorithm with the bytes that it moves over the whole run.

    Raises:
        ValueError: if there is no listing of that name.
    """
    if name not in LOOPS:
        raise ValueError(f"schedule is {name!r}; it must be one of {', '.join(LOOPS)}, which have listings")
    traffic = predict(problem, name, direction, blocks)
    return [(line, line.bytes_moved(traffic)) for line in LOOPS[name][direction]]
