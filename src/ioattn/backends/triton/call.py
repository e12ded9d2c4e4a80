"""Kernels with all but their tensors prepared, so that a later call does little more than hand over addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import triton
from torch import Tensor

from ioattn.assembler import sound_assembler
from ioattn.backends.triton.config import Tiles
from ioattn.launching import Arguments, Launch, addresses_of, by_address

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether Triton runs kernels in its interpreter, on the CPU: decided when Triton is imported."""


class Prepared:
    """A kernel that only lacks the arguments which hold tensors; compiled when it is first called."""

    def __init__(self, kernel: Any, programs: int, constant: Arguments, tiles: Tiles) -> None:
        self.kernel, self.programs, self.constant, self.tiles = kernel, programs, constant, tiles
        self.runner: Callable[..., None] | None = None

    def __call__(self, arguments: Arguments) -> None:
        """Start the kernel on the current stream, if there is anything to do."""
        if self.runner is not None:
            self.runner(*arguments, *self.constant)
        elif self.programs:
            with nullcontext() if INTERPRETED else sound_assembler():
                compiled = self.kernel[(self.programs,)](*arguments, *self.constant, **self.options)
            if not INTERPRETED:
                self.runner = Launch(compiled, self.programs)

    @property
    def options(self) -> dict[str, Any]:
        """How Triton compiles the kernel. Fused multiply-adds are wanted; Triton 3.10 turns their default around."""
        _, _, warps, stages, *_, registers = self.tiles
        limit = {} if registers is None else {"maxnreg": registers}
        return {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True, **limit}


class Call:
    """Groups of kernels; those of one group are handed the same arguments, made of the tensors by `describe`.

    Triton's compiler wants tensors and names; a compiled kernel takes addresses in plain tuples.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Prepared]],
        describe: Callable[[Sequence[Any]], Sequence[Arguments]],
        tensors: Sequence[Tensor | None],
    ) -> None:
        self.groups, self.describe = groups, describe
        self.compiled = INTERPRETED
        self.by_address = None if INTERPRETED else by_address(lambda x: tuple(describe(x)), tensors)

    def __call__(self, tensors: Sequence[Tensor | None]) -> None:
        """Start the kernels of each group in order."""
        if self.by_address is not None and self.compiled:
            given: Sequence[Arguments] = self.by_address(addresses_of(tensors))
        else:
            given = self.describe(tensors)
        for group, arguments in zip(self.groups, given, strict=True):
            for kernel in group:
                kernel(arguments)
        # Not before: a kernel that another thread has yet to compile needs tensors.
        self.compiled = True
