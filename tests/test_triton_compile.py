"""The Triton kernels compiled for GPUs that are not here: shared memory, registers, spills, tensor core instructions."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from ioattn.problem import Gradients, Options, Problem, Tensors

triton = pytest.importorskip("triton", reason="Triton is not installed")
if triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET is set: nothing is compiled", allow_module_level=True)

from ioattn.backends.triton import config, launch  # noqa: E402
from ioattn.backends.triton.config import Gpu  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

# Compute capability: shared memory that one program may use (CUDA C++ Programming Guide, technical specifications).
GPUS = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}

TENSOR_CORES = {80: "HMMA", 89: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}

POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.bool: "*i1",
    torch.int32: "*i32",
}


class Kernel(NamedTuple):
    """One kernel as the host would launch it."""

    name: str
    prepared: launch.Prepared
    arguments: tuple[Any, ...]
    shared_bound: int


def gpu(sm: int) -> Gpu:
    return Gpu(divmod(sm, 10), GPUS[sm])


def kernels(sm: int, dtype: torch.dtype, dim: int, options: Options = Options(), **extras: Any) -> Iterator[Kernel]:  # noqa: B008
    """Every kernel of the forward and the backward of one problem, on tensors without memory."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    packed = "cu_seqlens_q" in extras
    shape = (4096, 8, dim) if packed else (2, 8, 2048, dim)
    kv_shape = (4096, 4, dim) if packed else (2, 4, 2048, dim)
    tensors = Tensors(empty(*shape), empty(*kv_shape), empty(*kv_shape), **extras)
    problem = Problem.of(tensors, options)
    out, lse = empty(*shape), empty(*((8, 4096) if packed else shape[:3]), dtype=torch.float32)
    dbias = None if tensors.bias is None else torch.empty_like(tensors.bias)
    grads = Gradients(empty(*shape), empty(*kv_shape), empty(*kv_shape), dbias)
    groups = [launch.prepare_forward(problem, tensors, out, gpu(sm))]
    groups += launch.prepare_backward(problem, tensors, out, out, grads, gpu(sm))
    given = [launch.forward_arguments(problem, tensors, out, lse)]
    given += launch.backward_arguments(problem, tensors, out, lse, out, None, lse, grads)
    for direction, group, arguments in zip(("forward", "delta", "key_value", "query", "bias"), groups, given, strict=False):
        for prepared in group:
            bound = config.shared_bytes(problem, direction, prepared.tiles, gpu(sm))
            yield Kernel(prepared.kernel.__name__, prepared, (*arguments, *prepared.constant), bound)


def compile_for(sm: int, kernel: Kernel) -> Any:
    """What Triton's launcher would compile for these arguments on that GPU."""
    signature, constants, attributes = {}, {}, {}
    for i, (parameter, value) in enumerate(zip(kernel.prepared.kernel.params, kernel.arguments, strict=True)):
        if parameter.is_constexpr:
            signature[parameter.name], constants[(i,)] = "constexpr", value
        else:
            specialize = not parameter.do_not_specialize
            signature[parameter.name] = describe(value, (i,), specialize, constants, attributes)
    source = ASTSource(kernel.prepared.kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=kernel.prepared.options)


def describe(value: Any, path: tuple[int, ...], specialize: bool, constants: dict[Any, Any], attributes: dict[Any, Any]) -> Any:  # fmt: skip
    """Triton's type of an argument; what it takes as constant or as divisible by 16 goes to the dictionaries."""
    if isinstance(value, torch.Tensor):
        attributes[path] = [["tt.divisibility", 16]]
        return POINTERS[value.dtype]
    if isinstance(value, tuple):
        parts = [describe(part, (*path, i), specialize, constants, attributes) for i, part in enumerate(value)]
        return type(value)(*parts)
    if value is None or (specialize and value == 1):
        constants[path] = value
        return "constexpr"
    if isinstance(value, float):
        return "fp32"
    if specialize and value % 16 == 0:
        attributes[path] = [["tt.divisibility", 16]]
    return "i32" if abs(value) < 2**31 else "i64"


class Machine(NamedTuple):
    """What the assembler made of a kernel."""

    registers: int
    stack: int
    code: list[tuple[int, str]]

    def spills_in_loops(self) -> int:
        """Loads and stores of spilled registers in the worst innermost loop with tensor core instructions."""
        return max((sum("LDL" in i or "STL" in i for i in body) for body in self.loops()), default=0)

    def loops(self) -> Iterator[list[str]]:
        for address, instruction in self.code:
            jump = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", instruction)
            if jump and int(jump[1], 16) < address:
                body = [i for at, i in self.code if int(jump[1], 16) <= at <= address]
                if any("MMA" in i for i in body) and sum("BRA" in i for i in body) == 1:
                    yield body


def machine_of(compiled: Any, folder: Path) -> Machine:
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    usage, code = (dump(cubin, option) for option in ("--dump-resource-usage", "--dump-sass"))
    instructions = [(int(at, 16), i) for at, i in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;/]+);", code)]
    registers, stack = (max(map(int, re.findall(rf"{name}:(\d+)", usage))) for name in ("REG", "STACK"))
    return Machine(registers, stack, instructions)


def dump(cubin: Path, option: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, option, cubin], capture_output=True, text=True, check=True).stdout


CASES: dict[str, tuple[torch.dtype, int]] = {
    "bf16 D64": (torch.bfloat16, 64),
    "bf16 D128": (torch.bfloat16, 128),
    "fp32 D64": (torch.float32, 64),
}


@pytest.mark.parametrize("sm", GPUS)
@pytest.mark.parametrize("case", CASES)
def test_causal_kernels_fit(case: str, sm: int, tmp_path: Path) -> None:
    for kernel in kernels(sm, *CASES[case], Options(hi=0)):
        if kernel.name.startswith("repair"):
            continue
        compiled = compile_for(sm, kernel)
        machine = machine_of(compiled, tmp_path)
        print(kernel.name, tuple(kernel.prepared.tiles), compiled.metadata.shared, kernel.shared_bound, machine[:2], machine.spills_in_loops())
        assert compiled.metadata.shared <= kernel.shared_bound <= GPUS[sm], kernel
        if kernel.name != "delta_kernel":
            assert any(TENSOR_CORES[sm] in i for _, i in machine.code)
