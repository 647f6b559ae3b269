"""One operation of every rank, how a block runs, and the dependencies between a block's operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import networkx as nx
from torch import Tensor

from moe_compiler.exchange_plan.links import Transport

__all__ = ["ORDERS", "WISHED", "Carrier", "Op", "Rows", "Way", "dag_of", "layers"]

ORDERS = ("plain", "filler", "local_first", "chunks", "columns")
# Orders that no kernel can follow yet: told, and never chosen.
WISHED = ("columns",)


@dataclass(frozen=True)
class Carrier:
    """A transport with its CTAs, one of those that its table has."""

    transport: Transport
    ctas: int

    @property
    def label(self) -> str:
        """For a reader: "push (16 CTAs)"."""
        return f"{self.transport.name} ({self.ctas} CTAs)" if len(self.transport.shares) > 1 else self.transport.name


@dataclass(frozen=True)
class Way:
    """How a block runs: what carries rows to the experts and home, an order of `ORDERS`, and how many chunks.

    chunks: of the tokens, or of the columns where the order is "columns"; else 1.
    """

    out: Carrier
    home: Carrier
    order: str = "plain"
    chunks: int = 1

    @property
    def transports(self) -> tuple[str, str]:
        """The names of both transports."""
        return self.out.transport.name, self.home.transport.name

    @property
    def order_label(self) -> str:
        """For a reader: "local rows first"."""
        return {
            "plain": "no overlap",
            "filler": "filler only",
            "local_first": "local rows first",
            "chunks": f"{self.chunks} chunks",
            "columns": f"{self.chunks} blocks of columns",
        }[self.order]

    @property
    def label(self) -> str:
        """For a reader: "push (16 CTAs) out, copy_engine home, local rows first"."""
        same = self.out == self.home
        carriers = self.out.label if same else f"{self.out.label} out, {self.home.label} home"
        return f"{carriers}, {self.order_label}"


@dataclass(frozen=True)
class Rows:
    """What an exchange moves: bytes of a row; home: from where the experts are back to the tokens' ranks."""

    bytes: int
    home: bool
    of: int = 1


@dataclass(frozen=True)
class Op:
    """One operation of every rank. us: float64 [classes], what it takes alone on the current stream.

    kind    "launch" on the current stream; "send": the flight that a start begins, on the exchanges' stream; "wait"
    rows    what a send moves; flight: the send that a wait ends
    pdl     a programmatic launch, where a launch stands before it
    """

    name: str
    kind: str
    us: Tensor
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    pdl: bool = False
    rows: Rows | None = None
    flight: str = ""


def layers(ops: Sequence[Op], count: int) -> tuple[Op, ...]:
    """The operations of `count` equal layers, one after the other; names and buffers get the layer's number."""
    if count == 1:
        return tuple(ops)
    found = []
    for layer in range(count):
        mark = f"@{layer}"
        found += [
            replace(
                op,
                name=op.name + mark,
                reads=tuple(name + mark for name in op.reads),
                writes=tuple(name + mark for name in op.writes),
                flight=op.flight + mark if op.flight else "",
            )
            for op in ops
        ]
    return tuple(found)


def dag_of(ops: Sequence[Op]) -> nx.DiGraph:
    """The dependencies between operations by their names: "raw" by buffer, "order" between the group's exchanges.

    Node attribute `op`. Raises ValueError when an operation reads what a later one writes, or a name stands twice.
    """
    dag = nx.DiGraph()
    writer: dict[str, str] = {}
    wrote = {name for op in ops for name in op.writes}
    sent = ""
    for op in ops:
        if op.name in dag:
            raise ValueError(f"{op.name} stands twice")
        dag.add_node(op.name, op=op)
        for name in op.reads:
            if name in writer:
                dag.add_edge(writer[name], op.name, kind="raw")
            elif name in wrote:
                raise ValueError(f"{op.name} reads {name}, which is only written later")
        for name in op.writes:
            writer[name] = op.name
        if op.kind == "send":
            if sent and not dag.has_edge(sent, op.name):
                dag.add_edge(sent, op.name, kind="order")
            sent = op.name
    return dag
