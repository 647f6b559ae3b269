"""A capacity an expert that is filled up with tokens of weight zero: Megatron's drop-and-pad.

    probs = zeros(T, E).scatter(1, ids, w);  kept = zeros(T, E).scatter(0, topk(probs, C, dim=0)[1], 1).bool()
    probs = probs * kept;  token[e, c] = kept.T.int().argsort(-1, descending=True)[:, :C]
    x[token] -> view [E, C, H] -> W1 -> act (* p) -> W2 (* p),  p[e, c] = probs.T[e, token[e, c]]
    zeros.scatter_add(0, token, rows)

`kept` has C tokens in each expert's column, so every token of it has one slot and no other token has one. Those that
did not choose the expert have the weight zero, and so have the choices that are not in `kept`: the block is the same
as running each chosen expert with the weight (probs * kept)[t, e]. Which C tokens are kept makes no difference.

The products may also be grouped matmuls, or one linear layer for each part of C rows.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from moe_compiler.moe_ir import Match, Miss, op_name, size_expr
from moe_compiler.passes.formulations import sorted_experts, sorted_home, sorted_rows
from moe_compiler.passes.formulations.activation import match_activation
from moe_compiler.passes.formulations.base import (
    Bindings,
    Example,
    Formulation,
)
from moe_compiler.passes.formulations.capacity import reaches, slotted, slotted_match
from moe_compiler.passes.formulations.contraction import Product
from moe_compiler.passes.formulations.counts import is_integer_cast
from moe_compiler.passes.formulations.grouped_products import feeding, last_grouped, last_parts, read_grouped
from moe_compiler.passes.formulations.pairs import (
    are_distinct,
    in_range,
    is_counting,
    match_choice,
    rows_at,
    token_rows,
)
from moe_compiler.passes.formulations.routing_map import kept_weights
from moe_compiler.passes.formulations.sorted_weights import scaled, sorted_weights, take
from moe_compiler.passes.formulations.walk import (
    arg,
    is_op,
    is_written,
    is_zeros,
    item_of,
    require,
    same_size,
    same_value,
    shape_of,
    strip,
    strip_ids,
    strip_views,
    strip_views_casts,
    swaps_last_two,
    view_or_cast,
)

__all__ = ["DROP_AND_PAD"]


def _slots_of(index: Node) -> tuple[Node, Node] | None:
    """(matrix, place [E, C]) when `index` is the first C columns of a matrix's descending argsort, flattened or not."""
    place = strip_ids(index)
    whole = place
    if is_op(place, "slice") and arg(place, "dim") in (1, -1) and not arg(place, "start"):
        whole = strip_ids(place.args[0])  # type: ignore[arg-type]
    matrix = _sorted_map(whole)
    return None if matrix is None else (matrix, place)


def _sorted_map(node: object) -> Node | None:
    """What a descending argsort along the last dimension of a matrix sorts."""
    if not isinstance(node, Node):
        return None
    order = item_of(node, 1, "sort") or (node if is_op(node, "argsort") else None)
    if order is None or not arg(order, "descending") or arg(order, "dim") not in (1, -1):
        return None
    source = order.args[0]
    return source if isinstance(source, Node) and len(shape_of(source)) == 2 else None


def _reads_slots(product: Product) -> bool:
    gathered = rows_at(strip_views_casts(product.rows))
    return gathered is not None and _slots_of(gathered[1]) is not None


def anchors(graph: Graph) -> list[Node]:
    """Down projections whose first projections read tokens gathered by the slots' index."""
    grouped = [node for node in (*last_grouped(graph), *last_parts(graph)) if _parts_read_slots(node)]
    return [*_last_slotted(graph), *grouped]


def _parts_read_slots(node: Node) -> bool:
    """Is a grouped product fed by one of gathered slots?"""
    down = read_grouped(node)
    reads = [strip_views_casts(product.rows) for product in feeding(down.rows)] if down is not None else []
    gathers = [found for rows in reads if (found := rows_at(rows)) is not None]
    return any(_slots_of(index) is not None for _, index in gathers)


def _last_slotted(graph: Graph) -> list[Node]:
    """Batched down projections over slots."""
    found, first = [], set[Node]()
    for node in graph.nodes:
        product = slotted(node)
        if product is None:
            continue
        if _reads_slots(product):
            first.add(node)
        elif first and reaches(product.rows, first):
            found.append(node)
    return found


def products(b: Bindings) -> None:
    """The slots' rows go through gate and up, an activation and down."""
    down = slotted(b.anchor)
    b.bind(batched=down is not None)
    if down is None:
        sorted_rows.dispatch(b)
        b.bind(experts=b.down.experts, middle=None)
        return
    middle = scaled(strip_views_casts(down.rows))
    activation = match_activation(middle[0] if middle is not None else down.rows)
    first: dict[Node, Product] = {}
    for half in (activation.gate, activation.up):
        if half is None:
            continue
        product = slotted(half.source)
        if product is None or not _reads_slots(product):
            raise Miss("the gate and up projections do not read the slots' rows", half.source)
        first[half.source] = product
    rows = {strip_views_casts(product.rows) for product in first.values()}
    require(len(rows) == 1, "gate and up read different slots", b.anchor)
    experts = shape_of(down.weight)[0]
    same = all(shape_of(product.weight)[0] == experts for product in first.values())
    require(experts.is_Integer and same, "the packed matrices differ in the number of experts", b.anchor)
    b.bind(down=down, activation=activation, first=first, experts=int(experts), middle=middle, rows=rows.pop())


def slots(b: Bindings) -> None:
    """Each expert's slots are the tokens of its column of a map that has as many in every column."""
    source, index = rows_at(b.rows)  # type: ignore[misc]
    found = _slots_of(index)
    if found is None:
        raise Miss("the rows are not gathered by the slots' tokens", b.rows)
    turned, place = found
    turned = strip(turned, lambda n: strip_views(n) is not n or is_op(n, "to", "_to_copy"))
    require(swaps_last_two(turned), "the slots are not sorted from a transposed map", place)
    kept = turned.args[0]
    made = strip(kept, lambda n: strip_views(n) is not n or is_op(n, "to", "_to_copy"))  # type: ignore[arg-type]
    full = (
        is_op(made, "scatter")
        and arg(made, "dim") == 0
        and isinstance(made.args[0], Node)
        and is_zeros(strip_views(made.args[0]))
        and made.args[3] == 1
    )
    best = item_of(strip_ids(made.args[2]), 1, "topk") if full else None  # type: ignore[arg-type]
    own = shape_of(place)
    end = arg(place, "end") if is_op(place, "slice") else None
    known = best is not None and arg(best, "dim") == 0 and not is_written(made) and not is_written(made.args[2])  # type: ignore[arg-type]
    known = known and (same_value(best.args[1], end) or _is_size(best.args[1], own[1]))  # type: ignore[union-attr]
    require(
        known,
        "nothing shows that the map of the slots has as many tokens in every expert's column as there are slots",
        made,
        "make it of a top-k along the tokens with the capacity as k, as Megatron does, or leave the padding out",
    )
    experts = shape_of(made)[-1]
    require(experts == b.experts, f"the map has {experts} columns, but there are {b.experts} experts", made)
    tokens = shape_of(made)[0]
    whole = len(shape_of(b.rows)) == 2 and same_size(shape_of(b.rows)[0], own[0] * own[1])
    require(whole, "the slots' rows are not one a slot", b.rows)
    b.bind(kept=kept, token=strip_ids(index), place=place, order=None, tokens=tokens, k=1, weight_at="", last=b.anchor)
    b.bind(x=token_rows(source, tokens, b.rows), weights=None, weights_of=_slot_weights)
    if b.middle is not None:
        take(b, sorted_weights(b, b.middle[1]), "output", b.anchor)


def activate(b: Bindings) -> None:
    """Products of parts have as many rows for each expert as there are slots, and an activation in between."""
    if b.batched:
        return
    groups, capacity = b.down.groups, shape_of(b.place)[1]
    if isinstance(groups, Node):
        total = strip(groups, lambda n: view_or_cast(n) or is_integer_cast(n))
        require(is_op(total, "cumsum"), f"the offsets come from {op_name(total)}, not from a cumsum of counts", total)
        full = _is_full(total.args[0], capacity)
    else:
        full = all(_is_size(size, capacity) for size in groups)
        full = full or _is_full(sorted_experts.counts_of_sizes(b, groups), capacity)
    require(full, "the rows are split into other parts than each expert's slots", b.down.node)
    sorted_experts.activate(b)


def _is_full(node: object, size: object) -> bool:
    """Is every number of a tensor this size?"""
    made = strip(node, lambda n: view_or_cast(n) or is_integer_cast(n)) if isinstance(node, Node) else None
    return is_op(made, "full", "new_full", "full_like") and _is_size(arg(made, "fill_value"), size)  # type: ignore[arg-type]


def _slot_weights(b: Bindings, node: Node) -> None:
    """Bind the weights [T, E] whose entries at the slots `node` is: taken from the transposed matrix."""
    found = rows_at(node)
    if found is not None and len(shape_of(node)) == 1:
        flat, index = found
        dense, own = strip_views(flat), _is_flat_place(b, strip_ids(index))
    else:
        along = is_op(node, "gather", "take_along_dim") and arg(node, "dim") in (1, -1)
        require(along, f"the routing weights come from {op_name(node)}, not from the slots' places", node)
        dense = strip_views(node.args[0])  # type: ignore[arg-type]
        index = node.args[2] if is_op(node, "gather") else node.args[1]  # type: ignore[assignment]
        own = strip_ids(index) is b.place
    require(own, "the routing weights are taken at other places than the slots", node)
    require(swaps_last_two(dense), "the weights of the slots are not of the transpose of a [T, E] matrix", node)
    scores = strip_views_casts(dense.args[0])  # type: ignore[arg-type]
    scattered = next((s for operand in scores.args[:2] if (s := _scatter_behind(operand)) is not None), None)
    if scattered is None:
        raise Miss(f"the dense weights come from {op_name(scores)}, not from a scatter times the map", scores)
    ids = match_choice(scattered.args[2])  # type: ignore[arg-type]
    distinct = are_distinct(ids) and in_range(ids, b.experts)
    require(distinct, "nothing shows that a token's experts are distinct", ids)
    b.bind(ids=ids)
    kept_weights(b, scores)


def _scatter_behind(operand: object) -> Node | None:
    node = strip_views_casts(operand) if isinstance(operand, Node) else None
    return node if is_op(node, "scatter") and isinstance(node.args[3], Node) else None  # type: ignore[union-attr]


def _is_flat_place(b: Bindings, index: Node) -> bool:
    """e * T + token[e, c], the slots' places in the flattened transposed matrix."""
    if not is_op(index, "add") or arg(index, "alpha") != 1:
        return False
    for offset, place in (index.args[:2], index.args[1::-1]):
        if not isinstance(offset, Node) or not isinstance(place, Node) or strip_ids(place) is not b.place:
            continue
        step = strip_ids(offset)
        numbers = strip_ids(step.args[0]) if is_op(step, "mul") and isinstance(step.args[0], Node) else None
        column = numbers is not None and shape_of(step)[-1] == 1 and len(shape_of(step)) == 2
        if column and is_counting(numbers) and _is_size(step.args[1], b.tokens):  # type: ignore[arg-type]
            return True
    return False


def _is_size(value: object, size: object) -> bool:
    own = value.meta.get("val") if isinstance(value, Node) else value
    return isinstance(own, (int, torch.SymInt)) and same_size(size_expr(own), size)  # type: ignore[arg-type]


def finish(b: Bindings) -> Match:
    if not b.batched:
        return sorted_experts.finish(b, "drop_and_pad")
    return slotted_match(b, "drop_and_pad", b.weights_TE, b.router_miss, kept=b.kept, base=b.roles.get("base"))


class PaddedExperts(torch.nn.Module):
    """Example: Megatron's router, its capacity with padding, probabilities on the experts' output."""

    def __init__(self, experts: int, top_k: int, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.top_k, self.experts = top_k, experts
        self.router = torch.nn.Linear(hidden, experts, bias=False, dtype=dtype)
        self.weight1 = torch.nn.Parameter(torch.randn(experts, hidden, 2 * intermediate, dtype=dtype) * hidden**-0.5)
        self.weight2 = torch.nn.Parameter(torch.randn(experts, intermediate, hidden, dtype=dtype) * intermediate**-0.5)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        tokens, hidden = x_TH.shape
        logits = self.router(x_TH)
        weights, ids = torch.topk(torch.softmax(logits.float(), dim=-1), self.top_k, dim=1)
        probs_TE = torch.zeros_like(logits).scatter(1, ids, weights.to(x_TH.dtype))
        capacity = (self.top_k * tokens + self.experts - 1) // self.experts
        _, best = torch.topk(probs_TE, k=capacity, dim=0, sorted=False)
        kept_TE = torch.zeros_like(probs_TE).scatter(0, best, 1).bool()
        probs_TE = probs_TE * kept_TE
        token_EC = kept_TE.to(torch.int8).T.contiguous().argsort(dim=-1, descending=True, stable=True)
        token_EC = token_EC[:, :capacity].contiguous()
        token = token_EC.view(-1)
        place = torch.arange(self.experts, device=x_TH.device).unsqueeze(-1) * tokens + token_EC
        probs = probs_TE.T.contiguous().view(-1).index_select(0, place.view(-1))
        rows_ECH = x_TH.index_select(0, token).view(self.experts, capacity, hidden)
        gate, up = torch.bmm(rows_ECH, self.weight1).chunk(2, dim=-1)
        rows_ECH = torch.bmm(torch.nn.functional.silu(gate) * up, self.weight2)
        rows = rows_ECH.view(-1, hidden) * probs.unsqueeze(-1)
        result = torch.zeros_like(x_TH)
        return result.scatter_add_(0, token.unsqueeze(1).expand(-1, hidden), rows)


def example(
    dtype: torch.dtype = torch.float32, experts: int = 8, top_k: int = 2, hidden: int = 32, intermediate: int = 16
) -> Example:
    """A module written this way, and inputs for it."""
    module = PaddedExperts(experts, top_k, hidden, intermediate, dtype)
    return Example(module, lambda tokens: (torch.randn(tokens, hidden, dtype=dtype),))


DROP_AND_PAD = Formulation(
    name="drop_and_pad",
    summary="each expert's slots filled up with tokens of weight zero, exact drops (Megatron's drop-and-pad)",
    anchors=anchors,
    steps=(products, slots, activate, sorted_home.weigh, sorted_home.added, sorted_home.added_home),
    finish=finish,
    example=example,
)
