"""The Hopper kernels compile without a GPU, and the machine code is what the configurations ask for."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from barriers import abandoned_barriers
from sass import unwritten_reads

from ioattn.backends.gluon import config as table
from ioattn.masks import Band
from ioattn.problem import Problem

triton = pytest.importorskip("triton", minversion="3.6", reason="Triton is not installed")

from ioattn.backends.gluon import launch, one_code  # noqa: E402

CAUSAL, WINDOW = Band(hi=0), Band(lo=-1024, hi=0)
FEATURES = {
    "full": {},
    "full-odd": {"len_k": 1000},
    "causal": {"band": CAUSAL},
    "causal-2048": {"band": CAUSAL, "len_q": 2048, "len_k": 2048},
    "top-left": {"band": CAUSAL, "align": "top-left"},
    "window": {"band": WINDOW},
    "left": {"band": Band(lo=-64)},
    "packed": {"packed": True},
    "packed-window-alibi-sinks": {"packed": True, "band": WINDOW, "alibi": True, "sinks": True},
    "softcap-alibi": {"band": CAUSAL, "softcap": 30.0, "alibi": True},
    "negative-scale": {"scale": -0.1},
    "short": {"len_q": 256, "len_k": 256, "band": CAUSAL},
    "short-full": {"len_q": 512, "len_k": 512},
    "short-packed": {"len_q": 512, "len_k": 512, "packed": True},
    "short-features": {"len_q": 1000, "len_k": 1000, "band": WINDOW, "softcap": 30.0, "alibi": True, "sinks": True},
}


def problem(dim: int, dim_v: int, dtype: torch.dtype = torch.bfloat16, **features: Any) -> Problem:
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "len_q": 4096, "len_k": 4096, "scale": dim**-0.5} | features
    return Problem(dim=dim, dim_v=dim_v, dtype=dtype, device=torch.device("cuda", 0), **sizes)


def compiled(wanted: Problem) -> tuple[table.Config, Any]:
    config = table.choose(wanted)
    per_head = ("fp32" if wanted.alibi else None, "bf16" if wanted.sinks else None)
    return config, launch.compile_forward(config, wanted.dtype, launch.formula_of(wanted), *per_head)


@dataclass(frozen=True)
class Machine:
    """Disassembly of a kernel, one instruction per line."""

    lines: tuple[str, ...]

    def loops(self) -> list[tuple[str, ...]]:
        """The bodies of backward branches that hold no other such branch."""
        address = {int(found[1], 16): at for at, line in enumerate(self.lines) if (found := _ADDRESS.match(line))}
        spans = []
        for at, line in enumerate(self.lines):
            target = re.search(r"\bBRA (0x[0-9a-f]+)", line)
            if target and address.get(int(target[1], 16), at) < at:
                spans.append((address[int(target[1], 16)], at))
        inner = [s for s in spans if not any(s != t and s[0] <= t[0] and t[1] <= s[1] for t in spans)]
        return [self.lines[first : last + 1] for first, last in inner]

    def pipelines(self) -> list[tuple[str, ...]]:
        """The loops over keys: they multiply, and they exponentiate."""
        both = ("HGMMA", "MUFU.EX2")
        return [body for body in self.loops() if all(any(op in line for line in body) for op in both)]

    def count(self, operation: str) -> int:
        return sum(operation in line for line in self.lines)


_ADDRESS = re.compile(r"\s+/\*([0-9a-f]{4,})\*/")


def disassembled(kernel: Any, folder: Path) -> Machine:
    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    tool = str(bundled) if bundled.exists() else shutil.which("cuobjdump")
    if tool is None:
        pytest.skip("no cuobjdump to disassemble with")
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    text = subprocess.run([tool, "--dump-sass", str(cubin)], check=True, capture_output=True, text=True).stdout
    return Machine(tuple(line for line in text.splitlines() if _ADDRESS.match(line)))


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_machine_code(dim: int, feature: str, tmp_path: Path) -> None:
    config, kernel = compiled(problem(dim, dim, **FEATURES[feature]))
    # Each block takes 1 KiB more than it asks for.
    assert config.beside * (kernel.metadata.shared + 1024) <= table.SHARED_BYTES + 1024
    if config.start_registers is not None:
        threads = 128 * (config.groups + 1)
        assert f".maxnreg {config.start_registers}" in kernel.asm["ptx"]
        assert config.beside * threads * config.start_registers <= table.REGISTERS
    raises = len(re.findall(rf"setmaxnreg.inc.sync.aligned.u32\s+{config.registers};", kernel.asm["ptx"]))
    # Before and after it loads, the loader has what the others leave: of 136 and 24 that is 136 again.
    assert raises == config.groups + (2 if config.registers == 136 else 0)
    code = disassembled(kernel, tmp_path)
    assert code.count("UTMALDG") >= config.groups + 2, "Q, K and V are not all loaded by the copy engine"
    assert code.count("UTMASTG") == config.out_parts, "each group has machine code of its own"
    loops = code.pipelines()
    assert loops
    # Where its warps arrive by themselves a group meets before it may write the output's buffer, when it has, before it
    # reads it again, and, with Triton 3.6, at its end.
    meetings = [line for line in code.lines if "BAR.SYNC" in line and ", 0x80" in line and " 0x0, " not in line]
    if config.by_warp:
        assert len(meetings) - config.out_parts * (2 + config.cleans) in (0, 1)
    for body in loops:
        products = config.dim // 16 + config.keys // 16
        assert sum("HGMMA" in line for line in body) == products
        assert sum("WARPGROUP.DEPBAR" in line for line in body) == 2, "the products are not asynchronous"
        assert any("BAR.SYNC" in line for line in body) != config.by_warp
    assert not any("HMMA." in line.replace("HGMMA", "") for line in code.lines)
    assert unwritten_reads(code.lines) == []
    assert abandoned_barriers(kernel.asm["ttgir"]) == []


@pytest.mark.parametrize("feature", ["full", "full-odd", "causal", "window"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_loops_over_keys_spill_nothing(dim: int, feature: str, tmp_path: Path) -> None:
    _, kernel = compiled(problem(dim, dim, **FEATURES[feature]))
    loops = disassembled(kernel, tmp_path).pipelines()
    masked = [body for body in loops if sum("FSEL" in line for line in body) > 8]
    for body in loops:
        if body not in masked:
            assert not [line for line in body if re.search(r"\b(LDL|STL)\b", line)]


@pytest.mark.parametrize("feature", ["full", "causal", "causal-2048", "short"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_what_a_step_compares(dim: int, feature: str, tmp_path: Path) -> None:
    """Row maxima only where they may be -inf, and places in rings not where masks find them."""
    config, kernel = compiled(problem(dim, dim, **FEATURES[feature]))
    unmasked = min(disassembled(kernel, tmp_path).pipelines(), key=len)
    assert any("FSEL" in line for line in unmasked) != config.finite_max
    assert not (config.place_masks and any("USEL" in line for line in unmasked))


@pytest.mark.parametrize(
    ("dim", "feature"),
    [(128, "causal"), (128, "causal-2048"), (64, "causal"), (128, "short"), (128, "full"), (128, "window")],
)
def test_half_of_a_diagonal_block(dim: int, feature: str, tmp_path: Path) -> None:
    """Products with 64 of 128 keys, between the loops; loops over keys have whole blocks only."""
    config, kernel = compiled(problem(dim, dim, **FEATURES[feature]))
    code = disassembled(kernel, tmp_path)
    assert config.halves == feature.startswith("causal")
    halves = [line for line in code.lines if "HGMMA.64x64x16" in line and dim == 128 and config.keys == 128]
    assert len(halves) == (dim // 16 if config.halves and dim == 128 else 0)
    assert not any("HGMMA.64x64x16" in line for body in code.pipelines() for line in body if halves)


@pytest.mark.parametrize("feature", ["full", "causal", "short", "window"])
def test_sums_that_do_not_change_are_not_multiplied(feature: str, tmp_path: Path) -> None:
    config, kernel = compiled(problem(128, 128, **FEATURES[feature]))
    step = min(disassembled(kernel, tmp_path).pipelines(), key=len)
    predicated = sum(re.search(r"@!?P\d FMUL", line) is not None for line in step)
    assert predicated == (64 if config.scales_changed else 0)


@pytest.mark.parametrize("feature", ["full", "full-odd", "short"])
def test_two_tiles_of_queries_have_barriers_of_their_own(feature: str) -> None:
    config, kernel = compiled(problem(128, 128, **FEATURES[feature]))
    assert config.query_stages == 2
    assert kernel.metadata.shared <= table.SHARED_BYTES
    queries = 2 * config.groups
    assert kernel.asm["ttgir"].count(f"!ttg.memdesc<{queries}x1x1x{table.GROUP_ROWS}x128xbf16") > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(("dim", "dim_v"), [(192, 128), (64, 256), (40, 72), (256, 64)])
def test_other_dimensions_compile(dim: int, dim_v: int, dtype: torch.dtype) -> None:
    config, kernel = compiled(problem(dim, dim_v, dtype, band=CAUSAL))
    assert config.dim >= dim
    assert config.dim_v >= dim_v
    assert kernel.metadata.shared <= table.SHARED_BYTES


def test_code_that_is_not_as_expected_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another Triton, say: then each group has a copy of the code and its own barrier, and the user is told."""

    def refuse(*_: object) -> str:
        raise one_code.UnfamiliarCodeError("new")

    monkeypatch.setattr(one_code, "one_code", refuse)
    wanted = problem(128, 128, band=CAUSAL)
    config = table.choose(wanted)
    assert config.by_warp
    changed = replace(config, code=-1)  # not yet in Triton's cache
    with pytest.warns(UserWarning, match="copy of the code.*new"):
        kernel = launch.compile_forward(changed, wanted.dtype, launch.formula_of(wanted), None, None)
    ptx = kernel.asm["ptx"]
    assert "%elected" not in ptx
    assert all(f"bar.sync \t{barrier}, 128;" in ptx for barrier in (2, 3))


def test_reads_of_unwritten_registers_are_found() -> None:
    """A descriptor whose half is computed in a block that a branch jumps over; seen in the machine code of a kernel."""
    lines = [
        "/*0000*/ R2UR UR40, R3 ;",
        "/*0010*/ @!P0 BRA 0x40 ;",
        "/*0020*/ UIADD3 UR20, UP0, UR40, 0x2, URZ ;",
        "/*0030*/ UIADD3.X UR21, URZ, 0x40000040, URZ, UP0, !UPT ;",
        "/*0040*/ UIADD3 UR32, UP0, UR20, 0x2, URZ ;",
        "/*0050*/ @P1 BRA 0x20 ;",
        "/*0060*/ EXIT ;",
    ]
    assert [op.address for op in unwritten_reads(lines)] == [0x40]
    lines[1] = "/*0010*/ NOP ;"
    assert unwritten_reads(lines) == []


def test_barriers_that_nobody_waits_for_are_found() -> None:
    code = """
    %bars = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64>
    %first = ttg.memdesc_index %bars[%c0] : !ttg.memdesc<2x1xi64> -> !ttg.memdesc<1xi64>
    ttng.init_barrier %first, 1 : !ttg.memdesc<1xi64>
    %bars_1 = ttg.local_alloc : () -> !ttg.memdesc<1x1xi64>
    %second = ttg.memdesc_index %bars_1[%c0] : !ttg.memdesc<1x1xi64> -> !ttg.memdesc<1xi64>
    ttng.init_barrier %second, 1 : !ttg.memdesc<1xi64>
    ttg.warp_specialize(%bars)
    default { ttng.wait_barrier %second, %phase : !ttg.memdesc<1xi64> }
    """
    assert abandoned_barriers(code) == []
    assert abandoned_barriers(code.replace("wait_barrier %second", "wait_barrier %third")) == ["%bars_1"]
    assert abandoned_barriers(code.replace("(%bars)", "(%bars_12)")) == ["%bars"]


def test_formulas_do_not_share_a_kernel() -> None:
    """Two formulas of the same shape must not meet in the compiler's cache."""
    kernels = [compiled(problem(64, 64, **f))[1] for f in ({"softcap": 8.0}, {"scale": -1.0})]
    assert kernels[0].hash != kernels[1].hash


@pytest.mark.parametrize("length", [128, 1000, 8192, 131072])
@pytest.mark.parametrize("heads", [1, 7, 16, 40])
def test_sections_cover_all_heads_evenly(heads: int, length: int) -> None:
    wanted = replace(problem(128, 128, band=CAUSAL), batch=1, heads=heads, kv_heads=heads, len_k=length, len_q=length)
    size = table.section(wanted)
    assert 1 <= size <= heads
    assert size == 1 or size * length * 512 <= table.L2_SECTION_BYTES
    assert size <= table.SECTION_SHARE


def test_short_sections_leave_room_for_shorter_rows() -> None:
    """A section's longest rows must not take all programs: they fetch keys, and rows that are shorter find them."""
    sizes = {"batch": 32, "heads": 16, "kv_heads": 16, "len_q": 512, "len_k": 512}
    causal, full = (table.section(problem(128, 128, **sizes, band=band)) for band in (CAUSAL, Band()))
    assert causal <= table.SECTION_SHARE < full
    assert table.section(problem(128, 128, **sizes | {"kv_heads": 4}, band=CAUSAL)) > 2 * causal
    assert table.section(problem(64, 64, **sizes, band=CAUSAL)) > 2 * causal


@pytest.mark.parametrize(
    "by", [1, 2, 3, 7, 127, 448, 641, 2**16 - 1, 2**16 + 1, 2**30 - 1, 2**30, 2**30 + 1, 2**31 - 1]
)
def test_divisors_are_exact(by: int) -> None:
    most = 2**31 - 1
    _, factor, shift = table.divisor(by)
    assert -(2**31) <= factor < 2**31
    for n in (0, 1, by - 1, by, by + 1, 2 * by - 1, most // by * by - 1, most // by * by, most - 1, most):
        if n <= most:
            assert (2 * n * (factor % 2**32) >> 32) >> shift == n // by
