"""The dependency DAG: edges by data and by storage, convexity, costs."""

from __future__ import annotations

import networkx as nx
import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from moe_compiler.block_program import BlockSizes, backward_program, forward_program, inputs_of, weights_of
from moe_compiler.cost import stage_cost
from moe_compiler.dag import build_dag, convex, neighbourhood, to_record, without_getitems
from moe_compiler.passes.expand_stages import expand_stages
from moe_compiler.pipeline import run_passes
from moe_compiler.report import DagRecord
from tests.moe_compiler.graphs import E, H, I, K, context, forward_graph


def traced(function, *shapes):
    with FakeTensorMode():
        return make_fx(function)(*[torch.empty(shape) for shape in shapes])


def named(dag):
    return {(a.name, b.name): data["kind"] for a, b, data in dag.edges(data=True)}


def test_reads_and_writes_of_one_memory_are_ordered_through_views():
    def function(x):
        base = x + 1
        view = base.view(-1)
        read = base * 2
        view.mul_(3)
        again = base - 1
        view.fill_(1)
        return read, again, base

    dag = build_dag(traced(function, (2, 3)).graph)
    kinds = named(dag)
    assert kinds[("mul", "mul_")] == "war"
    assert kinds[("mul_", "sub")] == "raw"
    assert kinds[("sub", "fill_")] == "war"
    assert kinds[("mul_", "fill_")] == "waw"
    assert kinds[("add", "view")] == "raw"


def test_writers_through_views_lists_and_slices_follow_each_other():
    def function(x):
        doubled = x * 2
        x[0].add_(1)
        tripled = x[1] * 3
        x.copy_(doubled)
        torch._foreach_add_([doubled, tripled], 1.0)
        return doubled, tripled

    kinds = named(build_dag(traced(function, (4, 4)).graph))
    assert kinds["mul", "add_"] == "war" and kinds["add_", "copy_"] == "waw" and kinds["mul_1", "copy_"] == "war"
    assert kinds["copy_", "_foreach_add_"] == "war" and kinds["mul_1", "_foreach_add_"] == "raw"


def test_random_numbers_keep_their_order():
    kinds = named(build_dag(traced(lambda x: x + torch.rand(3) + torch.rand(3), (3,)).graph))
    assert kinds["rand", "rand_1"] == "effect"


def test_collectives_of_a_group_are_started_in_order():
    c10d = torch.ops._c10d_functional
    graph = Graph()
    x, y, z = (graph.placeholder(name) for name in "xyz")
    first = graph.call_function(c10d.all_reduce.default, (x, "sum", "a"))
    graph.call_function(c10d.all_to_all_single.default, (y, [1], [1], "b"))
    graph.call_function(c10d.wait_tensor.default, (first,))
    graph.call_function(c10d.all_gather_into_tensor.default, (z, 4, "a"))
    graph.call_function(c10d.reduce_scatter_tensor.default, (y, "sum", 4, "b"))
    graph.output(())
    found = {
        tuple(end.removesuffix("_default") for end in ends): kind for ends, kind in named(build_dag(graph)).items()
    }
    assert found == {
        ("all_reduce", "wait_tensor"): "raw",
        ("all_reduce", "all_gather_into_tensor"): "order",
        ("all_to_all_single", "reduce_scatter_tensor"): "order",
    }


@pytest.mark.parametrize(
    ("nodes", "edges", "text"),
    [
        (["a", "b", "a"], [], "two nodes of one id"),
        (["a"], [("a", "b")], "ends at b, which is no node"),
        (["a", "b"], [("b", "a")], "edge from b to a leads back"),
        (["a"], [("a", "a")], "edge from a to a leads back"),
    ],
)
def test_a_record_that_is_no_dag_is_refused(nodes, edges, text):
    pairs = [{"source": a, "target": b, "kind": "raw"} for a, b in edges]
    record = DagRecord("forward", [{"id": name} for name in nodes], pairs)
    with pytest.raises(ValueError, match=text):
        record.check()
    DagRecord("forward", [{"id": "a"}, {"id": "b"}], [{"source": "a", "target": "b", "kind": "raw"}]).check()


def test_stages_of_a_block_and_their_costs():
    module = forward_graph()
    run_passes(module, (expand_stages,), context())
    record = to_record(build_dag(module.graph), "forward")
    stages = {node["label"]: node for node in record.nodes if node["kind"] == "stage"}
    assert list(stages) == ["route", "order", "gate_up", "down", "combine"]
    tokens = sympy.Symbol("T", integer=True, positive=True)
    flops = sympy.sympify(stages["gate_up"]["flops"], locals={"T": tokens})
    assert flops == 2 * tokens * K * 2 * I * H
    moved = sympy.sympify(stages["down"]["bytes"], locals={"T": tokens})
    assert moved.subs(tokens, 1e6) == pytest.approx(10**6 * K * (I + H) * 2 + E * I * H * 2, rel=1e-6)
    edges = {(edge["source"], edge["target"]) for edge in record.edges}
    assert ("route", "order_default") in edges and ("gate_up_default", "down_default") in edges


def test_the_cost_of_the_reference_shape_is_the_published_one():
    sizes = {"k": 8, "E": 128, "H": 2048, "I": 768, "N": 1536, "w": 2}
    tokens = sympy.Symbol("T", integer=True, positive=True)
    first, second = stage_cost("gate_up", sizes), stage_cost("down", sizes)
    assert (first.flops + second.flops).subs(tokens, 8192) == 6 * 8192 * 8 * 2048 * 768
    weights = float((first.bytes + second.bytes).subs(tokens, 1))
    assert weights == pytest.approx(8 * 3 * 2048 * 768 * 2, rel=0.01)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("tokens", [1, 40, 97, 300, 5000])
@pytest.mark.parametrize("intermediate", [200, 256], ids=["tiles", "specialised warps"])
def test_the_grid_is_the_number_of_programs_of_the_launch(tokens, backward, intermediate):
    pytest.importorskip("triton")
    from moe_compiler.runtime_kernels.chain import launcher
    from moe_compiler.runtime_kernels.launching import recording

    sizes = BlockSizes(8, 2, 320, intermediate)
    program = (backward_program if backward else forward_program)(sizes, **({} if backward else {"save": True}))
    operands = inputs_of(sizes, tokens, weights_of(sizes, "cpu"), "cpu", backward=backward)
    with recording() as starts:
        launcher.run(operands, program.to_text())
    names = {"gate_up_kernel": "gate_up", "grad_act_kernel": "grad_act"}
    names |= dict.fromkeys(
        ("scatter_product_kernel", "scatter_product_specialised_kernel"), "grad_pairs" if backward else "down"
    )
    counted = []
    for start in starts:
        name = names.get(start.kernel.__name__)
        if start.kernel.__name__ == "grad_weights_kernel":
            name = "grad_gate_up" if "grad_down" in counted else "grad_down"
        if name is not None:
            counted.append(name)
            grid = stage_cost(name, sizes.named).grid
            assert grid.subs(sympy.Symbol("T", integer=True, positive=True), tokens) == start.programs, name
    assert counted == (["grad_act", "grad_down", "grad_gate_up", "grad_pairs"] if backward else ["gate_up", "down"])
    assert stage_cost("combine", sizes.named).grid is None


@st.composite
def graphs(draw):
    """A random graph of additions, and a random subset of its nodes."""
    graph = Graph()
    values = [graph.placeholder("x")]
    calls = []
    for _ in range(draw(st.integers(2, 12))):
        a, b = (draw(st.sampled_from(values)) for _ in range(2))
        node = graph.call_function(torch.ops.aten.add.Tensor, (a, b))
        values.append(node)
        calls.append(node)
    graph.output(tuple(calls))
    return graph, draw(st.lists(st.sampled_from(calls), min_size=1, unique=True))


@given(graphs())
def test_convexity_is_no_path_out_and_back_in(drawn):
    graph, group = drawn
    dag = build_dag(graph)
    outside = [node for node in dag if node not in group]
    leaves = {n for n in outside if any(nx.has_path(dag, g, n) for g in group)}
    returns = {n for n in outside if any(nx.has_path(dag, n, g) for g in group)}
    assert convex(dag, group) == (not leaves & returns)


@given(graphs())
def test_graph_order_is_a_topological_order_and_nothing_is_lost(drawn):
    graph, group = drawn
    dag = build_dag(graph)
    position = {node: index for index, node in enumerate(graph.nodes)}
    assert set(dag) == {node for node in graph.nodes if node.op == "call_function"}
    assert all(position[a] < position[b] for a, b in dag.edges)
    near = neighbourhood(dag, group)
    assert set(group) <= set(near) and list(near) == sorted(near, key=position.__getitem__)
    assert set(without_getitems(dag)) == set(dag)
