"""Device code of the gradients of the expert weights: per expert a product over its rows.

One side of the product is kept in sorted row order ("ordered"), the other is gathered from token rows in the load
("tokens"). A program owns a tile of one expert's gradient, BT columns of tokens by BO columns of ordered, and runs
over the rows of that expert. Experts without rows run no step and write zeros. The loops are short (an expert has few
hundred rows), so tiles are small enough for several programs a multiprocessor: one computes while others start or
store.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_compiler.runtime_kernels.device import expert_matrix, load_rows, tile_of_program, trigger, wait


@triton.jit
def outer_product(tokens, ordered, acc, TOKENS_FIRST: tl.constexpr, PRECISION: tl.constexpr):
    """acc + tokens [BK,BT]^T @ ordered [BK,BO], or its transpose."""
    if TOKENS_FIRST:
        acc = tl.dot(tl.trans(tokens), ordered, acc, input_precision=PRECISION)
    else:
        acc = tl.dot(tl.trans(ordered), tokens, acc, input_precision=PRECISION)
    return acc


@triton.jit
def empty_product(BT: tl.constexpr, BO: tl.constexpr, TOKENS_FIRST: tl.constexpr):
    """An empty accumulator for `outer_product`."""
    if TOKENS_FIRST:
        acc = tl.zeros((BT, BO), tl.float32)
    else:
        acc = tl.zeros((BO, BT), tl.float32)
    return acc


@triton.jit
def store_product(
    out,
    acc,
    t,
    o,
    T_SIZE: tl.constexpr,
    O_SIZE: tl.constexpr,
    STRIDE_T: tl.constexpr,
    STRIDE_O: tl.constexpr,
    WIDE: tl.constexpr,
    TOKENS_FIRST: tl.constexpr,
):
    """Store an accumulator of `outer_product` at the columns t of tokens and o of ordered."""
    if WIDE:
        t = t.to(tl.int64)
        o = o.to(tl.int64)
    if TOKENS_FIRST:
        at = t[:, None] * STRIDE_T + o[None, :] * STRIDE_O
        keep = (t < T_SIZE)[:, None] & (o < O_SIZE)[None, :]
    else:
        at = o[:, None] * STRIDE_O + t[None, :] * STRIDE_T
        keep = (o < O_SIZE)[:, None] & (t < T_SIZE)[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=keep)


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
    T_SIZE: tl.constexpr,
    O_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    FROM: tl.constexpr,
    PART_E: tl.constexpr,
    STRIDE_T: tl.constexpr,
    STRIDE_O: tl.constexpr,
    TABLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    TOKENS_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
    BT: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """part_e = the sum over the rows r of e of the outer product of tokens[perm[r] // K] and ordered[r, its columns].

    Part p of an expert (of PARTS) belongs to the O_SIZE columns of ordered from FROM + p * O_SIZE; both have the same
    strides. TOKENS_FIRST: the columns of tokens are the rows of the matrices, else the columns of ordered are.
    weights [T,K], where given, scale the token rows, which are then rounded to the data type.
    """
    wait(PDL)
    HEIGHT: tl.constexpr = (T_SIZE + BT - 1) // BT
    WIDTH: tl.constexpr = (O_SIZE + BO - 1) // BO
    DTYPE: tl.constexpr = ordered.dtype.element_ty
    matrices = tl.program_id(0) // (HEIGHT * WIDTH)
    expert = matrices // PARTS
    part = matrices % PARTS
    row, column = tile_of_program(tl.program_id(0) % (HEIGHT * WIDTH), HEIGHT, WIDTH, GROUP)
    begin = tl.load(starts + expert)
    end = tl.load(starts + expert + 1)
    t = row * BT + tl.arange(0, BT)
    o = column * BO + tl.arange(0, BO)
    acc = empty_product(BT, BO, TOKENS_FIRST)
    for r0 in range(begin, end, BK):
        r = r0 + tl.arange(0, BK)
        ok = r < end
        pair = tl.load(perm + r, mask=ok, other=0)
        token_rows = tokens + (pair // K).to(tl.int64) * TOKEN_ROW
        ordered_rows = ordered + r.to(tl.int64) * ORDERED_ROW + (FROM + part.to(tl.int64) * O_SIZE)
        left = load_rows(token_rows, ok, t, T_SIZE, T_SIZE % BT == 0, DTYPE)
        if weights is not None:
            scale = tl.load(weights + pair, mask=ok, other=0.0).to(tl.float32)
            left = (left.to(tl.float32) * scale[:, None]).to(DTYPE)
        right = load_rows(ordered_rows, ok, o, O_SIZE, O_SIZE % BO == 0, DTYPE)
        acc = outer_product(left, right, acc, TOKENS_FIRST, PRECISION)
    trigger(PDL)
    if PARTS == 2:
        if part == 1:
            out = expert_matrix(second_part, expert, PART_E, TABLE, ALIGNED, DTYPE)
        else:
            out = expert_matrix(first_part, expert, PART_E, TABLE, ALIGNED, DTYPE)
    else:
        out = expert_matrix(first_part, expert, PART_E, TABLE, ALIGNED, DTYPE)
    store_product(out, acc, t, o, T_SIZE, O_SIZE, STRIDE_T, STRIDE_O, WIDE, TOKENS_FIRST)
