"""Experts that are spread over the ranks of a group, read whole: what unmodified code of a sharded model computes with.

    moepdl::gather_experts(Tensor local, str group, int experts, str placement, str name) -> Tensor
        local [E_local, ..], this rank's experts -> [E, ..], those of all ranks in their own order
    moepdl::gather_expert(Tensor local, str group, int owner, SymInt[] shape, str name) -> Tensor
        one expert's tensor, which rank `owner` has; `local` is empty on all others

The gradient of a shared value is the sum over the ranks of what each makes for it, in the order of the ranks, in fp32
or wider: reduce_experts and reduce_expert. All are collectives of the group. `name` is the parameter's: ranks that read
different ones at the same time (a loop over the experts that were hit) are told so, and never get each other's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.activations import wide
from moe_compiler.runtime_kernels.exchange.flight import take_off
from moe_compiler.runtime_kernels.exchange.groups import group as group_of
from moe_compiler.runtime_kernels.exchange.placement import local_count, owned
from moe_compiler.runtime_kernels.exchange.reference import Part, packed, views
from moe_compiler.runtime_kernels.library import below_autograd, define, differentiable_once

# Nobody has set a timeout where the model's own code reads a weight.
TIMEOUT_S = 300.0


class GatherArgumentError(ValueError):
    """A tensor that is not this rank's share; the message says what it should be."""


def _most(experts: int, ranks: int, placement: str) -> int:
    return local_count(experts, ranks, 0, placement)


def _gather(local: Tensor, group: str, experts: int, placement: str, name: str) -> Tensor:
    ranks = group_of(group)
    own = owned(experts, ranks.ranks, ranks.rank, placement)
    if local.shape[0] != len(own):
        raise GatherArgumentError(
            f"rank {ranks.rank} of {ranks.ranks} owns {len(own)} of {experts} experts, got {local.shape[0]}"
        )
    most = _most(experts, ranks.ranks, placement)
    share = local.new_zeros((most, *local.shape[1:]))
    share[: len(own)] = local
    message, parts = packed([share.expand(ranks.ranks, *share.shape)])
    (shares,) = views(take_off(group, message, name, "gather", TIMEOUT_S).land(), parts)
    whole = local.new_empty((experts, *local.shape[1:]))
    for rank in range(ranks.ranks):
        theirs = owned(experts, ranks.ranks, rank, placement)
        whole[theirs.start : theirs.stop : theirs.step] = shares[rank, : len(theirs)]
    return whole


def _reduce(grad: Tensor, group: str, experts: int, placement: str, name: str) -> Tensor:
    ranks = group_of(group)
    most = _most(experts, ranks.ranks, placement)
    shares = grad.new_zeros((ranks.ranks, most, *grad.shape[1:]))
    for rank in range(ranks.ranks):
        theirs = owned(experts, ranks.ranks, rank, placement)
        shares[rank, : len(theirs)] = grad[theirs.start : theirs.stop : theirs.step]
    message, parts = packed([shares])
    (made,) = views(take_off(group, message, name, "reduce", TIMEOUT_S).land(), parts)
    return _summed(made)[: local_count(experts, ranks.ranks, ranks.rank, placement)].clone()


def _summed(made: Tensor) -> Tensor:
    total = made[0].to(wide(made.dtype))
    for other in made[1:]:
        total = total + other
    return total.to(made.dtype)


def _fake_gather(local: Tensor, group: str, experts: int, placement: str, name: str) -> Tensor:
    return local.new_empty((experts, *local.shape[1:]))


def _fake_reduce(grad: Tensor, group: str, experts: int, placement: str, name: str) -> Tensor:
    ranks = group_of(group)
    return grad.new_empty((local_count(experts, ranks.ranks, ranks.rank, placement), *grad.shape[1:]))


def _gather_one(local: Tensor, group: str, owner: int, shape: Sequence[int], name: str) -> Tensor:
    ranks = group_of(group)
    mine = ranks.rank == owner
    if mine and tuple(local.shape) != tuple(shape):
        raise GatherArgumentError(f"the expert of rank {owner} is {tuple(shape)}, got {tuple(local.shape)}")
    part = Part(local.dtype, tuple(shape))
    if mine:
        message, _ = packed([local.expand(ranks.ranks, *shape)])
    else:
        message = packed([local.new_empty((1, *shape))])[0][:0]
    rows = [int(rank == owner) for rank in range(ranks.ranks)]
    sends = [int(mine)] * ranks.ranks
    flight = take_off(group, message, name, "gather", TIMEOUT_S, send_rows=sends, received_rows=rows)
    (found,) = views(flight.land(), [part])
    return found[0].clone()


def _reduce_one(grad: Tensor, group: str, owner: int, name: str) -> Tensor:
    ranks = group_of(group)
    mine = ranks.rank == owner
    message, parts = packed([grad.unsqueeze(0)])
    rows = [int(rank == owner) for rank in range(ranks.ranks)]
    receives = [int(mine)] * ranks.ranks
    flight = take_off(group, message, name, "reduce", TIMEOUT_S, send_rows=rows, received_rows=receives)
    received = flight.land()
    return _summed(views(received, parts)[0]) if mine else grad.new_empty((0, *grad.shape[1:]))


def _fake_gather_one(local: Tensor, group: str, owner: int, shape: Sequence[int], name: str) -> Tensor:
    return local.new_empty(tuple(shape))


def _fake_reduce_one(grad: Tensor, group: str, owner: int, name: str) -> Tensor:
    return grad.new_empty(grad.shape if group_of(group).rank == owner else (0, *grad.shape[1:]))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gather: Any, reduce: Any, attributes: tuple[Any, ...], backward: tuple[Any, ...], local: Tensor
    ) -> Tensor:
        ctx.reduce, ctx.attributes = reduce, backward
        with below_autograd():
            return gather(local, *attributes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        with torch.no_grad():
            found = ctx.reduce(grad.contiguous(), *ctx.attributes)
        return None, None, None, None, *differentiable_once("gather_experts", [found], [grad])


def _autograd_gather(local: Tensor, group: str, experts: int, placement: str, name: str) -> Any:
    attributes = (group, experts, placement, name)
    if torch.is_grad_enabled() and local.requires_grad:
        return _Gather.apply(GATHER_EXPERTS, REDUCE_EXPERTS, attributes, attributes, local)
    with below_autograd():
        return GATHER_EXPERTS(local, *attributes)


def _autograd_gather_one(local: Tensor, group: str, owner: int, shape: Sequence[int], name: str) -> Any:
    attributes = (group, owner, list(shape), name)
    if torch.is_grad_enabled() and local.requires_grad:
        return _Gather.apply(GATHER_EXPERT, REDUCE_EXPERT, attributes, (group, owner, name), local)
    with below_autograd():
        return GATHER_EXPERT(local, *attributes)


GATHER_EXPERTS = define(
    "gather_experts(Tensor local, str group, int experts, str placement, str name) -> Tensor",
    fake=_fake_gather,
    cpu=_gather,
    cuda=_gather,
    autograd=_autograd_gather,
)
REDUCE_EXPERTS = define(
    "reduce_experts(Tensor grad, str group, int experts, str placement, str name) -> Tensor",
    fake=_fake_reduce,
    cpu=_reduce,
    cuda=_reduce,
)
GATHER_EXPERT = define(
    "gather_expert(Tensor local, str group, int owner, SymInt[] shape, str name) -> Tensor",
    fake=_fake_gather_one,
    cpu=_gather_one,
    cuda=_gather_one,
    autograd=_autograd_gather_one,
)
REDUCE_EXPERT = define(
    "reduce_expert(Tensor grad, str group, int owner, str name) -> Tensor",
    fake=_fake_reduce_one,
    cpu=_reduce_one,
    cuda=_reduce_one,
)
