"""torch.compile: as the very first call of a process, with new shapes, and with transposed inputs."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
from attend import Shape, Target, dense, packed, run
from features import LAYOUTS, laid_out
from torch import Tensor

import ioattn

SOURCE = Path(ioattn.__file__).parents[1]


def run_fresh(program: str) -> str:
    """The output of a program in a process of its own."""
    setup = f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", setup + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_fullgraph_as_the_first_call_of_a_process(backend: Target, compiler: str) -> None:
    run_fresh(f"""
        import torch, ioattn

        @torch.compile(fullgraph=True, backend={compiler!r})
        def block(x, sinks):
            q, k, v = x.unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
            out, lse = ioattn.attention(q, k, v, causal=True, softcap=3.0, sinks=sinks, return_lse=True,
                                        backend={backend.name!r})
            return out.transpose(1, 2).flatten(2) * 2, lse

        def eager(x, sinks):
            return block._torchdynamo_orig_callable(x, sinks)

        x = torch.randn(2, 33, 192, device={backend.device!r}, requires_grad=True)
        sinks = torch.randn(4, device={backend.device!r}, requires_grad=True)
        results = []
        for function in (block, eager):
            out, lse = function(x, sinks)
            results.append((out, lse, *torch.autograd.grad(out.sin().sum() + lse.sum(), (x, sinks))))
        for one, other in zip(*results):
            assert torch.allclose(one, other, atol=1e-5), (one - other).abs().max()
    """)


def compiled_gradients(target: Target, tensors: dict[str, Tensor], **compile_options: object) -> list[Tensor]:
    """Output and gradients of a compiled call, whose strides Dynamo has promised to the code around it."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = ioattn.attention(q, k, v, causal=True, backend=target.name)
        return out.transpose(1, 2).reshape(out.shape[0], out.shape[2], -1) + 1

    leaves = [x.detach().requires_grad_() for x in tensors.values()]
    out = torch.compile(attend, fullgraph=True, **compile_options)(*leaves)
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.mark.parametrize("layout", ["contiguous", "heads last", "queries outermost", "one head expanded", "row padded"])
@pytest.mark.parametrize("n", [196, 257])
def test_real_strides_are_those_of_the_fake(backend: Target, layout: str, n: int) -> None:
    torch._dynamo.reset()
    case = laid_out(dense(backend, Shape(2, 4, n, n, 16, kv_heads=2)), layout)
    tensors = {name: case.tensors[name] for name in "qkv"}
    actual = compiled_gradients(backend, tensors, backend="aot_eager")
    leaves = [x.detach().requires_grad_() for x in tensors.values()]
    out = ioattn.attention(*leaves, causal=True, backend=backend.name).transpose(1, 2).flatten(2) + 1
    for one, other in zip(actual, [out, *torch.autograd.grad(out.square().sum(), leaves)], strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_outputs_have_the_real_strides(backend: Target, layout: str) -> None:
    case = laid_out(dense(backend, Shape(2, 4, 33, 33, 16, kv_heads=2)), layout)
    real = run(backend, case)
    with torch._subclasses.FakeTensorMode() as mode:
        leaves = [mode.from_tensor(case.tensors[name]).requires_grad_() for name in "qkv"]
        out, lse = ioattn.attention(*leaves, return_lse=True, backend=backend.name)
        gradients = torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), torch.ones_like(lse)))
    for name, fake in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True):
        assert fake.shape == real[name].shape, name
        assert fake.stride() == real[name].stride(), name
        assert fake.dtype == real[name].dtype


def test_dynamic_shapes_compile_once(backend: Target) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ioattn.attention(q, k, v, causal=True, window=(20, None), backend=backend.name)

    for n_q, n_k in ((33, 70), (65, 65), (7, 130), (40, 20)):
        q, k, v = (dense(backend, Shape(2, 4, n_q, n_k, kv_heads=2)).tensors[name] for name in "qkv")
        expected = ioattn.attention(q, k, v, causal=True, window=(20, None), backend=backend.name)
        assert torch.allclose(attend(q, k, v), expected, atol=1e-6)
    assert counter.frame_count == 1


def test_packed_call_compiles(backend: Target) -> None:
    torch._dynamo.reset()
    case = packed(backend, [5, 0, 30], [9, 4, 40], slack=3, causal=True)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
        return ioattn.attention_varlen(
            q, k, v, cu_q, cu_k, max_seqlen_q=30, max_seqlen_k=40, causal=True, backend=backend.name
        )

    q, k, v, cu_q, cu_k = case.tensors.values()
    leaf = q.clone().requires_grad_()
    attend(leaf, k, v, cu_q, cu_k).backward(case.dout)
    plain = q.clone().requires_grad_()
    ioattn.attention_varlen(plain, k, v, cu_q, cu_k, causal=True, backend=backend.name).backward(case.dout)
    assert torch.allclose(leaf.grad, plain.grad, atol=1e-5)


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_longest_lengths_read_from_the_offsets(backend: Target) -> None:
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(rows: Tensor, offsets: Tensor) -> Tensor:
        longest = offsets.diff().max().item()
        lengths = {"max_seqlen_q": longest, "max_seqlen_k": longest}
        return ioattn.attention_varlen(rows, rows, rows, offsets, offsets, **lengths, backend=backend.name)

    case = packed(backend, [5, 9], [5, 9])
    rows, offsets = case.tensors["q"], case.tensors["cu_seqlens_q"]
    expected = ioattn.attention_varlen(rows, rows, rows, offsets, offsets, backend=backend.name)
    assert torch.allclose(attend(rows, offsets), expected, atol=1e-6)


def test_invalid_input_raises_under_compile_too(backend: Target) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(ioattn.attention, backend="aot_eager")
    q = torch.randn(1, 2, 8, 16, device=backend.device)
    with pytest.raises(Exception, match=r"softcap is -1\.0; it must be positive"):
        compiled(q, q, q, softcap=-1.0, backend=backend.name)
    with pytest.raises(Exception, match=r"k has head dimension 8; it must have q's, 16"):
        compiled(q, q[..., :8], q, backend=backend.name)
    with pytest.raises(Exception, match=r"sinks has shape \(3,\); it must be"):
        compiled(q, q, q, sinks=torch.zeros(3, device=backend.device), backend=backend.name)
    with pytest.raises(Exception, match="backend is 'nonsense'; it must be one of"):
        compiled(q, q, q, backend="nonsense")
    compiled(q, q, q, backend=backend.name)
