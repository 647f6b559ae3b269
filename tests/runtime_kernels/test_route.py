"""`route` against its plain formulation and autograd in float64."""

from __future__ import annotations

import pytest
import torch

import moe_compiler.runtime_kernels.register  # noqa: F401

ops = torch.ops.moepdl
CASES = [
    (score, order, renormalize, scale)
    for score in ("softmax", "sigmoid", "none")
    for order in ("before", "after")
    for renormalize, scale in ((True, 2.5), (False, 1.0))
]
F64 = torch.float64


def naive(logits, k, score, order, renormalize, eps, scale):
    """In float64, differentiable."""
    functions = {"softmax": lambda v: v.softmax(-1), "sigmoid": torch.sigmoid, "none": lambda v: v}
    if order == "before":
        weights, ids = functions[score](logits).topk(k, -1)
    else:
        values, ids = logits.topk(k, -1)
        weights = functions[score](values)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return weights * scale, ids


@pytest.mark.parametrize("tokens", [0, 1, 2, 37])
@pytest.mark.parametrize(("score", "order", "renormalize", "scale"), CASES)
def test_forward_and_backward(score, order, renormalize, scale, tokens):
    logits = torch.randn(tokens, 9, dtype=F64, requires_grad=True)
    judge = logits.detach().clone().requires_grad_()
    weights, ids = ops.route(logits, 3, score, order, renormalize, 1e-6, scale, F64, F64)
    expected, choice = naive(judge, 3, score, order, renormalize, 1e-6, scale)
    assert torch.equal(ids, choice)
    assert ids.dtype == torch.int64
    torch.testing.assert_close(weights, expected)
    grad = torch.randn_like(weights)
    weights.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(logits.grad, judge.grad)


@pytest.mark.parametrize(("score", "order", "renormalize", "scale"), CASES)
def test_float32(score, order, renormalize, scale):
    logits = torch.rand(37, 9).add(0.5).requires_grad_()
    judge = logits.detach().double().requires_grad_()
    weights, ids = ops.route(logits, 3, score, order, renormalize, 1e-20, scale, torch.float32, torch.float32)
    expected, choice = naive(judge, 3, score, order, renormalize, 1e-20, scale)
    assert torch.equal(ids, choice)
    torch.testing.assert_close(weights, expected.float(), rtol=1e-5, atol=1e-6)
    weights.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(logits.grad, judge.grad.float(), rtol=1e-4, atol=1e-5)


def test_scores_are_rounded_before_the_choice():
    """In bfloat16 both scores are the same number, so the choice is a tie; the weights are the rounded score."""
    logits = torch.tensor([[0.0, 0.001, -9.0]])
    weights, ids = ops.route(logits, 2, "softmax", "before", False, 0.0, 1.0, torch.bfloat16, torch.float32)
    scores = torch.softmax(logits, -1, dtype=torch.bfloat16)
    assert scores[0, 0] == scores[0, 1]
    assert set(ids[0].tolist()) == {0, 1}
    assert torch.equal(weights, scores[:, :2].float())


def test_the_order_after_chooses_by_the_logits_in_their_dtype():
    logits = torch.tensor([[1.0, 1.0 + 2**-20, 0.0]])
    _, ids = ops.route(logits, 1, "sigmoid", "after", False, 0.0, 1.0, torch.bfloat16, torch.bfloat16)
    assert ids.item() == 1


def test_dtypes_of_the_results():
    logits = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    weights, ids = ops.route(logits, 2, "softmax", "before", True, 1e-20, 1.0, torch.float32, torch.bfloat16)
    assert (weights.dtype, ids.dtype) == (torch.bfloat16, torch.int64)
    assert not ids.requires_grad
    weights.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_int32_ids_in_the_backward():
    logits = torch.randn(4, 8)
    weights, ids = ops.route(logits, 2, "softmax", "before", True, 0.0, 1.0, torch.float32, torch.float32)
    tail = ("softmax", "before", True, 0.0, 1.0, torch.float32)
    grads = [ops.route_backward(weights, logits, i, *tail) for i in (ids, ids.int())]
    assert torch.equal(*grads)


def test_logits_that_are_not_contiguous():
    logits = torch.randn(8, 37).t()
    tail = (2, "softmax", "before", True, 0.0, 1.0, torch.float32, torch.float32)
    for one, other in zip(ops.route(logits, *tail), ops.route(logits.contiguous(), *tail), strict=True):
        assert torch.equal(one, other)
        assert one.is_contiguous()


@pytest.mark.parametrize(
    ("score", "order", "message"),
    [
        ("tanh", "before", "score 'tanh' is not known; use one of softmax, sigmoid, none"),
        ("softmax", "between", "order 'between' is not known; use one of before, after"),
    ],
)
def test_errors(score, order, message):
    with pytest.raises(ValueError, match=message):
        ops.route(torch.ones(2, 4), 1, score, order, False, 0.0, 1.0, torch.float32, torch.float32)
    ids = torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        ops.route_backward(torch.ones(2, 1), torch.ones(2, 4), ids, score, order, False, 0.0, 1.0, torch.float32)


@pytest.mark.parametrize("tokens", [6, 0])
@pytest.mark.parametrize(("score", "order"), [("softmax", "before"), ("sigmoid", "after"), ("none", "before")])
def test_opcheck(score, order, tokens):
    logits = torch.randn(tokens, 5, requires_grad=True)
    tail = (score, order, True, 1e-6, 1.5, torch.float32)
    torch.library.opcheck(ops.route.default, (logits, 2, *tail, torch.float32))
    weights, ids = ops.route(logits.detach(), 2, *tail, torch.float32)
    torch.library.opcheck(ops.route_backward.default, (weights, logits.detach(), ids, *tail))


def test_a_second_derivative_is_refused():
    logits = torch.randn(6, 5, requires_grad=True)
    weights, _ = ops.route(logits, 2, "softmax", "before", True, 0.0, 1.0, torch.float32, torch.float32)
    (grad,) = torch.autograd.grad(weights.square().sum(), logits, create_graph=True)
    with pytest.raises(NotImplementedError, match="moepdl::route has no second derivative"):
        grad.sum().backward()
