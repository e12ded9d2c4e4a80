"""The Triton kernels compiled for GPUs that are not here: shared memory, spills, tensor core instructions."""

from __future__ import annotations

import ctypes
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

from sass import unwritten_reads  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from ioattn import driver  # noqa: E402
from ioattn.assembler import sound_assembler  # noqa: E402
from ioattn.backends.triton import config, halves, launch  # noqa: E402
from ioattn.backends.triton.call import Prepared  # noqa: E402
from ioattn.backends.triton.config import Gpu  # noqa: E402

# Compute capability: shared memory that one program may use (CUDA C++ Programming Guide, technical specifications).
GPUS = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}

TENSOR_CORES = {80: "HMMA", 89: "HMMA", 90: "HGMMA", 100: "HMMA", 120: "HMMA"}

POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.bool: "*i1",
    torch.int32: "*i32",
}

DIRECTIONS: dict[str, config.Direction] = {
    "measure": "delta",
    "split": "delta",
    "halves": "forward",
    "whole": "forward",
    "delta": "delta",
    "halves_key": "key_value",
    "halves_value": "key_value",
    "halves_query": "query",
    "key": "key_value",
    "value": "key_value",
    "query": "query",
    "bias": "bias",
}
"""What bounds the shared memory of a step's kernels."""


class Kernel(NamedTuple):
    """One kernel as the host would launch it."""

    name: str
    prepared: Prepared
    arguments: tuple[Any, ...]
    shared_bound: int


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def gpu(sm: int) -> Gpu:
    return Gpu(divmod(sm, 10), GPUS[sm])


def kernels(
    sm: int,
    dtype: torch.dtype,
    dim: int,
    options: Options = Options(),  # noqa: B008
    dim_v: int | None = None,
    lse_gradient: bool = False,
    **extras: Any,
) -> Iterator[Kernel]:
    """Every kernel of the forward and the backward of one problem, on tensors without memory."""

    packed = "cu_seqlens_q" in extras
    shape = (4096, 8, dim) if packed else (2, 8, 2048, dim)
    kv_shape = (4096, 4, dim) if packed else (2, 4, 2048, dim)
    v_shape = (*kv_shape[:-1], dim_v or dim)
    q, k, v = (empty(*sizes, dtype=dtype) for sizes in (shape, kv_shape, v_shape))
    tensors = Tensors(q, k, v, **extras)
    problem = Problem.of(tensors, options)
    out, lse = q.new_empty((*q.shape[:-1], v.shape[-1])), empty(*((8, 4096) if packed else shape[:3]))
    dbias = None if tensors.bias is None else torch.empty_like(tensors.bias)
    grads = Gradients(*map(torch.empty_like, (q, k, v)), dbias)
    forward = launch.prepare_forward(problem, tensors, out, gpu(sm))
    steps = launch.prepare_backward(problem, tensors, out, out, grads, gpu(sm))
    room = halves.room_for(problem, halves.wanted((*forward, *steps)), tensors, out)
    given = launch.forward_arguments(problem, tensors, out, lse, room._replace(dout=None))
    totals = lse if problem.sinks or dbias is not None else None
    others = (out, lse, out, lse if lse_gradient else None, totals, None, *launch.rows_for(problem, lse))
    given += launch.backward_arguments(problem, tensors, grads, others, room, steps)
    for name, group, arguments in zip((*forward._fields, *steps._fields), (*forward, *steps), given, strict=True):
        for prepared in group:
            bound = config.shared_bytes(problem, DIRECTIONS[name], group[0].tiles, gpu(sm))
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
    with sound_assembler():
        return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=kernel.prepared.options)


def describe(
    value: Any, path: tuple[int, ...], specialize: bool, constants: dict[Any, Any], attributes: dict[Any, Any]
) -> Any:
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

    def spills_in_loops(self, straight: bool = False) -> int:
        """Loads and stores of spilled registers in the worst innermost loop with tensor core instructions."""
        return max((sum("LDL" in i or "STL" in i for i in body) for body in self.loops(straight=straight)), default=0)

    def waits_in_loops(self) -> int:
        """Waits for products of tensor cores in the worst innermost loop.

        The assembler serialises products, and only says so in a warning, where it takes moves in another block for
        writes to their sums.
        """
        return max((sum("WARPGROUP.DEPBAR" in i for i in body) for body in self.loops()), default=0)

    def reads_of_nothing(self) -> list[str]:
        """Arithmetic on registers that nothing has written, or on the stack pointer.

        The assembler of CUDA 12.8 (Triton 3.6) may compute the address of an operand in front of what it starts from:
        in float32, D 40 and Dv 72, tiles of 16 by 64 on 8 warps, dK and dV were wrong on an H200 for that reason.
        """
        written, found = {"RZ", "URZ"}, []
        for _, instruction in self.code:
            name, operands = re.sub(r"^@\S+ ", "", instruction).partition(" ")[::2]
            parts = re.split(r",(?![^\[]*\])", operands)
            if name.startswith(("IADD", "VIADD", "IMAD", "LEA", "UIADD")):
                sources = {r for part in parts[1:] for r in re.findall(r"\bU?R\d+\b", part)}
                stack_pointer = {"R1"} if parts[0].strip() != "R1" else set()
                if sources - written or sources & stack_pointer:
                    found.append(instruction)
            targets = [part.strip() for part in parts if not re.fullmatch(r"\s*U?P(\d|T)", part)]
            written |= registers_written(name, targets[0] if targets else "")
        return found

    def loops(self, named: str = "MMA", straight: bool = False) -> Iterator[list[str]]:
        """Innermost loops with such an instruction; `straight`: only those without a branch inside."""
        jumps = [(at, re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", i)) for at, i in self.code]
        backward = [(int(jump[1], 16), at) for at, jump in jumps if jump and int(jump[1], 16) < at]
        for start, end in backward:
            body = [i for at, i in self.code if start <= at <= end]
            inner = [at for _, at in backward if start <= at < end]
            branches = sum("BRA" in i for i in body) - 1
            if any(named in i for i in body) and not inner and not (straight and branches):
                yield body


def registers_written(name: str, target: str) -> set[str]:
    """The registers that an instruction with this name and first operand writes."""
    register = re.fullmatch(r"(U?R)(\d+)", target)
    if not register or name.startswith(("ST", "LDGSTS", "RED.")) or "SETP" in name:
        return set()
    product = re.match(r"HGMMA\.64x(\d+)x", name)
    pair = "WIDE" in name or "CS2R" in name or (".64" in name and not name.startswith("SHF"))
    count = int(product[1]) // 2 if product else 4 if re.search(r"\.128|LDSM.*\.4|[HIQ]MMA|F64", name) else 1 + pair
    return {f"{register[1]}{int(register[2]) + i}" for i in range(count)}


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

# Per step of the innermost loop. The rest of the accumulators' 128 registers per thread is too little for this one.
MAX_SPILLS = 16
# Tiles were chosen with 3.6. With 3.9 dK and dV in float32 at D 64 spill 37 times; nothing was timed with it.
TILES_ARE_FOR_THIS_TRITON = triton.__version__.startswith("3.6.")
# The fastest of those that were timed on an H200, all the same, with what they had when they were timed.
KNOWN_SPILLS = {
    ("fp32 D64", 90, "forward_kernel"): 25,
    # With bf16x6, for what does not fit in halves, at edges; 17 without a factor of the LSE, 1 between the edges.
    ("fp32 D64", 90, "key_value_kernel"): 20,
}

WITHOUT_PRODUCTS = ("delta_kernel", "measure_kernel", "split_kernel")


@pytest.mark.parametrize("sm", GPUS)
@pytest.mark.parametrize("case", CASES)
def test_causal_kernels_fit(case: str, sm: int, tmp_path: Path) -> None:
    for kernel in kernels(sm, *CASES[case], Options(hi=0)):
        if kernel.name.startswith("repair"):
            continue
        compiled = compile_for(sm, kernel)
        machine = machine_of(compiled, tmp_path)
        assert compiled.metadata.shared <= kernel.shared_bound <= GPUS[sm], kernel
        if kernel.name in WITHOUT_PRODUCTS:
            assert machine.stack <= 16, kernel  # nothing to speak of: it has no loop
            continue
        assert any(TENSOR_CORES[sm] in instruction for _, instruction in machine.code), kernel
        assert machine.reads_of_nothing() == [], kernel
        if sm != 100 and TILES_ARE_FOR_THIS_TRITON:  # sm_100's loops wait for the tensor cores in loops of their own
            allowed = KNOWN_SPILLS.get((case, sm, kernel.name), MAX_SPILLS)
            assert machine.spills_in_loops() <= allowed, kernel


STEPS_ON_HOPPER: dict[str, tuple[Options, dict[str, torch.Tensor]]] = {
    "full": (Options(), {}),
    "causal": (Options(hi=0), {}),
    "softcap": (Options(softcap=20.0), {}),
    "bias": (Options(), {"bias": empty(1, 1, 2048, 2048, dtype=torch.bfloat16)}),
    "mask": (Options(), {"mask": empty(1, 1, 2048, 2048, dtype=torch.bool)}),
    "window": (Options(lo=-512, hi=512), {}),
}


# Per step: 334 TFLOP/s on an H200 with it; by 128 keys on 8 warps, which spill nothing, 310.
SPILLS_AND_IS_FASTEST = {("mask", 128, "key_value_kernel"): 1}


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("feature", STEPS_ON_HOPPER)
def test_products_on_hopper_do_not_wait_for_each_other(feature: str, dim: int, tmp_path: Path) -> None:
    """A step has 2 products in the forward, 3 in dQ, 4 in dK and dV, each of several instructions.

    Tiles that were chosen for a feature do not spill, but for one number in one kernel.
    """
    options, extras = STEPS_ON_HOPPER[feature]
    chosen = TILES_ARE_FOR_THIS_TRITON and any((dim, feature) == row[1:] for row in config.WITH)
    for kernel in kernels(90, torch.bfloat16, dim, options, **extras):
        if kernel.name in ("forward_kernel", "query_kernel", "key_value_kernel"):
            compiled = compile_for(90, kernel)
            assert compiled.metadata.shared <= GPUS[90], kernel
            machine = machine_of(compiled, tmp_path)
            assert machine.waits_in_loops() <= 4, kernel
            allowed = SPILLS_AND_IS_FASTEST.get((feature, dim, kernel.name), 0)
            assert machine.spills_in_loops() <= allowed or not chosen, kernel
            assert machine.reads_of_nothing() == [], kernel


@pytest.mark.parametrize("dim", [64, 128])
def test_a_mask_is_what_tensor_cores_start_from(dim: int, tmp_path: Path) -> None:
    """Made while they multiply the tile before; behind the product it cost a forward 13% on an H200."""
    options, extras = STEPS_ON_HOPPER["mask"]
    kernel = next(kernels(90, torch.bfloat16, dim, options, **extras))
    full, *_ = machine_of(compile_for(90, kernel), tmp_path).loops()
    product, *_ = (at for at, i in enumerate(full) if "HGMMA" in i)
    made = [at for at, i in enumerate(full) if "PRMT" in i]
    tiles = kernel.prepared.tiles
    assert len(made) >= tiles.q_tile * tiles.k_tile / (32 * tiles.num_warps), kernel
    assert max(made) < product, kernel
    assert ", RZ," not in full[product], kernel
    assert sum("FSEL" in i for i in full) < 8, kernel


@pytest.mark.parametrize("feature", ["bias", "mask"])
def test_words_are_read_in_front_of_the_copies_and_used_behind_the_product(feature: str, tmp_path: Path) -> None:
    """In dK and dV. Behind the copies of the next tile both come late; what is used before the product is waited for.

    Both cost a backward with a bias 8% on an H200, with a mask 14%.
    """
    options, extras = STEPS_ON_HOPPER[feature]
    for kernel in kernels(90, torch.bfloat16, 128, options, **extras):
        if kernel.name == "key_value_kernel":
            full, *_ = machine_of(compile_for(90, kernel), tmp_path).loops()
            reads = [at for at, i in enumerate(full) if "LDG.E" in i]
            product = next(at for at, i in enumerate(full) if "WARPGROUP.DEPBAR" in i)
            assert product < min(reads) <= max(reads) < next(at for at, i in enumerate(full) if "LDGSTS" in i), kernel
            words = {re.search(r"LDG\.\S+ (R\d+)", full[at])[1] for at in reads}  # type: ignore[index]
            early = [i for i in full[:product] if words & set(re.findall(r"\bR\d+\b", i))]
            assert not early, kernel


@pytest.mark.parametrize("precision", [None, "tf32"])
@pytest.mark.parametrize("sm", [80, 90])
def test_float32_products_are_rounded_to_tf32_on_request_only(sm: int, precision: str | None, tmp_path: Path) -> None:
    for kernel in kernels(sm, torch.float32, 64, Options(precision=precision)):
        if kernel.name.startswith("repair") or kernel.name in WITHOUT_PRODUCTS:
            continue
        products = [i for _, i in machine_of(compile_for(sm, kernel), tmp_path).code if "MMA" in i.split()[0]]
        assert products, kernel
        assert all(("TF32" in i) == (precision == "tf32") for i in products), kernel


def test_pieces_of_halves_are_added_outside_of_the_tensor_cores() -> None:
    """Which cut off what does not fit in a sum. Triton makes one chain of a sum of products where it sees one."""
    names = set()
    for kernel in kernels(90, torch.float32, 128):
        if kernel.prepared.tiles.precision == config.FP16X3:
            sums = re.findall(r"= tt\.dot %\S+, %\S+, (%\w+)", compile_for(90, kernel).asm["ttir"])
            started = [x for x in sums if x.startswith("%cst")]
            # Two pieces, each of three products.
            assert len(sums) == 3 * len(started) > 0, kernel
            names.add(kernel.name)
    assert names == {"forward_kernel", "key_value_kernel", "query_kernel"}


PACKED = {"cu_seqlens_q": empty(9, dtype=torch.int32), "cu_seqlens_k": empty(9, dtype=torch.int32)}

BF16, FP32 = torch.bfloat16, torch.float32

SCORED = {"alibi_slopes": empty(8), "sinks": empty(8), "lse_gradient": True}

FEATURES: dict[str, tuple[torch.dtype, Options, dict[str, Any]]] = {
    "window": (BF16, Options(lo=-100, hi=20), {}),
    "softcap and ALiBi": (FP32, Options(hi=0, softcap=20.0), {"alibi_slopes": empty(8)}),
    "bias": (BF16, Options(), {"bias": empty(2, 8, 2048, 2048)}),
    "repeated bias and sinks": (FP32, Options(), {"bias": empty(1, 8, 1, 2048), "sinks": empty(8)}),
    "mask": (torch.float16, Options(), {"mask": empty(2, 1, 2048, 2048, dtype=torch.bool)}),
    "packed": (BF16, Options(hi=0, max_seqlen_q=900, max_seqlen_k=900), PACKED),
    "gradient of the LSE": (BF16, Options(), {"lse_gradient": True}),
    "gradient of the LSE, float32": (FP32, Options(hi=0), {"lse_gradient": True}),
    "gradient of the LSE, packed": (
        torch.float16,
        Options(max_seqlen_q=900, max_seqlen_k=900),
        {**PACKED, "lse_gradient": True},
    ),
    "all at once": (
        BF16,
        Options(lo=-100, hi=20, softcap=50.0),
        {**SCORED, "bias": empty(2, 8, 2048, 2048), "mask": empty(2, 1, 1, 2048, dtype=torch.bool)},
    ),
    "all at once, float32": (
        FP32,
        Options(lo=-100, hi=20, softcap=50.0),
        {**SCORED, "bias": empty(2, 8, 2048, 2048), "mask": empty(2, 1, 1, 2048, dtype=torch.bool)},
    ),
    "all at once, packed": (
        torch.float16,
        Options(lo=-100, hi=20, softcap=50.0, max_seqlen_q=900, max_seqlen_k=900),
        {**SCORED, **PACKED},
    ),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_compiles(feature: str, tmp_path: Path) -> None:
    dtype, options, extras = FEATURES[feature]
    for kernel in kernels(90, dtype, 64, options, **extras):
        compiled = compile_for(90, kernel)
        assert compiled.metadata.shared <= kernel.shared_bound <= GPUS[90], kernel
        machine = machine_of(compiled, tmp_path)
        assert len(machine.code) > 100, kernel
        assert machine.reads_of_nothing() == [], kernel


@pytest.mark.parametrize("dim_v", [8, 16])
def test_narrow_values_are_multiplied_by_no_unwritten_descriptor(dim_v: int, tmp_path: Path) -> None:
    """NaN and 1e36 on an H200 with the assembler of CUDA 12.8, which `assembler.py` does without."""
    for kernel in kernels(90, FP32, 64, Options(precision="bf16x6"), dim_v=dim_v):
        if kernel.name == "forward_kernel":
            compiled = compile_for(90, kernel)
            (tmp_path / "kernel.cubin").write_bytes(compiled.asm["cubin"])
            assert unwritten_reads(dump(tmp_path / "kernel.cubin", "--dump-sass").splitlines()) == []


BYTES = {"u64": 8, "u32": 4, "b32": 4, "f32": 4}


@pytest.mark.parametrize("feature", ["causal", "mask"])
def test_a_queue_writes_the_parameters_that_a_kernel_declares(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_launch_function", lambda: None)
    options, extras = STEPS_ON_HOPPER[feature]
    for kernel in kernels(90, BF16, 64, options, **extras):
        compiled = compile_for(90, kernel)
        head = compiled.asm["ptx"].split(".entry", 1)[1].split(")", 1)[0]
        declared = [BYTES[name] for name in re.findall(r"\.param \.(\w+)", head)]
        tensors = list(tensors_in(kernel.arguments))
        queue = driver.Queue(len(tensors))
        queue.add(compiled, 1, kernel.arguments, {id(x): i for i, x in enumerate(tensors)})
        numbers = {ctypes.addressof(x): ctypes.sizeof(x) for x in queue.kept}
        assert [numbers.get(at, 8) for at in queue.launches[0][-1]] == declared, kernel


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from tensors_in(part)


def test_the_assembler_is_the_users_where_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = triton.knobs.nvidia.ptxas
    with sound_assembler():
        assert [int(x) for x in triton.knobs.nvidia.ptxas.version.split(".")] >= [12, 9]
    assert triton.knobs.nvidia.ptxas == before
    named = tmp_path / "ptxas"
    named.symlink_to(before.path)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(named))
    with sound_assembler():
        assert triton.knobs.nvidia.ptxas.path == str(named)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_widest_heads_compile(dtype: torch.dtype) -> None:
    for kernel in kernels(90, dtype, 256):
        assert compile_for(90, kernel).metadata.shared <= kernel.shared_bound <= GPUS[90], kernel


@pytest.mark.parametrize("shared_memory", [64 * 1024, *GPUS.values()])
@pytest.mark.parametrize("dim", [16, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tiles_fit_in_shared_memory_by_construction(dtype: torch.dtype, dim: int, shared_memory: int) -> None:
    """Also where a GPU has less than any that the table was made for; where nothing fits, the backend objects."""
    x, bias = empty(1, 1, 300, dim, dtype=dtype), empty(1, 1, 300, 300)
    problem = Problem.of(Tensors(x, x, x, bias, bias.bool()), Options())
    for capability in ((8, 0), (9, 0), (10, 0)):
        small = Gpu(capability, shared_memory)
        directions = ("forward", "delta", "key_value", "query", "bias")
        tiles = {direction: config.choose(problem, direction, small) for direction in directions}
        needs = [config.shared_bytes(problem, direction, tiles[direction], small) for direction in directions]
        assert (max(needs) > shared_memory) == bool(config.objections(problem, small))
        assert max(needs) <= shared_memory or (dtype == torch.float32 and dim > 128 and shared_memory < 99 * 1024)
