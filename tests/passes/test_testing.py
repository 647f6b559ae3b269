"""moe_compiler.testing: what a user who unit-tests a pass relies on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx import Graph
from torch.nn import functional as F

from moe_compiler.errors import CaptureError, OptionError, PassError
from moe_compiler.graph_pass import Context, GraphPass, graph_pass
from moe_compiler.moe_ir import Level
from moe_compiler.passes.formulations.registry import formulation_names
from moe_compiler.testing import Example, assert_same_graph, capture_graph, examples, run_passes
from tests.passes.spellings import E, H, I, K

CAPTURE = ["canonicalize", "find_moe", "raise_moe"]


def test_every_formulation_has_an_example():
    assert tuple(examples()) == formulation_names()
    example = examples()["batched_mm"](torch.float64, experts=E, top_k=K, hidden=H, intermediate=I)
    assert isinstance(example, Example) and example.blocks == 1
    (x,) = example.inputs(3)
    assert x.shape == (3, H) and x.dtype == torch.float64 and example.module(x).shape == (3, H)


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_a_raised_block_is_what_one_would_write_by_hand(dynamic):
    example = examples()["gather_einsum"](torch.float32, E, K, H, I)
    after, report = run_passes(example.module, CAPTURE, *example.inputs(5), dynamic=dynamic)

    def expected(*inputs: Tensor) -> Tensor:
        router, x, w1, w2, w3 = (value for value in inputs if isinstance(value, Tensor))
        arguments = (K, "softmax", "before", 1, 1, 1, "-inf", True, False, 0.0, 1.0, torch.float32, torch.float32)
        weights, ids = torch.ops.moepdl.route(F.linear(x, router), None, None, *arguments)
        return torch.ops.moepdl.experts(
            x, ids, weights, [w1], [w3], [w2], [], [], [], "silu", True, "output", torch.float32
        )

    if dynamic is None:
        assert_same_graph(after, expected)
    assert report.status == "rewritten" and [record.name for record in report.passes] == CAPTURE
    assert [record.rewrites for record in report.passes] == [1, 0, 1]


def test_a_graph_module_is_copied_and_left_as_it_is():
    example = examples()["dense_bmm"](torch.float32, E, K, H, I)
    module = capture_graph(example.module, *example.inputs(5))
    text = str(module.graph)
    first, _ = run_passes(module, CAPTURE)
    second, _ = run_passes(module, CAPTURE)
    assert str(module.graph) == text
    assert_same_graph(first, second)
    x = example.inputs(5)[0]
    values = {tuple(p.shape): p.detach() for p in example.module.parameters()} | {(5, H): x}
    arguments = [values[tuple(node.meta["val"].shape)] for node in first.graph.find_nodes(op="placeholder")]
    torch.testing.assert_close(first(*arguments)[0], example.module(x))


def test_passes_after_autograd_run_on_a_raised_graph():
    example = examples()["where_loop"](torch.float32, E, K, H, I)
    raised, _ = run_passes(example.module, CAPTURE, *example.inputs(5))
    after, report = run_passes(raised, ["expand_stages", "chain_pdl", "lower"])
    assert {record.phase for record in report.passes} == {"forward"}
    assert any("moepdl.chain" in str(node.target) for node in after.graph.nodes)


def test_sizes_stay_as_they_are_whatever_was_captured_before():
    module = torch.nn.Linear(H, I)
    shapes = [
        capture_graph(module, torch.randn(rows, H)).graph.output_node().args[0][0].meta["val"].shape
        for rows in (3, 4, 5)
    ]
    assert [tuple(shape) for shape in shapes] == [(3, I), (4, I), (5, I)]
    dynamic = capture_graph(module, torch.randn(3, H), dynamic=True)
    assert isinstance(dynamic.graph.output_node().args[0][0].meta["val"].shape[0], torch.SymInt)


def test_a_pass_that_is_in_no_pipeline_can_be_run_by_itself():
    @graph_pass(level=Level.CAPTURED, numerics="exact")
    def relu_is_silu(graph: Graph, context: Context) -> int:
        """Nonsense, for a test."""
        nodes = graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
        for node in nodes:
            node.target = torch.ops.aten.silu.default
        return len(nodes)

    assert isinstance(relu_is_silu, GraphPass)
    after, report = run_passes(torch.relu, [relu_is_silu], torch.randn(3))
    assert_same_graph(after, F.silu)
    assert report.passes[0].rewrites == 1


def test_mistakes_are_errors():
    x = torch.randn(3)
    with pytest.raises(KeyError, match="no pass is called 'nothing'"):
        run_passes(torch.relu, ["nothing"], x)
    with pytest.raises(OptionError):
        run_passes(torch.relu, ["canonicalize"], x, options={"nothing": 1})
    with pytest.raises(CaptureError):
        capture_graph(lambda: 3)

    @graph_pass(level=Level.CAPTURED, numerics="exact")
    def miscounts(graph: Graph, context: Context) -> int:
        return 1

    with pytest.raises(PassError, match="reported 1 rewrites"):
        run_passes(torch.relu, [miscounts], x)
