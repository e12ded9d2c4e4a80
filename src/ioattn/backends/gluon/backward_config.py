"""What each backward kernel is compiled for: tile sizes by head dimension, and which features its code holds."""

from __future__ import annotations

from dataclasses import dataclass

from ioattn.backends.gluon.config import tile_dim
from ioattn.problem import Problem

PAD = 128
"""Rows of the workspace that a sequence is padded to: the most rows of a tile of queries."""

L2_SECTION_BYTES = 28e6
"""Queries, their gradients and dO of the heads in work together: half of the H200's 60 MB L2."""


@dataclass(frozen=True)
class BackwardConfig:
    """One compiled kernel: tile sizes, and which features of a problem its code holds.

    `dq` says how it makes dQ: "halves", each group one of them in every step; "turns", each group all of it in every
    other step; "none", as a kernel of its own does. `rotate`: blocks that share a head start at different queries.
    """

    dim: int
    keys: int
    rows: int
    stages: int
    exchanges: int
    registers: int
    has_lo: bool = False
    has_hi: bool = False
    bottom_right: bool = True
    masks: bool = False
    cleans: bool = False
    has_softcap: bool = False
    grouped: bool = False
    dq: str = "halves"
    rotate: bool = False
    sequences: int = 0

    @property
    def sums_dq(self) -> bool:
        """Whether this kernel makes dQ, too."""
        return self.dq != "none"

    @property
    def dq_columns(self) -> int:
        """Columns of dQ that one group makes of a tile."""
        return self.dim if self.dq == "turns" else self.dim // 2

    @property
    def wide(self) -> bool:
        """Whether the groups share the keys of a tile and each owns half of the columns."""
        return self.dim > 128

    @property
    def columns(self) -> int:
        """Columns of dK and dV that one group owns."""
        return self.dim // 2 if self.wide else self.dim


def choose(problem: Problem) -> BackwardConfig:
    """The kernel for a problem, as measured on an H200 in BF16 (docs/journal.md has the runs).

    dQ in turns: D 64 full N 8192 547 against 485 TFLOP/s in halves; D 128 527 against 559. A kernel of its own costs 10
    to 20% there; above D 128, where a tile of 64 keys is all that fits, sums in global memory would take the time.
    """
    dim = tile_dim(max(problem.dim, problem.dim_v))
    band = problem.band
    keys = 64 if dim == 256 else 128
    masks = band.bounded or problem.packed or problem.len_k % keys != 0
    return BackwardConfig(
        dim,
        keys=keys,
        rows=128 if dim == 64 else 64,
        stages=2,
        exchanges=1 if dim == 256 else 2,
        registers=240,
        has_lo=band.lo is not None,
        has_hi=band.hi is not None,
        bottom_right=problem.align == "bottom-right",
        masks=masks,
        cleans=band.bounded or problem.packed,
        has_softcap=problem.softcap is not None,
        grouped=problem.group > 1,
        dq="none" if dim == 256 or problem.deterministic else "turns" if dim == 64 else "halves",
        # Where a band hides something the walks start at different queries as it is.
        rotate=not masks,
        sequences=1 << problem.batch.bit_length() if problem.packed else 0,
    )


def head_rows(problem: Problem, rows_q: int) -> int:
    """Rows of the workspace per head: every sequence, and what lies behind the last packed one, padded to `PAD`."""
    padded = -(-rows_q // PAD) * PAD
    return padded + (problem.batch + 2) * PAD if problem.packed else padded


def section(problem: Problem) -> int:
    """How many key/value heads a section of the schedule takes.

    Their queries, dO and dQ should stay in L2 together; of query heads that share keys, one at a time is walked over.
    And the last section must not be much smaller than the others: simulated, 16 even sections of 128 heads keep 132
    processors 98% busy (N 2048, causal), sections of 13 heads 96%.
    """
    bytes_per_head = problem.len_q * (4 * problem.dim + 2 * (problem.dim + problem.dim_v))
    all_heads = problem.kv_heads if problem.packed else problem.kv_heads * problem.batch
    most = int(min(max(L2_SECTION_BYTES // max(bytes_per_head, 1), 1), all_heads))
    sizes = range((most + 1) // 2, most + 1)
    return max(sizes, key=lambda size: 4 * ((all_heads - 1) % size + 1) / size + size / most)


@dataclass(frozen=True)
class QueryConfig:
    """One compiled kernel of dQ alone: tile sizes, and which features of a problem its code holds."""

    dim: int
    keys: int
    k_stages: int
    v_stages: int
    groups: int = 2
    registers: int = 240
    ping_pong: bool = False
    longest_first: bool = False
    has_lo: bool = False
    has_hi: bool = False
    bottom_right: bool = True
    masks: bool = False
    cleans: bool = False
    has_softcap: bool = False
    sequences: int = 0


def choose_query(problem: Problem) -> QueryConfig:
    """The kernel of dQ alone for a problem."""
    dim = tile_dim(max(problem.dim, problem.dim_v))
    band = problem.band
    keys = 64 if dim == 256 else 128
    return QueryConfig(
        dim,
        keys=keys,
        k_stages={64: 3, 128: 2, 256: 2}[dim],
        v_stages={64: 3, 128: 2, 256: 1}[dim],
        longest_first=band.hi is not None,
        has_lo=band.lo is not None,
        has_hi=band.hi is not None,
        bottom_right=problem.align == "bottom-right",
        masks=band.bounded or problem.packed or problem.len_k % keys != 0,
        cleans=band.bounded or problem.packed,
        has_softcap=problem.softcap is not None,
        sequences=1 << problem.batch.bit_length() if problem.packed else 0,
    )
