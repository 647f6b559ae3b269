"""The first expert matmuls and the activation, in plain torch.

    row r:  t = perm[r] // k,  h = gate_e(x_t) + gate_bias_e, u = up_e(x_t) + up_bias_e,  act[r] = f(h) * u
`weights` are given only when the routing weight scales the expert's input; x_t is then rounded to the compute dtype
after the product. Rows past starts[E] (ids out of range) are zero here and unspecified on a device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.activations import activate, wide
from moe_compiler.runtime_kernels.biases import ExpertBiases, biases, vector
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


def matmul_gate_up(
    rows: Tensor,
    gate: ExpertWeights,
    up: ExpertWeights | None,
    gate_bias: ExpertBiases | None,
    up_bias: ExpertBiases | None,
    expert: int,
    out: Tensor,
) -> None:
    """Write rows @ [gate_e; up_e]^T (+ biases) into out [rows, N], gate before up."""
    if gate.turns:
        product = matmul(rows, gate.matrix(expert).t(), bias=vector(gate_bias, expert))
        torch.cat([product[:, ::2], product[:, 1::2]], dim=1, out=out)
        return
    left = out if up is None else out[:, : gate.out]
    matmul(rows, gate.matrix(expert).t(), out=left, bias=vector(gate_bias, expert))
    if up is not None:
        matmul(rows, up.matrix(expert).t(), out=out[:, gate.out :], bias=vector(up_bias, expert))


def gate_up(
    x: Tensor,
    weights: Tensor | None,
    perm: Tensor,
    starts: Tensor,
    gate: Sequence[Tensor],
    up: Sequence[Tensor],
    gate_bias: Sequence[Tensor] | None,
    up_bias: Sequence[Tensor] | None,
    k: int,
    activation: str,
    gated: bool,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """-> act [S,I], preact [S,N] ([0,N] when not save), both in the dtype of x, in sorted row order."""
    size = preact_size(gate, up)
    gates, ups = ExpertWeights(gate, "gate"), ExpertWeights(up, "up") if up else None
    gate_biases, up_biases = biases(gate_bias, "gate_bias"), biases(up_bias, "up_bias")
    preact = x.new_empty((perm.shape[0], size))
    rows = gather_rows(x, weights, perm, k)
    for expert, begin, end in expert_rows(starts):
        matmul_gate_up(rows[begin:end], gates, ups, gate_biases, up_biases, expert, preact[begin:end])
    used = int(starts[-1])
    preact[used:].zero_()
    act = activate(preact, activation, gated)
    act[used:].zero_()
    return act, preact if save else x.new_empty((0, size))


def gate_up_few(
    x: Tensor,
    weights: Tensor | None,
    ids: Tensor,
    gate: Sequence[Tensor],
    up: Sequence[Tensor],
    gate_bias: Sequence[Tensor] | None,
    up_bias: Sequence[Tensor] | None,
    activation: str,
    gated: bool,
) -> Tensor:
    """-> act [S,I] in pair order; rows of ids out of range are zero. For few tokens: a device does not sort them."""
    gates = ExpertWeights(gate, "gate")
    perm, starts = order(ids, gates.experts)
    k = ids.shape[1]
    act, _ = gate_up(x, weights, perm, starts, gate, up, gate_bias, up_bias, k, activation, gated, False)
    return torch.empty_like(act).index_copy_(0, perm.to(torch.int64), act)
