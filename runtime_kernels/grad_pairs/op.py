"""The operator moepdl::grad_pairs: gradient of each pair's input row, in pair order."""

from __future__ import annotations

from torch import Tensor

from moe_compiler.runtime_kernels.stage import define_stage
from moe_compiler.runtime_kernels.weights import in_size


def _allocate(
    grad_preact: Tensor, perm: Tensor, starts: Tensor, gate: list[Tensor], up: list[Tensor], gated: bool
) -> Tensor:
    return grad_preact.new_empty((perm.shape[0], in_size(gate)))


define_stage(
    "grad_pairs(Tensor grad_preact, Tensor perm, Tensor starts, Tensor[] gate, Tensor[] up, bool gated) -> Tensor",
    _allocate,
)
