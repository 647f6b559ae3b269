"""Dense scores [T, E] that are exactly zero for every expert that was not chosen: how a dense block shows its choice.

sigmoid | softmax of a top-k scattered into -inf        the whole router, raised with the block
weights scattered into zeros                            ids and weights
sum over k of one_hot(ids, E) * w[..., None]            ids and weights
"""

from __future__ import annotations

import sympy
from torch.fx import Node

from moe_compiler.moe_ir import Miss, RouterSpec, op_name
from moe_compiler.passes.formulations.base import Bindings
from moe_compiler.passes.formulations.one_hot import encoded_ids, is_encoding
from moe_compiler.passes.formulations.pairs import are_distinct, match_choice, match_weights
from moe_compiler.passes.formulations.walk import (
    arg,
    dtype_of,
    is_op,
    is_written,
    is_zeros,
    item_of,
    require,
    same_shape,
    same_value,
    shape_of,
    strip,
    strip_casts,
    strip_ids,
    widens,
)

__all__ = ["choose"]

_TWICE = "nothing shows that a token chooses an expert only once"
_ONCE = "take the ids from a topk or a sort of the scores"


def choose(b: Bindings) -> None:
    """The scores are exactly zero for every expert that the top-k did not choose."""
    node = strip_casts(b.scores)
    require(
        same_shape(shape_of(node), (b.tokens, sympy.Integer(b.experts))),
        "the scores are not [T, E]",
        node,
    )
    if is_op(node, "sigmoid", "softmax", "_softmax"):
        _choose_by_score(b, node)
        return
    if is_op(node, "sum"):
        _choose_by_one_hot(b, node)
        return
    require(
        is_op(node, "scatter", "scatter_", "scatter_add", "scatter_add_"),
        f"the scores come from {op_name(node)}: nothing shows that experts that were not chosen get the weight 0",
        node,
        "the scores must be sigmoid or softmax of a top-k scattered into -inf, or weights scattered into zeros",
    )
    ids, values = _scattered(node)
    require(is_zeros(node.args[0]), "the weights are scattered into something else than zeros", node)
    ids = match_choice(ids)
    require(not is_written(strip_ids(ids)), "the ids of the top-k are written to before they are scattered", node)
    require(are_distinct(ids), _TWICE, node, _ONCE)
    b.bind(ids=ids, weights=match_weights(values, shape_of(ids), node), router=None, logits=None)


def _choose_by_one_hot(b: Bindings, scores: Node) -> None:
    """sum over k of one_hot(ids, E) * w[..., None]: an expert that is chosen twice has both weights."""
    dims = arg(scores, "dim") if len(scores.args) > 1 else None
    over_k = [d % 3 for d in ([dims] if isinstance(dims, int) else dims or [])] == [1] and not arg(scores, "keepdim")
    product = strip_casts(scores.args[0])
    require(
        over_k and is_op(product, "mul") and len(shape_of(product)) == 3,
        "the scores come from a sum of something else than one-hot encodings times weights",
        scores,
        "the scores must be sigmoid or softmax of a top-k scattered into -inf, or weights scattered into zeros",
    )
    for encoding, column in (product.args[:2], product.args[1::-1]):
        encoded = (
            strip(encoding, lambda n: is_op(n, "to", "_to_copy", "type_as")) if isinstance(encoding, Node) else None
        )
        if encoded is None or not is_encoding(encoded) or not isinstance(column, Node):
            continue
        source, experts = encoded_ids(encoded)
        require(experts == b.experts, "the encoding has another number of experts", encoded)
        ids = match_choice(source)
        fits = len(shape_of(column)) == 3 and shape_of(column)[-1] == 1
        require(fits, "the routing weight is not one number a (token, expert) pair", product)
        # Tokens with the sum of two weights are not what two weighted tokens give.
        require(b.weight_at == "output" or are_distinct(ids), _TWICE, product, _ONCE)
        b.bind(ids=ids, weights=match_weights(column, shape_of(ids), product), router=None, logits=None)
        return
    raise Miss("the summed scores are no one-hot encoding of the ids times weights", product)


def _scattered(node: Node) -> tuple[Node, Node]:
    """(ids, values) of a scatter along the experts."""
    reduced = any(argument.name == "reduce" for argument in node.target._schema.arguments)
    require(not reduced, "the scatter reduces instead of writing", node)
    ids, values = node.args[2], node.args[3] if len(node.args) > 3 else node.kwargs.get("src")
    require(isinstance(ids, Node) and isinstance(values, Node), "a constant is scattered", node)
    require(node.args[1] in (1, -1) and len(shape_of(node)) == 2, "the scatter is not along the experts", node)
    return ids, values


def _choose_by_score(b: Bindings, scored: Node) -> None:
    name = "sigmoid" if is_op(scored, "sigmoid") else "softmax"
    if name == "softmax":
        require(arg(scored, "dim") % 2 == 1, "the softmax is not over the experts", scored)
    source = strip(scored.args[0], widens)
    require(
        is_op(source, "scatter", "scatter_"),
        f"the {name} is of {op_name(source)}: experts that no top-k chose get a weight other than 0",
        source,
        "scatter the top-k's logits into -inf before the score",
    )
    ids, values = _scattered(source)
    fill = source.args[0]
    filled = is_op(fill, "full", "full_like", "new_full") and arg(fill, "fill_value") == float("-inf")
    require(filled, f"the logits are not scattered into -inf: the {name} of another fill is not 0", source)
    topk = item_of(strip_ids(ids), 1, "topk")
    require(topk is not None, "the scattered positions do not come from a top-k", source)
    assert topk is not None
    require(
        same_value(item_of(strip(values, widens), 0, "topk"), topk),
        "the scattered values are not those of the same top-k",
        source,
    )
    written = is_written(strip_ids(ids)) or is_written(strip(values, widens))
    require(not written, "what the top-k chose is written to before it is scattered", source)
    require(arg(topk, "largest") and arg(topk, "sorted"), "top-k takes the smallest, or is unsorted", topk)
    logits = topk.args[0]
    require(arg(topk, "dim") in (1, -1) and len(shape_of(logits)) == 2, "top-k is not over the experts", topk)
    require(isinstance(arg(topk, "k"), int), "k is not a constant", topk)
    spec = RouterSpec(
        k=arg(topk, "k"),
        score=name,
        order="after",
        renormalize=False,
        eps=0.0,
        scale=1.0,
        score_dtype=dtype_of(scored),
        dtype=dtype_of(b.scores),
    )
    b.bind(ids=strip_ids(ids), weights=None, router=spec, logits=logits)
