"""The host side: from a problem and its tensors to launches of the kernels.

What follows from shapes and strides alone (tiles, compiled kernel, numbers) is prepared once and looked up afterwards;
a later call only writes the addresses of its tensors where the compiled kernels read them: see `driver.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from ioattn.backends.triton import config, halves, shortcuts
from ioattn.backends.triton.arguments import (
    Box,
    Form,
    Inputs,
    Matrix,
    Numbers,
    Repeats,
    Rows,
    Upstream,
    encoded,
    is_wide,
    padded,
)
from ioattn.backends.triton.call import INTERPRETED as INTERPRETED  # the backend asks for it
from ioattn.backends.triton.call import Call, Prepared
from ioattn.backends.triton.config import Direction, Gpu, Tiles
from ioattn.backends.triton.halves import Room
from ioattn.backends.triton.kernels.backward import bias_kernel, delta_kernel, key_value_kernel, query_kernel
from ioattn.backends.triton.kernels.forward import forward_kernel
from ioattn.backends.triton.kernels.repair import repair_forward_kernel, repair_key_value_kernel, repair_query_kernel
from ioattn.backends.triton.kernels.tanh import tanh, tanh_of_scores
from ioattn.backends.triton.totals import make_delta, sink_gradients, sink_weights
from ioattn.compose import Formula, Function, fold
from ioattn.launching import Arguments, on_device
from ioattn.problem import Gradients, Problem, Tensors
from ioattn.scores import Term

FILLING_PROGRAMS = 1024
"""What keeps the multiprocessors of any GPU busy to the end."""

SECTION_BYTES = 2**24
"""A fraction of an H200's L2 cache; the last programs of a causal problem then end within 1% of each other, not 6%."""


Group = list[Prepared]
"""Kernels that are handed the same arguments."""


PIECE = 64
"""Columns of halves that tensor cores sum in one go. 32 lose less, 0.6e-7 of 4.4 at D128, at 66 and not 89 TFLOP/s."""


class ForwardSteps(NamedTuple):
    """The kernels of a forward, in order; see `halves` for the first two."""

    measure: Group
    split: Group
    halves: Group
    whole: Group
    """All heads, or those whose numbers do not fit in halves."""


class Steps(NamedTuple):
    """The kernels of a backward, in order; `key` is dK and dV, or dK alone where `value` has kernels of its own."""

    delta: Group
    measure: Group
    split: Group
    halves_query: Group
    halves_key: Group
    halves_value: Group
    query: Group
    key: Group
    value: Group
    bias: Group


def prepare(problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor) -> Callable[[Tensors, Tensor, Tensor], None]:
    """What writes softmax(S) V to `out` and log(rowsum(exp(S))) to `lse` for tensors that lie like these."""

    def describe(x: Sequence[Any]) -> list[Arguments]:
        count = len(Tensors._fields)
        out, lse, *room = x[count:]
        return forward_arguments(problem, Tensors(*x[:count]), out, lse, Room(*room))

    steps = prepare_forward(problem, tensors, out, gpu_of(problem.device))
    wanted = halves.wanted(steps)
    call = Call(steps, describe)

    def run(tensors: Tensors, out: Tensor, lse: Tensor) -> None:
        call((*tensors, out, lse, *halves.room_for(problem, wanted, tensors, None)))

    return on_device(problem.device, run)


def prepare_gradients(
    problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, grads: Gradients
) -> Callable[..., None]:
    """What writes the gradients of q, k and v, and those of bias and sinks where wanted, for tensors that lie so."""
    gpu = gpu_of(problem.device)
    repeated_bias = grads.dbias is not None and not _repeats_nothing(problem)
    improved = repeated_bias or grads.dsinks is not None
    parts = _bias_parts(problem, gpu) if repeated_bias else 1
    steps = prepare_backward(problem, tensors, out, dout, grads, gpu)
    wanted, counts = halves.wanted(steps), (len(tensors), len(tensors) + len(grads))

    def describe(x: Sequence[Any]) -> list[Arguments]:
        inputs, gradients, others = Tensors(*x[: counts[0]]), Gradients(*x[counts[0] : counts[1]]), x[counts[1] :]
        return backward_arguments(problem, inputs, gradients, others[:9], Room(*others[9:]), steps)

    def scratch(tensors: Tensors, lse: Tensor, dout: Tensor, grads: Gradients) -> tuple[Tensor | None, ...]:
        totals, partial = torch.empty_like(lse) if improved else None, _room_for_parts(grads.dbias, parts)
        return totals, partial, *rows_for(problem, lse), *halves.room_for(problem, wanted, tensors, dout)

    before = Call(steps[:-1], lambda x: describe(x)[:-1])
    bias_gradient = Call([steps.bias], lambda x: describe(x)[-1:])

    def run(tensors: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, grads: Gradients) -> None:
        if grads.dbias is not None:
            # The walk over keys leaves out what the band hides.
            grads.dbias.zero_()
        room = totals, partial, delta, *_ = scratch(tensors, lse, dout, grads)
        everything = (*tensors, *grads, out, lse, dout, dlse, *room)
        before(everything)
        if delta is None or totals is None:
            return
        weights = sink_weights(tensors.sinks, lse)
        make_delta(totals, delta, dlse, lse, weights)
        bias_gradient(everything)
        if partial is not None and grads.dbias is not None:
            grads.dbias.copy_(partial.unflatten(0, (parts, -1)).sum(0))
        if grads.dsinks is not None:
            grads.dsinks.copy_(sink_gradients(weights, totals, problem.packed))

    return on_device(problem.device, run)


def rows_for(problem: Problem, lse: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Room for delta and, in float32, the LSE in two parts; in 16 bits for it as `queries.load_pairs` reads it."""
    if problem.dtype != torch.float32:
        pairs = lse.new_empty((*lse.shape, 2))
        return pairs[..., 1], pairs[..., 0], None
    return torch.empty_like(lse), torch.empty_like(lse), torch.empty_like(lse)


def prepare_forward(problem: Problem, tensors: Tensors, out: Tensor, gpu: Gpu | None) -> ForwardSteps:
    """The kernels that overwrite `out` and the LSE."""
    wide = _is_wide(problem, tensors, (out,))
    split, whole = _kernels(problem, tensors, "forward", wide, gpu, (formula_of(problem).step,))
    return ForwardSteps(*_prepare_halves(problem, tensors, wide, 3 if split else 0), split, whole)


KERNELS: dict[Direction, tuple[Any, Any]] = {
    "forward": (forward_kernel, repair_forward_kernel),
    "key_value": (key_value_kernel, repair_key_value_kernel),
    "query": (query_kernel, repair_query_kernel),
}
"""Each kernel, and the one that repairs what it wrote."""


def _kernels(
    problem: Problem,
    tensors: Tensors,
    direction: Direction,
    wide: bool,
    gpu: Gpu | None,
    formula: Arguments,
    stores_bias: bool = False,
) -> tuple[Group, Group]:
    """The kernel with halves, if there is one, and the one for everything else, repaired where something is hidden."""
    main, repair = KERNELS[direction]
    # The tiles of one sequence more clear what lies behind the last packed one.
    sequences = problem.batch + problem.packed
    in_registers = _side_by_side(problem, tensors, gpu, stores_bias)
    split, tiles = [], config.choose(problem, direction, gpu, in_registers)
    if tiles.precision == config.FP16X3:
        programs, numbers, form = _launch(problem, tensors, direction, wide, tiles)
        split = [Prepared(main, programs * sequences, (numbers, form, *formula), tiles)]
        tiles = config.choose_whole(problem, direction, gpu)
    order = ORDERS[direction] if in_registers else ""
    programs, numbers, form = _launch(problem, tensors, direction, wide, tiles, order)
    constant = (numbers, form, *formula)
    may_overflow = direction == "forward" and form.FIRST
    whole = [Prepared(main, programs * sequences, constant, tiles)]
    if problem.band.bounded or problem.mask is not None or problem.bias is not None or may_overflow:
        # Without a pipeline, so that it needs no more shared memory than the kernel that it repairs. Its registers are
        # not limited: at D 64, where all tiles are repaired, 9.4 against 10.9 ms (H200, N 4096, a bias).
        tiles = tiles._replace(num_stages=1, max_registers=None)
        heads = problem.batch * (problem.kv_heads if direction == "key_value" else problem.heads)
        count = config.programs_to_repair(programs * problem.batch, heads, gpu)
        constant = (numbers._replace(tiles=encoded(count)), form, *formula)
        whole.append(Prepared(repair, count * heads, constant, tiles))
    return split, whole


ORDERS: dict[Direction, str] = {"forward": "columns", "key_value": "rows", "query": "columns"}
"""The order of the keys in a tile that lets a thread read its part of a bias or a mask many bytes at a time."""


def _side_by_side(problem: Problem, tensors: Tensors, gpu: Gpu | None, stores_bias: bool) -> bool:
    """Whether keys are taken in that order: each 16 keys of a row start at a multiple of 16 bytes, on Hopper."""
    per_score = [x for x in (tensors.bias, tensors.mask) if x is not None]
    if not per_score or problem.dtype.itemsize != 2 or problem.len_k == 0 or problem.len_k % 16 or stores_bias:
        return False
    if gpu is not None and gpu.capability[0] != 9:
        return False
    for x in per_score:
        steps = [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1]
        if x.stride(3) != 1 or any(step * x.element_size() % 16 for step in steps[:-1]) or x.data_ptr() % 16:
            return False
    return True


def _prepare_halves(problem: Problem, tensors: Tensors, wide: bool, operands: int) -> tuple[Group, Group]:
    if not operands:
        return [], []
    rows = max(tensors.q.shape[0], tensors.k.shape[0]) if problem.packed else max(problem.len_q, problem.len_k)
    _, numbers, form = _launch(problem, tensors, "delta", wide, halves.TILES)
    return halves.prepare(problem, numbers, form, _count(rows, halves.TILES.q_tile), operands)


def forward_arguments(problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor, room: Room) -> list[Arguments]:
    """The arguments that hold tensors, for each of the `ForwardSteps`."""
    inputs = _inputs(problem, tensors, room.scales)
    results = (Matrix.of(out, problem.packed), Rows.of(lse, problem.packed))
    if room.scales is None:
        return [(), (), (), (inputs, *results)]
    split = halves.split_operands(room, problem.packed)
    before = halves.arguments(inputs, None, room, problem.packed)
    return [*before, (inputs._replace(q=split.q, k=split.k, v=split.v), *results), (inputs, *results)]


def prepare_backward(
    problem: Problem, tensors: Tensors, out: Tensor, dout: Tensor, grads: Gradients, gpu: Gpu | None
) -> Steps:
    """The kernels that overwrite delta, dK and dV, dQ, and the bias's gradient."""
    wide = _is_wide(problem, tensors, (out, dout, *grads[:3]))
    formula = (formula_of(problem).step, formula_of(problem).dstep)
    tiles = config.choose(problem, "delta", gpu)
    programs, numbers, form = _launch(problem, tensors, "delta", wide, tiles)
    delta = [Prepared(delta_kernel, programs * (1 if problem.packed else problem.batch), (numbers, form), tiles)]
    delta = delta if problem.dtype == torch.float32 else []  # in 16 bits dQ's kernel makes it
    halves_key, key = _kernels(problem, tensors, "key_value", wide, gpu, formula)
    halves_value, value = _apart(halves_key), _apart(key)
    stores_bias = grads.dbias is not None and _repeats_nothing(problem)
    halves_query, query = _kernels(problem, tensors, "query", wide, gpu, formula, stores_bias)
    before = _prepare_halves(problem, tensors, wide, 4 if halves_key or halves_query else 0)
    split = (halves_query, halves_key, halves_value)
    alone = grads.dbias is None or _repeats_nothing(problem)
    bias = [] if alone else [_prepare_bias(problem, tensors, wide, gpu)]
    return Steps(delta, *before, *split, query, key, value, bias)


def _apart(kernels: Group) -> Group:
    """The same kernels once more, for dV, where it is computed on its own."""
    return [Prepared(k.kernel, k.programs, k.constant, k.tiles) for k in kernels if k.tiles.apart]


def backward_arguments(
    problem: Problem,
    tensors: Tensors,
    grads: Gradients,
    others: Sequence[Any],
    room: Room,
    steps: Steps,
) -> list[Arguments]:
    """The arguments that hold tensors, for each of the `Steps`.

    Others: out, lse, dout, dlse, totals, parts of dbias, delta, the rest of the LSE and its factor.
    """
    out, lse, dout, dlse, totals, partial, delta, rest, factor = others
    packed = problem.packed
    inputs, dout_matrix = _inputs(problem, tensors, room.scales), Matrix.of(dout, packed)
    lse_rows, delta_rows = Rows.of(lse, packed), Rows.of(delta, packed)
    dq, dk, dv = (Matrix.of(x, packed) for x in grads[:3])
    dbias = Matrix.maybe(grads.dbias)
    own_bias = dbias if _repeats_nothing(problem) else None
    upstream = Upstream(dout_matrix, lse_rows, delta_rows)
    if problem.dtype == torch.float32:
        upstream = Upstream(dout_matrix, Rows.of(rest, packed), delta_rows, factor=factor)
    dlse_rows, totals_rows = (None if x is None else Rows.of(x, packed) for x in (dlse, totals))

    def main(given: tuple[Inputs, Upstream], apart: bool) -> list[Arguments]:
        of_queries, of_keys = given, given
        if problem.dtype != torch.float32:
            of_queries = (inputs, upstream._replace(out=Matrix.of(out, packed), dlse=dlse_rows))
            of_keys = (inputs, upstream._replace(lse=Rows.of(rest, packed), delta=None))
        key, value = (*of_keys, dk, None if apart else dv), (*of_keys, None, dv)
        return [(*of_queries, dq, own_bias, totals_rows), key, value]

    before: list[Arguments] = [()] * 5
    if room.scales is not None:
        split = halves.split_operands(room, packed)
        assert split.dout is not None
        given = (inputs._replace(q=split.q, k=split.k, v=split.v), upstream._replace(dout=split.dout))
        before = halves.arguments(inputs, dout_matrix, room, packed) + main(given, bool(steps.halves_value))
    return [
        (Matrix.of(out, packed), dlse_rows, lse_rows, upstream),
        *before,
        *main((inputs, upstream), bool(steps.value)),
        (inputs, upstream._replace(delta=totals_rows or delta_rows), dbias if partial is None else Matrix.of(partial)),
    ]


def _prepare_bias(problem: Problem, tensors: Tensors, wide: bool, gpu: Gpu | None) -> Prepared:
    assert problem.bias is not None
    batches, heads, rows = problem.bias
    tiles = config.choose(problem, "bias", gpu)
    _, numbers, form = _launch(problem, tensors, "bias", wide, tiles)
    count = _count(problem.len_q, tiles.q_tile)
    own_tiles, repeated = (1, count) if rows == 1 else (count, 1)
    counts = (problem.batch // batches, problem.heads // heads, repeated, _bias_parts(problem, gpu))
    repeats = Repeats(*map(encoded, counts))
    numbers = numbers._replace(tiles=encoded(own_tiles))
    programs = _count(problem.len_k, tiles.k_tile) * own_tiles * heads * batches * counts[-1]
    return Prepared(bias_kernel, programs, (repeats, numbers, form, formula_of(problem).step, rows == 1), tiles)


def _bias_parts(problem: Problem, gpu: Gpu | None) -> int:
    """In how many parts the gradient of a repeated bias is summed: as many as it takes to fill a GPU."""
    assert problem.bias is not None
    batches, heads, rows = problem.bias
    tiles = config.choose(problem, "bias", gpu)
    own_tiles, repeated = _count(problem.len_q, tiles.q_tile), 1
    if rows == 1:
        own_tiles, repeated = repeated, own_tiles
    programs = _count(problem.len_k, tiles.k_tile) * own_tiles * heads * batches
    repeats = (problem.batch // max(1, batches)) * (problem.heads // heads) * repeated
    return max(1, min(repeats, FILLING_PROGRAMS // max(1, programs)))


def _room_for_parts(dbias: Tensor | None, parts: int) -> Tensor | None:
    if dbias is None or parts == 1:
        return None
    return torch.empty((parts * dbias.shape[0], *dbias.shape[1:]), dtype=torch.float32, device=dbias.device)


def _repeats_nothing(problem: Problem) -> bool:
    return problem.bias == (problem.batch, problem.heads, problem.len_q)


def _launch(
    problem: Problem, tensors: Tensors, direction: Direction, wide: bool, tiles: Tiles, order: str = ""
) -> tuple[int, Numbers, Form]:
    """How many programs each sequence has in the launch of a kernel, and what the kernel is told."""
    if direction == "key_value":
        heads, count = problem.kv_heads, _count(problem.len_k, tiles.k_tile)
    else:
        rows = tensors.q.shape[0] if direction == "delta" and problem.packed else problem.len_q
        heads, count = problem.heads, _count(rows, tiles.q_tile)
    if problem.packed:
        # Slack is cleared even where no sequence has a row.
        count = max(1, count)
    return count * heads, _numbers(problem, tensors, heads, count), _form(problem, direction, tiles, wide, order)


def _inputs(problem: Problem, tensors: Tensors, scales: Tensor | None) -> Inputs:
    q, k, v, bias, mask, slopes, sinks, starts_q, starts_k = tensors
    packed = problem.packed
    qkv = (Matrix.of(q, packed), Matrix.of(k, packed), Matrix.of(v, packed))
    per_head = (_in_a_row(slopes), _in_a_row(sinks), _in_a_row(starts_q), _in_a_row(starts_k))
    lo, hi = limits_of(problem)
    softcap = None if problem.softcap is None else float(problem.softcap)
    return Inputs(*qkv, Matrix.maybe(bias), Matrix.maybe(mask), *per_head, lo, hi, softcap, scales)


def _in_a_row(x: Tensor | None) -> Tensor | None:
    """One number after the other in memory."""
    return x if x is None or x.stride(0) == 1 else x.contiguous()


def limits_of(problem: Problem) -> tuple[int | None, int | None]:
    """The band's lo and hi, encoded."""
    band = problem.band
    # No offset is farther out than this, so that sums with these limits stay within 32 bits.
    reach = problem.len_q + problem.len_k + abs(band.shift)
    lo, hi = (None if x is None else encoded(min(max(x, -reach), reach)) for x in (band.lo, band.hi))
    return lo, hi


def _numbers(problem: Problem, tensors: Tensors, heads: int, tiles: int) -> Numbers:
    rows_q = tensors.q.shape[0] if problem.packed else problem.len_q
    rows_k = tensors.k.shape[0] if problem.packed else problem.len_k
    return Numbers(
        batch=encoded(problem.batch),
        heads=encoded(heads),
        len_q=encoded(problem.len_q),
        len_k=encoded(problem.len_k),
        rows_q=encoded(rows_q),
        rows_k=encoded(rows_k),
        tiles=encoded(tiles),
        section=encoded(_section(problem)),
        shift=encoded(problem.band.shift),
        scale=problem.scale,
        q_factor=shortcuts.q_factor(problem),
    )


def _section(problem: Problem) -> int:
    """How many heads share a section: if tiles differ in length, as many as the L2 cache holds keys and values of."""
    if not problem.band.bounded:
        return 1
    head_bytes = max(1, problem.len_k) * (problem.dim + problem.dim_v) * problem.dtype.itemsize
    return max(1, SECTION_BYTES // head_bytes)


def _form(problem: Problem, direction: Direction, tiles: Tiles, wide: bool, order: str) -> Form:
    halves = tiles.precision == config.FP16X3

    def box(rows: int, columns: int, order: str = "") -> Any:
        width = padded(columns)
        return constant_box(Box(rows, columns, width, wide, min(PIECE, width) if halves else width, order))

    late = not problem.terms and not problem.sinks and problem.scale > 0
    return Form(
        Q=box(tiles.q_tile, problem.dim),
        K=box(tiles.k_tile, problem.dim, order),
        V=box(tiles.k_tile, problem.dim_v, order),
        OUT=box(tiles.q_tile, problem.dim_v),
        GROUP=problem.group,
        BOTTOM_RIGHT=problem.align == "bottom-right",
        LATE=late,
        SQUASHED=shortcuts.is_squashed(problem),
        NEAR=_together(tiles),
        SHORT=direction != "forward" and shortcuts.is_bounded(problem),
        BOUNDED=shortcuts.is_bounded(problem),
        FIRST=shortcuts.takes_first(problem),
        SCALED=direction != "bias" and shortcuts.is_scaled(problem, backward=direction != "forward"),
        FUSED=problem.bias is None and problem.dtype != torch.float32,
        BY_BLOCK=direction in ("query", "key_value") and shortcuts.is_fused_by_block(problem),
        CARRIED=shortcuts.carries_units(problem),
        BY_THREAD=shortcuts.sums_by_thread(problem),
        EVEN=(problem.bias is not None or problem.mask is not None) and problem.len_k % 16 == 0,
        PRECISION=tiles.precision,
        SPLIT=problem.dtype == torch.float32,
        THREADS=32 * tiles.num_warps,
    )


def _together(tiles: Tiles) -> int:
    """Of how many scores of a thread one test says that all are small."""
    scores = tiles.q_tile * tiles.k_tile // (32 * tiles.num_warps)
    return next((count for count in (32, 16) if scores % count == 0), 0)


def constant_box(box: Box) -> Any:
    """A part of a constant is a constant of its own to Triton's compiler; its interpreter knows no constants."""
    return box if INTERPRETED else tl.constexpr(Box(*map(tl.constexpr, box)))


def _count(rows: int, tile: int) -> int:
    return -(-rows // tile)


def _is_wide(problem: Problem, tensors: Tensors, others: Sequence[Tensor]) -> bool:
    return is_wide(*(Matrix.of(x, problem.packed) for x in (*tensors[:3], *others)))


def formula_of(problem: Problem) -> Formula:
    """The score terms as Triton functions."""
    return _folded(problem.terms, tanh_of_scores if shortcuts.is_small(problem) else tanh)


@lru_cache
def _folded(terms: tuple[Term, ...], tanh: Function) -> Formula:
    return fold(terms, {"tanh": tanh}, _compiled)


def _compiled(function: Function) -> Function:
    if INTERPRETED:
        return function
    scope = function.__globals__
    if "slot" in scope:
        # Triton tells functions apart by name and types: folded steps of two terms need two names.
        function.__qualname__ = f"{function.__name__}_{scope['slot']}"
        # Of numbers, a Triton function may read only those globals that say that they are constant.
        scope["slot"] = tl.constexpr(scope["slot"])
    return cast(Function, triton.jit(function))


@lru_cache
def gpu_of(device: torch.device) -> Gpu | None:
    """What tiles are chosen for; None in the interpreter."""
    if INTERPRETED:
        return None
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    capability = (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)
    return Gpu(capability, properties["max_shared_mem"], properties["multiprocessor_count"])
