"""torch.func transforms in every order, forward-mode differentiation, meta tensors, and both under a compiler."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch._dynamo.testing
from attend import Target, normal
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import ioattn


def operands(target: Target) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (normal(1, 2, 9, 8, like=target, seed=seed) for seed in range(3))
    return q, k, v


def loss_of(target: Target, k: Tensor, v: Tensor) -> Callable[..., Tensor]:
    def loss(q: Tensor, bias: Tensor | None = None) -> Tensor:
        out, lse = ioattn.attention(q, k, v, causal=True, bias=bias, return_lse=True, backend=target.name)
        return out.square().sum() + lse.sin().sum()

    return loss


def test_grad_of_vmap(backend: Target) -> None:
    _, k, v = operands(backend)
    loss = loss_of(backend, k, v)
    stacked = normal(3, 4, 1, 2, 9, 8, like=backend)
    leaf = stacked.clone().requires_grad_()
    (expected,) = torch.autograd.grad(sum(loss(x) for row in leaf for x in row), leaf)
    nested = grad(lambda q: vmap(vmap(loss))(q).sum())(stacked)
    assert torch.allclose(nested, expected, atol=1e-5)
    between = vmap(grad(lambda q: vmap(loss)(q).sum()))(stacked)
    assert torch.allclose(between, expected, atol=1e-5)


def test_grad_of_vmap_over_a_bias(backend: Target) -> None:
    q, k, v = operands(backend)
    loss = loss_of(backend, k, v)
    biases = normal(3, 2, 9, 9, like=backend, seed=5)
    leaf = biases.clone().requires_grad_()
    (expected,) = torch.autograd.grad(sum(loss(q, bias) for bias in leaf), leaf)
    assert torch.allclose(grad(lambda b: vmap(lambda bias: loss(q, bias))(b).sum())(biases), expected, atol=1e-5)


def test_reverse_mode_jacobian(backend: Target) -> None:
    q, k, v = operands(backend)

    def row(q: Tensor) -> Tensor:
        return ioattn.attention(q, k, v, backend=backend.name)[0, 0, 3]

    expected = torch.stack([grad(lambda q, column=column: row(q)[column])(q) for column in range(8)])
    assert torch.allclose(jacrev(row)(q), expected, atol=1e-5)


def test_gradients_of_a_batch_of_results(backend: Target) -> None:
    inputs = [x.requires_grad_() for x in operands(backend)]
    out = ioattn.attention(*inputs, causal=True, backend=backend.name)
    douts = normal(3, *out.shape, like=backend, seed=3)
    batched = torch.autograd.grad(out, inputs, douts, is_grads_batched=True, retain_graph=True)
    each = zip(*[torch.autograd.grad(out, inputs, dout, retain_graph=True) for dout in douts], strict=True)
    for found, expected in zip(batched, map(torch.stack, each), strict=True):
        assert torch.allclose(found, expected, atol=1e-5)


def test_slopes_get_no_silent_zeros_under_vmap(backend: Target) -> None:
    q, k, v = operands(backend)
    slopes = torch.ones(3, 2, device=backend.device)

    def total(slopes: Tensor) -> Tensor:
        each = vmap(lambda s: ioattn.attention(q, k, v, alibi_slopes=s, backend=backend.name))
        return each(slopes).sum()

    total(slopes)  # does not concern backends that do not take float32
    with pytest.raises(ValueError, match="alibi_slopes requires a gradient"):
        grad(total)(slopes)


def dual(attend: Callable[[Tensor], Tensor], q: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return attend(forward_ad.make_dual(q, torch.ones_like(q)))


FORWARD_MODES: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], object]] = {
    "jvp": lambda attend, q: jvp(attend, (q,), (q,)),
    "jvp of vmap": lambda attend, q: jvp(vmap(attend), (q[None],), (q[None],)),
    "vmap of jvp": lambda attend, q: vmap(lambda q: jvp(attend, (q,), (q,))[1])(q[None]),
    "jacfwd": lambda attend, q: jacfwd(attend)(q),
    "hessian": lambda attend, q: hessian(lambda q: attend(q).sum())(q),
    "dual": dual,
    "dual with gradient": lambda attend, q: dual(attend, q.clone().requires_grad_()),
}


@pytest.mark.parametrize("mode", FORWARD_MODES)
def test_forward_mode_raises_and_says_so(backend: Target, mode: str) -> None:
    q, k, v = operands(backend)
    with pytest.raises(NotImplementedError, match="ioattn has no forward-mode derivatives"):
        FORWARD_MODES[mode](lambda q: ioattn.attention(q, k, v, backend=backend.name), q)


def test_vmap_over_nothing(backend: Target) -> None:
    q, k, v = operands(backend)
    none = normal(0, 1, 2, 9, 8, like=backend)
    assert vmap(lambda q: ioattn.attention(q, k, v, backend=backend.name))(none).shape == (0, 1, 2, 9, 8)
    with pytest.raises(ValueError, match="vmap maps a dimension of size 0"):
        vmap(lambda bias: ioattn.attention(q, k, v, bias=bias, backend=backend.name))(none[:, 0, :, :, :1].mT)


def test_a_compiler_leaves_grad_transforms_to_torch(backend: Target) -> None:
    q, k, v = operands(backend)
    torch._dynamo.reset()

    def gradient(q: Tensor) -> Tensor:
        return grad(loss_of(backend, k, v))(q)

    assert torch.allclose(torch.compile(gradient, backend="aot_eager")(q), gradient(q), atol=1e-5)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="must not be compiled"):
        torch.compile(gradient, backend="aot_eager", fullgraph=True)(q)


def test_numbers_that_change_do_not_recompile_a_window_or_break_a_scale(backend: Target) -> None:
    q, k, v = operands(backend)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def windowed(q: Tensor, left: int) -> Tensor:
        return ioattn.attention(q, k, v, window=(left, 0), backend=backend.name)

    for left in range(1, 8):
        expected = ioattn.attention(q, k, v, window=(left, 0), backend=backend.name)
        assert torch.allclose(windowed(q, left), expected, atol=1e-6)
    assert counter.frame_count <= 2

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def scaled(q: Tensor, scale: float) -> Tensor:
        return ioattn.attention(q, k, v, scale=scale, softcap=3 * scale, backend=backend.name)

    for scale in (0.5, 0.25):
        expected = ioattn.attention(q, k, v, scale=scale, softcap=3 * scale, backend=backend.name)
        assert torch.allclose(scaled(q, scale), expected, atol=1e-6)


@pytest.mark.parametrize("gradient", [False, True])
def test_meta_tensors_have_the_results_shapes(gradient: bool) -> None:
    q = torch.empty(2, 4, 10**6, 64, device="meta", requires_grad=gradient)
    v = torch.empty(2, 2, 10**6, 32, device="meta")
    out, lse = ioattn.attention(q, q.detach()[:, :2], v, causal=True, return_lse=True)
    assert (out.shape, out.device.type) == ((2, 4, 10**6, 32), "meta")
    assert lse.shape == (2, 4, 10**6)
    if gradient:
        out.sum().backward()
        assert q.grad is not None
        assert q.grad.shape == q.shape
    rows = torch.empty(100, 4, 64, device="meta")
    offsets = torch.empty(5, device="meta", dtype=torch.int32)
    assert ioattn.attention_varlen(rows, rows, rows, offsets, offsets).shape == (100, 4, 64)


def test_autocast_takes_a_bias_of_another_half(backend: Target) -> None:
    q, k, v = (x.half() for x in operands(backend))
    bias = normal(9, 9, like=backend, dtype=torch.float16)
    expected = ioattn.attention(*(x.bfloat16() for x in (q, k, v)), bias=bias.float(), backend=backend.name)
    with torch.autocast(backend.device, torch.bfloat16):
        assert torch.equal(ioattn.attention(q, k, v, bias=bias, backend=backend.name), expected)
