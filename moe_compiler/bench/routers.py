"""The routers of the measured blocks, spelled as the models spell them: x [T, H] -> (weights [T, k], ids [T, k]).

Each can also say what the weights are for ids that are given, in any dtype, and for which tokens the choice is so close
that a correct router in the block's dtype may choose otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_compiler.bench.shapes import Shape

__all__ = ["ROUTERS", "Router", "make_router"]


class Router(nn.Module):
    """weight [E, H], bias [E] or None; `wide`: logits are computed in float32."""

    wide = False

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.empty(shape.experts, shape.hidden, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(shape.experts, dtype=dtype)) if shape.biases else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(weights [T, k], ids [T, k]) as the model computes them."""
        raise NotImplementedError

    def logits(self, x: Tensor) -> Tensor:
        """[T, E]: in float32 where the model says so, else in the dtype of x; in float64 for float64."""
        if self.wide:
            return F.linear(x.to(_wide(x)), self.weight.to(_wide(x)))
        return F.linear(x, self.weight, self.bias)

    def exact_logits(self, x: Tensor) -> Tensor:
        """[T, E] in float64."""
        return F.linear(x.double(), self.weight.double(), None if self.bias is None else self.bias.double())

    def choose(self, logits: Tensor) -> Tensor:
        """ids [T, k] of these logits."""
        raise NotImplementedError

    def weigh(self, logits: Tensor, ids: Tensor) -> Tensor:
        """The weights [T, k] of given ids, in the dtype of the logits but at least float32, without a last cast."""
        raise NotImplementedError

    def near_ties(self, x: Tensor) -> Tensor:
        """[T], true where rounding may change the choice of experts, or any other step of the rule that jumps."""
        exact = self.exact_logits(x)
        # The sum over H in float32, and then the rounding to the dtype that the logits have.
        summed = torch.finfo(torch.float32).eps * x.double().norm(dim=-1) * self.weight.double().norm(dim=-1).max()
        last = torch.finfo(torch.float32 if self.wide else x.dtype).eps
        return self._close(exact, summed, last)

    def _close(self, logits: Tensor, summed: Tensor, last: float) -> Tensor:
        """summed: absolute error [T] of a logit before its last rounding; last: relative error of that rounding."""
        return _gap_is_small(logits, self.shape.k, summed + last * _at(logits, self.shape.k))


class SoftmaxRouter(Router):
    """Softmax over all experts in float32, then the k largest, renormalised or not."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.logits(x)
        scores = torch.softmax(logits, dim=-1, dtype=_wide(logits))
        weights, ids = torch.topk(scores, self.shape.k, dim=-1)
        if self.shape.renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return (weights if self.shape.weights_wide else weights.to(logits.dtype)), ids

    def choose(self, logits: Tensor) -> Tensor:
        return logits.topk(self.shape.k, dim=-1)[1]

    def weigh(self, logits: Tensor, ids: Tensor) -> Tensor:
        weights = torch.softmax(logits, dim=-1, dtype=_wide(logits)).gather(-1, ids)
        return weights / weights.sum(dim=-1, keepdim=True) if self.shape.renormalize else weights


class TopKFirstRouter(Router):
    """The k largest logits, then a softmax over these in their own dtype (gpt-oss)."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.logits(x)
        values, ids = torch.topk(logits, self.shape.k, dim=-1)
        return torch.softmax(values, dim=-1, dtype=values.dtype), ids

    def choose(self, logits: Tensor) -> Tensor:
        return logits.topk(self.shape.k, dim=-1)[1]

    def weigh(self, logits: Tensor, ids: Tensor) -> Tensor:
        return torch.softmax(logits.gather(-1, ids), dim=-1)


class SigmoidRouter(Router):
    """Sigmoid scores in float32; a bias for the choice alone; the best groups first (DeepSeek-V3, GLM-4.5)."""

    wide = True

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__(shape, torch.float32)
        self.choice_bias: Tensor
        self.register_buffer("choice_bias", torch.empty(shape.experts, dtype=torch.float32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.logits(x).sigmoid()
        ids = torch.topk(self._limited(scores + self.choice_bias), k=self.shape.k, dim=-1, sorted=False)[1]
        weights = scores.gather(1, ids)
        if self.shape.renormalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * self.shape.scale, ids

    def _limited(self, scores: Tensor) -> Tensor:
        """Scores [T, E], minus infinity outside the best groups."""
        groups, each = self.shape.groups, self.shape.experts // self.shape.groups
        best = torch.topk(self._group_scores(scores), k=self.shape.kept_groups, dim=-1, sorted=False)[1]
        mask = torch.zeros_like(scores[:, :groups]).scatter_(1, best, 1)
        kept = mask.unsqueeze(-1).expand(-1, groups, each).reshape(-1, self.shape.experts)
        return scores.masked_fill(~kept.bool(), float("-inf"))

    def _group_scores(self, scores: Tensor) -> Tensor:
        groups, each = self.shape.groups, self.shape.experts // self.shape.groups
        return scores.view(-1, groups, each).topk(2, dim=-1)[0].sum(dim=-1)

    def choose(self, logits: Tensor) -> Tensor:
        return self._limited(logits.sigmoid() + self.choice_bias).topk(self.shape.k, dim=-1)[1]

    def weigh(self, logits: Tensor, ids: Tensor) -> Tensor:
        weights = logits.sigmoid().gather(1, ids)
        if self.shape.renormalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * self.shape.scale

    def _close(self, logits: Tensor, summed: Tensor, last: float) -> Tensor:
        # The slope of the sigmoid is at most 1/4; the score itself is rounded too.
        error = (summed + last * logits.abs().amax(-1)) / 4 + 2 * last
        scores = logits.sigmoid() + self.choice_bias
        close = _gap_is_small(self._group_scores(scores), self.shape.kept_groups, 2 * error)
        return close | _gap_is_small(self._limited(scores), self.shape.k, error)


class SparseMixerRouter(Router):
    """Two experts, each the best of those left, weighed by a softmax over what is within 2 % of it (Phi-3.5-MoE)."""

    threshold = 0.02

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.logits(x)
        first = logits.max(dim=-1, keepdim=True)[1]
        left = torch.scatter(logits, -1, first, float("-inf"))
        second = left.max(dim=-1, keepdim=True)[1]
        weights = [self._weight(logits, logits, first), self._weight(logits, left, second)]
        return torch.cat(weights, dim=-1), torch.cat((first, second), dim=-1)

    def _weight(self, logits: Tensor, left: Tensor, best: Tensor) -> Tensor:
        with torch.no_grad():
            far = self._distance(logits, left) > self.threshold
        return torch.softmax(left.masked_fill(far, float("-inf")), dim=-1).gather(-1, best)

    def _distance(self, logits: Tensor, left: Tensor) -> Tensor:
        """How far a logit is from the best of those left, relative to the larger of the two."""
        most = left.max(dim=-1, keepdim=True)[0]
        return (most - logits) / logits.abs().clamp(min=most)

    def choose(self, logits: Tensor) -> Tensor:
        return logits.topk(2, dim=-1)[1]

    def weigh(self, logits: Tensor, ids: Tensor) -> Tensor:
        first, second = ids[:, :1], ids[:, 1:]
        left = torch.scatter(logits, -1, first, float("-inf"))
        return torch.cat((self._weight(logits, logits, first), self._weight(logits, left, second)), dim=-1)

    def _close(self, logits: Tensor, summed: Tensor, last: float) -> Tensor:
        error = summed + last * logits.abs().amax(-1)
        close = _gap_is_small(logits, 1, error) | _gap_is_small(logits, 2, error)
        left = torch.scatter(logits, -1, logits.max(dim=-1, keepdim=True)[1], float("-inf"))
        for some in (logits, left):
            # Both logits are rounded, each by half of `last` at most; then the quotient, of about the threshold.
            scale = logits.abs().clamp(min=some.max(dim=-1, keepdim=True)[0])
            allowed = 2 * summed[:, None] / scale + last * (1 + self.threshold)
            close = close | ((self._distance(logits, some) - self.threshold).abs() <= allowed).any(-1)
        return close


ROUTERS: dict[str, type[Router]] = {
    "softmax": SoftmaxRouter,
    "top_k_first": TopKFirstRouter,
    "sigmoid": SigmoidRouter,
    "sparsemixer": SparseMixerRouter,
}


def make_router(shape: Shape, dtype: torch.dtype) -> Router:
    """The router of a shape, uninitialised."""
    return ROUTERS[shape.router](shape, dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _at(values: Tensor, k: int) -> Tensor:
    """The size [T] of the k-th largest of [T, N]."""
    return values.topk(k, dim=-1)[0][:, -1].abs()


def _gap_is_small(values: Tensor, k: int, error: Tensor) -> Tensor:
    """[T]: whether the k-th and the next of [T, N] are within `error` [T] of each other."""
    if k >= values.shape[-1]:
        return torch.zeros(values.shape[0], dtype=torch.bool, device=values.device)
    top = values.topk(k + 1, dim=-1)[0]
    return top[:, k - 1] - top[:, k] <= error
