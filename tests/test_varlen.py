"""Packed sequences: uneven, empty and overlong buffers, against float64 one sequence at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attend import DTYPES, Shape, Target, check, dense, offsets, packed, run
from features import LAYOUTS
from oracle import Case

import ioattn

LENGTHS = {
    "one": ([33], [70]),
    "even": ([16, 16, 16], [16, 16, 16]),
    "uneven": ([1, 63, 7, 40], [65, 2, 7, 90]),
    "ones": ([1, 1, 1, 1, 1], [1, 7, 63, 2, 130]),
    "empty first": ([0, 20, 5], [0, 20, 9]),
    "empty last": ([20, 5, 0], [20, 9, 0]),
    "empty in a row": ([8, 0, 0, 9], [8, 0, 0, 9]),
    "no queries": ([8, 0, 9], [8, 30, 9]),
    "no keys": ([8, 6, 9], [8, 0, 9]),
    "all empty": ([0, 0], [0, 0]),
    "more queries than keys": ([76, 34, 46], [1, 1, 1]),
}

FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "top-left": {"causal": "top-left"},
    "window": {"window": (9, 4)},
    "causal window": {"causal": True, "window": (9, None)},
    "alibi": {"alibi": True},
    "softcap and scale": {"softcap": 1.5, "scale": 0.5},
    "sinks": {"sinks": True, "causal": True},
    "everything": {"alibi": True, "sinks": True, "softcap": 1.5, "scale": 0.5, "causal": True, "window": (30, 0)},
}


@pytest.mark.parametrize("causal", [False, True], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths(backend: Target, lengths: str, causal: bool) -> None:
    check(backend, packed(backend, *LENGTHS[lengths], causal=causal))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("feature", FEATURES)
def test_feature(backend: Target, feature: str, dtype: torch.dtype) -> None:
    lengths = LENGTHS["uneven"]
    check(backend, packed(backend, *lengths, dtype, heads=4, kv_heads=2, dim=32, dim_v=40, **FEATURES[feature]))


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("lengths", ["uneven", "empty in a row", "no keys"])
def test_slack_rows_are_not_read_and_get_zeros(backend: Target, lengths: str, feature: str) -> None:
    case = packed(backend, *LENGTHS[lengths], slack=11, **FEATURES[feature])
    for name in "qkv":
        case.tensors[name][-11:] = torch.nan
    case.dout[-11:] = torch.nan
    case.dlse[:, -11:] = torch.nan
    result = run(backend, case)
    for name in ("out", "dq", "dk", "dv"):
        assert (result[name][-11:] == 0).all(), name
    assert (result["lse"][:, -11:] == -torch.inf).all()
    check(backend, case)


def test_a_sequence_reads_nothing_of_its_neighbours(backend: Target) -> None:
    case = packed(backend, [5, 33, 4], [70, 40, 9], causal=True, deterministic=True)
    alone = run(backend, case)
    (_, _), (at_q, at_k), (_, _) = case.offsets()
    for name, at in (("q", at_q), ("k", at_k), ("v", at_k)):
        kept = case.tensors[name][at].clone()
        case.tensors[name].fill_(torch.nan)
        case.tensors[name][at] = kept
    result = run(backend, case)
    for name, at in (("out", at_q), ("dq", at_q), ("dk", at_k), ("dv", at_k)):
        assert torch.equal(result[name][at], alone[name][at]), name


def test_lengths_given_by_the_caller(backend: Target) -> None:
    case = packed(backend, *LENGTHS["uneven"], causal=True)
    plain = run(backend, case)
    for longest in ({"max_seqlen_q": 63, "max_seqlen_k": 90}, {"max_seqlen_q": 200, "max_seqlen_k": 91}):
        given = run(backend, case, **longest)
        check(backend, case, **longest)
        assert torch.allclose(plain["lse"], given["lse"], atol=1e-6)


def test_no_sequences(backend: Target) -> None:
    case = packed(backend, [], [], slack=3, sinks=True)
    check(backend, case)


def test_one_sequence_equals_the_dense_call(backend: Target) -> None:
    case = packed(backend, [33], [70], causal=True, sinks=True)
    one = run(backend, case)
    tensors = {n: case.tensors[n].transpose(0, 1)[None] for n in "qkv"} | {"sinks": case.tensors["sinks"]}
    other = run(backend, Case(tensors, case.dout.transpose(0, 1)[None], case.dlse[None], case.options))
    assert torch.allclose(one["out"], other["out"][0].transpose(0, 1), atol=1e-6)
    assert torch.allclose(one["dsinks"], other["dsinks"], atol=1e-5)


@pytest.mark.parametrize("layout", ["row padded", "offset by one", "every second column"])
def test_layouts(backend: Target, layout: str) -> None:
    case = packed(backend, *LENGTHS["uneven"], heads=4, kv_heads=2, causal=True)
    check(backend, case.replace(**{name: LAYOUTS[layout](case.tensors[name]) for name in "qkv"}))


def test_heads_outermost_in_memory(backend: Target) -> None:
    case = packed(backend, *LENGTHS["uneven"], heads=4, kv_heads=2, causal=True)
    check(backend, case.replace(**{n: case.tensors[n].transpose(0, 1).contiguous().transpose(0, 1) for n in "qkv"}))


def test_stride_zero_dout(backend: Target) -> None:
    case = packed(backend, *LENGTHS["uneven"], causal=True)
    check(backend, Case(case.tensors, case.dout[:1, :1, :1].expand(case.dout.shape), None, case.options))


def test_packed_rows_of_a_padded_batch(backend: Target) -> None:
    """Packing the rows of a padded batch gives what a padding mask gives."""
    case = dense(backend, Shape(3, 2, 20, 20))
    lengths = [20, 3, 11]
    keep = torch.arange(20, device=backend.device)[None] < torch.tensor(lengths, device=backend.device)[:, None]
    q, k, v = (case.tensors[n].transpose(1, 2)[keep] for n in "qkv")
    cu = offsets(lengths, backend)
    out = ioattn.attention_varlen(q, k, v, cu, cu, backend=backend.name)
    masked = ioattn.attention(**case.tensors, mask=keep[:, None, None], backend=backend.name)
    assert torch.allclose(out, masked.transpose(1, 2)[keep], atol=1e-6)
