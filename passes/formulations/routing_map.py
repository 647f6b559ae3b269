"""A dense map of the choices instead of a sort: Megatron's permutation of tokens.

    map = zeros(T, E).scatter(1, ids, 1).bool();  probs = zeros(T, E).scatter(1, ids, w)
    token = arange(T).expand(E, T).masked_select(map.T);  rows = x[token]           the rows, expert by expert
    grouped matmuls or a linear layer a part -> rows * probs.T.masked_select(map.T) -> added at token to zeros

`masked_select` walks the transposed map row by row, which is the order of an ascending sort of the ids. How many
elements it finds comes from the data, so the block arrives in one graph only with `fullgraph=True`. The choices must
be distinct within a token: a map cannot hold one twice.

A capacity may drop choices, by whatever rule: kept = map & mask, and probs * kept. A dropped choice then has the weight
zero, so running it as well is the same.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from moe_compiler.moe_ir import Match, Miss, op_name
from moe_compiler.passes.formulations import sorted_experts, sorted_home, sorted_rows
from moe_compiler.passes.formulations.base import Bindings, Example, Formulation
from moe_compiler.passes.formulations.counts import choice_map, kept_choices, map_choice
from moe_compiler.passes.formulations.grouped_products import last_grouped, last_parts
from moe_compiler.passes.formulations.pairs import is_counting, match_weights, token_rows
from moe_compiler.passes.formulations.walk import (
    arg,
    elements_of,
    is_op,
    is_zeros,
    require,
    same_size,
    same_value,
    shape_of,
    strip_ids,
    strip_views,
    strip_views_casts,
    swaps_last_two,
)

__all__ = ["ROUTING_MAP", "kept_weights"]


def anchors(graph: Graph) -> list[Node]:
    """Down projections of grouped matmuls and of parts of a split."""
    return [*last_grouped(graph), *last_parts(graph)]


def _is_truth(node: Node) -> bool:
    return is_op(node, "to", "_to_copy") and node.meta["val"].dtype == torch.bool


def _transposed_map(mask: object, where: Node) -> Node:
    """The [T, E] map whose transpose `mask` is."""
    node = mask
    while isinstance(node, Node) and (strip_views(node) is not node or _is_truth(node)):
        node = strip_views(node) if strip_views(node) is not node else node.args[0]
    require(isinstance(node, Node) and swaps_last_two(node), "the mask is not the transpose of a [T, E] map", where)
    assert isinstance(node, Node)
    return node.args[0]  # type: ignore[return-value]


def _counts_tokens(node: object) -> bool:
    """[E, T] numbers of tokens: arange(T) in every row."""
    if not isinstance(node, Node) or not is_op(node, "expand", "repeat", "expand_as", "broadcast_to"):
        return False
    source = node.args[0]
    inner = shape_of(source)  # type: ignore[arg-type]
    row = len(inner) == 1 or (len(inner) == 2 and inner[0] == 1)
    full = shape_of(node)
    whole = row and len(full) == 2 and same_size(inner[-1], full[-1])
    return whole and is_counting(strip_ids(source))  # type: ignore[arg-type]


def select(b: Bindings) -> None:
    """The gather's index is the token of each choice, expert by expert, taken from the transposed map."""
    token = b.token
    require(is_op(token, "masked_select"), f"the token index comes from {op_name(token)}, not from a map", token)
    numbers, mask = token.args[:2]
    require(_counts_tokens(strip_ids(numbers)), "the map does not select numbers of tokens", token)
    chosen = _transposed_map(mask, token)
    full = kept_choices(chosen)
    if full is not None:
        b.bind(kept=chosen)
    ids = map_choice(chosen if full is None else full)
    choice_map(chosen if full is None else full, ids)
    tokens = elements_of(shape_of(ids)[:-1])
    b.bind(ids=ids, k=int(shape_of(ids)[-1]), tokens=tokens, order=None, mask=mask, weights_of=_selected_weights)
    b.bind(x=token_rows(b.source, tokens, b.rows))


def _selected_weights(b: Bindings, node: Node) -> Node | None:
    """The [T, k] weights that were scattered into what `node` selects by the same map."""
    require(is_op(node, "masked_select"), f"the routing weights come from {op_name(node)}, not from a map", node)
    require(same_value(node.args[1], b.mask), "the routing weights are selected by another map", node)
    dense = strip_views(node.args[0])
    require(swaps_last_two(dense), "the selected weights are not the transpose of a [T, E] matrix", node)
    scores = strip_views_casts(dense.args[0])  # type: ignore[arg-type]
    if "kept" in b.roles:
        kept_weights(b, scores)
        return None
    return scattered_weights(b, scores)


def kept_weights(b: Bindings, scores: Node) -> None:
    """The weights [T, E] are those of the choices, times the map of those that are kept."""
    operands = scores.args[:2] if is_op(scores, "mul") else ()
    own = [operand for operand in operands if isinstance(operand, Node) and _same_map(operand, b.kept)]
    require(
        len(own) == 1 and len(operands) == 2,
        "choices are dropped, and the weights are not multiplied by the map of those that are kept",
        scores,
        "multiply the dense weights by the map: probs = probs * kept",
    )
    dense = next(operand for operand in operands if operand is not own[0])
    scattered_weights(b, strip_views_casts(dense))  # type: ignore[arg-type]
    why = Miss("a capacity drops choices after the top-k", scores, "the router stays with Inductor")
    b.bind(weights_TE=scores, router_miss=why)


def _same_map(node: Node, kept: Node) -> bool:
    """Is `node` the map `kept`, as truth values or numbers?"""
    sources = []
    for source in (node, kept):
        while is_op(source, "to", "_to_copy", "type_as") or strip_views(source) is not source:
            source = strip_views(source) if strip_views(source) is not source else source.args[0]  # type: ignore[assignment]
        sources.append(source)
    return sources[0] is sources[1]


def scattered_weights(b: Bindings, scores: Node) -> Node:
    """The [T, K] weights that `scores` [T, E] holds at the ids, with zeros elsewhere."""
    scattered = is_op(scores, "scatter") and isinstance(scores.args[3], Node)
    require(scattered, f"the dense weights come from {op_name(scores)}, not from a scatter", scores)
    base, dim, index, weights = scores.args[:4]
    reduces = any(a.name == "reduce" for a in scores.target._schema.arguments) and arg(scores, "reduce") is not None
    plain = isinstance(base, Node) and is_zeros(strip_views_casts(base)) and dim in (1, -1) and not reduces
    require(plain, "the dense weights are not scattered into zeros along the experts", scores)
    at_ids = isinstance(index, Node) and strip_ids(index) is strip_ids(b.ids)
    require(at_ids, "the weights are scattered at other ids than the map", scores)
    return match_weights(weights, shape_of(b.ids), scores)  # type: ignore[arg-type]


def finish(b: Bindings) -> Match:
    return sorted_experts.finish(b, "routing_map")


class MappedExperts(torch.nn.Module):
    """Example: Megatron's router and permutation, one linear layer an expert, probabilities inside the expert."""

    def __init__(self, experts: int, top_k: int, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.top_k, self.experts = top_k, experts
        self.router = torch.nn.Linear(hidden, experts, bias=False, dtype=dtype)
        self.linear_fc1 = torch.nn.Parameter(torch.randn(experts, 2 * intermediate, hidden, dtype=dtype) * hidden**-0.5)
        self.linear_fc2 = torch.nn.Parameter(
            torch.randn(experts, hidden, intermediate, dtype=dtype) * intermediate**-0.5
        )

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        logits = self.router(x_TH)
        weights, ids = torch.topk(torch.softmax(logits.float(), dim=-1), self.top_k, dim=1)
        probs_TE = torch.zeros_like(logits).scatter(1, ids, weights.to(x_TH.dtype))
        map_ET = torch.zeros_like(logits).int().scatter(1, ids, 1).bool().T.contiguous()
        token = torch.arange(x_TH.shape[0], device=x_TH.device).unsqueeze(0).expand(self.experts, -1)
        token = token.masked_select(map_ET)
        probs = probs_TE.T.contiguous().masked_select(map_ET).unsqueeze(-1)
        sizes = map_ET.sum(dim=1).tolist()
        gate, up = _linears(x_TH.index_select(0, token), sizes, self.linear_fc1).chunk(2, dim=-1)
        rows = _linears(torch.nn.functional.silu(gate) * up * probs, sizes, self.linear_fc2)
        result = torch.zeros_like(x_TH)
        return result.scatter_add_(0, token.unsqueeze(1).expand(-1, x_TH.shape[1]), rows)


def _linears(rows: torch.Tensor, sizes: list[int], weight: torch.Tensor) -> torch.Tensor:
    parts = torch.split(rows, sizes, dim=0)
    return torch.cat([torch.nn.functional.linear(part, weight[e]) for e, part in enumerate(parts)])


def example(
    dtype: torch.dtype = torch.float32, experts: int = 4, top_k: int = 2, hidden: int = 32, intermediate: int = 16
) -> Example:
    """A module written this way, and inputs for it. To arrive in one graph it needs `fullgraph=True`."""
    module = MappedExperts(experts, top_k, hidden, intermediate, dtype)
    return Example(module, lambda tokens: (torch.randn(tokens, hidden, dtype=dtype),))


ROUTING_MAP = Formulation(
    name="routing_map",
    summary="tokens selected expert by expert from a [T, E] map, rows added at their tokens (Megatron)",
    anchors=anchors,
    steps=(
        sorted_rows.dispatch,
        select,
        sorted_experts.count,
        sorted_experts.activate,
        sorted_home.weigh,
        sorted_home.added_home,
    ),
    finish=finish,
    example=example,
)
