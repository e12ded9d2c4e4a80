"""What only a GPU can get wrong: streams, devices, graphs, offsets beyond 2^31, launches of very many programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attend import Shape, Target, check, dense, normal, packed, run
from oracle import Case, Result
from tolerance import assert_close
from torch import Tensor

import ioattn
from ioattn import registry

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_gpu(backend: Target) -> None:
    if backend.device != "cuda" or backend.name == "eager":
        pytest.skip("about kernels on GPUs")


def step(target: Target, tensors: dict[str, Tensor], dout: Tensor, options: dict[str, Any]) -> Result:
    """Output, LSE and gradients; the tensors require them."""
    asked = None if registry.is_forward_only(target.name) else target.name
    out, lse = ioattn.attention(**tensors, **options, return_lse=True, backend=asked)
    gradients = torch.autograd.grad(out, list(tensors.values()), dout)
    named = {f"d{name}": gradient for name, gradient in zip(tensors, gradients, strict=True)}
    return {"out": out.detach(), "lse": lse.detach(), **named}


@pytest.mark.parametrize("features", [{}, {"bias": (2, 1, 1, 70), "sinks": True}], ids=["plain", "bias and sinks"])
def test_graph_of_forward_and_backward_replays_on_new_data(backend: Target, features: dict[str, object]) -> None:
    case = dense(backend, Shape(2, 4, 65, 70, 64, kv_heads=2), torch.bfloat16, causal=True, **features)
    tensors = {name: x.requires_grad_() for name, x in case.tensors.items()}
    dout = case.dout
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(backend, tensors, dout, case.options)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(backend, tensors, dout, case.options)
    with torch.no_grad():
        for i, x in enumerate((*tensors.values(), dout)):
            x.copy_(normal(*x.shape, like=backend, seed=20 + i))
    graph.replay()
    for name, expected in step(backend, tensors, dout, case.options).items():
        assert torch.equal(captured[name], expected), name


def test_work_is_ordered_on_the_current_stream(backend: Target) -> None:
    """The inputs are written late on a stream of their own; whoever reads them on another one reads zeros."""
    case = dense(backend, Shape(2, 4, 65, 70, 64, kv_heads=2), torch.bfloat16)
    expected = run(backend, case)
    tensors = {name: torch.zeros_like(x) for name, x in case.tensors.items()}
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for name, x in tensors.items():
            x.copy_(case.tensors[name])
        result = run(backend, Case(tensors, case.dout, case.dlse, case.options))
    stream.synchronize()
    for name, value in result.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_device_of_the_tensors_runs_them(backend: Target) -> None:
    other = Target(backend.name, "cuda:1")
    check(other, dense(other, Shape(2, 4, 65, 70, 64, kv_heads=2), causal=True, sinks=True))
    assert torch.cuda.current_device() == 0


def test_more_elements_than_32_bits_count_in_more_heads_than_a_launch_dimension_holds(backend: Target) -> None:
    shape = (2100, 64, 256, 64)
    assert torch.Size(shape).numel() > 2**31
    q, k, v, dout = (torch.randn(shape, device=backend.device, dtype=torch.bfloat16) for _ in range(4))
    tensors = {"q": q, "k": k, "v": v}
    whole = step(backend, {name: x.requires_grad_() for name, x in tensors.items()}, dout, {"causal": True})
    last = Case({name: x[-1:].detach() for name, x in tensors.items()}, dout[-1:], None, {"causal": True})
    assert_close({name: x[-1:] for name, x in whole.items()}, last)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_so_far_apart_that_a_tile_spans_more_than_32_bits(backend: Target, dtype: torch.dtype) -> None:
    rows, stride = 80, 2**25
    assert (rows - 1) * stride > 2**31
    case = dense(backend, Shape(1, 1, rows, dim=64), dtype, causal=True)
    stores = [torch.empty(rows, stride, device=backend.device, dtype=dtype) for _ in range(3)]
    far = {}
    for name, store in zip("qkv", stores, strict=True):
        far[name] = store[None, None, :, :64]
        far[name].copy_(case.tensors[name])
    check(backend, case.replace(**far))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_two_hundred_runs_give_the_same_bits(backend: Target, dim: int, deterministic: bool, causal: bool) -> None:
    """A race shows as a result that moves. Only dQ may, where blocks add to it in the order in which they come."""
    case = dense(backend, Shape(2, 8, 1000, 1100, dim, kv_heads=2), torch.bfloat16, causal=causal)
    first = run(backend, case, deterministic=deterministic)
    stays(backend, case, {x: first[x] for x in first if deterministic or x != "dq"}, 200, deterministic)


@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("causal", "heads", "kv_heads"), [(False, 5, 5), (True, 8, 2)], ids=["full", "grouped-causal"])
def test_long_walks_that_are_cut_give_the_same_bits(
    backend: Target, causal: bool, heads: int, kv_heads: int, dim: int, deterministic: bool
) -> None:
    """160 tiles of keys fill a round of 132 processors and part of another; parts hand sums on to each other."""
    case = dense(backend, Shape(1, heads, 4096, 4096, dim, kv_heads=kv_heads), torch.bfloat16, causal=causal)
    first = check(backend, case, deterministic=deterministic)
    stays(backend, case, {x: first[x] for x in first if deterministic or x != "dq"}, 50, deterministic)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("window", [None, (None, 0), (100, 0), (300, 200)], ids=str)
def test_packed_sequences_give_the_same_bits(backend: Target, dim: int, window: tuple[int | None, int] | None) -> None:
    lengths = [0, 700, 1, 1300, 128, 333]
    sizes = {"heads": 4, "kv_heads": 4, "dim": dim, "slack": 50, "window": window}
    case = packed(backend, lengths, lengths, torch.bfloat16, **sizes)
    stays(backend, case, check(backend, case, deterministic=True), 50, True)


def stays(backend: Target, case: Case, kept: Result, times: int, deterministic: bool = False) -> None:
    """Results that must not move from run to run."""
    for _ in range(times):
        again = run(backend, case, deterministic=deterministic)
        assert all(torch.equal(again[name], kept[name]) for name in kept), [
            (name, (again[name] - kept[name]).abs().max().item()) for name in kept
        ]
