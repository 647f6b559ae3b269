"""All experts of a block in one loop over the experts, in plain torch: the CPU plan, and the oracle of `experts`.

    y[t] = sum_j w[t,j] * down_e( f(gate_e(x_t)) * up_e(x_t) ),   e = ids[t,j]
With many rows an expert, its rows are gathered, pushed through both matmuls and added to the result before the next
expert is touched, so they stay in cache. With few rows the time goes into reading weights and calling operators:
then only the two matmuls are done an expert, and everything else once for all rows. Only the pre-activation is kept,
and only for a backward. Sums run in fp32 (fp64 for fp64).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.activations import activate, activate_backward, activate_parts, wide
from moe_compiler.runtime_kernels.gate_up.reference import matmul_gate_up
from moe_compiler.runtime_kernels.grad_pairs.reference import matmul_grad_rows
from moe_compiler.runtime_kernels.grad_weights.reference import WeightGradients
from moe_compiler.runtime_kernels.matmul import matmul
from moe_compiler.runtime_kernels.order.reference import expert_rows
from moe_compiler.runtime_kernels.weights import ExpertWeights, preact_size

WEIGHT_AT = ("output", "input")

# Mean rows an expert up to which all rows are handled together; measured on two cores for H = 256 ... 1024.
_TOGETHER = 64


class _Rows:
    """Which token and which routing weight belong to each row, and the rows of x themselves."""

    def __init__(self, x: Tensor, weights: Tensor, perm: Tensor, weight_at: str) -> None:
        self.tokens = torch.div(perm, weights.shape[1], rounding_mode="floor")
        self.scale = weights.reshape(-1).index_select(0, perm).to(wide(x.dtype)).unsqueeze(1)
        self.x = x
        self.weight_at_input = weight_at == "input"

    def inputs(self, begin: int, end: int) -> Tensor:
        """What the first matmul sees."""
        rows = self.x.index_select(0, self.tokens[begin:end])
        if self.weight_at_input:
            rows = (rows.to(self.scale.dtype) * self.scale[begin:end]).to(self.x.dtype)
        return rows


def _forward(
    x: Tensor,
    weights: Tensor,
    gate: Sequence[Tensor],
    up: Sequence[Tensor],
    down: Sequence[Tensor],
    perm: Tensor,
    starts: Tensor,
    activation: str,
    gated: bool,
    weight_at: str,
    dtype: torch.dtype,
    preact: Tensor | None,
) -> Tensor:
    gates, ups = ExpertWeights(gate, "gate"), ExpertWeights(up, "up") if up else None
    downs = ExpertWeights(down, "down")
    rows = _Rows(x, weights, perm, weight_at)
    if perm.shape[0] <= _TOGETHER * gates.experts:
        return _forward_together(rows, gates, ups, downs, perm, starts, activation, gated, preact).to(dtype)
    y = x.new_zeros((x.shape[0], downs.out), dtype=wide(x.dtype))
    for expert, begin, end in expert_rows(starts):
        inputs = rows.inputs(begin, end)
        if preact is not None:
            matmul_gate_up(inputs, gates, ups, expert, preact[begin:end])
            act = activate(preact[begin:end], activation, gated)
        elif ups is not None:
            hidden = matmul(inputs, gates.matrix(expert).t())
            act = activate_parts(hidden, matmul(inputs, ups.matrix(expert).t()), activation)
        else:
            act = activate(matmul(inputs, gates.matrix(expert).t()), activation, gated)
        out = matmul(act, downs.matrix(expert).t()).to(y.dtype)
        if not rows.weight_at_input:
            out.mul_(rows.scale[begin:end])
        y.index_add_(0, rows.tokens[begin:end], out)
    return y.to(dtype)


def _forward_together(
    rows: _Rows,
    gates: ExpertWeights,
    ups: ExpertWeights | None,
    downs: ExpertWeights,
    perm: Tensor,
    starts: Tensor,
    activation: str,
    gated: bool,
    preact: Tensor | None,
) -> Tensor:
    """y [T,H] in the wide dtype: two matmuls an expert, gather, activation and weighted sum once for all rows."""
    spans = list(expert_rows(starts))
    pairs, tokens = perm.shape[0], rows.x.shape[0]
    if not spans:
        return rows.x.new_zeros((tokens, downs.out), dtype=rows.scale.dtype)
    known = spans[-1][2]
    inputs = rows.inputs(0, known)
    hidden = _products(inputs, gates, spans, transposed=True)
    up = _products(inputs, ups, spans, transposed=True) if ups is not None else None
    if preact is not None:
        preact[:known, : gates.out] = hidden
        if up is not None:
            preact[:known, gates.out :] = up
    act = activate(hidden, activation, gated) if ups is None else activate_parts(hidden, up, activation)
    out = _products(act, downs, spans, transposed=True).to(rows.scale.dtype)
    if not rows.weight_at_input:
        out.mul_(rows.scale[:known])
    # Pairs of ids out of range have no row: they stay zero.
    home = out.new_empty((pairs, downs.out)) if known == pairs else out.new_zeros((pairs, downs.out))
    home.index_copy_(0, perm[:known].to(torch.int64), out)
    return home.view(tokens, -1, downs.out).sum(1)


def experts_loop(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate: Sequence[Tensor],
    up: Sequence[Tensor],
    down: Sequence[Tensor],
    perm: Tensor,
    starts: Tensor,
    activation: str,
    gated: bool,
    weight_at: str,
    dtype: torch.dtype,
) -> Tensor:
    """x [T,H], ids [T,K] (already in perm and starts, not read), weights [T,K] -> y [T,H] in dtype."""
    return _forward(x, weights, gate, up, down, perm, starts, activation, gated, weight_at, dtype, None)


def experts_loop_saving(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate: Sequence[Tensor],
    up: Sequence[Tensor],
    down: Sequence[Tensor],
    perm: Tensor,
    starts: Tensor,
    activation: str,
    gated: bool,
    weight_at: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """As experts_loop -> y [T,H], preact [S,N] in sorted row order; rows of ids out of range are zero."""
    preact = x.new_empty((perm.shape[0], preact_size(gate, up)))
    y = _forward(x, weights, gate, up, down, perm, starts, activation, gated, weight_at, dtype, preact)
    preact[int(starts[-1]) :].zero_()
    return y, preact


def _products(
    rows: Tensor, weights: ExpertWeights, spans: Sequence[tuple[int, int, int]], *, transposed: bool = False
) -> Tensor:
    """rows [R,out] @ weight_e [out,in] -> [R,in], or transposed [R,in] -> [R,out]; spans cover the rows in order.

    As little as can be is done for each expert: with few rows that is what the time goes into.
    """
    if weights.is_packed:
        stack = weights.tensors[0].mT if transposed else weights.tensors[0]
        matrices = stack.unbind(0)
        chosen = [matrices[expert] for expert, _, _ in spans]
    else:
        chosen = [weights.tensors[expert].t() if transposed else weights.tensors[expert] for expert, _, _ in spans]
    parts = rows.split([end - begin for _, begin, end in spans])
    found = [matmul(part, matrix) for part, matrix in zip(parts, chosen, strict=True)]
    return found[0] if len(found) == 1 else torch.cat(found)


def experts_loop_backward(
    grad_y: Tensor,
    x: Tensor,
    ids: Tensor | None,
    weights: Tensor,
    gate: Sequence[Tensor],
    up: Sequence[Tensor],
    down: Sequence[Tensor],
    preact: Tensor,
    perm: Tensor,
    starts: Tensor,
    activation: str,
    gated: bool,
    weight_at: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """-> grad_x [T,H], grad_weights [T,K], lists like gate, up and down; `needs` says which, in that order.

    What is not needed is an empty tensor or an empty list. Each result has the dtype of what it is the gradient of,
    but grad_weights, which stays in fp32 (fp64 for fp64) as the stages leave it.
    """
    need_x, need_weights, need_gate, need_up, need_down = needs
    compute = wide(x.dtype)
    gates, ups = ExpertWeights(gate, "gate"), ExpertWeights(up, "up") if up else None
    downs = ExpertWeights(down, "down")
    rows = _Rows(x, weights, perm, weight_at)
    pairs = perm.to(torch.int64)
    grad_y = grad_y.to(x.dtype)

    x_sum = x.new_zeros(x.shape, dtype=compute) if need_x else None
    pair_sum = x.new_zeros(perm.shape[0], dtype=compute) if need_weights else None
    grad_gate = WeightGradients(gate) if need_gate else None
    grad_up = WeightGradients(up) if need_up and up else None
    grad_down = WeightGradients(down) if need_down else None
    need_rows = need_x or (need_weights and rows.weight_at_input)
    need_preact = need_rows or need_gate or need_up

    spans = list(expert_rows(starts))
    together = perm.shape[0] <= _TOGETHER * gates.experts
    for part in [spans] if together and spans else [[span] for span in spans]:
        first, last = part[0][1], part[-1][2]
        scale = rows.scale[first:last]
        grad_out = grad_y.index_select(0, rows.tokens[first:last])
        parts = [(expert, begin - first, end - first) for expert, begin, end in part]
        grad_act = _products(grad_out, downs, parts).to(compute)
        scaled = grad_act if rows.weight_at_input else grad_act * scale
        grad_hidden, act = activate_backward(preact[first:last], scaled, activation, gated)
        if not rows.weight_at_input:
            if pair_sum is not None:
                pair_sum[pairs[first:last]] = (act * grad_act).sum(1)
            act.mul_(scale)
        if grad_down is not None:
            act = act.to(x.dtype)
            for expert, begin, end in parts:
                grad_down.add(expert, grad_out[begin:end], act[begin:end])
        if not need_preact:
            continue
        if grad_gate is not None or grad_up is not None:
            inputs = rows.inputs(first, last)
            for expert, begin, end in parts:
                if grad_gate is not None:
                    grad_gate.add(expert, grad_hidden[begin:end, : gates.out], inputs[begin:end])
                if grad_up is not None:
                    grad_up.add(expert, grad_hidden[begin:end, gates.out :], inputs[begin:end])
        if need_rows:
            grad_rows = x.new_empty((last - first, x.shape[1]))
            for expert, begin, end in parts:
                matmul_grad_rows(grad_hidden[begin:end], gates, ups, expert, grad_rows[begin:end])
            grad_rows = grad_rows.to(compute)
            if rows.weight_at_input:
                if pair_sum is not None:
                    source = x.index_select(0, rows.tokens[first:last])
                    pair_sum[pairs[first:last]] = (source * grad_rows).sum(1)
                grad_rows = grad_rows * scale
            if x_sum is not None:
                x_sum.index_add_(0, rows.tokens[first:last], grad_rows)
    return (
        x.new_empty(0) if x_sum is None else x_sum.to(x.dtype),
        weights.new_empty(0, dtype=compute) if pair_sum is None else pair_sum.view(weights.shape),
        grad_gate.finish() if grad_gate is not None else [],
        grad_up.finish() if grad_up is not None else [],
        grad_down.finish() if grad_down is not None else [],
    )
