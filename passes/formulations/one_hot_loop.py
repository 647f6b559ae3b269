"""A loop over the experts with one-hot masks: OLMoE and its relatives in transformers 4.

    one_hot(ids, E).permute(2, 1, 0); for e in range(E): j, t = where(mask[e])
    y.index_add_(0, t, expert_e(x[None, t].reshape(-1, H)) * w[t, j, None])

The masks may be permuted in any way, or be comparisons of the ids with all of 0 .. E-1 at once. All experts must be
there. Ids of one expert a token may have any shape, and masks [T, E]. A capacity may drop choices before the loop, by
whatever rule: one_hot(ids, E) * kept (Switch). The map that is left is an operand of the block: what it does not hold
gets the id of no expert.
"""

from __future__ import annotations

import sympy
import torch
from torch.fx import Graph, Node

from moe_compiler.moe_ir import Match
from moe_compiler.passes.formulations import loop
from moe_compiler.passes.formulations.base import Bindings, Example, Formulation
from moe_compiler.passes.formulations.matrices import are_all
from moe_compiler.passes.formulations.one_hot import encoded_ids, is_encoding, is_kept_part
from moe_compiler.passes.formulations.pairs import in_range, match_choice
from moe_compiler.passes.formulations.picks import Pick, complete, match_one_each, picks_of_mask, reordered
from moe_compiler.passes.formulations.walk import (
    dtype_of,
    elements_of,
    is_op,
    require,
    same_shape,
    shape_of,
    strip_ids,
    view_or_cast,
)

__all__ = ["ONE_HOT_LOOP"]


def anchors(graph: Graph) -> list[Node]:
    """Every one-hot encoding."""
    return [node for node in graph.nodes if is_encoding(node)]


def masks(b: Bindings) -> None:
    """The one-hot encoding of the ids, or what a rule leaves of it; one mask an expert, and where it is set."""
    source, experts = encoded_ids(b.anchor)
    require(shape_of(source) != (), "the one-hot encoding is of one number", b.anchor)
    found = _map(b.anchor, source)
    require(found is not None, "no expert picks its tokens from this one-hot encoding", b.anchor)
    assert found is not None
    chosen, dropped, picks = found
    tokens, *choices, _ = shape_of(chosen)
    k = choices[0] if choices else sympy.Integer(1)
    one_each = not choices or len(shape_of(source)) == 1 or shape_of(source)[-1] != k
    if not choices:
        ids = match_one_each(source, b.anchor)
    elif one_each:
        ids = strip_ids(source)
    else:
        ids = match_choice(source)
    require(not dtype_of(ids).is_floating_point, "the experts are chosen by numbers that are no integers", ids)
    # A class more than there are experts is for ids that stand for none: nobody picks it.
    spare = {pick.expert for pick in picks} == set(range(experts - 1)) and not _all_chosen(ids, experts)
    experts -= spare
    b.bind(spare=spare, running=experts, one_each=one_each, chosen=chosen if dropped else None)
    b.bind(ids=ids, experts=experts, pairs=(tokens, k))
    b.bind(picks=complete(picks, experts, b.anchor))


def _map(encoding: Node, source: Node) -> tuple[Node, bool, list[Pick]] | None:
    """(the map [T, K, E] that experts pick from, was a part of the choices dropped, the picks); None without picks.

    It is the encoding of [T, K] ids, a view with one dimension for all tokens, and one for the choices of a token where
    the ids have none (an argmax), or none for one expert a token: [T, E]; or the product of these with a map of what is
    kept: a capacity.
    """
    size, (*lead, k) = elements_of(shape_of(source)), shape_of(source)
    letters = {(size,): "te", (size, sympy.Integer(1)): "tke"}
    if lead and k.is_Integer and k != 0:
        letters[size / k, k] = "tke"
    pending, seen = [(encoding, False)], {encoding}
    while pending:
        node, dropped = pending.pop(0)
        for shape, names in letters.items():
            picks = _picks(node, names) if same_shape(shape_of(node)[:-1], shape) else []
            if picks:
                return node, dropped, picks
        for user in node.users:
            keeps, same = is_kept_part(user, node), _is_same_map(user, node)
            if (keeps or same) and user not in seen:
                seen.add(user)
                pending.append((user, dropped or keeps))
    return None


def _is_same_map(user: Node, node: Node) -> bool:
    """A cast of zeros and ones, or a view that leaves the experts their dimension."""
    if is_op(user, "to", "_to_copy", "type_as"):
        return user.args[0] is node
    return view_or_cast(user) and shape_of(user)[-1:] == shape_of(node)[-1:]


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


def _all_chosen(ids: Node, experts: int) -> bool:
    """Is the last of the experts one that ids can choose, as far as is known?"""
    return not in_range(ids, experts - 1) and in_range(ids, experts)


def finish(b: Bindings) -> Match:
    match = loop.finish(b, "one_hot_loop")
    # Weights of so many experts, or ids below that, say that none is missing in this graph.
    missing = f"expert {b.running} of {b.running + 1} never picks its tokens"
    known = not b.spare or in_range(b.ids, b.running) or (are_all(match.down) and are_all(match.gate))
    require(known, missing, b.anchor, "all experts of a block must run in one graph")
    return match


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
