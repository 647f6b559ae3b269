"""The gradients of the expert weights, in plain torch. They have the strides of the weights; empty experts get zero.

grad_down[e]    = sum over rows r of e:  grad_y[t_r]^T      act[r]          (act carries the routing weight)
grad_gate_up[e] = sum over rows r of e:  grad_preact[r]^T   x[t_r]          (times w_r where weights are given)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.gate_up.reference import gather_rows
from moe_compiler.runtime_kernels.matmul import matmul
from moe_compiler.runtime_kernels.weights import ExpertWeights


def _outer(left: Tensor, right: Tensor, bounds: list[int], like: ExpertWeights) -> list[Tensor]:
    """left [S,out], right [S,in] -> left_e^T @ right_e for every expert, shaped like the weights."""
    grads = like.empty_like()
    matrices = ExpertWeights(grads).matrices()
    for expert, (begin, end) in enumerate(pairwise(bounds)):
        if begin == end:
            matrices[expert].zero_()
        else:
            matmul(left[begin:end].t(), right[begin:end], out=matrices[expert])
    return grads


def grad_down(
    grad_y: Tensor, act: Tensor, perm: Tensor, starts: Tensor, down: Sequence[Tensor], k: int
) -> list[Tensor]:
    """grad_y [T,H], act [S,I] in sorted row order -> gradients like down."""
    rows = grad_y.to(act.dtype).index_select(0, torch.div(perm, k, rounding_mode="floor"))
    return _outer(rows, act, starts.tolist(), ExpertWeights(down, "down"))


def grad_gate_up(
    x: Tensor,
    weights: Tensor | None,
    grad_preact: Tensor,
    perm: Tensor,
    starts: Tensor,
    gate: Sequence[Tensor],
    up: Sequence[Tensor],
    k: int,
    gated: bool,
) -> tuple[list[Tensor], list[Tensor]]:
    """x [T,H], grad_preact [S,N] in sorted row order -> gradients like gate, gradients like up (empty if up is)."""
    rows = gather_rows(x, weights, perm, k)
    bounds = starts.tolist()
    gates = ExpertWeights(gate, "gate")
    grad_gate = _outer(grad_preact[:, : gates.out], rows, bounds, gates)
    if not up:
        return grad_gate, []
    return grad_gate, _outer(grad_preact[:, gates.out :], rows, bounds, ExpertWeights(up, "up"))
