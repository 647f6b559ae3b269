"""What bounds a dependency DAG in time: its critical path, the slack of every node, and what may overlap with what.

The DAG says what must happen before what; a time for each node turns it into the classic project network: the longest
path through it is the time that no order and no number of streams can beat, and a node off that path may be later by
its slack without costing anything. (J. E. Kelley and M. R. Walker, "Critical-path planning and scheduling", 1959.)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import combinations
from typing import Generic, TypeVar

import networkx as nx

__all__ = ["Timing", "longest_chain", "may_overlap", "timing"]

N = TypeVar("N", bound=Hashable)


@dataclass(frozen=True)
class Timing(Generic[N]):
    """A DAG in time, in the units of its nodes' times.

    total     the length of the critical path
    path      the nodes of one longest path, in order
    earliest  when each node can start; slack: by how much it may start later without making the total longer
    """

    total: float
    path: tuple[N, ...]
    earliest: dict[N, float]
    slack: dict[N, float]

    def __str__(self) -> str:
        lines = [f"critical path {self.total:.1f}: {' > '.join(map(str, self.path))}"]
        loose = sorted((node for node in self.slack if self.slack[node] > 0), key=lambda node: -self.slack[node])
        lines += [f"  {node}: starts at {self.earliest[node]:.1f}, slack {self.slack[node]:.1f}" for node in loose]
        return "\n".join(lines)


def timing(dag: nx.DiGraph, time_of: Callable[[N], float]) -> Timing[N]:
    """The DAG in time. Raises ValueError for a negative time, networkx.NetworkXUnfeasible for a cycle."""
    order: list[N] = list(nx.topological_sort(dag))
    times = {node: time_of(node) for node in order}
    negative = next((node for node in order if times[node] < 0), None)
    if negative is not None:
        raise ValueError(f"node {negative} takes {times[negative]}, less than no time")
    earliest: dict[N, float] = {}
    for node in order:
        earliest[node] = max((earliest[before] + times[before] for before in dag.predecessors(node)), default=0.0)
    total = max((earliest[node] + times[node] for node in order), default=0.0)
    latest: dict[N, float] = {}
    for node in reversed(order):
        end = min((latest[after] for after in dag.successors(node)), default=total)
        latest[node] = end - times[node]
    slack = {node: max(latest[node] - earliest[node], 0.0) for node in order}
    return Timing(total, _path(dag, order, times, earliest, total), earliest, slack)


def _path(
    dag: nx.DiGraph, order: list[N], times: dict[N, float], earliest: dict[N, float], total: float
) -> tuple[N, ...]:
    """One path whose times sum to `total`, from its end back to its start."""
    ends = [node for node in order if earliest[node] + times[node] == total]
    if not ends:
        return ()
    node = ends[0]
    path = [node]
    while True:
        before = [b for b in dag.predecessors(node) if earliest[b] + times[b] == earliest[node]]
        if not before:
            return tuple(reversed(path))
        node = before[0]
        path.append(node)


def longest_chain(dag: nx.DiGraph) -> tuple[Hashable, ...]:
    """The nodes of a longest path counted in nodes: how many launches must follow each other."""
    return tuple(nx.dag_longest_path(dag, weight=None, default_weight=1))


def may_overlap(dag: nx.DiGraph) -> list[tuple[Hashable, Hashable]]:
    """The pairs of nodes of which neither waits for the other, in the DAG's order: what streams could run beside."""
    behind = {node: nx.descendants(dag, node) for node in dag}
    return [(a, b) for a, b in combinations(dag, 2) if b not in behind[a] and a not in behind[b]]
