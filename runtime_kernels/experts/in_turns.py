"""gate and up that take turns in the columns of one stored tensor (gpt-oss): for a CPU, one matrix of both.

As views with every other column neither has a contiguous dimension, so a matrix product would copy it at each call.
Their common tensor has one. Its product gives gate and up in turns, which costs nothing to tell apart. It is known from
one 4-D tensor of both, and found behind two views (up before gate has no 4-D tensor).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.biases import Biases, ExpertBiases
from moe_compiler.runtime_kernels.weights import ExpertWeights


@dataclass(frozen=True)
class InTurns:
    """Both projections as one: matrices [2I, in], whose rows are gate's (from row `first` on) and up's in turns."""

    weights: ExpertWeights
    bias: ExpertBiases | None
    first: int

    def halves(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(gate, up) of products [rows, 2I], views."""
        return rows[:, self.first :: 2], rows[:, 1 - self.first :: 2]

    def joined(self, grad: Tensor) -> Tensor:
        """A gradient [rows, gate | up] with its columns in the order of the weights' rows."""
        parts = grad.chunk(2, dim=1)
        return torch.stack(parts if self.first == 0 else parts[::-1], dim=2).flatten(1)


def in_turns(gates: ExpertWeights, ups: ExpertWeights | None, added: Biases) -> InTurns | None:
    """gate and up as one, None where they are not neighbours in every row that is stored."""
    if gates.turns:
        return InTurns(gates, added.gate, 0)
    if ups is None or not (gates.is_packed and ups.is_packed) or gates.strides != ups.strides or gates.strides[0] != 2:
        return None
    gate, up = gates.tensors[0], ups.tensors[0]
    distance = up.data_ptr() - gate.data_ptr()
    shared = gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
    if not shared or abs(distance) != gate.itemsize or gates.expert_stride != ups.expert_stride:
        return None
    first, low = (0, gate) if distance > 0 else (1, up)
    both = low.as_strided((gates.experts, 2 * gates.out, gates.inner), (gates.expert_stride, 1, gates.strides[1]))
    bias = None
    if added.gate is not None or added.up is not None:
        if added.gate is None or added.up is None or not (added.gate.is_packed and added.up.is_packed):
            return None
        vectors = [added.gate.tensors[0], added.up.tensors[0]]
        bias = ExpertBiases([torch.stack(vectors if first == 0 else vectors[::-1], dim=2).flatten(1)], "bias")
    return InTurns(ExpertWeights([both], "gate and up"), bias, first)
