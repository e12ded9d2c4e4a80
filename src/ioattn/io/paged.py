"""Paged KV cache: what pages cost and save against one contiguous reservation per sequence.

A sequence of n tokens holds ceil(n / page) pages. The last page's rest is wasted (internal fragmentation); pages need
no neighbours, so nothing is lost between sequences. A contiguous cache reserves the longest length for every sequence,
and after sequences have ended leaves holes that are too small (external fragmentation).
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cache:
    """What one cached token takes: `2 * layers * kv_heads * dim * itemsize` bytes for K and V."""

    layers: int = 32
    kv_heads: int = 8
    dim: int = 128
    itemsize: int = 2

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token, all layers."""
        return 2 * self.layers * self.kv_heads * self.dim * self.itemsize


@dataclass(frozen=True)
class Paging:
    """One page size: what is held, wasted and read."""

    page: int
    used: int
    held: int
    contiguous: int
    table: int
    read: int

    @property
    def wasted(self) -> float:
        """The share of the held pages' bytes without a token, and of the block tables."""
        return 1 - self.used / (self.held + self.table)

    @property
    def contiguous_wasted(self) -> float:
        """The same for a reservation of the longest length for every sequence."""
        return 1 - self.used / self.contiguous


def paging(lengths: Sequence[int], page: int, cache: Cache, longest: int) -> Paging:
    """Pages of `page` tokens for sequences of these lengths; a decode step reads tokens and table entries.

    Raises:
        ValueError: if the page is empty, there is no sequence, or one is longer than `longest`.
    """
    if page < 1:
        raise ValueError(f"page is {page}; it must be at least 1 token")
    if not lengths or min(lengths) < 1 or max(lengths) > longest:
        raise ValueError(f"lengths are {len(lengths)} sequences; there must be some, of 1 to {longest} tokens")
    pages = sum(-(-n // page) for n in lengths)
    table = 4 * pages  # int32
    return Paging(
        page=page,
        used=sum(lengths) * cache.token_bytes,
        held=pages * page * cache.token_bytes,
        contiguous=len(lengths) * longest * cache.token_bytes,
        table=table,
        read=sum(lengths) * cache.token_bytes + cache.layers * table,
    )


def lengths_of(sequences: int, mean: int, longest: int, seed: int) -> list[int]:
    """Lengths as a server sees them: exponential, cut to 1..longest."""
    source = random.Random(seed)
    return [min(longest, max(1, round(source.expovariate(1 / mean)))) for _ in range(sequences)]


@dataclass(frozen=True)
class Churn:
    """A contiguous cache after sequences have come and gone: free bytes, and the largest hole among them."""

    free: int
    largest_hole: int
    refused: int

    @property
    def fragmentation(self) -> float:
        """The share of the free space that is outside the largest hole: 0 is one hole."""
        return 1 - self.largest_hole / self.free if self.free else 0.0


def churn(lengths: Sequence[int], capacity: int, seed: int) -> Churn:
    """First-fit contiguous placement of exact lengths in `capacity` tokens; a random one leaves when none fits.

    A refusal is a sequence that fits the free space but no hole in it: with pages it would have been admitted.
    """
    source, space, refused = random.Random(seed), _Space(capacity), 0
    placed: list[tuple[int, int]] = []
    for length in (n for n in lengths if n <= capacity):
        while (at := space.take(length)) is None:
            refused += space.free >= length
            leaving = source.randrange(len(placed))
            placed[leaving], placed[-1] = placed[-1], placed[leaving]
            space.give_back(*placed.pop())
        placed.append((at, length))
    return Churn(space.free, max(space.sizes, default=0), refused)


class _Space:
    """The holes of a contiguous cache, in order: where they start and how long they are."""

    def __init__(self, capacity: int) -> None:
        self.starts, self.sizes, self.free = [0], [capacity], capacity

    def take(self, length: int) -> int | None:
        """The start of the first hole that is long enough, which shrinks; None if there is none."""
        for i, size in enumerate(self.sizes):
            if size >= length:
                at = self.starts[i]
                self.starts[i], self.sizes[i] = at + length, size - length
                if size == length:
                    del self.starts[i], self.sizes[i]
                self.free -= length
                return at
        return None

    def give_back(self, at: int, length: int) -> None:
        """A hole more, joined with its neighbours."""
        i = bisect.bisect(self.starts, at)
        self.free += length
        if i < len(self.starts) and self.starts[i] == at + length:
            length += self.sizes[i]
            del self.starts[i], self.sizes[i]
        if i > 0 and self.starts[i - 1] + self.sizes[i - 1] == at:
            self.sizes[i - 1] += length
        else:
            self.starts.insert(i, at)
            self.sizes.insert(i, length)
