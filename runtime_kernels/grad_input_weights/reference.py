"""The gradient of routing weights that scale the experts' input: <x[t], pairs[p]> for p = t*k + j, in plain torch."""

from __future__ import annotations

from torch import Tensor

from moe_compiler.runtime_kernels.activations import wide


def grad_input_weights(x: Tensor, pairs: Tensor, k: int) -> Tensor:
    """x [T,H], pairs [S,H] (the gradient of each pair's scaled input) -> grad_weights [T,k] fp32 (fp64 for fp64)."""
    compute = wide(x.dtype)
    tokens, size = x.shape
    return (x.to(compute).unsqueeze(1) * pairs.to(compute).view(tokens, k, size)).sum(2)
