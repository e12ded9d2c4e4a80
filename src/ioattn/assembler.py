"""Which of NVIDIA's assemblers makes machine code of a kernel.

Triton 3.6 brings two, CUDA 12.8's and, for Blackwell GPUs, 12.9's. That of 12.8 sometimes leaves out the start of a
matrix descriptor's computation, and the product reads memory that is not its operand's: NaN and wrong gradients of a
few float32 shapes on an H200. Newer Tritons use 12.9 for Hopper, too.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from triton import knobs

SOUND = (12, 9)

_one_at_a_time = threading.RLock()


@contextmanager
def sound_assembler() -> Iterator[None]:
    """Compile with CUDA 12.9's assembler, unless the user has named one; Triton's setting is the process's."""
    with _one_at_a_time, knobs.nvidia.scope():
        if torch.version.hip is None and "TRITON_PTXAS_PATH" not in os.environ and (newer := _newer()):
            knobs.nvidia.ptxas = newer
        yield


def _newer() -> str | None:
    """The path of a sound assembler where Triton's choice is an older one."""
    tools = knobs.nvidia.ptxas, getattr(knobs.nvidia, "ptxas_blackwell", None)
    if _is_sound(tools[0].version) or tools[1] is None or not _is_sound(tools[1].version):
        return None
    path: str = tools[1].path
    return path


def _is_sound(version: str) -> bool:
    return tuple(map(int, version.split("."))) >= SOUND
