"""Sorted rows and a grouped matmul: transformers 5 with `experts_implementation="grouped_mm"`, and its relatives.

    ids -> sort -> perm; x[perm // k]; histc / bincount -> cumsum = offsets
    grouped_mm(rows, W1, offsets) -> act(gate) * up -> grouped_mm(.., W2, offsets)
    rows * w[perm]; rows[inverse perm] -> view [T, k, H] -> sum(1)

Both `aten._grouped_mm` and transformers' opaque `grouped_mm_fallback` count as the grouped matmul. The masks that
transformers writes for expert parallelism (rows of ids >= E become zero) say what `moepdl::experts` says about such
ids, and are looked through. Rows that are added at their tokens instead are `grouped_scatter`'s.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from moe_compiler.moe_ir import Match
from moe_compiler.passes.formulations import sorted_experts, sorted_home, sorted_rows
from moe_compiler.passes.formulations.base import Bindings, Example, Formulation
from moe_compiler.passes.formulations.grouped_products import last_grouped
from moe_compiler.passes.formulations.walk import require

__all__ = ["GROUPED_MM"]


def anchors(graph: Graph) -> list[Node]:
    """Grouped matmuls that are fed by another one: the down projections."""
    return last_grouped(graph)


def sort(b: Bindings) -> None:
    """The tokens are gathered by the token of each sorted pair, not by the sorting permutation itself."""
    sorted_rows.sort(b)
    require(b.k > 1 or b.token is not b.perm, "the tokens are gathered by the sorting permutation itself", b.rows)


def finish(b: Bindings) -> Match:
    return sorted_experts.finish(b, "grouped_mm")


class GroupedExperts(torch.nn.Module):
    """Example: softmax router, packed [E, 2I, H] and [E, H, I] weights, sorted rows and `aten._grouped_mm`."""

    def __init__(self, experts: int, top_k: int, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.top_k = top_k
        self.experts = experts
        self.router = torch.nn.Linear(hidden, experts, bias=False, dtype=dtype)
        self.gate_up = torch.nn.Parameter(torch.randn(experts, 2 * intermediate, hidden, dtype=dtype) * hidden**-0.5)
        self.down = torch.nn.Parameter(torch.randn(experts, hidden, intermediate, dtype=dtype) * intermediate**-0.5)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        scores = torch.softmax(self.router(x_TH).float(), dim=-1)
        weights, ids = torch.topk(scores, self.top_k, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x_TH.dtype)
        sorted_ids, perm = torch.sort(ids.reshape(-1))
        rows = x_TH[perm // self.top_k]
        counts = torch.histc(
            sorted_ids.float() if x_TH.device.type == "cpu" else sorted_ids.int(),
            bins=self.experts,
            min=0,
            max=self.experts - 1,
        )
        offsets = torch.cumsum(counts, 0, dtype=torch.int32)
        gate, up = _grouped(rows, self.gate_up.transpose(-2, -1), offsets).chunk(2, dim=-1)
        rows = _grouped(torch.nn.functional.silu(gate) * up, self.down.transpose(-2, -1), offsets)
        rows = rows * weights.reshape(-1)[perm].unsqueeze(-1)
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(perm.numel(), device=perm.device)
        return rows[inverse].view(x_TH.shape[0], self.top_k, x_TH.shape[1]).sum(1).to(x_TH.dtype)


def _grouped(rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return torch._grouped_mm(rows, weight, offs=offsets)


def example(
    dtype: torch.dtype = torch.bfloat16, experts: int = 8, top_k: int = 2, hidden: int = 32, intermediate: int = 16
) -> Example:
    module = GroupedExperts(experts, top_k, hidden, intermediate, dtype)
    return Example(module, lambda tokens: (torch.randn(tokens, hidden, dtype=dtype),))


GROUPED_MM = Formulation(
    name="grouped_mm",
    summary="rows sorted by expert, grouped matmuls, inverse permutation and sum (transformers 5 grouped_mm)",
    anchors=anchors,
    steps=(
        sorted_rows.dispatch,
        sort,
        sorted_experts.count,
        sorted_experts.activate,
        sorted_home.weigh,
        sorted_home.returned,
        sorted_home.gathered_home,
    ),
    finish=finish,
    example=example,
)
