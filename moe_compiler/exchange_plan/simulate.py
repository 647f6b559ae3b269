"""The operations of a block in time, on every class of ranks at once.

Each rank has two queues. On the current stream stand launches and waits, in the order of the block; on the exchanges'
stream the flights, in the order in which they were started, which is the same on every rank. A flight has the rank's
way out, and a later one waits for it. While a rank sends, its launches run at the transport's `beside` speed.

Between ranks: the rows from s to r take the longest of what leaves s, what reaches r and, between nodes, what leaves
and reaches their nodes, each divided by its bandwidth. So no link carries more than it can, and rows that go to a hot
rank hold back no others than their sender's. A wait ends when all that the rank sends and gets in this exchange has
passed, and when what it gets could have passed after what it got in the one before. A rank that starts late makes all
ranks wait: each expects something of it.

Events are handled in the order of the queues, for all classes in one step: what comes later in a queue never changes
what came before, since a flight is always started by the current stream. The cost is a few tensor operations an event,
whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_compiler.device_model import DeviceModel
from moe_compiler.exchange_plan.block import Op, Way
from moe_compiler.exchange_plan.links import Links
from moe_compiler.exchange_plan.traffic import Traffic

__all__ = ["Flight", "Simulation", "flight_of", "simulate"]

# 10^9 bytes a second in bytes a microsecond.
_GBS = 1e3
# Whose rate a copy within a rank's memory is given.
_COPY = "combine"


@dataclass(frozen=True)
class Flight:
    """One exchange of each class, float64 [classes].

    out_us, in_us    what a rank's rows take on the slowest link that they leave by, and that they reach it by
    call_us          before the first row;  latency_us: after the last
    floor_us         from start to arrival it takes no less
    out_bytes, in_bytes     that leave and reach a rank over its link;  node_bytes: that leave its node for others
    kept_bytes       that a rank keeps for itself
    """

    out_us: Tensor
    in_us: Tensor
    call_us: float
    latency_us: float
    floor_us: float
    out_bytes: Tensor
    in_bytes: Tensor
    node_bytes: Tensor
    kept_bytes: Tensor


@dataclass(frozen=True)
class Simulation:
    """start, end: float64 [operations, classes], microseconds; for a send, from its call to its last row's departure.

    waited: float64 [classes], how long the current stream stood still for exchanges. flights: by the send's name.
    """

    ops: tuple[Op, ...]
    start: Tensor
    end: Tensor
    waited: Tensor
    flights: dict[str, Flight]

    @property
    def by_class(self) -> Tensor:
        """When each class ends, float64 [classes]."""
        return self.end.max(0).values if self.ops else torch.zeros_like(self.waited)

    @property
    def us(self) -> float:
        """When the last rank ends."""
        return float(self.by_class.max())


def flight_of(op: Op, traffic: Traffic, links: Links, way: Way, model: DeviceModel, *, local: bool = False) -> Flight:
    """What a send takes. local: it is replaced by a copy of the same rows within the rank's memory."""
    assert op.rows is not None, "a send says what it moves"
    t, transport, rows = traffic, way.transport, op.rows
    size = rows.bytes / rows.of
    near, far, near_in, far_in = t.near, t.far, t.near_in, t.far_in
    node_out, node_in = t.node_out, t.node_in
    if rows.home:
        near, far, near_in, far_in, node_out, node_in = near_in, far_in, near, far, node_in, node_out
    if transport.whole_slots and not local:
        slots = float(-(-t.capacity // rows.of) * rows.of)
        near = near_in = slots * t.near_peers
        far = far_in = slots * t.far_peers
        node_out = node_in = slots * t.far_peers * t.node_ranks
    copied = (near + far + near_in + far_in) * size / model.kernels[_COPY].bytes_per_us
    sizes = {
        "out_bytes": near * size,
        "in_bytes": near_in * size,
        "node_bytes": node_out * size,
        "kept_bytes": t.kept * size,
    }
    if local:
        return Flight(copied, copied, 0.0, 0.0, 0.0, **sizes)
    share = transport.shares[way.ctas]
    several = links.several(t.ranks)
    per_us = links.gbs * share * _GBS
    out_us, in_us = near * size / per_us, near_in * size / per_us
    latency = links.latency_us if t.ranks > 1 else 0.0
    if several:
        node_per_us = links.node_gbs * share * _GBS
        out_us = torch.maximum(out_us, node_out * size / node_per_us)
        in_us = torch.maximum(in_us, node_in * size / node_per_us)
        latency = max(latency, links.node_latency_us)
    call = transport.call_us + transport.peer_us * (t.ranks - 1) if t.ranks > 1 else 0.0
    floor = transport.floor_us if t.ranks > 1 else 0.0
    return Flight(torch.maximum(out_us, copied), torch.maximum(in_us, copied), call, latency, floor, **sizes)


def simulate(
    ops: Sequence[Op], traffic: Traffic, links: Links, way: Way, model: DeviceModel, *, local: bool = False
) -> Simulation:
    """The operations in time. local: exchanges are copies within each rank's memory, and no rank waits for another."""
    zero = torch.zeros_like(traffic.tokens)
    clock, sending_until, received_until, waited = zero, zero, zero, zero
    beside = 1.0 if local else way.transport.beside[way.ctas]
    busy: list[tuple[Tensor, Tensor]] = []
    arrivals: dict[str, Tensor] = {}
    flights: dict[str, Flight] = {}
    starts, ends = [], []
    after_launch = False
    for op in ops:
        if op.kind == "send":
            flight = flight_of(op, traffic, links, way, model, local=local)
            flights[op.name] = flight
            start = torch.maximum(clock, sending_until)
            # The rows to the slowest receiver leave last.
            slowest = zero + flight.in_us.max() if not local else flight.in_us
            end = start + flight.call_us + torch.maximum(flight.out_us, slowest)
            if local:
                arrival = end
            else:
                arrival = _arrival(start, flight, received_until)
                received_until = arrival
            sending_until = end
            arrivals[op.name] = arrival
            busy.append((start, end))
            busy = [(begun, over) for begun, over in busy if bool((over > clock).any())]
        else:
            start = clock
            us = op.us
            if op.kind == "wait":
                stopped = torch.maximum(clock, arrivals[op.flight])
                waited = waited + (stopped - clock)
                clock = stopped
            elif op.pdl and after_launch:
                us = (us - model.boundary_us).clamp(min=0.0)
            clock = _worked(clock, us, busy, beside)
            end = clock
        after_launch = op.kind == "launch"
        starts.append(start)
        ends.append(end)
    shape = (len(ops), zero.numel())
    stacked = [torch.stack(times) if times else zero.new_zeros(shape) for times in (starts, ends)]
    return Simulation(tuple(ops), *stacked, waited, flights)


def _arrival(start: Tensor, flight: Flight, received_until: Tensor) -> Tensor:
    """When everything of an exchange has left and reached each class."""
    called = start + flight.call_us
    last_out = (called + flight.out_us).max()
    arrival = torch.maximum(last_out, called.max() + flight.in_us) + flight.latency_us
    arrival = torch.maximum(arrival, received_until + flight.in_us)
    return torch.maximum(arrival, start.max() + flight.floor_us)


def _worked(clock: Tensor, us: Tensor, busy: Sequence[tuple[Tensor, Tensor]], beside: float) -> Tensor:
    """When `us` microseconds of work that begin at `clock` are done; while the rank sends they pass `beside` as fast.

    busy: (from, until) of the rank's flights, which do not overlap, by growing time.
    """
    left = us
    for begun, over in busy:
        before = (begun - clock).clamp(min=0.0)
        alone = torch.minimum(left, before)
        clock, left = clock + alone, left - alone
        during = (over - torch.maximum(clock, begun)).clamp(min=0.0)
        # Nothing is left, so the flight is not waited for.
        during = torch.where(left > 0, during, 0.0)
        done = torch.minimum(left, during * beside)
        spent = torch.where(left > during * beside, during, done / beside if beside > 0 else 0.0)
        clock, left = clock + spent, left - done
    return clock + left
