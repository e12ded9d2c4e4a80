"""Predicted == counted, to the byte, and what was counted is true attention."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from ioattn.cases import problem_of
from ioattn.io.memory import CapacityError, Memory
from ioattn.io.reference import check
from ioattn.io.schedules import count
from ioattn.io.tiles import Blocks, Grid
from ioattn.io.traffic import FORMULAS, compulsory, predict, useful_flops
from ioattn.masks import Band
from ioattn.problem import Problem

RIGHT = [(s, d) for s, of in FORMULAS.items() for d in of if s != "as-printed"]


@pytest.fixture(autouse=True)
def _one_thread():
    """The checks are too small to share among threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


sides = st.none() | st.integers(0, 12)


@st.composite
def problems(draw, dtypes=("fp16", "bf16", "fp32", "fp64"), least_dim: int = 1) -> Problem:
    kv_heads = draw(st.integers(1, 2))
    sizes = (
        draw(st.integers(1, 2)),
        kv_heads * draw(st.integers(1, 3)),
        draw(st.integers(0, 28)),
        draw(st.integers(least_dim, 9)),
    )
    return problem_of(
        sizes,
        draw(st.sampled_from(dtypes)),
        kv_heads=kv_heads,
        len_k=draw(st.integers(0, 28)),
        dim_v=draw(st.integers(least_dim, 9)),
        causal=draw(st.sampled_from([False, True, "top-left"])),
        window=draw(st.none() | st.tuples(sides, sides)),
    )


blocks = st.builds(Blocks, st.integers(3, 17), st.integers(3, 17), st.integers(1, 5))


def tensors_of(problem: Problem, seed: int = 0) -> dict[str, torch.Tensor]:
    p, generator = problem, torch.Generator().manual_seed(seed)
    shapes = {
        "Q": (p.batch, p.heads, p.len_q, p.dim),
        "K": (p.batch, p.kv_heads, p.len_k, p.dim),
        "V": (p.batch, p.kv_heads, p.len_k, p.dim_v),
        "dO": (p.batch, p.heads, p.len_q, p.dim_v),
    }
    return {name: torch.randn(shape, generator=generator).to(p.dtype) for name, shape in shapes.items()}


def by_move(traffic) -> dict[tuple[str, str], tuple[int, int]]:
    return {(move.step, move.tensor): (move.read, move.written) for move in traffic.moves}


@pytest.mark.parametrize(("schedule", "direction"), [*RIGHT, ("as-printed", "forward")])
@given(problem=problems(), blocks=blocks)
@example(problem=problem_of((1, 2, 33, 4), causal=True, kv_heads=1, len_k=17), blocks=Blocks(8, 16))
@example(problem=problem_of((1, 1, 5, 2), len_k=7), blocks=Blocks(1, 1))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_predicted_is_counted(schedule, direction, problem, blocks):
    predicted = predict(problem, schedule, direction, blocks)
    # The chip is as large as the prediction says: a schedule that needed one byte more would be refused.
    counted = count(problem, schedule, direction, tensors_of(problem), blocks).traffic
    assert by_move(counted) == by_move(predicted)
    assert (counted.flops, counted.extra) == (predicted.flops, predicted.extra)
    assert sum(predicted.tiles.values()) == predicted.on_chip
    if not problem.band.bounded and problem.len_q and problem.len_k:
        assert counted.on_chip == predicted.on_chip


@pytest.mark.parametrize(("schedule", "direction"), RIGHT)
@given(problem=problems(("fp16", "bf16", "fp32"), least_dim=4), blocks=blocks)
@settings(max_examples=20, deadline=None, derandomize=True)
def test_counted_result_is_attention(schedule, direction, problem, blocks):
    # dQ and dK are differences of nearly equal sums where few keys are seen: their truth has no scale for a bound then.
    visible = Grid.of(problem, blocks).visible(slice(0, problem.len_q), slice(0, problem.len_k))
    assume(direction == "forward" or not visible.any() or visible.sum(-1).max() >= 4)
    inputs = tensors_of(problem)
    checks = check(problem, inputs, count(problem, schedule, direction, inputs, blocks).results)
    assert [c.name for c in checks] == (["O"] if direction == "forward" else ["dQ", "dK", "dV"])
    assert all(c.holds for c in checks), checks


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_the_printed_update_is_wrong(dtype):
    problem = problem_of((1, 1, 64, 16), dtype)
    inputs = tensors_of(problem)
    several, single = (count(problem, "as-printed", "forward", inputs, Blocks(16, k)).results for k in (16, 64))
    (wrong,), (right,) = check(problem, inputs, several), check(problem, inputs, single)
    assert not wrong.holds
    assert wrong.error > 0.1  # not a rounding error: the values are of order 0.3
    assert right.holds  # one key tile is never rescaled, which hides the error


@pytest.mark.parametrize(("schedule", "direction"), RIGHT)
def test_a_chip_one_byte_too_small_is_refused(schedule, direction):
    problem, blocks = problem_of((1, 1, 48, 8)), Blocks(16, 16, 2)
    needed = predict(problem, schedule, direction, blocks).on_chip
    with pytest.raises(CapacityError, match=r"of the chip's \d+ are in use; use smaller blocks or a chip of"):
        count(problem, schedule, direction, tensors_of(problem), blocks, capacity=needed - 1)


@given(problem=problems(), blocks=blocks)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_visits_are_the_tiles_that_the_band_touches(problem, blocks):
    grid = Grid.of(problem, blocks)
    seen = [
        (rows, cols)
        for rows, cols in itertools.product(grid.query_tiles(), grid.key_tiles())
        if any(grid.band.keeps(i, j) for i in range(rows.start, rows.stop) for j in range(cols.start, cols.stop))
    ]
    heights = [rows.stop - rows.start for rows, _ in seen]
    widths = [cols.stop - cols.start for _, cols in seen]
    live = {rows.start: rows.stop - rows.start for rows, _ in seen}
    pairs = sum(h * w for h, w in zip(heights, widths, strict=True))
    assert grid.visits() == (sum(widths), sum(heights), pairs, sum(live.values()))


@given(problem=problems())
@settings(max_examples=50, deadline=None, derandomize=True)
def test_no_schedule_moves_less_than_the_floor(problem):
    for schedule, direction in RIGHT:
        assert predict(problem, schedule, direction).total >= compulsory(problem, direction)


def test_the_documents_formulas():
    N, d, e, tiles = 4096, 64, 2, 64
    problem = problem_of((1, 1, N, d))
    formulas = {
        ("naive", "forward"): 4 * N * d * e + 6 * N**2 * e,
        ("fused-softmax", "forward"): 4 * N * d * e + 4 * N**2 * e,
        ("fa1", "forward"): 2 * N * d * e + tiles * N * d * e + (2 * tiles - 1) * (N * d * e + 8 * N),
        ("fa2", "forward"): 2 * N * d * e + tiles * 2 * N * d * e + 4 * N,
        ("naive", "backward"): 9 * N**2 * e + 8 * N * d * e,
        ("fused-softmax", "backward"): 7 * N**2 * e + 8 * N * d * e,
        ("two-pass", "backward"): (9 + 4 * tiles) * N * d * e + (12 + 8 * tiles) * N,
        ("fa2", "backward"): (7 + 2 * tiles) * N * d * e + (8 + 8 * tiles) * N * d + (4 + 8 * tiles) * N,
    }
    for (schedule, direction), total in formulas.items():
        assert predict(problem, schedule, direction).total == total, (schedule, direction)


def test_useful_flops_count_what_the_band_keeps():
    full, causal = problem_of((2, 4, 64, 16)), problem_of((2, 4, 64, 16), causal=True)
    assert useful_flops(full) == 4 * 2 * 4 * 64 * 64 * 16
    assert useful_flops(full, "backward") == 2.5 * useful_flops(full)
    assert useful_flops(causal) == useful_flops(full) * 65 // 128


def test_memory_counts_and_frees():
    memory = Memory(capacity=48, compute=torch.float32)
    x = memory.place("x", torch.arange(16, dtype=torch.float16).reshape(4, 4))
    with memory.step("one"), memory.region():
        tile = memory.load(x, slice(0, 2), dtype=torch.float32)  # 8 elements: 16 bytes moved, 32 kept
        tile += 1
        assert memory.used == 32
        with pytest.raises(CapacityError, match="a tile of 5 takes 20 bytes and 32 of the chip's 48 are in use"):
            memory.zeros(5)
        memory.store(x, tile, slice(2, 4))
    assert memory.used == 0
    assert memory.peak == 32
    assert memory.values(x).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [1, 2, 3, 4], [5, 6, 7, 8]]
    assert [(m.step, m.tensor, m.read, m.written) for m in memory.traffic().moves] == [("one", "x", 16, 16)]


def test_errors_name_the_cause():
    problem = problem_of((1, 1, 8, 4))
    with pytest.raises(ValueError, match="schedule is 'fa3'; it must be one of naive, fused-softmax, fa1"):
        predict(problem, "fa3")
    with pytest.raises(ValueError, match="split-kv has no backward of its own"):
        predict(problem, "split-kv", "backward")
    with pytest.raises(
        ValueError, match="two-pass has no forward of its own; it is a backward, whose forward is fa2's"
    ):
        predict(problem, "two-pass")
    with pytest.raises(ValueError, match="direction is 'sideways'"):
        predict(problem, "fa2", "sideways")
    with pytest.raises(ValueError, match="block_k is 0; it must be at least 1"):
        Blocks(8, 0)
    masked = Problem(**{**problem.__dict__, "mask": (1, 1, 1), "softcap": 3.0, "band": Band()})
    with pytest.raises(ValueError, match="problem has softcap, a mask tensor"):
        predict(masked, "fa2")
