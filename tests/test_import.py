"""Importing the package: quick, and nothing optional comes along."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ioattn

SOURCE = Path(ioattn.__file__).parents[1]
OPTIONAL = ("triton", "llvmlite", "matplotlib", "typer", "rich", "transformers", "diffusers")


def output_of(program: str, env: dict[str, str] | None = None) -> str:
    path = f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n"
    return subprocess.run(
        [sys.executable, "-c", path + program], capture_output=True, text=True, check=True, timeout=120, env=env
    ).stdout


def test_import_loads_nothing_that_torch_does_not_load() -> None:
    program = """
import torch
before = set(sys.modules)
import ioattn
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""
    loaded = set(output_of(program).split())
    assert not loaded & {*OPTIONAL, "numpy"}, loaded
    assert not {name for name in loaded - {"ioattn"} if name not in sys.stdlib_module_names}, loaded


@pytest.mark.parametrize("name", OPTIONAL)
def test_import_works_where_an_optional_package_is_missing(name: str) -> None:
    output_of(f"""
sys.modules[{name!r}] = None
import ioattn, torch
q = torch.zeros(1, 1, 4, 8)
ioattn.explain(q, q, q)
assert ioattn.attention(q, q, q, backend="eager").shape == q.shape
""")


def test_import_adds_less_than_50_ms(tmp_path: Path) -> None:
    program = """
import time, torch
started = time.process_time()
import ioattn
print(time.process_time() - started)
"""
    # Byte code is there, as after an installation, wherever the sources are and whatever the environment says.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPYCACHEPREFIX"] = str(tmp_path)
    output_of("import ioattn", env)
    # Processor time, and the least of a few runs: whatever else the machine does only ever adds.
    assert min(float(output_of(program, env)) for _ in range(3)) < 0.050
