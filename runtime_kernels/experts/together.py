"""All experts of a block with every step done once for all rows, in plain torch: the CPU plan for few rows an expert.

Then the time goes into reading weights and calling operators, so only the matmuls know experts, and of those as many
as can be are one call too. Rows of ids out of range come last; what is computed for them is never read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.activations import activate, activate_backward, activate_parts, wide
from moe_compiler.runtime_kernels.biases import Biases
from moe_compiler.runtime_kernels.experts.in_turns import in_turns
from moe_compiler.runtime_kernels.experts.rows import SortedRows
from moe_compiler.runtime_kernels.grad_biases.reference import BiasGradients
from moe_compiler.runtime_kernels.grad_pairs.reference import matmul_grad_rows
from moe_compiler.runtime_kernels.grad_weights.reference import WeightGradients
from moe_compiler.runtime_kernels.matmul import matmul_experts, matmul_gradients
from moe_compiler.runtime_kernels.weights import ExpertWeights

Spans = Sequence[tuple[int, int, int]]

# Mean rows an expert up to which this is the faster way; measured on two cores for H = 256 ... 1024.
_ROWS = 64


def pays(rows: SortedRows, gates: ExpertWeights, spans: Spans) -> bool:
    """Whether the experts have so few rows on average; false where no expert has any."""
    return bool(spans) and rows.pairs.shape[0] <= _ROWS * gates.experts


def forward(
    rows: SortedRows,
    gates: ExpertWeights,
    ups: ExpertWeights | None,
    downs: ExpertWeights,
    added: Biases,
    starts: Tensor,
    spans: Spans,
    activation: str,
    gated: bool,
    dtype: torch.dtype,
    save: bool,
) -> tuple[Tensor, Tensor | None]:
    """y [T,H] in dtype, and the pre-activation [S,N] if it is to be saved."""
    inputs = rows.inputs()
    both = in_turns(gates, ups, added)
    up: Tensor | None = None
    if both is not None:
        gate, up = both.halves(matmul_experts(inputs, both.weights, starts, spans, transposed=True, bias=both.bias))
    else:
        gate = matmul_experts(inputs, gates, starts, spans, transposed=True, bias=added.gate)
        if ups is not None:
            up = matmul_experts(inputs, ups, starts, spans, transposed=True, bias=added.up)
    act = activate(gate, activation, gated) if up is None else activate_parts(gate, up, activation)
    out = matmul_experts(act, downs, starts, spans, transposed=True, bias=added.down)
    y = rows.sums(out, spans[-1][2], dtype, weighted=not rows.weight_at_input)
    if not save:
        return y, None
    return y, gate if up is None else torch.cat([gate, up], dim=1)


def backward(
    rows: SortedRows,
    grad_y: Tensor,
    gates: ExpertWeights,
    ups: ExpertWeights | None,
    downs: ExpertWeights,
    added: Biases,
    preact: Tensor,
    starts: Tensor,
    spans: Spans,
    activation: str,
    gated: bool,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """The results of `experts_loop_backward`; grad_y [T,H] is in the dtype of x."""
    need_x, need_weights, need_gate, need_up, need_down, need_gate_bias, need_up_bias, need_down_bias = needs
    known, dtype = spans[-1][2], rows.x.dtype
    compute = wide(dtype)
    at_input = rows.weight_at_input
    grad_out = grad_y.index_select(0, rows.tokens)
    grad_act = matmul_experts(grad_out, downs, starts, spans).to(compute)
    scaled = grad_act if at_input else grad_act * rows.scale
    grad_hidden, act = activate_backward(preact, scaled, activation, gated)
    both = in_turns(gates, ups, added)
    if both is not None and gates.turns:
        grad_hidden = both.joined(grad_hidden)
    grad_x = grad_y.new_empty(0)
    grad_weights = grad_y.new_zeros(rows.weights.numel() if need_weights else 0, dtype=compute)
    if need_weights and not at_input:
        grad_weights[rows.pairs[:known]] = (act * grad_act).sum(1)[:known]
        if added.down is not None:
            for expert, begin, end in spans:
                bias = added.down.vector(expert).to(compute)
                grad_weights[rows.pairs[begin:end]] += grad_out[begin:end].to(compute) @ bias
    grad_biases = BiasGradients(
        added.gate if need_gate_bias else None,
        added.up if need_up_bias else None,
        added.down if need_down_bias else None,
    )
    if grad_biases.wanted:
        for expert, begin, end in spans:
            scale = None if at_input else rows.scale[begin:end]
            grad_biases.add(expert, grad_hidden[begin:end], grad_out[begin:end], scale)
    grad_gate: list[Tensor] = []
    grad_up: list[Tensor] = []
    grad_down: list[Tensor] = []
    if need_down:
        act = act if at_input else act.mul_(rows.scale)
        grad_down = _grad_matrices(downs, grad_out, act.to(dtype), starts, spans)
    if need_gate or need_up:
        inputs = rows.inputs()
        if need_gate:
            grad_gate = _grad_matrices(gates, grad_hidden[:, : gates.out], inputs, starts, spans)
        if need_up and ups is not None:
            grad_up = _grad_matrices(ups, grad_hidden[:, gates.out :], inputs, starts, spans)
    if need_x or (need_weights and at_input):
        if both is None or gates.turns:
            grad_rows = _grad_rows(grad_hidden, gates, ups, starts, spans)
        else:
            grad_rows = matmul_experts(both.joined(grad_hidden), both.weights, starts, spans)
        if need_weights and at_input:
            source = rows.x.index_select(0, rows.tokens)
            grad_weights[rows.pairs[:known]] = (source * grad_rows.to(compute)).sum(1)[:known]
        if need_x:
            grad_x = rows.sums(grad_rows, known, dtype, weighted=at_input)
    return (
        grad_x,
        grad_weights.view(rows.weights.shape) if need_weights else grad_weights,
        grad_gate,
        grad_up,
        grad_down,
        grad_biases.gate,
        grad_biases.up,
        grad_biases.down,
    )


def _grad_rows(grad: Tensor, gates: ExpertWeights, ups: ExpertWeights | None, starts: Tensor, spans: Spans) -> Tensor:
    """grad [S,N] @ [gate_e; up_e] -> [S,H]."""
    if ups is None:
        return matmul_experts(grad, gates, starts, spans)
    if grad.dtype is torch.float32:
        of_gate = matmul_experts(grad[:, : gates.out], gates, starts, spans)
        return of_gate.add_(matmul_experts(grad[:, gates.out :], ups, starts, spans))
    # Each expert's second product is added where it is made: else both would be rounded before their sum is.
    out = grad.new_empty((grad.shape[0], gates.inner))
    for expert, begin, end in spans:
        matmul_grad_rows(grad[begin:end], gates, ups, expert, out[begin:end])
    return out


def _grad_matrices(weights: ExpertWeights, left: Tensor, right: Tensor, starts: Tensor, spans: Spans) -> list[Tensor]:
    """left [S,out], right [S,in] -> left_e^T @ right_e for every expert, shaped like the weights."""
    if weights.is_packed:
        found = matmul_gradients(left, right, starts, weights.tensors[0])
        if found is not None:
            return weights.as_given([found])
    gradients = WeightGradients(weights.tensors)
    for expert, begin, end in spans:
        gradients.add(expert, left[begin:end], right[begin:end])
    return weights.as_given(gradients.finish())
