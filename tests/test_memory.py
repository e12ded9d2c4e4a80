"""Memory grows with N and not with N * N, measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from attend import Target

import ioattn

SOURCE = Path(ioattn.__file__).parents[1]

PROGRAM = """
import sys
sys.path.insert(0, {source!r})
import resource, torch, ioattn

def peak():
    if {device!r} == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def step(q, k, v, dout):
    out = ioattn.attention(q, k, v, backend={name!r}, **{options!r})
    return torch.autograd.grad(out, (q, k, v), dout)

def inputs(n):
    # Filled, because memory that nobody has touched is not resident yet.
    return [torch.full((1, 1, n, 64), 0.1 * i, device={device!r}).requires_grad_(i < 3) for i in range(4)]

step(*inputs(64))
tensors = inputs({n})
before = peak()
step(*tensors)
print(peak() - before)
"""

MIB = 2**20


def extra_memory(target: Target, n: int, **options: object) -> int:
    """Bytes that forward and backward at B1 H1 D64 FP32 add to the process's peak, outputs included."""
    if target.interpreted:
        pytest.skip("the interpreter's memory is not the kernels'")
    program = PROGRAM.format(source=str(SOURCE), device=target.device, name=target.name, n=n, options=options)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=280)
    return int(done.stdout)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (500, 500)}], ids=["full", "causal", "window"])
def test_memory_at_8192_tokens(backend: Target, options: dict[str, object]) -> None:
    """The scores alone would be 256 MiB, and autograd would keep several such matrices."""
    assert extra_memory(backend, 8192, **options) < 80 * MIB


@pytest.mark.slow
def test_memory_at_65536_tokens(backend: Target) -> None:
    """Standard attention needs 32 GiB for scores and weights alone."""
    assert extra_memory(backend, 65536, causal=True) < 256 * MIB


def test_memory_at_65536_tokens_in_a_window(backend: Target) -> None:
    assert extra_memory(backend, 65536, window=(300, 0)) < 256 * MIB
