"""Device code of the first expert matmuls with the activation in the epilogue.

`gate_up_kernel`: a program owns BM sorted rows of one expert and BN columns of the intermediate size. It keeps two
accumulators, gate and up, over the same rows of x, which are gathered in the load (a row's token is perm[row] // k).

`gate_up_few_kernel`, for few tokens: a program owns one (token, expert) pair and BN rows of gate and up. Nothing is
sorted and no tensor core is used: with a row or two an expert the time is that of streaming the weights once, and a
program's only dependent loads are the pair's expert id and its row of x.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_compiler.runtime_kernels.device import (
    activation,
    bias_row,
    dot_step,
    expert_matrix,
    expert_tile,
    load_matrix,
    load_rows,
    multiply,
    shifted,
    steps,
    tile_of_program,
    trigger,
    upright,
    wait,
    zero_tile,
)


@triton.jit
def gate_up_tile(
    x,
    weights,
    perm,
    gate,
    up,
    gate_bias,
    up_bias,
    act,
    preact,
    expert,
    first,
    end,
    column,
    X_ROW: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    H: tl.constexpr,
    INTER: tl.constexpr,
    GATE_E: tl.constexpr,
    UP_E: tl.constexpr,
    GATE_I: tl.constexpr,
    GATE_H: tl.constexpr,
    UP_I: tl.constexpr,
    UP_H: tl.constexpr,
    UP_SHIFT: tl.constexpr,
    GATE_BIAS_E: tl.constexpr,
    GATE_BIAS_I: tl.constexpr,
    GATE_BIAS_TABLE: tl.constexpr,
    UP_BIAS_E: tl.constexpr,
    UP_BIAS_I: tl.constexpr,
    UP_BIAS_TABLE: tl.constexpr,
    TABLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    BOX: tl.constexpr,
    JOINED: tl.constexpr,
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
    PDL: tl.constexpr,
):
    """The tile of BM rows from `first` and BN columns from `column` of one expert; arguments as of `gate_up_kernel`."""
    DTYPE: tl.constexpr = act.dtype.element_ty
    r = first + tl.arange(0, BM)
    ok = r < end
    pair = tl.load(perm + r, mask=ok, other=0)
    rows = x + (pair // K).to(tl.int64) * X_ROW
    # The rows of no expert skip the loop: their results are zero.
    depth = tl.where(expert < E, H, 0)
    safe = tl.minimum(expert, E - 1)
    if TURNS:
        if BOX > 0:
            matrix = gate
        else:
            matrix = expert_matrix(gate, safe, GATE_E, TABLE, ALIGNED, DTYPE)
        both = zero_tile(BM, 2 * BN, SWAP)
        for k0 in range(0, depth, BK):
            tile = load_rows(rows, ok, k0 + tl.arange(0, BK), H, H % BK == 0, DTYPE)
            block = load_matrix(matrix, safe, 0, k0, 2 * column, H, 2 * INTER, BK, 2 * BN, GATE_H, GATE_I, WIDE, BOX)
            both = multiply(tile, block, both, SWAP, PRECISION)
        both = upright(both, SWAP)
    elif JOINED:
        both = zero_tile(BM, 2 * BN, False)
        for k0 in range(0, depth, BK):
            tile = load_rows(rows, ok, k0 + tl.arange(0, BK), H, H % BK == 0, DTYPE)
            block = tl.reshape(gate.load([2 * safe, column, k0]), (2 * BN, BK))
            both = multiply(tile, tl.trans(block), both, False, PRECISION)
        gates, ups = tl.split(tl.permute(tl.reshape(both, (BM, 2, BN)), (0, 2, 1)))
    else:
        gates = zero_tile(BM, BN, SWAP)
        ups = zero_tile(BM, BN, SWAP)
        if BOX > 0:
            gate_matrix = gate
        else:
            gate_matrix = expert_matrix(gate, safe, GATE_E, TABLE, ALIGNED, DTYPE)
        if up is None:
            if BOX > 0:
                up_matrix = gate_matrix
            else:
                up_matrix = gate_matrix + UP_SHIFT * UP_I
        else:
            if BOX > 0:
                up_matrix = up
            else:
                up_matrix = expert_matrix(up, safe, UP_E, TABLE, ALIGNED, DTYPE)
        for k0 in range(0, depth, BK):
            tile = load_rows(rows, ok, k0 + tl.arange(0, BK), H, H % BK == 0, DTYPE)
            block = load_matrix(gate_matrix, safe, 0, k0, column, H, INTER, BK, BN, GATE_H, GATE_I, WIDE, BOX)
            gates = multiply(tile, block, gates, SWAP, PRECISION)
            if GATED:
                block = load_matrix(up_matrix, safe, UP_SHIFT, k0, column, H, INTER, BK, BN, UP_H, UP_I, WIDE, BOX)
                ups = multiply(tile, block, ups, SWAP, PRECISION)
        gates = upright(gates, SWAP)
        ups = upright(ups, SWAP)
    trigger(PDL)
    if weights is not None:
        scale = tl.load(weights + pair, mask=ok, other=0.0).to(tl.float32)
    n = column + tl.arange(0, BN)
    keep = ok[:, None] & (n < INTER)[None, :]
    real = (n < INTER) & (expert < E)
    if TURNS:
        # Neighbours are loaded at once, of the bias too, and are held by one thread, so telling them apart is free.
        if weights is not None:
            both *= scale[:, None]
        if gate_bias is not None:
            m = 2 * column + tl.arange(0, 2 * BN)
            known = (m < 2 * INTER) & (expert < E)
            both += bias_row(gate_bias, safe, m, known, GATE_BIAS_E, GATE_BIAS_I, GATE_BIAS_TABLE, DTYPE)[None, :]
        gates, ups = tl.split(tl.reshape(both, (BM, BN, 2)))
    else:
        if weights is not None:
            gates *= scale[:, None]
        if gate_bias is not None:
            gates += bias_row(gate_bias, safe, n, real, GATE_BIAS_E, GATE_BIAS_I, GATE_BIAS_TABLE, DTYPE)[None, :]
    value = activation(gates, ACTIVATION, ALPHA, LIMIT)
    if GATED:
        if weights is not None and not TURNS:
            ups *= scale[:, None]
        # The bias of packed weights is packed as they are.
        if up_bias is not None:
            ups += bias_row(up_bias, safe, n, real, UP_BIAS_E, UP_BIAS_I, UP_BIAS_TABLE, DTYPE)[None, :]
        if UP_SHIFT > 0 and not TURNS:
            if gate_bias is not None:
                at = n + UP_SHIFT
                ups += bias_row(gate_bias, safe, at, real, GATE_BIAS_E, GATE_BIAS_I, GATE_BIAS_TABLE, DTYPE)[None, :]
        value *= shifted(ups, LIMIT, SHIFT)
    tl.store(act + r.to(tl.int64)[:, None] * INTER + n[None, :], value.to(DTYPE), mask=keep)
    if preact is not None:
        N: tl.constexpr = 2 * INTER if GATED else INTER
        saved = preact + r.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(saved, gates.to(DTYPE), mask=keep)
        if GATED:
            tl.store(saved + INTER, ups.to(DTYPE), mask=keep)


@triton.jit(do_not_specialize=["S", "slots"])
def gate_up_kernel(
    x,
    weights,
    perm,
    starts,
    gate,
    up,
    gate_bias,
    up_bias,
    act,
    preact,
    S,
    slots,
    X_ROW: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    E_POW2: tl.constexpr,
    H: tl.constexpr,
    INTER: tl.constexpr,
    GATE_E: tl.constexpr,
    UP_E: tl.constexpr,
    GATE_I: tl.constexpr,
    GATE_H: tl.constexpr,
    UP_I: tl.constexpr,
    UP_H: tl.constexpr,
    UP_SHIFT: tl.constexpr,
    GATE_BIAS_E: tl.constexpr,
    GATE_BIAS_I: tl.constexpr,
    GATE_BIAS_TABLE: tl.constexpr,
    UP_BIAS_E: tl.constexpr,
    UP_BIAS_I: tl.constexpr,
    UP_BIAS_TABLE: tl.constexpr,
    TABLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    BOX: tl.constexpr,
    JOINED: tl.constexpr,
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
    PDL: tl.constexpr,
):
    """act[r] = f(gate_e x_t) * (up_e x_t); preact[r] = [gate_e x_t, up_e x_t] unless None. [x_t times its weight.]

    Biases are added to what the matrices make, where they are not None.

    up        None where gate and up are one matrix: its rows of up lie UP_SHIFT below those of gate
    BOX       rows an expert of the tensor descriptors `gate` and `up`, or 0: `gate` and `up` are pointers
    TURNS     the rows of that matrix, 2I, are those of gate and up in turns: 2 BN neighbours are one block, and one
              product of twice the width, which reads x from shared memory half as often
    JOINED    the same for gate before up: `gate` is a descriptor over both, [2E, I, H], whose boxes hold BN rows of
              each
    HALVES    a tile with at most BM / 2 rows is computed as one of that height
    """
    wait(PDL)
    WIDTH: tl.constexpr = (INTER + BN - 1) // BN
    slot, column = tile_of_program(tl.program_id(0), slots, WIDTH, GROUP)
    expert, first, end = expert_tile(starts, slot, S, E, E_POW2, BM)
    if end - first > (BM // 2 if HALVES else 0):
        gate_up_tile(
            x, weights, perm, gate, up, gate_bias, up_bias, act, preact, expert, first, end, column * BN,
            X_ROW, K, E, H, INTER, GATE_E, UP_E, GATE_I, GATE_H, UP_I, UP_H, UP_SHIFT,
            GATE_BIAS_E, GATE_BIAS_I, GATE_BIAS_TABLE, UP_BIAS_E, UP_BIAS_I, UP_BIAS_TABLE,
            TABLE, ALIGNED, WIDE, BOX, JOINED, GATED, TURNS, ACTIVATION, ALPHA, LIMIT, SHIFT, PRECISION,
            BM, BN, BK, SWAP, PDL,
        )  # fmt: skip
    else:
        if HALVES:
            if first < end:
                gate_up_tile(
                    x, weights, perm, gate, up, gate_bias, up_bias, act, preact, expert, first, end, column * BN,
                    X_ROW, K, E, H, INTER, GATE_E, UP_E, GATE_I, GATE_H, UP_I, UP_H, UP_SHIFT,
                    GATE_BIAS_E, GATE_BIAS_I, GATE_BIAS_TABLE, UP_BIAS_E, UP_BIAS_I, UP_BIAS_TABLE,
                    TABLE, ALIGNED, WIDE, BOX, JOINED, GATED, TURNS, ACTIVATION, ALPHA, LIMIT, SHIFT, PRECISION,
                    BM // 2, BN, BK, SWAP, PDL,
                )  # fmt: skip


@triton.jit
def gate_up_few_kernel(
    x,
    weights,
    ids,
    gate,
    up,
    gate_bias,
    up_bias,
    act,
    X_ROW: tl.constexpr,
    ID_T: tl.constexpr,
    ID_K: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    H: tl.constexpr,
    INTER: tl.constexpr,
    GATE_E: tl.constexpr,
    UP_E: tl.constexpr,
    GATE_I: tl.constexpr,
    GATE_H: tl.constexpr,
    UP_I: tl.constexpr,
    UP_H: tl.constexpr,
    UP_SHIFT: tl.constexpr,
    GATE_BIAS_E: tl.constexpr,
    GATE_BIAS_I: tl.constexpr,
    GATE_BIAS_TABLE: tl.constexpr,
    UP_BIAS_E: tl.constexpr,
    UP_BIAS_I: tl.constexpr,
    UP_BIAS_TABLE: tl.constexpr,
    TABLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    GATED: tl.constexpr,
    TURNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """act[p] = f(gate_e x_t) * (up_e x_t) for pair p = t*K + j, e = ids[t,j]; zero where e is out of range.

    AHEAD  0: the loop over H is unrolled; else the number of its steps whose loads are in flight
    """
    wait(PDL)
    WIDTH: tl.constexpr = (INTER + BN - 1) // BN
    pair = tl.program_id(0) // WIDTH
    n = (tl.program_id(0) % WIDTH) * BN + tl.arange(0, BN)
    token = pair // K
    expert = tl.load(ids + token.to(tl.int64) * ID_T + steps(pair % K, ID_K, K))
    DTYPE: tl.constexpr = act.dtype.element_ty
    out = act + pair.to(tl.int64) * INTER + n
    if (expert >= 0) & (expert < E):
        gate_matrix = expert_matrix(gate, expert, GATE_E, TABLE, ALIGNED, DTYPE)
        if up is None:
            up_matrix = gate_matrix + UP_SHIFT * UP_I
        else:
            up_matrix = expert_matrix(up, expert, UP_E, TABLE, ALIGNED, DTYPE)
        row = x + token.to(tl.int64) * X_ROW
        # Of gate, and besides of up; in turns of both.
        ROWS: tl.constexpr = 2 * BN if TURNS else BN
        LAST: tl.constexpr = 2 * INTER if TURNS else INTER
        m = (tl.program_id(0) % WIDTH) * ROWS + tl.arange(0, ROWS)
        gates = tl.zeros((ROWS, BK), tl.float32)
        ups = tl.zeros((BN, BK), tl.float32)
        if AHEAD == 0:
            for k0 in tl.static_range(0, H, BK):
                gates = dot_step(gates, gate_matrix, row, m, k0, H, LAST, BK, ROWS, GATE_I, GATE_H, WIDE)
                if GATED and not TURNS:
                    ups = dot_step(ups, up_matrix, row, n, k0, H, INTER, BK, BN, UP_I, UP_H, WIDE)
        else:
            for k0 in tl.range(0, H, BK, num_stages=AHEAD):
                gates = dot_step(gates, gate_matrix, row, m, k0, H, LAST, BK, ROWS, GATE_I, GATE_H, WIDE)
                if GATED and not TURNS:
                    ups = dot_step(ups, up_matrix, row, n, k0, H, INTER, BK, BN, UP_I, UP_H, WIDE)
        trigger(PDL)
        total = tl.sum(gates, 1)
        if weights is not None:
            scale = tl.load(weights + pair).to(tl.float32)
            total *= scale
        if gate_bias is not None:
            total += bias_row(gate_bias, expert, m, m < LAST, GATE_BIAS_E, GATE_BIAS_I, GATE_BIAS_TABLE, DTYPE)
        if TURNS:
            total, total_up = tl.split(tl.reshape(total, (BN, 2)))
        value = activation(total, ACTIVATION, ALPHA, LIMIT)
        if GATED:
            if not TURNS:
                total_up = tl.sum(ups, 1)
                if weights is not None:
                    total_up *= scale
                if up_bias is not None:
                    total_up += bias_row(up_bias, expert, n, n < INTER, UP_BIAS_E, UP_BIAS_I, UP_BIAS_TABLE, DTYPE)
                if UP_SHIFT > 0:
                    if gate_bias is not None:
                        at = n + UP_SHIFT
                        total_up += bias_row(
                            gate_bias, expert, at, n < INTER, GATE_BIAS_E, GATE_BIAS_I, GATE_BIAS_TABLE, DTYPE
                        )
            value *= shifted(total_up, LIMIT, SHIFT)
        tl.store(out, value.to(DTYPE), mask=n < INTER)
    else:
        tl.store(out, tl.zeros((BN,), DTYPE), mask=n < INTER)
