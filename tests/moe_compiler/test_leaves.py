"""Higher-order operators beside and around a block: kept as they are, and no reason to leave the block alone."""

from __future__ import annotations

import pytest
import torch

from moe_compiler.backend import last_reports, moepdl
from tests.fast_part import covering
from tests.moe_compiler.blocks import qwen3_block


class ScaleGradient(torch.autograd.Function):
    """The identity with a backward of its own: how auxiliary losses and gradient tricks are written."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


class AddLoss(torch.autograd.Function):
    """DeepSeek's way to add an auxiliary loss: the value passes through, the loss gets a gradient of one."""

    @staticmethod
    def forward(ctx, x, loss):
        ctx.dtype = loss.dtype
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones(1, dtype=ctx.dtype, device=grad.device)


def check(function, parameters, x, *, matches=1, options=None):
    parameters, options = list(parameters), {"remainder": "eager", **(options or {})}
    ours = torch.compile(function, backend=moepdl, options=options, fullgraph=True)
    out, eager = ours(x), function(x)
    torch.testing.assert_close(out, eager)
    grads = zip(
        torch.autograd.grad(out.square().sum(), [x, *parameters]),
        torch.autograd.grad(eager.square().sum(), [x, *parameters]),
        strict=True,
    )
    for mine, theirs in grads:
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    report = last_reports()[-1]
    assert sum(match.count for match in report.matches) == matches, str(report)
    return report


@pytest.mark.parametrize(("where", "remainder"), covering(["before", "after", "both"], ["eager", "inductor"]))
def test_a_users_autograd_function_beside_a_block(where, remainder):
    block = qwen3_block()

    def function(x):
        if where in ("before", "both"):
            x = ScaleGradient.apply(x, 0.5)
        y = block(x)
        return ScaleGradient.apply(y, 3.0) if where in ("after", "both") else y

    check(function, block.parameters(), torch.randn(1, 70, 32, requires_grad=True), options={"remainder": remainder})


def test_a_users_autograd_function_inside_of_a_block():
    """Between the router and the experts, on the weights: both are raised, and it stays between them."""
    block = qwen3_block()

    def function(x):
        flat = x.reshape(-1, 32)
        _, weights, ids = block.gate(flat)
        return block.experts(flat, ids, ScaleGradient.apply(weights, 2.0)).reshape(x.shape)

    report = check(function, block.parameters(), torch.randn(1, 70, 32, requires_grad=True))
    assert report.matches[0].router == "R1/R2 softmax, top-k, renormalise, then Inductor"


def test_an_auxiliary_loss_that_an_autograd_function_adds():
    block = qwen3_block()

    def function(x):
        flat = x.reshape(-1, 32)
        probabilities = torch.softmax(torch.nn.functional.linear(flat, block.gate.weight), -1)
        loss = probabilities.mean(0).square().sum()[None]
        return AddLoss.apply(block(x), loss)

    check(function, block.parameters(), torch.randn(1, 70, 32, requires_grad=True))


def test_a_block_in_the_forward_of_an_autograd_function_is_named_in_the_report():
    block = qwen3_block()

    class Around(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return block(x)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * x

    def function(x):
        return Around.apply(x) * 2

    x = torch.randn(1, 70, 32, requires_grad=True)
    report = check(function, [], x, matches=0)
    assert any("top-k" in note and "autograd_function_apply" in note for note in report.notes), report.notes


@pytest.mark.slow
def test_cond_and_flex_attention_beside_a_block():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    block = qwen3_block()
    mask = create_block_mask(lambda _b, _h, q, k: q >= k, 1, None, 320, 320, device="cpu")

    def near(score, _b, _h, q, k):
        return score - 0.1 * (q - k)

    def function(x):
        heads = x.reshape(1, x.shape[1], 2, 16).transpose(1, 2)
        x = flex_attention(heads, heads, heads, score_mod=near, block_mask=mask).transpose(1, 2).reshape(x.shape)
        y = block(x)
        return torch.cond(y.sum() > 0, lambda v: v * 2, lambda v: v - 1, (y,))

    x = torch.randn(1, 320, 32)
    with torch.no_grad():
        ours = torch.compile(function, backend=moepdl, options={"require_match": True}, fullgraph=True)
        torch.testing.assert_close(ours(x), function(x))
    report = last_reports()[-1]
    assert report.status == "rewritten" and [chain.direction for chain in report.schedule] == ["forward"]


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_a_compiled_block_under_a_transform_of_torch_func_is_right_or_says_what_is_wrong(transform):
    block = qwen3_block()
    ours = torch.compile(block, backend=moepdl, options={"remainder": "eager"})
    x = torch.randn(3, 1, 9, 32)

    def apply(module):
        if transform == "vmap":
            return torch.func.vmap(module)(x)
        return torch.func.grad(lambda value: module(value).sum())(x[0])

    try:
        wanted = apply(block)
    except Exception as error:  # transformers' own block cannot be transformed either
        with pytest.raises(type(error)):
            apply(ours)
        return
    torch.testing.assert_close(apply(ours), wanted)


def test_gradients_of_gradients_are_refused_in_words():
    block = qwen3_block()
    x = torch.randn(1, 9, 32, requires_grad=True)
    ours = torch.compile(block, backend=moepdl, options={"remainder": "eager"})

    def twice():
        (grad,) = torch.autograd.grad(ours(x).square().sum(), x, create_graph=True)
        grad.sum().backward()

    with pytest.raises(RuntimeError, match=r"double backward|differentiat"):
        twice()
