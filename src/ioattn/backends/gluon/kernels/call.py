"""What the roles of one launch share: layouts, score formula, memory, rings."""

from ioattn.backends.gluon.kernels.names import aggregate, gl, gluon, tma
from ioattn.backends.gluon.kernels.pipeline import Ring, Turns
from ioattn.backends.gluon.kernels.tiles import Band, Board, Divisor

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
INF = gl.constexpr(float("inf"))
LOWEST = gl.constexpr(-3.4028234663852886e38)  # of float32


@aggregate
class Layouts:
    """How the tiles of one compute group lie in its registers."""

    scores: gl.constexpr
    half_scores: gl.constexpr
    acc: gl.constexpr
    weights: gl.constexpr
    row: gl.constexpr
    acc_row: gl.constexpr
    acc_col: gl.constexpr
    copy: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, keys, dim_v, out_parts):
        scores = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, keys, 16])
        acc = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, dim_v, 16])
        half = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, keys // 2, 16])
        self.scores = gl.constexpr(scores)
        self.half_scores = gl.constexpr(half)
        self.acc = gl.constexpr(acc)
        self.weights = gl.constexpr(gl.DotOperandLayout(0, acc, 2))
        self.row = gl.constexpr(gl.SliceLayout(1, scores))
        self.acc_row = gl.constexpr(gl.SliceLayout(1, acc))
        self.acc_col = gl.constexpr(gl.SliceLayout(0, acc))
        lanes = min(32, dim_v // out_parts // 8)
        self.copy = gl.constexpr(gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0]))


@aggregate
class Scoring:
    """What turns a product of queries and keys into a score."""

    scale: gl.tensor
    softcap: gl.tensor
    slopes: object
    sinks: object
    formula: object
    has_softcap: gl.constexpr
    has_alibi: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, scale, softcap, slopes, sinks, formula, has_softcap):
        self.scale = scale
        self.softcap = softcap
        self.slopes = gl.constexpr(None) if slopes is None else slopes
        self.sinks = gl.constexpr(None) if sinks is None else sinks
        self.formula = gl.constexpr(formula)
        self.has_softcap = gl.constexpr(has_softcap)
        self.has_alibi = gl.constexpr(slopes is not None)

    @gluon.jit
    def factor(self):
        """What remains to multiply a score with to make it an exponent of two."""
        if self.formula is not None:
            factor = gl.to_tensor(LOG2E)
        else:
            factor = self.scale * LOG2E
        return factor

    @gluon.jit
    def apply(self, scores, tile, rows, cols):
        """Scores in natural units if there is a formula; else products as they are, and `factor` holds the scale.

        `rows` and `cols` are counted from the same key; only their difference matters.
        """
        if self.formula is not None:
            scores = scores * self.scale
            distance = scores
            if self.has_alibi:
                aligned = (rows + (tile.len_k - tile.len_q)).to(gl.float32)
                distance = gl.abs(aligned - cols.to(gl.float32))
            scores = self.formula(scores, distance, self.operands(tile))  # type: ignore[operator]
        return scores

    @gluon.jit
    def operands(self, tile):
        """One operand per term, in the terms' order."""
        if self.has_softcap and self.has_alibi:
            operands = (self.softcap, gl.load(self.slopes + tile.head).to(gl.float32))
        elif self.has_alibi:
            operands = (gl.load(self.slopes + tile.head).to(gl.float32),)
        else:
            operands = (self.softcap,)
        return operands

    @gluon.jit
    def first_row_state(self, tile, rows: gl.constexpr, layout: gl.constexpr):
        """Row maximum (in powers of two) and row sum before any key: a sink is a key that has been seen already."""
        row_max = gl.full([rows], -INF, gl.float32, layout)
        row_sum = gl.full([rows], 0.0, gl.float32, layout)
        if self.sinks is not None:
            sink = gl.load(self.sinks + tile.head).to(gl.float32)
            sink = gl.where(tile.len_k < 0, -INF, sink)
            row_max = gl.full([rows], sink * LOG2E, gl.float32, layout)
            row_sum = gl.full([rows], gl.where(sink == -INF, 0.0, 1.0), gl.float32, layout)
        return row_max, row_sum


@aggregate
class Memory:
    """Global memory that is reached by pointers: results, and V where a tile of it had to be cleaned."""

    out_desc: tma.tensor_descriptor
    out: gl.tensor
    out_batch: gl.tensor
    out_head: gl.tensor
    out_row: gl.tensor
    lse: gl.tensor
    lse_batch: gl.tensor
    lse_head: gl.tensor
    v: gl.tensor
    v_batch: gl.tensor
    v_head: gl.tensor
    v_row: gl.tensor
    dim_v: gl.tensor

    @gluon.constexpr_function
    def __init__(self, out_desc, out, out_strides, lse, lse_strides, v, v_strides, dim_v):
        self.out_desc = out_desc
        self.out = out
        self.out_batch, self.out_head, self.out_row = out_strides
        self.lse = lse
        self.lse_batch, self.lse_head = lse_strides
        self.v = v
        self.v_batch, self.v_head, self.v_row = v_strides
        self.dim_v = dim_v


@aggregate
class Call:
    """All that the roles of one launch share."""

    queries: Ring
    keys: Ring
    values: Ring
    landed: object
    board: Board
    turns: Turns
    band: Band
    scoring: Scoring
    memory: Memory
    out_tiles: gl.shared_memory_descriptor
    kv_group: Divisor
    layouts: Layouts
    config: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, rings, landed, board, turns, band, scoring, memory, out_tiles, kv_group, config):
        self.queries, self.keys, self.values = rings
        self.landed = gl.constexpr(None) if landed is None else landed
        self.board = board
        self.turns = turns
        self.band = band
        self.scoring = scoring
        self.memory = memory
        self.out_tiles = out_tiles
        self.kv_group = kv_group
        self.layouts = Layouts(config.keys, config.dim_v, config.out_parts)
        self.config = gl.constexpr(config)
