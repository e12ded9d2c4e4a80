"""Every number of the two background documents beside ours: "same", or "differs" and why.

000 is a chapter on attention's memory traffic, 002 an explanation of FlashAttention; sections are the documents' own.
Ours are computed here from the formulas, the machine table or a counted run, never typed in.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ioattn.cases import CASES, problem_of
from ioattn.io.machine import GB, KIB, KNOWN, MIB
from ioattn.io.reference import exact
from ioattn.io.roofline import best_blocks, bound
from ioattn.io.schedules import count
from ioattn.io.tiles import Blocks, Grid
from ioattn.io.traffic import compulsory, predict, useful_flops

CHAPTER = CASES["chapter"].problem()
GPT2 = CASES["gpt2-medium"].problem()


@dataclass(frozen=True)
class Claim:
    """One printed number and ours; `form` formats both to the digits that were printed."""

    where: str
    what: str
    theirs: float
    ours: float
    form: str
    unit: str
    why: str = ""

    @property
    def printed(self) -> str:
        """Their number."""
        return f"{self.theirs:{self.form}} {self.unit}".strip()

    @property
    def computed(self) -> str:
        """Our number, with more digits where it differs."""
        digits = f"{self.ours:{self.form}}" if self.same else f"{self.ours:.4g}"
        return f"{digits} {self.unit}".strip()

    @property
    def same(self) -> bool:
        """Whether ours is theirs to the digits printed."""
        return f"{self.theirs:{self.form}}" == f"{self.ours:{self.form}}"

    @property
    def verdict(self) -> str:
        """What the command prints."""
        if self.same:
            return f"same; {self.why}" if self.why else "same"
        return f"differs: {self.why}"


def claims() -> list[Claim]:
    """All numbers, in the documents' order."""
    parts = (_naive_steps, _naive_roofline, _intermediates, _flash, _theory, _gpt2, _figure_2, _elsewhere)
    more = (
        _bottleneck,
        _on_chip_sizes,
        _update,
        _recomputation,
        _causal,
        _precision,
        _memory_table,
        _floor,
        _tile_table,
    )
    return [claim for part in (*parts, *more) for claim in part()]


def _naive_steps() -> Iterator[Claim]:
    t, where = predict(CHAPTER, "naive"), "000 14.2"
    moves = {(m.step, m.tensor): m for m in t.moves}
    for step, tensor, printed in (("S = Q K^T", "Q", 512), ("S = Q K^T", "K", 512), ("O = P V", "V", 512)):
        yield Claim(where, f"{step}: read {tensor}", printed, moves[step, tensor].read / KIB, ".0f", "KiB")
    yield Claim(where, "S = Q K^T: write S", 32, moves["S = Q K^T", "S"].written / MIB, ".0f", "MiB")
    yield Claim(where, "softmax: read S three times", 96, moves["P = softmax(S)", "S"].read / MIB, ".0f", "MiB")
    yield Claim(where, "softmax: write P", 32, moves["P = softmax(S)", "P"].written / MIB, ".0f", "MiB")
    yield Claim(where, "O = P V: read P", 32, moves["O = P V", "P"].read / MIB, ".0f", "MiB")
    yield Claim(where, "O = P V: write O", 512, moves["O = P V", "O"].written / KIB, ".0f", "KiB")
    thin = f"a product reads its thin operand once: {t.on_chip / MIB:.2g} MiB on chip, a cache and not an SM"
    yield Claim(where, "naive, in all", 194, t.total / MIB, ".0f", "MiB", thin)
    yield Claim(where, "naive, in bytes", 2.03, t.total / 1e8, ".2f", "e8 B")
    yield Claim(where, "FLOPs of one product", 2.15, t.flops / 2e9, ".2f", "GFLOP")
    yield Claim(where, "FLOPs of both", 4.3, t.flops / 1e9, ".1f", "GFLOP")


def _naive_roofline() -> Iterator[Claim]:
    h100, where = KNOWN["h100"], "000 14.2"
    naive, fused = bound(CHAPTER, h100, "naive"), bound(CHAPTER, h100, "fused-softmax")
    yield Claim(where, "H100 peak, dense FP16", 989, naive.peak / 1e12, ".0f", "TFLOP/s", h100.source)
    yield Claim(where, "H100 memory bandwidth", 3.35, h100.bandwidth / 1e12, ".2f", "TB/s")
    yield Claim(where, "ridge", 295, h100.ridge(CHAPTER.dtype), ".0f", "FLOP/B")
    yield Claim(where, "naive: intensity", 21, naive.traffic.intensity, ".0f", "FLOP/B")
    yield Claim(where, "naive: ceiling", 71, naive.attainable / 1e12, ".0f", "TFLOP/s")
    yield Claim(where, "naive: share of the peak", 7, 100 * naive.attainable / naive.peak, ".0f", "%")
    yield Claim(where, "fused softmax, in all", 130, fused.traffic.total / MIB, ".0f", "MiB")
    yield Claim(where, "fused softmax: intensity", 32, fused.traffic.intensity, ".0f", "FLOP/B")
    yield Claim(where, "fused softmax: d/2", 32, CHAPTER.dim / 2, ".0f", "FLOP/B", "the limit of long sequences")
    yield Claim(where, "fused softmax: ceiling", 106, fused.attainable / 1e12, ".0f", "TFLOP/s")
    yield Claim(where, "fused softmax: share of the peak", 11, 100 * fused.attainable / fused.peak, ".0f", "%")


def _intermediates() -> Iterator[Claim]:
    t, where = predict(CHAPTER, "naive"), "000 14.3"
    between = t.of("S", "P")
    softmax = sum(m.read + m.written for m in t.moves if m.step == "P = softmax(S)")
    fused = predict(CHAPTER, "fused-softmax")
    fused_softmax = sum(m.read + m.written for m in fused.moves if m.step == "P = softmax(S)")
    yield Claim(where, "Q, K, V and O once each", 2, compulsory(CHAPTER) / MIB, ".0f", "MiB")
    yield Claim(where, "softmax: S three times and P", 128, softmax / MIB, ".0f", "MiB")
    yield Claim(where, "softmax fused: S once and P", 64, fused_softmax / MIB, ".0f", "MiB")
    yield Claim(where, "S and P, in all", 192, between / MIB, ".0f", "MiB")
    yield Claim(where, "their share", 99, 100 * between / t.total, ".0f", "%")


def _flash() -> Iterator[Claim]:
    it, where = bound(CHAPTER, KNOWN["h100"], "fa2"), "000 14.6"
    t, naive = it.traffic, predict(CHAPTER, "naive")
    moves = {m.tensor: m for m in t.moves}
    yield Claim(where, "times K is read", 64, moves["K"].read / (4096 * 64 * 2), ".0f", "")
    yield Claim(where, "read K", 32, moves["K"].read / MIB, ".0f", "MiB")
    yield Claim(where, "read V", 32, moves["V"].read / MIB, ".0f", "MiB")
    yield Claim(where, "write O", 512, moves["O"].written / KIB, ".0f", "KiB")
    yield Claim(where, "FA2 at 64x64, in all", 65, t.total / MIB, ".0f", "MiB", "with 16 KiB of LSE")
    yield Claim(where, "FA2, in bytes", 6.8, t.total / 1e7, ".1f", "e7 B")
    yield Claim(where, "less than naive by", 2 / 3, 1 - t.total / naive.total, ".2f", "", "two thirds in words")
    yield Claim(where, "FA2: intensity", 63, t.intensity, ".0f", "FLOP/B")
    yield Claim(where, "FA2: ceiling", 211, it.attainable / 1e12, ".0f", "TFLOP/s", "if every re-read goes to memory")
    kv = 2 * 4096 * 64 * 2
    yield Claim(where, "K and V of one head", 1, kv / MIB, ".0f", "MiB")
    yield Claim(where, "H100 L2, which catches re-reads", 50, KNOWN["h100"].l2 / MIB, ".0f", "MiB")


def _theory() -> Iterator[Claim]:
    where, sram = "000 14.6", KNOWN["h100"].sram
    elements = sram // 2
    yield Claim(where, "SRAM of an H100 SM, FP16 elements", 11.7, elements / 1e4, ".1f", "e4")
    cut = "M/d^2 is cut to whole numbers there"
    yield Claim(where, "M/d^2 for d = 64", 28, elements / 64**2, ".0f", "", cut)
    yield Claim(where, "M/d^2 for d = 128", 7, elements / 128**2, ".0f", "")
    slope = _slope()
    yield Claim(
        where,
        "slope of bytes against M, log-log",
        -1,
        slope,
        ".1f",
        "",
        "Theorem 2: FA2, best blocks at 128 KiB and 1 MiB",
    )


def _slope() -> float:
    """How FA2's bytes follow the SRAM, d log(bytes) / d log(M), with the best blocks for each size."""
    problem = problem_of((1, 1, 65536, 64))
    totals = []
    for sram in (128 * KIB, 1024 * KIB):
        blocks = best_blocks(problem, "fa2", "forward", sram)
        assert blocks is not None
        totals.append(predict(problem, "fa2", "forward", blocks).total)
    return math.log(totals[1] / totals[0]) / math.log(8)


def _gpt2() -> Iterator[Claim]:
    where = "000 14.6, FA1 fig. 2 left"
    T = GPT2.batch * GPT2.heads * GPT2.len_q * GPT2.dim * 2
    S = GPT2.batch * GPT2.heads * GPT2.len_q * GPT2.len_k * 2
    plain = predict(GPT2, "fused-softmax").total + predict(GPT2, "fused-softmax", "backward").total
    blocks = Blocks(64, 256)
    counted = predict(GPT2, "fa1", "forward", blocks).total + predict(GPT2, "fa1", "backward", blocks).total
    paper = (1 + 3 * 4) * T + (4 + 4 * 4) * T
    masked = "11 S + 12 T of the plain steps, and 7 S for GPT-2's mask and dropout; fits, not proven"
    yield Claim(where, "GPT-2 medium, standard", 40.3, (plain + 7 * S) / GB, ".1f", "GB", masked)
    delta = "13 T + 20 T at Bc = 256, delta and m, l not counted; fits, not proven"
    yield Claim(where, "GPT-2 medium, FlashAttention", 4.4, paper / GB, ".1f", "GB", delta)
    literal = "Algorithms 1 and 4 read O again for delta and move m and l; no first read of O and dQ"
    yield Claim(where, "the same as our FA1 counts it", 4.4, counted / GB, ".1f", "GB", literal)
    yield Claim(where, "ratio", 9, 40.3 / 4.4, ".0f", "times")
    flops = (useful_flops(GPT2) + useful_flops(GPT2, "backward")) / 1e9
    odd = "14 N^2 d H B is 962; 75.2 would be a batch of 5"
    yield Claim(where, "FLOPs of the same (FA1's table)", 75.2, flops, ".1f", "GFLOP", odd)


def _figure_2() -> Iterator[Claim]:
    T = GPT2.batch * GPT2.heads * GPT2.len_q * GPT2.dim * 2
    for bc, printed in ((64, 6.5767), (128, 3.3554), (256, 1.7448), (512, 0.9395)):
        traffic = predict(GPT2, "fa1", "forward", Blocks(64, bc))
        ours = traffic.of("Q", "K", "V", "O") / GB
        note = f"2 B H N d (1 + 3 ceil(N/Bc)) = {T * (1 + 3 * (1024 // bc)) / GB:.4f}; m and l: "
        note += f"{traffic.of('m', 'l') / GB:.4f} more"
        yield Claim("FA1 fig. 2 middle", f"FA1 forward, Bc = {bc}", printed, ours, ".4f", "GB", note)


def _elsewhere() -> Iterator[Claim]:
    decode = CASES["decode-128k"].problem()
    t = predict(decode, "split-kv", blocks=Blocks(64, 128, 16))
    partial = "partial results and Q take the rest"
    yield Claim("000 14.7.1", "decode: intensity = group size", 4, t.intensity, ".0f", "FLOP/B", partial)
    # FA2 forward, D128, 9216 tokens, H200, 2026-11-29.
    share = 100 * 357e12 / KNOWN["h200"].flops["fp16"]
    yield Claim("000 14.9", "FA2's share of Hopper's peak", 35, share, ".0f", "%", "357 TFLOP/s measured on an H200")


def _bottleneck() -> Iterator[Claim]:
    problem = CASES["chapter-32-heads"].problem()
    t = predict(problem, "naive")
    yield Claim("002 bottleneck", "S and P of 32 heads", 2, t.extra / 2**30, ".0f", "GiB")
    fused = predict(problem, "fused-softmax").of("S", "P") / (t.extra / 2)
    three = f"with a fused softmax; a three-pass one makes it {t.of('S', 'P') / (t.extra / 2):.0f}"
    yield Claim("002 bottleneck", "N^2 reads and writes", 4, fused, ".0f", "", three)


def _on_chip_sizes() -> Iterator[Claim]:
    where = "002 tiling"
    rows = (("v100", 96, Blocks(64, 64)), ("a100", 164, Blocks(128, 64)), ("h100", 228, Blocks(128, 128)))
    for name, printed, blocks in rows:
        sizes = [predict(problem_of((1, 1, 4096, d)), "fa2", blocks=blocks).on_chip / KIB for d in (64, 128)]
        note = f"{blocks} needs {sizes[0]:.0f} KiB at d = 64 and {sizes[1]:.0f} at 128 in FP16, registers included"
        yield Claim(where, f"SRAM of {name}", printed, KNOWN[name].sram / KIB, ".0f", "KiB", note)
    sram_rate = KNOWN["a100"].cores * 128 * 1.41e9 / 1e12
    yield Claim(where, "SRAM bandwidth", 19, sram_rate, ".0f", "TB/s", "A100: 108 SMs x 128 B per cycle x 1.41 GHz")
    old = "that is the A100 with 80 GB (2.04); 40 GB has 1.56, H100 3.35, B200 8.0"
    yield Claim(where, "HBM bandwidth", 2, KNOWN["a100"].bandwidth / 1e12, ".1f", "TB/s", old)


def _update() -> Iterator[Claim]:
    naive = predict(CHAPTER, "naive")
    matrix = CHAPTER.len_q * CHAPTER.len_k * CHAPTER.dtype.itemsize
    passes = sum(m.read for m in naive.moves if m.tensor == "S") / matrix
    why = "maximum, sum, result: 000 counts three; two if the result is left to whoever reads it"
    yield Claim("002 online softmax", "passes over a row, standard softmax", 2, passes, ".0f", "", why)
    problem = problem_of((1, 1, 256, 64), "fp32")
    generator = torch.Generator().manual_seed(0)
    inputs = {name: torch.randn(1, 1, 256, 64, generator=generator) for name in ("Q", "K", "V")}
    truth = exact(problem, inputs)["O"]
    outs = {name: count(problem, name, "forward", inputs).results["O"] for name in ("as-printed", "fa1", "fa2")}
    errors = {name: float((out - truth).abs().max()) for name, out in outs.items()}
    where, size = "002 online softmax", "largest error, N 256 in tiles of 64, FP32"
    lacks = "O is normalised already, so the old term lacks l_old"
    yield Claim(where, f"printed update: {size}", 0, errors["as-printed"], ".5f", "", lacks)
    yield Claim(where, f"with l_old (FA1): {size}", 0, errors["fa1"], ".5f", "")
    yield Claim(where, f"divided once at the end (FA2): {size}", 0, errors["fa2"], ".5f", "")


def _recomputation() -> Iterator[Claim]:
    forward, backward = (useful_flops(CHAPTER, d) for d in ("forward", "backward"))
    stored = predict(CHAPTER, "naive", "backward").flops
    why = f"2 + 5 products instead of 2 + 4; of the backward alone {100 * (backward / stored - 1):.0f}%"
    share = 100 * ((forward + backward) / (forward + stored) - 1)
    yield Claim("002 recomputation", "extra FLOPs of recomputing S", 33, share, ".0f", "%", why)
    inner, outside = (predict(CHAPTER, name, "backward") for name in ("fa1", "fa2"))
    why = f"delta outside reads O once and delta ({outside.of('O', 'delta') / MIB:.2f} MiB), not O in every pass"
    counted = outside.of("O", "delta") / MIB
    yield Claim("002 backward", "D in the inner loop: bytes for it", inner.of("O") / MIB, counted, ".1f", "MiB", why)


def _causal() -> Iterator[Claim]:
    causal = dataclasses.replace(CHAPTER, band=problem_of((1, 1, 4096, 64), causal=True).band)
    skipped = 100 * (1 - Grid.of(causal, Blocks()).visits().pairs / 4096**2)
    yield Claim("002 causal", "tiles skipped, N 4096 at 64x64", 50, skipped, ".0f", "%", "the diagonal's tiles remain")
    flops = 100 * (1 - useful_flops(causal) / useful_flops(CHAPTER))
    yield Claim("002 causal", "FLOPs saved", 50, flops, ".0f", "%")


def _precision() -> Iterator[Claim]:
    half = predict(CHAPTER, "fa2").total
    single = predict(problem_of((1, 1, 4096, 64), "fp32"), "fa2").total
    yield Claim("002 FP16", "bytes of FP16 against FP32", 0.5, half / single, ".2f", "", "but for the LSE")
    lse = math.log(4096.0) + 0.5  # scores of unit variance: E exp(s) = e^0.5
    spacing = 2.0 ** (math.floor(math.log2(lse)) - 10)
    error = 100 * (math.exp(spacing / 2) - 1)
    kept = "LSE in FP16 near 8.8 has steps of 1/128: every P of a row is off by up to this; ours is FP32"
    yield Claim("002 FP16", "error of P from a half-precision L", 0, error, ".2f", "%", kept)


def _memory_table() -> Iterator[Claim]:
    where, units = "002 memory", ((1024, 4, 8, 99.8), (4096, 64, 32, 99.95), (16384, 1024, 128, 99.99))
    for n, standard, flash, saved in units:
        problem = problem_of((1, 1, n, 64))
        plain, fa1, fa2 = (predict(problem, name).extra for name in ("naive", "fa1", "fa2"))
        yield Claim(where, f"standard, N = {n}", standard, plain / MIB, ".0f", "MiB", "S and P, FP16")
        ours = f"m and l, FP32; FA2 keeps one LSE, {fa2 / KIB:.0f} KiB"
        yield Claim(where, f"FlashAttention, N = {n}", flash, fa1 / KIB, ".0f", "KiB", ours)
        digits = len(str(saved).split(".")[1])
        yield Claim(where, f"saved, N = {n}", saved, 100 * (1 - fa1 / plain), f".{digits}f", "%")


def _floor() -> Iterator[Claim]:
    blocks = best_blocks(CHAPTER, "fa2", "forward", 4 * MIB)
    assert blocks is not None
    over = predict(CHAPTER, "fa2", blocks=blocks).of("Q", "K", "V", "O") / compulsory(CHAPTER)
    why = f"FA2, {blocks}: all queries of the head are one tile"
    yield Claim("002 memory", "IO at M = Theta(N d) over its least", 1, over, ".2f", "times", why)


def _tile_table() -> Iterator[Claim]:
    for d, block, printed in ((32, 64, 32), (64, 64, 64), (128, 32, 128)):
        t = predict(problem_of((1, 1, 4096, d), "fp32"), "fa2", blocks=Blocks(block, block))
        tiles = (3 * block * d + block * block) * 4 / KIB
        why = f"q, k, v and scores in FP32; with acc and row statistics {t.on_chip / KIB:.4g} KiB"
        yield Claim("002 tiles", f"SRAM, d = {d} at {block}x{block}", printed, tiles, ".0f", "KiB", why)
