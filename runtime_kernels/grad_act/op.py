"""The operator moepdl::grad_act: gradient through down and the activation, the activation again, routing weights."""

from __future__ import annotations

from torch import Tensor

from moe_compiler.runtime_kernels.activations import wide
from moe_compiler.runtime_kernels.stage import define_stage
from moe_compiler.runtime_kernels.weights import in_size


def _allocate(
    grad_y: Tensor,
    weights: Tensor | None,
    preact: Tensor,
    perm: Tensor,
    starts: Tensor,
    down: list[Tensor],
    down_bias: list[Tensor],
    k: int,
    activation: str,
    gated: bool,
    turns: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens = 0 if weights is None else weights.shape[0]
    return (
        preact.new_empty(preact.shape),
        preact.new_empty((preact.shape[0], in_size(down))),
        preact.new_empty((tokens, k), dtype=wide(preact.dtype)),
    )


define_stage(
    "grad_act(Tensor grad_y, Tensor? weights, Tensor preact, Tensor perm, Tensor starts, Tensor[] down, "
    "Tensor[] down_bias, int k, str activation, bool gated, bool turns=False) "
    "-> (Tensor grad_preact, Tensor act, Tensor grad_weights)",
    _allocate,
)
