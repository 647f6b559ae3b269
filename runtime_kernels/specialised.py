"""Device code that expert matmuls with many rows share on Hopper: one warpgroup loads, two multiply, programs stay.

A program is one of as many as the device has multiprocessors, and takes tile after tile. The loading warpgroup runs
ahead of the two that multiply by as many stages as shared memory holds, also from one tile into the next, so that
neither the search for a tile's expert nor the way of its results to memory stops the loads. Each multiplying warpgroup
owns 64 of a tile's 128 rows and all of its columns, and the two need not keep step: while one writes its results, the
other has the tensor cores to itself.

Rows arrive by asynchronous copies from a pointer to each, gathered or not; matrices by the tensor memory accelerator.
What a stage holds is handed over by a pair of barriers: `full` counts the loads that arrived, `empty` the warpgroups
that have read it. The copies of rows are ordinary writes, which the tensor cores do not see before a fence; the loading
warpgroup makes it, a stage later than the copies, so that neither side waits for it.

Triton's language has no way to say this (it orders a program's steps itself), so the file is written in Gluon, the
language below it that ships with it. Sorted rows and "expert" E are as in `device`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Copies from global to shared memory, by the tensor memory accelerator and by each thread. Later tritons renamed both.
load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_pieces = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
# Rows of a tile, and of the half that a multiplying warpgroup owns.
ROWS = gl.constexpr(128)
HALF = gl.constexpr(64)
# Stages that the loads go on while the copies of one are under way.
LAG = gl.constexpr(1)


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
    """(expert, first row, end row of the expert, column tile) of tile `index`, in the order of `tile_of_program`."""
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
def hand_over(arrived, PENDING: gl.constexpr):
    """Say that the rows of a stage are there; PENDING younger copies may be under way."""
    async_copy.wait_group(PENDING)
    fence_async_shared()
    mbarrier.arrive(arrived, count=1)


@gluon.jit
def load_tiles(
    left,
    perm,
    starts,
    first_part,
    second_part,
    S,
    full,
    empty,
    rows_of,
    matrix_of,
    LEFT_ROW: gl.constexpr,
    PER_ROW: gl.constexpr,
    E: gl.constexpr,
    E_POW2: gl.constexpr,
    K: gl.constexpr,
    N: gl.constexpr,
    PARTS: gl.constexpr,
    BESIDE: gl.constexpr,
    INNER: gl.constexpr,
    BOX: gl.constexpr,
    SHIFT: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Fill stage after stage with rows of `left` and tiles of the matrices, for all tiles of this program.

    left       sorted row r lies at left + r * LEFT_ROW, or, with `perm`, at left + perm[r] // PER_ROW * LEFT_ROW
    PARTS      parts of K columns that a row of `left` has, each of which meets a matrix of its own
    BESIDE     `second_part` is no second part: its tile lies beside that of `first_part`, over the same rows
    INNER      a matrix's stored rows run over its columns n, else over k;  BOX, SHIFT: as in `device.load_matrix`, of
               the second part
    """
    wait(PDL)
    WIDTH: gl.constexpr = (N + BN - 1) // BN
    STEPS: gl.constexpr = K // BK
    end, upto = expert_tiles(starts, S, E, E_POW2)
    tiles = gl.max(upto, 0)
    # 16 bytes a copy, a row of a stage from neighbouring threads.
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BK, BK // 8], [gl.num_warps(), 1], [1, 0])
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY))
    k = gl.arange(0, BK, layout=gl.SliceLayout(0, COPY))
    done = 0
    for index in range(gl.program_id(0), tiles * WIDTH, gl.num_programs(0)):
        expert, first, last, column = tile_at(index, tiles, end, upto, WIDTH, GROUP)
        if expert < E:
            ok = first + r < last
            if perm is None:
                row = (first + r).to(gl.int64)
            else:
                row = (gl.load(perm + first + r, mask=ok, other=0) // PER_ROW).to(gl.int64)
            source = gl.expand_dims(left + row * LEFT_ROW, 1) + gl.expand_dims(k, 0)
            keep = gl.expand_dims(ok, 1) & gl.expand_dims(k < BK, 0)
            n = column * BN
            for step in range(PARTS * STEPS):
                stage = done % STAGES
                mbarrier.wait(empty.index(stage), ((done // STAGES) & 1) ^ 1)
                arrived = full.index(stage)
                matrix = matrix_of.index(stage)
                mbarrier.expect(arrived, (2 if BESIDE else 1) * BN * BK * 2)
                if BESIDE:
                    load_box(first_part, [expert * BOX + n, step * BK], arrived, matrix.slice(0, BN))
                    load_box(second_part, [expert * BOX + SHIFT + n, step * BK], arrived, matrix.slice(BN, BN))
                else:
                    k0 = step * BK
                    if PARTS == 1:
                        at = [expert * BOX + n, k0] if INNER else [expert * BOX + k0, n]
                        load_box(first_part, at, arrived, matrix)
                    else:
                        if step < STEPS:
                            at = [expert * BOX + n, k0] if INNER else [expert * BOX + k0, n]
                            load_box(first_part, at, arrived, matrix)
                        else:
                            k1 = k0 - K
                            at = [expert * BOX + n, k1] if INNER else [expert * BOX + k1, n]
                            load_box(second_part, at, arrived, matrix)
                copy_pieces(rows_of.index(stage), source + step * BK, mask=keep)
                async_copy.commit_group()
                if done >= LAG:
                    hand_over(full.index((done - LAG) % STAGES), LAG)
                done += 1
    for last in gl.static_range(LAG):
        if done + last >= LAG:
            hand_over(full.index((done - LAG + last) % STAGES), 0)


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
        # The matrix, whose bytes are announced, and the rows.
        mbarrier.init(full.index(stage), count=2)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    return full, empty
