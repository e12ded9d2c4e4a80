"""Nsight Compute's output is read with its units, from recorded tables; and what goes wrong is said."""

from __future__ import annotations

import subprocess

import pytest
import torch

from ioattn.bench import workload
from ioattn.cases import problem_of
from ioattn.io import measure
from ioattn.io.measure import Call, Counters, MeasureError, explain, parse, text
from ioattn.io.reference import check
from ioattn.io.tiles import Blocks
from ioattn.io.traffic import compulsory

# The form of `ncu --csv --page raw`: the workload's lines, names, units, a row per kernel.
NAMES = (
    '"ID","Process ID","Process Name","Kernel Name","Context","Device","CC","dram__bytes_read.sum",'
    '"dram__bytes_write.sum","lts__t_sectors_op_read.sum","lts__t_sectors_op_red.sum","lts__t_sectors_op_write.sum"'
)
KERNELS = (
    '"0","1234","python3.12","gemm(half *, float, int)","1","0","9.0","{0}","{1}","3,145,728","0","1,048,576"',
    '"1","1234","python3.12","softmax","1","0","9.0","{0}","{1}","1048576","64","1048576"',
)


def table(unit: str, sectors: str = "sector", read: str = "33554432", written: str = "1048576") -> list[str]:
    units = f'"","","","","","","","{unit}","{unit}","{sectors}","{sectors}","{sectors}"'
    kernels = [kernel.format(read, written) for kernel in KERNELS]
    return ["==PROF== Connected to process 1234", "warming up", "", NAMES, units, *kernels]


def test_base_units():
    counters = parse(table("byte"))
    assert counters == Counters(
        ("gemm(half *, float, int)", "softmax"), 2 * 33554432, 2 * 1048576, 4194304 * 32, 2097216 * 32
    )
    assert (counters.dram, counters.l2) == (2 * 34603008, (4194304 + 2097216) * 32)


@pytest.mark.parametrize(
    ("unit", "factor"),
    [("byte", 1), ("Kbyte", 10**3), ("Mbyte", 10**6), ("Gbyte", 10**9), ("Kibyte", 2**10), ("bytes", 1)],
)
def test_scaled_units_are_powers_of_1000_unless_they_say_otherwise(unit, factor):
    assert parse(table(unit, read="2.16", written="1,024.5")).dram_read == 2 * round(2.16 * factor)
    assert parse(table(unit, read="2.16", written="1,024.5")).dram_written == 2 * round(1024.5 * factor)


def test_scaled_sectors():
    assert parse(table("byte", "Ksector")).l2_read == 4194304 * 1000 * 32


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (table("bit"), "dram__bytes_read.sum is in 'bit'; it must be in bytes"),
        (table("Xbyte"), "whose prefix 'X' is unknown"),
        (table("byte", "byte"), r"lts__t_sectors_op_read.sum is in 'byte'; it must be in sectors"),
        (table("byte", read="n/a"), "dram__bytes_read.sum is 'n/a'; it must be a number"),
        (table("byte", read="nan"), "it must be finite"),
        (table("byte")[:4], "printed no table of kernels"),
        (table("byte")[:5], "printed no table of kernels"),
        (["==ERROR== something"], "printed no table of kernels"),
        ([*table("byte"), '"2","short"'], "a row of ncu's table has 2 cells; it must have 12"),
        ([line.replace("lts__t_sectors_op_red.sum", "other") for line in table("byte")], "lacks lts__t_sectors_op_red"),
    ],
)
def test_what_cannot_be_read_is_refused(lines, message):
    with pytest.raises(ValueError, match=message):
        parse(lines)


def test_the_command_asks_for_base_units_and_leaves_the_clocks_alone():
    asked = " ".join(measure.command(Call("naive", (1, 1, 4096, 64), "fp16", backward=True)))
    for words in ("--print-units base", "--clock-control none", "--cache-control all", "--profile-from-start off"):
        assert words in asked
    assert "--cache-control none" in " ".join(measure.command(Call("sdpa", (1, 1, 64, 16), "fp16"), warm=True))
    assert asked.endswith("-m ioattn.bench.workload naive 1 1 4096 64 fp16 0 1")


@pytest.mark.parametrize("causal", [False, True])
def test_the_measured_implementations_compute_the_same(causal):
    given = {name: torch.randn(1, 2, 33, 16) for name in ("Q", "K", "V")}
    problem = problem_of((1, 2, 33, 16), "fp32", causal=causal)
    for run in workload.IMPLEMENTATIONS.values():
        out = run(given["Q"], given["K"], given["V"], causal)
        assert all(checked.holds for checked in check(problem, given, {"O": out}))


def test_without_a_gpu_the_reason_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MeasureError, match="torch sees no CUDA GPU here"):
        measure.measure(Call("naive", (1, 1, 64, 16), "fp16"))


def test_without_ncu_the_reason_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(measure.shutil, "which", lambda name: None)
    assert "ncu is not on the PATH" in measure.unusable()


@pytest.mark.parametrize(
    ("output", "code", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", 1, "only administrators read"),
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded", 1, "cannot reach the GPU's counters"),
        ("Traceback\nModuleNotFoundError: torch", 3, "ended with code 3; its last lines:\nTraceback"),
    ],
)
def test_what_ncu_says_is_passed_on(monkeypatch, output, code, message):
    monkeypatch.setattr(measure, "unusable", lambda: None)
    monkeypatch.setattr(
        measure.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, code, stdout=output, stderr="")
    )
    with pytest.raises(MeasureError, match=message):
        measure.measure(Call("sdpa", (1, 1, 64, 16), "fp16"))


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True])
def test_counters_of_the_exercise(backward):
    reason = measure.unusable()
    if reason is not None:
        pytest.skip(reason)
    problem = problem_of((1, 1, 4096, 64))
    direction = "backward" if backward else "forward"
    calls = [Call(name, (1, 1, 4096, 64), "fp16", backward=backward) for name in ("naive", "sdpa")]
    naive, sdpa = map(measure.measure, calls)
    assert len(naive.kernels) >= 3
    # The naive steps move matrices of N x N, the fused ones do not: at both levels, whatever the caches hold.
    assert naive.dram > 10 * sdpa.dram
    assert naive.l2 > 3 * sdpa.l2
    assert sdpa.dram_read < 4 * compulsory(problem, direction)


def test_the_gap_is_explained_by_level():
    # Read by ncu on an H200, one head, N 4096, d 64, FP16: naive 102 MB and 26 MB at DRAM, 355 MB at L2.
    problem, blocks = problem_of((1, 1, 4096, 64)), Blocks(128, 128)
    naive = Counters(("gemm", "softmax", "gemm"), 102 * 10**6, 26 * 10**6, 230 * 10**6, 125 * 10**6)
    flash = Counters(("flash",), 1_600_000, 0, 20_500_000, 500_000)
    dram, l2 = explain(problem, "forward", "naive", naive, blocks)
    assert dram.startswith("DRAM saw 122.1 MiB of the 194 MiB predicted: the L2 caught 37%, re-reads of matrices, and ")
    assert l2.startswith("L2 saw 338.6 MiB, 1.75 of the prediction: ")
    dram, less, l2 = explain(problem, "forward", "fa2", flash, blocks)
    assert dram == "DRAM saw 1.526 MiB of the 33.02 MiB predicted: the L2 caught 95%, re-reads of K and V."
    assert less.startswith("DRAM saw less than the compulsory 2 MiB")
    assert "0.61 of the prediction: larger tiles" in l2
    shown = text(problem, "forward", {"naive": naive, "sdpa": flash}, blocks)
    assert "sdpa" in shown
    assert "fa2 128x128" in shown
