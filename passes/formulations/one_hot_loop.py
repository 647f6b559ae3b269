"""A loop over the experts with one-hot masks: OLMoE and its relatives in transformers 4.

    one_hot(ids, E).permute(2, 1, 0); for e in range(E): j, t = where(mask[e])
    y.index_add_(0, t, expert_e(x[None, t].reshape(-1, H)) * w[t, j, None])

The masks may be permuted in any way, or be comparisons of the ids with all of 0 .. E-1 at once. All experts must be
there. Ids of one expert a token may be [T], with masks [T, E].
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from moe_compiler.moe_ir import Match
from moe_compiler.passes.formulations import loop
from moe_compiler.passes.formulations.base import Bindings, Example, Formulation
from moe_compiler.passes.formulations.one_hot import encoded_ids, is_encoding
from moe_compiler.passes.formulations.pairs import match_choice
from moe_compiler.passes.formulations.picks import Pick, check_one_each, complete, picks_of_mask, reordered
from moe_compiler.passes.formulations.walk import elements_of, is_op, require, shape_of

__all__ = ["ONE_HOT_LOOP"]


def anchors(graph: Graph) -> list[Node]:
    """Every one-hot encoding."""
    return [node for node in graph.nodes if is_encoding(node)]


def masks(b: Bindings) -> None:
    """The one-hot encoding of [T, K] ids; one mask an expert, and where it is set."""
    source, experts = encoded_ids(b.anchor)
    rank = len(shape_of(source))
    require(rank in (1, 2), "the one-hot encoding is not of [T, K] ids", b.anchor, "flatten the tokens before it")
    picks = _picks(b.anchor, "tke" if rank == 2 else "te")
    require(bool(picks), "no expert picks its tokens from this one-hot encoding", b.anchor)
    ids = match_choice(source)
    check_one_each(ids, rank, b.anchor)
    b.bind(ids=ids, experts=experts, tokens=elements_of(shape_of(ids)[:-1]))
    b.bind(picks=complete(picks, experts, b.anchor))


def _picks(node: Node, letters: str) -> list[Pick]:
    """The picks of all masks that are selected from `node`, whose dimensions are `letters`."""
    found: list[Pick] = []
    for user in node.users:
        order = reordered(user, letters)
        if order is not None:
            found += _picks(user, order)
        elif is_op(user, "to", "_to_copy"):
            found += _picks(user, letters)
        elif is_op(user, "select") and letters[user.args[1]] == "e":
            found += picks_of_mask(user.args[2], user, letters.replace("e", ""))
        elif is_op(user, "unbind") and letters[user.args[1] if len(user.args) > 1 else 0] == "e":
            for item in user.users:
                found += picks_of_mask(item.args[1], item, letters.replace("e", ""))
    return found


def finish(b: Bindings) -> Match:
    return loop.finish(b, "one_hot_loop")


class Expert(torch.nn.Module):
    """One expert of a ModuleList: three linear layers."""

    def __init__(self, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(hidden, intermediate, bias=False, dtype=dtype)
        self.up_proj = torch.nn.Linear(hidden, intermediate, bias=False, dtype=dtype)
        self.down_proj = torch.nn.Linear(intermediate, hidden, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class OneHotExperts(torch.nn.Module):
    """Example: a ModuleList of experts, softmax in fp32 without renormalisation, one-hot masks, index_add_."""

    def __init__(self, experts: int, top_k: int, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = torch.nn.Linear(hidden, experts, bias=False, dtype=dtype)
        self.experts = torch.nn.ModuleList(Expert(hidden, intermediate, dtype) for _ in range(experts))

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        scores = torch.softmax(self.router(x_TH), dim=1, dtype=torch.float32)
        weights, ids = torch.topk(scores, self.top_k, dim=-1)
        weights = weights.to(x_TH.dtype)
        result = torch.zeros_like(x_TH)
        masks = torch.nn.functional.one_hot(ids, num_classes=len(self.experts)).permute(2, 1, 0)
        for expert, module in enumerate(self.experts):
            choice, token = torch.where(masks[expert])
            rows = x_TH[None, token].reshape(-1, x_TH.shape[-1])
            rows = module(rows) * weights[token, choice, None]
            result.index_add_(0, token, rows.to(x_TH.dtype))
        return result


def example(
    dtype: torch.dtype = torch.float32, experts: int = 4, top_k: int = 2, hidden: int = 32, intermediate: int = 16
) -> Example:
    """A module written this way, and inputs for it. To arrive in one graph it needs `fullgraph=True`."""
    module = OneHotExperts(experts, top_k, hidden, intermediate, dtype)
    return Example(module, lambda tokens: (torch.randn(tokens, hidden, dtype=dtype),))


ONE_HOT_LOOP = Formulation(
    name="one_hot_loop",
    summary="a loop over the experts with one-hot masks and index_add (transformers 4 OLMoE)",
    anchors=anchors,
    steps=(masks, loop.accumulate, loop.weigh, loop.part, loop.compute),
    finish=finish,
    example=example,
)
