"""What was moved: bytes per step and tensor, the form in which predictions and counts are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Move:
    """Bytes of one tensor in one step of a schedule, between slow memory and the chip."""

    step: str
    tensor: str
    read: int
    written: int


@dataclass(frozen=True)
class Traffic:
    """What a schedule costs: `moves` in the order they first happen, and three totals.

    `flops` are those of the matrix products, masked or not; `on_chip` is the fast memory that the schedule needs at
    once; `extra` is the slow memory that it needs besides the inputs, outputs and gradients of attention. `tiles` says
    what is on the chip when it is fullest, in bytes; only a prediction knows.
    """

    moves: tuple[Move, ...]
    flops: int
    on_chip: int
    extra: int
    tiles: Mapping[str, int] = field(default_factory=dict)

    @property
    def read(self) -> int:
        """Bytes from slow memory to the chip."""
        return sum(move.read for move in self.moves)

    @property
    def written(self) -> int:
        """Bytes from the chip to slow memory."""
        return sum(move.written for move in self.moves)

    @property
    def total(self) -> int:
        """Bytes both ways."""
        return self.read + self.written

    @property
    def intensity(self) -> float:
        """FLOPs per byte; infinite where nothing moves."""
        return self.flops / self.total if self.total else float("inf")

    def of(self, *tensors: str) -> int:
        """Bytes both ways of these tensors, over all steps."""
        return sum(move.read + move.written for move in self.moves if move.tensor in tensors)


class Ledger:
    """Adds moves up by step and tensor; moves of no bytes leave no trace."""

    def __init__(self) -> None:
        self._bytes: dict[tuple[str, str], list[int]] = {}

    def read(self, step: str, tensor: str, n_bytes: int) -> None:
        """`n_bytes` of `tensor` went from slow memory to the chip."""
        self._entry(step, tensor, n_bytes)[0] += n_bytes

    def write(self, step: str, tensor: str, n_bytes: int) -> None:
        """`n_bytes` of `tensor` went from the chip to slow memory."""
        self._entry(step, tensor, n_bytes)[1] += n_bytes

    def moves(self) -> tuple[Move, ...]:
        """What moved, in the order of each first move."""
        return tuple(Move(*key, *both) for key, both in self._bytes.items())

    def _entry(self, step: str, tensor: str, n_bytes: int) -> list[int]:
        return self._bytes.setdefault((step, tensor), [0, 0]) if n_bytes else [0, 0]
