"""Device code of the first expert matmuls for many rows on Hopper: `gate_up_kernel` with specialised warps.

See `specialised` for how the work is shared out. A stage holds the tiles of gate and up beside each other, so that one
product makes both and a thread has the two numbers that the activation joins.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_compiler.runtime_kernels.device import activation, shifted
from moe_compiler.runtime_kernels.specialised import (
    HALF,
    ROWS,
    expert_tiles,
    load_tiles,
    multiply_rows,
    stage_barriers,
    tile_at,
    trigger,
    wait,
)


@gluon.jit
def _store_tile(out, value, first, last, n, ROW: gl.constexpr, COLUMNS: gl.constexpr, BN: gl.constexpr):
    """Write [HALF, BN] to rows from `first` and columns from `n` of an array [., ROW], of which COLUMNS are ours."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BN, BN // 8], [4, 1], [1, 0])
    r = first + gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
    c = n + gl.arange(0, BN, layout=gl.SliceLayout(0, LAYOUT))
    keep = gl.expand_dims(r < last, 1) & gl.expand_dims(c < COLUMNS, 0)
    at = out + gl.expand_dims(r.to(gl.int64) * ROW, 1) + gl.expand_dims(c, 0)
    gl.store(at, gl.convert_layout(value.to(out.dtype.element_ty), LAYOUT), mask=keep)


@gluon.jit
def _activate_rows(
    weights,
    perm,
    starts,
    gate_bias,
    up_bias,
    act,
    preact,
    S,
    full,
    empty,
    rows_of,
    matrix_of,
    E: gl.constexpr,
    E_POW2: gl.constexpr,
    INTER: gl.constexpr,
    STEPS: gl.constexpr,
    GATE_BIAS_E: gl.constexpr,
    GATE_BIAS_I: gl.constexpr,
    UP_BIAS_E: gl.constexpr,
    UP_BIAS_I: gl.constexpr,
    UP_SHIFT: gl.constexpr,
    ACTIVATION: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    SHIFT: gl.constexpr,
    BN: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    HALF_OF: gl.constexpr,
    PDL: gl.constexpr,
):
    """Multiply, activate and store this warpgroup's half of the rows of all tiles of this program."""
    wait(PDL)
    WIDTH: gl.constexpr = (INTER + BN - 1) // BN
    end, upto = expert_tiles(starts, S, E, E_POW2)
    tiles = gl.max(upto, 0)
    done = 0
    for index in range(gl.program_id(0), tiles * WIDTH, gl.num_programs(0)):
        expert, first, last, column = tile_at(index, tiles, end, upto, WIDTH, GROUP)
        first += HALF_OF * HALF
        both, done = multiply_rows(
            done, first < last, expert, full, empty, rows_of, matrix_of, E, STEPS, 2 * BN, True, STAGES, HALF_OF
        )
        if first < last:
            gates, ups = both.reshape((HALF, 2, BN)).permute((0, 2, 1)).split()
            LAYOUT: gl.constexpr = gates.type.layout
            n = column * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, LAYOUT))
            ours = (n < INTER) & (expert < E)
            if weights is not None:
                r = first + gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
                pair = gl.load(perm + r, mask=r < last, other=0)
                scale = gl.load(weights + pair, mask=r < last, other=0.0).to(gl.float32)
                gates *= gl.expand_dims(scale, 1)
                ups *= gl.expand_dims(scale, 1)
            if gate_bias is not None:
                own = gate_bias + expert.to(gl.int64) * GATE_BIAS_E
                row = gl.load(own + n * GATE_BIAS_I, mask=ours, other=0.0)
                gates += gl.expand_dims(row.to(gl.float32), 0)
                if up_bias is None:
                    row = gl.load(own + (n + UP_SHIFT) * GATE_BIAS_I, mask=ours, other=0.0)
                else:
                    row = gl.load(up_bias + expert.to(gl.int64) * UP_BIAS_E + n * UP_BIAS_I, mask=ours, other=0.0)
                ups += gl.expand_dims(row.to(gl.float32), 0)
            value = activation(gates, ACTIVATION, ALPHA, LIMIT) * shifted(ups, LIMIT, SHIFT)
            _store_tile(act, value, first, last, column * BN, INTER, INTER, BN)
            if preact is not None:
                _store_tile(preact, gates, first, last, column * BN, 2 * INTER, INTER, BN)
                _store_tile(preact + INTER, ups, first, last, column * BN, 2 * INTER, INTER, BN)
    trigger(PDL)


@gluon.jit(do_not_specialize=["S"])
def gate_up_specialised_kernel(
    x,
    weights,
    perm,
    starts,
    gate,
    up,
    gate_bias,
    up_bias,
    act,
    preact,
    S,
    X_ROW: gl.constexpr,
    K: gl.constexpr,
    E: gl.constexpr,
    E_POW2: gl.constexpr,
    H: gl.constexpr,
    INTER: gl.constexpr,
    UP_SHIFT: gl.constexpr,
    BOX: gl.constexpr,
    GATE_BIAS_E: gl.constexpr,
    GATE_BIAS_I: gl.constexpr,
    UP_BIAS_E: gl.constexpr,
    UP_BIAS_I: gl.constexpr,
    ACTIVATION: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    SHIFT: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """act[r] and preact[r] as `gate_up_kernel` makes them, to the bit. Grid: any number of programs.

    gate, up   tensor descriptors over the stored rows of all experts, BOX rows an expert, with boxes [BN, BK]; the same
               one where gate and up are one matrix, whose rows of up lie UP_SHIFT below those of gate
    """
    DTYPE: gl.constexpr = act.dtype.element_ty
    rows_of = gl.allocate_shared_memory(
        DTYPE, [STAGES, ROWS, BK], gl.NVMMASharedLayout.get_default_for([ROWS, BK], DTYPE)
    )
    matrix_of = gl.allocate_shared_memory(
        DTYPE, [STAGES, 2 * BN, BK], gl.NVMMASharedLayout.get_default_for([BN, BK], DTYPE)
    )
    full, empty = stage_barriers(STAGES)
    gl.warp_specialize(
        [
            (
                _activate_rows,
                (
                    weights, perm, starts, gate_bias, up_bias, act, preact, S, full, empty, rows_of, matrix_of,
                    E, E_POW2, INTER, H // BK, GATE_BIAS_E, GATE_BIAS_I, UP_BIAS_E, UP_BIAS_I, UP_SHIFT,
                    ACTIVATION, ALPHA, LIMIT, SHIFT, BN, GROUP, STAGES, 0, PDL,
                ),
            ),
            (
                _activate_rows,
                (
                    weights, perm, starts, gate_bias, up_bias, act, preact, S, full, empty, rows_of, matrix_of,
                    E, E_POW2, INTER, H // BK, GATE_BIAS_E, GATE_BIAS_I, UP_BIAS_E, UP_BIAS_I, UP_SHIFT,
                    ACTIVATION, ALPHA, LIMIT, SHIFT, BN, GROUP, STAGES, 1, PDL,
                ),
            ),
            (
                load_tiles,
                (
                    x, perm, starts, gate, up, S, full, empty, rows_of, matrix_of,
                    X_ROW, K, E, E_POW2, H, INTER, 1, True, True, BOX, UP_SHIFT, BN, BK, GROUP, STAGES, PDL,
                ),
            ),
        ],
        [4, 4],
        [216, 64],
    )  # fmt: skip
