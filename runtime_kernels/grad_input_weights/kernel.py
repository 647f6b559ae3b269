"""Device code of the gradient of routing weights that scale the experts' input: one dot product a pair."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_compiler.runtime_kernels.device import trigger, wait


@triton.jit
def grad_input_weights_kernel(
    x, pairs, grad_weights, X_ROW: tl.constexpr, K: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, PDL: tl.constexpr
):
    """grad_weights[p] = <x[p // K], pairs[p]> in fp32, one pair a program."""
    wait(PDL)
    pair = tl.program_id(0).to(tl.int64)
    acc = tl.zeros((BH,), tl.float32)
    for h0 in range(0, H, BH):
        h = h0 + tl.arange(0, BH)
        left = tl.load(x + (pair // K) * X_ROW + h, mask=h < H, other=0.0).to(tl.float32)
        right = tl.load(pairs + pair * H + h, mask=h < H, other=0.0).to(tl.float32)
        acc += left * right
    trigger(PDL)
    tl.store(grad_weights + pair, tl.sum(acc, 0))
