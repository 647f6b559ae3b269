"""Device code of the second expert matmul for few tokens, with the weighted sum over a token's experts inside.

A program owns BN columns of the hidden size of one token and runs over the token's K experts in order, so the sum needs
no further kernel, no atomics, and has one order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_compiler.runtime_kernels.device import expert_matrix, trigger, wait


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
    expert = tl.load(ids + token.to(tl.int64) * ID_T + j * ID_K)
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
    TABLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[t] = sum_j weights[t,j] * (down_e @ act[t*K + j]), e = ids[t,j]; ids out of range contribute nothing."""
    wait(PDL)
    trigger(PDL)
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
    out = y + token.to(tl.int64) * H + n
    tl.store(out, tl.sum(acc, 1).to(y.dtype.element_ty), mask=n < H)
