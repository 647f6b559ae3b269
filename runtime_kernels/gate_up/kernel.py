"""Device code of the first expert matmuls with the activation in the epilogue.

A program owns BM sorted rows of one expert and BN columns of the intermediate size. It keeps two accumulators, gate and
up, over the same rows of x, which are gathered in the load (a row's token is perm[row] // k).
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_compiler.runtime_kernels.device import (
    activation,
    expert_matrix,
    expert_tile,
    load_matrix,
    load_rows,
    multiply,
    tile_of_program,
    trigger,
    upright,
    wait,
    zero_tile,
)


@triton.jit(do_not_specialize=["S", "slots"])
def gate_up_kernel(
    x,
    weights,
    perm,
    starts,
    gate,
    up,
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
    TABLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    BOX: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    SWAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """act[r] = f(gate_e x_t) * (up_e x_t); preact[r] = [gate_e x_t, up_e x_t] unless None. [x_t times its weight.]

    UP_SHIFT  rows of the up matrix lie that far below those of gate where both are one matrix, else 0
    BOX       rows an expert of the tensor descriptors `gate` and `up`, or 0: `gate` and `up` are pointers
    """
    wait(PDL)
    trigger(PDL)
    WIDTH: tl.constexpr = (INTER + BN - 1) // BN
    slot, column = tile_of_program(tl.program_id(0), slots, WIDTH, GROUP)
    expert, first, end = expert_tile(starts, slot, S, E, E_POW2, BM)
    if first < end:
        DTYPE: tl.constexpr = act.dtype.element_ty
        r = first + tl.arange(0, BM)
        ok = r < end
        pair = tl.load(perm + r, mask=ok, other=0)
        rows = x + (pair // K).to(tl.int64) * X_ROW
        n0 = column * BN
        # The rows of no expert skip the loop: their results are zero.
        depth = tl.where(expert < E, H, 0)
        safe = tl.minimum(expert, E - 1)
        gates = zero_tile(BM, BN, SWAP)
        ups = zero_tile(BM, BN, SWAP)
        if BOX > 0:
            gate_matrix = gate
            up_matrix = up
        else:
            gate_matrix = expert_matrix(gate, safe, GATE_E, TABLE, ALIGNED, DTYPE)
            up_matrix = expert_matrix(up, safe, UP_E, TABLE, ALIGNED, DTYPE) + UP_SHIFT * UP_I
        for k0 in range(0, depth, BK):
            tile = load_rows(rows, ok, k0 + tl.arange(0, BK), H, H % BK == 0, DTYPE)
            block = load_matrix(gate_matrix, safe, 0, k0, n0, H, INTER, BK, BN, GATE_H, GATE_I, WIDE, BOX)
            gates = multiply(tile, block, gates, SWAP, PRECISION)
            if GATED:
                block = load_matrix(up_matrix, safe, UP_SHIFT, k0, n0, H, INTER, BK, BN, UP_H, UP_I, WIDE, BOX)
                ups = multiply(tile, block, ups, SWAP, PRECISION)
        gates = upright(gates, SWAP)
        if weights is not None:
            scale = tl.load(weights + pair, mask=ok, other=0.0).to(tl.float32)
            gates *= scale[:, None]
        value = activation(gates, ACTIVATION)
        n = n0 + tl.arange(0, BN)
        keep = ok[:, None] & (n < INTER)[None, :]
        if GATED:
            ups = upright(ups, SWAP)
            if weights is not None:
                ups *= scale[:, None]
            value *= ups
        tl.store(act + r.to(tl.int64)[:, None] * INTER + n[None, :], value.to(DTYPE), mask=keep)
        if preact is not None:
            N: tl.constexpr = 2 * INTER if GATED else INTER
            saved = preact + r.to(tl.int64)[:, None] * N + n[None, :]
            tl.store(saved, gates.to(DTYPE), mask=keep)
            if GATED:
                tl.store(saved + INTER, ups.to(DTYPE), mask=keep)
