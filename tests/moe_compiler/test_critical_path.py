"""The critical path, slack and possible overlap of a DAG with times, by hand and against a search over all paths."""

from __future__ import annotations

import itertools

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_compiler.critical_path import longest_chain, may_overlap, timing

# A router and a shared expert read x; the routed experts follow the router; both are summed.
TIMES = {"x": 0.0, "route": 2.0, "order": 1.5, "gate_up": 77.0, "down": 42.0, "shared": 30.0, "sum": 1.0}
EDGES = [
    ("x", "route"),
    ("route", "order"),
    ("order", "gate_up"),
    ("gate_up", "down"),
    ("x", "shared"),
    ("down", "sum"),
    ("shared", "sum"),
]


def test_a_block_with_a_shared_expert():
    dag = nx.DiGraph(EDGES)
    found = timing(dag, TIMES.__getitem__)
    assert found.total == 123.5
    assert found.path == ("x", "route", "order", "gate_up", "down", "sum")
    assert found.slack["shared"] == pytest.approx(92.5) and found.earliest["sum"] == 122.5
    assert all(found.slack[node] == 0 for node in found.path)
    assert longest_chain(dag) == found.path
    assert {frozenset(pair) for pair in may_overlap(dag)} == {
        frozenset({"shared", other}) for other in ("route", "order", "gate_up", "down")
    }
    assert str(found) == (
        "critical path 123.5: x > route > order > gate_up > down > sum\n  shared: starts at 0.0, slack 92.5"
    )


def test_no_node_and_a_bad_time():
    empty = timing(nx.DiGraph(), lambda node: 1.0)
    assert (empty.total, empty.path) == (0.0, ())
    with pytest.raises(ValueError, match="node a takes -1"):
        timing(nx.DiGraph([("a", "b")]), lambda node: -1.0)
    with pytest.raises(nx.NetworkXUnfeasible):
        timing(nx.DiGraph([("a", "b"), ("b", "a")]), lambda node: 1.0)


@st.composite
def networks(draw):
    count = draw(st.integers(1, 7))
    dag = nx.DiGraph()
    dag.add_nodes_from(range(count))
    dag.add_edges_from(pair for pair in itertools.combinations(range(count), 2) if draw(st.booleans()))
    return dag, [draw(st.integers(0, 9)) for _ in range(count)]


@given(networks())
def test_against_all_paths(drawn):
    dag, times = drawn
    found = timing(dag, times.__getitem__)
    ends = [node for node in dag if not dag.out_degree(node)]
    starts = [node for node in dag if not dag.in_degree(node)]
    paths = [
        path
        for start in starts
        for end in ends
        for path in ([[start]] if start == end else nx.all_simple_paths(dag, start, end))
    ]
    longest = max(sum(times[node] for node in path) for path in paths)
    assert found.total == longest == sum(times[node] for node in found.path)
    assert all(dag.has_edge(a, b) for a, b in itertools.pairwise(found.path))
    for node in dag:
        through = max(sum(times[n] for n in path) for path in paths if node in path)
        assert found.slack[node] == longest - through
    overlapping = {frozenset(pair) for pair in may_overlap(dag)}
    for a, b in itertools.combinations(dag, 2):
        assert (frozenset((a, b)) in overlapping) == (not nx.has_path(dag, a, b) and not nx.has_path(dag, b, a))
