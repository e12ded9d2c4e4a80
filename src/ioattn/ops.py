"""The registered operators `ioattn::forward` and `ioattn::backward`, their fakes, and autograd around them.

The only file that knows torch.library. Everything torch.compile sees is two opaque operators whose arguments are
`Tensors`, then `Options`, then a backend's name. Autograd is a Function outside of the operator: 2.6 us per call where
`register_autograd` costs 10.2. Outputs are allocated here, by the same code for real and fake tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ioattn import registry
from ioattn.problem import Gradients, Options, Problem, Tensors, check, check_offsets

_INPUTS = "Tensor q, Tensor k, Tensor v, " + ", ".join(f"Tensor? {name}" for name in Tensors._fields[3:])
_OPTIONS = (
    "int? lo, int? hi, int shift, str align, float? scale, float? softcap, bool deterministic, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, str? backend"
)
_SAVED = "Tensor out, Tensor lse, Tensor dout, Tensor? dlse, bool want_dbias, bool want_dsinks"

_INPUT_COUNT = len(Tensors._fields)
_SETTING_COUNT = len(Options._fields) + 1

_library = torch.library.Library("ioattn", "DEF")
_library.define(f"forward({_INPUTS}, {_OPTIONS}) -> (Tensor out, Tensor lse)")
_library.define(
    f"backward({_INPUTS}, {_SAVED}, {_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)"
)


def attend(tensors: Tensors, options: Options, backend: str | None) -> tuple[Tensor, Tensor]:
    """Attention of these inputs, under autocast and autograd where they apply."""
    tensors = _autocast(tensors)
    args = (*tensors, *options, backend)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return _Attention.apply(*args)  # type: ignore[no-untyped-call]
    return _forward_op(*args)


def _autocast(tensors: Tensors) -> Tensors:
    """Inside torch.autocast q, k and v take its dtype, as in torch's own attention; float64 stays."""
    device = tensors.q.device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in tensors[:3])
    return tensors._replace(q=q, k=k, v=v)


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    tensors, (options, backend) = Tensors(*args[:_INPUT_COUNT]), _settings(args)
    problem = _describe(tensors, options)
    out, lse = _allocate_forward(tensors)
    registry.choose(problem, backend).forward(problem, tensors, out, lse)
    return out, lse


def _backward(*args: Any) -> tuple[Tensor, ...]:
    tensors, (options, backend) = Tensors(*args[:_INPUT_COUNT]), _settings(args)
    out, lse, dout, dlse, want_dbias, want_dsinks = args[_INPUT_COUNT:-_SETTING_COUNT]
    problem = _describe(tensors, options)
    grads = _allocate_backward(tensors, want_dbias, want_dsinks)
    dq, dk, dv, dbias, dsinks = grads
    wanted = Gradients(dq, dk, dv, dbias if want_dbias else None, dsinks if want_dsinks else None)
    registry.choose(problem, backend).backward(problem, tensors, out, lse, dout, dlse, wanted)
    return grads


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    tensors = Tensors(*args[:_INPUT_COUNT])
    check(tensors)
    return _allocate_forward(tensors)


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    want_dbias, want_dsinks = args[_INPUT_COUNT + 4 : _INPUT_COUNT + 6]
    return _allocate_backward(Tensors(*args[:_INPUT_COUNT]), want_dbias, want_dsinks)


def _settings(args: tuple[Any, ...]) -> tuple[Options, str | None]:
    return Options(*args[-_SETTING_COUNT:-1]), args[-1]


def _describe(tensors: Tensors, options: Options) -> Problem:
    problem = Problem.of(tensors, options)
    known = options.max_seqlen_q is not None and options.max_seqlen_k is not None
    # Reading the offsets of a GPU tensor waits for the device; whoever gives both lengths asked for no wait.
    if problem.packed and (problem.device.type == "cpu" or not known):
        check_offsets(tensors, options)
    return problem


def _allocate_forward(tensors: Tensors) -> tuple[Tensor, Tensor]:
    q, v = tensors.q, tensors.v
    rows = (q.shape[1], q.shape[0]) if tensors.cu_seqlens_q is not None else q.shape[:-1]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return _empty_in_order(q, v.shape[-1]), torch.empty(rows, dtype=dtype, device=q.device)


def _allocate_backward(tensors: Tensors, want_dbias: bool, want_dsinks: bool) -> tuple[Tensor, ...]:
    dq, dk, dv = map(_empty_in_order, tensors[:3])
    absent = dq.new_empty((0,))
    dbias = absent if tensors.bias is None or not want_dbias else _empty_in_order(tensors.bias)
    dsinks = absent if tensors.sinks is None or not want_dsinks else _empty_in_order(tensors.sinks)
    # An operator may not return one tensor twice.
    return dq, dk, dv, dbias, absent.clone() if dsinks is dbias else dsinks


def _empty_in_order(like: Tensor, columns: int | None = None) -> Tensor:
    """Dense memory whose dimensions lie in the order of `like`'s, the last one innermost.

    The output of (B, N, H, D) data seen as (B, H, N, D) is then contiguous for whoever sees it as (B, N, H, D) again.
    """
    last = like.dim() - 1
    shape = (*like.shape[:-1], like.shape[-1] if columns is None else columns)
    order = [*sorted(range(last), key=like.stride, reverse=True), last]
    dense = torch.empty([shape[dim] for dim in order], dtype=like.dtype, device=like.device)
    return dense.permute([order.index(dim) for dim in range(last + 1)])


_library.impl("forward", _forward, "CompositeExplicitAutograd")
_library.impl("backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("ioattn::forward", _forward_fake, lib=_library)
torch.library.register_fake("ioattn::backward", _backward_fake, lib=_library)
_forward_op = torch.ops.ioattn.forward.default
_backward_op = torch.ops.ioattn.backward.default


class _Attention(torch.autograd.Function):
    """The forward operator with the backward operator as its derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        return _forward_op(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:_INPUT_COUNT], *output)
        ctx.settings = inputs[_INPUT_COUNT:]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, out, lse = ctx.saved_tensors
        wants = dict(zip(Tensors._fields, ctx.needs_input_grad, strict=False))
        if dout is None:
            dout = torch.zeros_like(out)
        args = (*inputs, out, lse, dout, dlse, wants["bias"], wants["sinks"], *ctx.settings)
        dq, dk, dv, dbias, dsinks = _backward_op(*args)
        grads = {"q": dq, "k": dk, "v": dv, "bias": dbias, "sinks": dsinks}
        by_position = [grads[name] if wants[name] else None for name in Tensors._fields]
        return (*by_position, *(None for _ in ctx.settings))


def _refuse_double_backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
    raise NotImplementedError("ioattn has no double backward yet: the gradients of attention are not differentiable")


torch.library.register_autograd("ioattn::backward", _refuse_double_backward, lib=_library)
