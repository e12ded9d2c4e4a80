"""Bytes and FLOPs of a problem under a schedule, from formulas: nothing is run.

Symbols: N query or key rows, D and Dv columns, e bytes of an element of the inputs, c bytes of an element of the
compute dtype (4, or 8 for float64), Tq and Tk tiles of queries and keys. Forward, per head, without a band:

    naive           N (2 D + 2 Dv) e + 6 N^2 e          with a fused softmax 4 N^2 e
    fa1             N (D + Dv) e + Tk N D e + (2 Tk - 1) N (Dv e + 2 c)
    fa2             N D e + Tq N (D + Dv) e + N Dv e + N c

A band replaces Tk N and Tq N by the rows of the tiles that are visited (`Grid.visits`). docs/io.md derives the
backward's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ioattn.io.ledger import Move, Traffic
from ioattn.io.tiles import Blocks, Grid, Visits
from ioattn.problem import Problem

Direction = Literal["forward", "backward"]

Rows = list[tuple[str, str, int, int]]
"""Step, tensor, bytes read, bytes written."""

Tiles = dict[str, int]
"""What one step holds on the chip, in bytes."""


def predict(problem: Problem, schedule: str, direction: Direction = "forward", blocks: Blocks | None = None) -> Traffic:
    """What `schedule` moves for `problem`, byte for byte what `count` finds.

    Args:
        problem: dense and without score terms; any band, heads, sizes and dtype.
        schedule: "naive", "fused-softmax", "fa1", "fa2", "two-pass", "split-kv" or "as-printed".
        direction: "forward" or "backward", the backward without its forward.
        blocks: tile sizes, 64x64 unless given.

    Returns:
        bytes per step and tensor, FLOPs of the matrix products, bytes needed on the chip, extra slow memory.

    Raises:
        ValueError: if the schedule does not exist or has no such direction, or if the problem is not covered.

    Example:
        >>> from ioattn.cases import problem_of
        >>> problem = problem_of((1, 1, 4096, 64), "fp16")
        >>> f"{predict(problem, 'naive').total / 2**20:.0f} MiB"
        '194 MiB'
    """
    formulas = FORMULAS.get(schedule)
    if formulas is None:
        raise ValueError(f"schedule is {schedule!r}; it must be one of {', '.join(FORMULAS)}")
    if direction not in ("forward", "backward"):
        raise ValueError(f"direction is {direction!r}; it must be 'forward' or 'backward'")
    if direction not in formulas:
        raise ValueError(f"schedule {schedule} has no {direction} of its own; {NOT_ITS_OWN[schedule]}")
    check_covered(problem)
    return formulas[direction](_Sizes(problem, blocks or Blocks()))


def check_covered(problem: Problem) -> None:
    """Raise ValueError, with every reason, unless the laboratory's schedules cover `problem`."""
    present = {
        "packed sequences (ask for each length)": problem.packed,
        "softcap": problem.softcap is not None,
        "ALiBi": problem.alibi,
        "a bias": problem.bias is not None,
        "a mask tensor": problem.mask is not None,
        "sinks": problem.sinks,
    }
    if any(present.values()):
        reasons = ", ".join(name for name, found in present.items() if found)
        raise ValueError(f"problem has {reasons}; the schedules of the laboratory cover bands and heads only")


def compulsory(problem: Problem, direction: Direction = "forward") -> int:
    """Bytes that no schedule avoids: each input read once and each output written once, where the band reaches them.

    A forward reads Q, K, V and writes O; a backward reads Q, K, V, O, dO and writes dQ, dK, dV.
    """
    p, e = problem, problem.dtype.itemsize
    band = p.band_of(p.len_q, p.len_k)
    keys = _span(band.key_range(0, p.len_q, p.len_k))
    queries = _span(band.query_range(0, p.len_k, p.len_q))
    heads, kv_heads, columns = p.batch * p.heads, p.batch * p.kv_heads, p.dim + p.dim_v
    if direction == "forward":
        return e * (heads * (queries * p.dim + p.len_q * p.dim_v) + kv_heads * keys * columns)
    inputs = heads * queries * (p.dim + 2 * p.dim_v) + kv_heads * keys * columns
    return e * (inputs + heads * p.len_q * p.dim + kv_heads * p.len_k * columns)


def useful_flops(problem: Problem, direction: Direction = "forward") -> int:
    """FLOPs of the scores that the band keeps: two products forward, five backward (one of them recomputes S)."""
    pairs = problem.band_of(problem.len_q, problem.len_k).area(problem.len_q, problem.len_k)
    d, dv = problem.dim, problem.dim_v
    return 2 * problem.batch * problem.heads * pairs * (d + dv if direction == "forward" else 3 * d + 2 * dv)


@dataclass(frozen=True)
class _Sizes:
    """What the formulas are made of."""

    problem: Problem
    blocks: Blocks

    @cached_property
    def e(self) -> int:
        return self.problem.dtype.itemsize

    @cached_property
    def c(self) -> int:
        return self.problem.compute_dtype.itemsize

    @cached_property
    def heads(self) -> int:
        return self.problem.batch * self.problem.heads

    @cached_property
    def kv_heads(self) -> int:
        return self.problem.batch * self.problem.kv_heads

    @cached_property
    def visits(self) -> Visits:
        return Grid.of(self.problem, self.blocks).visits()

    @cached_property
    def tile(self) -> tuple[int, int]:
        """Rows and keys of the largest tile."""
        return min(self.blocks.q, self.problem.len_q), min(self.blocks.k, self.problem.len_k)

    def queries(self, columns: int) -> int:
        """Bytes of a `(B, H, Nq, columns)` tensor."""
        return self.heads * self.problem.len_q * columns * self.e

    def keys(self, columns: int) -> int:
        """Bytes of a `(B, Hk, Nk, columns)` tensor."""
        return self.kv_heads * self.problem.len_k * columns * self.e

    @property
    def scores(self) -> int:
        """Bytes of a `(B, H, Nq, Nk)` tensor."""
        return self.heads * self.problem.len_q * self.problem.len_k * self.e

    @property
    def rows(self) -> int:
        """Bytes of a `(B, H, Nq)` tensor of the compute dtype."""
        return self.heads * self.problem.len_q * self.c


def _traffic(rows: Rows, flops: int, steps: list[Tiles], extra: int) -> Traffic:
    moves = tuple(Move(*row) for row in rows if row[2] or row[3])
    fullest = max(steps, key=lambda tiles: sum(tiles.values()))
    return Traffic(moves, flops, sum(fullest.values()), extra, fullest)


def _naive_forward(s: _Sizes, softmax_reads: int) -> Traffic:
    p, (bq, bk) = s.problem, s.tile
    moves = [
        ("S = Q K^T", "K", s.keys(p.dim), 0),
        ("S = Q K^T", "Q", s.queries(p.dim), 0),
        ("S = Q K^T", "S", 0, s.scores),
        ("P = softmax(S)", "S", softmax_reads * s.scores, 0),
        ("P = softmax(S)", "P", 0, s.scores),
        ("O = P V", "V", s.keys(p.dim_v), 0),
        ("O = P V", "P", s.scores, 0),
        ("O = P V", "O", 0, s.queries(p.dim_v)),
    ]
    width = bk if softmax_reads == 3 else p.len_k
    steps = [
        {"K": p.len_k * p.dim * s.e, "q_tile": bq * p.dim * s.e, "scores": bq * bk * s.c},
        {"scores": bq * width * s.c, "row_max, row_sum": 2 * bq * s.c},
        {"V": p.len_k * p.dim_v * s.e, "acc": bq * p.dim_v * s.c, "weights": bq * bk * s.e},
    ]
    flops = 2 * s.heads * p.len_q * p.len_k * (p.dim + p.dim_v)
    return _traffic(moves, flops, steps, extra=2 * s.scores)


def _naive_backward(s: _Sizes, softmax_reads: int) -> Traffic:
    p, (bq, bk) = s.problem, s.tile
    softmax = "dS = P * (dP - rowsum(P * dP))"
    moves = [
        ("dV = P^T dO", "dO", s.queries(p.dim_v), 0),
        ("dV = P^T dO", "P", s.scores, 0),
        ("dV = P^T dO", "dV", 0, s.keys(p.dim_v)),
        ("dP = dO V^T", "V", s.keys(p.dim_v), 0),
        ("dP = dO V^T", "dO", s.queries(p.dim_v), 0),
        ("dP = dO V^T", "dP", 0, s.scores),
        (softmax, "P", softmax_reads * s.scores, 0),
        (softmax, "dP", softmax_reads * s.scores, 0),
        (softmax, "dS", 0, s.scores),
        ("dQ = dS K", "K", s.keys(p.dim), 0),
        ("dQ = dS K", "dS", s.scores, 0),
        ("dQ = dS K", "dQ", 0, s.queries(p.dim)),
        ("dK = dS^T Q", "Q", s.queries(p.dim), 0),
        ("dK = dS^T Q", "dS", s.scores, 0),
        ("dK = dS^T Q", "dK", 0, s.keys(p.dim)),
    ]
    stored, width = bq * bk * s.e, bk if softmax_reads == 2 else p.len_k
    steps = [
        {"dO": p.group * p.len_q * p.dim_v * s.e, "dv": bk * p.dim_v * s.c, "weights": stored},
        {"V": p.len_k * p.dim_v * s.e, "dout_tile": bq * p.dim_v * s.e, "dweights": bq * bk * s.c},
        {"weights": bq * width * s.c, "dweights": bq * width * s.c, "delta": bq * s.c},
        {"K": p.len_k * p.dim * s.e, "dq": bq * p.dim * s.c, "dscores": stored},
        {"Q": p.group * p.len_q * p.dim * s.e, "dk": bk * p.dim * s.c, "dscores": stored},
    ]
    flops = 2 * s.heads * p.len_q * p.len_k * (2 * p.dim + 2 * p.dim_v)
    return _traffic(moves, flops, steps, extra=3 * s.scores)


def _fa1_forward(s: _Sizes) -> Traffic:
    p, bq, v = s.problem, s.tile[0], s.visits
    again, blind = v.query_rows - v.live_queries, p.len_q - v.live_queries
    moves: Rows = [("forward", "K", s.keys(p.dim), 0), ("forward", "V", s.keys(p.dim_v), 0)]
    moves += [("forward", "Q", s.heads * v.query_rows * p.dim * s.e, 0)]
    for tensor, row_bytes in (("O", p.dim_v * s.e), ("m", s.c), ("l", s.c)):
        moves += [("forward", tensor, s.heads * again * row_bytes, s.heads * (v.query_rows + blind) * row_bytes)]
    flops = 2 * s.heads * v.pairs * (p.dim + p.dim_v)
    return _traffic(moves, flops, [_online_softmax_tiles(s, bq)], extra=2 * s.rows)


def _fa1_backward(s: _Sizes) -> Traffic:
    p, bq, v = s.problem, s.tile[0], s.visits
    again, blind = v.query_rows - v.live_queries, p.len_q - v.live_queries
    moves: Rows = [("backward", "K", s.keys(p.dim), 0), ("backward", "V", s.keys(p.dim_v), 0)]
    for tensor, row_bytes in (("Q", p.dim * s.e), ("O", p.dim_v * s.e), ("dO", p.dim_v * s.e), ("m", s.c), ("l", s.c)):
        moves += [("backward", tensor, s.heads * v.query_rows * row_bytes, 0)]
    dq_row = s.heads * p.dim * s.e
    moves += [
        ("backward", "dQ", again * dq_row, (v.query_rows + blind) * dq_row),
        ("backward", "dK", 0, s.keys(p.dim)),
        ("backward", "dV", 0, s.keys(p.dim_v)),
    ]
    tiles = _backward_tiles(s) | {"out_tile": bq * p.dim_v * s.e, "row_max, row_sum, delta": 3 * bq * s.c}
    flops = 2 * s.heads * v.pairs * (3 * p.dim + 2 * p.dim_v)
    return _traffic(moves, flops, [tiles], extra=2 * s.rows)


def _fa2_forward(s: _Sizes) -> Traffic:
    p, v = s.problem, s.visits
    moves = [
        ("forward", "Q", s.queries(p.dim), 0),
        ("forward", "K", s.heads * v.key_rows * p.dim * s.e, 0),
        ("forward", "V", s.heads * v.key_rows * p.dim_v * s.e, 0),
        ("forward", "O", 0, s.queries(p.dim_v)),
        ("forward", "LSE", 0, s.rows),
    ]
    flops = 2 * s.heads * v.pairs * (p.dim + p.dim_v)
    return _traffic(moves, flops, [_online_softmax_tiles(s, s.tile[0])], extra=s.rows)


def _fa2_backward(s: _Sizes) -> Traffic:
    p, bq, v = s.problem, s.tile[0], s.visits
    visited_rows = s.heads * v.query_rows
    dq_sum, dq_visited = s.rows * p.dim, visited_rows * p.dim * s.c
    moves = [
        ("delta = rowsum(dO * O)", "dO", s.queries(p.dim_v), 0),
        ("delta = rowsum(dO * O)", "O", s.queries(p.dim_v), 0),
        ("delta = rowsum(dO * O)", "delta", 0, s.rows),
        ("dQ sum = 0", "dQ sum", 0, dq_sum),
        ("backward", "K", s.keys(p.dim), 0),
        ("backward", "V", s.keys(p.dim_v), 0),
        ("backward", "Q", visited_rows * p.dim * s.e, 0),
        ("backward", "dO", visited_rows * p.dim_v * s.e, 0),
        ("backward", "LSE", visited_rows * s.c, 0),
        ("backward", "delta", visited_rows * s.c, 0),
        ("backward", "dQ sum", dq_visited, dq_visited),
        ("backward", "dK", 0, s.keys(p.dim)),
        ("backward", "dV", 0, s.keys(p.dim_v)),
        ("dQ = round(dQ sum)", "dQ sum", dq_sum, 0),
        ("dQ = round(dQ sum)", "dQ", 0, s.queries(p.dim)),
    ]
    steps = [
        _backward_tiles(s) | {"lse, delta": 2 * bq * s.c},
        {"dout_tile": bq * p.dim_v * s.e, "out_tile": bq * p.dim_v * s.e},
        {"dq": bq * p.dim * s.c},
    ]
    flops = 2 * s.heads * v.pairs * (3 * p.dim + 2 * p.dim_v)
    return _traffic(moves, flops, steps, extra=2 * s.rows + dq_sum)


def _two_pass_backward(s: _Sizes) -> Traffic:
    p, bq, v = s.problem, s.tile[0], s.visits
    visited_rows, visited_keys = s.heads * v.query_rows, s.heads * v.key_rows
    moves = [
        ("delta = rowsum(dO * O)", "dO", s.queries(p.dim_v), 0),
        ("delta = rowsum(dO * O)", "O", s.queries(p.dim_v), 0),
        ("delta = rowsum(dO * O)", "delta", 0, s.rows),
        ("dK, dV", "K", s.keys(p.dim), 0),
        ("dK, dV", "V", s.keys(p.dim_v), 0),
        ("dK, dV", "Q", visited_rows * p.dim * s.e, 0),
        ("dK, dV", "dO", visited_rows * p.dim_v * s.e, 0),
        ("dK, dV", "LSE", visited_rows * s.c, 0),
        ("dK, dV", "delta", visited_rows * s.c, 0),
        ("dK, dV", "dK", 0, s.keys(p.dim)),
        ("dK, dV", "dV", 0, s.keys(p.dim_v)),
        ("dQ", "Q", s.queries(p.dim), 0),
        ("dQ", "dO", s.queries(p.dim_v), 0),
        ("dQ", "LSE", s.rows, 0),
        ("dQ", "delta", s.rows, 0),
        ("dQ", "K", visited_keys * p.dim * s.e, 0),
        ("dQ", "V", visited_keys * p.dim_v * s.e, 0),
        ("dQ", "dQ", 0, s.queries(p.dim)),
    ]
    tiles = _backward_tiles(s) | {"lse, delta": 2 * bq * s.c}
    delta_pass = {"dout_tile": bq * p.dim_v * s.e, "out_tile": bq * p.dim_v * s.e}
    key_pass = {name: n for name, n in tiles.items() if name != "dq"}
    query_pass = {name: n for name, n in tiles.items() if name != "dk, dv"}
    flops = 2 * s.heads * v.pairs * (4 * p.dim + 3 * p.dim_v)
    return _traffic(moves, flops, [key_pass, query_pass, delta_pass], extra=2 * s.rows)


def _split_kv_forward(s: _Sizes) -> Traffic:
    p = s.problem
    grid = Grid.of(p, s.blocks, packed_group=True)
    pieces, v = len(list(grid.pieces())), grid.visits()
    bq = min(s.blocks.q, grid.rows)
    partial_out, partial_lse = pieces * s.rows * p.dim_v, pieces * s.rows
    moves = [
        ("partial results", "Q", pieces * s.queries(p.dim), 0),
        ("partial results", "K", s.kv_heads * v.key_rows * p.dim * s.e, 0),
        ("partial results", "V", s.kv_heads * v.key_rows * p.dim_v * s.e, 0),
        ("partial results", "partial O", 0, partial_out),
        ("partial results", "partial LSE", 0, partial_lse),
        ("merge", "partial O", partial_out, 0),
        ("merge", "partial LSE", partial_lse, 0),
        ("merge", "O", 0, s.queries(p.dim_v)),
        ("merge", "LSE", 0, s.rows),
    ]
    merging = {"acc": bq * p.dim_v * s.c, "partial out": bq * p.dim_v * s.c, "row statistics": 5 * bq * s.c}
    flops = 2 * s.kv_heads * v.pairs * (p.dim + p.dim_v)
    return _traffic(moves, flops, [_online_softmax_tiles(s, bq), merging], extra=partial_out + partial_lse + s.rows)


def _online_softmax_tiles(s: _Sizes, bq: int) -> Tiles:
    p, bk = s.problem, s.tile[1]
    return {
        "q_tile": bq * p.dim * s.e,
        "k_tile": bk * p.dim * s.e,
        "v_tile": bk * p.dim_v * s.e,
        "scores": bq * bk * s.c,
        "acc": bq * p.dim_v * s.c,
        "row_max, row_sum and their next": 4 * bq * s.c,
    }


def _backward_tiles(s: _Sizes) -> Tiles:
    p, (bq, bk) = s.problem, s.tile
    return {
        "q_tile": bq * p.dim * s.e,
        "dout_tile": bq * p.dim_v * s.e,
        "k_tile": bk * p.dim * s.e,
        "v_tile": bk * p.dim_v * s.e,
        "dk, dv": bk * (p.dim + p.dim_v) * s.c,
        "dq": bq * p.dim * s.c,
        "weights, dscores": 2 * bq * bk * s.c,
    }


def _span(reached: tuple[int, int]) -> int:
    return reached[1] - reached[0]


FORMULAS: Mapping[str, Mapping[str, Callable[[_Sizes], Traffic]]] = {
    "naive": {"forward": lambda s: _naive_forward(s, 3), "backward": lambda s: _naive_backward(s, 2)},
    "fused-softmax": {"forward": lambda s: _naive_forward(s, 1), "backward": lambda s: _naive_backward(s, 1)},
    "fa1": {"forward": _fa1_forward, "backward": _fa1_backward},
    "fa2": {"forward": _fa2_forward, "backward": _fa2_backward},
    "two-pass": {"backward": _two_pass_backward},
    "split-kv": {"forward": _split_kv_forward},
    "as-printed": {"forward": _fa2_forward},
}
"""By schedule and direction."""

NOT_ITS_OWN = {
    "two-pass": "it is a backward, whose forward is fa2's",
    "split-kv": "fa2's has keys in its outer loop, so it splits them already",
    "as-printed": "it is there to show that its forward is wrong",
}
