"""The generated code of the CPU backend: its functions of a vector, and the assembly of its micro-kernels."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable

import pytest
import torch

from ioattn.backends import cpu
from ioattn.backends.cpu import jit, launch
from ioattn.backends.cpu.backward import backward
from ioattn.backends.cpu.decode import decode
from ioattn.backends.cpu.forward import forward
from ioattn.backends.cpu.ir import I64, PTR, Function, Module, Type, Value
from ioattn.backends.cpu.jit import Target
from ioattn.backends.cpu.softmax import Recipe
from ioattn.backends.cpu.tiles import add_log, exp2, tanh, widest

pytestmark = pytest.mark.skipif(cpu.unusable() is not None, reason=str(cpu.unusable()))

AVX512 = Target.of("x86_64-unknown-linux-gnu", "znver4", "+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512bf16,+fma")
AVX512_WITHOUT_BF16 = Target.of("x86_64-unknown-linux-gnu", "skylake-avx512", "+avx512f,+avx512bw,+avx512dq,+avx512vl")
AVX2 = Target.of("x86_64-unknown-linux-gnu", "haswell", "+avx2,+fma,+f16c")
NEON = Target.of("aarch64-unknown-linux-gnu", "neoverse-n1", "+neon")
TARGETS = {"avx512bf16": AVX512, "avx512": AVX512_WITHOUT_BF16, "avx2": AVX2, "neon": NEON}

VECTOR_ON_STACK = {
    "x86_64": re.compile(r"[xyz]mm\d+.*\(%rsp\)|\(%rsp\).*[xyz]mm\d+"),
    "aarch64": re.compile(r"^\s+(str|ldr|stp|ldp|stur|ldur)\s+q\d+.*\[sp"),
}


def evaluate(function: Callable[[Function, Value], Value], x: torch.Tensor) -> torch.Tensor:
    """A function of a vector, compiled and applied to every element of fp32 `x`."""
    target = jit.host()
    assert target is not None
    module = Module()
    f = module.function(jit.ENTRY, "ptr block", exported=True)
    src, dst = (f.args.block.load(PTR) if i == 0 else (f.args.block + 8).load(PTR) for i in range(2))
    with f.loop(0, (f.args.block + 16).load(I64), target.lanes) as at:
        (dst + at * 4).store(function(f, (src + at * 4).load(Type("float", target.lanes))))
    padded = torch.nn.functional.pad(x, (0, -len(x) % target.lanes))
    out = torch.zeros_like(padded)
    block = (ctypes.c_int64 * 3)(padded.data_ptr(), out.data_ptr(), len(padded))
    launch.worker(jit.load(str(module), target))(block)
    return out[: len(x)]


def ulps(value: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest error in units of the last place of the truth."""
    spacing = torch.exp2(truth.abs().clamp_min(2.0**-126).log2().floor() - 23)
    return ((value.double() - truth).abs() / spacing).max().item()


def test_exp2_is_accurate_down_to_denormal_numbers() -> None:
    x = torch.linspace(-150, 20, 400_001)
    assert ulps(evaluate(exp2, x), torch.exp2(x.double())) < 1.6


def test_exp2_at_its_edges() -> None:
    x = torch.tensor([0.0, -0.0, -torch.inf, torch.nan, -151.0, -1e30, 1.0, -126.0, -127.0])
    expected = torch.tensor([1.0, 1.0, 0.0, torch.nan, 0.0, 0.0, 2.0, 2.0**-126, 2.0**-127])
    torch.testing.assert_close(evaluate(exp2, x), expected, rtol=0, atol=0, equal_nan=True)


def test_a_nan_of_any_payload_stays_one() -> None:
    bits = torch.tensor([0x7FC00001, 0x7F800001, 0x7FFFFFFF, 0x7FC001FF - 2**32, -1], dtype=torch.int64)
    x = bits.to(torch.int32).view(torch.float32)
    assert x.isnan().all()
    for function in (exp2, lambda f, y: tanh(y), lambda f, y: add_log(f, f.constant(1.0, y.type), y)):
        assert evaluate(function, x).isnan().all()


def test_tanh_keeps_its_relative_accuracy() -> None:
    x = torch.cat([torch.linspace(-20, 20, 100_001), torch.logspace(-30, 1, 10_001), -torch.logspace(-30, 1, 10_001)])
    x = x[x != 0]
    assert ulps(evaluate(lambda f, y: tanh(y), x), torch.tanh(x.double())) < 3


@pytest.mark.parametrize("start", [0.0, 7.5, -80.0, 1e30])
def test_log_of_a_sum_rounds_about_once(start: float) -> None:
    x = torch.cat([torch.logspace(0, 6, 100_001), torch.linspace(1, 2, 10_001)])
    value = evaluate(lambda f, y: add_log(f, f.constant(start, y.type), y), x)
    truth = start + x.double().log()
    spacing = 2.0**-23 * max(abs(start), 1.0)
    assert ((value.double() - truth).abs() <= spacing * truth.abs().clamp_min(1) / max(abs(start), 1.0)).all()


def test_the_terms_of_softcap_reach_infinity() -> None:
    x = torch.tensor([torch.inf, -torch.inf, 100.0, -100.0])
    assert evaluate(lambda f, y: tanh(y), x).tolist() == [1.0, -1.0, 1.0, -1.0]


def functions_in(assembly: str) -> dict[str, list[str]]:
    """The lines of each function, by name."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in assembly.splitlines():
        label = re.match(r"^(\w+):", line)
        if label and not label[1].startswith("L"):
            lines = found.setdefault(label[1], [])
        lines.append(line)
    return found


def recipes(target: Target) -> list[Recipe]:
    kinds = [("fp32", False, False)] + ([("bf16", True, False)] if target.dpbf16 else [("bf16", False, True)])
    return [
        Recipe(dtype, vectors, paired, staged, natural=not paired)
        for dtype, paired, staged in kinds
        for vectors in range(1, widest(target) + 1)
    ]


@pytest.mark.parametrize("build", [forward, backward, decode], ids=lambda build: build.__name__)
@pytest.mark.parametrize("name", TARGETS)
def test_products_keep_their_sums_in_registers(name: str, build: Callable[[Target, Recipe], str]) -> None:
    target = TARGETS[name]
    assert target is not None
    pattern = VECTOR_ON_STACK[target.triple.split("-")[0]]
    as_it_lies = [Recipe("bf16", 1, False, False, natural=True)] if build is decode else []
    for recipe in recipes(target) + as_it_lies:
        if build is decode and (recipe.paired or recipe.vectors > 1):
            continue
        functions = functions_in(jit.compile_assembly(build(target, recipe), target))
        products = {n: lines for n, lines in functions.items() if n.startswith(("key_product", "accumulate", "add_"))}
        if recipe in as_it_lies:
            # Of four queries, values that are not finite may cost one register too many.
            products.pop("add_values_4_guarded", None)
        assert len(products) >= 3
        for function, lines in products.items():
            spills = [line for line in lines if pattern.search(line)]
            assert not spills, f"{function} of {recipe}: {spills[:3]}"


@pytest.mark.parametrize("name", TARGETS)
def test_products_use_the_widest_instructions(name: str) -> None:
    target = TARGETS[name]
    assert target is not None
    recipe = recipes(target)[-1]
    code = "\n".join(functions_in(jit.compile_assembly(forward(target, recipe), target))["key_product"])
    expected = {
        "avx512bf16": "vdpbf16ps.*zmm",
        "avx512": "vfmadd.*zmm",
        "avx2": "vfmadd.*ymm",
        "neon": r"fmla\s+v\d+.4s",
    }
    assert len(re.findall(expected[name], code)) >= 12


def test_targets_are_told_by_their_features() -> None:
    assert AVX512 is not None
    assert AVX512_WITHOUT_BF16 is not None
    assert AVX2 is not None
    assert NEON is not None
    assert (AVX512.lanes, AVX512.dpbf16) == (16, True)
    assert (AVX512_WITHOUT_BF16.lanes, AVX512_WITHOUT_BF16.dpbf16) == (16, False)
    assert (AVX2.lanes, NEON.lanes) == (8, 4)
    assert Target.of("x86_64-pc-linux", "nehalem", "+sse4.2,-avx2") is None
    assert Target.of("riscv64-unknown-linux", "generic", "+v") is None


def test_ir_is_the_same_in_every_process() -> None:
    """The cache is keyed by it: a set or an id in the text would make every process compile again."""
    target = jit.host()
    assert target is not None
    recipe = Recipe("fp32", 1, False, False, True, ("softcap", "alibi", "bias"), "fp32", True, True)
    for build in (forward, backward, decode):
        assert build(target, recipe) == build(target, recipe)
        assert "0x" not in re.sub(r"0x[0-9A-F]{16}", "", build(target, recipe))
