"""All experts of a block in one loop over the experts, in plain torch: the CPU plan, and the oracle of `experts`.

    y[t] = sum_j w[t,j] * down_e( f(gate_e(x_t)) * up_e(x_t) ),   e = ids[t,j]     (each projection with its bias)
The rows of an expert are gathered, pushed through both matmuls and added to the result before the next expert is
touched, so they stay in cache; with few rows an expert `together` is faster. Only the pre-activation is kept, and only
for a backward. Sums run in fp32 (fp64 for fp64).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.activations import activate, activate_backward, activate_parts, wide
from moe_compiler.runtime_kernels.biases import Biases, vector
from moe_compiler.runtime_kernels.experts import together
from moe_compiler.runtime_kernels.experts.in_turns import in_turns
from moe_compiler.runtime_kernels.experts.rows import SortedRows
from moe_compiler.runtime_kernels.gate_up.reference import matmul_gate_up
from moe_compiler.runtime_kernels.grad_biases.reference import BiasGradients
from moe_compiler.runtime_kernels.grad_pairs.reference import matmul_grad_rows
from moe_compiler.runtime_kernels.grad_weights.reference import WeightGradients
from moe_compiler.runtime_kernels.matmul import matmul
from moe_compiler.runtime_kernels.order.reference import expert_rows
from moe_compiler.runtime_kernels.weights import ExpertWeights, preact_size

WEIGHT_AT = ("output", "input")
Gradients = tuple[Tensor, Tensor, list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]


def _forward(
    x: Tensor,
    weights: Tensor,
    gate: Sequence[Tensor],
    up: Sequence[Tensor],
    down: Sequence[Tensor],
    gate_bias: Sequence[Tensor] | None,
    up_bias: Sequence[Tensor] | None,
    down_bias: Sequence[Tensor] | None,
    perm: Tensor,
    starts: Tensor,
    activation: str,
    gated: bool,
    weight_at: str,
    dtype: torch.dtype,
    save: bool,
) -> tuple[Tensor, Tensor | None]:
    """y [T,H] in dtype, and the pre-activation [S,N] if it is to be saved."""
    gates, ups = ExpertWeights(gate, "gate"), ExpertWeights(up, "up") if up else None
    downs = ExpertWeights(down, "down")
    added = Biases.of(gate_bias, up_bias, down_bias)
    rows = SortedRows(x, weights, perm, weight_at)
    spans = list(expert_rows(starts))
    if together.pays(rows, gates, spans):
        return together.forward(rows, gates, ups, downs, added, starts, spans, activation, gated, dtype, save)
    y = x.new_zeros((x.shape[0], downs.out), dtype=wide(x.dtype))
    preact = x.new_empty((perm.shape[0], preact_size(gate, up))) if save else None
    both = in_turns(gates, ups, added)
    for expert, begin, end in spans:
        inputs = rows.inputs(begin, end)
        if both is not None:
            product = matmul(inputs, both.weights.matrix(expert).t(), bias=vector(both.bias, expert))
            halves = both.halves(product)
            if preact is not None:
                torch.cat(halves, dim=1, out=preact[begin:end])
            act = activate_parts(*halves, activation)
        elif preact is not None:
            matmul_gate_up(inputs, gates, ups, added.gate, added.up, expert, preact[begin:end])
            act = activate(preact[begin:end], activation, gated)
        elif ups is not None:
            hidden = matmul(inputs, gates.matrix(expert).t(), bias=vector(added.gate, expert))
            other = matmul(inputs, ups.matrix(expert).t(), bias=vector(added.up, expert))
            act = activate_parts(hidden, other, activation)
        else:
            hidden = matmul(inputs, gates.matrix(expert).t(), bias=vector(added.gate, expert))
            act = activate(hidden, activation, gated)
        out = matmul(act, downs.matrix(expert).t(), bias=vector(added.down, expert)).to(y.dtype)
        if not rows.weight_at_input:
            out.mul_(rows.scale[begin:end])
        y.index_add_(0, rows.tokens[begin:end], out)
    return y.to(dtype), preact


def experts_loop(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate: Sequence[Tensor],
    up: Sequence[Tensor],
    down: Sequence[Tensor],
    gate_bias: Sequence[Tensor] | None,
    up_bias: Sequence[Tensor] | None,
    down_bias: Sequence[Tensor] | None,
    perm: Tensor,
    starts: Tensor,
    activation: str,
    gated: bool,
    weight_at: str,
    dtype: torch.dtype,
) -> Tensor:
    """x [T,H], ids [T,K] (already in perm and starts, not read), weights [T,K] -> y [T,H] in dtype."""
    return _forward(
        x,
        weights,
        gate,
        up,
        down,
        gate_bias,
        up_bias,
        down_bias,
        perm,
        starts,
        activation,
        gated,
        weight_at,
        dtype,
        False,
    )[0]


def experts_loop_saving(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate: Sequence[Tensor],
    up: Sequence[Tensor],
    down: Sequence[Tensor],
    gate_bias: Sequence[Tensor] | None,
    up_bias: Sequence[Tensor] | None,
    down_bias: Sequence[Tensor] | None,
    perm: Tensor,
    starts: Tensor,
    activation: str,
    gated: bool,
    weight_at: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """As experts_loop -> y [T,H], preact [S,N] in sorted row order; rows of ids out of range are zero."""
    y, preact = _forward(
        x,
        weights,
        gate,
        up,
        down,
        gate_bias,
        up_bias,
        down_bias,
        perm,
        starts,
        activation,
        gated,
        weight_at,
        dtype,
        True,
    )
    assert preact is not None
    preact[int(starts[-1]) :].zero_()
    return y, preact


def experts_loop_backward(
    grad_y: Tensor,
    x: Tensor,
    ids: Tensor | None,
    weights: Tensor,
    gate: Sequence[Tensor],
    up: Sequence[Tensor],
    down: Sequence[Tensor],
    gate_bias: Sequence[Tensor] | None,
    up_bias: Sequence[Tensor] | None,
    down_bias: Sequence[Tensor] | None,
    preact: Tensor,
    perm: Tensor,
    starts: Tensor,
    activation: str,
    gated: bool,
    weight_at: str,
    needs: Sequence[bool],
) -> Gradients:
    """-> grad_x [T,H], grad_weights [T,K], lists like gate, up, down and the three biases; `needs` says which.

    What is not needed is an empty tensor or an empty list. Each result has the dtype of what it is the gradient of,
    but grad_weights, which stays in fp32 (fp64 for fp64) as the stages leave it.
    """
    need_x, need_weights, need_gate, need_up, need_down, need_gate_bias, need_up_bias, need_down_bias = needs
    compute = wide(x.dtype)
    added = Biases.of(gate_bias, up_bias, down_bias)
    gates, ups = ExpertWeights(gate, "gate"), ExpertWeights(up, "up") if up else None
    downs = ExpertWeights(down, "down")
    grad_y = grad_y.to(x.dtype)
    spans = list(expert_rows(starts))
    rows = SortedRows(x, weights, perm, weight_at)
    if together.pays(rows, gates, spans):
        return together.backward(
            rows, grad_y, gates, ups, downs, added, preact, starts, spans, activation, gated, needs
        )
    grad_x = x.new_zeros(x.shape, dtype=compute) if need_x else None
    pair_sum = x.new_zeros(perm.shape[0], dtype=compute) if need_weights else None
    grad_gate = WeightGradients(gate) if need_gate else None
    grad_up = WeightGradients(up) if need_up and up else None
    grad_down = WeightGradients(down) if need_down else None
    grad_biases = BiasGradients(
        added.gate if need_gate_bias else None,
        added.up if need_up_bias else None,
        added.down if need_down_bias else None,
    )
    both = in_turns(gates, ups, added)
    need_rows = need_x or (need_weights and rows.weight_at_input)
    for expert, begin, end in spans:
        scale = rows.scale[begin:end]
        grad_out = grad_y.index_select(0, rows.tokens[begin:end])
        grad_act = matmul(grad_out, downs.matrix(expert)).to(compute)
        scaled = grad_act if rows.weight_at_input else grad_act * scale
        grad_hidden, act = activate_backward(preact[begin:end], scaled, activation, gated)
        if both is not None and gates.turns:
            grad_hidden = both.joined(grad_hidden)
        if not rows.weight_at_input:
            if pair_sum is not None:
                pair_sum[rows.pairs[begin:end]] = (act * grad_act).sum(1)
                if added.down is not None:
                    pair_sum[rows.pairs[begin:end]] += grad_out.to(compute) @ added.down.vector(expert).to(compute)
            act.mul_(scale)
        grad_biases.add(expert, grad_hidden, grad_out, None if rows.weight_at_input else scale)
        if grad_down is not None:
            grad_down.add(expert, grad_out, act.to(x.dtype))
        if grad_gate is not None or grad_up is not None:
            inputs = rows.inputs(begin, end)
            if grad_gate is not None:
                grad_gate.add(expert, grad_hidden[:, : gates.out], inputs)
            if grad_up is not None:
                grad_up.add(expert, grad_hidden[:, gates.out :], inputs)
        if not need_rows:
            continue
        if both is not None and not gates.turns:
            grad_rows = matmul(both.joined(grad_hidden), both.weights.matrix(expert)).to(compute)
        else:
            grad_rows = x.new_empty((end - begin, x.shape[1]))
            matmul_grad_rows(grad_hidden, gates, ups, expert, grad_rows)
            grad_rows = grad_rows.to(compute)
        if rows.weight_at_input:
            if pair_sum is not None:
                source = x.index_select(0, rows.tokens[begin:end])
                pair_sum[rows.pairs[begin:end]] = (source * grad_rows).sum(1)
            grad_rows = grad_rows * scale
        if grad_x is not None:
            grad_x.index_add_(0, rows.tokens[begin:end], grad_rows)
    return (
        x.new_empty(0) if grad_x is None else grad_x.to(x.dtype),
        weights.new_empty(0, dtype=compute) if pair_sum is None else pair_sum.view(weights.shape),
        grad_gate.finish() if grad_gate is not None else [],
        grad_up.finish() if grad_up is not None else [],
        grad_down.finish() if grad_down is not None else [],
        grad_biases.gate,
        grad_biases.up,
        grad_biases.down,
    )
