"""The exchanges as pairs of operators, a start and a wait, so that something else can be computed in between:

    moepdl::ep_dispatch_start, ep_dispatch_wait       ep_combine_start, ep_combine_wait
    moepdl::ep_redispatch_start, ep_redispatch_wait   ep_return_weights_start, ep_return_weights_wait

A start returns a token of one byte, and no value: the exchange under way is an attribute of the tensor, which torch
keeps with it from operator to operator. The wait of that very token returns what came. Results exist only from the wait
on, so nothing can read, write or free them before, and whatever orders a graph by its data orders these two.

after   of a start: the token of the group's exchange before. Every rank must start the exchanges of a group in the same
        order, so the order is a dependency in the data, which no scheduler undoes
beside  of a wait: results that must be computed before it, so that nothing moves the wait ahead of what it overlaps
The token stands first among the wait's arguments: Inductor moves what is read once in front of its reader, in the order
of the arguments, so the start stays in front of `beside`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.exchange import exchanges
from moe_compiler.runtime_kernels.exchange.exchanges import Route
from moe_compiler.runtime_kernels.exchange.flight import Flight
from moe_compiler.runtime_kernels.exchange.groups import group as group_of
from moe_compiler.runtime_kernels.library import define

_FLIGHT = "_moepdl_exchange"


class TokenError(RuntimeError):
    """A wait was given a token without an exchange under way."""


def _token(like: Tensor) -> Tensor:
    return torch.empty(1, dtype=torch.uint8, device=like.device)


def _carrying(like: Tensor, flight: Flight) -> Tensor:
    token = _token(like)
    setattr(token, _FLIGHT, flight)
    return token


def _flight(token: Tensor) -> Flight:
    flight: Flight | None = token.__dict__.pop(_FLIGHT, None)
    if flight is None:
        raise TokenError("a wait takes the very token that the start of its exchange returned, once")
    return flight


# dispatch


def _dispatch_start(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    after: list[Tensor],
    group: str,
    experts: int,
    placement: str,
    capacity: int,
    layer: str,
    timeout_s: float,
) -> tuple[Tensor, Tensor]:
    route = Route(group, capacity, layer, timeout_s)
    flight, slots = exchanges.start_dispatch(x, ids, weights, experts, placement, route)
    return _carrying(x, flight), slots


def _fake_dispatch_start(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    after: list[Tensor],
    group: str,
    experts: int,
    placement: str,
    capacity: int,
    layer: str,
    timeout_s: float,
) -> tuple[Tensor, Tensor]:
    return _token(x), ids.new_empty((ids.shape[0], group_of(group).ranks), dtype=torch.int32)


def _dispatch_wait(
    token: Tensor,
    beside: list[Tensor],
    group: str,
    capacity: int,
    hidden: int,
    k: int,
    dtype: torch.dtype,
    weights_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    return exchanges.end_dispatch(_flight(token), capacity, hidden, k, dtype, weights_dtype)


def _fake_dispatch_wait(
    token: Tensor,
    beside: list[Tensor],
    group: str,
    capacity: int,
    hidden: int,
    k: int,
    dtype: torch.dtype,
    weights_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    slots = group_of(group).ranks * capacity
    return (
        token.new_empty((slots, hidden), dtype=dtype),
        token.new_empty((slots, k), dtype=torch.int64),
        token.new_empty((slots, k), dtype=weights_dtype),
    )


# combine


def _combine_start(
    out: Tensor, after: list[Tensor], group: str, capacity: int, layer: str, timeout_s: float, phase: str
) -> Tensor:
    return _carrying(out, exchanges.start_combine(out, Route(group, capacity, layer, timeout_s), phase))


def _fake_combine_start(
    out: Tensor, after: list[Tensor], group: str, capacity: int, layer: str, timeout_s: float, phase: str
) -> Tensor:
    return _token(out)


def _combine_wait(
    token: Tensor,
    slots: Tensor,
    beside: list[Tensor],
    capacity: int,
    hidden: int,
    sent: torch.dtype,
    dtype: torch.dtype,
) -> Tensor:
    return exchanges.end_combine(_flight(token), slots, capacity, hidden, sent, dtype)


def _fake_combine_wait(
    token: Tensor,
    slots: Tensor,
    beside: list[Tensor],
    capacity: int,
    hidden: int,
    sent: torch.dtype,
    dtype: torch.dtype,
) -> Tensor:
    return token.new_empty((slots.shape[0], hidden), dtype=dtype)


# redispatch


def _redispatch_start(
    grad_y: Tensor, slots: Tensor, after: list[Tensor], group: str, capacity: int, layer: str, timeout_s: float
) -> Tensor:
    return _carrying(grad_y, exchanges.start_redispatch(grad_y, slots, Route(group, capacity, layer, timeout_s)))


def _fake_redispatch_start(
    grad_y: Tensor, slots: Tensor, after: list[Tensor], group: str, capacity: int, layer: str, timeout_s: float
) -> Tensor:
    return _token(grad_y)


def _redispatch_wait(
    token: Tensor, beside: list[Tensor], group: str, capacity: int, hidden: int, dtype: torch.dtype
) -> Tensor:
    return exchanges.end_redispatch(_flight(token), capacity, hidden, dtype)


def _fake_redispatch_wait(
    token: Tensor, beside: list[Tensor], group: str, capacity: int, hidden: int, dtype: torch.dtype
) -> Tensor:
    return token.new_empty((group_of(group).ranks * capacity, hidden), dtype=dtype)


# return_weights


def _return_weights_start(
    grads: Tensor, after: list[Tensor], group: str, capacity: int, layer: str, timeout_s: float
) -> Tensor:
    return _carrying(grads, exchanges.start_return_weights(grads, Route(group, capacity, layer, timeout_s)))


def _fake_return_weights_start(
    grads: Tensor, after: list[Tensor], group: str, capacity: int, layer: str, timeout_s: float
) -> Tensor:
    return _token(grads)


def _return_weights_wait(
    token: Tensor,
    ids: Tensor,
    slots: Tensor,
    beside: list[Tensor],
    experts: int,
    placement: str,
    capacity: int,
    dtype: torch.dtype,
) -> Tensor:
    return exchanges.end_return_weights(_flight(token), ids, slots, experts, placement, capacity, dtype)


def _fake_return_weights_wait(
    token: Tensor,
    ids: Tensor,
    slots: Tensor,
    beside: list[Tensor],
    experts: int,
    placement: str,
    capacity: int,
    dtype: torch.dtype,
) -> Tensor:
    return token.new_empty(ids.shape, dtype=dtype)


_TOLD = "str layer, float timeout_s"

define(
    "ep_dispatch_start(Tensor x, Tensor ids, Tensor weights, Tensor[] after, str group, int experts, str placement, "
    f"SymInt capacity, {_TOLD}) -> (Tensor token, Tensor slots)",
    fake=_fake_dispatch_start,
    cpu=_dispatch_start,
    cuda=_dispatch_start,
)
define(
    "ep_dispatch_wait(Tensor token, Tensor[] beside, str group, SymInt capacity, SymInt hidden, SymInt k, "
    "ScalarType dtype, ScalarType weights_dtype) -> (Tensor rows, Tensor row_ids, Tensor row_weights)",
    fake=_fake_dispatch_wait,
    cpu=_dispatch_wait,
    cuda=_dispatch_wait,
)
define(
    f"ep_combine_start(Tensor out, Tensor[] after, str group, SymInt capacity, {_TOLD}, str phase) -> Tensor",
    fake=_fake_combine_start,
    cpu=_combine_start,
    cuda=_combine_start,
)
define(
    "ep_combine_wait(Tensor token, Tensor slots, Tensor[] beside, SymInt capacity, SymInt hidden, ScalarType sent, "
    "ScalarType dtype) -> Tensor",
    fake=_fake_combine_wait,
    cpu=_combine_wait,
    cuda=_combine_wait,
)
define(
    f"ep_redispatch_start(Tensor grad_y, Tensor slots, Tensor[] after, str group, SymInt capacity, {_TOLD}) -> Tensor",
    fake=_fake_redispatch_start,
    cpu=_redispatch_start,
    cuda=_redispatch_start,
)
define(
    "ep_redispatch_wait(Tensor token, Tensor[] beside, str group, SymInt capacity, SymInt hidden, ScalarType dtype) "
    "-> Tensor",
    fake=_fake_redispatch_wait,
    cpu=_redispatch_wait,
    cuda=_redispatch_wait,
)
define(
    f"ep_return_weights_start(Tensor grads, Tensor[] after, str group, SymInt capacity, {_TOLD}) -> Tensor",
    fake=_fake_return_weights_start,
    cpu=_return_weights_start,
    cuda=_return_weights_start,
)
define(
    "ep_return_weights_wait(Tensor token, Tensor ids, Tensor slots, Tensor[] beside, int experts, str placement, "
    "SymInt capacity, ScalarType dtype) -> Tensor",
    fake=_fake_return_weights_wait,
    cpu=_return_weights_wait,
    cuda=_return_weights_wait,
)
