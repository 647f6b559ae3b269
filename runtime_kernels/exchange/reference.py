"""What the exchanges compute, in plain torch and without any communication: what is sent, and what is made of it.

Everything here has static shapes and asks the data nothing, so it also runs on a device. A message is a uint8 tensor
[R, M]: row r goes to rank r, or came from it. Its parts lie behind each other, each at a multiple of 16 bytes.

Letters: R ranks, C capacity (slots a rank has for each source), T tokens, k choices, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.activations import wide
from moe_compiler.runtime_kernels.exchange.placement import locate

_ALIGNMENT = 16


@dataclass(frozen=True)
class Part:
    """One tensor of a message: `shape` is what one rank gets."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Its own bytes, without what aligns the next part."""
        return prod(self.shape) * self.dtype.itemsize


def message_bytes(parts: Sequence[Part]) -> int:
    """M: the bytes of one row of a message."""
    return sum(_aligned(part.bytes) for part in parts)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def views(message: Tensor, parts: Sequence[Part]) -> list[Tensor]:
    """The parts of a message uint8 [R,M] as views [R, *shape] of it."""
    found, offset = [], 0
    for part in parts:
        columns = message[:, offset : offset + part.bytes]
        # An empty part has no bytes that could be looked at as another dtype.
        view = columns.view(part.dtype) if part.bytes else columns.new_empty(columns.shape, dtype=part.dtype)
        found.append(view.reshape(message.shape[0], *part.shape))
        offset += _aligned(part.bytes)
    return found


def packed(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Part]]:
    """A message of tensors [R, *shape] each, and its parts."""
    parts = [Part(tensor.dtype, tuple(tensor.shape[1:])) for tensor in tensors]
    message = tensors[0].new_zeros((tensors[0].shape[0], message_bytes(parts)), dtype=torch.uint8)
    for view, tensor in zip(views(message, parts), tensors, strict=True):
        view.copy_(tensor)
    return message, parts


def token_at(slots: Tensor, capacity: int) -> Tensor:
    """slots [T,R] -> int64 [R,C]: the token in each slot, T for none."""
    tokens, ranks = slots.shape
    # What has no slot goes to a column of its own, which is cut off.
    place = torch.where(slots < 0, capacity, slots).to(torch.int64).t()
    table = torch.full((ranks, capacity + 1), tokens, dtype=torch.int64, device=slots.device)
    numbers = torch.arange(tokens, device=slots.device).expand(ranks, tokens)
    return table.scatter(1, place, numbers)[:, :capacity]


def rows_of(x: Tensor, at: Tensor) -> Tensor:
    """x [T, ..], at [R,C] of `token_at` -> [R, C, ..]: each slot's row, zeros in a slot without a token."""
    shape = (*at.shape, *x.shape[1:])
    if not x.shape[0]:
        return x.new_zeros(shape)
    rows = x.index_select(0, at.reshape(-1).clamp(max=x.shape[0] - 1)).view(shape)
    empty = (at == x.shape[0]).view(*at.shape, *([1] * (x.dim() - 1)))
    return rows.masked_fill(empty, 0)


def dispatched(
    x: Tensor, ids: Tensor, weights: Tensor, slots: Tensor, experts: int, placement: str, capacity: int
) -> list[Tensor]:
    """What goes to each rank: rows [R,C,H], local ids int32 [R,C,k], weights [R,C,k].

    A choice that rank r does not own, or a slot without a token, has the id of no expert and weight zero.
    """
    ranks = slots.shape[1]
    owners, local = locate(ids, experts, ranks, placement)
    at = token_at(slots, capacity)
    empty = (at == x.shape[0]).unsqueeze(-1)
    rank = torch.arange(ranks, device=ids.device).view(ranks, 1, 1)
    mine = (rows_of(owners, at) == rank) & ~empty
    none = experts // ranks + (rank < experts % ranks)  # the number of a rank's experts, in either placement
    row_ids = torch.where(mine, rows_of(local, at), none).to(torch.int32)
    return [rows_of(x, at), row_ids, rows_of(weights, at).masked_fill(~mine, 0)]


def combined(out: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """out [R,C,H], what each rank computed -> y [T,H]: sums over the ranks in their order, in fp32 or wider."""
    tokens, ranks = slots.shape
    total = out.new_zeros((tokens, out.shape[2]), dtype=wide(out.dtype))
    for rank in range(ranks):
        there = (slots[:, rank] >= 0).unsqueeze(1)
        rows = out[rank].index_select(0, slots[:, rank].clamp(min=0).to(torch.int64))
        # Not a product with 0: what stands in a slot that is not this token's may be no number.
        total += rows.to(total.dtype).masked_fill(~there, 0)
    return total.to(dtype)


def returned_weights(grads: Tensor, slots: Tensor, ids: Tensor, experts: int, placement: str) -> Tensor:
    """grads [R,C,k], as each rank made them -> [T,k]: of each choice the one of its owner, zero for no expert."""
    ranks, capacity, k = grads.shape
    owners, _ = locate(ids, experts, ranks, placement)
    rank = owners.clamp(max=ranks - 1)
    slot = slots.to(torch.int64).gather(1, rank).clamp(min=0)
    column = torch.arange(k, device=ids.device).expand(ids.shape)
    flat = (rank * capacity + slot) * k + column
    return grads.reshape(-1)[flat].masked_fill(owners == ranks, 0)
