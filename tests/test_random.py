"""Whole problems at random: any mixture of features, sizes, types and layouts must agree with float64."""

from __future__ import annotations

import os
from typing import Any

import torch
from attend import DTYPES, Shape, Target, check, dense, packed
from features import LAYOUTS, laid_out
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# The same examples in every run: a failure must be one that others can repeat.
REPEATABLE = settings(
    max_examples=25 if os.environ.get("TRITON_INTERPRET") else 80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

bounds = st.none() | st.integers(0, 30)
options = st.fixed_dictionaries(
    {
        "causal": st.sampled_from([False, True, "top-left"]),
        "window": st.none() | st.tuples(bounds, bounds),
        "scale": st.sampled_from([None, 0.0, -0.4, 0.6]),
        "softcap": st.sampled_from([None, 0.5, 4.0]),
        "alibi": st.booleans(),
        "sinks": st.booleans(),
    }
)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    kv_heads = draw(st.integers(1, 3))
    return Shape(
        batch=draw(st.integers(1, 2)),
        heads=kv_heads * draw(st.integers(1, 3)),
        n_q=draw(st.integers(0, 40)),
        n_k=draw(st.integers(0, 70)),
        dim=draw(st.sampled_from([4, 8, 24, 64])),
        dim_v=draw(st.sampled_from([None, 8, 40])),
        kv_heads=kv_heads,
    )


def broadcast(draw: st.DrawFn, shape: Shape) -> tuple[int, ...] | None:
    """Sizes that broadcast to the scores, of any rank, or None."""
    full = (shape.batch, shape.heads, shape.n_q)
    leading = tuple(draw(st.sampled_from([1, size])) for size in full)
    return draw(st.sampled_from([None, *((*leading[skipped:], shape.keys) for skipped in range(4))]))


@REPEATABLE
@given(shapes(), options, st.sampled_from(DTYPES), st.sampled_from(sorted(LAYOUTS)), st.data())
def test_dense(
    backend: Target, shape: Shape, chosen: dict[str, Any], dtype: torch.dtype, layout: str, data: st.DataObject
) -> None:
    bias, mask = broadcast(data.draw, shape), broadcast(data.draw, shape)
    check(backend, laid_out(dense(backend, shape, dtype, bias=bias, mask=mask, **chosen), layout))


lengths = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=0, max_size=4)


@REPEATABLE
@given(lengths, options, st.sampled_from(DTYPES), st.integers(0, 5), st.sampled_from([(1, 1), (2, 2), (6, 2)]))
def test_packed(
    backend: Target,
    lengths: list[tuple[int, int]],
    chosen: dict[str, Any],
    dtype: torch.dtype,
    slack: int,
    heads: tuple[int, int],
) -> None:
    q_lens, k_lens = [q for q, _ in lengths], [k for _, k in lengths]
    check(
        backend,
        packed(backend, q_lens, k_lens, dtype, slack=slack, heads=heads[0], kv_heads=heads[1], **chosen),
    )
