"""What the kernels are handed: a few named tuples, so that no kernel has forty arguments.

The host fills them with tensors, strides and numbers; in a kernel the same names hold pointers and scalars. A field
that is None is known to be absent when the kernel is compiled: `if inputs.bias is not None` costs nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

Scalar = Any
"""A pointer or a number: a tensor, an int or a float on the host, a Triton scalar in a kernel."""


class Matrix(NamedTuple):
    """A `(B, H, rows, columns)` tensor: element (b, h, i, j) is `b * batch + h * head + ...` elements from `ptr`."""

    ptr: Scalar
    batch: Scalar
    head: Scalar
    row: Scalar
    column: Scalar

    @classmethod
    def of(cls, x: Tensor, packed: bool = False) -> Matrix:
        """`x` as 4-D, packed `(T, H, columns)` as one batch; a dimension of size 1 repeats: its stride is 0."""
        strides = x.stride()
        if packed:
            return cls(x, 0, strides[1], strides[0], strides[2])
        batch, head, row, column = strides
        sizes = x.shape
        return cls(x, batch * (sizes[0] != 1), head * (sizes[1] != 1), row * (sizes[2] != 1), column)

    @classmethod
    def maybe(cls, x: Tensor | None) -> Matrix | None:
        """`of` where there is a tensor, and it is dense."""
        return None if x is None else cls.of(x)


class Rows(NamedTuple):
    """One number per query, `(B, H, Nq)` or packed `(H, T)`, seen as `Matrix` sees its rows."""

    ptr: Scalar
    batch: Scalar
    head: Scalar
    row: Scalar

    @classmethod
    def of(cls, x: Tensor, packed: bool) -> Rows:
        """`x` as 3-D, packed `(H, T)` as one batch."""
        return cls(x, 0, *x.stride()) if packed else cls(x, *x.stride())


class Inputs(NamedTuple):
    """The tensors of `problem.Tensors`, and the numbers that may be absent; lo and hi are `encoded`."""

    q: Matrix
    k: Matrix
    v: Matrix
    bias: Matrix | None
    mask: Matrix | None
    slopes: Scalar
    sinks: Scalar
    starts_q: Scalar
    starts_k: Scalar
    lo: Scalar
    hi: Scalar
    softcap: Scalar
    scales: Scalar
    """What undoes the scales of q, k, v and dout, `(B, Hk, 4)`, where "fp16x3" is used for the heads that it fits."""


class SplitOperands(NamedTuple):
    """q, k, v and dout in halves: a row holds the high ones, then the low ones; see `kernels.halves`."""

    q: Matrix
    k: Matrix
    v: Matrix
    dout: Matrix | None


class Upstream(NamedTuple):
    """What the backward knows of each query."""

    dout: Matrix
    lse: Rows
    delta: Rows | None
    """None where `lse` leads to pairs: see `queries.load_pairs`."""
    out: Matrix | None = None
    """Where dQ's kernel makes delta, in 16 bits: what it is made of besides dout."""
    dlse: Rows | None = None
    factor: Scalar = None
    """Where `Form.SPLIT`: exp(-LSE) is this times exp(-lse). `delta_kernel` makes both, dQ's a better factor.

    No `Rows`, and last: Triton 3.6 forgets what is 1 or None in a tuple of a tuple where nothing behind it in the outer
    one is (it does not tell the outer type); `queries.factor_rows` says how it lies.
    """


class Repeats(NamedTuple):
    """For how many batches, heads and tiles of queries one tile of a bias counts; in how many parts they are summed."""

    batches: Scalar
    heads: Scalar
    tiles: Scalar
    parts: Scalar


class Numbers(NamedTuple):
    """What a kernel is told at run time: a new value compiles nothing, as integers are `encoded`.

    `batch` counts sequences, `len_q` and `len_k` are the longest lengths, `rows_q` and `rows_k` the rows of packed
    tensors. `tiles` is how many tiles the longest sequence has in this launch, `section` of how many heads the longest
    tiles go first together. `shift` is the band's.
    """

    batch: Scalar
    heads: Scalar
    len_q: Scalar
    len_k: Scalar
    rows_q: Scalar
    rows_k: Scalar
    tiles: Scalar
    section: Scalar
    shift: Scalar
    scale: Scalar
    q_factor: Scalar


def encoded(number: int) -> int:
    """An integer as kernels are handed it; they shift it back by two bits.

    Triton compiles a kernel anew for each integer that is 1 and for each multiple of 16; inside of a tuple, also where
    it is told not to. This is neither.
    """
    return 4 * number + 2


class Box(NamedTuple):
    """The shape of a tile in registers: COLUMNS of its WIDTH columns exist in memory."""

    ROWS: int
    COLUMNS: int
    WIDTH: int
    WIDE: bool
    """An offset inside of the tile may need more than 31 bits."""
    PIECE: int = 0
    """A tile is held in pieces of so many columns; decoding knows no pieces."""
    ORDER: str = ""
    """In which order its rows lie in the tile: see `kernels/scores.py`."""


class Form(NamedTuple):
    """What a kernel is compiled for, besides the types and the absence of its arguments."""

    Q: Box
    K: Box
    V: Box
    OUT: Box
    GROUP: int
    BOTTOM_RIGHT: bool
    LATE: bool
    """The scores stay Q K^T, and the scale is applied inside of the exponential: one multiplication less per score."""
    SQUASHED: bool
    """Softcap is all that happens to scores, and is done by a short way: in the forward they are powers of two."""
    NEAR: int
    """Where SQUASHED: how many scores of a thread, 32 or 16, take the way of small ones together; 0: none does."""
    SHORT: bool
    """Where SQUASHED, in the backward: small scores take a polynomial that is as accurate as bfloat16 needs."""
    BOUNDED: bool
    """Where SQUASHED: no score is far from 0, and weights are exp(score), whatever the maximum of a row."""
    FIRST: bool
    """Where SQUASHED, and not BOUNDED: weights are exp(score - m), where m is close to the maximum of the first keys.

    A tile with a score that is too far above it is computed again by `repair.py`.
    """
    SCALED: bool
    """Queries, for dK and dV keys, are multiplied by `Numbers.q_factor` first: one multiplication less per score."""
    FUSED: bool
    """A weight's exponent is one multiply-add: 5% of a 16-bit kernel's time.

    It rounds the maximum, or the LSE, once more: too coarse for float32, and for a bias that moves scores by 1e30.
    """
    BY_BLOCK: bool
    """It is, in the backward, with a bias, too, for blocks of queries whose LSE is near 0: see `queries.by_block`."""
    CARRIED: bool
    """It is, in the forward, with a bias, too: steps hand on the unit of a row's sums, which is made of its maximum.

    Beyond 1e9 that unit is too coarse: such rows are computed again by `repair.py`, with a factor of their own.
    """
    BY_THREAD: bool
    """Each thread sums the weights that it has, in the forward, and threads meet once, at the end."""
    EVEN: bool
    """The number of keys is a multiple of 16, so that a bias or a mask is read by 16 bytes."""
    PRECISION: str
    SPLIT: bool
    """The backward has the LSE in two parts: in float32, where one would round the weights."""
    THREADS: int
    """Of a program."""


WIDE_STRIDE = 2**31 // 512
"""From this stride on, 256 rows and 256 columns may span more than 31 bits of elements."""


def is_wide(*matrices: Matrix) -> bool:
    """Whether a tile of one of these matrices spans more than 31 bits of elements."""
    return any(max(m.row, m.column) >= WIDE_STRIDE for m in matrices)


def padded(size: int) -> int:
    """The power of two, at least 16, that a tile of `size` columns fills."""
    return max(16, 1 << (size - 1).bit_length())


class CacheInputs(NamedTuple):
    """The tensors of `caches.CacheTensors`, and the numbers that may be absent; lo and hi are `encoded`.

    `k` and `v` are caches: their batch is a page, or without a table a sequence.
    """

    q: Matrix
    k: Matrix
    v: Matrix
    lengths: Scalar
    table: Scalar
    tree: Matrix | None
    slopes: Scalar
    sinks: Scalar
    lo: Scalar
    hi: Scalar
    softcap: Scalar
    end: None = None
    """Always absent. Triton 3.6 loses a constant in an inner tuple, as a stride of 1 is one, when the outer tuple is
    carried into a loop, unless a later field of the outer one is a constant, too."""


class CacheNumbers(NamedTuple):
    """What a decoding kernel is told at run time: a new value compiles nothing, as integers are `encoded`.

    `columns` is the width of the block table; `tiles` is how many tiles of rows a head has, or, in the kernel that
    combines pieces, how many tiles of columns a row of the output has.
    """

    kv_heads: Scalar
    len_q: Scalar
    capacity: Scalar
    pages: Scalar
    columns: Scalar
    appended: Scalar
    pieces: Scalar
    tiles: Scalar
    scale: Scalar


class CacheForm(NamedTuple):
    """What a decoding kernel is compiled for; V is a tile of pieces where pieces are combined."""

    Q: Box
    K: Box
    V: Box
    EDGE_K: Box
    EDGE_V: Box
    """Tiles at the edges of what the rows see."""
    GROUP: int
    SEVERAL: bool
    """Several tokens, so that a key may be visible to some rows and hidden from others."""
    PAGE: int
    """Keys of a page; 0 without a block table."""
    SPLIT: bool
    LATE: bool
    TURNED: bool
    """Tiles of scores are [keys, rows], not [rows, keys]."""
    EARLY: bool
    """The kernel that combines the pieces starts early, and waits on the device."""
    PRECISION: str
    UPCAST: bool
    SIDE: int = 0
    """How many keys lie side by side in the threads of a program that uses no tensor cores, 0 elsewhere."""
    SPAN: int = 0
    """How many columns of a key lie side by side in those threads."""
    STAGES: int = 0
    """Of the loop over keys, where it has no product that tells Triton to load ahead."""
    APART: bool = False
    """Weights of full tiles are summed for each place of a tile, and over the keys only after the last."""
    EDGE_STAGES: int = 1
    """Of the loop over tiles at edges."""
