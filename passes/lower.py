"""Replace every chain by one operator that carries its whole program as a constant argument.

Nothing refers to a registry of this process, so code that is loaded from a cache in another process is complete. The
operator stands where the last of its stages stood; whatever read an earlier result before that place moves behind it,
in its old order.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from moe_compiler.graph_pass import Context, graph_pass, insert
from moe_compiler.launch import Chain
from moe_compiler.moe_ir import Level
from moe_compiler.runtime_kernels import register as _register  # noqa: F401 - defines torch.ops.moepdl

__all__ = ["lower"]


def _move_readers_behind(chain: Chain, last: Node) -> None:
    """Nodes before `last` that depend on the chain, other than its stages, move behind it in their old order."""
    members = set(chain.nodes)
    dependent: set[Node] = set(members)
    moving: list[Node] = []
    node = chain.nodes[0]  # the stages are in the graph's order: nothing before the first depends on any of them
    while node is not last:
        if node not in members and any(source in dependent for source in node.all_input_nodes):
            dependent.add(node)
            moving.append(node)
        node = node.next
    at = last
    for node in moving:
        at.append(node)
        at = node


def _lower_chain(graph: Graph, chain: Chain, replaced: dict[Node, Node]) -> None:
    """Lower one chain; `replaced` maps results of chains lowered before to the nodes that now stand for them."""
    last = chain.nodes[-1]
    _move_readers_behind(chain, last)
    operands = [replaced.get(operand, operand) for operand in chain.operands]
    with graph.inserting_before(last):
        call = insert(last, torch.ops.moepdl.chain.default, (operands, chain.program.to_text()))
        items: dict[int, Node] = {}
        for _, _, position in chain.results:
            if position not in items:
                items[position] = insert(last, operator.getitem, (call, position))
    for node, index, position in chain.results:
        if index is None:
            node.replace_all_uses_with(items[position])
            replaced[node] = items[position]
            continue
        for user in list(node.users):
            if user.target is operator.getitem and user.args[1] == index:
                user.replace_all_uses_with(items[position])
                replaced[user] = items[position]
                graph.erase_node(user)
    for node in reversed(chain.nodes):
        for user in list(node.users):
            if user.target is operator.getitem and not user.users:
                graph.erase_node(user)
        graph.erase_node(node)


@graph_pass(level=Level.LAUNCHES, numerics="exact")
def lower(graph: Graph, context: Context) -> int:
    """Turn each chain into one call of moepdl::chain.

    before   r, o = order(i, E); a = gate_up(x, ..); p = down(a, ..); y = combine(p, w)
    after    c = chain([x, i, w, W1, W2], "<program>"); y = c[0]
    """
    replaced: dict[Node, Node] = {}
    for chain in context.chains:
        _lower_chain(graph, chain, replaced)
    return len(context.chains)
