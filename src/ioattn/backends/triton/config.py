"""Which tiles each kernel runs with: a table with a reason per row, and a rule for what does not fit.

A row is for one kernel, element size and width. Its choices stand in order of preference; the first that fits in the
GPU's shared memory is taken, and where none fits the last one is halved until it does. No tuning at run time.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import triton

from ioattn.backends.triton.arguments import padded
from ioattn.backends.triton.shortcuts import is_bounded, is_fused_by_block
from ioattn.problem import Problem

Direction = Literal["forward", "delta", "key_value", "query", "bias"]
Family = Literal["wgmma", "mma"]


class Tiles(NamedTuple):
    """How one kernel is cut: rows of Q and of K per tile, warps, stages of its load pipeline, precision of products."""

    q_tile: int
    k_tile: int
    num_warps: int
    num_stages: int
    precision: str = "ieee"
    """For float32: "ieee", or a sum of bf16, fp16 or TF32 products of that accuracy. 16-bit products are exact."""
    apart: bool = False
    """dK and dV by a kernel each, where the sums of both leave no registers; S is then computed once more."""
    max_registers: int | None = None
    """Registers of a thread at most, so that one program more shares a multiprocessor."""


class Gpu(NamedTuple):
    """What the choice depends on."""

    capability: tuple[int, int]
    """Compute capability; (0, 0) for other makes."""
    shared_memory: int
    """Bytes that one program may use."""
    processors: int = 132
    """Streaming multiprocessors, or what another make has in their place."""

    @property
    def family(self) -> Family:
        """Whether the tensor cores read their operands from shared memory, or from registers."""
        return "wgmma" if self.capability[0] in (9, 10) else "mma"

    @property
    def tensor_memory(self) -> bool:
        """Whether the tensor cores have a memory of their own for their sums."""
        return self.capability[0] == 10


class Row(NamedTuple):
    """The choices up to a width, the larger one of D and Dv padded to a power of two."""

    max_width: int
    choices: tuple[Tiles, ...]
    why: str


INTERPRETER = Tiles(64, 64, 4, 1)
"""For Triton's interpreter: small, so that small cases cross many tiles."""

DELTA = Tiles(64, 64, 4, 1)
"""Any: the kernel reads two tensors once."""

TILES_AT_ONCE = 16
"""So many tiles of results a program looks at, at most, for NaN that nobody should see."""

X6 = "bf16x6"

FP16X3 = "fp16x3"
"""Three products of halves in float16, for the heads whose numbers fit, after a pass: see `kernels/halves.py`."""

SPLIT_ROWS = 256
"""So many queries and keys are worth that pass, whose time grows with their sum and not with their product."""

HALVES_APART = Tiles(64, 128, 8, 1, FP16X3, apart=True)

TABLE: dict[tuple[Family, Direction, int], tuple[Row, ...]] = {
    ("wgmma", "forward", 2): (
        Row(64, (Tiles(64, 64, 4, 3, max_registers=128),), "470; with 139 registers 415: 3 programs, not 4, per SM"),
        Row(
            128,
            (Tiles(128, 128, 8, 3), Tiles(128, 128, 8, 2), Tiles(128, 64, 8, 2)),
            "518; 475 before its products ran side by side",
        ),
        Row(256, (Tiles(128, 64, 8, 2), Tiles(64, 64, 4, 1)), "514 full; 390 before its products ran side by side"),
    ),
    ("wgmma", "key_value", 2): (
        Row(
            64,
            (Tiles(32, 64, 4, 3, max_registers=168), Tiles(64, 64, 4, 2)),
            "395 / 376 of a whole backward, N 4096; 64 by 64 on two programs per SM 385, with two stages 357 / 330",
        ),
        Row(
            128,
            (Tiles(32, 64, 4, 3), Tiles(32, 64, 4, 2), Tiles(32, 64, 4, 1)),
            "a stage less: 325, not 362 of a whole backward",
        ),
        Row(256, (Tiles(32, 128, 8, 2, apart=True), Tiles(32, 64, 4, 1, apart=True)), "no spills; together 194 / 212"),
    ),
    ("wgmma", "query", 2): (
        Row(64, (Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2)), "556 / 526; 128 queries 421 / 378"),
        Row(128, (Tiles(64, 64, 4, 2),), "380 / 354 of a whole backward, N 4096; 128 by 128 on 8 warps 343 / 318"),
        Row(256, (Tiles(128, 64, 8, 1), Tiles(128, 32, 8, 1), Tiles(64, 32, 4, 1)), "472 / 434; 32 keys 368 / 340"),
    ),
    ("wgmma", "forward", 4): (
        Row(
            64, (Tiles(64, 64, 4, 2, FP16X3), Tiles(64, 64, 4, 2, X6), Tiles(64, 32, 4, 2, X6)), "155 / 142; X6 57 / 52"
        ),
        Row(
            128,
            (Tiles(64, 32, 4, 2, FP16X3), Tiles(128, 64, 8, 1, X6), Tiles(64, 32, 4, 1, X6)),
            "137 / 124; X6 68 / 59",
        ),
        Row(256, (Tiles(64, 16, 4, 2, X6), Tiles(32, 16, 4, 1, X6)), "what shared memory holds"),
    ),
    ("wgmma", "key_value", 4): (
        Row(
            64, (Tiles(64, 64, 4, 1, FP16X3), Tiles(32, 64, 4, 2, X6), Tiles(32, 64, 4, 1, X6)), "154 / 149; X6 51 / 48"
        ),
        Row(128, (HALVES_APART, Tiles(16, 128, 8, 1, X6), Tiles(16, 64, 4, 1, X6)), "117 / 107; X6 32 / 30"),
        Row(256, (Tiles(16, 32, 8, 1, X6), Tiles(16, 16, 4, 1, X6)), "what registers hold"),
    ),
    ("wgmma", "query", 4): (
        Row(
            64,
            (Tiles(64, 32, 4, 2, FP16X3, max_registers=168), Tiles(64, 32, 4, 2, X6)),
            "173 / 158; X6 50 / 48",
        ),
        Row(
            128,
            (Tiles(128, 64, 8, 1, FP16X3), Tiles(64, 32, 4, 1, X6), Tiles(64, 16, 4, 1, X6)),
            "170 / 151; X6 39 / 37",
        ),
        Row(256, (Tiles(32, 16, 4, 1, X6),), "what shared memory holds"),
    ),
    ("mma", "forward", 2): (
        Row(64, (Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 2)), "no spills on sm_80"),
        Row(128, (Tiles(128, 64, 8, 2), Tiles(64, 32, 4, 2)), "96 KiB: fits sm_86, sm_89 and sm_120, too"),
        Row(256, (Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 1)), "96 KiB"),
    ),
    ("mma", "key_value", 2): (
        Row(64, (Tiles(64, 128, 8, 2), Tiles(64, 64, 4, 1)), "no spills on sm_80"),
        Row(128, (Tiles(64, 64, 8, 2), Tiles(32, 64, 4, 1)), "no spills on sm_80; 96 KiB"),
        Row(256, (Tiles(16, 64, 8, 2), Tiles(16, 32, 4, 1)), "what registers hold"),
    ),
    ("mma", "query", 2): (
        Row(64, (Tiles(128, 64, 8, 2), Tiles(64, 64, 4, 1)), "no spills on sm_80"),
        Row(128, (Tiles(64, 64, 8, 2), Tiles(64, 32, 4, 1)), "no spills on sm_80; 96 KiB"),
        Row(256, (Tiles(64, 32, 8, 1), Tiles(32, 32, 4, 1)), "what shared memory holds"),
    ),
    ("mma", "forward", 4): (
        Row(64, (Tiles(64, 32, 4, 2, X6), Tiles(32, 32, 4, 1, X6)), "what registers hold, on six operands"),
        Row(128, (Tiles(64, 16, 8, 2, X6), Tiles(32, 16, 4, 1, X6)), "95 spills per step on sm_80; 176 with 4 warps"),
        Row(256, (Tiles(32, 16, 4, 1, X6),), "what registers hold, on six operands"),
    ),
    ("mma", "key_value", 4): (
        Row(64, (Tiles(32, 32, 4, 1, X6),), "no spills on sm_80; 64 keys spill 206 times per step"),
        Row(128, (Tiles(16, 32, 8, 1, X6),), "3 spills per step on sm_80; 104 with 4 warps"),
        Row(256, (Tiles(16, 16, 4, 1, X6),), "what registers hold, on six operands"),
    ),
    ("mma", "query", 4): (
        Row(64, (Tiles(32, 32, 4, 1, X6),), "no spills on sm_80; 64 queries spill 69 times per step"),
        Row(128, (Tiles(32, 16, 8, 1, X6),), "82 spills per step on sm_80; 129 with 4 warps"),
        Row(256, (Tiles(16, 16, 4, 1, X6),), "what registers hold, on six operands"),
    ),
}
"""Numbers are TFLOP/s, full / causal, on an H200 with Triton 3.6, 8192 rows in 16 bits and 4096 in 32, counting two
products in the forward, four in dK and dV, three in dQ (`ioattn bench tune`). Spills are those of the compiled loops of
causal problems (`tests/test_triton_compile.py`)."""


QUERY_168 = Tiles(64, 64, 4, 3, max_registers=168)
"""The plain tiles, three programs to a multiprocessor where a feature's registers leave room for two."""

WITH: dict[tuple[Direction, int, str], Tiles] = {
    ("forward", 128, "bias"): Tiles(128, 128, 8, 3),  # 378, plain; here so that no row below is taken: 300 or 312
    ("forward", 128, "mask"): Tiles(128, 128, 8, 3),  # 447 of 520; 64 by 64 442, 128 by 64 402, two stages 380
    ("forward", 128, "bounded softcap"): Tiles(64, 64, 4, 3),  # 433 of 519; 128 by 64 388, 128 by 128 374
    ("forward", 128, "softcap"): Tiles(64, 64, 4, 3),  # as where it is bounded; before, 128 by 64 had 381
    ("forward", 128, "window"): Tiles(64, 64, 4, 3),  # 393 of 499; two stages 352, 128 by 64 336 of 516
    ("bias", 128, "bias"): Tiles(128, 128, 8, 1),  # plain until dQ took 64 by 64; no other was timed
    ("key_value", 64, "bias"): Tiles(64, 64, 4, 3),  # 300 of 379 with dQ's tiles below; the plain tiles 287
    ("key_value", 64, "mask"): Tiles(64, 64, 4, 3),  # 316 of 395; the plain tiles 297, 64 by 64 with two stages 297
    ("query", 64, "bias"): QUERY_168,  # 260; without a limit of registers 240
    ("query", 64, "mask"): QUERY_168,  # 294; 280
    ("query", 64, "softcap"): QUERY_168,  # 263; 249. With three stages in dK and dV 257
    ("query", 64, "window"): QUERY_168,  # 287; 271
}
"""What is preferred with a feature, in 16 bits on Hopper, up to a width: where the plain tiles spill, or wait.

Numbers as in TABLE, of B4 N4096; of a backward each with the other kernels' tiles as they were."""

WORDS_PASS_SHARED_MEMORY = not triton.__version__.startswith("3.6.")
"""Triton 3.9 passes what is read of a bias or mask for the next tile through shared memory, a byte per score."""

WINDOW = 2048
"""Up to so many keys per query the tiles at the edges of a window, and the start and end of a program, weigh most."""


def choose(problem: Problem, direction: Direction, gpu: Gpu | None, in_registers: bool = False) -> Tiles:
    """The tiles of one kernel; `gpu` is None in Triton's interpreter.

    `in_registers` says that bias and mask are read straight into registers: they take no shared memory.
    """
    tiles = _choose(problem, direction, gpu, in_registers)
    if direction == "key_value" and is_fused_by_block(problem):
        # Of the queries taken at a time all must be of one block of dQ's kernel.
        blocks = [_choose(problem, "query", gpu, way).q_tile for way in (False, True)]
        tiles = tiles._replace(q_tile=min(tiles.q_tile, *blocks))
    return tiles


def _choose(problem: Problem, direction: Direction, gpu: Gpu | None, in_registers: bool) -> Tiles:
    if gpu is None:
        return INTERPRETER if _may_split(problem, direction) else _whole(INTERPRETER)
    if direction == "delta":
        return DELTA
    choices = _choices(problem, direction, gpu)
    preferred = next((x for x in choices if in_registers and fits(problem, direction, x, gpu, in_registers)), None)
    if preferred is not None:
        return preferred
    may_split = _may_split(problem, direction) and not gpu.tensor_memory
    may_split = may_split and min(problem.len_q, problem.len_k) >= SPLIT_ROWS
    halves = [t for t in choices if t.precision == FP16X3 and fits(problem, direction, t, gpu)]
    return halves[0] if halves and may_split else choose_whole(problem, direction, gpu)


def choose_whole(problem: Problem, direction: Direction, gpu: Gpu | None) -> Tiles:
    """The tiles of one kernel for numbers that do not fit in halves."""
    if gpu is None:
        return _whole(INTERPRETER)
    choices = [t for t in _choices(problem, direction, gpu) if t.precision != FP16X3]
    if problem.precision is not None:
        choices = [t._replace(precision=problem.precision) for t in choices]
    tiles = next((t for t in choices if fits(problem, direction, t, gpu)), choices[-1])
    while not fits(problem, direction, tiles, gpu) and _smaller(tiles) != tiles:
        tiles = _smaller(tiles)
    if gpu.tensor_memory and problem.dtype.itemsize == 4:
        # Triton 3.6 compiles some float32 kernels to nothing at all for sm_100, not so where 32 rows keep it off that
        # GPU's newer instructions.
        tiles = Tiles(min(tiles.q_tile, 32), min(tiles.k_tile, 32), 4, 1, tiles.precision)
    return tiles


def _choices(problem: Problem, direction: Direction, gpu: Gpu) -> tuple[Tiles, ...]:
    # A tile of the bias's gradient costs what a tile of dQ costs.
    row_of: Direction = "query" if direction == "bias" else direction
    width = max(padded(problem.dim), padded(problem.dim_v))
    choices = next(r.choices for r in TABLE[gpu.family, row_of, problem.dtype.itemsize] if width <= r.max_width)
    if gpu.capability[0] == 9 and problem.dtype.itemsize == 2:
        special = [WITH.get((direction, width, feature)) for feature in _features(problem)]
        choices = (*(tiles for tiles in special if tiles is not None), *choices)
    return choices


def _features(problem: Problem) -> tuple[str, ...]:
    """Those that make a kernel's scores expensive, the most expensive first."""
    band = problem.band
    window = None if band.lo is None or band.hi is None or band.hi - band.lo > WINDOW else band
    bounded = True if is_bounded(problem) else None
    present = {"bias": problem.bias, "mask": problem.mask, "bounded softcap": bounded, "softcap": problem.softcap}
    return tuple(name for name, value in (present | {"window": window}).items() if value is not None)


def programs_to_repair(tiles: int, heads: int, gpu: Gpu | None) -> int:
    """How many programs share the tiles of a head in a kernel that repairs: as few as one multiprocessor each allows.

    Most only look, and what they cost is their start; but where there is something to repair, no multiprocessor idles.
    In the interpreter 4 of them let small cases have programs with several tiles.
    """
    per_head = tiles // max(1, heads)
    processors = 4 if gpu is None else gpu.processors
    return max(-(-per_head // TILES_AT_ONCE), min(per_head, processors // max(1, heads)))


def fits(problem: Problem, direction: Direction, tiles: Tiles, gpu: Gpu, in_registers: bool = False) -> bool:
    """Whether the GPU has the shared memory that these tiles need."""
    return shared_bytes(problem, direction, tiles, gpu, in_registers) <= gpu.shared_memory


def _whole(tiles: Tiles) -> Tiles:
    return tiles._replace(precision=X6) if tiles.precision == FP16X3 else tiles


def _may_split(problem: Problem, direction: Direction) -> bool:
    """Whether "fp16x3" applies; what a mask hides may have any size, and has no say in how the rest is computed."""
    if problem.dtype.itemsize != 4 or problem.precision is not None or direction in ("delta", "bias"):
        return False
    return problem.mask is None and min(problem.batch, problem.len_q, problem.len_k) > 0


def objections(problem: Problem, gpu: Gpu | None) -> list[str]:
    """Why not even the smallest tiles fit on this GPU, if so."""
    if gpu is None:
        return []
    needs = max(
        shared_bytes(problem, kernel, choose_whole(problem, kernel, gpu), gpu)
        for kernel in get_args(Direction)
        if kernel != "delta"
    )
    if needs <= gpu.shared_memory:
        return []
    return [f"the smallest tiles need {needs} bytes of shared memory; this GPU has {gpu.shared_memory} per program"]


def shared_bytes(problem: Problem, direction: Direction, tiles: Tiles, gpu: Gpu, in_registers: bool = False) -> int:
    """Shared memory that the kernel needs at most: operands of products, once per stage where a loop loads them."""
    if direction == "delta":
        return 8 * tiles.q_tile * tiles.num_warps
    size = problem.dtype.itemsize
    q_rows, k_rows = (tile * (padded(problem.dim) + padded(problem.dim_v)) for tile in tiles[:2])
    walked, kept = (q_rows, k_rows) if direction == "key_value" else (k_rows, q_rows)
    if direction == "forward":
        kept = tiles.q_tile * padded(problem.dim)
    scores = tiles.q_tile * tiles.k_tile
    per_score = 0 if in_registers else _bias_size(problem) + (problem.mask is not None)
    per_query = 2 * 4 * tiles.q_tile
    if direction == "key_value" and size == 2:
        per_query = max(per_query, 4 * 32 * tiles.num_warps)  # see `queries.load_pairs`
    extra = scores * per_score + per_query
    stages = 1 if direction == "bias" else tiles.num_stages
    total = stages * (walked * size + extra) + kept * size
    if in_registers and direction == "forward" and WORDS_PASS_SHARED_MEMORY:
        total += scores
    if direction == "key_value":
        # LSE and delta of one tile more, where three or more stages of them are on their way.
        total += per_query
    if size == 4 and tiles.precision != FP16X3:
        # Operands in three bf16 parts, of which some go through shared memory; measured, rounded up.
        total += 2 * (scores + max(q_rows, k_rows))
    if gpu.tensor_memory:
        # Weights and dS on their way from registers to the tensor cores; measured, rounded up.
        total += 1024 + 4 * scores * size
    return total


def _bias_size(problem: Problem) -> int:
    return 0 if problem.bias is None else 4


def _smaller(tiles: Tiles) -> Tiles:
    """The next smaller tiles: a pipeline stage less, then half of the longer side, down to 16 by 16."""
    if tiles.num_stages > 1:
        return tiles._replace(num_stages=tiles.num_stages - 1)
    if tiles.q_tile >= tiles.k_tile:
        return tiles._replace(q_tile=max(16, tiles.q_tile // 2))
    return tiles._replace(k_tile=max(16, tiles.k_tile // 2))
