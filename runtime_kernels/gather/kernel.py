"""Device code that puts each pair's row of x where the row's expert reads it."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_compiler.runtime_kernels.device import trigger, wait


@triton.jit(do_not_specialize=["S"])
def gather_kernel(
    x,
    weights,
    perm,
    rows,
    S,
    X_ROW: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    BR: tl.constexpr,
    BH: tl.constexpr,
    PDL: tl.constexpr,
):
    """rows[r] = x[perm[r] // K], times the pair's routing weight unless weights is None. A program owns BR rows."""
    wait(PDL)
    WIDTH: tl.constexpr = (H + BH - 1) // BH
    r = (tl.program_id(0) // WIDTH) * BR + tl.arange(0, BR)
    h = (tl.program_id(0) % WIDTH) * BH + tl.arange(0, BH)
    pair = tl.load(perm + r, mask=r < S, other=0)
    keep = (r < S)[:, None] & (h < H)[None, :]
    value = tl.load(x + (pair // K).to(tl.int64)[:, None] * X_ROW + h[None, :], mask=keep, other=0.0)
    if weights is not None:
        value = value.to(tl.float32) * tl.load(weights + pair, mask=r < S, other=0.0).to(tl.float32)[:, None]
    trigger(PDL)
    tl.store(rows + r.to(tl.int64)[:, None] * H + h[None, :], value.to(rows.dtype.element_ty), mask=keep)
