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
from ioattn.backends.triton.kernels.tanh import capped, in_units, squashed_of, tanh_of_scores
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
    load_operand,
    load_q,
    margin_at,
    or_zero,
    place,
    product_of,
    rounded,
    row_at,
    rows_of,
    scaled_by_way_of,
    score_scale,
    sequence_of,
    store_tile,
    zeros_for,
)

FAR = tl.constexpr(2.0**30)
"""Where numbers in float32 are 64 apart: exp(-64) is as good as 2^-64, and either as good as 0."""

LN2 = tl.constexpr(0.6931471824645996)
LN2_REST = tl.constexpr(0.6931471805599453 - 0.6931471824645996)
"""What float32 misses of it."""

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
    q_tile = queries_at(q_start, out, task, form)
    separate = key_ranges(q_start, task, form)
    ranges = in_one_loop(separate, seq.len_k, task, form.K.ROWS, form)
    row_max, row_sum = sums_before(q_tile, task, form)
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
    row_max, rest, row_sum = sums_after(row_max, row_sum, task, form)
    store_results(row_max, rest, total_of(row_sum, form), acc, out, lse, q_start, task, form)


@device
def queries_at(q_start, out, task, form: tl.constexpr):
    """The tile of queries."""
    q_tile = load_q(task, q_start, form, EDGE)
    if form.SCALED:
        first = row_at(out, task.seq.batch, task.head, task.seq.start_q)
        q_tile = scaled_by_way_of(out, first, q_tile, q_start, task.seq.len_q, task.numbers.q_factor, form.Q)
    return q_tile


@device
def sums_before(q_tile, task, form: tl.constexpr):
    """The maxima of rows, or what stands for them, and the sums before the first key.

    Where units are carried, the unit as a power of two, never below a clamp, and the maximum.
    """
    row_max, row_sum = sink_or_nothing(task, form)
    if form.FIRST:
        row_max = shift_of_first(q_tile, task, form)
    elif form.CARRIED:
        row_max = (tl.maximum(row_max * LOG2E, -FAR * LOG2E), row_max)
    return row_max, row_sum


@device
def sums_after(row_max, row_sum, task, form: tl.constexpr):
    """The maxima of rows, what the unit of sums misses of them, and the sums; NaN where `repair.py` is to look."""
    row_sum = sound_or_nan(row_sum, task, form)
    if form.CARRIED:
        unit, largest = row_max
        is_far = (tl.abs(unit) >= FAR * LOG2E) & (largest != -INF)
        row_sum = tl.where(tl.max(is_far.to(tl.int32)) == 0, row_sum, float("nan"))
        row_max, rest = natural_of(unit)
    else:
        rest = 0.0
    return row_max, rest, row_sum


@device
def natural_of(unit):
    """What a unit is a power of e of, and what that misses: by 2^-24 of a score of 1e4 the LSE would be off by 6e-4."""
    shift = product_of(unit, LN2)
    return shift, tl.fma(unit, LN2, -shift) + unit * LN2_REST


@device
def rows_after(row_max, form: tl.constexpr):
    """The maxima of rows, or what stands for them, and what the unit of sums misses of them, where none is carried.

    To the bit what carried units lead to, but of rows that are too far for them.
    """
    rest = 0.0
    if form.CARRIED:
        is_near = tl.abs(row_max) < FAR
        shift, rest = natural_of(product_of(or_zero(row_max), LOG2E))
        row_max = tl.where(is_near, shift, row_max)
        rest = tl.where(is_near, rest, 0.0)
    return row_max, rest


@device
def scaled(tile, task, SCALED: tl.constexpr):
    """The same as `scaled_by_way_of`, for kernels that may keep it in registers."""
    if SCALED:
        tile = rounded(tile.to(tl.float32) * task.numbers.q_factor, tile.dtype)
    return tile


@device
def shift_of_first(q_tile, task, form: tl.constexpr):
    """What is taken off all scores of a row, as powers of two: the maximum of the first keys, and 3 for good measure.

    Later weights are then up to 2^19 in float16, and it is found out at the end whether one was larger.
    """
    k = task.inputs.k
    first = row_at(k, task.seq.batch, task.head // form.GROUP, task.seq.start_k)
    k_tile = load_operand(k, first, 0, task.seq.len_k, form.K, form, EDGE)
    product = multiply(q_tile, k_tile, form) * (score_scale(task) / (task.numbers.q_factor * task.inputs.softcap))
    product = tl.where((rows_of(form.K) < task.seq.len_k)[None, :], product, -INF)
    return tanh_of_scores(tl.max(product, 1)) * (task.inputs.softcap * LOG2E) + 3.0


@device
def total_of(sums, form: tl.constexpr):
    """The sums of rows, of which each thread may have a part."""
    return tl.sum(sums, 1) if form.BY_THREAD else sums


@device
def sound_or_nan(sums, task, form: tl.constexpr):
    """The sums of rows, all NaN if one is and something is hidden: of a tile `repair.py` looks at one row.

    Hidden NaN in V reaches every row, and what a mask or softcap makes of hidden scores that are not finite only some.
    Where the first keys decide about the unit of sums, they are NaN, too, if a weight was too large for it.
    """
    inputs = task.inputs
    if form.FIRST:
        LIMIT: tl.constexpr = 60000.0 if inputs.q.ptr.dtype.element_ty == tl.float16 else 2.0**60
        is_small = tl.max((sums < LIMIT).to(tl.int32) ^ 1) == 0
        sums = tl.where(is_small, sums, float("nan"))
    elif not form.SPLIT and (inputs.mask is not None or inputs.lo is not None or inputs.hi is not None):
        sums = tl.where(is_finite(sums), sums, float("nan"))
    return sums


@device
def store_results(row_max, rest, row_sum, acc, out, lse, q_start, task, form: tl.constexpr):
    """Divide by the sum of the weights and write `out` and `lse`."""
    seq = task.seq
    log_sum = tl.log(row_sum) + rest
    # A row that saw no key has row_sum 0 (or only its sink's 1) and acc 0: out 0.
    factor = 1.0 / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
    if form.PRECISION == FP16X3:
        factor *= task.scales.v * (1.0 / LARGEST)
    store_tile(acc, factor, out, row_at(out, seq.batch, task.head, seq.start_q), q_start, seq.len_q, form.OUT)
    if form.LATE:
        row_max *= score_scale(task)
    if form.SQUASHED:
        row_max *= 1.0 / LOG2E
    row = q_start + tl.arange(0, form.Q.ROWS)
    pointers = row_at(lse, seq.batch, task.head, seq.start_q) + row.to(tl.int64) * lse.row
    tl.store(pointers, row_max + log_sum, mask=row < seq.len_q)


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
        scores = capped_scores(scores, row_max, task, form, KIND)
        factor = 1.0
    elif form.SCALED:
        scores = step(scores, distance_at(pairs, task), operands)
    else:
        scores = step(scores * score_scale(task), distance_at(pairs, task), operands)
    if veil is not None:
        scores += veil
    scores = keep(margin_at(pairs, task, KIND), mask, scores, -INF)
    scores = keep_where_cut(cut, pairs, task, scores, -INF)
    new_max, rescale, weights = weights_of_tile(scores, row_max, factor, form, KIND)
    if form.BY_THREAD:
        parts = weights.reshape(form.Q.ROWS, form.K.ROWS // 8, 8)
        row_sum = rescale[:, None] * row_sum + tl.sum(parts, 1)
    else:
        row_sum = rescale * row_sum + tl.sum(weights, 1)
    if form.PRECISION == FP16X3:
        acc = add_halves(acc, rescale[:, None], weights * LARGEST, keys.v, 1.0, form)
    else:
        v_tile = only_finite(keys.v, KIND)
        acc = (dot(rounded(weights, v_tile.dtype), v_tile, rescale[:, None] * acc[0], form),)
    return new_max, row_sum, acc


@device
def capped_scores(product, shift, task, form: tl.constexpr, KIND: tl.constexpr):
    """The scores with softcap, as powers of two; less the shift of a row where it has one from the start."""
    cap = task.inputs.softcap * LOG2E
    if KIND != FULL:
        # Keys that do not exist are 0, and 0 * inf is NaN: at edges it is to reach no other.
        scores = squashed_of(product, task, form) * cap
        if form.FIRST and KIND != EXACT:
            scores -= shift[:, None]
    else:
        product, unit = in_units(product, task, form)
        if form.FIRST:
            scores = capped(product, cap, unit, shift[:, None], form.NEAR)
        else:
            scores = capped(product, cap, unit, 0.0, form.NEAR)
    return scores


@device
def weights_of_tile(scores, row_max, factor, form: tl.constexpr, KIND: tl.constexpr):
    """The new maxima of rows, what sums in units of the old ones are multiplied with, and the weights."""
    if form.CARRIED and KIND != EXACT:
        largest = tl.max(scores, 1)
        unit = tl.maximum(row_max[0], product_of(largest, factor))
        weights = tl.exp2(scores * factor - unit[:, None])
        rescale = tl.exp2(row_max[0] - unit)
        new_max = (unit, tl.maximum(row_max[1], largest))
    elif form.BOUNDED or (form.FIRST and KIND != EXACT):
        # Nothing waits for a maximum, and no sum changes its unit.
        new_max = row_max if form.FIRST else tl.zeros_like(row_max)
        weights = tl.exp2(scores)
        rescale = tl.zeros_like(row_max) + 1.0
    else:
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = or_zero(new_max)
        if form.CARRIED:
            # A factor of 1 rounds nothing: where a multiply-add would leave 2^-24 of 1e30, neighbours differ by 64.
            is_far = tl.abs(shift) >= FAR
            factor = tl.where(is_far, 1.0, factor)
            # The unit of sums is 2 to this. Rounded once and once not it would move by 1e-6 of it in each step.
            unit = product_of(shift, factor)
            weights = tl.exp2(scores * factor[:, None] - unit[:, None])
            rescale = tl.exp2(product_of(row_max, factor) - unit)
            rescale = tl.where(is_far == (tl.abs(row_max) >= FAR), rescale, 0.0)
        elif form.FUSED:
            weights = tl.exp2(scores * factor - (shift * factor)[:, None])
            rescale = tl.exp2((row_max - shift) * factor)
        else:
            weights = tl.exp2((scores - shift[:, None]) * factor)
            rescale = tl.exp2((row_max - shift) * factor)
    return new_max, rescale, weights


@device
def sink_or_nothing(task, form: tl.constexpr):
    """The maxima and sums of rows before the first key: a sink counts as one key whose value is zero."""
    row_max = tl.full((form.Q.ROWS,), -INF, tl.float32)
    if task.inputs.sinks is not None:
        row_max = tl.zeros_like(row_max) + tl.load(task.inputs.sinks + task.head).to(tl.float32)
    row_sum = (row_max != -INF).to(tl.float32)
    if form.BY_THREAD:
        row_sum = row_sum[:, None] * tl.full((form.Q.ROWS, 8), 0.125, tl.float32)
    return row_max, row_sum


@device
def clear_lse(lse, task, tile, TILE: tl.constexpr):
    """-inf for the rows behind the last packed sequence."""
    pointers = row_at(lse, 0, task.head, task.seq.start_q)
    for at in range(tile * TILE, task.seq.len_q, task.numbers.tiles * TILE):
        row = at + tl.arange(0, TILE)
        tl.store(pointers + row.to(tl.int64) * lse.row, tl.full((TILE,), -INF, tl.float32), mask=row < task.seq.len_q)
