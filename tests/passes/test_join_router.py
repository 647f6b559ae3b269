"""The router's matmul becomes a stage of its block on a GPU, and stays where it is when it is another matmul."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from moe_compiler import device
from moe_compiler.moe_ir import op_name
from moe_compiler.passes.chain_pdl import chain_pdl
from moe_compiler.passes.expand_stages import expand_stages
from moe_compiler.passes.join_router import join_router
from moe_compiler.pipeline import run_passes
from tests.moe_compiler.graphs import EXPERTS, ROUTE, E, H, I, context


def graph_of(router, *, tokens: int = 4, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> GraphModule:
    """A block whose logits `router(x, weight, bias)` makes; the logits are a result too."""

    def block(x, weight, bias, gate_up, down):
        logits = router(x, weight, bias)
        weights, ids = torch.ops.moepdl.route(logits, *ROUTE)
        return torch.ops.moepdl.experts(x, ids, weights, [gate_up], [], [down], [], [], [], *EXPERTS), logits

    with FakeTensorMode():
        shapes = ((tokens, H), (E, H), (E,), (E, 2 * I, H), (E, H, I))
        return make_fx(block)(*[torch.empty(shape, device=device, dtype=dtype) for shape in shapes])


def plain(x, weight, bias):
    return torch.mm(x, weight.t())


def biased(x, weight, bias):
    return torch.addmm(bias, x, weight.t())


def seen_otherwise(x, weight, bias):
    return torch.mm(x, weight.t()).view(2, -1, E).reshape(-1, E)


def rows(matrix, first, end):
    return torch.ops.aten.slice.Tensor(matrix, 0, first, end)


def padded(x, weight, bias):
    """As Inductor has it where a library likes multiples of eight."""
    return rows(torch.mm(torch.constant_pad_nd(x, [0, 0, 0, 4]), weight.t()), 0, -4)


@pytest.mark.parametrize("router", [plain, biased, seen_otherwise, padded])
def test_the_matmul_becomes_the_first_launch_of_the_chain(router, monkeypatch):
    monkeypatch.setattr(device, "why_no_pdl", lambda kind: "")
    module, ctx = graph_of(router), context()
    assert run_passes(module, (expand_stages, join_router), ctx) == 2
    assert not any(op_name(node) in ("mm", "addmm", "constant_pad_nd", "slice") for node in module.graph.nodes)
    (logits,) = (node for node in module.graph.nodes if op_name(node) == "router_logits")
    assert (logits.args[2] is not None) == (router is biased)
    assert logits.meta["val"].dtype == torch.bfloat16 and logits.meta["val"].shape == (4, E)
    run_passes(module, (chain_pdl,), ctx)
    (chain,) = ctx.chains
    for variant in chain.program.variants:
        assert [launch.kernel for launch in variant.launches[:2]] == ["router_logits", "route"]
    # The logits are a result of the model too, and so one of the chain.
    assert chain.program.outputs[0] == "logits"
    assert chain.program.symbols == {"T": ("x", 0)}


def scaled(x, weight, bias):
    return torch.addmm(bias, x, weight.t(), alpha=0.5)


def full_bias(x, weight, bias):
    return torch.addmm(torch.mm(x, weight.t()), x, weight.t())


def followed(x, weight, bias):
    return torch.tanh(torch.mm(x, weight.t()))


def shifted_rows(x, weight, bias):
    return rows(torch.mm(torch.constant_pad_nd(x, [0, 0, 4, 0]), weight.t()), 0, -4)


def other_rows(x, weight, bias):
    return rows(torch.mm(torch.constant_pad_nd(x, [0, 0, 0, 4]), weight.t()), 4, 8)


def turned(x, weight, bias):
    return torch.mm(weight, x.t()).t()


@pytest.mark.parametrize("router", [scaled, full_bias, followed, turned, shifted_rows, other_rows])
def test_other_matmuls_stay(router):
    module = graph_of(router)
    assert run_passes(module, (expand_stages, join_router), context()) == 1
    assert any(op_name(node) in ("mm", "addmm") for node in module.graph.nodes)


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.bfloat16), ("cuda", torch.float32)], ids=["on a CPU", "in fp32"]
)
def test_it_stays_with_the_library(device, dtype):
    module = graph_of(plain, device=device, dtype=dtype)
    run_passes(module, (expand_stages, join_router), context())
    assert any(op_name(node) == "mm" for node in module.graph.nodes)
    assert not any(op_name(node) == "router_logits" for node in module.graph.nodes)


def test_a_second_run_finds_nothing():
    module = graph_of(plain)
    run_passes(module, (expand_stages, join_router), context())
    assert run_passes(module, (join_router,), context()) == 0
