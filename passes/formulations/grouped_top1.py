"""One expert a token, tokens weighted before it and sorted by it: Llama 4 with grouped matmuls (Thunder's).

    rows = (x * sigmoid(score))[perm],  perm = argsort(ids);  grouped_mm -> act(gate) * up -> grouped_mm
    rows[argsort(perm)]

With one expert a token there is no sum: a token's row is its result. The weight may also be on the output.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from moe_compiler.moe_ir import Match
from moe_compiler.passes.formulations import sorted_experts, sorted_home, sorted_rows
from moe_compiler.passes.formulations.base import Bindings, Example, Formulation
from moe_compiler.passes.formulations.grouped_products import last_grouped
from moe_compiler.passes.formulations.walk import require

__all__ = ["GROUPED_TOP1"]


def anchors(graph: Graph) -> list[Node]:
    """Grouped matmuls that are fed by another one: the down projections."""
    return last_grouped(graph)


def sort(b: Bindings) -> None:
    """The tokens are gathered by the sorting permutation itself: each has one expert."""
    sorted_rows.sort(b)
    require(b.k == 1, f"a token has {b.k} experts, not one", b.ids)
    require(b.token is b.perm, "the tokens are not gathered by the sorting permutation itself", b.rows)


def finish(b: Bindings) -> Match:
    return sorted_experts.finish(b, "grouped_top1")


class SingleExperts(torch.nn.Module):
    """Example: top-1 of the logits, sigmoid, tokens weighted and sorted, three grouped matmuls, sorted back."""

    def __init__(self, experts: int, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.experts = experts
        self.router = torch.nn.Linear(hidden, experts, bias=False, dtype=dtype)

        def made(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, dtype=dtype) * shape[-2] ** -0.5)

        self.gate, self.up = made(experts, hidden, intermediate), made(experts, hidden, intermediate)
        self.down = made(experts, intermediate, hidden)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        values, ids = torch.topk(self.router(x_TH), 1)
        rows = x_TH * torch.sigmoid(values.float()).to(x_TH.dtype)
        chosen = ids.view(-1)
        offsets = torch.bincount(chosen, minlength=self.experts).cumsum(0).to(torch.int32)
        perm = torch.argsort(chosen, stable=True)
        rows = rows[perm]
        gate = torch._grouped_mm(rows, self.gate, offs=offsets)
        up = torch._grouped_mm(rows, self.up, offs=offsets)
        rows = torch._grouped_mm(torch.nn.functional.silu(gate) * up, self.down, offs=offsets)
        return rows[torch.argsort(perm)]


def example(
    dtype: torch.dtype = torch.bfloat16, experts: int = 8, top_k: int = 1, hidden: int = 32, intermediate: int = 16
) -> Example:
    """A module written this way, and inputs for it; it has one expert a token, whatever `top_k` says."""
    module = SingleExperts(experts, hidden, intermediate, dtype)
    return Example(module, lambda tokens: (torch.randn(tokens, hidden, dtype=dtype),))


GROUPED_TOP1 = Formulation(
    name="grouped_top1",
    summary="one expert a token, tokens weighted, sorted and sorted back, grouped matmuls (Thunder's Llama 4)",
    anchors=anchors,
    steps=(
        sorted_rows.dispatch,
        sort,
        sorted_experts.count,
        sorted_experts.activate,
        sorted_home.weigh,
        sorted_home.gathered_home,
    ),
    finish=finish,
    example=example,
)
