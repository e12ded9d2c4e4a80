"""The laboratory's numbers: machines, roofline, the documents' claims, the loops' listings, the cases elsewhere."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ioattn.cases import CASES, from_line, problem_of
from ioattn.io import flashconv, machine
from ioattn.io.chapter import Claim
from ioattn.io.chapter import claims as computed_claims
from ioattn.io.loops import LOOPS, backward_sums, line_bytes
from ioattn.io.machine import KNOWN, machine_of
from ioattn.io.paged import Cache, churn, lengths_of, paging
from ioattn.io.results import measured_points
from ioattn.io.roofline import best_blocks, bound
from ioattn.io.speculative import Model, best_draft, speculate
from ioattn.io.sweep import AXES, sweep
from ioattn.io.tiles import Blocks
from ioattn.io.traffic import predict

H100 = KNOWN["h100"]


@pytest.fixture(scope="module")
def claims() -> list[Claim]:
    return computed_claims()


def test_every_claim_is_the_same_or_says_why(claims):
    assert all(claim.same or claim.why for claim in claims)
    assert len({(c.where, c.what) for c in claims}) == len(claims)


@pytest.mark.parametrize(
    ("what", "ours"),
    [
        ("naive, in all", "194 MiB"),
        ("S and P, in all", "192 MiB"),
        ("their share", "99 %"),
        ("fused softmax, in all", "130 MiB"),
        ("FA2 at 64x64, in all", "65 MiB"),
        ("FLOPs of both", "4.3 GFLOP"),
        ("naive: intensity", "21 FLOP/B"),
        ("fused softmax: intensity", "32 FLOP/B"),
        ("FA2: intensity", "63 FLOP/B"),
        ("ridge", "295 FLOP/B"),
        ("naive: ceiling", "71 TFLOP/s"),
        ("fused softmax: ceiling", "106 TFLOP/s"),
        ("FA2: ceiling", "211 TFLOP/s"),
        ("naive: share of the peak", "7 %"),
        ("fused softmax: share of the peak", "11 %"),
        ("M/d^2 for d = 64", "28"),
        ("M/d^2 for d = 128", "7"),
        ("GPT-2 medium, standard", "40.3 GB"),
        ("GPT-2 medium, FlashAttention", "4.4 GB"),
        ("FA1 forward, Bc = 64", "6.5767 GB"),
        ("FA1 forward, Bc = 128", "3.3554 GB"),
        ("FA1 forward, Bc = 256", "1.7448 GB"),
        ("FA1 forward, Bc = 512", "0.9395 GB"),
        ("S and P of 32 heads", "2 GiB"),
        ("standard, N = 1024", "4 MiB"),
        ("FlashAttention, N = 16384", "128 KiB"),
        ("decode: intensity = group size", "4 FLOP/B"),
    ],
)
def test_reproduced(claims, what, ours):
    (claim,) = [c for c in claims if c.what == what]
    assert claim.computed == claim.printed == ours


@pytest.mark.parametrize(
    ("what", "ours"),
    [
        ("extra FLOPs of recomputing S", 100 / 6),
        ("SRAM, d = 32 at 64x64", 40),
        ("SRAM, d = 128 at 32x32", 52),
        ("error of P from a half-precision L", 0.39),
        ("tiles skipped, N 4096 at 64x64", 49.2),
    ],
)
def test_corrected(claims, what, ours):
    (claim,) = [c for c in claims if c.what == what]
    assert not claim.same
    assert claim.ours == pytest.approx(ours, rel=0.01)


def test_the_printed_update_is_among_the_corrections(claims):
    (wrong,) = [c for c in claims if c.what.startswith("printed update")]
    assert wrong.ours > 0.1
    assert "l_old" in wrong.verdict


def test_machine_files(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("bandwidth_tb = 2.0\nsram_kib = 100\nl2_mib = 8\nmemory_gb = 24\nsms = 40\n[tflops]\nfp16 = 200\n")
    mine = machine_of(str(path))
    assert (mine.name, mine.sram, mine.ridge(torch.float16)) == ("mine", 102400, 100.0)
    with pytest.raises(ValueError, match="machine mine has no bf16 peak; it has fp16"):
        mine.peak(torch.bfloat16)
    path.write_text("bandwidth_tb = -2\n")
    with pytest.raises(ValueError, match="bandwidth_tb is -2; it must be a positive number"):
        machine_of(str(path))
    path.write_text(
        "bandwidth_tb = 2\nsram_kib = 100\nl2_mib = 8\nmemory_gb = 24\nsms = 40\nwatts = 3\n[tflops]\nfp16 = 2\n"
    )
    with pytest.raises(ValueError, match="watts is unknown"):
        machine_of(str(path))
    sizes = "bandwidth_tb = 2\nsram_kib = 100\nl2_mib = 8\nmemory_gb = 24\nsms = {}\n{}"
    for entries, message in (
        ("bandwidth_tb = ", "cannot be read"),
        ("bandwidth_tb = nan", "bandwidth_tb is nan; it must be a positive number"),
        ("bandwidth_tb = true", "bandwidth_tb is True"),
        (sizes.format("0.5", ""), "sms is 0.5; it must be an integer"),
        (sizes.format("4", ""), "tflops is None"),
        (sizes.format("4", "tflops = [1]"), r"tflops is \[1\]"),
        (sizes.format("4", "[tflops]\nfp16 = 'a'"), "tflops is {'fp16': 'a'}"),
        (sizes.format("4", "[tflops]\nfp8 = 1"), "it must map some of fp16"),
    ):
        path.write_text(entries)
        with pytest.raises(ValueError, match=message):
            machine_of(str(path))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="cannot be read"):
        machine_of(str(path))
    with pytest.raises(ValueError, match="machine is 'h300'; it must be one of v100, a100"):
        machine_of("h300")


def test_fp32_is_the_better_of_ieee_and_three_tf32_products():
    assert H100.peak(torch.float32) == (pytest.approx(164.9e12), "3xTF32")
    assert KNOWN["v100"].peak(torch.float32)[1] == "fp32"


def test_this_machine_is_measured(monkeypatch):
    monkeypatch.setattr(machine, "_best_seconds", lambda action, device: 0.5)
    this = machine_of("this")
    assert this.bandwidth > 0
    assert this.flops["fp32"] == 2 * (2 * 1024**3) if not torch.cuda.is_available() else this.flops["fp32"] > 0


@given(st.sampled_from(list(KNOWN)), st.sampled_from(["naive", "fa1", "fa2"]), st.sampled_from([512, 4096, 16384]))
@settings(max_examples=30, deadline=None)
def test_the_roofline_is_consistent(name, schedule, n):
    it = bound(problem_of((1, 1, n, 64)), KNOWN[name], schedule)
    assert it.attainable == pytest.approx(it.traffic.flops / it.seconds)
    assert (it.binds == "compute") == (it.traffic.intensity >= it.peak / it.machine.bandwidth)
    assert it.floor_seconds <= it.seconds


def test_best_blocks_fit_and_move_the_least():
    problem = problem_of((1, 1, 4096, 64))
    best = best_blocks(problem, "fa2", "forward", 100 * 1024)
    least = predict(problem, "fa2", "forward", best)
    assert least.on_chip <= 100 * 1024
    for q in range(16, 257, 16):
        other = predict(problem, "fa2", "forward", Blocks(q, 16))
        assert other.on_chip > 100 * 1024 or other.total >= least.total
    assert best_blocks(problem, "fa2", "forward", 1000) is None


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("case", ["chapter", "decode-128k", "train-8k"])
def test_sweeps(axis, case):
    points = sweep(axis, CASES[case].problem(), H100, "fa2", "forward", Blocks())
    assert [p.at for p in points] == sorted({p.at for p in points})
    assert len(points) >= 5
    if axis == "sram":
        assert [p.bound.traffic.total for p in points] == sorted((p.bound.traffic.total for p in points), reverse=True)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            "d,c,m,t,t,B1 H1 N8 D4 fp16 cuda,forward,x,1,1,abc,TFLOP/s,1",
            ":2: rate is 'abc'; it must be a positive number",
        ),
        ("d,c,m,t,t,B1 H1 N8 D4 fp16 cuda,forward,x,1,1,nan,TFLOP/s,1", "rate is 'nan'"),
        ("d,c,m", ":2 is cut short"),
    ],
)
def test_result_rows_that_cannot_be_read_are_named(tmp_path, row, message):
    columns = "date,commit,machine,torch,triton,case,direction,implementation,median_us,spread,rate,unit,error\n"
    (tmp_path / "x.csv").write_text(columns + row + "\n")
    with pytest.raises(ValueError, match=re.escape(message)):
        measured_points(tmp_path)


def test_one_line_forms_come_back():
    for case in CASES.values():
        problem = case.problem()
        plain = not (case.bias or case.mask or case.alibi or case.sinks or "softcap" in case.options)
        assert from_line(str(problem).replace(" meta", " cuda")) == (problem if plain else None)
    assert from_line("B1 H1 N8 D4 fp16 cuda softcap=3") is None
    assert from_line("nonsense") is None


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", list(LOOPS))
@pytest.mark.parametrize("causal", [False, True])
def test_the_lines_of_a_loop_move_all_bytes(name, direction, causal):
    problem, blocks = problem_of((2, 4, 100, 16), causal=causal, kv_heads=2), Blocks(32, 16)
    total = sum(moved for _, moved in line_bytes(problem, name, direction, blocks))
    assert total == predict(problem, name, direction, blocks).total


def test_listings_stand_beside_each_other():
    for direction in ("forward", "backward"):
        assert len({len(lines[direction]) for lines in LOOPS.values()}) == 1


def test_the_backward_swaps_back_because_one_sum_is_cheaper_than_two():
    keys, queries = backward_sums(problem_of((1, 1, 4096, 64)), Blocks())
    assert queries == 2 * keys


def test_paging():
    cache = Cache(layers=2, kv_heads=3, dim=4, itemsize=2)
    assert cache.token_bytes == 96
    found = paging([1, 16, 17], 16, cache, longest=32)
    assert (found.used, found.held, found.contiguous) == (34 * 96, 64 * 96, 96 * 96)
    assert found.wasted == pytest.approx(1 - 34 * 96 / (64 * 96 + 16))
    assert found.read == 34 * 96 + 2 * 16
    with pytest.raises(ValueError, match="page is 0"):
        paging([1], 0, cache, 8)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(30, 90))
@settings(max_examples=60, deadline=None)
def test_churn_keeps_its_books(lengths, capacity):
    found = churn(lengths, capacity, seed=1)
    assert 0 <= found.largest_hole <= found.free <= capacity - lengths[-1]
    assert 0 <= found.fragmentation < 1 or found.free == 0


def test_lengths_are_as_asked():
    lengths = lengths_of(4000, 100, 1000, seed=3)
    assert max(lengths) <= 1000
    assert sum(lengths) / 4000 == pytest.approx(100, rel=0.05)


def test_speculation():
    target, draft = Model(100.0, 0.0), Model(10.0, 0.0)
    assert speculate(target, draft, 0, 0.5).bytes_per_token == 100.0
    two = speculate(target, draft, 2, 0.5)
    assert two.tokens == pytest.approx(1 + 0.5 + 0.25)
    assert two.bytes_per_token == pytest.approx(120 / 1.75)
    assert speculate(target, draft, 3, 1.0).tokens == 4
    assert best_draft(target, draft, 0.0).drafted == 0
    assert best_draft(target, draft, 0.9).drafted > best_draft(target, draft, 0.5).drafted
    with pytest.raises(ValueError, match=r"acceptance is 1\.5; it must be from 0 to 1"):
        speculate(target, draft, 1, 1.5)


def test_accepted_tokens_are_what_drawing_gives():
    generator = torch.Generator().manual_seed(0)
    accepted = (torch.rand(100_000, 5, generator=generator) < 0.8).long().cumprod(1).sum(1) + 1
    assert float(accepted.float().mean()) == pytest.approx(speculate(Model(1, 0), Model(1, 0), 5, 0.8).tokens, rel=0.01)


@pytest.mark.parametrize(("run_it", "formula"), [("count_fused", "fused"), ("count_unfused", "unfused")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("length", [1, 7, 64, 257])
def test_convolutions_are_counted_and_true(run_it, formula, dtype, length):
    u, k = torch.randn(2, 3, length).to(dtype), torch.randn(3, length).to(dtype)
    y, counted = getattr(flashconv, run_it)(u, k)
    it = flashconv.Convolution(2, 3, length, dtype.itemsize)
    assert sorted(map(str, counted.moves)) == sorted(map(str, getattr(flashconv, formula)(it).moves))
    exact = torch.zeros(2, 3, length, dtype=torch.float64)
    for shift in range(length):
        exact[..., shift:] += k[:, shift, None].double() * u[..., : length - shift].double()
    # The FFT's own error is that of fp32 at the size of the largest terms.
    n = 2 * length
    plain = torch.fft.irfft(torch.fft.rfft(u.float(), n) * torch.fft.rfft(k.float(), n), n)[..., :length].to(dtype)
    bound = 2 * (float((plain - exact).abs().max()) + torch.finfo(dtype).eps * float(exact.abs().max()))
    assert float((y - exact).abs().max()) <= bound


def test_theorem_2(claims):
    # Without the fixed cost of the key tile the product of bytes and SRAM would be constant.
    (slope,) = [c.ours for c in claims if c.what.startswith("slope")]
    assert math.isclose(slope, -1, abs_tol=0.05)
