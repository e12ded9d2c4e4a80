"""The one door to llvmlite: from IR text to an entry point, through a cache of object code on disk.

An object's name in the cache is the hash of everything that determines it: IR, CPU, features and llvmlite's version. A
file carries the hash of its content, is written under a temporary name and renamed, so that a reader sees a whole file
or none; a file that cannot be read, does not match its hash or cannot be written costs a compilation and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import platform
import tempfile
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

ENTRY = "ioattn_worker"
"""The one exported function of every module."""

_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
_AVX2 = ("avx2", "fma", "f16c")


@dataclass(frozen=True)
class Target:
    """What code is generated for: LLVM's names, the vector width in fp32 lanes and the registers that hold a tile."""

    triple: str
    cpu: str
    features: str
    lanes: int
    dpbf16: bool = False

    @property
    def registers(self) -> int:
        """Vector registers of the instruction set."""
        return 16 if self.lanes == 8 else 32

    @classmethod
    def of(cls, triple: str, cpu: str, features: str) -> Target | None:
        """The target with the widest vectors that `features` ("+avx2,-avx512f,...") allows, None if it has none."""
        present = {name[1:] for name in features.split(",") if name.startswith("+")}
        if triple.startswith(("x86_64", "amd64")):
            if present.issuperset(_AVX512):
                return cls(triple, cpu, features, 16, "avx512bf16" in present)
            return cls(triple, cpu, features, 8) if present.issuperset(_AVX2) else None
        return cls(triple, cpu, features, 4) if triple.startswith(("aarch64", "arm64")) else None


def unusable() -> str | None:
    """Why code cannot be generated on this machine and what would change that, or None."""
    if importlib.util.find_spec("llvmlite") is None:
        return "llvmlite is not installed; install it with: pip install llvmlite"
    try:
        target = host()
    except (ImportError, OSError, RuntimeError) as error:
        return f"llvmlite does not load ({error}); reinstall it with: pip install --force-reinstall llvmlite"
    if target is None:
        return f"this CPU ({platform.machine()}) has no instruction set known here; AVX-512, AVX2 or NEON is needed"
    return None


@lru_cache
def host() -> Target | None:
    """The machine this runs on, or None where its instruction set is not known."""
    llvm = _llvm()
    features = llvm.get_host_cpu_features().flatten()
    return Target.of(llvm.get_process_triple(), llvm.get_host_cpu_name(), features)


@lru_cache
def _llvm() -> Any:
    # Loading it takes 50 ms, which nobody should pay for importing this package.
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


def cache_directory() -> Path:
    """Where object code is kept: `~/.cache/ioattn`; deleting it is always safe."""
    return Path.home() / ".cache" / "ioattn"


_engines: dict[str, tuple[Any, int]] = {}
_lock = threading.Lock()


def load(ir: str, target: Target) -> int:
    """The address of `ENTRY` in the compiled `ir`, which stays loaded for good."""
    key = _key(ir, target)
    with _lock:
        if key not in _engines:
            code = _read(key)
            if code is None:
                code = compile_object(ir, target)
                _write(key, code)
            _engines[key] = _link(code)
        return _engines[key][1]


def _key(ir: str, target: Target) -> str:
    import llvmlite

    parts = (ir, target.triple, target.cpu, target.features, llvmlite.__version__)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _link(code: bytes) -> tuple[Any, int]:
    llvm = _llvm()
    machine = llvm.Target.from_default_triple().create_target_machine(codemodel="jitdefault")
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine, engine.get_function_address(ENTRY)


def compile_object(ir: str, target: Target) -> bytes:
    """Object code for `target`."""
    machine, module = _optimised(ir, target)
    return machine.emit_object(module)


def compile_assembly(ir: str, target: Target) -> str:
    """Assembly for `target`, which need not be this machine."""
    _llvm().initialize_all_targets()
    _llvm().initialize_all_asmprinters()
    machine, module = _optimised(ir, target)
    return machine.emit_assembly(module)


def _optimised(ir: str, target: Target) -> tuple[Any, Any]:
    llvm = _llvm()
    machine = llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=target.features, opt=3, reloc="pic", codemodel="jitdefault"
    )
    module = llvm.parse_assembly(f'target triple = "{target.triple}"\n{ir}')
    module.verify()
    # Loops are unrolled and vectors chosen by the generator; LLVM's own passes for that only cost time here.
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_unrolling = options.loop_vectorization = options.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return machine, module


def _read(key: str) -> bytes | None:
    try:
        content = (cache_directory() / f"{key}.o").read_bytes()
    except (OSError, RuntimeError):
        return None
    digest, code = content[:32], content[32:]
    return code if hashlib.sha256(code).digest() == digest else None


def _write(key: str, code: bytes) -> None:
    temporary = None
    try:
        directory = cache_directory()
        directory.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=directory)
        with os.fdopen(descriptor, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
        Path(temporary).replace(directory / f"{key}.o")
    except (OSError, RuntimeError):
        if temporary is not None:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
