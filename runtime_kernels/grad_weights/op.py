"""The operators moepdl::grad_down and moepdl::grad_gate_up: the gradients of the expert weights."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.stage import define_stage


def _like(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


def _allocate_down(
    grad_y: Tensor, act: Tensor, perm: Tensor, starts: Tensor, down: list[Tensor], k: int
) -> tuple[list[Tensor]]:
    return (_like(down),)


def _allocate_gate_up(
    x: Tensor,
    weights: Tensor | None,
    grad_preact: Tensor,
    perm: Tensor,
    starts: Tensor,
    gate: list[Tensor],
    up: list[Tensor],
    k: int,
    gated: bool,
) -> tuple[list[Tensor], list[Tensor]]:
    return _like(gate), _like(up)


define_stage(
    "grad_down(Tensor grad_y, Tensor act, Tensor perm, Tensor starts, Tensor[] down, int k) -> Tensor[]",
    _allocate_down,
)
define_stage(
    "grad_gate_up(Tensor x, Tensor? weights, Tensor grad_preact, Tensor perm, Tensor starts, Tensor[] gate, "
    "Tensor[] up, int k, bool gated) -> Tensor[]",
    _allocate_gate_up,
)
