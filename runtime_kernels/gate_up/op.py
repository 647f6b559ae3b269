"""The operator moepdl::gate_up: first expert matmuls and activation, rows in sorted order."""

from __future__ import annotations

from torch import Tensor

from moe_compiler.runtime_kernels.stage import define_stage
from moe_compiler.runtime_kernels.weights import preact_size


def _allocate(
    x: Tensor,
    weights: Tensor | None,
    perm: Tensor,
    starts: Tensor,
    gate: list[Tensor],
    up: list[Tensor],
    gate_bias: list[Tensor],
    up_bias: list[Tensor],
    k: int,
    activation: str,
    gated: bool,
    save: bool,
) -> tuple[Tensor, Tensor]:
    size, rows = preact_size(gate, up), perm.shape[0]
    act = x.new_empty((rows, size // 2 if gated else size))
    return act, x.new_empty((rows if save else 0, size))


define_stage(
    "gate_up(Tensor x, Tensor? weights, Tensor perm, Tensor starts, Tensor[] gate, Tensor[] up, "
    "Tensor[] gate_bias, Tensor[] up_bias, int k, str activation, bool gated, bool save) "
    "-> (Tensor act, Tensor preact)",
    _allocate,
)
