"""A small run of every kernel of a GPU backend under NVIDIA's compute-sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from attend import Target
from races import BEHIND_BARRIERS, races

import ioattn

SOURCE = Path(ioattn.__file__).parents[1]
KERNELS = SOURCE / "ioattn/backends/gluon/kernels"

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

def heads_of_two(dim, dtype, len_q=190, len_k=230):
    q, k, v = (normal(2, heads, n, dim, dtype=dtype) for heads, n in ((2, len_q), (1, len_k), (1, len_k)))
    v[:1, :, -3:] = torch.nan
    return {{"q": q, "k": k, "v": v, "sinks": normal(2), "alibi_slopes": normal(2).abs()}}

def plain(dim, dtype, len_q=190, len_k=230):
    return {{n: x for n, x in heads_of_two(dim, dtype, len_q, len_k).items() if n in "qkv"}}

def packed(dim, dtype):
    offsets = torch.tensor([0, 40, 40, 150], device="cuda", dtype=torch.int32)
    q, k, v = (normal(160, 2, dim, dtype=dtype) for _ in range(3))
    return {{"q": q, "k": k, "v": v, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets}}

def decode(dim, dtype, heads, paged, splits):
    shape = (20, 1, 16, dim) if paged else (2, 1, 160, dim)
    tensors = {{"k_cache": normal(*shape, dtype=dtype), "v_cache": normal(*shape, dtype=dtype)}}
    if paged:
        tensors["block_table"] = torch.arange(20, device="cuda", dtype=torch.int32).reshape(2, 10)
    tensors["cache_seqlens"] = torch.tensor([150, 37], device="cuda", dtype=torch.int32)
    tensors |= {{n: normal(2, 1, 2, dim, dtype=dtype) for n in ("k_new", "v_new")}}
    q = normal(2, heads, 2, dim, dtype=dtype)
    ioattn.attention_decode(q, **tensors, window=(90, 0), num_splits=splits, backend={backend!r})
"""

PROGRAMS = {
    # Causal, so that edges are masked; NaN among the hidden values of one sequence, so that tiles are repaired; a bias
    # of its own and a repeated one, whose gradient has a kernel; packed with slack.
    ("triton", "edges"): """
for dtype in (torch.bfloat16, torch.float32):
    for bias in ((2, 2, 190, 230), (1, 2, 1, 230)):
        tensors = {"bias": normal(*bias), **heads_of_two(64, dtype)}
        step(ioattn.attention, tensors, causal=True, softcap=5.0)
    step(ioattn.attention_varlen, packed(40, dtype), window=(20, 20))
""",
    # A bias and a mask that are read many keys at a time; softcap on its own, whose weights have no maximum or that of
    # the first keys, which the last ones leave behind: see `kernels/repair.py`.
    ("triton", "scores"): """
for dim in (64, 128):
    for name, one in (("bias", normal(1, 1, 190, 240, dtype=torch.bfloat16)), ("mask", normal(1, 1, 190, 240) > 0)):
        step(ioattn.attention, {name: one, **plain(dim, torch.bfloat16, 190, 240)})
    for softcap in (20.0, 60.0):
        tensors = plain(dim, torch.bfloat16)
        tensors["k"][:, :, :64] = 0
        tensors["k"][:, :, 64:] *= 64
        step(ioattn.attention, tensors, softcap=softcap)
""",
    # Where halves in FP16 pay, for the sequence without NaN; dK and dV in kernels of their own at D 128.
    ("triton", "halves"): """
for dim in (64, 128):
    step(ioattn.attention, plain(dim, torch.float32, 260, 270), causal=True)
    step(ioattn.attention, heads_of_two(dim, torch.float32, 260, 270))
""",
    # With more rows the backward does not end in a minute.
    ("triton", "wide"): """
for dtype in (torch.bfloat16, torch.float32):
    step(ioattn.attention, plain(256, dtype, 70, 90), causal=True)
""",
    # By tensor cores and without, in pieces that are combined, with rows that are appended.
    ("triton", "decoding"): """
for dtype in (torch.bfloat16, torch.float32):
    for heads in (1, 8):
        for paged in (False, True):
            for splits in (1, 3):
                decode(128, dtype, heads, paged, splits)
""",
    ("gluon", "all"): """
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
@pytest.mark.parametrize("part", sorted({part for _, part in PROGRAMS}))
def test_sanitizer_is_silent(backend: Target, part: str, tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if backend.device != "cuda" or (backend.name, part) not in PROGRAMS:
        pytest.skip("about kernels on GPUs")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    program = STEP.format(source=str(SOURCE), backend=backend.name) + PROGRAMS[backend.name, part] + END
    # torch's cache of memory would hide an access behind the end of a tensor.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    # Not torch's own kernels, which would take minutes.
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--kernel-regex-exclude", "kns=native"]
    command += ["--racecheck-report", "analysis", "--show-backtrace", "no"] if tool == "racecheck" else []
    done = subprocess.run(
        [*command, sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment
    )
    told = done.stdout + done.stderr
    if "Device not supported" in told:
        pytest.skip("compute-sanitizer does not support this GPU here")
    assert "ran to its end" in told, told[-6000:]
    if tool == "racecheck" and backend.name == "gluon":
        assert races(told, KERNELS) <= BEHIND_BARRIERS, told[-6000:]
        assert told.count("Error:") == told.count("Race reported between"), told[-6000:]
    else:
        assert done.returncode == 0, told[-6000:]


REPORT = """
========= Error: Race reported between Read access at forward+0x20 in tiles.py:{read}
=========     and Write access at forward+0x5ee0 in tiles.py:{write} [2784 hazards]
=========
========= Error: Race reported between Write access at forward+0x8830 in forward.py:{kernel}
=========     and Read access at forward+0x200 in forward.py:{kernel} [64 hazards]
=========     and Read access at forward+0x40 in tiles.py:{read} [2 hazards]
"""


def line_of(name: str, text: str) -> int:
    """The number of the first line of a kernel's file that has a text."""
    return 1 + next(n for n, line in enumerate((KERNELS / name).read_text().splitlines()) if text in line)


def test_races_are_told_by_their_functions() -> None:
    lines = {"read": line_of("tiles.py", ".load(layout) == 0.0"), "write": line_of("tiles.py", ".store(poison)")}
    found = races(REPORT.format(kernel=line_of("forward.py", "def forward("), **lines), KERNELS)
    assert found == {("report", "is_suspect"), ("forward", "forward"), ("forward", "is_suspect")}
    assert found - BEHIND_BARRIERS == {("forward", "is_suspect")}
