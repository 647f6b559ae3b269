"""`route` against its plain formulation and autograd in float64."""

from __future__ import annotations

from typing import Any

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
# Attributes beside score and order, E = 12 and k = 3.
CHOICES: dict[str, dict[str, Any]] = {
    "bias": {"bias": True},
    "two of four groups by their best two": {"bias": True, "groups": 4, "kept_groups": 2, "group_top": 2},
    "the same with fill 0": {"bias": True, "groups": 4, "kept_groups": 2, "group_top": 2, "fill": "0"},
    "one of three groups by its best": {"groups": 3, "fill": "0"},
    "groups of one": {"bias": True, "groups": 12, "kept_groups": 4},
    "fewer kept than chosen": {"bias": True, "groups": 12, "kept_groups": 2},
    "all groups kept": {"groups": 2, "kept_groups": 2, "group_top": 6},
    "scale of each expert": {"expert_scale": True, "renormalize": True},
    "bias and scale, clamped": {"bias": True, "expert_scale": True, "renormalize": True, "clamp": True, "eps": 0.9},
    "sum below the limit": {"renormalize": True, "clamp": True, "eps": 100.0},
    "all experts": {"bias": True, "k": 12, "renormalize": True},
    "one expert": {"bias": True, "k": 1, "expert_scale": True},
}
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


def route(logits, k=3, score="softmax", order="before", bias=None, expert_scale=None, **changes):
    """moepdl::route with every attribute that is not given left out of the rule."""
    attrs = {"groups": 1, "kept_groups": 1, "group_top": 1, "fill": "-inf", "renormalize": False, "clamp": False}
    attrs |= {"eps": 0.0, "scale": 1.0, "score_dtype": logits.dtype, "dtype": logits.dtype, **changes}
    return ops.route(logits, bias, expert_scale, k, score, order, *attrs.values())


def naive(logits, k, score, order, bias=None, expert_scale=None, **attrs):
    """In float64, differentiable, one token at a time where there are groups."""
    functions = {"softmax": lambda v: v.softmax(-1), "sigmoid": torch.sigmoid, "none": lambda v: v}
    scores = functions[score](logits) if order == "before" else logits
    choice = (scores if bias is None else scores + bias).detach().clone()
    groups = attrs.get("groups", 1)
    for row in choice if groups > 1 else ():
        parts = row.view(groups, -1)
        best = torch.stack([part.sort(descending=True).values[: attrs.get("group_top", 1)].sum() for part in parts])
        kept = best.argsort(descending=True)[: attrs.get("kept_groups", 1)].tolist()
        for group in set(range(groups)) - set(kept):
            parts[group] = float(attrs.get("fill", "-inf"))
    ids = choice.topk(k, -1).indices
    weights = scores.gather(-1, ids)
    if order == "after":
        weights = functions[score](weights)
    if attrs.get("renormalize"):
        total, eps = weights.sum(-1, keepdim=True), attrs.get("eps", 0.0)
        weights = weights / (total.clamp(min=eps) if attrs.get("clamp") else total + eps)
    weights = weights * attrs.get("scale", 1.0)
    return (weights if expert_scale is None else weights * expert_scale[ids]), ids


@pytest.mark.parametrize("tokens", [0, 1, 2, 37])
@pytest.mark.parametrize(("score", "order", "renormalize", "scale"), CASES)
def test_forward_and_backward(score, order, renormalize, scale, tokens):
    logits = torch.randn(tokens, 9, dtype=F64, requires_grad=True)
    judge = logits.detach().clone().requires_grad_()
    attrs = {"renormalize": renormalize, "eps": 1e-6, "scale": scale}
    weights, ids = route(logits, 3, score, order, **attrs)
    expected, choice = naive(judge, 3, score, order, **attrs)
    assert torch.equal(ids, choice)
    assert ids.dtype == torch.int64
    torch.testing.assert_close(weights, expected)
    grad = torch.randn_like(weights)
    weights.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(logits.grad, judge.grad)


def _operands(case: dict[str, Any], dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Any]]:
    """The operands that a case asks for, and its attributes. Most of the bias is far below zero."""
    attrs = {key: value for key, value in case.items() if key not in ("bias", "expert_scale", "k")}
    operands: dict[str, Any] = {"k": case.get("k", 3)}
    if case.get("bias"):
        operands["bias"] = torch.linspace(-2.0, 0.3, 12, dtype=dtype)[torch.randperm(12)]
    if case.get("expert_scale"):
        operands["expert_scale"] = (torch.rand(12, dtype=dtype) + 0.5).requires_grad_()
    return operands, attrs


@pytest.mark.parametrize("tokens", [0, 1, 37])
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("name", CHOICES)
def test_another_choice_forward_and_backward(name, score, order, tokens):
    operands, attrs = _operands(CHOICES[name], F64)
    logits = torch.randn(tokens, 12, dtype=F64, requires_grad=True)
    judge = logits.detach().clone().requires_grad_()
    own = {key: value.detach().clone() if torch.is_tensor(value) else value for key, value in operands.items()}
    if "expert_scale" in own:
        own["expert_scale"].requires_grad_()
    weights, ids = route(logits, score=score, order=order, **operands, **attrs)
    expected, choice = naive(judge, score=score, order=order, **own, **attrs)
    assert torch.equal(ids, choice)
    torch.testing.assert_close(weights, expected)
    grad = torch.randn_like(weights)
    weights.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(logits.grad, judge.grad)
    if "expert_scale" in own:
        torch.testing.assert_close(operands["expert_scale"].grad, own["expert_scale"].grad)


@pytest.mark.parametrize("name", CHOICES)
def test_another_choice_in_narrow_types(name):
    """fp32 logits and fp32 bias beside a bf16 result; the choice is made in fp32, one rounding at the end."""
    operands, attrs = _operands(CHOICES[name], F32)
    logits = torch.randn(37, 12, requires_grad=True)
    judge = logits.detach().double().requires_grad_()
    own = {key: value.detach().double() if torch.is_tensor(value) else value for key, value in operands.items()}
    weights, ids = route(logits, score="sigmoid", **operands, **attrs, dtype=BF16)
    expected, choice = naive(judge, score="sigmoid", order="before", **own, **attrs)
    assert torch.equal(ids, choice)
    assert torch.equal(weights, expected.to(BF16)) or (weights.double() - expected).norm() <= 3e-3 * expected.norm()
    weights.float().square().sum().backward()
    expected.square().sum().backward()
    assert (logits.grad.double() - judge.grad).norm() <= 1e-2 * judge.grad.norm()


@pytest.mark.parametrize(("score", "order", "renormalize", "scale"), CASES)
def test_float32(score, order, renormalize, scale):
    logits = torch.rand(37, 9).add(0.5).requires_grad_()
    judge = logits.detach().double().requires_grad_()
    attrs = {"renormalize": renormalize, "eps": 1e-20, "scale": scale}
    weights, ids = route(logits, 3, score, order, **attrs)
    expected, choice = naive(judge, 3, score, order, **attrs)
    assert torch.equal(ids, choice)
    torch.testing.assert_close(weights, expected.float(), rtol=1e-5, atol=1e-6)
    weights.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(logits.grad, judge.grad.float(), rtol=1e-4, atol=1e-5)


def test_scores_are_rounded_before_the_choice():
    """In bfloat16 both scores are the same number, so the choice is a tie; the weights are the rounded score."""
    logits = torch.tensor([[0.0, 0.001, -9.0]])
    weights, ids = route(logits, 2, score_dtype=BF16)
    scores = torch.softmax(logits, -1, dtype=BF16)
    assert scores[0, 0] == scores[0, 1]
    assert set(ids[0].tolist()) == {0, 1}
    assert torch.equal(weights, scores[:, :2].float())


def test_the_choice_is_made_in_the_dtype_that_scores_and_bias_promote_to():
    """In bf16 either sum would be a tie, which the first expert may win."""
    logits = torch.tensor([[0.0, 0.0]], dtype=BF16)  # both score 0.5, whose neighbours are 2 ** -8 away
    bias = torch.tensor([0.0, 2.0**-12])
    assert route(logits, 1, "sigmoid", bias=bias)[1].item() == 1
    both = torch.tensor([[0.0, 2.0**-12]], dtype=BF16)
    assert route(both, 1, "none", bias=torch.tensor([0.5, 0.5]))[1].item() == 1


def test_a_dropped_expert_with_fill_zero_beats_a_negative_choice_and_with_minus_infinity_does_not():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    bias = torch.tensor([-1.5, -1.6, -2.5, -2.5])
    groups = {"groups": 2, "kept_groups": 1, "group_top": 2}
    weights, ids = route(logits, 2, "sigmoid", bias=bias, **groups, fill="-inf")
    assert ids.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, torch.sigmoid(logits[:, :2]))
    weights, ids = route(logits, 2, "sigmoid", bias=bias, **groups, fill="0")
    assert set(ids[0].tolist()) == {2, 3}
    torch.testing.assert_close(weights, torch.sigmoid(logits).gather(1, ids))


def test_groups_are_scored_by_the_sum_of_their_best():
    """The first of two groups has the best expert, the second the better two, the first the better three."""
    logits = torch.tensor([[5.0, 1.0, 1.0, 4.0, 3.0, -9.0]])
    for top, group in ((1, {0, 1, 2}), (2, {3, 4}), (3, {0, 1, 2})):
        _, ids = route(logits, 2, "none", groups=2, group_top=top)
        assert set(ids[0].tolist()) <= group


def test_equal_scores_are_chosen_again_when_the_router_is_recomputed():
    logits = torch.zeros(19, 12).requires_grad_()
    case = {"bias": torch.zeros(12), "groups": 4, "kept_groups": 2, "group_top": 2, "renormalize": True}
    first, again = (route(logits, score="sigmoid", **case) for _ in range(2))
    assert torch.equal(first[1], again[1]) and torch.equal(first[0], again[0])
    assert (first[1].sort(-1).values.diff(dim=-1) > 0).all()
    first[0].sum().backward()
    # A gradient of exactly zero: every chosen weight is 1 / k whatever moves.
    torch.testing.assert_close(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("experts", [4, 16, 60, 128])
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(("bias", "groups"), [(False, 1), (True, 1), (False, 2)])
def test_of_equal_scores_one_expert_is_the_first(experts, order, bias, groups):
    logits = torch.randint(0, 3, (200, experts)).to(BF16)
    assert (logits == logits.amax(-1, keepdim=True)).sum(-1).max() > 1
    operand = torch.zeros(experts, dtype=BF16) if bias else None
    weights, ids = route(logits, 1, "sigmoid", order, operand, groups=groups, kept_groups=groups)
    assert torch.equal(ids[:, 0], logits.argmax(-1))
    torch.testing.assert_close(weights, logits.sigmoid().gather(-1, ids))


def test_the_bias_gets_no_gradient():
    bias = torch.randn(8, requires_grad=True)
    logits = torch.randn(4, 8, requires_grad=True)
    weights, _ = route(logits, 2, bias=bias)
    grads = torch.autograd.grad(weights.sum(), [logits, bias], allow_unused=True)
    assert grads[0] is not None and grads[1] is None
    weights, _ = route(logits.detach(), 2, bias=bias)
    assert not weights.requires_grad


def test_the_scale_alone_may_want_a_gradient():
    scale = torch.rand(8).requires_grad_()
    logits = torch.randn(5, 8)
    weights, ids = route(logits, 2, expert_scale=scale)
    (grad,) = torch.autograd.grad(weights.sum(), scale)
    scores = torch.softmax(logits, -1).gather(1, ids)
    torch.testing.assert_close(grad, torch.zeros(8).index_add(0, ids.flatten(), scores.flatten()))


def test_the_order_after_chooses_by_the_logits_in_their_dtype():
    logits = torch.tensor([[1.0, 1.0 + 2**-20, 0.0]])
    _, ids = route(logits, 1, "sigmoid", "after", score_dtype=BF16, dtype=BF16)
    assert ids.item() == 1


def test_dtypes_of_the_results():
    logits = torch.randn(4, 8, dtype=BF16, requires_grad=True)
    weights, ids = route(logits, 2, renormalize=True, eps=1e-20, score_dtype=F32)
    assert (weights.dtype, ids.dtype) == (BF16, torch.int64)
    assert not ids.requires_grad
    weights.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == BF16


BACKWARD = ("softmax", "before", True, False, 0.0, 1.0, F32)


def test_int32_ids_in_the_backward():
    logits = torch.randn(4, 8)
    weights, ids = route(logits, 2, renormalize=True)
    grads = [ops.route_backward(weights, logits, i, None, *BACKWARD)[0] for i in (ids, ids.int())]
    assert torch.equal(*grads)


def test_operands_that_are_not_contiguous():
    logits = torch.randn(8, 37).t()
    numbers = torch.randn(8, 3)
    case = {"k": 2, "bias": numbers[:, 0], "expert_scale": numbers[:, 1], "renormalize": True}
    packed = {key: value.contiguous() if torch.is_tensor(value) else value for key, value in case.items()}
    for one, other in zip(route(logits, **case), route(logits.contiguous(), **packed), strict=True):
        assert torch.equal(one, other)
        assert one.is_contiguous()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score": "tanh"}, "score 'tanh' is not known; use one of softmax, sigmoid, none"),
        ({"order": "between"}, "order 'between' is not known; use one of before, after"),
        ({"fill": "1"}, "fill '1' is not known; use one of 0, -inf"),
        ({"groups": 3}, "4 experts do not fall into 3 groups of equal size"),
        ({"groups": 2, "kept_groups": 3}, "3 groups of 2 are kept; it must be between 1 and 2"),
        ({"groups": 2, "group_top": 3}, "a group of 2 experts is scored by its 3 largest"),
        ({"bias": torch.zeros(5)}, r"the bias has the shape \(5,\), not one number for each of 4 experts"),
        ({"expert_scale": torch.zeros(1, 4)}, r"the expert_scale has the shape \(1, 4\)"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_errors(changes, message):
    for logits in (torch.ones(2, 4), torch.ones(2, 4, device="meta")):
        operands = {k: v.to(logits.device) if torch.is_tensor(v) else v for k, v in changes.items()}
        with pytest.raises(ValueError, match=message):
            route(logits, 1, **operands)
    if "score" in changes or "order" in changes:
        score, order = changes.get("score", "softmax"), changes.get("order", "before")
        ids = torch.zeros(2, 1, dtype=torch.int64)
        with pytest.raises(ValueError, match=message):
            ops.route_backward(torch.ones(2, 1), torch.ones(2, 4), ids, None, score, order, *BACKWARD[2:])


@pytest.mark.parametrize("tokens", [6, 0])
@pytest.mark.parametrize(
    ("score", "order", "operands"),
    [
        ("softmax", "before", {}),
        ("sigmoid", "after", {"renormalize": True, "eps": 1e-6, "scale": 1.5}),
        ("none", "before", {"groups": 3, "fill": "0"}),
        ("sigmoid", "before", {"bias": True, "groups": 3, "kept_groups": 2, "group_top": 2, "renormalize": True}),
        ("softmax", "before", {"bias": True, "expert_scale": True, "renormalize": True, "clamp": True, "eps": 0.5}),
    ],
)
def test_opcheck(score, order, operands, tokens):
    logits = torch.randn(tokens, 6, requires_grad=True)
    attrs = {"groups": 1, "kept_groups": 1, "group_top": 1, "fill": "-inf", "renormalize": False, "clamp": False}
    attrs |= {"eps": 0.0, "scale": 1.0, "score_dtype": F32, "dtype": F32}
    attrs |= {key: value for key, value in operands.items() if key in attrs}
    bias = torch.randn(6) if "bias" in operands else None
    scale = torch.rand(6).requires_grad_() if "expert_scale" in operands else None
    torch.library.opcheck(ops.route.default, (logits, bias, scale, 2, score, order, *attrs.values()))
    with torch.no_grad():
        weights, ids = ops.route(logits, bias, scale, 2, score, order, *attrs.values())
    scale = scale.detach() if scale is not None else None
    tail = [attrs[name] for name in ("renormalize", "clamp", "eps", "scale", "score_dtype")]
    torch.library.opcheck(ops.route_backward.default, (weights, logits.detach(), ids, scale, score, order, *tail))


@pytest.mark.parametrize("wanted", ["logits", "expert_scale"])
def test_a_second_derivative_is_refused(wanted):
    leaves = {"logits": torch.randn(6, 5, requires_grad=True), "expert_scale": torch.rand(5).requires_grad_()}
    weights, _ = route(leaves["logits"], 2, expert_scale=leaves["expert_scale"], renormalize=True)
    (grad,) = torch.autograd.grad(weights.square().sum(), leaves[wanted], create_graph=True)
    with pytest.raises(NotImplementedError, match="moepdl::route has no second derivative"):
        grad.sum().backward()
