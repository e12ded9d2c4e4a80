"""What a schedule is given: the problem, its tiles and its tensors; and how it walks over heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ioattn.io.memory import Memory, Slow
from ioattn.io.tiles import Blocks, Grid
from ioattn.problem import Problem

Head = tuple[int, int]
"""Batch and head: the leading indices of a tensor."""


@dataclass(frozen=True)
class Task:
    """One problem to run: `given` holds Q, K, V, and for a backward also dO and what the forward `kept`."""

    problem: Problem
    blocks: Blocks
    given: Mapping[str, Tensor]
    kept: frozenset[str] = field(default=frozenset())

    @cached_property
    def grid(self) -> Grid:
        """The tiles of one head."""
        return Grid.of(self.problem, self.blocks)

    def place(self, memory: Memory, *names: str) -> list[Slow]:
        """These tensors in slow memory."""
        return [memory.place(name, self.given[name], extra=name in self.kept) for name in names]

    def new_like_q(self, memory: Memory, name: str, width: int, dtype: torch.dtype | None = None) -> Slow:
        """An output `(B, H, Nq, width)`, of the problem's dtype unless said otherwise."""
        p = self.problem
        return memory.new(name, p.batch, p.heads, p.len_q, width, dtype=dtype or p.dtype)

    def new_like_k(self, memory: Memory, name: str, width: int) -> Slow:
        """A gradient `(B, Hk, Nk, width)`."""
        p = self.problem
        return memory.new(name, p.batch, p.kv_heads, p.len_k, width, dtype=p.dtype)

    def new_scores(self, memory: Memory, name: str) -> Slow:
        """A whole score matrix per head, `(B, H, Nq, Nk)`: what tiling avoids."""
        p = self.problem
        return memory.new(name, p.batch, p.heads, p.len_q, p.len_k, dtype=p.dtype, extra=True)

    def new_rows(self, memory: Memory, name: str) -> Slow:
        """One number per query, `(B, H, Nq)`, of the compute dtype."""
        p = self.problem
        return memory.new(name, p.batch, p.heads, p.len_q, extra=True)

    def groups(self) -> Iterator[tuple[Head, list[Head]]]:
        """Each key/value head with the query heads that read it."""
        group = self.problem.group
        for batch in range(self.problem.batch):
            for kv_head in range(self.problem.kv_heads):
                yield (batch, kv_head), [(batch, kv_head * group + g) for g in range(group)]

    def heads(self) -> Iterator[tuple[Head, Head]]:
        """Each query head with the key/value head that it reads."""
        for kv_head, heads in self.groups():
            for head in heads:
                yield head, kv_head


def length(tile: slice) -> int:
    """Rows of a tile."""
    return int(tile.stop - tile.start)


def or_zero(x: Tensor) -> Tensor:
    """-inf becomes 0: a row that has seen nothing yields exp(-inf - 0) = 0 and not exp(-inf + inf)."""
    return torch.where(x == -torch.inf, 0, x)


def or_one(x: Tensor) -> Tensor:
    """0 becomes 1: a row that has seen nothing is divided by it."""
    return torch.where(x == 0, 1, x)
