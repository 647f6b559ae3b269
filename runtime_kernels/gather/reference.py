"""The row of each (token, expert) pair, in sorted row order, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.activations import wide


def gather(x: Tensor, weights: Tensor | None, perm: Tensor, k: int) -> Tensor:
    """x [T,H] -> rows [len(perm), H]: x[perm[r] // k], times its routing weight where weights [T,k] are given."""
    rows = x.index_select(0, torch.div(perm, k, rounding_mode="floor"))
    if weights is None:
        return rows
    scale = weights.reshape(-1).index_select(0, perm).to(wide(x.dtype)).unsqueeze(1)
    return (rows.to(scale.dtype) * scale).to(x.dtype)
