"""Device code of the first expert matmuls for many rows on Hopper: `gate_up_kernel` with specialised warps.

How the warps share the work is told in `runtime_kernels/specialised.py`. The rows of x have been gathered by expert
before (`gather`): as boxes they reach shared memory faster than one by one, which pays for the gathering where an
expert's matrices are wide (docs/benchmarks/README.md). A stage holds gate's tile above up's, so both are one product of
twice the width.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from moe_compiler.runtime_kernels import device
from moe_compiler.runtime_kernels.specialised import (
    HALF,
    ROWS,
    expert_tiles,
    load_box,
    multiply_rows,
    stage_barriers,
    tile_at,
    trigger,
    wait,
)

# The same functions for Gluon's compiler.
activation = gluon.jit(device.activation.fn)
shifted = gluon.jit(device.shifted.fn)


@gluon.jit
def _load_tiles(
    rows,
    starts,
    gate,
    up,
    S,
    full,
    empty,
    rows_of,
    matrix_of,
    E: gl.constexpr,
    E_POW2: gl.constexpr,
    H: gl.constexpr,
    INTER: gl.constexpr,
    GATE_BOX: gl.constexpr,
    UP_BOX: gl.constexpr,
    UP_SHIFT: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Fill stage after stage with rows and tiles of both matrices, for all tiles of this program."""
    wait(PDL)
    WIDTH: gl.constexpr = (INTER + BN - 1) // BN
    end, upto = expert_tiles(starts, S, E, E_POW2)
    tiles = gl.max(upto, 0)
    done = 0
    for index in range(gl.program_id(0), tiles * WIDTH, gl.num_programs(0)):
        expert, first, _last, column = tile_at(index, tiles, end, upto, WIDTH, GROUP)
        if expert < E:
            n = column * BN
            for step in range(H // BK):
                stage = done % STAGES
                mbarrier.wait(empty.index(stage), ((done // STAGES) & 1) ^ 1)
                arrived = full.index(stage)
                mbarrier.expect(arrived, (ROWS + 2 * BN) * BK * 2)
                k0 = step * BK
                load_box(rows, [first, k0], arrived, rows_of.index(stage))
                load_box(gate, [expert * GATE_BOX + n, k0], arrived, matrix_of.index(stage).slice(0, BN))
                load_box(up, [expert * UP_BOX + UP_SHIFT + n, k0], arrived, matrix_of.index(stage).slice(BN, BN))
                done += 1


@gluon.jit
def _activate_rows(
    starts,
    gate_bias,
    act,
    preact,
    S,
    full,
    empty,
    rows_of,
    matrix_of,
    E: gl.constexpr,
    E_POW2: gl.constexpr,
    H: gl.constexpr,
    INTER: gl.constexpr,
    BIAS_E: gl.constexpr,
    BIAS_I: gl.constexpr,
    BIAS_SHIFT: gl.constexpr,
    ACTIVATION: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    SHIFT: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    HALF_OF: gl.constexpr,
    PDL: gl.constexpr,
):
    """Multiply, activate and store this warpgroup's half of the rows of all tiles of this program."""
    wait(PDL)
    WIDTH: gl.constexpr = (INTER + BN - 1) // BN
    DTYPE: gl.constexpr = act.dtype.element_ty
    end, upto = expert_tiles(starts, S, E, E_POW2)
    tiles = gl.max(upto, 0)
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BN, BN // 8], [4, 1], [1, 0])
    done = 0
    for index in range(gl.program_id(0), tiles * WIDTH, gl.num_programs(0)):
        expert, first, last, column = tile_at(index, tiles, end, upto, WIDTH, GROUP)
        first += HALF_OF * HALF
        acc, done = multiply_rows(
            done, first < last, expert, full, empty, rows_of, matrix_of, E, H // BK, 2 * BN, True, STAGES, HALF_OF
        )
        if first < last:
            gates, ups = acc.reshape((HALF, 2, BN)).permute((0, 2, 1)).split()
            if gate_bias is not None:
                n = column * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, gates.type.layout))
                keep = (n < INTER) & (expert < E)
                bias = gate_bias + expert.to(gl.int64) * BIAS_E + n * BIAS_I
                gates += gl.expand_dims(gl.load(bias, mask=keep, other=0.0).to(gl.float32), 0)
                ups += gl.expand_dims(gl.load(bias + BIAS_SHIFT, mask=keep, other=0.0).to(gl.float32), 0)
            value = activation(gates, ACTIVATION, ALPHA, LIMIT) * shifted(ups, LIMIT, SHIFT)
            r = first + gl.arange(0, HALF, layout=gl.SliceLayout(1, STORE))
            n = column * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, STORE))
            keep = gl.expand_dims(r < last, 1) & gl.expand_dims(n < INTER, 0)
            at = gl.expand_dims(r.to(gl.int64) * INTER, 1) + gl.expand_dims(n, 0)
            gl.store(act + at, gl.convert_layout(value.to(DTYPE), STORE), mask=keep)
            if preact is not None:
                at += gl.expand_dims(r.to(gl.int64) * INTER, 1)
                gl.store(preact + at, gl.convert_layout(gates.to(DTYPE), STORE), mask=keep)
                gl.store(preact + at + INTER, gl.convert_layout(ups.to(DTYPE), STORE), mask=keep)
    trigger(PDL)


@gluon.jit(do_not_specialize=["S"])
def gate_up_specialised_kernel(
    rows,
    starts,
    gate,
    up,
    gate_bias,
    act,
    preact,
    S,
    E: gl.constexpr,
    E_POW2: gl.constexpr,
    H: gl.constexpr,
    INTER: gl.constexpr,
    GATE_BOX: gl.constexpr,
    UP_BOX: gl.constexpr,
    UP_SHIFT: gl.constexpr,
    BIAS_E: gl.constexpr,
    BIAS_I: gl.constexpr,
    BIAS_SHIFT: gl.constexpr,
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
    """act and preact as `gate_up_kernel` makes them of gathered rows, to the bit. Grid: any number of programs.

    rows       a tensor descriptor of [rows, H] with boxes of [ROWS, BK]
    gate, up   tensor descriptors over the stored rows of all experts, GATE_BOX and UP_BOX rows an expert, with boxes of
               [BN, BK]; up's rows lie UP_SHIFT below where a matrix holds both
    """
    DTYPE: gl.constexpr = act.dtype.element_ty
    rows_of = gl.allocate_shared_memory(
        DTYPE, [STAGES, ROWS, BK], gl.NVMMASharedLayout.get_default_for([ROWS, BK], DTYPE)
    )
    matrix_of = gl.allocate_shared_memory(
        DTYPE, [STAGES, 2 * BN, BK], gl.NVMMASharedLayout.get_default_for([2 * BN, BK], DTYPE)
    )
    full, empty = stage_barriers(STAGES)
    gl.warp_specialize(
        [
            (
                _activate_rows,
                (
                    starts, gate_bias, act, preact, S, full, empty, rows_of, matrix_of,
                    E, E_POW2, H, INTER, BIAS_E, BIAS_I, BIAS_SHIFT, ACTIVATION, ALPHA, LIMIT, SHIFT,
                    BN, BK, GROUP, STAGES, 0, PDL,
                ),
            ),
            (
                _activate_rows,
                (
                    starts, gate_bias, act, preact, S, full, empty, rows_of, matrix_of,
                    E, E_POW2, H, INTER, BIAS_E, BIAS_I, BIAS_SHIFT, ACTIVATION, ALPHA, LIMIT, SHIFT,
                    BN, BK, GROUP, STAGES, 1, PDL,
                ),
            ),
            (
                _load_tiles,
                (
                    rows, starts, gate, up, S, full, empty, rows_of, matrix_of,
                    E, E_POW2, H, INTER, GATE_BOX, UP_BOX, UP_SHIFT, BN, BK, GROUP, STAGES, PDL,
                ),
            ),
        ],
        [4, 4],
        [216, 64],
    )  # fmt: skip
