"""Nsight Compute's output is read with its units, from recorded tables; and what goes wrong is said."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ioattn.bench import workload
from ioattn.cases import problem_of
from ioattn.cli.io import app
from ioattn.cli.io.measure import counters
from ioattn.io import measure
from ioattn.io.levels import at_l2, compare, explain, text
from ioattn.io.machine import KNOWN
from ioattn.io.measure import Call, Counters, MeasureError, parse
from ioattn.io.reference import check
from ioattn.io.results import measured_points
from ioattn.io.tiles import Blocks
from ioattn.io.traffic import compulsory, predict

RECORDED = Path(__file__).parent / "recorded"
"""What ncu printed on an H200, the columns that are not read and the host's name left out."""

# The form of `ncu --csv --page raw`: the workload's lines, names, units, a row per kernel.
METRICS = sorted(measure.METRICS.values())
NAMES = ",".join(f'"{name}"' for name in ("ID", "Kernel Name", *METRICS))
UNITS = {"dram": "byte", "gpu_": "ns", "lts_": "sector", "smsp": "inst"}


def table(**units: str) -> list[str]:
    """Two kernels, every counter 1, with the units of `UNITS` but for those given; `number` is another number."""
    number = units.pop("number", "1")
    kinds = [(UNITS | units)[metric[:4]] for metric in METRICS]
    unit_row = ",".join(f'"{cell}"' for cell in ("", "", *kinds))
    cells = ",".join(f'"{number}"' for _ in METRICS)
    kernels = [f'"{i}","{name}",{cells}' for i, name in enumerate(("gemm(half *, float, int)", "softmax"))]
    return ["==PROF== Connected to process 1234", "warming up", "", NAMES, unit_row, *kernels]


def test_base_units():
    counters = parse(table(number="1,024"))
    assert counters.kernels == ("gemm(half *, float, int)", "softmax")
    assert (counters.dram_read, counters.dram_written, counters.nanoseconds) == (2048, 2048, 2048)
    # Sectors of 32 bytes, a warp's store of 128.
    assert (counters.l2_read, counters.l2_written, counters.l2_reduced, counters.spilled) == (*[65536] * 3, 262144)
    assert (counters.dram, counters.l2) == (4096, 3 * 65536)


@pytest.mark.parametrize(
    ("unit", "factor"),
    [("byte", 1), ("Kbyte", 10**3), ("Mbyte", 10**6), ("Gbyte", 10**9), ("Kibyte", 2**10), ("bytes", 1)],
)
def test_scaled_units_are_powers_of_1000_unless_they_say_otherwise(unit, factor):
    assert parse(table(dram=unit, number="2.16")).dram_read == 2 * round(2.16 * factor)
    assert parse(table(dram=unit, number="1,024.5")).dram_written == 2 * round(1024.5 * factor)


@pytest.mark.parametrize(
    ("unit", "factor"), [("ns", 1), ("nsecond", 1), ("us", 1000), ("usecond", 1000), ("ms", 10**6), ("s", 10**9)]
)
def test_times_have_units_too(unit, factor):
    assert parse(table(gpu_=unit, number="2.5")).nanoseconds == 2 * round(2.5 * factor)


def test_the_workloads_line_names_the_backend():
    assert parse(["ioattn runs on backend gluon", *table()]).backend == "gluon"
    assert parse(table()).backend == ""


def test_scaled_sectors():
    assert parse(table(lts_="Ksector")).l2_read == 2 * 1000 * 32


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (table(dram="bit"), "dram__bytes_read.sum is in 'bit'; it must be in bytes"),
        (table(dram="Xbyte"), "whose prefix 'X' is unknown"),
        (table(lts_="byte"), r"lts__t_sectors_srcunit_tex_op_read.sum is in 'byte'; it must be in sectors"),
        (table(gpu_="cycle"), r"gpu__time_duration.sum is in 'cycle'; it must be in ns, us, ms or s"),
        (table(gpu_=""), r"gpu__time_duration.sum is in ''; it must be in ns"),
        (table(number="n/a"), "dram__bytes_read.sum is 'n/a'; it must be a number"),
        (table(number="nan"), "it must be finite"),
        (table(number="-1"), "it must be finite and not negative"),
        (table()[:4], "printed no table of kernels"),
        (table()[:5], "printed no table of kernels"),
        (["==ERROR== something"], "printed no table of kernels"),
        ([*table(), '"2","short"'], r"a row of ncu's table has 2 cells; it must have \d+"),
        ([line.replace("op_red.sum", "other") for line in table()], "lacks lts__t_sectors_srcunit_tex_op_red"),
    ],
)
def test_what_cannot_be_read_is_refused(lines, message):
    with pytest.raises(ValueError, match=message):
        parse(lines)


def test_torchs_steps_are_as_predicted_on_an_h200():
    problem = problem_of((1, 1, 4096, 64))
    found = parse((RECORDED / "ncu-h200-naive-forward.csv").read_text().splitlines())
    (it,) = compare(problem, "forward", {"naive": found}, Blocks(128, 128))
    assert it.schedule == "fused-softmax"
    # The steps also scale Q in a kernel of its own, which reads and writes it once.
    scaled = 4096 * 64 * 2
    assert found.l2_written == it.predicted.written + scaled
    assert found.dram_read == pytest.approx(it.predicted.read + scaled, rel=0.001)
    assert found.l2_read > it.predicted.read
    dram, l2_read, l2_written = explain(it, compulsory(problem))
    assert dram.startswith("DRAM read 66.06 MiB, 1.01 of the prediction, and wrote 21.41 MiB of 64.5 MiB: 43.09 MiB ")
    assert l2_read.startswith("L2: SMs read 107.2 MiB, 1.64 of the prediction: products read their thin operands again")
    assert l2_written == "L2: SMs wrote or added 65 MiB, 1.01 of the prediction."


def test_a_backward_with_spilled_registers_is_told_by_its_stores():
    problem = problem_of((1, 16, 8192, 128), "bf16", causal=True)
    found = parse((RECORDED / "ncu-h200-triton-backward.csv").read_text().splitlines())
    (it,) = compare(problem, "backward", {"ioattn": found}, Blocks(128, 128))
    assert it.schedule == "two-pass"
    # dQ, dK, dV and delta, once; dK or dV once more by the kernel that repairs what a NaN has spoilt.
    stored = found.l2_written - found.spilled
    assert it.predicted.written <= stored <= it.predicted.written + 32 * 2**20
    assert "1.629 GiB of it are registers that did not fit." in explain(it, 0)[-1]


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


def test_additions_cross_from_the_sms_once():
    problem, blocks = problem_of((1, 1, 4096, 64)), Blocks(128, 128)
    traffic = predict(problem, "fa2", "backward", blocks)
    adds = 4096 // 128 * 4096 * 64 * 4
    assert at_l2(traffic) == (traffic.read - adds, traffic.written - adds, adds)
    assert at_l2(predict(problem, "fa2", "forward", blocks)).reduced == 0


def test_the_gap_is_explained_by_level():
    problem, blocks = problem_of((1, 1, 4096, 64)), Blocks(128, 128)
    flash = Counters(("flash",), 1_600_000, 0, 20_500_000, 540_672, nanoseconds=12_300)
    masked = Counters(("mul", "gemm", "fill", "triu", "softmax", "gemm"), 200 * 2**20, 60 * 2**20, 10**9, 10**8)
    compared = compare(problem, "forward", {"naive": masked, "sdpa": flash}, blocks)
    assert explain(compared[0], 2**21)[0].endswith("these kernels make more passes than the schedule.")
    dram, less, l2, stored = explain(compared[1], 2**21)
    assert dram == "DRAM saw 1.526 MiB of 33.02 MiB: the L2 caught 95%, re-reads of tiles."
    assert less.startswith("DRAM saw less than the compulsory 2 MiB")
    assert "0.60 of the prediction: larger tiles, or SMs" in l2
    assert stored == "L2: SMs wrote or added 528 KiB, 1.00 of the prediction."
    shown = text(problem, "forward", compared, blocks)
    assert re.search(r"sdpa +measured +1.526 MiB .* 12.3 us +1\n", shown)
    assert "fa2 128x128" in shown
    assert explain(compare(problem, "backward", {"sdpa": flash}, blocks)[0], 0)[0].endswith("and additions to dQ.")


def test_what_the_command_refuses_before_it_measures(monkeypatch):
    monkeypatch.setattr(counters, "measure", lambda *a: pytest.fail("it was measured"))
    for words, message in (
        ("--case window-256", "its band must be full or causal"),
        ("--case bias", "problem has a bias"),
        ("--case gqa-8-2", "one head count"),
        ("--shape 1,1,0,64", "no kernel would run"),
        ("--block-q 0", "block_q is 0"),
    ):
        result = CliRunner().invoke(app, ["measure", *words.split()])
        assert result.exit_code == 2
        assert message in " ".join(result.output.split())


def test_the_command_prints_what_was_measured(monkeypatch):
    def measured(call, warm):
        return parse((RECORDED / "ncu-h200-naive-forward.csv").read_text().splitlines())

    monkeypatch.setattr(counters, "measure", measured)
    shown = CliRunner().invoke(app, ["measure", "--implementation", "naive"]).output
    assert re.search(r"naive +measured +66.06 MiB +21.41 MiB +107.2 MiB +65 MiB +0 B +83.7 us +4", shown)
    found = json.loads(CliRunner().invoke(app, ["measure", "--implementation", "naive", "--json"]).output)
    naive = found["measured"]["naive"]
    assert naive["counters"]["dram_read"] == 69264640
    assert (naive["schedule"], naive["predicted"]["at_l2"]["reduced"]) == ("fused-softmax", 0)
    assert len(naive["explained"]) == 3

    def unreadable(call, warm):
        raise ValueError("ncu printed no table of kernels")

    monkeypatch.setattr(counters, "measure", unreadable)
    result = CliRunner().invoke(app, ["measure"])
    assert (result.exit_code, "no table of kernels" in result.output) == (2, True)


def test_the_counters_of_the_benchmark_become_points_of_the_page(monkeypatch, tmp_path):
    path = Path(__file__).parents[1] / "benchmarks" / "io_counters.py"
    spec = importlib.util.spec_from_file_location("io_counters", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    recorded = parse((RECORDED / "ncu-h200-naive-forward.csv").read_text().splitlines())

    def measured(call, warm):
        if call.implementation == "sdpa":
            raise MeasureError("ncu ended with code 1")
        return dataclasses.replace(recorded, backend="gluon" if call.implementation == "ioattn" else "")

    monkeypatch.setattr(script, "measure", measured)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert script.main(tmp_path, quick=False) == 1  # what failed is written beside what did not
    (csv_file,), (text_file,) = tmp_path.glob("h200-io-*.csv"), tmp_path.glob("h200-io-*.txt")
    assert "sdpa: ncu ended with code 1" in text_file.read_text()
    points = measured_points(tmp_path)
    # Three problems, two directions, two implementations that ran; what was read with caches kept is left out.
    assert len(points) == 12
    first = points[0]
    assert (first.implementation, first.dram_bytes) == ("naive", recorded.dram)
    assert points[1].implementation == "ioattn:gluon"
    assert first.flops_per_s == pytest.approx(4 * 4096**2 * 64 / 83.68e-6, rel=0.001)
    assert all(point.ran_on(KNOWN["h200"]) for point in points)
    assert csv_file.read_text().count("\n") == 1 + 16


def test_the_document_quotes_the_stored_counters():
    root = Path(__file__).parents[1]
    text_of_document = (root / "docs" / "io.md").read_text()
    (name,) = re.findall(r"benchmarks/results/(h200-io-[\d-]+\.csv)", text_of_document)
    with (root / "benchmarks" / "results" / name).open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["caches"] == "flushed"]
    chapter = {
        row["implementation"].partition(":")[0]: row
        for row in rows
        if row["case"] == "B1 H1 N4096 D64 fp16 cuda" and row["direction"] == "forward"
    }
    labels = {"naive": "torch's steps: scale, product, softmax, product", "sdpa": "SDPA (cuDNN)", "ioattn": "ioattn"}
    for implementation, label in labels.items():
        (line,) = re.findall(rf"^\| {re.escape(label)} \|(.*)\|$", text_of_document, flags=re.MULTILINE)
        for cell, column in zip(line.split("|"), ("dram_read", "dram_written", "l2_read", "l2_written"), strict=True):
            if cell.strip():
                counted = int(chapter[implementation][column]) / 2**20
                assert float(cell) == pytest.approx(counted, rel=0.01, abs=0.06), (implementation, column)
