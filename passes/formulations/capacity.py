"""A capacity an expert and one-hot masks of slots: nanoMoE, and GShard-like code with a constant capacity.

    m[k,t,e] = one_hot(ids) in the order of choices;  rank = cumsum of m over (k, t), minus 1;  m = m * (rank < C)
    slots[t,e,c] = sum over k of (m * p)[k,t,e] * one_hot(sum_e(m * rank), C)[k,t,c]
    rows[e,c] = slots.bool()[t,e,c] * x[t];  W1 -> act -> W2;  y[t] = slots[t,e,c] * rows[e,c]

A kept choice has a slot of its own, since ranks count up within an expert, and a dropped one has weight zero in every
slot. So the block is the same as running each chosen expert with the weight sum_k (m * p)[k,t,e], which is zero where
the choice was dropped: drops are exact. Every step from the ids to the slots is checked, because any other assignment
(two tokens in one slot, a rank of something else) mixes tokens.
"""

from __future__ import annotations

import sympy
import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from moe_compiler.moe_ir import Match, Miss, op_name
from moe_compiler.passes.formulations import combine
from moe_compiler.passes.formulations.activation import match_activation
from moe_compiler.passes.formulations.base import (
    Bindings,
    Example,
    Formulation,
    check_sizes,
    experts_spec,
    split_by_activation,
    trailing_cast,
)
from moe_compiler.passes.formulations.contraction import Product, contraction, match_product
from moe_compiler.passes.formulations.counts import EXACT, is_integer_cast
from moe_compiler.passes.formulations.one_hot import encoded_ids, is_encoding
from moe_compiler.passes.formulations.pairs import are_distinct, in_range, match_choice, token_rows
from moe_compiler.passes.formulations.walk import (
    arg,
    elements_of,
    is_cast,
    is_op,
    matrix_behind,
    rank_of,
    require,
    same_shape,
    same_size,
    shape_of,
    strip,
    strip_views,
    strip_views_casts,
)

__all__ = ["CAPACITY", "choose", "mask_product", "rank", "reaches", "slots", "slotted", "slotted_match", "weigh"]


def _any_cast(node: Node) -> Node:
    """What is behind views and conversions of zeros and ones, which come as truth values, integers and floats."""
    return strip(node, lambda n: strip_views(n) is not n or is_cast(n) or is_op(n, "to", "_to_copy", "type_as"))


def _exact(node: Node) -> Node:
    """What is behind views and conversions that keep a rank as it is."""
    node = strip(node, lambda n: strip_views(n) is not n or is_integer_cast(n))
    require(node.meta["val"].dtype in EXACT, f"ranks are counted in {node.meta['val'].dtype}", node)
    return node


def _is_number_cast(node: Node) -> bool:
    """A conversion of a truth value to a number."""
    converts = is_op(node, "to", "_to_copy", "type_as") and isinstance(node.args[0], Node)
    return converts and node.args[0].meta["val"].dtype == torch.bool  # type: ignore[union-attr]


def slotted(node: Node) -> Product | None:
    """Rows [E, C, in] times packed matrices [E, ., .]."""
    found = contraction(node)
    if found is None or rank_of(node) != 3:
        return None
    try:
        product = match_product(node, lambda operand: operand is found.right, "expert")
    except Miss:
        return None
    e, out = product.lead, found.out_letters
    fits = len(shape_of(product.weight)) == 3 and len(e) == 1 and len(found.left_letters) == 3
    ordered = found.left_letters == e + out[1] + product.contracted and out == e + out[1] + product.made
    return product if fits and ordered else None


def _repeated(node: Node, experts: sympy.Expr) -> Node | None:
    """The tokens [T, H] that `node` [E, T, H] holds once an expert: a product that torch.export has written out."""
    node = strip_views(node)
    shape, source = shape_of(node), node.args[0] if is_op(node, "expand") else None
    if not isinstance(source, Node) or len(shape) != 3 or not same_size(shape[0], experts):
        return None
    found = matrix_behind(source, shape[1:])
    return found if shape_of(source) in (shape[1:], (sympy.Integer(1), *shape[1:])) else None


def mask_product(node: Node) -> tuple[Node, Node, bool] | None:
    """(mask, tokens, is it [T, E, C]) when `node` [E, C, H] is a mask [E, C, T] or [T, E, C] times tokens [T, H]."""
    node = strip_views_casts(node)
    found = contraction(node)
    if found is None or len(shape_of(node)) != 3:
        return None
    e, c, h = found.out_letters
    if len(shape_of(found.right)) == 3:
        tokens = _repeated(found.right, shape_of(node)[0])
        t = found.right_letters[1:2]
        each = found.left_letters == e + c + t and found.right_letters == e + t + h
        return (found.left, tokens, False) if tokens is not None and each else None
    if len(shape_of(found.right)) != 2:
        return None
    t = found.right_letters[0]
    if found.right_letters[1:] != h or found.left_letters not in (e + c + t, t + e + c):
        return None
    return found.left, found.right, found.left_letters[0] == t


def anchors(graph: Graph) -> list[Node]:
    """Down projections over slots: their activation's matmuls read tokens multiplied by a mask."""
    found, first = [], set[Node]()
    for node in graph.nodes:
        product = slotted(node)
        if product is None:
            continue
        if mask_product(product.rows) is not None:
            first.add(node)
        elif first and reaches(product.rows, first):
            found.append(node)
    return found


def reaches(node: Node, targets: set[Node], limit: int = 12) -> bool:
    level, seen = [node], {node}
    for _ in range(limit):
        if any(found in targets for found in level):
            return True
        level = [n for n in dict.fromkeys(m for found in level for m in found.all_input_nodes) if n not in seen]
        seen.update(level)
    return False


# Steps


def activate(b: Bindings) -> None:
    """The slots' rows go through gate and up, an activation and down."""
    down = slotted(b.anchor)
    assert down is not None
    activation = match_activation(down.rows)
    first: dict[Node, Product] = {}
    masks: list[tuple[Node, Node, bool]] = []
    for half in (activation.gate, activation.up):
        if half is None:
            continue
        product = slotted(half.source)
        read = mask_product(product.rows) if product is not None else None
        if product is None or read is None:
            raise Miss("the gate and up projections do not read the slots' rows", half.source)
        first[half.source] = product
        masks.append(read)
    require(all(found == masks[0] for found in masks), "gate and up read different slots", b.anchor)
    experts = shape_of(down.weight)[0]
    same = all(shape_of(product.weight)[0] == experts for product in first.values())
    require(experts.is_Integer and same, "the packed matrices differ in the number of experts", b.anchor)
    b.bind(down=down, activation=activation, first=first, mask=masks[0][0], as_slots=masks[0][2], experts=int(experts))
    tokens = shape_of(masks[0][1])[0]
    b.bind(tokens=tokens, x=token_rows(masks[0][1], tokens, b.anchor))


def slots(b: Bindings) -> None:
    """The result is slots [T, E, C] times the rows of the slots, and the mask is where those are not zero."""
    step = combine.next_step(b.anchor, "the experts' rows")
    found = contraction(step)
    require(found is not None, f"the slots' rows are consumed by {op_name(step)}, not multiplied by the slots", step)
    assert found is not None
    shape = shape_of(b.anchor)
    require(strip_views_casts(found.right) is b.anchor, "the slots are not multiplied by their rows", step)
    rows, left = found.right_letters, found.left_letters
    size = shape_of(found.right)
    together = len(rows) == len(left) == 2 and same_size(size[0], elements_of(shape[:2]))
    summed = (together or (len(rows) == len(left) == 3 and same_shape(size, shape))) and rows[:-1] == left[1:]
    require(summed and found.out_letters == left[0] + rows[-1], "the slots' rows are not summed over their slots", step)
    scores = strip_views_casts(found.left)
    full = (b.tokens, sympy.Integer(b.experts), shape[1])
    require(same_shape(shape_of(scores), full), "the weights are not [T, E, C], one a slot", step)
    b.bind(scores=scores, slots=shape[1], output=trailing_cast(step))
    mask = _any_cast(b.mask)
    truth = b.mask
    if not b.as_slots:
        turned = is_op(mask, "permute") and [d % 3 for d in mask.args[1]] == [1, 2, 0]  # type: ignore[union-attr]
        require(turned, "the mask of the slots is not [E, C, T] of a [T, E, C] one", mask)
        truth = mask.args[0]
    while strip_views(truth) is not truth or _is_number_cast(truth):
        truth = strip_views(truth) if strip_views(truth) is not truth else truth.args[0]
    is_truth = is_op(truth, "to", "_to_copy") and truth.meta["val"].dtype == torch.bool
    is_truth = is_truth or (is_op(truth, "ne") and truth.args[1] == 0)
    own = is_truth and strip_views_casts(truth.args[0]) is scores  # type: ignore[arg-type]
    require(own, "tokens are put into other slots than those that they have a weight in", truth)


def _factors(node: Node) -> tuple[Node, Node]:
    require(is_op(node, "mul"), f"{op_name(node)} where a product was expected", node)
    left, right = node.args[:2]
    if not isinstance(left, Node) or not isinstance(right, Node):
        raise Miss("a slot is scaled by a constant", node)
    return left, right


def _summed(node: Node, dim: int) -> Node:
    """The operand of a sum over one dimension."""
    require(is_op(node, "sum"), f"{op_name(node)} where a sum was expected", node)
    source = node.args[0]
    assert isinstance(source, Node)
    dims = arg(node, "dim")
    dims = [dims] if isinstance(dims, int) else dims or []
    rank = len(shape_of(source))
    require(
        [d % rank for d in dims] == [dim % rank] and not arg(node, "keepdim"), "the sum is over other dimensions", node
    )
    return source


def weigh(b: Bindings) -> None:
    """slots[t,e,c] = sum over k of w[k,t,e] * one_hot(place[k,t], C), w = kept choices times their scores."""
    product = _summed(b.scores, 0)
    weights = places = None
    for left, right in (_factors(product), _factors(product)[::-1]):
        wide, narrow = shape_of(left), shape_of(right)
        if len(wide) == len(narrow) == 4 and wide[3] == 1 and narrow[2] == 1:
            weights, places = strip_views(left), _any_cast(right)
    if weights is None or places is None:
        raise Miss("the slots are not the product of weights [K, T, E, 1] and places [K, T, 1, C]", product)
    require(is_encoding(places), f"the places come from {op_name(places)}, not from a one-hot encoding", places)
    place, width = _encoded(places)
    rank = len(shape_of(weights))
    constant = rank == 3 and width != -1
    require(constant, "the number of slots comes from the data", places, "give one_hot its num_classes")
    b.bind(weights_KTE=weights, place=place, capacity=width)


def _encoded(encoding: Node) -> tuple[Node, object]:
    """(numbers, classes) of a one-hot encoding in either spelling; the classes may be computed from sizes."""
    if is_op(encoding, "one_hot"):
        return encoding.args[0], encoding.args[1] if len(encoding.args) > 1 else -1  # type: ignore[return-value]
    return encoded_ids(encoding)


def rank(b: Bindings) -> None:
    """A kept choice is one whose rank within its expert is below the capacity, and its place is that rank."""
    place = _exact(b.place)
    kept, ranks = _ordered(_factors(_summed(place, -1)), "add", "sub")
    kept, ranks = _any_cast(kept), _exact(ranks)
    own = any(_any_cast(factor) is kept for factor in _factors(b.weights_KTE))
    require(own, "weights and places are of different choices", b.weights_KTE)
    chosen, below = _ordered(_factors(kept), "lt", "gt", "le", "ge")
    below = _any_cast(below)
    require(is_op(below, "lt"), f"choices are kept by {op_name(below)}, not by rank < capacity", below)
    require(_same_number(below.args[1], b.capacity), "choices are kept below another number than the slots", below)
    require(_exact(below.args[0]) is ranks, "choices are kept by another rank", below)  # type: ignore[arg-type]
    b.bind(chosen=_any_cast(chosen), ranks=ranks)


def _same_number(a: object, b: object) -> bool:
    """Are two constants, or numbers computed from sizes, known to be equal? one_hot's is a constant by a guard."""
    left, right = (value.meta.get("val") if isinstance(value, Node) else value for value in (a, b))
    numbers = all(isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool) for value in (left, right))
    return numbers and statically_known_true(left == right)


def _ordered(pair: tuple[Node, Node], *names: str) -> tuple[Node, Node]:
    """The two operands of a product with the one that is (behind conversions) one of `names` last."""
    left, right = pair
    return (right, left) if is_op(_any_cast(left), *names) and not is_op(_any_cast(right), *names) else (left, right)


def choose(b: Bindings) -> None:
    """The rank counts the choices of an expert in one list, and the choices are the one-hot encoding of the ids."""
    one = b.ranks
    minus = (is_op(one, "sub") and one.args[1] == 1) or (is_op(one, "add") and one.args[1] == -1)
    require(minus, "the rank is not a cumulated sum minus one", one)
    total = _exact(one.args[0])
    require(is_op(total, "cumsum") and arg(total, "dim") == 0, "the rank does not count along the choices", total)
    counted = _any_cast(total.args[0])  # type: ignore[arg-type]
    flat = shape_of(total)
    require(len(flat) == 2 and flat[1] == b.experts, "the rank is not counted for each expert", total)
    require(counted is b.chosen, "another choice is ranked than is kept", total)
    turned = b.chosen
    require(is_op(turned, "permute", "transpose"), "the choices are not ordered [K, T, E]", turned)
    first = is_op(turned, "permute") and [d % 3 for d in turned.args[1]] == [1, 0, 2]
    first = first or (is_op(turned, "transpose") and {d % 3 for d in turned.args[1:3]} == {0, 1})
    encoding = _any_cast(turned.args[0])
    require(first and is_encoding(encoding), "the choices are not a one-hot encoding of the ids", turned)
    numbers, classes = _encoded(encoding)
    require(classes == b.experts, f"{classes} classes but {b.experts} experts", encoding)
    ids = match_choice(numbers)
    require(len(shape_of(numbers)) == 2, "the one-hot encoding is not of [T, K] ids", encoding)
    require(are_distinct(ids) and in_range(ids, b.experts), "nothing shows that a token's experts are distinct", ids)
    require(same_size(shape_of(ids)[0], b.tokens), "ids and tokens differ in their number of rows", ids)
    b.bind(ids=ids)


def slotted_match(
    b: Bindings,
    formulation: str,
    weights: Node,
    router_miss: Miss,
    *,
    kept: Node | None = None,
    base: Node | None = None,
) -> Match:
    """The Match of a block of batched products of slots; weights: of all experts, see `Match.weights_KTE`."""
    check_sizes(b.x, b.ids, None)
    gate, up = split_by_activation(b.activation, lambda source: b.first[source].weight)
    roles = {"gate": b.first[b.activation.gate.source], "down": b.down}
    if up:
        roles["up"] = b.first[b.activation.up.source]
    return Match(
        formulation=formulation,
        spec=experts_spec(b.activation, b.anchor, b.output),
        x_TH=b.x,
        ids_TK=b.ids,
        weights_TK=None,
        weights_KTE=weights,
        kept=kept,
        router_miss=router_miss,
        gate=gate,
        up=up,
        down=(b.down.weight,),
        transposed=frozenset(role for role, product in roles.items() if product.transposed),
        output=b.output,
        base=base,
        anchor=b.anchor,
    )


def finish(b: Bindings) -> Match:
    why = Miss("a capacity drops choices after the top-k", b.weights_KTE)
    return slotted_match(b, "capacity", b.weights_KTE, why)


def weights_in_slots(logits_TE: torch.Tensor, top_k: int) -> torch.Tensor:
    """For the examples: the weight [T, E, C] of each token in each slot of each expert, zero where it is dropped."""
    (tokens, experts), one_hot = logits_TE.shape, torch.nn.functional.one_hot
    values, ids = logits_TE.topk(top_k, dim=-1)
    probs_TE = torch.softmax(torch.full_like(logits_TE, float("-inf")).scatter(-1, ids, values), dim=-1)
    capacity = max(top_k * tokens // experts, 1)
    mask_KTE = one_hot(ids, num_classes=experts).permute(1, 0, 2)
    rank_KTE = mask_KTE.reshape(top_k * tokens, experts).cumsum(dim=0) - 1
    rank_KTE = rank_KTE.reshape(top_k, tokens, experts)
    mask_KTE = mask_KTE * torch.lt(rank_KTE, capacity)
    place_KT = torch.sum(mask_KTE * rank_KTE, dim=-1)
    weights_KTE = mask_KTE * probs_TE.unsqueeze(0)
    return torch.sum(weights_KTE.unsqueeze(3) * one_hot(place_KT, num_classes=capacity).unsqueeze(2), dim=0)


class CapacityExperts(torch.nn.Module):
    """Example: nanoMoE's router and slots: top-k, softmax over the chosen, drops beyond a constant capacity, GELU."""

    def __init__(self, experts: int, top_k: int, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.top_k = top_k
        self.w_g = torch.nn.Linear(hidden, experts, bias=False, dtype=dtype)
        self.c_fc = torch.nn.Parameter(torch.randn(experts, hidden, intermediate, dtype=dtype) * hidden**-0.5)
        self.c_proj = torch.nn.Parameter(torch.randn(experts, intermediate, hidden, dtype=dtype) * intermediate**-0.5)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        slots_TEC = weights_in_slots(self.w_g(x_TH).float(), self.top_k)
        rows_ECH = slots_TEC.bool().permute(1, 2, 0).type_as(x_TH) @ x_TH
        rows_ECH = torch.bmm(torch.nn.functional.gelu(torch.bmm(rows_ECH, self.c_fc)), self.c_proj)
        slots = slots_TEC.flatten(1).type_as(x_TH)
        return slots @ rows_ECH.view(-1, x_TH.shape[1])


def example(
    dtype: torch.dtype = torch.float32, experts: int = 8, top_k: int = 2, hidden: int = 32, intermediate: int = 16
) -> Example:
    """A module written this way, and inputs for it."""
    module = CapacityExperts(experts, top_k, hidden, intermediate, dtype)
    return Example(module, lambda tokens: (torch.randn(tokens, hidden, dtype=dtype),))


CAPACITY = Formulation(
    name="capacity",
    summary="slots of a constant capacity an expert, one-hot masks, exact drops (nanoMoE)",
    anchors=anchors,
    steps=(activate, slots, weigh, rank, choose),
    finish=finish,
    example=example,
)
