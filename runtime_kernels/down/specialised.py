"""Device code of the second expert matmul for many rows on Hopper: `scatter_product_kernel` with specialised warps.

How the warps share the work is told in `runtime_kernels/specialised.py`. The results of a tile go through shared memory
in two halves, to reach the scattered rows in pieces of 256 bytes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

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


@gluon.jit
def load_tiles(
    left,
    starts,
    first_part,
    second_part,
    S,
    full,
    empty,
    rows_of,
    matrix_of,
    E: gl.constexpr,
    E_POW2: gl.constexpr,
    K: gl.constexpr,
    N: gl.constexpr,
    PARTS: gl.constexpr,
    INNER: gl.constexpr,
    BOX: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Fill stage after stage with rows of `left` and tiles of the matrices, for all tiles of this program."""
    wait(PDL)
    WIDTH: gl.constexpr = (N + BN - 1) // BN
    STEPS: gl.constexpr = K // BK
    end, upto = expert_tiles(starts, S, E, E_POW2)
    tiles = gl.max(upto, 0)
    done = 0
    for index in range(gl.program_id(0), tiles * WIDTH, gl.num_programs(0)):
        expert, first, _last, column = tile_at(index, tiles, end, upto, WIDTH, GROUP)
        if expert < E:
            n = column * BN
            for step in range(PARTS * STEPS):
                stage = done % STAGES
                mbarrier.wait(empty.index(stage), ((done // STAGES) & 1) ^ 1)
                arrived = full.index(stage)
                matrix = matrix_of.index(stage)
                mbarrier.expect(arrived, (ROWS + BN) * BK * 2)
                k0 = step * BK
                load_box(left, [first, k0], arrived, rows_of.index(stage))
                if PARTS == 1:
                    load_box(first_part, [expert * BOX + n, k0] if INNER else [expert * BOX + k0, n], arrived, matrix)
                else:
                    if step < STEPS:
                        at = [expert * BOX + n, k0] if INNER else [expert * BOX + k0, n]
                        load_box(first_part, at, arrived, matrix)
                    else:
                        k1 = k0 - K
                        at = [expert * BOX + n, k1] if INNER else [expert * BOX + k1, n]
                        load_box(second_part, at, arrived, matrix)
                done += 1


@gluon.jit
def _scatter_rows(
    perm,
    starts,
    bias,
    pairs,
    S,
    full,
    empty,
    rows_of,
    matrix_of,
    E: gl.constexpr,
    E_POW2: gl.constexpr,
    N: gl.constexpr,
    STEPS: gl.constexpr,
    INNER: gl.constexpr,
    BIAS_E: gl.constexpr,
    BIAS_N: gl.constexpr,
    BN: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    HALF_OF: gl.constexpr,
    PDL: gl.constexpr,
):
    """Multiply and store this warpgroup's half of the rows of all tiles of this program."""
    wait(PDL)
    WIDTH: gl.constexpr = (N + BN - 1) // BN
    end, upto = expert_tiles(starts, S, E, E_POW2)
    tiles = gl.max(upto, 0)
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [512 // BN, BN // 16], [4, 1], [1, 0])
    done = 0
    for index in range(gl.program_id(0), tiles * WIDTH, gl.num_programs(0)):
        expert, first, last, column = tile_at(index, tiles, end, upto, WIDTH, GROUP)
        first += HALF_OF * HALF
        acc, done = multiply_rows(
            done, first < last, expert, full, empty, rows_of, matrix_of, E, STEPS, BN, INNER, STAGES, HALF_OF
        )
        if first < last:
            if bias is not None:
                n = column * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, acc.type.layout))
                row = gl.load(bias + expert.to(gl.int64) * BIAS_E + n * BIAS_N, mask=(n < N) & (expert < E), other=0.0)
                acc += gl.expand_dims(row.to(gl.float32), 0)
            r = first + gl.arange(0, HALF, layout=gl.SliceLayout(1, STORE))
            pair = gl.load(perm + r, mask=r < last, other=0)
            parts = acc.to(pairs.dtype.element_ty).reshape((HALF, 2, BN // 2)).permute((0, 2, 1)).split()
            for part in gl.static_range(2):
                n = column * BN + part * (BN // 2) + gl.arange(0, BN // 2, layout=gl.SliceLayout(0, STORE))
                at = pairs + gl.expand_dims(pair.to(gl.int64) * N, 1) + gl.expand_dims(n, 0)
                keep = gl.expand_dims(r < last, 1) & gl.expand_dims(n < N, 0)
                gl.store(at, gl.convert_layout(parts[part], STORE), mask=keep)
    trigger(PDL)


@gluon.jit(do_not_specialize=["S"])
def scatter_product_specialised_kernel(
    left,
    perm,
    starts,
    first_part,
    second_part,
    bias,
    pairs,
    S,
    E: gl.constexpr,
    E_POW2: gl.constexpr,
    K: gl.constexpr,
    N: gl.constexpr,
    PARTS: gl.constexpr,
    INNER: gl.constexpr,
    BOX: gl.constexpr,
    BIAS_E: gl.constexpr,
    BIAS_N: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """pairs[perm[r]] as `scatter_product_kernel` makes it, to the bit. Grid: any number of programs.

    left                      a tensor descriptor of [rows, PARTS * K] with boxes of [ROWS, BK]
    first_part, second_part   tensor descriptors over the stored rows of all experts, BOX rows an expert, with boxes of
                              [BN, BK] when INNER (stored rows run over N), else [BK, BN]
    """
    DTYPE: gl.constexpr = pairs.dtype.element_ty
    rows_of = gl.allocate_shared_memory(
        DTYPE, [STAGES, ROWS, BK], gl.NVMMASharedLayout.get_default_for([ROWS, BK], DTYPE)
    )
    BLOCK: gl.constexpr = [BN, BK] if INNER else [BK, BN]
    matrix_of = gl.allocate_shared_memory(DTYPE, [STAGES] + BLOCK, gl.NVMMASharedLayout.get_default_for(BLOCK, DTYPE))
    full, empty = stage_barriers(STAGES)
    STEPS: gl.constexpr = PARTS * (K // BK)
    gl.warp_specialize(
        [
            (
                _scatter_rows,
                (
                    perm, starts, bias, pairs, S, full, empty, rows_of, matrix_of,
                    E, E_POW2, N, STEPS, INNER, BIAS_E, BIAS_N, BN, GROUP, STAGES, 0, PDL,
                ),
            ),
            (
                _scatter_rows,
                (
                    perm, starts, bias, pairs, S, full, empty, rows_of, matrix_of,
                    E, E_POW2, N, STEPS, INNER, BIAS_E, BIAS_N, BN, GROUP, STAGES, 1, PDL,
                ),
            ),
            (
                load_tiles,
                (
                    left, starts, first_part, second_part, S, full, empty, rows_of, matrix_of,
                    E, E_POW2, K, N, PARTS, INNER, BOX, BN, BK, GROUP, STAGES, PDL,
                ),
            ),
        ],
        [4, 4],
        [216, 64],
    )  # fmt: skip
