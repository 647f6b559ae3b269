"""Weights gathered as [T, K, ., .] and einsums: gpt-fast's Mixtral, sglang's native path, torchao's example.

    W1[ids], W3[ids] [T, K, I, H], W2[ids] [T, K, H, I]
    act(einsum("ti,taoi->tao", x, W1)) * einsum("ti,taoi->tao", x, W3) -> einsum("tao,taio->tai", .., W2)
    einsum("tai,ta->ti", rows, w)

Equations are parsed: what counts is which letters contract and in which order the result has the rest. matmul and
bmm spellings of each product are the same to this matcher, and so are the three spellings of the weighted sum.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from moe_compiler.moe_ir import Match
from moe_compiler.passes.formulations import gathered
from moe_compiler.passes.formulations.base import Bindings, Example, Formulation

__all__ = ["GATHER_EINSUM"]


def anchors(graph: Graph) -> list[Node]:
    """Down projections with weights gathered as [T, K, H, I]."""
    return gathered.last_products(graph, pair_dims=2)


def finish(b: Bindings) -> Match:
    return gathered.finish(b, "gather_einsum")


class EinsumExperts(torch.nn.Module):
    """Example: softmax in the model's dtype, separate [E, I, H], [E, I, H] and [E, H, I] weights, four einsums."""

    def __init__(self, experts: int, top_k: int, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = torch.nn.Linear(hidden, experts, bias=False, dtype=dtype)
        self.w1 = torch.nn.Parameter(torch.randn(experts, intermediate, hidden, dtype=dtype) * hidden**-0.5)
        self.w2 = torch.nn.Parameter(torch.randn(experts, hidden, intermediate, dtype=dtype) * intermediate**-0.5)
        self.w3 = torch.nn.Parameter(torch.randn(experts, intermediate, hidden, dtype=dtype) * hidden**-0.5)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        scores = torch.softmax(self.router(x_TH), dim=-1)
        weights, ids = torch.topk(scores, self.top_k, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        w1, w2, w3 = self.w1[ids], self.w2[ids], self.w3[ids]
        gate = torch.nn.functional.silu(torch.einsum("ti,taoi -> tao", x_TH, w1))
        up = torch.einsum("ti,taoi -> tao", x_TH, w3)
        rows = torch.einsum("tao,taio -> tai", gate * up, w2)
        return torch.einsum("tai,ta -> ti", rows, weights)


def example(
    dtype: torch.dtype = torch.float32, experts: int = 8, top_k: int = 2, hidden: int = 32, intermediate: int = 16
) -> Example:
    """A module written this way, and inputs for it."""
    module = EinsumExperts(experts, top_k, hidden, intermediate, dtype)
    return Example(module, lambda tokens: (torch.randn(tokens, hidden, dtype=dtype),))


GATHER_EINSUM = Formulation(
    name="gather_einsum",
    summary="weights gathered as [T, K, ., .], einsums, weighted sum over k (gpt-fast)",
    anchors=anchors,
    steps=(gathered.select, gathered.down, gathered.activate, gathered.dispatch, gathered.combine_pairs),
    finish=finish,
    example=example,
)
