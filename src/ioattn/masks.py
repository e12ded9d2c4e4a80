"""The band: which keys a query sees, as two integers and a shift.

Causal attention, sliding windows, bottom-right alignment, decoding, chunked prefill and ring shards are all
`lo <= j - i - shift <= hi`. A tile of the score matrix is then skipped, computed without a test, or masked
element by element, and closed forms say which. Ranges are half-open, like Python's.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Band:
    """Keep key `j` for query `i` when `lo <= j - i - shift <= hi`; `None` is unbounded on that side.

    >>> causal = Band(hi=0)
    >>> [[int(causal.keeps(i, j)) for j in range(3)] for i in range(3)]
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """

    lo: int | None = None
    hi: int | None = None
    shift: int = 0

    @classmethod
    def of(cls, causal: bool, window: tuple[int | None, int | None] | None) -> Band:
        """The band of `causal` and `window`, both of which must hold; a window is (left, right), inclusive."""
        left, right = window or (None, None)
        band = cls(None if left is None else -left, right)
        return band.intersect(cls(hi=0)) if causal else band

    @property
    def bounded(self) -> bool:
        """Whether the band hides anything at all."""
        return self.lo is not None or self.hi is not None

    def keeps(self, i: int, j: int) -> bool:
        """Whether query `i` sees key `j`."""
        offset = j - i - self.shift
        return (self.lo is None or self.lo <= offset) and (self.hi is None or offset <= self.hi)

    def shifted(self, by: int) -> Band:
        """The same band moved `by` keys to the right.

        A shard whose queries start at `q_offset` and keys at `k_offset` sees `band.shifted(q_offset - k_offset)`.
        """
        return Band(self.lo, self.hi, self.shift + by)

    def intersect(self, other: Band) -> Band:
        """The band that keeps what both keep."""
        move = other.shift - self.shift
        los = [b for b in (self.lo, None if other.lo is None else other.lo + move) if b is not None]
        his = [b for b in (self.hi, None if other.hi is None else other.hi + move) if b is not None]
        return Band(max(los, default=None), min(his, default=None), self.shift)

    def within(self, reach: int) -> Band:
        """The same band where `abs(j - i - shift)` is at most `reach`: a side that hides nothing there is None."""
        lo = None if self.lo is not None and self.lo <= -reach else self.lo
        hi = None if self.hi is not None and self.hi >= reach else self.hi
        return Band(lo, hi, self.shift)

    def key_range(self, q_start: int, q_end: int, n_keys: int) -> tuple[int, int]:
        """The keys that at least one query of `[q_start, q_end)` sees; empty as `(k, k)`.

        A band with `lo > hi` keeps nothing.
        """
        return self._touched(self.lo, self.hi, self.shift, (q_start, q_end), n_keys)

    def query_range(self, k_start: int, k_end: int, n_queries: int) -> tuple[int, int]:
        """The queries that see at least one key of `[k_start, k_end)`; empty as `(q, q)`."""
        lo = None if self.hi is None else -self.hi
        hi = None if self.lo is None else -self.lo
        return self._touched(lo, hi, -self.shift, (k_start, k_end), n_queries)

    def full_key_range(self, q_start: int, q_end: int, n_keys: int) -> tuple[int, int]:
        """The keys that every query of `[q_start, q_end)` sees, a sub-range of `key_range`."""
        start, end = self.key_range(q_start, q_end, n_keys)
        return self._covered(self.lo, self.hi, self.shift, (q_start, q_end), (start, end))

    def full_query_range(self, k_start: int, k_end: int, n_queries: int) -> tuple[int, int]:
        """The queries that see every key of `[k_start, k_end)`, a sub-range of `query_range`."""
        start, end = self.query_range(k_start, k_end, n_queries)
        lo = None if self.hi is None else -self.hi
        hi = None if self.lo is None else -self.lo
        return self._covered(lo, hi, -self.shift, (k_start, k_end), (start, end))

    def is_full(self, queries: tuple[int, int], keys: tuple[int, int]) -> bool:
        """Whether every query of the tile sees every key of it, so that no element needs a test."""
        (q_start, q_end), (k_start, k_end) = queries, keys
        above = self.lo is None or k_start - (q_end - 1) - self.shift >= self.lo
        below = self.hi is None or (k_end - 1) - q_start - self.shift <= self.hi
        return above and below

    def is_empty(self, queries: tuple[int, int], keys: tuple[int, int]) -> bool:
        """Whether no query of the tile sees any key of it, so that the tile is skipped."""
        (q_start, q_end), (k_start, k_end) = queries, keys
        if q_start >= q_end or k_start >= k_end or (self.lo is not None and self.hi is not None and self.lo > self.hi):
            return True
        left = self.hi is not None and k_start - (q_end - 1) - self.shift > self.hi
        right = self.lo is not None and (k_end - 1) - q_start - self.shift < self.lo
        return left or right

    def area(self, n_queries: int, n_keys: int) -> int:
        """How many (query, key) pairs are kept: what the FLOPs of a problem are proportional to."""
        if n_queries <= 0 or n_keys <= 0 or (self.lo is not None and self.hi is not None and self.lo > self.hi):
            return 0
        below_hi = n_queries * n_keys if self.hi is None else _pairs_up_to(self.hi + self.shift, n_queries, n_keys)
        below_lo = 0 if self.lo is None else _pairs_up_to(self.lo + self.shift - 1, n_queries, n_keys)
        return below_hi - below_lo

    @staticmethod
    def _touched(lo: int | None, hi: int | None, shift: int, rows: tuple[int, int], n: int) -> tuple[int, int]:
        first, last = rows[0], rows[1] - 1
        if first > last or (lo is not None and hi is not None and lo > hi):
            return 0, 0
        start = 0 if lo is None else min(max(first + shift + lo, 0), n)
        end = n if hi is None else min(max(last + shift + hi + 1, 0), n)
        return (start, end) if start < end else (start, start)

    @staticmethod
    def _covered(
        lo: int | None, hi: int | None, shift: int, rows: tuple[int, int], touched: tuple[int, int]
    ) -> tuple[int, int]:
        first, last = rows[0], rows[1] - 1
        start = touched[0] if lo is None else min(max(last + shift + lo, touched[0]), touched[1])
        end = touched[1] if hi is None else min(max(first + shift + hi + 1, touched[0]), touched[1])
        return (start, end) if start < end else (start, start)


EVERYTHING = Band()
"""The band that hides nothing."""


def _pairs_up_to(bound: int, n_queries: int, n_keys: int) -> int:
    """Pairs (i, j) of the grid with `j - i <= bound`: row i holds `clamp(i + bound + 1, 0, n_keys)` of them."""
    first_nonempty = min(max(-bound, 0), n_queries)
    first_complete = min(max(n_keys - 1 - bound, first_nonempty), n_queries)
    ramp = first_complete - first_nonempty
    return ramp * (first_nonempty + first_complete + 1 + 2 * bound) // 2 + (n_queries - first_complete) * n_keys
