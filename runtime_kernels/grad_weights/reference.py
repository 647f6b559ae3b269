"""The gradients of the expert weights, in plain torch. They have the strides of the weights; empty experts get zero.

grad_down[e]    = sum over rows r of e:  grad_y[t_r]^T      act[r]          (act carries the routing weight)
grad_gate_up[e] = sum over rows r of e:  grad_preact[r]^T   x[t_r]          (times w_r where weights are given)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.gate_up.reference import gather_rows
from moe_compiler.runtime_kernels.matmul import matmul
from moe_compiler.runtime_kernels.order.reference import expert_rows
from moe_compiler.runtime_kernels.weights import ExpertWeights, out_size


class WeightGradients:
    """The gradients of one projection while an expert at a time is written; `finish` gives the result.

    Of gate and up in turns the columns of `left` are in turns too.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        like = self._like = ExpertWeights(weights)
        # A list's gradients are the products themselves: writing them into given memory would be one more pass over
        # it. Until an expert has its gradient, its weight stands in the list.
        self.tensors = like.empty_like() if like.is_packed else list(weights)
        self._matrices = self.tensors[0].unbind(0) if like.is_packed else None
        self._strides = torch.empty_like(like.tensors[0], device="meta").stride()[-2:]
        self._transposed = self._strides[0] == 1
        self._missing = set(range(like.experts))

    def add(self, expert: int, left: Tensor, right: Tensor) -> None:
        """left [rows,out], right [rows,in]: the gradient of `expert` is left^T @ right."""
        self._missing.discard(expert)
        if self._transposed:
            left, right = right, left
        if self._matrices is not None:
            matrix = self._matrices[expert]
            matmul(left.t(), right, out=matrix.t() if self._transposed else matrix)
            return
        product = matmul(left.t(), right)
        product = product.t() if self._transposed else product
        # Dimensions of size one have strides that a product need not share.
        self.tensors[expert] = torch.as_strided(product, product.shape, self._strides)

    def finish(self) -> list[Tensor]:
        """The gradients like the weights, zero for the experts that had no rows."""
        for expert in self._missing:
            if self._matrices is None:
                self.tensors[expert] = torch.zeros_like(self.tensors[expert])
            else:
                self._matrices[expert].zero_()
        return self._like.as_given(self.tensors)


def _gradients(left: Tensor, right: Tensor, starts: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """left [S,out], right [S,in] -> left_e^T @ right_e for every expert, shaped like the weights."""
    grads = WeightGradients(weights)
    for expert, begin, end in expert_rows(starts):
        grads.add(expert, left[begin:end], right[begin:end])
    return grads.finish()


def grad_down(
    grad_y: Tensor, act: Tensor, perm: Tensor, starts: Tensor, down: Sequence[Tensor], k: int
) -> list[Tensor]:
    """grad_y [T,H], act [S,I] in sorted row order -> gradients like down."""
    rows = grad_y.to(act.dtype).index_select(0, torch.div(perm, k, rounding_mode="floor"))
    return _gradients(rows, act, starts, down)


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
    """x [T,H], grad_preact [S,N] in sorted row order -> gradients like gate, gradients like up (empty if up is).

    The columns of grad_preact are in the order of the rows of the weights (see `grad_act`).
    """
    rows = gather_rows(x, weights, perm, k)
    size = out_size(gate)
    grad_gate = _gradients(grad_preact[:, :size], rows, starts, gate)
    return grad_gate, _gradients(grad_preact[:, size:], rows, starts, up) if up else []
