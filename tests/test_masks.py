"""Band: every closed form against counting the pairs one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ioattn.masks import Band

bounds = st.none() | st.integers(-12, 12)
bands = st.builds(Band, bounds, bounds, st.integers(-12, 12))
sizes = st.integers(0, 14)
ranges = st.tuples(st.integers(0, 14), st.integers(0, 8)).map(lambda pair: (pair[0], sum(pair)))


def kept(band: Band, queries: range, keys: range) -> list[tuple[int, int]]:
    """The pairs of a tile that the definition keeps, without calling the band."""
    return [
        (i, j)
        for i in queries
        for j in keys
        if (band.lo is None or band.lo <= j - i - band.shift) and (band.hi is None or j - i - band.shift <= band.hi)
    ]


@given(bands, st.integers(-20, 20), st.integers(-20, 20))
def test_keeps_is_the_definition(band: Band, i: int, j: int) -> None:
    assert band.keeps(i, j) == bool(kept(band, range(i, i + 1), range(j, j + 1)))


@given(bands, st.integers(0, 30))
def test_within_changes_nothing_within_reach_and_bounds_every_number(band: Band, reach: int) -> None:
    near = band.within(reach)
    for offset in range(-reach, reach + 1):
        assert near.keeps(0, offset + band.shift) == band.keeps(0, offset + band.shift) or abs(offset) == reach
    assert near.lo is None or near.lo > -reach
    assert near.hi is None or near.hi < reach


@given(bands, ranges, sizes)
def test_key_range_is_the_hull_of_the_kept_keys(band: Band, queries: tuple[int, int], n_keys: int) -> None:
    start, end = band.key_range(*queries, n_keys)
    assert 0 <= start <= end <= n_keys
    assert set(range(start, end)) == {j for _, j in kept(band, range(*queries), range(n_keys))}


@given(bands, ranges, sizes)
def test_query_range_is_the_hull_of_the_kept_queries(band: Band, keys: tuple[int, int], n_queries: int) -> None:
    start, end = band.query_range(*keys, n_queries)
    assert 0 <= start <= end <= n_queries
    assert set(range(start, end)) == {i for i, _ in kept(band, range(n_queries), range(*keys))}


@given(bands, ranges, sizes)
def test_full_key_range_holds_the_keys_that_all_queries_see(band: Band, queries: tuple[int, int], n_keys: int) -> None:
    start, end = band.full_key_range(*queries, n_keys)
    first, last = band.key_range(*queries, n_keys)
    assert first <= start <= end <= last
    expected = {j for j in range(first, last) if all(band.keeps(i, j) for i in range(*queries))}
    assert set(range(start, end)) == expected


@given(bands, ranges, sizes)
def test_full_query_range_holds_the_queries_that_see_all_keys(band: Band, keys: tuple[int, int], n: int) -> None:
    start, end = band.full_query_range(*keys, n)
    first, last = band.query_range(*keys, n)
    assert first <= start <= end <= last
    assert set(range(start, end)) == {i for i in range(first, last) if all(band.keeps(i, j) for j in range(*keys))}


@given(bands, ranges, ranges)
def test_full_and_empty_tiles(band: Band, queries: tuple[int, int], keys: tuple[int, int]) -> None:
    count = len(kept(band, range(*queries), range(*keys)))
    size = (queries[1] - queries[0]) * (keys[1] - keys[0])
    assert band.is_empty(queries, keys) == (count == 0)
    if size:
        assert band.is_full(queries, keys) == (count == size)


@given(bands, sizes, sizes)
def test_area_counts_the_kept_pairs(band: Band, n_queries: int, n_keys: int) -> None:
    assert band.area(n_queries, n_keys) == len(kept(band, range(n_queries), range(n_keys)))


@given(bands, bands, st.integers(-15, 15), st.integers(-15, 15))
def test_intersection_keeps_what_both_keep(one: Band, other: Band, i: int, j: int) -> None:
    assert one.intersect(other).keeps(i, j) == (one.keeps(i, j) and other.keeps(i, j))


@given(bands, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_a_shard_of_the_band_is_the_shifted_band(band: Band, q_offset: int, k_offset: int, i: int, j: int) -> None:
    shard = band.shifted(q_offset - k_offset)
    assert shard.keeps(i, j) == band.keeps(i + q_offset, j + k_offset)


@given(bands)
def test_bounded_says_whether_some_pair_is_hidden(band: Band) -> None:
    assert band.bounded == (len(kept(band, range(-40, 41), range(-40, 41))) < 81 * 81)


@pytest.mark.parametrize(
    ("causal", "window", "row"),
    [
        (False, None, "111111"),
        (True, None, "111100"),
        (False, (1, 1), "001110"),
        (False, (None, 0), "111100"),
        (False, (0, None), "000111"),
        (True, (2, 5), "011100"),
        (True, (0, 0), "000100"),
        (False, (None, None), "111111"),
    ],
)
def test_band_of_options_shows_query_three(
    causal: bool, window: tuple[int | None, int | None] | None, row: str
) -> None:
    band = Band.of(causal, window)
    assert "".join(str(int(band.keeps(3, j))) for j in range(6)) == row


def test_area_of_a_long_causal_band_is_immediate() -> None:
    n = 10**9
    assert Band(hi=0).area(n, n) == n * (n + 1) // 2
