"""The gradient of each pair's input row, in plain torch: pairs[p] = grad_preact[r] @ [gate_e; up_e], p = perm[r]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.matmul import matmul
from moe_compiler.runtime_kernels.order.reference import expert_rows
from moe_compiler.runtime_kernels.weights import ExpertWeights


def matmul_grad_rows(grad: Tensor, gate: ExpertWeights, up: ExpertWeights | None, expert: int, out: Tensor) -> None:
    """Write grad @ [gate_e; up_e] into out [rows, H]."""
    matmul(grad[:, : gate.out], gate.matrix(expert), out=out)
    if up is None:
        return
    if out.dtype is torch.float32:
        out.add_(matmul(grad[:, gate.out :], up.matrix(expert)))
    else:
        # The sum of both products is rounded once more, not twice.
        out.addmm_(grad[:, gate.out :], up.matrix(expert))


def grad_pairs(
    grad_preact: Tensor, perm: Tensor, starts: Tensor, gate: Sequence[Tensor], up: Sequence[Tensor], gated: bool
) -> Tensor:
    """grad_preact [S,N] in sorted row order -> pairs [S,H] in pair order; rows of ids out of range are zero."""
    gates, ups = ExpertWeights(gate, "gate"), ExpertWeights(up, "up") if up else None
    rows = grad_preact.new_empty((perm.shape[0], gates.inner))
    for expert, begin, end in expert_rows(starts):
        matmul_grad_rows(grad_preact[begin:end], gates, ups, expert, rows[begin:end])
    rows[int(starts[-1]) :].zero_()
    return torch.empty_like(rows).index_copy_(0, perm.to(torch.int64), rows)
