"""inline_few: a CPU block of few pairs, written out, computes what the operator computes."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from moe_compiler.passes import inline_few as module_of_the_pass
from moe_compiler.passes.inline_few import FEW_CACHED_PAIRS, FEW_PAIRS, FEW_PAIRS_OF_COLUMNS, inline_few
from moe_compiler.pipeline import run_passes
from tests.moe_compiler.graphs import E, H, I, K, calls, context, forward_graph


def block(
    activation="silu",
    gated=True,
    weight_at="output",
    dtype=torch.float32,
    separate=False,
    columns=False,
    biased=False,
):
    """A function of (x, logits, *weights), and the shapes of its weights."""
    rows = 2 * I if gated and not separate else I

    def function(x, logits, *given):
        weights, biases = (given[:-2], given[-2:]) if biased else (given, ())
        biases = ([biases[0]], [], [biases[1]]) if biased else ([], [], [])
        arguments = (K, "softmax", "before", 1, 1, 1, "-inf", True, False, 0.0, 1.0, torch.float32, dtype)
        w, ids = torch.ops.moepdl.route(logits, None, None, *arguments)
        if columns:
            weights = [weight.mT for weight in weights]
        up = [weights[1]] if separate else []
        weights = ([weights[0]], up, [weights[-1]])
        return torch.ops.moepdl.experts(x, ids, w, *weights, *biases, activation, gated, weight_at, dtype)

    shapes = [(E, rows, H), *([(E, I, H)] if separate else []), (E, H, I)]
    stored = [(e, b, a) if columns else (e, a, b) for e, a, b in shapes]
    return function, [*stored, (E, rows), (E, H)] if biased else stored


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "form",
    [
        {},
        {"activation": "gelu"},
        {"activation": "gelu_tanh"},
        {"activation": "relu", "gated": False},
        {"activation": "relu2", "gated": False},
        {"weight_at": "input"},
        {"separate": True},
        {"columns": True},
        {"columns": True, "separate": True, "weight_at": "input"},
        {"biased": True},
        {"biased": True, "columns": True, "activation": "silu(alpha=1.702,limit=0.5,shift=1.0)"},
        {"activation": "gelu(limit=0.25)", "weight_at": "input", "biased": True},
    ],
    ids=str,
)
def test_the_products_are_the_operator(form, dtype):
    function, shapes = block(dtype=dtype, **form)
    shapes = [(5, H), (5, E), *shapes]
    with FakeTensorMode():
        module = make_fx(function)(*[torch.empty(shape, dtype=dtype) for shape in shapes])
    ctx = context()
    assert run_passes(module, (inline_few,), ctx) == 1
    assert calls(module) == []
    assert any("written out" in note for note in ctx.report.notes)
    inputs = [torch.randn(shape).to(dtype) * 0.3 for shape in shapes]
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(module(*inputs), function(*inputs), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("operands", [(True, True), (True, False), (False, True)], ids=["both", "bias", "scale"])
def test_a_router_with_bias_groups_and_scale_is_written_out_too(operands):
    shapes = [(5, H), (5, E), (E,), (E,), (E, 2 * I, H), (E, H, I)]

    def function(x, logits, bias, scale, gate_up, down):
        arguments = (K, "sigmoid", "before", 4, 2, 2, "0", True, True, 0.9, 2.0, torch.float32, torch.float32)
        bias, scale = (value if there else None for value, there in zip((bias, scale), operands, strict=True))
        w, ids = torch.ops.moepdl.route(logits, bias, scale, *arguments)
        return torch.ops.moepdl.experts(x, ids, w, [gate_up], [], [down], [], [], [], "silu", True, "output", x.dtype)

    with FakeTensorMode():
        module = make_fx(function)(*[torch.empty(shape) for shape in shapes])
    assert run_passes(module, (inline_few,), context()) == 1
    assert calls(module) == []
    inputs = [torch.randn(shape) * 0.3 for shape in shapes]
    torch.testing.assert_close(module(*inputs), function(*inputs), rtol=1e-5, atol=1e-5)


def test_what_is_left_to_chains():
    many = forward_graph(tokens=FEW_CACHED_PAIRS // K + 1, device="cpu")
    assert run_passes(many, (inline_few,), context()) == 0
    gpu = forward_graph(device="cuda")
    assert run_passes(gpu, (inline_few,), context()) == 0
    eager = forward_graph(device="cpu")
    assert run_passes(eager, (inline_few,), context(remainder="eager")) == 0
    foreign = forward_graph(device="cpu", between=lambda weights, ids: (weights, ids + 0))
    assert run_passes(foreign, (inline_few,), context()) == 0
    few = forward_graph(tokens=FEW_CACHED_PAIRS // K, device="cpu")
    assert run_passes(few, (inline_few,), context()) == 1


@pytest.mark.parametrize(("columns", "limit"), [(False, FEW_PAIRS), (True, FEW_PAIRS_OF_COLUMNS)])
def test_weights_that_do_not_stay_in_cache_are_written_out_for_fewer_pairs(monkeypatch, columns, limit):
    monkeypatch.setattr(module_of_the_pass, "CACHED_BYTES", 0)
    function, shapes = block(columns=columns)
    for tokens, count in ((limit // K, 1), (limit // K + 1, 0)):
        with FakeTensorMode():
            module = make_fx(function)(*[torch.empty(shape) for shape in [(tokens, H), (tokens, E), *shapes]])
        assert run_passes(module, (inline_few,), context()) == count


def test_a_router_that_is_wider_than_the_experts_is_left_to_chains():
    function, shapes = block()
    shapes = [(5, H), (5, E + 1), *shapes]
    with FakeTensorMode():
        module = make_fx(function)(*[torch.empty(shape) for shape in shapes])
    assert run_passes(module, (inline_few,), context()) == 0
    inputs = [torch.randn(shape) for shape in shapes]
    inputs[1][:, E] = 100.0
    y = module(*inputs)
    assert torch.isfinite(y).all()


def test_a_symbolic_number_of_tokens_is_left_to_chains():
    function, shapes = block()
    module = make_fx(function, tracing_mode="symbolic")(*[torch.randn(shape) for shape in [(5, H), (5, E), *shapes]])
    assert run_passes(module, (inline_few,), context()) == 0


def test_clamps_are_written_as_inductor_takes_them_after_autograd():
    """aten.clamp has a decomposition ahead of that place, and no lowering there."""
    function, shapes = block(activation="silu(alpha=1.702,limit=0.2,shift=1.0)")
    shapes = [(5, H), (5, E), *shapes]
    inputs = [torch.randn(shape) for shape in shapes]
    with FakeTensorMode():
        module = make_fx(function)(*[torch.empty(shape) for shape in shapes])
    assert run_passes(module, (inline_few,), context()) == 1
    assert not any("clamp" in str(node.target) for node in module.graph.nodes)
    compiled = torch._inductor.compile(module, inputs)
    torch.testing.assert_close(compiled(*inputs), function(*inputs), rtol=1e-5, atol=1e-5)
