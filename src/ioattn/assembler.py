"""Which of NVIDIA's assemblers makes machine code of a kernel.

Triton 3.6 brings two, CUDA 12.8's and, for Blackwell GPUs, 12.9's. That of 12.8 sometimes leaves out the start of a
matrix descriptor's computation, and the product reads memory that is not its operand's: NaN and wrong gradients of a
few float32 shapes on an H200. Newer Tritons use 12.9 for Hopper, too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import triton
from triton import knobs

SOUND = (12, 9)

_one_at_a_time = threading.RLock()


@contextmanager
def sound_assembler() -> Iterator[None]:
    """Compile with CUDA 12.9's assembler, unless the user has named one; Triton's setting is the process's."""
    with _one_at_a_time, knobs.nvidia.scope():
        if torch.version.hip is None and (newer := _newer()):
            knobs.nvidia.ptxas = newer
        yield


def _newer() -> str | None:
    """The path of the sound assembler that Triton brings, where its choice is an older one that it brings, too."""
    chosen, other = knobs.nvidia.ptxas, getattr(knobs.nvidia, "ptxas_blackwell", None)
    is_named = Path(triton.__file__).parent not in Path(chosen.path).parents
    if is_named or other is None or _is_sound(chosen.version) or not _is_sound(other.version):
        return None
    path: str = other.path
    return path


def _is_sound(version: str) -> bool:
    return tuple(map(int, version.split("."))) >= SOUND
