"""The matrix product of the references.

For fp32 on the CPU it calls oneDNN, which torch ships but uses for fp32 only in compiled graphs: on processors where
MKL does not use AVX-512 it takes half the time of torch.mm, and a fifth for products over one or two rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _find_onednn() -> torch._ops.OpOverload | None:
    # A private operator of torch (Inductor's fp32 linear). Where a build lacks it, torch.mm does the work.
    packet = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
    return getattr(packet, "default", None)


_onednn_linear = _find_onednn()
# With right operands of at most this many elements torch.mm is through before oneDNN has begun ...
_SMALL = 1 << 16
# ... and where the result goes into given memory (weight gradients) it beats oneDNN's copy up to this many products.
_SMALL_INTO = 1 << 21


def matmul(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """left [M,L] @ right [L,N] -> [M,N], into `out` (any strides) where given. Accumulates in fp32, fp64 for fp64."""
    large = right.numel() > _SMALL if out is None else left.shape[0] * right.numel() > _SMALL_INTO
    if large and left.dtype is torch.float32 and left.is_cpu and _onednn_linear is not None:
        result = _onednn_linear(left, right.t(), None, "none", [], "")
        return result if out is None else out.copy_(result)
    return torch.mm(left, right) if out is None else torch.mm(left, right, out=out)
