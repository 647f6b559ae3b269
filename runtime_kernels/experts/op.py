"""The operators moepdl::experts, experts_saving and experts_backward: a whole block of experts, differentiable.

`experts` is what the compiler raises a block to. When a gradient is needed, autograd calls `experts_saving` instead
and `experts_backward` later, so the forward and the backward graph each hold one node a block.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.activations import check_activation
from moe_compiler.runtime_kernels.biases import ExpertBiases
from moe_compiler.runtime_kernels.experts import reference, stages
from moe_compiler.runtime_kernels.library import below_autograd, define, differentiable_once
from moe_compiler.runtime_kernels.order.reference import order
from moe_compiler.runtime_kernels.weights import ExpertWeights, num_experts, out_size, preact_size

_ARGUMENTS = (
    "Tensor x, Tensor ids, Tensor weights, Tensor[] gate, Tensor[] up, Tensor[] down, "
    "Tensor[] gate_bias, Tensor[] up_bias, Tensor[] down_bias, "
    "str activation, bool gated, str weight_at"
)


class ExpertsArgumentError(ValueError):
    """Arguments of `experts` that do not fit together; the message names the argument."""


def check_attributes(activation: str, gated: bool, weight_at: str) -> None:
    """Raise ValueError when the activation or the place of the routing weight is not known."""
    check_activation(activation, gated)
    if weight_at not in reference.WEIGHT_AT:
        raise ExpertsArgumentError(f"weight_at {weight_at!r} is not known; use one of {', '.join(reference.WEIGHT_AT)}")


def check_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate: list[Tensor],
    up: list[Tensor],
    down: list[Tensor],
    gate_bias: list[Tensor],
    up_bias: list[Tensor],
    down_bias: list[Tensor],
    activation: str,
    gated: bool,
    weight_at: str,
) -> None:
    """Raise ExpertsArgumentError (a ValueError) or WeightLayoutError when the arguments do not fit together."""
    check_attributes(activation, gated, weight_at)
    if x.dim() != 2:
        raise ExpertsArgumentError(f"x must be [T,H], got shape {tuple(x.shape)}")
    if ids.dim() != 2 or ids.shape != weights.shape or ids.shape[0] != x.shape[0]:
        raise ExpertsArgumentError(
            f"ids and weights must both be [T,K] with T = {x.shape[0]}, "
            f"got shapes {tuple(ids.shape)} and {tuple(weights.shape)}"
        )
    if ids.dtype not in (torch.int32, torch.int64):
        raise ExpertsArgumentError(f"ids must be int32 or int64, got {ids.dtype}")
    for name, tensors, turns in (
        ("up", up, 4),
        ("down", down, 4),
        ("up_bias", up_bias, 3),
        ("down_bias", down_bias, 3),
    ):
        if tensors and tensors[0].dim() == turns:
            raise ExpertsArgumentError(
                f"{name} has shape {tuple(tensors[0].shape)}; gate and gate_bias alone may hold gate and up in turns"
            )
    gates, downs = ExpertWeights(gate, "gate"), ExpertWeights(down, "down")
    if gates.turns and (up or not gated):
        raise ExpertsArgumentError(
            f"gate is {tuple(gate[0].shape)}, gate and up in turns, but "
            + ("up weights are given too" if up else "gated is False")
        )
    parts = [("gate", gates), ("down", downs)]
    ups = ExpertWeights(up, "up") if up else None
    if ups is not None:
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
    if gate_bias and ExpertBiases(gate_bias, "gate_bias").turns != gates.turns:
        raise ExpertsArgumentError(
            f"gate_bias is {tuple(gate_bias[0].shape)}, gate is {tuple(gate[0].shape)}: give both in turns "
            "([E,2,I] and [E,2,I,H]) or neither"
        )
    if up_bias and not up:
        raise ExpertsArgumentError("up_bias is given without up: the bias of packed weights is gate_bias")
    for name, tensors, biased in (("gate", gate_bias, gates), ("up", up_bias, ups), ("down", down_bias, downs)):
        if tensors and biased is not None:
            _check_biases(f"{name}_bias", ExpertBiases(tensors, f"{name}_bias"), name, biased, x.dtype)


def _check_biases(what: str, added: ExpertBiases, name: str, weights: ExpertWeights, dtype: torch.dtype) -> None:
    added.check()
    if added.dtype != dtype:
        raise ExpertsArgumentError(f"{what} is {added.dtype}, x is {dtype}; cast one of them")
    if (added.experts, added.size) != (weights.experts, weights.out):
        raise ExpertsArgumentError(
            f"{what} is [{added.experts},{added.size}], but {name} makes {weights.out} columns for {weights.experts} "
            "experts"
        )


def _fake(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate: list[Tensor],
    up: list[Tensor],
    down: list[Tensor],
    gate_bias: list[Tensor],
    up_bias: list[Tensor],
    down_bias: list[Tensor],
    activation: str,
    gated: bool,
    weight_at: str,
    dtype: torch.dtype,
) -> Tensor:
    check_attributes(activation, gated, weight_at)
    return x.new_empty((x.shape[0], out_size(down)), dtype=dtype)


def _fake_saving(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate: list[Tensor],
    up: list[Tensor],
    down: list[Tensor],
    gate_bias: list[Tensor],
    up_bias: list[Tensor],
    down_bias: list[Tensor],
    activation: str,
    gated: bool,
    weight_at: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pairs = ids.shape[0] * ids.shape[1]
    return (
        _fake(x, ids, weights, gate, up, down, gate_bias, up_bias, down_bias, activation, gated, weight_at, dtype),
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
    gate_bias: list[Tensor],
    up_bias: list[Tensor],
    down_bias: list[Tensor],
    preact: Tensor,
    perm: Tensor,
    starts: Tensor,
    activation: str,
    gated: bool,
    weight_at: str,
    needs: list[bool],
) -> reference.Gradients:
    def like(tensors: list[Tensor], needed: bool) -> list[Tensor]:
        return [torch.empty_like(tensor) for tensor in tensors] if needed else []

    return (
        x.new_empty(x.shape if needs[0] else (0,)),
        weights.new_empty(weights.shape if needs[1] else (0,)),
        like(gate, needs[2]),
        like(up, needs[3]),
        like(down, needs[4]),
        like(gate_bias, needs[5]),
        like(up_bias, needs[6]),
        like(down_bias, needs[7]),
    )


def _cpu(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate: list[Tensor],
    up: list[Tensor],
    down: list[Tensor],
    gate_bias: list[Tensor],
    up_bias: list[Tensor],
    down_bias: list[Tensor],
    activation: str,
    gated: bool,
    weight_at: str,
    dtype: torch.dtype,
) -> Tensor:
    check_experts(x, ids, weights, gate, up, down, gate_bias, up_bias, down_bias, activation, gated, weight_at)
    perm, starts = order(ids, num_experts(gate))
    lists = (gate, up, down, gate_bias, up_bias, down_bias)
    return reference.experts_loop(x, ids, weights, *lists, perm, starts, activation, gated, weight_at, dtype)


def _cpu_saving(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate: list[Tensor],
    up: list[Tensor],
    down: list[Tensor],
    gate_bias: list[Tensor],
    up_bias: list[Tensor],
    down_bias: list[Tensor],
    activation: str,
    gated: bool,
    weight_at: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_experts(x, ids, weights, gate, up, down, gate_bias, up_bias, down_bias, activation, gated, weight_at)
    perm, starts = order(ids, num_experts(gate))
    lists = (gate, up, down, gate_bias, up_bias, down_bias)
    y, preact = reference.experts_loop_saving(
        x, ids, weights, *lists, perm, starts, activation, gated, weight_at, dtype
    )
    return y, preact, perm, starts


def _cpu_backward(*arguments: Any) -> reference.Gradients:
    grad_x, grad_weights, *lists = reference.experts_loop_backward(*arguments)
    weights = arguments[3]
    return (grad_x, grad_weights.to(weights.dtype), *lists)  # type: ignore[return-value]


def _cuda(*arguments: Any) -> Tensor:
    check_experts(*arguments[:-1])
    return stages.experts_saving(*arguments, save=False)[0]


def _cuda_saving(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_experts(*arguments[:-1])
    return stages.experts_saving(*arguments, save=True)


class _Experts(torch.autograd.Function):
    """Tensors of the lists come one by one, for autograd to see them: x, ids, weights, gate..., up..., down..., biases.

    `sizes` are the lengths of the six lists.
    """

    @staticmethod
    def forward(ctx: Any, sizes: tuple[int, ...], attrs: tuple[Any, ...], *tensors: Tensor) -> Tensor:
        with below_autograd():
            y, *saved = EXPERTS_SAVING(*_grouped(tensors, sizes), *attrs)
        ctx.save_for_backward(*tensors, *saved)
        ctx.sizes, ctx.attrs = sizes, attrs
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
        *tensors, preact, perm, starts = ctx.saved_tensors
        x, ids, weights, *given = _grouped(tensors, ctx.sizes)
        wanted = _grouped(ctx.needs_input_grad[2:], ctx.sizes)
        needs = [wanted[0], wanted[2], *map(any, wanted[3:])]
        with torch.no_grad():
            grad_x, grad_weights, *lists = EXPERTS_BACKWARD(
                grad_y, x, ids, weights, *given, preact, perm, starts, *ctx.attrs[:-1], needs
            )
        flat: list[Tensor | None] = [grad_x if needs[0] else None, None, grad_weights if needs[1] else None]
        for tensors_of, grads in zip(given, lists, strict=True):
            flat += grads if grads else [None] * len(tensors_of)
        return None, None, *differentiable_once("experts", flat, [grad_y, *tensors])


def _grouped(flat: Any, sizes: tuple[int, ...]) -> list[Any]:
    """x, ids, weights and the six lists, whose lengths are `sizes`."""
    ends = list(accumulate(sizes, initial=3))
    return [*flat[:3], *(list(flat[begin:end]) for begin, end in pairwise(ends))]


def _autograd(x: Tensor, ids: Tensor, weights: Tensor, *rest: Any) -> Tensor:
    lists, attrs = rest[:6], rest[6:]
    tensors = [tensor for part in lists for tensor in part]
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, weights, *tensors)):
        return _Experts.apply(tuple(map(len, lists)), attrs, x, ids, weights, *tensors)
    with below_autograd():
        return EXPERTS(x, ids, weights, *lists, *attrs)


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
    "Tensor[] down, Tensor[] gate_bias, Tensor[] up_bias, Tensor[] down_bias, Tensor preact, Tensor perm, "
    "Tensor starts, str activation, bool gated, str weight_at, bool[] needs) -> (Tensor grad_x, Tensor grad_weights, "
    "Tensor[] grad_gate, Tensor[] grad_up, Tensor[] grad_down, "
    "Tensor[] grad_gate_bias, Tensor[] grad_up_bias, Tensor[] grad_down_bias)",
    fake=_fake_backward,
    cpu=_cpu_backward,
    cuda=stages.experts_backward,
)
