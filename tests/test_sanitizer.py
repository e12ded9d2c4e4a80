"""A small run of every kernel of a GPU backend under NVIDIA's compute-sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from attend import Target

import ioattn

SOURCE = Path(ioattn.__file__).parents[1]

STEP = """
import sys
sys.path.insert(0, {source!r})
import torch, ioattn

def step(operation, tensors, **options):
    leaves = {{n: x.requires_grad_(x.is_floating_point() and n != "alibi_slopes") for n, x in tensors.items()}}
    out = operation(**leaves, **options, backend={backend!r})
    torch.autograd.grad(out.float().nansum(), [x for x in leaves.values() if x.requires_grad])

def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, device="cuda").to(dtype)

def heads_of_two(dim, dtype):
    q, k, v = (normal(2, heads, n, dim, dtype=dtype) for heads, n in ((2, 190), (1, 230), (1, 230)))
    v[:, :, -3:] = torch.nan
    return {{"q": q, "k": k, "v": v, "sinks": normal(2), "alibi_slopes": normal(2).abs()}}

def packed(dim, dtype):
    offsets = torch.tensor([0, 40, 40, 150], device="cuda", dtype=torch.int32)
    q, k, v = (normal(160, 2, dim, dtype=dtype) for _ in range(3))
    return {{"q": q, "k": k, "v": v, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets}}
"""

# Causal, so that edges are masked; NaN among the hidden values, so that tiles are repaired; a bias of its own and a
# repeated one; packed with slack.
PROGRAMS = {
    "triton": """
for dtype in (torch.bfloat16, torch.float32):
    for bias in ((2, 2, 190, 230), (1, 2, 1, 230)):
        tensors = {"bias": normal(*bias), **heads_of_two(64, dtype)}
        step(ioattn.attention, tensors, causal=True, softcap=5.0)
    step(ioattn.attention_varlen, packed(40, dtype), window=(20, 20))
""",
    "gluon": """
for dim in (64, 128, 256):
    for deterministic in (False, True):
        tensors = heads_of_two(dim, torch.bfloat16)
        step(ioattn.attention, tensors, causal=True, softcap=5.0, deterministic=deterministic)
        plain = {name: tensors[name].detach() for name in "qk"}
        step(ioattn.attention, {**plain, "v": plain["k"].clone()}, deterministic=deterministic)
        step(ioattn.attention_varlen, packed(dim, torch.float16), window=(20, 20), deterministic=deterministic)
""",
}

END = """
torch.cuda.synchronize()
print("ran to its end")
"""


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer_is_silent(backend: Target, tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if backend.device != "cuda" or backend.name == "eager":
        pytest.skip("about kernels on GPUs")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    program = STEP.format(source=str(SOURCE), backend=backend.name) + PROGRAMS[backend.name] + END
    # torch's cache of memory would hide an access behind the end of a tensor.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    # Not torch's own kernels, which would take minutes.
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--kernel-regex-exclude", "kns=native"]
    done = subprocess.run(
        [*command, sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment
    )
    told = (done.stdout + done.stderr)[-6000:]
    if "Device not supported" in told:
        pytest.skip("compute-sanitizer does not support this GPU here")
    assert done.returncode == 0, told
    assert "ran to its end" in told, told
