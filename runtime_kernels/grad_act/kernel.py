"""Device code of the gradient through the down projection and the activation.

A program owns BM sorted rows of one expert and BN columns of the intermediate size: dA' = grad_y[t] @ W_down[e], with
the rows of grad_y gathered in the load. The epilogue reads the saved pre-activation, computes the activation again,
and writes its gradient, the weighted activation for the weight gradient of down, and its part of the row sum that is
the gradient of the routing weight. The parts are summed in order by a second, small kernel, so the result is the same
every run. A bias of the down projection has a part of its own in that sum, from `bias_scores_kernel`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_compiler.runtime_kernels.device import (
    accumulate,
    activation_slope,
    bias_row,
    expert_matrix,
    expert_tile,
    shifted,
    tile_of_program,
    trigger,
    upright,
    wait,
    zero_tile,
)


@triton.jit
def finish_piece(
    grad,
    r,
    n0,
    ok,
    known,
    scale,
    preact,
    grad_preact,
    act,
    INTER: tl.constexpr,
    BN: tl.constexpr,
    GATED: tl.constexpr,
    TURNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
    SUM: tl.constexpr,
):
    """Store what belongs to the columns from n0 of the rows r, from their dA'; the row sums of A * dA' when SUM."""
    DTYPE: tl.constexpr = grad_preact.dtype.element_ty
    N: tl.constexpr = 2 * INTER if GATED else INTER
    n = n0 + tl.arange(0, BN)
    columns = (n < INTER)[None, :]
    keep = ok[:, None] & columns
    at = r.to(tl.int64)[:, None] * N + n[None, :]
    gate = tl.load(preact + at, mask=known[:, None] & columns, other=0.0).to(tl.float32)
    value, slope = activation_slope(gate, ACTIVATION, ALPHA, LIMIT)
    if GATED:
        up = tl.load(preact + INTER + at, mask=known[:, None] & columns, other=0.0).to(tl.float32)
        other = shifted(up, LIMIT, SHIFT)
        total = value * other
    else:
        total = value
    if SUM:
        part = tl.sum(tl.where(known[:, None] & columns, total * grad, 0.0), 1)
    else:
        part = 0.0
    if scale is not None:
        grad *= scale[:, None]
        total *= scale[:, None]
    if act is not None:
        tl.store(act + r.to(tl.int64)[:, None] * INTER + n[None, :], total.to(DTYPE), mask=keep)
    if GATED:
        grad_gate = (grad * other * slope).to(DTYPE)
        grad_up = grad * value
        if LIMIT > 0:
            grad_up = tl.where((up <= LIMIT) & (up >= -LIMIT), grad_up, 0.0)
        if TURNS:
            ROWS: tl.constexpr = grad.shape[0]
            both = tl.reshape(tl.join(grad_gate, grad_up.to(DTYPE)), (ROWS, 2 * BN))
            c = 2 * n0 + tl.arange(0, 2 * BN)
            at = r.to(tl.int64)[:, None] * N + c[None, :]
            tl.store(grad_preact + at, both, mask=ok[:, None] & (c < N)[None, :])
        else:
            tl.store(grad_preact + at, grad_gate, mask=keep)
            tl.store(grad_preact + INTER + at, grad_up.to(DTYPE), mask=keep)
    else:
        tl.store(grad_preact + at, (grad * slope).to(DTYPE), mask=keep)
    return part


@triton.jit
def finish(
    grad,
    r,
    n0,
    ok,
    known,
    scale,
    preact,
    grad_preact,
    act,
    INTER: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    GATED: tl.constexpr,
    TURNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
    SUM: tl.constexpr,
    PIECES: tl.constexpr,
):
    """`finish_piece` on PIECES groups of columns, one after the other: a whole tile does not fit the registers."""
    if PIECES == 1:
        part = finish_piece(
            grad, r, n0, ok, known, scale, preact, grad_preact, act,
            INTER, BN, GATED, TURNS, ACTIVATION, ALPHA, LIMIT, SHIFT, SUM,
        )  # fmt: skip
    else:
        HALF: tl.constexpr = BN // 2
        left, right = tl.split(tl.permute(tl.reshape(grad, (BM, 2, HALF)), (0, 2, 1)))
        part = finish(
            left, r, n0, ok, known, scale, preact, grad_preact, act,
            INTER, BM, HALF, GATED, TURNS, ACTIVATION, ALPHA, LIMIT, SHIFT, SUM, PIECES // 2,
        )  # fmt: skip
        part += finish(
            right, r, n0 + HALF, ok, known, scale, preact, grad_preact, act,
            INTER, BM, HALF, GATED, TURNS, ACTIVATION, ALPHA, LIMIT, SHIFT, SUM, PIECES // 2,
        )  # fmt: skip
    return part


@triton.jit
def grad_act_tile(
    grad_y,
    weights,
    preact,
    perm,
    down,
    grad_preact,
    act,
    sums,
    expert,
    first,
    end,
    column,
    S,
    Y_ROW: tl.constexpr,
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
    BOX: tl.constexpr,
    GATED: tl.constexpr,
    TURNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SWAP: tl.constexpr,
    PIECES: tl.constexpr,
    PDL: tl.constexpr,
):
    """The tile of BM rows from `first` in the column-th group of BN columns of one expert; as `grad_act_kernel`."""
    DTYPE: tl.constexpr = grad_preact.dtype.element_ty
    r = first + tl.arange(0, BM)
    ok = r < end
    pair = tl.load(perm + r, mask=ok, other=0)
    rows = grad_y + (pair // K).to(tl.int64) * Y_ROW
    n0 = column * BN
    # The rows of no expert skip the loop: their results are zero.
    depth = tl.where(expert < E, H, 0)
    safe = tl.minimum(expert, E - 1)
    if BOX > 0:
        matrix = down
    else:
        matrix = expert_matrix(down, safe, DOWN_E, TABLE, ALIGNED, DTYPE)
    grad = zero_tile(BM, BN, SWAP)
    grad = accumulate(
        grad, rows, ok, matrix, safe, depth, n0,
        H, INTER, BK, BN, DOWN_H, DOWN_I, WIDE, BOX, SWAP, PRECISION, DTYPE,
    )  # fmt: skip
    trigger(PDL)
    if weights is not None:
        scale = tl.load(weights + pair, mask=ok & (expert < E), other=0.0).to(tl.float32)
    else:
        scale = None
    # Nobody wrote the pre-activation of the rows of no expert.
    known = ok & (expert < E)
    part = finish(
        upright(grad, SWAP), r, n0, ok, known, scale, preact, grad_preact, act,
        INTER, BM, BN, GATED, TURNS, ACTIVATION, ALPHA, LIMIT, SHIFT, sums is not None, PIECES,
    )  # fmt: skip
    if sums is not None:
        tl.store(sums + column.to(tl.int64) * S + pair, part, mask=ok)


@triton.jit(do_not_specialize=["S", "slots"])
def grad_act_kernel(
    grad_y,
    weights,
    preact,
    perm,
    starts,
    down,
    grad_preact,
    act,
    sums,
    S,
    slots,
    Y_ROW: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    E_POW2: tl.constexpr,
    H: tl.constexpr,
    INTER: tl.constexpr,
    DOWN_E: tl.constexpr,
    DOWN_H: tl.constexpr,
    DOWN_I: tl.constexpr,
    TABLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    BOX: tl.constexpr,
    GATED: tl.constexpr,
    TURNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    SWAP: tl.constexpr,
    HALVES: tl.constexpr,
    PIECES: tl.constexpr,
    PDL: tl.constexpr,
):
    """grad_preact [S,N], act [S,I] times the weight unless None, sums [column tiles, S] in pair order unless None.

    BOX and HALVES as in `gate_up_kernel`; PIECES as in `finish`.
    """
    wait(PDL)
    WIDTH: tl.constexpr = (INTER + BN - 1) // BN
    slot, column = tile_of_program(tl.program_id(0), slots, WIDTH, GROUP)
    expert, first, end = expert_tile(starts, slot, S, E, E_POW2, BM)
    if end - first > (BM // 2 if HALVES else 0):
        grad_act_tile(
            grad_y, weights, preact, perm, down, grad_preact, act, sums, expert, first, end, column, S,
            Y_ROW, K, E, H, INTER, DOWN_E, DOWN_H, DOWN_I, TABLE, ALIGNED, WIDE, BOX, GATED, TURNS, ACTIVATION,
            ALPHA, LIMIT, SHIFT, PRECISION, BM, BN, BK, SWAP, PIECES, PDL,
        )  # fmt: skip
    else:
        if HALVES:
            if first < end:
                grad_act_tile(
                    grad_y, weights, preact, perm, down, grad_preact, act, sums, expert, first, end, column, S, Y_ROW,
                    K, E, H, INTER, DOWN_E, DOWN_H, DOWN_I, TABLE, ALIGNED, WIDE, BOX, GATED, TURNS, ACTIVATION,
                    ALPHA, LIMIT, SHIFT, PRECISION, BM // 2, BN, BK, SWAP, PIECES, PDL,
                )  # fmt: skip


@triton.jit(do_not_specialize=["S"])
def bias_scores_kernel(
    grad_y,
    perm,
    starts,
    bias,
    sums,
    S,
    PART: tl.constexpr,
    Y_ROW: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    E_POW2: tl.constexpr,
    H: tl.constexpr,
    BIAS_E: tl.constexpr,
    BIAS_H: tl.constexpr,
    BIAS_TABLE: tl.constexpr,
    DTYPE: tl.constexpr,
    BH: tl.constexpr,
    PDL: tl.constexpr,
):
    """sums[PART, perm[r]] = <grad_y[perm[r] // K], bias_e> for the row r of a program and its expert e, else 0."""
    wait(PDL)
    r = tl.program_id(0)
    expert, _, _ = expert_tile(starts, r, S, E, E_POW2, 1)
    pair = tl.load(perm + r)
    row = grad_y + (pair // K).to(tl.int64) * Y_ROW
    acc = tl.zeros((BH,), tl.float32)
    for h0 in range(0, H, BH):
        h = h0 + tl.arange(0, BH)
        keep = (h < H) & (expert < E)
        added = bias_row(bias, tl.minimum(expert, E - 1), h, keep, BIAS_E, BIAS_H, BIAS_TABLE, DTYPE)
        acc += tl.load(row + h, mask=keep, other=0.0).to(DTYPE).to(tl.float32) * added
    trigger(PDL)
    tl.store(sums + PART * S.to(tl.int64) + pair, tl.sum(acc, 0))


@triton.jit(do_not_specialize=["S"])
def sum_parts_kernel(sums, grad_weights, S, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """grad_weights[p] = the sum of sums[:, p], in order."""
    wait(PDL)
    trigger(PDL)
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(PARTS):
        total += tl.load(sums + part.to(tl.int64) * S + p, mask=p < S, other=0.0)
    tl.store(grad_weights + p, total, mask=p < S)
