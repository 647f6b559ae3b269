"""Experts whose weights are gathered: a copy of the expert's matrices for each (token, expert) pair.

Both formulations that gather weights share this: the flat one ([S, N, H], transformers 5 batched_mm) and the one that
keeps [T, K, N, H] (gpt-fast). They differ in their anchors and in how a token's row reaches its pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy
from torch.fx import Graph, Node

from moe_compiler.moe_ir import Match, Miss
from moe_compiler.passes.formulations import combine
from moe_compiler.passes.formulations.activation import match_activation
from moe_compiler.passes.formulations.base import (
    Bindings,
    check_sizes,
    experts_spec,
    split_by_activation,
    trailing_cast,
)
from moe_compiler.passes.formulations.bias import behind_bias, gathered_bias, split_biases
from moe_compiler.passes.formulations.contraction import Product, contraction, fed_by, match_product
from moe_compiler.passes.formulations.pairs import match_ids, match_pair_rows, match_weights, pairs_matrix, token_rows
from moe_compiler.passes.formulations.walk import (
    arg,
    elements_of,
    is_cast,
    is_op,
    matrix_behind,
    require,
    same_shape,
    same_size,
    same_value,
    shape_of,
    strip_ids,
    swaps_last_two,
    view_or_cast,
)

__all__ = ["activate", "combine_pairs", "dispatch", "down", "finish", "last_products", "select"]


@dataclass(frozen=True)
class Gather:
    """packed[ids]: the index node, its packed [E, ., .] source, the ids as indexed, and whether it was transposed."""

    node: Node
    packed: Node
    index: Node
    swapped: bool


def _index_of(node: Node) -> Node | None:
    """The single index of a gather along the first dimension of a packed weight, else None."""
    if is_op(node, "index_select"):
        index = node.args[2] if arg(node, "dim") == 0 else None
    elif is_op(node, "index"):
        indices = node.args[1]
        index = indices[0] if len(indices) == 1 else None
    else:
        return None
    if not isinstance(index, Node) or len(shape_of(node.args[0])) != 3:
        return None
    value = index.meta["val"]
    return index if not value.dtype.is_floating_point and value.dtype.itemsize >= 4 else None


def _gather(node: Node) -> Gather | None:
    """The gather behind an operand, seen through casts, transposes and views that keep the matrices whole."""
    swapped = False
    while True:
        if swaps_last_two(node):
            swapped = not swapped
        elif not (is_cast(node) or _keeps_matrices(node)):
            break
        node = node.args[0]  # type: ignore[assignment]
    index = _index_of(node)
    return Gather(node, node.args[0], index, swapped) if index is not None else None


def _keeps_matrices(node: Node) -> bool:
    """A view that only splits or joins the pair dimensions of gathered weights."""
    if not is_op(node, "view", "reshape", "unflatten", "flatten", "contiguous", "clone"):
        return False
    before, after = shape_of(node.args[0]), shape_of(node)
    return len(before) > 2 and len(after) > 2 and same_shape(before[-2:], after[-2:])


def _read_product(node: object) -> tuple[Product, Gather] | None:
    """`node` as rows times gathered weights, None when it is not."""
    found = contraction(node, biased=True)
    if found is None or (_gather(found.left) is None and _gather(found.right) is None):
        return None
    try:
        product = match_product(found.node, lambda operand: _gather(operand) is not None, "expert", biased=True)
    except Miss:
        return None
    gather = _gather(product.weight)
    return (product, gather) if gather is not None else None


def last_products(graph: Graph, *, pair_dims: int) -> list[Node]:
    """Products with gathered weights that are fed by another such product: the down projections.

    pair_dims: 1 for weights gathered as [S, ., .], 2 for [T, K, ., .].
    """
    found: list[Node] = []
    products: set[Node] = set()
    for node in graph.nodes:
        read = _read_product(node)
        if read is None:
            continue
        products.add(node)
        product = read[0]
        if len(product.lead) == pair_dims and fed_by(product.rows, products):
            found.append(node)
    return found


def select(b: Bindings) -> None:
    """The ids that gather the down weights are a choice of K experts a token."""
    read = _read_product(b.anchor)
    assert read is not None
    gather = read[1]
    experts = shape_of(gather.packed)[0]
    require(experts.is_Integer, "the number of experts is not a constant", gather.packed)
    ids, in_range = match_ids(gather.index, int(experts))
    shape = shape_of(ids)
    b.bind(ids=ids, index=gather.index, ids_of_any_range=not in_range)
    b.bind(experts=int(experts), k=int(shape[-1]), tokens=elements_of(shape[:-1]))


def _product(b: Bindings, node: Node, what: str) -> tuple[Product, Gather]:
    """`node` as rows times weights gathered by the ids of this block."""
    product = match_product(node, lambda operand: _gather(operand) is not None, what, biased=True)
    gather = _gather(product.weight)
    assert gather is not None
    require(
        same_value(strip_ids(gather.index), strip_ids(b.index)),
        f"the {what} weights are gathered by other ids",
        gather.node,
    )
    experts = shape_of(gather.packed)[0]
    require(experts == b.experts, f"{experts} {what} weights, but {b.experts} down weights", gather.node)
    require(
        product.out_letters == product.lead + product.made,
        f"the {what} projection's result is not in the order of the pairs",
        node,
    )
    expected = (b.tokens * b.k,) if len(product.lead) == 1 else (b.tokens, sympy.Integer(b.k))
    lead = shape_of(product.weight)[:-2]
    require(same_shape(lead, expected), f"the {what} weights are not gathered one a (token, expert) pair", gather.node)
    return product, gather


def down(b: Bindings) -> None:
    """The last product contracts each pair's own row with its own matrix."""
    product, gather = _product(b, b.anchor, "down")
    require(
        product.rows_letters == product.lead + product.contracted,
        "the down projection does not read one row a pair",
        b.anchor,
    )
    last, added = behind_bias(b.anchor, "down")
    b.bind(down=product, down_gather=gather, last=last, down_bias=_bias(b, b.anchor, added, "down"))


def _width(node: Node) -> sympy.Expr:
    """The columns that a product with gathered weights makes."""
    read = _read_product(node)
    assert read is not None
    product = read[0]
    return shape_of(product.weight)[-1 if product.transposed else -2]


def _bias(b: Bindings, product: Node, operand: Node | None, what: str) -> tuple[Node, ...]:
    """The packed bias behind what is added to a product: gathered by the ids of this block."""
    if operand is None:
        return ()
    packed, index = gathered_bias(operand, b.experts, _width(product), what)
    same = same_value(strip_ids(index), strip_ids(b.index))
    require(same, f"the {what} bias is gathered by other ids", operand)
    pairs = same_size(elements_of(shape_of(operand)[:-1]), b.tokens * b.k)
    require(pairs, f"the {what} bias is not gathered one a (token, expert) pair", operand)
    return (packed,)


def activate(b: Bindings) -> None:
    """Its rows are act(gate) * up, or act(gate), of products with weights gathered by the same ids."""
    activation, added = split_biases(match_activation(b.down.rows, weighted=True))
    halves = [half.source for half in (activation.gate, activation.up) if half is not None]
    b.bind(activation=activation, first={source: _product(b, source, "gate and up") for source in halves})
    biases = {source: _bias(b, source, added.get(source), "gate and up") for source in halves}
    b.bind(first_biases=biases)


def dispatch(b: Bindings) -> None:
    """The first products' rows are the tokens, one for all of a token's pairs or repeated for each."""
    tokens = [_tokens(b, product) for product, _ in b.first.values()]
    require(all(x is tokens[0] for x in tokens), "gate and up read different tokens", b.anchor)
    b.bind(x=tokens[0])


def _tokens(b: Bindings, product: Product) -> Node:
    lead = product.lead
    if product.rows_letters == lead[0] + product.contracted and len(lead) == 2:
        return token_rows(product.rows, b.tokens, product.node)
    require(
        product.rows_letters == lead + product.contracted,
        "the gate and up projections do not read one row a token or a pair",
        product.node,
    )
    return match_pair_rows(product.rows, b.tokens, b.k)


def combine_pairs(b: Bindings) -> None:
    """The pairs' rows are weighted and summed over the K of each token."""
    norm = combine.row_norm(b.last) if b.activation.weight is None else None
    b.bind(per_pair=norm is not None)
    if norm is not None:
        _end_with_rows(b, norm)
        return
    if b.activation.weight is not None:
        combine.check_weighted_inside(b.activation.weight, b.down_bias)
        # A cast that rounds the weights for the product with the activation drops out: the sum has them as they were.
        inside = pairs_matrix(b.activation.weight, b.tokens, b.k, view_or_cast)
        weight, product = b.activation.weight if inside is None else inside, b.anchor
        output = combine.match_sum_over_k(combine.next_step(b.anchor, "the experts' rows"), b.anchor, b.tokens, b.k)
    else:
        weight, product, output = combine.match_weighted_sum(b.last, b.tokens, b.k)
    b.bind(weights=match_weights(weight, shape_of(b.ids), product), output=trailing_cast(output))


def _end_with_rows(b: Bindings, norm: Node) -> None:
    """The block ends with the pairs' rows, which are normalised before they are weighted."""
    pairs = (b.tokens * b.k, shape_of(b.x)[-1])
    rows = {matrix_behind(product.rows, pairs, view_or_cast) for product, _ in b.first.values()}
    source, output = next(iter(rows)), combine.squeezed(b.last)
    made = (*pairs[:1], shape_of(output)[-1])
    require(
        len(rows) == 1 and source is not None and same_shape(shape_of(output), made),
        "the experts' rows are normalised before they are weighted, and are no [pairs, hidden] matrix",
        norm,
    )
    b.bind(x=source, weights=None, output=output)


def finish(b: Bindings, formulation: str) -> Match:
    """The Match of a block with gathered weights."""
    check_sizes(b.x, b.ids, b.weights, per_pair=b.per_pair)
    gate, up = split_by_activation(b.activation, lambda source: b.first[source][1].packed)
    read = {**b.first, b.anchor: (b.down, b.down_gather)}
    sources = {"gate": b.activation.gate.source, "down": b.anchor}
    if up:
        sources["up"] = b.activation.up.source
    transposed = {role for role, node in sources.items() if read[node][0].transposed != read[node][1].swapped}
    return Match(
        formulation=formulation,
        spec=experts_spec(b.activation, b.anchor, b.output),
        x_TH=b.x,
        ids_TK=b.ids,
        ids_of_any_range=b.ids_of_any_range,
        weights_TK=b.weights,
        gate=gate,
        up=up,
        down=(b.down_gather.packed,),
        gate_bias=b.first_biases[b.activation.gate.source],
        up_bias=b.first_biases[b.activation.up.source] if up else (),
        down_bias=b.down_bias,
        transposed=frozenset(transposed),
        per_pair=b.per_pair,
        output=b.output,
        anchor=b.anchor,
    )
