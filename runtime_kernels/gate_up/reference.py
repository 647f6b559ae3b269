"""The first expert matmuls and the activation, in plain torch.

    row r:  t = perm[r] // k,  h = gate_e(x_t), u = up_e(x_t),  act[r] = f(h) * u
`weights` are given only when the routing weight scales the expert's input; x_t is then rounded to the compute dtype
after the product. Rows past starts[E] (ids out of range) are zero here and unspecified on a device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.activations import activate, wide
from moe_compiler.runtime_kernels.matmul import matmul
from moe_compiler.runtime_kernels.order.reference import expert_rows, order
from moe_compiler.runtime_kernels.weights import ExpertWeights, preact_size


def gather_rows(x: Tensor, weights: Tensor | None, pairs: Tensor, k: int) -> Tensor:
    """x [T,H] -> the row of each pair [len(pairs), H], times its routing weight where weights [T,k] are given."""
    rows = x.index_select(0, torch.div(pairs, k, rounding_mode="floor"))
    if weights is None:
        return rows
    scale = weights.reshape(-1).index_select(0, pairs).to(wide(x.dtype)).unsqueeze(1)
    return (rows.to(scale.dtype) * scale).to(x.dtype)


def matmul_gate_up(rows: Tensor, gate: ExpertWeights, up: ExpertWeights | None, expert: int, out: Tensor) -> None:
    """Write rows @ [gate_e; up_e]^T into out [rows, N]."""
    if up is None:
        matmul(rows, gate.matrix(expert).t(), out=out)
        return
    matmul(rows, gate.matrix(expert).t(), out=out[:, : gate.out])
    matmul(rows, up.matrix(expert).t(), out=out[:, gate.out :])


def gate_up(
    x: Tensor,
    weights: Tensor | None,
    perm: Tensor,
    starts: Tensor,
    gate: Sequence[Tensor],
    up: Sequence[Tensor],
    k: int,
    activation: str,
    gated: bool,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """-> act [S,I], preact [S,N] ([0,N] when not save), both in the dtype of x, in sorted row order."""
    size = preact_size(gate, up)
    gates, ups = ExpertWeights(gate, "gate"), ExpertWeights(up, "up") if up else None
    preact = x.new_empty((perm.shape[0], size))
    rows = gather_rows(x, weights, perm, k)
    for expert, begin, end in expert_rows(starts):
        matmul_gate_up(rows[begin:end], gates, ups, expert, preact[begin:end])
    preact[int(starts[-1]) :].zero_()
    return activate(preact, activation, gated), preact if save else x.new_empty((0, size))


def gate_up_few(
    x: Tensor,
    weights: Tensor | None,
    ids: Tensor,
    gate: Sequence[Tensor],
    up: Sequence[Tensor],
    activation: str,
    gated: bool,
) -> Tensor:
    """-> act [S,I] in pair order; rows of ids out of range are zero. For few tokens: a device does not sort them."""
    gates = ExpertWeights(gate, "gate")
    perm, starts = order(ids, gates.experts)
    act, _ = gate_up(x, weights, perm, starts, gate, up, ids.shape[1], activation, gated, False)
    return torch.empty_like(act).index_copy_(0, perm.to(torch.int64), act)
