"""`experts` and its backward against the dense float64 formulation; the CPU loop against the stages."""

from __future__ import annotations

import pytest
import torch

import moe_compiler.runtime_kernels.register  # noqa: F401
from moe_compiler.runtime_kernels.activations import ACTIVATIONS
from moe_compiler.runtime_kernels.biases import Biases
from moe_compiler.runtime_kernels.experts import stages
from moe_compiler.runtime_kernels.experts.in_turns import in_turns
from moe_compiler.runtime_kernels.registry import kernel
from moe_compiler.runtime_kernels.weights import ExpertWeights
from moe_compiler.runtime_kernels.weights import in_turns as turned
from tests.runtime_kernels.layouts import GATED_LAYOUTS

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
@pytest.mark.parametrize("layout", GATED_LAYOUTS)
@pytest.mark.parametrize("tokens", [0, 1, 2, 37, 512])
def test_sizes_and_layouts(make_block, assert_close, tokens, layout, weight_at):
    check_against_dense(make_block(tokens=tokens, layout=layout, weight_at=weight_at), assert_close)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(make_block, assert_close, activation, gated):
    check_against_dense(make_block(activation=activation, gated=gated), assert_close)
    check_against_dense(make_block(activation=activation, gated=gated, layout="list"), assert_close)


GPT_OSS = "silu(alpha=1.702,limit=0.7,shift=1.0)"  # a limit that many of the values here pass
ALL = ("gate", "up", "down")


@pytest.mark.parametrize("activation", [GPT_OSS, "silu(limit=0.5)", "gelu(limit=0.5,shift=0.25)", "silu(alpha=1.702)"])
@pytest.mark.parametrize(("tokens", "layout"), [(37, "packed"), (512, "list")])
def test_activations_with_parameters_in_bfloat16(make_block, activation, tokens, layout):
    """As accurate as the dense formulation in bfloat16. The pre-activations are exact: beside a clamp, a rounding
    decides over a gradient."""
    block = make_block(activation=activation, dtype=torch.bfloat16, layout=layout, tokens=tokens, biased=ALL)
    with torch.no_grad():
        block.x.copy_(torch.randint(-2, 3, block.x.shape))
        for tensor in (*block.gate, *block.up, *block.gate_bias, *block.up_bias):
            tensor.copy_(torch.randint(-2, 3, tensor.shape) / 8)
    grad, results = torch.randn(tokens, 12).to(block.dtype), []
    for one in (block, block.like(), block.double()):
        y = ops.experts(*one.arguments) if one is block else one.dense()
        roles = [[one.x], [one.weights], one.gate, one.up, one.down, one.gate_bias, one.up_bias, one.down_bias]
        given = [torch.autograd.grad(y, role, grad.to(y.dtype), retain_graph=True) for role in roles if role]
        results.append([y.double(), *(torch.cat([g.double().flatten() for g in role]) for role in given)])
    for index, (ours, eager, exact) in enumerate(zip(*results, strict=True)):
        error, allowed = (ours - exact).norm(), (eager - exact).norm()
        assert error <= 1.5 * allowed + 1e-3 * exact.norm(), f"result {index}: {error:.3g}, eager {allowed:.3g}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("activation", [GPT_OSS, "silu(limit=0.5)", "gelu(limit=0.5,shift=0.25)", "silu(alpha=1.702)"])
def test_activations_with_parameters(make_block, assert_close, activation, dtype):
    check_against_dense(make_block(activation=activation, dtype=dtype), assert_close)
    check_against_dense(make_block(activation=activation, dtype=dtype, layout="list", tokens=512), assert_close)


@pytest.mark.parametrize("activation", ["silu(alpha=1.702,limit=0.7)", "relu2(limit=0.5)"])
def test_activations_with_parameters_without_up(make_block, assert_close, activation):
    check_against_dense(make_block(activation=activation, gated=False), assert_close)


@pytest.mark.parametrize("biased", [ALL, ("down",), ("gate",)])
@pytest.mark.parametrize("weight_at", ["output", "input"])
@pytest.mark.parametrize("layout", GATED_LAYOUTS)
@pytest.mark.parametrize("tokens", [0, 1, 37, 512])
def test_biases(make_block, assert_close, tokens, layout, weight_at, biased):
    block = make_block(
        tokens=tokens, layout=layout, weight_at=weight_at, biased=biased, activation=GPT_OSS, routing="outside"
    )
    check_against_dense(block, assert_close)


@pytest.mark.parametrize("tokens", [37, 512])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_biases_in_other_dtypes(make_block, assert_close, dtype, tokens):
    for layout, gated in (("packed", True), ("list", True), ("packed", False)):
        block = make_block(tokens=tokens, dtype=dtype, layout=layout, gated=gated, biased=ALL, routing="skewed")
        check_against_dense(block, assert_close)


def test_a_bias_and_its_product_are_rounded_once(make_block):
    """With bias = -product + a little, a second rounding would leave nothing of the little."""
    block = make_block(dtype=torch.bfloat16, tokens=64, routing="one", gated=False, activation="relu", experts=1, k=1)
    block = block.detached()
    block.x, block.gate[0] = torch.full_like(block.x, 1.0), torch.full_like(block.gate[0], 1 / 12 + 2**-11)
    block.gate_bias = [torch.full((1, 7), -1.0, dtype=torch.bfloat16)]
    exact = float(block.gate[0][0, 0].double().sum()) - 1.0
    block.down[0] = torch.eye(12, 7, dtype=torch.bfloat16)[None]
    block.weights = torch.ones_like(block.weights)
    for y in (ops.experts(*block.arguments), stages.experts_saving(*block.arguments, save=False)[0]):
        torch.testing.assert_close(y[:, 0].double(), torch.full((64,), exact, dtype=torch.float64), rtol=2**-8, atol=0)


@pytest.mark.parametrize("layout", ["packed", "list"])
def test_experts_without_rows_have_bias_gradients_of_zero(make_block, layout):
    block = make_block(layout=layout, routing="one", biased=ALL)
    ops.experts(*block.arguments).sum().backward()
    for biases in (block.gate_bias, block.down_bias):
        grads = biases[0].grad if layout == "packed" else torch.stack([b.grad for b in biases])
        assert not grads[:-1].any()
        assert grads[-1].any()


@pytest.mark.parametrize("biased", [ALL, ("down",), ("gate", "down")])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("tokens", [37, 512])
def test_gate_and_up_in_turns_of_stored_columns(make_block, assert_close, tokens, first, biased):
    """[E, H, 2I] with gate in every other column: both are computed by one product, without a copy of the weights."""
    block = make_block(tokens=tokens, biased=biased, activation=GPT_OSS, layout="packed_transposed")
    stored = block.gate[0].detach().transpose(1, 2)
    block.gate, block.up = ([stored[..., at::2].transpose(1, 2).requires_grad_()] for at in (first, 1 - first))
    if block.gate_bias:
        bias = block.gate_bias[0].detach()
        block.gate_bias = [bias[:, first::2].requires_grad_()]
        block.up_bias = [bias[:, 1 - first :: 2].requires_grad_()] if "up" in biased else []
    added = Biases.of(block.gate_bias, block.up_bias, block.down_bias)
    both = in_turns(ExpertWeights(block.gate), ExpertWeights(block.up), added)
    # A bias of one of the two alone is kept apart, and so are they.
    assert (both is None) == (biased == ("gate", "down"))
    if both is not None:
        assert both.weights.tensors[0].data_ptr() == stored.data_ptr()
        assert torch.equal(both.weights.tensors[0], stored.transpose(1, 2))
    check_against_dense(block, assert_close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gate_and_up_as_views_of_interleaved_weights(make_block, assert_close, dtype):
    """W[:, 0::2] and W[:, 1::2], and the same of the bias: no copy, and gradients for each view."""
    block = make_block(dtype=dtype, biased=ALL, activation=GPT_OSS)
    weight, bias = block.gate[0].detach().requires_grad_(), block.gate_bias[0].detach().requires_grad_()
    block.gate, block.up = [weight[:, 0::2]], [weight[:, 1::2]]
    block.gate_bias, block.up_bias = [bias[:, 0::2]], [bias[:, 1::2]]
    exact = block.double()
    grad = torch.randn(37, 12).to(dtype)
    ops.experts(*block.arguments).backward(grad)
    exact.dense().backward(grad.double())
    wide = torch.stack([exact.gate[0].grad, exact.up[0].grad], 2).flatten(1, 2)
    assert_close(weight.grad, wide, dtype, "interleaved weights")
    wide = torch.stack([exact.gate_bias[0].grad, exact.up_bias[0].grad], 2).flatten(1, 2)
    assert_close(bias.grad, wide, dtype, "interleaved bias")


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tokens", [37, 512])
def test_gate_and_up_in_turns_are_one_tensor(make_block, assert_close, tokens, transposed, operator_calls):
    """The gradient of the view is that of the stored tensor: nothing is copied, filled with zeros or added."""
    block = make_block(tokens=tokens, biased=ALL, activation=GPT_OSS, layout="packed")
    stored, bias = block.gate[0].detach(), block.gate_bias[0].detach()
    stored = stored.transpose(1, 2).contiguous() if transposed else stored
    leaf, bias = stored.requires_grad_(), bias.requires_grad_()
    view = leaf.transpose(1, 2) if transposed else leaf
    block.gate, block.gate_bias = [turned(view, 1)], [turned(bias, 1)]
    assert block.gate[0].data_ptr() == leaf.data_ptr()
    exact = block.double()
    grad = torch.randn(tokens, 12)
    y = ops.experts(*block.arguments)
    with operator_calls() as calls:
        y.backward(grad)
    exact.dense().backward(grad.double())
    got = leaf.grad.transpose(1, 2) if transposed else leaf.grad
    assert leaf.grad.stride() == leaf.stride()
    assert_close(got, exact.gate[0].grad.transpose(1, 2).flatten(1, 2), torch.float32, "weights")
    assert_close(bias.grad, exact.gate_bias[0].grad.transpose(1, 2).flatten(1, 2), torch.float32, "bias")
    assert not {name for name in calls.names if "slice_backward" in name or "clone" in name or "add" in name}


@pytest.mark.parametrize("weight_at", ["output", "input"])
@pytest.mark.parametrize("layout", ["packed", "separate"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtypes(make_block, assert_close, dtype, layout, weight_at):
    check_against_dense(make_block(dtype=dtype, layout=layout, weight_at=weight_at), assert_close)


@pytest.mark.parametrize("layout", ["packed", "separate", "list", "turns"])
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
@pytest.mark.parametrize("layout", GATED_LAYOUTS)
def test_needs(make_block, layout, weight_at):
    block = make_block(layout=layout, weight_at=weight_at, biased=ALL).detached()
    _, preact, perm, starts = ops.experts_saving(*block.arguments)
    common = (torch.randn_like(block.x), *block.arguments[:9], preact, perm, starts, *block.arguments[9:12])
    full = ops.experts_backward(*common, [True] * 8)
    for index in range(8):
        needs = [i == index for i in range(8)]
        some = ops.experts_backward(*common, needs)
        for i, (part, whole) in enumerate(zip(some, full, strict=True)):
            if i == index:
                torch.testing.assert_close(part, whole)
            else:
                assert len(part) == 0


@pytest.mark.parametrize("layout", GATED_LAYOUTS)
def test_weight_gradients_have_the_strides_of_the_weights(make_block, layout):
    block = make_block(layout=layout).detached()
    _, preact, perm, starts = ops.experts_saving(*block.arguments)
    _, _, *lists = ops.experts_backward(
        torch.ones_like(block.x), *block.arguments[:9], preact, perm, starts, *block.arguments[9:12], [True] * 8
    )
    for grads, weights in zip(lists, (block.gate, block.up, block.down), strict=False):
        assert [(g.shape, g.stride()) for g in grads] == [(w.shape, w.stride()) for w in weights]


@pytest.mark.parametrize("weight_at", ["output", "input"])
@pytest.mark.parametrize("layout", GATED_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("biased", [(), ALL])
def test_the_stages_agree_with_the_loop(make_block, assert_close, dtype, layout, weight_at, biased):
    block = make_block(dtype=dtype, layout=layout, weight_at=weight_at, routing="outside", biased=biased).detached()
    y, preact, perm, starts = ops.experts_saving(*block.arguments)
    y2, preact2, perm2, starts2 = stages.experts_saving(*block.arguments, save=True)
    assert_close(y2, y, dtype)
    for one, other in ((preact, preact2), (perm, perm2), (starts, starts2)):
        torch.testing.assert_close(one, other)
    tail = (*block.arguments[:9], preact, perm, starts, *block.arguments[9:12])
    grad = torch.randn_like(y)
    for needs in ([True] * 8, [False, True, False, True, False, True, False, True], [True, False] * 4):
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
        ({"activation": "silu(limit=-1)"}, r"activation 'silu\(limit=-1\)': 'limit=-1' is not one of alpha="),
        ({"activation": "gelu(alpha=2.0)"}, "only silu has an alpha"),
        ({"activation": "silu(beta=2.0)"}, "'beta=2.0' is not one of alpha="),
        ({"down_bias": [torch.ones(5, 11)]}, r"down_bias is \[5,11\], but down makes 12 columns for 5 experts"),
        ({"gate_bias": [torch.ones(14)] * 4}, r"gate_bias is \[4,14\], but gate makes 14 columns for 5"),
        ({"gate_bias": [torch.ones(5, 14).double()]}, "gate_bias is torch.float64, x is torch.float32"),
        ({"gate_bias": [torch.ones(14)] * 4 + [torch.ones(13)]}, "gate_bias: expert 4 is"),
        ({"up_bias": [torch.ones(5, 7)]}, "up_bias is given without up: the bias of packed weights is gate_bias"),
        ({"down_bias": [torch.ones(5, 12, 1)]}, r"down_bias has shape \(5, 12, 1\); gate and gate_bias alone"),
        ({"down_bias": [torch.ones(1, 1, 5, 12)]}, r"down_bias: expected one tensor \[E, out\] or \[E, 2, I\], or E"),
        ({"up": [torch.ones(5, 2, 7, 12)]}, r"up has shape \(5, 2, 7, 12\); gate and gate_bias alone may hold"),
        ({"gate": [torch.ones(5, 2, 7, 12)]}, "is not gate and up in turns, which has two halves"),
        ({"gate": [turned(torch.ones(5, 14, 12), 1)], "gated": False}, "up in turns, but gated is False"),
        (
            {"gate": [turned(torch.ones(5, 14, 12), 1)], "up": [torch.ones(5, 14, 12)]},
            r"gate is \(5, 2, 7, 12\), gate and up in turns, but up weights are given too",
        ),
        (
            {"gate": [turned(torch.ones(5, 14, 12), 1)], "gate_bias": [torch.ones(5, 14)]},
            r"gate_bias is \(5, 14\), gate is \(5, 2, 7, 12\): give both in turns",
        ),
        ({"gate_bias": [turned(torch.ones(5, 14), 1)]}, r"gate_bias is \(5, 2, 7\), gate is \(5, 14, 12\)"),
        ({"gate_bias": [torch.ones(5, 2, 7)]}, r"gate_bias: shape \(5, 2, 7\) with strides \(14, 7, 1\) is not gate"),
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


@pytest.mark.parametrize(
    ("layout", "tokens"), [("packed_transposed", 6), ("list", 6), ("packed", 0), ("turns_transposed", 6)]
)
@pytest.mark.parametrize("biased", [(), ALL])
def test_opcheck(make_block, layout, tokens, biased):
    block = make_block(layout=layout, tokens=tokens, biased=biased)
    torch.library.opcheck(ops.experts.default, block.arguments)
    block = block.detached()
    torch.library.opcheck(ops.experts_saving.default, block.arguments)
    _, preact, perm, starts = ops.experts_saving(*block.arguments)
    tail = (*block.arguments[:9], preact, perm, starts, *block.arguments[9:12])
    for needs in ([True] * 8, [True, False, False, True, False, False, False, True]):
        torch.library.opcheck(ops.experts_backward.default, (torch.ones_like(block.x), *tail, needs))


@pytest.mark.parametrize("layout", ["packed", "list", "turns"])
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
        return ops.experts(x, ids, weights, gate, up, down, [], [], [], "silu", True, "output", x.dtype)

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
@pytest.mark.parametrize("layout", GATED_LAYOUTS)
def test_sizes_of_one(make_block, assert_close, layout, hidden, inner):
    block = make_block(layout=layout, hidden=hidden, inner=inner, dtype=torch.float64)
    frozen = block.detached()
    _, preact, perm, starts = ops.experts_saving(*frozen.arguments)
    common = (*frozen.arguments[:9], preact, perm, starts, *frozen.arguments[9:12], [True] * 8)
    _, _, *lists = ops.experts_backward(torch.ones_like(frozen.x), *common)
    for grads, weights in zip(lists, (block.gate, block.up, block.down), strict=False):
        assert [g.stride() for g in grads] == [torch.empty_like(w).stride() for w in weights]
    check_against_dense(block, assert_close)
