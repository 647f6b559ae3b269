"""How an expert-parallel block is run: every order simulated with every transport, and the fastest taken.

The compiler's plan asks `choose` for one block; `moepdl plan` asks it for each case. An order that overlaps is only
taken where it is predicted to gain more than it may cost, and orders that no kernel can follow yet never are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from moe_compiler.block_program import backward_program, forward_program
from moe_compiler.branches import FORK_JOIN_US
from moe_compiler.device_model import DeviceModel
from moe_compiler.exchange_plan.block import operations
from moe_compiler.exchange_plan.builder import Block, shared_us
from moe_compiler.exchange_plan.links import Links, LinkTable, Transport
from moe_compiler.exchange_plan.operation import WISHED, Carrier, Op, Way
from moe_compiler.exchange_plan.simulate import Simulation, simulate, times_us
from moe_compiler.exchange_plan.traffic import CAPACITY_UNIT, Traffic

__all__ = ["Choice", "Group", "Limits", "Outcome", "carriers", "choose", "one_rank_us", "orders"]

# In how many chunks tokens, and columns, are cut.
_CHUNKS, _COLUMNS = (2, 4, 8), (2, 4)
# A block of columns has at least so many: what a tile of `down` is wide.
_LEAST_COLUMNS = 256


@dataclass(frozen=True)
class Group:
    """Ranks with their traffic, what joins them, and what their devices and transports take."""

    traffic: Traffic
    links: Links
    model: DeviceModel
    table: LinkTable


@dataclass(frozen=True)
class Limits:
    """What a choice is limited to, as the compiler's options have it.

    transports  the names of those that may be used; None: all of the table
    overlap     "auto": where it is predicted to gain; "on": even where not; "off": never
    chunks      of the tokens, where they are cut at all; 0: as many as are predicted best; 1: never cut
    """

    transports: frozenset[str] | None = None
    overlap: str = "auto"
    chunks: int = 0

    def allows(self, order: str, chunks: int) -> bool:
        """Whether an order of so many chunks may be taken; without overlap always."""
        if order == "plain":
            return True
        if self.overlap == "off":
            return False
        cut = chunks if order == "chunks" else 1
        return self.chunks == 0 or cut == self.chunks


@dataclass(frozen=True)
class Outcome:
    """A way and the time of the block by it, microseconds."""

    way: Way
    us: float


@dataclass(frozen=True)
class Choice:
    """What is chosen for one direction of a block, and what it was chosen from; times in microseconds.

    best       the way that is taken;  plain: the fastest without overlap
    local_us   the block without overlap, its exchanges replaced by copies within each rank's memory
    live_us    `best` with kernels that leave out unused slots and choices of other ranks
    wished     the fastest of the orders that no kernel can follow yet, None where there is none
    considered the fastest of each order, and of each transport in the order that is taken, by growing time
    ops, simulation  of `best`
    """

    direction: str
    best: Outcome
    plain: Outcome
    local_us: float
    live_us: float
    wished: Outcome | None
    considered: tuple[Outcome, ...]
    ops: tuple[Op, ...]
    simulation: Simulation

    @property
    def gain_us(self) -> float:
        """What overlap is predicted to gain."""
        return self.plain.us - self.best.us

    @property
    def exposed_us(self) -> float:
        """What the exchanges add to the block."""
        return self.best.us - self.local_us

    @property
    def why(self) -> str:
        """The reason for the choice, with predicted times."""
        same = self.best == self.plain
        others = [each for each in self.considered if each.way != self.best.way and each.way.order not in WISHED]
        overlapped = [each for each in others if each.way.order != "plain"]
        if not same:
            text = f"{self.best.us:.1f} us against {self.plain.us:.1f} without overlap ({self.plain.way.label})"
        elif overlapped:
            text = (
                f"nothing that overlaps gains more than {FORK_JOIN_US:g} us; "
                f"the best takes {overlapped[0].us:.1f} us ({overlapped[0].way.label})"
            )
        else:
            text = "there is nothing that may overlap"
        best = self.best.way
        alike = (each for each in others if (each.way.order, each.way.chunks) == (best.order, best.chunks))
        second = next((each for each in alike if each.way.transports != best.transports), None)
        return text if second is None else f"{text}; next by transport {second.us:.1f} us ({second.way.label})"


_UNLIMITED = Limits()


class _Case:
    """One direction of a block, its operations written once for all transports that treat rows alike."""

    def __init__(self, block: Block, group: Group, direction: str) -> None:
        self.block, self.group, self.direction = block, group, direction
        self.written: dict[tuple[str, int, bool, bool], tuple[Op, ...]] = {}

    def ops(self, way: Way, *, every_slot: bool = True) -> tuple[Op, ...]:
        key = (way.order, way.chunks, way.out.transport.packs, every_slot)
        if key not in self.written:
            self.written[key] = operations(
                self.block, self.group.traffic, self.group.model, way, self.direction, every_slot=every_slot
            )
        return self.written[key]

    def run(self, way: Way, *, local: bool = False, every_slot: bool = True) -> Simulation:
        group = self.group
        ops = self.ops(way, every_slot=every_slot)
        return simulate(ops, group.traffic, group.links, way, group.model, local=local)

    def outcomes(self, order: str, chunks: int, usable: Sequence[Carrier]) -> list[Outcome]:
        """The times of an order by every pair of transports, those with the same operations at once."""
        group = self.group
        found: list[Outcome] = []
        for packs in (False, True):
            out = [each for each in usable if each.transport.packs == packs]
            ways = [Way(there, back, order, chunks) for there in out for back in usable]
            if ways:
                times = times_us(self.ops(ways[0]), group.traffic, group.links, ways, group.model)
                found += map(Outcome, ways, times)
        return found


def _time(outcome: Outcome) -> float:
    return outcome.us


def carriers(table: LinkTable, *, several_nodes: bool, among: frozenset[str] | None = None) -> tuple[Carrier, ...]:
    """The transports that a group can use, with every number of CTAs. among: names; None for all."""
    usable = [
        each
        for name, each in table.transports.items()
        if (each.between_nodes or not several_nodes) and (among is None or name in among)
    ]
    return tuple(Carrier(each, ctas) for each in usable for ctas in each.shares)


def orders(block: Block, traffic: Traffic, direction: str, limits: Limits = _UNLIMITED) -> tuple[tuple[str, int], ...]:
    """The orders that a block can have, with the number of chunks."""
    found = [("plain", 1)]
    if traffic.ranks == 1:
        return tuple(found)
    if block.shared or direction == "backward":
        found.append(("filler", 1))
    found.append(("local_first", 1))
    cuts = (limits.chunks,) if limits.chunks > 1 else _CHUNKS
    found += [("chunks", n) for n in cuts if traffic.capacity // n >= CAPACITY_UNIT]
    hidden = block.sizes.hidden
    found += [("columns", n) for n in _COLUMNS if hidden % n == 0 and hidden // n >= _LEAST_COLUMNS]
    return tuple(each for each in found if limits.allows(*each))


def one_rank_us(block: Block, model: DeviceModel, tokens: int, direction: str) -> float:
    """The block on one rank that has all experts and exchanges nothing, for T tokens and uniform routing.

    Raises ValueError for sizes that the device's table does not cover.
    """
    program = (
        backward_program(block.sizes) if direction == "backward" else forward_program(block.sizes, save=block.save)
    )
    launches = program.variant_for(tokens).launches
    kernels, programmatic = [item.kernel for item in launches], sum(item.pdl for item in launches)
    us = model.chain_us(kernels, programmatic, block.sizes.named, tokens)
    if us is None:
        raise ValueError(f"{model.device} has no times for {', '.join(kernels)} of {block.sizes}")
    if not block.shared:
        return us
    rows = torch.tensor(float(tokens), dtype=torch.float64)
    halves = (shared_us(block, model, rows, half, backward=direction == "backward") for half in (0, 1))
    return us + sum(map(float, halves))


def choose(block: Block, group: Group, direction: str, limits: Limits = _UNLIMITED) -> Choice:
    """The way to run one direction ("forward" or "backward") of a block.

    Raises ValueError where no transport is left: none of those allowed, or none that works between nodes.
    """
    several = group.links.several(group.traffic.ranks)
    usable = carriers(group.table, several_nodes=several, among=limits.transports)
    if not usable:
        names = sorted(group.table.transports if limits.transports is None else limits.transports)
        raise ValueError(f"none of the transports {', '.join(names)} works {'between nodes' if several else 'here'}")
    case = _Case(block, group, direction)
    by_order: list[Outcome] = []
    every: dict[Way, Outcome] = {}
    for order, chunks in orders(block, group.traffic, direction, limits):
        outcomes = case.outcomes(order, chunks, usable)
        every |= {outcome.way: outcome for outcome in outcomes}
        by_order.append(min(outcomes, key=_time))
    plain = by_order[0]
    possible = [each for each in by_order if each.way.order not in WISHED]
    best = min(possible, key=_time)
    overlapped = [each for each in possible if each is not plain]
    if limits.overlap == "on" and overlapped:
        best = min(overlapped, key=_time)
    elif plain.us - best.us <= FORK_JOIN_US:
        best = plain
    wished = min((each for each in by_order if each.way.order in WISHED), key=_time, default=None)
    # The other transports by themselves, for the order that is taken.
    for name in dict.fromkeys(each.transport.name for each in usable):
        same = [replace(best.way, out=each, home=each) for each in usable if each.transport.name == name]
        by_order.append(min((every[way] for way in same), key=_time))
    considered = sorted({each.way: each for each in by_order}.values(), key=_time)
    return Choice(
        direction=direction,
        best=best,
        plain=plain,
        local_us=case.run(Way(_UNPACKED, _UNPACKED), local=True).us,
        live_us=case.run(best.way, every_slot=False).us,
        wished=wished,
        considered=tuple(considered),
        ops=case.ops(best.way),
        simulation=case.run(best.way),
    )


# What a local copy is written for: rows are not packed.
_UNPACKED = Carrier(Transport("local copy", 0.0, {0: 1.0}, {0: 1.0}), 0)
