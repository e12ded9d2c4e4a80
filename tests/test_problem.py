"""Problem: frozen, hashable, one line, and a true description of the inputs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ioattn.masks import Band
from ioattn.problem import Options, Problem, Tensors


def problem(options: Options = Options(), **tensors: torch.Tensor) -> Problem:  # noqa: B008
    inputs = {
        "q": torch.zeros(2, 4, 9, 16),
        "k": torch.zeros(2, 2, 30, 16),
        "v": torch.zeros(2, 2, 30, 24),
    }
    return Problem.of(Tensors(**{**inputs, **tensors}), options)


def test_equal_inputs_give_one_key() -> None:
    assert {problem(): 1}[problem()] == 1
    assert problem() != problem(Options(hi=0))


def test_problem_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem().scale = 1.0  # type: ignore[misc]


def test_sizes_and_group() -> None:
    p = problem()
    assert (p.batch, p.heads, p.kv_heads, p.len_q, p.len_k, p.dim, p.dim_v) == (2, 4, 2, 9, 30, 16, 24)
    assert p.group == 2
    assert p.scale == 0.25


@pytest.mark.parametrize(
    ("options", "tensors", "line"),
    [
        (Options(), {}, "B2 H4/2 N9x30 D16/24 fp32 cpu"),
        (Options(hi=0), {}, "B2 H4/2 N9x30 D16/24 fp32 cpu causal"),
        (Options(hi=0, align="top-left"), {}, "B2 H4/2 N9x30 D16/24 fp32 cpu causal top-left"),
        (Options(lo=-3, hi=2), {}, "B2 H4/2 N9x30 D16/24 fp32 cpu band[-3,2]+0"),
        (
            Options(scale=0.5, softcap=30.0, deterministic=True),
            {"bias": torch.zeros(2, 1, 9, 30), "mask": torch.ones(1, 1, 1, 30, dtype=torch.bool)},
            "B2 H4/2 N9x30 D16/24 fp32 cpu scale=0.5 softcap=30 bias(2,1,9,Nk) mask(1,1,1,Nk) deterministic",
        ),
        (
            Options(),
            {"alibi_slopes": torch.zeros(4), "sinks": torch.zeros(4)},
            "B2 H4/2 N9x30 D16/24 fp32 cpu alibi sinks",
        ),
    ],
)
def test_one_line(options: Options, tensors: dict[str, torch.Tensor], line: str) -> None:
    assert str(problem(options, **tensors)) == line


def test_packed_lengths_are_the_longest() -> None:
    q, k = torch.zeros(20, 4, 16), torch.zeros(30, 4, 16)
    starts = {
        "cu_seqlens_q": torch.tensor([0, 3, 3, 17], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 20, 25, 28], dtype=torch.int32),
    }
    p = Problem.of(Tensors(q, k, k, **starts), Options())
    assert (p.batch, p.len_q, p.len_k, p.packed) == (3, 14, 20, True)
    assert str(p) == "B3 H4 N14x20 D16 fp32 cpu packed"


def test_band_of_a_sequence_resolves_the_alignment() -> None:
    assert problem(Options(hi=0)).band_of(9, 30) == Band(hi=0, shift=21)
    assert problem(Options(hi=0, align="top-left")).band_of(9, 30) == Band(hi=0)


def test_terms_come_in_order() -> None:
    p = problem(Options(softcap=2.0), bias=torch.zeros(1, 1, 1, 30), alibi_slopes=torch.zeros(4))
    assert [term.name for term in p.terms] == ["softcap", "alibi", "bias"]


def rows(*shape: int, offset: int = 0, pad: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Zeros whose start lies `offset` elements into a 64-byte aligned store, and whose rows are padded."""
    wide = (*shape[:-1], shape[-1] + pad)
    store = torch.zeros(torch.Size(wide).numel() + offset, dtype=dtype)
    return store[offset:].view(wide)[..., : shape[-1]]


@pytest.mark.parametrize(
    ("q", "alignment"),
    [
        (rows(2, 4, 9, 16), 16),
        (rows(2, 4, 9, 16, offset=1), 4),
        (rows(2, 4, 9, 16, offset=2), 8),
        (rows(2, 4, 9, 16, offset=4), 16),
        (rows(2, 4, 9, 16, pad=1), 4),
        (rows(2, 4, 9, 16, pad=2), 8),
        (rows(2, 4, 16, 9).mT, 0),
        (rows(2, 4, 1, 16).expand(2, 4, 9, 16), 16),
    ],
    ids=["plain", "off 1", "off 2", "off 4", "row + 1", "row + 2", "columns strided", "expanded"],
)
def test_alignment_is_what_divides_every_row(q: torch.Tensor, alignment: int) -> None:
    assert problem(q=q).alignment == alignment
