"""The operations of a block in time, on every class of ranks at once.

Each rank has two queues. On the current stream stand launches and waits, in the order of the block; on the exchanges'
stream the flights, in the order in which they were started, which is the same on every rank. A flight has the rank's
way out, and a later one waits for it. While a rank sends, its launches run at the transport's `beside` speed.

Between ranks: the rows from s to r take the longest of what leaves s, what reaches r and, between nodes, what leaves
and reaches their nodes, each divided by its bandwidth; so no link carries more than it can. A rank tells the others
when it has sent everything, and a wait ends when all have told: the slowest link of the group, and the rank that
starts last, are what an exchange takes.

Events are handled in the order of the queues, for all classes in one step: what comes later in a queue never changes
what came before, since a flight is always started by the current stream. So an event costs a few tensor operations,
whatever the number of ranks; and several transports are simulated at once where they have the same operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_compiler.device_model import DeviceModel
from moe_compiler.exchange_plan.links import Links
from moe_compiler.exchange_plan.operation import Carrier, Op, Rows, Way
from moe_compiler.exchange_plan.traffic import Traffic

__all__ = ["Flight", "Simulation", "flight_of", "simulate", "times_us"]

# 10^9 bytes a second in bytes a microsecond.
_GBS = 1e3
# Whose rate a copy within a rank's memory is given.
_COPY = "combine"


@dataclass(frozen=True)
class Flight:
    """One exchange of each class; tensors are float64 [classes].

    us               that a rank sends: what its rows take on the slowest link that they leave or arrive by
    call_us          before the first row;  latency_us: after the last
    floor_us         from start to arrival it takes no less
    beside           how fast launches run meanwhile
    out_bytes, in_bytes     that leave and reach a rank over its link
    node_bytes       that leave its node for others;  node_in_bytes: that reach it
    """

    us: Tensor
    call_us: float
    latency_us: float
    floor_us: float
    beside: float
    out_bytes: Tensor
    in_bytes: Tensor
    node_bytes: Tensor
    node_in_bytes: Tensor


@dataclass(frozen=True)
class Simulation:
    """start, end: float64 [operations, classes], microseconds; of a send from its call until its last row has left.

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
        return self.end.max(0).values

    @property
    def us(self) -> float:
        """When the last rank ends."""
        return float(self.by_class.max())


def flight_of(rows: Rows, traffic: Traffic, links: Links, carrier: Carrier, model: DeviceModel) -> Flight:
    """What an exchange takes by a transport."""
    t, transport = traffic, carrier.transport
    size = rows.bytes / rows.of
    near, far, near_in, far_in, node_out, node_in = _live_rows(rows, t)
    if transport.whole_slots:
        slots = float(-(-t.capacity // rows.of) * rows.of)
        near = near_in = slots * t.near_peers
        far = far_in = slots * t.far_peers
        node_out = node_in = slots * t.far_peers * t.node_ranks
    per_us = links.gbs * transport.shares[carrier.ctas] * _GBS
    # Rows are read and written in memory, too.
    copied = (near + far + near_in + far_in) * size / model.kernels[_COPY].bytes_per_us
    us = torch.maximum(copied, near * size / per_us)
    arriving = near_in * size / per_us
    latency = links.latency_us
    if links.several(t.ranks):
        node_per_us = links.node_gbs * transport.shares[carrier.ctas] * _GBS
        us = torch.maximum(us, node_out * size / node_per_us)
        arriving = torch.maximum(arriving, node_in * size / node_per_us)
        latency = max(latency, links.node_latency_us)
    alone = t.ranks == 1
    return Flight(
        us=torch.maximum(us, arriving.max()),
        call_us=0.0 if alone else transport.call_us + transport.peer_us * (t.ranks - 1),
        latency_us=0.0 if alone else latency,
        floor_us=0.0 if alone else transport.floor_us,
        beside=1.0 if alone else transport.beside[carrier.ctas],
        out_bytes=near * size,
        in_bytes=near_in * size,
        node_bytes=node_out * size,
        node_in_bytes=node_in * size,
    )


def _local_copy(rows: Rows, t: Traffic, model: DeviceModel) -> Flight:
    """The same rows copied within the rank's memory."""
    near, far, near_in, far_in, _, _ = _live_rows(rows, t)
    us = (near + far + near_in + far_in) * (rows.bytes / rows.of) / model.kernels[_COPY].bytes_per_us
    none = torch.zeros_like(us)
    return Flight(us, 0.0, 0.0, 0.0, 1.0, none, none, none, none)


def _live_rows(rows: Rows, t: Traffic) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(sent within the node, sent to others, got from the node, got from others, out of the node, into it)."""
    if rows.home:
        return t.near_in, t.far_in, t.near, t.far, t.node_in, t.node_out
    return t.near, t.far, t.near_in, t.far_in, t.node_out, t.node_in


def simulate(
    ops: Sequence[Op], traffic: Traffic, links: Links, way: Way, model: DeviceModel, *, local: bool = False
) -> Simulation:
    """The operations in time. local: exchanges are copies within each rank's memory, and no rank waits for another."""
    sends = [op for op in ops if op.kind == "send"]
    flights = {}
    for op in sends:
        assert op.rows is not None, "a send says what it moves"
        carrier = way.home if op.rows.home else way.out
        flights[op.name] = (
            _local_copy(op.rows, traffic, model) if local else flight_of(op.rows, traffic, links, carrier, model)
        )
    run = _Run(ops, {name: [flight] for name, flight in flights.items()}, model.boundary_us, local=local)
    starts, ends = [], []
    for start, end in run.events(torch.zeros(1, traffic.tokens.numel(), dtype=torch.float64)):
        starts.append(start[0])
        ends.append(end[0])
    return Simulation(tuple(ops), torch.stack(starts), torch.stack(ends), run.waited[0], flights)


def times_us(ops: Sequence[Op], traffic: Traffic, links: Links, ways: Sequence[Way], model: DeviceModel) -> list[float]:
    """When the last rank ends, by each of these ways, which all have these operations."""
    flights = {}
    for op in ops:
        if op.rows is not None:
            chosen = [way.home if op.rows.home else way.out for way in ways]
            known = {carrier: flight_of(op.rows, traffic, links, carrier, model) for carrier in dict.fromkeys(chosen)}
            flights[op.name] = [known[carrier] for carrier in chosen]
    run = _Run(ops, flights, model.boundary_us, local=False)
    latest = torch.zeros(len(ways), traffic.tokens.numel(), dtype=torch.float64)
    for _, end in run.events(latest):
        latest = torch.maximum(latest, end)
    return [float(us) for us in latest.max(-1).values]


class _Run:
    """One pass over the operations; tensors are [ways, classes]. flights: of each send, one a way."""

    def __init__(self, ops: Sequence[Op], flights: dict[str, list[Flight]], boundary_us: float, *, local: bool) -> None:
        self.ops, self.flights, self.boundary_us, self.local = ops, flights, boundary_us, local
        self.waited = torch.zeros(())
        self.busy: list[tuple[Tensor, Tensor, Tensor]] = []

    def events(self, zero: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (start, end) of each operation in order."""
        clock, sending_until, self.waited = zero, zero, zero
        arrivals: dict[str, Tensor] = {}
        after_launch = False
        for op in self.ops:
            if op.kind == "send":
                start, end, arrivals[op.name] = self._send(op, clock, sending_until)
                sending_until = end
            else:
                start, us = clock, op.us
                if op.kind == "wait":
                    clock = torch.maximum(clock, arrivals[op.flight])
                    self.waited = self.waited + (clock - start)
                elif op.pdl and after_launch:
                    us = (us - self.boundary_us).clamp(min=0.0)
                clock = end = self._worked(clock, us)
            after_launch = op.kind == "launch"
            yield start, end

    def _send(self, op: Op, clock: Tensor, sending_until: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(start, end, arrival): arrival is when every rank has told that it has sent everything."""
        flights = self.flights[op.name]

        def column(name: str) -> Tensor:
            return torch.tensor([[getattr(flight, name)] for flight in flights], dtype=torch.float64)

        start = torch.maximum(clock, sending_until)
        end = start + column("call_us") + torch.stack([flight.us for flight in flights])
        self.busy = [each for each in self.busy if bool((each[1] > clock).any())]
        self.busy.append((start, end, column("beside")))
        if self.local:
            return start, end, end
        told = end.max(-1, keepdim=True).values + column("latency_us")
        least = start.max(-1, keepdim=True).values + column("floor_us")
        return start, end, torch.maximum(told, least).expand_as(end)

    def _worked(self, clock: Tensor, us: Tensor) -> Tensor:
        """When `us` microseconds of work that begin at `clock` are done; flights slow them while they last."""
        left = us.expand_as(clock)
        for begun, over, beside in self.busy:
            alone = torch.minimum(left, (begun - clock).clamp(min=0.0))
            clock, left = clock + alone, left - alone
            # How long work meets the flight: until it is done, or until the rank has sent.
            meets = torch.where(left > 0, (over - torch.maximum(clock, begun)).clamp(min=0.0), 0.0)
            spent = torch.where(left > meets * beside, meets, left / beside.clamp(min=1e-300))
            clock, left = clock + spent, (left - spent * beside).clamp(min=0.0)
        return clock + left
