"""Device code of the second expert matmul for many rows on Hopper: `scatter_product_kernel` with specialised warps.

A program is one of as many as the device has multiprocessors, and takes tile after tile. One warpgroup loads, two
multiply. The loading one runs ahead by as many stages as shared memory holds, also from one tile into the next, so that
neither the search for a tile's expert nor the way of its results to memory stops the loads. Each multiplying warpgroup
owns 64 of a tile's 128 rows and all of its columns, and the two need not keep step: while one writes its results, which
go through shared memory in two halves to reach the scattered rows in pieces of 256 bytes, the other has the tensor
cores to itself.

Rows and matrices arrive through the tensor memory accelerator: an expert's rows lie together, so a tile of them is a
box, whose rows past the expert's last are loaded and not stored. What a stage holds is handed over by a pair of
barriers: `full` counts the bytes that arrived, `empty` the warpgroups that have read them.

Triton's language has no way to say this (it orders a program's steps itself), so the file is written in Gluon, the
language below it that ships with it. Sorted rows and "expert" E are as in `device`. The first matmul keeps to
`gate_up_kernel`: it sums over the hidden size, the larger one, so the ends of its tiles weigh less, and in this form it
was slower below some 1000 rows an expert (docs/benchmarks/README.md).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# A copy from global to shared memory by the tensor memory accelerator. Later tritons renamed it.
load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
# Rows of a tile, and of the half that a multiplying warpgroup owns.
ROWS = gl.constexpr(128)
HALF = gl.constexpr(64)


@gluon.jit
def wait(PDL: gl.constexpr):
    """As `device.wait`. Each warpgroup calls it first: what one of them waited for, the others have not."""
    if PDL:
        gdc_wait()


@gluon.jit
def trigger(PDL: gl.constexpr):
    """As `device.trigger`."""
    if PDL:
        gdc_launch_dependents()


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def expert_tiles(starts, S, E: gl.constexpr, E_POW2: gl.constexpr):
    """(end row, tiles up to and with it) of each expert and of the rows of none, [E_POW2] with E_POW2 > E."""
    # Each warp holds all of it, so that a tile is found without a word between warps.
    LAYOUT: gl.constexpr = gl.BlockedLayout([E_POW2 // 32], [32], [gl.num_warps()], [0])
    e = gl.arange(0, E_POW2, layout=LAYOUT)
    begin = gl.load(starts + e, mask=e <= E, other=S)
    end = gl.load(starts + 1 + e, mask=e < E, other=S)
    return end, gl.associative_scan((end - begin + ROWS - 1) // ROWS, 0, _add)


@gluon.jit
def tile_at(index, tiles, end, upto, WIDTH: gl.constexpr, GROUP: gl.constexpr):
    """(expert, first row, end row of the expert, column tile) of tile `index`, in `device.tile_of_program`'s order."""
    group = index // (GROUP * WIDTH)
    inside = index % (GROUP * WIDTH)
    height = gl.minimum(tiles - group * GROUP, GROUP)
    slot = group * GROUP + inside % height
    passed = upto <= slot
    expert = gl.sum(passed.to(gl.int32), 0)
    before = gl.max(gl.where(passed, upto, 0), 0)
    start = gl.max(gl.where(passed, end, 0), 0)
    last = gl.min(gl.where(passed, 0x7FFFFFFF, end), 0)
    return expert, start + (slot - before) * ROWS, last, inside // height


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
def multiply_rows(
    done,
    mine,
    expert,
    full,
    empty,
    rows_of,
    matrix_of,
    E: gl.constexpr,
    STEPS: gl.constexpr,
    WIDE: gl.constexpr,
    INNER: gl.constexpr,
    STAGES: gl.constexpr,
    HALF_OF: gl.constexpr,
):
    """([HALF, WIDE] fp32 product of this warpgroup's rows of a tile, steps so far); zero unless `mine`.

    Rows of no expert have no steps: nothing was loaded for them.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDE, 16])
    state = warpgroup_mma_init(gl.zeros((HALF, WIDE), gl.float32, layout=LAYOUT))
    if expert < E:
        if mine:
            for step in range(STEPS):
                stage = done % STAGES
                mbarrier.wait(full.index(stage), (done // STAGES) & 1)
                rows = rows_of.index(stage).slice(HALF_OF * HALF, HALF)
                matrix = matrix_of.index(stage)
                state = warpgroup_mma(rows, matrix.permute((1, 0)) if INNER else matrix, state, is_async=True)
                # One product stays in flight; the stage of the one before it is free.
                state = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[state]))
                mbarrier.arrive(empty.index((done + STAGES - 1) % STAGES), count=1, pred=step > 0)
                done += 1
            state = warpgroup_mma_init(warpgroup_mma_wait(0, deps=[state]))
            mbarrier.arrive(empty.index((done + STAGES - 1) % STAGES), count=1)
        else:
            for _step in range(STEPS):
                stage = done % STAGES
                mbarrier.wait(full.index(stage), (done // STAGES) & 1)
                mbarrier.arrive(empty.index(stage), count=1)
                done += 1
    return warpgroup_mma_wait(0, deps=[state]), done


@gluon.jit
def stage_barriers(STAGES: gl.constexpr):
    """(full, empty) of each stage, ready for use by all warpgroups."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    return full, empty


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
                at = expert.to(gl.int64) * BIAS_E + n.to(gl.int64) * BIAS_N
                row = gl.load(bias + at, mask=(n < N) & (expert < E), other=0.0)
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
