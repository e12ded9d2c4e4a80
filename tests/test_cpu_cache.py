"""The CPU backend's cache of object code: what it is keyed by, and that damage to it costs a compilation only."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ioattn
from ioattn.backends import cpu
from ioattn.backends.cpu import jit, launch, plan
from ioattn.backends.cpu.ir import F32, Module

pytestmark = pytest.mark.skipif(cpu.unusable() is not None, reason=str(cpu.unusable()))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory, and nothing loaded yet."""
    directory = tmp_path / "cache"
    monkeypatch.setattr(jit, "cache_directory", lambda: directory)
    monkeypatch.setattr(jit, "_engines", {})
    return directory


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    done: list[str] = []
    compile_object = jit.compile_object

    def counted(ir: str, target: jit.Target) -> bytes:
        done.append(ir)
        return compile_object(ir, target)

    monkeypatch.setattr(jit, "compile_object", counted)
    return done


def stores(number: float) -> str:
    """IR that stores a number."""
    module = Module()
    f = module.function(jit.ENTRY, "ptr dst", exported=True)
    f.args.dst.store(f.constant(number, F32))
    return str(module)


def value_of(ir: str) -> float:
    target = jit.host()
    assert target is not None
    out = torch.zeros(1)
    launch.worker(jit.load(ir, target))(out.data_ptr())
    return out.item()


def forget() -> None:
    """What a fresh process would not know."""
    jit._engines.clear()


def test_a_second_process_does_not_compile(cache: Path, compilations: list[str]) -> None:
    assert value_of(stores(1.5)) == 1.5
    forget()
    assert value_of(stores(1.5)) == 1.5
    assert len(compilations) == 1
    assert len(list(cache.iterdir())) == 1


def test_the_key_covers_ir_cpu_features_and_version(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import llvmlite

    target = jit.host()
    assert target is not None
    keys = {
        jit._key(stores(1.0), target),
        jit._key(stores(2.0), target),
        jit._key(stores(1.0), replace(target, cpu="other")),
        jit._key(stores(1.0), replace(target, features=target.features + ",+made-up")),
        jit._key(stores(1.0), replace(target, triple="other")),
    }
    monkeypatch.setattr(llvmlite, "__version__", "0.0")
    assert len(keys | {jit._key(stores(1.0), target)}) == 6


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "foreign"])
def test_a_damaged_file_costs_a_compilation(cache: Path, compilations: list[str], damage: str) -> None:
    value_of(stores(2.5))
    (file,) = cache.iterdir()
    content = file.read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    damaged = {"empty": b"", "cut": content[:-7], "flipped": flipped, "foreign": b"not object code" * 100}
    file.write_bytes(damaged[damage])
    forget()
    assert value_of(stores(2.5)) == 2.5
    assert len(compilations) == 2
    assert file.read_bytes() == content


def test_an_unwritable_cache_costs_a_compilation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(jit, "cache_directory", lambda: tmp_path / "file" / "cache")
    monkeypatch.setattr(jit, "_engines", {})
    assert value_of(stores(3.5)) == 3.5


def test_a_machine_without_a_home_costs_a_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(jit, "cache_directory", homeless)
    monkeypatch.setattr(jit, "_engines", {})
    assert value_of(stores(4.5)) == 4.5


def test_nothing_temporary_stays_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fails)
    assert value_of(stores(5.5)) == 5.5
    assert list(cache.iterdir()) == []


WRITER = """
import sys, pathlib, torch, ioattn
from ioattn.backends.cpu import jit
jit.cache_directory = lambda: pathlib.Path(sys.argv[1])
q = torch.ones(1, 1, 20, 16)
assert (ioattn.attention(q, q, q, backend="cpu") == 1).all()
"""


def test_processes_write_at_the_same_time(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    writers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    for writer in writers:
        _, errors = writer.communicate(timeout=120)
        assert writer.returncode == 0, errors
    (file,) = tmp_path.iterdir()
    assert file.suffix == ".o"


def test_without_llvmlite_eager_runs_and_the_reason_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit.importlib.util, "find_spec", lambda name: None)
    reason = cpu.unusable()
    assert reason is not None
    assert "pip install llvmlite" in reason
    q = torch.randn(1, 1, 8, 16)
    explanation = ioattn.explain(q, q, q)
    assert explanation.chosen == "eager"
    assert "pip install llvmlite" in str(explanation)


def test_an_unknown_cpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "host", lambda: None)
    reason = cpu.unusable()
    assert reason is not None
    assert "AVX2" in reason
    with pytest.raises(RuntimeError, match="AVX2"):
        plan._host()
