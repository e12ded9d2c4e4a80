"""Kernels with all but their tensors prepared, so that a later call does little more than hand over addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

from ioattn.assembler import sound_assembler
from ioattn.backends.triton.config import Tiles
from ioattn.driver import Queue
from ioattn.launching import Arguments, Launch, is_watched

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether Triton runs kernels in its interpreter, on the CPU: decided when Triton is imported."""


class Prepared:
    """A kernel that only lacks the arguments which hold tensors; compiled when it is first called."""

    def __init__(self, kernel: Any, programs: int, constant: Arguments, tiles: Tiles) -> None:
        self.kernel, self.programs, self.constant, self.tiles = kernel, programs, constant, tiles
        self.runner: Launch | None = None

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

    Triton's compiler wants tensors and names. Compiled kernels are started by a `Queue` of the driver's, unless someone
    wants to be told of launches, Triton adds something to kernels on request, or an argument is a copy of a tensor.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Prepared]],
        describe: Callable[[Sequence[Any]], Sequence[Arguments]],
    ) -> None:
        self.groups, self.describe = groups, describe
        self.queue: Queue | None = None
        instrumented = getattr(triton.knobs.compilation, "instrumentation_mode", "")
        self.may_queue = not INTERPRETED and not instrumented and torch.version.hip is None

    def __call__(self, tensors: Sequence[Tensor | None]) -> None:
        """Start the kernels of each group in order."""
        queue = None if is_watched() else self.queue
        if queue is not None and queue.start(tensors, self.stream_of(self.device)):
            return
        for group, arguments in zip(self.groups, self.describe(tensors), strict=True):
            for kernel in group:
                kernel(arguments)
        # Not before: a kernel has to be compiled, and loaded.
        if self.may_queue:
            self.may_queue = False
            self.queue = self._queued(tensors)

    def _queued(self, tensors: Sequence[Tensor | None]) -> Queue | None:
        """The compiled kernels, ready for tensors that lie like these."""
        driver = triton.runtime.driver.active
        self.stream_of, self.device = driver.get_current_stream, driver.get_current_device()
        # One tensor may be handed over twice, and two another time.
        apart = [None if x is None else x.detach() for x in tensors]
        places = {id(x): i for i, x in enumerate(apart) if x is not None}
        try:
            queue = Queue(len(apart))
            for group, arguments in zip(self.groups, self.describe(apart), strict=True):
                for kernel in group:
                    if kernel.runner is not None:
                        queue.add(kernel.runner.kernel, kernel.programs, (*arguments, *kernel.constant), places)
        except (KeyError, OSError, AttributeError):
            return None
        return queue
