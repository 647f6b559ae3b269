"""Device code of the gradients of the expert weights: per expert a product over its rows.

A program owns a BM x BN tile of one expert's gradient and runs over the rows of that expert, the shared dimension of the
product. One side is kept in sorted row order, the other is gathered from token rows in the load. Experts without rows
run no step and write zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_compiler.runtime_kernels.device import expert_matrix, tile_of_program, trigger, wait


@triton.jit
def grad_weights_kernel(
    tokens,
    weights,
    ordered,
    perm,
    starts,
    first_part,
    second_part,
    TOKEN_ROW: tl.constexpr,
    ORDERED_ROW: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    FROM: tl.constexpr,
    PART_E: tl.constexpr,
    STRIDE_M: tl.constexpr,
    STRIDE_N: tl.constexpr,
    TABLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    TOKENS_ON_M: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """part_e [M,N] = left_e^T @ right_e over the rows of e.

    TOKENS_ON_M: left is tokens[perm[r] // K], right is ordered[r]; else right is tokens[perm[r] // K] and left is
    ordered[r, FROM + part * M : FROM + part * M + M]. Both parts have the same strides. weights [T,K], where given, scale
    the token rows, which are then rounded to the data type.
    """
    wait(PDL)
    HEIGHT: tl.constexpr = (M + BM - 1) // BM
    WIDTH: tl.constexpr = (N + BN - 1) // BN
    DTYPE: tl.constexpr = ordered.dtype.element_ty
    matrices = tl.program_id(0) // (HEIGHT * WIDTH)
    expert = matrices // PARTS
    part = matrices % PARTS
    row, column = tile_of_program(tl.program_id(0) % (HEIGHT * WIDTH), HEIGHT, WIDTH, GROUP)
    begin = tl.load(starts + expert)
    end = tl.load(starts + expert + 1)
    m = row * BM + tl.arange(0, BM)
    n = column * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for r0 in range(begin, end, BK):
        r = r0 + tl.arange(0, BK)
        ok = r < end
        pair = tl.load(perm + r, mask=ok, other=0)
        token_rows = tokens + (pair // K).to(tl.int64) * TOKEN_ROW
        ordered_rows = ordered + r.to(tl.int64) * ORDERED_ROW
        if TOKENS_ON_M:
            left_rows = token_rows
            right_rows = ordered_rows
        else:
            left_rows = ordered_rows + (FROM + part * M)
            right_rows = token_rows
        if M % BM == 0:
            left = tl.load(left_rows[:, None] + m[None, :], mask=ok[:, None], other=0.0).to(DTYPE)
        else:
            left = tl.load(left_rows[:, None] + m[None, :], mask=ok[:, None] & (m < M)[None, :], other=0.0).to(DTYPE)
        if N % BN == 0:
            right = tl.load(right_rows[:, None] + n[None, :], mask=ok[:, None], other=0.0).to(DTYPE)
        else:
            right = tl.load(right_rows[:, None] + n[None, :], mask=ok[:, None] & (n < N)[None, :], other=0.0).to(DTYPE)
        if weights is not None:
            scale = tl.load(weights + pair, mask=ok, other=0.0).to(tl.float32)[:, None]
            if TOKENS_ON_M:
                left = (left.to(tl.float32) * scale).to(DTYPE)
            else:
                right = (right.to(tl.float32) * scale).to(DTYPE)
        acc = tl.dot(tl.trans(left), right, acc, input_precision=PRECISION)
    trigger(PDL)
    if PARTS == 2:
        if part == 1:
            out = expert_matrix(second_part, expert, PART_E, TABLE, ALIGNED, DTYPE)
        else:
            out = expert_matrix(first_part, expert, PART_E, TABLE, ALIGNED, DTYPE)
    else:
        out = expert_matrix(first_part, expert, PART_E, TABLE, ALIGNED, DTYPE)
    if WIDE:
        at = m.to(tl.int64)[:, None] * STRIDE_M + n.to(tl.int64)[None, :] * STRIDE_N
    else:
        at = m[:, None] * STRIDE_M + n[None, :] * STRIDE_N
    tl.store(out + at, acc.to(DTYPE), mask=(m < M)[:, None] & (n < N)[None, :])
