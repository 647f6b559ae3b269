"""`experts` and its backward against the dense float64 formulation; the CPU loop against the stages."""

from __future__ import annotations

import pytest
import torch

import moe_compiler.runtime_kernels.register  # noqa: F401
from moe_compiler.runtime_kernels.activations import ACTIVATIONS
from moe_compiler.runtime_kernels.experts import stages
from moe_compiler.runtime_kernels.registry import kernel

LAYOUTS = ("packed", "packed_transposed", "separate", "list", "list_packed", "list_transposed")
ops = torch.ops.moepdl


def check_against_dense(block, assert_close) -> None:
    y = ops.experts(*block.arguments)
    exact = block.double()
    expected = exact.dense()
    assert y.dtype == block.dtype
    assert_close(y, expected, block.dtype, "y")
    grad = torch.randn_like(expected).to(block.dtype)
    y.backward(grad)
    expected.backward(grad.double())
    for index, (leaf, judge) in enumerate(zip(block.leaves, exact.leaves, strict=True)):
        assert leaf.grad is not None
        wanted = torch.zeros_like(judge) if judge.grad is None else judge.grad
        assert_close(leaf.grad, wanted, block.dtype, f"gradient of leaf {index}")


@pytest.mark.parametrize("weight_at", ["output", "input"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [0, 1, 2, 37, 512])
def test_sizes_and_layouts(make_block, assert_close, tokens, layout, weight_at):
    check_against_dense(make_block(tokens=tokens, layout=layout, weight_at=weight_at), assert_close)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(make_block, assert_close, activation, gated):
    check_against_dense(make_block(activation=activation, gated=gated), assert_close)
    check_against_dense(make_block(activation=activation, gated=gated, layout="list"), assert_close)


@pytest.mark.parametrize("weight_at", ["output", "input"])
@pytest.mark.parametrize("layout", ["packed", "separate"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtypes(make_block, assert_close, dtype, layout, weight_at):
    check_against_dense(make_block(dtype=dtype, layout=layout, weight_at=weight_at), assert_close)


@pytest.mark.parametrize("layout", ["packed", "separate", "list"])
@pytest.mark.parametrize("routing", ["one", "skewed", "outside"])
@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32])
def test_routings(make_block, assert_close, routing, ids_dtype, layout):
    block = make_block(routing=routing, ids_dtype=ids_dtype, layout=layout)
    check_against_dense(block, assert_close)


def test_x_that_is_not_contiguous(make_block, assert_close):
    block = make_block()
    y = ops.experts(*block.arguments)
    wide = torch.randn(12, 37 * 2)
    wide[:, ::2] = block.x.detach().t()
    block.x = wide[:, ::2].t()
    assert not block.x.is_contiguous()
    assert_close(ops.experts(*block.arguments), y, torch.float32)


def test_y_in_another_dtype(make_block, assert_close):
    block = make_block(dtype=torch.bfloat16)
    y = ops.experts(*block.arguments[:-1], torch.float32)
    assert y.dtype == torch.float32
    assert_close(y, block.double().dense(), torch.bfloat16)
    y.sum().backward()
    assert block.x.grad is not None
    assert block.x.grad.dtype == torch.bfloat16


def test_routing_weights_in_another_dtype(make_block, assert_close):
    block = make_block(dtype=torch.bfloat16)
    block.weights = torch.rand(37, 2, requires_grad=True)
    check_against_dense(block, assert_close)
    assert block.weights.grad is not None
    assert block.weights.grad.dtype == torch.float32


@pytest.mark.parametrize("weight_at", ["output", "input"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_needs(make_block, layout, weight_at):
    block = make_block(layout=layout, weight_at=weight_at).detached()
    _, preact, perm, starts = ops.experts_saving(*block.arguments)
    common = (torch.randn_like(block.x), *block.arguments[:6], preact, perm, starts, *block.arguments[6:9])
    full = ops.experts_backward(*common, [True] * 5)
    for index in range(5):
        needs = [i == index for i in range(5)]
        some = ops.experts_backward(*common, needs)
        for i, (part, whole) in enumerate(zip(some, full, strict=True)):
            if i == index:
                torch.testing.assert_close(part, whole)
            else:
                assert len(part) == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weight_gradients_have_the_strides_of_the_weights(make_block, layout):
    block = make_block(layout=layout).detached()
    _, preact, perm, starts = ops.experts_saving(*block.arguments)
    _, _, *lists = ops.experts_backward(
        torch.ones_like(block.x), *block.arguments[:6], preact, perm, starts, *block.arguments[6:9], [True] * 5
    )
    for grads, weights in zip(lists, (block.gate, block.up, block.down), strict=True):
        assert [(g.shape, g.stride()) for g in grads] == [(w.shape, w.stride()) for w in weights]


@pytest.mark.parametrize("weight_at", ["output", "input"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_stages_agree_with_the_loop(make_block, assert_close, dtype, layout, weight_at):
    block = make_block(dtype=dtype, layout=layout, weight_at=weight_at, routing="outside").detached()
    y, preact, perm, starts = ops.experts_saving(*block.arguments)
    y2, preact2, perm2, starts2 = stages.experts_saving(*block.arguments, save=True)
    assert_close(y2, y, dtype)
    for one, other in ((preact, preact2), (perm, perm2), (starts, starts2)):
        torch.testing.assert_close(one, other)
    tail = (*block.arguments[:6], preact, perm, starts, *block.arguments[6:9])
    grad = torch.randn_like(y)
    for needs in ([True] * 5, [False, True, False, True, False], [True, False, True, False, True]):
        one, other = ops.experts_backward(grad, *tail, needs), stages.experts_backward(grad, *tail, needs)
        for a, b in zip(one, other, strict=True):
            assert len(a) == len(b)
            pairs = [(a, b)] if isinstance(a, torch.Tensor) else zip(a, b, strict=True)
            for p, q in pairs:
                assert_close(p, q, dtype)


def test_without_a_gradient_nothing_is_saved(make_block, operator_calls):
    block = make_block()
    arguments, frozen = block.arguments, block.detached().arguments
    with torch.no_grad(), operator_calls() as calls:
        ops.experts(*arguments)
    with operator_calls() as more:
        ops.experts(*frozen)
    assert calls.names[0] == more.names[0] == "moepdl.experts.default"
    with operator_calls() as training:
        ops.experts(*arguments)
    assert training.names[0] == "moepdl.experts_saving.default"


def test_frozen_weights_get_no_gradient(make_block):
    block = make_block(layout="list")
    frozen = block.detached()
    block.gate, block.up, block.down = frozen.gate, frozen.up, frozen.down
    ops.experts(*block.arguments).sum().backward()
    assert block.x.grad is not None
    assert all(t.grad is None for t in (*block.gate, *block.up, *block.down))


def test_a_second_derivative_is_refused(make_block):
    block = make_block(dtype=torch.float64)
    (grad,) = torch.autograd.grad(ops.experts(*block.arguments).sum(), block.x, create_graph=True)
    with pytest.raises(NotImplementedError, match="moepdl::experts has no second derivative"):
        (grad.sum() + block.x.sum()).backward()


def test_results_are_the_same_from_run_to_run(make_block):
    block = make_block(dtype=torch.bfloat16, tokens=512).detached()
    assert torch.equal(ops.experts(*block.arguments), ops.experts(*block.arguments))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "tanh"}, "activation 'tanh' is not known; use one of silu"),
        ({"weight_at": "middle"}, "weight_at 'middle' is not known; use one of output, input"),
        ({"x": torch.ones(3, 4, 12)}, r"x must be \[T,H\], got shape \(3, 4, 12\)"),
        ({"x": torch.ones(36, 12)}, r"ids and weights must both be \[T,K\] with T = 36"),
        ({"weights": torch.ones(37, 3)}, r"got shapes \(37, 2\) and \(37, 3\)"),
        ({"ids": torch.ones(37, 2)}, "ids must be int32 or int64, got torch.float32"),
        ({"x": torch.ones(37, 12, dtype=torch.float64)}, "gate is torch.float32, x is torch.float64"),
        ({"x": torch.ones(37, 13)}, "gate reads rows of 12, x has rows of 13"),
        ({"gated": False}, r"down reads rows of 7, gate and up give 14 \(gated=False\)"),
        ({"up": [torch.ones(5, 14, 11)]}, r"up is \[14,11\], gate is \[14,12\]"),
        ({"up": [torch.ones(5, 14, 12)], "gated": False}, "up weights are given, but gated is False"),
        ({"up": [torch.ones(5, 14, 12)]}, "down reads rows of 7, gate and up give 14"),
        ({"gate": [torch.ones(5, 13, 12)]}, "gate and up together must have an even number of rows, got 13"),
        ({"down": [torch.ones(4, 12, 7)]}, "down has 4 experts, gate has 5"),
        ({"down": []}, "down: the list of weights is empty"),
        ({"gate": [torch.ones(14, 12)] * 4 + [torch.ones(14, 11)]}, "gate: expert 4 has shape"),
    ],
)
def test_errors(make_block, change, message):
    block = make_block().detached()
    for name, value in change.items():
        setattr(block, name, value)
    with pytest.raises(ValueError, match=message):
        ops.experts(*block.arguments)


@pytest.mark.parametrize(("layout", "tokens"), [("packed_transposed", 6), ("list", 6), ("packed", 0)])
def test_opcheck(make_block, layout, tokens):
    block = make_block(layout=layout, tokens=tokens)
    torch.library.opcheck(ops.experts.default, block.arguments)
    block = block.detached()
    torch.library.opcheck(ops.experts_saving.default, block.arguments)
    _, preact, perm, starts = ops.experts_saving(*block.arguments)
    tail = (*block.arguments[:6], preact, perm, starts, *block.arguments[6:9])
    for needs in ([True] * 5, [True, False, False, True, False]):
        torch.library.opcheck(ops.experts_backward.default, (torch.ones_like(block.x), *tail, needs))


@pytest.mark.parametrize("layout", ["packed", "list"])
def test_compiled_with_dynamic_tokens(make_block, layout):
    """One graph serves every T, forward and backward: the fakes do not specialise."""
    graphs = []

    def backend(graph, examples):
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def count(g, _):
            graphs.append(g)
            return make_boxed_func(g.forward)

        return aot_autograd(fw_compiler=count, bw_compiler=count)(graph, examples)

    def model(x, logits, gate, up, down):
        route = (2, "softmax", "before", 1, 1, 1, "-inf", True, False, 1e-20, 1.0, torch.float32, x.dtype)
        weights, ids = ops.route(logits, None, None, *route)
        return ops.experts(x, ids, weights, gate, up, down, "silu", True, "output", x.dtype)

    compiled = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
    for tokens in (37, 5, 64):
        block = make_block(tokens=tokens, layout=layout)
        other = block.double()
        logits = torch.randn(tokens, 5)
        results = []
        for fn, b in ((model, other), (compiled, block)):
            scores = logits.to(b.dtype).requires_grad_()
            y = fn(b.x, scores, b.gate, b.up, b.down)
            results.append((y, *torch.autograd.grad(y.sum(), [b.x, scores, *b.gate, *b.up, *b.down])))
        for expected, actual in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected.float(), rtol=1e-4, atol=1e-5)
    assert len(graphs) == 2
    assert "moepdl.experts_saving" in graphs[0].code
    assert "moepdl.experts_backward" in graphs[1].code


def test_the_loops_are_kernels_of_the_cpu_only():
    for name in ("experts_loop", "experts_loop_saving", "experts_loop_backward"):
        assert callable(kernel(name).reference)
        with pytest.raises(NotImplementedError, match=f"kernel '{name}' runs on the CPU only"):
            _ = kernel(name).launch


@pytest.mark.parametrize(("hidden", "inner"), [(1, 7), (12, 1), (1, 1)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sizes_of_one(make_block, assert_close, layout, hidden, inner):
    block = make_block(layout=layout, hidden=hidden, inner=inner, dtype=torch.float64)
    frozen = block.detached()
    _, preact, perm, starts = ops.experts_saving(*frozen.arguments)
    common = (*frozen.arguments[:6], preact, perm, starts, *frozen.arguments[6:9], [True] * 5)
    _, _, *lists = ops.experts_backward(torch.ones_like(frozen.x), *common)
    for grads, weights in zip(lists, (block.gate, block.up, block.down), strict=True):
        assert [g.stride() for g in grads] == [torch.empty_like(w).stride() for w in weights]
    check_against_dense(block, assert_close)
