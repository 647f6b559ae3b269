"""Routing in plain torch: scores, the k best experts of each token and their weights; and its gradient.

    order "before"   scores = score(logits) over all E in score_dtype
    order "after"    scores = logits, in their dtype
    choice           scores + bias (when there is one), in the dtype that the two promote to
    groups           neighbouring experts in `groups` groups of equal size, each scored by the sum of its `group_top`
                     largest entries of the choice; outside of the `kept_groups` best the choice is `fill`
    ids              top-k of the choice, and for k = 1 the first of equals, as argmax takes it and the device's kernel;
                     values = scores at ids: neither bias nor fill is in the weights
    order "after"    values = score(values) over the k, in score_dtype
then, in fp32 or wider: values / (sum + eps) if renormalize, / max(sum, eps) if clamp too, * scale, * expert_scale at
ids (when there is one), and one rounding to dtype. The choice is never differentiated: the bias gets no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.activations import wide

SCORES = ("softmax", "sigmoid", "none")
ORDERS = ("before", "after")
FILLS = ("0", "-inf")


def check_route(score: str, order: str) -> None:
    """Raise ValueError for a score or an order that is not known."""
    if score not in SCORES:
        raise ValueError(f"score {score!r} is not known; use one of {', '.join(SCORES)}")
    if order not in ORDERS:
        raise ValueError(f"order {order!r} is not known; use one of {', '.join(ORDERS)}")


def check_groups(experts: int, groups: int, kept_groups: int, group_top: int, fill: str) -> None:
    """Raise ValueError unless `experts` fall into such groups; one group is none."""
    if fill not in FILLS:
        raise ValueError(f"fill {fill!r} is not known; use one of {', '.join(FILLS)}")
    if groups < 1 or experts % groups:
        raise ValueError(f"{experts} experts do not fall into {groups} groups of equal size")
    if not 1 <= kept_groups <= groups:
        raise ValueError(f"{kept_groups} groups of {groups} are kept; it must be between 1 and {groups}")
    if not 1 <= group_top <= experts // groups:
        raise ValueError(f"a group of {experts // groups} experts is scored by its {group_top} largest")


def check_operand(operand: Tensor | None, experts: int, what: str) -> None:
    """Raise ValueError unless an optional operand holds one number an expert."""
    if operand is not None and tuple(operand.shape) != (experts,):
        raise ValueError(
            f"the {what} has the shape {tuple(operand.shape)}, not one number for each of {experts} experts"
        )


def _scored(logits: Tensor, score: str, score_dtype: torch.dtype) -> Tensor:
    if score == "softmax":
        return torch.softmax(logits, dim=-1, dtype=score_dtype)
    logits = logits.to(score_dtype)
    return torch.sigmoid(logits) if score == "sigmoid" else logits


def _limited(choice: Tensor, groups: int, kept_groups: int, group_top: int, fill: str) -> Tensor:
    """choice [T,E] with `fill` outside of each token's best groups."""
    grouped = choice.unflatten(-1, (groups, -1))
    best = grouped.amax(-1) if group_top == 1 else grouped.topk(group_top, dim=-1).values.sum(-1)
    # Of equals topk takes any; an argmax, which a choice of one may be, takes the first.
    kept = best.argmax(-1, keepdim=True) if kept_groups == 1 else best.topk(kept_groups, dim=-1).indices
    dropped = torch.ones_like(best, dtype=torch.bool).scatter(-1, kept, False)
    return grouped.masked_fill(dropped.unsqueeze(-1), float(fill)).flatten(-2)


def route(
    logits: Tensor,
    bias: Tensor | None,
    expert_scale: Tensor | None,
    k: int,
    score: str,
    order: str,
    groups: int,
    kept_groups: int,
    group_top: int,
    fill: str,
    renormalize: bool,
    clamp: bool,
    eps: float,
    scale: float,
    score_dtype: torch.dtype,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """logits [T,E], bias and expert_scale [E] or None -> weights [T,k] in dtype, ids [T,k] int64.

    Both are in descending order of the choice. Raises ValueError for an unknown score, order or fill, for groups that
    the experts do not fall into, and for operands of another shape.
    """
    check_route(score, order)
    check_groups(logits.shape[1], groups, kept_groups, group_top, fill)
    check_operand(bias, logits.shape[1], "bias")
    check_operand(expert_scale, logits.shape[1], "expert_scale")
    scores = _scored(logits, score, score_dtype) if order == "before" else logits
    choice = scores if bias is None else scores + bias
    if groups > 1:
        choice = _limited(choice, groups, kept_groups, group_top, fill)
    # As of the groups, the first of equals where there is one.
    values, ids = choice.max(dim=-1, keepdim=True) if k == 1 else torch.topk(choice, k, dim=-1)
    if choice is not scores:
        values = scores.gather(-1, ids)
    if order == "after":
        values = _scored(values, score, score_dtype)
    weights = values.to(wide(values.dtype))
    if renormalize:
        total = weights.sum(dim=-1, keepdim=True)
        if clamp:
            total = total.clamp(min=eps)
        elif eps:
            total = total + eps
        weights = weights / total
    if scale != 1.0:
        weights = weights * scale
    if expert_scale is not None:
        weights = weights * expert_scale.to(wide(expert_scale.dtype))[ids]
    return weights.to(dtype), ids


def route_backward(
    grad_weights: Tensor,
    logits: Tensor,
    ids: Tensor,
    expert_scale: Tensor | None,
    score: str,
    order: str,
    renormalize: bool,
    clamp: bool,
    eps: float,
    scale: float,
    score_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Gradients of the logits [T,E] and of expert_scale [E], from that of the weights [T,k]; the choice `ids` is given.

    Each is in the dtype of what it belongs to; without an expert_scale the second is empty. Raises ValueError for an
    unknown score or order.
    """
    check_route(score, order)
    ids = ids.to(torch.int64)
    compute = torch.float64 if torch.float64 in (logits.dtype, score_dtype) else torch.float32
    grad = grad_weights.to(compute)
    if scale != 1.0:
        grad = grad * scale
    scores: Tensor | None = None
    if order == "before" and score == "softmax":
        scores = _scored(logits, score, score_dtype).to(compute)
        values = scores.gather(-1, ids)
    else:
        values = _scored(logits.gather(-1, ids), score, score_dtype).to(compute)
    total, moves = None, None
    if renormalize:
        total = values.sum(dim=-1, keepdim=True)
        if clamp:
            moves = total >= eps
            total = total.clamp(min=eps)
        else:
            total = total + eps
    grad_scale = logits.new_zeros(0)
    if expert_scale is not None:
        flow = grad * (values if total is None else values / total)
        # Each row names an expert at most once, so nothing is added up in an order of chance.
        dense = torch.zeros(logits.shape, dtype=compute, device=logits.device).scatter_add(-1, ids, flow)
        grad_scale = dense.sum(0).to(expert_scale.dtype)
        grad = grad * expert_scale.to(compute)[ids]
    if total is not None:
        inner = (grad * values).sum(dim=-1, keepdim=True) / total
        grad = (grad - (inner if moves is None else torch.where(moves, inner, 0.0))) / total
    if score == "sigmoid":
        grad = grad * values * (1 - values)
    elif score == "softmax":
        inner = (grad * values).sum(dim=-1, keepdim=True)
        if scores is not None:
            # Every expert's logit moves the denominator, not only those of the chosen ones.
            grad_logits = (scores * -inner).scatter_add_(-1, ids, grad * values)
            return grad_logits.to(logits.dtype), grad_scale
        grad = values * (grad - inner)
    grad_logits = torch.zeros(logits.shape, dtype=compute, device=logits.device).scatter_add_(-1, ids, grad)
    return grad_logits.to(logits.dtype), grad_scale
