"""Which rank owns which expert, and which slot a token gets on a rank.

Letters: R ranks, E experts of the whole group, T tokens of this rank, k choices a token. Experts of a rank are counted
from 0 in ascending order: its LOCAL ids. `local_count(..)` of them is the local id of no expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

PLACEMENTS = ("contiguous", "round_robin")


class PlacementError(ValueError):
    """Experts that cannot be placed so; the message says why."""


def check_placement(experts: int, ranks: int, placement: str) -> None:
    """Raise PlacementError unless each of `ranks` ranks owns at least one of `experts` experts."""
    if placement not in PLACEMENTS:
        raise PlacementError(f"placement {placement!r} is not known; use one of {', '.join(PLACEMENTS)}")
    if experts < ranks:
        raise PlacementError(
            f"{experts} experts cannot be spread over {ranks} ranks: every rank has to own one; use a group of at most "
            f"{experts} ranks"
        )


def owned(experts: int, ranks: int, rank: int, placement: str) -> range:
    """The experts of a rank, ascending. "contiguous": neighbours, one more on the first E % R ranks."""
    check_placement(experts, ranks, placement)
    if placement == "round_robin":
        return range(rank, experts, ranks)
    base, extra = divmod(experts, ranks)
    begin = rank * base + min(rank, extra)
    return range(begin, begin + base + (rank < extra))


def local_count(experts: int, ranks: int, rank: int, placement: str) -> int:
    """How many experts a rank owns."""
    return len(owned(experts, ranks, rank, placement))


def owner(expert: int, experts: int, ranks: int, placement: str) -> int:
    """The rank that owns one expert."""
    return next(rank for rank in range(ranks) if expert in owned(experts, ranks, rank, placement))


def locate(ids: Tensor, experts: int, ranks: int, placement: str) -> tuple[Tensor, Tensor]:
    """The owner and the local id of each id, int64 in the shape of `ids`; owner R for an id that is no expert."""
    check_placement(experts, ranks, placement)
    ids = ids.to(torch.int64)
    if placement == "round_robin":
        rank, local = ids % ranks, torch.div(ids, ranks, rounding_mode="floor")
    else:
        base, extra = divmod(experts, ranks)
        wide = extra * (base + 1)  # the experts of the ranks that own one more
        behind = ids - wide
        rank = torch.where(
            ids < wide,
            torch.div(ids, base + 1, rounding_mode="floor"),
            extra + torch.div(behind, base, rounding_mode="floor"),
        )
        local = torch.where(ids < wide, ids % (base + 1), behind % base)
    inside = (ids >= 0) & (ids < experts)
    return torch.where(inside, rank, ranks), torch.where(inside, local, 0)


def token_slots(ids: Tensor, experts: int, ranks: int, placement: str) -> Tensor:
    """ids [T,k] -> slots int32 [T,R]: the slot of token t on rank r, in token order; -1 where r owns none of its
    experts. A token has one slot a rank, however many of its experts live there.
    """
    owners, _ = locate(ids, experts, ranks, placement)
    chosen = torch.zeros((ids.shape[0], ranks + 1), dtype=torch.bool, device=ids.device)
    chosen = chosen.scatter(1, owners, True)[:, :ranks]
    places = torch.cumsum(chosen, 0, dtype=torch.int32) - 1
    return torch.where(chosen, places, -1).to(torch.int32)
