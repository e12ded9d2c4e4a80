"""Moves rows between the caller's tensors, of any type and strides, and the layouts that the products read.

Scratch rows are fp32 (or 16-bit copies, for paired products), contiguous, and padded with zeros to whole vectors:
only `stage` and `unstage` know of tails, types and strides.
"""

from __future__ import annotations

from ioattn.backends.cpu.ir import F16, F32, I1, I16, I32, I64, Function, Module, Type, Value, Variable
from ioattn.backends.cpu.jit import Target
from ioattn.backends.cpu.tiles import SIZES, read, to_bfloat_bits

EXPONENTS = {"fp32": (0x7F800000,), "bf16": (0x7F800000, 0x7F80), "fp16": (0x7C000000, 0x7C00)}
"""The exponent bits of the numbers in a 32-bit word, all set in infinities and NaNs."""


def write(f: Function, place: Value, dtype: str, x: Value, target: Target) -> None:
    """Round fp32 to `dtype` and store it."""
    if dtype == "bf16":
        place.store(to_bfloat_bits(f, x, target))
    else:
        place.store(x.to(F16) if dtype == "fp16" else x)


def stage(module: Module, target: Target, name: str, dtype: str, raw: bool = False) -> Function:
    """Copy `rows` x `cols` elements to scratch rows, times `factor`; zeros up to `rows_padded` x `cols_padded`.

    `raw` keeps 16-bit elements as they are and ignores the factor.
    """
    f = module.function(
        name,
        (
            "ptr src, i64 row, i64 col, i64 rows, i64 cols, ptr dst, i64 dst_row, i64 rows_padded, "
            "i64 cols_padded, float factor"
        ),
    )
    a, size, lanes = f.args, SIZES[dtype], target.lanes
    cell = I16 if raw else F32
    width = 2 if raw else 4
    vector = Type(cell.element, lanes)

    def copy(src: Value, at: Value, dst: Value, count: int) -> None:
        kind = Type(cell.element, count)
        place = src + a.col * at
        x = place.load(kind) if raw else read(f, place, dtype, count) * f.constant(a.factor, kind)
        (dst + at * width).store(x)

    whole = f.select(a.col.equals(size), a.cols - a.cols % lanes, 0)
    with f.loop(0, a.rows) as row:
        src, dst = a.src + row * a.row, a.dst + row * a.dst_row
        with f.loop(0, whole, lanes) as at:
            copy(src, at, dst, lanes)
        with f.loop(whole, a.cols_padded, lanes) as at:
            (dst + at * width).store(f.constant(0, vector))
        with f.loop(whole, a.cols) as at:
            copy(src, at, dst, 0)
    with f.loop(a.rows, a.rows_padded) as row, f.loop(0, a.cols_padded, lanes) as at:
        (a.dst + row * a.dst_row + at * width).store(f.constant(0, vector))
    return f


_UNSTAGE = "ptr src, i64 src_row, ptr dst, i64 row, i64 col, i64 rows, i64 cols, ptr factors, i64 factors_step"


def unstage(module: Module, target: Target, name: str, dtype: str, how: str = "times") -> Function:
    """Write `rows` x `cols` scratch elements to a tensor: times their row's factor, or divided by it.

    how: "times"; "divide", where x / 0 is 0; or "add", times the factor and added to what fp32 memory holds.
    """
    f = module.function(name, _UNSTAGE)
    a, size, lanes = f.args, SIZES[dtype], target.lanes

    def scaled(x: Value, factor: Value) -> Value:
        if how != "divide":
            return x * factor
        inverse = 1.0 / factor
        near = x * inverse
        # One step of Newton's method rounds as a division would; it has nothing to add to an infinity.
        rest = f.fma(-near, f.constant(factor, x.type), x)
        better = f.select(rest.differs(rest), near, f.fma(inverse, rest, near))
        return f.select(f.constant(factor.equals(0.0), x.type.of(I1)), f.constant(0.0, x.type), better)

    def copy(src: Value, dst: Value, at: Value, factor: Value, count: int) -> None:
        x = scaled((src + at * 4).load(Type("float", count)), factor)
        place = dst + a.col * at
        write(f, place, dtype, read(f, place, dtype, count) + x if how == "add" else x, target)

    whole = f.select(a.col.equals(size), a.cols - a.cols % lanes, 0)
    with f.loop(0, a.rows) as row:
        src, dst = a.src + row * a.src_row, a.dst + row * a.row
        factor = (a.factors + row * a.factors_step).load(F32)
        with f.loop(0, whole, lanes) as at:
            copy(src, dst, at, factor, lanes)
        with f.loop(whole, a.cols) as at:
            copy(src, dst, at, factor, 0)
    return f


def transpose(module: Module, target: Target, name: str) -> Function:
    """dst[col][row] = src[row][col] of 32-bit words; rows and cols are whole vectors, strides in bytes."""
    f = module.function(name, "ptr src, i64 src_row, ptr dst, i64 dst_row, i64 rows, i64 cols")
    a, lanes = f.args, target.lanes
    vector = Type("i32", lanes)
    with f.loop(0, a.rows, lanes) as row, f.loop(0, a.cols, lanes) as col:
        src, dst = a.src + row * a.src_row + col * 4, a.dst + col * a.dst_row + row * 4
        block = [(src + a.src_row * i).load(vector) for i in range(lanes)]
        for i, x in enumerate(_transposed(f, block)):
            (dst + a.dst_row * i).store(x)
    return f


def _transposed(f: Function, block: list[Value]) -> list[Value]:
    """A square block of registers transposed: step s exchanges what differs in bit s of row and lane."""
    lanes = len(block)
    step = 1
    while step < lanes:
        upper = [lane & ~step if lane & step == 0 else lanes + (lane & ~step) for lane in range(lanes)]
        lower = [lane | step if lane & step == 0 else lanes + (lane | step) for lane in range(lanes)]
        for i in range(lanes):
            if i & step == 0:
                a, b = block[i], block[i | step]
                block[i], block[i | step] = f.shuffle(a, b, upper), f.shuffle(a, b, lower)
        step *= 2
    return block


def interleave(module: Module, target: Target, name: str) -> Function:
    """dst[i][col] = the pair src[2i][col], src[2i + 1][col] of 16-bit elements; a missing last row counts as zero."""
    f = module.function(name, "ptr src, i64 src_row, ptr dst, i64 dst_row, i64 rows, i64 cols")
    a, lanes = f.args, target.lanes
    half, word = Type("i16", lanes), Type("i32", lanes)

    def widened(place: Value) -> Value:
        return f.convert("zext", place.load(half), word)

    with f.loop(0, a.rows - a.rows % 2, 2) as row:
        low, dst = a.src + row * a.src_row, a.dst + row // 2 * a.dst_row
        with f.loop(0, a.cols, lanes) as at:
            (dst + at * 4).store(widened(low + at * 2) | (widened(low + a.src_row + at * 2) << 16))
    with f.loop(a.rows - a.rows % 2, a.rows) as row:
        low, dst = a.src + row * a.src_row, a.dst + row // 2 * a.dst_row
        with f.loop(0, a.cols, lanes) as at:
            (dst + at * 4).store(widened(low + at * 2))
    return f


def find_nonfinite(module: Module, target: Target, name: str, dtype: str) -> Function:
    """Set `found` to 1 if a row of `cols` 32-bit words, of one or two numbers, has an infinity or a NaN, else to 0."""
    f = module.function(name, "ptr src, i64 row, i64 rows, i64 cols, ptr found")
    a, lanes = f.args, target.lanes
    many = f.variable(f.constant(0, Type("i1", lanes)))
    single = f.variable(f.constant(0, I1))

    def look(seen: Variable, word: Value) -> None:
        for mask in EXPONENTS[dtype]:
            seen.value = seen.value | (word & mask).equals(mask)

    whole = a.cols - a.cols % lanes
    with f.loop(0, a.rows) as row:
        src = a.src + row * a.row
        with f.loop(0, whole, lanes) as at:
            look(many, (src + at * 4).load(Type("i32", lanes)))
        with f.loop(whole, a.cols) as at:
            look(single, (src + at * 4).load(I32))
    found = f.any(many.value) | single.value
    a.found.store(f.convert("zext", found, I64))
    return f
