"""Branches beside a chain: which nodes they are, what they cost, and what a second stream is predicted to gain."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sympy
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from moe_compiler import device
from moe_compiler.block_program import BlockSizes, forward_program
from moe_compiler.branches import FEW_ROWS, FORK_JOIN_US, IDLE_US, Matmul, gain_us, idle_us, matmul_of
from moe_compiler.cost import T
from moe_compiler.device_model import DeviceModel, KernelModel, device_model
from moe_compiler.passes.chain_pdl import chain_pdl
from moe_compiler.passes.expand_stages import expand_stages
from moe_compiler.pipeline import run_passes
from moe_compiler.report import Report
from tests.moe_compiler.graphs import H, S, context, layers

# bytes and FLOPs a microsecond, and a microsecond for each launch.
RATE, SPEED, FIXED = 1e3, 1e6, 1.0
KERNELS = ("route", "order", "gate_up", "down", "combine")
MODEL = DeviceModel("NVIDIA H200", "shipped", {name: KernelModel(FIXED, RATE, SPEED, 30.0) for name in KERNELS}, 0.5)


@pytest.fixture
def dag_of(monkeypatch):
    """The DAG's record of a graph as on a machine with MODEL (or with another)."""
    monkeypatch.setattr(device, "why_no_pdl", lambda kind: "")

    def made(module, model=MODEL):
        monkeypatch.setattr(device, "cost_model", lambda kind: model)
        ctx = context()
        run_passes(module, (expand_stages, chain_pdl), ctx)
        (dag,) = ctx.report.dags
        return dag

    return made


@pytest.mark.parametrize("first", [False, True])
def test_a_shared_expert_is_a_branch_wherever_it_stands(dag_of, first):
    dag = dag_of(layers(first=first))
    (branch,) = dag.branches
    assert sorted(branch.operators) == ["mm", "mm", "mm", "mul", "sigmoid"]
    assert [name.removesuffix("_default") for name in branch.beside] == ["route", "order", "gate_up", "down", "combine"]
    assert sympy.sympify(branch.flops) == 3 * 2 * 4 * H * S
    assert sympy.sympify(branch.bytes) == 2 * (3 * H * S + 2 * (4 * H + 4 * S) + (4 * S + 4 * H))
    kinds = {node["id"]: node for node in dag.nodes}
    assert {kinds[name]["kind"] for name in branch.nodes} == {"branch"}
    matmuls = [kinds[name] for name in branch.nodes if kinds[name]["label"] == "mm"]
    assert all(node["predicted_us"] > FIXED and not node["critical"] and node["slack_us"] > 0 for node in matmuls)


def test_what_feeds_the_chain_or_follows_it_is_no_branch(dag_of):
    assert dag_of(layers(shared=False, count=2)).branches == ()


def test_each_layer_has_its_own_and_equal_ones_are_told_once(dag_of):
    dag = dag_of(layers(count=3))
    assert [len(branch.nodes) for branch in dag.branches] == [5, 5, 5]
    names = [set(branch.nodes) for branch in dag.branches]
    assert not names[0] & names[1] and not names[1] & names[2]
    (told,) = dag.folded_branches()
    assert told.count == 3 and str(told).startswith("branch x3 of 5 nodes (3 matmuls, ")


def test_the_gain_is_what_the_branch_idles_while_the_chain_works():
    assert gain_us(10.0, 0.0, 8.0) == 8.0 - FORK_JOIN_US
    assert gain_us(10.0, 2.5, 8.0) == 6.0 - FORK_JOIN_US
    # A chain of launches alone has no work to hide anything behind, and a branch of many rows does not idle.
    assert gain_us(10.0, 10.0, 8.0) == gain_us(10.0, 2.0, 0.0) == gain_us(0.0, 0.0, 8.0) == -FORK_JOIN_US


def test_matmuls_of_few_rows_idle():
    one = Matmul(sympy.Integer(8), sympy.Integer(8), T)
    assert idle_us([one, one], FEW_ROWS) == 2 * IDLE_US and idle_us([one], FEW_ROWS + 1) == 0
    assert idle_us([one, Matmul(T, T, 2 * T)], FEW_ROWS) == IDLE_US
    assert idle_us([one, Matmul(T, T, sympy.Symbol("s7"))], 4) is None


# docs/benchmarks/branch_stream.md: (experts, k, H, I, shared I) and for each T the gain of a second stream on an H200.
MEASURED = {
    (512, 10, 2048, 512): {1: 8.38, 8: 13.1, 64: 11.4, 512: 4.14, 4096: -4.0},
    (128, 8, 4096, 1408): {1: 14.2, 8: 18.4, 64: 19.6, 512: 0.64, 4096: 17.6},
    (32, 8, 7168, 2048): {1: 14.1, 8: 18.4, 64: 19.4, 512: -3.31, 4096: 83.1},
}


@pytest.mark.parametrize("sizes", MEASURED)
def test_the_prediction_agrees_with_what_was_measured_on_an_h200(sizes):
    model = device_model("NVIDIA H200")
    block = BlockSizes(*sizes)
    for tokens, measured in MEASURED[sizes].items():
        launches = [launch.kernel for launch in forward_program(block).variant_for(tokens).launches]
        whole = sum(model.time_us(kernel, block.named, tokens) for kernel in launches)
        idle = idle_us([Matmul(T, T, T)] * 3, tokens)
        found = gain_us(whole, sum(model.kernels[kernel].fixed_us for kernel in launches), idle)
        if tokens <= FEW_ROWS:
            assert found == pytest.approx(measured, abs=4.5)
        else:
            assert found < 0 and abs(measured - found) < 0.02 * whole


def test_a_record_tells_the_gain_and_for_which_tokens(dag_of):
    (branch,) = dag_of(layers()).branches
    mine = [KernelModel(FIXED, RATE, SPEED, 30.0)] * 3
    costs = [(2 * (H * S + 4 * H + 4 * S), 2 * 4 * H * S)] * 3
    times = [kernel.time_us(*cost) - FIXED + IDLE_US for kernel, cost in zip(mine, costs, strict=True)]
    assert list(branch.predicted_us.values()) == pytest.approx(times, abs=1e-3)
    assert branch.at_tokens == branch.times_at == 4 and -FORK_JOIN_US < branch.gain_us < 3 * IDLE_US - FORK_JOIN_US
    assert f"a second stream is predicted to gain {branch.gain_us:.1f} us at T=4" in str(branch)


def test_without_a_model_or_a_row_nothing_is_predicted(dag_of):
    for model in (None, replace(MODEL, kernels={})):
        (branch,) = dag_of(layers(), model).branches
        assert branch.predicted_us == {} and branch.gain_us is None and branch.at_tokens is None
        assert "us predicted" not in str(branch) and "may overlap with route" in str(branch)
        assert not branch.overlapped and "so no gain is predicted" in branch.why
    partial = {name: kernel for name, kernel in MODEL.kernels.items() if name != "down"}
    (branch,) = dag_of(layers(), replace(MODEL, kernels=partial)).branches
    assert len(branch.predicted_us) == 3 and branch.gain_us is None


def test_matmuls_of_every_spelling():
    def model(a, b, c, d, bias):
        return torch.addmm(bias, a, b), torch.bmm(c, d), a * 2

    with FakeTensorMode():
        tensors = [torch.empty(s) for s in ((3, 5), (5, 7), (2, 3, 5), (2, 5, 7), (7,))]
        graph = make_fx(model)(*tensors).graph
    costs = {node.name: matmul_of(node) for node in graph.nodes if node.op == "call_function"}
    assert costs["addmm"] == Matmul(4 * (7 + 15 + 35 + 21), 2 * 3 * 5 * 7, 3)
    assert costs["bmm"] == Matmul(4 * 2 * (15 + 35 + 21), 2 * 2 * 3 * 5 * 7, 6)
    assert costs["mul"] is None


def test_a_report_with_branches_survives_json(dag_of):
    report = Report("0/0", "rewritten", dags=[dag_of(layers(count=2))])
    assert Report.from_dict(report.to_dict()) == report
    text = str(report.dags[0])
    assert text.startswith("forward: ") and "branch x2 of 5 nodes" in text
    assert "gate_up_default (stage) after " in text and "; bytes " in text and "critical" in text
