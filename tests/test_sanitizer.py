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

# Causal, so that edges are masked; NaN among the hidden values, so that tiles are repaired; a bias of its own and a
# repeated one; packed with slack.
PROGRAM = """
import sys
sys.path.insert(0, {source!r})
import torch, ioattn

def step(operation, tensors, **options):
    leaves = {{n: x.requires_grad_(x.is_floating_point() and n != "alibi_slopes") for n, x in tensors.items()}}
    out = operation(**leaves, **options, backend={backend!r})
    torch.autograd.grad(out.float().nansum(), [x for x in leaves.values() if x.requires_grad])

def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, device="cuda").to(dtype)

for dtype in (torch.bfloat16, torch.float32):
    for bias in ((2, 2, 90, 130), (1, 2, 1, 130)):
        q, k, v = (normal(2, heads, n, 64, dtype=dtype) for heads, n in ((2, 90), (1, 130), (1, 130)))
        v[:, :, -3:] = torch.nan
        extras = {{"bias": normal(*bias), "sinks": normal(2), "alibi_slopes": normal(2).abs()}}
        step(ioattn.attention, {{"q": q, "k": k, "v": v, **extras}}, causal=True, softcap=5.0)
    offsets = torch.tensor([0, 40, 40, 150], device="cuda", dtype=torch.int32)
    q, k, v = (normal(160, 2, 40, dtype=dtype) for _ in range(3))
    packed = {{"q": q, "k": k, "v": v, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets}}
    step(ioattn.attention_varlen, packed, window=(20, 20))
torch.cuda.synchronize()
print("ran to its end")
"""


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer_is_silent(backend: Target, tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if backend.device != "cuda" or ioattn.registry.is_forward_only(backend.name) or backend.name == "eager":
        pytest.skip("about kernels on GPUs")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    program = PROGRAM.format(source=str(SOURCE), backend=backend.name)
    # torch's cache of memory would hide an access behind the end of a tensor.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--kernel-regex", "kns=_kernel"]
    done = subprocess.run(
        [*command, sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment
    )
    told = (done.stdout + done.stderr)[-6000:]
    if "Device not supported" in told:
        pytest.skip("compute-sanitizer does not support this GPU here")
    assert done.returncode == 0, told
    assert "ran to its end" in told, told
