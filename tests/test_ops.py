"""The registered operators under autograd, autocast, vmap, checkpointing and double backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attend import Shape, Target, check, dense, normal, packed, run, skip_where_it_objects
from oracle import Case
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

import ioattn

FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (3, 2)},
    "scale": {"scale": -0.7},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi": True},
    "bias": {"bias": (2, 5, 9)},
    "bias of one row": {"bias": (9,)},
    "mask": {"mask": (2, 2, 5, 9)},
    "sinks": {"sinks": True},
    "everything": {"causal": True, "softcap": 1.5, "alibi": True, "bias": (1, 2, 1, 9), "mask": (5, 9), "sinks": True},
}


def leaves_of(case: Case) -> dict[str, Tensor]:
    """The differentiable inputs as leaves."""
    names = [name for name in ("q", "k", "v", "bias", "sinks") if name in case.tensors]
    return {name: case.tensors[name].detach().requires_grad_() for name in names}


def with_inputs(target: Target, case: Case, names: list[str]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The operation as a function of the named tensors alone."""
    operation = ioattn.attention_varlen if case.packed else ioattn.attention

    def attend(*values: Tensor) -> tuple[Tensor, Tensor]:
        tensors = {**case.tensors, **dict(zip(names, values, strict=True))}
        return operation(**tensors, **case.options, return_lse=True, backend=target.name)

    return attend


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_gradcheck(backend: Target, features: dict[str, Any]) -> None:
    case = dense(backend, Shape(2, 2, 5, 9, 3, kv_heads=1), torch.float64, **features)
    skip_unless_it_takes(backend, torch.float64)
    case = case.replace(**{n: x.double() for n, x in case.tensors.items() if n == "sinks"})
    leaves = leaves_of(case)

    def finite(*values: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = with_inputs(backend, case, list(leaves))(*values)
        return out, lse.masked_fill(lse == -torch.inf, 0)

    assert torch.autograd.gradcheck(finite, tuple(leaves.values()), fast_mode=True)


@pytest.mark.parametrize("lengths", [([4, 0, 3], [5, 2, 6]), ([2, 3], [0, 7])], ids=["uneven", "no keys"])
def test_gradcheck_packed(backend: Target, lengths: tuple[list[int], list[int]]) -> None:
    skip_unless_it_takes(backend, torch.float64)
    case = packed(backend, *lengths, torch.float64, dim=3, slack=2, softcap=2.0, causal=True)
    leaves = leaves_of(case)

    def out_only(*values: Tensor) -> Tensor:
        return with_inputs(backend, case, list(leaves))(*values)[0]

    assert torch.autograd.gradcheck(out_only, tuple(leaves.values()), fast_mode=True)


def skip_unless_it_takes(target: Target, dtype: torch.dtype) -> None:
    """Skip where a fast backend does not compute in `dtype`."""
    x = torch.zeros(1, 1, 8, 16, device=target.device, dtype=dtype)
    reasons = dict(ioattn.explain(x, x, x).verdicts)[target.name]
    if reasons and target.name != "eager":
        pytest.skip("; ".join(reasons))


def operator_arguments(target: Target, case: Case) -> tuple[Any, ...]:
    """What `torch.ops.ioattn.forward` receives for a case with causal masking."""
    tensors = [case.tensors.get(n) for n in ("q", "k", "v")]
    tensors += [
        case.tensors[n][(None,) * (4 - case.tensors[n].dim())] if n in case.tensors else None for n in ("bias", "mask")
    ]
    tensors += [case.tensors.get(n) for n in ("alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k")]
    return (
        *tensors,
        None,
        0,
        0,
        "bottom-right",
        None,
        case.options.get("softcap"),
        False,
        None,
        None,
        None,
        target.name,
    )


OPCHECKED: dict[str, Callable[[Target], Case]] = {
    "dense": lambda target: dense(target, Shape(2, 4, 9, 20, kv_heads=2), softcap=2.0, alibi=True, sinks=True),
    "bias and mask": lambda target: dense(target, Shape(2, 4, 9, 20), bias=(4, 9, 20), mask=(9, 20)),
    "transposed": lambda target: heads_last(dense(target, Shape(2, 4, 9, 20, kv_heads=2))),
    "half": lambda target: dense(target, Shape(2, 4, 9, 20), torch.bfloat16),
    "packed": lambda target: packed(target, [5, 0, 9], [7, 3, 20], slack=2),
    "no rows": lambda target: dense(target, Shape(2, 4, 0, 20)),
}


def heads_last(case: Case) -> Case:
    """The case with q, k and v stored as (B, N, H, D)."""
    return case.replace(**{n: case.tensors[n].transpose(1, 2).contiguous().transpose(1, 2) for n in "qkv"})


@pytest.mark.parametrize("make", OPCHECKED.values(), ids=OPCHECKED)
def test_opcheck_forward(backend: Target, make: Callable[[Target], Case]) -> None:
    torch.library.opcheck(torch.ops.ioattn.forward.default, operator_arguments(backend, make(backend)))


@pytest.mark.parametrize("make", OPCHECKED.values(), ids=OPCHECKED)
def test_opcheck_backward(backend: Target, make: Callable[[Target], Case]) -> None:
    case = make(backend)
    args = operator_arguments(backend, case)
    out, lse = torch.ops.ioattn.forward.default(*args)
    saved = (out, lse, case.dout, case.dlse, "bias" in case.tensors, "sinks" in case.tensors)
    torch.library.opcheck(torch.ops.ioattn.backward.default, (*args[:9], *saved, *args[9:]))


@pytest.mark.parametrize("create_graph", [True, False])
def test_double_backward_raises_and_says_so(backend: Target, create_graph: bool) -> None:
    q = normal(1, 2, 5, 8, like=backend).requires_grad_()
    (dq,) = torch.autograd.grad(ioattn.attention(q, q, q, backend=backend.name).sum(), q, create_graph=create_graph)
    if not create_graph:
        assert not dq.requires_grad
        return
    with pytest.raises(NotImplementedError, match="double backward"):
        dq.sum().backward()


def test_backward_twice_over_a_retained_graph(backend: Target) -> None:
    case = dense(backend, causal=True)
    q = case.tensors["q"].requires_grad_()
    out = ioattn.attention(**case.tensors, causal=True, backend=backend.name)
    first, second = (torch.autograd.grad(out, q, case.dout, retain_graph=True)[0] for _ in range(2))
    assert torch.allclose(first, second)


def test_changing_an_input_before_the_backward_raises(backend: Target) -> None:
    q, k = normal(1, 2, 5, 8, like=backend).requires_grad_(), normal(1, 2, 5, 8, like=backend)
    out = ioattn.attention(q, k, k, backend=backend.name)
    k.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_autograd(backend: Target, context: Callable[[], Any]) -> None:
    q = normal(1, 2, 5, 8, like=backend).requires_grad_()
    with context():
        out = ioattn.attention(q, q, q, backend=backend.name)
    assert not out.requires_grad
    assert torch.equal(out, ioattn.attention(q, q, q, backend=backend.name))


def test_inputs_without_gradient_make_no_graph(backend: Target) -> None:
    q = normal(1, 2, 5, 8, like=backend)
    assert ioattn.attention(q, q, q, backend=backend.name).grad_fn is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_computes_in_its_type(backend: Target, dtype: torch.dtype) -> None:
    case = dense(backend, sinks=True, bias=(65, 65))
    leaves = leaves_of(case)
    with torch.autocast(backend.device, dtype):
        out, lse = with_inputs(backend, case, list(leaves))(*leaves.values())
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    out.backward(case.dout.to(dtype))
    assert all(x.grad.dtype == x.dtype for x in leaves.values())
    low = case.replace(**{n: case.tensors[n].to(dtype) for n in "qkv"})
    check(backend, Case(low.tensors, low.dout.to(dtype), low.dlse, low.options))
    assert torch.equal(out, run(backend, low, gradients=False)["out"])


@pytest.mark.parametrize("inside", ["forward", "backward"])
def test_autocast_does_not_reach_into_a_backend(backend: Target, inside: str) -> None:
    """Sums stay in float32, also where somebody calls the backward within autocast."""
    case = dense(backend, Shape(n_q=33, n_k=70), torch.bfloat16, causal=True, deterministic=True)
    skip_where_it_objects(backend, case)
    leaves = leaves_of(case)
    with torch.autocast(backend.device, torch.bfloat16, enabled=inside == "forward"):
        out = with_inputs(backend, case, list(leaves))(*leaves.values())
    with torch.autocast(backend.device, torch.bfloat16, enabled=inside == "backward"):
        gradients = torch.autograd.grad(out, list(leaves.values()), (case.dout, case.dlse))
    plain = run(backend, case)
    named = dict(zip(leaves, gradients, strict=True)) | {"out": out[0], "lse": out[1]}
    for name, value in named.items():
        assert torch.equal(value, plain[name if name in plain else f"d{name}"]), name


def test_autocast_leaves_float64_alone(backend: Target) -> None:
    skip_unless_it_takes(backend, torch.float64)
    q = normal(1, 2, 5, 8, like=backend, dtype=torch.float64)
    with torch.autocast(backend.device, torch.bfloat16):
        assert ioattn.attention(q, q, q, backend=backend.name).dtype == torch.float64


@pytest.mark.parametrize("dims", [(0, 0, 0), (1, None, 0), (None, 1, 1)], ids=str)
def test_vmap(backend: Target, dims: tuple[int | None, ...]) -> None:
    stacked = [normal(3, 2, 2, 9, 8, like=backend, seed=seed) for seed in range(3)]
    given = [x[0] if dim is None else x.movedim(0, dim) for x, dim in zip(stacked, dims, strict=True)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return ioattn.attention(q, k, v, causal=True, return_lse=True, backend=backend.name)

    mapped = torch.vmap(attend, dims)(*given)
    for n in range(3):
        single = attend(*(x[0] if dim is None else x[n] for x, dim in zip(stacked, dims, strict=True)))
        for one, other in zip(mapped, single, strict=True):
            assert torch.allclose(one[n], other, atol=1e-6)


def test_grad_transform_and_vmap_of_it(backend: Target) -> None:
    q, k, v = (normal(3, 1, 2, 9, 8, like=backend, seed=seed) for seed in range(3))

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = ioattn.attention(q, k, v, causal=True, return_lse=True, backend=backend.name)
        return (out * out).sum() + lse.sin().sum()

    per_sample = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    total = sum(loss(*(x[n] for x in leaves)) for n in range(3))
    for one, other in zip(per_sample, torch.autograd.grad(total, leaves), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_checkpointing_recomputes_the_same(backend: Target) -> None:
    case = dense(backend, causal=True)
    plain = run(backend, Case(case.tensors, case.dout, None, case.options))
    leaves = leaves_of(case)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ioattn.attention(q, k, v, causal=True, backend=backend.name)

    torch.utils.checkpoint.checkpoint(attend, *leaves.values(), use_reentrant=False).backward(case.dout)
    for name, x in leaves.items():
        assert torch.allclose(x.grad, plain[f"d{name}"], atol=1e-5)


@pytest.mark.parametrize(
    "make", [dense, lambda target, **f: packed(target, [63, 1, 40], [70, 9, 65], **f)], ids=["dense", "packed"]
)
def test_deterministic_runs_are_bitwise_equal(backend: Target, make: Callable[..., Case]) -> None:
    case = (
        make(backend, heads=8, kv_heads=2, deterministic=True)
        if make is not dense
        else dense(backend, Shape(2, 8, 130, 257, kv_heads=2), deterministic=True, bias=(1, 8, 1, 257), sinks=True)
    )
    first = run(backend, case)
    for _ in range(1 if backend.interpreted else 3):
        again = run(backend, case)
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_results_do_not_depend_on_the_number_of_threads(backend: Target) -> None:
    case = dense(backend, Shape(2, 4, 65, 130), deterministic=True, causal=True)
    threads = torch.get_num_threads()
    first = run(backend, case)
    try:
        torch.set_num_threads(1)
        again = run(backend, case)
    finally:
        torch.set_num_threads(threads)
    for name in first:
        assert torch.allclose(first[name], again[name], atol=1e-5), name


def test_a_gradient_of_zeros_that_torch_does_not_store(backend: Target) -> None:
    q, k, v = (normal(1, 2, 9, 8, like=backend, seed=seed).requires_grad_() for seed in range(3))
    out = ioattn.attention(q, k, v, backend=backend.name)
    zeros = torch._efficientzerotensor(out.shape, dtype=out.dtype, device=out.device)
    for gradient in torch.autograd.grad(out, (q, k, v), zeros):
        assert torch.equal(gradient, torch.zeros_like(q))
    assert torch.equal(ioattn.attention(q, k, zeros, backend=backend.name), torch.zeros_like(q))


def test_defaults_of_torch_change_no_buffer(backend: Target) -> None:
    # Long enough for a CPU to sum dQ in several parts, in a buffer of its own.
    length = 2100 if backend.name == "cpu" else 70
    inputs = [normal(1, 1, length, 16, like=backend, seed=seed).requires_grad_() for seed in range(3)]

    def step() -> tuple[Tensor, ...]:
        out = ioattn.attention(*inputs, causal=True, backend=backend.name)
        return out, *torch.autograd.grad(out.square().sum(), inputs)

    expected = step()
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = step()
    finally:
        torch.set_default_dtype(default)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


class Seen(TorchDispatchMode):
    """The names of the operators that pass."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_call_like_the_last_one_sees_what_has_changed_around_it(backend: Target) -> None:
    q, k, v = (normal(1, 2, 9, 8, like=backend, seed=seed) for seed in range(3))
    expected = ioattn.attention(q, k, v, backend=backend.name)

    def again(*inputs: Tensor) -> Tensor:
        """The same, just after a call that nothing has looked at."""
        assert torch.equal(ioattn.attention(q, k, v, backend=backend.name), expected)
        found = ioattn.attention(*(inputs or (q, k, v)), backend=backend.name)
        assert isinstance(found, Tensor)
        return found

    with Seen() as seen:
        ioattn.attention(q, k, v, backend=backend.name)
    assert "ioattn::forward" in seen.names
    again()
    with torch.profiler.profile() as profile:
        ioattn.attention(q, k, v, backend=backend.name)
    assert any(event.key == "ioattn::forward" for event in profile.key_averages())
    leaf = q.clone().requires_grad_()
    out = again(leaf, k, v)
    assert out.requires_grad
    out.sum().backward()
    assert leaf.grad is not None
    with torch.no_grad():
        assert not ioattn.attention(leaf, k, v, backend=backend.name).requires_grad
    assert ioattn.attention(leaf, k, v, backend=backend.name).requires_grad
    assert torch.allclose(again(torch._neg_view(-q), k, v), expected, atol=1e-6)
    assert torch.equal(again(Parameter(q), k, v), expected)
    again()
    batched = torch.vmap(lambda x: ioattn.attention(x, k, v, backend=backend.name))(q[None])
    assert torch.allclose(batched[0], expected, atol=1e-6)
    with torch.inference_mode():
        assert again().is_inference()
    again()
    with torch.autocast(backend.device, torch.bfloat16):
        assert ioattn.attention(q, k, v, backend=backend.name).dtype == torch.bfloat16
    with pytest.raises(TypeError, match="q is a list"):
        again(q.tolist(), k, v)
    with pytest.raises(TypeError, match="k is a sparse_coo tensor"):
        again(q, k.to_sparse(), v)
    with pytest.raises(ValueError, match="v has shape"):
        again(q, k, v[:, :, 1:])
    with pytest.raises(TypeError, match=r"v is torch\.float64"):
        again(q, k, v.double())


def test_another_start_or_stride_is_another_call(backend: Target) -> None:
    store = normal(1, 2, 10, 8, like=backend, seed=4).flatten()
    aligned, moved = (store[at:][:144].view(1, 2, 9, 8) for at in (0, 1))
    strided = store[:144].view(1, 9, 2, 8).transpose(1, 2)
    for q in (aligned, moved, strided, aligned, moved):
        found = ioattn.attention(q, aligned, aligned, backend=backend.name)
        expected = ioattn.attention(q.double(), aligned.double(), aligned.double(), backend="eager")
        assert torch.allclose(found, expected.to(found.dtype), atol=1e-5)
