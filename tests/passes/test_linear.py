"""The finder and the passes cost as much again for as many layers again, and a raised block the same whatever E is."""

from __future__ import annotations

import gc
import itertools
import sys
import time
from collections.abc import Callable

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from moe_compiler import pipeline
from moe_compiler.graph_pass import Context
from moe_compiler.options import resolve
from moe_compiler.report import Report
from moe_compiler.testing import capture_graph, examples, run_passes

TOKENS, HIDDEN = 17, 8
UNROLLED = ("where_loop", "one_hot_loop")
LIMIT = 2.3


def one_layer(name: str, experts: int) -> GraphModule:
    example = examples()[name](torch.float32, experts, 2, HIDDEN, HIDDEN)
    return capture_graph(example.module, torch.randn(TOKENS, HIDDEN))


def layers(one: GraphModule, count: int) -> GraphModule:
    """`count` copies of a layer, each with weights of its own, the tokens of one from the one before it."""
    graph = Graph()
    maps: list[dict[Node, Node]] = [{} for _ in range(count)]

    def copy(node: Node, own: dict[Node, Node]) -> None:
        new = own[node] = graph.node_copy(node, own.__getitem__)
        new.meta = dict(node.meta)
        if node.op == "placeholder":
            new.target = new.name

    places = one.graph.find_nodes(op="placeholder")
    (tokens,) = (place for place in places if tuple(getattr(place.meta["val"], "shape", ())) == (TOKENS, HIDDEN))
    for number, own in enumerate(maps):
        for place in places:
            if place is not tokens or not number:
                copy(place, own)
    value = maps[0][tokens]
    for own in maps:
        own[tokens] = value
        for node in one.graph.nodes:
            if node.op not in ("placeholder", "output"):
                copy(node, own)
        (result,) = one.graph.output_node().all_input_nodes
        value = own[result]
    graph.output((value,))
    return GraphModule(torch.nn.Module(), graph)


def run(one: GraphModule, count: int, meter: Callable[[Callable[[], None]], float]) -> tuple[float, Report]:
    """What the meter says of all passes of both phases on so many layers; the graph is built before it starts."""
    module = layers(one, count)
    settings = resolve({"remainder": "eager"}, known_names=pipeline.known_names())
    report = Report(frame="0/0", status="unchanged", options=settings.to_dict())

    def phases() -> None:
        pipeline.run_phase(module, "capture", Context(settings, "capture", report))
        pipeline.run_phase(module, "graph", Context(settings, "forward", report))

    gc.collect()
    return meter(phases), report


def calls(function: Callable[[], None]) -> float:
    """How many functions are called, in Python or below: the same on any machine, however busy."""
    count = 0

    def count_call(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    previous = sys.getprofile()
    sys.setprofile(count_call)
    try:
        function()
    finally:
        sys.setprofile(previous)
    return count


def cpu_seconds(function: Callable[[], None]) -> float:
    started = time.process_time()
    function()
    return time.process_time() - started


def assert_linear(
    one: GraphModule, counts: tuple[int, ...], *, matched: bool, meter: Callable[[Callable[[], None]], float] = calls
) -> None:
    taken = []
    for count in counts:
        cost, report = run(one, count, meter)
        assert len(report.matches) == (count if matched else 0)
        assert len(report.schedule) == len(report.matches)
        assert matched or sum(miss.count for miss in report.misses) == count
        taken.append(cost)
    ratios = [after / before for before, after in itertools.pairwise(taken)]
    assert max(ratios) < LIMIT, f"layers {counts}: {taken}"


@pytest.mark.parametrize("name", UNROLLED)
def test_twice_the_layers_take_twice_the_time(name):
    assert_linear(one_layer(name, 8), (4, 8, 16), matched=True)


@pytest.mark.parametrize("name", UNROLLED)
def test_so_do_layers_that_do_not_match(name):
    one = one_layer(name, 8)
    silu = one.graph.find_nodes(op="call_function", target=torch.ops.aten.silu.default)[3]
    silu.target = torch.ops.aten.tanh.default
    one.recompile()
    assert_linear(one, (4, 8, 16), matched=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", UNROLLED)
def test_up_to_64_layers_of_128_unrolled_experts(name):
    assert_linear(one_layer(name, 128), (16, 32, 64), matched=True, meter=cpu_seconds)


@pytest.mark.parametrize("name", sorted(examples()))
def test_a_raised_block_is_as_large_whatever_the_number_of_experts(name):
    sizes = set()
    for experts in (4, 16):
        example = examples()[name](experts=experts)
        module, report = run_passes(example.module, ["canonicalize", "find_moe", "raise_moe"], *example.inputs(9))
        assert len(report.matches) == 1
        calls = [node for node in module.graph.nodes if node.op == "call_function"]
        sizes.add(len(calls))
    assert len(sizes) == 1
