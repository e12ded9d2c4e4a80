"""The backward in float32: what the rounding of the LSE, and of exponents near it, does not do to the gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from attend import Target

from ioattn.backends.triton import launch
from ioattn.problem import Gradients, Options, Problem, Tensors


@pytest.fixture
def device(backend: Target) -> str:
    if backend.name != "triton":
        pytest.skip("of the kernels in Triton alone")
    return backend.device


class Attention:
    """Of 16 queries and 4096 keys: an LSE between 8 and 16, where float32 numbers are 9.5e-7 apart."""

    def __init__(self, device: str, sink: float | None = None) -> None:
        q, self.dout = torch.randn(2, 1, 1, 16, 16, device=device).unbind()
        k, v = torch.randn(2, 1, 1, 4096, 16, device=device).unbind()
        sinks = None if sink is None else torch.tensor([sink], device=device)
        self.tensors = Tensors(q, k, v, sinks=sinks)
        self.problem = Problem.of(self.tensors, Options())
        q, k, v, dout = (x[0, 0].double() for x in (q, k, v, self.dout))
        scores = q @ k.T / 4
        all_scores = scores if sinks is None else torch.cat([scores, sinks.double().expand(16, 1)], 1)
        self.lse = all_scores.logsumexp(1)
        assert ((self.lse > 8) & (self.lse < 16)).all()
        self.scores, self.operands = scores, (q, k, v, dout)
        self.out = (scores - self.lse[:, None]).exp() @ v

    def truth(self, lse: Tensor, out: Tensor) -> tuple[Tensor, ...]:
        q, k, v, dout = self.operands
        weights = (self.scores - lse[:, None]).exp()
        dscores = weights * (dout @ v.T - (dout * out).sum(1, keepdim=True)) / 4
        return dscores @ k, dscores.T @ q, weights.T @ dout

    def errors(self, lse: Tensor, out: Tensor, truth: tuple[Tensor, ...]) -> list[float]:
        """Of dQ, dK and dV, relative in the Euclidean norm, from this LSE and output."""
        tensors = self.tensors
        given = (tensors, out.float()[None, None], lse.float()[None, None], self.dout, None)
        grads = Gradients(*map(torch.empty_like, tensors[:3]))
        launch.prepare_gradients(self.problem, *given, grads)(*given, grads)
        return [
            ((grad[0, 0].double() - true).norm() / true.norm()).item()
            for grad, true in zip(grads[:3], truth, strict=True)
        ]


@pytest.mark.parametrize("sink", [None, 8.0])
@pytest.mark.parametrize("ulps", [-1, 0, 1])
def test_the_last_bit_of_the_lse_has_no_say(device: str, sink: float | None, ulps: int) -> None:
    """With the exponent rounded where it is 12 and the weights off by the LSE's error: up to 1e-6."""
    attention = Attention(device, sink)
    lse = attention.lse.float() + ulps * 2.0**-20
    errors = attention.errors(lse, attention.out, attention.truth(attention.lse, attention.out))
    # Tensor cores cut sums off where the interpreter rounds: up to 4.4e-7 on an H200.
    assert max(errors) < (5e-7 if device == "cuda" else 4e-7), errors


def test_an_lse_of_more_keys_than_these_is_taken_as_it_is(device: str) -> None:
    """As where keys are shared out: of all keys, of which these have a part of the weight."""
    attention = Attention(device)
    lse = attention.lse + torch.linspace(1e-4, 1.0, 16, device=device)
    out = torch.randn_like(attention.out)
    errors = attention.errors(lse, out, attention.truth(lse.float().double(), out))
    assert max(errors) < 2.5e-7, errors


@pytest.mark.parametrize("lse", [1e4, 1e7, 1e30])
def test_rows_without_weight_have_no_gradient(device: str, lse: float) -> None:
    """However coarse their LSE is: weights that sum to 0 are not made to sum to 1."""
    attention = Attention(device)
    tensors, rows = attention.tensors, torch.full((1, 1, 16), lse, device=device)
    given = (tensors, attention.out.float()[None, None], rows, attention.dout, None)
    grads = Gradients(*map(torch.empty_like, tensors[:3]))
    launch.prepare_gradients(attention.problem, *given, grads)(*given, grads)
    assert not any(x.any() for x in grads[:3])


def test_the_lse_in_two_parts(device: str) -> None:
    """A power of two, and what is left and small; the LSE itself where a weight could overflow, and for NaN and inf."""
    special = [-torch.inf, torch.inf, torch.nan, 64.0, -64.0, 1e4, -1e30, 0.0]
    lse = torch.cat([torch.tensor(special), torch.linspace(-63.9, 63.9, 248)]).to(device)
    q = torch.zeros(1, 1, len(lse), 16, device=device)
    tensors, rows = Tensors(q, q, q), lse[None, None]
    problem = Problem.of(tensors, Options())
    grads = Gradients(*map(torch.empty_like, tensors[:3]))
    steps = launch.prepare_backward(problem, tensors, q, q, grads, launch.gpu_of(q.device))
    others = (q, rows, q, None, None, None, *launch.rows_for(problem, rows))
    given = launch.backward_arguments(problem, tensors, grads, others, launch.Room(), steps)
    for kernel in steps.delta:
        kernel(given[0])
    rest, factor = (x[0, 0].cpu() for x in others[-2:])
    lse = lse.cpu()
    assert torch.equal(rest[:7].nan_to_num(0.5), lse[:7].nan_to_num(0.5))
    assert (factor[:7] == 1).all()
    assert (factor[7:].frexp().mantissa == 0.5).all()
    assert (rest[7:].abs() < 0.35).all()
    whole = rest[7:].double() - factor[7:].double().log()
    assert (whole - lse[7:].double()).abs().max() < 2e-8
