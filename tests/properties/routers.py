"""Routers: logits [T, E] -> weights [T, K], ids [T, K], by the rules of a case; and what the weights are in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.properties.case import Case

NEGATIVE = -1.5  # added for the choice: no biased score of softmax or sigmoid is above zero


def parameters(module: Any, c: Case, dtype: torch.dtype) -> None:
    """Give `module` what its router reads."""
    module.router = torch.nn.Linear(c.hidden, c.experts, bias=c.router_bias, dtype=dtype)
    with torch.no_grad():  # logits with a spread of about 2: a choice is seldom between equals
        module.router.weight.copy_(torch.randn(c.experts, c.hidden) * 2 * c.hidden**-0.5)
    if c.correction != "none":
        spread = torch.randn(c.experts) * 0.2
        module.register_buffer("correction", (spread + NEGATIVE if c.correction == "negative" else spread).to(dtype))
    if c.expert_scale:
        module.expert_scale = torch.nn.Parameter((0.5 + torch.rand(c.experts)).to(dtype))


def score(c: Case, logits: Tensor) -> Tensor:
    """The score function, computed in the dtype that the case asks for."""
    wide = logits.float() if c.score_dtype == "cast" else logits
    if c.score == "softmax":
        if c.score_dtype == "argument":
            return F.softmax(wide, dim=-1, dtype=torch.float32)
        return torch.softmax(wide, dim=-1)
    if c.score == "sigmoid":
        return wide.sigmoid()
    if c.score == "sqrtsoftplus":
        return F.softplus(wide).sqrt()
    return wide


def _limited(c: Case, scores: Tensor) -> Tensor:
    """Scores with those of the groups that were not kept filled: half of the groups stay."""
    count = 2 if c.experts == 4 else 4
    grouped = scores.view(-1, count, c.experts // count)
    best = grouped.topk(2, dim=-1)[0].sum(dim=-1) if c.groups == "top2" else grouped.amax(dim=-1)
    kept = torch.topk(best, k=count // 2, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(best).scatter_(1, kept, 1)
    mask = mask.unsqueeze(-1).expand(-1, count, c.experts // count).reshape(-1, c.experts)
    return scores.masked_fill(~mask.bool(), float(c.fill))


def _chosen(c: Case, module: Any, scores: Tensor) -> tuple[Tensor | None, Tensor]:
    """(values of the top-k where the case takes them from it, ids)."""
    choice = scores
    if c.correction != "none":
        choice = choice + module.correction
    if c.groups != "none":
        choice = _limited(c, choice)
    if c.choose == "argmax":
        return None, torch.argmax(choice, dim=-1, keepdim=True)
    if c.choose == "argsort":
        return None, torch.argsort(choice, dim=-1, descending=True)[:, : c.k]
    if c.choose == "table":
        position = torch.arange(choice.shape[0], device=choice.device)
        return None, (position[:, None] * 7 + torch.arange(c.k, device=choice.device)) % c.experts
    if c.choose == "topk":
        return torch.topk(choice, c.k, dim=-1)
    return None, torch.topk(choice, k=c.k, dim=-1, sorted=c.choose != "unsorted")[1]


def route(c: Case, module: Any, logits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """weights [T, K], in `dtype` or in the score's own, and ids [T, K]."""
    before = c.order == "before"
    scores = score(c, logits) if before else logits
    values, ids = _chosen(c, module, scores)
    weights = scores.gather(1, ids) if values is None else values
    if not before:
        weights = score(c, weights)
    if c.renorm == "sum":
        weights = weights / weights.sum(dim=-1, keepdim=True)
    elif c.renorm == "in_place":
        weights /= weights.sum(dim=-1, keepdim=True)
    elif c.renorm == "eps":
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-9)
    elif c.renorm == "clamp":
        weights = weights / torch.clamp(weights.sum(dim=-1, keepdim=True), min=0.75)
    elif c.renorm == "l2":
        weights = weights / weights.norm(dim=-1, keepdim=True)
    if c.scale != 1.0:
        weights = weights * c.scale
    if c.expert_scale:
        weights = weights * module.expert_scale[ids]
    if c.weight_dtype == "x":
        weights = weights.to(dtype)
    return weights, ids.to(torch.int32) if c.ids_dtype == "int32" else ids


def exact_weights(c: Case, module: Any, logits: Tensor, ids: Tensor) -> Tensor:
    """The weights of given choices, by the rule itself in float64: nothing here is spelled as a model would."""
    chosen = torch.gather(logits, 1, ids)
    if c.score == "softmax":
        total = torch.logsumexp(logits if c.order == "before" else chosen, -1, keepdim=True)
        weights = torch.exp(chosen - total)
    elif c.score == "sigmoid":
        weights = 0.5 * (1 + torch.tanh(0.5 * chosen))
    elif c.score == "sqrtsoftplus":
        weights = torch.logaddexp(chosen, torch.zeros_like(chosen)) ** 0.5
    else:
        weights = chosen
    total = weights.sum(-1, keepdim=True)
    if c.renorm in ("sum", "in_place"):
        weights = weights / total
    elif c.renorm == "eps":
        weights = weights / (total + 1e-9)
    elif c.renorm == "clamp":
        weights = weights / total.clamp(min=0.75)
    elif c.renorm == "l2":
        weights = weights / weights.square().sum(-1, keepdim=True).sqrt()
    weights = weights * c.scale
    return weights * module.expert_scale[ids] if c.expert_scale else weights
