"""The operators moepdl::grad_down_bias and moepdl::grad_gate_up_bias: the gradients of the expert biases."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.stage import define_stage


def _like(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


def _allocate_down(
    grad_y: Tensor, weights: Tensor | None, perm: Tensor, starts: Tensor, down_bias: list[Tensor], k: int
) -> tuple[list[Tensor]]:
    return (_like(down_bias),)


def _allocate_gate_up(
    grad_preact: Tensor, starts: Tensor, gate_bias: list[Tensor], up_bias: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    return _like(gate_bias), _like(up_bias)


define_stage(
    "grad_down_bias(Tensor grad_y, Tensor? weights, Tensor perm, Tensor starts, Tensor[] down_bias, int k) -> Tensor[]",
    _allocate_down,
)
define_stage(
    "grad_gate_up_bias(Tensor grad_preact, Tensor starts, Tensor[] gate_bias, Tensor[] up_bias) -> Tensor[]",
    _allocate_gate_up,
)
