"""The kernels of the Hopper backward compile without a GPU, and the machine code is what the configurations ask for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ioattn.backends.gluon import backward_config as table
from ioattn.backends.gluon.config import SHARED_BYTES
from ioattn.problem import Problem

pytest.importorskip("triton", minversion="3.6", reason="Triton is not installed")

from barriers import abandoned_barriers
from sass import unwritten_reads
from test_gluon_compile import CAUSAL, FEATURES, Machine, disassembled, problem

from ioattn.backends.gluon import backward_launch as launch
from ioattn.backends.gluon.kernels.names import HAS_REGISTERS
from ioattn.backends.gluon.repair_launch import compile_repair

DIMS = [64, 128, 256]
DETERMINISTIC = {"deterministic": True}


def per_head(wanted: Problem) -> str | None:
    return "fp32" if wanted.alibi else None


def common_kernel(wanted: Problem) -> tuple[table.BackwardConfig, Any]:
    config = table.choose(wanted)
    return config, launch.compile_backward(config, wanted.dtype, launch.steps_of(wanted), per_head(wanted))


def query_kernel(wanted: Problem) -> tuple[table.QueryConfig, Any]:
    config = table.choose_query(wanted)
    return config, launch.compile_query(config, wanted.dtype, launch.steps_of(wanted), per_head(wanted))


def products_of(config: table.BackwardConfig) -> int:
    """Matrix instructions of a step of one group: each takes 64 rows and 16 columns of the left operand."""
    scores = config.dim // 16
    if config.wide:
        return scores + 2 * config.rows // 16
    parts = 1 if config.transposed else config.rows // 64
    dq = parts * config.keys // 16 if config.sums_dq else 0
    return 2 * scores + 2 * config.rows // 16 + dq


def multiplying_loops(code: Machine) -> list[tuple[str, ...]]:
    return [body for body in code.loops() if any("HGMMA" in line for line in body)]


def products_in(body: tuple[str, ...]) -> int:
    return sum("HGMMA" in line for line in body)


def stores_spilled(body: tuple[str, ...]) -> list[str]:
    return [line for line in body if re.search(r"\bSTL\b", line)]


def has_mask(body: tuple[str, ...]) -> bool:
    return sum("FSEL" in line for line in body) > 8


@pytest.mark.parametrize("extra", [{}, DETERMINISTIC], ids=["default", "deterministic"])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dim", DIMS)
def test_machine_code(dim: int, feature: str, extra: dict[str, Any], tmp_path: Path) -> None:
    config, kernel = common_kernel(problem(dim, dim, **FEATURES[feature], **extra))
    assert kernel.metadata.shared <= SHARED_BYTES
    # The first role has more registers before the others are there.
    assert len(re.findall(rf"setmaxnreg.\w+.sync.aligned.u32\s+{config.registers};", kernel.asm["ptx"])) == 2
    code = disassembled(kernel, tmp_path)
    assert code.count("UTMALDG") >= 6, "K, V, Q, dO, LSE and delta are not all loaded by the copy engine"
    assert code.count("UTMASTG") >= 4
    assert bool(code.count("UTMAREDG")) == config.sums_dq
    loops = multiplying_loops(code)
    assert len(loops) >= 2
    for body in loops:
        assert products_in(body) == products_of(config)
        assert sum("WARPGROUP.DEPBAR" in line for line in body) <= 5, "the products are not asynchronous"
    assert not any("HMMA." in line.replace("HGMMA", "") for line in code.lines)
    assert not unwritten_reads(code.lines)
    assert not abandoned_barriers(kernel.asm["ttgir"])


@pytest.mark.parametrize("extra", [{}, DETERMINISTIC], ids=["default", "deterministic"])
@pytest.mark.parametrize("feature", ["full", "full-odd", "causal", "top-left", "window", "left", "short"])
@pytest.mark.parametrize("dim", DIMS)
def test_the_loops_over_whole_blocks_spill_nothing(
    dim: int, feature: str, extra: dict[str, Any], tmp_path: Path
) -> None:
    """A value that never changes may wait in memory, which costs a load; nothing may be written there."""
    _, kernel = common_kernel(problem(dim, dim, **FEATURES[feature], **extra))
    whole = [body for body in multiplying_loops(disassembled(kernel, tmp_path)) if not has_mask(body)]
    assert whole
    for body in whole:
        assert not stores_spilled(body)


@pytest.mark.parametrize("feature", ["full", "causal", "softcap-alibi", "packed"])
@pytest.mark.parametrize("dim", [64, 128])
def test_dq_has_keys_in_registers_where_it_is_transposed_at_d128(dim: int, feature: str, tmp_path: Path) -> None:
    """Left operands from registers: P and dS, and half of K^T."""
    config, kernel = common_kernel(problem(dim, dim, **FEATURES[feature]))
    assert config.transposed == (feature in ("full", "causal") if dim == 128 else feature != "full")
    assert config.held_keys == (64 if dim == 128 and config.transposed else 0)
    held = config.held_keys // 16 if HAS_REGISTERS else 0
    for body in multiplying_loops(disassembled(kernel, tmp_path)):
        from_registers = sum(re.search(r"HGMMA\S+ R\d+, R\d+, gdesc", line) is not None for line in body)
        assert from_registers == 2 * config.rows // 16 + held


@pytest.mark.parametrize("feature", ["causal", "window", "left", "packed-window-alibi-sinks", "softcap-alibi"])
def test_groups_let_pass_what_only_the_other_one_sees(feature: str, tmp_path: Path) -> None:
    """Before and after its own blocks a group makes dQ alone."""
    config, kernel = common_kernel(problem(128, 128, **FEATURES[feature], heads=4, kv_heads=4))
    assert config.skips
    assert not table.choose(problem(128, 128, **FEATURES[feature], **DETERMINISTIC, heads=4, kv_heads=4)).skips
    loops = multiplying_loops(disassembled(kernel, tmp_path))
    passing = [body for body in loops if products_in(body) != products_of(config)]
    # Nothing comes before the blocks that a group sees where no key is hidden from the first queries.
    assert [products_in(body) for body in passing] == [config.keys // 16] * (4 if config.has_hi else 2)
    for body in loops:
        assert any("MUFU.EX2" in line for line in body) == (body not in passing)
        if feature in ("causal", "window", "left") and not has_mask(body):
            assert not stores_spilled(body)


@pytest.mark.parametrize("feature", FEATURES)
def test_machine_code_of_queries_alone(feature: str, tmp_path: Path) -> None:
    config, kernel = query_kernel(problem(256, 256, **FEATURES[feature]))
    assert kernel.metadata.shared <= SHARED_BYTES
    code = disassembled(kernel, tmp_path)
    assert not code.count("UTMAREDG")
    assert not unwritten_reads(code.lines)
    assert not abandoned_barriers(kernel.asm["ttgir"])
    loops = multiplying_loops(code)
    assert len(loops) >= config.groups
    for body in loops:
        assert sum("HGMMA" in line for line in body) == 2 * config.dim // 16 + config.keys // 16
        assert sum("WARPGROUP.DEPBAR" in line for line in body) == 3, "the products are not asynchronous"


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dim", DIMS)
def test_the_passes_around_compile_and_copy_by_16_bytes(dim: int, feature: str) -> None:
    wanted = problem(dim, dim, **FEATURES[feature])
    config = table.choose(wanted)
    before = launch.compile_prepare(config, wanted.dtype, "fp32", "fp32" if wanted.sinks else None)
    kernels = [before, *([launch.compile_convert(config, wanted.dtype)] if config.sums_dq else [])]
    for kernel in kernels:
        assert not re.search(r"(ld|st)\.global\.b16\b", kernel.asm["ptx"])
    if config.cleans:
        assert len(compile_repair(config, wanted.dtype, wanted.terms, per_head(wanted))) == 2


@pytest.mark.parametrize(
    "features",
    [{"heads": 16, "kv_heads": 16}, {"heads": 64, "kv_heads": 8}, {"band": CAUSAL}],
    ids=["full", "grouped-full", "grouped-causal"],
)
def test_parts_of_walks_pass_sums_on_by_vectors(features: dict[str, Any], tmp_path: Path) -> None:
    config, kernel = common_kernel(problem(128, 128, **({"len_q": 8192, "len_k": 8192} | features)))
    assert config.parts
    code = disassembled(kernel, tmp_path)
    assert not re.search(r"ld\.global\.b32", kernel.asm["ptx"]), "sums of parts are not read by vectors"
    for body in multiplying_loops(code):
        assert not stores_spilled(body)


@pytest.mark.parametrize("features", [{}, {"band": CAUSAL}, {"packed": True}], ids=["full", "causal", "packed"])
@pytest.mark.parametrize("dim", [64, 128])
def test_dq_in_order_is_counted_once_it_is_in_memory(dim: int, features: dict[str, Any]) -> None:
    _, kernel = common_kernel(problem(dim, dim, **features, **DETERMINISTIC))
    ptx = re.sub(r"\t\.loc.*\n", "", kernel.asm["ptx"])
    counts = re.findall(r"wait_group 0;\s+fence\.proxy\.async;\s+bar\.warp\.sync \S+;[^}]*red\.release\.gpu", ptx)
    assert len(counts) == len(re.findall(r"red\.release\.gpu", ptx)) >= 2
    assert len(re.findall(r"ld\.acquire\.gpu[^}]*bar\.warp\.sync \S+;\s+fence\.proxy\.async;", ptx)) == len(counts)


@pytest.mark.parametrize("heads", [16, 64, None], ids=["alone", "grouped", "grouped-causal"])
@pytest.mark.parametrize("length", [1024, 4096, 8192, 16384])
@pytest.mark.parametrize("batch", [1, 2, 7])
def test_cut_walks_are_those_that_fill_no_round(batch: int, length: int, heads: int | None) -> None:
    features = {"heads": heads, "kv_heads": 16} if heads else {"band": CAUSAL}
    wanted = problem(128, 128, batch=batch, len_q=length, len_k=length, **features)
    whole, together, parts = table.split(wanted)
    tiles = table.key_tiles(wanted)
    assert 0 <= whole <= tiles
    assert together >= 1
    assert 1 <= parts <= table.MOST_PARTS
    if parts > 1 and heads:
        rounds = -(-((tiles - whole) * parts) // table.PROCESSORS)
        assert tiles - whole < table.PROCESSORS
        assert rounds < parts, "a round of parts takes as long as one of whole tiles"
    if length < table.LONG:
        assert parts == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(("dim", "dim_v"), [(192, 128), (64, 256), (40, 72), (256, 64)])
def test_other_dimensions_compile(dim: int, dim_v: int, dtype: torch.dtype) -> None:
    wanted = problem(dim, dim_v, dtype, **FEATURES["causal"])
    config, kernel = common_kernel(wanted)
    assert config.dim >= max(dim, dim_v)
    assert kernel.metadata.shared <= SHARED_BYTES
    if not config.sums_dq:
        assert query_kernel(wanted)[1].metadata.shared <= SHARED_BYTES


@pytest.mark.parametrize("length", [128, 1000, 8192, 131072])
@pytest.mark.parametrize("heads", [1, 7, 16, 40])
def test_sections_cover_all_heads(heads: int, length: int) -> None:
    sizes = {"batch": 1, "heads": heads, "kv_heads": heads, "len_q": length, "len_k": length}
    assert 1 <= table.section(problem(128, 128, **sizes)) <= heads
