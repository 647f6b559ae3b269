"""The operators of an expert-parallel block at the level of moepdl::experts, differentiable:

    moepdl::ep_dispatch(x, ids, weights, group, experts, placement, capacity) -> (rows, row_ids, row_weights, slots)
    moepdl::ep_combine(out, slots, group, capacity, dtype) -> y

    x [T,H], ids [T,k] global ids (others than 0..E-1: no expert), weights [T,k]; group: the process group's name;
    experts: E of the whole group; placement: see `placement`; capacity C: slots a rank has for each source.
    rows [R*C,H]: slot r*C + j holds the j-th token (in token order) of rank r that chose an expert of this rank.
    row_ids int64 [R*C,k]: LOCAL ids; choices of other ranks, and unused slots, have the id E_local, which is no expert.
    row_weights [R*C,k]: zero there. slots int32 [T,R]: the slot of token t on rank r, -1 for none.
    y [T,H]: the sum over the ranks of what each computed for the token, in the order of the ranks, in fp32 or wider.

and their backward: ep_redispatch (grad_y to the slots), ep_combine (grad_rows home), ep_return_weights (the gradient
of the routing weights home). Every call is a collective: all ranks of the group make the same ones in the same order.
layer and timeout_s are for errors: see `flight`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.exchange import exchanges
from moe_compiler.runtime_kernels.exchange.exchanges import Route
from moe_compiler.runtime_kernels.exchange.groups import group as group_of
from moe_compiler.runtime_kernels.exchange.placement import check_placement
from moe_compiler.runtime_kernels.library import below_autograd, define, differentiable_once

# The phase of an ep_combine that is the backward of a dispatch.
RETURN = "backward of dispatch"


def _dispatch(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    group: str,
    experts: int,
    placement: str,
    capacity: int,
    layer: str = "",
    timeout_s: float = 30.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    route = Route(group, capacity, layer, timeout_s)
    flight, slots = exchanges.start_dispatch(x, ids, weights, experts, placement, route)
    rows = exchanges.end_dispatch(flight, capacity, x.shape[1], ids.shape[1], x.dtype, weights.dtype)
    return (*rows, slots)


def _fake_dispatch(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    group: str,
    experts: int,
    placement: str,
    capacity: int,
    layer: str = "",
    timeout_s: float = 30.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ranks = group_of(group).ranks
    check_placement(experts, ranks, placement)
    slots, k = ranks * capacity, ids.shape[1]
    return (
        x.new_empty((slots, x.shape[1])),
        ids.new_empty((slots, k), dtype=torch.int64),
        weights.new_empty((slots, k)),
        ids.new_empty((ids.shape[0], ranks), dtype=torch.int32),
    )


def _combine(
    out: Tensor,
    slots: Tensor,
    group: str,
    capacity: int,
    dtype: torch.dtype,
    layer: str = "",
    timeout_s: float = 30.0,
    phase: str = "combine",
) -> Tensor:
    flight = exchanges.start_combine(out, Route(group, capacity, layer, timeout_s), phase)
    return exchanges.end_combine(flight, slots, capacity, out.shape[1], out.dtype, dtype)


def _fake_combine(
    out: Tensor,
    slots: Tensor,
    group: str,
    capacity: int,
    dtype: torch.dtype,
    layer: str = "",
    timeout_s: float = 30.0,
    phase: str = "combine",
) -> Tensor:
    return out.new_empty((slots.shape[0], out.shape[1]), dtype=dtype)


def _redispatch(
    grad_y: Tensor, slots: Tensor, group: str, capacity: int, layer: str = "", timeout_s: float = 30.0
) -> Tensor:
    flight = exchanges.start_redispatch(grad_y, slots, Route(group, capacity, layer, timeout_s))
    return exchanges.end_redispatch(flight, capacity, grad_y.shape[1], grad_y.dtype)


def _fake_redispatch(
    grad_y: Tensor, slots: Tensor, group: str, capacity: int, layer: str = "", timeout_s: float = 30.0
) -> Tensor:
    return grad_y.new_empty((group_of(group).ranks * capacity, grad_y.shape[1]))


def _return_weights(
    grads: Tensor,
    ids: Tensor,
    slots: Tensor,
    group: str,
    experts: int,
    placement: str,
    capacity: int,
    layer: str = "",
    timeout_s: float = 30.0,
) -> Tensor:
    flight = exchanges.start_return_weights(grads, Route(group, capacity, layer, timeout_s))
    return exchanges.end_return_weights(flight, ids, slots, experts, placement, capacity, grads.dtype)


def _fake_return_weights(
    grads: Tensor,
    ids: Tensor,
    slots: Tensor,
    group: str,
    experts: int,
    placement: str,
    capacity: int,
    layer: str = "",
    timeout_s: float = 30.0,
) -> Tensor:
    return grads.new_empty(ids.shape)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor, weights: Tensor, *attributes: Any) -> tuple[Tensor, ...]:
        with below_autograd():
            rows, row_ids, row_weights, slots = EP_DISPATCH(x, ids, weights, *attributes)
        constant = [row_ids, slots]
        # What needs no gradient here needs none there: the experts would compute it for nothing.
        constant += [] if ctx.needs_input_grad[0] else [rows]
        constant += [] if ctx.needs_input_grad[2] else [row_weights]
        ctx.mark_non_differentiable(*constant)
        ctx.save_for_backward(ids, slots)
        ctx.attributes, ctx.dtypes = attributes, (x.dtype, weights.dtype)
        return rows, row_ids, row_weights, slots

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, _: Any, grad_row_weights: Tensor, *__: Any) -> tuple[Any, ...]:
        ids, slots = ctx.saved_tensors
        group, experts, placement, capacity, *told = ctx.attributes
        grad_x = grad_weights = None
        with torch.no_grad():
            if ctx.needs_input_grad[0]:
                grad_x = EP_COMBINE(grad_rows, slots, group, capacity, ctx.dtypes[0], *told, RETURN)
            if ctx.needs_input_grad[2]:
                grads = grad_row_weights.to(ctx.dtypes[1])
                grad_weights = EP_RETURN_WEIGHTS(grads, ids, slots, group, experts, placement, capacity, *told)
        sources = [grad for grad in (grad_rows, grad_row_weights) if grad is not None]
        found = differentiable_once("ep_dispatch", [grad_x, grad_weights], sources)
        return found[0], None, found[1], *([None] * len(ctx.attributes))


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, slots: Tensor, *attributes: Any) -> Tensor:
        with below_autograd():
            y = EP_COMBINE(out, slots, *attributes)
        ctx.save_for_backward(slots)
        ctx.attributes, ctx.dtype = attributes, out.dtype
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
        (slots,) = ctx.saved_tensors
        group, capacity, _, layer, timeout_s, _ = ctx.attributes
        with torch.no_grad():
            grad = EP_REDISPATCH(grad_y.to(ctx.dtype), slots, group, capacity, layer, timeout_s)
        (found,) = differentiable_once("ep_combine", [grad], [grad_y])
        return found, *([None] * (1 + len(ctx.attributes)))


def _autograd_dispatch(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    group: str,
    experts: int,
    placement: str,
    capacity: int,
    layer: str = "",
    timeout_s: float = 30.0,
) -> Any:
    attributes = (group, experts, placement, capacity, layer, timeout_s)
    if torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad):
        return _Dispatch.apply(x, ids, weights, *attributes)
    with below_autograd():
        return EP_DISPATCH(x, ids, weights, *attributes)


def _autograd_combine(
    out: Tensor,
    slots: Tensor,
    group: str,
    capacity: int,
    dtype: torch.dtype,
    layer: str = "",
    timeout_s: float = 30.0,
    phase: str = "combine",
) -> Any:
    attributes = (group, capacity, dtype, layer, timeout_s, phase)
    if torch.is_grad_enabled() and out.requires_grad:
        return _Combine.apply(out, slots, *attributes)
    with below_autograd():
        return EP_COMBINE(out, slots, *attributes)


_TOLD = 'str layer="", float timeout_s=30.0'

EP_DISPATCH = define(
    "ep_dispatch(Tensor x, Tensor ids, Tensor weights, str group, int experts, str placement, SymInt capacity, "
    f"{_TOLD}) -> (Tensor rows, Tensor row_ids, Tensor row_weights, Tensor slots)",
    fake=_fake_dispatch,
    cpu=_dispatch,
    cuda=_dispatch,
    autograd=_autograd_dispatch,
)
EP_COMBINE = define(
    "ep_combine(Tensor out, Tensor slots, str group, SymInt capacity, ScalarType dtype, "
    f'{_TOLD}, str phase="combine") -> Tensor',
    fake=_fake_combine,
    cpu=_combine,
    cuda=_combine,
    autograd=_autograd_combine,
)
EP_REDISPATCH = define(
    f"ep_redispatch(Tensor grad_y, Tensor slots, str group, SymInt capacity, {_TOLD}) -> Tensor",
    fake=_fake_redispatch,
    cpu=_redispatch,
    cuda=_redispatch,
)
EP_RETURN_WEIGHTS = define(
    "ep_return_weights(Tensor grads, Tensor ids, Tensor slots, str group, int experts, str placement, "
    f"SymInt capacity, {_TOLD}) -> Tensor",
    fake=_fake_return_weights,
    cpu=_return_weights,
    cuda=_return_weights,
)
