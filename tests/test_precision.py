"""Products in TF32: only on request, only for float32, and nobody has to."""

from __future__ import annotations

import pytest
import torch
from attend import Shape, Target, dense, packed, run
from oracle import Case, exact
from tolerance import plain

import ioattn


def in_tf32(x: torch.Tensor) -> torch.Tensor:
    """Rounded to 11 bits."""
    bits = x.contiguous().view(torch.int32) + 0x0FFF
    return (bits & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_error_is_at_most_that_of_tf32(backend: Target, layout: str) -> None:
    if layout == "dense":
        case = dense(backend, Shape(2, 4, 50, 81, 32, kv_heads=2), causal=True)
    else:
        case = packed(backend, [40, 7], [70, 30], causal=True)
    truth = exact(case)
    coarse = {name: in_tf32(x) if x.is_floating_point() else x for name, x in case.tensors.items()}
    rounded = plain(Case(coarse, in_tf32(case.dout), case.dlse, case.options), 0)
    for name, value in run(backend, case, precision="tf32").items():
        finite = truth[name].isfinite()
        error, own = ((x.double() - truth[name])[finite].abs().max() for x in (value, rounded[name]))
        assert error <= 2 * own + 2 * torch.finfo(torch.float32).eps * truth[name][finite].abs().max(), name


@pytest.mark.parametrize("precision", ["fp32", "TF32", 32])
def test_what_is_no_precision(precision: object) -> None:
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match=r"precision is .*; it must be 'tf32', or None"):
        ioattn.attention(q, q, q, precision=precision)


def test_only_float32_can_be_rounded() -> None:
    q = torch.randn(1, 1, 4, 8, dtype=torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"precision is 'tf32' and q is torch.bfloat16; it must be None but for float32"
    ):
        ioattn.attention(q, q, q, precision="tf32")


def test_problem_says_it() -> None:
    q = torch.randn(1, 1, 4, 8)
    assert str(ioattn.explain(q, q, q, precision="tf32").problem) == "B1 H1 N4 D8 fp32 cpu tf32"
