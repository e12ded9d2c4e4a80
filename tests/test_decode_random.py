"""Decoding at random: any lengths, pages, pieces, heads and features must agree with float64."""

from __future__ import annotations

import os
from typing import Any

import torch
from attend import DTYPES, Target
from decoding import Sizes, build, check
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# The same examples in every run: a failure must be one that others can repeat.
REPEATABLE = settings(
    max_examples=25 if os.environ.get("TRITON_INTERPRET") else 60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

bounds = st.none() | st.integers(0, 40)
features = st.fixed_dictionaries(
    {
        "causal": st.booleans(),
        "window": st.none() | st.tuples(bounds, bounds),
        "scale": st.sampled_from([None, 0.0, -0.4, 0.6]),
        "softcap": st.sampled_from([None, 0.5, 4.0]),
        "alibi": st.booleans(),
        "sinks": st.booleans(),
        "tree": st.sampled_from([None, "one", "each"]),
        "num_splits": st.sampled_from([0, 1, 2, 5, 17]),
    }
)


@st.composite
def all_sizes(draw: st.DrawFn) -> Sizes:
    page = draw(st.sampled_from([None, 16, 32, 128]))
    capacity = draw(st.sampled_from([16, 48, 200])) if page is None else page * draw(st.integers(1, 4))
    appended = draw(st.integers(0, 3))
    lengths = draw(st.lists(st.integers(appended, capacity), min_size=1, max_size=4))
    kv_heads = draw(st.integers(1, 3))
    return Sizes(
        lengths=tuple(lengths),
        n_q=draw(st.sampled_from([1, 1, 2, 5, 20])),
        heads=kv_heads * draw(st.sampled_from([1, 2, 3, 8])),
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([8, 16, 40])),
        dim_v=draw(st.sampled_from([None, 8, 24])),
        capacity=capacity,
        page=page,
        appended=appended,
        dtype=draw(st.sampled_from(DTYPES)),
    )


@REPEATABLE
@given(all_sizes(), features)
def test_decode(backend: Target, sizes: Sizes, chosen: dict[str, Any]) -> None:
    options = {name: value for name, value in chosen.items() if value is not None}
    check(backend, build(backend, sizes, **options))


@REPEATABLE
@given(all_sizes())
def test_float64(backend: Target, sizes: Sizes) -> None:
    if backend.name == "eager":
        check(backend, build(backend, Sizes(**{**vars(sizes), "dtype": torch.float64}), num_splits=3))
