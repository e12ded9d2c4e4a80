"""What the roles of one launch of the backward share: layouts, score formula, results, rings."""

from ioattn.backends.gluon.kernels.call import LOG2E
from ioattn.backends.gluon.kernels.in_order import Order
from ioattn.backends.gluon.kernels.key_tiles import KeyBoard, QueryBand
from ioattn.backends.gluon.kernels.names import aggregate, gl, gluon, tma
from ioattn.backends.gluon.kernels.pipeline import Exchange, Ring, RowRing

GROUP_KEYS = gl.constexpr(64)
"""Keys of one compute group: what a warp group's matrix instruction covers."""


@gluon.constexpr_function
def register_order(rows, columns):
    """How a part of dQ, or of its transpose, lies in shared memory and in the workspace: the numbers of each thread by
    fours, thread after thread, and 64 columns after 64.

    A thread holds two numbers of a row and two of the row 8 below, and so on, 8 columns apart.
    """
    fours = [[0, 1], [8, 0]]
    threads = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0]]
    others = [[0, 8], [0, 16], [0, 32]] + [[0, 64]] * (columns == 128) + [[64, 0]] * (rows == 128)
    return gl.SharedLinearLayout([*fours, *threads, *others])


@aggregate
class BackwardLayouts:
    """How the tiles of one compute group lie in its registers."""

    scores: gl.constexpr
    acc: gl.constexpr
    dq: gl.constexpr
    staged: gl.constexpr
    operand: gl.constexpr
    held: gl.constexpr
    row: gl.constexpr
    col: gl.constexpr
    copy: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, rows, columns, dq_shape):
        scores = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, rows, 16])
        acc = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])
        self.scores = gl.constexpr(scores)
        self.acc = gl.constexpr(acc)
        dq = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, dq_shape[1], 16])
        self.dq = gl.constexpr(dq)
        self.held = gl.constexpr(gl.DotOperandLayout(0, dq, 2))
        self.staged = gl.constexpr(register_order(*dq_shape))
        self.operand = gl.constexpr(gl.DotOperandLayout(0, acc, 2))
        self.row = gl.constexpr(gl.SliceLayout(1, scores))
        self.col = gl.constexpr(gl.SliceLayout(0, scores))
        lanes = min(32, columns // 8)
        self.copy = gl.constexpr(gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0]))


@aggregate
class Derivative:
    """What turns a product of keys and queries into a score, and the gradient of the score into that of the product."""

    scale: gl.tensor
    softcap: object
    slopes: object
    step: object
    dstep: object
    has_softcap: gl.constexpr
    has_alibi: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, scale, softcap, slopes, step, dstep, has_softcap):
        self.scale = scale
        self.softcap = gl.constexpr(None) if softcap is None else softcap
        self.slopes = gl.constexpr(None) if slopes is None else slopes
        self.step = gl.constexpr(step)
        self.dstep = gl.constexpr(dstep)
        self.has_softcap = gl.constexpr(has_softcap)
        self.has_alibi = gl.constexpr(slopes is not None)

    @gluon.jit
    def factor(self):
        """What remains to multiply a score with to make it an exponent of two."""
        if self.step is not None:
            factor = gl.to_tensor(LOG2E)
        else:
            factor = self.scale * LOG2E
        return factor

    @gluon.jit
    def shape(self, raw, tile, rows, cols, head):
        """Scores in natural units if there is a formula; else products as they are, and `factor` holds the scale."""
        scores = raw
        if self.step is not None:
            scaled = raw * self.scale
            distance = self.distance(scaled, tile, rows, cols)
            scores = self.step(scaled, distance, self.operands(head))  # type: ignore[operator]
        return scores

    @gluon.jit
    def unshape(self, dscores, raw, tile, rows, cols, head):
        """The gradient of `scale * raw` from that of the scores."""
        if self.has_softcap:
            scaled = raw * self.scale
            distance = self.distance(scaled, tile, rows, cols)
            dscores = self.dstep(dscores, scaled, distance, self.operands(head))  # type: ignore[operator]
        return dscores

    @gluon.jit
    def distance(self, scores, tile, rows, cols):
        """abs(i + Nk - Nq - j) for queries `rows` and keys `cols`, where ALiBi asks for it."""
        distance = scores
        if self.has_alibi:
            distance = gl.abs((rows + (tile.len_k - tile.len_q) - cols).to(gl.float32))
        return distance

    @gluon.jit
    def operands(self, head):
        """One operand per term, in the terms' order."""
        if self.has_softcap and self.has_alibi:
            operands = (self.softcap, gl.load(self.slopes + head).to(gl.float32))
        elif self.has_alibi:
            operands = (gl.load(self.slopes + head).to(gl.float32),)
        else:
            operands = (self.softcap,)
        return operands


@aggregate
class Target:
    """A gradient in global memory, reached by the copy engine; in packed problems also by pointers, where a tile is cut
    short: what follows belongs to another sequence.
    """

    desc: tma.tensor_descriptor
    pointer: object
    head: object
    row: object
    dim: object

    @gluon.constexpr_function
    def __init__(self, desc, pointer, strides):
        self.desc = desc
        self.pointer = gl.constexpr(None) if pointer is None else pointer
        self.head, self.row, self.dim = (gl.constexpr(None),) * 3 if strides is None else strides

    @gluon.jit
    def store(self, tile, row, column: gl.constexpr, values):
        """Store the rows from `row` on that belong to the tile's sequence."""
        layout: gl.constexpr = values.type.layout
        rows = row + gl.arange(0, values.shape[0], gl.SliceLayout(1, layout))
        cols = column + gl.arange(0, values.shape[1], gl.SliceLayout(0, layout))
        at = tile.head * self.head + (tile.k_offset + rows) * self.row
        inside = (rows < tile.len_k)[:, None] & (cols < self.dim)[None, :]
        gl.store(self.pointer + at[:, None] + cols[None, :], values, mask=inside)


@aggregate
class Parts:
    """What the parts of a tile leave for each other: sums of dK and dV, and how many parts have."""

    sums: object
    turns: object

    @gluon.constexpr_function
    def __init__(self, sums, turns):
        self.sums = gl.constexpr(None) if sums is None else sums
        self.turns = gl.constexpr(None) if turns is None else turns


@aggregate
class BackwardCall:
    """All that the roles of one launch share. `group` heads share one of keys, `head_rows` apart in the workspace."""

    keys: Ring
    values: Ring
    queries: RowRing
    douts: RowRing
    dscores: Exchange
    weights: Exchange
    sloped: Exchange
    board: KeyBoard
    band: QueryBand
    scoring: Derivative
    dk: Target
    dv: Target
    dq_desc: object
    dq_tiles: gl.shared_memory_descriptor
    order: Order
    group: object
    head_rows: object
    parts: Parts
    layouts: BackwardLayouts
    config: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, rings, exchanges, board, band, scoring, targets, dq_desc, dq_tiles, heads, parts, config):
        self.keys, self.values, self.queries, self.douts = rings
        self.dscores, self.weights, self.sloped = exchanges
        self.board = board
        self.band = band
        self.scoring = scoring
        self.dk, self.dv = targets
        self.dq_desc = gl.constexpr(None) if dq_desc is None else dq_desc
        self.dq_tiles, self.order = dq_tiles
        self.group, self.head_rows = heads if config.grouped else (gl.constexpr(1), gl.constexpr(0))
        self.parts = parts
        self.layouts = BackwardLayouts(config.rows, config.columns, config.dq_shape)
        self.config = gl.constexpr(config)

    @gluon.jit
    def members(self, tile):
        """The first of the heads that share the tile's keys, and the first that is not walked over any more."""
        first = gl.to_tensor(0)
        last = gl.to_tensor(self.group)
        if self.config.parts and self.config.grouped and self.config.masks:
            first = tile.part * self.group // tile.parts
            last = (tile.part + 1) * self.group // tile.parts
        return first, last
