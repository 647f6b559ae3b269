"""The operators moepdl::experts, experts_saving and experts_backward: a whole block of experts, differentiable.

`experts` is what the compiler raises a block to. When a gradient is needed, autograd calls `experts_saving` instead
and `experts_backward` later, so the forward and the backward graph each hold one node a block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.activations import check_activation
from moe_compiler.runtime_kernels.experts import reference, stages
from moe_compiler.runtime_kernels.library import below_autograd, define, differentiable_once
from moe_compiler.runtime_kernels.order.reference import order
from moe_compiler.runtime_kernels.weights import ExpertWeights, num_experts, out_size, preact_size

_ARGUMENTS = (
    "Tensor x, Tensor ids, Tensor weights, Tensor[] gate, Tensor[] up, Tensor[] down, "
    "str activation, bool gated, str weight_at"
)


class ExpertsArgumentError(ValueError):
    """Arguments of `experts` that do not fit together; the message names the argument."""


def check_attributes(activation: str, weight_at: str) -> None:
    """Raise ValueError when the activation or the place of the routing weight is not known."""
    check_activation(activation)
    if weight_at not in reference.WEIGHT_AT:
        raise ExpertsArgumentError(f"weight_at {weight_at!r} is not known; use one of {', '.join(reference.WEIGHT_AT)}")


def check_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate: list[Tensor],
    up: list[Tensor],
    down: list[Tensor],
    activation: str,
    gated: bool,
    weight_at: str,
) -> None:
    """Raise ExpertsArgumentError (a ValueError) or WeightLayoutError when the arguments do not fit together."""
    check_attributes(activation, weight_at)
    if x.dim() != 2:
        raise ExpertsArgumentError(f"x must be [T,H], got shape {tuple(x.shape)}")
    if ids.dim() != 2 or ids.shape != weights.shape or ids.shape[0] != x.shape[0]:
        raise ExpertsArgumentError(
            f"ids and weights must both be [T,K] with T = {x.shape[0]}, "
            f"got shapes {tuple(ids.shape)} and {tuple(weights.shape)}"
        )
    if ids.dtype not in (torch.int32, torch.int64):
        raise ExpertsArgumentError(f"ids must be int32 or int64, got {ids.dtype}")
    gates, downs = ExpertWeights(gate, "gate"), ExpertWeights(down, "down")
    parts = [("gate", gates), ("down", downs)]
    if up:
        ups = ExpertWeights(up, "up")
        parts.append(("up", ups))
        if not gated:
            raise ExpertsArgumentError("up weights are given, but gated is False")
        if (ups.out, ups.inner) != (gates.out, gates.inner):
            raise ExpertsArgumentError(f"up is [{ups.out},{ups.inner}], gate is [{gates.out},{gates.inner}]")
    for name, part in parts:
        part.check()
        if part.dtype != x.dtype:
            raise ExpertsArgumentError(f"{name} is {part.dtype}, x is {x.dtype}; cast one of them")
        if part.experts != gates.experts:
            raise ExpertsArgumentError(f"{name} has {part.experts} experts, gate has {gates.experts}")
    if gates.inner != x.shape[1]:
        raise ExpertsArgumentError(f"gate reads rows of {gates.inner}, x has rows of {x.shape[1]}")
    columns = preact_size(gate, up)
    if gated and columns % 2:
        raise ExpertsArgumentError(f"gate and up together must have an even number of rows, got {columns}")
    if downs.inner != (columns // 2 if gated else columns):
        raise ExpertsArgumentError(
            f"down reads rows of {downs.inner}, gate and up give {columns // 2 if gated else columns} (gated={gated})"
        )


def _fake(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate: list[Tensor],
    up: list[Tensor],
    down: list[Tensor],
    activation: str,
    gated: bool,
    weight_at: str,
    dtype: torch.dtype,
) -> Tensor:
    check_attributes(activation, weight_at)
    return x.new_empty((x.shape[0], out_size(down)), dtype=dtype)


def _fake_saving(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate: list[Tensor],
    up: list[Tensor],
    down: list[Tensor],
    activation: str,
    gated: bool,
    weight_at: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pairs = ids.shape[0] * ids.shape[1]
    return (
        _fake(x, ids, weights, gate, up, down, activation, gated, weight_at, dtype),
        x.new_empty((pairs, preact_size(gate, up))),
        x.new_empty((pairs,), dtype=torch.int32),
        x.new_empty((num_experts(gate) + 1,), dtype=torch.int32),
    )


def _fake_backward(
    grad_y: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate: list[Tensor],
    up: list[Tensor],
    down: list[Tensor],
    preact: Tensor,
    perm: Tensor,
    starts: Tensor,
    activation: str,
    gated: bool,
    weight_at: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    def like(tensors: list[Tensor], needed: bool) -> list[Tensor]:
        return [torch.empty_like(tensor) for tensor in tensors] if needed else []

    return (
        x.new_empty(x.shape if needs[0] else (0,)),
        weights.new_empty(weights.shape if needs[1] else (0,)),
        like(gate, needs[2]),
        like(up, needs[3]),
        like(down, needs[4]),
    )


def _cpu(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate: list[Tensor],
    up: list[Tensor],
    down: list[Tensor],
    activation: str,
    gated: bool,
    weight_at: str,
    dtype: torch.dtype,
) -> Tensor:
    check_experts(x, ids, weights, gate, up, down, activation, gated, weight_at)
    perm, starts = order(ids, num_experts(gate))
    return reference.experts_loop(x, ids, weights, gate, up, down, perm, starts, activation, gated, weight_at, dtype)


def _cpu_saving(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate: list[Tensor],
    up: list[Tensor],
    down: list[Tensor],
    activation: str,
    gated: bool,
    weight_at: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_experts(x, ids, weights, gate, up, down, activation, gated, weight_at)
    perm, starts = order(ids, num_experts(gate))
    y, preact = reference.experts_loop_saving(
        x, ids, weights, gate, up, down, perm, starts, activation, gated, weight_at, dtype
    )
    return y, preact, perm, starts


def _cpu_backward(*arguments: Any) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    grad_x, grad_weights, *lists = reference.experts_loop_backward(*arguments)
    weights = arguments[3]
    return grad_x, grad_weights.to(weights.dtype), lists[0], lists[1], lists[2]


def _cuda(*arguments: Any) -> Tensor:
    check_experts(*arguments[:-1])
    return stages.experts_saving(*arguments, save=False)[0]


def _cuda_saving(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_experts(*arguments[:-1])
    return stages.experts_saving(*arguments, save=True)


class _Experts(torch.autograd.Function):
    """Tensors of the lists come one by one, for autograd to see them: x, ids, weights, gate..., up..., down..."""

    @staticmethod
    def forward(ctx: Any, sizes: tuple[int, int], attrs: tuple[Any, ...], *tensors: Tensor) -> Tensor:
        with below_autograd():
            y, *saved = EXPERTS_SAVING(*_grouped(tensors, sizes), *attrs)
        ctx.save_for_backward(*tensors, *saved)
        ctx.sizes, ctx.attrs = sizes, attrs
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
        *tensors, preact, perm, starts = ctx.saved_tensors
        x, ids, weights, gate, up, down = _grouped(tensors, ctx.sizes)
        wanted = _grouped(ctx.needs_input_grad[2:], ctx.sizes)
        needs = [wanted[0], wanted[2], any(wanted[3]), any(wanted[4]), any(wanted[5])]
        with torch.no_grad():
            grad_x, grad_weights, *lists = EXPERTS_BACKWARD(
                grad_y, x, ids, weights, gate, up, down, preact, perm, starts, *ctx.attrs[:-1], needs
            )
        flat: list[Tensor | None] = [grad_x if needs[0] else None, None, grad_weights if needs[1] else None]
        for given, grads in zip((gate, up, down), lists, strict=True):
            flat += grads if grads else [None] * len(given)
        return None, None, *differentiable_once("experts", flat, [grad_y, *tensors])


def _grouped(flat: Any, sizes: tuple[int, int]) -> tuple[Any, Any, Any, list[Any], list[Any], list[Any]]:
    """x, ids, weights and the three lists of weights; `sizes` are the lengths of the first two lists."""
    first, second = 3 + sizes[0], 3 + sizes[0] + sizes[1]
    return flat[0], flat[1], flat[2], list(flat[3:first]), list(flat[first:second]), list(flat[second:])


def _autograd(
    x: Tensor, ids: Tensor, weights: Tensor, gate: list[Tensor], up: list[Tensor], down: list[Tensor], *attrs: Any
) -> Tensor:
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, weights, *gate, *up, *down)):
        return _Experts.apply((len(gate), len(up)), attrs, x, ids, weights, *gate, *up, *down)
    with below_autograd():
        return EXPERTS(x, ids, weights, gate, up, down, *attrs)


EXPERTS = define(
    f"experts({_ARGUMENTS}, ScalarType dtype) -> Tensor", fake=_fake, cpu=_cpu, cuda=_cuda, autograd=_autograd
)
EXPERTS_SAVING = define(
    f"experts_saving({_ARGUMENTS}, ScalarType dtype) -> (Tensor y, Tensor preact, Tensor perm, Tensor starts)",
    fake=_fake_saving,
    cpu=_cpu_saving,
    cuda=_cuda_saving,
)
EXPERTS_BACKWARD = define(
    "experts_backward(Tensor grad_y, Tensor x, Tensor ids, Tensor weights, Tensor[] gate, Tensor[] up, "
    "Tensor[] down, Tensor preact, Tensor perm, Tensor starts, str activation, bool gated, str weight_at, "
    "bool[] needs) -> (Tensor grad_x, Tensor grad_weights, Tensor[] grad_gate, Tensor[] grad_up, Tensor[] grad_down)",
    fake=_fake_backward,
    cpu=_cpu_backward,
    cuda=stages.experts_backward,
)
