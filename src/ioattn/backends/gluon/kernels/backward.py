"""The backward kernel for Hopper: one loader and two compute groups per block, on a persistent grid.

Where dQ is summed in order two warps beside the loader's add it.
"""

from ioattn.backends.gluon.kernels.backward_call import BackwardCall, Derivative, Parts, Target
from ioattn.backends.gluon.kernels.differentiate import differentiate
from ioattn.backends.gluon.kernels.differentiate_wide import differentiate_wide
from ioattn.backends.gluon.kernels.in_order import add_0, add_1, order
from ioattn.backends.gluon.kernels.key_tiles import KeySchedule, QueryBand, key_board
from ioattn.backends.gluon.kernels.load_backward import load_backward
from ioattn.backends.gluon.kernels.names import gl, gluon
from ioattn.backends.gluon.kernels.pipeline import exchange, ring, row_ring


@gluon.jit
def differentiate_0(call):
    """The first group."""
    if call.config.wide:
        differentiate_wide(call, 0)
    else:
        differentiate(call, 0)


@gluon.jit
def differentiate_1(call):
    """The second group."""
    if call.config.wide:
        differentiate_wide(call, 1)
    else:
        differentiate(call, 1)


@gluon.jit
def staging(config: gl.constexpr, dq_desc, rings):
    """Where dQ is staged, and at the end of a tile dK and dV."""
    if config.sums_dq:
        FLAT: gl.constexpr = dq_desc.block_type.shape
        BUFFERS: gl.constexpr = 2 * config.dq_parts if config.in_order else 2
        dq_tiles = gl.allocate_shared_memory(gl.float32, [BUFFERS, FLAT[0], FLAT[1]], dq_desc.layout)
    else:
        dq_tiles = rings[0].buffers
    return dq_tiles


@gluon.jit
def run_roles(call, loads, config: gl.constexpr):
    """Let the loader, which is handed `loads`, the compute groups and, if any, the adders run side by side."""
    if config.in_order:
        # One warp group holds the loader and the adders, a warp each.
        gl.warp_specialize(
            [
                (differentiate_0, (call,)),
                (differentiate_1, (call,)),
                (load_backward, loads),
                (add_0, (call,)),
                (add_1, (call,)),
            ],
            [4, 1, 1, 1],
            [config.registers, config.few_registers, config.few_registers, config.few_registers],
        )
    else:
        gl.warp_specialize(
            [(load_backward, loads), (differentiate_0, (call,)), (differentiate_1, (call,))],
            [4, 4],
            [config.registers, config.registers],
        )


@gluon.jit
def backward(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    lse_desc,
    delta_desc,
    dq_desc,
    dk_desc,
    dv_desc,
    dk,
    dk_strides,
    dv,
    dv_strides,
    cu_seqlens_q,
    cu_seqlens_k,
    slopes,
    counter,
    part_sums,
    part_turns,
    dq_turns,
    split,
    sizes,
    rows,
    band,
    scale,
    softcap,
    config: gl.constexpr,
    step: gl.constexpr,
    dstep: gl.constexpr,
):
    """The kernel: sets the stage, then the loader and the compute groups run side by side."""
    GROUPS: gl.constexpr = 2
    rings = (
        ring(k_desc, 1, GROUPS),
        ring(v_desc, 1, GROUPS),
        row_ring(q_desc, lse_desc, config.stages, GROUPS, True),
        row_ring(dout_desc, delta_desc, config.stages, GROUPS, False),  # released together with Q
    )
    schedule = KeySchedule(counter, cu_seqlens_q, cu_seqlens_k, sizes, rows, split, config)
    # dS; and the weights, and what they become by the slope of softcap, where one group makes them for both.
    KEYS: gl.constexpr = config.keys
    ROWS: gl.constexpr = config.rows
    SIZE: gl.constexpr = config.exchanges
    WRITERS: gl.constexpr = 1 if config.wide else GROUPS
    dscores = exchange(q_desc.dtype, KEYS, ROWS, SIZE, WRITERS, GROUPS)
    weights = dscores
    sloped = dscores
    if config.wide:
        weights = exchange(q_desc.dtype, KEYS, ROWS, SIZE, WRITERS, GROUPS)
        if config.has_softcap:
            sloped = exchange(q_desc.dtype, KEYS, ROWS, SIZE, WRITERS, 1)
    dq_tiles = staging(config, dq_desc, rings)
    call = BackwardCall(
        rings,
        (dscores, weights, sloped),
        key_board(GROUPS + (2 if config.in_order else 0)),
        QueryBand(band, config),
        Derivative(scale, softcap, slopes, step, dstep, config.has_softcap),
        (Target(dk_desc, dk, dk_strides), Target(dv_desc, dv, dv_strides)),
        dq_desc,
        (dq_tiles, order(dq_turns, config)),
        (schedule.group, schedule.head_rows),
        Parts(part_sums, part_turns),
        config,
    )
    run_roles(call, (call, schedule, k_desc, v_desc, q_desc, dout_desc, lse_desc, delta_desc), config)
