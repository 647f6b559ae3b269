"""Sorted rows split by a list of sizes, one linear layer an expert: ParallelExperts (JetMoE, GraniteMoE).

    sizes = counts.tolist(); rows = x[perm // k]
    cat([linear(part, W1[e]) for e, part in enumerate(split(rows, sizes))])
    act(gate) * up -> split and cat again with W2
    zeros.index_add(0, perm // k, rows * w[perm])

The numbers in `sizes` come from the data, so it arrives in one graph only with `fullgraph=True`. Routed projections
with something else than an activation in between (JetMoE's attention experts) are no experts of this kind.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from moe_compiler.moe_ir import Match
from moe_compiler.passes.formulations import sorted_experts, sorted_home, sorted_rows
from moe_compiler.passes.formulations.base import Bindings, Example, Formulation
from moe_compiler.passes.formulations.grouped_products import last_parts, last_slices

__all__ = ["SPLIT_LINEAR"]


def anchors(graph: Graph) -> list[Node]:
    """Concatenated products of the parts of a split, fed by others like them: the down projections.

    And those of slices that are cut by hand (Aria in transformers 4): refused, with what to write instead.
    """
    return [*last_parts(graph), *last_slices(graph)]


def finish(b: Bindings) -> Match:
    return sorted_experts.finish(b, "split_linear")


class ParallelExperts(torch.nn.Module):
    """E linear layers, each on its own part of the sorted rows."""

    def __init__(self, experts: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(experts, outputs, inputs, dtype=dtype) * inputs**-0.5)

    def forward(self, rows: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        parts = rows.split(sizes, dim=0)
        return torch.cat([torch.nn.functional.linear(part, self.weight[e]) for e, part in enumerate(parts)], dim=0)


class SplitExperts(torch.nn.Module):
    """Example: top-k of the logits, softmax over the k, sizes as a list, two ParallelExperts, index_add."""

    def __init__(self, experts: int, top_k: int, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.top_k, self.experts = top_k, experts
        self.router = torch.nn.Linear(hidden, experts, bias=False, dtype=dtype)
        self.input_linear = ParallelExperts(experts, hidden, 2 * intermediate, dtype)
        self.output_linear = ParallelExperts(experts, intermediate, hidden, dtype)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        logits = self.router(x_TH)
        values, ids = torch.topk(logits, self.top_k, dim=1)
        weights = torch.softmax(values.float(), dim=1).to(x_TH.dtype)
        chosen = torch.zeros(x_TH.shape[0], self.experts, dtype=x_TH.dtype, device=x_TH.device).scatter(1, ids, 1)
        sizes = chosen.long().sum(0).tolist()
        _, perm = ids.flatten().sort(0)
        token = perm.div(self.top_k, rounding_mode="trunc")
        gate, up = self.input_linear(x_TH[token], sizes).chunk(2, dim=-1)
        rows = self.output_linear(torch.nn.functional.silu(gate) * up, sizes)
        rows = rows * weights.flatten()[perm][:, None]
        return torch.zeros_like(x_TH).index_add(0, token, rows)


def example(
    dtype: torch.dtype = torch.float32, experts: int = 4, top_k: int = 2, hidden: int = 32, intermediate: int = 16
) -> Example:
    """A module written this way, and inputs for it. To arrive in one graph it needs `fullgraph=True`."""
    module = SplitExperts(experts, top_k, hidden, intermediate, dtype)
    return Example(module, lambda tokens: (torch.randn(tokens, hidden, dtype=dtype),))


SPLIT_LINEAR = Formulation(
    name="split_linear",
    summary="sorted rows split by a list of sizes, one linear layer an expert, index_add (GraniteMoE, JetMoE)",
    anchors=anchors,
    steps=(
        sorted_rows.dispatch,
        sorted_rows.sort,
        sorted_experts.count,
        sorted_experts.activate,
        sorted_home.weigh,
        sorted_home.home,
    ),
    finish=finish,
    example=example,
)
