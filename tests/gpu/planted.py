"""A kernel with a fault, for what has to find it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def one_too_far(out, SIZE: tl.constexpr):
    """Write SIZE numbers to `out`, which has one fewer."""
    tl.store(out + tl.arange(0, SIZE), tl.zeros((SIZE,), tl.float32))
