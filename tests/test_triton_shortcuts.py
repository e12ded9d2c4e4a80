"""What the Triton kernels leave out where something is known of the size of scores: that they do, and may."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from test_triton_compile import GPUS, TILES_ARE_FOR_THIS_TRITON, Machine, compile_for, empty, kernels, machine_of

from ioattn.backends.triton import config, shortcuts
from ioattn.backends.triton.kernels.tanh import SERIES, SHORT_SERIES
from ioattn.problem import Options, Problem, Tensors

BIAS = {"bias": empty(1, 1, 2048, 2048, dtype=torch.bfloat16)}


@pytest.mark.parametrize(("series", "limits"), [(SERIES, (1e-7, 3e-7)), (SHORT_SERIES, (3.4e-6, 8.4e-6))])
def test_a_polynomial_is_tanh_up_to_where_it_ends(series: tuple[float, ...], limits: tuple[float, float]) -> None:
    """In float32, as the kernels compute it; a score's error is softcap times as large."""
    x = torch.linspace(-shortcuts.NEAR, shortcuts.NEAR, 10001)
    square, value = x * x, torch.zeros_like(x)
    for coefficient in reversed(series):
        value = value * square + coefficient
    error = (x * value - x.double().tanh()).abs()
    assert error.max() < limits[0]
    assert (error <= limits[1] * x.abs()).all()


@pytest.mark.parametrize("softcap", [1e-3, 5.0, 20.0, 30.0, 50.0, 100.0])
@pytest.mark.parametrize("scale", [1e-12, 0.05, 0.125, 3.0])
def test_a_power_of_two_makes_2_of_scores_where_the_polynomial_ends(scale: float, softcap: float) -> None:
    x = torch.empty(1, 1, 64, 64, dtype=torch.bfloat16, device="meta")
    factor = shortcuts.q_factor(Problem.of(Tensors(x, x, x), Options(scale=scale, softcap=softcap)))
    assert math.frexp(factor)[0] == 0.5
    assert factor <= 1
    # A product of such queries that is 2, as a part of softcap.
    end = 2 * scale / factor / softcap
    assert factor == 1 or shortcuts.NEAR / 2 < end <= shortcuts.NEAR


@pytest.mark.parametrize(("scale", "factor"), [(0.125, 0.125), (0.1, 1.0), (-0.125, 1.0), (2.0, 1.0), (2.0**-40, 1.0)])
def test_queries_are_scaled_where_that_rounds_nothing(scale: float, factor: float) -> None:
    x = torch.empty(1, 1, 64, 64, dtype=torch.bfloat16, device="meta")
    bias = torch.empty(1, 1, 64, 64, dtype=torch.bfloat16, device="meta")
    assert shortcuts.q_factor(Problem.of(Tensors(x, x, x, bias), Options(scale=scale))) == factor
    halves = Tensors(*(y.to(torch.float16) for y in (x, x, x, bias)))
    assert shortcuts.q_factor(Problem.of(halves, Options(scale=scale))) == 1


@pytest.mark.parametrize("sm", GPUS)
@pytest.mark.parametrize("dim", [16, 32, 64])
def test_blocks_of_queries_are_not_smaller_than_what_dk_and_dv_take_at_a_time(sm: int, dim: int) -> None:
    """Whether its LSE are in powers of two, dQ's kernel says of each block: see `queries.by_block`."""
    x = torch.empty(1, 1, 2048, dim, dtype=torch.bfloat16, device="meta")
    problem = Problem.of(Tensors(x, x, x, BIAS["bias"]), Options(scale=0.25))
    assert shortcuts.is_fused_by_block(problem)
    for memory in (48 * 1024, 64 * 1024, 99 * 1024, GPUS[sm]):
        gpu = config.Gpu(divmod(sm, 10), memory)
        for in_registers in itertools.product((False, True), repeat=2):
            query = config.choose(problem, "query", gpu, in_registers[0])
            key_value = config.choose(problem, "key_value", gpu, in_registers[1])
            assert query.q_tile % key_value.q_tile == 0, (query, key_value)


def forward(dtype: torch.dtype, dim: int, options: Options, folder: Path, sm: int = 90, **extras: Any) -> Machine:
    return machine_of(compile_for(sm, next(kernels(sm, dtype, dim, options, **extras))), folder)


@pytest.mark.parametrize(
    ("dtype", "options", "exchanges"),
    [
        (torch.bfloat16, Options(softcap=float(shortcuts.BOUNDED_SOFTCAP)), 0),
        (torch.bfloat16, Options(softcap=shortcuts.BOUNDED_SOFTCAP + 1.0), 0),
        (torch.float16, Options(softcap=20.0), 0),
        (torch.float16, Options(softcap=20.0, hi=0), 4),
        (torch.bfloat16, Options(), 4),
    ],
    ids=str,
)
def test_maxima_and_not_sums_are_what_threads_of_a_row_exchange(
    dtype: torch.dtype, options: Options, exchanges: int, tmp_path: Path
) -> None:
    full, *_ = forward(dtype, 64, options, tmp_path).loops()
    assert sum("SHFL" in i for i in full) == exchanges


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_small_scores_with_softcap_take_one_special_function_each(dtype: torch.dtype, tmp_path: Path) -> None:
    """Forward, dQ, dK and dV at D 64; of a thread's scores those that are not small take more behind a branch."""
    for kernel in kernels(90, dtype, 64, Options(softcap=20.0)):
        if kernel.name in ("forward_kernel", "query_kernel", "key_value_kernel"):
            full, *_ = machine_of(compile_for(90, kernel), tmp_path).loops()
            vote = next(at for at, i in enumerate(full) if "VOTE.ANY" in i)
            near = next(at for at, i in enumerate(full) if at > vote + 1 and "BRA" in i)
            special = ["MUFU" in i for i in full]
            tiles = kernel.prepared.tiles
            scores = tiles.q_tile * tiles.k_tile // (32 * tiles.num_warps)
            far = next(at for at, i in enumerate(full) if at > near and "F2FP" in i)
            assert sum(special[vote:near]) == 0, kernel
            assert near - vote < scores * 5 + 20, kernel
            assert sum(special[near:far]) > scores, kernel
            limit = scores * 3 if kernel.name != "forward_kernel" else scores * 2 + 4
            assert sum(special) == limit, kernel


def test_products_with_softcap_are_looked_at_as_they_are(tmp_path: Path) -> None:
    """As queries, or keys, have been multiplied by a power of two."""
    for kernel in kernels(90, torch.bfloat16, 64, Options(softcap=20.0)):
        if kernel.name in ("forward_kernel", "query_kernel", "key_value_kernel"):
            full, *_ = machine_of(compile_for(90, kernel), tmp_path).loops()
            product = next(at for at, i in enumerate(full) if "WARPGROUP.DEPBAR" in i)
            vote = next(at for at, i in enumerate(full) if "VOTE.ANY" in i)
            assert not any("FMUL" in i for i in full[product:vote]), kernel


@pytest.mark.parametrize("dim", [64, 128])
def test_lse_and_delta_are_copied_once_and_used_as_they_are(dim: int, tmp_path: Path) -> None:
    """In dK and dV: one copy of a thread for both, and nothing that looks for queries that saw nothing."""
    for kernel in kernels(90, torch.bfloat16, dim):
        if kernel.name == "key_value_kernel":
            full, *_ = machine_of(compile_for(90, kernel), tmp_path).loops()
            tiles = kernel.prepared.tiles
            of_queries = tiles.q_tile * 2 * dim * 2 // 16 // (32 * tiles.num_warps)
            assert sum("LDGSTS" in i for i in full) == of_queries + 1, kernel
            assert not any("FSETP" in i or "FSEL" in i for i in full), kernel


@pytest.mark.parametrize(
    ("dim", "softcap", "with_bias", "in_backward"),
    [(64, 20.0, False, True), (128, 20.0, False, True), (64, None, True, True), (256, 20.0, False, False)],
)
def test_where_operands_are_scaled(dim: int, softcap: float | None, with_bias: bool, in_backward: bool) -> None:
    """At D 256 dV has a kernel of its own, in which keys have no way to take."""
    x = torch.empty(1, 1, 64, dim, dtype=torch.bfloat16, device="meta")
    bias = torch.empty(1, 1, 64, 64, dtype=torch.bfloat16, device="meta") if with_bias else None
    problem = Problem.of(Tensors(x, x, x, bias), Options(softcap=softcap))
    assert shortcuts.is_scaled(problem, backward=False)
    assert shortcuts.is_scaled(problem, backward=True) is in_backward


@pytest.mark.parametrize("sm", GPUS)
@pytest.mark.parametrize("softcap", [20.0, 50.0])
def test_softcap_compiles(sm: int, softcap: float, tmp_path: Path) -> None:
    for kernel in kernels(sm, torch.bfloat16, 64, Options(softcap=softcap)):
        compiled = compile_for(sm, kernel)
        assert compiled.metadata.shared <= kernel.shared_bound <= GPUS[sm], kernel
        if not kernel.name.startswith("repair"):
            machine = machine_of(compiled, tmp_path)
            assert machine.reads_of_nothing() == [], kernel
            assert machine.spills_in_loops() == 0 or sm != 90 or not TILES_ARE_FOR_THIS_TRITON, kernel


def test_tensor_cores_start_from_a_bias(tmp_path: Path) -> None:
    """At D 64, where the scale is a power of two; and a weight's exponent is one multiply-add.

    Two others belong to each sum of two rows, and none to what it is multiplied with: that is of rounded products.
    """
    full, *_ = forward(torch.bfloat16, 64, Options(), tmp_path, **BIAS).loops()
    product = next(i for i in full if "HGMMA" in i)
    assert ", RZ," not in product
    assert sum("FFMA" in i for i in full) == 32 + 2 * 2
    unscaled, *_ = forward(torch.bfloat16, 64, Options(scale=0.1), tmp_path, **BIAS).loops()
    assert sum("FFMA" in i for i in unscaled) >= 32 + 2 * 2 + 32


def test_a_step_with_a_bias_does_not_look_for_rows_that_are_far(tmp_path: Path) -> None:
    """Nor make an address anew; 350 instructions before, 1.01 to 1.04 of the time on an H200."""
    full, *_ = forward(torch.bfloat16, 64, Options(), tmp_path, **BIAS).loops()
    assert not any("FSETP" in i or "FSEL" in i for i in full)
    assert len(full) < 335 or not TILES_ARE_FOR_THIS_TRITON


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dim", "expected"), [(64, True), (128, False)])
def test_steps_with_a_bias_hand_on_units_up_to_64(dim: int, expected: bool, dtype: torch.dtype) -> None:
    x = torch.empty(1, 1, 64, dim, dtype=dtype, device="meta")
    bias = torch.empty(1, 1, 64, 64, dtype=dtype, device="meta")
    assert shortcuts.carries_units(Problem.of(Tensors(x, x, x, bias), Options())) is expected
    assert not shortcuts.carries_units(Problem.of(Tensors(x, x, x), Options()))


@pytest.mark.parametrize(
    ("dim", "with_bias", "expected"), [(128, False, True), (128, True, False), (256, False, False)]
)
def test_threads_sum_what_they_have_where_registers_allow(dim: int, with_bias: bool, expected: bool) -> None:
    x = torch.empty(1, 1, 64, dim, dtype=torch.bfloat16, device="meta")
    bias = torch.empty(1, 1, 64, 64, dtype=torch.bfloat16, device="meta") if with_bias else None
    assert shortcuts.sums_by_thread(Problem.of(Tensors(x, x, x, bias), Options())) is expected
