"""The gradient through the down projection and the activation, in plain torch.

    dA' = grad_y[t] @ W_down[e]                       (unweighted, fp32)
    with weights (on the output)   grad_act = w * dA',  act output = w * A,
                                   grad_weights[p] = sum_i A * dA' + <grad_y[t], down_bias_e>
    without                        grad_act = dA',  act output = A,  grad_weights [0,k]
    grad_preact = grad_act through f                  (gate before up, or with `turns` both in turns, as their weights)
A is computed again from the saved pre-activation, so nothing of size [S,I] is saved between forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.activations import activate_backward, wide
from moe_compiler.runtime_kernels.biases import biases
from moe_compiler.runtime_kernels.matmul import matmul
from moe_compiler.runtime_kernels.order.reference import expert_rows
from moe_compiler.runtime_kernels.weights import ExpertWeights


def grad_act(
    grad_y: Tensor,
    weights: Tensor | None,
    preact: Tensor,
    perm: Tensor,
    starts: Tensor,
    down: Sequence[Tensor],
    down_bias: Sequence[Tensor] | None,
    k: int,
    activation: str,
    gated: bool,
    turns: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> grad_preact [S,N], act [S,I] in preact's dtype, grad_weights [T,k] fp32 (fp64 for fp64).

    grad_y [T,H] of any float dtype is rounded to preact's. Rows of ids out of range are zero in all three.
    """
    matrices = ExpertWeights(down, "down")
    compute = wide(preact.dtype)
    rows = grad_y.to(preact.dtype).index_select(0, torch.div(perm, k, rounding_mode="floor"))
    grad = preact.new_empty((perm.shape[0], matrices.inner))
    for expert, begin, end in expert_rows(starts):
        matmul(rows[begin:end], matrices.matrix(expert), out=grad[begin:end])
    grad = grad.to(compute)
    used = int(starts[-1])
    grad[used:].zero_()
    if weights is None:
        grad_preact, act = activate_backward(preact, grad, activation, gated)
        grad_preact[used:].zero_()
        act[used:].zero_()
        return _ordered(grad_preact, turns), act.to(preact.dtype), grad.new_empty((0, k))
    pairs = perm.to(torch.int64)
    scale = weights.reshape(-1).index_select(0, pairs).to(compute).unsqueeze(1)
    grad_preact, act = activate_backward(preact, grad * scale, activation, gated)
    grad_weights = grad.new_zeros(perm.shape[0])
    grad_weights[pairs[:used]] = (act[:used] * grad[:used]).sum(1)
    added = biases(down_bias, "down_bias")
    if added is not None:
        for expert, begin, end in expert_rows(starts):
            grad_weights[pairs[begin:end]] += rows[begin:end].to(compute) @ added.vector(expert).to(compute)
    act.mul_(scale)
    grad_preact[used:].zero_()
    act[used:].zero_()
    return _ordered(grad_preact, turns), act.to(preact.dtype), grad_weights.view(weights.shape)


def _ordered(grad_preact: Tensor, turns: bool) -> Tensor:
    """[S, gate | up] as it is, or with its columns in turns."""
    return torch.stack(grad_preact.chunk(2, dim=1), dim=2).flatten(1) if turns else grad_preact
