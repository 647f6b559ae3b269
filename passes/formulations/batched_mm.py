"""A matrix for every (token, expert) pair, and batched products: transformers 5 with `batched_mm` experts.

    x repeated K times: repeat_interleave(x, K, 0), x[arange(T * K) // K], ...          [S, H]
    W1[flat ids] [S, N, H] @ rows[.., None] -> act(gate) * up -> W2[flat ids] @ ..[.., None]     [S, H]
    * w[.., None] -> view [T, K, H] -> sum(1)

Products are read by letters, so bmm, matmul and einsum are one thing, and so are weights stored [E, in, out] or
gathered and then transposed. A clamp of the ids is looked through where it changes nothing (`pairs.match_ids`).
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from moe_compiler.moe_ir import Match
from moe_compiler.passes.formulations import gathered
from moe_compiler.passes.formulations.base import Bindings, Example, Formulation

__all__ = ["BATCHED_MM"]


def anchors(graph: Graph) -> list[Node]:
    """Down projections with one gathered matrix a pair, [S, H, I]."""
    return gathered.last_products(graph, pair_dims=1)


def finish(b: Bindings) -> Match:
    return gathered.finish(b, "batched_mm")


class BatchedExperts(torch.nn.Module):
    """Example: softmax router, packed [E, 2I, H] and [E, H, I] weights gathered by the flat ids, two bmm."""

    def __init__(self, experts: int, top_k: int, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = torch.nn.Linear(hidden, experts, bias=False, dtype=dtype)
        self.gate_up = torch.nn.Parameter(torch.randn(experts, 2 * intermediate, hidden, dtype=dtype) * hidden**-0.5)
        self.down = torch.nn.Parameter(torch.randn(experts, hidden, intermediate, dtype=dtype) * intermediate**-0.5)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        scores = torch.softmax(self.router(x_TH).float(), dim=-1)
        weights, ids = torch.topk(scores, self.top_k, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x_TH.dtype)
        rows_SH = x_TH.repeat_interleave(self.top_k, dim=0)
        flat_ids = ids.reshape(-1)
        gate, up = torch.bmm(self.gate_up[flat_ids], rows_SH.unsqueeze(-1)).squeeze(-1).chunk(2, dim=-1)
        act_SI = torch.nn.functional.silu(gate) * up
        rows_SH = torch.bmm(self.down[flat_ids], act_SI.unsqueeze(-1)).squeeze(-1)
        rows_SH = rows_SH * weights.reshape(-1).unsqueeze(-1)
        return rows_SH.view(x_TH.shape[0], self.top_k, x_TH.shape[1]).sum(dim=1).to(x_TH.dtype)


def example(
    dtype: torch.dtype = torch.float32, experts: int = 8, top_k: int = 2, hidden: int = 32, intermediate: int = 16
) -> Example:
    """A module written this way, and inputs for it."""
    module = BatchedExperts(experts, top_k, hidden, intermediate, dtype)
    return Example(module, lambda tokens: (torch.randn(tokens, hidden, dtype=dtype),))


BATCHED_MM = Formulation(
    name="batched_mm",
    summary="weights gathered by the flat ids, one bmm a projection, weighted sum (transformers 5 batched_mm)",
    anchors=anchors,
    steps=(gathered.select, gathered.down, gathered.activate, gathered.dispatch, gathered.combine_pairs),
    finish=finish,
    example=example,
)
