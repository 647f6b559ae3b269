"""The module of a case, and the same in float64, written without any of its spellings.

`Model` is what is compiled. `Model.exact` computes the same outputs from the rules alone, for choices that are given:
with the parameters in float64 it is the reference of the accuracy rule, and it says whether the spelling is what the
case means.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn import functional as F

from tests.properties import experts, routers
from tests.properties.case import Case
from tests.properties.experts import fiddle
from tests.properties.layouts import ExpertWeights

DTYPES = {"float32": torch.float32, "autocast": torch.float32, "bfloat16": torch.bfloat16}


class Shared(torch.nn.Module):
    """An expert that every token has, with a gate of its own or without."""

    def __init__(self, c: Case, dtype: torch.dtype) -> None:
        super().__init__()
        self.w1 = torch.nn.Linear(c.hidden, c.inter, bias=False, dtype=dtype)
        self.w3 = torch.nn.Linear(c.hidden, c.inter, bias=False, dtype=dtype)
        self.w2 = torch.nn.Linear(c.inter, c.hidden, bias=False, dtype=dtype)
        self.gate = torch.nn.Linear(c.hidden, 1, bias=False, dtype=dtype) if c.shared == "gated" else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return y if self.gate is None else torch.sigmoid(self.gate(x)) * y


class Block(torch.nn.Module):
    """Router, experts, shared expert: x [T, H] -> y [T, H], and what the case returns besides."""

    def __init__(self, c: Case, dtype: torch.dtype) -> None:
        super().__init__()
        self.c, self.dtype = c, dtype
        routers.parameters(self, c, dtype)
        self.experts = ExpertWeights(c, dtype)
        self.shared = Shared(c, dtype) if c.shared != "none" else None
        if c.extra == "counted":
            self.register_buffer("counts", torch.zeros(c.experts, dtype=torch.int64))

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(logits [T, E], weights [T, K], ids [T, K])."""
        logits = self.router(x)
        weights, ids = routers.route(self.c, self, logits, x.dtype)
        return logits, weights, ids

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        c = self.c
        logits, weights, ids = self.choose(x)
        if c.extra == "counted":
            self.counts.add_(torch.bincount(ids.reshape(-1), minlength=c.experts))
        tokens = fiddle(c.fiddle_x, x)
        used_ids, used = fiddle(c.fiddle_ids, ids), fiddle(c.fiddle_weights, weights)
        if c.formulation == "dense":
            y = experts.dense(c, self.experts, tokens, used, used_ids, self._scores(logits, used, used_ids))
        else:
            y = experts.FORMULATIONS[c.formulation](c, self.experts, tokens, used, used_ids)
        y = fiddle(c.fiddle_out, y).to(x.dtype)
        if self.shared is not None:
            beside = self.shared(x)
            if c.add == "in_place":
                beside.add_(y)
                y = beside
            else:
                y = y + beside if c.add == "plus" else beside + y
        if c.residual:
            y = x + y
        return (y, *self._extra(logits, weights, ids))

    def _scores(self, logits: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        c = self.c
        if c.dense_scores == "one_hot":
            return (F.one_hot(ids, c.experts).to(weights.dtype) * weights.unsqueeze(-1)).sum(dim=1)
        if c.dense_scores == "kept":
            values = logits.gather(1, ids) if c.choose != "topk" else torch.topk(logits, c.k, dim=-1)[0]
            kept = torch.full_like(logits, float("-inf")).scatter_(1, ids, values)
            return routers.score(c, kept).to(weights.dtype)
        return torch.zeros(logits.shape, dtype=weights.dtype, device=weights.device).scatter_(1, ids, weights)

    def _extra(self, logits: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        c = self.c
        if c.extra == "logits":
            return (logits,)
        if c.extra == "weights":
            return (weights, ids)
        if c.extra == "aux":
            wide = torch.promote_types(logits.dtype, torch.float32)
            scores = torch.softmax(logits.to(wide), dim=-1)
            share = F.one_hot(ids.long(), c.experts).to(wide).mean(dim=(0, 1))
            return ((share * scores.mean(dim=0)).sum() * c.experts,)
        return ()

    def exact(self, x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        """The outputs for these choices, by the rules of the case."""
        c = self.c
        logits = x @ self.router.weight.T + (0 if self.router.bias is None else self.router.bias)
        ids = ids.long()
        weights = routers.exact_weights(c, self, logits, ids)
        y = self._exact_experts(x, weights, ids).sum(1)
        if self.shared is not None:
            y = y + self.shared(x)
        if c.residual:
            y = y + x
        extra = self._extra(logits, weights, ids)
        return (y, *extra)

    def _exact_experts(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """The weighted row of every pair, [T, K, H]."""
        c, w = self.c, self.experts
        rows = x[:, None].expand(-1, c.k, -1)
        if c.weight_at == "input":
            rows = rows * weights[..., None]

        def product(rows: Tensor, role: str) -> Tensor:
            matrix, bias = w.plain(role)
            out = (matrix[ids] @ rows[..., None])[..., 0]
            return out if bias is None else out + bias[ids]

        parts = [product(rows, role) for role in w.roles[:-1]]
        if len(parts) == 1 and c.gated:
            both = parts[0]
            first, second = (
                (both[..., 0::2], both[..., 1::2]) if c.gate_order == "interleaved" else both.split(c.inter, -1)
            )
            parts = [second, first] if c.gate_order == "up_gate" else [first, second]
        gate = parts[0]
        if c.activation == "swiglu_clamp":
            act = gate.clamp(max=1.5)
            act = act * _logistic(1.702 * act) * (parts[1].clamp(-1.5, 1.5) + 1)
        else:
            act = {
                "silu": lambda t: t * _logistic(t),
                "gelu": lambda t: t * 0.5 * (1 + torch.erf(t * 0.5**0.5)),
                "gelu_tanh": lambda t: t * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (t + 0.044715 * t**3))),
                "relu": lambda t: t * (t > 0),
                "relu2": lambda t: t**2 * (t > 0),
            }[c.activation](gate)
            act = act * parts[1] if c.gated else act
        rows = product(act, "down")
        return rows if c.weight_at == "input" else rows * weights[..., None]


def _logistic(t: Tensor) -> Tensor:
    """1 / (1 + exp(-t)), of any t: what exp(-t) overflows at gives a gradient of 0 and not NaN."""
    return (1 + torch.tanh(t / 2)) / 2


class Model(torch.nn.Module):
    """The blocks of a case behind one another, each with its norm, in a shape of two or three dimensions."""

    def __init__(self, c: Case) -> None:
        super().__init__()
        self.c, self.dtype = c, DTYPES[c.dtype]
        self.blocks = torch.nn.ModuleList(Block(c, self.dtype) for _ in range(c.layers))
        self.norm = torch.nn.Parameter(torch.rand(c.hidden, dtype=self.dtype) + 0.5) if c.norm else None

    def before(self, x: Tensor) -> Tensor:
        """What a block reads of the stream."""
        if self.norm is None:
            return x
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype) * self.norm

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [T, H] or [B, T / B, H] -> (y like x, the rest of each block)."""
        shape, rest = x.shape, []
        if self.c.rank == 3:
            x = x.view(-1, self.c.hidden)
        for block in self.blocks:
            inner = self.before(x)
            if self.c.checkpoint:
                x, *extra = torch.utils.checkpoint.checkpoint(block, inner, use_reentrant=False)
            else:
                x, *extra = block(inner)
            rest += extra
        return (x.view(shape) if self.c.rank == 3 else x, *rest)

    @torch.no_grad()
    def choices(self, x: Tensor) -> list[Tensor]:
        """The ids [T, K] of each block."""
        found, x = [], x.reshape(-1, self.c.hidden)
        for block in self.blocks:
            inner = self.before(x)
            found.append(block.choose(inner)[2])
            if len(self.blocks) > 1:
                x = block(inner)[0]
        return found

    def ties(self, x: Tensor) -> Tensor:
        """For which tokens equal scores leave it to the operator which experts it names: [T], true or false.

        Rewritten, all of them are a top-k, so those that are one already cannot differ.
        """
        found = torch.zeros(x.reshape(-1, self.c.hidden).shape[0], dtype=torch.bool)
        if self.c.choose not in ("argsort", "argmax"):
            return found
        own = self.choices(x)
        for block in self.blocks:
            block.c = replace(self.c, choose="gather")
        other = self.choices(x)
        for block in self.blocks:
            block.c = self.c
        for one, two in zip(own, other, strict=True):
            found |= (one.sort(-1)[0] != two.sort(-1)[0]).any(-1)
        return found

    def exact(self, x: Tensor, choices: list[Tensor]) -> tuple[Tensor, ...]:
        """`forward` by the rules alone, for these choices."""
        shape, rest = x.shape, []
        x = x.reshape(-1, self.c.hidden)
        for block, ids in zip(self.blocks, choices, strict=True):
            if self.norm is not None:
                x = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * self.norm
            x, *extra = block.exact(x, ids)
            rest += extra
        return (x.reshape(shape), *rest)
