"""Replace every chain by one operator that carries its whole program as a constant argument.

Nothing refers to a registry of this process, so code that is loaded from a cache in another process is complete. The
operator stands where the last of its stages stood; whatever read an earlier result before that place moves behind it,
in its old order.

A chain with a second stream becomes two operators, a start and a wait. The start stands right behind the last of its
operands. The branch comes behind the start, and the wait behind the branch. That is the order in the graph, and data
keeps it when Inductor schedules anew: the wait reads the start's token and the last matmuls of the branch, and the
results exist from the wait on. Nothing in the data keeps the branch behind the start. But the start, whose only output
is one byte, is what an order for the least memory takes first, and an order that took the branch first would be slower
and no less right.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from moe_compiler.aliasing import mutated_arguments
from moe_compiler.dag import storages
from moe_compiler.graph_pass import Context, graph_pass, insert
from moe_compiler.launch import Beside, Chain
from moe_compiler.moe_ir import Level
from moe_compiler.runtime_kernels import register as _register  # noqa: F401 - defines torch.ops.moepdl

__all__ = ["lower"]


def _move_readers_behind(chain: Chain, first: Node, last: Node) -> None:
    """Nodes from `first` to `last` that depend on the chain, other than its stages, move behind `last`, in their order.

    Whoever writes what the chain, or a node that moves, reads or writes depends on it too.
    """
    members = set(chain.nodes)
    dependent: set[Node] = set(members)
    moving: list[Node] = []
    read = {storage for operand in chain.operands for storage in storages(operand)}
    written: set[object] = set()
    node = first
    while node is not last:
        if node not in members:
            writes = {storage for argument in mutated_arguments(node) for storage in storages(argument)}
            reads = {storage for source in node.all_input_nodes for storage in storages(source)}
            if writes & read or reads & written or any(source in dependent for source in node.all_input_nodes):
                dependent.add(node)
                moving.append(node)
                read |= reads
                written |= writes
        node = node.next
    at = last
    for node in moving:
        at.append(node)
        at = node


def _lower_chain(graph: Graph, chain: Chain, replaced: dict[Node, Node]) -> None:
    """Lower one chain; `replaced` maps results of chains lowered before to the nodes that now stand for them."""
    operands = [replaced.get(operand, operand) for operand in chain.operands]
    text = chain.program.to_text()
    last = chain.nodes[-1]
    if chain.beside is None:
        # The stages are in the graph's order: nothing before the first depends on any of them.
        _move_readers_behind(chain, chain.nodes[0], last)
        with graph.inserting_before(last):
            call = insert(last, torch.ops.moepdl.chain.default, (operands, text))
            items = _items(chain, call, last)
    else:
        call, items = _start_and_wait(graph, chain, chain.beside, operands, text)
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


def _items(chain: Chain, call: Node, like: Node) -> dict[int, Node]:
    """The results of a call that are asked for, by position."""
    positions = dict.fromkeys(position for _, _, position in chain.results)
    return {position: insert(like, operator.getitem, (call, position)) for position in positions}


def _start_and_wait(
    graph: Graph, chain: Chain, beside: Beside, operands: list[Node], text: str
) -> tuple[Node, dict[int, Node]]:
    """Put a start behind the operands, the branch behind the start, and a wait behind both branch and stages."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    anchor = max([*operands, *graph.find_nodes(op="placeholder")[-1:]], key=place.__getitem__)
    like = chain.nodes[-1]
    with graph.inserting_after(anchor):
        start = insert(like, torch.ops.moepdl.chain_start.default, (operands, text, beside.limit, beside.captured))
    at = start
    for node in sorted(beside.nodes, key=place.__getitem__):
        if place[node] < place[anchor]:
            at.append(node)
            at = node
    place = {node: index for index, node in enumerate(graph.nodes)}
    last = max([like, *beside.nodes], key=place.__getitem__)
    _move_readers_behind(chain, start.next, last)
    with graph.inserting_after(last):
        wait = insert(like, torch.ops.moepdl.chain_wait.default, (start, operands, list(beside.last), text))
    with graph.inserting_before(wait.next):
        items = _items(chain, wait, like)
    return wait, items


@graph_pass(level=Level.LAUNCHES, numerics="exact")
def lower(graph: Graph, context: Context) -> int:
    """Turn each chain into one call of moepdl::chain, or into a start and a wait with its branch between the two.

    before   r, o = order(i, E); a = gate_up(x, ..); p = down(a, ..); y = combine(p, w); b = shared(x); z = y + b
    after    c = chain([x, i, w, W1, W2], "<program>"); y = c[0]; b = shared(x); z = y + b
    or       s = chain_start([..], ..); b = shared(x); c = chain_wait(s, [..], [b], ..); y = c[0]; z = y + b
    """
    replaced: dict[Node, Node] = {}
    for chain in context.chains:
        _lower_chain(graph, chain, replaced)
    return len(context.chains)
