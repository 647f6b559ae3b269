"""Device code of the weighted sum over a token's experts: K neighbouring rows, summed in order in fp32."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_compiler.runtime_kernels.device import trigger, wait


@triton.jit
def combine_kernel(pairs, weights, y, K: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, PDL: tl.constexpr):
    """y[t] = sum_j weights[t,j] * pairs[t*K + j], or the plain sum without weights."""
    wait(PDL)
    WIDTH: tl.constexpr = (H + BH - 1) // BH
    token = (tl.program_id(0) // WIDTH).to(tl.int64)
    h = (tl.program_id(0) % WIDTH) * BH + tl.arange(0, BH)
    acc = tl.zeros((BH,), tl.float32)
    for j in tl.static_range(K):
        row = tl.load(pairs + (token * K + j) * H + h, mask=h < H, other=0.0).to(tl.float32)
        if weights is None:
            acc += row
        else:
            acc += row * tl.load(weights + token * K + j).to(tl.float32)
    trigger(PDL)
    tl.store(y + token * H + h, acc.to(y.dtype.element_ty), mask=h < H)
