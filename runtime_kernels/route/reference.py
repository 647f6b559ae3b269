"""Routing in plain torch: scores, the k best experts of each token and their weights; and its gradient.

    order "before"   scores = score(logits) over all E in score_dtype;  weights, ids = top-k of the scores
    order "after"    values, ids = top-k of the logits in their dtype;  weights = score(values) over k in score_dtype
then, in fp32 or wider, weights / (sum + eps) if renormalize, * scale, and one rounding to dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.activations import wide

SCORES = ("softmax", "sigmoid", "none")
ORDERS = ("before", "after")


def check_route(score: str, order: str) -> None:
    """Raise ValueError for a score or an order that is not known."""
    if score not in SCORES:
        raise ValueError(f"score {score!r} is not known; use one of {', '.join(SCORES)}")
    if order not in ORDERS:
        raise ValueError(f"order {order!r} is not known; use one of {', '.join(ORDERS)}")


def _scored(logits: Tensor, score: str, score_dtype: torch.dtype) -> Tensor:
    if score == "softmax":
        return torch.softmax(logits, dim=-1, dtype=score_dtype)
    logits = logits.to(score_dtype)
    return torch.sigmoid(logits) if score == "sigmoid" else logits


def route(
    logits: Tensor,
    k: int,
    score: str,
    order: str,
    renormalize: bool,
    eps: float,
    scale: float,
    score_dtype: torch.dtype,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """logits [T,E] -> weights [T,k] in dtype, ids [T,k] int64, both in descending order of the selected value.

    Raises ValueError for an unknown score or order.
    """
    check_route(score, order)
    if order == "before":
        values, ids = torch.topk(_scored(logits, score, score_dtype), k, dim=-1)
    else:
        values, ids = torch.topk(logits, k, dim=-1)
        values = _scored(values, score, score_dtype)
    weights = values.to(wide(values.dtype))
    if renormalize:
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / (total + eps if eps else total)
    if scale != 1.0:
        weights = weights * scale
    return weights.to(dtype), ids


def route_backward(
    grad_weights: Tensor,
    logits: Tensor,
    ids: Tensor,
    score: str,
    order: str,
    renormalize: bool,
    eps: float,
    scale: float,
    score_dtype: torch.dtype,
) -> Tensor:
    """Gradient of the logits [T,E], in their dtype, from that of the weights [T,k]; the choice `ids` is given.

    Raises ValueError for an unknown score or order.
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
    if renormalize:
        total = values.sum(dim=-1, keepdim=True) + eps
        grad = (grad - (grad * values).sum(dim=-1, keepdim=True) / total) / total
    if score == "sigmoid":
        grad = grad * values * (1 - values)
    elif score == "softmax":
        inner = (grad * values).sum(dim=-1, keepdim=True)
        if scores is not None:
            # Every expert's logit moves the denominator, not only those of the chosen ones.
            return (scores * -inner).scatter_add_(-1, ids, grad * values).to(logits.dtype)
        grad = values * (grad - inner)
    grad_logits = torch.zeros(logits.shape, dtype=compute, device=logits.device)
    return grad_logits.scatter_add_(-1, ids, grad).to(logits.dtype)
