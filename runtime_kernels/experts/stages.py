"""`experts`, forward and backward, as a composition of the stage operators. What eager use on CUDA runs.

The compiler expands `experts` in the same way and then plans the stages; this composition is the plain version.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.weights import are_in_turns, num_experts

_ops = torch.ops.moepdl


def experts_saving(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate: Sequence[Tensor],
    up: Sequence[Tensor],
    down: Sequence[Tensor],
    gate_bias: Sequence[Tensor],
    up_bias: Sequence[Tensor],
    down_bias: Sequence[Tensor],
    activation: str,
    gated: bool,
    weight_at: str,
    dtype: torch.dtype,
    *,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> y [T,H], preact [S,N] ([0,N] when not save), perm [S], starts [E+1]."""
    k = ids.shape[1]
    inside = weights if weight_at == "input" else None
    outside = weights if weight_at == "output" else None
    perm, starts = _ops.order(ids, num_experts(gate))
    act, preact = _ops.gate_up(x, inside, perm, starts, gate, up, gate_bias, up_bias, k, activation, gated, save)
    pairs = _ops.down(act, perm, starts, down, down_bias)
    return _ops.combine(pairs, outside, k, dtype), preact, perm, starts


def experts_backward(
    grad_y: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate: Sequence[Tensor],
    up: Sequence[Tensor],
    down: Sequence[Tensor],
    gate_bias: Sequence[Tensor],
    up_bias: Sequence[Tensor],
    down_bias: Sequence[Tensor],
    preact: Tensor,
    perm: Tensor,
    starts: Tensor,
    activation: str,
    gated: bool,
    weight_at: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """-> the gradients of x, weights, gate, up, down and the three biases; empty where `needs` is false."""
    need_x, need_weights, need_gate, need_up, need_down, need_gate_bias, need_up_bias, need_down_bias = needs
    k = ids.shape[1]
    inside = weights if weight_at == "input" else None
    outside = weights if weight_at == "output" else None
    grad_preact, act, grad_weights = _ops.grad_act(
        grad_y, outside, preact, perm, starts, down, down_bias, k, activation, gated, are_in_turns(gate)
    )
    grad_down = _ops.grad_down(grad_y, act, perm, starts, down, k) if need_down else []
    del act
    grad_gate: list[Tensor] = []
    grad_up: list[Tensor] = []
    if need_gate or need_up:
        grads = _ops.grad_gate_up(x, inside, grad_preact, perm, starts, gate, up, k, gated)
        grad_gate = grads[: len(gate)] if need_gate else []
        grad_up = grads[len(gate) :] if need_up else []
    grad_gate_bias: list[Tensor] = []
    grad_up_bias: list[Tensor] = []
    if (need_gate_bias and gate_bias) or (need_up_bias and up_bias):
        grads = _ops.grad_gate_up_bias(grad_preact, starts, gate_bias, up_bias)
        grad_gate_bias = grads[: len(gate_bias)] if need_gate_bias else []
        grad_up_bias = grads[len(gate_bias) :] if need_up_bias else []
    grad_down_bias: list[Tensor] = []
    if need_down_bias and down_bias:
        grad_down_bias = _ops.grad_down_bias(grad_y, outside, perm, starts, down_bias, k)
    grad_x = x.new_empty(0)
    if need_x or (need_weights and inside is not None):
        pairs = _ops.grad_pairs(grad_preact, perm, starts, gate, up, gated)
        if need_x:
            grad_x = _ops.combine(pairs, inside, k, x.dtype)
        if need_weights and inside is not None:
            grad_weights = _ops.grad_input_weights(x, pairs, k)
    return (
        grad_x,
        grad_weights.to(weights.dtype) if need_weights else weights.new_empty(0),
        grad_gate,
        grad_up,
        grad_down,
        grad_gate_bias,
        grad_up_bias,
        grad_down_bias,
    )
