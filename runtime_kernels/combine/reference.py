"""The weighted sum over a token's experts, in plain torch: y[t] = sum_j w[t,j] * pairs[t*k + j], j in order, fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.activations import wide


def combine(pairs: Tensor, weights: Tensor | None, k: int, dtype: torch.dtype) -> Tensor:
    """pairs [S,H], weights [T,k] or None (a plain sum) -> y [T,H] in dtype, rounded once."""
    size = pairs.shape[1]
    pairs = pairs.view(-1, k, size) if pairs.shape[0] else pairs.new_empty((0, k, size))
    compute = wide(pairs.dtype)
    if weights is None:
        y = pairs[:, 0].to(compute, copy=True, memory_format=torch.contiguous_format)
        for j in range(1, k):
            y.add_(pairs[:, j])
        return y.to(dtype)
    scale = weights.to(compute).unsqueeze(2)
    y = pairs[:, 0].to(compute) * scale[:, 0]
    for j in range(1, k):
        y.addcmul_(pairs[:, j].to(compute), scale[:, j])
    return y.to(dtype)
