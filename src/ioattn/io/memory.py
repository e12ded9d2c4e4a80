"""A two-level memory that counts: slow memory of any size, a chip of `capacity` bytes, and a tally of what moves.

A schedule can reach numbers in slow memory only through `load` and `store`, and can keep numbers on the chip only
where `load` and `alloc` have charged room for them. What the count says is therefore what the schedule did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from ioattn.io.ledger import Ledger, Traffic

T = TypeVar("T")

Index = Any
"""What indexes one dimension of a tensor: an int or a slice."""


class CapacityError(MemoryError):
    """A tile does not fit the chip next to what is there; the message says by how much."""


class Slow:
    """A tensor in slow memory, known to schedules by its name only."""

    __slots__ = ("_values", "name")

    def __init__(self, name: str, values: Tensor) -> None:
        self.name, self._values = name, values


class Memory:
    """Slow memory, a chip of `capacity` bytes (None: as many as asked for), and the count of what moves between.

    `compute` is the dtype in which the chip multiplies and keeps scores, sums and accumulators. `on_move` hears of
    the bytes of each move, for progress bars.

    >>> memory = Memory(capacity=64, compute=torch.float32)
    >>> x = memory.place("x", torch.ones(4, 4, dtype=torch.float16))
    >>> with memory.step("double"), memory.region():
    ...     tile = memory.load(x, slice(0, 2))
    ...     memory.store(x, 2 * tile, slice(0, 2))
    >>> memory.traffic().moves
    (Move(step='double', tensor='x', read=16, written=16),)
    """

    def __init__(
        self, capacity: int | None, compute: torch.dtype, on_move: Callable[[int], object] | None = None
    ) -> None:
        self.capacity, self.compute, self._on_move = capacity, compute, on_move
        self.used = self.peak = self.flops = self.extra = 0
        self._tiles: dict[int, Tensor] = {}
        self._ledger, self._step = Ledger(), ""

    def place(self, name: str, values: Tensor, extra: bool = False) -> Slow:
        """`values` in slow memory; `extra` if they are there only because the schedule needs them."""
        self.extra += values.nbytes if extra else 0
        return Slow(name, values)

    def new(self, name: str, *shape: int, dtype: torch.dtype | None = None, extra: bool = False) -> Slow:
        """An unwritten tensor in slow memory, NaN until stored to; of the compute dtype unless said otherwise."""
        return self.place(name, torch.full(shape, torch.nan, dtype=dtype or self.compute), extra)

    def values(self, source: Slow) -> Tensor:
        """The numbers of a tensor in slow memory, uncounted: for whoever reads the result after the schedule."""
        return source._values

    def replace(self, target: Slow, values: Tensor) -> None:
        """Rearrange a tensor in slow memory, uncounted: for a change of layout, which moves nothing in a kernel."""
        target._values = values

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """What moves inside belongs to the step of this name."""
        before, self._step = self._step, name
        yield
        self._step = before

    @contextmanager
    def region(self) -> Iterator[None]:
        """Frees on leaving what was loaded or allocated inside."""
        before = set(self._tiles)
        yield
        self.free(*(tile for key, tile in self._tiles.items() if key not in before))

    def each(self, items: Iterable[T]) -> Iterator[T]:
        """`items`, one by one; what an iteration loads or allocates is freed at its end."""
        for item in items:
            with self.region():
                yield item

    def load(self, source: Slow, *index: Index, dtype: torch.dtype | None = None) -> Tensor:
        """A copy of `source[index]` on the chip, kept there in `dtype`; counts the bytes it has in slow memory."""
        part = source._values[index]
        self._ledger.read(self._step, source.name, part.nbytes)
        if self._on_move is not None:
            self._on_move(part.nbytes)
        return self.alloc(part.to(dtype or part.dtype, copy=True))

    def store(self, target: Slow, tile: Tensor, *index: Index) -> None:
        """Write `tile` to `target[index]`, rounded to target's dtype; counts the bytes it has in slow memory."""
        part = target._values[index]
        part.copy_(tile)
        self._ledger.write(self._step, target.name, part.nbytes)
        if self._on_move is not None:
            self._on_move(part.nbytes)

    def alloc(self, tile: Tensor) -> Tensor:
        """`tile`, with its room on the chip charged; raises CapacityError where there is none."""
        if self.capacity is not None and self.used + tile.nbytes > self.capacity:
            shape = "x".join(map(str, tile.shape))
            raise CapacityError(
                f"a tile of {shape} takes {tile.nbytes} bytes and {self.used} of the chip's {self.capacity} are in use;"
                f" use smaller blocks or a chip of {self.used + tile.nbytes}"
            )
        self._tiles[id(tile)] = tile
        self.used += tile.nbytes
        self.peak = max(self.peak, self.used)
        return tile

    def full(self, value: float, *shape: int) -> Tensor:
        """A tile of the compute dtype filled with `value`."""
        return self.alloc(torch.full(shape, value, dtype=self.compute))

    def zeros(self, *shape: int) -> Tensor:
        """A tile of the compute dtype filled with zeros."""
        return self.full(0.0, *shape)

    def free(self, *tiles: Tensor) -> None:
        """Give back the room of these tiles."""
        for tile in tiles:
            self.used -= self._tiles.pop(id(tile)).nbytes

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """`a @ b` in the compute dtype, FLOPs counted; charges no room: the caller adds it to a tile or allocs it."""
        self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return a.to(self.compute) @ b.to(self.compute)

    def traffic(self) -> Traffic:
        """The count so far."""
        return Traffic(self._ledger.moves(), self.flops, self.peak, self.extra)
