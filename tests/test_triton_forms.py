"""Forms of the Triton kernels that its table may choose and its interpreter does not by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from attend import Shape, Target, check, dense, packed

pytest.importorskip("triton", reason="Triton is not installed")

import ioattn
from ioattn import ops
from ioattn.backends.triton import config, launch
from ioattn.backends.triton.config import FP16X3, Tiles
from ioattn.backends.triton.halves import Room
from ioattn.backends.triton.kernels.queries import UNSEEN
from ioattn.launching import _with_tensor_maps, by_address
from ioattn.problem import Gradients, Options, Problem, Tensors

FORMS = {
    "apart": Tiles(32, 64, 4, 1, apart=True),
    "halves": Tiles(32, 64, 4, 1, FP16X3),
    "halves apart": Tiles(64, 32, 4, 1, FP16X3, apart=True),
}


def test_later_calls_get_the_same_arguments_as_addresses() -> None:
    x, bias = torch.empty(2, 4, 9, 16), torch.empty(1, 4, 1, 9)
    tensors = Tensors(x, x.mT.contiguous().mT, x, bias, sinks=torch.empty(4))
    problem = Problem.of(tensors, Options(lo=-3, softcap=2.0))
    every = (*tensors, x, torch.empty(2, 4, 9))

    def describe(given: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(launch.forward_arguments(problem, Tensors(*given[:-2]), *given[-2:], Room()))

    def with_addresses(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.data_ptr()
        return tuple(map(with_addresses, value)) if isinstance(value, tuple) else value

    made = by_address(describe, every)
    assert made is not None
    assert made([None if x is None else x.data_ptr() for x in every]) == with_addresses(describe(every))


def test_a_tensor_that_is_copied_first_is_not_called_by_address() -> None:
    apart = torch.empty(8)[::2]
    assert by_address(lambda given: (given[0].contiguous(),), [apart]) is None


def test_infinite_numbers_are_written_down_too() -> None:
    made = by_address(lambda given: (given[0], math.inf, -math.inf), [torch.empty(8)])
    assert made is not None
    assert made([16]) == (16, math.inf, -math.inf)


def test_one_kernel_is_loaded_for_all_calls_of_a_device() -> None:
    class Metadata(NamedTuple):
        tensordesc_meta: Any

    class Kernel:
        src = SimpleNamespace(signature={"x_desc": "tensordesc<fp16[64,64],layout>", "n": "constexpr"}, fn=None)
        metadata = Metadata([None])
        module = "loaded elsewhere"

    kernel = Kernel()
    other = _with_tensor_maps(kernel, 0)
    assert list(other.src.signature) == ["x_desc", "x_desc.shape", "x_desc.strides"]
    assert other.module is None
    assert _with_tensor_maps(kernel, 0) is other
    assert _with_tensor_maps(kernel, 1) is not other


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, backend: Target) -> Tiles:
    if not backend.interpreted:
        pytest.skip("in Triton's interpreter the tiles can be set")
    tiles = FORMS[request.param]
    monkeypatch.setattr(config, "INTERPRETER", tiles)
    monkeypatch.setattr(ops, "_plans", {})
    return tiles


FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window and softcap": {"window": (40, 20), "softcap": 2.0},
    "alibi": {"alibi": True, "causal": True},
    "bias, mask and sinks": {"bias": (1, 1, 1, 130), "mask": (70, 130), "sinks": True},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_feature(backend: Target, form: Tiles, feature: str) -> None:
    check(backend, dense(backend, Shape(1, 4, 70, 130, 24, dim_v=40, kv_heads=2), **FEATURES[feature]))


def test_packed(backend: Target, form: Tiles) -> None:
    check(backend, packed(backend, [9, 70, 0, 17], [0, 90, 5, 70], causal=True, slack=5))


@pytest.mark.parametrize("factor", [1e-6, 1e6, 1e12])
def test_sizes_of_numbers(backend: Target, form: Tiles, factor: float) -> None:
    """Halves have 5 bits of exponent: what is scaled wrongly is infinite or zero."""
    case = dense(backend, Shape(1, 2, 70, 130, 16))
    case = case.replace(v=case.tensors["v"] * factor)
    check(backend, type(case)(case.tensors, case.dout * factor, None, case.options))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e5], ids=str)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_does_not_fit_in_halves(backend: Target, form: Tiles, name: str, value: float) -> None:
    case = dense(backend, Shape(1, 2, 70, 130, 16), causal=True)
    case.tensors[name][0, 0, 60, 3] = value
    check(backend, case)


def _hidden(value: float) -> torch.Tensor:
    """A causal mask as a bias."""
    return torch.zeros(96, 144).masked_fill(torch.arange(144) > torch.arange(96)[:, None], value)


MOST_NEGATIVE = float(torch.finfo(torch.bfloat16).min)

BIASES: dict[str, tuple[torch.Tensor, bool]] = {
    "of distances": (-8.0 * (torch.arange(144) - torch.arange(96)[:, None]).abs(), False),
    "growing by a thousand": (torch.linspace(-500, 500, 144).expand(96, 144), False),
    "-1e9 where hidden": (_hidden(-1e9), False),
    "the most negative number where hidden": (_hidden(MOST_NEGATIVE), False),
    "-inf where hidden": (_hidden(-torch.inf), False),
    "-1e9 everywhere": (torch.full((96, 144), -1e9), False),
    "-inf in a row": (torch.zeros(96, 144).index_fill(0, torch.tensor([5]), -torch.inf), False),
    "the most negative number in a row": (torch.zeros(96, 144).index_fill(0, torch.tensor([5]), MOST_NEGATIVE), True),
    "1e30 in a row": (torch.zeros(96, 144).index_fill(0, torch.tensor([5]), 1e30), True),
}


@pytest.mark.parametrize("name", BIASES)
def test_biases_that_are_repaired(backend: Target, name: str) -> None:
    """Only where all that a row sees, or the most of it, is beyond 2^30: repair takes several times as long."""
    if backend.name != "triton":
        pytest.skip("of the kernels in Triton alone")
    bias, repaired = BIASES[name]
    q, k, v = (torch.randn(1, 1, n, 64, dtype=torch.bfloat16, device=backend.device) for n in (96, 144, 144))
    tensors = Tensors(q, k, v, bias.to(q)[None, None].contiguous())
    problem = Problem.of(tensors, Options())
    out, lse = torch.empty_like(q), torch.empty(1, 1, 96, device=backend.device)
    main, _ = launch.prepare_forward(problem, tensors, out, launch.gpu_of(q.device)).whole
    main(launch.forward_arguments(problem, tensors, out, lse, Room())[-1])
    assert bool(out.isnan().any()) is repaired


@pytest.mark.parametrize("name", [*BIASES, "-1e9 in a row"])
def test_gradients_with_biases_far_from_0(backend: Target, name: str) -> None:
    """An LSE far from 0 is not rounded in powers of two, nor are those of the queries in its block.

    A GPU, whose multiply-add does not round the product, would make 2^64 of that; the interpreter rounds both alike.
    Compared with float32, not float64: where all that a row sees is at -1e9, scores and LSE are multiples of 64.
    """
    row = torch.zeros(96, 144).index_fill(0, torch.tensor([5]), -1e9)
    bias = BIASES[name][0] if name in BIASES else row
    given = [torch.randn(1, 1, n, 64, device=backend.device).bfloat16() for n in (96, 144, 144)]
    dout = torch.randn_like(given[0])

    def gradients(dtype: torch.dtype, chosen: str) -> tuple[torch.Tensor, ...]:
        leaves = [x.to(dtype).requires_grad_() for x in given]
        whole = bias.to(given[0])[None, None].contiguous().to(dtype)
        out = ioattn.attention(*leaves, bias=whole, backend=chosen)
        return torch.autograd.grad(out, leaves, dout.to(dtype))

    if backend.name != "triton":
        pytest.skip("of the kernels in Triton alone")
    results = [
        gradients(torch.bfloat16, "triton"),
        gradients(torch.bfloat16, "eager"),
        gradients(torch.float32, "eager"),
    ]
    for found, plain, known in zip(*results, strict=True):
        assert (found - known).norm() <= 2 * (plain - known).norm() + 0.002 * known.norm()


@pytest.mark.parametrize("with_dbias", [False, True])
@pytest.mark.parametrize("lse", [1100.0, -1e9, torch.nan], ids=str)
def test_one_lse_far_from_0_has_its_block_flagged(
    backend: Target, monkeypatch: pytest.MonkeyPatch, lse: float, with_dbias: bool
) -> None:
    """In the lowest bit of each delta, that of a query that saw nothing too: threads look at one of several.

    Results do not say so: in the interpreter each score goes by its own flag.
    """
    if backend.name != "triton":
        pytest.skip("of the kernels in Triton alone")
    q, k, v, dout = (torch.randn(1, 1, n, 64, device=backend.device).bfloat16() for n in (192, 144, 144, 192))
    bias = torch.zeros(1, 1, 192, 144, device=backend.device)
    bias[..., 5, :], bias[..., 7, :], bias[..., 100:, :] = lse, -torch.inf, 1000.0
    bias = bias.bfloat16()
    tensors = Tensors(q, k, v, bias)
    problem = Problem.of(tensors, Options())
    out, sums = torch.empty_like(q), torch.empty(1, 1, 192, device=backend.device)
    launch.prepare(problem, tensors, out, sums)(tensors, out, sums)
    room = launch.rows_for(problem, sums)
    monkeypatch.setattr(launch, "rows_for", lambda *_: room)
    given = (tensors, out, sums, dout, None)
    grads = Gradients(*map(torch.empty_like, (q, k, v)), torch.empty_like(bias) if with_dbias else None)
    launch.prepare_gradients(problem, *given, grads)(*given, grads)
    delta, in_units = (x[0, 0].contiguous() for x in room[:2] if x is not None)
    block = config.choose(problem, "query", launch.gpu_of(q.device)).q_tile
    is_far = torch.arange(192, device=backend.device) < block
    assert torch.equal(delta.view(torch.int32) & 1, is_far.int())
    expected = torch.where(is_far, sums[0, 0], sums[0, 0] / math.log(2))
    expected[7] = UNSEEN.value
    torch.testing.assert_close(in_units, expected, equal_nan=True)
