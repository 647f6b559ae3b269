"""What goes wrong between ranks, as errors that say what, where, why and what to try.

They are raised deep in an exchange, in the backward as well. Whoever embeds the exchange (the compiler) has error
classes of its own; `raise_as` makes the exchange raise those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ExchangeFault(RuntimeError):
    """Base of the two: `what` and `why` as sentences, `try_` what helps; further facts are attributes."""

    def __init__(self, what: str, *, why: str, try_: str, **facts: Any) -> None:
        self.what, self.why, self.try_ = what, why, try_
        vars(self).update(facts)
        super().__init__(f"{what}\n  why: {why}\n  try: {try_}")


class PeerFault(ExchangeFault):
    """Ranks that are dead, late, or doing something else: facts ranks, rank, layer, phase, epoch."""


class CapacityFault(ExchangeFault):
    """More tokens than slots: facts tokens, capacity, layer."""


_raised: dict[str, Callable[..., BaseException]] = {"peer": PeerFault, "capacity": CapacityFault}


def raise_as(*, peer: Callable[..., BaseException], capacity: Callable[..., BaseException]) -> None:
    """From now on raise what these make; they take the arguments of ExchangeFault."""
    _raised.update(peer=peer, capacity=capacity)


def peer_fault(
    what: str, *, why: str, try_: str, ranks: tuple[int, ...], layer: str, phase: str, epoch: int
) -> BaseException:
    """The error about peers: `ranks` are those to blame, as far as is known; epoch counts a group's exchanges."""
    rank = ranks[0] if ranks else None
    return _raised["peer"](what, why=why, try_=try_, ranks=ranks, rank=rank, layer=layer, phase=phase, epoch=epoch)


def capacity_fault(tokens: int, capacity: int, layer: str) -> BaseException:
    """The error about `tokens` tokens of a rank where the group agreed on `capacity`."""
    return _raised["capacity"](
        f"{layer or 'an expert-parallel block'} got {tokens} tokens on one rank, and its exchange has room for "
        f"{capacity}",
        why="every rank has a fixed number of slots for each other one, agreed when the block was compiled first: the "
        "largest number of tokens that any rank had then",
        try_=f'options={{"capacity": {-(-tokens // 16) * 16}}} on every rank, or more: the most tokens a rank ever has',
        tokens=tokens,
        capacity=capacity,
        layer=layer,
    )
