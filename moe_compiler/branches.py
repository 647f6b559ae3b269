"""What may run beside a chain: branches of the graph that neither feed it nor wait for it, and what a second stream
for them is predicted to gain.

The usual one is a shared expert: it reads the block's tokens, and its result is added to the block's. On one stream it
takes its time before or after the chain. On two both share the device, and memory and arithmetic are no faster for
that: what one gets the other goes without. What is hidden is the time in which the branch has the device and uses
neither: a matmul of few rows starts, waits for its first loads, and ends, a few blocks at a time. It passes while the
chain uses the device, and not while the chain's own launches start and end:

    gain = idle time of the branch * the share of its time that the chain is at work - a fork and a join

From some hundred rows on a matmul's blocks take multiprocessors whole, and nothing is hidden any more. On an H200 that
is within 5 us of what was measured for three models up to 64 tokens (8 to 20 us), and says rightly that there is next
to nothing from 512 on (docs/cost_model.md).

Only matmuls count: what stands between them is fused into its neighbours by Inductor. `moe_compiler.beside` decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import networkx as nx
import sympy
import torch
from torch.fx import Node

from moe_compiler.cost import T
from moe_compiler.device_model import DeviceModel
from moe_compiler.launch import tokens_expr
from moe_compiler.moe_ir import is_moepdl, op_name, size_expr
from moe_compiler.report import BranchRecord

__all__ = [
    "FEW_ROWS",
    "FILLER",
    "FORK_JOIN_US",
    "IDLE_US",
    "WINDOW",
    "Branch",
    "Matmul",
    "branches",
    "gain_us",
    "idle_us",
    "matmul_of",
    "to_record",
]

# A fork and a join: a margin. Probe P7 finds less than a microsecond on an H200 (docs/benchmarks/pdl_progress.md), and
# the measurements fit as well with any value up to 5, IDLE_US being chosen to it; what gains less is not worth it.
FORK_JOIN_US = 2.0
# A dense matmul of few rows, with the pointwise kernel that goes with it, less its memory traffic: on an H200 the
# shared experts of docs/benchmarks/branch_stream.md take 19 to 21 us of that for three matmuls, 13 to 20 of them behind
# a chain.
IDLE_US = 6.0
# Up to so many rows all of that was hidden, and with 512 nothing; what is in between was not measured.
FEW_ROWS = 64
# How far around a chain, in nodes of the graph's order, its branches are looked for.
WINDOW = 128
# Key of a matmul's metadata: the exchange that it is computed beside. It is part of no branch.
FILLER = "moepdl_beside_exchange"
# Whose rates a dense matmul is given.
_LIKE = "gate_up"
_MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm"})


@dataclass(frozen=True)
class Matmul:
    """What a dense matmul moves and computes, and its rows, in the symbols of the graph's sizes."""

    bytes: sympy.Expr
    flops: sympy.Expr
    rows: sympy.Expr

    def subs(self, old: object, new: object) -> Matmul:
        """The same with a size replaced."""
        return Matmul(*(expr.subs(old, new) for expr in (self.bytes, self.flops, self.rows)))

    @property
    def known(self) -> bool:
        """Whether all three are numbers."""
        return not (self.bytes.free_symbols or self.flops.free_symbols or self.rows.free_symbols)


@dataclass(frozen=True)
class Branch:
    """Nodes in graph order, which may overlap with all of `beside`; `matmuls` are those among them."""

    nodes: tuple[Node, ...]
    beside: tuple[Node, ...]
    matmuls: Mapping[Node, Matmul]

    def in_tokens(self) -> dict[Node, Matmul]:
        """The matmuls with their sizes in T, as far as T decides them."""
        own = next((expr for node in self.beside if (expr := tokens_expr(node)) is not None), None)
        if own is None or not own.free_symbols:
            return dict(self.matmuls)
        return {node: matmul.subs(own, T) for node, matmul in self.matmuls.items()}

    @property
    def last(self) -> tuple[Node, ...]:
        """The matmuls that no other one of the branch reads from, directly or not."""
        before: set[Node] = set()
        for node in reversed(self.nodes):
            if node in before or node in self.matmuls:
                before.update(node.all_input_nodes)
        return tuple(node for node in self.matmuls if node not in before)


def matmul_of(node: Node) -> Matmul | None:
    """What a dense matmul costs; None for any other node."""
    if op_name(node) not in _MATMULS:
        return None
    matrices = [source for source in node.all_input_nodes if source.meta["val"].dim() >= 2]
    moved = sum((_bytes(value.meta["val"]) for value in (*node.all_input_nodes, node)), sympy.Integer(0))
    inner = size_expr(matrices[-1].meta["val"].shape[-2])
    shape = node.meta["val"].shape
    return Matmul(moved, 2 * _elements(node.meta["val"]) * inner, sympy.Mul(*map(size_expr, shape[:-1])))


def _elements(value: torch.Tensor) -> sympy.Expr:
    return sympy.Mul(*map(size_expr, value.shape))


def _bytes(value: torch.Tensor) -> sympy.Expr:
    return _elements(value) * value.element_size()


def branches(dag: nx.DiGraph, chain: Iterable[Node]) -> list[Branch]:
    """The branches beside a chain's nodes, largest first: with a matmul, and met by what follows the chain.

    dag: of `build_dag`. A node of the window that is reached from the chain, or reaches it, does so inside of the
    window, since the graph's order is one of the DAG's. What another block is part of is none.
    """
    group = list(chain)
    order: list[Node] = dag.graph["order"]
    position: dict[Node, int] = dag.graph["position"]
    places = [position[node] for node in group]
    window = order[max(min(places) - WINDOW, 0) : max(places) + WINDOW + 1]
    inside = set(window)
    before, behind = _reached(dag.pred, group, inside), _reached(dag.succ, group, inside)
    free = inside - before - behind
    found = []
    for part in nx.weakly_connected_components(dag.subgraph(free)):
        matmuls = {node: cost for node in part if (cost := matmul_of(node)) is not None}
        if not matmuls or any(is_moepdl(node) or FILLER in node.meta for node in part):
            continue
        if any(user in behind for node in part for user in dag.succ[node]):
            nodes = tuple(sorted(part, key=position.__getitem__))
            found.append(Branch(nodes, tuple(group), {node: matmuls[node] for node in nodes if node in matmuls}))
    return sorted(found, key=lambda branch: (-len(branch.nodes), position[branch.nodes[0]]))


def _reached(neighbours: Mapping[Node, Iterable[Node]], start: Iterable[Node], inside: set[Node]) -> set[Node]:
    """What can be reached from `start` within `inside`, `start` included."""
    found = set(start)
    pending = list(found)
    while pending:
        for other in neighbours[pending.pop()]:
            if other in inside and other not in found:
                found.add(other)
                pending.append(other)
    return found


def gain_us(chain_us: float, starting_us: float, idle: float) -> float:
    """What a second stream gains, negative where it costs.

    chain_us: the chain's time; starting_us: how much of it its launches start and end; idle: of the branch, `idle_us`.
    """
    at_work = max(chain_us - starting_us, 0.0) / chain_us if chain_us > 0 else 0.0
    return idle * at_work - FORK_JOIN_US


def idle_us(matmuls: Iterable[Matmul], tokens: int) -> float | None:
    """How long matmuls have the device and use neither memory nor arithmetic; None for sizes that T does not decide."""
    idle = 0.0
    for rows in (each.rows.subs(T, tokens) for each in matmuls):
        if rows.free_symbols:
            return None
        idle += IDLE_US if rows <= FEW_ROWS else 0.0
    return idle


def to_record(
    branch: Branch,
    model: DeviceModel | None,
    tokens: int,
    *,
    gain: float | None = None,
    at_tokens: int | None = None,
    overlapped: bool = False,
    limit: int | None = None,
    why: str = "",
) -> BranchRecord:
    """What the report shows of a branch.

    model, tokens: for the times of its matmuls, for T tokens. gain, at_tokens, overlapped, limit, why: what
    was predicted and decided for the chain (`moe_compiler.beside`).
    """
    matmuls = branch.in_tokens()
    moved, flops = (
        sum((getattr(matmul, key) for matmul in matmuls.values()), sympy.Integer(0)) for key in ("bytes", "flops")
    )
    times = {node: time for node, cost in matmuls.items() if (time := _matmul_us(cost, model, tokens)) is not None}
    return BranchRecord(
        nodes=tuple(node.name for node in branch.nodes),
        operators=tuple(map(op_name, branch.nodes)),
        beside=tuple(node.name for node in branch.beside),
        bytes=str(moved),
        flops=str(flops),
        predicted_us={node.name: round(time, 3) for node, time in times.items()},
        gain_us=None if gain is None else round(gain, 3),
        at_tokens=at_tokens,
        times_at=tokens if times else None,
        overlapped=overlapped,
        limit=limit,
        why=why,
    )


def _matmul_us(cost: Matmul, model: DeviceModel | None, tokens: int) -> float | None:
    """Predicted time of a matmul; None without a model, or for sizes that T does not decide."""
    kernel = None if model is None else model.kernels.get(_LIKE)
    own = cost.subs(T, tokens)
    if kernel is None or not own.known:
        return None
    idle = IDLE_US if own.rows <= FEW_ROWS else kernel.fixed_us
    return kernel.time_us(float(own.bytes), float(own.flops)) - kernel.fixed_us + idle
