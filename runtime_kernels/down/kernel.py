"""Device code of the second expert matmul: rows sorted by expert in, rows in pair order out.

`scatter_product_kernel`: a program owns BM sorted rows of one expert and BN columns of the hidden size; the store
scatters row r to pair perm[r], so that the sum over a token's experts (combine) reads K neighbouring rows in a fixed
order.

`down_few_kernel`, for few tokens: a program owns BN columns of the hidden size of one token and runs over the token's K
experts in order, so the sum needs no further kernel, no atomics, and has one order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_compiler.runtime_kernels.device import (
    accumulate,
    bias_row,
    expert_matrix,
    expert_tile,
    steps,
    tile_of_program,
    trigger,
    upright,
    wait,
    zero_tile,
)


@triton.jit
def scatter_product_tile(
    left,
    perm,
    first_part,
    second_part,
    bias,
    pairs,
    expert,
    first,
    end,
    column,
    E: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    FIRST_E: tl.constexpr,
    SECOND_E: tl.constexpr,
    FIRST_K: tl.constexpr,
    FIRST_N: tl.constexpr,
    SECOND_K: tl.constexpr,
    SECOND_N: tl.constexpr,
    BIAS_E: tl.constexpr,
    BIAS_N: tl.constexpr,
    BIAS_TABLE: tl.constexpr,
    TABLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    BOX: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SWAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """The tile of BM rows from `first` and BN columns from `column` of one expert; as `scatter_product_kernel`."""
    DTYPE: tl.constexpr = pairs.dtype.element_ty
    r = first + tl.arange(0, BM)
    ok = r < end
    rows = left + r.to(tl.int64) * (K * PARTS)
    # The rows of no expert skip the loop: their results are zero.
    depth = tl.where(expert < E, K, 0)
    safe = tl.minimum(expert, E - 1)
    if BOX > 0:
        matrix = first_part
    else:
        matrix = expert_matrix(first_part, safe, FIRST_E, TABLE, ALIGNED, DTYPE)
    acc = zero_tile(BM, BN, SWAP)
    acc = accumulate(
        acc, rows, ok, matrix, safe, depth, column,
        K, N, BK, BN, FIRST_K, FIRST_N, WIDE, BOX, SWAP, PRECISION, DTYPE,
    )  # fmt: skip
    if PARTS == 2:
        if BOX > 0:
            matrix = second_part
        else:
            matrix = expert_matrix(second_part, safe, SECOND_E, TABLE, ALIGNED, DTYPE)
        acc = accumulate(
            acc, rows + K, ok, matrix, safe, depth, column,
            K, N, BK, BN, SECOND_K, SECOND_N, WIDE, BOX, SWAP, PRECISION, DTYPE,
        )  # fmt: skip
    pair = tl.load(perm + r, mask=ok, other=0)
    trigger(PDL)
    n = column + tl.arange(0, BN)
    at = pair.to(tl.int64)[:, None] * N + n[None, :]
    product = upright(acc, SWAP)
    if bias is not None:
        product += bias_row(bias, safe, n, (n < N) & (expert < E), BIAS_E, BIAS_N, BIAS_TABLE, DTYPE)[None, :]
    tl.store(pairs + at, product.to(DTYPE), mask=ok[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["S", "slots"])
def scatter_product_kernel(
    left,
    perm,
    starts,
    first_part,
    second_part,
    bias,
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
    BIAS_E: tl.constexpr,
    BIAS_N: tl.constexpr,
    BIAS_TABLE: tl.constexpr,
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
    HALVES: tl.constexpr,
    PDL: tl.constexpr,
):
    """pairs[perm[r]] = left[r, 0:K] @ first_e (+ left[r, K:2K] @ second_e when PARTS == 2), for row r of expert e.

    bias, where it is not None, is added to the rows of its expert. The matrices are seen as [K, N]; `second_part` is
    None when PARTS == 1. BOX and HALVES as in `gate_up_kernel`.
    """
    wait(PDL)
    WIDTH: tl.constexpr = (N + BN - 1) // BN
    slot, column = tile_of_program(tl.program_id(0), slots, WIDTH, GROUP)
    expert, first, end = expert_tile(starts, slot, S, E, E_POW2, BM)
    if end - first > (BM // 2 if HALVES else 0):
        scatter_product_tile(
            left, perm, first_part, second_part, bias, pairs, expert, first, end, column * BN,
            E, K, N, PARTS, FIRST_E, SECOND_E, FIRST_K, FIRST_N, SECOND_K, SECOND_N, BIAS_E, BIAS_N, BIAS_TABLE,
            TABLE, ALIGNED, WIDE, BOX, PRECISION, BM, BN, BK, SWAP, PDL,
        )  # fmt: skip
    else:
        if HALVES:
            if first < end:
                scatter_product_tile(
                    left, perm, first_part, second_part, bias, pairs, expert, first, end, column * BN,
                    E, K, N, PARTS, FIRST_E, SECOND_E, FIRST_K, FIRST_N, SECOND_K, SECOND_N, BIAS_E, BIAS_N, BIAS_TABLE,
                    TABLE, ALIGNED, WIDE, BOX, PRECISION, BM // 2, BN, BK, SWAP, PDL,
                )  # fmt: skip


@triton.jit
def expert_step(
    acc,
    step,
    token,
    n,
    act,
    ids,
    weights,
    down,
    ID_T: tl.constexpr,
    ID_K: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    H: tl.constexpr,
    INTER: tl.constexpr,
    DOWN_E: tl.constexpr,
    DOWN_H: tl.constexpr,
    DOWN_I: tl.constexpr,
    TABLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """acc [BN,BK] + part `step % PARTS` of expert `step // PARTS` of the token, times its weight."""
    PARTS: tl.constexpr = (INTER + BK - 1) // BK
    j = step // PARTS
    i = (step % PARTS) * BK + tl.arange(0, BK)
    pair = token.to(tl.int64) * K + j
    expert = tl.load(ids + token.to(tl.int64) * ID_T + steps(j, ID_K, K))
    valid = (expert >= 0) & (expert < E)
    values = tl.load(act + pair * INTER + i, mask=(i < INTER) & valid, other=0.0).to(tl.float32)
    if weights is not None:
        values *= tl.load(weights + pair, mask=valid, other=0.0).to(tl.float32)
    matrix = expert_matrix(down, tl.where(valid, expert, 0), DOWN_E, TABLE, ALIGNED, DTYPE)
    if WIDE:
        at = n.to(tl.int64)[:, None] * DOWN_H + i.to(tl.int64)[None, :] * DOWN_I
    else:
        at = n[:, None] * DOWN_H + i[None, :] * DOWN_I
    if INTER % BK == 0 and H % BN == 0:
        tile = tl.load(matrix + at, mask=valid, other=0.0, eviction_policy="evict_first")
    else:
        inside = (n < H)[:, None] & ((i < INTER) & valid)[None, :]
        tile = tl.load(matrix + at, mask=inside, other=0.0, eviction_policy="evict_first")
    return acc + tile.to(tl.float32) * values[None, :]


@triton.jit
def down_few_kernel(
    act,
    ids,
    weights,
    down,
    bias,
    y,
    ID_T: tl.constexpr,
    ID_K: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    H: tl.constexpr,
    INTER: tl.constexpr,
    DOWN_E: tl.constexpr,
    DOWN_H: tl.constexpr,
    DOWN_I: tl.constexpr,
    BIAS_E: tl.constexpr,
    BIAS_H: tl.constexpr,
    BIAS_TABLE: tl.constexpr,
    TABLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[t] = sum_j weights[t,j] * (down_e @ act[t*K + j] + bias_e), e = ids[t,j]; ids out of range give nothing."""
    wait(PDL)
    WIDTH: tl.constexpr = (H + BN - 1) // BN
    token = tl.program_id(0) // WIDTH
    n = (tl.program_id(0) % WIDTH) * BN + tl.arange(0, BN)
    STEPS: tl.constexpr = K * ((INTER + BK - 1) // BK)
    DTYPE: tl.constexpr = act.dtype.element_ty
    acc = tl.zeros((BN, BK), tl.float32)
    if AHEAD == 0:
        for step in tl.static_range(STEPS):
            acc = expert_step(
                acc, step, token, n, act, ids, weights, down, ID_T, ID_K, K, E, H, INTER,
                DOWN_E, DOWN_H, DOWN_I, TABLE, ALIGNED, WIDE, BN, BK, DTYPE,
            )  # fmt: skip
    else:
        for step in tl.range(0, STEPS, num_stages=AHEAD):
            acc = expert_step(
                acc, step, token, n, act, ids, weights, down, ID_T, ID_K, K, E, H, INTER,
                DOWN_E, DOWN_H, DOWN_I, TABLE, ALIGNED, WIDE, BN, BK, DTYPE,
            )  # fmt: skip
    trigger(PDL)
    total = tl.sum(acc, 1)
    if bias is not None:
        for j in tl.static_range(K):
            expert = tl.load(ids + token.to(tl.int64) * ID_T + j * ID_K)
            valid = (expert >= 0) & (expert < E)
            row = bias_row(bias, tl.where(valid, expert, 0), n, (n < H) & valid, BIAS_E, BIAS_H, BIAS_TABLE, DTYPE)
            if weights is not None:
                row *= tl.load(weights + token.to(tl.int64) * K + j, mask=valid, other=0.0).to(tl.float32)
            total += row
    out = y + token.to(tl.int64) * H + n
    tl.store(out, total.to(y.dtype.element_ty), mask=n < H)
