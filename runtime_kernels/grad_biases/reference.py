"""The gradients of the expert biases, in plain torch. They have the shapes of the biases; empty experts get zero.

grad_gate_up_bias[e] = sum over rows r of e:  grad_preact[r]
grad_down_bias[e]    = sum over rows r of e:  grad_y[t_r]          (times w_r where weights are given)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.activations import wide
from moe_compiler.runtime_kernels.biases import ExpertBiases, biases
from moe_compiler.runtime_kernels.order.reference import expert_rows


class BiasGradients:
    """The gradients of the biases that are given while an expert at a time is added: `gate`, `up`, `down`."""

    def __init__(self, gate: ExpertBiases | None, up: ExpertBiases | None, down: ExpertBiases | None) -> None:
        self.wanted = not gate is up is down is None
        self._gate, self._up, self._down = (
            [torch.zeros_like(t) for t in b.tensors] if b else [] for b in (gate, up, down)
        )
        self.gate, self.up, self.down = (
            b.as_given(grads) if b else []
            for b, grads in zip((gate, up, down), (self._gate, self._up, self._down), strict=True)
        )

    def add(self, expert: int, grad_preact: Tensor, grad_out: Tensor, scale: Tensor | None) -> None:
        """The gradients of one expert's rows: grad_preact [rows,N], grad_out [rows,H] (times scale [rows,1]).

        Of the biases of gate and up in turns the columns of grad_preact are in turns too.
        """
        if self._gate:
            add_sum(self._gate, expert, grad_preact[:, : self._gate[0].shape[-1]])
        if self._up:
            add_sum(self._up, expert, grad_preact[:, -self._up[0].shape[-1] :])
        if self._down:
            add_sum(self._down, expert, grad_out if scale is None else grad_out.to(scale.dtype) * scale)


def add_sum(grads: list[Tensor], expert: int, rows: Tensor) -> None:
    """Write the sum of rows [rows,out], in fp32 (fp64 for fp64), as the gradient of one expert."""
    target = grads[0][expert] if grads[0].dim() == 2 else grads[expert]
    target.copy_(rows.sum(0, dtype=wide(rows.dtype)))


def grad_down_bias(
    grad_y: Tensor, weights: Tensor | None, perm: Tensor, starts: Tensor, down_bias: Sequence[Tensor], k: int
) -> list[Tensor]:
    """grad_y [T,H] of any float dtype, weights [T,k] (on the output) or None -> gradients like down_bias."""
    pairs = perm.to(torch.int64)
    rows = grad_y.to(down_bias[0].dtype).index_select(0, torch.div(pairs, k, rounding_mode="floor"))
    grads = BiasGradients(None, None, biases(down_bias, "down_bias"))
    scale = None
    if weights is not None:
        scale = weights.reshape(-1).index_select(0, pairs).to(wide(rows.dtype)).unsqueeze(1)
    for expert, begin, end in expert_rows(starts):
        grads.add(expert, rows[:0], rows[begin:end], None if scale is None else scale[begin:end])
    return grads.down


def grad_gate_up_bias(
    grad_preact: Tensor, starts: Tensor, gate_bias: Sequence[Tensor] | None, up_bias: Sequence[Tensor] | None
) -> tuple[list[Tensor], list[Tensor]]:
    """grad_preact [S,N] in sorted row order -> gradients like gate_bias and like up_bias; empty lists for none."""
    grads = BiasGradients(biases(gate_bias, "gate_bias"), biases(up_bias, "up_bias"), None)
    for expert, begin, end in expert_rows(starts):
        grads.add(expert, grad_preact[begin:end], grad_preact[:0], None)
    return grads.gate, grads.up
