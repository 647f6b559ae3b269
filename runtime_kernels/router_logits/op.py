"""The operator moepdl::router_logits."""

from __future__ import annotations

from torch import Tensor

from moe_compiler.runtime_kernels.stage import define_stage


def _allocate(x: Tensor, router: Tensor, router_bias: Tensor | None) -> Tensor:
    return x.new_empty((x.shape[0], router.shape[1]))


define_stage("router_logits(Tensor x, Tensor router, Tensor? router_bias) -> Tensor", _allocate)
