"""Device functions that several kernels share: the PDL pair, activations, where a tile and its expert lie, the tile
product.

Every kernel that uses them follows one discipline, which `audit.py` checks in the compiled code:

    wait(PDL)        first statement, straight-line, before any access to memory and before any loop
    trigger(PDL)     after the wait, never before it

Rows are sorted by expert: rows starts[e] .. starts[e+1] belong to expert e, and the rows past starts[E] are those of
ids out of range. They form a last group, "expert" E, which multiplies with nothing, so its results are zero.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def wait(PDL: tl.constexpr):
    """Return once every earlier grid of the stream is complete and visible. Nothing when PDL is off."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def trigger(PDL: tl.constexpr):
    """Let the next grid of the stream start; it waits for our end before it touches memory. Nothing when PDL is off."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def activation(gate, NAME: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """f(min(gate, LIMIT)), fp32; LIMIT 0 is none. NaN stays NaN, as in torch."""
    if LIMIT > 0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
    if NAME == "silu":
        value = gate * tl.sigmoid(gate if ALPHA == 1.0 else ALPHA * gate)
    elif NAME == "gelu":
        value = 0.5 * gate * (1.0 + tl.math.erf(gate * 0.7071067811865476))
    elif NAME == "gelu_tanh":
        value = 0.5 * gate * (1.0 + libdevice.tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)))
    elif NAME == "relu":
        value = tl.where(gate <= 0, 0.0, gate)
    else:
        tl.static_assert(NAME == "relu2", "unknown activation")
        positive = tl.where(gate <= 0, 0.0, gate)
        value = positive * positive
    return value


@triton.jit
def shifted(up, LIMIT: tl.constexpr, SHIFT: tl.constexpr):
    """What the activated gate is multiplied with: up, clamped to -LIMIT .. LIMIT (0: not), plus SHIFT."""
    if LIMIT > 0:
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if SHIFT != 0:
        up += SHIFT
    return up


@triton.jit
def activation_slope(gate, NAME: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """f(min(gate, LIMIT)) and its derivative, fp32."""
    free = gate <= LIMIT
    if LIMIT > 0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
    if NAME == "silu":
        scaled = gate if ALPHA == 1.0 else ALPHA * gate
        chance = tl.sigmoid(scaled)
        value = gate * chance
        slope = chance * (1.0 + scaled * (1.0 - chance))
    elif NAME == "gelu":
        chance = 0.5 * (1.0 + tl.math.erf(gate * 0.7071067811865476))
        value = gate * chance
        slope = chance + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
    elif NAME == "gelu_tanh":
        square = gate * gate
        bend = libdevice.tanh(0.7978845608028654 * gate * (1.0 + 0.044715 * square))
        value = 0.5 * gate * (1.0 + bend)
        slope = 0.5 * (1.0 + bend) + 0.5 * gate * (1.0 - bend * bend) * 0.7978845608028654 * (1.0 + 0.134145 * square)
    elif NAME == "relu":
        value = tl.where(gate <= 0, 0.0, gate)
        slope = tl.where(gate > 0, 1.0, 0.0)
    else:
        tl.static_assert(NAME == "relu2", "unknown activation")
        positive = tl.where(gate <= 0, 0.0, gate)
        value = positive * positive
        slope = 2.0 * positive
    if LIMIT > 0:
        slope = tl.where(free, slope, 0.0)
    return value, slope


@triton.jit
def steps(index, STRIDE: tl.constexpr, SIZE: tl.constexpr):
    """index * STRIDE for an index of at most SIZE: in 64 bits where 32 may not hold it, and only there."""
    if SIZE * STRIDE < 2147483648:
        offset = index * STRIDE
    else:
        offset = tl.cast(index, tl.int64) * STRIDE
    return offset


@triton.jit
def expert_matrix(base, expert, STRIDE: tl.constexpr, TABLE: tl.constexpr, ALIGNED: tl.constexpr, DTYPE: tl.constexpr):
    """Pointer to the first element of an expert's matrix: base + expert * STRIDE, or base[expert] of a table."""
    if TABLE:
        matrix = tl.load(base + expert).to(tl.pointer_type(DTYPE))
        if ALIGNED:
            matrix = tl.multiple_of(matrix, 16)
    else:
        matrix = base + expert.to(tl.int64) * STRIDE
    return matrix


@triton.jit
def bias_row(
    base, expert, at, keep, STRIDE_E: tl.constexpr, STRIDE: tl.constexpr, TABLE: tl.constexpr, DTYPE: tl.constexpr
):
    """The numbers `at` of an expert's bias where `keep`, else zero; fp32."""
    vector = expert_matrix(base, expert, STRIDE_E, TABLE, False, DTYPE)
    return tl.load(vector + at.to(tl.int64) * STRIDE, mask=keep, other=0.0).to(tl.float32)


@triton.jit
def write_table_kernel(table, addresses, COUNT: tl.constexpr):
    """table[i] = addresses[i], int64; the addresses come by value. Launched without PDL only: it does not wait."""
    for i in tl.static_range(COUNT):
        tl.store(table + i, addresses[i])


@triton.jit
def expert_tile(starts, slot, S, E: tl.constexpr, E_POW2: tl.constexpr, ROWS: tl.constexpr):
    """The slot-th tile of ROWS rows, counting the experts' tiles in order: (expert, first row, end row of the expert).

    expert is E for the rows of no expert; the first row is at least the end row where there is no such tile.
    """
    e = tl.arange(0, E_POW2)
    begin = tl.load(starts + e, mask=e < E, other=0)
    end = tl.load(starts + 1 + e, mask=e < E, other=0)
    upto = tl.cumsum((end - begin + ROWS - 1) // ROWS, 0)
    # Padding experts repeat the total, so they count as passed only when every expert is.
    expert = tl.minimum(tl.sum((upto <= slot).to(tl.int32), 0), E)
    passed = tl.max(tl.where(upto <= slot, upto, 0), 0)
    first = tl.load(starts + expert) + (slot - passed) * ROWS
    last = tl.load(starts + tl.minimum(expert + 1, E))
    return expert, first, tl.where(expert < E, last, S)


@triton.jit
def tile_of_program(program, tiles, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """(row tile, column tile) of a program: GROUP row tiles walk over all WIDTH column tiles together, to share L2."""
    group = program // (GROUP * WIDTH)
    inside = program % (GROUP * WIDTH)
    height = tl.minimum(tiles - group * GROUP, GROUP)
    return group * GROUP + inside % height, inside // height


@triton.jit
def load_rows(rows, rows_ok, at, K: tl.constexpr, WHOLE: tl.constexpr, DTYPE: tl.constexpr):
    """The columns `at` of a row-major operand, given a pointer to each row: [rows, at]; zero outside."""
    if WHOLE:
        tile = tl.load(rows[:, None] + at[None, :], mask=rows_ok[:, None], other=0.0)
    else:
        tile = tl.load(rows[:, None] + at[None, :], mask=rows_ok[:, None] & (at < K)[None, :], other=0.0)
    return tile.to(DTYPE)


@triton.jit
def load_matrix(
    matrix,
    expert,
    shift: tl.constexpr,
    k0,
    n0,
    K: tl.constexpr,
    N: tl.constexpr,
    BK: tl.constexpr,
    BN: tl.constexpr,
    STRIDE_K: tl.constexpr,
    STRIDE_N: tl.constexpr,
    WIDE: tl.constexpr,
    BOX: tl.constexpr,
):
    """The tile [BK, BN] at (k0, n0) of an expert's matrix seen as [K, N]; zero outside of it where it matters.

    BOX == 0: `matrix` points to the expert's first element; WIDE says that offsets inside pass 32 bits.
    BOX > 0: `matrix` is a tensor descriptor over the stored rows of all experts, BOX rows an expert, and the columns
    n of this matrix lie `shift` further. A tile may reach past N, in columns that are not stored; BK divides K then.
    """
    if BOX > 0:
        if STRIDE_K == 1:
            tile = matrix.load([expert * BOX + shift + n0, k0]).T
        else:
            tile = matrix.load([expert * BOX + k0, shift + n0])
    else:
        k = tl.arange(0, BK)
        n = n0 + tl.arange(0, BN)
        if WIDE:
            origin = matrix + k0.to(tl.int64) * STRIDE_K
            at = k.to(tl.int64)[:, None] * STRIDE_K + n.to(tl.int64)[None, :] * STRIDE_N
        else:
            origin = matrix + k0 * STRIDE_K
            at = k[:, None] * STRIDE_K + n[None, :] * STRIDE_N
        if K % BK == 0 and N % BN == 0:
            tile = tl.load(origin + at)
        elif K % BK == 0:
            tile = tl.load(origin + at, mask=(n < N)[None, :], other=0.0)
        else:
            tile = tl.load(origin + at, mask=(k < K - k0)[:, None] & (n < N)[None, :], other=0.0)
    return tile


@triton.jit
def multiply(rows, matrix, acc, SWAP: tl.constexpr, PRECISION: tl.constexpr):
    """acc + rows [BM,BK] @ matrix [BK,BN] in fp32, or its transpose when SWAP (acc is then [BN,BM]).

    Swapped, the matrix fills the wide side of the tensor core, which pays where the rows are few.
    """
    if SWAP:
        acc = tl.dot(tl.trans(matrix), tl.trans(rows), acc, input_precision=PRECISION)
    else:
        acc = tl.dot(rows, matrix, acc, input_precision=PRECISION)
    return acc


@triton.jit
def zero_tile(BM: tl.constexpr, BN: tl.constexpr, SWAP: tl.constexpr):
    """An empty accumulator for `multiply`."""
    if SWAP:
        acc = tl.zeros((BN, BM), tl.float32)
    else:
        acc = tl.zeros((BM, BN), tl.float32)
    return acc


@triton.jit
def upright(acc, SWAP: tl.constexpr):
    """The accumulator of `multiply` as [BM, BN]."""
    if SWAP:
        acc = tl.trans(acc)
    return acc


@triton.jit
def accumulate(
    acc,
    rows,
    rows_ok,
    matrix,
    expert,
    depth,
    n0,
    K: tl.constexpr,
    N: tl.constexpr,
    BK: tl.constexpr,
    BN: tl.constexpr,
    STRIDE_K: tl.constexpr,
    STRIDE_N: tl.constexpr,
    WIDE: tl.constexpr,
    BOX: tl.constexpr,
    SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """acc + rows @ matrix over k in [0, depth), where depth is K, or 0 for the rows of no expert."""
    for k0 in range(0, depth, BK):
        tile = load_rows(rows, rows_ok, k0 + tl.arange(0, BK), K, K % BK == 0, DTYPE)
        block = load_matrix(matrix, expert, 0, k0, n0, K, N, BK, BN, STRIDE_K, STRIDE_N, WIDE, BOX)
        acc = multiply(tile, block, acc, SWAP, PRECISION)
    return acc


@triton.jit
def dot_step(
    acc,
    matrix,
    row,
    n,
    k0,
    K: tl.constexpr,
    N: tl.constexpr,
    BK: tl.constexpr,
    BN: tl.constexpr,
    STRIDE_N: tl.constexpr,
    STRIDE_K: tl.constexpr,
    WIDE: tl.constexpr,
):
    """acc [BN,BK] + matrix[n, k0 : k0+BK] * row[k0 : k0+BK], in fp32."""
    k = k0 + tl.arange(0, BK)
    if WIDE:
        at = n.to(tl.int64)[:, None] * STRIDE_N + k.to(tl.int64)[None, :] * STRIDE_K
    else:
        at = n[:, None] * STRIDE_N + k[None, :] * STRIDE_K
    if K % BK == 0 and N % BN == 0:
        values = tl.load(row + k).to(tl.float32)
        tile = tl.load(matrix + at, eviction_policy="evict_first")
    else:
        values = tl.load(row + k, mask=k < K, other=0.0).to(tl.float32)
        tile = tl.load(matrix + at, mask=(n < N)[:, None] & (k < K)[None, :], other=0.0, eviction_policy="evict_first")
    return acc + tile.to(tl.float32) * values[None, :]
