"""Routers that choose by more than the scores, in the spellings of public models, over one small block.

A router is a function (block, logits [T, E]) -> (weights [T, k], ids [T, k]). The experts are written as batched_mm.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

E, K, G, KEPT, H, I = 12, 3, 4, 2, 16, 8
SIZE = E // G

Router = Callable[["Block", Tensor], tuple[Tensor, Tensor]]


class Block(torch.nn.Module):
    """Parameters of a router and of its experts. bias: of the choice, some entries far below zero."""

    def __init__(self, router: Router, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.route = router

        def made(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, dtype=dtype) * shape[-1] ** -0.5)

        self.router = torch.nn.Parameter(torch.randn(E, H, dtype=dtype))
        self.per_expert = torch.nn.Parameter(torch.rand(E, dtype=dtype) + 0.5)
        self.gate_up, self.down = made(E, 2 * I, H), made(E, H, I)
        self.register_buffer("bias", torch.linspace(-1.5, 0.5, E)[torch.randperm(E)])

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(self, F.linear(x, self.router))
        k = ids.shape[-1]
        flat = ids.reshape(-1)
        gate, up = torch.bmm(self.gate_up[flat], x.repeat_interleave(k, 0).unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        rows = torch.bmm(self.down[flat], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return (rows * weights.to(x.dtype).reshape(-1, 1)).view(-1, k, H).sum(1)


def kept_experts(group_scores: Tensor) -> Tensor:
    """transformers' mask of the experts in the best groups: 1.0 for those, [T, E]."""
    group_idx = torch.topk(group_scores, k=KEPT, dim=-1, sorted=False)[1]
    group_mask = torch.zeros_like(group_scores)
    group_mask.scatter_(1, group_idx, 1)
    return group_mask.unsqueeze(-1).expand(-1, G, SIZE).reshape(-1, E)


def deepseek_v3(b: Block, logits: Tensor, fill: float = float("-inf")) -> tuple[Tensor, Tensor]:
    """transformers 5: DeepSeek-V3, GLM-4 MoE, dots.llm1, Kimi Linear and others."""
    scores = logits.float().sigmoid()
    choice = scores + b.bias
    group_scores = choice.view(-1, G, SIZE).topk(2, dim=-1)[0].sum(dim=-1)
    choice = choice.masked_fill(~kept_experts(group_scores).bool(), fill)
    ids = torch.topk(choice, k=K, dim=-1, sorted=False)[1]
    weights = scores.gather(1, ids)
    denominator = weights.sum(dim=-1, keepdim=True) + 1e-20
    weights /= denominator
    return weights * 2.5, ids


def deepseek_v3_zero(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    """transformers 4: the same with fill 0, so a biased score below zero loses against a dropped one."""
    return deepseek_v3(b, logits, 0.0)


@torch.no_grad()
def _chosen_without_gradients(b: Block, scores: Tensor) -> Tensor:
    choice = scores.view(-1, E) + b.bias.unsqueeze(0)
    group_scores = choice.view(-1, G, SIZE).topk(2, dim=-1)[0].sum(dim=-1)
    return torch.topk(choice.masked_fill(~kept_experts(group_scores).bool(), 0.0), k=K, dim=-1, sorted=False)[1]


def deepseek_v3_no_grad(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    """transformers 4: the choice stands in a region without gradients, the weights do not."""
    scores = logits.float().sigmoid()
    ids = _chosen_without_gradients(b, scores)
    weights = scores.gather(1, ids)
    weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    return weights * 2.5, ids


def deepseek_v4(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    """A score that the operator does not know stays outside; what is done with it is raised."""
    scores = F.softplus(logits.float()).sqrt()
    ids = torch.topk(scores + b.bias, K, dim=-1, sorted=False).indices
    weights = scores.gather(1, ids)
    weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * 2.5, ids


def deepseek_v2(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    """group_limited_greedy: groups by their best, the weights are the masked scores' own."""
    scores = logits.softmax(dim=-1, dtype=torch.float32)
    group_scores = scores.view(-1, G, SIZE).max(dim=-1).values
    scores = scores.masked_fill(~kept_experts(group_scores).bool(), 0.0)
    weights, ids = torch.topk(scores, k=K, dim=-1, sorted=False)
    return weights * 16.0, ids


def mistral4(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.float().softmax(-1)
    group_scores = scores.view(-1, G, SIZE).topk(2, dim=-1)[0].sum(dim=-1)
    ids = torch.topk(scores.masked_fill(~kept_experts(group_scores).bool(), 0.0), k=K, dim=-1, sorted=False)[1]
    weights = scores.gather(1, ids)
    weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    return weights, ids


def torchtitan(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.sigmoid(logits.to(torch.float32))
    grouped = (scores + b.bias).view(-1, G, SIZE)
    best, _ = grouped.topk(2, dim=-1)
    _, group_idx = torch.topk(best.sum(dim=-1), k=KEPT, dim=-1, sorted=False)
    dropped = torch.ones(grouped.shape[0], G, dtype=torch.bool)
    dropped.scatter_(1, group_idx, False)
    choice = grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).view(-1, E)
    _, ids = torch.topk(choice, k=K, dim=-1, sorted=False)
    top = scores.gather(dim=1, index=ids)
    return top / (top.sum(dim=-1, keepdim=True) + 1e-20) * 1.5, ids


def deepseek_inference(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    """DeepSeek's own inference code with a bias: filled in place, on a view of the biased scores."""
    scores = logits.float().sigmoid()
    original = scores
    scores = (scores + b.bias).view(logits.size(0), G, -1)
    group_scores = scores.topk(2, dim=-1)[0].sum(dim=-1)
    indices = group_scores.topk(KEPT, dim=-1)[1]
    mask = scores.new_ones(logits.size(0), G, dtype=torch.bool).scatter_(1, indices, False)
    scores = scores.masked_fill_(mask.unsqueeze(-1), float("-inf")).flatten(1)
    ids = torch.topk(scores, K, dim=-1)[1]
    weights = original.gather(1, ids)
    weights /= weights.sum(dim=-1, keepdim=True)
    weights *= 2.5
    return weights.type_as(logits), ids


def deepseek_inference_unbiased(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The same without a bias: the view is one of the scores that the weights are gathered from."""
    scores = logits.softmax(dim=-1, dtype=torch.float32)
    original = scores
    scores = scores.view(logits.size(0), G, -1)
    indices = scores.amax(dim=-1).topk(KEPT, dim=-1)[1]
    mask = scores.new_ones(logits.size(0), G, dtype=torch.bool).scatter_(1, indices, False)
    scores = scores.masked_fill_(mask.unsqueeze(-1), float("-inf")).flatten(1)
    ids = torch.topk(scores, K, dim=-1)[1]
    return original.gather(1, ids).type_as(logits), ids


def by_where(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.sigmoid(logits.float())
    choice = b.bias + scores
    best = choice.unflatten(1, (G, SIZE)).amax(2).topk(KEPT).indices
    kept = torch.zeros(logits.shape[0], G).scatter(1, best, torch.ones(logits.shape[0], KEPT))
    choice = torch.where(kept.repeat_interleave(SIZE, dim=1) > 0, choice, 0.0)
    ids = choice.topk(K).indices
    return scores[torch.arange(logits.shape[0])[:, None], ids], ids


def groups_of_one(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Every expert its own group: the limit is another top-k."""
    scores = logits.float().softmax(-1)
    group_scores = scores.view(-1, E, 1).max(-1)[0]
    mask = torch.zeros_like(group_scores).scatter_(1, group_scores.topk(K + 1)[1], 1)
    choice = scores.masked_fill(mask.logical_not(), float("-inf"))
    ids = choice.topk(K)[1]
    return scores.gather(1, ids), ids


def minimax_m2(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.nn.functional.sigmoid(logits.float())
    _, ids = torch.topk(scores + b.bias, K, dim=-1, sorted=False)
    weights = scores.gather(1, ids)
    weights /= weights.sum(dim=-1, keepdim=True)
    return weights, ids


def ernie(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    """In fp32 without autocast; softmax, the bias as [1, E], the sum limited from below; cast outside of the region."""
    with torch.autocast("cpu", enabled=False):
        scores = F.softmax(logits.float(), dim=1, dtype=torch.float)
        _, ids = torch.topk(scores + b.bias.unsqueeze(0).squeeze(), K, dim=-1)
        weights = torch.gather(scores, dim=-1, index=ids)
        weights = weights / torch.clamp(weights.sum(dim=-1, keepdim=True), min=0.2)
    return weights.to(logits.dtype), ids


def longcat(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = F.softmax(logits.float(), dim=-1)
    ids = torch.topk(scores.view(-1, E) + b.bias.unsqueeze(0), k=K, dim=-1, sorted=False)[1]
    return scores.gather(1, ids) * 6.0, ids


def lfm2(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.float().sigmoid()
    _, ids = torch.topk(scores + b.bias, k=K, dim=-1)
    weights = torch.gather(scores, dim=1, index=ids).type_as(logits)
    return weights / (weights.sum(dim=-1, keepdim=True) + 1e-6) * 1.0, ids


def detached(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The choice of Zaya: by the detached scores in fp32 plus the bias."""
    scores = torch.softmax(logits.float(), dim=-1)
    _, ids = torch.topk(scores.detach().to(torch.float32) + b.bias, K, dim=-1)
    return torch.gather(scores, dim=1, index=ids), ids


def biased_logits(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The bias is on the logits, and the score is of the logits that were chosen without it."""
    logits = logits.float()
    ids = torch.topk(logits + b.bias, K, dim=-1)[1]
    weights = logits.gather(1, ids).sigmoid()
    return weights / weights.sum(dim=-1, keepdim=True), ids


def gemma4(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = torch.topk(F.softmax(logits, dim=-1, dtype=torch.float32), k=K, dim=-1)
    weights /= weights.sum(dim=-1, keepdim=True)
    return weights * b.per_expert[ids], ids


def scaled_and_biased(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.float().sigmoid()
    ids = (scores + b.bias).topk(K).indices
    weights = scores.gather(1, ids)
    weights = b.per_expert.index_select(0, ids.flatten()).view_as(ids) * (weights / weights.sum(-1, keepdim=True))
    return weights.to(logits.dtype), ids


def argmax(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = F.softmax(logits.float(), dim=-1)
    return scores.max(-1, keepdim=True).values, scores.argmax(-1, keepdim=True)


def maximum(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = logits.float().max(dim=-1, keepdim=True)
    return torch.sigmoid(values), ids


def argmax_of_a_row(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Tutorials' top-1: [T] ids and weights, made columns afterwards."""
    scores = F.softmax(logits, dim=-1, dtype=torch.float32)
    ids = torch.argmax(scores, dim=-1)
    return scores.gather(-1, ids.unsqueeze(-1)), ids.unsqueeze(-1)


def max_of_a_row(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = torch.max(logits.float().sigmoid() + 0.0 * b.bias, dim=-1)
    return weights.unsqueeze(1), ids[:, None]


def all_experts(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.float().sigmoid()
    ids = torch.topk(scores + b.bias, E)[1]
    weights = scores.gather(1, ids)
    return weights / weights.sum(-1, keepdim=True).clamp_min(1.0), ids


def divided(b: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
    """A division that a multiplication by the inverse repeats to the last bit."""
    values, ids = torch.topk(logits.float(), 4)
    return torch.softmax(values, 1) / 4, ids


# The rule that the report names, and attributes of it.
ROUTERS: dict[str, tuple[Router, str, dict[str, object]]] = {
    "deepseek_v3": (
        deepseek_v3,
        "R5 sigmoid, bias, groups, top-k, renormalise",
        {"groups": G, "kept_groups": KEPT, "group_top": 2, "fill": "-inf", "eps": 1e-20, "scale": 2.5},
    ),
    "deepseek_v3_zero": (deepseek_v3_zero, "R5 sigmoid, bias, groups, top-k, renormalise", {"fill": "0"}),
    "deepseek_v3_no_grad": (deepseek_v3_no_grad, "R5 sigmoid, bias, groups, top-k, renormalise", {"fill": "0"}),
    "deepseek_v4": (deepseek_v4, "R6 bias, top-k, renormalise", {"score": "none", "scale": 2.5}),
    "deepseek_v2": (deepseek_v2, "R5 softmax, groups, top-k", {"group_top": 1, "fill": "-inf", "scale": 16.0}),
    "mistral4": (mistral4, "R5 softmax, groups, top-k, renormalise", {"group_top": 2, "fill": "0"}),
    "torchtitan": (torchtitan, "R5 sigmoid, bias, groups, top-k, renormalise", {"fill": "-inf", "scale": 1.5}),
    "deepseek_inference": (
        deepseek_inference,
        "R5 sigmoid, bias, groups, top-k, renormalise",
        {"group_top": 2, "fill": "-inf", "eps": 0.0},
    ),
    "by_where": (by_where, "R5 sigmoid, bias, groups, top-k", {"group_top": 1, "fill": "0"}),
    "groups_of_one": (groups_of_one, "R5 softmax, groups, top-k", {"groups": E, "kept_groups": K + 1}),
    "minimax_m2": (minimax_m2, "R6 sigmoid, bias, top-k, renormalise", {"bias": True, "eps": 0.0, "clamp": False}),
    "ernie": (ernie, "R6 softmax, bias, top-k, renormalise", {"clamp": True, "eps": 0.2}),
    "longcat": (longcat, "R6 softmax, bias, top-k", {"scale": 6.0}),
    "lfm2": (lfm2, "R6 sigmoid, bias, top-k, renormalise", {"eps": 1e-6}),
    "detached": (detached, "R6 softmax, bias, top-k", {}),
    "biased_logits": (biased_logits, "R6 bias, top-k, sigmoid, renormalise", {"order": "after"}),
    "gemma4": (gemma4, "R11 softmax, top-k, renormalise, per-expert scale", {"expert_scale": True, "bias": False}),
    "scaled_and_biased": (
        scaled_and_biased,
        "R11 sigmoid, bias, top-k, renormalise, per-expert scale",
        {"expert_scale": True, "bias": True},
    ),
    "argmax": (argmax, "R3 softmax, top-k", {}),
    "argmax_of_a_row": (argmax_of_a_row, "R3 softmax, top-k", {}),
    "max_of_a_row": (max_of_a_row, "top-k", {}),
    "maximum": (maximum, "R7 top-k, sigmoid", {}),
    "all_experts": (all_experts, "R6 sigmoid, bias, top-k, renormalise", {"clamp": True, "eps": 1.0}),
    "divided": (divided, "R4 top-k, softmax", {"scale": 0.25}),
}
