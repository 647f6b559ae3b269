"""Let exchanges travel while something else is computed.

Each exchange is a start and a wait. The start moves to right behind what it reads, the wait to right in front of what
reads it; what lies between the two runs while the bytes are under way. Dense matmuls near by that are independent of
the exchange (a shared expert, in the backward the gradients of its weights) are brought in between. Where a dispatch
and the combine behind it could have the same ones, they share them, half of the work each.

Every rank starts the exchanges of a group in the same order, before and after: each start reads the token of the one
before. A wait reads what it was given to overlap with, so no scheduler computes that after it. Nothing in the data
keeps it behind the start; but the start, whose output is one byte, stands first among what the wait reads.

With options["overlap"] "off" nothing moves: every exchange is waited for where it starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import networkx as nx
import sympy
from torch.fx import Graph, Node

from moe_compiler.branches import FILLER, WINDOW, matmul_of
from moe_compiler.dag import build_dag
from moe_compiler.graph_pass import Context, graph_pass
from moe_compiler.inline import named_arguments
from moe_compiler.moe_ir import STARTS, WAITS, Level, is_moepdl, op_name
from moe_compiler.report import OverlapRecord

__all__ = ["overlap_all_to_all"]


@dataclass
class _Exchange:
    """A start and its wait, and the matmuls that were brought in between, in graph order."""

    start: Node
    wait: Node
    filler: list[Node] = field(default_factory=list)


class _Order:
    """The calls of a graph in an order that its DAG allows, and moves that keep it so."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.dag = build_dag(graph)
        self.number()

    def number(self) -> None:
        self.place = {node: index for index, node in enumerate(self.graph.nodes)}

    def early(self, start: Node) -> None:
        """Move a start up to right behind the last of what has to come before it."""
        before = [*self.dag.predecessors(start), *start.all_input_nodes]
        last = max(before, key=self.place.__getitem__)
        if last.op == "placeholder":
            last = max(self.graph.find_nodes(op="placeholder"), key=self.place.__getitem__)
        if last.next is not start:
            last.append(start)
            self.number()
        self.together(start)

    def late(self, wait: Node) -> None:
        """Move a wait, and the names of its results, down to right in front of the first that has to come after it."""
        items = [user for user in wait.users if op_name(user) == "getitem"]
        own = {wait, *items}
        after = [user for node in own for user in (*node.users, *(self.dag.successors(node))) if user not in own]
        first = min(after, key=self.place.__getitem__, default=None)
        if first is None:
            return
        for node in (wait, *sorted(items, key=self.place.__getitem__)):
            first.prepend(node)
        self.number()

    def together(self, node: Node) -> None:
        """Keep the names of a call's results right behind it."""
        at = node
        for item in sorted((u for u in node.users if op_name(u) == "getitem"), key=self.place.__getitem__):
            at.append(item)
            at = item
        self.number()

    def free(self, exchange: _Exchange) -> list[Node]:
        """The matmuls near an exchange that neither feed its start nor depend on its wait, and may be in between."""
        feeding, depending = nx.ancestors(self.dag, exchange.start), nx.descendants(self.dag, exchange.wait)
        low, high = self.place[exchange.start] - WINDOW, self.place[exchange.wait] + WINDOW
        found = []
        for node in self.dag:
            if not low <= self.place[node] <= high or node in feeding or node in depending:
                continue
            if matmul_of(node) is not None and node.meta.get(FILLER) is None:
                found.append(node)
        return sorted(found, key=self.place.__getitem__)

    def between(self, exchange: _Exchange, matmul: Node) -> bool:
        """Bring a matmul of `free`, with what it needs or what needs it, in between; False where that cannot be."""
        start, wait = self.place[exchange.start], self.place[exchange.wait]
        at = self.place[matmul]
        if start < at < wait:
            return True
        tied = nx.descendants(self.dag, matmul) if at < start else nx.ancestors(self.dag, matmul)
        moving = [node for node in (*tied, matmul) if (self.place[node] < start) == (at < start)]
        moving = [node for node in moving if not start <= self.place[node] <= wait]
        if any(is_moepdl(node) for node in moving) or len(moving) > WINDOW:
            return False
        moving.sort(key=self.place.__getitem__)
        for node in moving if at > wait else reversed(moving):
            if at > wait:
                exchange.wait.prepend(node)
            else:
                self.last_of(exchange.start).append(node)
        self.number()
        return True

    def last_of(self, start: Node) -> Node:
        """A start, or the last of the names of its results behind it."""
        node = start
        while op_name(node.next) == "getitem" and node.next.args[0] is start:
            node = node.next
        return node


def _work(matmuls: Iterable[Node]) -> sympy.Expr:
    costs = (matmul_of(node) for node in matmuls)
    return sum((cost.flops for cost in costs if cost is not None), sympy.Integer(0))


def _first_half(matmuls: Sequence[Node]) -> list[Node]:
    """The first of them, up to half of the work; sizes that are symbols count as much as a large number of tokens."""
    works = [_work([node]) for node in matmuls]
    works = [float(work.subs(dict.fromkeys(work.free_symbols, 1024))) for work in works]
    taken, total = 0.0, sum(works)
    found = []
    for node, work in zip(matmuls, works, strict=True):
        taken += work
        if taken > total / 2 * 1.001:
            break
        found.append(node)
    return found


def _exchanges(graph: Graph) -> list[_Exchange]:
    """The exchanges in the order of their starts."""
    found = []
    for node in graph.nodes:
        if is_moepdl(node) and op_name(node) in STARTS:
            tokens = [node, *(user for user in node.users if op_name(user) == "getitem")]
            readers = {user for token in tokens for user in token.users if is_moepdl(user) and op_name(user) in WAITS}
            (wait,) = (user for user in readers if named_arguments(user)["token"] in tokens)
            found.append(_Exchange(node, wait))
    return found


def _tie(exchange: _Exchange, dag: nx.DiGraph) -> None:
    """Let the wait read what was brought in between, but for what another of them depends on anyway."""
    schema = [argument.name for argument in exchange.wait.target._schema.arguments]
    inner = {source for node in exchange.filler for source in nx.ancestors(dag, node)}
    last = [node for node in exchange.filler if node not in inner]
    args = list(exchange.wait.args)
    args[schema.index("beside")] = last
    exchange.wait.args = tuple(args)


@graph_pass(level=Level.STAGES, numerics="exact")
def overlap_all_to_all(graph: Graph, context: Context) -> int:
    """Start every exchange as early as its inputs allow; wait as late as its users allow.

    Moves nodes only. Exchanges of one group keep their order on every rank.

    before   s = combine_start(o); y = combine_wait(s); b = mm(x, W); z = y + b
    after    s = combine_start(o); b = mm(x, W); y = combine_wait(s, beside=[b]); z = y + b
    """
    exchanges = _exchanges(graph)
    if not exchanges or context.options.overlap == "off":
        return 0
    before = list(graph.nodes)
    order = _Order(graph)
    for exchange in exchanges:
        order.early(exchange.start)
    for exchange in reversed(exchanges):
        order.late(exchange.wait)
    for exchange, following in zip(exchanges, [*exchanges[1:], None], strict=True):
        mine = order.free(exchange)
        theirs = set(order.free(following)) if following is not None else set()
        shared = [node for node in mine if node in theirs]
        kept = set(mine) - set(shared) | set(_first_half(shared))
        for node in mine:
            if node in kept and order.between(exchange, node):
                node.meta[FILLER] = exchange.start.name
                exchange.filler.append(node)
    tied = 0
    for exchange in exchanges:
        exchange.filler = [
            node
            for node in exchange.filler
            if order.place[exchange.start] < order.place[node] < order.place[exchange.wait]
        ]
        if exchange.filler:
            _tie(exchange, order.dag)
            tied += 1
        context.report.overlaps.append(_record(exchange, order, context))
    moved = list(graph.nodes) != before
    return max(tied, int(moved))


def _record(exchange: _Exchange, order: _Order, context: Context) -> OverlapRecord:
    inside = [
        node
        for node in order.dag
        if order.place[exchange.start] < order.place[node] < order.place[exchange.wait] and op_name(node) != "getitem"
    ]
    stages = tuple(op_name(node) for node in inside if is_moepdl(node) and op_name(node) not in STARTS | WAITS)
    named = named_arguments(exchange.start)
    return OverlapRecord(
        direction="backward" if context.phase == "backward" else "forward",
        exchange=op_name(exchange.start).removesuffix("_start"),
        block=str(named["layer"]),
        matmuls=len(exchange.filler),
        stages=stages,
    )
