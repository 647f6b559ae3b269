"""Exchanges in the graph and in Inductor's code, compiled for a group whose other ranks do not exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_compiler
from moe_compiler.backend import last_reports, moepdl
from moe_compiler.graph_pass import insert
from moe_compiler.inline import named_arguments
from moe_compiler.moe_ir import STARTS, op_name
from moe_compiler.pipeline import PIPELINE, run_phase
from moe_compiler.testing import run_passes
from moe_compiler.verify import check_exchanges
from tests.moe_compiler.graphs import context
from tests.ranks import fake_ranks

ops = torch.ops.moepdl


class Block(nn.Module):
    """gpt-fast's experts, in parameters of the module itself, beside a shared expert."""

    def __init__(self, experts: int = 8, hidden: int = 32) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, experts, bias=False)
        self.w1 = nn.Parameter(0.2 * torch.randn(experts, 32, hidden))
        self.w2 = nn.Parameter(0.2 * torch.randn(experts, hidden, 16))
        self.gate, self.up = (nn.Linear(hidden, 64, bias=False) for _ in range(2))
        self.down = nn.Linear(64, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(torch.softmax(self.router(x), -1), 2)
        gate, up = torch.einsum("ti,taoi->tao", x, self.w1[ids]).chunk(2, -1)
        rows = torch.einsum("tai,taoi->tao", nn.functional.silu(gate) * up, self.w2[ids])
        return (rows * weights[..., None]).sum(1) + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


@pytest.fixture
def fake_group(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The group of rank 0 of as many ranks as the test asks for, 8 by default."""
    with fake_ranks(getattr(request, "param", 8)) as group:
        yield group


def sharded(group: Any, experts: int = 8, hidden: int = 32) -> nn.Module:
    block = Block(experts, hidden)
    moe_compiler.expert_parallel(block, group, modules=[""])
    return block


def calls_of(code: str) -> list[str]:
    """The calls of other libraries and of our operators in a generated function, in their order."""
    body = code[code.index("def call(") :]
    found = re.findall(r"= torch\.ops\.moepdl\.(\w+)\.default\(|extern_kernels\.((?:add)?mm)\(", body)
    return [ours or theirs for ours, theirs in found]


def overlapping(group: Any) -> Any:
    return torch.compile(sharded(group), backend=moepdl, options={"overlap": "on"}, fullgraph=True)


FORWARD = [
    "mm",  # the router's logits
    "route",
    "ep_dispatch_start",
    "mm",  # of the shared expert
    "ep_dispatch_wait",
    "chain",
    "ep_combine_start",
    "mm",
    "mm",
    "ep_combine_wait",
]


def test_inductor_keeps_the_order_of_exchanges_and_of_what_they_overlap_with(fake_group):
    from torch._inductor.utils import run_and_get_code

    with torch.no_grad():
        _, (code,) = run_and_get_code(overlapping(fake_group), torch.randn(64, 32))
    assert calls_of(code) == FORWARD
    # What the wait is to overlap with is among its arguments, so no scheduler can compute it later.
    assert re.search(r"ep_dispatch_wait\.default\(buf\d+, \[buf\d+\],", code)
    assert re.search(r"ep_combine_start\.default\(buf\d+, \[buf\d+\],", code)


@pytest.mark.slow
def test_inductor_keeps_the_order_in_the_backward_too(fake_group):
    from torch._inductor.utils import run_and_get_code

    compiled = overlapping(fake_group)

    def step() -> Tensor:
        y = compiled(torch.randn(64, 32, requires_grad=True))
        y.sum().backward()
        return y

    _, codes = run_and_get_code(step)
    forward, backward = map(calls_of, codes)
    assert forward == FORWARD
    start, wait = backward.index("ep_redispatch_start"), backward.index("ep_redispatch_wait")
    assert backward[start + 1 : wait] == ["mm", "mm", "mm"] and backward[wait + 1] == "chain"
    rest = backward[wait + 2 :]
    assert [name for name in rest if name.startswith("ep_")] == [
        "ep_combine_start",
        "ep_return_weights_start",
        "ep_combine_wait",
        "ep_return_weights_wait",
    ]
    assert "mm" in rest[rest.index("ep_return_weights_start") : rest.index("ep_combine_wait")]


def test_without_overlap_every_exchange_is_waited_for_at_once(fake_group):
    options = {"remainder": "eager", "verify": "structural"}
    torch.compile(sharded(fake_group), backend=moepdl, options=options, fullgraph=True)(torch.randn(16, 32))
    report = last_reports()[-1]
    assert not report.overlaps and report.exchanges[0].capacity == 16
    assert next(p for p in report.passes if p.name == "overlap_all_to_all").rewrites == 0


@pytest.mark.parametrize("fake_group", [256], indirect=True)
def test_a_group_of_256_ranks_compiles(fake_group):
    options = {"remainder": "eager", "overlap": "on", "require_match": True}
    compiled = torch.compile(sharded(fake_group, 256), backend=moepdl, options=options, fullgraph=True)
    compiled(torch.randn(9, 32, requires_grad=True)).sum().backward()
    report = last_reports()[-1]
    (exchange,) = report.exchanges
    assert exchange.ranks == 256 and exchange.dispatch_bytes == 255 * 16 * (32 * 4 + 2 * 4 + 2 * 4)
    assert {"forward", "backward"} == {overlap.direction for overlap in report.overlaps}


def test_a_dry_run_asks_nobody_and_shows_the_exchange(fake_group):
    report = moe_compiler.explain(sharded(fake_group), torch.randn(20, 32))
    assert report.exchanges[0].agreed == "of this rank alone: nothing runs"
    assert report.exchanges[0].capacity == 32


def test_a_report_with_exchanges_comes_back_from_its_data(fake_group):
    options = {"remainder": "eager", "overlap": "on"}
    torch.compile(sharded(fake_group), backend=moepdl, options=options)(torch.randn(16, 32))
    report = last_reports()[-1]
    again = moe_compiler.Report.from_dict(report.to_dict())
    assert again == report and again.exchanges and again.overlaps


def test_an_option_about_exchanges_is_idle_without_one():
    options = {"remainder": "eager", "capacity": 64, "timeout_s": 5}
    torch.compile(Block(), backend=moepdl, options=options)(torch.randn(16, 32))
    notes = last_reports()[-1].notes
    assert "capacity: no all-to-all exchange in this graph" in notes
    assert "timeout_s: no all-to-all exchange in this graph" in notes


def test_weights_that_other_code_reads_too_stay_gathered_there(fake_group):
    class Penalised(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.w1.square().mean()

    block = Penalised()
    moe_compiler.expert_parallel(block, fake_group, modules=[""])
    torch.compile(block, backend=moepdl, options={"remainder": "eager"})(torch.randn(16, 32))
    report = last_reports()[-1]
    assert len(report.exchanges) == 1
    assert any(note.startswith("1 weight that ranks share gathered whole") for note in report.notes)


def test_a_view_that_mixes_experts_keeps_the_block_gathered(fake_group):
    class Mixed(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.shown = self.w1.flip(0)
            weights, ids = torch.topk(torch.softmax(self.router(x), -1), 2)
            gate, up = torch.einsum("ti,taoi->tao", x, self.shown[ids]).chunk(2, -1)
            rows = torch.einsum("tai,taoi->tao", nn.functional.silu(gate) * up, self.w2[ids])
            return (rows * weights[..., None]).sum(1)

    block = Mixed()
    moe_compiler.expert_parallel(block, fake_group, modules=[""])
    torch.compile(block, backend=moepdl, options={"remainder": "eager"})(torch.randn(16, 32))
    report = last_reports()[-1]
    assert not report.exchanges and any("flip mixes its experts" in note for note in report.notes), report.notes


def graph_of_exchanges(group: Any, overlap: str = "off") -> torch.fx.GraphModule:
    """A forward graph after autograd, its exchanges as starts and waits."""
    block = sharded(group)
    after, _ = run_passes(block, [p.name for phase, p in PIPELINE if phase == "capture"], torch.randn(16, 32))
    run_phase(after, "graph", context(overlap=overlap))
    return after


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_each_start_reads_the_token_of_the_one_before(fake_group, overlap):
    graph = graph_of_exchanges(fake_group, overlap).graph
    assert check_exchanges(graph) is None
    dispatch, combine = (node for node in graph.nodes if op_name(node) in STARTS)
    (token,) = named_arguments(combine)["after"]
    assert token.args == (dispatch, 0) and named_arguments(dispatch)["after"] == []


def test_faults_of_exchanges_are_found(fake_group):
    graph = graph_of_exchanges(fake_group).graph
    combine = next(node for node in graph.nodes if op_name(node) == "ep_combine_start")
    args = combine.args
    combine.args = (args[0], [], *args[2:])
    told, node = check_exchanges(graph)
    assert "reads the token of the one before" in told and node is combine
    combine.args = args
    wait = next(node for node in graph.nodes if op_name(node) == "ep_combine_wait")
    with graph.inserting_after(wait):
        insert(wait, wait.target, wait.args)
    told, node = check_exchanges(graph)
    assert "has one wait" in told and node is combine
    graph = graph_of_exchanges(fake_group).graph
    wait = next(node for node in graph.nodes if op_name(node) == "ep_combine_wait")
    wait.args = (graph.find_nodes(op="placeholder")[0], *wait.args[1:])
    assert "has one wait" in check_exchanges(graph)[0]
