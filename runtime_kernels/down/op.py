"""The operator moepdl::down: second expert matmul, rows in sorted order in, pair order out."""

from __future__ import annotations

from torch import Tensor

from moe_compiler.runtime_kernels.stage import define_stage
from moe_compiler.runtime_kernels.weights import out_size


def _allocate(act: Tensor, perm: Tensor, starts: Tensor, down: list[Tensor], down_bias: list[Tensor]) -> Tensor:
    return act.new_empty((perm.shape[0], out_size(down)))


define_stage("down(Tensor act, Tensor perm, Tensor starts, Tensor[] down, Tensor[] down_bias) -> Tensor", _allocate)
