"""The forward kernel for Hopper: one loader and one to three compute groups per block, on a persistent grid."""

from ioattn.backends.gluon.kernels.call import Call, Memory, Scoring
from ioattn.backends.gluon.kernels.compute import compute
from ioattn.backends.gluon.kernels.load import load
from ioattn.backends.gluon.kernels.names import gl, gluon
from ioattn.backends.gluon.kernels.pipeline import barriers, ring, turns
from ioattn.backends.gluon.kernels.tiles import GROUP_ROWS, Band, Divisor, Schedule, board


@gluon.jit
def forward(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    out,
    out_strides,
    lse,
    lse_strides,
    v,
    v_strides,
    dim_v,
    cu_seqlens_q,
    cu_seqlens_k,
    slopes,
    sinks,
    counter,
    sizes,
    divisors,
    band,
    scale,
    softcap,
    config: gl.constexpr,
    formula: gl.constexpr,
):
    """The kernel: sets the stage, then the loader and the compute groups run side by side."""
    GROUPS: gl.constexpr = config.groups
    ARRIVALS: gl.constexpr = 4 if config.by_warp else 1
    queries = ring(q_desc, config.query_stages * GROUPS, ARRIVALS)
    rings = (
        queries,
        ring(k_desc, config.stages, GROUPS * ARRIVALS),
        ring(v_desc, config.stages, GROUPS * ARRIVALS),
    )
    PART: gl.constexpr = config.dim_v // config.out_parts
    out_tiles = gl.allocate_shared_memory(out_desc.dtype, [GROUPS, 1, 1, GROUP_ROWS, PART], out_desc.layout)
    call = Call(
        rings,
        barriers(1, 1, config.cleans),
        board(GROUPS, ARRIVALS),
        turns(GROUPS, config.ping_pong, ARRIVALS),
        Band(band[0], band[1], band[2], config.has_lo, config.has_hi, config.bottom_right),
        Scoring(scale, softcap, slopes, sinks, formula, config.has_softcap),
        Memory(out_desc, out, out_strides, lse, lse_strides, v, v_strides, dim_v),
        out_tiles,
        Divisor(divisors[12:15], True),
        config,
    )
    schedule = Schedule(counter, cu_seqlens_q, cu_seqlens_k, sizes, divisors, config)
    if GROUPS == 1:
        gl.warp_specialize(
            [(load, (call, schedule, q_desc, k_desc, v_desc)), (compute, (call,))],
            [4],
            [config.registers],
        )
    elif GROUPS == 2:
        gl.warp_specialize(
            [(load, (call, schedule, q_desc, k_desc, v_desc)), (compute, (call,)), (compute, (call,))],
            [4, 4],
            [config.registers, config.registers],
        )
    else:
        gl.warp_specialize(
            [
                (load, (call, schedule, q_desc, k_desc, v_desc)),
                (compute, (call,)),
                (compute, (call,)),
                (compute, (call,)),
            ],
            [4, 4, 4],
            [config.registers, config.registers, config.registers],
        )
