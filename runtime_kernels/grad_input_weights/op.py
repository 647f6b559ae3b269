"""The operator moepdl::grad_input_weights: gradient of routing weights that scale the experts' input."""

from __future__ import annotations

from torch import Tensor

from moe_compiler.runtime_kernels.activations import wide
from moe_compiler.runtime_kernels.stage import define_stage


def _allocate(x: Tensor, pairs: Tensor, k: int) -> Tensor:
    return x.new_empty((x.shape[0], k), dtype=wide(x.dtype))


define_stage("grad_input_weights(Tensor x, Tensor pairs, int k) -> Tensor", _allocate)
