"""Device code of the second expert matmul: rows sorted by expert in, rows in pair order out.

A program owns BM sorted rows of one expert and BN columns of the hidden size; the store scatters row r to pair perm[r],
so that the sum over a token's experts (combine) reads K neighbouring rows in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_compiler.runtime_kernels.device import (
    accumulate,
    expert_matrix,
    expert_tile,
    tile_of_program,
    trigger,
    upright,
    wait,
    zero_tile,
)


@triton.jit(do_not_specialize=["S", "slots"])
def scatter_product_kernel(
    left,
    perm,
    starts,
    first_part,
    second_part,
    pairs,
    S,
    slots,
    E: tl.constexpr,
    E_POW2: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    FIRST_E: tl.constexpr,
    SECOND_E: tl.constexpr,
    FIRST_K: tl.constexpr,
    FIRST_N: tl.constexpr,
    SECOND_K: tl.constexpr,
    SECOND_N: tl.constexpr,
    TABLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    BOX: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    SWAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """pairs[perm[r]] = left[r, 0:K] @ first_e (+ left[r, K:2K] @ second_e when PARTS == 2), both [K, N] a row r of expert e."""
    wait(PDL)
    trigger(PDL)
    WIDTH: tl.constexpr = (N + BN - 1) // BN
    slot, column = tile_of_program(tl.program_id(0), slots, WIDTH, GROUP)
    expert, first, end = expert_tile(starts, slot, S, E, E_POW2, BM)
    if first < end:
        DTYPE: tl.constexpr = pairs.dtype.element_ty
        r = first + tl.arange(0, BM)
        ok = r < end
        rows = left + r.to(tl.int64) * (K * PARTS)
        n0 = column * BN
        depth = tl.where(expert < E, K, 0)
        safe = tl.minimum(expert, E - 1)
        if BOX > 0:
            matrix = first_part
        else:
            matrix = expert_matrix(first_part, safe, FIRST_E, TABLE, ALIGNED, DTYPE)
        acc = zero_tile(BM, BN, SWAP)
        acc = accumulate(
            acc, rows, ok, matrix, safe, depth, n0, K, N, BK, BN, FIRST_K, FIRST_N, WIDE, BOX, SWAP, PRECISION, DTYPE
        )
        if PARTS == 2:
            if BOX > 0:
                matrix = second_part
            else:
                matrix = expert_matrix(second_part, safe, SECOND_E, TABLE, ALIGNED, DTYPE)
            rows += K
            acc = accumulate(
                acc, rows, ok, matrix, safe, depth, n0, K, N, BK, BN, SECOND_K, SECOND_N, WIDE, BOX, SWAP, PRECISION, DTYPE
            )
        pair = tl.load(perm + r, mask=ok, other=0)
        n = n0 + tl.arange(0, BN)
        at = pair.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(pairs + at, upright(acc, SWAP).to(DTYPE), mask=ok[:, None] & (n < N)[None, :])
