"""What the ranks of a group agree on before an expert-parallel block is compiled: its capacity, and that all mean the
same block.

The first time a block is compiled every rank posts its terms and its number of tokens in the group's c10d store, and
reads those of all the others. The capacity is the largest number of tokens, rounded up to a multiple of 16. Terms that
differ are a PlanMismatchError on every rank; a rank that posts nothing within the timeout is a PeerError. A later
compilation under the same terms asks nobody: one rank alone may compile anew, for another number of tokens.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

from moe_compiler import __version__
from moe_compiler.errors import CapacityError, PeerError, PlanMismatchError
from moe_compiler.runtime_kernels.exchange import faults
from moe_compiler.runtime_kernels.exchange.groups import Group

__all__ = ["ROUNDING", "Agreed", "Terms", "agree"]

ROUNDING = 16

faults.raise_as(peer=PeerError, capacity=CapacityError)


@dataclass(frozen=True)
class Terms:
    """What must be equal on every rank: the block, its sizes, and how its exchange is made.

    block: its path in the model; capacity: options["capacity"]; the rest as in ExchangeRecord. experts_of: which
    experts a rank owns follows from experts, ranks and placement.
    """

    block: str
    experts: int
    k: int
    hidden: int
    dtype: str
    placement: str
    ranks: int
    transport: str
    capacity: int
    chunks: int
    overlap: str
    moepdl: str = __version__


@dataclass(frozen=True)
class Agreed:
    """The capacity of a block, and in words where it comes from."""

    capacity: int
    how: str


@dataclass
class _Known:
    """What a group has agreed on in this process, and how often each block was spoken of."""

    agreed: dict[Terms, Agreed] = dataclasses.field(default_factory=dict)
    times: dict[str, int] = dataclasses.field(default_factory=dict)


_KNOWN: WeakKeyDictionary[object, _Known] = WeakKeyDictionary()


def rounded(tokens: int) -> int:
    """The capacity for so many tokens."""
    return max(-(-tokens // ROUNDING), 1) * ROUNDING


def agree(group: Group, blocks: Sequence[tuple[Terms, int]], timeout_s: float, *, ask: bool) -> list[Agreed]:
    """The capacities of blocks in graph order, each with its terms and how many tokens this rank has now.

    ask: False where nothing will run (a dry run): then this rank's own numbers count.
    Raises PlanMismatchError, PeerError; CapacityError when this rank has more tokens than was agreed on before.
    """
    known = _KNOWN.setdefault(group.process_group, _Known())
    if not ask or group.fake:
        how = "of this rank alone: nothing runs" if not ask else "of this rank alone: the others do not exist"
        return [_settle(terms, known.agreed.get(terms), [tokens], how) for terms, tokens in blocks]
    posts = [(terms, tokens, _key(known, terms)) for terms, tokens in blocks if terms not in known.agreed]
    for terms, tokens, key in posts:
        group.store.set(f"{key}/{group.rank}", json.dumps({**dataclasses.asdict(terms), "tokens": tokens}))
    for terms, _, key in posts:
        said = _said(group, terms, key, timeout_s)
        _compare(terms, said)
        tokens_of = [int(other["tokens"]) for other in said]
        how = f"agreed by {len(said)} ranks, the largest has {max(tokens_of)} tokens"
        known.agreed[terms] = _settle(terms, None, tokens_of, how)
    return [_checked(terms, known.agreed[terms], tokens) for terms, tokens in blocks]


def _settle(terms: Terms, before: Agreed | None, tokens: list[int], how: str) -> Agreed:
    if before is not None:
        return before
    if terms.capacity:
        return Agreed(rounded(terms.capacity), 'given by options["capacity"]')
    return Agreed(rounded(max(tokens)), how)


def _checked(terms: Terms, agreed: Agreed, tokens: int) -> Agreed:
    if tokens > agreed.capacity:
        raise faults.capacity_fault(tokens, agreed.capacity, terms.block)
    return agreed


def _key(known: _Known, terms: Terms) -> str:
    """Where the ranks meet: the block, and the how-manieth time that it is spoken of."""
    number = known.times.get(terms.block, 0)
    known.times[terms.block] = number + 1
    return f"moepdl/agree/{terms.block}/{number}"


def _said(group: Group, terms: Terms, key: str, timeout_s: float) -> list[dict[str, Any]]:
    """What every rank posted, by rank."""
    keys = [f"{key}/{rank}" for rank in range(group.ranks)]
    why = f"it posted nothing within {timeout_s:g} s"
    missing: tuple[int, ...] = ()
    try:
        group.store.wait(keys, timedelta(seconds=timeout_s))
        return [json.loads(group.store.get(one)) for one in keys]
    except RuntimeError as error:
        try:
            missing = tuple(rank for rank, one in enumerate(keys) if not group.store.check([one]))
        except RuntimeError:
            why = f"the group's store is gone: {str(error).splitlines()[0]}"
    who = ", ".join(f"rank {rank}" for rank in missing[:8]) or "a peer"
    raise PeerError(
        f"no answer from {who} when {terms.block} was compiled, in group {group.name!r} of {group.ranks} ranks",
        why=why,
        try_="compile the same model on every rank at the same time; look at that rank's own log; "
        'options={"timeout_s": ...} gives slower ranks more time',
        ranks=missing,
        layer=terms.block,
        phase="compile",
    )


def _compare(terms: Terms, said: list[dict[str, Any]]) -> None:
    for field in dataclasses.fields(Terms):
        values = tuple(str(other.get(field.name)) for other in said)
        odd = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if odd is None:
            continue
        raise PlanMismatchError(
            f"{terms.block}: rank {odd} compiled it with {field.name} {values[odd]}, rank 0 with {values[0]}",
            why="ranks that exchange tokens must run the same block, spread and cut in the same way",
            try_="give every rank the same model, the same options and the same version of moepdl",
            field=field.name,
            values=values,
            rank=odd,
            layer=terms.block,
        )
