"""Sorted rows, grouped matmuls, and rows added at their tokens: torchtitan, and training stacks like it.

    perm = argsort(flat ids); token = perm // k; rows = x[token]            (scores before: rows * w[perm] in fp32)
    silu(grouped_mm(rows, W1)) * grouped_mm(rows, W3); grouped_mm(.., W2)   (scores after: rows * w[perm] in fp32)
    zeros.scatter_add(0, token[:, None].expand(-1, H), rows)                or index_add at token

The counts may come from a histogram, bincount, one-hot encoding or a boolean map of the choices. With packed weights
[E, I, H], [E, I, H], [E, H, I] as torchtitan has them, or any other order of strides.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from moe_compiler.moe_ir import Match
from moe_compiler.passes.formulations import sorted_experts, sorted_home, sorted_rows
from moe_compiler.passes.formulations.base import Bindings, Example, Formulation
from moe_compiler.passes.formulations.grouped_products import last_grouped

__all__ = ["GROUPED_SCATTER"]


def anchors(graph: Graph) -> list[Node]:
    """Grouped matmuls that are fed by another one: the down projections."""
    return last_grouped(graph)


def finish(b: Bindings) -> Match:
    return sorted_experts.finish(b, "grouped_scatter")


class ScatteredExperts(torch.nn.Module):
    """Example: torchtitan's order: softmax router, counts of a boolean map, scores after in fp32, scatter_add."""

    def __init__(self, experts: int, top_k: int, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = torch.nn.Linear(hidden, experts, bias=False, dtype=dtype)

        def made(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, dtype=dtype) * shape[-1] ** -0.5)

        self.w1, self.w3 = made(experts, intermediate, hidden), made(experts, intermediate, hidden)
        self.w2 = made(experts, hidden, intermediate)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        logits = self.router(x_TH)
        scores, ids = torch.topk(torch.softmax(logits.float(), dim=-1), self.top_k, dim=-1)
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True)
        offsets = torch.cumsum(chosen.sum(dim=0), 0, dtype=torch.int32)
        perm = torch.argsort(ids.view(-1), stable=True)
        token = perm // self.top_k
        rows = x_TH[token]
        gate = torch._grouped_mm(rows, self.w1.transpose(-2, -1), offs=offsets)
        up = torch._grouped_mm(rows, self.w3.transpose(-2, -1), offs=offsets)
        rows = torch._grouped_mm(torch.nn.functional.silu(gate) * up, self.w2.transpose(-2, -1), offs=offsets)
        rows = (rows.float() * scores.view(-1)[perm].reshape(-1, 1)).to(x_TH.dtype)
        return torch.zeros_like(x_TH).scatter_add(0, token.reshape(-1, 1).expand(-1, x_TH.shape[1]), rows)


def example(
    dtype: torch.dtype = torch.bfloat16, experts: int = 8, top_k: int = 2, hidden: int = 32, intermediate: int = 16
) -> Example:
    """A module written this way, and inputs for it."""
    module = ScatteredExperts(experts, top_k, hidden, intermediate, dtype)
    return Example(module, lambda tokens: (torch.randn(tokens, hidden, dtype=dtype),))


GROUPED_SCATTER = Formulation(
    name="grouped_scatter",
    summary="rows sorted by expert, grouped matmuls, rows added at their tokens (torchtitan)",
    anchors=anchors,
    steps=(
        sorted_rows.dispatch,
        sorted_rows.sort,
        sorted_experts.count,
        sorted_experts.activate,
        sorted_home.weigh,
        sorted_home.added,
        sorted_home.added_home,
    ),
    finish=finish,
    example=example,
)
