"""The order in which a graph starts the collectives of each group: every rank has to start the same ones in one order.

A pass may replace some of them where they stand, and drop some that nobody reads. It may not let two change places, and
may not start one between two others where none stood before.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from moe_compiler.dag import collective_group

__all__ = ["Order", "changed_order", "collectives"]

Order = dict[str, list[Node]]


def collectives(graph: Graph) -> Order:
    """The calls that start a collective, by the name of their group, in graph order."""
    found: Order = {}
    for node in graph.nodes:
        group = collective_group(node) if node.op == "call_function" else None
        if group is not None:
            found.setdefault(group, []).append(node)
    return found


def changed_order(before: Order, after: Order) -> tuple[str, Node] | None:
    """What a pass may not have done to the collectives of a group, and the node; None when it did nothing such."""
    for group, now in after.items():
        was = before.get(group, [])
        stay = set(was) & set(now)
        kept = [node for node in was if node in stay]
        moved = next((a for a, b in zip(kept, [n for n in now if n in stay], strict=True) if a is not b), None)
        if moved is not None:
            return f"the collectives of group {group} change their order", moved
        for old, new in zip(_gaps(was, stay), _gaps(now, stay), strict=True):
            if new and not old:
                return f"a collective of group {group} stands where none stood before", new[0]
    return None


def _gaps(nodes: list[Node], stay: set[Node]) -> list[list[Node]]:
    """What stands ahead of the first of those that stay, between each two of them, and behind the last."""
    gaps: list[list[Node]] = [[]]
    for node in nodes:
        if node in stay:
            gaps.append([])
        else:
            gaps[-1].append(node)
    return gaps
