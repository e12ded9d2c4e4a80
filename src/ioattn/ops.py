"""The registered operators `ioattn::forward` and `ioattn::backward`, their fakes, and autograd around them.

With `cache_ops`, the only file that knows torch.library. Everything torch.compile sees is two opaque operators whose
arguments are `Tensors`, then `Options`, then a backend's name. Run eagerly, autograd is a Function outside of the
operator: 2.6 us per call where `register_autograd` costs 10.2. A compiler gets the same derivative through
`register_autograd`, because it refuses a Function that receives one tensor twice. Real and fake outputs are allocated
by the same code, here.

What follows from layouts and options alone (the checked Problem, its backend, the outputs' layouts, what starts the
kernels) is a `Plan`, made once and looked up afterwards. Where nothing looks at the operator on its way, a call uses
its plan without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from ioattn import registry
from ioattn.plans import Layout, Plan, layout_key, remember
from ioattn.problem import Gradients, Options, Problem, Tensors, check, check_offsets, longest_lengths

NO_SLOPE_GRADIENT = "alibi_slopes requires a gradient; it has none here, it must be detached"

_INPUTS = "Tensor q, Tensor k, Tensor v, " + ", ".join(f"Tensor? {name}" for name in Tensors._fields[3:])
_OPTIONS = (
    "SymInt? lo, SymInt? hi, int shift, str align, float? scale, float? softcap, bool deterministic, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, str? precision, str? backend"
)
_SAVED = "Tensor out, Tensor lse, Tensor dout, Tensor? dlse, bool want_dbias, bool want_dsinks"

_AUTOCAST_FROM = (torch.float16, torch.bfloat16, torch.float32)

_INPUT_COUNT = len(Tensors._fields)
_WANT_POSITIONS = (_INPUT_COUNT + 4, _INPUT_COUNT + 5)
_SETTING_COUNT = len(Options._fields) + 1

_library = torch.library.Library("ioattn", "DEF")
_library.define(f"forward({_INPUTS}, {_OPTIONS}) -> (Tensor out, Tensor lse)")
_library.define(
    f"backward({_INPUTS}, {_SAVED}, {_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)"
)


def attend(tensors: Tensors, options: Options, backend: str | None) -> tuple[Tensor, Tensor]:
    """Attention of these inputs, under autocast and autograd where they apply."""
    needs_grad = requires_grad(tensors)
    if is_plain(tensors):
        plan = _plan_for(tensors, options, backend)
        if all(x is None for x in tensors[3:]):
            plan.watch(*tensors[:3])
            _plans[options, backend] = plan
        return _run_plainly(plan, tensors, options, backend, needs_grad)
    tensors = _autocast(tensors)
    if torch.compiler.is_compiling():
        if _is_transformed() and not any(x is not None and torch._C._functorch.is_batchedtensor(x) for x in tensors):
            # `register_autograd` knows no functorch, and a compiler does not trace a Function that has a jvp.
            raise NotImplementedError("attention inside torch.func.grad, vjp or jvp must not be compiled; vmap may be")
    elif needs_grad or _is_transformed():
        return _Attention.apply(*tensors, *options, backend)  # type: ignore[no-untyped-call]
    return _forward_op(*tensors, *options, backend)


def attend_again(
    q: Tensor, k: Tensor, v: Tensor, options: Options, backend: str | None
) -> tuple[Tensor, Tensor] | None:
    """Attention as in the last plain call with these options, if q, k and v are like that one's; None if they are not.

    Most calls are: this takes 2 us of what `Tensors.of` and `attend` take 10 for.
    """
    if torch.compiler.is_compiling():
        return None
    try:
        plan = _plans.get((options, backend))
    except TypeError:
        return None  # a backend's name without a hash
    if plan is None or forward_ad._current_level >= 0 or torch._C._autograd._profiler_enabled():
        return None
    has_gradients = plan.recognised(q, k, v)
    if has_gradients is None:
        return None
    return _run_plainly(plan, Tensors(q, k, v), options, backend, has_gradients and torch.is_grad_enabled())


def _run_plainly(
    plan: Plan, tensors: Tensors, options: Options, backend: str | None, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    if not needs_grad:
        return _run_forward(plan, tensors)
    q, k, v, bias, mask, slopes, sinks, *starts = tensors
    apply: Callable[..., tuple[Tensor, Tensor]] = _PlainAttention.apply
    return apply(q, k, v, bias, sinks, (plan, mask, slopes, *starts, options, backend))


def requires_grad(tensors: Iterable[Tensor | None]) -> bool:
    """Whether one of them does, where gradients are recorded."""
    if not torch.is_grad_enabled():
        return False
    for x in tensors:  # noqa: SIM110 - `any` over a generator takes twice as long
        if x is not None and x.requires_grad:
            return True
    return False


def is_plain(tensors: Iterable[Tensor | None]) -> bool:
    """Whether nothing would look at the operator on its way, so that it need not be called."""
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() != 0
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._is_any_autocast_enabled()
        or torch._C._autograd._profiler_enabled()
        or torch._C._get_tracing_state() is not None
    ):
        return False
    for x in tensors:
        if x is None:
            continue
        if type(x) not in (Tensor, Parameter) or x.is_neg() or x.is_meta or x._is_zerotensor():
            return False
        if not torch._C._has_storage(x):
            # Batched, as `is_grads_batched` hands it to a backward: no transform shows.
            return False
    return True


def _is_transformed() -> bool:
    """Whether functorch (vmap, grad, jvp, ...) or forward-mode differentiation is under way.

    Their inner levels do not show on the tensors: `requires_grad` of a tensor that vmap wraps is False.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _autocast(tensors: Tensors) -> Tensors:
    """Inside torch.autocast q, k and v take its dtype, as in torch's own attention; float64 stays.

    A 16-bit bias that then has another type becomes float32, which loses nothing.
    """
    device = tensors.q.device.type
    if not _is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    q, k, v = (x.to(dtype) if x.dtype in _AUTOCAST_FROM else x for x in tensors[:3])
    bias = tensors.bias
    if bias is not None and bias.dtype in _AUTOCAST_FROM and bias.dtype != dtype:
        bias = bias.float()
    return tensors._replace(q=q, k=k, v=v, bias=bias)


def _is_autocast_enabled(device: str) -> bool:
    """Whether autocast is on for a type of device; torch 2.11 does not trace `torch.amp.is_autocast_available`.

    Without it a type that has no autocast (meta) must not be asked about.
    """
    return torch._C._is_any_autocast_enabled() and device != "meta" and torch.is_autocast_enabled(device)


Upstream = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""What a backward gets besides the inputs: out, lse, dout and dlse."""


_plans: dict[Any, Plan] = {}


def _plan_for(tensors: Tensors, options: Options, backend: str | None) -> Plan:
    """The plan of a forward: it writes out and lse."""
    if tensors.cu_seqlens_q is not None:
        options = _with_lengths(tensors, options)
    key = (layout_key(tensors), options, backend)
    plan = _plans.get(key)
    if plan is None:
        problem = Problem.of(tensors, options)
        results = _allocate_forward(tensors)
        run = registry.prepare("forward", registry.choose(problem, backend), problem, tensors, *results)
        plan = remember(_plans, key, Plan(tuple(map(Layout.of, results)), run))
    return plan


def _backward_plan_for(
    tensors: Tensors, upstream: Upstream, wants: tuple[bool, bool], options: Options, backend: str | None
) -> Plan:
    """The plan of a backward: it writes dq, dk and dv, then dbias and dsinks where they are wanted."""
    if tensors.cu_seqlens_q is not None:
        options = _with_lengths(tensors, options)
    key = (layout_key((*tensors, *upstream)), wants, options, backend)
    plan = _plans.get(key)
    if plan is None:
        problem = Problem.of(tensors, options)
        grads = _allocate_backward(tensors, *wants)
        chosen = registry.choose(problem, backend, backward=True)
        run = registry.prepare("backward", chosen, problem, tensors, *upstream, grads)
        plan = remember(_plans, key, Plan(tuple(None if x is None else Layout.of(x) for x in grads), run))
    return plan


def _with_lengths(tensors: Tensors, options: Options) -> Options:
    """The options with both longest lengths, after a check of the offsets' values.

    Reading the offsets of a GPU tensor waits for the device; whoever gives both lengths asked for no wait.
    """
    check(tensors)
    known = options.max_seqlen_q is not None and options.max_seqlen_k is not None
    if known and tensors.q.device.type != "cpu":
        return options
    check_offsets(tensors, options)
    longest_q, longest_k = longest_lengths(tensors, options)
    return options._replace(max_seqlen_q=longest_q, max_seqlen_k=longest_k)


def describe(tensors: Tensors, options: Options) -> Problem:
    """The problem that `attend` would run for these inputs, checked as there."""
    tensors = _autocast(tensors)
    if tensors.cu_seqlens_q is not None:
        options = _with_lengths(tensors, options)
    return Problem.of(tensors, options)


def _run_forward(plan: Plan, tensors: Tensors) -> tuple[Tensor, Tensor]:
    out, lse = plan.results[0].empty(), plan.results[1].empty()
    plan.run(tensors, out, lse)
    return out, lse


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    tensors = Tensors(*args[:_INPUT_COUNT])
    with as_written(tensors.q.device.type):
        return _run_forward(_plan_for(tensors, *_settings(args)), tensors)


def _run_backward(
    tensors: Tensors, upstream: Upstream, wants: tuple[bool, bool], options: Options, backend: str | None
) -> Gradients:
    out, lse, dout, dlse = upstream
    # Backends index lse as the forward wrote it; vmap hands it over as a view with stride 0.
    lse = lse.contiguous()
    plan = _backward_plan_for(tensors, (out, lse, dout, dlse), wants, options, backend)
    grads = Gradients._make([None if layout is None else layout.empty() for layout in plan.results])
    plan.run(tensors, out, lse, dout, dlse, grads)
    return grads


def _backward(*args: Any) -> tuple[Tensor, ...]:
    tensors = Tensors(*args[:_INPUT_COUNT])
    out, lse, dout, dlse, *wants = args[_INPUT_COUNT:-_SETTING_COUNT]
    with as_written(tensors.q.device.type):
        return _all_present(_run_backward(tensors, (out, lse, dout, dlse), tuple(wants), *_settings(args)))


def as_written(device: str) -> AbstractContextManager[None]:
    """Inside a backend autocast has no say: it would round the float32 products of softmax and sums."""
    return torch.autocast(device, enabled=False) if _is_autocast_enabled(device) else nullcontext()


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    tensors = Tensors(*args[:_INPUT_COUNT])
    check(tensors)
    return _allocate_forward(tensors)


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    want_dbias, want_dsinks = (args[i] for i in _WANT_POSITIONS)
    return _all_present(_allocate_backward(Tensors(*args[:_INPUT_COUNT]), want_dbias, want_dsinks))


def _settings(args: tuple[Any, ...]) -> tuple[Options, str | None]:
    return Options(*args[-_SETTING_COUNT:-1]), args[-1]


def _allocate_forward(tensors: Tensors) -> tuple[Tensor, Tensor]:
    q, v = tensors.q, tensors.v
    rows = (q.shape[1], q.shape[0]) if tensors.cu_seqlens_q is not None else q.shape[:-1]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return empty_in_order(q, v.shape[-1]), torch.empty(rows, dtype=dtype, device=q.device)


def _allocate_backward(tensors: Tensors, want_dbias: bool, want_dsinks: bool) -> Gradients:
    dq, dk, dv = map(empty_in_order, tensors[:3])
    extras = (tensors.bias if want_dbias else None, tensors.sinks if want_dsinks else None)
    return Gradients(dq, dk, dv, *(None if x is None else empty_in_order(x) for x in extras))


def _all_present(grads: Gradients) -> tuple[Tensor, ...]:
    """The gradients with an empty tensor, each time another one, where there is none: an operator returns tensors."""
    return tuple(grads.dq.new_empty((0,)) if x is None else x for x in grads)


def empty_in_order(like: Tensor, columns: int | None = None) -> Tensor:
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
        saved = (*inputs[:_INPUT_COUNT], *output)
        ctx.save_for_backward(*saved)
        if _is_transformed():
            # jvp of a vmap looks for them before it calls `jvp`, which then raises.
            ctx.save_for_forward(*saved)
        ctx.settings = inputs[_INPUT_COUNT:]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, out, lse = ctx.saved_tensors
        wants = dict(zip(Tensors._fields, ctx.needs_input_grad, strict=False))
        if wants["alibi_slopes"]:
            # Under vmap the slopes did not yet show that they require a gradient.
            raise ValueError(NO_SLOPE_GRADIENT)
        settings = Options(*ctx.settings[:-1]), ctx.settings[-1]
        dq, dk, dv, dbias, dsinks = _differentiate(
            Tensors(*inputs), (out, lse, dout, dlse), (wants["bias"], wants["sinks"]), *settings
        )
        grads = {"q": dq, "k": dk, "v": dv, "bias": dbias, "sinks": dsinks}
        by_position = [grads[name] if wants[name] else None for name in Tensors._fields]
        return (*by_position, *(None for _ in ctx.settings))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        raise NotImplementedError("ioattn has no forward-mode derivatives (jvp, jacfwd, dual tensors) yet")


class _PlainAttention(torch.autograd.Function):
    """`_Attention` where nothing is transformed, in half the time.

    Without a `setup_context` torch binds no arguments to a signature, and it looks only at those that have gradients.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Any, sinks: Any, rest: Any) -> tuple[Tensor, Tensor]:
        plan, mask, slopes, starts_q, starts_k, *ctx.settings = rest
        tensors = Tensors(q, k, v, bias, mask, slopes, sinks, starts_q, starts_k)
        out, lse = _run_forward(plan, tensors)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, out, lse = ctx.saved_tensors
        wants = ctx.needs_input_grad
        grads = _differentiate(Tensors(*inputs), (out, lse, dout, dlse), wants[3:5], *ctx.settings)
        return (*(grad if want else None for grad, want in zip(grads, wants, strict=False)), None)

    jvp = _Attention.jvp


def _differentiate(
    tensors: Tensors, upstream: Upstream, wants: tuple[bool, bool], options: Options, backend: str | None
) -> Sequence[Tensor | None]:
    """The gradients, by the backward operator where anything looks at it; `wants` are those of bias and sinks."""
    out, lse, dout, dlse = upstream
    if dout is None:
        dout = torch.zeros_like(out)
    given = (*tensors, out, lse, dout, dlse)
    if torch.is_grad_enabled():
        apply: Callable[..., Sequence[Tensor]] = _AttentionBackward.apply
        return apply(*given, *wants, *options, backend)
    if is_plain(given):
        return _run_backward(tensors, (out, lse, dout, dlse), wants, options, backend)
    grads: Sequence[Tensor] = _backward_op(*given, *wants, *options, backend)
    return grads


class _AttentionBackward(torch.autograd.Function):
    """The backward operator where its results might be differentiated: that raises instead of giving zeros."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return _backward_op(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise NotImplementedError(
            "ioattn has no double backward yet: the gradients of attention are not differentiable"
        )

    jvp = _Attention.jvp


torch.library.register_autograd(
    "ioattn::forward", _Attention.backward, setup_context=_Attention.setup_context, lib=_library
)


def _vmap_rule(op: Callable[..., Any], folded: tuple[int, ...]) -> Callable[..., Any]:
    """vmap of `op`: the mapped dimension joins the batch at the positions `folded`; anything else is a loop."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        size = info.batch_size
        others = [i for i, arg in enumerate(args) if isinstance(arg, Tensor) and i not in folded]
        per_head = [i for i in others if Tensors._fields[i] in ("alibi_slopes", "sinks")]
        wants_sums = any(args[i] for i in _WANT_POSITIONS) if op is _backward_op else False
        if others == per_head and not wants_sums and all(in_dims[i] is None for i in others):
            joined = list(args)
            for i in folded:
                if isinstance(args[i], Tensor):
                    mapped = (
                        args[i].expand(size, *args[i].shape) if in_dims[i] is None else args[i].movedim(in_dims[i], 0)
                    )
                    batch, joined[i] = mapped.shape[1], mapped.flatten(0, 1)
            results = tuple(x.unflatten(0, (size, batch)) if x.dim() > 1 else x.expand(size, 0) for x in op(*joined))
        elif size == 0:
            raise ValueError("vmap maps a dimension of size 0; with bias, mask or mapped sinks it must have at least 1")
        else:
            slices = (
                [a if d is None else a.select(d, s) for a, d in zip(args, in_dims, strict=True)] for s in range(size)
            )
            results = tuple(torch.stack(parts) for parts in zip(*(op(*each) for each in slices), strict=True))
        return results, (0,) * len(results)

    return rule


torch.library.register_vmap("ioattn::forward", _vmap_rule(_forward_op, (0, 1, 2)), lib=_library)
torch.library.register_vmap(
    "ioattn::backward", _vmap_rule(_backward_op, (0, 1, 2, *range(_INPUT_COUNT, _INPUT_COUNT + 4))), lib=_library
)
