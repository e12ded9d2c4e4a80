"""Merging partial results against float64."""

from __future__ import annotations

import math

import pytest
import torch

import ioattn


def partials(parts: int, rows: int = 40, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(parts, 2, rows, 8).to(dtype), 4 * torch.randn(parts, 2, rows).to(dtype)


@pytest.mark.parametrize("parts", [1, 2, 9])
def test_merge_weighs_by_the_exponential_of_the_lse(parts: int) -> None:
    outs, lses = partials(parts)
    out, lse = ioattn.merge(outs, lses)
    weights = lses.double().softmax(0)[..., None]
    assert torch.allclose(out.double(), (weights * outs).sum(0), atol=1e-6)
    assert torch.allclose(lse.double(), lses.double().logsumexp(0), rtol=1e-6)


@pytest.mark.parametrize("level", [-1e5, 1e5, -3e38])
def test_merge_of_large_lses_does_not_overflow(level: float) -> None:
    outs, _ = partials(3)
    out, lse = ioattn.merge(outs, torch.full((3, 2, 40), level))
    assert torch.allclose(out, outs.mean(0), atol=1e-6)
    assert torch.allclose(lse.double(), torch.tensor(level).double() + math.log(3), rtol=1e-6)


def test_all_parts_empty_is_empty() -> None:
    outs, lses = partials(4)
    lses[:, :, 5] = -torch.inf
    out, lse = ioattn.merge(outs, lses)
    assert (out[:, 5] == 0).all()
    assert (lse[:, 5] == -torch.inf).all()
    assert out.isfinite().all()


@pytest.mark.parametrize("kept", [0, 2])
def test_one_part_left_is_returned_exactly(kept: int) -> None:
    outs, lses = partials(3)
    lses[[part for part in range(3) if part != kept]] = -torch.inf
    out, lse = ioattn.merge(outs, lses)
    assert torch.equal(out, outs[kept])
    assert torch.equal(lse, lses[kept])


def test_garbage_in_an_empty_part_is_left_out() -> None:
    outs, lses = partials(2)
    outs[1], lses[1] = torch.nan, -torch.inf
    assert torch.equal(ioattn.merge(outs, lses)[0], outs[0])


def test_nan_in_a_part_that_counts_stays() -> None:
    outs, lses = partials(2)
    outs[1, 0, 3, 2] = torch.nan
    out, _ = ioattn.merge(outs, lses)
    assert out.isnan().nonzero().tolist() == [[0, 3, 2]]


def test_merge_order_does_not_matter_beyond_rounding() -> None:
    outs, lses = partials(6)
    nested = ioattn.merge(
        *(torch.stack(x) for x in zip(ioattn.merge(outs[:4], lses[:4]), ioattn.merge(outs[4:], lses[4:]), strict=True))
    )
    for one, other in zip(nested, ioattn.merge(outs, lses), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_merge_refuses_rounded_parts_and_shapes_that_do_not_fit() -> None:
    outs, lses = partials(2)
    with pytest.raises(TypeError, match=r"outs is torch.bfloat16; it must be"):
        ioattn.merge(outs.bfloat16(), lses)
    with pytest.raises(ValueError, match=r"lses has shape .* must be"):
        ioattn.merge(outs, lses[:, :1])


def test_the_gradient_of_what_nobody_saw_is_zero() -> None:
    outs, lses = partials(3, dtype=torch.float64)
    lses[:, :, 5] = lses[0, :, 6] = -torch.inf
    outs.requires_grad_()
    lses.requires_grad_()
    out, lse = ioattn.merge(outs, lses)
    douts, dlses = torch.autograd.grad(out.sum() + lse.sum(), (outs, lses))
    assert douts.isfinite().all()
    assert (dlses[:, :, 5] == 0).all()
    weights = lses.detach()[:, :, 6:].softmax(0)
    expected = weights * (1 + (outs.detach()[:, :, 6:] - out.detach()[:, 6:]).sum(-1))
    assert torch.allclose(dlses[:, :, 6:], expected)


@pytest.mark.parametrize(
    ("outs", "lses", "kind", "says"),
    [
        (torch.zeros(0, 3, 4), torch.zeros(0, 3), ValueError, r"lses has shape \(0, 3\); it must be"),
        (torch.zeros(()), torch.zeros(()), ValueError, r"lses has shape \(\); it must be"),
        ([1.0], torch.zeros(1), TypeError, "outs is a list; it must be a torch.Tensor"),
        (torch.zeros(2, 4), torch.zeros(2, device="meta"), ValueError, "lses is on meta; it must be on outs' device"),
    ],
)
def test_what_cannot_be_merged(outs: object, lses: object, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        ioattn.merge(outs, lses)  # type: ignore[arg-type]
