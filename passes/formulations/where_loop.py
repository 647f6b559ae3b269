"""A loop over the experts that compares the ids: Mistral's reference code, and tutorials.

    for e in range(E): t, j = where(ids == e); y[t] += w[t, j, None] * expert_e(x[t])

The addition may be an index_add, an index_put that accumulates, or one that does not: a token picks an expert once.
The ids may be transposed: j, t = where(ids.T == e). Ids of one expert a token may be [T]; the comparison itself may
then be the index, y[ids == e] = ...
"""

from __future__ import annotations

import sympy
import torch
from torch.fx import Graph, Node

from moe_compiler.moe_ir import Match
from moe_compiler.passes.formulations import loop
from moe_compiler.passes.formulations.base import Bindings, Example, Formulation
from moe_compiler.passes.formulations.one_hot_loop import Expert
from moe_compiler.passes.formulations.pairs import match_choice
from moe_compiler.passes.formulations.picks import complete, feeds_where, match_one_each, picks_of_mask, reordered
from moe_compiler.passes.formulations.walk import (
    CASTS,
    arg,
    dtype_of,
    is_op,
    item_of,
    rank_of,
    require,
    shape_of,
    strip_ids,
)

__all__ = ["WHERE_LOOP"]


def _compared(node: Node) -> dict[Node, int]:
    """The comparisons of `node` with a constant whose result goes into `where` or `nonzero`."""
    found = {}
    for user in node.users:
        constant = is_op(user, "eq") and isinstance(user.args[1], int) and not isinstance(user.args[1], bool)
        if constant and feeds_where(user):
            found[user] = user.args[1]
    return found


def anchors(graph: Graph) -> list[Node]:
    """Lists and matrices of integers, or of what these are cast to, that are compared with two constants or more."""
    return [
        node
        for node in graph.nodes
        if rank_of(node) in (1, 2)
        and (_has_ids(node) or (is_op(node, *CASTS) and _has_ids(node.args[0])))  # type: ignore[arg-type]
        and len(_compared(node)) > 1
    ]


def _has_ids(node: Node) -> bool:
    return dtype_of(node) in (torch.int32, torch.int64)


def _letters(ids: Node, expert: int, mask: Node) -> str:
    """The dimensions of the compared ids: "kt" where they were transposed, and rows are added at the second index."""
    if rank_of(ids) == 1:
        return "t"
    turned = reordered(ids, "tk") == "kt" and any(map(loop.additions, picks_of_mask(expert, mask, "kt")))
    return "kt" if turned else "tk"


def comparisons(b: Bindings) -> None:
    """Every expert's number is compared with the [T, K] ids, and where it is found is picked."""
    compared = _compared(b.anchor)
    require(
        _has_ids(b.anchor),
        f"the ids are compared as {dtype_of(b.anchor)}, not as the integers that they are",
        b.anchor,
        "compare the ids themselves: torch.where(ids == e)",
    )
    mask, expert = next(iter(compared.items()))
    letters = _letters(b.anchor, expert, mask)
    ids_at: Node = b.anchor.args[0] if letters == "kt" else b.anchor  # type: ignore[assignment]
    base = strip_ids(ids_at)
    topk = item_of(base, 1, "topk")
    experts = max(compared.values()) + 1
    if topk is not None and shape_of(topk.args[0]):  # type: ignore[arg-type]
        width = shape_of(topk.args[0])[arg(topk, "dim")]  # type: ignore[arg-type]
        require(width.is_Integer, "the number of experts is not a constant", topk)
        experts = int(width)
    tokens, *choices = shape_of(ids_at)
    picks = [p for mask, expert in compared.items() for p in picks_of_mask(expert, mask, letters)]
    ids = match_choice(ids_at) if choices else match_one_each(b.anchor, b.anchor)
    pairs = (tokens, choices[0] if choices else sympy.Integer(1))
    b.bind(ids=ids, experts=experts, one_each=not choices, pairs=pairs)
    b.bind(picks=complete(picks, experts, b.anchor))


def finish(b: Bindings) -> Match:
    return loop.finish(b, "where_loop")


class WhereExperts(torch.nn.Module):
    """Example: Mistral's reference: top-k of the logits, softmax over the K, rows added by index."""

    def __init__(self, experts: int, top_k: int, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = torch.nn.Linear(hidden, experts, bias=False, dtype=dtype)
        self.experts = torch.nn.ModuleList(Expert(hidden, intermediate, dtype) for _ in range(experts))

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        values, ids = torch.topk(self.gate(x_TH), self.top_k)
        weights = torch.softmax(values, dim=1, dtype=torch.float32).to(x_TH.dtype)
        result = torch.zeros_like(x_TH)
        for expert, module in enumerate(self.experts):
            token, choice = torch.where(ids == expert)
            result[token] += weights[token, choice, None] * module(x_TH[token])
        return result


def example(
    dtype: torch.dtype = torch.float32, experts: int = 4, top_k: int = 2, hidden: int = 32, intermediate: int = 16
) -> Example:
    """A module written this way, and inputs for it. To arrive in one graph it needs `fullgraph=True`."""
    module = WhereExperts(experts, top_k, hidden, intermediate, dtype)
    return Example(module, lambda tokens: (torch.randn(tokens, hidden, dtype=dtype),))


WHERE_LOOP = Formulation(
    name="where_loop",
    summary="a loop over the experts that compares the ids and adds rows by index (Mistral's reference)",
    anchors=anchors,
    steps=(comparisons, loop.accumulate, loop.weigh, loop.part, loop.compute),
    finish=finish,
    example=example,
)
