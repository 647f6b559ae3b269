"""expand_stages, chain_pdl and lower: what a block becomes after autograd, without a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import networkx as nx
import pytest
import torch
from torch.testing import FileCheck

from moe_compiler import device
from moe_compiler.errors import PassError, PdlUnavailable, VerifyError
from moe_compiler.graph_pass import GraphPass, insert
from moe_compiler.launch import edges
from moe_compiler.moe_ir import Level
from moe_compiler.passes.chain_pdl import chain_pdl
from moe_compiler.passes.expand_stages import expand_stages
from moe_compiler.passes.lower import lower
from moe_compiler.pipeline import run_passes, run_phase
from moe_compiler.runtime_kernels.chain.program import Program
from tests.moe_compiler.graphs import E, H, I, K, backward_graph, calls, context, forward_graph


@pytest.fixture
def hopper(monkeypatch):
    """The compiler's view of a machine with an sm_90 GPU; nothing is launched."""
    monkeypatch.setattr(device, "why_no_pdl", lambda kind: "" if kind == "cuda" else f"the block runs on {kind}")


def program(module) -> Program:
    (node,) = [n for n in module.graph.nodes if "moepdl.chain" in str(n.target)]
    return Program.from_text(node.args[1])


def kernels(variant) -> list[str]:
    return [launch.kernel for launch in variant.launches]


def test_a_forward_block_opens_into_its_stages_in_order():
    module, ctx = forward_graph(), context()
    assert run_passes(module, (expand_stages,), ctx) == 1
    assert calls(module) == ["route", "order", "gate_up", "down", "combine"]
    FileCheck().check("moepdl.route").check("moepdl.order").check("moepdl.gate_up").check("moepdl.combine").run(
        str(module.graph)
    )


def test_a_backward_block_opens_into_what_is_needed_only():
    module = backward_graph()
    run_passes(module, (expand_stages,), context("backward"))
    assert calls(module) == ["grad_act", "grad_down", "grad_gate_up", "grad_pairs", "combine"]
    module = backward_graph(needs=(True, False, False, False, False))
    run_passes(module, (expand_stages,), context("backward"))
    assert calls(module) == ["grad_act", "grad_pairs", "combine"]
    module = backward_graph(at="input")
    run_passes(module, (expand_stages,), context("backward"))
    assert calls(module) == ["grad_act", "grad_down", "grad_gate_up", "grad_pairs", "combine", "grad_input_weights"]


def test_the_router_backward_becomes_plain_operators():
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    def function(grad, logits, ids):
        arguments = ("softmax", "before", True, False, 0.0, 1.0, torch.float32)
        return torch.ops.moepdl.route_backward(grad, logits, ids, None, *arguments)[0]

    with FakeTensorMode():
        module = make_fx(function)(torch.empty(4, K), torch.empty(4, E), torch.empty(4, K, dtype=torch.int64))
    assert run_passes(module, (expand_stages,), context("backward")) == 1
    assert calls(module) == []
    grad, logits = torch.randn(4, K, dtype=torch.float64), torch.randn(4, E, dtype=torch.float64, requires_grad=True)
    weights, ids = torch.softmax(logits, -1).topk(K)
    (expected,) = torch.autograd.grad(weights / weights.sum(-1, keepdim=True), logits, grad)
    torch.testing.assert_close(module(grad.float(), logits.detach().float(), ids), expected.float())


def test_the_router_backward_with_a_scale_for_each_expert_becomes_plain_operators():
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    def function(grad, logits, ids, scale):
        arguments = ("sigmoid", "before", True, True, 0.7, 1.5, torch.float32)
        return torch.ops.moepdl.route_backward(grad, logits, ids, scale, *arguments)

    with FakeTensorMode():
        shapes = torch.empty(9, K), torch.empty(9, E), torch.empty(9, K, dtype=torch.int64), torch.empty(E)
        module = make_fx(function)(*shapes)
    assert run_passes(module, (expand_stages,), context("backward")) == 1
    assert calls(module) == []
    grad, (logits, scale) = (
        torch.randn(9, K),
        (torch.randn(9, E, requires_grad=True), torch.rand(E, requires_grad=True)),
    )
    values, ids = torch.sigmoid(logits).topk(K)
    weights = values / values.sum(-1, keepdim=True).clamp(min=0.7) * 1.5 * scale[ids]
    expected = torch.autograd.grad(weights, [logits, scale], grad)
    torch.testing.assert_close(module(grad, logits.detach(), ids, scale.detach()), expected)


def test_a_router_with_a_bias_and_a_scale_is_part_of_the_chain(hopper):
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    from tests.moe_compiler.graphs import EXPERTS, ROUTE

    def block(x, logits, bias, scale, gate_up, down):
        weights, ids = torch.ops.moepdl.route(logits, bias, scale, *ROUTE[2:])
        return torch.ops.moepdl.experts(x, ids, weights, [gate_up], [], [down], [], [], [], *EXPERTS)

    with FakeTensorMode(allow_non_fake_inputs=True):
        bf16 = {"dtype": torch.bfloat16, "device": "cuda"}
        vectors = [torch.empty(E, device="cuda") for _ in range(2)]
        matrices = torch.empty(E, 2 * I, H, **bf16), torch.empty(E, H, I, **bf16)
        module = make_fx(block)(torch.empty(9, H, **bf16), torch.empty(9, E, **bf16), *vectors, *matrices)
    run_phase(module, "graph", context())
    assert calls(module) == ["chain"]
    for variant in program(module).variants:
        assert variant.launches[0].ins == {"logits": "logits", "bias": "bias", "expert_scale": "expert_scale"}
    assert dict(program(module).inputs).keys() >= {"logits", "bias", "expert_scale"}


def test_on_a_gpu_a_forward_block_is_one_chain_with_variants_by_tokens(hopper):
    module, ctx = forward_graph(), context()
    run_phase(module, "graph", ctx)
    assert calls(module) == ["chain"]
    few, ordered, blocked = program(module).variants
    assert kernels(few) == ["route", "gate_up_few", "down_few"]
    assert kernels(ordered) == ["route", "order", "gate_up", "down", "combine"]
    assert kernels(blocked) == ["route", "order_count", "order_scatter", "gate_up", "down", "combine"]
    assert (few.max_tokens, ordered.max_tokens, blocked.max_tokens) == (1, 4096 // K, None)
    assert few.buffers["act"].shape == (f"T*{K}", str(I)) and few.buffers["y"].shape == ("T", str(H))


def test_every_launch_but_the_first_is_programmatic(hopper):
    module, ctx = forward_graph(), context()
    run_phase(module, "graph", ctx)
    for variant in program(module).variants:
        assert [launch.pdl for launch in variant.launches] == [False] + [True] * (len(variant.launches) - 1)
    (chain,) = ctx.report.schedule
    assert [variant.programmatic for variant in chain.variants] == [2, 4, 5]
    assert ctx.report.pdl_off == ""


def test_pdl_off_is_the_same_chain_without_the_attribute(hopper):
    on, off = forward_graph(), forward_graph()
    run_phase(on, "graph", context())
    ctx = context(pdl="off")
    run_phase(off, "graph", ctx)
    assert [kernels(v) for v in program(on).variants] == [kernels(v) for v in program(off).variants]
    assert not any(launch.pdl for v in program(off).variants for launch in v.launches)
    assert ctx.report.pdl_off == 'options["pdl"] is "off"'


def test_pdl_on_where_there_is_none_is_an_error_with_a_way_out():
    with pytest.raises(PdlUnavailable, match='options\\["pdl"\\]="on"') as caught:
        run_phase(forward_graph(tokens=1000, device="cpu"), "graph", context(pdl="on"))
    assert "auto" in caught.value.try_


def test_on_a_cpu_a_block_is_a_loop_over_the_experts():
    module = forward_graph(tokens=1000, device="cpu")
    run_phase(module, "graph", context())
    (variant,) = program(module).variants
    assert kernels(variant) == ["route", "order", "experts_loop"]
    module = backward_graph(device="cpu")
    run_phase(module, "graph", context("backward"))
    (variant,) = program(module).variants
    assert kernels(variant) == ["experts_loop_backward"]


def test_a_backward_chain_on_a_gpu(hopper):
    module, ctx = backward_graph(), context("backward")
    run_phase(module, "graph", ctx)
    (variant,) = program(module).variants
    assert kernels(variant) == ["grad_act", "grad_down", "grad_gate_up", "grad_pairs", "combine"]
    assert variant.buffers[variant.launches[1].outs["grad_down"]].like == "down"
    found = {(edge.producer, edge.consumer): edge.kind for edge in edges(variant)}
    assert found == {(0, 1): "raw", (0, 2): "raw", (0, 3): "raw", (1, 2): "order", (2, 3): "order", (3, 4): "raw"}


@pytest.mark.parametrize("direction", ["forward", "backward", "backward at the input", "backward of some"])
def test_no_order_of_a_chain_has_more_neighbours_that_feed_each_other(hopper, direction):
    """Each such pair is a boundary whose consumer has its operands hot; every other order that is right has at most
    as many. A programmatic boundary gains the same wherever it is, so nothing else tells one order from another."""
    if direction == "forward":
        module = forward_graph(tokens=9)
    elif direction == "backward of some":
        module = backward_graph(needs=(True, True, False, False, True))
    else:
        module = backward_graph(at="input" if "input" in direction else "output")
    run_phase(module, "graph", context(direction.split()[0]))
    for variant in program(module).variants:
        fed = {(edge.producer, edge.consumer) for edge in edges(variant) if edge.kind == "raw"}
        dag = nx.DiGraph(fed)
        dag.add_nodes_from(range(len(variant.launches)))

        def neighbours(order, fed=fed):
            return sum(pair in fed for pair in pairwise(order))

        most = max(map(neighbours, nx.all_topological_sorts(dag)))
        assert neighbours(range(len(variant.launches))) == most, kernels(variant)


def test_a_router_whose_weights_pass_through_something_stays_a_stage_of_its_own(hopper):
    module = forward_graph(between=lambda weights, ids: (weights * 2, ids))
    run_phase(module, "graph", context())
    assert calls(module) == ["route", "chain"]
    assert kernels(program(module).variants[0]) == ["gate_up_few", "down_few"]


def test_ids_read_elsewhere_are_an_output_of_the_chain(hopper):
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    from tests.moe_compiler.graphs import EXPERTS, ROUTE

    def block(x, logits, gate_up, down):
        weights, ids = torch.ops.moepdl.route(logits, *ROUTE)
        load = ids.sum()
        y = torch.ops.moepdl.experts(x, ids, weights, [gate_up], [], [down], [], [], [], *EXPERTS)
        return y, load

    with FakeTensorMode():
        shapes = ((4, H), (4, E), (E, 2 * I, H), (E, H, I))
        module = make_fx(block)(*[torch.empty(s, device="cuda", dtype=torch.bfloat16) for s in shapes])
    run_phase(module, "graph", context())
    assert calls(module) == ["chain"]
    assert set(program(module).outputs) == {"ids", "y"}
    module.graph.lint()


def test_equal_layers_have_equal_programs(hopper):
    texts = []
    for _ in range(2):
        module = forward_graph()
        run_phase(module, "graph", context())
        texts.append(program(module).to_text())
    assert texts[0] == texts[1]


def test_the_first_launch_of_a_chain_may_not_be_programmatic():
    from moe_compiler.launch import with_pdl
    from moe_compiler.verify import check_chain

    module, ctx = forward_graph(), context(pdl="off")
    run_passes(module, (expand_stages, chain_pdl), ctx)
    (chain,) = ctx.chains
    wrong = with_pdl(chain, {"few": frozenset({0})})
    with pytest.raises(VerifyError, match="first launch of a chain carries the PDL attribute"):
        check_chain(wrong, ctx.options)
    check_chain(with_pdl(chain, {"few": frozenset({1, 2})}), ctx.options)


def test_memory_that_a_chain_uses_again_is_held_to_the_rules(hopper):
    from moe_compiler.pdl_rules import Wait, check
    from moe_compiler.verify import grids

    ctx = context("backward")
    run_passes(backward_graph(), (expand_stages, chain_pdl), ctx)
    (chain,) = ctx.chains
    (variant,) = chain.program.variants
    found = grids(chain, variant)
    act = variant.launches[0].outs["act"]
    assert [grid.name for grid in found if act in grid.touched] == [*kernels(variant)]
    assert act in found[2].writes and act not in found[1].writes, "grad_down is the last to read it"
    assert not check(found)
    careless = [*found[:2], replace(found[2], wait=Wait.SOME), *found[3:]]
    reasons = [str(violation) for violation in check(careless)]
    assert any(f"writes {act}, which grad_down may still be using" in reason for reason in reasons)


def test_the_runner_catches_a_pass_that_lies_or_breaks_the_graph(hopper):
    def silent(graph, ctx):
        graph.eliminate_dead_code()
        node = next(n for n in graph.nodes if n.op == "call_function")
        node.args = (node.args[0], 1, *node.args[2:])
        return 0

    liar = GraphPass("liar", Level.MOE, "exact", silent, "Changes and denies it.")
    with pytest.raises(PassError, match="liar: it reported 0 rewrites, but the graph has changed"):
        run_passes(forward_graph(), (liar,), context())

    def low(graph, ctx):
        return expand_stages(graph, ctx)

    early = GraphPass("early", Level.CAPTURED, "exact", low, "Leaves operators of another level.")
    with pytest.raises(PassError, match=r"(order|route) does not belong to level captured"):
        run_passes(forward_graph(), (early,), context())

    def narrow(graph, ctx):
        output = graph.output_node()
        (value,) = output.all_input_nodes
        with graph.inserting_before(output):
            output.replace_input_with(value, insert(value, torch.ops.aten.slice.Tensor, (value, 0, 0, 1)))
        return 1

    shrink = GraphPass("shrink", Level.LAUNCHES, "exact", narrow, "Returns another shape.")
    module = forward_graph()
    run_passes(module, (expand_stages, chain_pdl, lower), context())
    with pytest.raises(PassError, match="inputs or outputs changed"):
        run_passes(module, (shrink,), context())
