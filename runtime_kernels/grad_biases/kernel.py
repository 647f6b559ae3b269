"""Device code of the gradients of the expert biases: the sum of an expert's rows, a block of columns a program."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_compiler.runtime_kernels.device import expert_matrix, load_rows, trigger, wait


@triton.jit
def grad_bias_kernel(
    rows,
    weights,
    perm,
    starts,
    grads,
    ROW: tl.constexpr,
    FROM: tl.constexpr,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    GRAD_E: tl.constexpr,
    GRAD_N: tl.constexpr,
    TABLE: tl.constexpr,
    DTYPE: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """grads_e = the sum over the rows r of e of rows[r], or of rows[perm[r] // K] where perm is not None, in fp32.

    SIZE columns from FROM; weights [T,K], where given, scale the rows. Experts without rows get zeros.
    """
    wait(PDL)
    WIDTH: tl.constexpr = (SIZE + BN - 1) // BN
    expert = tl.program_id(0) // WIDTH
    n = (tl.program_id(0) % WIDTH) * BN + tl.arange(0, BN)
    begin = tl.load(starts + expert)
    end = tl.load(starts + expert + 1)
    acc = tl.zeros((BK, BN), tl.float32)
    for r0 in range(begin, end, BK):
        r = r0 + tl.arange(0, BK)
        ok = r < end
        row = r
        if perm is not None:
            pair = tl.load(perm + r, mask=ok, other=0)
            row = pair // K
        tile = load_rows(rows + row.to(tl.int64) * ROW + FROM, ok, n, SIZE, SIZE % BN == 0, DTYPE).to(tl.float32)
        if weights is not None:
            tile *= tl.load(weights + pair, mask=ok, other=0.0).to(tl.float32)[:, None]
        acc += tile
    trigger(PDL)
    vector = expert_matrix(grads, expert, GRAD_E, TABLE, False, DTYPE)
    tl.store(vector + n.to(tl.int64) * GRAD_N, tl.sum(acc, 0).to(DTYPE), mask=n < SIZE)
