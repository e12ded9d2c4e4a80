"""The forward: one program walks over the keys that its tile of queries sees.

Reads like `eager.forward`. Tiles that the band keeps whole run a loop without a test; the tiles at its edges run a
second loop that masks by select. Values that are hidden and not finite are the business of `repair.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ioattn.backends.triton.kernels.products import (
    FP16X3,
    add_halves,
    belongs_to_others,
    dot,
    multiply,
    only_finite,
    scales_of,
)
from ioattn.backends.triton.kernels.ranges import edge_start, in_one_loop, is_cut, key_ranges
from ioattn.backends.triton.kernels.scores import distance_at, mask_at, operands_at, pairs_at, veil_at, words_at
from ioattn.backends.triton.kernels.tanh import SQUASHED_ONE, squashed
from ioattn.backends.triton.kernels.tiles import (
    EDGE,
    EXACT,
    FULL,
    INF,
    LOG2E,
    Task,
    clear_slack,
    decoded,
    device,
    is_finite,
    keep,
    keep_where_cut,
    load_keys,
    load_q,
    margin_at,
    or_zero,
    place,
    rounded,
    row_at,
    score_scale,
    sequence_of,
    store_tile,
    zeros_for,
)

LARGEST = tl.constexpr(32768.0)
"""What scales weights, which are at most 1, before they are split into halves."""


@triton.jit
def forward_kernel(inputs, out, lse, numbers, form: tl.constexpr, step: tl.constexpr):
    """Overwrite one tile of `out` and `lse`."""
    numbers = decoded(numbers)
    batch, head, tile = place(numbers, inputs.hi is not None)
    seq = sequence_of(batch, inputs, numbers, form)
    if inputs.scales is not None:
        if belongs_to_others(inputs, seq.batch, head // form.GROUP, numbers.heads // form.GROUP, numbers, form):
            return
    scales = scales_of(inputs, seq.batch, head // form.GROUP, numbers.heads // form.GROUP, form)
    task = Task(inputs, numbers, head, seq, scales)
    if inputs.starts_q is not None and batch == numbers.batch:
        clear_slack(out, seq.start_q, numbers.rows_q, head, tile, numbers, form.OUT)
        clear_lse(lse, task, tile, form.Q.ROWS)
        return
    q_start = tile * form.Q.ROWS
    if q_start >= seq.len_q:
        return
    q_tile = load_q(task, q_start, form, EDGE)
    separate = key_ranges(q_start, task, form)
    ranges = in_one_loop(separate, seq.len_k, task, form.K.ROWS, form)
    row_max, row_sum = sink_or_nothing(task, form)
    acc = zeros_for(form.OUT)
    # A tile ahead, or the assembler would put these loads where their results are needed, one after the other. At the
    # end of a step: read before the words of this one are used, they would be moved to where those are, at once.
    words = words_at(q_start, ranges.full_start, task, form, EDGE)
    for k_start in range(ranges.full_start, ranges.full_end, form.K.ROWS):
        pairs = pairs_at(q_start, k_start, form)
        cut = is_cut(k_start, separate, task, form)
        row_max, row_sum, acc = attend(row_max, row_sum, acc, q_tile, words, pairs, cut, task, form, step, FULL)
        words = words_at(q_start, tl.minimum(k_start + form.K.ROWS, ranges.full_end - form.K.ROWS), task, form, FULL)
    # Without this test the assembler does not see that the products of a loop that runs not at all are none, and has
    # the tensor cores wait after each instruction.
    if ranges.edges > 0:
        for edge in range(ranges.edges):
            k_start = edge_start(edge, ranges, form.K.ROWS)
            words = words_at(q_start, k_start, task, form, EDGE)
            pairs = pairs_at(q_start, k_start, form)
            row_max, row_sum, acc = attend(row_max, row_sum, acc, q_tile, words, pairs, None, task, form, step, EDGE)
    store_results(row_max, sound_or_nan(row_sum, task, form), acc, out, lse, q_start, task, form)


@device
def sound_or_nan(row_sum, task, form: tl.constexpr):
    """The sums of rows, all NaN if one is, where something is hidden: of a tile `repair.py` looks at one row.

    Hidden NaN in V reaches every row, and what a mask or softcap makes of hidden scores that are not finite only some.
    """
    inputs = task.inputs
    if not form.SPLIT and (inputs.mask is not None or inputs.lo is not None or inputs.hi is not None):
        row_sum = tl.where(is_finite(row_sum), row_sum, float("nan"))
    return row_sum


@device
def store_results(row_max, row_sum, acc, out, lse, q_start, task, form: tl.constexpr):
    """Divide by the sum of the weights and write `out` and `lse`."""
    seq = task.seq
    # A row that saw no key has row_sum 0 (or only its sink's 1) and acc 0: out 0.
    factor = 1.0 / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
    if form.PRECISION == FP16X3:
        factor *= task.scales.v * (1.0 / LARGEST)
    store_tile(acc, factor, out, row_at(out, seq.batch, task.head, seq.start_q), q_start, seq.len_q, form.OUT)
    if form.LATE:
        row_max *= score_scale(task)
    if form.SQUASHED and not form.BOUNDED:
        row_max = task.inputs.softcap * (row_max * (2.0 / SQUASHED_ONE) + 1.0)
    row = q_start + tl.arange(0, form.Q.ROWS)
    pointers = row_at(lse, seq.batch, task.head, seq.start_q) + row.to(tl.int64) * lse.row
    tl.store(pointers, row_max + tl.log(row_sum), mask=row < seq.len_q)


@device
def attend(
    row_max, row_sum, acc, q_tile, words, pairs, cut, task, form: tl.constexpr, step: tl.constexpr, KIND: tl.constexpr
):
    """The online softmax over one tile of keys."""
    keys = load_keys(task, pairs.k_start, form, KIND)
    operands = operands_at(pairs, words, task, form)
    veil = veil_at(words, task, form, KIND)
    mask = None
    if veil is None:
        mask = mask_at(pairs, words, task, form)
    scores = multiply(q_tile, keys.k, form)
    factor = LOG2E
    if form.LATE:
        factor = score_scale(task) * LOG2E
    elif form.SQUASHED:
        scores = squashed(scores * (score_scale(task) * (2.0 * LOG2E) / task.inputs.softcap), KIND == EXACT)
        factor = task.inputs.softcap * (2.0 * LOG2E / SQUASHED_ONE)
    else:
        scores = step(scores * score_scale(task), distance_at(pairs, task), operands)
    if veil is not None:
        scores += veil
    scores = keep(margin_at(pairs, task, KIND), mask, scores, -INF)
    scores = keep_where_cut(cut, pairs, task, scores, -INF)
    new_max, rescale, weights = weights_of_tile(scores, row_max, factor, form)
    row_sum = rescale * row_sum + tl.sum(weights, 1)
    if form.PRECISION == FP16X3:
        acc = add_halves(acc, rescale[:, None], weights * LARGEST, keys.v, 1.0, form)
    else:
        v_tile = only_finite(keys.v, KIND)
        acc = (dot(rounded(weights, v_tile.dtype), v_tile, rescale[:, None] * acc[0], form),)
    return new_max, row_sum, acc


@device
def weights_of_tile(scores, row_max, factor, form: tl.constexpr):
    """The new maxima of rows, what sums in units of the old ones are multiplied with, and the weights."""
    if form.BOUNDED:
        # A weight is exp(score): nothing waits for a maximum, and no sum changes its unit.
        new_max = tl.zeros_like(row_max)
        weights = tl.exp2(scores * factor + factor * (SQUASHED_ONE / 2))
        rescale = new_max + 1.0
    else:
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = or_zero(new_max)
        if form.FUSED:
            weights = tl.exp2(scores * factor - (shift * factor)[:, None])
        else:
            weights = tl.exp2((scores - shift[:, None]) * factor)
        rescale = tl.exp2((row_max - shift) * factor)
    return new_max, rescale, weights


@device
def sink_or_nothing(task, form: tl.constexpr):
    """`row_max` and `row_sum` before the first key: a sink counts as one key whose value is zero."""
    row_max = tl.full((form.Q.ROWS,), -INF, tl.float32)
    if task.inputs.sinks is not None:
        row_max = tl.zeros_like(row_max) + tl.load(task.inputs.sinks + task.head).to(tl.float32)
    return row_max, (row_max != -INF).to(tl.float32)


@device
def clear_lse(lse, task, tile, TILE: tl.constexpr):
    """-inf for the rows behind the last packed sequence."""
    pointers = row_at(lse, 0, task.head, task.seq.start_q)
    for at in range(tile * TILE, task.seq.len_q, task.numbers.tiles * TILE):
        row = at + tl.arange(0, TILE)
        tl.store(pointers + row.to(tl.int64) * lse.row, tl.full((TILE,), -INF, tl.float32), mask=row < task.seq.len_q)
