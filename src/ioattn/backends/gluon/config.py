"""What each kernel is compiled for: a measured table of tile sizes and warp roles, with a reason per row."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ioattn.problem import Problem

GROUP_ROWS = 64
"""Query rows of a compute group: the rows of one warp group's matrix instruction."""

TILE_DIMS = (64, 128, 256)
MAX_SEQUENCES = 1023
SHARED_BYTES = 227 * 1024
REGISTERS = 65536
L2_SECTION_BYTES = 28e6
"""Keys and values of the heads in work together: half of the H200's 60 MB L2, which Q and O share.

20, 28, 40 and 60 MB, causal, TFLOP/s: N 2048 D 128 551, 558, 543, 544; N 512 D 256 288, 319, 282, 307; N 8192 alike.
"""

SECTION_SHARE = 132 // 5
"""Heads of keys and values in a causal section, for each block of a multiprocessor: a fifth of the H200's 132.

A section's longest rows fetch all of its keys from memory; with few heads, shorter rows work beside them. D 128 causal,
26 heads / what L2 holds: N 512 347 / 341 TFLOP/s, N 1024 483 / 473. D 64 N 1024, 64, 86 / 103 heads: 353, 357 / 351.
"""


@dataclass(frozen=True)
class Config:
    """One compiled kernel: tile sizes, roles, and which features of a problem its code holds."""

    dim: int
    dim_v: int
    groups: int
    keys: int
    stages: int
    registers: int
    beside: int = 1
    """How many blocks share a multiprocessor."""
    out_parts: int = 1
    """In how many parts, one after the other, a group's result goes through its buffer in shared memory: 1 or 2."""
    ping_pong: bool = False
    wait_after_max: bool = False
    query_stages: int = 1
    """How many tiles of queries there is room for: with 2 the next tile's come while this one's are still needed."""
    place_masks: bool = False
    """Whether compute groups find the next of two or four buffers by masks, not by comparing."""
    finite_max: bool = False
    """Whether row maxima start at the lowest number: from -inf on, each block asks if a row has seen a key."""
    thread_sums: bool = False
    """Whether each thread sums what it holds of a row, and a row's four threads meet only when the tile ends."""
    early_decay: bool = False
    """Whether, of sums by thread, what was summed before is taken in with the last quarter of a block's weights."""
    by_warp: bool = False
    """Whether each warp of a group arrives at barriers by itself, not one thread after all of the group have met."""
    halves: bool = False
    """Whether rows that see only the first half of their last block multiply no more of it."""
    by_turns: bool = False
    """Whether two groups take a tile's upper and lower rows by turns, as a diagonal gives the lower more to do."""
    scales_changed: bool = False
    """Whether sums are multiplied only where a row's maximum has grown: a predicate, not a branch, so for energy."""
    code: int = 1
    """How machine code is put together, `one_code`: counted up with each change, as Triton's cache does not see it."""
    longest_first: bool = False
    has_lo: bool = False
    has_hi: bool = False
    bottom_right: bool = True
    masks: bool = False
    cleans: bool = False
    has_softcap: bool = False
    sequences: int = 0

    @property
    def tile_rows(self) -> int:
        """Query rows of a tile."""
        return self.groups * GROUP_ROWS

    @property
    def start_registers(self) -> int | None:
        """Registers of each thread when a block starts; for one block alone the compiler knows it."""
        threads = self.beside * (self.groups + 1) * 128
        return None if self.beside == 1 else REGISTERS // threads // 8 * 8


def tile_dim(dim: int) -> int:
    """The smallest tile that holds a head dimension."""
    return next(d for d in TILE_DIMS if d >= dim)


def tiles(problem: Problem) -> Config:
    """Tile sizes and roles, as measured on an H200 in BF16 (docs/journal.md has the runs).

    `registers` are a compute group's; what is left of 512 per thread position is the loader's.
    """
    dim, dim_v = tile_dim(problem.dim), tile_dim(problem.dim_v)
    wide = max(dim, dim_v)
    bounded = problem.band.bounded or problem.packed
    if wide == 64:
        return _tiles_64(problem, bounded)
    if wide == 128:
        return _tiles_128(problem, dim, dim_v, bounded)
    crowded = problem.packed or problem.band.lo is not None
    # A buffer for all of the output fits in only where Q's is, which then comes late: full N 2048 737 in halves /
    # 719. Registers as at D 128: causal N 8192 with 24 for the loader 762 / 737. The wait: causal N 8192 643 / 614.
    # Sums by threads: causal N 8192 719 / 701; full, with the wait, which costs 1% without them, 723 / 711. Their
    # decay early: causal N 2048 588 / 600, N 8192 718 / 741. Arrivals by warp: causal N 2048 613 / 610, N 8192 680
    # / 677, full 686 / 664, 709 / 681. Finite maxima: causal N 2048 631 / 630, full N 8192 711 / 732.
    return Config(
        dim,
        dim_v,
        groups=2,
        keys=64,
        stages=2,
        registers=232 if crowded else 240,
        out_parts=2 if dim == dim_v else 1,
        wait_after_max=True,
        thread_sums=True,
        by_warp=True,
    )


def _tiles_128(problem: Problem, dim: int, dim_v: int, bounded: bool) -> Config:
    """The same where the larger head dimension is at most 128 and above 64.

    In turn costs 2%; a third stage in the place of the output's own buffer, 4%. The loader of windows and packed
    sequences has more to hold, and 40 registers for it instead of 24 give a window of 1024 539 against 505; causal
    N 8192 has 634 with 40 and 641 with 24. Half the keys per step where a diagonal is most of the work: N 512
    causal 285 against 258 TFLOP/s. Sums by threads: causal N 8192 646 / 642; full, with the wait after the row
    maximum, N 2048 654 / 645, N 8192 652 / 647. Their decay early: causal N 512 319 / 315 (against whole sums), N
    2048 586 / 577, N 8192 644 / 643, full 697 / 688, 662 / 650. Arrivals by warp: causal N 2048 596 / 592, N 8192
    641 / 635, full 693 / 690, 665 / 658, window of 1024 539 / 531.
    """
    narrow = bounded and problem.len_k <= 512
    crowded = problem.packed or problem.band.lo is not None
    # Finite maxima: full N 2048 669 / 659, N 8192 671 / 662; causal with the wait, and places by masks, N 2048 571 /
    # 568 and 590 / 585; without it N 2048 548 / 574, a window of 1024 524 / 544.
    # Two tiles of queries: causal N 512 339 / 322, N 1024 468 / 465, N 2048 565 / 568, full 665 / 659, 664 / 662.
    # Halves by turns, scaling where it changes, and two tiles of queries to N 2048: causal N 1024 469 / 461, N 2048 606
    # / 595, N 8192 703 / 699, N 16384 674 / 673; N 512, by turns alone 368 / 358, with the scaling 370. Full, the
    # scaling 639 / 633, 696 / 680. A window of 1024 520 / 535, with the scaling alone 533.
    # Places by masks, with both: causal N 512 347 / 343, full 672 / 670, 673 / 670.
    # All of these above N 2048, too: causal N 4096 695 / 691, N 8192 723 / 715, N 16384 703 / 690, 32 heads on 8 687 /
    # 678; without the wait N 8192 714.
    diagonal = bounded and not crowded
    return Config(
        dim,
        dim_v,
        groups=2,
        keys=64 if narrow else 128,
        stages=4 if narrow else 2,
        registers=232 if crowded else 240,
        query_stages=1 if crowded else 2,
        wait_after_max=not crowded and not narrow,
        place_masks=not crowded,
        finite_max=not crowded,
        thread_sums=True,
        early_decay=True,
        by_warp=True,
        halves=diagonal and not narrow,
        by_turns=diagonal,
        scales_changed=not crowded,
    )


def _tiles_64(problem: Problem, bounded: bool) -> Config:
    """The same where both head dimensions are at most 64."""
    longest, band = max(problem.len_q, problem.len_k), problem.band
    if bounded and longest <= (1024 if problem.packed else 2048):
        # Blocks of one group, whose ends hide behind each other's products; each fetches K and V for 64 rows only, and
        # at longer N L2 is the limit. Causal, against more groups in one block: N 512 273 / 222, N 1024 359 / 318,
        # N 2048 417 / 413, N 8192 427 / 482; packed, up to 1000 rows each 286 / 232, up to 2048 354 / 362. The decay of
        # sums early: causal N 512 268 / 264, N 1024 359 / 356, N 2048 386 / 379. Finite maxima: N 1024 366 / 364.
        three = Config(64, 64, groups=1, keys=64, stages=3, registers=136, beside=3, thread_sums=True, early_decay=True)
        return replace(three, finite_max=band.lo is None and not problem.packed)
    if not bounded and longest <= 512:
        # The same where no diagonal asks for few keys per step: N 512 404 / 390, N 768 434 / 485. The decay
        # of sums early: N 512 382 / 378.
        return Config(64, 64, groups=1, keys=128, stages=2, registers=216, beside=2, thread_sums=True, early_decay=True)
    if problem.len_q <= (1024 if bounded else 512):
        # Three groups leave much of the last tile empty: N 512 full 347 / 321, N 1024 causal 297 / 280.
        return Config(64, 64, groups=2, keys=128, stages=4, registers=240, ping_pong=True)
    # In turn: full N 2048 511 / 473. Waiting for P V after the row maximum: full N 8192 540 / 530, causal -1%. Sums by
    # threads: full N 2048 517 / 513, causal N 8192 494 / 499. Their decay early: full N 2048 529 / 525,
    # N 8192 534 / 533. Arrivals by warp: causal N 8192 506 / 512, full 534 / 534, a window of 1024 387 / 383. Finite
    # maxima: full N 8192 544 / 540, causal 514 / 517. Halves: causal N 8192 518 / 513; with them sums by threads causal
    # N 4096 519 / 515, N 8192 533 / 528, N 16384 526 / 521.
    diagonal = bounded and band.lo is None and not problem.packed
    return Config(
        64,
        64,
        groups=3,
        keys=128,
        stages=4,
        registers=160,
        ping_pong=True,
        wait_after_max=not bounded,
        finite_max=not bounded,
        thread_sums=not bounded or diagonal,
        early_decay=True,
        halves=diagonal,
    )


def choose(problem: Problem) -> Config:
    """The kernel for a problem."""
    config = tiles(problem)
    band = problem.band
    bounded = band.bounded or problem.packed
    return replace(
        config,
        longest_first=band.hi is not None,
        has_lo=band.lo is not None,
        has_hi=band.hi is not None,
        bottom_right=problem.align == "bottom-right",
        masks=bounded or problem.len_k % config.keys != 0,
        cleans=bounded,
        has_softcap=problem.softcap is not None,
        sequences=_power_of_two(problem.batch + 1) if problem.packed else 0,
    )


def divisors(problem: Problem, tile_rows: int, longest_first: bool) -> tuple[int, ...]:
    """What the schedule divides by, each as `kernels.tiles.Divisor`: it has no time for divisions.

    Tiles of a section; within it, heads, or row tiles, and the same in the last section; heads; heads of a group. How
    many row tiles packed sequences have is not known here, and counts as 1.
    """
    row_tiles = 1 if problem.packed else -(-problem.len_q // tile_rows)
    all_heads = problem.heads if problem.packed else problem.heads * problem.batch
    size = section(problem)
    inner = (size, (all_heads - 1) % size + 1) if longest_first else (row_tiles, row_tiles)
    return sum(map(divisor, (row_tiles * size, *inner, problem.heads, problem.group)), ())


def divisor(by: int) -> tuple[int, int, int]:
    """A divisor, and a factor and a shift: `n // by` is `(2 n * factor >> 32) >> shift` for all n below 2**31.

    The factor is 2**(31 + shift) / by, rounded up by e / by with e < by <= 2**shift; n e < 2**(31 + shift) keeps the
    quotient right (Granlund and Montgomery, 1994). It is below 2**32, and given as a signed number.
    """
    shift = (by - 1).bit_length()
    factor = -(-(1 << (31 + shift)) // by)
    return by, factor - (factor >> 31 << 32), shift


def section(problem: Problem) -> int:
    """How many query heads a section of the schedule takes.

    Their keys and values should stay in L2 together, and not all be fetched at once. The last section should not be
    much smaller than the others: when few heads are left, the blocks run out of long tiles to share.
    """
    bytes_per_head = problem.len_k * (problem.dim + problem.dim_v) * 2 / problem.group
    all_heads = problem.heads if problem.packed else problem.heads * problem.batch
    most = int(min(max(L2_SECTION_BYTES // max(bytes_per_head, 1), 1), all_heads))
    if problem.band.hi is not None and not problem.packed and max(problem.dim, problem.dim_v) <= 128:
        most = min(most, SECTION_SHARE * tiles(problem).beside * problem.group)
    sizes = range((most + 1) // 2, most + 1)
    return max(sizes, key=lambda size: ((all_heads - 1) % size + 1) / size + size / most)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
