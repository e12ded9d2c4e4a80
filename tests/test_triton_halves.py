"""float32 as halves: what the pass before the kernels makes of numbers of any size, and which heads it leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from attend import Shape, Target, check, dense

from ioattn import ops
from ioattn.backends.triton import config, halves, launch
from ioattn.backends.triton.config import FP16X3, X6, Direction, Gpu, Tiles
from ioattn.backends.triton.halves import Room
from ioattn.problem import Options, Precision, Problem, Tensors

H200 = Gpu((9, 0), 227 * 1024)
MAIN: tuple[Direction, ...] = ("forward", "key_value", "query")


def precisions(
    gpu: Gpu, rows: int = 4096, dim: int = 64, precision: Precision | None = None, **extras: Tensor
) -> set[str]:
    x = torch.empty(1, 2, rows, dim, device="meta")
    problem = Problem.of(Tensors(x, x, x, **extras), Options(precision=precision))
    return {config.choose(problem, direction, gpu).precision for direction in MAIN}


@pytest.mark.parametrize("dim", [40, 64, 80, 128])
def test_hopper_multiplies_halves(dim: int) -> None:
    assert precisions(H200, dim=dim) == {FP16X3}
    assert precisions(H200, 256, dim) == {FP16X3}


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
@pytest.mark.parametrize("dim", [64, 128])
def test_other_gpus_keep_six_products(capability: tuple[int, int], dim: int) -> None:
    assert precisions(H200._replace(capability=capability), dim=dim) == {X6}


def test_where_hopper_keeps_six_products_too() -> None:
    assert precisions(H200, rows=255) == {X6}
    assert precisions(H200, dim=192) == {X6}
    assert precisions(H200, mask=torch.empty(1, 1, 4096, 4096, dtype=torch.bool, device="meta")) == {X6}
    assert precisions(H200, precision="tf32") == {"tf32"}
    x = torch.empty(1, 2, 4096, 64, device="meta")
    problem = Problem.of(Tensors(x, x[:, :, :0], x[:, :, :0]), Options())
    assert {config.choose(problem, direction, H200).precision for direction in MAIN} == {X6}
    assert precisions(H200._replace(shared_memory=48 * 1024), dim=128) != {FP16X3}


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if not launch.INTERPRETED:
        pytest.skip("in Triton's interpreter the tiles can be set")
    monkeypatch.setattr(config, "INTERPRETER", Tiles(32, 32, 4, 1, FP16X3))
    monkeypatch.setattr(ops, "_plans", {})


def split(q: Tensor, k: Tensor, v: Tensor) -> Room:
    """What the two kernels before a forward write."""
    tensors, out = Tensors(q, k, v), torch.empty_like(q)
    problem = Problem.of(tensors, Options())
    steps = launch.prepare_forward(problem, tensors, out, None)
    assert halves.wanted(steps)
    room = halves.room_for(problem, True, tensors, None)
    lse = torch.empty(q.shape[:3])
    arguments = launch.forward_arguments(problem, tensors, out, lse, room)
    for group, given in zip((steps.measure, steps.split), arguments, strict=False):
        for kernel in group:
            kernel(given)
    return room


def operands(rows: int = 70, dim: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    """Two heads of queries per head of keys, two of these."""
    torch.manual_seed(1)
    return torch.randn(1, 4, rows, dim), torch.randn(1, 2, rows, dim), torch.randn(1, 2, rows, dim)


@pytest.mark.parametrize("factor", [1e-28, 1e-6, 1.0, 1e12, 1e28])
def test_halves_add_up_to_the_number(interpreted: None, factor: float) -> None:
    q, k, v = (x * factor for x in operands())
    room = split(q, k, v)
    assert room.scales is not None
    for i, (x, parts) in enumerate(((q, room.q), (k, room.k), (v, room.v))):
        assert parts is not None
        high, low = parts.double().unflatten(-1, (2, 32)).unbind(-2)
        scale = room.scales[..., i].double().repeat_interleave(x.shape[1] // 2, 1)[..., None, None]
        assert torch.isfinite(scale).all()
        assert 2**14 <= high.abs().amax() <= 2**15
        off = ((high + low) * scale)[..., :24] - x.double()
        assert (off.abs() <= 2.0**-23 * x.double().abs() + 2.0**-39 * x.double().abs().amax()).all()
        assert (low != 0).any()
        assert (high + low)[..., 24:].count_nonzero() == 0


def with_number(value: float) -> Callable[[Tensor], None]:
    def change(x: Tensor) -> None:
        x[0, 1, 66, 3] = value

    return change


def with_row(factor: float) -> Callable[[Tensor], None]:
    def change(x: Tensor) -> None:
        x[0, 1, 66] *= factor / x[0, 1, 66].abs().amax() * x[0, 1].abs().amax()

    return change


def with_column(factor: float) -> Callable[[Tensor], None]:
    def change(x: Tensor) -> None:
        x = of_one_key_head(x)
        x[..., 3] *= factor / x[..., 3].abs().amax() * x.abs().amax()

    return change


def all_times(factor: float) -> Callable[[Tensor], None]:
    def change(x: Tensor) -> None:
        of_one_key_head(x).mul_(factor)

    return change


def of_one_key_head(x: Tensor) -> Tensor:
    """Both heads of queries, or one of K or V: what is measured together."""
    return x[0, (0 if x.shape[1] == 4 else 1) : 2]


CHANGES: dict[str, tuple[Callable[[Tensor], None], bool]] = {
    "nothing": (lambda x: None, True),
    "NaN": (with_number(torch.nan), False),
    "inf": (with_number(torch.inf), False),
    "-inf": (with_number(-torch.inf), False),
    "one large number": (with_number(1e6), False),
    "one small number": (with_number(1e-20), True),
    "a row of zeros": (with_row(0.0), True),
    "a column of zeros": (with_column(0.0), True),
    "all zeros": (all_times(0.0), True),
    "a smaller row": (with_row(2.0**-14), True),
    "a tiny row": (with_row(2.0**-18), False),
    "a smaller column": (with_column(2.0**-14), True),
    "a tiny column": (with_column(2.0**-18), False),
    "small": (all_times(1e-28), True),
    "too small": (all_times(1e-32), False),
    "large": (all_times(1e28), True),
    "too large": (all_times(1e32), False),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("operand", range(3))
def test_which_heads_fit(interpreted: None, name: str, operand: int) -> None:
    """A change in a head has no say about the other one, nor about other operands."""
    change, fits = CHANGES[name]
    given = operands()
    change(given[operand])
    room = split(*given)
    assert room.scales is not None
    expected = torch.ones(1, 2, 4, dtype=torch.bool)
    expected[0, 0 if operand == 0 else 1, operand] = fits  # queries 0 and 1 share keys 0
    assert torch.equal(torch.isfinite(room.scales), expected)


@pytest.mark.parametrize("value", [1.0, 1e6], ids=["both heads fit", "one does not"])
def test_each_head_is_computed_once(
    backend: Target, interpreted: None, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    """By the kernel with halves where they fit, by the one with whole numbers where not: no head is left out."""
    if not backend.interpreted:
        pytest.skip("in Triton's interpreter the tiles can be set")
    case = dense(backend, Shape(1, 2, 40, 70, 16), causal=True)
    case.tensors["k"][0, 1, 20, 3] = value
    seen: list[Room] = []
    room_for = halves.room_for

    def room_that_is_seen(*given: Any) -> Room:
        seen.append(room_for(*given))
        return seen[-1]

    monkeypatch.setattr(halves, "room_for", room_that_is_seen)
    check(backend, case)
    scales = seen[-1].scales
    assert scales is not None
    assert torch.equal(torch.isfinite(scales).all(-1)[0], torch.tensor([True, value == 1.0]))
