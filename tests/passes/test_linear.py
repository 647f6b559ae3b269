"""The finder and the passes cost as much again for as many layers again, and a raised block the same whatever E is."""

from __future__ import annotations

import functools
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
from tests.fast_part import one_in

TOKENS, HIDDEN = 17, 8
UNROLLED = ("where_loop", "one_hot_loop")
PACKED = ("batched_mm", "dense_bmm", "grouped_mm")
LIMIT = 2.3


@functools.cache
def one_layer(name: str, experts: int, dtype: torch.dtype = torch.float32) -> GraphModule:
    example = examples()[name](dtype, experts, 2, HIDDEN, HIDDEN)
    return capture_graph(example.module, torch.randn(TOKENS, HIDDEN, dtype=dtype))


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


def run(one: GraphModule, count: int, meter: Callable[[Callable[[], object]], float]) -> tuple[list[float], Report]:
    """What the meter says of all passes on so many layers, (capture, graph); the graph is built before it starts."""
    module = layers(one, count)
    settings = resolve({"remainder": "eager"}, known_names=pipeline.known_names())
    report = Report(frame="0/0", status="unchanged", options=settings.to_dict())
    gc.collect()
    taken = []
    for own, phase in (("capture", "capture"), ("graph", "forward")):
        context = Context(settings, phase, report)
        taken.append(meter(functools.partial(pipeline.run_phase, module, own, context)))
    return taken, report


def calls(function: Callable[[], object]) -> float:
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


def cpu_seconds(function: Callable[[], object]) -> float:
    started = time.process_time()
    function()
    return time.process_time() - started


def assert_linear(
    one: GraphModule,
    counts: tuple[int, ...],
    *,
    matched: bool,
    meter: Callable[[Callable[[], object]], float] = calls,
    repeats: int = 1,
) -> None:
    """Each phase costs less than LIMIT times as much for each number of layers as for the one before, its half."""
    taken = []
    for count in counts:
        costs = []
        for _ in range(repeats):
            cost, report = run(one, count, meter)
            assert len(report.matches) == (count if matched else 0)
            assert len(report.schedule) == len(report.matches)
            assert matched or sum(miss.count for miss in report.misses) == count
            costs.append(cost)
        taken.append([min(phase) for phase in zip(*costs, strict=True)])
    for phase, costs in zip(("capture", "graph"), zip(*taken, strict=True), strict=True):
        ratios = [after / before for before, after in itertools.pairwise(costs)]
        assert max(ratios) < LIMIT, f"{phase} phase, layers {counts}: {costs}"


def damaged(one: GraphModule) -> GraphModule:
    """A layer like it that does not match: one expert has another activation."""
    copy = layers(one, 1)
    copy.graph.find_nodes(op="call_function", target=torch.ops.aten.silu.default)[
        3
    ].target = torch.ops.aten.tanh.default
    return copy


@pytest.mark.parametrize("name", UNROLLED)
def test_twice_the_layers_take_twice_the_time(name):
    one = one_layer(name, 8)
    assert_linear(one, (4, 8, 16), matched=True)
    assert_linear(damaged(one), (4, 8, 16), matched=False)


@pytest.mark.parametrize("counts", [(4, 8, 16), pytest.param((8, 16, 32), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", UNROLLED)
def test_twice_the_experts_take_twice_the_time(name, counts):
    ones = [one_layer(name, experts) for experts in counts]
    costs = [[run(one, 1, calls)[0] for _ in range(2)][-1] for one in ones]  # the first also does what is done once
    for before, after in itertools.pairwise(costs):
        assert all(b < LIMIT * a for a, b in zip(before, after, strict=True)), costs


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", UNROLLED)
def test_up_to_64_layers_of_128_unrolled_experts(name):
    one = one_layer(name, 128)
    run(one, 1, calls)  # what happens once in a process
    for layer, matched in ((one, True), (damaged(one), False)):
        assert_linear(layer, (8, 16, 32, 64), matched=matched, meter=cpu_seconds, repeats=2)


@pytest.mark.parametrize("name", PACKED)
def test_a_packed_block_takes_the_same_time_whatever_the_number_of_experts(name):
    ones = [one_layer(name, experts, torch.bfloat16) for experts in (8, 512)]
    few, many = ([run(one, 1, calls)[0] for _ in range(2)][-1] for one in ones)
    assert many == [pytest.approx(cost, rel=0.02) for cost in few]


@pytest.mark.parametrize("name", one_in(3, sorted(examples())))
def test_a_raised_block_is_as_large_whatever_the_number_of_experts(name):
    sizes = set()
    for experts in (3, 6):
        example = examples()[name](experts=experts)
        module, report = run_passes(example.module, ["canonicalize", "find_moe", "raise_moe"], *example.inputs(9))
        assert len(report.matches) == 1
        calls = [node for node in module.graph.nodes if node.op == "call_function"]
        sizes.add(len(calls))
    assert len(sizes) == 1
