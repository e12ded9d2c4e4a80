"""The host side of "fp16x3": room for Q, K, V and dO in halves, and the pass that fills it.

`kernels/halves.py` says what is in them. The room is as large as the operands themselves, and freed after the call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ioattn.backends.triton.arguments import Form, Inputs, Matrix, Numbers, SplitOperands, encoded, padded
from ioattn.backends.triton.call import Prepared
from ioattn.backends.triton.config import FP16X3, Tiles
from ioattn.backends.triton.kernels.halves import MAXIMA, measure_kernel, split_kernel
from ioattn.launching import Arguments
from ioattn.problem import Problem, Tensors

TILES = Tiles(64, 64, 4, 1)
"""Any: the pass reads each tensor twice and writes it once."""


class Room(NamedTuple):
    """Scratch tensors, None where no kernel multiplies halves."""

    maxima: Tensor | None = None
    scales: Tensor | None = None
    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    dout: Tensor | None = None


NO_ROOM = Room()


def wanted(groups: Iterable[Sequence[Prepared]]) -> bool:
    """Whether one of these kernels multiplies halves."""
    return any(kernel.tiles.precision == FP16X3 for kernels in groups for kernel in kernels)


def room_for(problem: Problem, wanted: bool, tensors: Tensors, dout: Tensor | None) -> Room:
    """Room for q, k, v and, in a backward, dout."""
    if not wanted:
        return NO_ROOM
    heads = (1 if problem.packed else problem.batch, problem.kv_heads, 4)
    maxima = torch.zeros((*heads, MAXIMA.value), dtype=torch.int32, device=problem.device)
    halves = (None if x is None else _halves_of(x) for x in (*tensors[:3], dout))
    return Room(maxima, torch.empty(heads, dtype=torch.float32, device=problem.device), *halves)


def _halves_of(x: Tensor) -> Tensor:
    return torch.empty((*x.shape[:-1], 2 * padded(x.shape[-1])), dtype=torch.float16, device=x.device)


def prepare(
    problem: Problem, numbers: Numbers, form: Form, tiles_of_rows: int, operands: int
) -> tuple[list[Prepared], list[Prepared]]:
    """The kernel that measures three or four operands, and the one that splits them."""
    batch = 1 if problem.packed else problem.batch
    numbers = numbers._replace(batch=encoded(batch), heads=encoded(problem.heads), tiles=encoded(tiles_of_rows))
    programs = operands * batch * problem.heads * tiles_of_rows
    measure, split = (Prepared(kernel, programs, (numbers, form), TILES) for kernel in (measure_kernel, split_kernel))
    return [measure], [split]


def arguments(inputs: Inputs, dout: Matrix | None, room: Room, packed: bool) -> list[Arguments]:
    """The arguments that hold tensors, for each of the two kernels."""
    return [(inputs, dout, room.maxima), (inputs, dout, room.maxima, split_operands(room, packed), room.scales)]


def split_operands(room: Room, packed: bool) -> SplitOperands:
    """The operands in halves, as kernels are handed them."""
    q, k, v, dout = (None if x is None else Matrix.of(x, packed) for x in room[2:])
    assert q is not None
    assert k is not None
    assert v is not None
    return SplitOperands(q, k, v, dout)
