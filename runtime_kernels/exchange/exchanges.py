"""The four exchanges of an expert-parallel block, each in two halves: what is sent, and what is made of what came.

    dispatch         tokens, ids and routing weights to the ranks that own the experts
    combine          what those computed back to the tokens, summed there; also the gradient of dispatch by the tokens
    redispatch       the gradient of combine: along the slots of the dispatch
    return_weights   the gradient of dispatch by the routing weights

A token goes to a rank once, however many of its experts live there, and comes back once, with their sum. Shapes are
static: every rank has `capacity` slots for each source, used or not.

Letters: R ranks, C capacity, T tokens of this rank, k choices a token, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.exchange import faults
from moe_compiler.runtime_kernels.exchange.flight import Flight, refuse, take_off
from moe_compiler.runtime_kernels.exchange.groups import group
from moe_compiler.runtime_kernels.exchange.placement import token_slots
from moe_compiler.runtime_kernels.exchange.reference import (
    Part,
    combined,
    dispatched,
    packed,
    returned_weights,
    rows_of,
    token_at,
    views,
)


class ExchangeArgumentError(ValueError):
    """Arguments of an exchange that do not fit together; the message names the argument."""


@dataclass(frozen=True)
class Route:
    """Between whom, with how many slots a rank for each source, for whom (in errors), and how long a wait may take."""

    group: str
    capacity: int
    layer: str
    timeout_s: float

    @property
    def ranks(self) -> int:
        return group(self.group).ranks


def start_dispatch(
    x: Tensor, ids: Tensor, weights: Tensor, experts: int, placement: str, route: Route
) -> tuple[Flight, Tensor]:
    """x [T,H], ids [T,k], weights [T,k] -> the flight, slots int32 [T,R]. Raises the error about capacity."""
    phase = "dispatch"
    if x.dim() != 2 or ids.dim() != 2 or ids.shape != weights.shape or ids.shape[0] != x.shape[0]:
        raise ExchangeArgumentError(
            f"x must be [T,H], ids and weights [T,k]; got {tuple(x.shape)}, {tuple(ids.shape)}, {tuple(weights.shape)}"
        )
    if x.shape[0] > route.capacity:
        error = faults.capacity_fault(x.shape[0], route.capacity, route.layer)
        refuse(route.group, error, route.layer, phase, route.timeout_s, x.device)
    slots = token_slots(ids, experts, route.ranks, placement)
    message, _ = packed(dispatched(x, ids, weights, slots, experts, placement, route.capacity))
    return take_off(route.group, message, route.layer, phase, route.timeout_s), slots


def end_dispatch(
    flight: Flight, capacity: int, hidden: int, k: int, dtype: torch.dtype, weights_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """-> rows [R*C,H], row_ids int64 [R*C,k], row_weights [R*C,k]."""
    parts = [Part(dtype, (capacity, hidden)), Part(torch.int32, (capacity, k)), Part(weights_dtype, (capacity, k))]
    with flight.landed() as message:
        rows, ids, weights = views(message, parts)
        return _fresh(rows, hidden), ids.reshape(-1, k).to(torch.int64), _fresh(weights, k)


def _fresh(part: Tensor, width: int) -> Tensor:
    """[R, C, width] of a message as [R*C, width] in memory of its own."""
    return part.reshape(-1, width).clone(memory_format=torch.contiguous_format)


def start_combine(out: Tensor, route: Route, phase: str) -> Flight:
    """out [R*C,H], each source's part in a row of its own -> the flight."""
    if out.dim() != 2 or out.shape[0] != route.ranks * route.capacity:
        raise ExchangeArgumentError(
            f"out must be [R*C,H] with R={route.ranks}, C={route.capacity}, got {tuple(out.shape)}"
        )
    message, _ = packed([out.reshape(route.ranks, route.capacity, out.shape[1])])
    return take_off(route.group, message, route.layer, phase, route.timeout_s)


def end_combine(
    flight: Flight, slots: Tensor, capacity: int, hidden: int, sent: torch.dtype, dtype: torch.dtype
) -> Tensor:
    """-> y [T,H] in `dtype` of what came in `sent`: for each token the sum over the ranks, in fp32 or wider."""
    with flight.landed() as message:
        (out,) = views(message, [Part(sent, (capacity, hidden))])
        return combined(out, slots, dtype)


def start_redispatch(grad_y: Tensor, slots: Tensor, route: Route) -> Flight:
    """grad_y [T,H], slots of the dispatch -> the flight."""
    message, _ = packed([rows_of(grad_y, token_at(slots, route.capacity))])
    return take_off(route.group, message, route.layer, "backward of combine", route.timeout_s)


def end_redispatch(flight: Flight, capacity: int, hidden: int, dtype: torch.dtype) -> Tensor:
    """-> rows [R*C,H], zeros in unused slots."""
    with flight.landed() as message:
        (rows,) = views(message, [Part(dtype, (capacity, hidden))])
        return _fresh(rows, hidden)


def start_return_weights(grads: Tensor, route: Route) -> Flight:
    """grads [R*C,k], the gradient of row_weights -> the flight."""
    message, _ = packed([grads.reshape(route.ranks, route.capacity, grads.shape[1])])
    return take_off(route.group, message, route.layer, "backward of dispatch, weights", route.timeout_s)


def end_return_weights(
    flight: Flight, ids: Tensor, slots: Tensor, experts: int, placement: str, capacity: int, dtype: torch.dtype
) -> Tensor:
    """-> [T,k] in `dtype`: of each choice what the rank made that owns the expert, zero for no expert."""
    with flight.landed() as message:
        (grads,) = views(message, [Part(dtype, (capacity, ids.shape[1]))])
        return returned_weights(grads, slots, ids, experts, placement)
