"""What each backward kernel is compiled for: tile sizes by head dimension, and which features its code holds."""

from __future__ import annotations

from dataclasses import dataclass

from ioattn.backends.gluon.config import tile_dim
from ioattn.problem import Problem

PAD = 128
"""Rows of the workspace that a sequence is padded to: the most rows of a tile of queries."""

KEYS = 128
"""Keys of a tile up to D 128."""

PROCESSORS = 132
"""Multiprocessors of an H100 or H200: with another number the last tiles are cut less well."""

MOST_PARTS = 8
"""Into so many a walk is cut at the most."""

PART_COST = 300
"""What the start and end of a part cost, in queries of its walk: a guess that fits 3 and 4 parts at N 8192, 16384."""

SHORT, LONG = 1024, 4096
"""Queries up to which walks go forwards, and from which on some are cut."""

STRETCH, ALL = 1024, 1 << 20
"""Queries of one head at a time where others share the keys, and blocks where none do."""

L2_SECTION_BYTES = 28e6
"""Queries, their gradients and dO of the heads in work together: half of the H200's 60 MB L2."""

LEAST_HEADS, LEAST_SHORT_HEADS = 8, 16
"""Heads in work together where tiles add to dQ in order, at the least; and where heads share keys, or at D 64.

The tiles of a head come to their first block one after another, 3 us apart (H200), which few heads would wait for.
"""

LEAST_CAUSAL_HEADS = 4
"""The same where tiles add in any order and each walks less than the one before, at D 128.

H200, N 16384: 4 heads 1.005 and 1.007 of one, 8 as 4, 16 0.997, 3 0.96; N 8192 1.00.
"""


@dataclass(frozen=True)
class BackwardConfig:
    """One compiled kernel: tile sizes, and which features of a problem its code holds.

    `dq` says how it makes dQ: "halves", each group one of them in every step; "turns", each group all of it in every
    other step; "none", as a kernel of its own does. `transposed`: as K^T dS^T.

    `rotate`: blocks that share a head start at different queries. `stretch`: they walk from the last queries to the
    first, so many blocks of each head that shares the keys at a time; 0: from the first on, head after head. `parts`:
    some walks are cut, as `split` says. `skips`: a group lets blocks pass that only the other one sees. `lean`: V is
    let go before K, and weights alone are masked. `in_order`: tiles add to dQ in the order in which they are drawn;
    `fresh`: the first one stores, and nothing is cleared before.
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
    stretch: int = 0
    parts: bool = False
    skips: bool = False
    lean: bool = False
    in_order: bool = False
    fresh: bool = False
    transposed: bool = False

    @property
    def sums_dq(self) -> bool:
        """Whether this kernel makes dQ, too."""
        return self.dq != "none"

    @property
    def dq_shape(self) -> tuple[int, int]:
        """What one group makes of a tile of dQ, all of it or half of its columns, or the transpose of that."""
        columns = self.dim if self.dq == "turns" else self.dim // 2
        return (columns, self.rows) if self.transposed else (self.rows, columns)

    @property
    def held_keys(self) -> int:
        """Keys of which a group holds its columns in registers all along a walk, for dQ: at D 64 that is 3% slower.

        They take 16 registers. With as many for S = K Q^T beside them too few are left for the products.
        """
        return 64 if self.transposed and self.dim == 128 else 0

    @property
    def dq_parts(self) -> int:
        """How many groups make dQ of one step."""
        return 2 if self.dq == "halves" else 1

    @property
    def few_registers(self) -> int:
        """Registers of a third warp group beside two compute groups: three times 168 are shared out."""
        return 504 - 2 * self.registers

    @property
    def draws(self) -> bool:
        """Whether each program's first tile is drawn, too: some wait for those of lower numbers."""
        return self.parts or self.in_order

    @property
    def across(self) -> bool:
        """Whether the tiles of a section's heads are drawn by turns, else head after head."""
        return self.has_hi or self.in_order

    @property
    def descending(self) -> bool:
        """Whether the last keys come first: tiles drawn together then walk the diagonal without waiting."""
        return self.in_order and self.has_hi and not self.has_lo and not self.grouped

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

    dQ in turns: D 64 full N 8192 547 against 485 TFLOP/s in halves; D 128 527 against 559. Above D 128, where a tile of
    64 keys is all that fits, sums in global memory would take the time, and dQ has a kernel of its own.
    """
    dim = tile_dim(max(problem.dim, problem.dim_v))
    band = problem.band
    keys = 64 if dim == 256 else 128
    rows = 128 if dim == 64 else 64
    masks = band.bounded or problem.packed or problem.len_k % keys != 0
    sums_dq = dim < 256
    in_order = adds_in_order(problem)
    grouped = problem.group > 1
    # With a mask and heads that share keys it costs 1%: 64 heads on 8, causal.
    lean = sums_dq and not in_order and not (grouped and masks)
    return BackwardConfig(
        dim,
        keys=keys,
        rows=rows,
        stages=2,
        exchanges=1 if dim == 256 else 2,
        registers=240,
        has_lo=band.lo is not None,
        has_hi=band.hi is not None,
        bottom_right=problem.align == "bottom-right",
        masks=masks,
        cleans=band.bounded or problem.packed,
        has_softcap=problem.softcap is not None,
        grouped=grouped,
        dq="turns" if dim == 64 else "halves" if sums_dq else "none",
        rotate=rotates(problem, masks),
        sequences=1 << problem.batch.bit_length() if problem.packed else 0,
        stretch=(STRETCH // rows if grouped and band.lo is None else ALL) if walks_backwards(problem) else 0,
        parts=sums_dq and not problem.packed and split(problem)[2] > 1,
        # At D 64 a block of queries is as long as a tile of keys.
        skips=lean and dim == 128 and band.bounded,
        lean=lean,
        in_order=in_order,
        fresh=in_order and all_see_keys(problem),
        transposed=sums_dq and transposes_dq(problem, masks),
    )


def adds_in_order(problem: Problem) -> bool:
    """Whether tiles add to dQ in one order: where that is asked for, and where it is faster, as nothing is cleared.

    H200, N 512 and 1024: D 64 1.13 and 1.05 causal, 1.03 full (N 1024); D 128 1.09 and 1.02 causal, where letting
    blocks pass is worth 1.04, 1.06 and 1.02 full. Blocks of few queries would wait for many keys.
    """
    dim = tile_dim(max(problem.dim, problem.dim_v))
    if problem.deterministic or dim == 256:
        return dim < 256
    longest = SHORT // 2 if dim == 128 and problem.band.bounded else SHORT
    return problem.group == 1 and max(problem.len_q, problem.len_k) <= longest and all_see_keys(problem)


def walks_backwards(problem: Problem) -> bool:
    """Whether walks go from the last queries to the first."""
    dim = tile_dim(max(problem.dim, problem.dim_v))
    grouped, band = problem.group > 1, problem.band
    if adds_in_order(problem):
        return grouped or band.hi is None or band.lo is not None
    return grouped and dim == 128 and not problem.packed and band.lo is None and problem.len_q > SHORT


def rotates(problem: Problem, masks: bool) -> bool:
    """Whether walks start at different queries: where a band hides something they do as it is.

    H200, D 128: N 2048 0.99, N 4096 1.02, N 8192 1.025, N 16384 1.025 of walks from the last queries to the first,
    which from the first to the last have 1.01, 0.995, 1.01, 1.00. Where heads share keys it is 0.99.
    """
    if masks or adds_in_order(problem):
        return False
    dim = tile_dim(max(problem.dim, problem.dim_v))
    return dim != 128 or (problem.group == 1 and problem.len_q >= LONG)


def transposes_dq(problem: Problem, masks: bool) -> bool:
    """Whether dQ is made as K^T dS^T, at D 128 with half of that K in registers, which softcap and ALiBi need.

    H200, N 1024, 2048, 8192, 16384 (causal without the last). D 64 full 1.01, 1.00, 1.01, 1.01, causal 1.01, 1.03,
    1.01, windows 1.00, 32 heads on 8 causal 1.02, but full 0.99. D 128 full 1.01, 1.005, 1.03, 1.02, 64 heads on 8
    1.03, causal 1.02, but heads of their own 0.99 (N 8192).
    """
    grouped = problem.group > 1
    if tile_dim(max(problem.dim, problem.dim_v)) == 64:
        return masks or not grouped
    if problem.packed or problem.band.lo is not None or problem.terms:
        return False
    return not masks or (grouped and not problem.deterministic)


def all_see_keys(problem: Problem) -> bool:
    """Whether each block of queries in the workspace is seen by some tile of keys."""
    band = problem.band
    shift = band.shift + (problem.len_k - problem.len_q if problem.align == "bottom-right" else 0)
    if problem.packed or band.lo is not None or problem.len_q % PAD:
        return False
    return band.hi is None or band.hi + shift >= 0


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
    least = min(least_heads(problem), all_heads)
    most = int(min(max(L2_SECTION_BYTES // max(bytes_per_head, 1), least), all_heads))
    sizes = range(max((most + 1) // 2, least), most + 1)
    return max(sizes, key=lambda size: 4 * ((all_heads - 1) % size + 1) / size + size / most)


def least_heads(problem: Problem) -> int:
    """How many heads a section takes at the least, so that few tiles wait for others, or are left to end alone."""
    dim, band = tile_dim(max(problem.dim, problem.dim_v)), problem.band
    if adds_in_order(problem):
        many = LEAST_SHORT_HEADS if problem.group > 1 or dim == 64 else LEAST_HEADS
        return many if walks_backwards(problem) else 1
    causal = band.hi is not None and band.lo is None and not problem.packed
    return LEAST_CAUSAL_HEADS if causal and dim == 128 and problem.group == 1 else 1


def key_tiles(problem: Problem) -> int:
    """Tiles of keys of a problem that is not packed, up to D 128."""
    return -(-problem.len_k // KEYS) * problem.kv_heads * problem.batch


def split(problem: Problem) -> tuple[int, int, int]:
    """How many tiles stay whole, how many of the others are walked over at a time, and in how many parts.

    Equal tiles: 2048 of them take 132 processors as long as 2112 would. Cut are those of the last, incomplete round. A
    part costs about as much as a walk over 300 queries: N 8192 is 2.4% faster, N 16384 3.6%, N 1024 1.3% slower (H200,
    D 128). So it is where heads share keys: 64 on 8 is 1% faster. Where their tiles are not equal: those of a section
    in two parts, half of the heads each.
    """
    tiles = key_tiles(problem)
    none = tiles, 1, 1
    if problem.len_q < LONG or (problem.group > 1 and problem.dim != 128):
        return none
    if problem.group > 1 and problem.band.hi is not None and problem.band.lo is None:
        return 0, -(-problem.len_k // KEYS) * section(problem), 2
    if problem.band.bounded or problem.len_k % KEYS:
        return none
    rest = tiles % PROCESSORS
    cost = PART_COST / (problem.len_q * problem.group)
    times = {n: -(-rest * n // PROCESSORS) * (1 / n + cost) for n in range(2, MOST_PARTS + 1)}
    parts = min(times, key=lambda n: times[n])
    return (tiles - rest, rest, parts) if 0 < times[parts] < 0.9 else none


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
    """The kernel of dQ alone for a problem above D 128."""
    band = problem.band
    keys = 64
    return QueryConfig(
        tile_dim(max(problem.dim, problem.dim_v)),
        keys=keys,
        k_stages=2,
        v_stages=1,
        longest_first=band.hi is not None,
        has_lo=band.lo is not None,
        has_hi=band.hi is not None,
        bottom_right=problem.align == "bottom-right",
        masks=band.bounded or problem.packed or problem.len_k % keys != 0,
        cleans=band.bounded or problem.packed,
        has_softcap=problem.softcap is not None,
        sequences=1 << problem.batch.bit_length() if problem.packed else 0,
    )
