"""What may run beside a chain: branches of the graph that neither feed it nor wait for it, and what a second stream
for them is predicted to gain.

The usual one is a shared expert: it reads the block's tokens, and its result is added to the block's. On one stream it
takes its time before or after the chain; on a stream of its own both share the device:

    one stream    chain + branch
    two streams   the longest of chain, branch, all their memory traffic, all their arithmetic; and a fork and a join

Only matmuls count: what stands between them is fused into its neighbours by Inductor. Their times are the roofline of
the block's own matmul kernel. Nothing is launched on a second stream today; the report tells what that leaves open.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx
import sympy
import torch
from torch.fx import Node

from moe_compiler.cost import T
from moe_compiler.dag import block_sizes
from moe_compiler.device_model import DeviceModel
from moe_compiler.launch import tokens_expr
from moe_compiler.moe_ir import op_name, size_expr
from moe_compiler.report import BranchRecord

__all__ = ["FORK_JOIN_US", "Branch", "branches", "gain_us", "matmul_cost", "to_record"]

# Two events and what they cost a graph: assumed, probe P7 measures it (docs/benchmarks/pdl_progress.md).
FORK_JOIN_US = 2.0
# How far around a chain, in nodes of the graph's order, its branches are looked for.
_WINDOW = 128
# Whose rates a dense matmul is given.
_LIKE = "gate_up"
_MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm"})


@dataclass(frozen=True)
class Branch:
    """Nodes in graph order, which may overlap with all of `beside`; `costs` has the bytes and FLOPs of the matmuls."""

    nodes: tuple[Node, ...]
    beside: tuple[Node, ...]
    costs: Mapping[Node, tuple[sympy.Expr, sympy.Expr]]


def matmul_cost(node: Node) -> tuple[sympy.Expr, sympy.Expr] | None:
    """(bytes, FLOPs) of a dense matmul, in the symbols of the graph's sizes; None for any other node."""
    if op_name(node) not in _MATMULS:
        return None
    matrices = [source for source in node.all_input_nodes if source.meta["val"].dim() >= 2]
    moved = sum((_bytes(value.meta["val"]) for value in (*node.all_input_nodes, node)), sympy.Integer(0))
    inner = size_expr(matrices[-1].meta["val"].shape[-2])
    return moved, 2 * _elements(node.meta["val"]) * inner


def _elements(value: torch.Tensor) -> sympy.Expr:
    return sympy.Mul(*map(size_expr, value.shape))


def _bytes(value: torch.Tensor) -> sympy.Expr:
    return _elements(value) * value.element_size()


def branches(dag: nx.DiGraph, chain: Iterable[Node]) -> list[Branch]:
    """The branches beside a chain's nodes, largest first: with a matmul, and met by what follows the chain.

    dag: of `build_dag`. A node of the window that is reached from the chain, or reaches it, does so inside of the
    window, since the graph's order is one of the DAG's.
    """
    group = list(chain)
    order: list[Node] = dag.graph["order"]
    position: dict[Node, int] = dag.graph["position"]
    places = [position[node] for node in group]
    window = order[max(min(places) - _WINDOW, 0) : max(places) + _WINDOW + 1]
    inside = set(window)
    before, behind = _reached(dag.pred, group, inside), _reached(dag.succ, group, inside)
    free = inside - before - behind
    found = []
    for part in nx.weakly_connected_components(dag.subgraph(free)):
        costs = {node: cost for node in part if (cost := matmul_cost(node)) is not None}
        if costs and any(user in behind for node in part for user in dag.succ[node]):
            nodes = tuple(sorted(part, key=position.__getitem__))
            found.append(Branch(nodes, tuple(group), {node: costs[node] for node in nodes if node in costs}))
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


def gain_us(chain: tuple[float, float, float], branch: tuple[float, float, float]) -> float:
    """What a second stream gains, negative where it costs. Each is (time, time of its memory traffic, of its FLOPs)."""
    together = max(chain[0], branch[0], chain[1] + branch[1], chain[2] + branch[2])
    return chain[0] + branch[0] - together - FORK_JOIN_US


def to_record(branch: Branch, model: DeviceModel | None, tokens: int) -> BranchRecord:
    """What the report shows of a branch; with a model, times for T tokens (LARGE ones where T is a symbol)."""
    own = next((expr for node in branch.beside if (expr := tokens_expr(node)) is not None), None)

    def in_tokens(size: sympy.Expr) -> sympy.Expr:
        return size if own is None or not own.free_symbols else size.subs(own, T)

    costs = {node: (in_tokens(moved), in_tokens(flops)) for node, (moved, flops) in branch.costs.items()}
    moved, flops = (sum((cost[i] for cost in costs.values()), sympy.Integer(0)) for i in (0, 1))
    times = {node: time for node, cost in costs.items() if (time := _matmul_us(cost, model, tokens)) is not None}
    gain = None
    chain = _chain_us(branch.beside, model, tokens)
    if chain is not None and len(times) == len(costs):
        mine = [sum(each) for each in zip(*times.values(), strict=True)]
        gain = gain_us(chain, (mine[0], mine[1], mine[2]))
    return BranchRecord(
        nodes=tuple(node.name for node in branch.nodes),
        operators=tuple(map(op_name, branch.nodes)),
        beside=tuple(node.name for node in branch.beside),
        bytes=str(moved),
        flops=str(flops),
        predicted_us={node.name: round(time[0], 3) for node, time in times.items()},
        gain_us=None if gain is None else round(gain, 3),
        at_tokens=None if gain is None else tokens,
    )


def _matmul_us(
    cost: tuple[sympy.Expr, sympy.Expr], model: DeviceModel | None, tokens: int
) -> tuple[float, float, float] | None:
    """Time, and that of its memory traffic and its FLOPs; None without a model, or for sizes that T does not decide."""
    kernel = None if model is None else model.kernels.get(_LIKE)
    moved, flops = (size.subs(T, tokens) for size in cost)
    if kernel is None or moved.free_symbols or flops.free_symbols:
        return None
    amounts = float(moved), float(flops)
    return (kernel.time_us(*amounts), *kernel.bounds_us(*amounts))


def _chain_us(stages: Sequence[Node], model: DeviceModel | None, tokens: int) -> tuple[float, float, float] | None:
    """The same of a chain's stages."""
    if model is None:
        return None
    sizes = block_sizes(stages)
    total = [0.0, 0.0, 0.0]
    for node in stages:
        time = model.time_us(op_name(node), sizes, tokens)
        bounds = model.bounds_us(op_name(node), sizes, tokens)
        if time is None or bounds is None:
            return None
        total = [a + b for a, b in zip(total, (time, *bounds), strict=True)]
    return total[0], total[1], total[2]
