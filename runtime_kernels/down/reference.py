"""The second expert matmul, in plain torch: pairs[p] = down_e(act[r]) + down_bias_e, p = perm[r], in pair order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.biases import biases, vector
from moe_compiler.runtime_kernels.combine.reference import combine
from moe_compiler.runtime_kernels.matmul import matmul
from moe_compiler.runtime_kernels.order.reference import expert_rows, order
from moe_compiler.runtime_kernels.weights import ExpertWeights


def _pairs(act: Tensor, perm: Tensor, starts: Tensor, weights: ExpertWeights, bias: Sequence[Tensor] | None) -> Tensor:
    added = biases(bias, "down_bias")
    rows = act.new_empty((perm.shape[0], weights.out))
    for expert, begin, end in expert_rows(starts):
        matmul(act[begin:end], weights.matrix(expert).t(), out=rows[begin:end], bias=vector(added, expert))
    rows[int(starts[-1]) :].zero_()
    return torch.empty_like(rows).index_copy_(0, perm.to(torch.int64), rows)


def down(
    act: Tensor, perm: Tensor, starts: Tensor, down: Sequence[Tensor], down_bias: Sequence[Tensor] | None
) -> Tensor:
    """act [S,I] in sorted row order -> pairs [S,H] in pair order; rows of ids out of range are zero."""
    return _pairs(act, perm, starts, ExpertWeights(down, "down"), down_bias)


def down_few(
    act: Tensor,
    ids: Tensor,
    weights: Tensor | None,
    down: Sequence[Tensor],
    down_bias: Sequence[Tensor] | None,
    dtype: torch.dtype,
) -> Tensor:
    """act [S,I] in pair order, ids [T,k] -> y [T,H] in dtype, summed over k. For few tokens: no sort on a device."""
    matrices = ExpertWeights(down, "down")
    perm, starts = order(ids, matrices.experts)
    pairs = _pairs(act.index_select(0, perm), perm, starts, matrices, down_bias)
    return combine(pairs, weights, ids.shape[1], dtype)
