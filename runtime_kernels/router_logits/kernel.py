"""Device code of the router's matmul, a narrow one: as many columns as there are experts.

It is a kernel of the chain rather than a library's so that the choice of experts can be launched behind it
programmatically, and so that a block is one call on the host. With a few tokens the time is that of reading the
router's weights once, by as many programs as it takes (`router_logits_few_kernel`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_compiler.runtime_kernels.device import dot_step, load_matrix, load_rows, multiply, trigger, wait, zero_tile


@triton.jit(do_not_specialize=["T"])
def router_logits_kernel(
    x,
    router,
    bias,
    logits,
    T,
    X_ROW: tl.constexpr,
    ROUTER_H: tl.constexpr,
    ROUTER_E: tl.constexpr,
    BIAS: tl.constexpr,
    WIDE: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """logits[t] = x[t] @ router + bias: BM tokens and BN experts a program, summed and rounded once in fp32."""
    wait(PDL)
    DTYPE: tl.constexpr = x.dtype.element_ty
    WIDTH: tl.constexpr = (E + BN - 1) // BN
    column = (tl.program_id(0) % WIDTH) * BN
    t = (tl.program_id(0) // WIDTH) * BM + tl.arange(0, BM)
    ok = t < T
    rows = x + t.to(tl.int64) * X_ROW
    acc = zero_tile(BM, BN, False)
    for k0 in range(0, H, BK):
        tile = load_rows(rows, ok, k0 + tl.arange(0, BK), H, H % BK == 0, DTYPE)
        block = load_matrix(router, 0, 0, k0, column, H, E, BK, BN, ROUTER_H, ROUTER_E, WIDE, 0)
        acc = multiply(tile, block, acc, False, PRECISION)
    trigger(PDL)
    e = column + tl.arange(0, BN)
    if bias is not None:
        acc += tl.load(bias + e.to(tl.int64) * BIAS, mask=e < E, other=0.0).to(tl.float32)[None, :]
    out = logits + t.to(tl.int64)[:, None] * E + e[None, :]
    tl.store(out, acc.to(logits.dtype.element_ty), mask=ok[:, None] & (e < E)[None, :])


@triton.jit
def router_logits_few_kernel(
    x,
    router,
    bias,
    logits,
    X_ROW: tl.constexpr,
    ROUTER_H: tl.constexpr,
    ROUTER_E: tl.constexpr,
    BIAS: tl.constexpr,
    WIDE: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `router_logits_kernel`: one token and BN experts a program, without the tensor cores."""
    wait(PDL)
    WIDTH: tl.constexpr = (E + BN - 1) // BN
    token = (tl.program_id(0) // WIDTH).to(tl.int64)
    e = (tl.program_id(0) % WIDTH) * BN + tl.arange(0, BN)
    row = x + token * X_ROW
    acc = tl.zeros((BN, BK), tl.float32)
    for k0 in tl.static_range(0, H, BK):
        acc = dot_step(acc, router, row, e, k0, H, E, BK, BN, ROUTER_E, ROUTER_H, WIDE)
    trigger(PDL)
    total = tl.sum(acc, 1)
    if bias is not None:
        total += tl.load(bias + e.to(tl.int64) * BIAS, mask=e < E, other=0.0).to(tl.float32)
    tl.store(logits + token * E + e, total.to(logits.dtype.element_ty), mask=e < E)
